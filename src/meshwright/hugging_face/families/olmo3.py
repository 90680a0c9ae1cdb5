"""OLMo 3 as `transformers` names it: OLMo 2's tensors, kinds of layers, and rotary fields for each kind."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.layer_types import layer_types, read_local_layers
from meshwright.hugging_face.families.llama import (
    COMPUTED,
    OLMO2,
    TIED,
    attention_bias,
    llama_tensors,
    read_biases,
    write_sizes,
)
from meshwright.hugging_face.families.rope import rope_fields
from meshwright.hugging_face.families.yarn import read_yarn, write_yarn
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.families.olmo3 import Olmo3


def _read(fields: Fields) -> Olmo3:
    fields.require("hidden_act", "silu")
    layers, heads = fields.get("num_hidden_layers"), fields.get("num_attention_heads")
    rope, local = (rope_fields(fields, 500000.0, kind) for kind in ("full_attention", "sliding_attention"))
    if local.kind != "default" or local.theta != rope.theta:
        raise WeightsError(
            f"reading {fields.file}",
            f"rotary frequencies of local layers have the base {local.theta:g} and the scaling {local.kind!r}, those "
            f"of global ones the base {rope.theta:g}",
            "the same rope_theta in both, and YaRN or nothing in global layers",
        )
    return Olmo3(
        fields.get("vocab_size"), fields.get("hidden_size"), layers, heads,
        kv_heads=fields.get("num_key_value_heads", heads), mlp=fields.get("intermediate_size"),
        rope_theta=rope.theta, norm_epsilon=fields.get("rms_norm_eps", 1e-5),
        sliding_window=fields.get("sliding_window", 4096),
        embedding="tied" if fields.get("tie_word_embeddings", False) else "untied",
        local_layers=read_local_layers(fields, layers, 3),
        yarn=read_yarn(fields, rope),
        **read_biases(fields),
    )  # fmt: skip


def _write(c: Any) -> dict[str, Any] | None:
    biased = attention_bias(c) if type(c) is Olmo3 and c.mlp_bias == "none" else None
    if biased is None or c.norm_place != "after" or c.qk_norm != "rms_heads":
        return None
    sizes = write_sizes(c)
    # `transformers` computes this architecture with heads of width / heads.
    if sizes.pop("head_dim") * c.heads != c.width:
        return None
    return {
        **sizes,
        "attention_bias": biased,
        "sliding_window": c.sliding_window,
        "layer_types": layer_types(c.layers, c.local_layers),
        "rope_scaling": None if c.yarn is None else write_yarn(c.rope_theta, c.yarn),
        "rope_parameters": {
            "sliding_attention": write_yarn(c.rope_theta, None),
            "full_attention": write_yarn(c.rope_theta, c.yarn),
        },
    }


def _tensors(c: Olmo3) -> dict[str, StoredTensor]:
    return llama_tensors(c, {"blocks": range(c.layers)}, OLMO2)


ARCHITECTURES = (Architecture("Olmo3ForCausalLM", "olmo3", _read, _write, _tensors, TIED, COMPUTED),)
