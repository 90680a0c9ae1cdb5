"""The train step of nanoGPT's CPU setting, by turns with PyTorch's: `python bench/nanogpt_step.py PYTHON [ROUNDS CORES]`.

PYTHON is an interpreter that has torch, whose step is timed eager and by `torch.compile` (which needs a C++ compiler).
All sides are bound to the same cores in one run (turns.py), with one thread for each core, and threads that wait sleep:
OpenMP's spin by default, and take the cores from the side whose turn it is and from whatever else the machine does.
Writes the run into results/nanogpt-cpu.json, which has one for each number of cores, and the figures of all of them into
README.md.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import turns
from page_table import put_figures

SCRIPT = "nanogpt_step.py"
HERE = Path(__file__).parent
RESULTS = HERE / "results" / "nanogpt-cpu.json"
"""Number of cores -> load of the machine and summaries of the last run on so many."""


def sides(python: str, cores: int) -> dict[str, turns.Command]:
    """Returns our step and PyTorch's, eager and compiled. The cores are those of this process."""
    threads = {
        "OMP_NUM_THREADS": str(cores),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "GOMP_SPINCOUNT": "0",
    }
    env = {**os.environ, **threads}
    theirs = {key: value for key, value in env.items() if key != "PYTHONPATH"}
    torch = [python, str(HERE / "torch_nanogpt.py")]
    ours = [sys.executable, str(HERE / "our_step.py"), "nanogpt-cpu", "1", "--model.vocab", "66"]
    return {
        "meshwright": (ours, env),
        "eager": ([*torch, "eager"], theirs),
        "compiled": ([*torch, "compiled"], theirs),
    }


def figures(runs: Mapping[str, Any]) -> dict[str, str]:
    """Returns the figures of README.md by name: those of every number of cores, the unfavorable ones too."""
    return {"steps": "; ".join(sentence_of(cores, run) for cores, run in runs.items())}


def sentence_of(cores: str, run: Mapping[str, Any]) -> str:
    """Returns what a step takes on so many cores of each of PyTorch's, in wall and in processor time."""
    eager, compiled = run["results"]["eager"], run["results"]["compiled"]
    noun = "core" if cores == "1" else "cores"
    return (
        f"{cores} {noun}: {ratio_of(eager)} of eager's time, {ratio_of(compiled)} of `torch.compile`'s, of processor "
        f"time {eager['processor_ratio']:.2f} and {compiled['processor_ratio']:.2f} "
        f"(load of the machine {run['load']['before']:.0f} to {run['load']['after']:.0f})"
    )


def ratio_of(found: Mapping[str, float]) -> str:
    """Returns the median of the paired ratios of wall time with its quartiles."""
    return f"{found['ratio']:.2f} ({found['ratio_low']:.2f} to {found['ratio_high']:.2f})"


def main(python: str, rounds: int, cores: int) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if not 1 <= cores <= len(usable):
        raise SystemExit(f"CORES is {cores}: this process may use 1 to {len(usable)}")
    os.sched_setaffinity(0, usable[:cores])  # inherited by every side
    before = os.getloadavg()[0]
    times = turns.by_turns(sides(python, cores), rounds=rounds)
    found = {name: turns.summary(times, "meshwright", name) for name in ("eager", "compiled")}
    for name, summary in found.items():
        print(turns.line_of(summary, "meshwright", name))
    load = {"before": before, "after": os.getloadavg()[0]}
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))
    runs[str(cores)] = {"load": load, "results": found}
    ordered = dict(sorted(runs.items(), key=lambda item: int(item[0])))
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    put_figures(SCRIPT, figures(ordered))
    print(
        f"{cores} cores; load of the machine {load['before']:.1f} before, {load['after']:.1f} after"
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    most = len(os.sched_getaffinity(0))
    main(
        sys.argv[1],
        int(sys.argv[2]) if len(sys.argv) > 2 else 30,
        int(sys.argv[3]) if len(sys.argv) > 3 else most,
    )
