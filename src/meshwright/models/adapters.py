"""LoRA: low-rank adapters beside frozen matrices, which may be quantised (arXiv:2106.09685, QLoRA: arXiv:2305.14314).

An adapter of a weight W `[in..., out...]` is two parameters, A `[in..., r]` and B `[r, out...]`, which lie in the stack
beside it (`blocks.adapters.query.a`). They have the letters of W's dimensions, so every layout places them: with
`tensor`, a column-parallel matrix has B split as its own columns are, a row-parallel one has A split as its rows are.
The product is computed at the projection, `x W + (alpha / r) (x A) B`, inside the function that Megatron's pair of
collectives surrounds: it is summed with that of W, and nothing more is sent for it. Merging `W + (alpha / r) A B` in
every layer instead would cost a matrix of W's size and 2 r n FLOPs for n elements, at each gather.

No family knows of adapters. A gathered weight that has one is an object that multiplies itself (blocks/layers.py).
"""

import dataclasses
import fnmatch
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import ConfigError, nearest
from meshwright.fine_tuning import FineTune
from meshwright.models.base_weights import dequantise, quantised_params
from meshwright.models.blocks.layers import linear
from meshwright.sharding.params import LOW_PRECISION_ROLES, GatherParams, Param, Stored, Tree, is_param, tree_map

ADAPTERS = "adapters"
"""Subtree of a stack with the adapters of its weights."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """Gathered weight of one layer with its adapter; multiplies itself."""

    base: Any
    """Weight [in..., out...]."""
    a: jax.Array
    """A [in..., r]."""
    b: jax.Array
    """B [r, out...]."""
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        shape: tuple[int, ...] = self.base.shape
        return shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the weight."""
        return len(self.shape)

    def linear(self, x: jax.Array, contract: int) -> jax.Array:
        """Returns x W + scale (x A) B, contracting the last `contract` dimensions of x; result in x's dtype."""
        low_BTU = linear(x, self.a, contract=contract)
        return linear(x, self.base, contract=contract) + self.scale * linear(low_BTU, self.b)

    def __jax_array__(self) -> jax.Array:
        raise ConfigError(
            "a weight with an adapter used as an array",
            "its adapter is a product of its own, and only its matmul is defined",
            "meshwright.models.blocks.layers.linear(x, w), or --finetune.targets without this weight",
        )


@dataclasses.dataclass(frozen=True)
class AdapterGather(GatherParams):
    """Gathers sharded parameters into weights: quantised ones dequantised after the gather, adapters beside theirs."""

    scale: float | None
    """Factor of A B; None leaves the adapters out, which is the reference of preferences."""

    def __call__(self, params: Tree, path: str) -> Tree:
        """Returns the weights of the subtree `path`, of one layer of it where it is stacked."""
        weights = super().__call__(params, path)
        if not isinstance(weights, dict):
            return weights
        weights = {name: dequantise(w, self.compute_dtype) for name, w in weights.items()}
        adapters = weights.pop(ADAPTERS, {})
        if self.scale is None:
            return weights
        for name, pair in adapters.items():
            weights[name] = AdaptedWeight(weights[name], pair["a"], pair["b"], self.scale)
        return weights


def adapter_gather(gather: GatherParams, scale: float) -> AdapterGather:
    """Returns `gather` for parameters that `adapted_params` describes."""
    fields = {f.name: getattr(gather, f.name) for f in dataclasses.fields(GatherParams)}
    return AdapterGather(**fields, scale=scale)


