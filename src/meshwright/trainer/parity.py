"""Parity: one run on two meshes, compared tensor by tensor in float32.

Initial values are equal bit for bit. At every step, both meshes compute gradients at equal
parameters, and each tensor's gradients agree on that tensor's own scale: AdamW divides by the root
of the second moment, so after one update a rounding error of a small gradient has grown to a
difference of parameters. The losses of two training runs, each with its own updates, agree along
the way.

Where they diverge, the step is taken again on both meshes with its tensors recorded, and the first
tensor in the order of computation is named whose difference is more than rounding explains
(trainer/divergence.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.formatting import Shown
from meshwright.hardware.agreement import answer_of_the_first
from meshwright.hardware.mesh import build_mesh
from meshwright.models.recording import TensorName
from meshwright.runs.run import Run
from meshwright.sharding.layouts import VOCAB_AXES
from meshwright.sharding.params import Tree, layers_to_rows, named_leaves, rows_to_layers
from meshwright.signs import waiting
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.gradients import build_gradients
from meshwright.step.recorded_step import Recording, record_step
from meshwright.trainer.divergence import (
    ROUNDING_FACTOR,
    Difference,
    Divergence,
    as_json,
    compare,
    divergence_of,
    perturb,
)
from meshwright.trainer.prepare import Position, Trainable

TOLERANCE = 1e-5
"""Largest accepted difference of losses, relative to the loss, and of gradients, relative to their
tensor's scale."""
Tensors = dict[str, np.ndarray]
"""Tensors on the host by dotted name, with one row per layer."""
Named = list[tuple[TensorName, np.ndarray]]
"""Recorded tensors in the order of computation."""


@dataclasses.dataclass(frozen=True)
class StepParity:
    """Comparison of one step on two meshes."""

    step: int
    losses: tuple[float, float]
    """Loss on each mesh, each after its own updates."""
    gradient_difference: float
    """Largest difference of gradients at equal parameters, relative to the tensor's scale."""
    worst_tensor: str
    """Tensor with that difference."""


@dataclasses.dataclass(frozen=True, repr=False)
class Parity(Shown):
    """Result of `mw.parity`.

    Example:
        >>> run = mw.recipe("tiny", mesh="fsdp=2", layers=1, batch=2, seq=32)
        >>> result = mw.parity(run, against="data=1", steps=1, cache=tmp)
        >>> result.meshes, result.unequal_initial, result.first_divergence
        (('fsdp=2', 'data=1'), (), None)
    """

    meshes: tuple[str, str]
    """Mesh of the run, and the mesh that it was compared with; or names of the two programs."""
    unequal_initial: tuple[str, ...]
    """Tensors whose initial values are not bitwise equal."""
    steps: tuple[StepParity, ...]
    """Comparison of each step."""
    tensors: Divergence | None = None
    """Comparison of the tensors of one step: the first that diverges,
    or the first if that was asked for."""
    tensors_of_step: int = 1
    """Step of that comparison."""
    devices: tuple[str, ...] = ()
    """Devices that computed the first tensor that differs, where devices are compared."""
    note: str = ""
    """What was computed, where it is not steps of the run."""

    def brief(self) -> str:
        """Returns the meshes, and whether they agree."""
        said = self.first_divergence
        outcome = "agree" if said is None else f"differ: {said}"
        steps = max(1, len(self.steps))
        return f"{' against '.join(self.meshes)}: {steps} steps, {outcome}"

    @property
    def first_divergence(self) -> str | None:
        """First difference above the tolerances, or None where the meshes agree."""
        if self.unequal_initial:
            return f"initial values of {self.unequal_initial[0]}"
        for s in self.steps:
            # `not <=` rather than `>`: a difference that is NaN diverges.
            if not s.gradient_difference <= TOLERANCE:
                return (
                    f"step {s.step}, gradient of {s.worst_tensor}: {s.gradient_difference:.1e} "
                    "of its scale"
                )
            if not abs(s.losses[0] - s.losses[1]) <= TOLERANCE * abs(s.losses[1]):
                return f"step {s.step}, loss {s.losses[0]:.7f} against {s.losses[1]:.7f}"
        return None if self.first_tensor is None else str(self.first_tensor)

    @property
    def first_tensor(self) -> Difference | None:
        """First tensor whose difference is more than rounding explains,
        in the order of computation.

        None where there is none, or where no tensors were compared.
        """
        return None if self.tensors is None else self.tensors.first


