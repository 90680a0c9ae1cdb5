"""First tensor of a bad step: the first in the order of computation that is not finite,
or beyond its history.

`Watch` looks at the loss and the health of every step. Four rules tell a bad one:

    not finite          the loss, a norm, or anything that is measured
    beyond its history  the rule of `reporters.outliers`, for loss, norms and figures of layers
    seen before         a part of the batch has the tokens of a recent step of the same epoch
    changed in between  the bits of a parameter or of a moment are not those that the step before
                        has left

The figures of a step already say which layer and parameter is first, in the order of computation:
parameters, then the forward pass up the layers, then gradients down the layers, then updates.
`name_first` takes the step again with the same batch and records its tensors
(`step.recorded_step`), which gives the tensor within the layer, the sequences and the device. A
step that is not finite has left the state as it was before; after another one the state has its
update.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.data.batch import Epochs
from meshwright.hardware.agreement import choose_together
from meshwright.models.recording import Piece, Recorder, TensorName
from meshwright.reporters.health import HealthRecord, Series
from meshwright.reporters.outliers import FACTOR, SPREADS, Baseline
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import DeviceRun
from meshwright.step.health import (
    ATTENTION,
    ENTROPY,
    GRADIENT,
    LARGEST_LOAD,
    PARAMETER,
    RESIDUAL,
    SMALLEST_LOAD,
    UNCHANGED,
    UPDATE,
)
from meshwright.step.recorded_step import Recording, build_recorder

_LOSS_SPREADS = 8.0
_LOSS_FACTOR = 1.25
"""Least factor of a loss over its median that is beyond its history."""
VALUES = "values"
"""Figure of a suspect that has been changed between two steps."""
_LARGEST_LSE = 100.0
"""Attention logits above which runs have become unstable (Kimi K2, arXiv:2507.20534,
section 2.1)."""
_UNJUDGED = (SMALLEST_LOAD, UNCHANGED)
"""Shares that are often zero."""
_QUIET = 50
"""Steps after an alarm in which a number beyond its history is not another one."""
_RECENT = 10
"""Losses with whose median a loss is compared."""
_REMEMBERED = 100
"""Steps whose batches are remembered."""
_ORDER = (
    (PARAMETER,),
    (RESIDUAL, ATTENTION, LARGEST_LOAD, ENTROPY),
    (GRADIENT,),
    (UPDATE,),
)
"""Figures in the order of computation."""


class Suspect(NamedTuple):
    """Number of a step's health that is not as it should be."""

    series: Series
    number: int
    """Index of the number in the series."""
    what: str

    def __str__(self) -> str:
        return f"{self.series.figure} of {self.series.place(self.number)}"


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A bad step, as its loss and its health tell it."""

    step: int
    reason: str
    finite: bool
    suspects: tuple[Suspect, ...]
    """In the order of computation;
    empty where only the loss or the global norm is beyond its history."""
    closest: Suspect | None = None
    """Number that came closest to its limit, where none is a suspect."""


class Watch:
    """History of a run's loss and health, by which it tells a bad step."""

    def __init__(self, epochs: Epochs | None = None) -> None:
        """Begins without a history.

        epochs: passes over the text, after each of which batches may come again;
        None where the data have no end.
        """
        self._epochs = epochs
        self._baseline: Baseline | None = None
        self._before: HealthRecord | None = None
        self._quiet_until = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._parts: collections.OrderedDict[tuple[int, bytes], int] = collections.OrderedDict()
        """Step of each part of the last batches, by its place and its hashes."""

    def rewind(self) -> None:
        """Forgets the steps after the one to which the run returns."""
        self._before = None
        self._parts.clear()

    def replaced(self) -> None:
        """Forgets the bits that the last step has left: the state was changed since."""
        self._before = None

    def look(
        self, step: int, loss: float, norm: float, record: HealthRecord, finite: bool
    ) -> Alarm | None:
        """Returns the alarm of a step, if it is bad, and takes it into the history."""
        values = np.concatenate([[self._jump(loss), norm], record.values])
        if self._baseline is None:
            self._baseline = Baseline(_factors(record), _spreads(record))
        before, self._before = self._before, record if finite else None
        if not finite or not np.isfinite(values).all():
            wrong = ~np.isfinite(record.values)
            return Alarm(step, "not finite", finite, tuple(_suspects(record, wrong, None)))
        changed = _changed(before, record)
        if changed:
            self._baseline.add(values)
            return Alarm(
                step, "it did not begin with what the step before has left", finite, changed
            )
        repeated = self._repeated(step, record)
        if repeated and step >= self._quiet_until:
            self._quiet_until = step + _QUIET
            self._baseline.add(values)
            return Alarm(step, repeated, finite, ())
        deviations = self._baseline.deviations(values)
        factors = self._baseline.factors(values)
        self._baseline.add(values)
        return self._beyond(step, values, deviations, factors, record)

    def _jump(self, loss: float) -> float:
        """Returns a loss over the median of the last ones: a loss falls,
        and what is new is a jump."""
        recent = float(np.median(self._losses)) if self._losses else loss
        if np.isfinite(loss):
            self._losses.append(loss)
        return loss / recent if recent else 1.0

    def _beyond(
        self,
        step: int,
        values: np.ndarray,
        deviations: np.ndarray,
        factors: np.ndarray,
        record: HealthRecord,
    ) -> Alarm | None:
        """Returns the alarm of a step whose loss or whose health is beyond its history."""
        beyond = np.abs(deviations) > 1
        beyond[2:] &= _judged(record)
        beyond[2:] |= _is_large_lse(record)
        if not beyond.any() or step < self._quiet_until:
            return None
        self._quiet_until = step + _QUIET
        suspects = tuple(_suspects(record, beyond[2:], factors[2:]))
        closest = None
        if not suspects and record.values.size:
            distances = np.where(_judged(record), np.abs(deviations[2:]), 0.0)
            is_closest = np.arange(distances.size) == distances.argmax()
            closest = next(_suspects(record, is_closest, factors[2:]))
        reasons = []
        if beyond[0]:
            times = f"{values[0]:.3g} times the median of the last {_RECENT}"
            reasons.append(f"its loss is {self._losses[-1]:.4g}, {times}")
        if beyond[1]:
            reasons.append(
                f"its gradient norm is {values[1]:.4g}, {factors[1]:.3g} times its median"
            )
        if not reasons:
            reasons.append(f"the {suspects[0]} is {suspects[0].what}")
        return Alarm(step, "; ".join(reasons), True, suspects, closest)

    def _repeated(self, step: int, record: HealthRecord) -> str:
        """Says which parts of the batch have been read before; "" where all are new."""
        if record.batch is None:
            return ""
        found: dict[int, int] = {}
        parts = record.batch.shape[1]
        for part in range(parts):
            key = (part, record.batch[:, part].tobytes())
            earlier_step = self._parts.get(key)
            if earlier_step is not None and self._is_one_epoch(earlier_step, step):
                found[part] = earlier_step
            self._parts[key] = step
        while len(self._parts) > _REMEMBERED * parts:
            self._parts.popitem(last=False)
        if not found:
            return ""
        earlier = ", ".join(str(number) for number in sorted(set(found.values())))
        if len(found) == parts:
            return f"its batch is that of step {earlier}"
        shown = ", ".join(map(str, found))
        return f"part {shown} of {parts} of its batch is that of step {earlier}: its data are stuck"

    def _is_one_epoch(self, earlier: int, step: int) -> bool:
        """Whether the samples of two steps are of one pass over the text, so that all differ."""
        if self._epochs is None:
            return True
        return self._epochs.of_step(earlier)[0] == self._epochs.of_step(step)[1]


