"""Gradients and evaluation of a wrapped model.

`data` and `fsdp` are manual: a `shard_map` in which each device computes the loss of its own
examples. Parameters are gathered over `fsdp` before the loss, and the backward pass reduce-scatters
their gradients; `data` sums them. `tensor` is the compiler's: it sees the whole arrays, split as
rules or annotations state, and inserts what the module's own operations need.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from meshwright.activity import activity
from meshwright.comm.collectives import all_reduce, axis_index
from meshwright.errors import ConfigError, divisors
from meshwright.models.layer_health import HEALTH
from meshwright.models.model import Metrics
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placed_params import plan_gathers
from meshwright.sharding.placement import axes_of, to_spec
from meshwright.step.device_run import DeviceRun
from meshwright.step.gradients import clip, matmuls_of, sum_over_devices
from meshwright.step.health import GRADIENT, gradient_squares
from meshwright.words import AXES
from meshwright.wrapped.keys import Draws, step_key
from meshwright.wrapped.modules import Arrays, Result
from meshwright.wrapped.parts import WrappedParts

_EVALUATION = 0x7FFFFFFF
"""Step of the keys of an evaluation."""
_CLOSE = 2e-3
"""Relative difference of losses, and of gradients, that rounding explains."""
_CLOSE_LOW = 3e-2
"""Relative difference of gradients that rounding explains where the loss rounds to 16 bits."""


def parts_of(device_run: DeviceRun) -> WrappedParts:
    """Returns module, loss and data of a wrapped model on its devices."""
    model: Any = device_run.run.model
    return model.parts


def draw_arrays(model: Any, device_run: DeviceRun) -> tuple[Arrays, tuple[Arrays, ...]]:
    """Returns parameters and variables before the first step: drawn in their shardings,
    or copies of those given."""
    adapter = model.parts.adapter
    training = device_run.run.training
    shardings = device_run.abstract.shardings
    dtype = jnp.dtype(training.param_dtype)

    def build(key: jax.Array) -> Any:
        params, variables, _ = adapter.build(key)
        params = {name: x.astype(dtype) for name, x in params.items()}
        return params, (variables,) if shardings.variables else ()

    if adapter.drawn:
        with jax.threefry_partitionable(True):
            draw = jax.jit(build, out_shardings=(shardings.params, shardings.variables))
            return draw(jax.random.key(training.seed))
    # Copies: the train step writes over its own arrays, and the module keeps those that it has.
    return jax.tree.map(
        lambda x, sharding: jax.device_put(np.array(x), sharding, may_alias=False),
        build(jax.random.key(0)),
        (shardings.params, shardings.variables),
    )


def _specs(device_run: DeviceRun, form: str) -> dict[str, PartitionSpec]:
    """Returns the spec of each parameter over the manual axes. form: a field of `Placements`."""
    specs = {}
    for name, placements in device_run.layout.placements.items():
        dims = getattr(placements, form)
        specs[name] = to_spec(tuple(_without_tensor(axes) for axes in dims))
    return specs


def _without_tensor(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != "tensor")


def _over_mesh(
    device_run: DeviceRun, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Any:
    """Applies `shard_map` over all axes;
    `tensor` stays with the compiler where it has several devices."""
    manual = set(AXES)
    if device_run.layout.shape.tensor > 1:
        manual.remove("tensor")
    return jax.shard_map(
        function,
        mesh=device_run.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual,
        check_vma=False,
    )


def _gather(device_run: DeviceRun, params: Arrays) -> Arrays:
    """Gathers every parameter over `fsdp`, in the type in which the loss gets it."""
    training = device_run.run.training
    plan = plan_gathers(
        device_run.layout.params,
        device_run.layout.placements,
        compute_dtype=jnp.dtype(training.compute_dtype),
        reduce_dtype=jnp.dtype(training.reduce_dtype),
        dcn=device_run.links,
    )

    def gather_all(params: Arrays) -> Arrays:
        weights = {}
        for name, param in params.items():
            gathers = plan.gathers[name]
            if gathers.gathers:
                weights[name] = plan(param, name)
            else:
                weights[name] = param.astype(gathers.dtype or plan.compute_dtype)
        return weights

    return _by_tensor(device_run, gather_all)(params)


def _by_tensor(
    device_run: DeviceRun, function: Callable[[Arrays], Arrays]
) -> Callable[[Arrays], Arrays]:
    """Applies a function with collectives to this device's part
    of each parameter (or gradient) over `tensor`.

    The compiler does not split the operand of a collective over an axis
    of its own: it would gather it first.
    """
    specs = {}
    for name, placements in device_run.layout.placements.items():
        if "tensor" in axes_of(placements.in_use):
            dims = [("tensor",) if "tensor" in axes else () for axes in placements.in_use]
            specs[name] = to_spec(tuple(dims))
    if not specs:
        return function

    def apply(arrays: Arrays) -> Arrays:
        split = {name: x for name, x in arrays.items() if name in specs}
        replicated = {name: x for name, x in arrays.items() if name not in specs}
        of_shards = jax.shard_map(
            function,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(specs,),
            out_specs=specs,
            axis_names={"tensor"},
            check_vma=False,
        )
        # Gradients of replicated arrays would be summed over `tensor` once more inside
        # of the `shard_map`.
        return of_shards(split) | function(replicated)

    return apply


def wrapped_gradients(
    model: Any, device_run: DeviceRun
) -> Callable[..., tuple[Arrays, Metrics, tuple[Arrays, ...]]]:
    """Returns `(params, step, batch, *variables) -> (gradients, metrics, variables)`.

    Gradients are those of the mean over the complete batch, clipped, in the optimizer's placement.
    Floating-point variables are averaged over the devices; of others every device has the same.
    """
    replicated = PartitionSpec()
    parts_of(device_run).draws.compare(
        _total_parts(device_run, device_run.run.training.microbatches)
    )

    def local(params: Arrays, step: jax.Array, batch: Any, variables: Arrays) -> Any:
        variables, (grads, sums) = _accumulate(device_run, params, step, batch, variables)
        sums = all_reduce(sums, BATCH_AXES)
        with jax.named_scope("gradients"):
            total = jnp.maximum(sums["loss"][1], 1e-9)
            grads = _by_tensor(device_run, functools.partial(_reduce, device_run))(grads)
            grads = {name: g.astype(jnp.float32) / total for name, g in grads.items()}
        return grads, sums, _averaged(variables)

    sharded = _over_mesh(
        device_run,
        local,
        (_specs(device_run, "at_rest"), replicated, PartitionSpec(BATCH_AXES), replicated),
        (_specs(device_run, "optimizer"), replicated, replicated),
    )

    def gradients(params: Arrays, step: jax.Array, batch: Any, *variables: Arrays) -> Any:
        grads, metrics, updated = sharded(params, step, batch, _only(variables))
        norm = optax.tree.norm({name: g.astype(jnp.float32) for name, g in grads.items()})
        metrics = {**metrics, "gradient norm": (norm, jnp.ones(()))}
        if device_run.run.training.health:
            metrics[HEALTH] = {GRADIENT: gradient_squares(device_run, grads)}
        grads = clip(grads, norm, device_run.run.optimizer.grad_clip_norm)
        return grads, metrics, (updated,)

    return gradients


def _only(variables: tuple[Arrays, ...]) -> Arrays:
    """Returns the variables of a module, which has one dictionary of them or none."""
    return variables[0] if variables else {}


def _over_parts(
    count: int, batch: Any, carry: Any, compute: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> Any:
    """Returns the last carry and the sum of the results
    of `compute(carry, number, examples)` over parts of a batch."""
    if count == 1:
        return compute(carry, 0, batch)
    parts_M = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

    def add(state: Any, part: Any) -> Any:
        carry, total = state
        carry, result = compute(carry, *part)
        return (carry, jax.tree.map(jnp.add, total, result)), None

    zeros = _zero_results(compute, carry, parts_M)
    state, _ = jax.lax.scan(add, (carry, zeros), (jnp.arange(count), parts_M))
    return state


def _zero_results(
    compute: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any, parts_M: Any
) -> Any:
    """Returns zeros in the shapes of the results of one part."""
    first = jax.tree.map(lambda x: x[0], parts_M)
    _, shapes = jax.eval_shape(functools.partial(compute, carry), jnp.int32(0), first)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _accumulate(
    device_run: DeviceRun, params: Arrays, step: jax.Array, batch: Any, variables: Arrays
) -> Any:
    """Returns this device's variables, and its gradients and metrics (sum, weight),
    over its microbatches.

    gradient = sum over microbatches m of weight_m * (d loss_m / d params)
    """
    count = device_run.run.training.microbatches

    def compute(variables: Arrays, number: Any, examples: Any) -> Any:
        key = _key_of_part(device_run, step, number, count, parts_of(device_run).draws)
        _, vjp, (sums, updated) = _differentiate(device_run, params, variables, examples, key)
        weight = sums["loss"][1]
        # The backward pass begins with this part's share of the mean over the complete batch, as on
        # one device: one that is not linear, such as a clipped cotangent, gives the same there. The
        # gradient is that of loss * weight.
        total_weight = jnp.maximum(all_reduce(weight, BATCH_AXES), 1e-9) * count
        (grads,) = vjp(weight / total_weight)
        # Microbatches are summed in float32, whatever the type of the reduction over devices.
        scaled = {name: g.astype(jnp.float32) * total_weight for name, g in grads.items()}
        return updated, (scaled, sums)

    return _over_parts(count, batch, variables, compute)


def _differentiate(
    device_run: DeviceRun, params: Arrays, variables: Arrays, examples: Any, key: jax.Array
) -> Any:
    """Returns the loss of some examples, its vector-Jacobian product by the parameters,
    and `(metrics, variables)`."""

    def loss(params: Arrays) -> Any:
        result = _apply(device_run, params, variables, examples, key)
        return jnp.asarray(result.loss, jnp.float32), (_weighted(result), result.variables)

    remat = device_run.run.training.remat
    differentiated = jax.checkpoint(loss) if remat == "full" else loss
    return jax.vjp(differentiated, params, has_aux=True)


def _apply(
    device_run: DeviceRun,
    params: Arrays,
    variables: Arrays,
    examples: Any,
    key: jax.Array,
    train: bool = True,
) -> Result:
    """Returns the result of the loss of some examples, with gathered parameters."""
    weights = _gather(device_run, params)
    return parts_of(device_run).adapter.call((weights, variables), examples, key, train)


def _key_of_part(
    device_run: DeviceRun, step: Any, number: Any, count: int, draws: Draws
) -> jax.Array:
    """Returns the key of a device's part `number` of `count`, of all parts of a batch."""
    part = axis_index(BATCH_AXES) * count + number
    total = _total_parts(device_run, count)
    return step_key(device_run.run.training.seed, step, part, total, draws)


