"""Llama and its relatives as `transformers` names them: Mistral, Phi-3 and 4, SmolLM3, Qwen2, Qwen3, OLMo 2 and 3,
Mixtral, Qwen3-MoE."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.rope import plain_rope, read_yarn, rope_fields, scaled_rope, write_yarn
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.table import (
    LLAMA,
    Entry,
    choice,
    fixed,
    flag,
    head_size,
    local_layers,
    must,
    only_if,
    same,
    without_effect,
)
from meshwright.models.decoder import head_size_of
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.families.olmo3 import Olmo3
from meshwright.models.families.smollm3 import SmolLM3

TIED = choice("tie_word_embeddings", "embedding", {False: "untied", True: "tied"})
CORE = (
    same("vocab_size", "vocab"),
    same("hidden_size", "width"),
    same("num_hidden_layers", "layers"),
    same("num_attention_heads", "heads"),
)
KV_HEADS = same("num_key_value_heads", "kv_heads", lambda fields: fields.get("num_attention_heads"))
_USUAL_SIZES = (*CORE, KV_HEADS, fixed("hidden_act", "silu"), TIED)
SIZES = (*_USUAL_SIZES, head_size())
MLP = same("intermediate_size", "mlp")
ATTENTION_BIAS = flag("attention_bias", "qkv_bias", "out_bias")


def epsilon(default: float = 1e-6) -> Entry:
    """Returns the entry of the norms' epsilon. default: where a configuration does not have it."""
    return same("rms_norm_eps", "norm_epsilon", default)


def aux_loss(default: float = 0.001) -> Entry:
    """Returns the entry of the weight of the balance loss. default: where a configuration does not have it."""
    return same("router_aux_loss_coef", "aux_loss_weight", default)


def _read_window(fields: Fields) -> dict[str, Any]:
    """Returns the sliding window of Qwen's architectures, which have it from the layer `max_window_layers` on."""
    layers, used = fields.get("num_hidden_layers"), fields.get("use_sliding_window", False)
    first = fields.get("max_window_layers", layers)
    usual = ["full_attention" if not used or i < first else "sliding_attention" for i in range(layers)]
    kinds, window = fields.get("layer_types", usual), fields.get("sliding_window", None)
    if len(kinds) != layers:
        raise WeightsError(
            f"reading {fields.file}",
            f"layer_types has {len(kinds)} layers, and num_hidden_layers is {layers}",
            "the config.json of these weights",
        )
    if set(kinds) == {"full_attention"}:
        return {"sliding_window": None}
    if set(kinds) != {"sliding_attention"} or window is None:
        raise WeightsError(
            f"reading {fields.file}",
            f"some layers have a sliding window of {window} and others do not (layer_types, max_window_layers {first})",
            "a model whose layers all have one, or none",
        )
    return {"sliding_window": int(window)}


def _write_window(c: Any) -> dict[str, Any]:
    used = c.sliding_window is not None
    first = 0 if used else c.layers
    return {"use_sliding_window": used, "sliding_window": c.sliding_window, "max_window_layers": first}


_QWEN_WINDOW = Entry(_read_window, _write_window)
# Null has no window; a configuration without the field is that of Mistral 7B.
_MISTRAL_WINDOW = same(
    "sliding_window", "sliding_window", lambda fields: None if "sliding_window" in fields.config else 4096
)
_LLAMA = (*SIZES, scaled_rope(), epsilon(), MLP)
_WINDOW = same("sliding_window", "sliding_window", None)
_PHI3_VALUES = must(qk_norm="none", rope_scaling=None, rope_factor=1.0, yarn=None)
_PHI3_DROPOUT = without_effect("resid_pdrop", "embd_pdrop", "original_max_position_embeddings")
_NO_BIASES = must(qkv_bias="none", out_bias="none", mlp_bias="none")
_OLMO_NORMS = must(norm_place="after", qk_norm="rms_heads")
# `transformers` computes OLMo with heads of width / heads.
_USUAL_HEADS = only_if(lambda c: head_size_of(c) * c.heads == c.width)
_OLMO = (*_USUAL_SIZES, epsilon(1e-5), MLP, ATTENTION_BIAS, _OLMO_NORMS, _USUAL_HEADS, must(mlp_bias="none"))


