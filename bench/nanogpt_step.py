"""The train step of nanoGPT's CPU setting, by turns with PyTorch's: `python bench/nanogpt_step.py PYTHON [ROUNDS CORES]`.

PYTHON is an interpreter that has torch, whose step is timed eager and by `torch.compile` (which needs a C++ compiler).
All sides are bound to the same cores in one run (turns.py), with one thread for each core, and threads that wait sleep:
OpenMP's spin by default, and take the cores from the side whose turn it is and from whatever else the machine does.
Writes results/nanogpt-cpu.json.
"""

import json
import os
import sys
from pathlib import Path

import turns

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "nanogpt-cpu.json"


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
    RESULTS.write_text(
        json.dumps({"cores": cores, "load": load, "results": found}, indent=1) + "\n"
    )
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
