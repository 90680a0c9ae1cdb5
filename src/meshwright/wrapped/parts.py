"""A wrapped model traced once: its parameters, variables and random draws;
and what a loss may not be."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from meshwright.errors import ConfigError, foreign_code
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.words import AXES
from meshwright.wrapped.batches import Source, hash_of
from meshwright.wrapped.keys import KEY_WORDS, Draws, draws_of, key_of
from meshwright.wrapped.modules import Adapter, Annotations, Arrays
from xlacensus.jaxprs import Origin, all_jaxprs, uses


@dataclasses.dataclass(frozen=True)
class WrappedParts:
    """Everything about a wrapped model that is not a plain value."""

    adapter: Adapter
    source: Source
    held_out: Source | None
    rules: dict[str, PartitionSpec]
    axes: dict[str, str | None]
    """Logical axis -> mesh axis, for annotations."""
    params: Arrays
    """`ShapeDtypeStruct` of each parameter, by path."""
    variables: Arrays
    """`ShapeDtypeStruct` of each variable, by path."""
    annotations: Annotations
    untrained: frozenset[str] = frozenset()
    """Paths of parameters that the loss has no gradient of."""
    ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    """Rank of each parameter where the loss uses it: of a layer's,
    not of the stack that a loop goes over."""
    local_batch: bool = False
    """Whether the loss is meant to be over a device's own examples."""

    @functools.cached_property
    def _equations(self) -> list[Any]:
        function, arguments = self.traced(train=True)
        jaxprs = all_jaxprs(jax.make_jaxpr(function)(*arguments).jaxpr)
        return [equation for jaxpr, _ in jaxprs for equation in jaxpr.eqns]

    @property
    def communicates(self) -> bool:
        """Whether the loss has collectives over the batch axes of its own,
        as batch norm with `axis_name` has."""
        for equation in self._equations:
            if equation.primitive.name in ("axis_index", "shard_map"):
                continue
            named = equation.params.get("axes", equation.params.get("axis_name", ()))
            axes = named if isinstance(named, tuple | list) else (named,)
            if set(BATCH_AXES) & {axis for axis in axes if isinstance(axis, str)}:
                return True
        return False

    @property
    def rounds(self) -> bool:
        """Whether the loss computes in a floating-point type of 16 bits or fewer."""
        avals = [v.aval for equation in self._equations for v in equation.outvars]
        types = [aval.dtype for aval in avals if hasattr(aval, "dtype")]
        return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2 for dtype in types)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the traced loss and its constants;
        names of functions and places in memory are left out."""
        function, arguments = self.traced(train=True)
        jaxpr = jax.make_jaxpr(function)(*arguments)
        text = re.sub(r" at 0x[0-9a-f]+|name=\S+", "", str(jaxpr))
        return hash_of([text, *_constants(jaxpr)])

    @functools.cached_property
    def draws(self) -> Draws:
        """Draws of the loss for a whole batch."""
        return self.draws_of_batch(train=True)

    @functools.cached_property
    def eval_draws(self) -> Draws:
        """Draws of the loss for a whole batch of the held-out data."""
        return self.draws_of_batch(train=False)

    def draws_of_batch(self, train: bool, rows: int | None = None) -> Draws:
        """Returns what the loss draws for a batch. rows: examples of the batch;
        None takes those of the data."""
        function, arguments = self.traced(train, rows)
        examples = jax.tree.leaves(arguments[2])[0].shape[0]

        def trace_twice() -> Any:
            function, arguments = self.traced(train, 2 * examples)
            return jax.make_jaxpr(function)(*arguments).jaxpr

        return Draws(draws_of(jax.make_jaxpr(function)(*arguments).jaxpr), trace_twice)

    def traced(
        self, train: bool, rows: int | None = None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns `(params, variables, batch, key words) -> (loss, metrics, variables)`
        and abstract arguments.

        It runs inside a `shard_map` of one device,
        where a module may average over the axes of the mesh.
        rows: examples of the batch; None takes those of the data.
        """
        source = self.source if train else self.held_out or self.source

        def loss(params: Arrays, variables: Arrays, batch: Any, words: Any) -> Any:
            key = key_of(words, 1, None)
            result = self.adapter.call((params, variables), batch, key, train)
            return result.loss, result.metrics, result.variables

        return on_one_device(loss), (self.params, self.variables, source.abstract(rows), KEY_WORDS)

    def origins(self, jaxpr: Any) -> dict[Any, Origin]:
        """Returns the variables of the traced loss that are parameters, for
        `analysis.jaxprs.uses`."""
        # A dictionary's leaves are in the order of its sorted keys.
        names = zip(sorted(self.params), jaxpr.invars, strict=False)
        return {v: (name, tuple(range(self.params[name].ndim))) for name, v in names}


