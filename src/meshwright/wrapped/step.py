"""Gradients and evaluation of a wrapped model.

`data` and `fsdp` are manual: a `shard_map` in which each device computes the loss of its own examples. Parameters are
gathered over `fsdp` before the loss, and the backward pass reduce-scatters their gradients; `data` sums them.
`tensor` is the compiler's: it sees the whole arrays, split as rules or annotations state, and inserts what the module's
own operations need.
"""

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
from meshwright.models.model import Metrics
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import plan_gathers
from meshwright.sharding.placement import axes_of, to_spec
from meshwright.step.device_run import DeviceRun
from meshwright.step.gradients import clip, sum_over_devices
from meshwright.step.train_step import matmuls_of
from meshwright.words import AXES
from meshwright.wrapped.keys import Draws, step_key
from meshwright.wrapped.modules import Arrays, Result
from meshwright.wrapped.parts import WrappedParts

_EVALUATION = 0x7FFFFFFF
"""Step of the keys of an evaluation."""
_CLOSE, _CLOSE_LOW = 2e-3, 3e-2
"""Relative difference of losses, and of gradients, that rounding explains; the second of gradients where the loss rounds
to 16 bits."""


def parts_of(device_run: DeviceRun) -> WrappedParts:
    """Returns module, loss and data of a wrapped model on its devices."""
    model: Any = device_run.run.model
    return model.parts


def draw_arrays(model: Any, device_run: DeviceRun) -> tuple[Arrays, tuple[Arrays, ...]]:
    """Returns parameters and variables before the first step: drawn in their shardings, or copies of those given."""
    adapter, training, where = (
        model.parts.adapter,
        device_run.run.training,
        device_run.state_shardings,
    )
    dtype = jnp.dtype(training.param_dtype)

    def build(key: jax.Array) -> Any:
        params, variables, _ = adapter.build(key)
        return {name: x.astype(dtype) for name, x in params.items()}, (
            variables,
        ) if where.variables else ()

    if adapter.drawn:
        with jax.threefry_partitionable(True):
            drawn = jax.jit(build, out_shardings=(where.params, where.variables))
            return drawn(jax.random.key(training.seed))
    # Copies: the train step writes over its own arrays, and the module keeps those that it has.
    return jax.tree.map(
        lambda x, s: jax.device_put(np.array(x), s, may_alias=False),
        build(jax.random.key(0)),
        (where.params, where.variables),
    )


def _specs(device_run: DeviceRun, which: str) -> Any:
    placed = {name: getattr(p, which) for name, p in device_run.layout.placements.items()}
    return {
        name: to_spec(tuple(tuple(a for a in axes if a != "tensor") for axes in p))
        for name, p in placed.items()
    }


