"""Division of Muon's matrices among devices: which a device orthogonalises whole, and which all of them split.

Arithmetic on shapes, which the update (step/muon.py) follows and the planner prices.
"""

import dataclasses
import math

from meshwright.config import MeshShape, MuonHeads
from meshwright.sharding.params import Param, Tree, named_leaves
from meshwright.sharding.placement import Placement, local_shape
from meshwright.step.matrices import Owners, owners_of

STEPS = 5
"""Newton-Schulz iterations."""
IN_A_ROUND = 2**26
"""Elements that a device has of small matrices in one round (64 Mi)."""
_PADDING = 0.1
"""Largest fraction of a group's matrices that may be padding; beyond it the last matrices are split."""


def orthogonalised(p: Param) -> bool:
    """Returns whether Muon updates a parameter: matmuls of layers, other than the router's; AdamW has the rest."""
    matrix = p.role not in (None, "router") and "L" in p.dims and not p.frozen
    return matrix and (p.init == "normal" or p.role == "adapter")


def newton_schulz_flops(short: int, long: int) -> float:
    """Returns the FLOPs of orthogonalising a matrix: X X' (2 s² l), its square (2 s³), and their product with X."""
    return STEPS * (4.0 * short * short * long + 2.0 * short**3)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter on the devices that share them."""

    path: str
    owners: Owners
    experts: int
    """Experts of a layer on a device, each a layer of its own here; 1 for other parameters."""
    where: Placement
    """Placement of [layers and experts, ...]."""
    shape: tuple[int, ...]
    """Local sizes of [layers and experts, ...]."""
    head: int | None
    """Dimension of `shape` that counts heads, each a matrix; None where there is none."""
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
        most = max(1, IN_A_ROUND // (self.rows * self.columns * self.heads))
        return max((d for d in range(1, min(most, self.whole) + 1) if self.whole % d == 0), default=1)

    @property
    def left(self) -> int:
        """Rows that the devices do not divide."""
        return self.shape[0] % self.owners.count

    @property
    def matrix_dims(self) -> tuple[int, ...]:
        """Dimensions of `shape` that are a matrix's: of the shorter side, then of the longer."""
        dims = tuple(d for d in range(1, len(self.shape)) if d != self.head)
        rows, columns = dims[: self.contract], dims[self.contract :]
        return (*columns, *rows) if self._transposed(rows, columns) else dims

    @property
    def short_dims(self) -> int:
        """How many of `matrix_dims` are the shorter side's."""
        dims = tuple(d for d in range(1, len(self.shape)) if d != self.head)
        rows, columns = dims[: self.contract], dims[self.contract :]
        return len(columns) if self._transposed(rows, columns) else len(rows)

    def _transposed(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> bool:
        # Of square matrices those with the same placement shall look alike: a projection and its way back.
        first, second = (
            (n, len(d), [self.where[i] for i in d]) for n, d in ((self.rows, rows), (self.columns, columns))
        )
        return second < first


@dataclasses.dataclass(frozen=True)
class Rest:
    """Matrices of one local shape, of several parameters, that were left when devices divided the layers."""

    members: tuple[Stack, ...]
    rounds: int
    """Matrices of each device."""
    split: int
    """Matrices whose matmuls all devices split."""


def plan_muon(params: Tree, placements: Tree, mesh: MeshShape, heads: MuonHeads) -> tuple[list[Stack], list[Rest]]:
    """Returns the stacks of all matrices, and what is left of them.

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
        local = tuple((stack.shape[d], stack.where[d]) for d in stack.matrix_dims)
        groups.setdefault((stack.owners, stack.short_dims, local), []).append(stack)
    rests = []
    for members in groups.values():
        count, n = sum(stack.left * stack.heads for stack in members), members[0].owners.count
        if count:
            total = sum(stack.shape[0] * stack.heads for stack in members)
            padded = (-count % n) <= _PADDING * total
            left = tuple(stack for stack in members if stack.left)
            rests.append(Rest(left, -(-count // n), 0) if padded else Rest(left, count // n, count % n))
    return stacks, rests


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
        experts=math.prod(shape[1:first]),
        where=((), *where[first:]),
        shape=(math.prod(shape[:first]), *shape[first:]),
        head=None if head is None else head - first + 1,
        contract=contract,
        rows=math.prod(sizes[:contract]),
        columns=math.prod(sizes[contract:]),
    )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind over the same axes, `count` times in an update."""

    kind: str
    axes: tuple[str, ...]
    elements: float
    """Elements of the whole array, as the planner counts: of an all-to-all those of a device."""
    count: float
    float32: bool = False
    """Whether they are float32 rather than of the compute dtype."""


def exchanges(stacks: list[Stack], rests: list[Rest]) -> list[Exchange]:
    """Returns the collectives of an update: matrices to their owners and back, and the products of split ones."""
    found: list[Exchange] = []
    for stack in stacks:
        if stack.whole:
            dims = tuple(range(1, len(stack.shape)))
            unit = stack.rows * stack.columns * stack.heads * stack.each
            found += _moved(stack, dims, float(unit), stack.whole / stack.each)
    for rest in rests:
        first = rest.members[0]
        n, short = first.owners.count, min(first.rows, first.columns)
        if rest.rounds:
            found += _moved(first, first.matrix_dims, float(first.rows * first.columns), rest.rounds)
        if rest.split:
            part = float(rest.split * first.rows * first.columns)
            found += _moved(first, first.matrix_dims[: first.short_dims], part / n, 1.0, first.matrix_dims)
            square = float((short + -short % n) * (short + -short % n))
            found.append(Exchange("reduce-scatter", first.owners.axes, square, float(STEPS * rest.split), True))
            found.append(Exchange("all-gather", first.owners.axes, square, float(2 * STEPS * rest.split)))
    return found


def _moved(
    stack: Stack, dims: tuple[int, ...], mine: float, count: float, all_dims: tuple[int, ...] = ()
) -> list[Exchange]:
    """Collectives that bring `mine` elements to a device and take as many back. dims: those that are made whole."""
    axes_of_dims = [tuple(axis for axis in stack.where[d] if axis in stack.owners.axes) for d in dims]
    found = [Exchange("all-to-all", axes, mine, 2 * count) for axes in axes_of_dims if axes]
    sharded = {axis for d in all_dims or dims for axis in stack.where[d]}
    replicated = tuple(axis for axis in stack.owners.axes if axis not in sharded)
    if replicated:
        found.append(Exchange("all-gather", replicated, mine * math.prod(stack.owners.of(replicated)), count))
    return found


def temporaries(stacks: list[Stack], rests: list[Rest]) -> tuple[float, float]:
    """Returns the elements of a device's momentum that an update copies, and of the largest matrices of a round."""
    copied = sum(float(math.prod(stack.shape)) for stack in stacks)
    rounds = [stack.rows * stack.columns * stack.heads * stack.each for stack in stacks if stack.whole]
    for rest in rests:
        first = rest.members[0]
        # Split matrices have their square whole.
        rounds.append(first.rows * first.columns if rest.rounds else min(first.rows, first.columns) ** 2)
    return copied, float(max(rounds, default=0))


def flops_of_device(stacks: list[Stack], rests: list[Rest]) -> tuple[float, float]:
    """Returns the Newton-Schulz FLOPs of a device, and those of an even share among all that hold its layers."""
    done = even = 0.0
    for stack in stacks:
        matrix = newton_schulz_flops(*sorted((stack.rows, stack.columns)))
        done += stack.whole * stack.heads * matrix
        even += stack.shape[0] * stack.heads * matrix / stack.owners.count
    for rest in rests:
        stack = rest.members[0]
        matrix = newton_schulz_flops(*sorted((stack.rows, stack.columns)))
        done += (rest.rounds + rest.split / stack.owners.count) * matrix
    return done, even
