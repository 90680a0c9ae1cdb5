"""Compares models of random sizes with `transformers`, and prints the largest differences of each (docs/families.md).

    python bench/random_models.py [ARCHITECTURE...] [--seed 0] [--draws 2]

Draws head sizes that are not width / heads, one key/value head, odd vocabularies and widths, tied or untied tables, one
layer, windows on both sides of the sequence, epsilons, rotary bases and scalings; then compares logits and gradients
on one device and on a mesh drawn for each model, greedy text after prompts of unequal length, and the bytes after a
checkpoint and back. float32 on eight simulated devices. Exits with 1 where a difference is above its bound.
"""

import argparse
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

# As in tests/conftest.py: not optimising programs that run once takes half of the time off.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
LOGITS, GRADIENTS, NEW_TOKENS = 1e-5, 1e-5, 10
"""Bounds: of any logit, over the largest one where that is above 1; of any gradient, over the largest of its tensor."""


class Draw:
    """Random sizes of one model."""

    def __init__(self, seed: str):
        self.rng = random.Random(seed)

    def one(self, *values: Any) -> Any:
        """Returns one of some values."""
        return self.rng.choice(values)

    def maybe(self, chance: float = 0.5) -> bool:
        """Returns whether something with this chance happens."""
        return self.rng.random() < chance

    def width(self) -> int:
        """Returns the width of a feed-forward layer: any, or a multiple of eight, that meshes divide."""
        return self.rng.randint(17, 90) if self.maybe(0.3) else 8 * self.rng.randint(2, 10)

    def common(self, own_heads: bool = True) -> dict[str, Any]:
        """Returns sizes that all but GPT-2 have. own_heads: whether heads are of a size of their own."""
        kv_heads = self.one(1, 2, 4)
        heads, size = kv_heads * self.one(1, 2, 3), self.one(8, 16, 20)
        sizes = {
            "vocab_size": self.rng.randint(33, 99), "num_hidden_layers": self.one(1, 2, 3, 4),
            "hidden_size": heads * (self.one(4, 8, 12) if own_heads else size),
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": self.width(),
            "rms_norm_eps": self.one(1e-8, 1e-6, 1e-5, 1e-3), "tie_word_embeddings": self.maybe(),
            "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        return {**sizes, "head_dim": size} if own_heads else sizes

    def theta(self) -> float:
        """Returns a base of rotary frequencies."""
        return self.one(100.0, 10000.0, 500000.0, 1e6)

    def rope(self, *kinds: str) -> dict[str, Any]:
        """Returns rotary fields. kinds: scalings that may be drawn, besides none."""
        kind, fields = self.one("default", *kinds), {"rope_theta": self.theta()}
        original = {"factor": self.one(2.0, 4.0, 3.3), "original_max_position_embeddings": self.one(8, 16, 1024)}
        if kind == "linear":
            fields["factor"] = original["factor"]
        if kind == "llama3":
            fields |= {**original, "low_freq_factor": 1.0, "high_freq_factor": self.one(2.0, 4.0)}
        if kind == "yarn":
            more: dict[str, Any] = self.one(
                {}, {"attention_factor": 0.8}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"truncate": False},
                {"beta_fast": 16.0, "beta_slow": 2.0}, {"mscale": 0.7, "mscale_all_dim": 1.2},
            )  # fmt: skip
            fields |= {**original, **more}
        return {"rope_type": kind, **fields}

    def experts(self, experts: str = "num_local_experts", most: int = 3) -> dict[str, Any]:
        """Returns the number of experts, under the name `experts`, and of those of a token."""
        return {experts: self.one(4, 6, 8), "num_experts_per_tok": self.one(*range(1, most + 1))}

    def turns(self, layers: int, local: str = "sliding_attention") -> list[str]:
        """Returns kinds of layers by turns."""
        period = self.one(2, 3)
        return [local if (i + 1) % period else "full_attention" for i in range(layers)]


SCALINGS = ("linear", "llama3", "yarn", "yarn")


