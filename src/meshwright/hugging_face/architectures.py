"""Architectures of Hugging Face: configuration to model and back,
and the tensors of each parameter.

An architecture is a table of entries, each read and written by the same code, and a table of
tensors. Another one is added from outside the package by adding it to `ARCHITECTURES`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.config_fields import (
    Entry,
    Fields,
    choice,
    fixed,
    flag,
    given,
    head_size,
    layer_types,
    local_layers,
    must,
    only_if,
    own_head_size,
    plain_rope,
    read_local_layers,
    read_no_rope,
    read_scaling,
    read_table,
    read_yarn,
    rope_fields,
    rotary_layers,
    same,
    scaled_rope,
    without_effect,
    write_table,
    write_yarn,
)
from meshwright.hugging_face.names import LLAMA, Names, StoredTensor, locate_tensors
from meshwright.hugging_face.quantised import FP8, MXFP4
from meshwright.hugging_face.safetensors_files import tensor_names
from meshwright.models.blocks.yarn import LatentYarn
from meshwright.models.decoder import head_size_of
from meshwright.models.families.arcee import Arcee
from meshwright.models.families.cohere import Cohere, Cohere2
from meshwright.models.families.deepseek import Deepseek
from meshwright.models.families.deepseek_sparse import DeepseekSparse
from meshwright.models.families.gemma import Gemma2, Gemma3
from meshwright.models.families.gemma4 import Gemma4
from meshwright.models.families.glm4_moe import Glm4Moe
from meshwright.models.families.gpt2 import Gpt2
from meshwright.models.families.gpt_oss import GptOss
from meshwright.models.families.granite import Granite, GraniteMoe
from meshwright.models.families.granite_hybrid import GraniteHybrid
from meshwright.models.families.hunyuan import Hunyuan
from meshwright.models.families.kimi_linear import KimiLinear
from meshwright.models.families.llama import Llama
from meshwright.models.families.llama4 import Llama4
from meshwright.models.families.ministral3 import Ministral3
from meshwright.models.families.mistral4 import Mistral4
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.families.nemotron_h import NemotronH
from meshwright.models.families.olmo3 import Olmo3
from meshwright.models.families.qwen2_moe import Qwen2Moe
from meshwright.models.families.qwen3_5 import Qwen35, Qwen35Moe
from meshwright.models.families.qwen3_next import Qwen3Next
from meshwright.models.families.smollm3 import SmolLM3
from meshwright.models.model import Model

_LAYER = "model.layers.{layer}."
_COMPUTED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture of `transformers`, as a family of Meshwright computes it."""

    name: str
    """Name in config.json: "LlamaForCausalLM"."""
    model_type: str
    """Type in config.json: "llama"."""
    family: Callable[..., Model]
    """Class of the models."""
    table: tuple[Entry, ...]
    """Facts that config.json and the model's fields both state, read and written."""
    names: Names = dataclasses.field(default_factory=lambda: LLAMA)
    """Tensors of the parameters."""
    layer: str = _LAYER
    """Prefix of a layer's tensors."""
    tied: tuple[str, str] | None = ("lm_head.weight", "model.embed_tokens.weight")
    """Tensor that files may have besides the one that it is tied to: it is compared
    with it, and not kept."""
    computed: tuple[str, ...] = _COMPUTED
    """Patterns of stored tensors that are computed, not learned: they are left out."""
    prefix: str = ""
    """Prefix of the tensors' names that files may lack."""
    packed: str | None = None
    """Quantised form of weights that is read as the numbers it stands for; None reads none."""
    other_types: tuple[str, ...] = ()
    """Further types that files of this architecture name."""
    left_out: tuple[str, ...] = ()
    """Patterns of learned tensors that no logit depends on: they are left out,
    and a note counts them."""
    forms: Mapping[str, Names] = dataclasses.field(default_factory=dict)
    """Other forms that published files have: name of the form -> the tensors that differ in it."""
    names_by_fields: Callable[[Any], Names] = dataclasses.field(default_factory=lambda: _no_names)
    """Tensors whose axes depend on the model's fields: `model -> those that differ`."""

    @property
    def types(self) -> tuple[str, ...]:
        """Types that config.json may name with this architecture."""
        return (self.model_type, *self.other_types)

    def read(self, fields: Fields) -> Model:
        """Returns the model of a configuration.
        Raises WeightsError for a field that the family does not compute."""
        return self.family(**read_table(self.table, fields))

    def write(self, model: Model) -> dict[str, Any] | None:
        """Returns the configuration of a model,
        or None where the architecture cannot express it."""
        return write_table(self.table, model) if type(model) is self.family else None

    def tensors(self, model: Model, form: str = "") -> Mapping[str, StoredTensor]:
        """Returns where each parameter of a model is stored, by dotted path.
        form: one of `forms`."""
        other = self.forms[form] if form else {}
        names = {**self.names, **self.names_by_fields(model), **other}
        return locate_tensors(model, names, self.layer)


def _no_names(model: Model) -> Names:
    return {}


_BIAS_UPDATE_RATE = 0.001
"""Step of the router bias in DeepSeek-V3's training (arXiv:2412.19437, section 4.2)."""
_V3_BALANCE_WEIGHT, _V2_BALANCE_WEIGHT = 0.0001, 0.001
"""Weight of the sequence-wise balance loss (arXiv:2412.19437, section 4.2;
V2-Lite's `aux_loss_alpha`)."""

# Entries that several architectures share.
_CORE = (
    same("vocab_size", "vocab"),
    same("hidden_size", "width"),
    same("num_hidden_layers", "layers"),
    same("num_attention_heads", "heads"),
)
_KV_HEADS = same(
    "num_key_value_heads", "kv_heads", lambda fields: fields.get("num_attention_heads")
)
_SILU = fixed("hidden_act", "silu")
_TIED = choice("tie_word_embeddings", "embedding", {False: "untied", True: "tied"})
_USUAL_SIZES = (*_CORE, _KV_HEADS, _SILU, _TIED)
_SIZES = (*_USUAL_SIZES, head_size())
_MLP = same("intermediate_size", "mlp")
_BIASES = flag("attention_bias", "qkv_bias", "out_bias")
_EPSILON, _EPSILON_5 = (same("rms_norm_eps", "norm_epsilon", default) for default in (1e-6, 1e-5))
_AUX_LOSS = same("router_aux_loss_coef", "aux_loss_weight", 0.001)
_WINDOW = same("sliding_window", "sliding_window", None)
_BEFORE = must(norm_place="before")
_NO_QK_NORM = must(qk_norm="none")
_NO_BIASES = must(qkv_bias="none", out_bias="none", mlp_bias="none")
_PLAIN_ROUTING = must(
    router_score="softmax",
    routed_scaling=1.0,
    expert_groups=1,
    bias_update_rate=0.0,
    dispatch="dropless",
)
"""Routing of Mixtral and Qwen: softmax over all experts."""


def _shared_expert(name: str) -> Names:
    return {
        f"shared_{part}": (f"{name}.{part}_proj.weight", LLAMA[part][1])
        for part in ("gate", "up", "down")
    }


def _packed_experts(up_axes: tuple[str, ...], down_axes: tuple[str, ...]) -> Names:
    """Returns the experts of a layer in two tensors, the gates before the projections up."""
    gate_up = "mlp.experts.gate_up_proj"
    return {
        "expert_gate": (gate_up, up_axes),
        "expert_up": (gate_up, up_axes),
        "expert_down": ("mlp.experts.down_proj", down_axes),
    }


_PACKED_FORMS = {
    "packed experts": _packed_experts(("E", "F+", "D"), ("E", "D", "F")),
    "packed and transposed experts": _packed_experts(("E", "D", "F+"), ("E", "F", "D")),
}
"""Forms of experts under one name.
`transformers` takes the first where both have the same shape."""


# Llama and its relatives: Mistral, Phi-3 and 4, Qwen2, Qwen3, OLMo 2
# and 3, SmolLM3, Mixtral, Qwen3-MoE.
def _read_window(fields: Fields) -> dict[str, Any]:
    """Returns the sliding window of Qwen's architectures, which have it from the layer
    `max_window_layers` on."""
    layers = fields.get("num_hidden_layers")
    window = _qwen_window(fields)
    first = fields.get("max_window_layers", 28)
    usual = [
        "full_attention" if window is None or i < first else "sliding_attention"
        for i in range(layers)
    ]
    kinds = fields.get("layer_types", usual)
    if len(kinds) != layers:
        found = f"layer_types has {len(kinds)} layers, and num_hidden_layers is {layers}"
        raise fields.error(found, "the config.json of these weights")
    if set(kinds) == {"full_attention"}:
        return {"sliding_window": None}
    if set(kinds) != {"sliding_attention"} or window is None:
        raise fields.error(
            f"some layers have a sliding window of {window} and others do not (layer_types, "
            f"max_window_layers {first})",
            "a model whose layers all have one, or none",
        )
    return {"sliding_window": int(window)}


def _qwen_window(fields: Fields) -> int | None:
    """Returns the window that some layers have;
    a configuration that uses one and has no size has that of 4096."""
    size = fields.get("sliding_window", None)
    if not fields.flag("use_sliding_window"):
        return None
    return size if "sliding_window" in fields.config else 4096


def _read_window_of_all(fields: Fields) -> dict[str, Any]:
    """Returns the sliding window of Qwen3-MoE: `transformers` gives it to all layers,
    or to none."""
    window, first = _qwen_window(fields), fields.get("max_window_layers", 0)
    kinds = set(fields.get("layer_types", ["sliding_attention"]))
    if window is not None and (first or kinds != {"sliding_attention"}):
        found = (
            f"it uses a sliding window of {window} from layer {first} on (max_window_layers, "
            "layer_types), and `transformers` would give it to all layers"
        )
        raise fields.error(found, "max_window_layers 0, or use_sliding_window false")
    return {"sliding_window": window}


def _read_qwen2_moe_window(fields: Fields) -> dict[str, Any]:
    """Returns the sliding window of Qwen2-MoE, which writes a size of 0 where there is none."""
    if fields.flag("use_sliding_window"):
        return _read_window(fields)
    fields.without_effect("sliding_window", "max_window_layers")
    _check_full_attention(fields, [])
    return {"sliding_window": None}


def _check_full_attention(fields: Fields, default: list[str]) -> None:
    """Raises WeightsError where some layers have a sliding window.
    default: kinds of layers, where no field has them."""
    kinds = set(fields.get("layer_types", default))
    if kinds - {"full_attention"}:
        found = f"layer_types has {', '.join(sorted(kinds))}"
        raise fields.error(found, "a model whose layers all have full attention")


def _write_window(c: Any) -> dict[str, Any]:
    used = c.sliding_window is not None
    first = 0 if used else c.layers
    return {
        "use_sliding_window": used,
        "sliding_window": c.sliding_window,
        "max_window_layers": first,
    }


def _read_olmo3_rope(fields: Fields) -> dict[str, Any]:
    rope, local = (
        rope_fields(fields, 500000.0, kind) for kind in ("full_attention", "sliding_attention")
    )
    if local.kind != "default" or local.theta != rope.theta:
        raise fields.error(
            f"rotary frequencies of local layers have the base {local.theta:g} and the scaling "
            f"{local.kind!r}, those of global ones the base {rope.theta:g}",
            "the same rope_theta in both, and YaRN or nothing in global layers",
        )
    return {"rope_theta": rope.theta, "yarn": read_yarn(rope)}


def _write_olmo3_rope(c: Any) -> dict[str, Any]:
    local, last = (write_yarn(c.rope_theta, scaling) for scaling in (None, c.yarn))
    longest = {} if c.yarn is None else {"max_position_embeddings": c.yarn.longest}
    return {
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.yarn is None else last,
        "rope_parameters": {"sliding_attention": local, "full_attention": last},
        **longest,
    }


