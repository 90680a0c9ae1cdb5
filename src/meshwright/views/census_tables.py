"""Tables of a census on a terminal: memory, ledger, FLOPs and findings as compiled, step time as predicted."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from meshwright.analysis.census import Census, summarise_traffic
from meshwright.analysis.compare import Change, LimitExceeded
from meshwright.formatting import format_bytes, format_count
from meshwright.hardware.targets import Target
from meshwright.hlo.ledger import LedgerEntry
from meshwright.models.flops import FORMULAS
from meshwright.views.plain_table import plain_table

if TYPE_CHECKING:
    from meshwright.analysis.run_measure import MeasuredMemory
    from meshwright.analysis.run_saving import SavingMemory
    from meshwright.planner.estimate import Estimate
    from meshwright.planner.explain import Remedy

_MAX_ENTRIES = 16
"""Rows of the ledger that are printed; the others are added up."""
_MAX_FINDINGS = 8
_MAX_MODULES = 8
_MAX_TEMPORARIES = 3
_BAR = 32
"""Characters of the longest bar."""
_SMALL = 0.0005
"""Fraction of a step below which a part is not printed."""


def _bar(fraction: float) -> str:
    """Bar of a fraction; one that is less than an eighth of a cell has none, so that 5 bytes do not look like 5 MiB."""
    return "█" * max(1, round(fraction * _BAR)) if 8 * fraction * _BAR >= 1 else ""


def census_title(census: Census) -> str:
    """Returns one line: name, mesh, device, compile time and versions."""
    mesh = ",".join(f"{axis}={n}" for axis, n in census.mesh.items() if n > 1) or "one device"
    return (
        f"{census.name} on mesh {mesh}, compiled for {census.device} in {census.compile_seconds:.1f} s "
        f"({census.versions})"
    )


def print_census(console: Console, census: Census) -> None:
    """Prints the title and all parts of a census."""
    console.print(f"[bold]{escape(census_title(census))}[/]; every figure is of one device\n")
    print_census_parts(console, census)


def census_text(census: Census) -> str:
    """Returns the parts of a census as plain text."""
    console = Console(file=io.StringIO(), width=120, highlight=False)
    print_census_parts(console, census)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def print_census_parts(console: Console, census: Census) -> None:
    """Prints what the census doubts, memory, ledger, FLOPs and findings."""
    print_doubts(console, census)
    print_memory(console, census)
    print_ledger(console, census)
    print_flops(console, census)
    print_findings(console, census)


def print_doubts(console: Console, census: Census) -> None:
    """Prints the reasons for which the census does not trust its own figures."""
    for doubt in census.doubts:
        console.print(f"[bold red]this census does not trust itself[/]: {escape(doubt)}")


def unpriced_text(unpriced: Mapping[str, int]) -> str:
    """Returns the kernels whose FLOPs are not known, with their executions; empty if there is none."""
    return ", ".join(f"{name} ({count} x)" for name, count in unpriced.items())


def print_saving(console: Console, saving: "SavingMemory") -> None:
    """Prints what a save and a restore take of the device and of the hosts."""
    reordered = f"; the rows of {saving.reordered} tensors are reordered, one after another" if saving.reordered else ""
    console.print(
        f"\n[bold]saving[/]: at most {format_bytes(saving.save)} of a device ({escape(saving.save_by)}), of which the "
        f"state is {format_bytes(saving.state)}; restoring: {format_bytes(saving.restore)} "
        f"({escape(saving.restore_by)}){reordered}. Host memory until a save is committed: "
        f"{format_bytes(saving.host)} of the process with most"
    )


def print_prediction(console: Console, census: Census, target: Target, estimate: "Estimate | None") -> None:
    """Prints the predicted step time, and the planner's estimate beside the compiled memory.

    estimate: of the planner for the same run; None where there is none.
    """
    schedule, compiled = census.schedule, census.memory.compiled
    if schedule is not None:
        mfu = schedule.mfu(sum(census.flops.model.values()), target.chip.flops_bf16)
        console.print(
            f"\n[bold]predicted[/] by a simulated schedule: {schedule.step_seconds:.3g} s per step, {mfu:.0%} MFU on "
            f"{target}"
        )
        parts = {
            **{kind: schedule.by_kind.get(kind, 0.0) for kind in ("matmul", "attention", "memory")},
            **{f"exposed, {axes} ({schedule.routes.get(axes, 'HBM')})": n for axes, n in schedule.exposed.items()},
            "pipeline bubble": schedule.bubble,
        }
        if schedule.unpriced:
            console.print(f"[bold red]not priced[/], by their bytes alone: {escape(unpriced_text(schedule.unpriced))}")
        if schedule.doubt:
            console.print(f"[bold red]not to be trusted[/]: {escape(schedule.doubt)}")
        table = plain_table("part", "seconds", "", right=("seconds",))
        for name, seconds in parts.items():
            if seconds > _SMALL * schedule.step_seconds:
                table.add_row(name, f"{seconds:.3f}", _bar(seconds / schedule.step_seconds))
        console.print(table)
    if estimate is not None:
        console.print(
            f"[bold]planned[/] by arithmetic: {format_bytes(estimate.bytes)} per device, {estimate.seconds:.3g} s per "
            f"step; [bold]compiled[/]: {format_bytes(compiled.live)} live at the peak "
            f"(planned {estimate.bytes / compiled.live - 1:+.0%}), in a heap of {format_bytes(compiled.peak)}"
        )


def print_remedies(console: Console, over: float, remedies: "Sequence[Remedy]") -> None:
    """Prints the options that reduce the memory of a step, cheapest first. over: bytes too many."""
    if not remedies:
        return
    console.print(f"\n[bold]{format_bytes(over)} too many[/]; options that save memory, predicted:")
    for remedy in remedies:
        enough = "" if remedy.saved_bytes >= over else ", not enough alone"
        saved, extra = format_bytes(remedy.saved_bytes), remedy.extra_seconds * 1e3
        console.print(f"  {remedy.option}: {saved} less, {extra:+,.0f} ms per step{enough}")


def print_memory(console: Console, census: Census) -> None:
    """Prints the bytes by category with bars, and by module."""
    memory = census.memory
    console.print(f"[bold]memory[/]: {format_bytes(memory.compiled.peak)} at the peak")
    table = plain_table("category", "bytes", "", right=("bytes",))
    largest = max(memory.by_category().values(), default=1) or 1
    for category, size in memory.by_category().items():
        table.add_row(category, format_bytes(size), _bar(size / largest))
    console.print(table)
    modules = [f"{name} {format_bytes(size)}" for name, size in memory.by_module().items() if name]
    if modules:
        console.print(f"[dim]by module:[/] {escape(', '.join(modules[:_MAX_MODULES]))}")
    temporaries = [
        " ".join(f"{array} {module} {category} {format_bytes(size)}".split())
        for category, module, array, size in memory.largest[:_MAX_TEMPORARIES]
    ]
    if temporaries:
        console.print(f"[dim]largest temporaries:[/] {escape('; '.join(temporaries))}")
    console.print()


def print_ledger(console: Console, census: Census) -> None:
    """Prints the collectives by kind and axes, then the largest by tensor."""
    print_unread(console, census)
    if not census.ledger:
        console.print("[bold]ledger[/]: no communication\n")
        return
    sent, count = sum(entry.sent for entry in census.ledger), sum(entry.count for entry in census.ledger)
    console.print(f"[bold]ledger[/]: {format_bytes(sent)} sent in {count} collectives")
    table = plain_table("collective", "axes", "count", "payload", "sent", right=("count", "payload", "sent"))
    for row in sorted(summarise_traffic(census.ledger), key=lambda row: -row["sent"]):
        sizes = (format_bytes(row["total"]), format_bytes(row["sent"]))
        table.add_row(row["kind"], row["axes"], str(row["count"]), *sizes)
    console.print(table)
    console.print()
    print_entries(console, census.ledger)


def print_unread(console: Console, census: Census) -> None:
    """Prints a warning if the program contains collectives that the ledger does not."""
    if census.unread:
        console.print(
            f"[bold red]incomplete ledger[/]: {len(census.unread)} instructions look like collectives and are not "
            f"understood; bytes and predicted time lack them: {escape(', '.join(census.unread[:4]))}"
        )


def operands_text(entry: LedgerEntry) -> str:
    """Returns the first two operands of a collective as text."""
    return " ".join(entry.operands[:2]) + (" ..." if len(entry.operands) > 2 else "")


def print_entries(console: Console, entries: Sequence[LedgerEntry]) -> None:
    """Prints the largest collectives, those of the same tensor and source line as one row."""
    merged: dict[tuple[Any, ...], list[float]] = {}
    for e in entries:
        overlap = f"overlaps {len(e.overlapped)}" if e.overlapped else "exposed" if e.asynchronous else ""
        row = merged.setdefault((e.tensor, e.kind, e.axes_label, operands_text(e), e.line, overlap), [0, 0.0])
        row[0] += e.count
        row[1] += e.sent
    rows = sorted(merged.items(), key=lambda item: -item[1][1])
    headings = ("tensor or scope", "collective", "axes", "operands", "count", "sent", "line")
    table = plain_table(*headings, right=("count", "sent"))
    for (tensor, kind, axes, operands, line, overlap), (count, sent) in rows[:_MAX_ENTRIES]:
        collective = f"{kind} ({overlap})" if overlap else kind
        sizes = (f"{count:.0f}", format_bytes(sent))
        table.add_row(escape(tensor), collective, axes, escape(operands), *sizes, line)
    others = [totals for _, totals in rows[_MAX_ENTRIES:]]
    if others:
        count, sent = sum(count for count, _ in others), sum(sent for _, sent in others)
        note = f"[dim]and {len(others)} more (--json has all)[/]"
        table.add_row(note, "", "", "", f"{count:.0f}", format_bytes(sent), "")
    console.print(table)
    console.print()


def print_flops(console: Console, census: Census) -> None:
    """Prints the model FLOPs by formula and the FLOPs of the compiled program."""
    flops = census.flops
    model, compiled = sum(flops.model.values()), flops.compiled
    text = f"[bold]FLOPs[/]: {format_count(compiled)} in compiled matmuls"
    if model and compiled:
        text += f"; model FLOPs {format_count(model)} ({model / compiled:.0%})"
    if flops.intensity:
        text += f"; {flops.intensity:.1f} FLOPs per byte by the compiler's cost analysis"
    console.print(text)
    if flops.unpriced:
        console.print(f"[bold red]not in it[/], FLOPs unknown: {escape(unpriced_text(flops.unpriced))}")
    if flops.model:
        note = "formula of the forward pass; a training step is three of it"
        table = plain_table("item", "model FLOPs", note, right=("model FLOPs",))
        for item, n in flops.model.items():
            table.add_row(item, format_count(n), FORMULAS.get(item, ""))
        console.print(table)
    phases: dict[str, float] = {}
    for matmul in flops.matmuls:
        phases[matmul.phase] = phases.get(matmul.phase, 0.0) + matmul.flops
    by_phase = ", ".join(f"{phase} {format_count(n)}" for phase, n in phases.items())
    console.print(f"[dim]compiled:[/] {by_phase or 'no matmul'}\n")


def print_findings(console: Console, census: Census) -> None:
    """Prints the findings of the lint, each with its reason and fix."""
    if not census.findings:
        console.print("[bold]lint[/]: no findings")
        return
    console.print(f"[bold]lint[/]: {len(census.findings)} finding{'s' if len(census.findings) > 1 else ''}")
    for f in census.findings[:_MAX_FINDINGS]:
        line = f" at {f.line}" if f.line else ""
        console.print(f"[bold yellow]{f.kind}[/] {escape(f.subject)}{line} ({format_bytes(f.bytes)})")
        console.print(f"  because: {escape(f.reason)}\n  fix:     {escape(f.fix)}")
    if len(census.findings) > _MAX_FINDINGS:
        console.print(f"and {len(census.findings) - _MAX_FINDINGS} more (--json has all)")


def print_changes(console: Console, changes: Sequence[Change], names: tuple[str, str]) -> None:
    """Prints two censuses side by side."""
    console.print(f"[bold]{escape(names[0])}[/] against [bold]{escape(names[1])}[/], on one device")
    table = plain_table("", *names, "ratio", right=(*names, "ratio"))
    part = ""
    for change in changes:
        if change.part != part:
            part = change.part
            table.add_row(f"[bold]{part}[/]" + (" (bytes sent)" if part == "traffic" else ""), "", "", "")
        table.add_row(f"  {escape(change.quantity)}", *change.formatted)
    console.print(table)


def print_measured(console: Console, measured: "MeasuredMemory") -> None:
    """Prints the memory of some real steps, beside the census's peak."""
    console.print(f"\n[bold]{measured.steps} steps measured here[/]")
    table = plain_table("live between steps", "bytes", right=("bytes",))
    for name, size in measured.live.categories.items():
        table.add_row(name, format_bytes(size))
    console.print(table)
    for device, stats in measured.live.devices.items():
        shown = {k: format_bytes(v) for k, v in stats.items() if k in ("bytes_in_use", "peak_bytes_in_use")}
        console.print(f"{device}: {shown}")
    if measured.resident_growth is not None:
        console.print(
            f"resident memory of this process grew by {format_bytes(measured.resident_growth)}; the census's peak of "
            f"its devices is {format_bytes(measured.predicted_peak)} "
            f"(ratio {measured.resident_growth / measured.predicted_peak:.2f})"
        )


def print_limits_exceeded(console: Console, exceeded: Sequence[LimitExceeded]) -> None:
    """Prints the limits of a budget that a program exceeds."""
    for limit in exceeded:
        over = f" ({limit.actual / limit.limit - 1:+.1%})" if limit.limit else ""
        console.print(
            f"[bold red]over budget[/] {escape(limit.quantity)}: {limit.actual:,.0f}, limit {limit.limit:,.0f}{over}"
        )
