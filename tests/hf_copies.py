"""Models of `transformers` with the weights of ours, small and random, for comparisons of generated text."""

import os
import warnings
from typing import Any

import numpy as np
from tiny_runs import VOCAB

from meshwright.models.families.gpt2 import Gpt2
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.model import Model

ENDLESS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
"""Texts go on for as many tokens as are asked for."""

MODELS: dict[str, Model] = {
    "gpt2": Gpt2(VOCAB, 64, 2, 8, vocab_multiple=16, positions=64),
    "llama": Llama(VOCAB, 64, 2, 8, vocab_multiple=16, kv_heads=4, mlp=96),
    "qwen-like": Llama(
        VOCAB, 64, 2, 8, vocab_multiple=16, kv_heads=4, mlp=96, qkv_bias="learned", embedding="tied", sliding_window=5
    ),
    "mixtral": Mixtral(VOCAB, 64, 2, 8, vocab_multiple=16, kv_heads=4, experts=8, experts_per_token=2, expert_mlp=32),
}


def copy_of(name: str, params: Any) -> Any:
    """The model `name` of `transformers` with `params`, host arrays with one row per layer."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers as hf

        torch.set_num_threads(1)
        transformers_model = _build(name, MODELS[name], hf).float().eval()
        state = transformers_model.state_dict()
        ours = _gpt2_names(params) if name == "gpt2" else _llama_names(params)
        for key, value in ours.items():
            assert state[key].shape == value.shape, (key, state[key].shape, value.shape)
            state[key].copy_(torch.tensor(np.ascontiguousarray(value)))
        left = set(state) - set(ours) - {"lm_head.weight"}
        assert not left, left
    return transformers_model


def greedy(model: Any, prompt: np.ndarray, tokens: int) -> list[int]:
    """Tokens that `transformers` generates after one prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        ids = torch.tensor(prompt[None].astype(np.int64))
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def _build(name: str, c: Any, hf: Any) -> Any:
    if name == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCAB, n_embd=c.width, n_layer=c.layers, n_head=c.heads, n_positions=c.positions, **ENDLESS
            )
        )
    common = {
        "vocab_size": VOCAB, "hidden_size": c.width, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "rms_norm_eps": c.norm_epsilon, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "tie_word_embeddings": c.embedding == "tied", "attn_implementation": "eager", **ENDLESS,
    }  # fmt: skip
    if name == "mixtral":
        config = hf.MixtralConfig(
            intermediate_size=c.expert_mlp, num_local_experts=c.experts, num_experts_per_tok=c.experts_per_token,
            sliding_window=None, **common,
        )  # fmt: skip
        return hf.MixtralForCausalLM(config)
    if name == "qwen-like":
        config = hf.Qwen2Config(
            intermediate_size=c.mlp, use_sliding_window=True, sliding_window=c.sliding_window, max_window_layers=0,
            **common,
        )  # fmt: skip
        return hf.Qwen2ForCausalLM(config)
    return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=c.mlp, **common))


def _llama_names(params: Any) -> dict[str, np.ndarray]:
    blocks = params["blocks"]
    names = {"model.embed_tokens.weight": params["embed"][:VOCAB], "model.norm.weight": params["final_norm"]}
    if "unembed" in params:
        names["lm_head.weight"] = params["unembed"][:VOCAB]
    for layer in range(blocks["query"].shape[0]):
        w, at = {name: value[layer] for name, value in blocks.items()}, f"model.layers.{layer}"
        width = w["query"].shape[0]
        names |= {
            f"{at}.input_layernorm.weight": w["attention_norm"],
            f"{at}.post_attention_layernorm.weight": w["mlp_norm"],
            f"{at}.self_attn.o_proj.weight": w["attention_out"].reshape(-1, width).T,
        }
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            names[f"{at}.self_attn.{theirs}_proj.weight"] = w[ours].reshape(width, -1).T
            if f"{ours}_bias" in w:
                names[f"{at}.self_attn.{theirs}_proj.bias"] = w[f"{ours}_bias"].reshape(-1)
        if "router" in w:
            up = np.concatenate([w["expert_gate"], w["expert_up"]], -1)
            names |= {
                f"{at}.mlp.gate.weight": w["router"].T,
                f"{at}.mlp.experts.gate_up_proj": up.swapaxes(1, 2),
                f"{at}.mlp.experts.down_proj": w["expert_down"].swapaxes(1, 2),
            }
        else:
            names |= {f"{at}.mlp.{n}_proj.weight": w[n].T for n in ("gate", "up", "down")}
    return names


def _gpt2_names(params: Any) -> dict[str, np.ndarray]:
    final = params["final_norm"]
    names = {
        "transformer.wte.weight": params["embed"][:VOCAB], "transformer.wpe.weight": params["positions"],
        "transformer.ln_f.weight": final["scale"], "transformer.ln_f.bias": final["bias"],
    }  # fmt: skip
    for layer in range(params["blocks"]["query"].shape[0]):
        w, at = {name: value[layer] for name, value in params["blocks"].items()}, f"transformer.h.{layer}"
        width = w["query"].shape[0]
        qkv = [w[name].reshape(width, -1) for name in ("query", "key", "value")]
        biases = [w[f"{name}_bias"].reshape(-1) for name in ("query", "key", "value")]
        names |= {
            f"{at}.ln_1.weight": w["attention_norm"], f"{at}.ln_1.bias": w["attention_norm_bias"],
            f"{at}.ln_2.weight": w["mlp_norm"], f"{at}.ln_2.bias": w["mlp_norm_bias"],
            f"{at}.attn.c_attn.weight": np.concatenate(qkv, 1), f"{at}.attn.c_attn.bias": np.concatenate(biases),
            f"{at}.attn.c_proj.weight": w["attention_out"].reshape(-1, width),
            f"{at}.attn.c_proj.bias": w["attention_out_bias"],
            f"{at}.mlp.c_fc.weight": w["up"], f"{at}.mlp.c_fc.bias": w["up_bias"],
            f"{at}.mlp.c_proj.weight": w["down"], f"{at}.mlp.c_proj.bias": w["down_bias"],
        }  # fmt: skip
    return names