def check_processes(shape: MeshShape | None, other: MeshShape) -> None:
    """Raises ConfigError where the processes of a run cannot compare two meshes.

    The first mesh (None: all devices) is computed by all of them, the other by all or by process 0
    alone.
    """
    processes = jax.process_count()
    total = jax.device_count()
    local = jax.local_device_count()
    if processes == 1:
        return
    if shape is not None and shape.size != total:
        raise ConfigError(
            f"parity of mesh {shape} on {processes} processes",
            f"it takes {shape.size} of their {total} devices, and every process computes a part "
            "of it",
            f"a mesh of {total} devices, and {shape} in --against where it is the smaller one",
        )
    if other.size != total and other.size > local:
        raise ConfigError(
            f"parity against mesh {other} on {processes} processes",
            f"it takes {other.size} of their {total} devices, and process 0 alone has {local}",
            f"--against data=1, or another mesh of at most {local} devices, or of all {total}",
        )


def other_devices(shape: MeshShape, devices: list[jax.Device]) -> list[jax.Device]:
    """Returns the devices of process 0 where the mesh takes fewer than all."""
    return devices if shape.size == len(devices) else [d for d in devices if d.process_index == 0]


# Each step, on both meshes, with the gradients g(params, batch) of a mesh:
#
#   first mesh                     second mesh (of several processes: in process 0, if smaller)
#   params, batch  ------------->  params, batch
#   g(params)      -- compare -->  g(params), and g(params (1 +- 2^-23)): its rounding error
#   update: loss   -- compare -->  update of its own state: loss
def compare_meshes(
    prepared: Trainable, other: MeshShape, *, steps: int, tensors: bool = False
) -> Parity:
    """Compares `steps` steps of a run with the same steps on the mesh `other`, in float32.

    tensors: whether the tensors of the first step are compared even if the meshes agree.

    Gradients of both meshes are copied to the host and compared there. A step costs two gradients
    and an update on the first mesh's parameters for each mesh, and one more gradient on `other`
    that measures its rounding error.
    """
    run = in_float32(prepared.device_run.run, other, steps)
    first = Side(prepared, run, prepared.device_run.mesh)
    mesh = build_mesh(other, other_devices(other, jax.devices()))
    second = _SecondSide(prepared, dataclasses.replace(first.run, mesh=other), mesh)
    unequal = second.unequal_params(first.params())
    compared: list[StepParity] = []
    meshes = (str(first.run.mesh), str(other))
    divergence: Divergence | None = None
    tensors_of_step = 1
    for step in range(1, steps + 1):
        batch = next(first.feed)
        params = first.params()
        gradients = first.gradients(params, batch)
        loss = first.update(batch)
        compared.append(second.compare(step, loss, params, gradients))
        result = Parity(meshes, tuple(unequal), tuple(compared), divergence, tensors_of_step)
        if divergence is None and (tensors or result.first_divergence):
            divergence = second.compare_tensors(meshes, params, first.record(params, batch, step))
            tensors_of_step = step
    return Parity(meshes, tuple(unequal), tuple(compared), divergence, tensors_of_step)


def in_float32(run: Run, other: MeshShape, steps: int) -> Run:
    """Returns the run in float32, its vocabulary padded for both meshes.

    Every step has the full batch.
    """
    training = dataclasses.replace(
        run.training,
        steps=max(run.training.steps, steps),
        compute_dtype="float32",
        param_dtype="float32",
        param_rounding="master",
        reduce_dtype="float32",
        matmul_precision="compute",
        batch_ramp=(),
    )
    model = run.model
    if model.vocab:
        multiple = math.lcm(model.vocab_multiple, other.over(VOCAB_AXES))
        model = dataclasses.replace(model, vocab_multiple=multiple)
    return dataclasses.replace(run, training=training, model=model)