def configuration(architecture: str, draw: Draw) -> dict[str, Any]:
    """Returns the configuration of one model."""
    c = draw.common(own_heads=architecture not in ("Olmo2", "Olmo3"))
    window = draw.one(1, 3, 11, 40)
    if architecture == "GPT2":
        heads = draw.one(1, 2, 4)
        return {
            "vocab_size": c["vocab_size"], "n_embd": heads * draw.one(8, 12, 20), "n_layer": c["num_hidden_layers"],
            "n_head": heads, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": c["rms_norm_eps"],
            "n_inner": draw.one(None, draw.width()),
        }  # fmt: skip
    if architecture not in ("Gemma3", "Olmo3", "DeepseekV2", "DeepseekV3"):
        c["rope_parameters"] = draw.rope(*SCALINGS) if architecture not in ("GptOss", "Gemma2") else draw.rope()
    more: dict[str, Any] = {}
    if architecture == "Llama":
        more = {"attention_bias": draw.maybe(), "mlp_bias": draw.maybe()}
    if architecture == "Mistral":
        more = {"sliding_window": draw.one(None, window)}
    if architecture in ("Qwen2", "Qwen3", "Qwen3Moe") and draw.maybe():
        more = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    if architecture in ("Qwen3", "Qwen3Moe", "Olmo2", "Olmo3"):
        more["attention_bias"] = draw.maybe()
    if architecture == "Mixtral":
        more = {**draw.experts(), "sliding_window": draw.one(None, window)}
    if architecture == "Qwen3Moe":
        dense = draw.rng.randrange(c["num_hidden_layers"])
        more |= {
            **draw.experts("num_experts"), "moe_intermediate_size": draw.width(), "norm_topk_prob": draw.maybe(),
            "mlp_only_layers": list(range(dense)),
        }  # fmt: skip
    turns = _by_turns(architecture, draw, c, window)
    return {**c, **more, **turns}


def _by_turns(architecture: str, draw: Draw, c: dict[str, Any], window: int) -> dict[str, Any]:
    """Returns the fields of architectures whose layers are of several kinds."""
    if architecture in ("Gemma2", "Gemma3", "Olmo3", "GptOss", "Llama4", "Qwen3Next", "DeepseekV2", "DeepseekV3"):
        c["num_hidden_layers"] = max(c["num_hidden_layers"], 2)
    layers = c["num_hidden_layers"]
    plain = {"rope_type": "default", "rope_theta": draw.theta()}
    if architecture == "Gemma2":
        caps = {"attn_logit_softcapping": draw.one(None, 0.5), "final_logit_softcapping": draw.one(None, 0.7)}
        return {**caps, "sliding_window": window, "query_pre_attn_scalar": draw.one(8, 40), "tie_word_embeddings": True}
    if architecture == "Gemma3":
        scaled = draw.one({}, {"rope_type": "linear", "factor": 8.0})
        return {
            "sliding_window": window, "query_pre_attn_scalar": draw.one(8, 40), "layer_types": draw.turns(layers),
            "tie_word_embeddings": True, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": draw.theta()},
                "full_attention": {**plain, **scaled},
            },
        }  # fmt: skip
    if architecture == "Olmo3":
        scaled = {**draw.rope("yarn"), "rope_theta": plain["rope_theta"]}
        scaled.pop("truncate", None)  # `transformers` looks for it elsewhere
        return {
            "sliding_window": window, "layer_types": draw.turns(layers),
            "rope_parameters": {"sliding_attention": plain, "full_attention": scaled},
        }  # fmt: skip
    if architecture == "GptOss":
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        return {
            **draw.experts(), "sliding_window": window, "swiglu_limit": draw.one(0.1, 7.0), "layer_types": kinds,
            "tie_word_embeddings": False, "rope_parameters": draw.rope("yarn"),
        }  # fmt: skip
    if architecture == "Llama4":
        step, interval = draw.one(1, 2), draw.one(2, 3, 4)
        return {
            **draw.experts(most=2), "intermediate_size_mlp": draw.width(), "interleave_moe_layer_step": step,
            "no_rope_layer_interval": interval, "attention_chunk_size": draw.one(3, 8, 40), "floor_scale": 4,
            "use_qk_norm": draw.maybe(), "rope_parameters": draw.rope("llama3", "linear"),
        }  # fmt: skip
    if architecture == "Qwen3Next":
        keys = draw.one(1, 2)
        return {
            **draw.experts("num_experts"), "full_attention_interval": 2, "moe_intermediate_size": draw.width(),
            "shared_expert_intermediate_size": draw.width(), "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * draw.one(1, 2, 3), "linear_key_head_dim": draw.one(8, 12),
            "linear_value_head_dim": draw.one(8, 20), "linear_conv_kernel_dim": draw.one(2, 4),
            "rope_parameters": {**draw.rope(*SCALINGS), "partial_rotary_factor": 0.5},
        }  # fmt: skip
    if architecture.startswith("Deepseek"):
        return _latent(architecture, draw, c)
    return {}


