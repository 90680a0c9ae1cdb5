"""Recording of a step's named tensors, forward and backward, in the order of computation,
on any mesh.

The step that is recorded is the step that trains: the same layer functions, scans, collectives and
pipeline. A tap is the identity with a name. Where the `Execution` has a recorder, a tap sends its
tensor to the host as it is computed, and the tensor's gradient as the backward pass computes it;
without one, a tap adds nothing to the program.

              embedding
    layer 0   input -> attention input -> attention heads -> attention output -> attention residual
              -> feed-forward input -> (router probabilities, router weights) -> feed-forward output
              -> output
    layer 1   input -> ...
              final norm -> log-sum-exp of the logits, token loss

    gradients of the same tensors from the last to the first,
    and after those of a layer its parameters' gradients

A tensor arrives in pieces: a device sends what it has with the indices of its sequences in the
global batch, its positions, and its place in the mesh. So the pieces of any mesh, pipeline schedule
and number of microbatches make the same global tensor, and a piece tells which device computed it.
`step.recorded_step.record_step` records a step.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.comm.collectives import all_reduce, local_shard
from meshwright.words import AXES

if TYPE_CHECKING:
    from meshwright.models.blocks.layers import Dropout

EMBEDDING = "embedding"
LAYER_TENSORS = (
    "input",
    "attention input",
    "attention heads",
    "attention output",
    "attention residual",
    "feed-forward input",
    "router probabilities",
    "router weights",
    "feed-forward output",
    "output",
)
"""Tensors of a layer in the order of computation."""
FINAL_NORM = "final norm"
LOG_SUM_EXP = "log-sum-exp of the logits"
TOKEN_LOSS = "token loss"
_BEFORE_LAYERS = (EMBEDDING, "embed", "positions")
"""Tensors before the layers, with the parameters that make them."""
_AFTER_LAYERS = (FINAL_NORM, LOG_SUM_EXP, TOKEN_LOSS)

Pass = Literal["forward", "backward", "parameters"]
"""Where a tensor is computed: an activation, the gradient of an activation, the gradient
of a parameter."""
PASSES: tuple[Pass, ...] = ("forward", "backward", "parameters")
Measure = Callable[[jax.Array], jax.Array]
"""`x [B, T, ...] -> what is sent of it`, computed on the device."""


class TensorName(NamedTuple):
    """Name of a recorded tensor."""

    of: Pass
    name: str
    layer: int | None = None
    """Index of its layer; None outside of the layers."""

    def __str__(self) -> str:
        where = self.name if self.layer is None else f"layer {self.layer}, {self.name}"
        return where if self.of == "forward" else f"gradient of {where}"

    @property
    def row(self) -> tuple[int, int]:
        """Where the tensor is in the forward pass: before the layers (0, -1), in a layer (1,
        layer), or after (2, -1)."""
        if self.layer is not None:
            return 1, self.layer
        return (0, -1) if self.name in _BEFORE_LAYERS else (2, -1)

    @property
    def order(self) -> tuple[int, ...]:
        """Sorts tensors in the order of computation."""
        part, layer = self.row
        rank = _rank(LAYER_TENSORS if part == 1 else _AFTER_LAYERS, self.name)
        if self.of == "forward":
            return 0, part, layer, 0, rank
        return 1, -part, -layer, PASSES.index(self.of), -rank


def _rank(names: Sequence[str], name: str) -> int:
    """Returns the place of a name in a list; a name that is not in it comes after the others."""
    return names.index(name) if name in names else len(names)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a tensor that one device has sent."""

    sequences_B: np.ndarray
    """Index of each sequence in the global batch."""
    positions_T: np.ndarray
    """Positions of its tokens in their sequences."""
    coordinates: tuple[int, ...]
    """Index of the device along each axis of `words.AXES`."""
    split: str | None
    """Mesh axis that splits dimension 2 of the tensor; None where the piece has all of it."""
    values: np.ndarray
    """The piece [B, T, ...], or what `Recorder.measure` made of it."""


