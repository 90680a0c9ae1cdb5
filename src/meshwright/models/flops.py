"""Model FLOPs and model-FLOP utilisation (MFU), defined once.

A matmul of a weight with n elements costs 2 n FLOPs per token (scaling-book, transformers.md);
attention costs 4 H N FLOPs for each position a token attends to. A training step costs three
forward passes (one forward, two backward; Kaplan et al. 2020, arXiv:2001.08361, section 2.1),
recomputation not counted. Model-FLOP utilisation is that over the bfloat16 peak of the chips (PaLM,
arXiv:2204.02311, appendix B).
"""

import collections
import functools
import math

import jax

from meshwright.models.model import LayerSpec, Model, ModelSpec, Recurrence, vocab_size
from meshwright.sharding.params import Tree, is_param

FORMULAS: dict[str, str] = {
    "attention projections": "2 D H (2 N + 2 K) per token and layer "
    "(scaling-book, transformers.md)",
    "attention": "4 s N H per token and layer, s positions attended to on average: (T + 1) / 2, "
    "fewer in a window",
    "indexer projections": "2 n per token and layer, of its n weights (DeepSeek-V3.2)",
    "indexer": "2 s N (H + 1) per token and layer: its N heads compare s positions, "
    "(T + 1) / 2 on average",
    "feed-forward": "2 D F per matrix, token and layer: three in SwiGLU, two in an MLP "
    "(scaling-book, transformers.md)",
    "router": "2 D E per token and layer with experts",
    "experts": "2 D F per matrix, token and each of its k experts, three in SwiGLU "
    "(Mixtral, arXiv:2401.04088)",
    "projections": "2 n per token for a weight of n elements",
    "unembedding": "2 D V per token (scaling-book, transformers.md)",
}
"""Item of `forward_flops` -> its formula and source; letters as in words.py.
Recurrences bring their own."""
ITEMS = {
    "qkv": "attention projections",
    "attention_out": "attention projections",
    "ffn_in": "feed-forward",
    "ffn_out": "feed-forward",
    "router": "router",
}
"""Role of a weight -> item that its matmul counts as; other roles are projections."""
_ITEMS_OF_WEIGHTS = frozenset({*ITEMS.values(), "experts", "projections", "unembedding"})
"""Items that count matmuls of weights, which `lora` freezes."""
INDEXER_ITEMS = frozenset({"indexer projections", "indexer"})


def formulas(spec: ModelSpec) -> dict[str, str]:
    """Returns the items of a model's FLOPs in their order, each with its formula;
    recurrences follow attention."""
    items = dict[str, str]()
    for item, formula in FORMULAS.items():
        items[item] = formula
        if item == "attention":
            items |= {r.item: r.formula for r in spec.recurrences}
    return items


def formula_of(item: str) -> str:
    """Returns the formula of an item of `forward_flops`; "" for one that is not a layer kind's."""
    recurrences = {kind.item: kind.formula for kind in Recurrence.__subclasses__()}
    return FORMULAS.get(item) or recurrences.get(item, "")


def passes_of_step(model: Model, item: str, method: str = "full") -> float:
    """Returns the FLOPs of an item of `forward_flops` in a training step over those
    of its forward pass.

        3   a gradient of both factors of a product
        2   a gradient of one: of frozen weights (`lora`) the input's, of an indexer's weights
            their own, as its input is detached
        1   none: a frozen indexer, whose choice of keys has no derivative; in its warm-up
            everything else

    method: of fine-tuning.
    """
    spec = model.spec() if model.states_layers else None
    if spec is not None and item in INDEXER_ITEMS:
        if not any(a.indexer.trained for a in spec.attention if a.indexer is not None):
            return 1.0
        return 2.0 if item == "indexer projections" else 3.0
    if spec is not None and spec.trains_only_indexers:
        return 1.0
    if method == "lora" and item in _ITEMS_OF_WEIGHTS:
        return 2.0
    return 3.0


def training_flops_per_token(model: Model, seq: int, method: str = "full") -> float:
    """Returns the FLOPs of one training step per token, forward and backward.

    method: of fine-tuning. Adapters of rank r add 3 r / width to the FLOPs of a matmul,
    which is not counted.
    """
    items = forward_flops(model, seq)
    return sum(passes_of_step(model, item, method) * flops for item, flops in items.items())


def forward_flops(model: Model, seq: int) -> dict[str, float]:
    """Returns the FLOPs of the forward pass of one token by item, averaged over a sequence
    of `seq` tokens.

    A model that does not read text has them for one example.
    """
    return model.forward_flops(seq, _forward_flops)


@functools.lru_cache(maxsize=256)
def _forward_flops(model: Model, seq: int) -> dict[str, float]:
    spec, params, items = model.spec(), model.params(), dict[str, float]()
    for layer, count in collections.Counter((*spec.layers, *spec.further)).items():
        for item, flops in _layer(layer, params[layer.stack], seq).items():
            items[item] = items.get(item, 0.0) + flops * count
    items["unembedding"] = 2.0 * spec.width * vocab_size(model) * (1 + len(spec.further))
    return {item: items[item] for item in formulas(spec) if item in items}


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
        attention = layer.attention
        items["attention"] = attention.flops(seq)
        if attention.indexer is not None:
            items["indexer projections"] = attention.indexer.projection_flops
            items["indexer"] = attention.indexer.score_flops(attention.causal_positions(seq))
    if layer.recurrence is not None:
        items[layer.recurrence.item] = layer.recurrence.flops(seq)
    return items


def mfu(flops_per_token: float, tokens_per_second: float, peak_flops: float) -> float:
    """Returns the model-FLOP utilisation: a fraction of the peak FLOP/s of all devices together."""
    return flops_per_token * tokens_per_second / peak_flops
