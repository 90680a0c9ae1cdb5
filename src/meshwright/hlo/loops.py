"""Execution counts: how often each computation of a program runs in one execution of the program.

XLA annotates loops with `known_trip_count` on CPU and GPU, not on TPU. Without it a trip count is believed only if the
condition is one comparison of a counter with a bound, the counter starts at a constant, the body adds a constant to it,
and the bound is a constant. A loop that ends on data (`error > tolerance`) has no trip count, even if a constant stands
in its condition.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.hlo.parser import Computation, Instruction, Module
from meshwright.hlo.scopes import BranchScope

_ALWAYS = BranchScope(1, 1)


@dataclasses.dataclass(frozen=True)
class ExecutionContext:
    """A computation at one place of the call tree."""

    computation: Computation
    count: int
    """Executions of the computation; the trip counts of all loops around it are multiplied."""
    exact: bool
    """Whether the trip counts of all loops around it are known; a loop without one is counted once."""
    conditional: bool
    """Whether it is inside a branch of unknown frequency (`Module.branches`), which is counted as always taken."""
    callers: tuple[tuple[Computation, Instruction], ...]
    """Instructions through which it is reached, outermost first, each with its computation."""

    def op_name(self, instruction: Instruction) -> str:
        """Returns JAX's name of an instruction, or of the nearest of its callers that has one."""
        names = (instruction.op_name, *(caller.op_name for _, caller in reversed(self.callers)))
        return next(filter(None, names), "")


Choice = Callable[[Sequence[Computation]], Sequence[Computation]]
"""Chooses, of the branches of a conditional whose frequency is unknown, those that are entered."""


def walk(module: Module, choice: Choice = lambda branches: branches) -> Iterator[ExecutionContext]:
    """Yields the entry computation and all computations it runs, fusion bodies included, once per place.

    choice: branches of unknown frequency to enter; by default all of them. A branch that a constant selects is the only
    one, whatever the choice.
    """
    yield from _walk(module, ExecutionContext(module.entry, 1, True, False, ()), choice)


def walk_instructions(
    module: Module, choice: Choice = lambda branches: branches
) -> Iterator[tuple[ExecutionContext, Instruction]]:
    """Yields every instruction that `walk` reaches, with its computation's place in the call tree."""
    for context in walk(module, choice):
        for instruction in context.computation.instructions.values():
            yield context, instruction


def _walk(module: Module, context: ExecutionContext, choice: Choice) -> Iterator[ExecutionContext]:
    yield context
    for instruction in context.computation.instructions.values():
        trips: int | None = 1
        callees: list[tuple[Computation, BranchScope | None]]
        callees = [(callee, _ALWAYS) for callee in module.called_by(instruction)]
        if instruction.opcode == "while":
            trips = trip_count(module, context.computation, instruction)
        elif instruction.opcode == "conditional":
            callees = _entered(module, context.computation, instruction, choice)
        for callee, branch in callees:
            frequency = branch or _ALWAYS
            # A condition runs once more than its body; the difference is negligible.
            inner = ExecutionContext(
                callee,
                context.count * (1 if trips is None else trips) * frequency.taken // frequency.executions,
                context.exact and trips is not None,
                context.conditional or branch is None,
                (*context.callers, (context.computation, instruction)),
            )
            yield from _walk(module, inner, choice)


def _entered(
    module: Module, computation: Computation, conditional: Instruction, choice: Choice
) -> list[tuple[Computation, BranchScope | None]]:
    """Returns the branches of a conditional that are entered: those of known frequency, and the chosen others."""
    branches = [(branch, known_branch(module, branch)) for branch in branches_of(module, computation, conditional)]
    unknown = [branch for branch, known in branches if known is None]
    chosen = {branch.name for branch in (choice(unknown) if len(unknown) > 1 else unknown)}
    return [(branch, known) for branch, known in branches if known is not None or branch.name in chosen]


def branches_of(module: Module, computation: Computation, conditional: Instruction) -> list[Computation]:
    """Returns the branches that a conditional can take: all of them, or the one that a constant selects."""
    branches = module.called_by(conditional)
    selector = computation.operand(conditional)
    if selector is None or selector.opcode != "constant":
        return branches
    # `true` selects the first of two branches, a number the branch of that place; one out of range the last.
    value = selector.operand_text.strip()
    if value in ("true", "false"):
        return branches[:1] if value == "true" else branches[1:]
    if not re.fullmatch(r"-?\d+", value):
        return branches
    place = int(value)
    return [branches[place if 0 <= place < len(branches) else -1]]


def scope_of_branch(module: Module, branch: Computation) -> str | None:
    """Finds the scope of `Module.branches` that a branch belongs to; None if it belongs to none."""
    names = [i.op_name for i in branch.instructions.values()]
    return next((scope for scope in module.branches if any(f"/{scope}/" in name for name in names)), None)


def known_branch(module: Module, branch: Computation) -> BranchScope | None:
    """Returns how often a branch is taken; None if the caller has not said."""
    scope = scope_of_branch(module, branch)
    return None if scope is None else module.branches[scope]


@dataclasses.dataclass(frozen=True)
class _Linear:
    """Integer scalar `state[element] + offset`; a constant if `element` is None."""

    element: int | None
    """Index in the tuple that the loop carries."""
    offset: int


_PASSES_THROUGH = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"})
_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_MAX_DEPTH = 50


