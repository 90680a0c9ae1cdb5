"""Time that communication takes, and how much of it computation overlaps."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.hardware.interconnect import AxisMapping
from meshwright.hardware.targets import Target
from meshwright.planner.physics import Physics
from meshwright.planner.traffic import TO_EXPERTS, Movement


class Communication(NamedTuple):
    """Communication of a step, by the axes that it goes over, joined by `+`."""

    exposed: dict[str, float]
    """Seconds during which only communication runs."""
    busy: dict[str, float]
    """Seconds that the links are busy, overlapped or exposed."""
    routes: dict[str, str]
    """Links of those axes."""


class TimedMovement(NamedTuple):
    """A movement with the seconds that its links are busy in a step."""

    movement: Movement
    seconds: float
    axes: str


def overlap_communication(
    traffic: Sequence[Movement],
    mapping: AxisMapping,
    target: Target,
    physics: Physics,
    computation: Mapping[str, float],
    scheduled_by_price: bool,
) -> Communication:
    """Returns how long links are busy, and how much of it is exposed.

    computation: seconds of a step's computation by pass.
    scheduled_by_price: whether the compiler schedules the step by predicted times
    (`Settled.scheduled_by_price`).

    A blocking movement is exposed but for the pieces that it is sent in.
    The others of a pass share its computation c:

        exposed = t - min(o * t, p * room),  room = c,  on a torus c * t / sqrt(t^2 + c^2)

    On GPUs of a step that is scheduled by predicted times, what overlaps slows the computation
    beside it, which takes `communication_multiprocessors` / multiprocessors of the overlapped
    seconds longer; these count as exposed.

    t: seconds of all of them.
    o, p: fractions of transfers and of computation that can overlap. On a torus less is left to
    compute than to send near the end of a pass, the more so the closer the two are.
    """
    overlap = _Overlap(target, physics, computation, scheduled_by_price)
    timed, routes = _timed(traffic, mapping, _launch_seconds(target, physics))
    busy = defaultdict[str, float](float)
    exposed = defaultdict[str, float](float)

    pieces = defaultdict[str, float](float)
    for movement, seconds, axes in timed:
        busy[axes] += seconds
        pieces[movement.during] += seconds * movement.overlap
    for movement, seconds, axes in timed:
        if movement.blocking:
            exposed[axes] += seconds * (1 - overlap.of_blocking(movement, pieces))

    overlappable = defaultdict[str, float](float)
    for movement, seconds, _ in timed:
        if not movement.blocking:
            overlappable[movement.during] += seconds
    has_exchange = any(m.purpose == TO_EXPERTS for m in traffic)
    for name, transfers in overlappable.items():
        remaining = transfers - overlap.seconds(transfers, name, has_exchange)
        for movement, seconds, axes in timed:
            if movement.during == name and not movement.blocking:
                exposed[axes] += remaining * seconds / transfers
    return Communication(dict(exposed), dict(busy), routes)


def _launch_seconds(target: Target, physics: Physics) -> float:
    """Returns the seconds that a collective's launches take."""
    if target.chip.on_torus:
        return 0.0
    return physics.collective_launches * physics.gpu_launch_seconds


def _timed(
    traffic: Iterable[Movement], mapping: AxisMapping, launches: float
) -> tuple[list[TimedMovement], dict[str, str]]:
    """Returns the movements between devices with their seconds in a step,
    and the links of each set of axes."""
    timed: list[TimedMovement] = []
    routes: dict[str, str] = {}
    for movement in traffic:
        path = mapping.route(movement.axes)
        if path is None:
            continue
        axes = "+".join(movement.axes)
        routes[axes] = path.medium
        once = path.seconds(movement.kind, movement.payload) + launches
        timed.append(TimedMovement(movement, movement.times * once, axes))
    return timed, routes


class _Overlap(NamedTuple):
    """Fractions of communication that computation overlaps."""

    target: Target
    physics: Physics
    computation: Mapping[str, float]
    scheduled_by_price: bool

    def of_blocking(self, movement: Movement, pieces: Mapping[str, float]) -> float:
        """Returns the fraction of a blocking movement that overlaps.

        pieces: seconds by pass of all that is sent in pieces,
        which overlaps with all of the pass at most.
        """
        efficiency = self.target.efficiency
        fraction = movement.overlap
        if movement.axes == ("tensor",) and movement.kind != "all-to-all":
            # Collective matmul: it overlaps in pieces with the matmuls that it opens and closes.
            fraction = efficiency.tensor_overlap * self.physics.tensor_overlap
        if movement.overlap:
            fraction *= min(1.0, self.computation[movement.during] / pieces[movement.during])
            fraction *= 1 - self.slowed
        return fraction

    def seconds(self, transfers: float, name: str, has_exchange: bool) -> float:
        """Returns the seconds of a pass' transfers that overlap.
        has_exchange: whether a step sends rows of experts."""
        computation = self.computation[name]
        room = computation
        if self.target.chip.on_torus:
            room *= transfers / (math.hypot(transfers, computation) or 1.0)
        of_transfers = self.target.efficiency.overlap
        if not self.target.chip.on_torus:
            of_transfers *= self.physics.gpu_overlap
        of_computation = of_transfers
        if self.scheduled_by_price and self.physics.overlapped_compute:
            of_transfers = self.physics.exchange_overlap if has_exchange else 1.0
            of_computation = self.physics.overlapped_compute
        overlapped = min(of_transfers * transfers, of_computation * room)
        return overlapped * (1 - self.slowed)

    @property
    def slowed(self) -> float:
        """Fraction of the overlapped seconds by which the computation beside them takes longer.

        Collectives take multiprocessors from it.
        Overlap that is fitted to measured steps has this in itself.
        """
        multiprocessors = self.target.chip.multiprocessors
        if not (self.scheduled_by_price and self.physics.overlapped_compute and multiprocessors):
            return 0.0
        return self.physics.communication_multiprocessors / multiprocessors
