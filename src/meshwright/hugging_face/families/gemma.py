"""Gemma 2 and 3 as `transformers` names them: Llama's projections, four norms in a layer."""

from typing import Any

from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import CORE, MLP, epsilon
from meshwright.hugging_face.families.rope import plain_rope, refused_rope, rope_fields
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.table import (
    LLAMA,
    Entry,
    fixed,
    local_layers,
    read_local_layers,
    same,
    without_effect,
)
from meshwright.models.decoder import head_size_of
from meshwright.models.families.gemma import Gemma2, Gemma3

_BOTH = (
    *CORE,
    same("num_key_value_heads", "kv_heads"),
    Entry(lambda fields: {"head_size": fields.get("head_dim")}, lambda c: {"head_dim": head_size_of(c)}),
    MLP,
    fixed("hidden_activation", "gelu_pytorch_tanh"),
    without_effect("hidden_act"),  # the files of Gemma 2 have both
    fixed("attention_bias", False, written=False),
    fixed("use_bidirectional_attention", False, None, written=False),
    fixed("tie_word_embeddings", True),
    same("sliding_window", "sliding_window", 4096),
    Entry(
        lambda fields: {"query_scale": fields.get("query_pre_attn_scalar", 256)},
        lambda c: {"query_pre_attn_scalar": int(c.query_scale or head_size_of(c))},
    ),
    epsilon(),
)


def _read_pattern(fields: Fields) -> dict[str, Any]:
    pattern = fields.first("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return {"local_layers": read_local_layers(fields, pattern - 1)}


def _read_gemma3_rope(fields: Fields) -> dict[str, Any]:
    """Base and factor of the global layers, base of the local ones."""
    rope = rope_fields(fields, 1e6, "full_attention")
    local = rope_fields(fields, 1e4, "sliding_attention", "rope_local_base_freq")
    if rope.kind not in ("default", "linear") or local.kind != "default":
        found = f"rope_scaling of type {rope.kind!r} in global layers and {local.kind!r} in local ones"
        raise refused_rope(fields, found, "a model with none, or with that of type linear in global layers")
    factor = float(rope.scaling["factor"]) if rope.kind == "linear" else 1.0
    return {"rope_theta": rope.theta, "rope_factor": factor, "local_rope_theta": local.theta}


def _write_gemma3_rope(c: Any) -> dict[str, Any]:
    linear = None if c.rope_factor == 1.0 else {"rope_type": "linear", "factor": c.rope_factor}
    return {
        "rope_parameters": {
            "full_attention": {"rope_theta": c.rope_theta, **(linear or {"rope_type": "default"})},
            "sliding_attention": {"rope_type": "default", "rope_theta": c.local_rope_theta},
        },
        # As `transformers` 4 reads them.
        "rope_theta": c.rope_theta,
        "rope_local_base_freq": c.local_rope_theta,
        "rope_scaling": linear,
    }


def _softcap(name: str, field: str, default: float) -> Entry:
    """Returns the entry of a soft cap, whose null has no cap. default: where the field is missing."""

    def read(fields: Fields) -> dict[str, Any]:
        fields.without_effect(name)
        return {field: fields.config.get(name, default)}

    return Entry(read, lambda c: {name: getattr(c, field)})


_GEMMA3 = (
    *_BOTH,
    fixed("attn_logit_softcapping", None, written=False),
    fixed("final_logit_softcapping", None, written=False),
    local_layers(5),
    Entry(_read_pattern, lambda c: {"model_type": "gemma3_text"}),
    Entry(_read_gemma3_rope, _write_gemma3_rope),
)
_GEMMA2 = (
    *_BOTH,
    local_layers(1),
    plain_rope(),
    _softcap("attn_logit_softcapping", "softcap", 50.0),
    _softcap("final_logit_softcapping", "logit_softcap", 30.0),
)
_NAMES = {
    **LLAMA,
    "attention_out_norm": ("post_attention_layernorm.weight", ("D",)),
    "mlp_norm": ("pre_feedforward_layernorm.weight", ("D",)),
    "mlp_out_norm": ("post_feedforward_layernorm.weight", ("D",)),
}

ARCHITECTURES = (
    Architecture("Gemma2ForCausalLM", "gemma2", Gemma2, _GEMMA2, _NAMES),
    Architecture("Gemma3ForCausalLM", "gemma3_text", Gemma3, _GEMMA3, _NAMES),
)
