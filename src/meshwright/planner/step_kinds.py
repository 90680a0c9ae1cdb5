"""Kinds of work of a step: what a plan predicts of each,
and the rates with which it predicts what a trace measured.

matmuls: attention half          projections of queries, keys, values and outputs
matmuls: feed-forward half       gate, up, down, experts, router
matmuls: outside of the layers   unembedding
attention kernel                 scores; of the attention half where no fused kernel computes them
elementwise                      norms, residuals, rotary, optimizer
exposed communication            collectives beside which nothing computes
waiting for other devices        time in a collective before the last device reaches it
idle                             nothing runs: the host, its transfers, the pipeline's bubble
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.formatting import format_step
from meshwright.hardware.targets import Target
from meshwright.planner.compute import ATTENTION_HALF, FEED_FORWARD_HALF
from meshwright.planner.estimate import (
    ATTENTION,
    ELEMENTWISE,
    MATMULS,
    OPERANDS,
    SCORES,
    Estimate,
    estimate,
)
from meshwright.runs.placed_run import PlacedRun

ATTENTION_MATMULS = "matmuls: attention half"
FEED_FORWARD_MATMULS = "matmuls: feed-forward half"
OTHER_MATMULS = "matmuls: outside of the layers"
KERNEL = "attention kernel"
ELEMENTS = "elementwise"
EXPOSED = "exposed communication"
WAITING = "waiting for other devices"
IDLE = "idle"
MATMUL_KINDS = (ATTENTION_MATMULS, FEED_FORWARD_MATMULS, OTHER_MATMULS)
KINDS = (*MATMUL_KINDS, KERNEL, ELEMENTS, EXPOSED, WAITING, IDLE)

ENOUGH_SECONDS = 5e-3
"""Measured seconds of all devices and steps from which a rate is taken: a lane's events are some
microseconds apart, so their ends are 1 % of the time of a few hundred of them."""
_OTHER_BOUND = "the plan's seconds of it do not follow its rate: something else bounds it"
"""Why a rate does not explain a trace."""
_ROUNDS = 20
_CLOSE = 0.01
"""Relative difference of planned and measured seconds at which the rates are found."""


def planned_kinds(e: Estimate, *, fused_attention: bool) -> dict[str, float]:
    """Returns the planned seconds of each kind; they add up to the step.

    fused_attention: whether a kernel computes attention, whose time a trace has by itself.
    """
    bounds = e.bounds
    matmuls = bounds.get(MATMULS, 0.0) + bounds.get(OPERANDS, 0.0)
    attention = bounds.get(ATTENTION, 0.0) + bounds.get(SCORES, 0.0)
    half_of_attention = e.halves.get(ATTENTION_HALF, 0.0)
    feed_forward = e.halves.get(FEED_FORWARD_HALF, 0.0)
    return {
        ATTENTION_MATMULS: half_of_attention + (0.0 if fused_attention else attention),
        FEED_FORWARD_MATMULS: feed_forward,
        OTHER_MATMULS: matmuls - half_of_attention - feed_forward,
        KERNEL: attention if fused_attention else 0.0,
        ELEMENTS: bounds.get(ELEMENTWISE, 0.0) + e.parts["optimizer"],
        EXPOSED: e.parts["exposed"],
        WAITING: 0.0,
        IDLE: e.parts["host"] + e.parts["bubble"],
    }


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """Seconds of a traced step by kind."""

    seconds: Mapping[str, float]
    """Of one device in one step, by kind; they add up to the step."""
    traced: float
    """Steps times devices of the trace."""
    fused_attention: bool
    """Whether a kernel computes attention."""
    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """FLOPs that the program cannot avoid on a device in a step,
    by the peak they run at: `bf16`, `fp8`."""
    devices_elsewhere: int = 0
    """Devices of other processes, of which the trace has nothing: waiting for them is
    in exposed communication."""

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    def of(self, kinds: Iterable[str]) -> float:
        """Returns the seconds of some kinds together."""
        return sum(self.seconds.get(kind, 0.0) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class StepRate:
    """A rate that a traced step ran at."""

    name: str
    """Field of `Efficiency` that it corrects: matmul, attention, hbm, links, overlap."""
    value: float
    """FLOP/s, bytes/s, or for `overlap` a fraction."""
    refused: str = ""
    """Why it is not taken; empty where it is."""
    impossible: bool = False
    """Whether it is refused because no device of the data sheet could run at it."""


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Kinds of a step whose planned seconds a rate is fitted to."""

    name: str
    kinds: tuple[str, ...]


