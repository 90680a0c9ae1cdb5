"""Muon's matrices: each is orthogonalised on one of the devices that share it.

The rule of optax is in layer_rules.py. Update of a matrix [rows, columns] (K. Jordan 2024,
kellerjordan.github.io/posts/muon), with the scale of Moonlight (Liu et al. 2025, arXiv:2502.16982,
section 2.2), by which updates are as large as AdamW's. In update t = 1, 2, ...:

    m = beta m + (1 - beta) g
    o = newton_schulz(beta m / (1 - beta^(t+1)) + (1 - beta) g / (1 - beta^t))
    w -= learning rate (0.2 sqrt(max(rows, columns)) o + weight decay w)

Matrices are the weights of the layers' matmuls, each expert's its own, and each head's unless the
run takes them together. Routers, embeddings, norms and biases get AdamW. Moonlight (section 2.3)
gathers every matrix; here it moves to its owner by all-to-all, which sends 1/n of that.

`plan_muon` decides which device orthogonalises which matrix, and which matrices all devices split:
arithmetic on shapes, which the update follows and the planner prices.
"""

import dataclasses
import functools
import itertools
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
"""Largest fraction of a group's matrices that may be padding; beyond it the last matrices are
split."""


def orthogonalised(p: Param) -> bool:
    """Returns whether Muon updates a parameter: matmuls of layers, other than the router's.

    AdamW has the rest.
    """
    matrix = p.role not in (None, "router") and "L" in p.dims and not p.frozen
    return matrix and (p.init == "normal" or p.role == "adapter")