@dataclasses.dataclass(frozen=True)
class _Arithmetic:
    """Integer scalars of a computation in terms of a loop's state; None for values that are not linear in it."""

    module: Module
    computation: Computation
    arguments: Mapping[int, _Linear | None] | None = None
    """Values of the parameters of a fusion or call; None in a loop's own computation, whose parameter is the state."""

    def callee(self, instruction: Instruction) -> "_Arithmetic | None":
        """Returns the body of a fusion or call, with the values of its parameters."""
        bodies = self.module.called_by(instruction) if instruction.opcode in ("fusion", "call") else []
        if not bodies:
            return None
        operands = (self.computation.operand(instruction, i) for i in range(len(instruction.operands)))
        return _Arithmetic(self.module, bodies[0], dict(enumerate(map(self.value, operands))))

    def value(self, instruction: Instruction | None) -> _Linear | None:
        """Evaluates an integer scalar."""
        if instruction is None:
            return None
        opcode, operand = instruction.opcode, self.computation.operand(instruction)
        if opcode == "constant":
            is_integer = re.fullmatch(r"-?\d+", instruction.operand_text)
            return _Linear(None, int(instruction.operand_text)) if is_integer else None
        if opcode == "parameter":
            return None if self.arguments is None else self.arguments.get(int(instruction.operand_text))
        if operand is None:
            return None
        if opcode == "get-tuple-element":
            return self.element(operand, int(instruction.attributes["index"]))
        if opcode in _PASSES_THROUGH:
            return self.value(operand)
        if opcode in ("add", "subtract"):
            left, right = self.value(operand), self.value(self.computation.operand(instruction, 1))
            if left is None or right is None:
                return None
            if opcode == "add":
                sum_of_two = left.element is not None and right.element is not None
                element = left.element if right.element is None else right.element
                return None if sum_of_two else _Linear(element, left.offset + right.offset)
            return _Linear(left.element, left.offset - right.offset) if right.element is None else None
        inner = self.callee(instruction)
        return None if inner is None else inner.value(inner.computation.root)

    def element(self, instruction: Instruction | None, index: int) -> _Linear | None:
        """Evaluates one element of a tuple."""
        if instruction is None:
            return None
        if instruction.opcode == "parameter":
            return _Linear(index, 0) if self.arguments is None else None
        if instruction.opcode == "tuple":
            return self.value(self.computation.operand(instruction, index))
        if instruction.opcode in _PASSES_THROUGH:
            return self.element(self.computation.operand(instruction), index)
        inner = self.callee(instruction)
        return None if inner is None else inner.element(inner.computation.root, index)

    def comparison(self, instruction: Instruction | None) -> tuple[str, _Linear, _Linear] | None:
        """Reads a predicate as one comparison: its direction (LT, LE, ..) and sides; None for others, as an `and`."""
        if instruction is None:
            return None
        inner = self.callee(instruction)
        if inner is not None:
            return inner.comparison(inner.computation.root)
        if instruction.opcode in ("copy", "bitcast", "tuple") and len(instruction.operands) == 1:
            return self.comparison(self.computation.operand(instruction))
        left, right = (self.value(self.computation.operand(instruction, i)) for i in range(2))
        if instruction.opcode != "compare" or left is None or right is None:
            return None
        return instruction.attributes.get("direction", ""), left, right

    def keeps(self, value: _Linear) -> bool:
        """Whether a value is a constant, or an element of the state that this body of a loop passes on unchanged."""
        return value.element is None or self.element(self.computation.root, value.element) == _Linear(value.element, 0)


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a `while` in the computation `caller`; None if it depends on data or is not proved."""
    annotated = re.search(r'known_trip_count[\\"]*:\{[\\"]*n[\\"]*:[\\"]*(\d+)', loop.attribute_text)
    if annotated:
        return int(annotated[1])
    if len(module.called_by(loop)) != 2:
        return None
    body, condition = (_Arithmetic(module, computation) for computation in module.called_by(loop))
    comparison = condition.comparison(condition.computation.root)
    if comparison is None:
        return None
    direction, counter, bound = comparison
    if body.keeps(counter):
        direction, counter, bound = _SWAPPED[direction], bound, counter
    if counter.element is None or not body.keeps(bound):
        return None
    following = body.element(body.computation.root, counter.element)
    first, last = (_initial(module, caller, loop, value, 0) for value in (counter, bound))
    if following is None or following.element != counter.element or first is None or last is None:
        return None
    return _trips(direction, first, last, following.offset)


def _trips(direction: str, first: int, last: int, step: int) -> int | None:
    """Counts the values first, first + step, ... before the comparison with `last` fails; None if it never does."""
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


def _initial(module: Module, caller: Computation, loop: Instruction, value: _Linear, depth: int) -> int | None:
    """Evaluates a value of the loop's condition before the first trip; None if it is not a constant."""
    if value.element is None:
        return value.offset
    around = _Arithmetic(module, caller)
    first = around.element(caller.operand(loop), value.element)
    if first is None or depth > _MAX_DEPTH:
        return None
    if first.element is None:
        return first.offset + value.offset
    # The caller is the body of a loop itself, which may carry the value unchanged.
    outer = next(((c, i) for c, i in module.instructions() if i.opcode == "while" and i.called[0] == caller.name), None)
    if outer is None or not around.keeps(_Linear(first.element, 0)):
        return None
    constant = _initial(module, *outer, first, depth + 1)
    return None if constant is None else constant + value.offset
