"""Llama, Mistral, Qwen2, Qwen3 and OLMo 2 as `transformers` names them: one matrix [outputs, inputs] per layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.rope import rope_fields
from meshwright.hugging_face.families.rope_scaling import read_rope, write_rope
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.decoder import head_size_of
from meshwright.models.families.llama import Llama
from meshwright.sharding.params import named_leaves


def read_sizes(fields: Fields, theta: float = 10000.0, epsilon: float = 1e-6) -> dict[str, Any]:
    """Returns the fields of `Llama` that all of its architectures have.

    theta, epsilon: base of the rotary frequencies and epsilon of the norms, where a configuration does not have them.
    """
    heads = fields.get("num_attention_heads")
    fields.require("hidden_act", "silu")
    head_size, width = fields.get("head_dim", None), fields.get("hidden_size")
    return {
        "vocab": fields.get("vocab_size"),
        "width": width,
        "layers": fields.get("num_hidden_layers"),
        "heads": heads,
        "kv_heads": fields.get("num_key_value_heads", heads),
        "head_size": None if head_size is None or head_size * heads == width else head_size,
        **read_rope(fields, rope_fields(fields, theta)),
        "norm_epsilon": fields.get("rms_norm_eps", epsilon),
        "embedding": "tied" if fields.get("tie_word_embeddings", False) else "untied",
    }


def read_window(fields: Fields) -> int | None:
    """Returns the sliding window of Qwen's architectures, which have it from the layer `max_window_layers` on."""
    layers, used = fields.get("num_hidden_layers"), fields.get("use_sliding_window", False)
    first = fields.get("max_window_layers", layers)
    kinds = fields.get("layer_types", ["full_attention" if not used or i < first else "sliding_attention"
                                       for i in range(layers)])  # fmt: skip
    window = fields.get("sliding_window", None)
    if len(kinds) != layers:
        raise WeightsError(
            f"reading {fields.file}", f"layer_types has {len(kinds)} layers, and num_hidden_layers is {layers}",
            "the config.json of these weights",
        )  # fmt: skip
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"} or window is None:
        raise WeightsError(
            f"reading {fields.file}",
            f"some layers have a sliding window of {window} and others do not (layer_types, max_window_layers {first})",
            "a model whose layers all have one, or none",
        )
    return int(window)


def read_biases(fields: Fields) -> dict[str, Any]:
    """Returns the fields of the biases of all four projections of attention, which are there together or not at all."""
    return dict.fromkeys(("qkv_bias", "out_bias"), "learned" if fields.flag("attention_bias") else "none")


def attention_bias(c: Any) -> bool | None:
    """Returns whether all four projections of attention have a bias; None is some of them, which has no such field."""
    both = {c.qkv_bias, c.out_bias}
    return None if len(both) == 2 else both == {"learned"}


def _read_llama(fields: Fields) -> Llama:
    return Llama(
        **read_sizes(fields), **read_biases(fields), mlp=fields.get("intermediate_size"),
        mlp_bias="learned" if fields.flag("mlp_bias") else "none",
    )  # fmt: skip


def _read_mistral(fields: Fields) -> Llama:
    # Null has no window; a configuration without the field is that of Mistral 7B.
    window = fields.get("sliding_window", None) if "sliding_window" in fields.config else 4096
    return Llama(**read_sizes(fields), mlp=fields.get("intermediate_size"), sliding_window=window)


def _read_qwen2(fields: Fields) -> Llama:
    return Llama(
        **read_sizes(fields), mlp=fields.get("intermediate_size"), sliding_window=read_window(fields),
        qkv_bias="learned",
    )  # fmt: skip


def _read_qwen3(fields: Fields) -> Llama:
    return Llama(
        **read_sizes(fields), **read_biases(fields), mlp=fields.get("intermediate_size"),
        sliding_window=read_window(fields), qk_norm="rms",
    )  # fmt: skip


def write_sizes(c: Any) -> dict[str, Any]:
    """Returns the configuration fields that all of the architectures have."""
    return {
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": head_size_of(c),
        "intermediate_size": c.mlp,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.embedding == "tied",
        **write_rope(c),
    }


def write_window(c: Any) -> dict[str, Any]:
    """Returns the fields of Qwen's sliding window."""
    if c.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": c.layers}
    return {"use_sliding_window": True, "sliding_window": c.sliding_window, "max_window_layers": 0}


def _read_olmo2(fields: Fields) -> Llama:
    fields.require("clip_qkv", None)
    sizes = {**read_sizes(fields, epsilon=1e-5), **read_biases(fields)}
    return Llama(**sizes, mlp=fields.get("intermediate_size"), qk_norm="rms_heads", norm_place="after")


def _biases(c: Llama) -> tuple[str, str, str]:
    return c.qkv_bias, c.out_bias, c.mlp_bias


def _reads_normalised(c: Any) -> bool:
    return type(c) is Llama and c.norm_place == "before"


def _write_llama(c: Any) -> dict[str, Any] | None:
    biased = attention_bias(c) if _reads_normalised(c) else None
    if biased is None or c.qk_norm != "none" or c.sliding_window is not None:
        return None
    return {**write_sizes(c), "attention_bias": biased, "mlp_bias": c.mlp_bias == "learned"}