def fit_rates(
    placed: PlacedRun, target: Target, measured: MeasuredStep, *, has_data_sheet: bool
) -> list[StepRate]:
    """Returns the rates with which the plan of `placed`
    on `target` has the measured seconds of each kind.

    The rate of a kind is multiplied by planned / measured seconds until both agree. Communication
    of a chip with a data sheet keeps its links, of which a trace does not tell what each carried,
    and gets another overlap. Planned exposed seconds are linear in it:

        overlap = overlap before + (planned - measured) / (planned
        without overlap - planned with all of it)

    Without a fused kernel attention is part of the attention half, and its rate changes with that
    of matmuls. A device without a data sheet whose plan is bound by memory in its matmuls too gets
    one memory rate for both.

    has_data_sheet: whether the peaks of `target` are a data sheet's.
    Without, rates have no upper limit.
    """
    fits = _fits(measured, has_data_sheet)
    before = planned_kinds(estimate(placed, target), fused_attention=measured.fused_attention)
    enough = [fit for fit in fits if not _unfit(fit, measured, before)]
    fitted, unmet = _fitted(placed, target, measured, enough)
    reasons = {fit.name: _unfit(fit, measured, before) for fit in fits}
    if unmet and not has_data_sheet:
        # The plan's matmuls wait for memory, whatever their rate: one rate of memory
        # for all computation.
        computation = _Fit("hbm", (*MATMUL_KINDS, KERNEL, ELEMENTS))
        together = [fit for fit in enough if fit.name not in ("matmul", "hbm")]
        fitted, unmet = _fitted(placed, target, measured, [computation, *together])
        reasons["matmul"] = (
            "the plan's matmuls wait for memory, whose rate is that of all computation"
        )
    for name in unmet:
        reasons[name] = _OTHER_BOUND
        if name == "overlap":
            reasons[name] = _why_no_overlap(placed, fitted, measured)
    rates = [
        _rate(fit, reasons[fit.name], target, fitted, measured, before, has_data_sheet)
        for fit in fits
    ]
    if has_data_sheet and not measured.fused_attention:
        of_attention = _Fit("attention", MATMUL_KINDS)
        refused = rates[0].refused
        rates.append(_rate(of_attention, refused, target, fitted, measured, before, has_data_sheet))
    return rates


def _fits(measured: MeasuredStep, has_data_sheet: bool) -> list[_Fit]:
    fits = [_Fit("matmul", MATMUL_KINDS)]
    if measured.fused_attention:
        fits.append(_Fit("attention", (KERNEL,)))
    fits.append(_Fit("hbm", (ELEMENTS,)))
    fits.append(_Fit("overlap" if has_data_sheet else "links", (EXPOSED,)))
    return fits


def _unfit(fit: _Fit, measured: MeasuredStep, planned: Mapping[str, float]) -> str:
    """Returns why no rate is taken from the measured seconds of some kinds; empty where one is."""
    if measured.devices_elsewhere and EXPOSED in fit.kinds:
        return (
            f"the trace has nothing of the {measured.devices_elsewhere} devices of other "
            "processes, and waits for them count as exposed communication; trace a run of one "
            "process"
        )
    total = measured.of(fit.kinds) * measured.traced
    if total < ENOUGH_SECONDS:
        return (
            f"{total * 1e3:.3g} ms in {measured.traced:g} steps of a device, less than the "
            f"{ENOUGH_SECONDS * 1e3:g} ms that a rate is taken from; trace more steps"
        )
    if not any(planned[kind] for kind in fit.kinds):
        return "the plan has no such work"
    return ""


def _fitted(
    placed: PlacedRun, target: Target, measured: MeasuredStep, fits: Sequence[_Fit]
) -> tuple[Target, list[str]]:
    """Returns the target whose plan has the measured seconds of some kinds,
    and the rates that could not be fitted."""
    unmet: list[str] = []
    for _ in range(_ROUNDS):
        e = estimate(placed, target)
        planned = planned_kinds(e, fused_attention=measured.fused_attention)
        fractions: dict[str, Any] = {}
        unmet = []
        for fit in fits:
            seconds = measured.of(fit.kinds)
            before = sum(planned[kind] for kind in fit.kinds)
            old: float = getattr(target.efficiency, fit.name)
            if fit.name == "overlap":
                overlap = _overlapped(placed, target, seconds, before)
                if overlap is None:
                    unmet.append(fit.name)
                    continue
                fractions[fit.name] = overlap
            else:
                fractions[fit.name] = old * before / seconds
            if fit.name == "matmul" and not measured.fused_attention:
                fractions["attention"] = target.efficiency.attention * before / seconds
            if abs(before / seconds - 1) > _CLOSE:
                unmet.append(fit.name)
        if not unmet:
            return target, []
        efficiency = dataclasses.replace(target.efficiency, **fractions)
        target = dataclasses.replace(target, given_efficiency=efficiency)
    return target, unmet


