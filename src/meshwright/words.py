"""The vocabulary: mesh axes and dimension letters, defined here and nowhere else.

A layout prints in the notation of the scaling book (Austin et al., "How to Scale Your
Model", chapter "Sharding"): `w[D/fsdp, F/tensor]` says that dimension D is split over
the mesh axis `fsdp` and F over `tensor`; `{U/tensor}` marks a sum not yet reduced.
"""

# Outermost first: neighbouring devices differ in the last axis, so the axes that talk most sit last.
AXES: dict[str, str] = {
    "stage": "pipeline stages: whole layers live on different devices",
    "data": "replicas: each holds the parameters and takes its own part of the batch",
    "fsdp": "shards of the parameters at rest; also takes its own part of the batch",
    "expert": "shards of the experts of a layer; also takes its own part of the batch",
    "context": "shards of the sequence",
    "tensor": "shards of heads, feed-forward and vocabulary (Megatron columns and rows)",
}

DIMENSIONS: dict[str, str] = {
    "B": "batch, in sequences",
    "T": "query positions",
    "S": "key positions",
    "D": "model width",
    "F": "feed-forward width",
    "N": "query heads",
    "K": "key/value heads",
    "G": "query heads that share one key/value head",
    "H": "head size",
    "V": "vocabulary",
    "L": "layers",
    "E": "experts",
    "R": "scores of a router, one for each expert",
    "X": "choices of a token among the experts",
    "C": "expert capacity, in tokens",
    "M": "microbatches",
    "P": "pipeline stages",
}
