"""Placement of a wrapped model on a mesh: by rules, annotations or size.
Arithmetic on shapes, without a device."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, nearest
from meshwright.models.model import ModelSpec
from meshwright.runs.fields import check_fields
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.runs.run import Run
from meshwright.sharding.layer_cuts import assign_layers
from meshwright.sharding.layouts import BATCH_AXES, find_layout
from meshwright.sharding.params import Param
from meshwright.sharding.placement import Layout, Placements, axes_of, place_param
from meshwright.update_rules import UPDATE_RULES
from meshwright.wrapped.parts import WrappedParts

PARAM_AXES = ("fsdp", "tensor")
"""Mesh axes that may split a parameter."""
REMAT = ("auto", "none", "full")
"""Rematerialisation of a wrapped model."""


def describe_params(parts: WrappedParts) -> dict[str, Param]:
    """Returns the description of each parameter; its dimensions are numbered.

    Weight decay applies to what the loss uses as a matrix
    and has a gradient of: others would shrink untrained.
    """
    params = {}
    for name, x in parts.params.items():
        is_decayed = parts.ranks.get(name, 0) > 1 and name not in parts.untrained
        # `Param.init` tells which parameters decay; the module draws their values.
        init: Literal["normal", "zeros"] = "normal" if is_decayed else "zeros"
        precision = "compute" if x.dtype == jnp.float32 else x.dtype.name
        params[name] = Param(
            x.shape,
            "0123456789abcdefghijklmnopqrstuvwxyz"[: x.ndim],
            init=init,
            precision=cast(Any, precision),
        )
    return params


def read_rules(rules: Mapping[str, Any]) -> dict[str, PartitionSpec]:
    """Returns the rules with their specs.
    Raises ConfigError for an axis that cannot split a parameter."""
    read = {}
    for pattern, spec in rules.items():
        names = _names_of(spec)
        for name in _flat(names):
            _check_axis(f"rule {pattern!r}", name)
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"rule {pattern!r}",
                f"it is not a regular expression: {error}",
                "for example '.*kernel'",
            ) from error
        read[pattern] = PartitionSpec(*names)
    return read


def _names_of(spec: Any) -> tuple[Any, ...]:
    """Returns the entry of each dimension of a rule: None, an axis, or a tuple of axes."""
    if spec is None:
        return ()
    if isinstance(spec, PartitionSpec | tuple | list):
        return tuple(spec)
    return (spec,)


def _flat(names: Any) -> list[str]:
    """Returns the axes of all dimensions in order."""
    flat: list[str] = []
    for name in names:
        if isinstance(name, str):
            flat.append(name)
        elif name is not None:
            flat.extend(name)
    return flat


def _check_axis(asked: str, name: str) -> None:
    if name not in PARAM_AXES:
        raise ConfigError(
            asked,
            f"{name!r} is not a mesh axis that splits the parameters of a wrapped model",
            f"one of {', '.join(PARAM_AXES)}; for a logical axis, axes={{{name!r}: 'tensor'}}, or "
            "None for whole",
        )


def check_rules(parts: WrappedParts) -> None:
    """Raises ConfigError for a rule that matches no parameter, a spec of another rank,
    or an unknown annotation."""
    taken: dict[str, str] = {}
    for pattern, spec in parts.rules.items():
        matched = [name for name in parts.params if re.fullmatch(pattern, name)]
        if not matched:
            raise ConfigError(
                f"rule {pattern!r}", "no parameter has such a path", nearest(pattern, parts.params)
            )
        earlier = [taken.setdefault(name, pattern) for name in matched]
        if pattern not in earlier:
            raise ConfigError(
                f"rule {pattern!r}",
                f"it places nothing: the rule {earlier[0]!r} before it has {matched[0]}, and the "
                "first that matches counts",
                "this rule before that one, or without it",
            )
        for name in matched:
            if len(spec) > parts.params[name].ndim:
                raise ConfigError(
                    f"rule {pattern!r}",
                    f"it names {len(spec)} dimensions, and {name} has "
                    f"{list(parts.params[name].shape)}",
                    "at most one axis or tuple of axes for each dimension",
                )
    known = sorted({name for names in parts.annotations.values() for name in _flat(names)})
    for name, axis in parts.axes.items():
        if axis is not None:
            _check_axis(f"axes={{{name!r}: {axis!r}}}", axis)
            if name not in known:
                raise ConfigError(
                    f"axes={{{name!r}: {axis!r}}}",
                    "no annotation of the module has an axis of that name",
                    nearest(name, known)
                    if known
                    else "nn.with_partitioning in the module, or rules={path: axes}",
                )
    for path in parts.params:
        _annotated(parts, path)


def _annotated(parts: WrappedParts, path: str) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of each dimension that the module's own annotation names."""
    dims = []
    for names in parts.annotations.get(path, ()):
        axes = []
        for name in _flat((names,)):
            axis = parts.axes.get(name, name)
            if axis is not None:
                _check_axis(f"annotation {name!r} of {path}", axis)
                axes.append(axis)
        dims.append(tuple(axes))
    return tuple(dims)


