"""Run of the hardware benchmark: sections one after another, each in a process
of its own, within a number of minutes.

The time that a section leaves goes to those after it. A section that hangs is stopped some time
after its limit, and what it had measured is kept.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.bench.hardware.section import (
    FAILED,
    OUT_OF_TIME,
    RUNNING,
    Request,
    file_name,
    read_section,
    section_file,
    write_json_file,
)
from meshwright.errors import ConfigError, nearest
from meshwright.storage.removing import remove_file
from meshwright.storage.writing import make_folder, open_file
from meshwright.trust import is_reference, options_of_child

_PLACE = "meshwright.bench.hardware"
SECTIONS: dict[str, tuple[str, int]] = {
    "machine": (f"{_PLACE}.machine:measure_machine", 1),
    "kernels": (f"{_PLACE}.kernels:measure_kernels", 4),
    "matmuls": (f"{_PLACE}.machine:measure_matmuls", 2),
    "collectives": (f"{_PLACE}.machine:measure_collectives", 3),
}
"""Section -> its function `(section: Section) -> None` and its time relative to the others,
in the order they run."""
_OUTSIDE = ("", 2)
"""A section from outside is named by its function."""
_GRACE_SECONDS, _GRACE_FACTOR = 30.0, 1.5
"""A section is stopped after its time multiplied by the factor,
and these seconds more: it may be compiling."""

Finished = Callable[[str, dict[str, Any]], None]
"""Called after each section with its name and its result."""


def check_sections(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the sections to run, `machine` first. Raises ConfigError for an unknown one."""
    for name in names:
        if name not in SECTIONS and not is_reference(name):
            raise ConfigError(f"--only {name}", "there is no such section", nearest(name, SECTIONS))
    chosen = names or tuple(SECTIONS)
    return tuple(dict.fromkeys(["machine", *(n for n in SECTIONS if n in chosen), *chosen]))


def run_sections(
    request: Request, names: Sequence[str], minutes: float, finished: Finished
) -> dict[str, Any]:
    """Runs the sections, and returns the result of each by name.

    minutes: for all of them together.  finished: called after each.
    """
    folder, ends, results = Path(request.folder), time.monotonic() + 60 * minutes, dict[str, Any]()
    request.write()
    for number, name in enumerate(names):
        share = sum(SECTIONS.get(n, _OUTSIDE)[1] for n in names[number:])
        left = max(0.0, ends - time.monotonic())
        remove_file(section_file(folder, name), below=folder, missing_ok=True)  # of an earlier run
        _run_child(folder, request, name, left * SECTIONS.get(name, _OUTSIDE)[1] / share)
        results[name] = read_section(folder, name)
        finished(name, results[name])
    return results


def _run_child(folder: Path, request: Request, name: str, seconds: float) -> None:
    """Runs a section in a child process, and records how it ended where the child could not."""
    logs = folder / "logs"
    make_folder(folder, logs.name)
    log = logs / f"{file_name(name)}.log"
    # Where a section or a kernel from outside is named, the user named it.
    trusted = options_of_child(name, request.kernels)
    command = [sys.executable, "-P", "-m", _PLACE, str(folder), name, f"{seconds:.1f}", *trusted]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    limit, message, state = seconds * _GRACE_FACTOR + _GRACE_SECONDS, "", FAILED
    with open_file(log, "w") as output:
        try:
            streams: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": output,
            }
            done = subprocess.run(command, **streams, timeout=limit, check=False, env=environment)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code, state, message = (
                -signal.SIGKILL,
                OUT_OF_TIME,
                f"stopped after {limit:.0f} s; its log is {log}",
            )
    result = read_section(folder, name)
    if result is not None and result["state"] != RUNNING and code == 0:
        return
    if not message:
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next(
            (line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing"
        )
        message = f"its process ended with {ended}: {last}; its log is {log}"
    unmeasured: dict[str, Any] = {"section": name, "seconds": seconds, "seconds_used": 0.0}
    result = result or {**unmeasured, "problems": [], "notes": [], "facts": {}, "rows": []}
    write_json_file(section_file(folder, name), {**result, "state": state, "message": message})
