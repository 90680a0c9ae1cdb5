"""Blocks of a run's page with its hosts and their memory: what `processes.json`
and the events say of each process.

A process that is slow in its own work makes all others wait for it, at the devices. With the usual
seconds s_i of a step on process i, without its wait for data,

    waiting for others of i = s_i - min over processes of s

is the time that it waits for the slowest, whose own is 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.documents import real
from meshwright.formatting import format_time
from meshwright.monitoring.processes import NAME
from meshwright.signs import WORK
from meshwright.views.blocks import Block, Column, Table, Text, Tone
from meshwright.views.run_folder import RunFolder, objects
from meshwright.views.run_status import run_status

_OLD = 120.0
"""Seconds after which a sign is old: rows come every 10 s, into a bucket every minute."""
_FEW = 20
"""Rows of a table that needs no search."""
_LASTING = 7200.0
"""Seconds for which a warning marks its host: one that lasts is given once an hour."""
_WARNINGS = 2
"""Warnings of a host's machine that its row has, the last first; the table of machines has all."""


def host_blocks(folder: RunFolder, now: float, title: str) -> list[Block]:
    """Returns the table of a run's processes; a sentence where the run left none.
    now: Unix seconds."""
    rows = objects(folder.document(NAME), "processes")
    if not rows:
        return _absent(folder)
    processes = _process_rows(folder, rows, now)
    tones: list[Tone] = []
    for process in processes:
        age = process["age"]
        is_old = age is not None and age > _OLD
        tones.append("bad" if is_old or process["is sick"] else "")
    columns = [
        Column("host", cell="host"),
        Column("process", "integer", "process"),
        Column("last sign", "seconds", "age"),
        Column("doing", cell="doing"),
        Column("step", "seconds", "step", bar=True),
        Column("waits for others", "seconds", "waits"),
        Column("own work", "seconds", "work"),
        Column("data", "seconds", "data"),
        Column("save", "seconds", "save"),
        Column("its machine", cell="machine", wide=True),
    ]
    note = "Medians of the last 100 steps and saves."
    if len(rows) > 1:
        note += (
            " Waits for others: seconds of a step above those of the process that spends the "
            "fewest there, for which the others wait. A slow device keeps all processes equally "
            "long."
        )
    is_searchable = len(processes) > _FEW
    table = Table.of(
        processes, columns, tones=tones, title=title, note=note, searchable=is_searchable
    )
    return [table]


def _process_rows(
    folder: RunFolder, rows: Sequence[Mapping[str, Any]], now: float
) -> list[dict[str, Any]]:
    """Returns the cells of each process. rows: of the file."""
    status = run_status(folder, now)
    is_over = status.state == "ended"
    warnings_by_host = _warnings_by_host(folder)
    steps = [seconds for row in rows if (seconds := _seconds(row, "step")) is not None]
    quickest = min(steps, default=0.0)
    processes = []
    for row in rows:
        host = str(row.get("host", ""))
        # Of several processes of a host the first has its machine.
        warnings = warnings_by_host.pop(host, [])
        step = _seconds(row, "step")
        waits = None
        if step is not None and len(rows) > 1:
            waits = step - quickest
        processes.append(
            {
                "process": real(row.get("process")),
                "host": host,
                "age": None if is_over else _age_of(row.get("seen"), now),
                "doing": "" if is_over else _doing(row),
                "step": step,
                "waits": waits,
                "work": _seconds(row, WORK),
                "data": _seconds(row, "data"),
                "save": _seconds(row, "save"),
                "machine": _machine_text(warnings, now),
                "is sick": _is_sick(warnings, now),
            }
        )
    return processes


def memory_blocks(folder: RunFolder, suffix: str) -> list[Block]:
    """Returns the most memory that each device and each process of a run has had in use.
    suffix: of the titles."""
    rows = objects(folder.document(NAME), "processes")
    if not rows:
        return []
    planned = _planned_bytes(folder)
    devices = _device_rows(rows, planned)
    blocks: list[Block] = []
    if devices:
        blocks.append(_device_table(devices, suffix))
    else:
        blocks.append(
            Text(
                ["JAX tells no memory of these devices: simulated ones have that of their process."]
            )
        )
        planned = None if planned is None else planned * _most_devices(rows)
    processes = []
    for row in rows:
        used, total = _process_memory(row)
        if used is not None:
            processes.append(
                {
                    "process": real(row.get("process")),
                    "host": str(row.get("host", "")),
                    "used": used,
                    "total": total,
                    "share": None if not total else used / total,
                    "planned": None if devices else planned,
                }
            )
    if processes:
        columns = [
            Column("host", cell="host"),
            Column("process", "integer", "process"),
            Column("highest", "bytes", "used", bar=True),
            Column("memory of the host", "bytes", "total"),
            Column("share", "fraction", "share"),
            Column("arrays of the step, by the compiler", "bytes", "planned"),
        ]
        note = "Main memory: programs, readers of data, copies for checkpoints."
        blocks.append(Table.of(processes, columns, title=f"Processes{suffix}", note=note))
    return blocks


