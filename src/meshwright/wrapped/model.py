"""A model of one's own as a Run's model: `wrap`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from meshwright.config import MeshShape, Training
from meshwright.errors import ConfigError, MeshwrightError, describe_failure
from meshwright.models.model import Model
from meshwright.plugins import load, name_of
from meshwright.runs.recipe import change_fields
from meshwright.runs.run import Run
from meshwright.storage.paths import path_of
from meshwright.words import AXES
from meshwright.wrapped.batches import Source, find_held_out, find_source
from meshwright.wrapped.growth import Degree, growth
from meshwright.wrapped.keys import KEY_WORDS, Draws, key_of
from meshwright.wrapped.losses import Annotations, Arrays, Result
from meshwright.wrapped.modules import Adapter, find_adapter
from meshwright.wrapped.reach import reached

Rules = Mapping[str, Any]
"""Regular expression of paths -> a PartitionSpec, or axis names of the dimensions."""


@dataclasses.dataclass(frozen=True)
class WrappedParts:
    """Everything about a wrapped model that is no plain value."""

    adapter: Adapter
    source: Source
    held_out: Source | None
    rules: dict[str, PartitionSpec]
    axes: dict[str, str | None]
    """Logical axis -> mesh axis, for annotations."""
    draws: Draws
    """What the loss draws for a whole batch."""
    eval_draws: Draws
    params: Arrays
    """`ShapeDtypeStruct` of each parameter, by path."""
    variables: Arrays
    """`ShapeDtypeStruct` of each variable, by path."""
    annotations: Annotations
    untrained: frozenset[str] = frozenset()
    """Paths of parameters that the loss has no gradient of."""

    def loss(self, arrays: tuple[Arrays, Arrays], batch: Any, key: jax.Array, train: bool) -> Result:
        """Computes the loss of a batch. arrays: parameters and variables."""
        return self.adapter.call(arrays, batch, key, train)


@dataclasses.dataclass(frozen=True)
class Wrapped(Model):
    """A model of one's own as the model of a Run: made by `wrap`.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> model = mw.wrap({"w": jnp.zeros((4, 2))}, lambda p, b: ((b["x"] @ p["w"] - b["y"]) ** 2).mean(),
        ...                 lambda step: {"x": np.ones((8, 4), "f"), "y": np.ones((8, 2), "f")})
        >>> run = model.run(mesh="fsdp=8", steps=3, learning_rate=0.1)
        >>> mw.train(run, out=tmp / "wrapped", progress="none", cache=tmp).steps
        3
    """

    vocab: int | None = 0
    """No vocabulary: batches are arrays."""
    name: str = ""
    """`FILE.py:attribute` of the object, by which another process finds it; empty where it has no such name."""

    @functools.cached_property
    def parts(self) -> WrappedParts:
        """Module, loss and data. Raises ConfigError where a run file names no object that has them."""
        if not self.name:
            raise ConfigError(
                "the wrapped model of this run",
                "it was no top-level object of a file, so run.json could not name it",
                "pass the model: model=mw.wrap(...), or define it at the top level of a .py file",
            )
        found = load("wrapped model", self.name)
        if not isinstance(found, Wrapped):
            raise ConfigError(f"wrapped model {self.name}", f"it is a {type(found).__name__}", "the result of mw.wrap")
        return found.parts

    def named(self) -> "Wrapped":
        """Returns the model with its name, where it is a top-level object of a module or file."""
        if self.name:
            return self
        try:
            name = name_of(self)
        except MeshwrightError:
            return self
        return _with_parts(Wrapped(name=name), self.parts)

    def run(self, *, mesh: str | MeshShape | None = None, **changes: Any) -> Run:
        """Returns a Run of the model with the batch of its data, in the model's own precision.

        mesh: as `data=2,fsdp=4`; None takes all devices as `fsdp`.  changes: fields of `Run`, or of its training or
        optimizer, by name. Raises ConfigError for an unknown field.
        """
        training = Training(batch=self.parts.source.batch_size, compute_dtype="float32")
        return change_fields(Run(model=self.named(), training=training), mesh, changes)

    def restore(self, out: str | Path, *, at: int | None = None) -> Any:
        """Returns the trained model of an output folder on the first device, in evaluation mode.

        A module of NNX or Equinox, an Equinox module with its state, a pytree; of a Linen module its variables.
        at: step of the checkpoint; None takes the last. Raises CheckpointError.
        """
        from meshwright.wrapped.prepared import restore_model

        return restore_model(self, path_of(out), at)

    def spec(self) -> NoReturn:
        """Raises ConfigError: what is asked for needs to know the layers of a model."""
        raise ConfigError(
            "the layers of a wrapped model",
            "they are known to the module alone; show, rehearse, generate and convert are for model families",
            "train, evaluate, plan, prove or parity; or a family of your own (docs: Adding things)",
        )

    def shrunk(self, shape: MeshShape, layers: int) -> NoReturn:
        """Raises ConfigError, like `spec`."""
        self.spec()

    def params(self) -> Any:
        """Returns the descriptions of all parameters, by path."""
        from meshwright.wrapped.placing import describe_params

        return describe_params(self.parts)


def is_wrapped(run: Run) -> bool:
    """Whether the run's model was made by `mw.wrap`."""
    return isinstance(run.model, Wrapped)


