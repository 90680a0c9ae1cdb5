"""Health of every tensor, measured in every step: what each figure is, and how a step computes it.

A step returns a dictionary by figure, equal on every device: of figures of parameters one vector,
which has a number for each layer of a stacked parameter and one for any other; of figures of layers
a vector for each stack.

A step with health has the same losses and the same parameters, bit for bit, as a step without:
nothing that it measures is an input of anything else.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_reduce, all_reduce_max, axis_index
from meshwright.models.layer_health import HEALTH, LSE, SQUARES, TOKENS, is_maximum
from meshwright.models.model import Aux, Metrics
from meshwright.reporters.health import HealthRecord, Series
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import Param, Tree, named_leaves, rows_to_layers, trained_only
from meshwright.sharding.placement import Placements, axes_of
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import specs_of
from meshwright.words import AXES

GRADIENT = "gradient norm"
PARAMETER = "parameter norm"
UPDATE = "update norm"
UNCHANGED = "unchanged share"
RESIDUAL = "residual rms"
ATTENTION = LSE
LARGEST_LOAD = "largest expert load"
SMALLEST_LOAD = "smallest expert load"
ENTROPY = "router entropy"
BATCH = "batch checksum"
"""Not kept: two hashes of the tokens of each part of the batch,
so that data that repeat themselves are seen."""
BITS = "bits"
"""Not kept: sums of the bits of every parameter and of every array of the optimizer's state, before
and after the step. What the step leaves is what the next one finds, unless something else has
changed it."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Declaration of a figure of health."""

    formula: str
    summary: str


FIGURES: dict[str, Figure] = {
    GRADIENT: Figure(
        "sqrt(sum g^2)",
        "Gradient over the complete batch, before it is clipped. Not finite where an element is "
        "not, or where its square is above float32 (1.8e19).",
    ),
    PARAMETER: Figure("sqrt(sum w^2)", "Parameter before the step."),
    UPDATE: Figure(
        "sqrt(sum (w' - w)^2)",
        "What the step adds, weight decay included; over the parameter norm it is the relative "
        "update.",
    ),
    UNCHANGED: Figure(
        "count(w' = w) / count(w)",
        "Share of a bfloat16 parameter that the step leaves as it is: updates lost in rounding.",
    ),
    RESIDUAL: Figure(
        "sqrt(mean x^2)", "Residual stream before a layer, over all tokens and features."
    ),
    ATTENTION: Figure(
        "max(0, max over queries of ln sum over keys exp(q.k / sqrt(H)))",
        "Largest log-sum-exp of attention logits; with S keys the largest logit is between it and "
        "it - ln S.",
    ),
    LARGEST_LOAD: Figure(
        "max over experts of tokens / mean", "Load of the busiest expert of a layer over the mean."
    ),
    SMALLEST_LOAD: Figure(
        "min over experts of tokens / mean", "Load of the idlest expert of a layer over the mean."
    ),
    ENTROPY: Figure(
        "mean over tokens of -sum over experts p ln p",
        "Entropy of the router's probabilities; ln E where it prefers no expert, 0 where it is "
        "certain.",
    ),
}
"""All figures, in the order of a record."""


def _described(device_run: DeviceRun) -> list[tuple[str, Param]]:
    """Returns the trained parameters by path."""
    params = device_run.layout.params
    return list(named_leaves(trained_only(params, params)).items())


def _is_stacked(p: Param) -> bool:
    return p.dims.startswith("L")


def _layers_of(device_run: DeviceRun, name: str, p: Param) -> tuple[int, ...]:
    """Returns the layers of a parameter's rows in order; () for one without layers."""
    if not _is_stacked(p):
        return ()
    spec = device_run.run.model.spec()
    stack = name.partition(".")[0]
    if stack in spec.stacks:
        return spec.layers_of(stack)
    # Layers that predict further tokens come after all others.
    return tuple(range(len(spec.layers), len(spec.layers) + p.logical_shape[0]))


def _is_rounded(device_run: DeviceRun, p: Param) -> bool:
    return (p.stored or device_run.run.training.param_dtype) == "bfloat16"


# A parameter [L, ...] whose rows lie on the stages,
# and of which several devices may hold the same part:
#
#   squares_l = sum over devices of (sum over the device's part of row l
#   of x^2) / (devices that hold the part)
#
# Each device writes its rows into the rows of all, so that one sum over all devices is the result.
def _row_sums(device_run: DeviceRun, p: Param, placed: Placements, x: jax.Array) -> jax.Array:
    """Returns this device's addends of the sums of each layer of x, [layers];
    [1] for a parameter without layers."""
    shape = device_run.layout.shape
    fraction = shape.over(axes_of(placed.optimizer)) / shape.size  # 1 / devices that hold the part
    if not _is_stacked(p):
        return x.sum()[None] * fraction
    sums = x.sum(tuple(range(1, x.ndim))) * fraction
    return rows_to_layers(p, _in_all_rows(sums, placed.optimizer[0], p.shape[0]))


