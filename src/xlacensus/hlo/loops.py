"""Execution counts: how often each computation of a program runs in one execution of the program.

XLA annotates loops with `known_trip_count` on CPU and GPU, not on TPU. Without it a trip count is
believed only if the condition is one comparison of a counter with a bound, the counter starts at a
constant, the body adds a constant to it, and the bound is a constant. A loop that ends on data
(`error > tolerance`) has no trip count, even if a constant stands in its condition.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from xlacensus.hlo.parser import Computation, Instruction, Module
from xlacensus.hlo.scopes import BranchScope

_ALWAYS = BranchScope(1, 1)


@dataclasses.dataclass(frozen=True)
class ExecutionContext:
    """A computation at one place of the call tree."""

    computation: Computation
    count: int
    """Executions of the computation; the trip counts of all loops around it are multiplied."""
    exact: bool
    """Whether the trip counts of all loops around it are known;
    a loop without one is counted once."""
    conditional: bool
    """Whether it is inside a branch of unknown frequency (`Module.branches`),
    which is counted as always taken."""
    callers: tuple[Instruction, ...]
    """Instructions through which it is reached, outermost first."""

    def op_name(self, instruction: Instruction) -> str:
        """Returns JAX's name of an instruction, or of the nearest of its callers that has one."""
        return next(filter(None, (i.op_name for i in (instruction, *reversed(self.callers)))), "")


Choice = Callable[[Sequence[Computation]], Sequence[Computation]]
"""Chooses, of the branches of a conditional whose frequency is unknown, those that are entered."""


def walk(
    module: Module, choice: Choice = lambda branches: branches
) -> Iterator[tuple[ExecutionContext, Instruction]]:
    """Yields every instruction of the computations that a program runs, fusion bodies
    included, once per place.

    choice: branches of unknown frequency to enter; by default all of them. A branch that a constant
    selects is the only one, whatever the choice.
    """
    for context in _contexts(ExecutionContext(module.entry, 1, True, False, ()), choice):
        for instruction in context.computation:
            yield context, instruction


def _contexts(context: ExecutionContext, choice: Choice) -> Iterator[ExecutionContext]:
    yield context
    for instruction in context.computation:
        trips: int | None = 1
        callees: list[tuple[Computation, BranchScope | None]] = [
            (callee, _ALWAYS) for callee in instruction.called
        ]
        if instruction.opcode == "while":
            trips = trip_count(instruction)
        elif instruction.opcode == "conditional":
            branches = [
                (branch, known_branch(instruction, branch)) for branch in branches_of(instruction)
            ]
            unknown = [branch for branch, known in branches if known is None]
            chosen = choice(unknown) if len(unknown) > 1 else unknown
            callees = [
                (branch, known)
                for branch, known in branches
                if known is not None or branch in chosen
            ]
        for callee, branch in callees:
            frequency = branch or _ALWAYS
            # A condition runs once more than its body; the difference is negligible.
            inner = ExecutionContext(
                callee,
                context.count
                * (1 if trips is None else trips)
                * frequency.taken
                // frequency.executions,
                context.exact and trips is not None,
                context.conditional or branch is None,
                (*context.callers, instruction),
            )
            yield from _contexts(inner, choice)


def branches_of(conditional: Instruction) -> tuple[Computation, ...]:
    """Returns the branches that a conditional can take: all of them,
    or the one that a constant selects."""
    branches, selector = conditional.called, conditional.operand()
    value = (
        selector.operand_text.strip()
        if selector is not None and selector.opcode == "constant"
        else ""
    )
    # `true` selects the first of two branches, a number the branch of that place;
    # one out of range the last.
    if value in ("true", "false"):
        return branches[:1] if value == "true" else branches[1:]
    if not re.fullmatch(r"-?\d+", value):
        return branches
    return (branches[int(value) if 0 <= int(value) < len(branches) else -1],)


def scope_of_branch(conditional: Instruction, branch: Computation) -> str | None:
    """Finds the scope of `Module.branches` that a branch has;
    None if it has none, or only that of an outer one."""
    inside = (scope for scope in branch.module.branches if scope not in conditional.op_name)
    return next((scope for scope in inside if any(scope in i.op_name for i in branch)), None)


def known_branch(conditional: Instruction, branch: Computation) -> BranchScope | None:
    """Returns how often a branch is taken; None if the caller has not said."""
    scope = scope_of_branch(conditional, branch)
    return None if scope is None else branch.module.branches[scope]


@dataclasses.dataclass(frozen=True)
class _Linear:
    """Integer scalar `state[element] + offset`; a constant if `element` is None."""

    element: int | None
    """Index in the tuple that the loop carries."""
    offset: int


