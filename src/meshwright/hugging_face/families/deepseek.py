"""DeepSeek-V3, Kimi K2 (the same architecture with other sizes) and DeepSeek-V2-Lite as `transformers` names them."""

import dataclasses
from typing import Any, Literal

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import COMPUTED, LAYER, TIED, llama_tensors
from meshwright.hugging_face.families.rope import refused_rope, rope_fields
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.fp8 import PACKED
from meshwright.hugging_face.names import StoredTensor
from meshwright.hugging_face.safetensors_files import tensor_names
from meshwright.models.blocks.rotary import LatentYarn
from meshwright.models.families.deepseek import Deepseek
from meshwright.models.further_tokens import STACK as MTP

BIAS_UPDATE_RATE = 0.001
"""Step of the router bias in DeepSeek-V3's training (arXiv:2412.19437, section 4.2)."""
V3_BALANCE_WEIGHT, V2_BALANCE_WEIGHT = 0.0001, 0.001
"""Weight of the sequence-wise balance loss (arXiv:2412.19437, section 4.2; V2-Lite's `aux_loss_alpha`)."""


def _read(fields: Fields, balance_weight: float) -> dict[str, Any]:
    """Returns the fields that both architectures have. Raises WeightsError for what the family does not compute.

    balance_weight: weight of the balance loss, where a configuration does not have it.
    """
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    fields.require("moe_layer_freq", 1)
    fields.require("ep_size", 1)
    heads = fields.get("num_attention_heads")
    fields.require("num_key_value_heads", heads)
    fields.without_effect("head_dim", "qk_head_dim", "seq_aux")
    theta, yarn = _read_rope(fields)
    return {
        "vocab": fields.get("vocab_size"),
        "width": fields.get("hidden_size"),
        "layers": fields.get("num_hidden_layers"),
        "heads": heads,
        "mlp": fields.get("intermediate_size"),
        "rope_theta": theta,
        "yarn": yarn,
        "norm_epsilon": fields.get("rms_norm_eps", 1e-6),
        "embedding": "tied" if fields.get("tie_word_embeddings", False) else "untied",
        "q_lora_rank": fields.get("q_lora_rank", 0) or None,
        "kv_lora_rank": fields.get("kv_lora_rank"),
        "qk_nope_head_dim": fields.get("qk_nope_head_dim"),
        "qk_rope_head_dim": fields.get("qk_rope_head_dim"),
        "v_head_dim": fields.get("v_head_dim"),
        "experts": fields.get("n_routed_experts"),
        "experts_per_token": fields.get("num_experts_per_tok"),
        "expert_mlp": fields.get("moe_intermediate_size"),
        "shared_experts": fields.get("n_shared_experts"),
        "dense_layers": fields.get("first_k_dense_replace"),
        "routed_scaling": float(fields.get("routed_scaling_factor")),
        "aux_loss_weight": fields.get("aux_loss_alpha", balance_weight),
        "router_z_loss_weight": 0.0,
    }


def _read_v3(fields: Fields) -> Deepseek:
    fields.require("rope_interleave", True)
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    return Deepseek(
        **_read(fields, V3_BALANCE_WEIGHT), router_score="sigmoid", normalize_top_k=fields.get("norm_topk_prob", True),
        expert_groups=fields.get("n_group"), topk_groups=fields.get("topk_group"),
        bias_update_rate=BIAS_UPDATE_RATE, mtp_depth=_further_layers(fields),
    )  # fmt: skip


def _further_layers(fields: Fields) -> Literal[0, 1]:
    """Returns the layers of multi-token prediction whose weights are there: the released files have one.

    `transformers` names them in the configuration and leaves them out of the files that it writes.
    """
    named = fields.first("num_nextn_predict_layers", "num_mtp_layers", default=0)
    prefix = LAYER.format(layer=fields.get("num_hidden_layers"))
    if not named or not any(name.startswith(prefix) for name in tensor_names(fields.file.parent)):
        return 0
    if named > 1:
        raise WeightsError(
            f"reading {fields.file}", f"it has {named} layers of multi-token prediction, and one is computed",
            "a model with one, or none",
        )  # fmt: skip
    return 1


def _read_v2(fields: Fields) -> Deepseek:
    fields.require("scoring_func", "softmax")
    fields.require("topk_method", "greedy")
    fields.require("norm_topk_prob", False)
    # With the method "greedy" there are no groups, whatever their number is.
    fields.without_effect("n_group", "topk_group")
    return Deepseek(**_read(fields, V2_BALANCE_WEIGHT), router_score="softmax", normalize_top_k=False)