def adapted_params(params: Tree, tuning: FineTune, compute_dtype: Stored) -> Tree:
    """Returns the descriptions of a frozen model with adapters. params: descriptions of the model.

    Raises ConfigError for a target that no matrix has, and for a matrix that the type of the base cannot hold.
    """
    chosen = targets_of(params, tuning)
    kept: Stored = "float32" if tuning.base == "float32" else compute_dtype

    def freeze(p: Param) -> Param:
        return dataclasses.replace(p, frozen=True, stored="float32" if p.precision == "float32" else kept)

    frozen: Tree = tree_map(freeze, params)
    for stack, names in chosen.items():
        pairs = {name: adapter_of(params[stack][name], tuning.rank) for name in names}
        frozen[stack] = {**frozen[stack], ADAPTERS: pairs}
    return frozen if tuning.base not in ("int8", "nf4") else quantised_params(frozen, tuning.base)


def adapter_of(p: Param, rank: int) -> dict[str, Param]:
    """Returns A and B of a stacked matrix. A begins with the variance that PEFT's has, 1 / (3 inputs); B with zeros."""
    inner, outer = slice(1, 1 + p.contract), slice(1 + p.contract, None)
    std = (3 * math.prod(p.shape[inner])) ** -0.5
    return {
        "a": Param(
            (*p.shape[:1], *p.shape[inner], rank), f"L{p.dims[inner]}U", std=std, role="adapter", contract=p.contract
        ),
        "b": Param((*p.shape[:1], rank, *p.shape[outer]), f"LU{p.dims[outer]}", "zeros", role="adapter"),
    }


def targets_of(params: Tree, tuning: FineTune) -> dict[str, list[str]]:
    """Returns the matrices that get an adapter, by stack. Raises ConfigError for a pattern that matches none."""
    found: dict[str, list[str]] = {}
    unused = set(tuning.targets)
    for stack, tree in params.items():
        for name, p in (tree if isinstance(tree, dict) else {}).items():
            if not is_param(p) or p.role not in LOW_PRECISION_ROLES or "E" in p.dims or "L" not in p.dims:
                continue
            matching = [t for t in tuning.targets if t == "all" or _matches(t, stack, name)]
            unused -= set(matching)
            if matching:
                found.setdefault(stack, []).append(name)
    if unused:
        pattern = min(unused)
        matrices = sorted({n for n, _ in _matrices(params)})
        routed = sorted({n for n, p in _matrices(params) if "E" in p.dims and _matches(pattern, "", n)})
        raise ConfigError(
            f"--finetune.targets {pattern}",
            f"{', '.join(routed)} are of routed experts, whose grouped matmul takes whole matrices"
            if routed
            else f"no matrix of a layer has such a name; they are {', '.join(matrices)}",
            nearest(pattern, matrices) if not routed else "--finetune.targets all, which leaves them out",
        )
    return found


def _matrices(params: Tree) -> list[tuple[str, Param]]:
    stacks = (tree for tree in params.values() if isinstance(tree, dict))
    return [(n, p) for tree in stacks for n, p in tree.items() if is_param(p) and p.role in LOW_PRECISION_ROLES]


def _matches(pattern: str, stack: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f"{stack}.{name}", pattern)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns A B in float32, [L, in..., out...]: what is added to a weight, before its scale."""
    lead = ((a.ndim - 1,), (1,)), ((0,), (0,))
    with jax.default_matmul_precision("highest"):
        return jax.lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), lead)


def merged(params: Tree, scale: float, dtype: Any) -> Tree:
    """Returns the model with its adapters merged, W + scale A B, without them. params: arrays, in any rows.

    The sum is in float32; quantised weights are dequantised. Every weight is in `dtype`.
    """

    def one(name: str, w: Any, pairs: Tree) -> jax.Array:
        w = dequantise(w, jnp.float32)
        if name in pairs:
            w = w.astype(jnp.float32) + scale * product(pairs[name]["a"], pairs[name]["b"])
        return w.astype(dtype)

    def subtree(tree: Tree) -> Tree:
        if not isinstance(tree, dict):
            return tree.astype(dtype)
        pairs = tree.get(ADAPTERS, {})
        return {name: one(name, w, pairs) for name, w in tree.items() if name != ADAPTERS}

    return {path: subtree(tree) for path, tree in params.items() if path != "reference"}