def _changed(before: HealthRecord | None, record: HealthRecord) -> tuple[Suspect, ...]:
    """Returns the parameters and moments that something else than the step before has changed."""
    if before is None or before.bits is None or record.bits is None:
        return ()
    wrong = np.flatnonzero(before.bits[1] != record.bits[0])
    what = "not what the step before has left"
    return tuple(Suspect(Series(VALUES, record.names[i], ()), 0, what) for i in wrong)


def _factors(record: HealthRecord) -> np.ndarray:
    """Returns the least factor of each number that is beyond its history: of the loss,
    of norms, of figures."""
    return np.concatenate([[_LOSS_FACTOR, FACTOR], np.full(record.values.size, FACTOR)])


def _spreads(record: HealthRecord) -> np.ndarray:
    """Returns the least deviation of each number that is beyond its history, in spreads."""
    return np.concatenate([[_LOSS_SPREADS, SPREADS], np.full(record.values.size, SPREADS)])


def _judged(record: HealthRecord) -> np.ndarray:
    """Returns which numbers are compared with their history."""
    judged = [np.full(s.size, s.figure not in _UNJUDGED) for s, _ in record.items()]
    return np.concatenate(judged)


def _is_large_lse(record: HealthRecord) -> np.ndarray:
    large = [
        (values > _LARGEST_LSE) if series.figure == ATTENTION else np.zeros(series.size, bool)
        for series, values in record.items()
    ]
    return np.concatenate(large)