def _read_rope(fields: Fields) -> tuple[float, LatentYarn | None]:
    """Returns base and scaling of the rotary frequencies, as `transformers` 4 or 5 writes them."""
    rope = rope_fields(fields)
    if rope.kind == "default":
        return rope.theta, None
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
    return rope.theta, LatentYarn(**{**missing, **numbers})


def _write(c: Deepseek) -> dict[str, Any]:
    scaling = None
    if c.yarn is not None:
        values = dataclasses.asdict(c.yarn)
        del values["bounds"]
        scaling = {"rope_type": "yarn", "type": "yarn", **{n: v for n, v in values.items() if v is not None}}
    return {
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "intermediate_size": c.mlp,
        "moe_intermediate_size": c.expert_mlp,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.embedding == "tied",
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "n_routed_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "n_shared_experts": c.shared_experts,
        "first_k_dense_replace": c.dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": c.routed_scaling,
        "norm_topk_prob": c.normalize_top_k,
        "n_group": c.expert_groups,
        "topk_group": c.topk_groups,
        "aux_loss_alpha": c.aux_loss_weight,
        **({"max_position_embeddings": _longest(c.yarn)} if c.yarn else {}),
    }


def _longest(yarn: LatentYarn) -> int:
    return int(yarn.factor * yarn.original_max_position_embeddings)


def _whole_bounds(yarn: LatentYarn | None) -> bool:
    return yarn is None or yarn.bounds == "whole"


def _expressible(c: Any) -> bool:
    return type(c) is Deepseek and c.dispatch == "dropless" and c.shared_experts > 0 and _whole_bounds(c.yarn)


def _write_v3(c: Any) -> dict[str, Any] | None:
    if not _expressible(c) or c.router_score != "sigmoid":
        return None
    return {
        **_write(c), "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "num_nextn_predict_layers": c.mtp_depth,
    }  # fmt: skip


def _write_v2(c: Any) -> dict[str, Any] | None:
    if not _expressible(c) or c.router_score != "softmax" or c.normalize_top_k or c.has_router_bias:
        return None
    groups = {"n_group": 1, "topk_group": 1} if c.expert_groups == c.topk_groups else None
    return None if groups is None else {**_write(c), **groups, "scoring_func": "softmax", "topk_method": "greedy"}


_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "query": ("self_attn.q_proj.weight", ("NH", "D")),
    "query_down": ("self_attn.q_a_proj.weight", ("Z", "D")),
    "query_norm": ("self_attn.q_a_layernorm.weight", ("Z",)),
    "query_up": ("self_attn.q_b_proj.weight", ("NH", "Z")),
    "kv_down": ("self_attn.kv_a_proj_with_mqa.weight", ("Z", "D")),
    "kv_norm": ("self_attn.kv_a_layernorm.weight", ("Z",)),
    "kv_up": ("self_attn.kv_b_proj.weight", ("NH", "Z")),
    "embed_norm": ("enorm.weight", ("D",)),
    "hidden_norm": ("hnorm.weight", ("D",)),
    "project": ("eh_proj.weight", ("D", "Z")),
    "final_norm": ("shared_head.norm.weight", ("D",)),
    "router": ("mlp.gate.weight", ("R", "D")),
    "router_bias": ("mlp.gate.e_score_correction_bias", ("R",)),
    "expert_gate": ("mlp.experts.{expert}.gate_proj.weight", ("F", "D")),
    "expert_up": ("mlp.experts.{expert}.up_proj.weight", ("F", "D")),
    "expert_down": ("mlp.experts.{expert}.down_proj.weight", ("D", "F")),
    "shared_gate": ("mlp.shared_experts.gate_proj.weight", ("F", "D")),
    "shared_up": ("mlp.shared_experts.up_proj.weight", ("F", "D")),
    "shared_down": ("mlp.shared_experts.down_proj.weight", ("D", "F")),
}
"""Parameter of a layer -> name after the layer's number, and axes; those of `Llama` are not repeated."""


def _tensors(c: Deepseek) -> dict[str, StoredTensor]:
    stacks = {
        "dense_blocks": range(c.dense_layers), "blocks": range(c.dense_layers, c.layers),
        MTP: range(c.layers, c.layers + c.mtp_depth),
    }  # fmt: skip
    return llama_tensors(c, stacks, _NAMES)


_COPIES = (r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",)
"""Copies of embedding and unembedding beside the layer of multi-token prediction, which shares those of the model."""
ARCHITECTURES = (
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _read_v3,
        _write_v3,
        _tensors,
        TIED,
        (*COMPUTED, *_COPIES),
        packed=PACKED,
    ),
    Architecture("DeepseekV2ForCausalLM", "deepseek_v2", _read_v2, _write_v2, _tensors, TIED, COMPUTED),
)
