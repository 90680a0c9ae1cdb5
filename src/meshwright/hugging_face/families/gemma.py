"""Gemma 2 and 3 as `transformers` names it: Llama's projections, four norms in a layer."""

from typing import Any

from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.layer_types import layer_types, read_local_layers
from meshwright.hugging_face.families.llama import COMPUTED, LAYER, TIED
from meshwright.hugging_face.families.rope import refused_rope, rope_fields
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.decoder import head_size_of
from meshwright.models.families.gemma import Gemma, Gemma2, Gemma3
from meshwright.sharding.params import named_leaves


def _read_sizes(fields: Fields, local_layers: int) -> dict[str, Any]:
    """Returns the fields of both. local_layers: before each global one, where the configuration names no kinds."""
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.without_effect("hidden_act")  # the files of Gemma 2 have both
    fields.require("attention_bias", False)
    fields.require("use_bidirectional_attention", False, None)
    fields.require("tie_word_embeddings", True)
    layers = fields.get("num_hidden_layers")
    return {
        "vocab": fields.get("vocab_size"),
        "width": fields.get("hidden_size"),
        "layers": layers,
        "heads": fields.get("num_attention_heads"),
        "kv_heads": fields.get("num_key_value_heads"),
        "head_size": fields.get("head_dim"),
        "mlp": fields.get("intermediate_size"),
        "local_layers": read_local_layers(fields, layers, local_layers),
        "sliding_window": fields.get("sliding_window", 4096),
        "query_scale": fields.get("query_pre_attn_scalar", 256),
        "norm_epsilon": fields.get("rms_norm_eps", 1e-6),
    }


def _read_gemma3(fields: Fields) -> Gemma3:
    fields.require("attn_logit_softcapping", None)
    fields.require("final_logit_softcapping", None)
    pattern = fields.first("sliding_window_pattern", "_sliding_window_pattern", default=6)
    theta, factor, local_theta = _read_rope(fields)
    return Gemma3(
        **_read_sizes(fields, pattern - 1), rope_theta=theta, rope_factor=factor, local_rope_theta=local_theta
    )


def _read_gemma2(fields: Fields) -> Gemma2:
    rope = rope_fields(fields)
    if rope.kind != "default":
        raise refused_rope(fields, f"rope_scaling of type {rope.kind!r}", "a model without")
    caps = {name: fields.config.get(name, default) for name, default in _SOFTCAPS.items()}
    fields.without_effect(*caps)
    return Gemma2(
        **_read_sizes(fields, 1), rope_theta=rope.theta, softcap=caps["attn_logit_softcapping"],
        logit_softcap=caps["final_logit_softcapping"],
    )  # fmt: skip


_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Field of Gemma 2 -> its value where it is missing; null has no cap."""


def _read_rope(fields: Fields) -> tuple[float, float, float]:
    """Base and factor of the global layers, base of the local ones."""
    rope = rope_fields(fields, 1e6, "full_attention")
    local = rope_fields(fields, 1e4, "sliding_attention", "rope_local_base_freq")
    if rope.kind not in ("default", "linear") or local.kind != "default":
        found = f"rope_scaling of type {rope.kind!r} in global layers and {local.kind!r} in local ones"
        raise refused_rope(fields, found, "a model with none, or with that of type linear in global layers")
    return rope.theta, float(rope.scaling["factor"]) if rope.kind == "linear" else 1.0, local.theta


def _write_sizes(c: Gemma) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": head_size_of(c),
        "intermediate_size": c.mlp,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(c.query_scale or head_size_of(c)),
        "rms_norm_eps": c.norm_epsilon,
        "sliding_window": c.sliding_window,
        "layer_types": layer_types(c.layers, c.local_layers),
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": True,
    }


def _write_gemma3(c: Any) -> dict[str, Any] | None:
    if type(c) is not Gemma3:
        return None
    full = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_factor != 1.0:
        full = {"rope_type": "linear", "rope_theta": c.rope_theta, "factor": c.rope_factor}
    return {
        "model_type": "gemma3_text",
        **_write_sizes(c),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": c.local_rope_theta},
        },
        # As `transformers` 4 reads them.
        "rope_local_base_freq": c.local_rope_theta,
        "rope_scaling": None if c.rope_factor == 1.0 else {"rope_type": "linear", "factor": c.rope_factor},
    }


def _write_gemma2(c: Any) -> dict[str, Any] | None:
    if type(c) is not Gemma2:
        return None
    caps = {"attn_logit_softcapping": c.softcap, "final_logit_softcapping": c.logit_softcap}
    return {**_write_sizes(c), **caps}


_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention_norm": ("input_layernorm.weight", ("D",)),
    "query": ("self_attn.q_proj.weight", ("NH", "D")),
    "key": ("self_attn.k_proj.weight", ("KH", "D")),
    "value": ("self_attn.v_proj.weight", ("KH", "D")),
    "query_norm": ("self_attn.q_norm.weight", ("H",)),
    "key_norm": ("self_attn.k_norm.weight", ("H",)),
    "attention_out": ("self_attn.o_proj.weight", ("D", "NH")),
    "attention_out_norm": ("post_attention_layernorm.weight", ("D",)),
    "mlp_norm": ("pre_feedforward_layernorm.weight", ("D",)),
    "gate": ("mlp.gate_proj.weight", ("F", "D")),
    "up": ("mlp.up_proj.weight", ("F", "D")),
    "down": ("mlp.down_proj.weight", ("D", "F")),
    "mlp_out_norm": ("post_feedforward_layernorm.weight", ("D",)),
}


def _tensors(c: Gemma) -> dict[str, StoredTensor]:
    rest = {
        "embed": StoredTensor("model.embed_tokens.weight", ("V", "D")),
        "final_norm": StoredTensor("model.norm.weight", ("D",)),
    }
    layers = tuple(range(c.layers))
    blocks = {f"blocks.{name}": StoredTensor(LAYER + stored, axes, layers) for name, (stored, axes) in _NAMES.items()}
    return {path: (rest | blocks)[path] for path in named_leaves(c.params())}


ARCHITECTURES = (
    Architecture("Gemma2ForCausalLM", "gemma2", _read_gemma2, _write_gemma2, _tensors, TIED, COMPUTED),
    Architecture("Gemma3ForCausalLM", "gemma3_text", _read_gemma3, _write_gemma3, _tensors, TIED, COMPUTED),
)
