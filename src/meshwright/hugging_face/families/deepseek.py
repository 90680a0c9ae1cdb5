"""DeepSeek-V3, Kimi K2 (the same architecture with other sizes) and DeepSeek-V2-Lite as `transformers` names them."""

import dataclasses
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import COMPUTED, LAYER, Architecture
from meshwright.hugging_face.families.llama import CORE, MLP, TIED, epsilon
from meshwright.hugging_face.families.rope import refused_rope, rope_fields
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.quantised import FP8
from meshwright.hugging_face.safetensors_files import tensor_names
from meshwright.hugging_face.table import LLAMA, Entry, fixed, given, must, only_if, same, without_effect
from meshwright.models.blocks.rotary import LatentYarn
from meshwright.models.families.deepseek import Deepseek

BIAS_UPDATE_RATE = 0.001
"""Step of the router bias in DeepSeek-V3's training (arXiv:2412.19437, section 4.2)."""
V3_BALANCE_WEIGHT, V2_BALANCE_WEIGHT = 0.0001, 0.001
"""Weight of the sequence-wise balance loss (arXiv:2412.19437, section 4.2; V2-Lite's `aux_loss_alpha`)."""


def _read_heads(fields: Fields) -> dict[str, Any]:
    fields.require("num_key_value_heads", fields.get("num_attention_heads"))
    return {}


def _read_rope(fields: Fields) -> dict[str, Any]:
    """Returns base and scaling of the rotary frequencies, as `transformers` 4 or 5 writes them."""
    rope = rope_fields(fields)
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "yarn": None}
    names = {field.name for field in dataclasses.fields(LatentYarn)} - {"bounds"}
    others = set(rope.scaling) - names
    if rope.kind != "yarn" or others:
        found = f"rope scaling of type {rope.kind!r}" + (f" with {', '.join(sorted(others))}" if others else "")
        raise refused_rope(fields, found, "a model without, or YaRN")
    scaling = {"factor": rope.number(fields, "factor"), **rope.scaling}
    scaling["original_max_position_embeddings"] = rope.pretrained_length(fields)
    numbers: dict[str, Any] = {name: rope.number(fields, name) for name, value in scaling.items() if value}
    # A field that is missing has these values in `transformers`, which are not those of DeepSeek.
    missing = {"mscale": 0.0, "mscale_all_dim": 0.0}
    return {"rope_theta": rope.theta, "yarn": LatentYarn(**{**missing, **numbers})}


def _write_rope(c: Any) -> dict[str, Any] | None:
    if c.yarn is None:
        return {"rope_theta": c.rope_theta, "rope_scaling": None}
    if c.yarn.bounds != "whole":
        return None
    values = {name: value for name, value in dataclasses.asdict(c.yarn).items() if value is not None}
    del values["bounds"]
    scaling = {"rope_type": "yarn", "type": "yarn", **values}
    return {"rope_theta": c.rope_theta, "rope_scaling": scaling, "max_position_embeddings": c.yarn.longest}


def _further_layers(fields: Fields) -> dict[str, Any]:
    """Returns the layers of multi-token prediction whose weights are there: the released files have one.

    `transformers` names them in the configuration and leaves them out of the files that it writes.
    """
    named = fields.first("num_nextn_predict_layers", "num_mtp_layers", default=0)
    prefix = LAYER.format(layer=fields.get("num_hidden_layers"))
    if not named or not any(name.startswith(prefix) for name in tensor_names(fields.file.parent)):
        return {"mtp_depth": 0}
    if named > 1:
        raise WeightsError(
            f"reading {fields.file}",
            f"it has {named} layers of multi-token prediction, and one is computed",
            "a model with one, or none",
        )
    return {"mtp_depth": 1}


