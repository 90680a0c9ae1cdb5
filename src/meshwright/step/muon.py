"""Muon's matrices: each is orthogonalised on one of the devices that share it (the rule is in layer_rules.py).

Update of a matrix [rows, columns] (K. Jordan 2024, kellerjordan.github.io/posts/muon), with the scale of
Moonlight (Liu et al. 2025, arXiv:2502.16982, section 2.2), by which updates are as large as AdamW's:

    m = beta m + (1 - beta) g;  o = newton_schulz(beta m + (1 - beta) g)
    w -= learning rate (0.2 sqrt(max(rows, columns)) o + weight decay w)

Matrices are the weights of the layers' matmuls, each expert's its own, and each head's unless the run takes them
together. Routers, embeddings, norms and biases get AdamW. Moonlight (section 2.3) gathers every matrix; here it moves
to its owner by all-to-all, which sends 1/n of that.

`plan_muon` decides which device orthogonalises which matrix, and which matrices all devices split: arithmetic on
shapes, which the update follows and the planner prices.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    local_shard,
    reduce_scatter,
)
from meshwright.config import MeshShape, MuonHeads
from meshwright.sharding.params import Param, Tree, named_leaves
from meshwright.sharding.placement import Placement, axes_of, local_shape, to_spec
from meshwright.step.matrices import Job, LayerMap, Owners, owners_of, pad_layers

STEPS = 5
"""Newton-Schulz iterations."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz iteration: x -> a x + b (x x') x + c (x x')² x (K. Jordan 2024)."""
_RMS = 0.2
"""Root mean square of an update, before the learning rate: AdamW's (Moonlight, section 2.2)."""
_EPSILON = 1e-8
_IN_A_ROUND = 2**26
"""Elements that a device has of small matrices in one round (64 Mi)."""
_PADDING = 0.1
"""Largest fraction of a group's matrices that may be padding; beyond it the last matrices are split."""


