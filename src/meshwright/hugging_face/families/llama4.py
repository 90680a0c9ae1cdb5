"""Llama 4's text model as `transformers` names it: the experts of a layer in one tensor, gates first."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import SIZES, aux_loss, epsilon
from meshwright.hugging_face.families.rope import scaled_rope
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.table import LLAMA, Entry, choice, fixed, same, without_effect
from meshwright.models.families.llama4 import Llama4


def _pattern(layers: int, no_rope: int, expert: int) -> dict[str, Any]:
    """Returns the lists of a configuration. The first has a 1 for layers *with* a rotary embedding."""
    rotary = [int((i + 1) % no_rope != 0) for i in range(layers)]
    return {
        "no_rope_layers": rotary,
        "layer_types": ["chunked_attention" if rotates else "full_attention" for rotates in rotary],
        "moe_layers": list(range(expert - 1, layers, expert)),
    }


def _read_pattern(fields: Fields) -> dict[str, Any]:
    layers, interval = fields.get("num_hidden_layers"), fields.get("no_rope_layer_interval", 4)
    step = fields.get("interleave_moe_layer_step", 1)
    usual = _pattern(layers, interval, step)
    rotary = [int(bool(x)) for x in fields.get("no_rope_layers", None) or usual["no_rope_layers"]]
    interval = rotary.index(0) + 1 if 0 in rotary else layers + 1
    moe = fields.get("moe_layers", usual["moe_layers"])
    step = moe[0] + 1 if moe else step
    expected = _pattern(layers, interval, step)
    found = {"no_rope_layers": rotary, "layer_types": fields.get("layer_types", expected["layer_types"])}
    for name, kinds in {**found, "moe_layers": moe}.items():
        if kinds != expected[name] or (name == "moe_layers" and not moe):
            raise WeightsError(
                f"reading {fields.file}",
                f"{name} is {kinds}, and Meshwright computes layers that repeat: {expected[name]}",
                "a model whose layers without rotary embedding, and those with experts, are each n-th",
            )
    return {"no_rope_interval": interval, "expert_interval": step}


def _write_pattern(c: Any) -> dict[str, Any]:
    return {
        **_pattern(c.layers, c.no_rope_interval, c.expert_interval),
        "interleave_moe_layer_step": c.expert_interval,
        "model_type": "llama4_text",
    }


def _read_temperature(fields: Fields) -> dict[str, Any]:
    scale, tuned = fields.get("attn_scale", 0.1), fields.get("attn_temperature_tuning", True)
    return {"temperature_scale": scale if tuned else 0.0}


_TABLE = (
    *SIZES,
    scaled_rope(500000.0),
    epsilon(1e-5),
    fixed("attention_bias", False),
    fixed("router_jitter_noise", 0.0, written=False),
    without_effect("for_llm_compressor", "attn_implementation"),
    Entry(_read_pattern, _write_pattern),
    same("intermediate_size", "expert_mlp"),
    same("intermediate_size_mlp", "mlp", 16384),
    same("attention_chunk_size", "attention_chunk", 8192),
    choice("use_qk_norm", "qk_l2_norm", {True: "rotary", False: "none"}, default=True),
    Entry(
        _read_temperature,
        lambda c: {"attn_scale": c.temperature_scale, "attn_temperature_tuning": c.temperature_scale != 0.0},
    ),
    same("floor_scale", "temperature_floor", 8192, kind=int),
    same("num_local_experts", "experts", 16),
    same("num_experts_per_tok", "experts_per_token", 1),
    aux_loss(),
)
_NAMES = {
    **{name: (tensor.replace("mlp.", "feed_forward."), axes) for name, (tensor, axes) in LLAMA.items()},
    "router": ("feed_forward.router.weight", ("R", "D")),
    "shared_gate": ("feed_forward.shared_expert.gate_proj.weight", ("F", "D")),
    "shared_up": ("feed_forward.shared_expert.up_proj.weight", ("F", "D")),
    "shared_down": ("feed_forward.shared_expert.down_proj.weight", ("D", "F")),
    "expert_gate": ("feed_forward.experts.gate_up_proj", ("E", "D", "F+")),
    "expert_up": ("feed_forward.experts.gate_up_proj", ("E", "D", "F+")),
    "expert_down": ("feed_forward.experts.down_proj", ("E", "F", "D")),
}

ARCHITECTURES = (Architecture("Llama4ForCausalLM", "llama4_text", Llama4, _TABLE, _NAMES),)
