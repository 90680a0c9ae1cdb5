"""GPT-2 as `transformers` names it: projections as [inputs, outputs], query, key and value fused."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.table import Entry, fixed, must, same, without_effect
from meshwright.models.families.gpt2 import Gpt2


def _read_inner(fields: Fields) -> dict[str, Any]:
    width = fields.get("n_embd")
    if fields.get("n_inner", 4 * width) != 4 * width:
        raise WeightsError(
            f"reading {fields.file}",
            f"n_inner is {fields.get('n_inner')}, and Meshwright computes GPT-2 with 4 * {width} = {4 * width}",
            f"a model with n_inner {4 * width}",
        )
    return {}


_TABLE = (
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
    Entry(_read_inner),
    without_effect("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "n_ctx"),
    without_effect("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    without_effect("summary_use_proj"),
)
_NAMES = {
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

ARCHITECTURES = (
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        Gpt2,
        _TABLE,
        _NAMES,
        "transformer.h.{layer}.",
        ("lm_head.weight", "transformer.wte.weight"),
        (r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        "transformer.",
    ),
)