def _suspects(
    record: HealthRecord, wrong: np.ndarray, factors: np.ndarray | None
) -> Iterator[Suspect]:
    """Yields the numbers that are wrong in the order of computation,
    of one place the furthest first."""
    found: list[tuple[tuple[float, ...], Suspect]] = []
    start = 0
    for series, values in record.items():
        for number in np.flatnonzero(wrong[start : start + series.size]):
            factor = 1.0 if factors is None else float(factors[start + number])
            what = f"{values[number]:.3g}"
            if factors is not None:
                what += f", {factor:.3g} times its median"
            key = (*_place(series, int(number)), -abs(np.log(max(factor, 1e-30))))
            found.append((key, Suspect(series, int(number), what)))
        start += series.size
    for _, suspect in sorted(found, key=lambda pair: pair[0]):
        yield suspect


def _place(series: Series, number: int) -> tuple[int, float]:
    """Returns where a number is in the order of computation: its pass, and its place in it."""
    part = next((i for i, figures in enumerate(_ORDER) if series.figure in figures), len(_ORDER))
    if series.layers:
        layer = float(series.layers[number])
    else:
        layer = -1.0 if series.tensor in ("embed", "positions") else float("inf")
    is_backward = series.figure == GRADIENT
    return part, -layer if is_backward else layer


# The step again


def measure(x_BT: jax.Array) -> jax.Array:
    """Returns of each sequence the largest |x|, the root mean square,
    and the count of what is not finite, [B, 3]."""
    x = x_BT.astype(jnp.float32).reshape(x_BT.shape[0], -1)
    finite = jnp.isfinite(x)
    x = jnp.where(finite, x, 0.0)
    count = (~finite).sum(1).astype(jnp.float32)
    return jnp.stack([jnp.abs(x).max(1), jnp.sqrt(jnp.square(x).mean(1)), count], 1)


class First(NamedTuple):
    """First bad tensor of a recorded step, in one process; JSON values."""

    order: list[int]
    """Place in the order of computation."""
    tensor: str
    what: str
    sequences: list[int]
    """Sequences of the batch in which it is bad, the worst first."""
    device: str
    """The device, where it is one."""
    host: int


def name_first(
    device_run: DeviceRun, state: Any, batch: Any, alarm: Alarm, reference: Any
) -> First | None:
    """Takes a step again and returns its first bad tensor;
    None where neither the batch nor an activation is bad.

    reference: another batch, with whose tensors those of a finite step are compared. The
    activations of a wrapped model have no names, so only its batch is looked at. All processes call
    it together.
    """
    activation = None
    if device_run.run.model.states_layers:
        activation = _first_activation(device_run, state, batch, alarm, reference)
    found = _bad_batch(batch) or activation
    mine = None if found is None else found._asdict()
    chosen = choose_together("first bad tensor", mine, _earliest)
    return None if chosen is None else First(**chosen)


