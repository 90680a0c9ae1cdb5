"""Qwen3-Next as `transformers` names it: linear attention's projections in two tensors, by key head."""

from typing import Any

from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.layer_types import layer_types, read_local_layers
from meshwright.hugging_face.families.llama import COMPUTED, LAYER, TIED
from meshwright.hugging_face.families.rope import rope_fields
from meshwright.hugging_face.families.rope_scaling import read_rope, write_rope
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.decoder import head_size_of
from meshwright.models.families.qwen3_next import Qwen3Next
from meshwright.sharding.params import named_leaves

_LOCAL = "linear_attention"


def _read(fields: Fields) -> Qwen3Next:
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [])
    fields.without_effect("intermediate_size")  # of layers without experts
    layers, width, heads = (fields.get(f) for f in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    interval = fields.get("full_attention_interval", 4)
    # Both forms of the same fact: files have one of them, or both.
    interval = read_local_layers(fields, layers, interval - 1, _LOCAL) + 1
    rope = rope_fields(fields, fraction=0.25)
    head_size = fields.get("head_dim", 256)
    return Qwen3Next(
        vocab=fields.get("vocab_size"), width=width, layers=layers, heads=heads,
        kv_heads=fields.get("num_key_value_heads", 2), head_size=None if head_size * heads == width else head_size,
        **read_rope(fields, rope), rotary_fraction=rope.fraction,
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        embedding="tied" if fields.get("tie_word_embeddings", False) else "untied",
        full_attention_interval=interval, linear_heads=fields.get("linear_num_key_heads", 16),
        linear_value_heads=fields.get("linear_num_value_heads", 32),
        linear_key_size=fields.get("linear_key_head_dim", 128),
        linear_value_size=fields.get("linear_value_head_dim", 128),
        convolution_taps=fields.get("linear_conv_kernel_dim", 4), experts=fields.get("num_experts", 512),
        experts_per_token=fields.get("num_experts_per_tok", 10), expert_mlp=fields.get("moe_intermediate_size", 512),
        shared_mlp=fields.get("shared_expert_intermediate_size", 512),
        normalize_top_k=fields.get("norm_topk_prob", True), aux_loss_weight=fields.get("router_aux_loss_coef", 0.001),
    )  # fmt: skip


def _write(c: Any) -> dict[str, Any] | None:
    plain = (
        type(c) is Qwen3Next
        and c.router_score == "softmax"
        and c.routed_scaling == 1.0
        and c.expert_groups == 1
        and not c.bias_update_rate
        and c.dispatch == "dropless"
    )
    if not plain:
        return None
    return {
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": head_size_of(c),
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.embedding == "tied",
        "attention_bias": False,
        **write_rope(c),
        "partial_rotary_factor": c.rotary_fraction,
        "full_attention_interval": c.full_attention_interval,
        "layer_types": layer_types(c.layers, c.full_attention_interval - 1, _LOCAL),
        "linear_num_key_heads": c.linear_heads,
        "linear_num_value_heads": c.linear_value_heads,
        "linear_key_head_dim": c.linear_key_size,
        "linear_value_head_dim": c.linear_value_size,
        "linear_conv_kernel_dim": c.convolution_taps,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_mlp,
        "shared_expert_intermediate_size": c.shared_mlp,
        "norm_topk_prob": c.normalize_top_k,
        "router_aux_loss_coef": c.aux_loss_weight,
    }


_REST: dict[str, tuple[str, tuple[str, ...]]] = {
    "embed": ("model.embed_tokens.weight", ("V", "D")),
    "final_norm": ("model.norm.weight", ("D",)),
    "unembed": ("lm_head.weight", ("V", "D")),
}
_BOTH: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention_norm": ("input_layernorm.weight", ("D",)),
    "mlp_norm": ("post_attention_layernorm.weight", ("D",)),
    "router": ("mlp.gate.weight", ("R", "D")),
    "expert_gate": ("mlp.experts.{expert}.gate_proj.weight", ("F", "D")),
    "expert_up": ("mlp.experts.{expert}.up_proj.weight", ("F", "D")),
    "expert_down": ("mlp.experts.{expert}.down_proj.weight", ("D", "F")),
    "shared_gate": ("mlp.shared_expert.gate_proj.weight", ("F", "D")),
    "shared_up": ("mlp.shared_expert.up_proj.weight", ("F", "D")),
    "shared_down": ("mlp.shared_expert.down_proj.weight", ("D", "F")),
    "shared_scale": ("mlp.shared_expert_gate.weight", ("Q", "D")),
}
_FULL: dict[str, tuple[str, tuple[str, ...]]] = {
    **_BOTH,
    "key": ("self_attn.k_proj.weight", ("KH", "D")),
    "value": ("self_attn.v_proj.weight", ("KH", "D")),
    "attention_out": ("self_attn.o_proj.weight", ("D", "NH")),
    "query_norm": ("self_attn.q_norm.weight", ("H",)),
    "key_norm": ("self_attn.k_norm.weight", ("H",)),
}
_LINEAR: dict[str, tuple[str, tuple[str, ...]]] = {
    **_BOTH,
    "step_bias": ("linear_attn.dt_bias", ("NG",)),
    "a_log": ("linear_attn.A_log", ("NG",)),
    "value_norm": ("linear_attn.norm.weight", ("H",)),
    "attention_out": ("linear_attn.out_proj.weight", ("D", "NGH")),
}


