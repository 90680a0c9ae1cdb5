"""GPT-2 as `transformers` names it: projections as [inputs, outputs], query, key and value fused."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.families.gpt2 import Gpt2
from meshwright.sharding.params import named_leaves


def _read(fields: Fields) -> Gpt2:
    fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    fields.require("tie_word_embeddings", True)
    fields.without_effect(
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "n_ctx",
    )  # fmt: skip
    width = fields.get("n_embd")
    if fields.get("n_inner", 4 * width) != 4 * width:
        raise WeightsError(
            f"reading {fields.file}",
            f"n_inner is {fields.get('n_inner')}, and Meshwright computes GPT-2 with 4 * {width} = {4 * width}",
            f"a model with n_inner {4 * width}",
        )
    return Gpt2(
        fields.get("vocab_size"), width, fields.get("n_layer"), fields.get("n_head"), fields.get("n_positions"),
        norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
    )  # fmt: skip


def _write(c: Any) -> dict[str, Any] | None:
    if type(c) is not Gpt2 or c.bias == "none":
        return None
    return {
        "vocab_size": c.vocab,
        "n_embd": c.width,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_positions": c.positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_epsilon,
        "tie_word_embeddings": True,
    }


_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention_norm": ("ln_1.weight", ("D",)),
    "attention_norm_bias": ("ln_1.bias", ("D",)),
    "attention_out": ("attn.c_proj.weight", ("NH", "D")),
    "attention_out_bias": ("attn.c_proj.bias", ("D",)),
    "mlp_norm": ("ln_2.weight", ("D",)),
    "mlp_norm_bias": ("ln_2.bias", ("D",)),
    "up": ("mlp.c_fc.weight", ("D", "F")),
    "up_bias": ("mlp.c_fc.bias", ("F",)),
    "down": ("mlp.c_proj.weight", ("F", "D")),
    "down_bias": ("mlp.c_proj.bias", ("D",)),
}


def _tensors(c: Gpt2) -> dict[str, StoredTensor]:
    width, layers = c.width, tuple(range(c.layers))
    stored = {
        "embed": StoredTensor("transformer.wte.weight", ("V", "D")),
        "positions": StoredTensor("transformer.wpe.weight", ("T", "D")),
        "final_norm.scale": StoredTensor("transformer.ln_f.weight", ("D",)),
        "final_norm.bias": StoredTensor("transformer.ln_f.bias", ("D",)),
    }
    for name, (stored_name, axes) in _NAMES.items():
        stored[f"blocks.{name}"] = StoredTensor("transformer.h.{layer}." + stored_name, axes, layers)
    # [D, 3 N H]: the queries of all heads, then the keys, then the values.
    for place, name in enumerate(("query", "key", "value")):
        columns = slice(place * width, (place + 1) * width)
        fused = "transformer.h.{layer}.attn.c_attn."
        stored[f"blocks.{name}"] = StoredTensor(
            fused + "weight", ("D", "NH"), layers, (1, columns), (width, 3 * width)
        )  # fmt: skip
        stored[f"blocks.{name}_bias"] = StoredTensor(fused + "bias", ("NH",), layers, (0, columns), (3 * width,))
    return {path: stored[path] for path in named_leaves(c.params())}


ARCHITECTURES = (
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        _read,
        _write,
        _tensors,
        ("lm_head.weight", "transformer.wte.weight"),
        (r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        "transformer.",
    ),
)
