"""Gemma 3 as `transformers` names it: Llama's projections, four norms in a layer."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import COMPUTED, LAYER, TIED
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.families.gemma import Gemma3
from meshwright.sharding.params import named_leaves


def _read(fields: Fields) -> Gemma3:
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("attention_bias", False)
    fields.require("attn_logit_softcapping", None)
    fields.require("final_logit_softcapping", None)
    fields.require("use_bidirectional_attention", False, None)
    fields.require("tie_word_embeddings", True)
    layers = fields.get("num_hidden_layers")
    theta, factor, local_theta = _read_rope(fields)
    return Gemma3(
        fields.get("vocab_size"), fields.get("hidden_size"), layers, fields.get("num_attention_heads"),
        fields.get("num_key_value_heads"), fields.get("head_dim"), fields.get("intermediate_size"),
        local_layers=_local_layers(fields, layers), sliding_window=fields.get("sliding_window"), rope_theta=theta,
        rope_factor=factor, local_rope_theta=local_theta, query_scale=fields.get("query_pre_attn_scalar", 256),
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
    )  # fmt: skip


def _local_layers(fields: Fields, layers: int) -> int:
    """Local layers before each global one. Raises WeightsError for layers that do not repeat so."""
    pattern = fields.first("sliding_window_pattern", "_sliding_window_pattern", default=6)
    expected = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    kinds = fields.get("layer_types", expected)
    if "full_attention" in kinds:
        pattern = kinds.index("full_attention") + 1
        expected = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    if kinds != expected:
        raise WeightsError(
            f"reading {fields.file}",
            f"layer_types does not repeat every {pattern} layers: {kinds}",
            "a model with the same number of local layers before each global one",
        )
    return int(pattern) - 1


def _read_rope(fields: Fields) -> tuple[float, float, float]:
    """Base and factor of the global layers, base of the local ones."""
    both = fields.get("rope_parameters", {})
    scaling = both.get("full_attention", {}) or fields.get("rope_scaling", {})
    local = both.get("sliding_attention", {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear") or local.get("rope_type", "default") != "default":
        raise WeightsError(
            f"reading {fields.file}",
            f"its rope_scaling is of type {kind!r} in global layers and {local.get('rope_type', 'default')!r} in local "
            "ones, which Meshwright does not compute",
            "a model with none, or with that of type linear in global layers",
        )
    theta = scaling.get("rope_theta") or fields.get("rope_theta", 1e6)
    local_theta = local.get("rope_theta") or fields.get("rope_local_base_freq", 1e4)
    return float(theta), float(scaling.get("factor", 1.0)), float(local_theta)


def _write(c: Any) -> dict[str, Any] | None:
    if type(c) is not Gemma3:
        return None
    full = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_factor != 1.0:
        full = {"rope_type": "linear", "rope_theta": c.rope_theta, "factor": c.rope_factor}
    kinds = ["full_attention" if (i + 1) % c.period == 0 else "sliding_attention" for i in range(c.layers)]
    return {
        "model_type": "gemma3_text",
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.size_of_head,
        "intermediate_size": c.mlp,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(c.query_scale or c.size_of_head),
        "rms_norm_eps": c.norm_epsilon,
        "sliding_window": c.sliding_window,
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": c.local_rope_theta},
        },
        # As `transformers` 4 reads them.
        "rope_theta": c.rope_theta,
        "rope_local_base_freq": c.local_rope_theta,
        "rope_scaling": None if c.rope_factor == 1.0 else {"rope_type": "linear", "factor": c.rope_factor},
        "tie_word_embeddings": True,
    }


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


def _tensors(c: Gemma3) -> dict[str, StoredTensor]:
    rest = {
        "embed": StoredTensor("model.embed_tokens.weight", ("V", "D")),
        "final_norm": StoredTensor("model.norm.weight", ("D",)),
    }
    layers = tuple(range(c.layers))
    blocks = {f"blocks.{name}": StoredTensor(LAYER + stored, axes, layers) for name, (stored, axes) in _NAMES.items()}
    return {path: (rest | blocks)[path] for path in named_leaves(c.params())}


ARCHITECTURES = (Architecture("Gemma3ForCausalLM", "gemma3_text", _read, _write, _tensors, TIED, COMPUTED),)