def _tensors(c: Qwen3Next) -> dict[str, StoredTensor]:
    spec = c.spec()
    stored = {path: StoredTensor(*where) for path, where in _REST.items()}
    for stack, names in (("blocks", _FULL), ("linear_blocks", _LINEAR)):
        layers = spec.layers_of(stack)
        own = {name: StoredTensor(LAYER + tensor, axes, layers) for name, (tensor, axes) in names.items()}
        stored |= {f"{stack}.{name}": where for name, where in own.items()}
    stored |= _fused(c, "blocks", "self_attn.q_proj.weight", {"query": "NH", "query_gate": "NH"})
    linear = {"query": "NH", "key": "NH", "value": "NGH", "value_gate": "NGH"}
    stored |= _fused(c, "linear_blocks", "linear_attn.in_proj_qkvz.weight", linear)
    stored |= _fused(c, "linear_blocks", "linear_attn.in_proj_ba.weight", {"rate": "NG", "step": "NG"})
    stored |= _convolution(c)
    return {path: stored[path] for path in named_leaves(c.params())}


def _fused(c: Qwen3Next, stack: str, tensor: str, parts: dict[str, str]) -> dict[str, StoredTensor]:
    """Returns projections of one tensor, whose rows are those of the first head, one after another, then the next."""
    params, layers, found, first = c.params()[stack], c.spec().layers_of(stack), {}, 0
    heads = {name: params[name].shape[2] for name in parts}
    rows = {name: params[name].size // (params[name].shape[0] * c.width * heads[name]) for name in parts}
    for name, axes in parts.items():
        part, whole = (1, slice(first, first + rows[name])), sum(rows.values())
        by_head = (heads[name], whole, c.width)
        shape = (heads[name] * whole, c.width)
        found[f"{stack}.{name}"] = StoredTensor(LAYER + tensor, (axes, "D"), layers, part, shape, by_head)
        first += rows[name]
    return found


def _convolution(c: Qwen3Next) -> dict[str, StoredTensor]:
    """Returns the taps of queries, keys and values: rows of one tensor, one after another."""
    d, layers, found, first = c.delta, c.spec().layers_of("linear_blocks"), {}, 0
    queries = d.heads * d.key_size
    for name, axes, size in (("query", "NH", queries), ("key", "NH", queries), ("value", "NGH", d.values)):
        found[f"linear_blocks.{name}_taps"] = StoredTensor(
            LAYER + "linear_attn.conv1d.weight", (axes, "W"), layers, (0, slice(first, first + size)),
            (d.width, 1, d.taps),
        )  # fmt: skip
        first += size
    return found


_MTP = r"mtp\..*"
"""Layer that predicts the token after the next, in the published weights; `transformers` does not read it either."""

ARCHITECTURES = (
    Architecture("Qwen3NextForCausalLM", "qwen3_next", _read, _write, _tensors, TIED, COMPUTED, left_out=(_MTP,)),
)