def _latent(architecture: str, draw: Draw, c: dict[str, Any]) -> dict[str, Any]:
    c.pop("head_dim")
    v3, dense = architecture == "DeepseekV3", draw.rng.randrange(c["num_hidden_layers"])
    rope = draw.rope("yarn")
    rope.pop("truncate", None)
    groups = {"n_group": 2, "topk_group": draw.one(1, 2), "num_mtp_layers": 0} if v3 else {"topk_method": "greedy"}
    return {
        "num_key_value_heads": c["num_attention_heads"], "kv_lora_rank": draw.one(8, 12), "qk_nope_head_dim": 12,
        "qk_rope_head_dim": draw.one(4, 8), "v_head_dim": draw.one(8, 24), "q_lora_rank": draw.one(None, 12, 24),
        "moe_intermediate_size": draw.width(), "n_routed_experts": 8, "n_shared_experts": draw.one(1, 2),
        "num_experts_per_tok": draw.one(2, 3), "first_k_dense_replace": dense, "rope_parameters": rope, **groups,
    }  # fmt: skip


ARCHITECTURES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe", "GPT2", "Olmo2", "Olmo3", "GptOss", "Llama4", "Gemma2",
    "Gemma3", "DeepseekV2", "DeepseekV3", "Qwen3Next",
)  # fmt: skip


def random_mesh(draw: Draw) -> str:
    """Returns a mesh of eight devices, of up to three axes."""
    degrees = draw.one((2, 2, 2), (2, 2, 2), (4, 2), (8,))
    axes = draw.rng.sample(AXES, len(degrees))
    return ",".join(f"{axis}={degree}" for axis, degree in zip(axes, degrees, strict=True))


