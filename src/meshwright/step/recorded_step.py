"""A step whose named tensors are recorded: activations, their gradients,
and the gradients of parameters.

recording = record_step(device_run, params, step, batch)
for name in recording.names:           # in the order of computation (models/recording.py)
    recording.tensor(name)             # [B, T, ...], or a layer's row of a parameter's gradient
    recording.pieces[name]             # what each device sent of it
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from meshwright.models.recording import Piece, Recorder, Tap, TensorName
from meshwright.sharding.params import Tree, is_param, named_leaves, rows_to_layers, trained_only
from meshwright.signs import waiting
from meshwright.step.device_run import DeviceRun
from meshwright.step.gradients import build_gradients
from meshwright.words import AXES


@dataclasses.dataclass(frozen=True)
class Recording:
    """Named tensors of one step, and its metrics."""

    device_run: DeviceRun
    pieces: dict[TensorName, list[Piece]]
    """Pieces of every activation and of every activation's gradient."""
    gradients: dict[TensorName, np.ndarray]
    """Gradient of every trained parameter, one array for each layer."""
    metrics: Any
    """As the train step returns them."""

    @property
    def names(self) -> list[TensorName]:
        """All tensors, in the order of computation."""
        return sorted([*self.pieces, *self.gradients], key=lambda name: name.order)

    def tensor(self, name: TensorName) -> np.ndarray:
        """Returns a global tensor; what no device of this process has is NaN."""
        if name in self.gradients:
            return self.gradients[name]
        training = self.device_run.run.training
        degrees = self.device_run.layout.shape.degrees()
        pieces = self.pieces[name]
        features = list(pieces[0].values.shape[2:])
        split = pieces[0].split
        if split is not None:
            features[0] *= degrees[split]
        tensor = np.full((training.batch, training.seq, *features), np.nan, np.float32)
        for piece in pieces:
            columns = tensor
            if split is not None:
                size = piece.values.shape[2]
                start = size * piece.coordinates[tuple(AXES).index(split)]
                columns = tensor[:, :, start : start + size]
            columns[np.ix_(piece.sequences_B, piece.positions_T)] = piece.values
        return tensor

    def devices(self, name: TensorName, sequence: int, position: int) -> list[jax.Device]:
        """Returns the devices that computed a token of an activation."""
        found: dict[jax.Device, None] = {}
        for piece in self.pieces.get(name, []):
            if sequence in piece.sequences_B and position in piece.positions_T:
                found[self.device_of(piece)] = None
        return list(found)

    def device_of(self, piece: Piece) -> jax.Device:
        """Returns the device that sent a piece."""
        mesh = self.device_run.mesh
        index = tuple(piece.coordinates[tuple(AXES).index(axis)] for axis in mesh.axis_names)
        device: jax.Device = mesh.devices[index]
        return device


def record_step(
    device_run: DeviceRun,
    params: Tree,
    step: Any,
    batch: Any,
    *variables: Any,
    recorder: Recorder | None = None,
) -> Recording:
    """Computes the gradients of one step as the train step does, and records its tensors.

    params, step, batch: as the train step takes them; nothing is donated or updated.  recorder:
    what is sent of each tensor; by default all of it. Of a wrapped model only the gradients of its
    parameters are recorded.
    """
    recorder = recorder or Recorder()
    return build_recorder(device_run, recorder)(params, step, batch, *variables)


def build_recorder(
    device_run: DeviceRun, recorder: Recorder, *, with_gradients: bool = True
) -> Any:
    """Returns `(params, step, batch, *variables) -> Recording`, compiled once.

    with_gradients: whether the gradients of parameters come to the host too,
    which has to have all of them.
    """
    taps = device_run
    if device_run.run.model.states_layers:
        execution = dataclasses.replace(device_run.local_model.execution, tap=Tap(recorder))
        local_model = dataclasses.replace(device_run.local_model, execution=execution)
        taps = dataclasses.replace(device_run, local_model=local_model)
    options = device_run.accepted_compiler_options() or None
    gradients = jax.jit(build_gradients(taps), compiler_options=options)
    return functools.partial(_record, device_run, recorder, gradients, with_gradients)


def _record(
    device_run: DeviceRun,
    recorder: Recorder,
    gradients: Any,
    with_gradients: bool,
    params: Tree,
    step: Any,
    batch: Any,
    *variables: Any,
) -> Recording:
    recorder.clear()
    grads, metrics, _ = gradients(params, step, batch, *variables)
    jax.block_until_ready(grads)
    by_layer = gradients_by_layer(device_run, grads) if with_gradients else {}
    return Recording(device_run, recorder.pieces(), by_layer, jax.device_get(metrics))


def gradients_by_layer(device_run: DeviceRun, grads: Tree) -> dict[TensorName, np.ndarray]:
    """Returns the gradients of parameters on the host, one array for each layer of a stack."""
    described = trained_only(device_run.layout.params, device_run.layout.params)
    stacks = device_run.run.model.spec().stacks if device_run.run.model.states_layers else {}
    descriptions = named_leaves(described)
    found: dict[TensorName, np.ndarray] = {}
    for name, grad in named_leaves(grads).items():
        p = descriptions[name]
        assert is_param(p)
        if not grad.is_fully_addressable:
            with waiting("the devices"):
                grad = process_allgather(grad, tiled=True)
        rows = rows_to_layers(p, np.asarray(grad))
        stack, _, name_in_layer = name.partition(".")
        if stack not in stacks:
            found[TensorName("parameters", name)] = rows
            continue
        layers = device_run.run.model.spec().layers_of(stack)
        for layer, row in zip(layers, rows, strict=True):
            found[TensorName("parameters", name_in_layer, layer)] = row
    return found


def by_key(recording: Recording) -> dict[str, np.ndarray]:
    """Returns the tensors of a recording by the keys of a file: pass, layer and name."""
    found: dict[str, np.ndarray] = {}
    for name in recording.names:
        layer = "" if name.layer is None else str(name.layer)
        found[f"{name.of}|{layer}|{name.name}"] = recording.tensor(name)
    return found
