"""Run of which one host is slow: `python straggling.py OUT` trains it in one process of several.

Process 2 sleeps between its steps, as if Python or another program kept it, and process 1 once, which is no straggler.
"""

import itertools
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from flipped import replicated_run

import meshwright as mw
from meshwright.api.verb import start_devices
from meshwright.hardware.hosts import hosts_of
from meshwright.trainer.meter import Meter

SLOW, SECONDS = 2, 0.4

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    socket.gethostname = lambda: f"node{rank}"
    push, steps = Meter.push, itertools.count(1)

    def push_slowly(self: Meter, step: int, metrics: Any, samples: int) -> None:
        push(self, step, metrics, samples)
        if rank == SLOW or (rank == 1 and next(steps) == 5):
            time.sleep(SECONDS)

    Meter.push = push_slowly  # type: ignore[method-assign]
    processes = int(os.environ["WORLD_SIZE"])
    start_devices(processes, None, hosts_of(os.environ))
    folder = Path(sys.argv[1])
    mw.train(
        replicated_run(folder, f"data={processes}", 0, steps=28), out=folder / "out",
        cache=folder / "cache", devices=processes, progress="none",
    )  # fmt: skip
