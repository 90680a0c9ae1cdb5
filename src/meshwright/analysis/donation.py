"""Donation of a step's state: arguments that their own update could overwrite, and donations that nothing can use."""

import re
from collections.abc import Mapping
from typing import Any

from jax.extend import core

from meshwright.analysis.lint import Finding
from meshwright.hlo.parser import Module, bytes_of
from meshwright.hlo.scopes import plain_path

MIN_DONATED_BYTES = 2**18
"""Bytes on a device from which state that is not donated, or donated in vain, is reported."""
_STATE = ("parameters", "optimizer state")
_UPDATES = frozenset({"add", "sub", "select_n", "convert_element_type", "sharding_constraint", "copy"})
"""Primitives through which an update passes its parameter: `w - rate * gradient`, but not a gradient itself."""


def lint_donation(
    module: Module, jaxpr: Any, leaves: Mapping[str, Any], categories: Mapping[str, str], line: str
) -> list[Finding]:
    """Reports arguments that are returned updated and not donated, and state that is donated and not returned.

    leaves: arguments by path, in the order of the closed jaxpr's inputs.  categories: their memory category by path.
    line: FILE:LINE of the function.
    """
    if len(leaves) != len(jaxpr.jaxpr.invars):
        return []  # no path for every input
    aliased = {int(n) for n in re.findall(r": \((\d+),", _header_list(module, "input_output_alias"))}
    unused = {int(n) for n in re.findall(r"\((\d+),", _header_list(module, "buffer_donor"))}
    numbers = {plain_path(i.op_name): (n, bytes_of(i.shape)) for n, i in module.entry.parameters.items()}
    outputs, updated = _updated_inputs(jaxpr.jaxpr), set[str]()
    for path, variable in zip(leaves, jaxpr.jaxpr.invars, strict=True):
        if variable in outputs:
            updated.add(path)
    wasted, vain = dict[str, int](), dict[str, int]()
    for path, (number, size) in numbers.items():
        tree = path.partition(".")[0]
        if number in unused and categories.get(path) in _STATE:
            vain[tree] = vain.get(tree, 0) + size
        elif path != tree and path in updated and number not in aliased | unused:
            # An array on its own is as likely an activation with a residual connection as state.
            wasted[tree] = wasted.get(tree, 0) + size
    findings = [
        Finding(
            "donation",
            tree,
            "it is returned updated and not donated: a step holds it twice",
            f"donate it: donate_argnums or donate_argnames={tree!r} of jax.jit",
            size,
            line,
        )
        for tree, size in wasted.items()
        if size >= MIN_DONATED_BYTES
    ]
    findings += [
        Finding(
            "donation",
            tree,
            "it is donated, and no result has its shape, type and sharding: the donation is lost",
            "return it updated in its own type, or do not donate it",
            size,
            line,
        )
        for tree, size in vain.items()
        if size >= MIN_DONATED_BYTES
    ]
    return findings


def _updated_inputs(jaxpr: Any) -> set[Any]:
    """Returns the inputs of an open jaxpr of which an output is a sum or difference, through calls."""
    reached = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    passed_on = set(reached)
    for equation in reversed(jaxpr.eqns):
        wanted = [i for i, v in enumerate(equation.outvars) if v in reached]
        if not wanted:
            continue
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        if equation.primitive.name in _UPDATES:
            sources = list(equation.invars)
        elif inner is not None and len(inner.invars) == len(equation.invars):
            found = _updated_inputs(inner)
            sources = [v for v, i in zip(equation.invars, inner.invars, strict=True) if i in found]
        else:
            sources = []
        shapes = {equation.outvars[i].aval.shape for i in wanted}
        reached |= {v for v in sources if isinstance(v, core.Var) and getattr(v.aval, "shape", None) in shapes}
    # An argument that is returned as it is was not updated.
    return {v for v in jaxpr.invars if v in reached and v not in passed_on}


def _header_list(module: Module, name: str) -> str:
    """Returns the text of a list in the program's header; empty if it has none."""
    start = module.header.find(f"{name}={{")
    depth = 0
    for i in range(start + len(name) + 1, len(module.header)) if start >= 0 else ():
        depth += (module.header[i] == "{") - (module.header[i] == "}")
        if not depth:
            return module.header[start:i]
    return ""