def _device_table(devices: Sequence[Mapping[str, Any]], suffix: str) -> Table:
    """Returns the table of devices, the fullest first."""
    columns = [
        Column("device", "integer", "device"),
        Column("process", "integer", "process"),
        Column("host", cell="host"),
        Column("kind", cell="kind"),
        Column("highest", "bytes", "peak", bar=True),
        Column("capacity", "bytes", "limit"),
        Column("share", "fraction", "share"),
        Column("planned by the compiler", "bytes", "planned"),
    ]
    ordered = sorted(devices, key=lambda row: row["share"] or 0.0, reverse=True)
    note = (
        "Capacity: what JAX may take of a device. The plan is that of the train step, with its "
        "arguments."
    )
    is_searchable = len(ordered) > _FEW
    return Table.of(ordered, columns, title=f"Devices{suffix}", note=note, searchable=is_searchable)


def _device_rows(rows: Sequence[Mapping[str, Any]], planned: float | None) -> list[dict[str, Any]]:
    """Returns a row for each device whose memory JAX tells."""
    found = []
    for row in rows:
        for device in objects(row, "devices"):
            peak = real(device.get("peak"))
            limit = real(device.get("limit"))
            if peak is None:
                continue
            found.append(
                {
                    "device": real(device.get("device")),
                    "process": real(row.get("process")),
                    "host": str(row.get("host", "")),
                    "kind": str(device.get("kind", "")),
                    "peak": peak,
                    "limit": limit,
                    "share": None if not limit else peak / limit,
                    "planned": planned,
                }
            )
    return found


def _absent(folder: RunFolder) -> list[Block]:
    """Returns a sentence for a run without the table."""
    if not folder.event_counts["start"]:
        return []
    return [Text([f"This run left no {NAME}: it is of an earlier version."], tone="faded")]


def _planned_bytes(folder: RunFolder) -> float | None:
    """Returns the bytes of a device that the compiler planned for the largest train step
    of the last start."""
    starts = folder.events_of("start")
    began = 0.0
    if starts:
        began = real(starts[-1].get("time")) or 0.0
    planned = []
    for event in folder.events_of("compile"):
        size = real(event.get("bytes"))
        if size is not None and (real(event.get("time")) or 0.0) >= began:
            planned.append(size)
    return max(planned, default=None)


def _most_devices(rows: Sequence[Mapping[str, Any]]) -> int:
    return max(len(objects(row, "devices")) for row in rows)


def _process_memory(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Returns the most bytes that a process has had, and those of its host."""
    values = row.get("memory")
    if not isinstance(values, list | tuple) or len(values) != 2:
        return None, None
    return real(values[0]), real(values[1])


def _seconds(row: Mapping[str, Any], phase: str) -> float | None:
    values = row.get("seconds")
    return real(values.get(phase)) if isinstance(values, Mapping) else None


def _doing(row: Mapping[str, Any]) -> str:
    """Formats what a process does: `step 1,200, data`."""
    step = real(row.get("step"))
    place = "" if step is None else f"step {step:,.0f}, "
    return f"{place}{row.get('phase', '')}"


def _warnings_by_host(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """Returns the last warning of each counter of each host's machine, the newest first."""
    by_host: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for event in folder.events_of("machine"):
        counter = (str(event.get("part", "")), str(event.get("counter", "")))
        of_host = by_host.setdefault(str(event.get("host", "")), {})
        of_host.pop(counter, None)
        of_host[counter] = event
    return {host: list(of_host.values())[::-1] for host, of_host in by_host.items()}


def _machine_text(warnings: Sequence[Mapping[str, Any]], now: float) -> str:
    """Formats the newest warnings of a machine with their ages."""
    lines = []
    for event in warnings[:_WARNINGS]:
        age = _age_of(event.get("time"), now)
        ago = "" if age is None else f"{format_time(age)} ago: "
        lines.append(f"{ago}{event.get('warning', '')}")
    more = len(warnings) - len(lines)
    if more > 0:
        lines.append(f"and {more} more below")
    return "\n".join(lines)


def _is_sick(warnings: Sequence[Mapping[str, Any]], now: float) -> bool:
    """Whether a machine has a warning that is not long past."""
    ages = [_age_of(event.get("time"), now) for event in warnings]
    return any(age is not None and age < _LASTING for age in ages)


def _age_of(time: Any, now: float) -> float | None:
    at = real(time)
    return None if at is None else max(0.0, now - at)
