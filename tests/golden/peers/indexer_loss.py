"""Writes losses and gradients of the indexer of DeepSeek-V3.2 in both stages of its training, by autograd of `torch`.

The attention weights are those that `transformers` returns, and the projections, norm and rotation are its modules; the
index scores and the two losses are DeepSeek-V3.2's equations 1, 3 and 4.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import newer
import numpy as np
import theirs
import torch
from drawn import TOKENS, digests, write
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

HERE = Path(__file__).resolve()
ROW = "deepseek-v3.2"


def index_scores(indexer: Any, h: Any, q_resid: Any, angles: tuple[Any, Any]) -> Any:
    """I[t, s], [B, T, S], with a derivative for the indexer alone: h and q_resid are detached."""
    h, q_resid = h.detach(), q_resid.detach()
    size = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(h)).unsqueeze(2)
    q_rot, k_rot = apply_rotary_pos_emb(q[..., :size], k[..., :size], *angles, unsqueeze_dim=2)
    q = torch.cat([q_rot, q[..., size:]], -1)
    k = torch.cat([k_rot, k[..., size:]], -1)[:, :, 0]
    products = torch.relu(torch.einsum("bthd,bsd->bths", q, k) * indexer.head_dim**-0.5)
    return torch.einsum("bth,bths->bts", indexer.weights_proj(h) * indexer.n_heads**-0.5, products)


def losses_of(model: Any) -> list[Any]:
    """The loss of the indexer of each layer: the mean over tokens of KL(p || softmax(I)) on the keys with p > 0."""
    found = []

    def observe(module: Any, _: Any, inputs: dict[str, Any], outputs: Any) -> None:
        h = inputs["hidden_states"]
        q_resid = module.q_a_layernorm(module.q_a_proj(h))
        scores = index_scores(module.indexer, h, q_resid, inputs["position_embeddings"])
        summed = outputs[1].detach().sum(1)
        p = summed / summed.sum(-1, keepdim=True)
        scores = scores.masked_fill(p == 0, float("-inf"))
        ratio = torch.where(p > 0, p.clamp_min(1e-30).log() - scores.log_softmax(-1), 0.0)
        found.append((p * ratio).sum(-1).mean())

    hooks = [
        layer.self_attn.register_forward_hook(observe, with_kwargs=True)
        for layer in model.model.layers
    ]
    theirs.logits_of(model)
    for hook in hooks:
        hook.remove()
    return found


def main(out: Path) -> None:
    theirs.ROWS = newer.ROWS
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save(ROW, folder)
        for stage, top_k in (("warmup", TOKENS.shape[1]), ("sparse", None)):
            model = theirs.load(folder)
            for layer in model.model.layers:
                indexer = layer.self_attn.indexer
                indexer.index_topk = top_k or indexer.index_topk
            losses = losses_of(model)
            sum(losses).backward()
            arrays[f"{stage} losses"] = np.array([float(loss) for loss in losses], np.float32)
            gradients = {
                name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None
            }
            assert all(".indexer." in name for name in gradients)
            arrays |= digests(f"{stage} gradient", gradients)
    scripts = [HERE, HERE.parent / "theirs.py", HERE.parent / "newer.py"]
    write(out, "indexer-loss", scripts, theirs.versions(), {"row": ROW}, arrays)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))