class Compared:
    """One model in a folder, and what is compared of it."""

    def __init__(self, architecture: str, config: dict[str, Any], folder: Path, draw: Draw):
        import hf_models

        self.hf, self.folder, self.draw, self.row = hf_models, folder, draw, "drawn"
        self.row = {"Mixtral": "mixtral", "GptOss": "gpt-oss"}.get(architecture, "drawn")
        # The other implementations want widths that are multiples of 16 bytes.
        hf_models.ROWS[self.row] = (architecture, {**config, "experts_implementation": "eager"})
        hf_models.VOCAB, hf_models.SEQ = config["vocab_size"], draw.one(8, 16, 32)
        hf_models.tokens.cache_clear()
        self.model = hf_models.save(self.row, folder)
        self.logits, gradients = hf_models.reference(self.model)
        self.gradients = hf_models.stored_gradients(self.row, gradients)

    def on(self, mesh: str) -> dict[str, float]:
        """Returns the largest differences on a mesh over their bounds."""
        found = self.hf.gradients_of(self.folder, mesh)
        logits = abs(self.hf.logits_of(self.folder, mesh) - self.logits).max() / max(1.0, abs(self.logits).max())
        largest = max(float(abs(g).max()) for g in self.gradients.values())
        # Gradients that are zero but for rounding (of queries that see one key) are divided by the model's largest.
        gaps = {
            name: float(abs(found[name] - g).max() / max(abs(g).max(), 1e-2 * largest))
            for name, g in self.gradients.items()
        }
        worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else np.inf)
        return {"logits": float(logits) / LOGITS, f"gradients ({worst})": gaps[worst] / GRADIENTS}

    def greedy(self, mesh: str) -> str:
        """Returns where greedy text after prompts of unequal length differs, or "" where it does not."""
        import torch

        from meshwright.generation.sampling import Sampling

        rows = self.hf.tokens()
        prompts = [row[: self.draw.rng.randint(1, len(row) - 1)] for row in rows]
        decoder, sampling = self.hf.decoder_of(self.folder, mesh), Sampling(temperature=0.0)
        state = decoder.prefill(decoder.start(prompts), sampling, ())
        found = decoder.read(decoder.decode(state, sampling, (), NEW_TOKENS - 1))[0]
        for row, prompt in enumerate(prompts):
            text = torch.tensor(prompt[None].astype(np.int64))
            for place in range(NEW_TOKENS):
                with torch.no_grad(), self.hf.quiet():
                    best = self.model(text, use_cache=False).logits[0, -1].topk(2)
                token = int(found[row, place])
                if token != int(best.indices[0]):
                    if float(best.values[0] - best.values[1]) < 1e-4 and token == int(best.indices[1]):
                        break  # a tie
                    return f"text {row} of {len(prompt)} tokens, token {place}: {token}, not {int(best.indices[0])}"
                text = torch.cat([text, torch.tensor([[token]])], 1)
        return ""

    def round_trip(self) -> str:
        """Returns "" where the tensors have the same bytes after a checkpoint and back."""
        from families import _tensors

        import meshwright as mw

        run, back = (self.folder.parent / name for name in ("run", "back"))
        mw.convert(self.folder, run)
        mw.convert(run, back)
        return "" if _tensors(self.folder) == _tensors(back) else "other bytes"


def compare(architecture: str, seed: str) -> str:
    """Draws and compares one model; returns its line, with "FAILS" where a bound does not hold."""
    from meshwright.errors import MeshwrightError

    draw, said, fails = Draw(seed), [], False
    config = configuration(architecture, draw)
    with tempfile.TemporaryDirectory() as temporary:
        compared = Compared(architecture, config, Path(temporary) / "model", draw)
        meshes, refused = ["data=1"], 0
        while meshes and refused < 8:
            mesh = meshes.pop(0)
            try:
                gaps = compared.on(mesh)
            except MeshwrightError as error:
                if mesh == "data=1":
                    raise
                refused, meshes = refused + 1, [random_mesh(draw)]
                said.append(f"[{mesh}: {str(error).splitlines()[0][:70]}]")
                continue
            fails |= any(not gap <= 1 for gap in gaps.values())
            said.append(f"{mesh}: " + ", ".join(f"{n} {g:.2f}" for n, g in gaps.items()))
            try:
                differs = compared.greedy(mesh)
            except MeshwrightError as error:
                differs = f"refused: {str(error).splitlines()[0]}"
            fails |= bool(differs) and not differs.startswith("refused")
            said.append(f"greedy {differs or 'equal'}")
            meshes = [random_mesh(draw)] if mesh == "data=1" else []
        differs = compared.round_trip()
    line = f"{'FAILS' if fails or differs else 'holds'} {architecture} {seed}: {'; '.join(said)}"
    return f"{line}; {differs or 'same bytes'}" + (f"\n    {config}" if fails or differs else "")


def main() -> int:
    """Compares the models that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architectures", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=2)
    arguments = parser.parse_args()

    import jax

    from meshwright.hardware.mesh import prepare_host

    prepare_host(8)
    failed = 0
    for number in range(arguments.seed, arguments.seed + arguments.draws):
        for architecture in arguments.architectures:
            try:
                line = compare(architecture, f"{architecture}-{number}")
            except Exception:
                config = configuration(architecture, Draw(f"{architecture}-{number}"))
                line = f"FAILS {architecture}-{number}\n    {config}\n{traceback.format_exc()}"
            failed += line.startswith("FAILS")
            print(line, flush=True)
            jax.clear_caches()
    print(f"{failed} models differ")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
