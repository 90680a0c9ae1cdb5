"""Muon: momentum whose matrices are orthogonalised, each on one of the devices that share them.

Update of a matrix [rows, columns] (K. Jordan 2024, kellerjordan.github.io/posts/muon), with the scale of
Moonlight (Liu et al. 2025, arXiv:2502.16982, section 2.2), by which updates are as large as AdamW's:

    m = beta m + (1 - beta) g;  o = newton_schulz(beta m + (1 - beta) g)
    w -= learning rate (0.2 sqrt(max(rows, columns)) o + weight decay w)

Matrices are the weights of the layers' matmuls, each expert's its own, and each head's unless the run takes them
together. Routers, embeddings, norms and biases get AdamW. `muon_plan` decides which device orthogonalises which matrix.
Moonlight (section 2.3) gathers every matrix; here it moves to its owner by all-to-all, which sends 1/n of that.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.comm.collectives import all_gather, all_reduce, all_to_all, local_shard, reduce_scatter
from meshwright.config import MuonHeads, Optimizer
from meshwright.sharding.params import Tree, is_param, named_leaves, tree_map
from meshwright.sharding.placement import Placement, axes_of, to_spec
from meshwright.step.matrices import Job, LayerMap, Owners, in_rounds, pad_layers
from meshwright.step.muon_plan import STEPS, Rest, Stack, orthogonalised, plan_muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz iteration: x -> a x + b (x x') x + c (x x')² x (K. Jordan 2024)."""
RMS = 0.2
"""Root mean square of an update, before the learning rate: AdamW's (Moonlight, section 2.2)."""
_EPSILON = 1e-8


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    step: jax.Array
    """Updates so far; int32 scalar."""
    mu: Tree
    """Momentum, like the parameters."""


