"""Pipeline engine: executes the table of any schedule, tick by tick, inside the step.

A tick has a forward half and a backward half (and a third, for weight gradients, where a schedule
splits the backward pass), each of its own microbatch and part of the model. A stage passes
activations on after its half, and gradients after the tick (`ring_shift`): activations travel
during the backward half of the same tick, gradients during the forward half of the next. They wait
in the buffer slots that the table has assigned. A backward half differentiates its part with
`jax.vjp`: from the saved input, by recomputing the part, or from what the forward half has kept
(`PipelineModel.keeps`).

A layer reads its row of the stage's stacks by number, and its gradients are added to the same row
of their float32 sums as soon as they are known: no part's weights are copied, and no part's
gradients exist beside the sums.

The ticks are run in segments (before the first backward pass, with both halves, after the last
forward pass), each a loop whose body has only the halves that some stage runs in it. A half that
all stages run in every tick of its segment has no branch around it; elsewhere a stage without a
task waits in a `lax.cond`. Where the layers send values around a ring of devices
(`PipelineModel.together`), every stage runs the half, and the result of one without a task is
dropped.

Embedding and loss belong to no stage: their tables are split over all stages, which take part in
the ticks in which the first part begins a microbatch, or the last part has finished one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Var

from meshwright.comm.collectives import ring_shift
from meshwright.data.batch import Batch
from meshwright.models.blocks.layers import Dropout
from meshwright.models.forward import LocalModel
from meshwright.models.layer_health import add_aux
from meshwright.models.model import Aux, ForwardContext, Metrics
from meshwright.models.period_scan import with_gradient_of
from meshwright.sharding.params import RoundedParam, Tree, with_frozen
from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    IDLE,
    NOTHING,
    PLACES,
    Arrivals,
    ScheduleTable,
)

Tick = dict[str, Any]
"""The table's entries of one tick, for this stage."""
Ticks = dict[frozenset[frozenset[str]], float]
"""Number of ticks by the scopes of what the stages run in them: a set for each stage that is not
idle."""

Layers = dict[str, Tree]
"""Parameters of the stacked layers, by stack."""


class Part(NamedTuple):
    """A part of the layers, as the inputs of a forward pass."""

    params: Layers
    """Whole stacks."""
    rounded: dict[str, dict[str, tuple[jax.Array, jax.Array]]]
    """Weights of them in low precision, rounded once for all ticks (`GatherParams.rounded`)."""
    grad_stand_ins: Layers
    """Zeros shaped like the float32 sums of gradients [rows, ...]. The part is differentiated by
    them instead of by its weights, and their values are never read: `vjp.with_refs` gets the sums
    themselves, to whose rows the gradients are added in place. A leaf that *is* the weight marks a
    frozen parameter; in a forward-only run every leaf does, and nothing is differentiated."""
    adds_gradients: jax.Array
    """Bool scalar; where it is false, gradients are dropped (`_sum_of_row`)."""
    virtual_stage: jax.Array
    microbatch: jax.Array


_COLUMNS = ("kind", "virtual_stage", "microbatch", "input_slot", "gradient_slot")
"""Fields of a table, and of a task."""
_RUN, _INPUT, _WEIGHT = range(len(PLACES))
"""Places of a tick: the forward pass, the backward pass or the gradient of its input, the gradient
of the weights."""