def _total_parts(device_run: DeviceRun, count: int) -> int:
    """Returns the number of parts of a batch of which each device has `count`."""
    return device_run.layout.shape.over(BATCH_AXES) * count


def _weighted(result: Result) -> Metrics:
    """Returns the metrics of a result and its loss, each (value times weight, weight)."""
    weight = jax.lax.stop_gradient(jnp.asarray(result.metrics.get("weight", 1.0), jnp.float32))
    values = {"loss": result.loss, **result.metrics}
    values.pop("weight", None)
    return {
        name: (jnp.asarray(value, jnp.float32) * weight, weight) for name, value in values.items()
    }


def _reduce(device_run: DeviceRun, grads: Arrays) -> Arrays:
    """Sums gradients over the batch axes into the optimizer's placement."""
    placements = {name: device_run.layout.placements[name] for name in grads}
    replicated_axes = {}
    for name, placed in placements.items():
        sharded_axes = axes_of(placed.optimizer)
        replicated_axes[name] = tuple(axis for axis in BATCH_AXES if axis not in sharded_axes)
    dtype = jnp.dtype(device_run.run.training.reduce_dtype)
    return sum_over_devices(grads, placements, replicated_axes, device_run.links, dtype)


def _averaged(variables: Arrays) -> Arrays:
    """Averages floating-point variables over the devices, each of
    which has seen its own examples."""
    floating = {name: x for name, x in variables.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    count = all_reduce(jnp.ones(()), BATCH_AXES)
    sums = all_reduce({name: x.astype(jnp.float32) for name, x in floating.items()}, BATCH_AXES)
    averages = {name: (x / count).astype(floating[name].dtype) for name, x in sums.items()}
    return {**variables, **averages}


def evaluation_parts(device_run: DeviceRun) -> int:
    """Returns in how many parts a device evaluates a held-out batch: none has more examples
    than a microbatch."""
    parts = parts_of(device_run)
    microbatches = device_run.run.training.microbatches
    if parts.held_out is None or microbatches == 1:
        return 1
    degree = device_run.layout.shape.over(BATCH_AXES)
    examples = parts.held_out.batch_size // degree
    microbatch = parts.source.batch_size // (degree * microbatches)
    return min(count for count in divisors(examples) if examples <= count * microbatch)


def build_evaluation(device_run: DeviceRun) -> Any:
    """Returns `(params, batch, *variables) -> metrics`, jitted, each metric (sum, weight)
    over the complete batch."""
    compute_dtype = device_run.run.training.compute_dtype
    draws = parts_of(device_run).eval_draws
    count = evaluation_parts(device_run)
    draws.compare(_total_parts(device_run, count))

    def local(params: Arrays, batch: Any, variables: Arrays) -> Metrics:
        def compute(_: Any, number: Any, examples: Any) -> Any:
            key = _key_of_part(device_run, _EVALUATION, number, count, draws)
            with matmuls_of(compute_dtype):
                result = _apply(device_run, params, variables, examples, key, train=False)
            return (), _weighted(result)

        _, metrics = _over_parts(count, batch, (), compute)
        return all_reduce(metrics, BATCH_AXES)

    specs = (_specs(device_run, "at_rest"), PartitionSpec(BATCH_AXES), PartitionSpec())
    sharded = _over_mesh(device_run, local, specs, PartitionSpec())
    return jax.jit(lambda params, batch, *variables: sharded(params, batch, _only(variables)))


def check_mean(device_run: DeviceRun, batch: Any) -> None:
    """Compares loss and gradient of some examples with the means
    of their halves, each what a device has of a batch.

    batch: the first one, on the devices. The step takes the mean of what the parts of a batch give,
    so the loss has to be one, weighted by the metric `weight`. Raises ConfigError for a loss that
    is a sum over the examples, and for one that depends on which examples are together (batch
    statistics, pairs), unless its author has said so. A loss that communicates over the batch axes
    itself is that of the complete batch, and is not compared.
    """
    microbatches = device_run.run.training.microbatches
    count = device_run.layout.shape.over(BATCH_AXES) * microbatches
    if count == 1:
        return
    parts = parts_of(device_run)
    words = "comparing loss and gradient of some examples with those of halves"
    with activity("check", words, "compared the loss") as work:
        if not parts.communicates:
            work.result = _compare_halves(device_run, batch, count)
        elif microbatches == 1:
            work.result = "the loss communicates over the batch axes: it is that of the whole batch"
        else:
            work.result = (
                "the loss communicates over the batch axes: it is that of each of "
                f"{microbatches} microbatches"
            )


class _Part(NamedTuple):
    """Loss of some examples, its weight, and the gradient of the loss."""

    loss: jax.Array
    weight: jax.Array
    gradient: Arrays


@dataclasses.dataclass(frozen=True)
class _Halves:
    """The first examples of a batch in two halves, whose loss is measured together and of each.

    Every device computes the same examples,
    so gradients are those of one device times the devices that sum them.
    """

    device_run: DeviceRun
    batch: Any
    examples: int
    """Examples of a half."""
    draws: Draws
    """What the loss draws for both halves together."""

    def measure(self, *halves: int) -> _Part:
        """Returns the loss of the halves (0, 1) that are taken together."""
        # Both together are the only part of a batch; one of them is one of two.
        part = halves[0] if len(halves) == 1 else 0
        params, variables = self._state
        with matmuls_of(self.device_run.run.training.compute_dtype):
            return self._jitted(params, _only(variables), self.batch, halves, part)

    @functools.cached_property
    def _state(self) -> tuple[Arrays, tuple[Arrays, ...]]:
        return draw_arrays(self.device_run.run.model, self.device_run)

    @functools.cached_property
    def _jitted(self) -> Callable[..., _Part]:
        return jax.jit(self._measure)

    def _measure(
        self, params: Arrays, variables: Arrays, batch: Any, halves: tuple[int, ...], part: int
    ) -> _Part:
        replicated: Any = PartitionSpec()
        at_rest: Any = _specs(self.device_run, "at_rest")
        sharded = _over_mesh(
            self.device_run,
            functools.partial(self._measure_local, len(halves)),
            (at_rest, replicated, replicated, replicated),
            _Part(replicated, replicated, at_rest),
        )
        examples = jax.tree.map(lambda x: self._take(x, halves), batch)
        return sharded(params, variables, examples, part)

    def _take(self, x: jax.Array, halves: tuple[int, ...]) -> jax.Array:
        """Returns the rows of the halves."""
        rows = [
            jax.lax.dynamic_slice_in_dim(x, half * self.examples, self.examples) for half in halves
        ]
        return jnp.concatenate(rows)

    def _measure_local(
        self, count: int, params: Arrays, variables: Arrays, examples: Any, part: jax.Array
    ) -> _Part:
        """Measures the examples of `count` halves on one device."""
        seed = self.device_run.run.training.seed
        key = step_key(seed, 0, part, 3 - count, self.draws)

        def loss(params: Arrays) -> Any:
            result = _apply(self.device_run, params, variables, examples, key)
            weight = _weighted(result)["loss"][1]
            return jnp.asarray(result.loss, jnp.float32), weight

        # A half is half of the examples: a backward pass
        # that is not linear gets what the step gives it.
        value, vjp, weight = jax.vjp(loss, params, has_aux=True)
        (gradient,) = vjp(jnp.float32(count / 2))
        scaled = {name: g.astype(jnp.float32) * 2 / count for name, g in gradient.items()}
        return _Part(value, weight, scaled)


def _halves_of(device_run: DeviceRun, batch: Any, examples: int) -> _Halves:
    """Returns the first examples of a batch in halves of `examples`."""
    draws = parts_of(device_run).draws_of_batch(train=True, rows=2 * examples)
    draws.compare(2)
    return _Halves(device_run, batch, examples, draws)


def _norm(gradient: Arrays) -> float:
    return float(optax.tree.norm(gradient))


def _close(a: float, b: float) -> bool:
    """Returns whether rounding explains the difference of two losses."""
    return abs(a - b) <= _CLOSE * max(abs(a), abs(b))


class _Comparison(NamedTuple):
    """Loss of two halves together, of each, and the weighted mean of these;
    and how far the gradients differ."""

    both: float
    first: float
    second: float
    mean: float
    relative: float
    """Norm of the difference of the gradient and the mean of those of the halves,
    over the largest norm."""

    @property
    def is_finite(self) -> bool:
        """Whether all figures are finite."""
        return all(map(math.isfinite, self))

    @property
    def is_mean(self) -> bool:
        """Whether the loss is the mean of those of the halves."""
        return _close(self.both, self.mean)

    def is_sum(self, halves: _Halves) -> bool:
        """Returns whether the loss is a sum over the examples,
        of which some terms may be shared by all."""
        if self.is_mean:
            return False
        if _close(self.both, self.first + self.second):
            return True
        # A sum and something that all examples share, such
        # as a penalty: an example adds the same to any others.
        added_to_second = self.both - self.second
        added_to_itself = float(halves.measure(0, 0).loss) - self.first
        is_above_rounding = abs(added_to_itself) > _CLOSE * abs(self.both)
        return is_above_rounding and _close(added_to_second, added_to_itself)


def _compare(halves: _Halves) -> _Comparison:
    """Measures the halves together and each, and compares.

    mean = (w1 first + w2 second) / (w1 + w2)
    """
    together = halves.measure(0, 1)
    one = halves.measure(0)
    other = halves.measure(1)
    total = max(float(one.weight) + float(other.weight), 1e-9)
    share = float(one.weight) / total
    other_share = float(other.weight) / total
    mean_gradient = jax.tree.map(
        lambda a, b: share * a + other_share * b, one.gradient, other.gradient
    )
    difference = _norm(jax.tree.map(jnp.subtract, together.gradient, mean_gradient))
    size = max(_norm(part.gradient) for part in (together, one, other))
    relative = difference / size if size else difference
    return _Comparison(
        both=float(together.loss),
        first=float(one.loss),
        second=float(other.loss),
        mean=share * float(one.loss) + other_share * float(other.loss),
        relative=relative,
    )


def _compare_halves(device_run: DeviceRun, batch: Any, count: int) -> str:
    """Returns what the loss of two parts of a batch is, in words. count: parts of the batch.

    Raises ConfigError for a loss that is not a mean, unless its author has said that it is
    over a device's examples.
    """
    parts = parts_of(device_run)
    examples = parts.source.batch_size // count
    halves = _halves_of(device_run, batch, examples)
    found = _compare(halves)
    if not found.is_finite:
        return "the loss or its gradient is not finite, so it was not compared with that of halves"
    tolerance = _CLOSE_LOW if parts.rounds else _CLOSE
    if found.is_mean and found.relative <= tolerance:
        return (
            "the loss is a mean over the examples: the gradients of halves agree to "
            f"{found.relative:.1g} of their size"
        )
    figures = (
        f"at the first batch it is {found.both:.6g} for {2 * examples} examples, and "
        f"{found.first:.6g} and {found.second:.6g} for its halves, whose mean is {found.mean:.6g}; "
        f"its gradient differs from the mean of theirs by {found.relative:.2g} of its size"
    )
    local = f"the {examples} of {parts.source.batch_size} examples of a batch that a device has"
    if found.is_sum(halves):
        raise ConfigError(
            f"a loss that is a sum over {local}",
            f"{figures}. The step takes the mean of what the parts of a batch give: on another "
            "mesh this loss and its gradients would have another size",
            "the mean over the examples: .mean() instead of .sum(), or the sum divided by "
            "x.shape[0]",
        )
    if parts.local_batch:
        return (
            "the loss is over each device's examples, as mw.wrap(local_batch=True) has it: "
            f"{figures}"
        )
    gather = 'x = jax.lax.all_gather(x, ("data", "fsdp"), tiled=True)'
    fix = f"{gather} in the loss, for what it compares or averages"
    if device_run.run.training.microbatches > 1:
        fix += ", with --training.microbatches 1"
    raise ConfigError(
        f"a loss that depends on which examples are together, over {local}",
        f"{figures}. The step takes the mean of what the parts of a batch give, so statistics of a "
        "batch, pairs of examples and functions of a mean have other gradients on another mesh",
        f"{fix}; or mw.wrap(..., local_batch=True), for a loss that is meant to be over a device's "
        "own examples",
    )