def _stated(parts: WrappedParts, path: str) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """Mesh axes of each dimension by the first rule that matches, else the annotation;
    whether a rule did."""
    for pattern, spec in parts.rules.items():
        if re.fullmatch(pattern, path):
            return tuple(tuple(_flat((names,))) for names in spec), True
    return _annotated(parts, path), False


def place_wrapped(model: Any, run: Run, shape: MeshShape) -> PlacedRun:
    """Places a run of a wrapped model on the mesh `shape`.

    A rule places a parameter completely. Without one, `fsdp` splits the largest dimension that
    divides, of parameters of at least `run.fsdp_min_size` elements, besides what the module's
    annotation states. Raises ConfigError where batch or parameters do not divide, and for fields of
    the run without meaning here.
    """
    parts: WrappedParts = model.parts
    check_fields("wrap", run, shape)
    _check_values(run)
    _check_batch(run, shape, parts)
    params = describe_params(parts)
    placements = {name: _place(name, p, parts, run, shape) for name, p in params.items()}
    used_axes = {axis for placed in placements.values() for axis in axes_of(placed.at_rest)}
    if shape.tensor > 1 and "tensor" not in used_axes:
        raise _unused_tensor(shape, params)
    model = model.named()  # another process may have to find it
    layout = ModelLayout(
        model, shape, params, placements, assign_layers((1.0,), 1, 1), ModelSpec(0, ())
    )
    return PlacedRun(dataclasses.replace(run, mesh=shape, model=model), layout)


def _unused_tensor(shape: MeshShape, params: Mapping[str, Param]) -> ConfigError:
    """Returns the error of a mesh whose axis `tensor` splits no parameter."""
    # The first matrix: a rule has an axis for each dimension, and a bias has only one dimension.
    matrices = [name for name, p in params.items() if len(p.shape) > 1]
    example = next(iter(matrices or params), "path")
    rank = len(params[example].shape) if params else 1
    axes = tuple([None] * (rank - 1) + ["tensor"])
    return ConfigError(
        f"mesh {shape} for a wrapped model",
        f"no rule or annotation splits a parameter over tensor: its {shape.tensor} devices would "
        "compute the same",
        f"rules={{{example!r}: {axes}}}, axes={{logical axis: 'tensor'}}, or the "
        "devices as data or fsdp",
    )


def _place(name: str, p: Param, parts: WrappedParts, run: Run, shape: MeshShape) -> Placements:
    """Returns the placements of a parameter: by rule, or by annotation and size."""
    stated, by_rule = _stated(parts, name)
    by_dim = dict(zip(p.dims, stated, strict=False))
    for digit, axes in by_dim.items():
        if len(axes) > 1:
            raise ConfigError(
                f"{name} with {'+'.join(axes)} on dimension {digit}",
                "`fsdp` is gathered by the step and `tensor` by the compiler, so they split "
                "different dimensions",
                "one axis for each dimension",
            )
    table = {digit: axes for digit, axes in by_dim.items() if "fsdp" not in axes}
    at_rest = {digit: axes for digit, axes in by_dim.items() if "fsdp" in axes}
    layout = find_layout(run.layout)
    params_over = layout.params_over
    optimizer_over = layout.optimizer_over
    if by_rule:
        params_over = optimizer_over = ()
    param_layout = Layout(
        table,
        params_over,
        optimizer_over,
        layout.summary,
        at_rest,
    )
    min_size = 0 if by_rule or at_rest else run.fsdp_min_size
    return place_param(name, p.shape, p.dims, layout=param_layout, mesh=shape, min_size=min_size)


def _check_values(run: Run) -> None:
    if run.training.remat not in REMAT:
        raise ConfigError(
            f"--training.remat {run.training.remat} with a wrapped model",
            "its layers are not known here",
            f"one of {', '.join(REMAT)}, and jax.checkpoint or nn.remat inside the module",
        )
    row = UPDATE_RULES.get(run.optimizer.name)
    if row is not None and row.matrices:
        known = [name for name, other in UPDATE_RULES.items() if not other.matrices]
        raise ConfigError(
            f"--optimizer.name {run.optimizer.name} with a wrapped model",
            "it needs to know which dimensions of a parameter are heads and layers",
            f"one of {', '.join(known)}, or module:attribute of a function that returns one of "
            "optax's",
        )


def _check_batch(run: Run, shape: MeshShape, parts: WrappedParts) -> None:
    batch = run.training.batch
    microbatches = run.training.microbatches
    data_batch = parts.source.batch_size
    if batch != data_batch:
        raise ConfigError(
            f"a batch of {batch} examples",
            f"the first batch of the data has {data_batch}",
            f"training.batch={data_batch}, or data with batches of {batch}",
        )
    divisor = shape.over(BATCH_AXES) * microbatches
    sizes = [("batch", batch, divisor)]
    if parts.held_out is not None:
        sizes.append(("held-out batch", parts.held_out.batch_size, shape.over(BATCH_AXES)))
    for what, size, degree in sizes:
        if microbatches < 1 or size % degree:
            below = size // degree * degree
            above = below + degree
            raise ConfigError(
                f"a {what} of {size} examples on mesh {shape} in {microbatches} microbatch(es)",
                f"data * fsdp * microbatches = {degree}, and {size} = {size // degree} * {degree} "
                f"+ {size % degree}",
                f"a batch of {above}" + (f" or {below}" if below else ""),
            )