class Recorder:
    """Receives the tensors of a step that is traced with it.

    Example:
        recorder = Recorder(measure=lambda x: jnp.abs(x).max((1, 2)))
        recording = record_step(device_run, params, step, batch, recorder=recorder)
    """

    def __init__(self, measure: Measure | None = None) -> None:
        """measure: what is sent of a tensor; None sends all of it, in float32."""
        self.measure = measure
        self._received: list[tuple[Pass, str, str | None, tuple[Any, ...]]] = []
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forgets what was received, before a step."""
        with self._lock:
            self._received.clear()

    def receive(self, of: Pass, name: str, split: str | None, *arrays: Any) -> None:
        """Keeps a piece as it arrives;
        it is read after the step, since reading it here may wait for this device."""
        with self._lock:
            self._received.append((of, name, split, arrays))

    def pieces(self) -> dict[TensorName, list[Piece]]:
        """Returns the pieces of each tensor in the order of computation;
        call it after the step has ended."""
        jax.effects_barrier()
        found: dict[TensorName, list[Piece]] = {}
        for of, name, split, arrays in self._received:
            values, layer, sequences_B, positions_T, counts, coordinates = map(np.asarray, arrays)
            if not counts:
                continue
            key = TensorName(of, name, None if layer < 0 else int(layer))
            piece = Piece(
                sequences_B, positions_T, tuple(int(i) for i in coordinates), split, values
            )
            found.setdefault(key, []).append(piece)
        return {key: found[key] for key in sorted(found, key=lambda key: key.order)}


@dataclasses.dataclass(frozen=True)
class Tap:
    """A recorder at a place of the forward pass: which tokens are there,
    in which layer, and whether they count."""

    recorder: Recorder
    sequences_B: Any = None
    positions_T: Any = None
    """Positions that this device has, those of all devices of `tensor` together."""
    layer: Any = -1
    """Index of the layer; -1 outside of the layers."""
    counts: Any = True
    """Whether what is computed counts;
    a pipeline's stage without a task may compute with the others."""

    def of_tokens(self, dropout: "Dropout") -> "Tap":
        """Returns the tap for the tokens of a microbatch,
        which dropout counts by global index too."""
        return dataclasses.replace(
            self, sequences_B=dropout.sequences_B, positions_T=dropout.positions_T
        )

    def of_piece(self, index: int, count: int) -> "Tap":
        """Returns the tap for one of `count` equal pieces of the batch."""
        piece_B = jnp.split(self.sequences_B, count)[index]
        return dataclasses.replace(self, sequences_B=piece_B)

    def of_layer(self, layer: Any) -> "Tap":
        """Returns the tap inside a layer."""
        return dataclasses.replace(self, layer=layer)

    def where(self, counts: Any) -> "Tap":
        """Returns the tap for tensors that count only where `counts` is true."""
        return dataclasses.replace(self, counts=jnp.asarray(counts) & jnp.asarray(self.counts))

    def __call__(
        self, name: str, x: jax.Array, split: str | None = None, partial: tuple[str, ...] = ()
    ) -> jax.Array:
        """Returns x [B, T, ...], and records it.

        split: mesh axis that splits dimension 2.
        partial: axes over which x's gradient is a partial sum, which is summed to be recorded.
        """
        if self.sequences_B is None:
            return x
        positions_T = self.positions_T
        if x.shape[1] != positions_T.shape[0]:
            positions_T = local_shard(positions_T, ("tensor",), 0)
        coordinates = jnp.stack([jax.lax.axis_index(axis) for axis in AXES])
        place = (
            jnp.asarray(self.layer, jnp.int32),
            self.sequences_B,
            positions_T,
            jnp.asarray(self.counts),
            coordinates,
        )
        return _tapped(_Site(self.recorder, name, split, partial), x, place)


@dataclasses.dataclass(frozen=True)
class _Site:
    """Static part of a tap: recorder, name, and how the tensor is split."""

    recorder: Recorder
    name: str
    split: str | None
    partial: tuple[str, ...]

    def send(self, of: Pass, x: jax.Array, place: tuple[jax.Array, ...]) -> None:
        """Sends this device's piece to the host."""
        measure = self.recorder.measure
        values = x.astype(jnp.float32) if measure is None else measure(x)
        receive = functools.partial(self.recorder.receive, of, self.name, self.split)
        jax.debug.callback(receive, values, *place)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(site: _Site, x: jax.Array, place: tuple[jax.Array, ...]) -> jax.Array:
    site.send("forward", x, place)
    return x


def _tapped_forward(site: _Site, x: jax.Array, place: tuple[jax.Array, ...]) -> Any:
    site.send("forward", x, place)
    return x, place


def _tapped_backward(site: _Site, place: tuple[jax.Array, ...], g: jax.Array) -> Any:
    site.send("backward", all_reduce(g, site.partial), place)
    return g, None


_tapped.defvjp(_tapped_forward, _tapped_backward)