def _gathered(x: jax.Array) -> Any:
    """Returns an array of several processes, which all of them ask for, on this host."""
    with waiting("the devices"):
        return process_allgather(x, tiled=True)


def _joined(mesh: Mesh, x: np.ndarray) -> np.ndarray:
    """Returns a recorded tensor of which each process of a mesh has a part, and NaN elsewhere."""
    if not spans_processes(mesh):
        return x
    with waiting("the devices"):
        return np.fmax.reduce(process_allgather(x))


def unclipped(device_run: DeviceRun) -> DeviceRun:
    """Returns a run whose gradients are not clipped, since the factor depends on all of them."""
    optimizer = dataclasses.replace(device_run.run.optimizer, grad_clip_norm=0.0)
    run = dataclasses.replace(device_run.run, optimizer=optimizer)
    return dataclasses.replace(device_run, run=run)


class Side:
    """Run on one mesh, with its batches, and its gradients as the train step takes them."""

    def __init__(self, prepared: Trainable, run: Run, mesh: Mesh):
        self._mesh = mesh
        self._device_run = place_on_devices(run, mesh)
        self._prepared = dataclasses.replace(prepared, device_run=self._device_run)
        self.feed = self._prepared.feed(Position(0, 0))
        self.run = self._device_run.run
        options = self._device_run.accepted_compiler_options() or None
        self._gradients = jax.jit(build_gradients(self._device_run), compiler_options=options)
        self._step: Any = None
        self._state = self._device_run.initial_state()

    def params(self) -> Tensors:
        """Returns the parameters of this side's state."""
        return self._to_host(self._state.params)

    def gradients(self, params: Tensors, batch: Any) -> Tensors:
        """Returns the gradients at `params` and this side's step count."""
        state = self._state
        arrays = self._to_devices(params)
        gradients, *_ = self._gradients(arrays, state.step, batch, *state.variables)
        return self._to_host(gradients)

    def record(self, params: Tensors, batch: Any, step: int) -> Named:
        """Returns the tensors of `recording` in the order of computation,
        of all processes of the mesh."""
        recording = self.recording(params, batch, step)
        return [(name, _joined(self._mesh, recording.tensor(name))) for name in recording.names]

    def recording(self, params: Tensors, batch: Any, step: int) -> Recording:
        """Records a step at `params`, before gradients are clipped.
        step: from 1, as the results count."""
        device_run = unclipped(self._device_run)
        arrays = self._to_devices(params)
        count = np.int32(step - 1)
        variables = self._state.variables
        return record_step(device_run, arrays, count, batch, *variables)

    def update(self, batch: Any) -> float:
        """Takes a train step on this side's own state and returns its loss."""
        if self._step is None:
            self._step = self._prepared.compile(batch)
        self._state, metrics = self._step(self._state, batch)
        return float(metrics["loss"][0] / metrics["loss"][1])

    def _to_host(self, tree: Tree) -> Tensors:
        descriptions = named_leaves(self._device_run.layout.params)
        tensors: Tensors = {}
        for name, x in named_leaves(tree).items():
            if not x.is_fully_addressable:
                x = _gathered(x)
            tensors[name] = rows_to_layers(descriptions[name], np.asarray(x))
        return tensors

    def _to_devices(self, params: Tensors) -> Tree:
        shardings, structure = jax.tree.flatten(self._device_run.abstract.shardings.params)
        descriptions = named_leaves(self._device_run.layout.params)
        arrays: list[jax.Array] = []
        for (name, p), sharding in zip(descriptions.items(), shardings, strict=True):
            x = layers_to_rows(p, params[name])
            arrays.append(jax.make_array_from_callback(x.shape, sharding, x.__getitem__))
        return jax.tree.unflatten(structure, arrays)


def spans_processes(mesh: Mesh) -> bool:
    """Whether several processes have devices of a mesh: all processes see all of its devices."""
    processes = {device.process_index for device in mesh.devices.flat}
    return len(processes) > 1


