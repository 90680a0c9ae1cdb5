"""Writes golden files of single layers: the gated delta rule, multi-token prediction, numbers of MXFP4."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import theirs
import torch
from drawn import TOKENS, digests, draw, draw_tensors, write
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

HERE = Path(__file__).resolve()
SCRIPTS = [HERE, HERE.parent / "theirs.py"]
B, T, N, G, H, F = 2, 150, 2, 2, 8, 16
"""Rows, tokens, key heads, value heads of each, their sizes."""


def delta_rule(out: Path) -> None:
    """Output, last state and gradients of the sum of sines, by the recurrence: with a decay of each state."""
    decay = -np.exp(draw("delta decay", (B, T, N * G), spread=1.0))
    rule = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    _recurrence(out, "delta-rule", rule, decay, N * G, {})


def kimi_delta_rule(out: Path) -> None:
    """The same with a decay of each channel of a key, of which some forget all and some nothing (Kimi Linear)."""
    decay = -np.exp(draw("kimi decay", (B, T, N, H), spread=3.0))
    rule = modeling_kimi_linear.recurrent_kimi_delta_attention
    _recurrence(out, "kimi-delta-rule", rule, decay, N, {"initial_state": None})


def _recurrence(
    out: Path, name: str, rule: Any, decay: np.ndarray, heads: int, others: dict[str, Any]
) -> None:
    """Writes what a rule computes. heads: of values.  others: its further arguments."""
    shapes = {"q": (B, T, N, H), "k": (B, T, N, H), "v": (B, T, heads, F)}
    q, k, v = (draw(f"delta {n}", shape, spread=1.0) for n, shape in shapes.items())
    rate = 1 / (1 + np.exp(-draw("delta rate", (B, T, heads), spread=1.5)))
    rule = getattr(rule, "__wrapped__", rule)
    given = {
        n: torch.tensor(a, requires_grad=True)
        for n, a in zip("qkvgb", (q, k, v, decay, rate), strict=True)
    }
    named = {
        "g": given["g"],
        "beta": given["b"],
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        **others,
    }
    found, last = rule(given["q"], given["k"], given["v"], **named)
    torch.sin(found).sum().backward()
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "rate": rate}
    arrays = {f"input/{n}": a for n, a in inputs.items()}
    arrays |= {"output": found.detach().numpy(), "state": last.detach().numpy()}
    grads = zip(inputs, given.values(), strict=True)
    arrays |= {f"gradient/{n}": x.grad.numpy() for n, x in grads}
    write(out, name, SCRIPTS, theirs.versions(), {}, arrays)


def mxfp4(out: Path) -> None:
    """Every byte with scales from the smallest to the largest that bfloat16 holds, float32 [E, D, F]."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    scales = np.array(
        [0, 1, 60, 100, 120, 126, 127, 128, 130, 140, 160, 200, 250, 251, 252, 90], np.uint8
    )
    scales = scales.reshape(1, 1, 16)
    numbers = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    write(
        out,
        "mxfp4",
        SCRIPTS,
        theirs.versions(),
        {},
        {"blocks": blocks, "scales": scales, "numbers": numbers},
    )


def _parts(name: str) -> tuple[str, list[str]] | None:
    """Stored names of a fused parameter of the layer's experts, with {} for the expert."""
    part = name.rpartition("mlp.experts.")[2]
    found = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(part)
    return found and (name.removesuffix(part) + "{}.", found)


def _split(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Values of the layer's parameters by their names in a released folder."""
    found = {}
    for name, value in values.items():
        name = "model.layers.3." + name.replace("mtp_block.", "").replace(
            "post_norm", "shared_head.norm"
        )
        if fused := _parts(name):
            for expert, whole in enumerate(value):
                parts = zip(fused[1], np.split(whole, len(fused[1])), strict=True)
                found |= {f"{fused[0].format(expert)}{part}.weight": w for part, w in parts}
        else:
            found[name] = value
    return found


def _fuse(like: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inverts `_split`: `like` has the shapes of the parameters."""
    found = {}
    for name, value in like.items():
        at = "model.layers.3." + name.replace("mtp_block.", "").replace(
            "post_norm", "shared_head.norm"
        )
        if fused := _parts(at):
            each = (
                [stored[f"{fused[0].format(e)}{p}.weight"] for p in fused[1]]
                for e in range(len(value))
            )
            found[name] = np.stack([np.concatenate(parts) for parts in each])
        else:
            found[name] = stored[at]
    return found


def further_token(out: Path) -> None:
    """Gradients with DeepSeek-V3's released layer that predicts the token after the next, by `transformers`' class."""
    with tempfile.TemporaryDirectory() as name:
        folder, scratch = Path(name, "model"), Path(name, "scratch")
        table = theirs.save("deepseek-v3", folder)
        model = theirs.load(folder)
        layer = MtpLayer(model.config, v3.DeepseekV3DecoderLayer, v3.DeepseekV3RMSNorm, 3).float()
        like = {n: t.detach().numpy() for n, t in layer.state_dict().items()}
        further = {
            n: (str(t.dtype), list(t.shape), 1.0 if n.endswith("norm.weight") else 0.0, 0.1)
            for n, t in _split(like).items()
        }
        values = _fuse(like, draw_tensors(further))
        layer.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
        tokens = torch.tensor(TOKENS, dtype=torch.long)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = model.model(inputs, use_cache=False).last_hidden_state
        positions = torch.arange(inputs.shape[1])[None]
        mask = torch.triu(torch.full((inputs.shape[1],) * 2, -1e30), 1)[None, None]
        angles = model.model.rotary_emb(hidden, positions)
        after = layer(model.model.embed_tokens(targets), hidden, angles, mask, positions, None)
        loss = torch.nn.functional.cross_entropy(
            model.lm_head(hidden).flatten(0, 1), targets.flatten()
        )
        logits = model.lm_head(after)[:, :-1]
        sums = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum"
        )
        (loss + 0.3 * sums / targets.numel()).backward()
        gradients = _split({n: p.grad.numpy() for n, p in layer.named_parameters()})
        of_model = {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        }
        gradients |= theirs.stored(model, of_model, scratch)
        about = {
            "config": theirs.json.loads((folder / "config.json").read_text()),
            "tensors": table | further,
        }
    about["config"]["num_nextn_predict_layers"] = 1
    write(out, "further-token", SCRIPTS, theirs.versions(), about, digests("gradient", gradients))


def main(out: Path) -> None:
    delta_rule(out)
    kimi_delta_rule(out)
    mxfp4(out)
    further_token(out)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))