def _in_all_rows(local: jax.Array, axes: tuple[str, ...], rows: int) -> jax.Array:
    """Returns zeros of all rows with those of this device in their place.
    axes: that split the rows."""
    if local.shape[0] == rows:
        return local
    start = axis_index(axes) * local.shape[0]
    return lax.dynamic_update_slice_in_dim(jnp.zeros(rows, local.dtype), local, start, 0)


def row_sums(device_run: DeviceRun, function: Callable[..., Any], *trees: Tree) -> jax.Array:
    """Returns this device's addends of the sums over `function` of each tensor, concatenated.

    trees: of trained parameters or what has their shape,
    in the optimizer's placement, local to this device.
    """
    placements = trained_only(device_run.layout.params, device_run.layout.placements)
    placed = named_leaves(placements)
    leaves = [named_leaves(tree) for tree in trees]
    sums = []
    for name, p in _described(device_run):
        x = function(p, *(tree[name] for tree in leaves))
        if x is not None:
            sums.append(_row_sums(device_run, p, placed[name], x))
    return jnp.concatenate(sums) if sums else jnp.zeros(0)


def gradient_sums(device_run: DeviceRun, grads: Tree) -> jax.Array:
    """Returns this device's addends of the squared norms of gradients that are summed
    and not clipped."""
    return row_sums(device_run, _square, lax.optimization_barrier(grads))


def gradient_squares(device_run: DeviceRun, grads: Tree) -> jax.Array:
    """Returns the squared norm of each gradient, outside of a `shard_map`."""

    def local(grads: Tree) -> jax.Array:
        return all_reduce(gradient_sums(device_run, grads), tuple(AXES))

    squares: jax.Array = _over_mesh(device_run, local, grads)
    return squares