class _SecondSide:
    """The mesh that a run is compared with.

    A mesh of several processes is built and computed by all of them, another by process 0 only,
    whose answers the others receive; all processes call each method in the same order.
    """

    def __init__(self, prepared: Trainable, run: Run, mesh: Mesh):
        self._is_everywhere = spans_processes(mesh)
        self._side: Side | None = None
        self._batch: Any = None
        self._step = 0
        self._answer(functools.partial(self._build, prepared, run, mesh))

    def unequal_params(self, params: Tensors) -> list[str]:
        """Returns the names of the parameters that are not bitwise those of this side."""
        return self._answer(functools.partial(self._unequal_params, params))

    def compare(self, step: int, loss: float, params: Tensors, gradients: Tensors) -> StepParity:
        """Compares a step of the first side with one of this side.

        loss: of the first side.  params, gradients: parameters and gradients of the first side
        before its update.
        """
        other_loss, difference, worst = self._answer(
            functools.partial(self._compare, step, params, gradients)
        )
        return StepParity(step, (loss, other_loss), difference, worst)

    def compare_tensors(self, meshes: tuple[str, str], params: Tensors, first: Named) -> Divergence:
        """Compares the tensors of the last step that was compared.
        first: those of the first side, at `params`."""
        rows = self._answer(functools.partial(self._compare_tensors, meshes, params, first))
        return divergence_of(meshes, rows)

    def _compare_tensors(self, meshes: tuple[str, str], params: Tensors, first: Named) -> Any:
        side = self._side
        assert side is not None
        reference = side.record(params, self._batch, self._step)
        perturbed = side.record(perturbed_params(params, self._step), self._batch, self._step)
        return as_json(compare(meshes, first, reference, perturbed))

    def _answer(self, compute: Callable[[], Any]) -> Any:
        """Computes where this side is; returns the result, as JSON has it, in all processes."""
        if self._is_everywhere:
            return compute()
        return answer_of_the_first(compute)

    def _build(self, prepared: Trainable, run: Run, mesh: Mesh) -> None:
        self._side = Side(prepared, run, mesh)

    def _unequal_params(self, params: Tensors) -> list[str]:
        assert self._side is not None
        return [
            name for name, x in self._side.params().items() if not np.array_equal(x, params[name])
        ]

    def _compare(self, step: int, params: Tensors, gradients: Tensors) -> list[Any]:
        """Compares gradients at the first side's parameters, and losses after the updates."""
        side = self._side
        assert side is not None
        self._step = step
        self._batch = batch = next(side.feed)
        expected = side.gradients(params, batch)
        perturbed = side.gradients(perturbed_params(params, step), batch)
        differences = gradient_differences(gradients, expected, perturbed)
        # A difference that is NaN is the worst.
        worst = max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf))
        return [side.update(batch), differences[worst], worst]


def perturbed_params(params: Tensors, seed: int) -> Tensors:
    """Multiplies each element by 1 + 2^-23 or 1 - 2^-23 at random; zeros stay zero."""
    rng = np.random.default_rng(seed)
    return {name: perturb(x, rng) for name, x in params.items()}


def gradient_differences(
    gradients: Tensors, reference: Tensors, perturbed: Tensors
) -> dict[str, float]:
    """Returns each tensor's largest difference from the reference, relative to its scale.

    The scale is the largest element of the tensor's reference gradient, but a gradient is a sum
    over tokens, which rounds relative to its terms, and these may cancel: the gradient of a key
    bias is only rounding error, because softmax ignores a constant that is added to all scores of a
    query. So the rounding error is measured: `perturbed` are the reference's gradients at
    parameters changed by one unit in the last place (Parker 1997, "Monte Carlo Arithmetic"). The
    scale is at least that change times `ROUNDING_FACTOR / TOLERANCE`, which accepts differences of
    up to `ROUNDING_FACTOR` times the change.
    """
    differences = {}
    for name, expected in reference.items():
        difference = float(np.abs(gradients[name] - expected).max())
        rounding = float(np.abs(perturbed[name] - expected).max())
        scale = max(float(np.abs(expected).max()), ROUNDING_FACTOR / TOLERANCE * rounding)
        if scale:
            differences[name] = difference / scale
        else:
            differences[name] = math.inf if difference else 0.0
    return differences