def check_named(run: Run) -> None:
    """Raises ConfigError for a wrapped model that no other process could import."""
    if isinstance(run.model, Wrapped) and not run.model.named().name:
        raise ConfigError(
            f"compiling {run.name} in another process",
            "the wrapped model is no top-level object of a file, so that process cannot import it",
            "define it at the top level of a .py file: model = mw.wrap(...)",
        )


def _with_parts(model: Wrapped, parts: WrappedParts) -> Wrapped:
    model.__dict__["parts"] = parts
    return model


def wrap(
    model: Any,
    loss: Callable[..., Any],
    data: Any,
    *,
    held_out: Any = None,
    evaluate: Callable[..., Any] | None = None,
    rules: Rules | None = None,
    axes: Mapping[str, str | None] | None = None,
) -> Wrapped:
    """Returns a module of Flax NNX, Flax Linen or Equinox, or a pytree of arrays, as the model of a Run.

    model: the module or pytree; an Equinox module with its state as `(module, state)`; or a function of a key that
    makes one, whose arrays are then created in their shardings.
    loss: `loss(model, batch)` or `loss(model, batch, key)` -> the mean over the batch's examples, or (mean, metrics).
    A Linen module is given bound to its variables: `model(x, train=model.training)`. With an Equinox state it is
    `loss(model, state, batch[, key])` -> (mean, state) or (mean, metrics, state). Where the metrics have a `weight`,
    means of devices are averaged by it.
    data: global batches, pytrees of arrays with the batch first: a function of the step (from 0), an iterable, or an
    iterator. `held_out`: a list, or another iterable that can be read again, of the batches that are evaluated.
    evaluate: loss on held-out batches; None takes `loss`.
    rules: regular expression of a parameter's path -> PartitionSpec or axis names over `fsdp` and `tensor`.
    axes: logical axis of the module's annotations -> mesh axis, or None for whole.
    Raises ConfigError for an unknown kind of module, a loss that is not scalar, or a rule that matches nothing.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, numpy as np
        >>> batches = lambda step: {"x": np.ones((8, 4), "f"), "y": np.zeros(8, int)}
        >>> def loss(model, batch):
        ...     return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][:, None], 1).mean()
        >>> sorted(mw.wrap(nn.Dense(3), loss, batches).params())
        ['bias', 'kernel']
    """
    from meshwright.wrapped.placing import check_rules, read_rules

    source = find_source(data, "data")
    adapter = find_adapter(model, loss, evaluate, source.example)
    parts = _describe(adapter, source, find_held_out(held_out) if held_out is not None else None)
    parts = dataclasses.replace(parts, rules=read_rules(rules or {}), axes=dict(axes or {}))
    check_rules(parts)
    return _with_parts(Wrapped(), parts)


def _describe(adapter: Adapter, source: Source, held_out: Source | None) -> WrappedParts:
    """Traces model and loss once with abstract arrays: shapes, annotations, what is drawn; whether it is a loss."""
    annotations: Annotations = {}

    def build(key: jax.Array) -> tuple[Arrays, Arrays]:
        params, variables, found = adapter.build(key)
        annotations.update(found)
        return params, variables

    try:
        params, variables = jax.eval_shape(build, jax.eval_shape(jax.random.key, 0))
        _check_arrays({**variables, **params})
        draws, eval_draws = Draws(), Draws()
        parts = WrappedParts(
            adapter, source, held_out, {}, {}, draws, eval_draws, params, variables, annotations
        )  # fmt: skip
        parts = dataclasses.replace(parts, untrained=_trace(parts, source.example, train=True))
        if held_out is not None:
            _trace(parts, held_out.example, train=False)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(
            f"wrapping a model of {adapter.framework or 'unknown kind'}",
            f"tracing it with its loss {describe_failure(error)}",
            "a loss of (model, batch) that works on one device",
        ) from error
    return parts


