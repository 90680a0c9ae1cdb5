"""Qwen3-Next as `transformers` names it: linear attention's projections in two tensors, by key head."""

from typing import Any

from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import CORE, PLAIN_ROUTING, TIED, aux_loss, epsilon
from meshwright.hugging_face.families.rope import partial_rope
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.table import (
    LLAMA,
    Entry,
    fixed,
    head_size,
    layer_types,
    read_local_layers,
    same,
    without_effect,
)
from meshwright.models.families.qwen3_next import Qwen3Next

_LOCAL = "linear_attention"


def _read_pattern(fields: Fields) -> dict[str, Any]:
    # Both forms of the same fact: files have one of them, or both.
    interval = fields.get("full_attention_interval", 4)
    return {"full_attention_interval": read_local_layers(fields, interval - 1, _LOCAL) + 1}


def _write_pattern(c: Any) -> dict[str, Any]:
    interval = c.full_attention_interval
    return {"full_attention_interval": interval, "layer_types": layer_types(c.layers, interval - 1, _LOCAL)}


_TABLE = (
    *CORE,
    same("num_key_value_heads", "kv_heads", 2),
    head_size(256),
    fixed("hidden_act", "silu"),
    TIED,
    fixed("attention_bias", False),
    fixed("decoder_sparse_step", 1),
    fixed("mlp_only_layers", []),
    without_effect("intermediate_size"),  # of layers without experts
    Entry(_read_pattern, _write_pattern),
    partial_rope(0.25),
    epsilon(),
    same("linear_num_key_heads", "linear_heads", 16),
    same("linear_num_value_heads", "linear_value_heads", 32),
    same("linear_key_head_dim", "linear_key_size", 128),
    same("linear_value_head_dim", "linear_value_size", 128),
    same("linear_conv_kernel_dim", "convolution_taps", 4),
    PLAIN_ROUTING,
    same("num_experts", "experts", 512),
    same("num_experts_per_tok", "experts_per_token", 10),
    same("moe_intermediate_size", "expert_mlp", 512),
    same("shared_expert_intermediate_size", "shared_mlp", 512),
    same("norm_topk_prob", "normalize_top_k", True),
    aux_loss(),
)
_FUSED = {
    "self_attn.q_proj.weight": {"blocks.query": "NH/", "blocks.query_gate": "NH/"},
    "linear_attn.in_proj_qkvz.weight": {"query": "NH/", "key": "NH/", "value": "NGH/", "value_gate": "NGH/"},
    "linear_attn.in_proj_ba.weight": {"rate": "NG/", "step": "NG/"},
}
"""Tensor -> the projections in it, of which it has the rows of the first head, then those of the next."""
_TAPS = "linear_attn.conv1d.weight"
_NAMES = {
    **LLAMA,
    "shared_gate": ("mlp.shared_expert.gate_proj.weight", ("F", "D")),
    "shared_up": ("mlp.shared_expert.up_proj.weight", ("F", "D")),
    "shared_down": ("mlp.shared_expert.down_proj.weight", ("D", "F")),
    "shared_scale": ("mlp.shared_expert_gate.weight", ("Q", "D")),
    "blocks.key": LLAMA["key"],
    "blocks.value": LLAMA["value"],
    "blocks.attention_out": LLAMA["attention_out"],
    "attention_out": ("linear_attn.out_proj.weight", ("D", "NGH")),
    "step_bias": ("linear_attn.dt_bias", ("NG",)),
    "a_log": ("linear_attn.A_log", ("NG",)),
    "value_norm": ("linear_attn.norm.weight", ("H",)),
    "query_taps": (_TAPS, ("NH+", "", "W")),
    "key_taps": (_TAPS, ("NH+", "", "W")),
    "value_taps": (_TAPS, ("NGH+", "", "W")),
    **{name: (tensor, (axes, "D")) for tensor, parts in _FUSED.items() for name, axes in parts.items()},
}
_MTP = r"mtp\..*"
"""Layer that predicts the token after the next, in the published weights; `transformers` does not read it either."""

ARCHITECTURES = (Architecture("Qwen3NextForCausalLM", "qwen3_next", Qwen3Next, _TABLE, _NAMES, left_out=(_MTP,)),)