def _rate(
    fit: _Fit,
    refused: str,
    target: Target,
    fitted: Target,
    measured: MeasuredStep,
    planned: Mapping[str, float],
    has_data_sheet: bool,
) -> StepRate:
    """Returns a fitted rate, refused where it is above the data sheet."""
    peak = _peak(fit.name, target)
    fraction: float = getattr(fitted.efficiency, fit.name)
    rate = StepRate(fit.name, fraction * peak, refused)
    if refused or not has_data_sheet or fit.name == "overlap":
        return rate
    seconds = measured.of(fit.kinds)
    if fit.name == "matmul":
        above = _above_data_sheet(target, measured)
        if above:
            return dataclasses.replace(rate, refused=above, impossible=True)
    if fraction > 1:
        old: float = getattr(target.efficiency, fit.name)
        before = sum(planned[kind] for kind in fit.kinds)
        reason = (
            f"{format_step(before)} planned at {old:.2f} of the data sheet's {peak:.3g}, and "
            f"{format_step(seconds)} measured, would be {fraction:.2f} of it"
        )
        return dataclasses.replace(rate, refused=reason)
    return rate


def _peak(name: str, target: Target) -> float:
    chip = target.chip
    if name in ("matmul", "attention"):
        return chip.flops_bf16
    if name == "hbm":
        return chip.hbm_bandwidth
    return chip.interconnect.link_bandwidth if name == "links" else 1.0


def _above_data_sheet(target: Target, measured: MeasuredStep) -> str:
    """Returns the arithmetic by which the program's products are faster than the peak;
    empty where they are not."""
    chip = target.chip
    least = 0.0
    for rate, flops in measured.flops.items():
        least += flops / (getattr(chip, f"flops_{rate}", None) or chip.flops_bf16)
    seconds = measured.of((*MATMUL_KINDS, KERNEL))
    if not seconds or least <= seconds:
        return ""
    flops = sum(measured.flops.values())
    return (
        f"{flops:.4g} FLOPs in {format_step(seconds)} are {flops / seconds:.3g} FLOP/s, and take "
        f"at least {format_step(least)} at the data sheet's {chip.flops_bf16:.3g} of {chip.name}"
    )


def _overlapped(placed: PlacedRun, target: Target, seconds: float, before: float) -> float | None:
    """Returns the overlap between 0 and 1 with which the planned exposed communication is
    nearest to the measured one.

    None where the exposed time hardly depends on it: so little that the agreement that is asked of
    a fit would not tell one overlap from another.

    seconds: measured.  before: planned with the overlap of `target`.
    """
    without, complete = _exposed_at(placed, target, 0.0), _exposed_at(placed, target, 1.0)
    governed = without - complete
    if governed <= _CLOSE * seconds:
        return None
    overlap = target.efficiency.overlap + (before - seconds) / governed
    return min(1.0, max(0.0, overlap))


def _exposed_at(placed: PlacedRun, target: Target, overlap: float) -> float:
    """Returns the planned seconds of exposed communication with another overlap."""
    efficiency = dataclasses.replace(target.efficiency, overlap=overlap)
    changed = dataclasses.replace(target, given_efficiency=efficiency)
    return estimate(placed, changed).parts["exposed"]


def _why_no_overlap(placed: PlacedRun, target: Target, measured: MeasuredStep) -> str:
    """Returns why no overlap explains the measured exposed communication.

    target: with all other rates fitted.
    """
    seconds = measured.of((EXPOSED,))
    busy = sum(estimate(placed, target).busy.values())
    if seconds > busy:
        return (
            f"{format_step(seconds)} are exposed, and all communication was planned to take "
            f"{format_step(busy)} without overlap: the links are slower than planned; `meshwright "
            "bench collectives` measures them"
        )
    complete, without = _exposed_at(placed, target, 1.0), _exposed_at(placed, target, 0.0)
    return (
        f"{format_step(seconds)} are exposed, and the plan has {format_step(complete)} with an "
        f"overlap of 1 and {format_step(without)} with 0: the rest it does not govern (blocking "
        "collectives, such as those over `tensor`)"
    )