DEEPSEEK_EXPERTS = (
    same("n_routed_experts", "experts"),
    same("num_experts_per_tok", "experts_per_token"),
    same("moe_intermediate_size", "expert_mlp"),
    same("n_shared_experts", "shared_experts"),
    same("first_k_dense_replace", "dense_layers"),
    same("routed_scaling_factor", "routed_scaling", kind=float),
    given(router_z_loss_weight=0.0),
    must(dispatch="dropless"),
    only_if(lambda c: c.shared_experts > 0),
)
_BOTH = (
    *CORE,
    MLP,
    epsilon(),
    TIED,
    fixed("hidden_act", "silu"),
    fixed("attention_bias", False),
    fixed("mlp_bias", False, written=False),
    fixed("moe_layer_freq", 1),
    fixed("ep_size", 1, written=False),
    Entry(_read_heads, lambda c: {"num_key_value_heads": c.heads}),
    without_effect("head_dim", "qk_head_dim", "seq_aux"),
    Entry(_read_rope, _write_rope),
    same("q_lora_rank", "q_lora_rank", 0, kind=lambda rank: rank or None),
    *(same(name, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    *DEEPSEEK_EXPERTS,
)
_V3 = (
    *_BOTH,
    same("aux_loss_alpha", "aux_loss_weight", V3_BALANCE_WEIGHT),
    fixed("rope_interleave", True),
    fixed("scoring_func", "sigmoid"),
    fixed("topk_method", "noaux_tc"),
    must(router_score="sigmoid"),
    same("norm_topk_prob", "normalize_top_k", True),
    same("n_group", "expert_groups"),
    same("topk_group", "topk_groups"),
    given(bias_update_rate=BIAS_UPDATE_RATE),
    Entry(_further_layers, lambda c: {"num_nextn_predict_layers": c.mtp_depth}),
)
_V2 = (
    *_BOTH,
    same("aux_loss_alpha", "aux_loss_weight", V2_BALANCE_WEIGHT),
    fixed("scoring_func", "softmax"),
    fixed("topk_method", "greedy"),
    fixed("norm_topk_prob", False),
    must(router_score="softmax", normalize_top_k=False, bias_update_rate=0.0),
    # With the method "greedy" there are no groups, whatever their number is.
    without_effect("n_group", "topk_group"),
    Entry(lambda fields: {}, lambda c: {"n_group": 1, "topk_group": 1} if c.expert_groups == c.topk_groups else None),
)
NAMES = {
    **LLAMA,
    "query_down": ("self_attn.q_a_proj.weight", ("Z", "D")),
    "query_norm": ("self_attn.q_a_layernorm.weight", ("Z",)),
    "query_up": ("self_attn.q_b_proj.weight", ("NH", "Z")),
    "kv_down": ("self_attn.kv_a_proj_with_mqa.weight", ("Z", "D")),
    "kv_norm": ("self_attn.kv_a_layernorm.weight", ("Z",)),
    "kv_up": ("self_attn.kv_b_proj.weight", ("NH", "Z")),
    "router_bias": ("mlp.gate.e_score_correction_bias", ("R",)),
    "shared_gate": ("mlp.shared_experts.gate_proj.weight", ("F", "D")),
    "shared_up": ("mlp.shared_experts.up_proj.weight", ("F", "D")),
    "shared_down": ("mlp.shared_experts.down_proj.weight", ("D", "F")),
    "mtp.embed_norm": ("enorm.weight", ("D",)),
    "mtp.hidden_norm": ("hnorm.weight", ("D",)),
    "mtp.project": ("eh_proj.weight", ("D", "Z")),
    "mtp.final_norm": ("shared_head.norm.weight", ("D",)),
}
_COPIES = r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
"""Copies of embedding and unembedding with the layer of multi-token prediction, which shares those of the model."""

ARCHITECTURES = (
    Architecture(
        "DeepseekV3ForCausalLM", "deepseek_v3", Deepseek, _V3, NAMES, computed=(*COMPUTED, _COPIES), packed=FP8
    ),
    Architecture("DeepseekV2ForCausalLM", "deepseek_v2", Deepseek, _V2, NAMES),
)