@dataclasses.dataclass(frozen=True)
class Stack:
    """One parameter as entries of matrices, on the devices that share them.

    An entry is one layer, or one expert of one layer. It is one matrix, or one for each head.
    """

    path: str
    owners: Owners
    placement: Placement
    """Placement of [entries, ...]."""
    shape: tuple[int, ...]
    """Local sizes of [entries, dimensions of an entry ...], a head's dimension included."""
    head: int | None
    """Dimension of `shape` that counts heads, each a matrix; None if heads are not separate."""
    contract: int
    """How many dimensions of an entry, that of its heads not counted, are the matrix's rows."""
    rows: int
    """Rows of a matrix over all devices, unlike `shape`."""
    columns: int
    """Columns of a matrix over all devices."""

    @property
    def matrices_per_entry(self) -> int:
        """Matrices of an entry."""
        return 1 if self.head is None else self.shape[self.head]

    @property
    def elements(self) -> int:
        """Elements of a matrix."""
        return self.rows * self.columns

    @property
    def entries_owned(self) -> int:
        """Entries that each device owns."""
        return self.shape[0] // self.owners.count

    @property
    def entries_per_round(self) -> int:
        """Entries that each device takes in a round."""
        limit = max(1, _IN_A_ROUND // (self.elements * self.matrices_per_entry))
        largest = min(limit, self.entries_owned)
        divisors = [d for d in range(1, largest + 1) if self.entries_owned % d == 0]
        return max(divisors, default=1)

    @property
    def remaining(self) -> int:
        """Entries that the devices do not divide."""
        return self.shape[0] % self.owners.count

    @functools.cached_property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dimensions of `shape` that are a matrix's shorter side, and its longer side."""
        dims = tuple(d for d in range(1, len(self.shape)) if d != self.head)
        sizes = {dims[: self.contract]: self.rows, dims[self.contract :]: self.columns}

        # Of square matrices those with the same placement shall look alike: a projection and its
        # way back.
        def order(side: tuple[int, ...]) -> tuple[Any, ...]:
            return sizes[side], len(side), [self.placement[d] for d in side]

        short, long = sorted(sizes, key=order)
        return short, long

    @property
    def matrix_dims(self) -> tuple[int, ...]:
        """Dimensions of a matrix: those of its shorter side, then those of its longer side."""
        short, long = self.sides
        return (*short, *long)

    @property
    def matrix_order(self) -> tuple[int, ...]:
        """Order of the dimensions that makes [rows, heads, shorter side, longer side]."""
        heads = () if self.head is None else (self.head,)
        return (0, *heads, *self.matrix_dims)

    def exchanges(
        self, elements: float, count: float, gathered: tuple[int, ...], dims: tuple[int, ...]
    ) -> list["Exchange"]:
        """Returns the collectives that bring elements to a device and take as many back.

        elements: of each of `count` exchanges.
        gathered: dimensions that a device gets in full, some of `dims`, the dimensions of what is
        moved.
        """
        found = []
        for dim in gathered:
            axes = tuple(axis for axis in self.placement[dim] if axis in self.owners.axes)
            if axes:
                found.append(Exchange("all-to-all", axes, elements, 2 * count))
        sharded = {axis for dim in dims for axis in self.placement[dim]}
        replicated = tuple(axis for axis in self.owners.axes if axis not in sharded)
        if replicated:
            everything = elements * math.prod(self.owners.of(replicated))
            found.append(Exchange("all-gather", replicated, everything, count))
        return found


@dataclasses.dataclass(frozen=True)
class Rest:
    """Matrices of one local shape, of several parameters, that full rounds leave."""

    members: tuple[Stack, ...]
    rounds: int
    """Matrices of each device."""
    split: int
    """Matrices whose matmuls all devices split."""

    def exchanges(self) -> list["Exchange"]:
        """Returns the collectives of an update: of matrices, and of the products of split ones."""
        s = self.members[0]
        n = s.owners.count
        found = []
        if self.rounds:
            found += s.exchanges(float(s.elements), self.rounds, s.matrix_dims, s.matrix_dims)
        if self.split:
            short = min(s.rows, s.columns)
            square = float((short + -short % n) ** 2)
            products = STEPS * self.split
            found += s.exchanges(float(self.split * s.elements) / n, 1.0, s.sides[0], s.matrix_dims)
            found.append(Exchange("reduce-scatter", s.owners.axes, square, float(products), True))
            found.append(Exchange("all-gather", s.owners.axes, square, float(2 * products)))
        return found


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
    """Returns the FLOPs of orthogonalising a matrix: X X', its square, their product with X."""
    short, long = sorted((rows, columns))
    return STEPS * (4.0 * short * short * long + 2.0 * short**3)


@dataclasses.dataclass(frozen=True)
class MuonPlan:
    """Which device orthogonalises which matrices, and what that costs."""

    stacks: list[Stack]
    rests: list[Rest]

    def exchanges(self) -> list[Exchange]:
        """Returns the collectives of an update: of all matrices to their owners and back."""
        found: list[Exchange] = []
        for s in self.stacks:
            if s.entries_owned:
                dims = tuple(range(1, len(s.shape)))
                elements = float(s.elements * s.matrices_per_entry * s.entries_per_round)
                found += s.exchanges(elements, s.entries_owned / s.entries_per_round, dims, dims)
        for rest in self.rests:
            found += rest.exchanges()
        return found

    def temporaries(self) -> tuple[float, float]:
        """Returns the elements that an update copies, and those of the largest round."""
        copied = sum(float(math.prod(s.shape)) for s in self.stacks)
        rounds = [
            s.elements * s.matrices_per_entry * s.entries_per_round
            for s in self.stacks
            if s.entries_owned
        ]
        for rest in self.rests:
            s = rest.members[0]
            # Every device has the full square of a split matrix.
            rounds.append(s.elements if rest.rounds else min(s.rows, s.columns) ** 2)
        return copied, float(max(rounds, default=0))

    def flops(self) -> tuple[float, float]:
        """Returns the Newton-Schulz FLOPs of a device, and of an even share among its owners."""
        done = 0.0
        even = 0.0
        for s in self.stacks:
            matrix = newton_schulz_flops(s.rows, s.columns)
            done += s.entries_owned * s.matrices_per_entry * matrix
            even += s.shape[0] * s.matrices_per_entry * matrix / s.owners.count
        for rest in self.rests:
            s = rest.members[0]
            matrices = rest.rounds + rest.split / s.owners.count
            done += matrices * newton_schulz_flops(s.rows, s.columns)
        return done, even


def plan_muon(params: Tree, placements: Tree, mesh: MeshShape, heads: MuonHeads) -> MuonPlan:
    """Divides all matrices among devices.

    params: descriptions.  placements: the same tree of Placements.  heads: whether a head is a
    matrix of its own.
    """
    placements_of = named_leaves(placements)
    stacks = [
        _stack(path, p, placements_of[path].optimizer, mesh, heads)
        for path, p in named_leaves(params).items()
        if orthogonalised(p)
    ]
    groups: dict[object, list[Stack]] = {}
    for stack in stacks:
        sizes = tuple(stack.shape[d] for d in stack.matrix_dims)
        axes = tuple(stack.placement[d] for d in stack.matrix_dims)
        short, _ = stack.sides
        groups.setdefault((stack.owners, len(short), sizes, axes), []).append(stack)
    rests = [_rest(members) for members in groups.values() if any(s.remaining for s in members)]
    return MuonPlan(stacks, rests)


def _rest(members: list[Stack]) -> Rest:
    """Divides the matrices that remain: each device gets as many, or all split the last."""
    n = members[0].owners.count
    count = sum(stack.remaining * stack.matrices_per_entry for stack in members)
    total = sum(stack.shape[0] * stack.matrices_per_entry for stack in members)
    remaining = tuple(stack for stack in members if stack.remaining)
    if (-count % n) <= _PADDING * total:
        return Rest(remaining, math.ceil(count / n), 0)
    return Rest(remaining, count // n, count % n)


def _stack(path: str, p: Param, placement: Placement, mesh: MeshShape, heads: MuonHeads) -> Stack:
    """Returns the matrices of a parameter. placement: of its optimizer state."""
    shape = local_shape(p.shape, placement, mesh)
    first = 2 if "E" in p.dims else 1
    head = None
    if heads == "each" and p.role in ("qkv", "attention_out"):
        head = next((d for d in range(first, len(p.dims)) if p.dims[d] in "NK"), None)
    # Dimensions that count matrices: layers, experts, heads.
    counting = [*range(first)]
    contract = p.contract
    if head is not None:
        counting.append(head)
        if head < first + p.contract:
            contract -= 1
    split = {axis for d in counting for axis in placement[d]}
    sizes = [p.shape[d] for d in range(first, len(p.dims)) if d != head]
    return Stack(
        path=path,
        owners=owners_of(placement, tuple(split), mesh),
        placement=((), *placement[first:]),
        shape=(math.prod(shape[:first]), *shape[first:]),
        head=None if head is None else head - first + 1,
        contract=contract,
        rows=math.prod(sizes[:contract]),
        columns=math.prod(sizes[contract:]),
    )


def orthogonalise(
    arrays: dict[str, jax.Array], layer_map: LayerMap, heads: MuonHeads
) -> dict[str, jax.Array]:
    """Returns the scaled orthogonal factor of every matrix, placed like the optimizer state.

    arrays: by path, float32, as the result. They are exchanged and multiplied in the compute dtype
    (bfloat16 by K. Jordan's design).
    """
    placements = named_leaves(layer_map.placements)
    plan = plan_muon(layer_map.params, layer_map.placements, layer_map.shape, heads)
    specs = {s.path: to_spec(placements[s.path].optimizer) for s in plan.stacks}

    def local(blocks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return _orthogonalise_blocks(plan, blocks, layer_map.compute_dtype)

    with jax.named_scope("muon"):
        mapped = jax.shard_map(
            local, mesh=layer_map.mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        return mapped(arrays)


def _orthogonalise_blocks(
    plan: MuonPlan, blocks: dict[str, jax.Array], compute_dtype: Any
) -> dict[str, jax.Array]:
    """Returns the scaled orthogonal factors of this device's blocks."""
    rows = {s.path: blocks[s.path].astype(compute_dtype).reshape(s.shape) for s in plan.stacks}
    parts: dict[str, list[jax.Array]] = {s.path: [] for s in plan.stacks}
    for s in plan.stacks:
        if s.entries_owned:
            in_full_rounds = rows[s.path][: s.entries_owned * s.owners.count]
            job = Job(s.owners, (in_full_rounds,), (s.placement,), s.placement)
            factors = functools.partial(_factors_of_rows, s)
            parts[s.path].append(
                job.in_rounds(factors, s.entries_owned // s.entries_per_round, s.entries_per_round)
            )
    for rest in plan.rests:
        for s, found in zip(rest.members, _orthogonalise_rest(rest, rows), strict=True):
            parts[s.path].append(found)
    scaled = {}
    for s in plan.stacks:
        scale = _RMS * math.sqrt(max(s.rows, s.columns))
        first, *others = parts[s.path]
        factor = jnp.concatenate([first, *others]) if others else first
        scaled[s.path] = (scale * factor.astype(jnp.float32)).reshape(blocks[s.path].shape)
    return scaled


def _newton_schulz(x: jax.Array) -> jax.Array:
    """Returns factors of matrices x [k, short, long] with singular values from 0.7 to 1.2."""
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
    """Computes `_newton_schulz` of matrices whose columns devices share: x [k, short, long / n].

    Each device computes 1/n of every product. An iteration sends 3 s² (n-1)/n elements of a matrix.
    """
    short = x.shape[1]
    dtype = x.dtype
    x = jnp.pad(x, ((0, 0), (0, -short % owners.count), (0, 0)))
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True)
    x = _normalised(x, all_reduce(squares, owners.axes))
    a, b, c = _COEFFICIENTS

    def step(_: Any, x: jax.Array) -> jax.Array:
        partial = jnp.einsum("sl,tl->st", x, x, preferred_element_type=jnp.float32)
        mine = reduce_scatter(partial, owners.axes, 0).astype(dtype)
        square = all_gather(mine, owners.axes, 0)
        polynomial = all_gather(b * mine + c * mine @ square, owners.axes, 0)
        return a * x + polynomial @ x

    def orthogonalise_one(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, step, x)

    return jax.lax.map(orthogonalise_one, x)[:, :short]


def _factors_of_rows(s: Stack, x: jax.Array) -> jax.Array:
    """Returns the orthogonal factors of rows of `shape`, each a matrix or one for each head."""
    by_head = x if s.head is None else jnp.moveaxis(x, s.head, 1)
    matrices = by_head.reshape(-1, s.rows, s.columns)
    is_wide = s.rows <= s.columns
    factors = _newton_schulz(matrices) if is_wide else _newton_schulz(matrices.mT).mT
    factors = factors.reshape(by_head.shape)
    return factors if s.head is None else jnp.moveaxis(factors, 1, s.head)


def _orthogonalise_rest(rest: Rest, rows: dict[str, jax.Array]) -> list[jax.Array]:
    """Returns the orthogonal factors of the rows that remain of each member.

    rows: all rows, by path.

    pooled matrices   | in rounds: one of each device at a time | split by all devices |
    """
    first = rest.members[0]
    owners = first.owners
    short = len(first.sides[0])
    placement: Placement = ((), *(first.placement[d] for d in first.matrix_dims))
    pooled = jnp.concatenate([_remaining_matrices(s, rows[s.path]) for s in rest.members])
    in_rounds = rest.rounds * owners.count
    parts = []
    if rest.rounds:
        padded = pad_layers(pooled[: min(in_rounds, pooled.shape[0])], in_rounds)
        job = Job(owners, (padded,), (placement,), placement)
        factors = functools.partial(_factors_of_matrices, short)
        parts.append(job.in_rounds(factors, rest.rounds)[: pooled.shape[0]])
    if rest.split:
        parts.append(_orthogonalise_split(pooled[in_rounds:], placement, short, owners))
    found = jnp.concatenate(parts)
    results = []
    start = 0
    for s in rest.members:
        count = s.remaining * s.matrices_per_entry
        results.append(_rows_of_matrices(s, found[start : start + count]))
        start += count
    return results


def _remaining_matrices(s: Stack, rows: jax.Array) -> jax.Array:
    """Returns the matrices of the rows that remain, [matrices, shorter side, longer side]."""
    x = rows[-s.remaining :].transpose(s.matrix_order)
    counting = 1 if s.head is None else 2
    return x.reshape(-1, *x.shape[counting:])


def _rows_of_matrices(s: Stack, matrices: jax.Array) -> jax.Array:
    """Inverts `_remaining_matrices`."""
    order = s.matrix_order
    x = matrices.reshape(s.remaining, *(s.shape[d] for d in order[1:]))
    return x.transpose([order.index(d) for d in range(len(order))])


def _factors_of_matrices(short: int, x: jax.Array) -> jax.Array:
    """Returns the orthogonal factors of matrices whose first `short` dimensions are a side."""
    rows = math.prod(x.shape[1 : 1 + short])
    return _newton_schulz(x.reshape(x.shape[0], rows, -1)).reshape(x.shape)


def _orthogonalise_split(
    x: jax.Array, placement: Placement, short: int, owners: Owners
) -> jax.Array:
    """Orthogonalises local blocks x of k matrices, devices sharing each matrix.

    x: [k, dimensions of the shorter side (`short` of them), dimensions of the longer side].
    Rows and columns may be in any order, as long as it is the same for all devices: the result is
    in that order too.
    """
    shape = x.shape
    gathers = []
    for sharded_over in placement[1 : 1 + short]:
        gathers.append(tuple(axis for axis in sharded_over if axis in owners.axes))
    replicated = tuple(axis for axis in owners.axes if axis not in axes_of(placement))
    x = x.reshape(shape[0], math.prod(shape[1 : 1 + short]), -1)
    long = x.shape[2]
    parts = math.prod(owners.of((*replicated, *itertools.chain(*gathers))))
    x = local_shard(jnp.pad(x, ((0, 0), (0, 0), (0, -long % parts))), replicated, 2)
    for axes in gathers:
        x = all_to_all(x, axes, 2, 1)
    x = _split_newton_schulz(x, owners)
    for axes in reversed(gathers):
        x = all_to_all(x, axes, 1, 2)
    return all_gather(x, replicated, 2)[:, :, :long].reshape(shape)