def _over_mesh(device_run: DeviceRun, local: Callable[..., Any], *trees: Tree) -> Any:
    specs = specs_of(device_run.update_shardings)
    return jax.shard_map(
        local,
        mesh=device_run.mesh,
        in_specs=(specs,) * len(trees),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(*trees)


# h = (sum over tokens i of mix((id + 1) m1 + i m2) mod 2^32) / 2^8, an integer below 2^24: exact in
# float32. Without `mix` (the finalizer of MurmurHash3) the sum would be a linear function of the
# ids, of which many batches have the same.
def batch_checksums(device_run: DeviceRun, ids_BT: jax.Array) -> jax.Array:
    """Returns this device's addends of the hashes of each part of the batch, [2, parts].

    ids_BT: complete sequences.
    """
    parts = device_run.layout.shape.over(BATCH_AXES)
    others = tuple(axis for axis in AXES if axis not in BATCH_AXES)
    counts = axis_index(others) == 0
    ids = ids_BT.reshape(-1).astype(jnp.uint32) + 1
    positions = lax.iota(jnp.uint32, ids.shape[0])
    hashes = []
    for multiplier in (2654435761, 2246822519):
        mixed = _mix(ids * jnp.uint32(multiplier) + positions * jnp.uint32(3266489917))
        hashes.append((mixed.sum(dtype=jnp.uint32) >> 8).astype(jnp.float32))
    own = jnp.where(counts, jnp.stack(hashes), 0.0)
    return lax.dynamic_update_slice_in_dim(
        jnp.zeros((2, parts)), own[:, None], axis_index(BATCH_AXES), 1
    )


def _mix(x: jax.Array) -> jax.Array:
    """Returns the bits of whole numbers, mixed."""
    x = (x ^ (x >> 16)) * jnp.uint32(2246822507)
    x = (x ^ (x >> 13)) * jnp.uint32(3266489909)
    return x ^ (x >> 16)


def layer_sums(device_run: DeviceRun, health: dict[str, Aux]) -> dict[str, Aux]:
    """Returns this device's addends of the figures of layers: [layers] of each stack.

    health: figures of each stack, in the rows of this device.
    """
    sums = {}
    for stack, figures in health.items():
        p = stack_param(device_run, stack)
        sums[stack] = {
            figure: rows_to_layers(p, _in_all_rows(rows, ("stage",), p.shape[0]))
            for figure, rows in figures.items()
        }
    return sums


def stack_param(device_run: DeviceRun, stack: str) -> Param:
    """Returns a parameter of a stack: any knows in which rows its layers are."""
    found: Param = next(iter(named_leaves(device_run.layout.params[stack]).values()))
    return found


def over_devices(tree: Any) -> Any:
    """Returns figures of all devices from the addends of each, in two collectives: sums,
    and the largest of `MAXIMA`."""
    axes = tuple(AXES)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    largest = {i: x for i, (path, x) in enumerate(leaves) if is_maximum(path)}
    added = {i: x for i, (path, x) in enumerate(leaves) if i not in largest}
    found = all_reduce(added, axes)
    if largest:
        maxima = all_reduce_max(jnp.concatenate(list(largest.values())), axes)
        stops = np.cumsum([x.shape[0] for x in largest.values()])[:-1]
        found |= dict(zip(largest, jnp.split(maxima, stops), strict=True))
    return jax.tree.unflatten(treedef, [found[i] for i in range(len(leaves))])


def gradient_figures(
    device_run: DeviceRun,
    grads: Tree,
    ids_BT: jax.Array,
    health: dict[str, Aux],
    aux: dict[str, Aux],
) -> dict[str, Any]:
    """Returns what a step's gradients and forward pass say of its health, inside
    of the step's `shard_map`.

    Squared norms of gradients, by tensor, hashes of the batch, and the figures of layers. grads:
    summed over devices and not clipped.
    ids_BT: of this device's sequences.
    health: of the layers of this device.
    aux: of all layers in order.
    """
    sums = over_devices(
        {
            GRADIENT: gradient_sums(device_run, grads),
            BATCH: batch_checksums(device_run, ids_BT),
            HEALTH: layer_sums(device_run, health),
        }
    )
    sequences = device_run.run.training.batch
    known = {GRADIENT: sums[GRADIENT], BATCH: sums[BATCH]}
    return {**known, **layer_figures(sums[HEALTH], aux, sequences)}


def layer_figures(health: dict[str, Aux], aux: dict[str, Aux], sequences: int) -> dict[str, Aux]:
    """Returns the figures of layers, by figure and stack, from sums over the batch.

    health: sums of `layer_sums`.
    aux: of each stack, whose routers have load and entropy.
    sequences: of the batch.
    """
    figures: dict[str, Aux] = {RESIDUAL: {}, ATTENTION: {}}
    for stack, sums in health.items():
        figures[RESIDUAL][stack] = jnp.sqrt(sums[SQUARES] / sums[TOKENS])
        if LSE in sums:
            figures[ATTENTION][stack] = sums[LSE]
    for stack, values in aux.items():
        if "load" in values and stack in health:
            load_LE = values["load"]
            mean_L = load_LE.mean(-1)
            mean_L = jnp.where(mean_L > 0, mean_L, 1.0)  # a batch without text has no load
            figures.setdefault(LARGEST_LOAD, {})[stack] = load_LE.max(-1) / mean_L
            figures.setdefault(SMALLEST_LOAD, {})[stack] = load_LE.min(-1) / mean_L
            figures.setdefault(ENTROPY, {})[stack] = values["entropy"] / sequences
    return {figure: stacks for figure, stacks in figures.items() if stacks}


def with_tensor_figures(
    device_run: DeviceRun, metrics: Metrics, before: Tree, after: Tree, states: tuple[Any, Any]
) -> Metrics:
    """Returns the metrics of a step with the figures of its parameters.
    before, after: as of `tensor_figures`.

    states: of the optimizer around the update.
    """
    health: Any = metrics[HEALTH]
    squares = health[GRADIENT]  # `tensor_figures` returns their roots under the same name
    figures = tensor_figures(device_run, squares, before, after)
    if device_run.run.faults.check_bits:
        sums = [
            sums_of_bits(device_run, params, state)
            for params, state in zip((before, after), states, strict=True)
        ]
        figures[BITS] = jnp.stack(sums)
    measured: Any = {HEALTH: {**health, **figures}}
    return {**metrics, **measured}


def tensor_figures(
    device_run: DeviceRun, gradients: jax.Array, before: Tree, after: Tree
) -> dict[str, jax.Array]:
    """Returns the figures of parameters, each one vector.

    gradients: their squared norms.
    before, after: trained parameters around the update, in the optimizer's placement.
    """

    def local(before: Tree, after: Tree) -> dict[str, jax.Array]:
        sums = {
            PARAMETER: row_sums(device_run, _square, before),
            UPDATE: row_sums(device_run, _squared_difference, before, after),
        }
        if any(_is_rounded(device_run, p) for _, p in _described(device_run)):
            same = functools.partial(_unchanged, device_run)
            sums[UNCHANGED] = row_sums(device_run, same, before, after)
        return all_reduce(sums, tuple(AXES))

    before, after = lax.optimization_barrier((before, after))
    figures = _over_mesh(device_run, local, before, after)
    for figure in (PARAMETER, UPDATE):
        figures[figure] = jnp.sqrt(figures[figure])
    return {GRADIENT: jnp.sqrt(gradients), **figures}


def _square(p: Param, x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(jnp.float32))


# The sum of the mixed bits of all elements as whole numbers, modulo 2^32, over every device that
# has them: exact, the same in any order, and another one if any bit of any copy is another.
def sums_of_bits(device_run: DeviceRun, params: Tree, state: Any) -> jax.Array:
    """Returns a sum for each row of each trained parameter,
    and for each array of the optimizer's state, uint32."""
    arrays = _arrays_of(state)
    specs = [x.sharding.spec for x in _arrays_of(device_run.abstract.optimizer)]

    def local(params: Tree, arrays: list[jax.Array]) -> jax.Array:
        placed = named_leaves(trained_only(device_run.layout.params, device_run.layout.placements))
        leaves = named_leaves(params)
        sums = []
        for name, p in _described(device_run):
            bits = _bits(leaves[name])
            if not _is_stacked(p):
                sums.append(bits.sum(dtype=jnp.uint32)[None])
                continue
            rows = bits.reshape(bits.shape[0], -1).sum(1, dtype=jnp.uint32)
            rows = _in_all_rows(rows, placed[name].optimizer[0], p.shape[0])
            sums.append(rows_to_layers(p, rows))
        sums += [_bits(x).sum(dtype=jnp.uint32)[None] for x in arrays]
        return all_reduce(jnp.concatenate(sums), tuple(AXES))

    measured: jax.Array = jax.shard_map(
        local,
        mesh=device_run.mesh,
        in_specs=(specs_of(device_run.update_shardings), specs),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(*lax.optimization_barrier((params, arrays)))
    return measured


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as a whole number, mixed: twice a number is one bit more
    in each element."""
    size = x.dtype.itemsize
    whole = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
    return _mix(lax.bitcast_convert_type(x, whole).astype(jnp.uint32))


def _arrays_of(state: Any) -> list[Any]:
    """Returns the arrays of an optimizer's state that have dimensions."""
    return [x for x in jax.tree.leaves(state) if x.ndim]


def names_of_bits(device_run: DeviceRun) -> list[str]:
    """Returns what each sum of `sums_of_bits` is of."""
    names = []
    for name, p in _described(device_run):
        series = Series(PARAMETER, name, _layers_of(device_run, name, p))
        names += [series.place(number) for number in range(series.size)]
    names += [name for name, x in named_leaves(device_run.abstract.optimizer).items() if x.ndim]
    return names


def _squared_difference(p: Param, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.square(y.astype(jnp.float32) - x.astype(jnp.float32))


def _unchanged(device_run: DeviceRun, p: Param, x: jax.Array, y: jax.Array) -> jax.Array | None:
    """Returns the share of each element in the count of those that are unchanged;
    None for a parameter of float32."""
    if not _is_rounded(device_run, p):
        return None
    elements = p.size // p.shape[0] if _is_stacked(p) else p.size
    return (x == y).astype(jnp.float32) / elements


class HealthReader:
    """Makes records of what a step returns; the series are worked out once."""

    def __init__(self, device_run: DeviceRun):
        self._device_run = device_run
        self._series: tuple[Series, ...] = ()
        self._names = tuple(names_of_bits(device_run))

    def read(self, health: dict[str, Any]) -> HealthRecord:
        """Returns the record of a step. health: its entry `HEALTH` on the host."""
        if not self._series:
            self._series = series_of(self._device_run, health)
        parts: list[np.ndarray] = []
        for figure in _figures_of(health):
            values = health[figure]
            parts += values.values() if isinstance(values, dict) else [values]
        batch = np.asarray(health.get(BATCH, np.zeros((2, 0))))
        bits = np.asarray(health[BITS]) if BITS in health else None
        return HealthRecord(self._series, np.concatenate(parts), bits, self._names, batch)


def _figures_of(health: dict[str, Any]) -> list[str]:
    return [figure for figure in FIGURES if figure in health]


def series_of(device_run: DeviceRun, health: dict[str, Any]) -> tuple[Series, ...]:
    """Returns what the numbers of a step's health are, in order."""
    described = _described(device_run)
    series = []
    for figure in _figures_of(health):
        if isinstance(health[figure], dict):
            layers_of = device_run.run.model.spec().layers_of
            series += [Series(figure, stack, layers_of(stack)) for stack in health[figure]]
            continue
        for name, p in described:
            if figure != UNCHANGED or _is_rounded(device_run, p):
                series.append(Series(figure, name, _layers_of(device_run, name, p)))
    return tuple(series)
