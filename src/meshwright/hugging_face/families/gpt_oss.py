"""GPT-OSS as `transformers` names it: the experts of a layer in one tensor, gate and up by turns in its columns."""

from typing import Any

from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.llama import CORE, KV_HEADS, aux_loss, epsilon
from meshwright.hugging_face.families.rope import read_yarn, rope_fields, write_yarn
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.quantised import MXFP4
from meshwright.hugging_face.table import LLAMA, Entry, fixed, local_layers, same, without_effect
from meshwright.models.decoder import head_size_of
from meshwright.models.families.gpt_oss import GptOss


def _read_rope(fields: Fields) -> dict[str, Any]:
    # `transformers` takes YaRN for a configuration without rotary fields, and Meshwright writes them.
    fields.first("rope_scaling", "rope_parameters")
    rope = rope_fields(fields, 150000.0)
    return {"rope_theta": rope.theta, "rope_scaling": read_yarn(fields, rope)}


def _write_rope(c: Any) -> dict[str, Any]:
    written = write_yarn(c.rope_theta, c.rope_scaling)
    scaling = None if c.rope_scaling is None else written
    return {"rope_theta": c.rope_theta, "rope_scaling": scaling, "rope_parameters": written}


_TABLE = (
    *CORE,
    KV_HEADS,
    Entry(lambda fields: {"head_size": fields.get("head_dim", 64)}, lambda c: {"head_dim": head_size_of(c)}),
    fixed("hidden_act", "silu"),
    fixed("attention_bias", True),
    fixed("tie_word_embeddings", False),
    same("sliding_window", "sliding_window", 128),
    local_layers(1),
    Entry(_read_rope, _write_rope),
    epsilon(1e-5),
    same("num_local_experts", "experts", other="num_experts"),
    same("num_experts_per_tok", "experts_per_token", other="experts_per_token"),
    same("intermediate_size", "expert_mlp"),
    same("swiglu_alpha", "swiglu_alpha", 1.702),
    same("swiglu_limit", "swiglu_limit", 7.0),
    aux_loss(),
    # Names of the published files that repeat others.
    without_effect("experts_per_token", "initial_context_length", "num_experts"),
)
_NAMES = {
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

ARCHITECTURES = (Architecture("GptOssForCausalLM", "gpt_oss", GptOss, _TABLE, _NAMES, tied=None, packed=MXFP4),)
