"""Experts over axes of devices against experts on one: values and gradients, whichever experts the tokens choose."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwright.models.blocks.experts import Experts, Routes, Routing, dropless_moe
from meshwright.models.kernels.choose import ragged_dot

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
TOKENS, D, F = 12, 6, 5


@dataclasses.dataclass(frozen=True)
class Shape:
    """Experts over devices."""

    devices: int
    experts: int
    per_token: int
    nodes: int = 1
    groups: tuple[int, int] = (1, 1)
    """Groups of experts, and those that a token's are in."""
    split: tuple[int, int, int] = (0, 1, 1)
    """Devices along `expert`, `context` and `tensor`; 0 are all."""


def choices(shape: Shape, load: str, rng: np.random.Generator) -> np.ndarray:
    """Returns the experts of every token, [devices * TOKENS, k], each at most once."""
    tokens, E, k = shape.devices * TOKENS, shape.experts, shape.per_token
    groups, limit = shape.groups
    if (
        limit < groups and load != "one"
    ):  # experts of a token's own groups, of which those used are the first ones
        each, used = E // groups, groups if load == "even" else limit
        own = [
            (rng.permutation(used)[:limit, None] * each + np.arange(each)).reshape(-1)
            for _ in range(tokens)
        ]
        return np.stack([rng.permutation(pool)[:k] for pool in own]).astype(np.int32)
    if load == "one":  # all tokens to the same experts, the last ones
        return np.broadcast_to(E - 1 - np.arange(k), (tokens, k)).astype(np.int32)
    if load == "groups":  # of two neighbouring groups among four, a token's own
        in_groups, first = max(k, E // 2), rng.integers(0, 4, tokens) * (E // 4)
        return np.stack([(f + rng.permutation(in_groups)[:k]) % E for f in first]).astype(np.int32)
    used = max(k, E // 2) if load == "empty" else E  # the second half has no token
    return np.stack([rng.permutation(used)[:k] for _ in range(tokens)]).astype(np.int32)


@functools.cache
def program(shape: Shape, one: bool) -> Any:
    """Returns a function of (hidden states, experts, weights, expert weights) over the devices, or on one."""
    e = Experts(
        D, Routing(shape.experts, shape.per_token, "softmax", True, 1.0, *shape.groups), F, 0.02
    )
    split = (1, 1, 1) if one else (shape.split[0] or shape.devices, *shape.split[1:])
    axes = tuple(axis for axis, n in zip(AXES[3:], split, strict=True) if n > 1)
    devices = np.array(jax.devices()[: math.prod(split)]).reshape(1, 1, 1, *split)

    def body(h: Any, experts: Any, weights: Any, w: Any) -> Any:
        def total(h: Any, weights: Any, w: Any) -> Any:
            routes = Routes(experts[None], weights[None], weights[None], weights[None, :, 0])
            out, dropped = dropless_moe(
                e,
                h[None],
                routes,
                w,
                ragged_dot().multiply,
                axes=axes,
                nodes=1 if one else shape.nodes,
            )
            assert dropped is None
            return (out[0] * jnp.sin(lax.stop_gradient(h))).sum(), out[0]

        gradients, out = jax.grad(total, (0, 1, 2), has_aux=True)(h, weights, w)
        return out, gradients

    spec = P(AXES[3:])
    step = jax.shard_map(
        body, mesh=Mesh(devices, AXES), in_specs=(spec,) * 4, out_specs=spec, check_vma=False
    )
    return jax.jit(step)


def largest_difference(shape: Shape, load: str) -> float:
    """Returns the largest difference of outputs and gradients from one device, relative to the largest of each."""
    rng = np.random.default_rng(0)
    chosen, E = choices(shape, load, rng), shape.experts
    h, weights = rng.normal(size=(len(chosen), D)), rng.uniform(0.1, 1, chosen.shape)
    w = {
        n: rng.normal(size=s)
        for n, s in (("gate", (E, D, F)), ("up", (E, D, F)), ("down", (E, F, D)))
    }
    arguments = jax.tree.map(lambda a: a.astype(np.float32), (h, weights, w))
    found, expected = (
        jax.tree.leaves(program(shape, one)(arguments[0], chosen, *arguments[1:]))
        for one in (False, True)
    )
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found, expected, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
