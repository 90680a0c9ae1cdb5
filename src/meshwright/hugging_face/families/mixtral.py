"""Mixtral and Qwen3-MoE as `transformers` names them: one matrix for each expert of each layer."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import (
    COMPUTED,
    TIED,
    attention_bias,
    llama_tensors,
    read_biases,
    read_sizes,
    read_window,
    write_sizes,
    write_window,
)
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.families.mixtral import Mixtral


def _read_mixtral(fields: Fields) -> Mixtral:
    fields.without_effect("router_jitter_noise")
    width = fields.get("intermediate_size")
    return Mixtral(
        **read_sizes(fields, 1e6, 1e-5), mlp=width, expert_mlp=width, sliding_window=fields.get("sliding_window", None),
        experts=fields.get("num_local_experts"), experts_per_token=fields.get("num_experts_per_tok"),
        aux_loss_weight=fields.get("router_aux_loss_coef", 0.001),
    )  # fmt: skip


def _read_qwen3_moe(fields: Fields) -> Mixtral:
    fields.require("decoder_sparse_step", 1)
    dense = sorted(fields.get("mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise WeightsError(
            f"reading {fields.file}",
            f"layers {', '.join(map(str, dense))} are without experts (mlp_only_layers)",
            "a model whose layers without experts come first",
        )
    return Mixtral(
        **read_sizes(fields), **read_biases(fields), mlp=fields.get("intermediate_size"),
        sliding_window=read_window(fields), qk_norm="rms",
        experts=fields.first("num_experts", "num_local_experts"), experts_per_token=fields.get("num_experts_per_tok"),
        expert_mlp=fields.get("moe_intermediate_size"), normalize_top_k=fields.get("norm_topk_prob", False),
        aux_loss_weight=fields.get("router_aux_loss_coef", 0.001), dense_layers=len(dense),
    )  # fmt: skip


def _plain(c: Any) -> bool:
    """Whether the routing is softmax over all experts, as both architectures have it."""
    return (
        type(c) is Mixtral
        and c.router_score == "softmax"
        and c.routed_scaling == 1.0
        and c.expert_groups == 1
        and not c.shared_experts
        and not c.bias_update_rate
        and c.dispatch == "dropless"
    )


def _write_mixtral(c: Any) -> dict[str, Any] | None:
    plain = _plain(c) and attention_bias(c) is False and c.qk_norm == "none"
    if not plain or c.dense_layers or not c.normalize_top_k:
        return None
    return {
        **write_sizes(c),
        "intermediate_size": c.expert_mlp,
        "num_local_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "sliding_window": c.sliding_window,
        "router_aux_loss_coef": c.aux_loss_weight,
    }


def _write_qwen3_moe(c: Any) -> dict[str, Any] | None:
    biased = attention_bias(c) if _plain(c) else None
    if biased is None or c.qk_norm != "rms":
        return None
    return {
        **write_sizes(c),
        **write_window(c),
        "attention_bias": biased,
        "num_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_mlp,
        "norm_topk_prob": c.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(c.dense_layers)),
        "router_aux_loss_coef": c.aux_loss_weight,
    }


_MIXTRAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "router": ("block_sparse_moe.gate.weight", ("R", "D")),
    "expert_gate": ("block_sparse_moe.experts.{expert}.w1.weight", ("F", "D")),
    "expert_up": ("block_sparse_moe.experts.{expert}.w3.weight", ("F", "D")),
    "expert_down": ("block_sparse_moe.experts.{expert}.w2.weight", ("D", "F")),
}
_QWEN3_MOE: dict[str, tuple[str, tuple[str, ...]]] = {
    "router": ("mlp.gate.weight", ("R", "D")),
    "expert_gate": ("mlp.experts.{expert}.gate_proj.weight", ("F", "D")),
    "expert_up": ("mlp.experts.{expert}.up_proj.weight", ("F", "D")),
    "expert_down": ("mlp.experts.{expert}.down_proj.weight", ("D", "F")),
}


def _stacks(c: Mixtral) -> dict[str, range]:
    return {"dense_blocks": range(c.dense_layers), "blocks": range(c.dense_layers, c.layers)}


def _mixtral_tensors(c: Mixtral) -> dict[str, StoredTensor]:
    return llama_tensors(c, _stacks(c), _MIXTRAL)


def _qwen3_moe_tensors(c: Mixtral) -> dict[str, StoredTensor]:
    return llama_tensors(c, _stacks(c), _QWEN3_MOE)


ARCHITECTURES = (
    Architecture("MixtralForCausalLM", "mixtral", _read_mixtral, _write_mixtral, _mixtral_tensors, TIED, COMPUTED),
    Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", _read_qwen3_moe, _write_qwen3_moe, _qwen3_moe_tensors, TIED, COMPUTED
    ),
)