def _write_mistral(c: Any) -> dict[str, Any] | None:
    if not _reads_normalised(c) or _biases(c) != ("none", "none", "none") or c.qk_norm != "none":
        return None
    return {**write_sizes(c), "sliding_window": c.sliding_window}


def _write_qwen2(c: Any) -> dict[str, Any] | None:
    if not _reads_normalised(c) or _biases(c) != ("learned", "none", "none") or c.qk_norm != "none":
        return None
    return {**write_sizes(c), **write_window(c)}


def _write_qwen3(c: Any) -> dict[str, Any] | None:
    biased = attention_bias(c) if _reads_normalised(c) and c.mlp_bias == "none" else None
    if biased is None or c.qk_norm != "rms":
        return None
    return {**write_sizes(c), **write_window(c), "attention_bias": biased}


def _write_olmo2(c: Any) -> dict[str, Any] | None:
    biased = attention_bias(c) if type(c) is Llama and c.mlp_bias == "none" else None
    if biased is None or c.norm_place != "after" or c.qk_norm != "rms_heads":
        return None
    sizes = write_sizes(c)
    # `transformers` computes this architecture with heads of width / heads and without a window.
    whole = sizes.pop("head_dim") * c.heads == c.width and c.sliding_window is None
    return {**sizes, "attention_bias": biased} if whole else None


LAYER = "model.layers.{layer}."
_BLOCK: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention_norm": ("input_layernorm.weight", ("D",)),
    "query": ("self_attn.q_proj.weight", ("NH", "D")),
    "key": ("self_attn.k_proj.weight", ("KH", "D")),
    "value": ("self_attn.v_proj.weight", ("KH", "D")),
    "attention_out": ("self_attn.o_proj.weight", ("D", "NH")),
    "query_bias": ("self_attn.q_proj.bias", ("NH",)),
    "key_bias": ("self_attn.k_proj.bias", ("KH",)),
    "value_bias": ("self_attn.v_proj.bias", ("KH",)),
    "attention_out_bias": ("self_attn.o_proj.bias", ("D",)),
    "query_norm": ("self_attn.q_norm.weight", ("H",)),
    "key_norm": ("self_attn.k_norm.weight", ("H",)),
    "mlp_norm": ("post_attention_layernorm.weight", ("D",)),
    "gate": ("mlp.gate_proj.weight", ("F", "D")),
    "up": ("mlp.up_proj.weight", ("F", "D")),
    "down": ("mlp.down_proj.weight", ("D", "F")),
    "gate_bias": ("mlp.gate_proj.bias", ("F",)),
    "up_bias": ("mlp.up_proj.bias", ("F",)),
    "down_bias": ("mlp.down_proj.bias", ("D",)),
}
"""Parameter of a layer -> name after the layer's number, and axes."""
_REST: dict[str, tuple[str, tuple[str, ...]]] = {
    "embed": ("model.embed_tokens.weight", ("V", "D")),
    "final_norm": ("model.norm.weight", ("D",)),
    "unembed": ("lm_head.weight", ("V", "D")),
}


def llama_tensors(
    c: Any, stacks: Mapping[str, Sequence[int]], names: dict[str, tuple[str, tuple[str, ...]]] | None = None
) -> dict[str, StoredTensor]:
    """Returns where each parameter is stored.

    stacks: layers of each stack.  names: of the parameters of a layer that `Llama` does not have.
    """
    stored = {}
    known = {**_BLOCK, **(names or {})}
    for path in named_leaves(c.params()):
        stack, _, name = path.rpartition(".")
        if stack in stacks:
            stored[path] = StoredTensor(LAYER + known[name][0], known[name][1], tuple(stacks[stack]))
        else:
            stored[path] = StoredTensor(*_REST[path])
    return stored


def _tensors(c: Llama) -> dict[str, StoredTensor]:
    return llama_tensors(c, {"blocks": range(c.layers)})


OLMO2: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention_norm": ("post_attention_layernorm.weight", ("D",)),
    "mlp_norm": ("post_feedforward_layernorm.weight", ("D",)),
    "query_norm": ("self_attn.q_norm.weight", ("NH",)),
    "key_norm": ("self_attn.k_norm.weight", ("KH",)),
}
"""Parameters of a layer that OLMo 2 names otherwise."""


def _olmo2_tensors(c: Llama) -> dict[str, StoredTensor]:
    return llama_tensors(c, {"blocks": range(c.layers)}, OLMO2)


def _architecture(name: str, model_type: str, read: Any, write: Any) -> Architecture:
    return Architecture(name, model_type, read, write, _tensors, TIED, COMPUTED)


TIED = ("lm_head.weight", "model.embed_tokens.weight")
COMPUTED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
ARCHITECTURES = (
    _architecture("LlamaForCausalLM", "llama", _read_llama, _write_llama),
    _architecture("MistralForCausalLM", "mistral", _read_mistral, _write_mistral),
    _architecture("Qwen2ForCausalLM", "qwen2", _read_qwen2, _write_qwen2),
    _architecture("Qwen3ForCausalLM", "qwen3", _read_qwen3, _write_qwen3),
    Architecture("Olmo2ForCausalLM", "olmo2", _read_olmo2, _write_olmo2, _olmo2_tensors, TIED, COMPUTED),
)
