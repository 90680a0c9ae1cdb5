"""Times two programs by turns on one machine, so that its other load falls on both.

Each side is a process of its own that compiles, warms up and then runs a few steps whenever it is told to. The order of
the sides changes every round. The result is the median over rounds of the ratio within a round, with its quartiles, and
each side's best and median step. Only the standard library: a side may run in any environment.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

Command = tuple[Sequence[str], Mapping[str, str]]
"""A side's command line and its environment."""


def serve(steps: Callable[[int], None], warm_up: int = 5) -> None:
    """Answers each line of standard input, a number of steps, with the milliseconds that one of them took.

    steps: runs that many steps and waits for the last.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    steps(warm_up)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        began = time.perf_counter()
        steps(count)
        print((time.perf_counter() - began) / count * 1e3, file=answers, flush=True)


def by_turns(
    sides: Mapping[str, Command], *, rounds: int = 30, steps: int = 10
) -> dict[str, list[float]]:
    """Returns the milliseconds of a step of each side in each round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
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


def _ask(process: subprocess.Popen[str], steps: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def summary(times: Mapping[str, Sequence[float]], ours: str, theirs: str) -> dict[str, float]:
    """Returns the median of the paired ratios and its quartiles, and each side's best and median milliseconds."""
    ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": middle, "ratio_low": low, "ratio_high": high, "rounds": float(len(ratios)),
        f"{ours}_best_ms": min(times[ours]), f"{ours}_median_ms": statistics.median(times[ours]),
        f"{theirs}_best_ms": min(times[theirs]), f"{theirs}_median_ms": statistics.median(times[theirs]),
    }  # fmt: skip


def line_of(found: Mapping[str, float], ours: str, theirs: str) -> str:
    """Returns a summary in one line."""
    return (
        f"{ours} {found[f'{ours}_best_ms']:.1f} ms (median {found[f'{ours}_median_ms']:.1f}), "
        f"{theirs} {found[f'{theirs}_best_ms']:.1f} ms (median {found[f'{theirs}_median_ms']:.1f}); "
        f"paired ratio {found['ratio']:.2f}, quartiles {found['ratio_low']:.2f} to {found['ratio_high']:.2f}, "
        f"{found['rounds']:.0f} rounds"
    )