def describe_model(adapter: Adapter, source: Source, held_out: Source | None) -> WrappedParts:
    """Traces model and loss with abstract arrays: shapes, annotations, what is drawn,
    and which parameters are trained.

    Raises ConfigError where the loss cannot train the model.
    """
    annotations: Annotations = {}

    def build(key: jax.Array) -> tuple[Arrays, Arrays]:
        params, variables, found = adapter.build(key)
        annotations.update(found)
        return params, variables

    fix = "a loss of (model, batch) that works on one device"
    with foreign_code("wrapping a model", fix, "tracing it with its loss {}"):
        params, variables = jax.eval_shape(build, jax.eval_shape(jax.random.key, 0))
        _check_arrays({**variables, **params})
        parts = WrappedParts(adapter, source, held_out, {}, {}, params, variables, annotations)
        jaxpr = _check_loss(parts, train=True)
        if held_out is not None:
            _check_loss(parts, train=False)
        return dataclasses.replace(parts, untrained=_untrained(parts), ranks=_ranks(parts, jaxpr))


def _check_arrays(arrays: Arrays) -> None:
    for name, x in arrays.items():
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ConfigError(
                f"array {name} of a wrapped model",
                f"it is {x.dtype}, and only real numbers are trained and saved",
                "two real arrays, of which the loss makes a complex one; a constant belongs in the "
                "loss",
            )
        if not x.size:
            truth = f"it is {x.dtype}{list(x.shape)}, which has no elements"
            raise ConfigError(f"array {name} of a wrapped model", truth, "a model without it")


def _check_loss(parts: WrappedParts, train: bool) -> Any:
    """Checks what the loss draws, and its result; returns its open jaxpr."""
    function, arguments = parts.traced(train)
    jaxpr, (value, _, variables) = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if not all(draw.of_step for draw in draws_of(jaxpr.jaxpr)):
        parts.draws_of_batch(train).check_keys_of_the_loss()
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ConfigError(
            "the loss of a wrapped model",
            f"it is {value.dtype}, which has no gradient",
            "a floating-point mean",
        )
    for name, x in variables.items():
        before = parts.variables[name]
        if (x.shape, x.dtype) != (before.shape, before.dtype):
            raise ConfigError(
                f"variable {name}",
                f"it was {before.dtype}{list(before.shape)} and is {x.dtype}{list(x.shape)} after "
                "the loss",
                "the same shape and type after each step",
            )
    return jaxpr.jaxpr


def _ranks(parts: WrappedParts, jaxpr: Any) -> dict[str, int]:
    """Returns the largest rank with which the loss uses each parameter.

    A loop uses the rows of what it scans over, so stacked norm scales [L, D] have rank 1.
    """
    found: dict[str, int] = {}
    for equation, given, _ in uses(jaxpr, parts.origins(jaxpr)):
        for origin, v in zip(given, equation.invars, strict=True):
            if origin is not None:
                found[origin[0]] = max(v.aval.ndim, found.get(origin[0], 0))
    return found


def _untrained(parts: WrappedParts) -> frozenset[str]:
    """Returns the parameters whose change the linearised loss does not read: their gradient
    is zero.

    Raises ConfigError where it has no gradient of any.
    """
    function, arguments = parts.traced(train=True)

    def change(changes: Arrays, params: Arrays, *others: Any) -> Any:
        return jax.linearize(lambda params: function(params, *others)[0], params)[1](changes)

    jaxpr = jax.make_jaxpr(change)(parts.params, *arguments).jaxpr
    used = partial_eval.dce_jaxpr(jaxpr, [True])[1]
    # A dictionary's leaves are in the order of its sorted keys.
    untrained = frozenset(
        name for name, read in zip(sorted(parts.params), used, strict=False) if not read
    )
    if parts.params and len(untrained) == len(parts.params):
        listed = ", ".join(sorted(untrained)[:3])
        if len(untrained) > 3:
            listed += ", ..."
        raise ConfigError(
            "the loss of a wrapped model",
            f"it has no gradient of any parameter ({listed}): it does not use them, or integers or "
            "stop_gradient stand between",
            "a loss of the model that it is given, as its first argument",
        )
    return untrained


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that a jaxpr, and those inside it, have captured."""
    yield from getattr(jaxpr, "consts", ())
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in equation.params.values():
            values = value if isinstance(value, tuple | list) else (value,)
            for part in values:
                if hasattr(getattr(part, "jaxpr", part), "eqns"):
                    yield from _constants(part)


def check_rows(parts: WrappedParts, rows: int, held_out: int) -> None:
    """Traces the losses with the examples of a device.
    Raises ConfigError for a loss that takes another number.

    rows: examples of a device in a microbatch of training.
    held_out: the same of a held-out batch, 0 for none.
    """
    for train, examples in ((True, rows), (False, held_out)):
        if not examples:
            continue
        function, arguments = parts.traced(train, examples)
        _, complete_arguments = parts.traced(train)
        size = jax.tree.leaves(complete_arguments[2])[0].shape[0]
        with foreign_code(
            f"{examples} of the {size} examples of a batch on a device",
            "the number of examples from the batch, x.shape[0], instead of a constant",
            "the loss {}, and takes all of them",
        ):
            jax.eval_shape(function, *arguments)


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function inside a `shard_map` over an abstract mesh of one device
    that has all axes."""
    mesh = AbstractMesh((1,) * len(AXES), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