def muon(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    """Returns Muon for the matrices of layers, and AdamW for all other parameters. params: descriptions."""
    matrices = optax.chain(
        scale_by_muon(o, params), optax.add_decayed_weights(o.weight_decay), optax.scale_by_learning_rate(rate)
    )
    decays = tree_map(lambda p: optax.MaskedNode() if orthogonalised(p) else p.init == "normal", params)
    others = optax.adamw(
        rate, o.beta1, o.beta2, eps=o.epsilon, mu_dtype=o.moment_dtype, weight_decay=o.weight_decay, mask=decays
    )
    labels = tree_map(lambda p: "matrices" if orthogonalised(p) else "others", params)
    return optax.partition({"matrices": matrices, "others": others}, labels)


def scale_by_muon(o: Optimizer, params: Tree) -> optax.GradientTransformationExtraArgs:
    """Returns the orthogonalised Nesterov momentum, scaled to AdamW's size.

    params: descriptions. Its `update` takes the `layer_map` of the step.
    """
    treedef: Any = jax.tree.structure(params, is_leaf=is_param)
    matrices = [path for path, p in named_leaves(params).items() if orthogonalised(p)]

    def init(arrays: Tree) -> MuonState:
        mu = jax.tree.map(lambda x: jnp.zeros(x.shape, o.moment_dtype), arrays)
        return MuonState(jnp.zeros((), jnp.int32), mu)

    def update(
        grads: Tree, state: MuonState, arrays: Tree = None, *, layer_map: LayerMap, **_: Any
    ) -> tuple[Tree, MuonState]:
        count = state.step + 1
        mu = jax.tree.map(lambda m, g: o.beta1 * m.astype(jnp.float32) + (1 - o.beta1) * g, state.mu, grads)
        # Bias of the momentum one step ahead, which is Nesterov's, as in optax.contrib.muon.
        ahead, now = 1 - o.beta1 ** (count + 1), 1 - o.beta1**count
        nesterov = jax.tree.map(lambda m, g: o.beta1 * m / ahead + (1 - o.beta1) * g / now, mu, grads)
        leaves = dict(zip(named_leaves(params), treedef.flatten_up_to(nesterov), strict=True))
        found = orthogonalise({path: leaves[path] for path in matrices}, layer_map, o.muon_heads)
        updates = treedef.unflatten([found.get(path, leaf) for path, leaf in leaves.items()])
        mu = jax.tree.map(lambda m: m.astype(o.moment_dtype), mu)
        return updates, MuonState(count, mu)

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonalise(arrays: dict[str, jax.Array], layer_map: LayerMap, heads: MuonHeads) -> dict[str, jax.Array]:
    """Returns the scaled orthogonal factor of every matrix, float32, placed like the optimizer state.

    arrays: by path, float32. They are exchanged and multiplied in the compute dtype (bfloat16 by K. Jordan's design).
    """
    wheres = named_leaves(layer_map.placements)
    stacks, rests = plan_muon(layer_map.params, layer_map.placements, layer_map.shape, heads)
    specs = {stack.path: to_spec(wheres[stack.path].optimizer) for stack in stacks}

    def local(blocks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        rows = {s.path: blocks[s.path].astype(layer_map.compute_dtype).reshape(s.shape) for s in stacks}
        parts: dict[str, list[jax.Array]] = {s.path: [] for s in stacks}
        for s in stacks:
            if s.whole:
                job = Job((rows[s.path][: s.whole * s.owners.count],), (s.where,), s.where)
                found = in_rounds(lambda x, s=s: _of_rows(x, s), s.owners, job, s.whole // s.each, s.each)
                parts[s.path].append(found)
        for rest in rests:
            for s, found in zip(rest.members, _orthogonalise_rest(rest, rows), strict=True):
                parts[s.path].append(found)
        scale = {s.path: RMS * math.sqrt(max(s.rows, s.columns)) for s in stacks}
        return {
            path: (scale[path] * (x[0] if len(x) == 1 else jnp.concatenate(x)).astype(jnp.float32)).reshape(
                blocks[path].shape
            )
            for path, x in parts.items()
        }

    with jax.named_scope("muon"):
        mapped = jax.shard_map(local, mesh=layer_map.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
        return mapped(arrays)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Returns nearly orthogonal factors of matrices x [k, short, long]: singular values from 0.7 to 1.2."""
    x = _normalised(x, jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    a, b, c = COEFFICIENTS

    def step(_: Any, x: jax.Array) -> jax.Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    # As a loop it is compiled once per shape of matrix, not five times.
    return jax.lax.fori_loop(0, STEPS, step, x)


def _normalised(x: jax.Array, squares: jax.Array) -> jax.Array:
    return (x / (jnp.sqrt(squares) + _EPSILON)).astype(x.dtype)


def _split_newton_schulz(x: jax.Array, owners: Owners) -> jax.Array:
    """Computes `newton_schulz` of matrices whose columns all devices share: x [k, short, long / n].

    Each device computes 1/n of every product. An iteration sends 3 s² (n-1)/n elements of a matrix.
    """
    n, short = owners.count, x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, -short % n), (0, 0)))
    squares = all_reduce(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True), owners.axes)
    x, dtype = _normalised(x, squares), x.dtype
    a, b, c = COEFFICIENTS

    def step(_: Any, x: jax.Array) -> jax.Array:
        partial = jnp.einsum("sl,tl->st", x, x, preferred_element_type=jnp.float32)
        mine = reduce_scatter(partial, owners.axes, 0).astype(dtype)
        square = all_gather(mine, owners.axes, 0)
        polynomial = all_gather(b * mine + c * mine @ square, owners.axes, 0)
        return a * x + polynomial @ x

    return jax.lax.map(lambda x: jax.lax.fori_loop(0, STEPS, step, x), x)[:, :short]


def _of_rows(x: jax.Array, s: Stack) -> jax.Array:
    """Orthogonalises the matrices of whole rows x [k, ...] of a stack."""
    by_head = x if s.head is None else jnp.moveaxis(x, s.head, 1)
    matrices = by_head.reshape(-1, s.rows, s.columns)
    found = newton_schulz(matrices if s.rows <= s.columns else matrices.mT)
    found = (found if s.rows <= s.columns else found.mT).reshape(by_head.shape)
    return found if s.head is None else jnp.moveaxis(found, 1, s.head)


def _orthogonalise_rest(rest: Rest, rows: dict[str, jax.Array]) -> list[jax.Array]:
    """Returns the local blocks of the last rows of each member."""
    first = rest.members[0]
    owners, short = first.owners, first.short_dims
    pooled = jnp.concatenate([_alike(rows[s.path][-s.left :], s) for s in rest.members])
    where: Placement = ((), *(first.where[d] for d in first.matrix_dims))
    whole = rest.rounds * owners.count
    parts = []
    if rest.rounds:
        job = Job((pad_layers(pooled[: min(whole, pooled.shape[0])], whole),), (where,), where)
        parts.append(in_rounds(lambda x: _of_alike(x, short), owners, job, rest.rounds)[: pooled.shape[0]])
    if rest.split:
        parts.append(_orthogonalise_split(pooled[whole:], where, short, owners))
    found, results, start = jnp.concatenate(parts), [], 0
    for s in rest.members:
        results.append(_unlike(found[start : start + s.left * s.heads], s))
        start += s.left * s.heads
    return results


def _of_alike(x: jax.Array, short: int) -> jax.Array:
    """Orthogonalises matrices [k, ...] with `short` dimensions of the shorter side first."""
    return newton_schulz(x.reshape(x.shape[0], math.prod(x.shape[1 : 1 + short]), -1)).reshape(x.shape)


def _alike(x: jax.Array, s: Stack) -> jax.Array:
    """Returns rows of a stack as matrices [rows * heads, shorter side, longer side]."""
    heads = () if s.head is None else (s.head,)
    x = x.transpose(0, *heads, *s.matrix_dims)
    return x.reshape(-1, *x.shape[1 + len(heads) :])


def _unlike(x: jax.Array, s: Stack) -> jax.Array:
    """Inverts `_alike`."""
    heads = () if s.head is None else (s.head,)
    order = (0, *heads, *s.matrix_dims)
    x = x.reshape(s.left, *(s.shape[d] for d in order[1:]))
    return x.transpose(*(order.index(d) for d in range(len(order))))


def _orthogonalise_split(x: jax.Array, where: Placement, short: int, owners: Owners) -> jax.Array:
    """Orthogonalises local blocks x [k, shorter side, longer side] of matrices, all devices sharing each of them.

    Rows and columns may be in any order, as long as it is the same for all devices: the result is in that order too.
    """
    shape, used = x.shape, axes_of(where)
    gathers = [tuple(axis for axis in axes if axis in owners.axes) for axes in where[1 : 1 + short]]
    replicated = tuple(axis for axis in owners.axes if axis not in used)
    x = x.reshape(shape[0], math.prod(shape[1 : 1 + short]), -1)
    long, parts = x.shape[2], math.prod(owners.of((*replicated, *(axis for axes in gathers for axis in axes))))
    x = local_shard(jnp.pad(x, ((0, 0), (0, 0), (0, -long % parts))), replicated, 2)
    for axes in gathers:
        x = all_to_all(x, axes, 2, 1)
    x = _split_newton_schulz(x, owners)
    for axes in reversed(gathers):
        x = all_to_all(x, axes, 1, 2)
    return all_gather(x, replicated, 2)[:, :, :long].reshape(shape)