def _read_olmo3_rope(fields: Fields) -> dict[str, Any]:
    rope, local = (rope_fields(fields, 500000.0, kind) for kind in ("full_attention", "sliding_attention"))
    if local.kind != "default" or local.theta != rope.theta:
        raise WeightsError(
            f"reading {fields.file}",
            f"rotary frequencies of local layers have the base {local.theta:g} and the scaling {local.kind!r}, those "
            f"of global ones the base {rope.theta:g}",
            "the same rope_theta in both, and YaRN or nothing in global layers",
        )
    return {"rope_theta": rope.theta, "yarn": read_yarn(fields, rope)}


def _write_olmo3_rope(c: Any) -> dict[str, Any]:
    local, last = (write_yarn(c.rope_theta, scaling) for scaling in (None, c.yarn))
    longest = {} if c.yarn is None else {"max_position_embeddings": c.yarn.longest}
    return {
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.yarn is None else last,
        "rope_parameters": {"sliding_attention": local, "full_attention": last},
        **longest,
    }


_OLMO3_ROPE = Entry(_read_olmo3_rope, _write_olmo3_rope)


def _read_dense_layers(fields: Fields) -> dict[str, Any]:
    dense = sorted(fields.get("mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise WeightsError(
            f"reading {fields.file}",
            f"layers {', '.join(map(str, dense))} are without experts (mlp_only_layers)",
            "a model whose layers without experts come first",
        )
    return {"dense_layers": len(dense)}


PLAIN_ROUTING = must(
    router_score="softmax", routed_scaling=1.0, expert_groups=1, bias_update_rate=0.0, dispatch="dropless"
)
"""Routing of Mixtral and Qwen: softmax over all experts."""
_MIXTRAL = (
    *SIZES,
    scaled_rope(1e6),
    epsilon(1e-5),
    PLAIN_ROUTING,
    must(qkv_bias="none", out_bias="none", qk_norm="none", norm_place="before", shared_experts=0, dense_layers=0),
    must(normalize_top_k=True),
    same("intermediate_size", "mlp"),
    same("intermediate_size", "expert_mlp"),
    same("num_local_experts", "experts"),
    same("num_experts_per_tok", "experts_per_token"),
    _WINDOW,
    aux_loss(),
    without_effect("router_jitter_noise"),
)
_QWEN3_MOE = (
    *_LLAMA,
    PLAIN_ROUTING,
    _QWEN_WINDOW,
    ATTENTION_BIAS,
    must(qk_norm="rms", norm_place="before", shared_experts=0),
    same("num_experts", "experts", other="num_local_experts"),
    same("num_experts_per_tok", "experts_per_token"),
    same("moe_intermediate_size", "expert_mlp"),
    same("norm_topk_prob", "normalize_top_k", False),
    fixed("decoder_sparse_step", 1),
    Entry(_read_dense_layers, lambda c: {"mlp_only_layers": list(range(c.dense_layers))}),
    aux_loss(),
)
_OLMO2 = {
    **LLAMA,
    "attention_norm": ("post_attention_layernorm.weight", ("D",)),
    "mlp_norm": ("post_feedforward_layernorm.weight", ("D",)),
    "query_norm": ("self_attn.q_norm.weight", ("NH",)),
    "key_norm": ("self_attn.k_norm.weight", ("KH",)),
}
_MIXTRAL_NAMES = {
    **LLAMA,
    "router": ("block_sparse_moe.gate.weight", ("R", "D")),
    "expert_gate": ("block_sparse_moe.experts.{expert}.w1.weight", ("F", "D")),
    "expert_up": ("block_sparse_moe.experts.{expert}.w3.weight", ("F", "D")),
    "expert_down": ("block_sparse_moe.experts.{expert}.w2.weight", ("D", "F")),
}
_PHI3_NAMES = {
    **LLAMA,
    "query": ("self_attn.qkv_proj.weight", ("NH+", "D")),
    "key": ("self_attn.qkv_proj.weight", ("KH+", "D")),
    "value": ("self_attn.qkv_proj.weight", ("KH+", "D")),
    "gate": ("mlp.gate_up_proj.weight", ("F+", "D")),
    "up": ("mlp.gate_up_proj.weight", ("F+", "D")),
}


def _no_rope(layers: int, interval: int) -> list[int]:
    """Returns the list of a configuration, with a 1 for layers *with* a rotary embedding."""
    return [int((i + 1) % interval != 0) for i in range(layers)]


def _read_no_rope(fields: Fields) -> dict[str, Any]:
    layers, interval = fields.get("num_hidden_layers"), fields.get("no_rope_layer_interval", 4)
    rotary = [int(bool(x)) for x in fields.get("no_rope_layers", _no_rope(layers, interval))]
    interval = rotary.index(0) + 1 if 0 in rotary else layers + 1
    if rotary != _no_rope(layers, interval):
        raise WeightsError(
            f"reading {fields.file}",
            f"no_rope_layers is {rotary}, and Meshwright computes layers that repeat: {_no_rope(layers, interval)}",
            "a model of which every n-th layer is without rotary embedding",
        )
    return {"no_rope_interval": interval}


_SMOLLM3 = (
    *CORE,
    KV_HEADS,
    head_size(),
    fixed("hidden_act", "silu"),
    choice("tie_word_embeddings", "embedding", {False: "untied", True: "tied"}, default=True),
    scaled_rope(2000000.0),
    epsilon(),
    MLP,
    ATTENTION_BIAS,
    flag("mlp_bias", "mlp_bias"),
    must(sliding_window=None, norm_place="before", qk_norm="none"),
    fixed("use_sliding_window", False),
    Entry(lambda fields: {}, lambda c: {"pad_token_id": None}),  # its default is a token of the published vocabulary
    Entry(_read_no_rope, lambda c: {"no_rope_layers": _no_rope(c.layers, c.no_rope_interval)}),
    without_effect("layer_types", "sliding_window"),
)
_BEFORE = must(norm_place="before")

ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        "llama",
        Llama,
        (*_LLAMA, _BEFORE, must(qk_norm="none", sliding_window=None), ATTENTION_BIAS, flag("mlp_bias", "mlp_bias")),
    ),
    Architecture(
        "MistralForCausalLM", "mistral", Llama, (*_LLAMA, _BEFORE, _NO_BIASES, must(qk_norm="none"), _MISTRAL_WINDOW)
    ),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        Llama,
        (*_LLAMA, _BEFORE, must(qkv_bias="learned", out_bias="none", mlp_bias="none", qk_norm="none"), _QWEN_WINDOW),
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        Llama,
        (*_LLAMA, _BEFORE, must(qk_norm="rms", mlp_bias="none"), ATTENTION_BIAS, _QWEN_WINDOW),
    ),
    Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        Llama,
        (*_OLMO, scaled_rope(), must(sliding_window=None), fixed("clip_qkv", None, written=False)),
        _OLMO2,
    ),
    Architecture(
        "Olmo3ForCausalLM",
        "olmo3",
        Olmo3,
        (*_OLMO, _OLMO3_ROPE, same("sliding_window", "sliding_window", 4096), local_layers(3)),
        _OLMO2,
    ),
    Architecture(
        "Phi3ForCausalLM",
        "phi3",
        Llama,
        (*SIZES, plain_rope(), epsilon(1e-5), MLP, _BEFORE, _NO_BIASES, _PHI3_VALUES, _WINDOW, _PHI3_DROPOUT),
        _PHI3_NAMES,
    ),
    Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        SmolLM3,
        _SMOLLM3,
    ),
    Architecture("MixtralForCausalLM", "mixtral", Mixtral, _MIXTRAL, _MIXTRAL_NAMES),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", Mixtral, _QWEN3_MOE),
)