def _first_activation(
    device_run: DeviceRun, state: Any, batch: Any, alarm: Alarm, reference: Any
) -> First | None:
    """Returns the first bad activation, or gradient of one, that this process has.
    Arguments: of `name_first`."""
    unclipped = dataclasses.replace(device_run.run.optimizer, grad_clip_norm=0.0)
    device_run = dataclasses.replace(
        device_run, run=dataclasses.replace(device_run.run, optimizer=unclipped)
    )
    recorder = Recorder(measure)
    record = build_recorder(device_run, recorder, with_gradients=False)
    arguments = (state.params, state.step)
    recording = record(*arguments, batch, *state.variables)
    compared = None
    if alarm.finite and reference is not None:
        compared = record(*arguments, reference, *state.variables)
    return _first_of(recording, compared)


def _bad_batch(batch: Any) -> First | None:
    """Returns the array of a batch that is not finite, if this process has a part of one."""
    for name, x in named_leaves(batch).items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        sequences = []
        for shard in x.addressable_shards:
            start = shard.index[0].start or 0
            rows = np.asarray(shard.data, np.float32).reshape(shard.data.shape[0], -1)
            sequences += [start + int(i) for i in np.flatnonzero(~np.isfinite(rows).all(1))]
        if sequences:
            tensor = f"{name} of the batch" if name else "the batch"
            bad = sorted(set(sequences))[:8]
            return First([-1], tensor, "not finite", bad, "", jax.process_index())
    return None


def _earliest(answers: list[Any]) -> Any:
    """Returns the first tensor that any process has found."""
    known = [answer for answer in answers if answer is not None]
    return min(known, key=lambda answer: answer["order"]) if known else None


def _first_of(recording: Recording, compared: Recording | None) -> First | None:
    """Returns the first tensor that is not finite,
    or that is far above the same tensor of another batch."""
    for name, pieces in recording.pieces.items():
        counts = _by_sequence(pieces, 2)
        if max(counts.values(), default=0.0) > 0:
            what = f"not finite in {int(sum(counts.values())):,} values"
            return _found(recording, name, pieces, counts, what, 2)
    if compared is None:
        return None
    for name, pieces in recording.pieces.items():
        other = _by_sequence(compared.pieces.get(name, []), 0)
        own = _by_sequence(pieces, 0)
        usual = float(np.median(list(other.values()))) if other else 0.0
        most = max([*other.values(), 1e-30])
        if usual and max(own.values()) > FACTOR * most:
            what = (
                f"its largest value is {max(own.values()) / usual:.3g} times that of the next batch"
            )
            return _found(recording, name, pieces, own, what, 0)
    return None


def _by_sequence(pieces: list[Piece], column: int) -> dict[int, float]:
    """Returns the largest of a measure over the pieces of each sequence; counts are added."""
    found: dict[int, float] = {}
    for piece in pieces:
        for sequence, row in zip(piece.sequences_B, piece.values, strict=True):
            number = int(sequence)
            value = float(row[column])
            before = found.get(number, 0.0)
            found[number] = before + value if column == 2 else max(before, value)
    return found


def _found(
    recording: Recording,
    name: TensorName,
    pieces: list[Piece],
    by_sequence: dict[int, float],
    what: str,
    column: int,
) -> First:
    worst = max(by_sequence.values())
    sequences = [s for s, value in by_sequence.items() if value > 0.5 * worst]
    sequences.sort(key=lambda sequence: -by_sequence[sequence])
    bad = [p for p in pieces if float(p.values[:, column].max()) > 0.5 * worst / len(pieces)]
    devices = list(dict.fromkeys(recording.device_of(piece) for piece in bad))
    everywhere = {recording.device_of(piece) for piece in pieces}
    device = ""
    if len(devices) == 1 and len(everywhere) > 1:
        device = f"device {devices[0].id}"
    return First(list(name.order), str(name), what, sequences[:8], device, jax.process_index())