def orthogonalised(p: Param) -> bool:
    """Returns whether Muon updates a parameter: matmuls of layers, other than the router's; AdamW has the rest."""
    matrix = p.role not in (None, "router") and "L" in p.dims and not p.frozen
    return matrix and (p.init == "normal" or p.role == "adapter")


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter on the devices that share them."""

    path: str
    owners: Owners
    where: Placement
    """Placement of [layers and experts, ...]."""
    shape: tuple[int, ...]
    """Local sizes of [layers and experts, ...]; each expert counts as a layer."""
    head: int | None
    """Dimension of `shape` that counts heads, each a matrix; None if heads are not separate."""
    contract: int
    """Dimensions of a matrix's rows, without that of heads."""
    rows: int
    columns: int

    @property
    def heads(self) -> int:
        """Matrices of a row of `shape`."""
        return 1 if self.head is None else self.shape[self.head]

    @property
    def whole(self) -> int:
        """Rows of `shape` that each device owns."""
        return self.shape[0] // self.owners.count

    @property
    def each(self) -> int:
        """Rows that each device owns in a round."""
        most = max(1, _IN_A_ROUND // (self.rows * self.columns * self.heads))
        return max(
            (d for d in range(1, min(most, self.whole) + 1) if self.whole % d == 0), default=1
        )

    @property
    def left(self) -> int:
        """Rows that the devices do not divide."""
        return self.shape[0] % self.owners.count

    @functools.cached_property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dimensions of `shape` that are a matrix's shorter side, and its longer side."""
        dims = tuple(d for d in range(1, len(self.shape)) if d != self.head)
        sizes = {dims[: self.contract]: self.rows, dims[self.contract :]: self.columns}
        # Of square matrices those with the same placement shall look alike: a projection and its way back.
        short, long = sorted(
            sizes, key=lambda side: (sizes[side], len(side), [self.where[d] for d in side])
        )
        return short, long

    @property
    def matrix_order(self) -> tuple[int, ...]:
        """Order of the dimensions of `shape` that makes matrices [rows, heads, shorter side, longer side]."""
        return (0, *(() if self.head is None else (self.head,)), *self.sides[0], *self.sides[1])


@dataclasses.dataclass(frozen=True)
class Rest:
    """Matrices of one local shape, of several parameters, that were left when devices divided the layers."""

    members: tuple[Stack, ...]
    rounds: int
    """Matrices of each device."""
    split: int
    """Matrices whose matmuls all devices split."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind over the same axes, `count` times in an update."""

    kind: str
    axes: tuple[str, ...]
    elements: float
    """Elements of the gathered array, as the planner counts: of an all-to-all those of a device."""
    count: float
    float32: bool = False
    """Whether they are float32 rather than of the compute dtype."""


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Returns the FLOPs of orthogonalising a matrix: X X' (2 s² l), its square (2 s³), and their product with X."""
    short, long = sorted((rows, columns))
    return STEPS * (4.0 * short * short * long + 2.0 * short**3)


@dataclasses.dataclass(frozen=True)
class MuonPlan:
    """Which device orthogonalises which matrices, and what that costs."""

    stacks: list[Stack]
    rests: list[Rest]

    def exchanges(self) -> list[Exchange]:
        """Returns the collectives of an update: matrices to their owners and back, and the products of split ones."""
        found: list[Exchange] = []

        def move(
            stack: Stack,
            mine: float,
            count: float,
            gathered: tuple[int, ...],
            dims: tuple[int, ...],
        ) -> None:
            """Adds what brings `mine` elements to a device and takes as many back. gathered: some of `dims`."""
            split = (
                tuple(axis for axis in stack.where[d] if axis in stack.owners.axes)
                for d in gathered
            )
            found.extend(Exchange("all-to-all", axes, mine, 2 * count) for axes in split if axes)
            sharded = {axis for d in dims for axis in stack.where[d]}
            replicated = tuple(axis for axis in stack.owners.axes if axis not in sharded)
            if replicated:
                found.append(
                    Exchange(
                        "all-gather",
                        replicated,
                        mine * math.prod(stack.owners.of(replicated)),
                        count,
                    )
                )

        for s in self.stacks:
            if s.whole:
                dims = tuple(range(1, len(s.shape)))
                move(s, float(s.rows * s.columns * s.heads * s.each), s.whole / s.each, dims, dims)
        for rest in self.rests:
            s = rest.members[0]
            n, short, dims = s.owners.count, min(s.rows, s.columns), (*s.sides[0], *s.sides[1])
            if rest.rounds:
                move(s, float(s.rows * s.columns), rest.rounds, dims, dims)
            if rest.split:
                move(s, float(rest.split * s.rows * s.columns) / n, 1.0, s.sides[0], dims)
                square = float((short + -short % n) ** 2)
                found.append(
                    Exchange(
                        "reduce-scatter", s.owners.axes, square, float(STEPS * rest.split), True
                    )
                )
                found.append(
                    Exchange("all-gather", s.owners.axes, square, float(2 * STEPS * rest.split))
                )
        return found

    def temporaries(self) -> tuple[float, float]:
        """Returns the elements of a device's momentum that an update copies, and of the largest matrices of a round."""
        copied = sum(float(math.prod(s.shape)) for s in self.stacks)
        rounds = [s.rows * s.columns * s.heads * s.each for s in self.stacks if s.whole]
        for rest in self.rests:
            s = rest.members[0]
            # Every device has the full square of a split matrix.
            rounds.append(s.rows * s.columns if rest.rounds else min(s.rows, s.columns) ** 2)
        return copied, float(max(rounds, default=0))

    def flops(self) -> tuple[float, float]:
        """Returns the Newton-Schulz FLOPs of a device, and of an even share among all that hold its layers."""
        done = even = 0.0
        for s in self.stacks:
            matrix = newton_schulz_flops(s.rows, s.columns)
            done += s.whole * s.heads * matrix
            even += s.shape[0] * s.heads * matrix / s.owners.count
        for rest in self.rests:
            s = rest.members[0]
            done += (rest.rounds + rest.split / s.owners.count) * newton_schulz_flops(
                s.rows, s.columns
            )
        return done, even


def plan_muon(params: Tree, placements: Tree, mesh: MeshShape, heads: MuonHeads) -> MuonPlan:
    """Divides all matrices among devices.

    params: descriptions.  placements: the same tree of Placements.  heads: whether a head is a matrix of its own.
    """
    wheres = named_leaves(placements)
    stacks = [
        _stack(path, p, wheres[path].optimizer, mesh, heads)
        for path, p in named_leaves(params).items()
        if orthogonalised(p)
    ]
    groups: dict[object, list[Stack]] = {}
    for stack in stacks:
        local = tuple(tuple((stack.shape[d], stack.where[d]) for d in side) for side in stack.sides)
        groups.setdefault((stack.owners, local), []).append(stack)
    rests = []
    for members in groups.values():
        count, n = sum(stack.left * stack.heads for stack in members), members[0].owners.count
        if count:
            total = sum(stack.shape[0] * stack.heads for stack in members)
            padded = (-count % n) <= _PADDING * total
            left = tuple(stack for stack in members if stack.left)
            rests.append(
                Rest(left, -(-count // n), 0) if padded else Rest(left, count // n, count % n)
            )
    return MuonPlan(stacks, rests)


def _stack(path: str, p: Param, where: Placement, mesh: MeshShape, heads: MuonHeads) -> Stack:
    shape = local_shape(p.shape, where, mesh)
    first = 2 if "E" in p.dims else 1
    by_head = heads == "each" and p.role in ("qkv", "attention_out")
    head = next((d for d in range(first, len(p.dims)) if by_head and p.dims[d] in "NK"), None)
    split = {axis for d in (*range(first), *(() if head is None else (head,))) for axis in where[d]}
    contract = p.contract - (1 if head is not None and head < first + p.contract else 0)
    sizes = [p.shape[d] for d in range(first, len(p.dims)) if d != head]
    return Stack(
        path=path,
        owners=owners_of(where, tuple(split), mesh),
        where=((), *where[first:]),
        shape=(math.prod(shape[:first]), *shape[first:]),
        head=None if head is None else head - first + 1,
        contract=contract,
        rows=math.prod(sizes[:contract]),
        columns=math.prod(sizes[contract:]),
    )


def orthogonalise(
    arrays: dict[str, jax.Array], layer_map: LayerMap, heads: MuonHeads
) -> dict[str, jax.Array]:
    """Returns the scaled orthogonal factor of every matrix, float32, placed like the optimizer state.

    arrays: by path, float32. They are exchanged and multiplied in the compute dtype (bfloat16 by K. Jordan's design).
    """
    wheres = named_leaves(layer_map.placements)
    plan = plan_muon(layer_map.params, layer_map.placements, layer_map.shape, heads)
    stacks = plan.stacks
    specs = {s.path: to_spec(wheres[s.path].optimizer) for s in stacks}

    def local(blocks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        rows = {
            s.path: blocks[s.path].astype(layer_map.compute_dtype).reshape(s.shape) for s in stacks
        }
        parts: dict[str, list[jax.Array]] = {s.path: [] for s in stacks}
        for s in stacks:
            if s.whole:
                job = Job(
                    s.owners, (rows[s.path][: s.whole * s.owners.count],), (s.where,), s.where
                )
                parts[s.path].append(
                    job.in_rounds(functools.partial(_of_rows, s), s.whole // s.each, s.each)
                )
        for rest in plan.rests:
            for s, found in zip(rest.members, _orthogonalise_rest(rest, rows), strict=True):
                parts[s.path].append(found)
        scale = {s.path: _RMS * math.sqrt(max(s.rows, s.columns)) for s in stacks}
        return {
            path: (
                scale[path] * (x[0] if len(x) == 1 else jnp.concatenate(x)).astype(jnp.float32)
            ).reshape(blocks[path].shape)
            for path, x in parts.items()
        }

    with jax.named_scope("muon"):
        mapped = jax.shard_map(
            local, mesh=layer_map.mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        return mapped(arrays)


def _newton_schulz(x: jax.Array) -> jax.Array:
    """Returns nearly orthogonal factors of matrices x [k, short, long]: singular values from 0.7 to 1.2."""
    x = _normalised(x, jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    a, b, c = _COEFFICIENTS

    def step(_: Any, x: jax.Array) -> jax.Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    # As a loop it is compiled once per shape of matrix, not five times.
    return jax.lax.fori_loop(0, STEPS, step, x)


def _normalised(x: jax.Array, squares: jax.Array) -> jax.Array:
    return (x / (jnp.sqrt(squares) + _EPSILON)).astype(x.dtype)


def _split_newton_schulz(x: jax.Array, owners: Owners) -> jax.Array:
    """Computes `_newton_schulz` of matrices whose columns all devices share: x [k, short, long / n].

    Each device computes 1/n of every product. An iteration sends 3 s² (n-1)/n elements of a matrix.
    """
    n, short = owners.count, x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, -short % n), (0, 0)))
    squares = all_reduce(
        jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True), owners.axes
    )
    x, dtype = _normalised(x, squares), x.dtype
    a, b, c = _COEFFICIENTS

    def step(_: Any, x: jax.Array) -> jax.Array:
        partial = jnp.einsum("sl,tl->st", x, x, preferred_element_type=jnp.float32)
        mine = reduce_scatter(partial, owners.axes, 0).astype(dtype)
        square = all_gather(mine, owners.axes, 0)
        polynomial = all_gather(b * mine + c * mine @ square, owners.axes, 0)
        return a * x + polynomial @ x

    return jax.lax.map(lambda x: jax.lax.fori_loop(0, STEPS, step, x), x)[:, :short]


def _of_rows(s: Stack, x: jax.Array) -> jax.Array:
    by_head = x if s.head is None else jnp.moveaxis(x, s.head, 1)
    matrices = by_head.reshape(-1, s.rows, s.columns)
    found = _newton_schulz(matrices if s.rows <= s.columns else matrices.mT)
    found = (found if s.rows <= s.columns else found.mT).reshape(by_head.shape)
    return found if s.head is None else jnp.moveaxis(found, 1, s.head)


def _orthogonalise_rest(rest: Rest, rows: dict[str, jax.Array]) -> list[jax.Array]:
    first = rest.members[0]
    owners, short = first.owners, len(first.sides[0])

    def matrices(s: Stack) -> jax.Array:
        x = rows[s.path][-s.left :].transpose(s.matrix_order)
        return x.reshape(-1, *x.shape[1 if s.head is None else 2 :])

    def of_matrices(x: jax.Array) -> jax.Array:
        return _newton_schulz(x.reshape(x.shape[0], math.prod(x.shape[1 : 1 + short]), -1)).reshape(
            x.shape
        )

    pooled = jnp.concatenate([matrices(s) for s in rest.members])
    where: Placement = ((), *(first.where[d] for side in first.sides for d in side))
    whole, parts = rest.rounds * owners.count, []
    if rest.rounds:
        job = Job(
            owners, (pad_layers(pooled[: min(whole, pooled.shape[0])], whole),), (where,), where
        )
        parts.append(job.in_rounds(of_matrices, rest.rounds)[: pooled.shape[0]])
    if rest.split:
        parts.append(_orthogonalise_split(pooled[whole:], where, short, owners))
    found, results, start = jnp.concatenate(parts), [], 0
    for s in rest.members:
        x, order = found[start : start + s.left * s.heads], s.matrix_order
        x = x.reshape(s.left, *(s.shape[d] for d in order[1:]))
        results.append(x.transpose(*(order.index(d) for d in range(len(order)))))
        start += s.left * s.heads
    return results


def _orthogonalise_split(x: jax.Array, where: Placement, short: int, owners: Owners) -> jax.Array:
    """Orthogonalises local blocks x [k, shorter side, longer side] of matrices, all devices sharing each of them.

    Rows and columns may be in any order, as long as it is the same for all devices: the result is in that order too.
    """
    shape, used = x.shape, axes_of(where)
    gathers = [tuple(axis for axis in axes if axis in owners.axes) for axes in where[1 : 1 + short]]
    replicated = tuple(axis for axis in owners.axes if axis not in used)
    x = x.reshape(shape[0], math.prod(shape[1 : 1 + short]), -1)
    long, parts = (
        x.shape[2],
        math.prod(owners.of((*replicated, *(axis for axes in gathers for axis in axes)))),
    )
    x = local_shard(jnp.pad(x, ((0, 0), (0, 0), (0, -long % parts))), replicated, 2)
    for axes in gathers:
        x = all_to_all(x, axes, 2, 1)
    x = _split_newton_schulz(x, owners)
    for axes in reversed(gathers):
        x = all_to_all(x, axes, 1, 2)
    return all_gather(x, replicated, 2)[:, :, :long].reshape(shape)