@dataclasses.dataclass(frozen=True)
class PipelineModel:
    """A forward pass as functions of sharded parameters and of a microbatch's index."""

    model: LocalModel
    microbatches: tuple[jax.Array, Batch]
    """Sequence indices [M, B] and batches [M, B, T]."""
    dropout: Callable[[jax.Array], Dropout]
    total: jax.Array
    """Weight of the global batch."""
    frozen: tuple[Tree, Tree] | None = None
    """Descriptions and arrays of all parameters of this stage, where the engine is given those that
    are trained (with None for the frozen ones)."""

    def _take(self, m: jax.Array) -> tuple[jax.Array, Batch]:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, m, keepdims=False), self.microbatches
        )

    def _context(self, m: jax.Array) -> ForwardContext:
        sequences_B, batch = self._take(m)
        return self.model.context(batch, self.dropout(sequences_B))

    def _all(self, params: Tree) -> Tree:
        if self.frozen is None:
            return params
        described, arrays = self.frozen
        return {
            path: with_frozen(described[path], tree, arrays[path]) for path, tree in params.items()
        }

    def embed(self, params: Tree, m: jax.Array) -> jax.Array:
        """Returns x [B, T, D] of a microbatch, on the first stage."""
        return self.model.embed(self._all(params), self._context(m))

    def layers(self, part: Part, x: jax.Array) -> tuple[jax.Array, Any]:
        """Returns x after the layers of a part, and their aux: a tree of [rows, ...]."""
        rows = _PartRows(self.model, part, self._all(part.params), self._all(part.grad_stand_ins))
        ctx = self._context(part.microbatch)
        if ctx.tap is not None:
            ctx = dataclasses.replace(ctx, tap=ctx.tap.where(part.adds_gradients))
        return self.model.layers(rows.read, x, ctx, part.virtual_stage)

    def loss(self, params: Tree, x: jax.Array, m: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the loss of the local shard and its sums from x of the last part."""
        sequences_B, batch = self._take(m)
        model = self.model.recorded(self.dropout(sequences_B))
        return model.loss(self._all(params), x, batch, self.total)

    @property
    def keeps(self) -> bool:
        """Whether a forward pass keeps what its backward pass reads.

        Otherwise that recomputes the part.
        """
        return self.model.training.stage_saves == "layers"

    @property
    def together(self) -> bool:
        """Whether the layers send values around a ring of devices, so that all stages take part."""
        return self.model.execution.permutes

    def stacked(self, params: Tree) -> Layers:
        """Returns the subtrees of stacked layers."""
        return {path: params[path] for path in self.model.stacks}

    def unstacked(self, params: Tree) -> Tree:
        """Returns all other parameters: embedding, unembedding, final norm."""
        return {path: tree for path, tree in params.items() if path not in self.model.stacks}

    def gradients(
        self, table: ScheduleTable, trained: Tree
    ) -> tuple[Tree, tuple[Metrics, dict[str, Aux]]]:
        """Returns this device's gradients of the trained parameters, and its metrics and aux."""
        end = _Engine(table, self, trained, self._rounded(trained), trains=True).run()
        grads = {**end.layers, **end.rest}
        return {path: grads[path] for path in trained}, (end.sums, end.aux)

    def sums(self, table: ScheduleTable, params: Tree) -> Any:
        """Runs a table of forward passes; returns the sums of `loss`, summed over `stage`."""
        return _Engine(table, self, params, self._rounded(params), trains=False).run().sums

    def _rounded(self, params: Tree) -> Any:
        stacks = self._all(self.stacked(params))
        return {
            path: self.model.execution.gather_params.rounded(tree, path)
            for path, tree in stacks.items()
        }


@dataclasses.dataclass(frozen=True, eq=False)
class _PartRows:
    """Rows of the stacks that a part reads, whose gradients go to the same rows of the sums.

    Layer i of virtual stage v, of a stack with R rows in V virtual stages, is row v R/V + i.
    """

    model: LocalModel
    part: Part
    params: Layers
    """Whole stacks, frozen parameters included."""
    sums: Layers
    """Sums of their gradients; a frozen parameter stands for its own."""

    def read(self, stack: str, number: Any) -> Callable[[], Tree]:
        """Returns what reads the weights of a layer, which calls it in each of its passes."""
        gathers = self.model.execution.gather_params.gathers[stack]
        sum_of = functools.partial(self._sum_of_row, number)
        sums = jax.tree.map(sum_of, self.params[stack], self.sums[stack], gathers)
        return functools.partial(self._weights, stack, number, sums)

    def _weights(self, stack: str, number: Any, sums: Tree) -> Tree:
        weights = jax.tree.map(functools.partial(self._weight, number), self.params[stack], sums)
        for name, (values, scale) in self.part.rounded[stack].items():
            weights[name] = RoundedParam(
                weights[name], self._row(number, values), self._row(number, scale)
            )
        return weights

    def _weight(self, number: Any, stacked: jax.Array, row_of_sum: jax.Array | None) -> jax.Array:
        """Returns a weight, whose gradient goes to a row of its sum."""
        weight = self._row(number, stacked)
        return weight if row_of_sum is None else with_gradient_of(row_of_sum, weight)

    def _sum_of_row(
        self, number: Any, stacked: jax.Array, total: jax.Array, gathers: Any
    ) -> jax.Array | None:
        """Returns the row that takes a weight's gradient; None for a frozen weight."""
        if stacked is total:  # frozen, or a forward-only run (`Part.grad_stand_ins`)
            return None
        # Where nothing is gathered, a gradient leaves its layer in the weight's type.
        weight_dtype = gathers.dtype or self.model.execution.gather_params.compute_dtype
        dtype = stacked.dtype if gathers.gathers else weight_dtype
        row = self._row(number, total).astype(dtype)
        return lax.select(self.part.adds_gradients, row, jnp.zeros_like(row))

    def _row(self, number: Any, stacked: jax.Array) -> jax.Array:
        rows = stacked.shape[0] // self.model.stages.virtual_stages
        index = self.part.virtual_stage * rows + number
        return lax.dynamic_index_in_dim(stacked, index, keepdims=False)


_EVENTS = {
    "embed": (0, (FORWARD,)),
    "loss": (-1, (FORWARD,)),
    "embed gradient": (0, (BACKWARD, BACKWARD_INPUT)),
}
"""What all stages do together: the part that starts it, by index, and the kinds of its tasks."""


def scope_of(segment: str, name: str) -> str:
    """Returns the named scope of a branch, by which the census knows how often a stage takes it."""
    # The full stop keeps a scope from being a substring of another.
    return f"pipeline {segment}: {name}."


def repeats_forward(scope: str) -> bool:
    """Returns whether a branch differentiates what another branch has computed."""
    return not scope.endswith((": forward.", ": loss."))


def branch_ticks(table: ScheduleTable, together: bool = False) -> dict[str, tuple[int, int]]:
    """Returns the ticks in which a stage takes a branch, and all ticks, by the branch's scope.

    together: whether a stage without a task computes with the others (`PipelineModel.together`).
    """
    counts: dict[str, tuple[int, int]] = {}
    events = _events(table)
    for segment, ticks in table.segments:
        running = table.kind[ticks] != IDLE
        taken = running.any(axis=1) if together else running[:, 0]
        for i, name in enumerate(PLACES):
            counts[scope_of(segment, name)] = (int(taken[:, i].sum()), len(ticks))
        for name, microbatches in events.items():
            happening = int((microbatches[ticks] != NOTHING).sum())
            counts[scope_of(segment, name)] = (happening, len(ticks))
    return {scope: count for scope, count in counts.items() if count[0]}


def tick_scopes(table: ScheduleTable, costs: Sequence[float], together: bool = False) -> Ticks:
    """Counts the ticks of a table by the scopes of the halves that each stage runs in them.

    costs: of each part over the mean of all; a tick counts as much as the stage whose parts cost
    most in it.
    """
    counts: Ticks = {}
    for segment, ticks in table.segments:
        running = table.kind[ticks] != IDLE
        for runs, virtual_stages in zip(running, table.virtual_stage[ticks], strict=True):
            by_stage = [runs.any(axis=0)] if together else runs
            scopes = frozenset(_scopes_of(segment, places) for places in by_stage)
            cost = _cost_of_tick(table, costs, runs, virtual_stages)
            counts[scopes] = counts.get(scopes, 0.0) + cost
    return counts


def _scopes_of(segment: str, places: np.ndarray) -> frozenset[str]:
    """Returns the scopes of the halves that a stage runs in a tick.

    places: whether it runs each, [places].
    """
    names = (name for name, runs in zip(PLACES, places, strict=True) if runs)
    return frozenset(scope_of(segment, name) for name in names)


def _cost_of_tick(
    table: ScheduleTable, costs: Sequence[float], runs: np.ndarray, virtual_stages: np.ndarray
) -> float:
    """Returns the largest mean cost of the parts that a stage runs in a tick.

    runs, virtual_stages: [stages, places].
    """
    by_stage: list[float] = []
    for stage, places in enumerate(runs):
        if places.any():
            parts = [table.parts.part(stage, v) for v in virtual_stages[stage][places]]
            by_stage.append(float(np.mean([costs[part] for part in parts])))
    return max(by_stage, default=1.0)


def _events(table: ScheduleTable) -> dict[str, np.ndarray]:
    """Returns the microbatch of each event in each tick, [ticks], or NOTHING."""
    parts = range(len(table.parts.stage_of))
    return {name: table.runs(parts[part], *kinds) for name, (part, kinds) in _EVENTS.items()}


class _Segment:
    """Some ticks of a table: its columns for this stage, and what is known of all stages."""

    def __init__(self, table: ScheduleTable, name: str, ticks: range):
        self.name, self.running = name, table.kind[ticks] != IDLE
        """Whether a stage runs a task, [ticks, stages, places]."""
        self.unsplit = bool((table.kind[ticks] == BACKWARD).any())
        """Whether some backward pass is not split."""
        self.events = {name: row[ticks] for name, row in _events(table).items()}
        # Gradients travel at the beginning of the tick after the one that has computed them; the
        # last tick sends none.
        before = np.asarray(ticks) - 1
        self.arrivals = [
            Arrivals(a.hop, a.inputs[ticks], a.gradients[before]) for a in table.arrivals
        ]
        self.columns = {name: getattr(table, name)[ticks] for name in _COLUMNS}
        self.loss_arrives = table.loss_arrives[ticks]
        self.last_stage = table.parts.last_stage

    def ticks(self) -> Tick:
        """Returns the entries of all ticks for this stage, each [ticks, ...]."""
        stage = lax.axis_index("stage")
        return {
            **{name: jnp.asarray(column)[:, stage] for name, column in self.columns.items()},
            **{name: jnp.asarray(row) for name, row in self.events.items()},
            "any": jnp.asarray(self.running.any(axis=1)),
            "inputs": [jnp.asarray(a.inputs)[:, stage] for a in self.arrivals],
            "gradients": [jnp.asarray(a.gradients)[:, stage] for a in self.arrivals],
            "loss_arrives": jnp.where(
                stage == self.last_stage, jnp.asarray(self.loss_arrives), NOTHING
            ),
        }


class _Carry(NamedTuple):
    inputs: jax.Array
    """Buffer of live inputs, [input_slots, B, T, D]."""
    kept: list[jax.Array]
    """Buffers of what the backward passes of live inputs read, each [input_slots, ...]; empty where
    they recompute."""
    gradients: jax.Array
    """Buffer of output gradients that wait for a backward task, [gradient_slots, B, T, D]."""
    sent: jax.Array
    """Gradient of the last tick's input, [B, T, D], which its neighbour receives in the next
    tick."""
    layers: Layers
    """Gradients of this stage's layers, summed so far."""
    rest: Tree
    """Gradients of all other parameters, summed so far."""
    aux: Any
    sums: Any


class _Task(NamedTuple):
    runs: jax.Array | bool
    """Whether the stage has a task; one without is run only where stages compute together."""
    kind: jax.Array
    virtual_stage: jax.Array
    microbatch: jax.Array
    input_slot: jax.Array
    gradient_slot: jax.Array


_FIRST = _Task(True, **dict.fromkeys(_COLUMNS, np.int32(0)))  # type: ignore[arg-type]
"""A task for shapes, which are those of every task."""


@dataclasses.dataclass(frozen=True)
class _Backward:
    """Derivative of a part as `jax.vjp` returns it: a tree of arrays, parameters among them.

    A forward pass keeps the others; the parameters are put back where the backward pass needs them.
    """

    leaves: list[Any]
    """Shapes and types of the tree's leaves."""
    treedef: Any
    input_of: dict[int, int]
    """Leaves of the tree that are leaves of the part, with their index among those."""

    def select(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves that a forward pass keeps, or their shapes and types."""
        return [leaf for i, leaf in enumerate(leaves) if i not in self.input_of]

    def rebuild(self, kept: list[jax.Array], part: Part) -> Any:
        """Returns the derivative of a part, as `jax.vjp` does."""
        inputs = jax.tree.leaves(part)
        remaining = iter(kept)
        leaves = []
        for i in range(self.treedef.num_leaves):
            leaves.append(inputs[self.input_of[i]] if i in self.input_of else next(remaining))
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class _Engine:
    table: ScheduleTable
    model: PipelineModel
    params: Tree
    rounded: Any
    """As of `Part`."""
    trains: bool

    @functools.cached_property
    def x(self) -> Any:
        """Shape and type of the activations that pass between stages."""
        return jax.eval_shape(self.model.embed, self.params, jnp.int32(0))

    def run(self) -> _Carry:
        """Runs all ticks; returns what the last one leaves."""
        carry = self._start()
        for name, ticks in self.table.segments:
            segment = _Segment(self.table, name, ticks)
            carry = lax.scan(functools.partial(self._tick, segment), carry, segment.ticks())[0]
        return carry

    def _start(self) -> _Carry:
        """Returns empty buffers, and sums of nothing."""
        table = self.table
        x = self.x
        grads: Tree = {}
        aux: Any = {}
        if self.trains:
            # The gradients of bfloat16 parameters are bfloat16; the sum of many is float32.
            grads = jax.tree.map(_float32_zeros, self.params)
            aux = jax.eval_shape(lambda x: self._run_part(self._part(_FIRST), x)[1], x)
        first = functools.partial(self.model.loss, m=jnp.int32(0))
        _, sums = jax.eval_shape(first, self.params, x)
        return _Carry(
            inputs=_buffer(table.input_slots, x),
            kept=[_buffer(table.input_slots, a) for a in self._kept()],
            gradients=_buffer(table.gradient_slots if self.trains else 0, x),
            sent=_zeros_of(x),
            layers=self.model.stacked(grads) if self.trains else {},
            rest=self.model.unstacked(grads),
            aux=jax.tree.map(self._rows_of_parts, aux),
            sums=_zeros_of(sums),
        )

    def _rows_of_parts(self, rows: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns zeros for the aux of all parts of this stage. rows: of one part."""
        count, *rest = rows.shape
        return jnp.zeros((self.table.virtual_stages * count, *rest), rows.dtype)

    # What a stage does in a tick, from left to right:
    #
    #   gradients arrive | embed | forward | x leaves | backward | weights | x arrives | loss | ...
    #
    def _tick(self, segment: _Segment, carry: _Carry, now: Tick) -> tuple[_Carry, None]:
        for arrivals, slot in zip(segment.arrivals, now["gradients"], strict=True):
            if arrivals.has_gradients:
                received = _write_slot(carry.gradients, _send(carry.sent, arrivals.hop), slot)
                carry = carry._replace(gradients=received)
        carry = self._event(segment, now, "embed", self._embed, carry)

        otherwise = (_zeros_of(self.x), carry.aux, carry.kept)
        x, aux, kept = self._half(segment, now, _RUN, self._forward, otherwise, carry)
        sent = [_send(x, a.hop) if a.has_inputs else None for a in segment.arrivals]
        carry = carry._replace(aux=aux, kept=kept)

        backward = functools.partial(self._backward, unsplit=segment.unsplit)
        nothing = (_zeros_of(self.x), carry.layers)
        g_x, layers = self._half(segment, now, _INPUT, backward, nothing, carry)
        carry = carry._replace(sent=g_x, layers=layers)
        layers = self._half(segment, now, _WEIGHT, self._weight_gradients, layers, carry)
        carry = carry._replace(layers=layers)

        # A slot is free for what arrives when the tick's last task has read it.
        for value, slot in zip(sent, now["inputs"], strict=True):
            if value is not None:
                carry = carry._replace(inputs=_write_slot(carry.inputs, value, slot))
        carry = self._event(segment, now, "loss", functools.partial(self._add_loss, x), carry)
        carry = self._event(segment, now, "embed gradient", self._add_embed_gradient, carry)
        return carry, None

    def _event(
        self,
        segment: _Segment,
        now: Tick,
        name: str,
        do: Callable[[jax.Array, Tick, _Carry], _Carry],
        carry: _Carry,
    ) -> _Carry:
        return _run_where(
            segment.events[name] != NOTHING,
            lambda: now[name] != NOTHING,
            scope_of(segment.name, name),
            lambda carry: do(now[name], now, carry),
            carry,
        )

    def _half[T](
        self,
        segment: _Segment,
        now: Tick,
        place: int,
        run: Callable[[_Task, _Carry, T], T],
        value: T,
        carry: _Carry,
    ) -> T:
        """Runs the tasks of one place of a tick; returns `value` on a stage that has none.

        run: `(task, carry, value) -> result`.
        """
        together = self.model.together
        running = segment.running[:, :, place]
        if not running.any():
            return value
        runs = now["kind"][place] != IDLE
        entries = {name: jnp.maximum(now[name][place], 0) for name in _COLUMNS}
        task = _Task(runs=runs if together else True, **entries)
        return _run_where(
            running.any(axis=1) if together else running,
            lambda: now["any"][place] if together else runs,
            scope_of(segment.name, PLACES[place]),
            lambda value: run(task, carry, value),
            value,
        )

    def _forward(
        self, task: _Task, carry: _Carry, otherwise: tuple[jax.Array, Any, list[jax.Array]]
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        _, aux_sums, buffers = otherwise
        x = _read_slot(carry.inputs, task.input_slot)
        part = self._part(task)
        if not self.trains:
            (x, _), _ = self._run_part(part, x)
            return x, aux_sums, buffers
        if not self.model.keeps:
            (x, _), aux = self._run_part(part, x)
            return x, self._add(aux_sums, aux, task), buffers
        (x, _), vjp, aux = self._vjp(part, x)
        kept = self._backward_of_part.select(jax.tree.leaves(vjp))
        # A stage that runs only its own tasks writes their slots without reading them.
        write = _put
        slot = task.input_slot
        if task.runs is not True:
            write = _write_slot
            slot = jnp.where(task.runs, task.input_slot, NOTHING)
        buffers = [write(buffer, value, slot) for buffer, value in zip(buffers, kept, strict=True)]
        return x, self._add(aux_sums, aux, task), buffers

    def _backward(
        self, task: _Task, carry: _Carry, otherwise: tuple[jax.Array, Layers], unsplit: bool
    ) -> tuple[jax.Array, Layers]:
        """Returns the gradient of a part's input, and the sums with those of its parameters."""
        _, sums = otherwise
        if unsplit:
            return self._gradients(task, carry, sums)
        return self._input_gradient(task, carry), sums

    def _weight_gradients(self, task: _Task, carry: _Carry, sums: Layers) -> Layers:
        """Adds the gradients of a part's parameters: the second half of a split backward pass."""
        _, sums = self._gradients(task, carry, sums)
        return sums

    def _input_gradient(self, task: _Task, carry: _Carry) -> jax.Array:
        """Returns the gradient of a part's input only: the first half of a split backward pass."""
        g = self._output_gradients(task, carry)
        part = self._part(task)
        x = _read_slot(carry.inputs, task.input_slot)
        _, vjp = jax.vjp(lambda x: self._run_part(part, x)[0], x)
        (g_x,) = vjp(g)
        return _masked(g_x, task.runs)

    def _gradients(self, task: _Task, carry: _Carry, sums: Layers) -> tuple[jax.Array, Layers]:
        """Returns the gradient of a part's input, and `sums` with those of its parameters."""
        g = self._output_gradients(task, carry)
        part = self._part(task)
        x = _read_slot(carry.inputs, task.input_slot)
        kept = [_read_slot(buffer, task.input_slot) for buffer in carry.kept]
        if self.model.keeps:
            vjp = self._backward_of_part.rebuild(kept, part)
        else:
            _, vjp, _ = self._vjp(part, x)
        references = jax.tree.map(jax.new_ref, sums)
        _, g_x = vjp.with_refs(references, jax.ad.GradValue())(g)  # type: ignore[attr-defined]
        return _masked(g_x, task.runs), jax.tree.map(jax.freeze, references)

    def _output_gradients(self, task: _Task, carry: _Carry) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of a part's output and of its auxiliary loss."""
        g_x = _read_slot(carry.gradients, task.gradient_slot)
        return _masked((g_x, jnp.ones(())), task.runs)

    @functools.cached_property
    def _backward_of_part(self) -> _Backward:
        """How to call the derivative of a part with what a forward pass has kept."""
        part = self._part(_FIRST)
        traced, shapes = jax.make_jaxpr(self._derivative, return_shape=True)(part, self.x)
        inputs = traced.jaxpr.invars[: len(jax.tree.leaves(part))]
        number_of = {var: i for i, var in enumerate(inputs)}
        input_of = {}
        for i, var in enumerate(traced.jaxpr.outvars):
            if isinstance(var, Var) and var in number_of:
                input_of[i] = number_of[var]
        return _Backward(*jax.tree.flatten(shapes), input_of)

    def _kept(self) -> list[Any]:
        if not (self.trains and self.model.keeps):
            return []
        return self._backward_of_part.select(self._backward_of_part.leaves)

    def _derivative(self, part: Part, x: jax.Array) -> Any:
        _, vjp, _ = self._vjp(part, x)
        return vjp

    def _vjp(self, part: Part, x: jax.Array) -> Any:
        return jax.vjp(
            lambda stand_ins, x: self._run_part(part._replace(grad_stand_ins=stand_ins), x),
            part.grad_stand_ins,
            x,
            has_aux=True,
        )

    def _run_part(self, part: Part, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        x, aux = self.model.layers(part, x)
        return (x, jnp.asarray(self.model.model.aux_loss(aux), jnp.float32)), aux

    def _part(self, task: _Task) -> Part:
        params = self.model.stacked(self.params)
        sums = jax.tree.map(_float32_zeros, params) if self.trains else params
        # The other half of a split backward pass adds the gradients of the weights.
        splits = (self.table.kind == BACKWARD_INPUT).any()
        counts = task.runs & (task.kind != BACKWARD_INPUT) if splits else task.runs
        return Part(
            params, self.rounded, sums, jnp.asarray(counts), task.virtual_stage, task.microbatch
        )

    def _add(self, tree: Any, values: Any, task: _Task) -> Any:
        """Returns `tree` with the values of a task added to the rows of its part."""

        def rows(x: jax.Array, y: jax.Array) -> jax.Array:
            start, n = task.virtual_stage * y.shape[0], y.shape[0]
            return lax.dynamic_slice_in_dim(x, start, n)

        def put(x: jax.Array, y: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(x, y, task.virtual_stage * y.shape[0], 0)

        values = _masked(values, task.runs)
        return jax.tree.map(put, tree, add_aux(jax.tree.map(rows, tree, values), values))

    def _embed(self, microbatch: jax.Array, now: Tick, carry: _Carry) -> _Carry:
        slot = jnp.where(lax.axis_index("stage") == 0, now["input_slot"][_RUN], NOTHING)
        inputs = _write_slot(carry.inputs, self.model.embed(self.params, microbatch), slot)
        return carry._replace(inputs=inputs)

    def _add_loss(self, x: jax.Array, microbatch: jax.Array, now: Tick, carry: _Carry) -> _Carry:
        loss = functools.partial(self.model.loss, m=microbatch)
        if not self.trains:
            _, sums = loss(self.params, x)
            return carry._replace(sums=jax.tree.map(jnp.add, carry.sums, sums))
        value, vjp, sums = jax.vjp(loss, self.model.unstacked(self.params), x, has_aux=True)
        g_rest, g_x = vjp(jnp.ones_like(value))
        return carry._replace(
            gradients=_write_slot(carry.gradients, g_x, now["loss_arrives"]),
            rest=jax.tree.map(jnp.add, carry.rest, g_rest),
            sums=jax.tree.map(jnp.add, carry.sums, sums),
        )

    def _add_embed_gradient(self, microbatch: jax.Array, now: Tick, carry: _Carry) -> _Carry:
        """Adds the embedding's gradient for a microbatch that the first part has finished."""
        # On all but the first stage, it is the gradient of another microbatch.
        g_x = _masked(carry.sent, lax.axis_index("stage") == 0)
        embed = functools.partial(self.model.embed, m=microbatch)
        _, vjp = jax.vjp(embed, self.model.unstacked(self.params))
        (g_rest,) = vjp(g_x)
        return carry._replace(rest=jax.tree.map(jnp.add, carry.rest, g_rest))


def _run_where[T](
    happens: np.ndarray,
    needed: Callable[[], jax.Array],
    scope: str,
    run: Callable[[T], T],
    value: T,
) -> T:
    """Returns `run(value)` where it is needed, and `value` elsewhere.

    Without a branch where it always happens.
    """
    if not happens.any():
        return value

    def scoped(value: T) -> T:
        with jax.named_scope(scope):
            return run(value)

    if happens.all():
        return scoped(value)
    return lax.cond(needed(), scoped, lambda value: value, value)


def _send(value: jax.Array, hop: int) -> jax.Array:
    """Sends a value to the stage `hop` stages further in the ring; 0 keeps it."""
    return ring_shift(value, "stage", hop) if hop else value


def _buffer(slots: int, abstract: Any) -> jax.Array:
    """Returns a buffer of empty slots for arrays of this shape and type."""
    return jnp.zeros((slots, *abstract.shape), abstract.dtype)


def _read_slot(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), keepdims=False)


def _write_slot(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the buffer with `value` in a slot; slot NOTHING leaves it as it is."""
    value = jnp.where(slot == NOTHING, _read_slot(buffer, slot), value)
    return _put(buffer, value, jnp.maximum(slot, 0))


def _put(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)


def _zeros_of(abstract: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)


def _float32_zeros(p: jax.Array) -> jax.Array:
    return jnp.zeros(p.shape, jnp.float32)


def _masked(tree: Any, runs: jax.Array | bool) -> Any:
    """Returns the tree, or zeros on a stage without a task, whose infinities do not survive."""
    if runs is True:
        return tree
    return jax.tree.map(lambda x: jnp.where(runs, x, jnp.zeros_like(x)), tree)
