"""Model FLOPs and model-FLOP utilisation (MFU), defined once.

A matmul of a weight with n elements costs 2 n FLOPs per token (scaling-book, transformers.md); attention costs 4 H N
FLOPs for each position a token attends to. A training step costs three forward passes (one forward, two backward;
Kaplan et al. 2020, arXiv:2001.08361, section 2.1), recomputation not counted. Model-FLOP utilisation is that over the
bfloat16 peak of the chips (PaLM, arXiv:2204.02311, appendix B).
"""

import collections
import functools
import math

import jax

from meshwright.models.model import LayerSpec, Model, vocab_size
from meshwright.sharding.params import Tree, is_param

FORMULAS: dict[str, str] = {
    "attention projections": "2 D H (2 N + 2 K) per token and layer (scaling-book, transformers.md)",
    "attention": "4 s N H per token and layer, s positions attended to on average: (T + 1) / 2, fewer in a window",
    "linear attention": "chunks of 64 tokens, and their states (models/blocks/delta_net.py; arXiv:2412.06464)",
    "feed-forward": "2 D F per matrix, token and layer: three in SwiGLU, two in an MLP (scaling-book, transformers.md)",
    "router": "2 D E per token and layer with experts",
    "experts": "6 D F per token for each of its k experts (Mixtral, arXiv:2401.04088)",
    "projections": "2 n per token for a weight of n elements",
    "unembedding": "2 D V per token (scaling-book, transformers.md)",
}
"""Item of `forward_flops` -> its formula and source; letters as in words.py."""
ITEMS = {
    "qkv": "attention projections",
    "attention_out": "attention projections",
    "ffn_in": "feed-forward",
    "ffn_out": "feed-forward",
    "router": "router",
}
"""Role of a weight -> item that its matmul counts as; other roles are projections."""


def training_flops_per_token(model: Model, seq: int, method: str = "full") -> float:
    """Returns the FLOPs of one training step per token, forward and backward.

    method: `lora` for frozen weights, which have no gradient of their own: two forward passes for their matmuls and
    three for attention. Adapters of rank r add 3 r / width of that to a matmul, which is not counted.
    """
    items = forward_flops(model, seq)
    weightless = items.get("attention", 0.0) + items.get("linear attention", 0.0)
    frozen = sum(items.values()) - weightless if method == "lora" else 0.0
    return 3.0 * sum(items.values()) - frozen


@functools.singledispatch
@functools.lru_cache(maxsize=256)
def forward_flops(model: Model, seq: int) -> dict[str, float]:
    """Returns the FLOPs of one token's forward pass by item, averaged over a sequence of `seq` tokens.

    Another kind of model registers its own function (`wrapped`): of one example.
    """
    spec, params, items = model.spec(), model.params(), dict[str, float]()
    for layer, count in collections.Counter((*spec.layers, *spec.further)).items():
        for item, flops in _layer(layer, params[layer.stack], seq).items():
            items[item] = items.get(item, 0.0) + flops * count
    items["unembedding"] = 2.0 * spec.width * vocab_size(model) * (1 + len(spec.further))
    return {item: items[item] for item in FORMULAS if item in items}


def layer_flops(model: Model, seq: int) -> tuple[float, ...]:
    """Returns the FLOPs of one token's forward pass in each layer."""
    spec, params = model.spec(), model.params()
    cost = {
        layer: sum(_layer(layer, params[layer.stack], seq).values()) for layer in set(spec.layers)
    }
    return tuple(cost[layer] for layer in spec.layers)


def _layer(layer: LayerSpec, stack: Tree, seq: int) -> dict[str, float]:
    """FLOPs of one token in one layer, by item. stack: descriptions of its parameters."""
    items: dict[str, float] = {}
    for p in jax.tree.leaves(stack, is_leaf=is_param):
        if p.role is None:
            continue
        flops = 2.0 * math.prod(p.logical_shape[1:])
        if "E" in p.dims and layer.experts is not None:
            flops *= layer.experts.experts_per_token / layer.experts.experts
        item = (
            "experts"
            if "E" in p.dims and p.role in ("ffn_in", "ffn_out")
            else ITEMS.get(p.role, "projections")
        )
        items[item] = items.get(item, 0.0) + flops
    if layer.attention is not None:
        items["attention"] = layer.attention.flops(seq)
    if layer.delta is not None:
        items["linear attention"] = layer.delta.flops(seq)
    return items


def mfu(flops_per_token: float, tokens_per_second: float, peak_flops: float) -> float:
    """Returns the model-FLOP utilisation: a fraction of the peak FLOP/s of all devices together."""
    return flops_per_token * tokens_per_second / peak_flops
