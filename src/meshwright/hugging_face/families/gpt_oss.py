"""GPT-OSS as `transformers` names it: the experts of a layer in one tensor, gate and up by turns in its columns."""

from typing import Any

from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.families.layer_types import layer_types, read_local_layers
from meshwright.hugging_face.families.llama import COMPUTED, LAYER
from meshwright.hugging_face.families.rope import rope_fields
from meshwright.hugging_face.families.yarn import read_yarn, write_yarn
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.mxfp4 import PACKED
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.decoder import head_size_of
from meshwright.models.families.gpt_oss import GptOss
from meshwright.sharding.params import named_leaves


def _read(fields: Fields) -> GptOss:
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", True)
    fields.require("tie_word_embeddings", False)
    layers, heads = fields.get("num_hidden_layers"), fields.get("num_attention_heads")
    # `transformers` takes YaRN for a configuration without rotary fields, and Meshwright writes them.
    fields.first("rope_scaling", "rope_parameters")
    rope = rope_fields(fields, 150000.0)
    # Names of the published files that repeat others.
    fields.without_effect("experts_per_token", "initial_context_length", "num_experts", "head_dim")
    width, size = fields.get("hidden_size"), fields.get("head_dim", 64)
    return GptOss(
        fields.get("vocab_size"), width, layers, heads, fields.get("num_key_value_heads", heads), size,
        local_layers=read_local_layers(fields, layers, 1), sliding_window=fields.get("sliding_window", 128),
        rope_theta=rope.theta,
        rope_scaling=read_yarn(fields, rope),
        norm_epsilon=fields.get("rms_norm_eps", 1e-5), experts=fields.first("num_local_experts", "num_experts"),
        experts_per_token=fields.first("num_experts_per_tok", "experts_per_token"),
        expert_mlp=fields.get("intermediate_size"), swiglu_alpha=fields.get("swiglu_alpha", 1.702),
        swiglu_limit=fields.get("swiglu_limit", 7.0), aux_loss_weight=fields.get("router_aux_loss_coef", 0.001),
    )  # fmt: skip


def _write(c: Any) -> dict[str, Any] | None:
    if type(c) is not GptOss:
        return None
    return {
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": head_size_of(c),
        "intermediate_size": c.expert_mlp,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "num_local_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "swiglu_alpha": c.swiglu_alpha,
        "swiglu_limit": c.swiglu_limit,
        "router_aux_loss_coef": c.aux_loss_weight,
        "sliding_window": c.sliding_window,
        "layer_types": layer_types(c.layers, c.local_layers),
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else write_yarn(c.rope_theta, c.rope_scaling),
        "rope_parameters": write_yarn(c.rope_theta, c.rope_scaling),
    }


_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention_norm": ("input_layernorm.weight", ("D",)),
    "query": ("self_attn.q_proj.weight", ("NH", "D")),
    "key": ("self_attn.k_proj.weight", ("KH", "D")),
    "value": ("self_attn.v_proj.weight", ("KH", "D")),
    "query_bias": ("self_attn.q_proj.bias", ("NH",)),
    "key_bias": ("self_attn.k_proj.bias", ("KH",)),
    "value_bias": ("self_attn.v_proj.bias", ("KH",)),
    "sinks": ("self_attn.sinks", ("N",)),
    "attention_out": ("self_attn.o_proj.weight", ("D", "NH")),
    "attention_out_bias": ("self_attn.o_proj.bias", ("D",)),
    "mlp_norm": ("post_attention_layernorm.weight", ("D",)),
    "router": ("mlp.router.weight", ("R", "D")),
    "router_bias": ("mlp.router.bias", ("R",)),
    "expert_down": ("mlp.experts.down_proj", ("E", "F", "D")),
    "expert_down_bias": ("mlp.experts.down_proj_bias", ("E", "D")),
}


def _tensors(c: GptOss) -> dict[str, StoredTensor]:
    layers, E, D, F = tuple(range(c.layers)), c.experts, c.width, c.expert_mlp
    stored = {
        "embed": StoredTensor("model.embed_tokens.weight", ("V", "D")),
        "final_norm": StoredTensor("model.norm.weight", ("D",)),
        "unembed": StoredTensor("lm_head.weight", ("V", "D")),
    }
    for name, (tensor, axes) in _NAMES.items():
        stored[f"blocks.{name}"] = StoredTensor(LAYER + tensor, axes, layers)
    fused = LAYER + "mlp.experts.gate_up_proj"
    for first, name in enumerate(("gate", "up")):
        columns = slice(first, None, 2)
        stored[f"blocks.expert_{name}"] = StoredTensor(fused, ("E", "D", "F"), layers, (2, columns), (E, D, 2 * F))
        stored[f"blocks.expert_{name}_bias"] = StoredTensor(
            fused + "_bias", ("E", "F"), layers, (1, columns), (E, 2 * F)
        )
    return {path: stored[path] for path in named_leaves(c.params())}


ARCHITECTURES = (Architecture("GptOssForCausalLM", "gpt_oss", _read, _write, _tensors, None, COMPUTED, packed=PACKED),)
