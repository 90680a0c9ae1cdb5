"""Execution counts: how often each computation of a program runs in one execution of the program."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

from meshwright.hlo.parser import Computation, Instruction, Module
from meshwright.hlo.scopes import BranchScope
from meshwright.hlo.trip_count import trip_count

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


Choice = Callable[[Sequence[Computation]], Sequence[Computation]]
"""Chooses, of the branches of a conditional whose frequency is unknown, those that are entered."""


def walk(module: Module, choice: Choice = lambda branches: branches) -> Iterator[ExecutionContext]:
    """Yields the entry computation and all computations it runs, fusion bodies included, once per place.

    choice: branches of unknown frequency to enter; by default all of them. A branch that a constant selects is the only
    one, whatever the choice.
    """
    yield from _walk(module, ExecutionContext(module.entry, 1, True, False, ()), choice)


def _walk(module: Module, context: ExecutionContext, choice: Choice) -> Iterator[ExecutionContext]:
    yield context
    for instruction in context.computation.instructions.values():
        if not instruction.called:
            continue
        trips: int | None = 1
        if instruction.opcode == "while":
            trips = trip_count(module, context.computation, instruction)
        callees = [module.computations[name] for name in instruction.called if name in module.computations]
        if instruction.opcode == "conditional":
            callees = _entered(module, context.computation, instruction, choice)
        for callee in callees:
            branch = known_branch(module, callee) if instruction.opcode == "conditional" else _ALWAYS
            frequency = branch or _ALWAYS
            # A condition runs once more than its body; the difference is negligible.
            yield from _walk(
                module,
                ExecutionContext(
                    callee,
                    context.count * (1 if trips is None else trips) * frequency.taken // frequency.executions,
                    context.exact and trips is not None,
                    context.conditional or branch is None,
                    (*context.callers, (context.computation, instruction)),
                ),
                choice,
            )


def branches_of(module: Module, computation: Computation, conditional: Instruction) -> list[Computation]:
    """Returns the branches that a conditional can take: all of them, or the one that a constant selects."""
    branches = [module.computations[name] for name in conditional.called if name in module.computations]
    selector = computation.instructions.get(conditional.operands[0]) if conditional.operands else None
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


def _entered(module: Module, computation: Computation, conditional: Instruction, choice: Choice) -> list[Computation]:
    """Returns the branches of a conditional that are entered: those of known frequency, and the chosen others."""
    branches = branches_of(module, computation, conditional)
    unknown = [branch for branch in branches if known_branch(module, branch) is None]
    chosen = {branch.name for branch in choice(unknown)} if len(unknown) > 1 else {branch.name for branch in unknown}
    return [branch for branch in branches if branch.name in chosen or known_branch(module, branch) is not None]


def scope_of_branch(module: Module, branch: Computation) -> str | None:
    """Finds the scope of `Module.branches` that a branch belongs to; None if it belongs to none."""
    names = [i.op_name for i in branch.instructions.values()]
    return next((scope for scope in module.branches if any(f"/{scope}/" in name for name in names)), None)


def known_branch(module: Module, branch: Computation) -> BranchScope | None:
    """Returns how often a branch is taken; None if the caller has not said."""
    scope = scope_of_branch(module, branch)
    return None if scope is None else module.branches[scope]
