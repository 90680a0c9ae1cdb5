"""Times two programs by turns on one machine, so that its other load falls on both.

Each side is a process of its own that compiles, warms up and then runs a few steps whenever it is told to. The order of
the sides changes every round. The result is the median over rounds of the ratio within a round, with its quartiles, and
each side's best and median step. Beside wall time stands the processor time of a side's threads: on a machine that
others use too, a side that waits for a core has more wall time and no more processor time; a thread that spins has more
of both. Only the standard library: a side may run in any environment.
"""

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

Command = tuple[Sequence[str], Mapping[str, str]]
"""A side's command line and its environment."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """Milliseconds of a step in one turn of a side."""

    wall: float
    processor: float
    """Of all threads of the process together."""


def serve(steps: Callable[[int], None], warm_up: int = 5) -> None:
    """Answers each line of standard input, a number of steps, with the wall and processor milliseconds of one of them.

    steps: runs that many steps and waits for the last.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    steps(warm_up)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        began, used = time.perf_counter(), time.process_time()
        steps(count)
        wall = (time.perf_counter() - began) / count * 1e3
        processor = (time.process_time() - used) / count * 1e3
        print(wall, processor, file=answers, flush=True)


def by_turns(
    sides: Mapping[str, Command], *, rounds: int = 30, steps: int = 10
) -> dict[str, list[Turn]]:
    """Returns each side's turn in each round."""
    times: dict[str, list[Turn]] = {name: [] for name in sides}
    processes: dict[str, subprocess.Popen[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for name, (words, env) in sides.items():
                processes[name] = subprocess.Popen(
                    words,
                    env=dict(env),
                    cwd=scratch,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                _wait_until_ready(processes[name], words)
            for number in range(rounds):
                for name in list(processes)[:: 1 if number % 2 else -1]:
                    times[name].append(_ask(processes[name], steps))
        finally:
            for process in processes.values():
                process.kill()
                process.communicate()
    return times


def _wait_until_ready(process: subprocess.Popen[str], words: Sequence[str]) -> None:
    """Reads what a side's libraries print, until it has compiled."""
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            return
    raise SystemExit(f"this ended before its first step: {' '.join(words)}")


def _ask(process: subprocess.Popen[str], steps: int) -> Turn:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    wall, processor = process.stdout.readline().split()
    return Turn(float(wall), float(processor))


def summary(times: Mapping[str, Sequence[Turn]], ours: str, theirs: str) -> dict[str, float]:
    """Returns the median of the paired ratios and its quartiles, and each side's best and median milliseconds.

    `processor_ratio` is that of the processor times.
    """
    pairs = list(zip(times[ours], times[theirs], strict=True))
    low, middle, high = statistics.quantiles((a.wall / b.wall for a, b in pairs), n=4)
    found = {
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "processor_ratio": statistics.median(a.processor / b.processor for a, b in pairs),
        "rounds": float(len(pairs)),
    }
    for name in (ours, theirs):
        wall = [turn.wall for turn in times[name]]
        found[f"{name}_best_ms"] = min(wall)
        found[f"{name}_median_ms"] = statistics.median(wall)
        found[f"{name}_processor_ms"] = statistics.median(turn.processor for turn in times[name])
    return found


def line_of(found: Mapping[str, float], ours: str, theirs: str) -> str:
    """Returns a summary in one line."""
    return (
        f"{_side_of(found, ours)}, {_side_of(found, theirs)}; "
        f"paired ratio {found['ratio']:.2f}, quartiles {found['ratio_low']:.2f} to {found['ratio_high']:.2f}, "
        f"{found['rounds']:.0f} rounds; of processor time {found['processor_ratio']:.2f}"
    )


def _side_of(found: Mapping[str, float], name: str) -> str:
    return (
        f"{name} {found[f'{name}_best_ms']:.1f} ms (median {found[f'{name}_median_ms']:.1f}, "
        f"processor {found[f'{name}_processor_ms']:.1f})"
    )
