"""Check of a compiled program's donated arguments: state that a step holds twice."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from xlacensus.findings import Finding
from xlacensus.hlo.parser import Module, bytes_of, closing
from xlacensus.hlo.scopes import plain_path
from xlacensus.peak_memory import Argument

MIN_DONATED_BYTES = 2**18
"""Bytes on a device from which state that is not donated, or donated in vain, is reported."""
_STATE = ("parameters", "optimizer state")
_UPDATES = frozenset(
    {"add", "sub", "select_n", "convert_element_type", "sharding_constraint", "copy"}
)
"""Primitives through which an update passes its parameter: `w - rate * gradient`,
but not a gradient itself."""
_NOT_DONATED = (
    "it is returned updated and not donated: a step holds it twice",
    "donate it: donate_argnums or donate_argnames={tree!r} of jax.jit",
)
_DONATED_IN_VAIN = (
    "it is donated, and no result has its shape, type and sharding: the donation is lost",
    "return it updated in its own type, or do not donate it",
)


def lint_donation(
    module: Module, jaxpr: Any, leaves: Mapping[str, Any], arguments: Sequence[Argument]
) -> Iterator[Finding]:
    """Reports arguments that are returned updated and not donated,
    and state that is donated in vain.

    leaves: arguments by path, in the order of the closed jaxpr's inputs.
    """
    if len(leaves) != len(jaxpr.jaxpr.invars):
        return  # no path for every input
    aliased = _numbers(r": \((\d+),", _header_list(module, "input_output_alias"))
    unused_donors = _numbers(r"\((\d+),", _header_list(module, "buffer_donor"))
    donated = aliased | unused_donors
    categories = {a.path: a.category for a in arguments}
    changed = _updated_inputs(jaxpr.jaxpr)
    inputs = zip(leaves, jaxpr.jaxpr.invars, strict=True)
    updated = {path for path, variable in inputs if variable in changed}

    not_donated = Counter[str]()
    donated_in_vain = Counter[str]()
    for number, parameter in module.entry.parameters.items():
        path = plain_path(parameter.op_name)
        tree = path.partition(".")[0]
        size = bytes_of(parameter.shape)
        if number in unused_donors and categories.get(path) in _STATE:
            donated_in_vain[tree] += size
        elif path != tree and path in updated and number not in donated:
            # An array on its own is as likely an activation with a residual connection as state.
            not_donated[tree] += size
    yield from _donation_findings(not_donated, *_NOT_DONATED)
    yield from _donation_findings(donated_in_vain, *_DONATED_IN_VAIN)


def _donation_findings(sizes: Mapping[str, int], reason: str, fix: str) -> Iterator[Finding]:
    """Yields a finding for each tree of arguments that is large enough. sizes: in bytes."""
    for tree, size in sizes.items():
        if size >= MIN_DONATED_BYTES:
            yield Finding("donation", tree, reason, fix.format(tree=tree), size)


def _numbers(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text)}


def _updated_inputs(jaxpr: Any) -> set[Any]:
    """Returns the inputs of an open jaxpr of which an output is a sum
    or difference, through calls."""
    reached = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    passed_on = set(reached)
    for equation in reversed(jaxpr.eqns):
        wanted = [i for i, v in enumerate(equation.outvars) if v in reached]
        if not wanted:
            continue
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        sources: list[Any] = []
        if equation.primitive.name in _UPDATES:
            sources = list(equation.invars)
        elif inner is not None and len(inner.invars) == len(equation.invars):
            found = _updated_inputs(inner)
            pairs = zip(equation.invars, inner.invars, strict=True)
            sources = [variable for variable, inside in pairs if inside in found]
        shapes = {equation.outvars[i].aval.shape for i in wanted}
        for variable in sources:
            shape = getattr(variable.aval, "shape", None)
            if isinstance(variable, core.Var) and shape in shapes:
                reached.add(variable)
    # An argument that is returned as it is was not updated.
    return {v for v in jaxpr.invars if v in reached and v not in passed_on}


def _header_list(module: Module, name: str) -> str:
    """Returns the text of a list in the program's header; empty if it has none."""
    start = module.header.find(f"{name}={{") + len(name) + 1
    return module.header[start : closing(module.header, start)] if start > len(name) else ""