_PASSES_THROUGH = frozenset(
    {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"}
)
_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_MAX_DEPTH = 50

_Given = Mapping[int, _Linear | None] | None
"""Values of the parameters of a fusion or call;
None in a loop's own computation, whose parameter is the state."""


def _inside(instruction: Instruction, given: _Given) -> tuple[Instruction | None, _Given]:
    """Returns the root of a fusion or call, with the values of its parameters;
    no root for other instructions."""
    if instruction.opcode not in ("fusion", "call") or not instruction.called:
        return None, None
    return instruction.called[0].root, {
        i: _value(operand, given) for i, operand in enumerate(instruction.operands)
    }


def _value(instruction: Instruction | None, given: _Given = None) -> _Linear | None:
    """Evaluates an integer scalar in terms of a loop's state; None where it is not linear in it."""
    if instruction is None:
        return None
    opcode, operand = instruction.opcode, instruction.operand()
    if opcode == "constant":
        is_integer = re.fullmatch(r"-?\d+", instruction.operand_text)
        return _Linear(None, int(instruction.operand_text)) if is_integer else None
    if opcode == "parameter":
        return None if given is None else given.get(int(instruction.operand_text))
    if operand is None:
        return None
    if opcode == "get-tuple-element":
        return _element(operand, int(instruction.attributes["index"]), given)
    if opcode in _PASSES_THROUGH:
        return _value(operand, given)
    if opcode in ("add", "subtract"):
        left, right = _value(operand, given), _value(instruction.operand(1), given)
        if left is None or right is None:
            return None
        if right.element is None:
            return _Linear(
                left.element, left.offset + (right.offset if opcode == "add" else -right.offset)
            )
        is_sum = opcode == "add" and left.element is None
        return _Linear(right.element, left.offset + right.offset) if is_sum else None
    return _value(*_inside(instruction, given))


def _element(instruction: Instruction | None, index: int, given: _Given = None) -> _Linear | None:
    if instruction is None:
        return None
    if instruction.opcode == "parameter":
        return _Linear(index, 0) if given is None else None
    if instruction.opcode == "tuple":
        return _value(instruction.operand(index), given)
    if instruction.opcode in _PASSES_THROUGH:
        return _element(instruction.operand(), index, given)
    root, inner = _inside(instruction, given)
    return _element(root, index, inner)


def _comparison(
    instruction: Instruction | None, given: _Given = None
) -> tuple[str, _Linear, _Linear] | None:
    """Reads a predicate as one comparison: its direction (LT, LE, ..) and sides;
    None for others, as an `and`."""
    if instruction is None:
        return None
    root, inner = _inside(instruction, given)
    if root is not None:
        return _comparison(root, inner)
    if instruction.opcode in ("copy", "bitcast", "tuple") and len(instruction.operands) == 1:
        return _comparison(instruction.operand(), given)
    left, right = (_value(instruction.operand(i), given) for i in range(2))
    if instruction.opcode != "compare" or left is None or right is None:
        return None
    return instruction.attributes.get("direction", ""), left, right


def _keeps(body: Computation, value: _Linear) -> bool:
    """Whether a value is a constant, or an element of the state that this body
    of a loop passes on unchanged."""
    return value.element is None or _element(body.root, value.element) == _Linear(value.element, 0)


def trip_count(loop: Instruction) -> int | None:
    """Returns the trip count of a `while`; None if it depends on data or is not proved."""
    annotated = re.search(
        r'known_trip_count[\\"]*:\{[\\"]*n[\\"]*:[\\"]*(\d+)', loop.attribute_text
    )
    if annotated:
        return int(annotated[1])
    comparison = _comparison(loop.called[1].root) if len(loop.called) == 2 else None
    if comparison is None:
        return None
    body, (direction, counter, bound) = loop.called[0], comparison
    if _keeps(body, counter):
        direction, counter, bound = _SWAPPED[direction], bound, counter
    if counter.element is None or not _keeps(body, bound):
        return None
    following = _element(body.root, counter.element)
    first, last = (_initial(loop, value, 0) for value in (counter, bound))
    if following is None or following.element != counter.element or first is None or last is None:
        return None
    return _trips(direction, first, last, following.offset)


def _trips(direction: str, first: int, last: int, step: int) -> int | None:
    """Counts the values first, first + step, ... before the comparison with `last` fails;
    None if it never does."""
    if direction in ("GT", "GE"):
        direction, first, last, step = _SWAPPED[direction], -first, -last, -step
    if direction == "NE":
        distance = last - first
        return distance // step if step and distance % step == 0 and distance // step >= 0 else None
    if direction not in ("LT", "LE"):
        return None
    distance = last - first + (direction == "LE")
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _initial(loop: Instruction, value: _Linear, depth: int) -> int | None:
    """Evaluates a value of the loop's condition before the first trip;
    None if it is not a constant."""
    if value.element is None:
        return value.offset
    caller = loop.computation
    first = _element(loop.operand(), value.element)
    if first is None or depth > _MAX_DEPTH:
        return None
    if first.element is None:
        return first.offset + value.offset
    # The caller is the body of a loop itself, which may carry the value unchanged.
    outer = next((i for i in caller.module if i.opcode == "while" and i.called[0] is caller), None)
    if outer is None or not _keeps(caller, _Linear(first.element, 0)):
        return None
    constant = _initial(outer, first, depth + 1)
    return None if constant is None else constant + value.offset
