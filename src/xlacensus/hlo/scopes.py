"""Phases and named scopes of a program's operations, read from the names that JAX gives them."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

Phase = Literal["forward", "recomputed", "backward", "update"]
"""Part of a training step: the forward pass,
what rematerialisation computes again, the backward pass, the rest."""

_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|jit|pjit|remat|checkpoint)\(|\)")
_JAX_INTERNAL = re.compile(
    "while|body|cond|scan|checkpoint|remat2?|rematted_computation|shard_map|pjit"
    "|closed_call|core_call|eval_jaxpr|custom_jvp_call|custom_vjp_call(_jaxpr)?"
)
_COMBINED = re.compile(r"/\((?P<names>[^()]+)\)$")
"""End of the name of an operation that XLA made of several: `(a/psum:b/psum)`."""
_BRANCH_FUNCTION = re.compile(r"branch_\d+_fun$")


@dataclasses.dataclass(frozen=True)
class BranchScope:
    """A `jax.named_scope` around one branch of a conditional, with how often that branch is taken.

    A compiled program does not contain this: whoever wrote the conditional knows it (a
    pipeline schedule, for one).
    """

    taken: int
    """Executions in which the branch is taken."""
    executions: int
    recomputes: bool = False
    """Whether a forward pass that the branch differentiates repeats one of an earlier branch."""


Branches = Mapping[str, BranchScope]
"""Scope of a branch -> how often it is taken."""


def phase_of(op_name: str, branches: Branches) -> Phase:
    """Returns the phase of a training step that an operation belongs to."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    differentiated = "jvp(" in op_name
    branch = next((branch for scope, branch in branches.items() if scope in op_name), None)
    if branch is not None:
        return "recomputed" if branch.recomputes and differentiated else "forward"
    return "forward" if differentiated else "update"


def scopes_of(op_name: str, branches: Branches) -> tuple[str, ...]:
    """Lists the names given by `jax.named_scope`, outermost first.

    The function's own name, the operation's name and the scopes of `branches` are left out.
    """
    if combined := _COMBINED.search(op_name):
        names = combined["names"].split(":")
        inner_most = list(dict.fromkeys(name.rpartition("/")[0] for name in names))
        outer = scopes_of(f"{op_name[: combined.start()]}/{names[0]}", branches)
        return (
            (*outer[:-1], f"{outer[-1]} and {len(inner_most) - 1} more")
            if outer and inner_most[1:]
            else outer
        )
    # `jit(silu)` inside a path is a function of JAX, not a scope.
    parts = [
        part for part in op_name.split("/")[1:-1] if not part.startswith(("jit(", "pjit(", "("))
    ]
    inner = [_WRAPPER.sub("", part) for part in parts]
    # An einsum is named by its formula, `bskh,bkh->bs`.
    return tuple(
        part
        for part in inner
        if part
        and not _JAX_INTERNAL.fullmatch(part)
        and part not in branches
        and not _BRANCH_FUNCTION.match(part)
        and "->" not in part
    )


def plain_path(path: str) -> str:
    """Rewrites a JAX key path with dots: `state.params['blocks'][0]` becomes
    `state.params.blocks.0`."""
    plain = (
        path.replace("\\'", "'")
        .replace("['", ".")
        .replace("']", "")
        .replace("[", ".")
        .replace("]", "")
    )
    return plain.replace("<flat index ", "").replace(">", "").lstrip(".")