def _over_mesh(
    device_run: DeviceRun, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Any:
    """`shard_map` over all axes; `tensor` stays with the compiler where it has several devices."""
    manual = set(AXES) - ({"tensor"} if device_run.layout.shape.tensor > 1 else set())
    mesh = device_run.mesh
    return jax.shard_map(
        function,
        mesh=mesh,
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

    def gather_one(name: str, w: jax.Array) -> jax.Array:
        how = plan.gathers[name]
        return plan(w, name) if how.gathers else w.astype(how.dtype or plan.compute_dtype)

    return _by_tensor(
        device_run, lambda params: {name: gather_one(name, w) for name, w in params.items()}
    )(params)


def _by_tensor(
    device_run: DeviceRun, function: Callable[[Arrays], Arrays]
) -> Callable[[Arrays], Arrays]:
    """Applies a function with collectives to this device's part of each parameter (or gradient) over `tensor`.

    The compiler does not split the operand of a collective over an axis of its own: it would gather it first.
    """
    specs = {}
    for name, where in device_run.layout.placements.items():
        if "tensor" in axes_of(where.in_use):
            specs[name] = to_spec(
                tuple(tuple(a for a in axes if a == "tensor") for axes in where.in_use)
            )
    if not specs:
        return function

    def apply(arrays: Arrays) -> Arrays:
        split = {name: x for name, x in arrays.items() if name in specs}
        mesh = jax.sharding.get_abstract_mesh()
        own = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
            axis_names={"tensor"},
            check_vma=False,
        )
        # The others are whole over `tensor`: inside, their gradients would be summed over it once more.
        return own(split) | function({name: x for name, x in arrays.items() if name not in specs})

    return apply


def wrapped_gradients(
    model: Any, device_run: DeviceRun
) -> Callable[..., tuple[Arrays, Metrics, tuple[Arrays, ...]]]:
    """Returns `(params, step, batch, *variables) -> (gradients, metrics, variables)`.

    Gradients are those of the mean over the whole batch, clipped, in the optimizer's placement. Floating-point
    variables are averaged over the devices; of others every device has the same.
    """
    run, replicated = device_run.run, PartitionSpec()

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
        grads, metrics, after = sharded(params, step, batch, variables[0] if variables else {})
        norm = optax.tree.norm({name: g.astype(jnp.float32) for name, g in grads.items()})
        grads = clip(grads, norm, run.optimizer.grad_clip_norm)
        return grads, {**metrics, "gradient norm": (norm, jnp.ones(()))}, (after,)

    return gradients


def _over_parts(
    count: int, batch: Any, carry: Any, one: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> Any:
    """Returns the last carry and the sum of the results of `one(carry, number, examples)` over parts of a batch."""
    if count == 1:
        return one(carry, 0, batch)
    parts_M = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    first = jax.tree.map(lambda x: x[0], parts_M)
    like = jax.eval_shape(lambda: one(carry, jnp.int32(0), first)[1])

    def add(state: Any, part: Any) -> Any:
        carry, more = one(state[0], *part)
        return (carry, jax.tree.map(jnp.add, state[1], more)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return jax.lax.scan(add, (carry, zeros), (jnp.arange(count), parts_M))[0]


def _accumulate(
    device_run: DeviceRun, params: Arrays, step: jax.Array, batch: Any, variables: Arrays
) -> Any:
    """This device's variables, and its gradients and metrics (sum, weight), over its microbatches."""
    training, parts = device_run.run.training, parts_of(device_run)
    count = training.microbatches
    total = device_run.layout.shape.over(BATCH_AXES) * count

    def one(variables: Arrays, number: Any, batch: Any) -> Any:
        part = axis_index(BATCH_AXES) * count + number
        key = step_key(training.seed, step, part, total, parts.draws)

        def loss(params: Arrays) -> Any:
            result = parts.adapter.call((_gather(device_run, params), variables), batch, key, True)
            return jnp.asarray(result.loss, jnp.float32), (_weighted(result), result.variables)

        differentiated = jax.checkpoint(loss) if training.remat == "full" else loss
        _, pull, (sums, after) = jax.vjp(differentiated, params, has_aux=True)
        weight = sums["loss"][1]
        # The backward pass begins with this part's share of the mean over the whole batch, as on one device: one that
        # is not linear, such as a clipped cotangent, gives the same there. The gradient is that of loss * weight.
        over_devices = jnp.maximum(all_reduce(weight, BATCH_AXES), 1e-9) * count
        (grads,) = pull(weight / over_devices)
        # Microbatches are summed in float32, whatever the type of the reduction over devices.
        scaled = {name: g.astype(jnp.float32) * over_devices for name, g in grads.items()}
        return after, (scaled, sums)

    return _over_parts(count, batch, variables, one)


def _weighted(result: Result) -> Metrics:
    weight = jax.lax.stop_gradient(jnp.asarray(result.metrics.get("weight", 1.0), jnp.float32))
    values = {
        "loss": result.loss,
        **{name: v for name, v in result.metrics.items() if name != "weight"},
    }
    return {name: (jnp.asarray(v, jnp.float32) * weight, weight) for name, v in values.items()}


def _reduce(device_run: DeviceRun, grads: Arrays) -> Arrays:
    """Sums gradients over the batch axes into the optimizer's placement."""
    where = {name: device_run.layout.placements[name] for name in grads}
    lacking = {
        name: tuple(a for a in BATCH_AXES if a not in axes_of(p.optimizer))
        for name, p in where.items()
    }
    dtype = jnp.dtype(device_run.run.training.reduce_dtype)
    return sum_over_devices(grads, where, lacking, device_run.links, dtype)


def _averaged(variables: Arrays) -> Arrays:
    """Averages floating-point variables over the devices, each of which has seen its own examples."""
    means = {name: x for name, x in variables.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    count = all_reduce(jnp.ones(()), BATCH_AXES)
    summed = all_reduce({name: x.astype(jnp.float32) for name, x in means.items()}, BATCH_AXES)
    return {
        **variables,
        **{name: (x / count).astype(means[name].dtype) for name, x in summed.items()},
    }


def evaluation_parts(device_run: DeviceRun) -> int:
    """Returns in how many parts a device evaluates a held-out batch: none has more examples than a microbatch."""
    parts, microbatches = parts_of(device_run), device_run.run.training.microbatches
    if parts.held_out is None or microbatches == 1:
        return 1
    degree = device_run.layout.shape.over(BATCH_AXES)
    rows, most = (
        parts.held_out.batch_size // degree,
        parts.source.batch_size // (degree * microbatches),
    )
    return min(n for n in divisors(rows) if rows <= n * most)


def build_evaluation(device_run: DeviceRun) -> Any:
    """Returns `(params, batch, *variables) -> metrics`, jitted, each metric (sum, weight) over the whole batch."""
    training, parts = device_run.run.training, parts_of(device_run)
    count = evaluation_parts(device_run)
    total = device_run.layout.shape.over(BATCH_AXES) * count

    def local(params: Arrays, batch: Any, variables: Arrays) -> Metrics:
        def one(_: Any, number: Any, batch: Any) -> Any:
            part = axis_index(BATCH_AXES) * count + number
            key = step_key(training.seed, _EVALUATION, part, total, parts.eval_draws)
            with matmuls_of(training.compute_dtype):
                return (), _weighted(
                    parts.adapter.call((_gather(device_run, params), variables), batch, key, False)
                )

        return all_reduce(_over_parts(count, batch, (), one)[1], BATCH_AXES)

    specs = (_specs(device_run, "at_rest"), PartitionSpec(BATCH_AXES), PartitionSpec())
    sharded = _over_mesh(device_run, local, specs, PartitionSpec())
    return jax.jit(
        lambda params, batch, *variables: sharded(params, batch, variables[0] if variables else {})
    )


def check_mean(device_run: DeviceRun, batch: Any) -> None:
    """Compares loss and gradient of some examples with the means of their halves, each what a device has of a batch.

    batch: the first one, on the devices. The step takes the mean of what the parts of a batch give, so the loss has to
    be one, weighted by the metric `weight`. Raises ConfigError for a loss that is a sum over the examples, and for one
    that depends on which examples are together (batch statistics, pairs), unless its author has said so. A loss that
    communicates over the batch axes itself is that of the whole batch, and is not compared.
    """
    count = device_run.layout.shape.over(BATCH_AXES) * device_run.run.training.microbatches
    if count == 1:
        return
    parts, microbatches = parts_of(device_run), device_run.run.training.microbatches
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


def _measure_parts(device_run: DeviceRun, batch: Any, rows: int) -> Callable[..., _Part]:
    """Returns a function of the halves (0, 1) of the first examples that are taken together, `rows` in each.

    Every device computes the same examples, so gradients are those of one device times the devices that sum them.
    """
    training, parts = device_run.run.training, parts_of(device_run)
    params, variables = draw_arrays(device_run.run.model, device_run)
    draws = Draws()
    function, arguments = parts.traced(True, 2 * rows)
    draws.read(jax.make_jaxpr(function)(*arguments).jaxpr)
    everywhere: Any = PartitionSpec()
    at_rest = _specs(device_run, "at_rest")

    def chosen(x: jax.Array, halves: tuple[int, ...]) -> jax.Array:
        pieces = [jax.lax.dynamic_slice_in_dim(x, half * rows, rows) for half in halves]
        return jnp.concatenate(pieces)

    @jax.jit
    def measure(
        params: Arrays, variables: Arrays, batch: Any, halves: tuple[int, ...], part: int
    ) -> _Part:
        def local(params: Arrays, variables: Arrays, examples: Any, part: jax.Array) -> _Part:
            key = step_key(training.seed, 0, part, 3 - len(halves), draws)

            def loss(params: Arrays) -> Any:
                weights = _gather(device_run, params)
                result = parts.adapter.call((weights, variables), examples, key, True)
                weight = _weighted(result)["loss"][1]
                return jnp.asarray(result.loss, jnp.float32), weight

            # A half is half of the examples: a backward pass that is not linear gets what the step gives it.
            value, pull, weight = jax.vjp(loss, params, has_aux=True)
            (gradient,) = pull(jnp.float32(len(halves) / 2))
            whole = {name: g.astype(jnp.float32) for name, g in gradient.items()}
            return _Part(value, weight, {name: g * 2 / len(halves) for name, g in whole.items()})

        in_specs = (at_rest, everywhere, everywhere, everywhere)
        sharded = _over_mesh(device_run, local, in_specs, _Part(everywhere, everywhere, at_rest))
        examples = jax.tree.map(lambda x: chosen(x, halves), batch)
        return sharded(params, variables, examples, part)

    def of_halves(*halves: int) -> _Part:
        part = halves[0] if len(halves) == 1 else 0
        with matmuls_of(training.compute_dtype):
            return measure(params, variables[0] if variables else {}, batch, halves, part)

    return of_halves


def _norm(gradient: Arrays) -> float:
    return float(optax.tree.norm(gradient))


def _compare_halves(device_run: DeviceRun, batch: Any, count: int) -> str:
    """Returns what the loss of two parts of a batch is, in words. count: parts of the batch."""
    parts = parts_of(device_run)
    rows = parts.source.batch_size // count
    of_halves = _measure_parts(device_run, batch, rows)
    together, one, other = of_halves(0, 1), of_halves(0), of_halves(1)
    both, first, second = float(together.loss), float(one.loss), float(other.loss)
    total = max(float(one.weight) + float(other.weight), 1e-9)
    shares = (float(one.weight) / total, float(other.weight) / total)
    mean = shares[0] * first + shares[1] * second
    parted = jax.tree.map(lambda a, b: shares[0] * a + shares[1] * b, one.gradient, other.gradient)
    difference = _norm(jax.tree.map(jnp.subtract, together.gradient, parted))
    size = max(_norm(together.gradient), *map(_norm, (one.gradient, other.gradient)))

    def close(one: float, other: float) -> bool:
        return abs(one - other) <= _CLOSE * max(abs(one), abs(other))

    if not all(map(math.isfinite, (both, first, second, difference))):
        return "the loss or its gradient is not finite, so it was not compared with that of halves"
    relative = difference / size if size else 0.0
    means = close(both, mean)
    if means and relative <= (_CLOSE_LOW if parts.rounds else _CLOSE):
        return (
            "the loss is a mean over the examples: the gradients of halves agree to "
            f"{relative:.1g} of their size"
        )
    figures = (
        f"at the first batch it is {both:.6g} for {2 * rows} examples, and {first:.6g} and {second:.6g} for its "
        f"halves, whose mean is {mean:.6g}; its gradient differs from the mean of theirs by {relative:.2g} of its size"
    )
    is_sum = close(both, first + second)
    if not means and not is_sum:
        # A sum and something that all examples share, such as a penalty: an example adds the same to any others.
        added, twice = both - second, float(of_halves(0, 0).loss) - first
        is_sum = abs(twice) > _CLOSE * abs(both) and close(added, twice)
    own = f"the {rows} of {parts.source.batch_size} examples of a batch that a device has"
    if is_sum and not means:
        raise ConfigError(
            f"a loss that is a sum over {own}",
            f"{figures}. The step takes the mean of what the parts of a batch give: on another mesh this loss and its "
            "gradients would have another size",
            "the mean over the examples: .mean() instead of .sum(), or the sum divided by x.shape[0]",
        )
    if parts.local_batch:
        return f"the loss is over each device's examples, as mw.wrap(local_batch=True) has it: {figures}"
    microbatches = device_run.run.training.microbatches
    whole = 'x = jax.lax.all_gather(x, ("data", "fsdp"), tiled=True) in the loss, for what it compares or averages'
    if microbatches > 1:
        whole += ", with --training.microbatches 1"
    raise ConfigError(
        f"a loss that depends on which examples are together, over {own}",
        f"{figures}. The step takes the mean of what the parts of a batch give, so statistics of a batch, pairs of "
        "examples and functions of a mean have other gradients on another mesh",
        f"{whole}; or mw.wrap(..., local_batch=True), for a loss that is meant to be over a device's own examples",
    )
