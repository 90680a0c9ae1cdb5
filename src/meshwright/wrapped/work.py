"""Work of a loss, read from its jaxpr: matmuls with their sizes, what the backward pass keeps, and what is sent."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import jax
from jax.extend import core

from meshwright.planner.work import Matmul
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.wrapped.parts import WrappedParts, check_rows

Dims = tuple[int | None, ...]
"""Dimension of a parameter that each dimension of a value is; None where it is none."""
_Origin = tuple[str, Dims]


@dataclasses.dataclass(frozen=True)
class LossWork:
    """Forward pass of a microbatch on one device, and the arrays that its backward pass reads."""

    matmuls: tuple[Matmul, ...]
    """The backward pass has two of the size of each."""
    kept_bytes: float
    """Bytes that are kept for the backward pass, besides parameters."""
    tensor_bytes: float
    """Bytes of activations that are summed over `tensor`, forward and backward."""


def training_flops(parts: WrappedParts) -> float:
    """Returns the model FLOPs of a step on the whole batch: three times those of the forward pass."""
    function, arguments = parts.traced(train=True)
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return 3.0 * sum(m.flops for m in _Reader(None).matmuls(jaxpr, {}, 1.0))


def work_of_loss(parts: WrappedParts, placed: PlacedRun) -> LossWork:
    """Returns the work of one device's part of a microbatch.

    A matmul whose parameter is split over `tensor` is divided by its degree; all others count in full.
    """
    rows = placed.run.training.batch // (placed.shape.over(BATCH_AXES) * placed.run.training.microbatches)
    if rows < parts.source.batch_size:
        check_rows(parts, rows, rows if parts.held_out is not None else 0)
    function, arguments = parts.traced(True, rows)

    def kept(params: Any, variables: Any, batch: Any, words: Any) -> list[Any]:
        backward = jax.vjp(lambda params: function(params, variables, batch, words)[0], params)[1]
        own = {id(x) for x in jax.tree.leaves((params, batch))}
        return [x for x in jax.tree.leaves(backward) if id(x) not in own]

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    origins: dict[Any, _Origin] = {
        variable: (name, tuple(range(parts.params[name].ndim)))
        for name, variable in zip(sorted(parts.params), jaxpr.invars, strict=False)
    }
    reader = _Reader(placed)
    matmuls = tuple(reader.matmuls(jaxpr, origins, 1.0))
    shapes = jax.eval_shape(kept, *arguments)
    return LossWork(matmuls, float(sum(x.size * x.dtype.itemsize for x in shapes)), reader.tensor_bytes)


@dataclasses.dataclass
class _Reader:
    """Matmuls of a jaxpr, each divided where its parameter is split over `tensor`."""

    placed: PlacedRun | None
    """Placement of the parameters; None splits nothing."""
    tensor_bytes: float = 0.0

    def matmuls(self, jaxpr: Any, origins: dict[Any, _Origin], times: float) -> Iterator[Matmul]:
        """Yields the matmuls of an open jaxpr. origins: values that are parameters.  times: executions of it."""
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            given = [origins.get(v) if isinstance(v, core.Var) else None for v in equation.invars]
            if name == "dot_general":
                yield self._product(equation, given, times)
            elif name == "conv_general_dilated":
                numbers, kernel = equation.params["dimension_numbers"], equation.invars[1].aval.shape
                depth = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
                out, n = equation.outvars[0].aval.size, kernel[numbers.rhs_spec[0]]
                groups = equation.params.get("batch_group_count", 1)
                yield Matmul("convolution", out / n, depth, n, times / groups)
            elif name in ("convert_element_type", "copy", "transpose", "optimization_barrier") and given[0]:
                path, dims = given[0]
                order = equation.params.get("permutation", range(len(dims)))
                origins[equation.outvars[0]] = (path, tuple(dims[d] for d in order))
            yield from self._inside(equation, given, times)

    def _inside(self, equation: Any, given: list[_Origin | None], times: float) -> Iterator[Matmul]:
        name, params = equation.primitive.name, equation.params
        if name == "cond":
            branches = [list(self.matmuls(b.jaxpr, {}, times)) for b in params["branches"]]
            yield from max(branches, key=lambda found: sum(m.flops for m in found))
            return
        for value in params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if not isinstance(inner, core.Jaxpr):
                    continue
                own = given[-len(inner.invars) :] if inner.invars else []
                if name == "scan":  # whose body gets rows of what is scanned over
                    ranks = [len(cast(Any, v.aval).shape) for v in inner.invars]
                    own = [g and (g[0], g[1][len(g[1]) - rank :]) for g, rank in zip(own, ranks, strict=True)]
                known = {v: g for v, g in zip(inner.invars, own, strict=False) if g is not None}
                yield from self.matmuls(inner, known, times * (params["length"] if name == "scan" else 1))

    def _product(self, equation: Any, given: list[_Origin | None], times: float) -> Matmul:
        (contracted, (batched, _)) = (equation.params["dimension_numbers"][0], equation.params["dimension_numbers"][1])
        left, right = (v.aval for v in equation.invars)
        k = math.prod(left.shape[d] for d in contracted[0])
        groups = math.prod(left.shape[d] for d in batched)
        m, n = left.size / k / groups, right.size / k / groups
        degree = 1.0
        for side, origin in enumerate(given):
            if origin is None or self.placed is None:
                continue
            placement = self.placed.placements[origin[0]].in_use
            split = [i for i, d in enumerate(origin[1]) if d is not None and "tensor" in placement[d]]
            if split:
                degree = float(self.placed.shape.tensor)
                # Rows of a pair of matrices need a sum of the result forward, columns one of the input backward.
                by_rows = split[0] in contracted[side]
                other = equation.invars[1 - side].aval
                moved = equation.outvars[0].aval if by_rows else other
                self.tensor_bytes += times * moved.size * moved.dtype.itemsize
        return Matmul("matmul", m, int(k), max(1, round(n)), times * groups / degree)
