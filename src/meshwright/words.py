"""Vocabulary of the package: mesh axes and dimension letters.

Layouts print in the notation of the scaling book (Austin et al., "How to Scale Your Model", chapter
"Sharding"): `w[D/fsdp, F/tensor]` shards dimension D over the mesh axis `fsdp` and F over `tensor`;
`{U/tensor}` is a partial sum, not yet reduced over `tensor`. Arrays of rank two and more carry
their dimension letters as a suffix: `x_BTD`.
"""

# Outermost first. Neighbouring devices differ in the last axis,
# so the axes that communicate most come last.
AXES: dict[str, str] = {
    "stage": "pipeline parallelism: stages hold different layers",
    "data": "data parallelism: replicas of the parameters, each with its own part of the batch "
    "(with fsdp: HSDP)",
    "fsdp": "FSDP (ZeRO-3): shards of the parameters at rest, each with its own part of the batch",
    "expert": "expert parallelism: shards of the experts, each with its own part of the batch",
    "context": "context parallelism: shards of the sequence",
    "tensor": (
        "tensor and sequence parallelism: shards of heads, feed-forward and vocabulary (Megatron)"
    ),
}

AXIS_ALIASES: dict[str, str] = {
    "data": "dp ddp replica data_parallel dp_replicate",
    "fsdp": "zero3 fsdp2 dp_shard shard",
    "tensor": "tp mp model model_parallel tensor_parallel",
    "stage": "pp pipeline pipeline_parallel",
    "context": "cp sp sequence context_parallel",
    "expert": "ep expert_parallel",
}
"""Mesh axis -> its names in other trainers."""

DIMENSIONS: dict[str, str] = {
    "B": "batch, in sequences",
    "T": "query positions",
    "S": "key positions",
    "D": "model width",
    "F": "feed-forward width",
    "N": "query heads",
    "K": "key/value heads",
    "G": "query heads per key/value head (GQA), value heads per key head (linear attention)",
    "H": "head size",
    "I": "heads of a sparse indexer, which every device of `tensor` has",
    "Z": "width of a latent of queries, or of keys and values (MLA), of decays and gates "
    "(Kimi Linear), or of experts (Nemotron 3 Super)",
    "V": "vocabulary",
    "L": "layers",
    "E": "experts",
    "R": "router scores, one per expert, never sharded",
    "X": "experts chosen by a token",
    "C": "expert capacity, in tokens",
    "M": "microbatches",
    "P": "pipeline stages",
    "W": "taps of a short convolution, the token's own last",
    "U": "rank of an adapter (LoRA)",
    "Q": "size 1: a scale that all elements of a dimension share",
}