def _check_arrays(arrays: Arrays) -> None:
    """Raises ConfigError for an array that no optimizer trains or no checkpoint keeps."""
    for name, x in arrays.items():
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ConfigError(
                f"array {name} of a wrapped model", f"it is {x.dtype}, and real numbers alone are trained and saved",
                "two real arrays, of which the loss makes a complex one; a constant belongs in the loss",
            )  # fmt: skip
        if not x.size:
            raise ConfigError(
                f"array {name} of a wrapped model", f"it is {x.dtype}{list(x.shape)}, which has no elements",
                "a model without it",
            )  # fmt: skip


def _trace(parts: WrappedParts, batch: Any, train: bool) -> frozenset[str]:
    """Traces the loss and checks it; returns the parameters that it has no gradient of."""
    draws = parts.draws if train else parts.eval_draws

    def loss(params: Arrays, variables: Arrays, batch: Any, words: Any) -> Any:
        result = parts.loss((params, variables), batch, key_of(words, 1, draws), train)
        return result.loss, result.metrics, result.variables

    # Inside a shard_map of one device, where a module may average over the axes of the mesh.
    traced = jax.make_jaxpr(on_one_device(loss), return_shape=True)
    jaxpr, (value, _, variables) = traced(parts.params, parts.variables, batch, KEY_WORDS)
    draws.read(jaxpr.jaxpr)
    if draws.foreign:
        twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), batch)
        draws.check_foreign(traced(parts.params, parts.variables, twice, KEY_WORDS)[0].jaxpr)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ConfigError(
            "the loss of a wrapped model", f"it is {value.dtype}, which has no gradient", "a floating-point mean"
        )
    for name, x in variables.items():
        before = parts.variables[name]
        if (x.shape, x.dtype) != (before.shape, before.dtype):
            raise ConfigError(
                f"variable {name}",
                f"it was {before.dtype}{list(before.shape)} and is {x.dtype}{list(x.shape)} after the loss",
                "the same shape and type after each step",
            )
    names = sorted(parts.params)
    given = [1 << i if i < len(names) else 0 for i in range(len(jaxpr.jaxpr.invars))]
    bits = reached(jaxpr.jaxpr, given)[0]
    if names and not bits:
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ConfigError(
            "the loss of a wrapped model",
            f"it has no gradient of any parameter ({listed}): it does not use them, or integers or stop_gradient "
            "stand between",
            "a loss of the model that it is given, as its first argument",
        )
    return frozenset(name for i, name in enumerate(names) if not bits >> i & 1)


def check_rows(parts: WrappedParts, rows: int, held_out: int) -> None:
    """Traces the losses with the part of a batch that a device has.

    Raises ConfigError for a loss that takes another number of examples, or is a sum over them.

    rows: examples of a part in training.  held_out: the same of a held-out batch, 0 for none.
    """
    sources = [(parts.source, rows, True)] + ([(parts.held_out, held_out, False)] if parts.held_out is not None else [])
    for source, own, train in sources:
        draws = parts.draws if train else parts.eval_draws
        batch = jax.tree.map(lambda x, own=own: jax.ShapeDtypeStruct((own, *x.shape[1:]), x.dtype), source.example)

        def loss(params: Arrays, variables: Arrays, batch: Any, words: Any, d: Draws = draws, t: bool = train) -> Any:
            return parts.loss((params, variables), batch, key_of(words, 1, d), t).loss

        try:
            traced = jax.make_jaxpr(on_one_device(loss))(parts.params, parts.variables, batch, KEY_WORDS)
        except MeshwrightError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{own} of the {source.batch_size} examples of a batch on a device",
                f"the loss {describe_failure(error)}, and takes all of them",
                "the number of examples from the batch, x.shape[0], instead of a constant",
            ) from error
        twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), batch)
        degrees: list[Degree] = []
        with contextlib.suppress(Exception):  # one that takes no other number of examples is no sum over them
            doubled = jax.make_jaxpr(on_one_device(loss))(parts.params, parts.variables, twice, KEY_WORDS)
            degrees = growth(traced, doubled, [0] * len(traced.jaxpr.invars))
        if degrees == [1]:
            raise ConfigError(
                f"a loss that is a sum over the {own} of {source.batch_size} examples of a batch that a device has",
                "the step takes the mean of what the parts of a batch give: on another mesh this loss and its "
                "gradients would have another size",
                "the mean over the examples: .mean() in the place of .sum(), or the sum divided by x.shape[0]",
            )


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function inside a `shard_map` over an abstract mesh of one device that has all axes."""
    mesh = AbstractMesh((1,) * len(AXES), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
