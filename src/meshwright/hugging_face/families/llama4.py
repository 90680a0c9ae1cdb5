"""Llama 4's text model as `transformers` names it: the experts of a layer in one tensor, gates first."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import COMPUTED, TIED, llama_tensors, read_sizes, write_sizes
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.families.llama4 import Llama4


def _read(fields: Fields) -> Llama4:
    fields.require("attention_bias", False)
    fields.require("router_jitter_noise", 0.0)
    fields.without_effect("for_llm_compressor", "attn_implementation")
    layers, interval = fields.get("num_hidden_layers"), fields.get("no_rope_layer_interval", 4)
    rotary = [int(bool(x)) for x in fields.get("no_rope_layers", None) or _rotary(layers, interval)]
    # The list has a 1 for layers *with* a rotary embedding.
    interval = rotary.index(0) + 1 if 0 in rotary else layers + 1
    step = fields.get("interleave_moe_layer_step", 1)
    moe = fields.get("moe_layers", list(range(step - 1, layers, step)))
    step = moe[0] + 1 if moe else step
    kinds = ["chunked_attention" if rotates else "full_attention" for rotates in rotary]
    for name, found, expected in (
        ("no_rope_layers", rotary, _rotary(layers, interval)), ("layer_types", fields.get("layer_types", kinds), kinds),
        ("moe_layers", moe, list(range(step - 1, layers, step))),
    ):  # fmt: skip
        if found != expected or (name == "moe_layers" and not moe):
            raise WeightsError(
                f"reading {fields.file}",
                f"{name} is {found}, and Meshwright computes layers that repeat: {expected}",
                "a model whose layers without rotary embedding, and those with experts, are each n-th",
            )
    tuned = fields.get("attn_temperature_tuning", True)
    return Llama4(
        **read_sizes(fields, 500000.0, 1e-5), mlp=fields.get("intermediate_size_mlp", 16384), no_rope_interval=interval,
        attention_chunk=fields.get("attention_chunk_size", 8192),
        qk_l2_norm="rotary" if fields.get("use_qk_norm", True) else "none",
        temperature_scale=fields.get("attn_scale", 0.1) if tuned else 0.0,
        temperature_floor=int(fields.get("floor_scale", 8192)), expert_interval=step,
        experts=fields.get("num_local_experts", 16), experts_per_token=fields.get("num_experts_per_tok", 1),
        expert_mlp=fields.get("intermediate_size"), aux_loss_weight=fields.get("router_aux_loss_coef", 0.001),
    )  # fmt: skip


def _rotary(layers: int, interval: int) -> list[int]:
    return [int((i + 1) % interval != 0) for i in range(layers)]


def _write(c: Any) -> dict[str, Any] | None:
    if type(c) is not Llama4:
        return None
    rotary = _rotary(c.layers, c.no_rope_interval)
    return {
        "model_type": "llama4_text",
        **write_sizes(c),
        "intermediate_size": c.expert_mlp,
        "intermediate_size_mlp": c.mlp,
        "attention_bias": False,
        "no_rope_layers": rotary,
        "layer_types": ["chunked_attention" if rotates else "full_attention" for rotates in rotary],
        "attention_chunk_size": c.attention_chunk,
        "use_qk_norm": c.qk_l2_norm == "rotary",
        "attn_temperature_tuning": c.temperature_scale != 0.0,
        "attn_scale": c.temperature_scale,
        "floor_scale": c.temperature_floor,
        "interleave_moe_layer_step": c.expert_interval,
        "moe_layers": list(range(c.expert_interval - 1, c.layers, c.expert_interval)),
        "num_local_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "router_aux_loss_coef": c.aux_loss_weight,
    }


_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "gate": ("feed_forward.gate_proj.weight", ("F", "D")),
    "up": ("feed_forward.up_proj.weight", ("F", "D")),
    "down": ("feed_forward.down_proj.weight", ("D", "F")),
    "router": ("feed_forward.router.weight", ("R", "D")),
    "shared_gate": ("feed_forward.shared_expert.gate_proj.weight", ("F", "D")),
    "shared_up": ("feed_forward.shared_expert.up_proj.weight", ("F", "D")),
    "shared_down": ("feed_forward.shared_expert.down_proj.weight", ("D", "F")),
    "expert_gate": ("feed_forward.experts.gate_up_proj", ("E", "D", "F")),
    "expert_up": ("feed_forward.experts.gate_up_proj", ("E", "D", "F")),
    "expert_down": ("feed_forward.experts.down_proj", ("E", "F", "D")),
}


def _tensors(c: Llama4) -> dict[str, StoredTensor]:
    spec, E, D, F = c.spec(), c.experts, c.width, c.expert_mlp
    # Layers of a stack are not neighbours.
    stored = llama_tensors(c, {stack: spec.layers_of(stack) for stack in spec.stacks}, _NAMES)
    for first, name in enumerate(("expert_gate", "expert_up")):
        whole, columns = stored[f"blocks.{name}"], slice(first * F, (first + 1) * F)
        stored[f"blocks.{name}"] = StoredTensor(whole.name, whole.axes, whole.layers, (2, columns), (E, D, 2 * F))
    return stored


ARCHITECTURES = (Architecture("Llama4ForCausalLM", "llama4_text", _read, _write, _tensors, TIED, COMPUTED),)