def _read_smollm3_layers(fields: Fields) -> dict[str, Any]:
    interval, rotary = read_no_rope(fields)
    expected = rotary_layers(fields.get("num_hidden_layers"), interval)
    given = fields.get("no_rope_layers", rotary)
    if rotary != expected or not given:
        raise fields.error(
            f"no_rope_layers is {given}, and Meshwright computes layers that repeat: {expected}",
            "a model of which every n-th layer is without rotary embedding",
        )
    return {"no_rope_interval": interval}


def _read_dense_layers(fields: Fields) -> dict[str, Any]:
    dense = sorted(fields.get("mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise fields.error(
            f"layers {', '.join(map(str, dense))} are without experts (mlp_only_layers)",
            "a model whose layers without experts come first",
        )
    return {"dense_layers": len(dense)}


_QWEN_WINDOW = Entry(_read_window, _write_window)
_QWEN_MOE_WINDOW = Entry(_read_window_of_all, _write_window)
# Null has no window; a configuration without the field is that of Mistral 7B.
_MISTRAL_WINDOW = same(
    "sliding_window",
    "sliding_window",
    lambda fields: None if "sliding_window" in fields.config else 4096,
)
_LLAMA = (*_SIZES, scaled_rope(), _EPSILON, _MLP)
_OLMO = (
    *(*_USUAL_SIZES, _EPSILON_5, _MLP, _BIASES),
    must(norm_place="after", qk_norm="rms_heads", mlp_bias="none"),
    # `transformers` computes OLMo with heads of width / heads.
    only_if(lambda c: head_size_of(c) * c.heads == c.width),
)
_PHI3 = (
    *(*_SIZES, plain_rope(), _EPSILON_5, _MLP, _BEFORE, _NO_BIASES, _WINDOW),
    must(qk_norm="none", rope_scaling=None, rope_factor=1.0, yarn=None),
    without_effect("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"),
)
_SMOLLM3 = (
    *(*_CORE, _KV_HEADS, head_size(), _SILU),
    choice("tie_word_embeddings", "embedding", {False: "untied", True: "tied"}, default=True),
    *(scaled_rope(2000000.0), _EPSILON, _MLP, _BIASES),
    flag("mlp_bias", "mlp_bias"),
    must(sliding_window=None, norm_place="before", qk_norm="none"),
    fixed("use_sliding_window", False),
    Entry(
        write=lambda c: {"pad_token_id": None}
    ),  # its default is a token of the published vocabulary
    Entry(
        _read_smollm3_layers,
        lambda c: {"no_rope_layers": rotary_layers(c.layers, c.no_rope_interval)},
    ),
    without_effect("layer_types", "sliding_window"),
)
_MIXTRAL = (
    *(*_SIZES, scaled_rope(1e6), _EPSILON_5, _PLAIN_ROUTING),
    must(
        qkv_bias="none",
        out_bias="none",
        qk_norm="none",
        norm_place="before",
        shared_experts=0,
        dense_layers=0,
    ),
    must(normalize_top_k=True),
    same("intermediate_size", "mlp"),
    same("intermediate_size", "expert_mlp"),
    same("num_local_experts", "experts"),
    same("num_experts_per_tok", "experts_per_token"),
    *(_WINDOW, _AUX_LOSS),
    without_effect("router_jitter_noise"),
)
_QWEN3_MOE = (
    *(*_LLAMA, _PLAIN_ROUTING, _QWEN_MOE_WINDOW, _BIASES),
    must(qk_norm="rms", norm_place="before", shared_experts=0),
    same("num_experts", "experts", other="num_local_experts"),
    same("num_experts_per_tok", "experts_per_token"),
    same("moe_intermediate_size", "expert_mlp"),
    same("norm_topk_prob", "normalize_top_k", False),
    fixed("decoder_sparse_step", 1),
    Entry(_read_dense_layers, lambda c: {"mlp_only_layers": list(range(c.dense_layers))}),
    _AUX_LOSS,
)
_QWEN3_VL_MOE = (
    *(*_SIZES, scaled_rope(500000.0), _EPSILON, _MLP, _PLAIN_ROUTING, _BIASES),
    must(qk_norm="rms", norm_place="before", shared_experts=0, sliding_window=None),
    same("num_experts", "experts", 60, other="num_local_experts"),
    same("num_experts_per_tok", "experts_per_token", 4),
    same("moe_intermediate_size", "expert_mlp", 1408),
    fixed("norm_topk_prob", True, written=False),
    must(normalize_top_k=True),
    fixed("decoder_sparse_step", 1),
    Entry(_read_dense_layers, lambda c: {"mlp_only_layers": list(range(c.dense_layers))}),
    _AUX_LOSS,
)
_OLMOE = (
    *(*_USUAL_SIZES, scaled_rope(), _EPSILON_5, _PLAIN_ROUTING, _BIASES),
    must(qk_norm="rms_heads", norm_place="before", shared_experts=0, dense_layers=0),
    must(sliding_window=None),
    fixed("clip_qkv", None, written=False),
    same("intermediate_size", "mlp"),
    same("intermediate_size", "expert_mlp"),
    same("num_experts", "experts", 64),
    same("num_experts_per_tok", "experts_per_token", 8),
    same("norm_topk_prob", "normalize_top_k", False),
    same("router_aux_loss_coef", "aux_loss_weight", 0.01),
    only_if(lambda c: head_size_of(c) * c.heads == c.width),
)
_QWEN2_MOE = (
    *(*_LLAMA, _PLAIN_ROUTING, Entry(_read_qwen2_moe_window, _write_window)),
    choice("qkv_bias", "qkv_bias", {False: "none", True: "learned"}, default=True),
    must(qk_norm="none", norm_place="before", out_bias="none", shared_experts=0),
    same("num_experts", "experts", 60),
    same("num_experts_per_tok", "experts_per_token", 4),
    same("moe_intermediate_size", "expert_mlp", 1408),
    same("shared_expert_intermediate_size", "shared_mlp", 5632),
    same("norm_topk_prob", "normalize_top_k", False),
    fixed("decoder_sparse_step", 1),
    Entry(_read_dense_layers, lambda c: {"mlp_only_layers": list(range(c.dense_layers))}),
    _AUX_LOSS,
)
_SEED_OSS = (
    *(*_USUAL_SIZES, head_size(128), scaled_rope(), _EPSILON, _MLP, _BEFORE, _NO_QK_NORM),
    must(sliding_window=None),
    choice("attention_bias", "qkv_bias", {False: "none", True: "learned"}, default=True),
    flag("attention_out_bias", "out_bias"),
    flag("mlp_bias", "mlp_bias"),
    without_effect("residual_dropout"),
)
_FACTORS = tuple(
    same(name, name, 1.0, kind=float)
    for name in (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
)
_GRANITE = (
    *(*_LLAMA, _BIASES, _BEFORE, _NO_QK_NORM, *_FACTORS),
    flag("mlp_bias", "mlp_bias"),
    must(sliding_window=None),
)
_GRANITE_MOE = (
    *(*_SIZES, scaled_rope(), _EPSILON, _PLAIN_ROUTING, _BIASES, _BEFORE, _NO_QK_NORM, *_FACTORS),
    must(sliding_window=None, shared_experts=0, dense_layers=0, normalize_top_k=True),
    same("intermediate_size", "mlp"),
    same("intermediate_size", "expert_mlp"),
    same("num_local_experts", "experts", 8),
    same("num_experts_per_tok", "experts_per_token", 2),
    _AUX_LOSS,
)


_LETTERS_OF_GRANITE = {"linear_attention": "M", "full_attention": "*"}
"""Kind of layers, as `transformers` 5 names it -> its letter in a pattern."""
_OLDER_LETTERS_OF_GRANITE = {"mamba": "M", "attention": "*"}
"""As the published files name it."""


def _read_granite_hybrid_layers(fields: Fields) -> dict[str, Any]:
    layers = fields.get("num_hidden_layers")
    kinds = fields.first("layer_types", "layers_block_type", default=["mamba"] * layers)
    letters = _LETTERS_OF_GRANITE | _OLDER_LETTERS_OF_GRANITE
    unknown = sorted({str(kind) for kind in kinds if kind not in letters})
    if unknown or len(kinds) != layers:
        found = f"layer_types has {len(kinds)} kinds for {layers} layers"
        if unknown:
            found = f"layer_types has {', '.join(unknown)}"
        raise fields.error(found, f"one of {', '.join(letters)} for each layer")
    pattern = "".join(letters[kind] for kind in kinds)
    return {"pattern": pattern}


def _write_granite_hybrid_layers(c: Any) -> dict[str, Any]:
    names = {letter: name for name, letter in _OLDER_LETTERS_OF_GRANITE.items()}
    return {"layer_types": [names[letter] for letter in c.kinds]}


def _read_rotation(fields: Fields) -> dict[str, Any]:
    fields.require("position_embedding_type", None, "rope", "nope")
    rotates = fields.config.get("position_embedding_type") == "rope"
    return {"rotation": "rope" if rotates else "none"}


def _read_mamba_sizes(fields: Fields) -> dict[str, Any]:
    heads = fields.get("mamba_n_heads", 128)
    inner = fields.get("mamba_expand", 2) * fields.get("hidden_size")
    size = fields.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else size
    if size * heads != inner:
        found = (
            f"mamba_expand * hidden_size is {inner}, and {heads} heads of {size} are {size * heads}"
        )
        raise fields.error(found, f"mamba_d_head {inner // heads}")
    return {"mamba_heads": heads, "mamba_head_size": size}


def _write_mamba_sizes(c: Any) -> dict[str, Any] | None:
    expand, over = divmod(c.mamba_heads * c.mamba_head_size, c.width)
    if over:
        return None  # `transformers` has a multiple of the width
    return {
        "mamba_n_heads": c.mamba_heads,
        "mamba_d_head": c.mamba_head_size,
        "mamba_expand": expand,
    }


def _check_step_limit(fields: Fields) -> None:
    limit = fields.get("time_step_limit", [0.0, math.inf])
    # `transformers` writes {"__float__": "Infinity"}, which is a number in JSON too.
    numbers = [x["__float__"] if isinstance(x, dict) else x for x in limit]
    if [float(x) for x in numbers] != [0.0, math.inf]:
        found = f"time_step_limit is {limit}, and Meshwright limits no step"
        raise fields.error(found, "a model without a limit: [0.0, Infinity]")


def _read_granite_hybrid_experts(fields: Fields) -> dict[str, Any]:
    experts = fields.config.get("num_local_experts", 8)
    fields.without_effect("num_local_experts")
    if not experts:
        fields.without_effect("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef")
        return {"experts": 0}
    return {
        "experts": experts,
        "experts_per_token": fields.get("num_experts_per_tok", 2),
        "expert_mlp": fields.get("intermediate_size", 11008),
        "aux_loss_weight": fields.get("router_aux_loss_coef", 0.001),
    }


def _write_granite_hybrid_experts(c: Any) -> dict[str, Any]:
    if not c.experts:
        return {"num_local_experts": 0}
    return {
        "num_local_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "intermediate_size": c.expert_mlp,
        "router_aux_loss_coef": c.aux_loss_weight,
    }


_GRANITE_HYBRID = (
    *(*_SIZES, plain_rope(), _EPSILON, *_FACTORS),
    flag("attention_bias", "attention_bias"),
    same("shared_intermediate_size", "mlp", 1024),
    Entry(_read_granite_hybrid_experts, _write_granite_hybrid_experts),
    Entry(_read_granite_hybrid_layers, _write_granite_hybrid_layers),
    Entry(
        _read_rotation,
        lambda c: {"position_embedding_type": "rope" if c.rotation == "rope" else "nope"},
    ),
    Entry(_read_mamba_sizes, _write_mamba_sizes),
    same("mamba_n_groups", "mamba_groups", 1),
    same("mamba_d_state", "mamba_state", 256),
    same("mamba_d_conv", "convolution_taps", 4),
    fixed("mamba_conv_bias", True),
    fixed("mamba_proj_bias", False),
    Entry(_check_step_limit),
    # Chunks of any size have the same numbers.
    without_effect("mamba_chunk_size", "normalization_function", "init_method"),
)
_KINDS_OF_NEMOTRON_H = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Kind of layers, as `transformers` 5.24 names it -> its letter in the published configurations."""
_OLDER_KINDS_OF_NEMOTRON_H = {"mamba": "M", "attention": "*"}


def _read_nemotron_h_layers(fields: Fields) -> dict[str, Any]:
    """Returns the kinds of layers: `transformers` takes a list of them
    before the string of published files."""
    fields.without_effect("num_hidden_layers")
    letters = fields.get("hybrid_override_pattern", "ME*-")
    kinds = fields.first("layers_block_type", "layer_types", default=[])
    names = _KINDS_OF_NEMOTRON_H | _OLDER_KINDS_OF_NEMOTRON_H
    pattern = "".join(names.get(kind, "?") for kind in kinds) or letters
    if not set(pattern) <= set("M*-E"):
        raise fields.error(
            f"its layers are {kinds or letters}",
            f"a model whose layers are {', '.join(names)}, or M, *, - and E",
        )
    if fields.config.get("hybrid_override_pattern") not in (None, pattern):
        raise fields.error(
            f"hybrid_override_pattern is {letters}, and the list of kinds is {pattern}",
            "the config.json of these weights",
        )
    return {"pattern": pattern, "layers": len(pattern)}


def _write_nemotron_h_layers(c: Any) -> dict[str, Any]:
    names = {letter: name for name, letter in _KINDS_OF_NEMOTRON_H.items()}
    return {
        "num_hidden_layers": c.layers,
        "layers_block_type": [names[letter] for letter in c.kinds],
        "hybrid_override_pattern": c.kinds,
    }


def _check_older_names_of_nemotron_h(fields: Fields) -> None:
    """Raises WeightsError where a field that `transformers` no longer reads differs
    from the one that it reads."""
    older = {
        "norm_eps": fields.get("layer_norm_epsilon", 1e-5),
        "rms_norm_eps": fields.get("layer_norm_epsilon", 1e-5),
        "attention_head_dim": fields.get("head_dim", 128),
    }
    for name, value in older.items():
        fields.require(name, value, None)


_NEMOTRON_H = (
    same("vocab_size", "vocab", 131072),
    same("hidden_size", "width", 4096),
    same("num_attention_heads", "heads", 32),
    same("num_key_value_heads", "kv_heads", 8),
    own_head_size(128),
    Entry(_read_nemotron_h_layers, _write_nemotron_h_layers),
    # `transformers` 5.24 ties no tables of it, whatever the value of this field.
    fixed("tie_word_embeddings", False),
    same("layer_norm_epsilon", "norm_epsilon", 1e-5),
    same("intermediate_size", "mlp", 21504),
    same("mamba_num_heads", "mamba_heads", 128),
    same("mamba_head_dim", "mamba_head_size", 64),
    same("n_groups", "mamba_groups", 8),
    same("ssm_state_size", "mamba_state", 128),
    same("conv_kernel", "convolution_taps", 4),
    # `transformers` limits steps by it, and not by time_step_limit.
    same("time_step_min", "mamba_step_floor", 0.001, kind=float),
    Entry(_check_step_limit),
    same("n_routed_experts", "experts", 8),
    same("num_experts_per_tok", "experts_per_token", 2),
    same("moe_intermediate_size", "expert_mlp", 7688),
    same("moe_shared_expert_intermediate_size", "shared_mlp", 7688),
    same("routed_scaling_factor", "routed_scaling", 1.0, kind=float),
    same("n_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    same("norm_topk_prob", "normalize_top_k", True),
    must(router_score="sigmoid", dispatch="dropless"),
    given(bias_update_rate=_BIAS_UPDATE_RATE, aux_loss_weight=_V3_BALANCE_WEIGHT),
    fixed("n_shared_experts", 1),
    same("moe_latent_size", "expert_latent", None),
    fixed("mlp_hidden_act", "relu2"),
    fixed("mamba_hidden_act", "silu"),
    fixed("use_conv_bias", True),
    *(fixed(name, False) for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")),
    fixed("residual_in_fp32", False),
    fixed("sliding_window", None),
    Entry(_check_older_names_of_nemotron_h),
    # Its default is a token of the published vocabulary, whose embedding `torch` would not train.
    Entry(write=lambda c: {"pad_token_id": None}),
    # Heads and their size say how wide a state space is; chunks of any size have the same numbers.
    without_effect("expand", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    # Attention has no rotary embedding.
    without_effect("rope_theta", "rope_parameters", "partial_rotary_factor"),
    # How initial weights are drawn, and programs run.
    without_effect("time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    without_effect("hidden_dropout", "num_logits_to_keep", "moe_shared_expert_overlap"),
    # `transformers` does not read the layers for further tokens.
    without_effect("num_nextn_predict_layers", "mtp_layers_block_type"),
    without_effect("mtp_hybrid_override_pattern"),
)
_ARCEE = (
    *(*_CORE, _KV_HEADS, _TIED, head_size(), scaled_rope(), _EPSILON_5, _MLP, _BIASES),
    *(_BEFORE, _NO_QK_NORM),
    fixed("hidden_act", "relu2"),
    flag("mlp_bias", "mlp_bias"),
    must(sliding_window=None),
)
_COHERE_OF_BOTH = (
    *(*_CORE, _KV_HEADS, _SILU, _MLP),
    choice("tie_word_embeddings", "embedding", {False: "untied", True: "tied"}, default=True),
    same("layer_norm_eps", "norm_epsilon", 1e-5),
    same("logit_scale", "logit_scale", 0.0625, kind=float),
    flag("attention_bias", "attention_bias"),
    # `transformers` computes it with heads of width / heads, whatever head_dim is.
    without_effect("head_dim"),
    only_if(lambda c: head_size_of(c) * c.heads == c.width),
    # Its default is a token of the published vocabulary, whose embedding `torch` would not train.
    Entry(write=lambda c: {"pad_token_id": None}),
    # Fields of the published files that `transformers` does not read: what they say is what
    # it computes.
    fixed("use_parallel_block", True, written=False),
    fixed("use_gated_activation", True, written=False),
    fixed("use_embedding_sharing", True, written=False),
    fixed("position_embedding_type", "rope_gptj", written=False),
    fixed("rotary_pct", 1.0, written=False),
    without_effect("use_parallel_embedding", "cache_implementation", "model_max_length"),
)
_COHERE = (
    *(*_COHERE_OF_BOTH, plain_rope(500000.0)),
    choice("use_qk_norm", "qk_norm", {False: "none", True: "layer_heads"}, default=False),
)


def _read_cohere2_layers(fields: Fields) -> dict[str, Any]:
    # Three names of one number; files have one or several.
    names = ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
    interval = fields.first(*names, default=4)
    if fields.config.get("sliding_window", 4096) is None:
        found = "sliding_window is null, with which `transformers` rotates no layer"
        raise fields.error(found, "a model with a sliding_window, such as 4096")
    return {"local_layers": read_local_layers(fields, interval - 1)}


_COHERE2 = (
    *(*_COHERE_OF_BOTH, plain_rope()),
    same("sliding_window", "sliding_window", 4096),
    Entry(_read_cohere2_layers, local_layers(3).write),
    fixed("order_of_interleaved_layers", "local_attn_first", written=False),
)


def _read_hunyuan_rope(fields: Fields) -> dict[str, Any]:
    """Returns the rotation of Hunyuan, whose scaling of type dynamic
    with an alpha is another base for all lengths."""
    rope = rope_fields(fields)
    if rope.kind == "dynamic" and rope.scaling.get("alpha"):
        rope.number("factor")  # `transformers` demands it, and computes nothing of it
        size = fields.get("head_dim")
        return {"rope_theta": rope.theta * rope.number("alpha") ** (size / (size - 2))}
    return {"rope_theta": rope.theta, **read_scaling(rope)}


_HUNYUAN = (
    *(*_SIZES, Entry(_read_hunyuan_rope, scaled_rope().write), _EPSILON_5, _MLP, _BIASES, _BEFORE),
    must(qk_norm="rms", sliding_window=None, mlp_bias="none"),
    without_effect("eod_token_id"),
)
_HUNYUAN_NAMES = {
    **LLAMA,
    "query_norm": ("self_attn.query_layernorm.weight", ("H",)),
    "key_norm": ("self_attn.key_layernorm.weight", ("H",)),
}


def _apart_from_temperature(fields: Fields) -> tuple[Fields, dict[str, Any]]:
    """Returns the fields without those of the growth of queries,
    and that growth as fields of a model."""
    parameters = fields.get("rope_parameters")
    scale, length = "llama_4_scaling_beta", "original_max_position_embeddings"
    for name in (scale, length):
        if parameters.get(name) is None:
            raise fields.error(f"its rope_parameters have no {name!r}", f"a model with {name}")
    found = {
        "temperature_scale": float(parameters[scale]),
        "temperature_floor": int(parameters[length]),
    }
    others = (scale, "max_position_embeddings", "partial_rotary_factor")
    rest = {name: value for name, value in parameters.items() if name not in others}
    return fields.with_value("rope_parameters", rest), found


def _read_ministral3_rope(fields: Fields) -> dict[str, Any]:
    part = fields.mapping("rope_parameters").get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise fields.error(f"partial_rotary_factor is {part}", "a model that rotates whole heads")
    fields, temperature = _apart_from_temperature(fields)
    rope = rope_fields(fields)
    return {"rope_theta": rope.theta, "yarn": read_yarn(rope), **temperature}


def _write_ministral3_rope(c: Any) -> dict[str, Any] | None:
    if c.yarn is None or c.yarn.original_max_position_embeddings != c.temperature_floor:
        return None  # `transformers` has one length for both
    scaling = {**write_yarn(c.rope_theta, c.yarn), "llama_4_scaling_beta": c.temperature_scale}
    return {"rope_parameters": scaling, "max_position_embeddings": c.yarn.longest}


_MINISTRAL3 = (
    *(*_USUAL_SIZES, head_size(128), _EPSILON_5, _MLP, _BEFORE, _NO_BIASES, _NO_QK_NORM, _WINDOW),
    must(rope_scaling=None, rope_factor=1.0),
    Entry(_read_ministral3_rope, _write_ministral3_rope),
)
_GRANITE_MOE_NAMES = {
    **LLAMA,
    "router": ("block_sparse_moe.router.layer.weight", ("R", "D")),
    "expert_gate": ("block_sparse_moe.input_linear.weight", ("E", "F+", "D")),
    "expert_up": ("block_sparse_moe.input_linear.weight", ("E", "F+", "D")),
    "expert_down": ("block_sparse_moe.output_linear.weight", ("E", "D", "F")),
}
_OF_MAMBA = {
    "value_gate": ("NH+",),
    "value": ("NH+",),
    "key": ("KH+",),
    "query": ("KH+",),
    "step": ("N+",),
}
"""Parts of the projection into a state space, in their order."""
_MAMBA_NAMES = {
    **{name: ("mamba.in_proj.weight", (*axes, "D")) for name, axes in _OF_MAMBA.items()},
    **{
        f"{name}_taps": ("mamba.conv1d.weight", (*_OF_MAMBA[name], "", "W"))
        for name in ("value", "key", "query")
    },
    **{
        f"{name}_taps_bias": ("mamba.conv1d.bias", _OF_MAMBA[name])
        for name in ("value", "key", "query")
    },
    "step_bias": ("mamba.dt_bias", ("N",)),
    "a_log": ("mamba.A_log", ("N",)),
    "skip": ("mamba.D", ("N",)),
    "value_norm": ("mamba.norm.weight", ("NH",)),
    "attention_out": ("mamba.out_proj.weight", ("D", "NH")),
}
_NEMOTRON_H_NAMES = {
    "embed": ("backbone.embeddings.weight", ("V", "D")),
    "final_norm": ("backbone.norm_f.weight", ("D",)),
    "unembed": LLAMA["unembed"],
    "attention_norm": ("norm.weight", ("D",)),
    "mlp_norm": ("norm.weight", ("D",)),
    **{
        name: (tensor.replace("mamba.", "mixer."), axes)
        for name, (tensor, axes) in _MAMBA_NAMES.items()
    },
    **{
        f"attention_blocks.{name}": (LLAMA[name][0].replace("self_attn.", "mixer."), LLAMA[name][1])
        for name in ("query", "key", "value", "attention_out")
    },
    **{
        name: (LLAMA[name][0].replace("mlp.", "mixer."), LLAMA[name][1])
        for name in ("up", "down", "router", "expert_up", "expert_down")
    },
    "router_bias": ("mixer.gate.e_score_correction_bias", ("R",)),
    "latent_down": ("mixer.fc1_latent_proj.weight", ("Z", "D")),
    "latent_up": ("mixer.fc2_latent_proj.weight", ("D", "Z")),
    "shared_up": ("mixer.shared_experts.up_proj.weight", ("F", "D")),
    "shared_down": ("mixer.shared_experts.down_proj.weight", ("D", "F")),
}


def _names_of_latent_experts(c: NemotronH) -> Names:
    """Returns the experts of a Nemotron-H whose rows are latents and not of the model's width."""
    if c.expert_latent is None:
        return {}
    return {
        "expert_up": (_NEMOTRON_H_NAMES["expert_up"][0], ("F", "Z")),
        "expert_down": (_NEMOTRON_H_NAMES["expert_down"][0], ("Z", "F")),
    }


_SHARED_MLP = {"gate": ("F+", "D"), "up": ("F+", "D")}
_GRANITE_HYBRID_NAMES = {
    **{name: names for name, names in _GRANITE_MOE_NAMES.items() if name not in _MAMBA_NAMES},
    **_MAMBA_NAMES,
    **{f"blocks.{name}": LLAMA[name] for name in ("query", "key", "value", "attention_out")},
    **{name: ("shared_mlp.input_linear.weight", axes) for name, axes in _SHARED_MLP.items()},
    "down": ("shared_mlp.output_linear.weight", ("D", "F")),
    **{
        f"shared_{name}": ("shared_mlp.input_linear.weight", axes)
        for name, axes in _SHARED_MLP.items()
    },
    "shared_down": ("shared_mlp.output_linear.weight", ("D", "F")),
}
_COHERE_NAMES = {
    **LLAMA,
    "final_norm.scale": LLAMA["final_norm"],
    "query_norm": ("self_attn.q_norm.weight", ("N", "H")),
    "key_norm": ("self_attn.k_norm.weight", ("K", "H")),
}
_OLMO_NAMES = {
    **LLAMA,
    "attention_norm": ("post_attention_layernorm.weight", ("D",)),
    "mlp_norm": ("post_feedforward_layernorm.weight", ("D",)),
    "query_norm": ("self_attn.q_norm.weight", ("NH",)),
    "key_norm": ("self_attn.k_norm.weight", ("KH",)),
}
_PHI3_NAMES = {
    **LLAMA,
    "query": ("self_attn.qkv_proj.weight", ("NH+", "D")),
    "key": ("self_attn.qkv_proj.weight", ("KH+", "D")),
    "value": ("self_attn.qkv_proj.weight", ("KH+", "D")),
    "gate": ("mlp.gate_up_proj.weight", ("F+", "D")),
    "up": ("mlp.gate_up_proj.weight", ("F+", "D")),
}
_OLMOE_NAMES = {
    **LLAMA,
    "query_norm": _OLMO_NAMES["query_norm"],
    "key_norm": _OLMO_NAMES["key_norm"],
}
_MIXTRAL_NAMES = {
    **LLAMA,
    "router": ("block_sparse_moe.gate.weight", ("R", "D")),
    "expert_gate": ("block_sparse_moe.experts.{expert}.w1.weight", ("F", "D")),
    "expert_up": ("block_sparse_moe.experts.{expert}.w3.weight", ("F", "D")),
    "expert_down": ("block_sparse_moe.experts.{expert}.w2.weight", ("D", "F")),
}

# DeepSeek-V3, Kimi K2 (the same architecture with other sizes) and DeepSeek-V2-Lite;
# GLM-4.5 has V3's experts.


def _read_deepseek_rope(fields: Fields) -> dict[str, Any]:
    rope = rope_fields(fields)
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "yarn": None}
    names = {field.name for field in dataclasses.fields(LatentYarn)} - {"bounds"}
    others = set(rope.scaling) - names
    if rope.kind != "yarn" or others:
        found = f"rope scaling of type {rope.kind!r}" + (
            f" with {', '.join(sorted(others))}" if others else ""
        )
        raise rope.refused(found, "a model without, or YaRN")
    scaling = {"factor": rope.number("factor"), **rope.scaling}
    scaling["original_max_position_embeddings"] = rope.pretrained_length()
    numbers: dict[str, Any] = {name: rope.number(name) for name, value in scaling.items() if value}
    # A field that is missing has these values in `transformers`, which are not those of DeepSeek.
    missing = {"mscale": 0.0, "mscale_all_dim": 0.0}
    return {"rope_theta": rope.theta, "yarn": LatentYarn(**{**missing, **numbers})}


def _write_deepseek_rope(c: Any) -> dict[str, Any] | None:
    if c.yarn is None:
        return {"rope_theta": c.rope_theta, "rope_scaling": None}
    if c.yarn.bounds != "whole":
        return None
    values = {
        name: value for name, value in dataclasses.asdict(c.yarn).items() if value is not None
    }
    del values["bounds"]
    scaling = {"rope_type": "yarn", "type": "yarn", **values}
    return {
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": c.yarn.longest,
    }


def _read_mtp_depth(fields: Fields) -> dict[str, Any]:
    """Returns the layers of multi-token prediction whose weights are there: the released files
    have one.

    `transformers` names them in the configuration and leaves them out of the files that it writes.
    """
    named = fields.first("num_nextn_predict_layers", "num_mtp_layers", default=0)
    prefix = _LAYER.format(layer=fields.get("num_hidden_layers"))
    if not named or not any(name.startswith(prefix) for name in tensor_names(fields.file.parent)):
        return {"mtp_depth": 0}
    if named > 1:
        found = f"it has {named} layers of multi-token prediction, and one is computed"
        raise fields.error(found, "a model with one, or none")
    return {"mtp_depth": 1}


_DENSE_FIRST = same("first_k_dense_replace", "dense_layers")
_DEEPSEEK_EXPERTS = (
    same("n_routed_experts", "experts"),
    same("num_experts_per_tok", "experts_per_token"),
    same("moe_intermediate_size", "expert_mlp"),
    same("n_shared_experts", "shared_experts"),
    _DENSE_FIRST,
    same("routed_scaling_factor", "routed_scaling", kind=float),
    given(router_z_loss_weight=0.0),
    must(dispatch="dropless"),
    only_if(lambda c: c.shared_experts > 0),
)
_DEEPSEEK_ROPE = Entry(_read_deepseek_rope, _write_deepseek_rope)
_LATENT_ATTENTION = (
    Entry(
        lambda fields: fields.require("num_key_value_heads", fields.get("num_attention_heads")),
        lambda c: {"num_key_value_heads": c.heads},
    ),
    without_effect("head_dim", "qk_head_dim"),
    same("q_lora_rank", "q_lora_rank", 0, kind=lambda rank: rank or None),
    *(
        same(name, name)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ),
)
_DEEPSEEK = (
    *(*_CORE, _MLP, _EPSILON, _TIED, _SILU),
    fixed("attention_bias", False),
    fixed("mlp_bias", False, written=False),
    fixed("moe_layer_freq", 1),
    fixed("ep_size", 1, written=False),
    without_effect("seq_aux"),
    _DEEPSEEK_ROPE,
    *_LATENT_ATTENTION,
    *_DEEPSEEK_EXPERTS,
)


def _check_kv_heads(fields: Fields) -> None:
    """Raises WeightsError where key/value heads are missing
    and `transformers` would take 128 for fewer heads."""
    heads = fields.get("num_attention_heads")
    if "num_key_value_heads" not in fields.config and heads != 128:
        found = (
            f"it has no num_key_value_heads, for which `transformers` takes 128, and {heads} heads"
        )
        raise fields.error(found, f"num_key_value_heads {heads}")


_DEEPSEEK_V3 = (
    *_DEEPSEEK,
    Entry(_check_kv_heads),
    same("aux_loss_alpha", "aux_loss_weight", _V3_BALANCE_WEIGHT),
    fixed("rope_interleave", True),
    fixed("scoring_func", "sigmoid"),
    fixed("topk_method", "noaux_tc"),
    must(router_score="sigmoid"),
    same("norm_topk_prob", "normalize_top_k", True),
    same("n_group", "expert_groups"),
    same("topk_group", "topk_groups"),
    given(bias_update_rate=_BIAS_UPDATE_RATE),
    Entry(_read_mtp_depth, lambda c: {"num_nextn_predict_layers": c.mtp_depth}),
)
_DEEPSEEK_V2 = (
    *_DEEPSEEK,
    same("aux_loss_alpha", "aux_loss_weight", _V2_BALANCE_WEIGHT),
    fixed("scoring_func", "softmax"),
    fixed("topk_method", "greedy"),
    fixed("norm_topk_prob", False),
    must(router_score="softmax", normalize_top_k=False, bias_update_rate=0.0),
    # With the method "greedy" there are no groups, whatever their number is.
    without_effect("n_group", "topk_group"),
    Entry(
        write=lambda c: (
            {"n_group": 1, "topk_group": 1} if c.expert_groups == c.topk_groups else None
        )
    ),
)


def _read_dense_of_glm4_moe_lite(fields: Fields) -> dict[str, Any]:
    """Returns the leading dense layers: one,
    where the configuration does not name the kind of each layer."""
    layers = fields.get("num_hidden_layers")
    kinds = fields.get("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
    dense = kinds.count("dense")
    stated = fields.get("first_k_dense_replace", dense)
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense) or stated != dense:
        found = f"mlp_layer_types is {kinds}, and first_k_dense_replace {stated}"
        raise fields.error(found, "a model whose dense layers come first, as many in both fields")
    return {"dense_layers": dense}


_GLM4_MOE_LITE = (
    *(entry for entry in _DEEPSEEK if entry not in (_EPSILON, _DENSE_FIRST)),
    _EPSILON_5,
    Entry(_read_dense_of_glm4_moe_lite),
    fixed("rope_interleave", True),
    fixed("scoring_func", "sigmoid", written=False),
    fixed("topk_method", "noaux_tc", written=False),
    must(router_score="sigmoid"),
    same("norm_topk_prob", "normalize_top_k", True),
    same("n_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    given(bias_update_rate=_BIAS_UPDATE_RATE, aux_loss_weight=_V3_BALANCE_WEIGHT),
    Entry(_read_mtp_depth),
)


def _read_dense_of_sparse_deepseek(fields: Fields) -> dict[str, Any]:
    """Returns the leading dense layers: three, where no field names them."""
    layers = fields.get("num_hidden_layers")
    dense = min(fields.get("first_k_dense_replace", 3), layers)
    usual = ["dense"] * dense + ["sparse"] * (layers - dense)
    kinds = fields.get("mlp_layer_types", usual)
    if kinds != usual:
        found = f"mlp_layer_types is {kinds}, and first_k_dense_replace {dense}"
        raise fields.error(found, "a model whose dense layers come first, as many in both fields")
    return {"dense_layers": dense}


def _check_every_layer_has_an_indexer(fields: Fields) -> None:
    """Raises WeightsError for layers that attend to all keys,
    or to those that another layer chose."""
    layers = fields.get("num_hidden_layers")
    for name, known in (("layer_types", "indexed_attention"), ("indexer_types", "full")):
        kinds = fields.get(name, [known] * layers)
        if kinds != [known] * layers:
            others = sorted({str(kind) for kind in kinds} - {known})
            found = (
                f"{name} has {', '.join(others)}, and Meshwright computes an indexer in every layer"
            )
            raise fields.error(found, f"a model whose {name} are all {known}")


_SPARSE_DEEPSEEK = (
    *(entry for entry in _DEEPSEEK if entry not in (_EPSILON, _DENSE_FIRST)),
    Entry(
        _read_dense_of_sparse_deepseek,
        lambda c: {"first_k_dense_replace": c.dense_layers},
    ),
    Entry(_check_every_layer_has_an_indexer),
    *(same(name, name) for name in ("index_n_heads", "index_head_dim", "index_topk")),
    same("aux_loss_alpha", "aux_loss_weight", _V3_BALANCE_WEIGHT),
    fixed("rope_interleave", True, written=False),
    fixed("scoring_func", "sigmoid"),
    fixed("topk_method", "noaux_tc"),
    must(router_score="sigmoid"),
    same("norm_topk_prob", "normalize_top_k", True),
    given(bias_update_rate=_BIAS_UPDATE_RATE),
    Entry(_read_mtp_depth, lambda c: {"num_nextn_predict_layers": c.mtp_depth}),
)
_DEEPSEEK_V32 = (
    *_SPARSE_DEEPSEEK,
    _EPSILON,
    must(index_pairs="halves"),
    same("n_group", "expert_groups", 8),
    same("topk_group", "topk_groups", 4),
)
_GLM_MOE_DSA = (
    *_SPARSE_DEEPSEEK,
    _EPSILON_5,
    must(index_pairs="neighbours"),
    same("n_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    fixed("indexer_rope_interleave", True, written=False),
    # Every how many layers one has an indexer, and from which layer on they are counted.
    fixed("index_topk_freq", 1, written=False),
    without_effect("index_skip_topk_offset"),
)


def _read_mistral4_rope(fields: Fields) -> dict[str, Any]:
    sizes = [fields.get(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim")]
    usual = sizes[0] / sum(sizes)
    part = fields.mapping("rope_parameters").get("partial_rotary_factor", usual)
    if part != usual:
        found = f"partial_rotary_factor is {part}, and {sizes[0]} of {sum(sizes)} features rotate"
        raise fields.error(found, f"partial_rotary_factor {usual}")
    fields, temperature = _apart_from_temperature(fields)
    return {**_read_deepseek_rope(fields), **temperature}


def _write_mistral4_rope(c: Any) -> dict[str, Any] | None:
    written = _write_deepseek_rope(c)
    if written is None or c.yarn is None:
        return None
    if c.yarn.original_max_position_embeddings != c.temperature_floor:
        return None  # `transformers` has one length for both
    scaling = {
        **written["rope_scaling"],
        "rope_theta": c.rope_theta,
        "llama_4_scaling_beta": c.temperature_scale,
    }
    longest = written["max_position_embeddings"]
    return {"rope_parameters": scaling, "max_position_embeddings": longest}


_MISTRAL4 = (
    *(entry for entry in _DEEPSEEK if entry is not _DEEPSEEK_ROPE),
    Entry(_read_mistral4_rope, _write_mistral4_rope),
    fixed("rope_interleave", True),
    must(router_score="softmax", bias_update_rate=0.0, mtp_depth=0),
    same("norm_topk_prob", "normalize_top_k", True),
    same("n_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    # No field states the weight of a balance loss, and `transformers` computes none.
    given(aux_loss_weight=0.0),
)
_DEEPSEEK_NAMES = {
    **LLAMA,
    "query_down": ("self_attn.q_a_proj.weight", ("Z", "D")),
    "query_norm": ("self_attn.q_a_layernorm.weight", ("Z",)),
    "query_up": ("self_attn.q_b_proj.weight", ("NH", "Z")),
    "kv_down": ("self_attn.kv_a_proj_with_mqa.weight", ("Z", "D")),
    "kv_norm": ("self_attn.kv_a_layernorm.weight", ("Z",)),
    "kv_up": ("self_attn.kv_b_proj.weight", ("NH", "Z")),
    "router_bias": ("mlp.gate.e_score_correction_bias", ("R",)),
    **_shared_expert("mlp.shared_experts"),
    "mtp.embed_norm": ("enorm.weight", ("D",)),
    "mtp.hidden_norm": ("hnorm.weight", ("D",)),
    "mtp.project": ("eh_proj.weight", ("D", "Z")),
    "mtp.final_norm": ("shared_head.norm.weight", ("D",)),
}
_SPARSE_DEEPSEEK_NAMES = {
    **_DEEPSEEK_NAMES,
    "index_query": ("self_attn.indexer.wq_b.weight", ("IH", "Z")),
    "index_key": ("self_attn.indexer.wk.weight", ("H", "D")),
    "index_key_norm": ("self_attn.indexer.k_norm.weight", ("H",)),
    "index_key_norm_bias": ("self_attn.indexer.k_norm.bias", ("H",)),
    "index_weights": ("self_attn.indexer.weights_proj.weight", ("I", "D")),
}
_MTP_COPIES = r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
"""Copies of embedding and unembedding with the layer of multi-token prediction,
which shares those of the model."""
_GLM4_MOE = (
    *(*_SIZES, _MLP, _EPSILON_5, scaled_rope(fraction=0.5)),
    flag("attention_bias", "qkv_bias"),
    choice("use_qk_norm", "qk_norm", {False: "none", True: "rms"}),
    *_DEEPSEEK_EXPERTS,
    same("norm_topk_prob", "normalize_top_k", True),
    same("n_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    must(router_score="sigmoid"),
    given(bias_update_rate=_BIAS_UPDATE_RATE, aux_loss_weight=_V3_BALANCE_WEIGHT),
    without_effect("num_nextn_predict_layers", "num_mtp_layers"),
)


def _read_minimax_m2_rope(fields: Fields) -> dict[str, Any]:
    """Returns the rotation of MiniMax-M2,
    whose published files state the features that rotate (`rotary_dim`)."""
    size = fields.get("head_dim", 128)
    part = fields.get("rotary_dim", size) / size
    rope = rope_fields(fields, 5e6, fraction=part, partial=True)
    return {"rope_theta": rope.theta, **read_scaling(rope), "rotary_fraction": rope.fraction}


# What the fields of the published files that `transformers` does not read say, it computes; and it
# leaves out the layers for further tokens.
_MINIMAX_M2 = (
    *(*_USUAL_SIZES, own_head_size(128), _EPSILON),
    Entry(_read_minimax_m2_rope, scaled_rope(fraction=0.5).write),
    same("intermediate_size", "mlp"),
    same("intermediate_size", "expert_mlp"),
    same("num_local_experts", "experts", 256, other="num_experts"),
    same("num_experts_per_tok", "experts_per_token", 8),
    must(qkv_bias="none", qk_norm="rms_heads", shared_experts=0, dense_layers=0),
    must(router_score="sigmoid", normalize_top_k=True, routed_scaling=1.0, expert_groups=1),
    must(dispatch="dropless"),
    given(bias_update_rate=_BIAS_UPDATE_RATE, router_z_loss_weight=0.0),
    _AUX_LOSS,
    fixed("scoring_func", "sigmoid", written=False),
    fixed("use_routing_bias", True, written=False),
    fixed("use_qk_norm", True, written=False),
    fixed("qk_norm_type", "per_layer", written=False),
    fixed("shared_intermediate_size", 0, written=False),
    without_effect("router_jitter_noise", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
)
_MINIMAX_M2_NAMES = {
    **_MIXTRAL_NAMES,
    "query_norm": _OLMO_NAMES["query_norm"],
    "key_norm": _OLMO_NAMES["key_norm"],
    "router_bias": ("block_sparse_moe.e_score_correction_bias", ("R",)),
}


def _read_dots1_layers(fields: Fields) -> None:
    layers = fields.get("num_hidden_layers")
    first = fields.get("max_window_layers", 62)
    windowed = layers > first and fields.config.get("sliding_window", 4096) is not None
    fields.without_effect("sliding_window")
    _check_full_attention(fields, ["sliding_attention"] if windowed else [])


_DOTS1 = (
    *(*_SIZES, _MLP, _EPSILON, scaled_rope(), Entry(_read_dots1_layers)),
    fixed("attention_bias", False),
    must(qkv_bias="none", qk_norm="rms", rotary_fraction=1.0),
    *_DEEPSEEK_EXPERTS,
    same("norm_topk_prob", "normalize_top_k", False),
    same("n_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    fixed("scoring_func", "sigmoid", "noaux_tc", written=False),
    must(router_score="sigmoid"),
    given(bias_update_rate=_BIAS_UPDATE_RATE, aux_loss_weight=_V3_BALANCE_WEIGHT),
)
_GLM4_MOE_NAMES = {**_DEEPSEEK_NAMES, "query_norm": LLAMA["query_norm"]}


# Gemma 2 and 3: Llama's projections, four norms in a layer.
def _read_gemma3_layers(fields: Fields) -> dict[str, Any]:
    pattern = fields.first("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return {"local_layers": read_local_layers(fields, pattern - 1)}


def _read_gemma3_rope(fields: Fields) -> dict[str, Any]:
    """Returns base and factor of the global layers, and the base of the local ones."""
    rope = rope_fields(fields, 1e6, "full_attention")
    local = rope_fields(fields, 1e4, "sliding_attention", "rope_local_base_freq")
    if rope.kind not in ("default", "linear") or local.kind != "default":
        found = (
            f"rope_scaling of type {rope.kind!r} in global layers and {local.kind!r} in local ones"
        )
        raise rope.refused(found, "a model with none, or with that of type linear in global layers")
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


def _softcap(name: str, field: str, default: float | None) -> Entry:
    """Returns the entry of a soft cap, whose null has no cap.
    default: where the field is missing."""

    def read(fields: Fields) -> dict[str, Any]:
        fields.without_effect(name)
        return {field: fields.config.get(name, default)}

    return Entry(read, lambda c: {name: getattr(c, field)})


_GEMMA = (
    *_CORE,
    same("num_key_value_heads", "kv_heads"),
    own_head_size(),
    _MLP,
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
    _EPSILON,
)
_GEMMA2 = (
    *_GEMMA,
    local_layers(1),
    plain_rope(),
    _softcap("attn_logit_softcapping", "softcap", 50.0),
    _softcap("final_logit_softcapping", "logit_softcap", 30.0),
)
_GEMMA3 = (
    *_GEMMA,
    fixed("attn_logit_softcapping", None, written=False),
    fixed("final_logit_softcapping", None, written=False),
    local_layers(5),
    Entry(_read_gemma3_layers, lambda c: {"model_type": "gemma3_text"}),
    Entry(_read_gemma3_rope, _write_gemma3_rope),
)
_GEMMA_NAMES = {
    **LLAMA,
    "attention_out_norm": ("post_attention_layernorm.weight", ("D",)),
    "mlp_norm": ("pre_feedforward_layernorm.weight", ("D",)),
    "mlp_out_norm": ("post_feedforward_layernorm.weight", ("D",)),
}


# Gemma 4: global layers with heads of their own, and experts beside the dense feed-forward.
def _gemma4_layer_types(fields: Fields) -> list[str]:
    """Returns the kinds of layers, of which the last is always global."""
    kinds = fields.get("layer_types", layer_types(fields.get("num_hidden_layers"), 5))
    return [*kinds[:-1], "full_attention"]


def _read_gemma4_layers(fields: Fields) -> dict[str, Any]:
    kinds = _gemma4_layer_types(fields)
    return {"local_layers": read_local_layers(fields.with_value("layer_types", kinds), 5)}


def _read_gemma4_heads(fields: Fields) -> dict[str, Any]:
    """Returns the heads of global layers,
    which the files of `transformers` 5.24 have for each layer."""
    shares = fields.flag("attention_k_eq_v")
    kv_heads = fields.get("num_key_value_heads")
    own = {"head_dim": fields.get("global_head_dim", 512)}
    own["num_key_value_heads"] = fields.get("num_global_key_value_heads", kv_heads)
    if not shares:
        own["num_key_value_heads"] = kv_heads
    by_layer = fields.mapping("per_layer_config")
    if by_layer:
        own = _heads_of_global_layers(fields, by_layer)
    return {
        "global_head_size": own.get("head_dim", fields.get("head_dim", 256)),
        "global_kv_heads": own.get("num_key_value_heads", kv_heads),
        "keys_are_values": shares,
    }


def _heads_of_global_layers(fields: Fields, by_layer: Mapping[str, Any]) -> dict[str, int]:
    """Returns what `per_layer_config` has for every global layer.
    Raises WeightsError for anything else in it."""
    kinds = _gemma4_layer_types(fields)
    own = next(iter(by_layer.values()))
    layers = [int(layer) for layer in by_layer if layer.isdecimal()]
    is_global = sorted(layers) == [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    same_for_all = len(layers) == len(by_layer) and all(o == own for o in by_layer.values())
    sizes = {"head_dim", "num_key_value_heads"}
    is_known = isinstance(own, dict) and own.keys() <= sizes
    if not (is_global and same_for_all and is_known):
        found = f"per_layer_config is {by_layer}"
        raise fields.error(found, f"the same {' and '.join(sorted(sizes))} for all global layers")
    return dict(own)


def _write_gemma4_heads(c: Any) -> dict[str, Any] | None:
    if not c.keys_are_values and c.global_kv_heads != c.kv_heads:
        return None  # `transformers` reads the number of heads only where keys are values
    return {
        "attention_k_eq_v": c.keys_are_values,
        "global_head_dim": c.global_head_size,
        "num_global_key_value_heads": c.global_kv_heads,
    }


def _read_gemma4_rope(fields: Fields) -> dict[str, Any]:
    usual = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    if not fields.mapping("rope_parameters"):
        fields = fields.with_value("rope_parameters", {"full_attention": usual})
    rope = rope_fields(fields, 1e6, "full_attention", partial=True)
    local = rope_fields(fields, 1e4, "sliding_attention", partial=True)
    if rope.kind not in ("default", "proportional") or local.kind != "default":
        found = f"rope_type {rope.kind!r} in global layers and {local.kind!r} in local ones"
        raise rope.refused(found, "a model with proportional in global layers, or default")
    proportional = rope.kind == "proportional"
    return {
        "rope_theta": rope.theta,
        "local_rope_theta": local.theta,
        "rotary_fraction": rope.fraction if proportional else 1.0,
        "rope_factor": float(rope.scaling.get("factor", 1.0)) if proportional else 1.0,
    }


def _write_gemma4_rope(c: Any) -> dict[str, Any]:
    last = {
        "rope_type": "proportional",
        "rope_theta": c.rope_theta,
        "partial_rotary_factor": c.rotary_fraction,
    }
    if c.rope_factor != 1.0:
        last["factor"] = c.rope_factor
    local = {"rope_type": "default", "rope_theta": c.local_rope_theta}
    return {"rope_parameters": {"full_attention": last, "sliding_attention": local}}


def _check_gemma4_parts(fields: Fields) -> None:
    """Raises WeightsError for the parts of the small models.
    `transformers` has them where no field excludes them."""
    width = fields.config.get("hidden_size_per_layer_input", 256)
    fields.without_effect("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    lacked = []
    if width:
        lacked.append(f"embeddings of each layer (hidden_size_per_layer_input {width})")
    shared = fields.get("num_kv_shared_layers", 0)
    if shared:
        lacked.append(f"{shared} layers with the keys and values of others (num_kv_shared_layers)")
    if lacked:
        raise fields.error(
            f"it has {' and '.join(lacked)}, which Meshwright does not compute",
            "a Gemma 4 without: 12B, 26B-A4B, 31B",
        )


def _read_gemma4_experts(fields: Fields) -> dict[str, Any]:
    if not fields.flag("enable_moe_block"):
        fields.without_effect("num_experts", "top_k_experts", "moe_intermediate_size")
        return {"experts": 0}
    return {
        "experts": fields.get("num_experts"),
        "experts_per_token": fields.get("top_k_experts"),
        "expert_mlp": fields.get("moe_intermediate_size"),
    }


def _write_gemma4_experts(c: Any) -> dict[str, Any]:
    if not c.experts:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": c.experts,
        "top_k_experts": c.experts_per_token,
        "moe_intermediate_size": c.expert_mlp,
    }


_GEMMA4_DENSE = (
    *_CORE,
    same("num_key_value_heads", "kv_heads"),
    own_head_size(256),
    _MLP,
    fixed("hidden_activation", "gelu_pytorch_tanh"),
    fixed("attention_bias", False, written=False),
    # Tokens of an image may attend to each other; those of a text do not.
    fixed("use_bidirectional_attention", None, "vision", written=False),
    fixed("tie_word_embeddings", True),
    Entry(_read_gemma4_layers, local_layers(5).write),
    Entry(_read_gemma4_heads, _write_gemma4_heads),
    Entry(_read_gemma4_rope, _write_gemma4_rope),
    _softcap("final_logit_softcapping", "logit_softcap", None),
    _EPSILON,
    fixed("num_kv_shared_layers", 0),
    without_effect("use_double_wide_mlp"),  # of layers that share keys and values
)
_GEMMA4 = (
    Entry(_check_gemma4_parts, lambda c: {"hidden_size_per_layer_input": 0}),
    *_GEMMA4_DENSE,
    same("sliding_window", "sliding_window", 512),
    Entry(_read_gemma4_experts, _write_gemma4_experts),
    # No field states the weight of a balance loss, and `transformers` computes none.
    given(aux_loss_weight=0.0),
)
_GEMMA4_UNIFIED = (
    *_GEMMA4_DENSE,
    same("sliding_window", "sliding_window", 1024),
    must(experts=0),
)
_GEMMA4_NAMES = {
    **_GEMMA_NAMES,
    "output_scale": ("layer_scalar", ("Q",)),
    "dense_out_norm": ("post_feedforward_layernorm_1.weight", ("D",)),
    "experts_norm": ("pre_feedforward_layernorm_2.weight", ("D",)),
    "experts_out_norm": ("post_feedforward_layernorm_2.weight", ("D",)),
    "router_norm": ("router.scale", ("D",)),
    "weight_scale": ("router.per_expert_scale", ("R",)),
    "router": ("router.proj.weight", ("R", "D")),
    "expert_gate": ("experts.gate_up_proj", ("E", "F+", "D")),
    "expert_up": ("experts.gate_up_proj", ("E", "F+", "D")),
    "expert_down": ("experts.down_proj", ("E", "D", "F")),
}


# GPT-2: projections as [inputs, outputs], query, key and value fused.
def _check_inner(fields: Fields) -> None:
    width, inner = fields.get("n_embd"), fields.get("n_inner", 4 * fields.get("n_embd"))
    if inner != 4 * width:
        truth = f"n_inner is {inner}, and Meshwright computes GPT-2 with 4 * {width} = {4 * width}"
        raise fields.error(truth, f"a model with n_inner {4 * width}")


_GPT2 = (
    same("vocab_size", "vocab"),
    same("n_embd", "width"),
    same("n_layer", "layers"),
    same("n_head", "heads"),
    same("n_positions", "positions"),
    same("layer_norm_epsilon", "norm_epsilon", 1e-5),
    fixed("activation_function", "gelu_new", "gelu_pytorch_tanh"),
    fixed("tie_word_embeddings", True),
    fixed("scale_attn_weights", True, written=False),
    fixed("scale_attn_by_inverse_layer_idx", False, written=False),
    fixed("add_cross_attention", False, written=False),
    must(bias="learned"),
    Entry(_check_inner),
    without_effect("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "n_ctx"),
    without_effect(
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"
    ),
    without_effect("summary_use_proj"),
)
_GPT2_NAMES = {
    "embed": ("transformer.wte.weight", ("V", "D")),
    "positions": ("transformer.wpe.weight", ("T", "D")),
    "final_norm.scale": ("transformer.ln_f.weight", ("D",)),
    "final_norm.bias": ("transformer.ln_f.bias", ("D",)),
    "attention_norm": ("ln_1.weight", ("D",)),
    "attention_norm_bias": ("ln_1.bias", ("D",)),
    "query": ("attn.c_attn.weight", ("D", "NH+")),
    "key": ("attn.c_attn.weight", ("D", "NH+")),
    "value": ("attn.c_attn.weight", ("D", "NH+")),
    "query_bias": ("attn.c_attn.bias", ("NH+",)),
    "key_bias": ("attn.c_attn.bias", ("NH+",)),
    "value_bias": ("attn.c_attn.bias", ("NH+",)),
    "attention_out": ("attn.c_proj.weight", ("NH", "D")),
    "attention_out_bias": ("attn.c_proj.bias", ("D",)),
    "mlp_norm": ("ln_2.weight", ("D",)),
    "mlp_norm_bias": ("ln_2.bias", ("D",)),
    "up": ("mlp.c_fc.weight", ("D", "F")),
    "up_bias": ("mlp.c_fc.bias", ("F",)),
    "down": ("mlp.c_proj.weight", ("F", "D")),
    "down_bias": ("mlp.c_proj.bias", ("D",)),
}


# GPT-OSS: the experts of a layer in one tensor, gate and up by turns in its columns.
def _read_gpt_oss_rope(fields: Fields) -> dict[str, Any]:
    # `transformers` takes YaRN for a configuration without rotary fields,
    # and Meshwright writes them.
    fields.first("rope_scaling", "rope_parameters")
    rope = rope_fields(fields, 150000.0)
    return {"rope_theta": rope.theta, "rope_scaling": read_yarn(rope)}


def _write_gpt_oss_rope(c: Any) -> dict[str, Any]:
    written = write_yarn(c.rope_theta, c.rope_scaling)
    scaling = None if c.rope_scaling is None else written
    return {"rope_theta": c.rope_theta, "rope_scaling": scaling, "rope_parameters": written}


_GPT_OSS = (
    *(*_CORE, _KV_HEADS, own_head_size(64), _SILU),
    fixed("attention_bias", True),
    fixed("tie_word_embeddings", False),
    same("sliding_window", "sliding_window", 128),
    local_layers(1),
    Entry(_read_gpt_oss_rope, _write_gpt_oss_rope),
    _EPSILON_5,
    same("num_local_experts", "experts", other="num_experts"),
    same("num_experts_per_tok", "experts_per_token", other="experts_per_token"),
    same("intermediate_size", "expert_mlp"),
    same("swiglu_alpha", "swiglu_alpha", 1.702),
    same("swiglu_limit", "swiglu_limit", 7.0),
    _AUX_LOSS,
    # Names of the published files that repeat others.
    without_effect("experts_per_token", "initial_context_length", "num_experts"),
)
_GPT_OSS_NAMES = {
    **LLAMA,
    "sinks": ("self_attn.sinks", ("N",)),
    "router": ("mlp.router.weight", ("R", "D")),
    "router_bias": ("mlp.router.bias", ("R",)),
    "expert_gate": ("mlp.experts.gate_up_proj", ("E", "D", "F%")),
    "expert_up": ("mlp.experts.gate_up_proj", ("E", "D", "F%")),
    "expert_gate_bias": ("mlp.experts.gate_up_proj_bias", ("E", "F%")),
    "expert_up_bias": ("mlp.experts.gate_up_proj_bias", ("E", "F%")),
    "expert_down": ("mlp.experts.down_proj", ("E", "F", "D")),
    "expert_down_bias": ("mlp.experts.down_proj_bias", ("E", "D")),
}


# Llama 4's text model: the experts of a layer in one tensor, gates first.
def _llama4_layers(layers: int, no_rope: int, expert: int) -> dict[str, Any]:
    rotary = rotary_layers(layers, no_rope)
    return {
        "no_rope_layers": rotary,
        "layer_types": ["chunked_attention" if rotates else "full_attention" for rotates in rotary],
        "moe_layers": list(range(expert - 1, layers, expert)),
    }


def _read_llama4_layers(fields: Fields) -> dict[str, Any]:
    layers, step = fields.get("num_hidden_layers"), fields.get("interleave_moe_layer_step", 1)
    interval, rotary = read_no_rope(fields)
    moe = fields.get("moe_layers", list(range(step - 1, layers, step)))
    step = moe[0] + 1 if moe else step
    expected = _llama4_layers(layers, interval, step)
    found = {
        "no_rope_layers": rotary,
        "layer_types": fields.get("layer_types", expected["layer_types"]),
    }
    for name, kinds in {**found, "moe_layers": moe}.items():
        if kinds != expected[name] or (name == "moe_layers" and not moe):
            raise fields.error(
                f"{name} is {kinds}, and Meshwright computes layers that repeat: {expected[name]}",
                "a model whose layers without rotary embedding, and those with experts, are each "
                "n-th",
            )
    return {"no_rope_interval": interval, "expert_interval": step}


def _read_temperature(fields: Fields) -> dict[str, Any]:
    scale, tuned = fields.get("attn_scale", 0.1), fields.get("attn_temperature_tuning", True)
    return {"temperature_scale": scale if tuned else 0.0}


_LLAMA4 = (
    *(*_SIZES, scaled_rope(500000.0), _EPSILON_5),
    fixed("attention_bias", False),
    fixed("router_jitter_noise", 0.0, written=False),
    without_effect("for_llm_compressor", "attn_implementation"),
    Entry(
        _read_llama4_layers,
        lambda c: _llama4_layers(c.layers, c.no_rope_interval, c.expert_interval),
    ),
    Entry(
        write=lambda c: {
            "interleave_moe_layer_step": c.expert_interval,
            "model_type": "llama4_text",
        }
    ),
    same("intermediate_size", "expert_mlp"),
    same("intermediate_size_mlp", "mlp", 16384),
    same("attention_chunk_size", "attention_chunk", 8192),
    choice("use_qk_norm", "qk_l2_norm", {True: "rotary", False: "none"}, default=True),
    Entry(
        _read_temperature,
        lambda c: {
            "attn_scale": c.temperature_scale,
            "attn_temperature_tuning": c.temperature_scale != 0.0,
        },
    ),
    same("floor_scale", "temperature_floor", 8192, kind=int),
    same("num_local_experts", "experts", 16),
    same("num_experts_per_tok", "experts_per_token", 1),
    _AUX_LOSS,
)
_LLAMA4_NAMES = {
    **{
        name: (tensor.replace("mlp.", "feed_forward."), axes)
        for name, (tensor, axes) in LLAMA.items()
    },
    "router": ("feed_forward.router.weight", ("R", "D")),
    **_shared_expert("feed_forward.shared_expert"),
    "expert_gate": ("feed_forward.experts.gate_up_proj", ("E", "D", "F+")),
    "expert_up": ("feed_forward.experts.gate_up_proj", ("E", "D", "F+")),
    "expert_down": ("feed_forward.experts.down_proj", ("E", "F", "D")),
}

# Qwen3-Next: linear attention's projections in two tensors, by key head.
_LINEAR = "linear_attention"


def _read_qwen3_next_layers(fields: Fields) -> dict[str, Any]:
    # Both forms of the same fact: files have one of them, or both.
    interval = fields.get("full_attention_interval", 4)
    return {"full_attention_interval": read_local_layers(fields, interval - 1, _LINEAR) + 1}


def _write_qwen3_next_layers(c: Any) -> dict[str, Any]:
    interval = c.full_attention_interval
    return {
        "full_attention_interval": interval,
        "layer_types": layer_types(c.layers, interval - 1, _LINEAR),
    }


def _linear_and_full(kv_heads: int) -> tuple[Entry, ...]:
    """Returns the entries of linear and full attention by turns.
    kv_heads: where the configuration has none."""
    return (
        *_CORE,
        same("num_key_value_heads", "kv_heads", kv_heads),
        *(head_size(256), _SILU, _TIED),
        fixed("attention_bias", False),
        Entry(_read_qwen3_next_layers, _write_qwen3_next_layers),
        *(scaled_rope(fraction=0.25), _EPSILON),
        same("linear_num_key_heads", "linear_heads", 16),
        same("linear_num_value_heads", "linear_value_heads", 32),
        same("linear_key_head_dim", "linear_key_size", 128),
        same("linear_value_head_dim", "linear_value_size", 128),
        same("linear_conv_kernel_dim", "convolution_taps", 4),
    )


def _experts_and_shared(experts: int, experts_per_token: int) -> tuple[Entry, ...]:
    """Returns the entries of experts in all layers, and a shared one.
    The numbers stand for missing fields."""
    return (
        without_effect("intermediate_size"),  # of layers without experts
        _PLAIN_ROUTING,
        same("num_experts", "experts", experts),
        same("num_experts_per_tok", "experts_per_token", experts_per_token),
        same("moe_intermediate_size", "expert_mlp", 512),
        same("shared_expert_intermediate_size", "shared_mlp", 512),
        _AUX_LOSS,
    )


_QWEN3_NEXT = (
    *_linear_and_full(kv_heads=2),
    *_experts_and_shared(experts=512, experts_per_token=10),
    fixed("decoder_sparse_step", 1),
    fixed("mlp_only_layers", []),
    same("norm_topk_prob", "normalize_top_k", True),
)
# Fields of the published files that `transformers` does not read: what they say is what
# it computes.
_QWEN3_5_CONSTANTS = (
    fixed("attn_output_gate", True, written=False),
    fixed("output_gate_type", "swish", "silu", written=False),
    fixed("mamba_ssm_dtype", "float32", written=False),
    without_effect("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)
_QWEN3_5 = (*_linear_and_full(kv_heads=4), _MLP, *_QWEN3_5_CONSTANTS)
_QWEN3_5_MOE = (
    *_linear_and_full(kv_heads=2),
    *_experts_and_shared(experts=256, experts_per_token=8),
    fixed("norm_topk_prob", True, written=False),
    must(normalize_top_k=True),
    *_QWEN3_5_CONSTANTS,
)
_FUSED = {
    "self_attn.q_proj.weight": {"blocks.query": "NH/", "blocks.query_gate": "NH/"},
    "linear_attn.in_proj_qkvz.weight": {
        "query": "NH/",
        "key": "NH/",
        "value": "NGH/",
        "value_gate": "NGH/",
    },
    "linear_attn.in_proj_ba.weight": {"rate": "NG/", "step": "NG/"},
}
"""Tensor -> the projections in it, of which it has the rows of the first head, then those
of the next."""
_TAPS = "linear_attn.conv1d.weight"
_QWEN3_NEXT_NAMES = {
    **LLAMA,
    **_shared_expert("mlp.shared_expert"),
    "shared_scale": ("mlp.shared_expert_gate.weight", ("Q", "D")),
    "blocks.key": LLAMA["key"],
    "blocks.value": LLAMA["value"],
    "blocks.attention_out": LLAMA["attention_out"],
    "attention_out": ("linear_attn.out_proj.weight", ("D", "NGH")),
    "step_bias": ("linear_attn.dt_bias", ("NG",)),
    "a_log": ("linear_attn.A_log", ("NG",)),
    "value_norm": ("linear_attn.norm.weight", ("H",)),
    "query_taps": (_TAPS, ("NH+", "", "W")),
    "key_taps": (_TAPS, ("NH+", "", "W")),
    "value_taps": (_TAPS, ("NGH+", "", "W")),
    **{
        name: (tensor, (axes, "D"))
        for tensor, parts in _FUSED.items()
        for name, axes in parts.items()
    },
}
# Qwen3.5: the projections of linear attention in four tensors, each head after head.
_IN_PROJ = {
    name: f"linear_attn.in_proj_{tensor}.weight"
    for name, tensor in (("mixed", "qkv"), ("gate", "z"), ("rate", "b"), ("step", "a"))
}
_QWEN3_5_NAMES = {
    **_QWEN3_NEXT_NAMES,
    "query": (_IN_PROJ["mixed"], ("NH+", "D")),
    "key": (_IN_PROJ["mixed"], ("NH+", "D")),
    "value": (_IN_PROJ["mixed"], ("NGH+", "D")),
    "value_gate": (_IN_PROJ["gate"], ("NGH", "D")),
    "rate": (_IN_PROJ["rate"], ("NG", "D")),
    "step": (_IN_PROJ["step"], ("NG", "D")),
}

# Kimi Linear. The published files state linear attention in `linear_attn_config`,
# with layers numbered from 1.
_LINEAR_CONFIG = "linear_attn_config"
_LINEAR_LAYERS = ("full_attn_layers", "kda_layers")
_LINEAR_SIZES = {
    "linear_heads": ("num_heads", "linear_num_heads", 32),
    "linear_head_size": ("head_dim", "linear_head_dim", 128),
    "convolution_taps": ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
}
"""Field of the model -> its name there, its name in configurations of `transformers` 5,
and its default."""


def _full_layers_of_kimi(layers: int, interval: int) -> list[int]:
    """Returns the layers with full attention, numbered from 1: each `interval`-th, and the last."""
    return [n for n in range(1, layers + 1) if n % interval == 0 or n == layers]


def _read_linear_config(fields: Fields) -> Mapping[str, Any]:
    """Returns `linear_attn_config`.
    Raises WeightsError for a field that is not known, or a layer in no list or two."""
    stated = fields.mapping(_LINEAR_CONFIG)
    known = {*_LINEAR_LAYERS, *(name for name, _, _ in _LINEAR_SIZES.values())}
    unknown = sorted(stated.keys() - known)
    if unknown:
        raise fields.error(
            f"its {_LINEAR_CONFIG} has {', '.join(unknown)}, which Meshwright does not compute: "
            "what the model computes may depend on it",
            f"a {_LINEAR_CONFIG} of {', '.join(sorted(known))}",
        )
    full, linear = (stated.get(name, []) for name in _LINEAR_LAYERS)
    layers = fields.get("num_hidden_layers")
    if (full or linear) and sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise fields.error(
            f"of {layers} layers full_attn_layers has {full}, and kda_layers has {linear}",
            f"a {_LINEAR_CONFIG} that has each layer from 1 to {layers} in one of the two",
        )
    return stated


def _read_kimi_layers(fields: Fields) -> dict[str, Any]:
    layers = fields.get("num_hidden_layers")
    of_config = _read_linear_config(fields).get("full_attn_layers")
    # `transformers` takes these where a configuration names no layers.
    usual = of_config or list(range(5, layers + 1, 4))
    kinds = fields.get(
        "layer_types",
        ["full_attention" if n in usual else _LINEAR for n in range(1, layers + 1)],
    )
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    interval = full[0] if full else layers
    if (of_config or full) != full or full != _full_layers_of_kimi(layers, interval):
        raise fields.error(
            f"layers {of_config or full} of {layers} have full attention",
            "a model with full attention in each n-th layer, and in the last",
        )
    return {"full_attention_interval": interval}


def _read_kimi_dense(fields: Fields) -> dict[str, Any]:
    layers = fields.get("num_hidden_layers")
    dense = fields.get("first_k_dense_replace", 1)
    kinds = fields.get("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    found = kinds.count("dense")
    if kinds != ["dense"] * found + ["sparse"] * (layers - found):
        raise fields.error(f"mlp_layer_types is {kinds}", "a model whose dense layers come first")
    return {"dense_layers": found}


def _read_kimi_sizes(fields: Fields) -> dict[str, Any]:
    stated = fields.mapping(_LINEAR_CONFIG)
    return {
        field: stated.get(name, fields.get(newer, default))
        for field, (name, newer, default) in _LINEAR_SIZES.items()
    }


def _write_kimi_linear(c: Any) -> dict[str, Any]:
    full = _full_layers_of_kimi(c.layers, c.full_attention_interval)
    linear = {
        "full_attn_layers": full,
        "kda_layers": [n for n in range(1, c.layers + 1) if n not in full],
        **{name: getattr(c, field) for field, (name, _, _) in _LINEAR_SIZES.items()},
    }
    return {_LINEAR_CONFIG: linear, "first_k_dense_replace": c.dense_layers}


_KIMI_LINEAR = (
    *(*_CORE, _MLP, _EPSILON_5, _SILU),
    fixed("tie_word_embeddings", False),
    must(embedding="untied"),
    fixed("attention_bias", False),
    *_LATENT_ATTENTION,
    Entry(_read_kimi_layers, _write_kimi_linear),
    Entry(_read_kimi_sizes),
    Entry(_read_kimi_dense),
    same("num_experts", "experts", 256, other="num_local_experts"),
    same("num_experts_per_token", "experts_per_token", 8, other="num_experts_per_tok"),
    same("num_shared_experts", "shared_experts", 1, other="n_shared_experts"),
    same("moe_intermediate_size", "expert_mlp"),
    same("routed_scaling_factor", "routed_scaling", 2.446, kind=float),
    same("moe_renormalize", "normalize_top_k", True),
    same("num_expert_group", "expert_groups", 1),
    same("topk_group", "topk_groups", 1),
    # Fields of the published files that `transformers` does not read: what they say is what
    # it computes.
    fixed("moe_router_activation_func", "sigmoid"),
    fixed("mla_use_nope", True),
    fixed("moe_layer_freq", 1),
    fixed("use_grouped_topk", True, written=False),
    fixed("num_nextn_predict_layers", 0, written=False),
    without_effect("rope_theta", "rope_scaling", "rope_parameters", "model_max_length"),
    # `transformers` takes the published number where it is missing,
    # which may be beyond the vocabulary.
    Entry(write=lambda c: {"pad_token_id": None}),
    must(router_score="sigmoid", dispatch="dropless"),
    given(
        router_z_loss_weight=0.0,
        bias_update_rate=_BIAS_UPDATE_RATE,
        aux_loss_weight=_V3_BALANCE_WEIGHT,
    ),
    only_if(lambda c: c.shared_experts > 0),
)
_KIMI_LINEAR_NAMES = {
    **_DEEPSEEK_NAMES,
    **{
        name: _MIXTRAL_NAMES[name] for name in ("router", "expert_gate", "expert_up", "expert_down")
    },
    "router_bias": ("block_sparse_moe.gate.e_score_correction_bias", ("R",)),
    **_shared_expert("block_sparse_moe.shared_experts"),
    "blocks.attention_out": LLAMA["attention_out"],
    "dense_blocks.attention_out": LLAMA["attention_out"],
    "attention_out": ("self_attn.o_proj.weight", ("D", "NGH")),
    "key": ("self_attn.k_proj.weight", ("NH", "D")),
    "value": ("self_attn.v_proj.weight", ("NGH", "D")),
    "rate": ("self_attn.b_proj.weight", ("NG", "D")),
    "step_down": ("self_attn.f_a_proj.weight", ("Z", "D")),
    "step_up": ("self_attn.f_b_proj.weight", ("NGH", "Z")),
    "step_bias": ("self_attn.dt_bias", ("NGH",)),
    "a_log": ("self_attn.A_log", ("", "", "NG", "")),
    "gate_down": ("self_attn.g_a_proj.weight", ("Z", "D")),
    "gate_up": ("self_attn.g_b_proj.weight", ("NGH", "Z")),
    "value_norm": ("self_attn.o_norm.weight", ("H",)),
    "query_taps": ("self_attn.q_conv1d.weight", ("NH", "", "W")),
    "key_taps": ("self_attn.k_conv1d.weight", ("NH", "", "W")),
    "value_taps": ("self_attn.v_conv1d.weight", ("NGH", "", "W")),
}
_KIMI_LINEAR_FORMS = {
    "one word for both kinds of second halves": {
        name: (LLAMA[name][0].replace("mlp.", "block_sparse_moe."), LLAMA[name][1])
        for name in ("gate", "up", "down")
    }
}
"""`transformers` 5 writes the dense layers under the word
that the published files have for experts."""

_ALL = (
    Architecture("DeepseekV2ForCausalLM", "deepseek_v2", Deepseek, _DEEPSEEK_V2, _DEEPSEEK_NAMES),
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        Deepseek,
        _DEEPSEEK_V3,
        _DEEPSEEK_NAMES,
        computed=(*_COMPUTED, _MTP_COPIES),
        packed=FP8,
        other_types=("kimi_k2",),
    ),
    Architecture(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        DeepseekSparse,
        _DEEPSEEK_V32,
        _SPARSE_DEEPSEEK_NAMES,
        computed=(*_COMPUTED, _MTP_COPIES),
        packed=FP8,
    ),
    Architecture(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        DeepseekSparse,
        _GLM_MOE_DSA,
        _SPARSE_DEEPSEEK_NAMES,
        computed=(*_COMPUTED, _MTP_COPIES),
        packed=FP8,
    ),
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        Gpt2,
        _GPT2,
        _GPT2_NAMES,
        "transformer.h.{layer}.",
        ("lm_head.weight", "transformer.wte.weight"),
        (r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        "transformer.",
    ),
    # What is left out is the layer that predicts the token
    # after the next: `transformers` does not read it either.
    Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        Glm4Moe,
        _GLM4_MOE,
        _GLM4_MOE_NAMES,
        left_out=(r"model\.layers\.(46|92)\..*",),
    ),
    Architecture(
        "GptOssForCausalLM", "gpt_oss", GptOss, _GPT_OSS, _GPT_OSS_NAMES, tied=None, packed=MXFP4
    ),
    Architecture("Gemma2ForCausalLM", "gemma2", Gemma2, _GEMMA2, _GEMMA_NAMES),
    Architecture("Gemma3ForCausalLM", "gemma3_text", Gemma3, _GEMMA3, _GEMMA_NAMES),
    Architecture("Gemma4ForCausalLM", "gemma4_text", Gemma4, _GEMMA4, _GEMMA4_NAMES),
    Architecture(
        "Gemma4UnifiedForCausalLM", "gemma4_unified_text", Gemma4, _GEMMA4_UNIFIED, _GEMMA4_NAMES
    ),
    Architecture(
        "LlamaForCausalLM",
        "llama",
        Llama,
        (
            *_LLAMA,
            _BEFORE,
            _NO_QK_NORM,
            must(sliding_window=None),
            _BIASES,
            flag("mlp_bias", "mlp_bias"),
        ),
    ),
    Architecture(
        "MistralForCausalLM",
        "mistral",
        Llama,
        (*_LLAMA, _BEFORE, _NO_BIASES, _NO_QK_NORM, _MISTRAL_WINDOW),
    ),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        Llama,
        (
            *_LLAMA,
            _BEFORE,
            must(qkv_bias="learned", out_bias="none", mlp_bias="none", qk_norm="none"),
            _QWEN_WINDOW,
        ),
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        Llama,
        (*_LLAMA, _BEFORE, must(qk_norm="rms", mlp_bias="none"), _BIASES, _QWEN_WINDOW),
    ),
    Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        Llama,
        (*_OLMO, scaled_rope(), must(sliding_window=None), fixed("clip_qkv", None, written=False)),
        _OLMO_NAMES,
    ),
    Architecture(
        "Olmo3ForCausalLM",
        "olmo3",
        Olmo3,
        (
            *(*_OLMO, Entry(_read_olmo3_rope, _write_olmo3_rope)),
            *(same("sliding_window", "sliding_window", 4096), local_layers(3)),
        ),
        _OLMO_NAMES,
    ),
    Architecture("GraniteForCausalLM", "granite", Granite, _GRANITE),
    Architecture(
        "GraniteMoeForCausalLM", "granitemoe", GraniteMoe, _GRANITE_MOE, _GRANITE_MOE_NAMES
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        GraniteHybrid,
        _GRANITE_HYBRID,
        _GRANITE_HYBRID_NAMES,
    ),
    Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        NemotronH,
        _NEMOTRON_H,
        _NEMOTRON_H_NAMES,
        layer="backbone.layers.{layer}.",
        tied=None,
        left_out=(r"mtp\..*",),
        names_by_fields=_names_of_latent_experts,
    ),
    Architecture("ArceeForCausalLM", "arcee", Arcee, _ARCEE),
    Architecture("CohereForCausalLM", "cohere", Cohere, _COHERE, _COHERE_NAMES),
    Architecture("Cohere2ForCausalLM", "cohere2", Cohere2, _COHERE2, _COHERE_NAMES),
    Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", Hunyuan, _HUNYUAN, _HUNYUAN_NAMES
    ),
    Architecture("Ministral3ForCausalLM", "ministral3", Ministral3, _MINISTRAL3),
    Architecture(
        "Mistral4ForCausalLM",
        "mistral4",
        Mistral4,
        _MISTRAL4,
        {**_DEEPSEEK_NAMES, **_PACKED_FORMS["packed experts"]},
        forms=_PACKED_FORMS,
    ),
    Architecture(
        "KimiLinearForCausalLM",
        "kimi_linear",
        KimiLinear,
        _KIMI_LINEAR,
        _KIMI_LINEAR_NAMES,
        forms=_KIMI_LINEAR_FORMS,
    ),
    Architecture("Phi3ForCausalLM", "phi3", Llama, _PHI3, _PHI3_NAMES),
    Architecture("SmolLM3ForCausalLM", "smollm3", SmolLM3, _SMOLLM3),
    Architecture("MixtralForCausalLM", "mixtral", Mixtral, _MIXTRAL, _MIXTRAL_NAMES),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", Mixtral, _QWEN3_MOE),
    Architecture("OlmoeForCausalLM", "olmoe", Mixtral, _OLMOE, _OLMOE_NAMES),
    Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        Qwen2Moe,
        _QWEN2_MOE,
        {
            **LLAMA,
            **_shared_expert("mlp.shared_expert"),
            "shared_scale": ("mlp.shared_expert_gate.weight", ("Q", "D")),
        },
    ),
    Architecture("SeedOssForCausalLM", "seed_oss", Llama, _SEED_OSS),
    Architecture("Dots1ForCausalLM", "dots1", Glm4Moe, _DOTS1, _GLM4_MOE_NAMES),
    Architecture(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        Glm4Moe,
        _MINIMAX_M2,
        _MINIMAX_M2_NAMES,
        packed=FP8,
        left_out=(r"mtp\..*",),
    ),
    Architecture(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        Deepseek,
        _GLM4_MOE_LITE,
        _DEEPSEEK_NAMES,
        computed=(*_COMPUTED, _MTP_COPIES),
    ),
    # The text model of Qwen3-VL, which has no class of its own with an unembedding.
    Architecture(
        "Qwen3VLMoeTextModel",
        "qwen3_vl_moe_text",
        Mixtral,
        _QWEN3_VL_MOE,
        {**LLAMA, **_PACKED_FORMS["packed experts"]},
        forms=_PACKED_FORMS,
    ),
    Architecture("Llama4ForCausalLM", "llama4_text", Llama4, _LLAMA4, _LLAMA4_NAMES),
    Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        Qwen3Next,
        _QWEN3_NEXT,
        _QWEN3_NEXT_NAMES,
        left_out=(r"mtp\..*",),
    ),
    Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        Qwen35,
        _QWEN3_5,
        _QWEN3_5_NAMES,
        left_out=(r"mtp\..*",),
    ),
    Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        Qwen35Moe,
        _QWEN3_5_MOE,
        _QWEN3_5_NAMES,
        left_out=(r"mtp\..*",),
        forms=_PACKED_FORMS,
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}
"""All architectures by name, and those added from outside the package;
the first that can express a model writes it."""


def architecture_of(model: Model) -> tuple[Architecture, dict[str, Any]]:
    """Returns the architecture that can express `model`, and its configuration.
    Raises WeightsError where none can."""
    for architecture in ARCHITECTURES.values():
        config = architecture.write(model)
        if config is not None:
            names = {"architectures": [architecture.name], "model_type": architecture.model_type}
            return architecture, {**names, **config}
    raise WeightsError(
        f"a {type(model).__name__} as a Hugging Face model",
        "no architecture of `transformers` that Meshwright knows has this combination of fields",
        f"a model that one of these can express: {', '.join(sorted(ARCHITECTURES))}",
    )
