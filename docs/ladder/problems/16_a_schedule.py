"""A schedule

Write the order of work of every stage of a pipeline: `("F", m)` is the forward pass of microbatch m, `("B", m)` its
backward pass, which takes twice as long. A stage runs its list in order and waits where an input has not arrived: F
needs the F of the stage before, B the B of the stage after (on the last stage, its own F). Between F and B the stage
keeps the input of the microbatch.

Keep at most P inputs on any stage, and lose no time against GPipe. (A backward pass may be split: `("I", m)` is the
gradient of the input, `("W", m)` that of the weights, later. Who finds a use for that beats the reference.)
"""

import numpy as np
from grading import Blocks, Figures, Problem, read_sizes

from meshwright.hardware.targets import parse_target

PROBLEM = Problem(
    lesson="9_pipeline",
    mesh="stage=8",
    takes="xs[M, B]; w[P]",
    gives="losses[M]; dw[P]",
    small="P=4 M=8 B=2",
    other="P=8 M=32 B=2",
    full="P=8 M=32 B=8192",
    most_memory="P * 8192 * 8192 * 2",
    most_time=1.0,
    predict="h100:8: milliseconds of a step (a forward pass of 70B / P parameters and B tokens has 2 x 70e9 / P x "
    "B FLOPs, at 989e12 FLOP/s)",
    arithmetic="(M + P - 1) * 3 * 2 * 70e9 / P * B / 989e12",
    because="M microbatches of three units, and P - 1 times three units of waiting: a bubble of (P - 1)/M. The "
    "order changes memory, not the bubble, as long as no stage waits in the middle.",
    hints=(
        "How many forward passes may stage s run before its first backward pass can arrive? The last stage: one.",
        "Stage s: P - s forwards, then one backward and one forward in turn, then the backwards that are left: 1F1B.",
        "Split B into I and W: the stage before waits for I only. Fill the ticks at the end with the W that are left.",
    ),
)
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
BYTES_OF_INPUT = 8192 * 8192 * 2  # B tokens of width 8,192 in bfloat16
FLOPS = 2 * 70e9  # of a forward pass, for a token


def play(orders, microbatches):
    """Runs the orders; returns the time, and the most inputs that a stage keeps.

    Raises ValueError where stages wait for each other for ever.
    """
    stages, finished, clock = len(orders), {}, [0] * len(orders)
    at, kept, most = [0] * stages, [0] * stages, 0
    while any(at[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, m = orders[s][at[s]]
                needs = {"F": [(s - 1, "F", m)] if s else [], "W": [(s, "I", m)]}.get(
                    kind, [(s, "F", m)] + ([(s + 1, "B", m)] if s + 1 < stages else [])
                )
                if any(need not in finished for need in needs):
                    break
                clock[s] = max([clock[s], *(finished[need] for need in needs)]) + UNITS[kind]
                # The stage before needs the gradient of its output only.
                finished[s, kind, m] = finished[s, {"I": "B"}.get(kind, kind), m] = clock[s]
                kept[s] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
                most, at[s], moved = max(most, kept[s]), at[s] + 1, True
        if not moved:
            s = next(s for s in range(stages) if at[s] < len(orders[s]))
            kind, m = orders[s][at[s]]
            raise ValueError(f"deadlock: stage {s} waits for ever before ({kind!r}, {m})")
    return max(clock), most


def attempt(answer, case):
    """Adds up what the orders compute: a loss for each microbatch that leaves, gradients for each backward pass."""
    sizes = read_sizes(case.sizes)
    orders = answer(sizes["P"], sizes["M"])
    if len(orders) != sizes["P"]:
        raise ValueError(f"answer returns the orders of {len(orders)} stages, and there are {sizes['P']}")
    for stage, order in enumerate(orders):
        _require_tasks(stage, order, sizes["M"])
    play(orders, sizes["M"])
    losses = np.zeros(sizes["M"], np.float32)
    for kind, m in orders[-1]:
        losses[m] += (kind == "F") * (m + 1)
    dw = np.array([sum({"B": 1, "W": 1}.get(k, 0) * (m + 1) for k, m in order) for order in orders], np.float32)
    want, total = np.arange(1, sizes["M"] + 1, dtype=np.float32), sizes["M"] * (sizes["M"] + 1) / 2
    return [
        Blocks("losses", [losses], [want], 1e-6),
        Blocks("dw", list(dw), [np.float32(total)] * sizes["P"], 1e-6),
    ]


def _require_tasks(stage, order, microbatches):
    """Raises ValueError for a task that does not exist or is listed twice."""
    seen = set()
    for task in order:
        kind, m = task
        if kind not in UNITS:
            raise ValueError(f"stage {stage} lists {task}: a task is one of {', '.join(UNITS)}")
        if m not in range(microbatches):
            raise ValueError(f"stage {stage} lists {task}: microbatches are 0 to {microbatches - 1}")
        if task in seen:
            raise ValueError(f"stage {stage} lists {task} twice")
        seen.add(task)


def measure(answer):
    """Times the orders at the peak of each machine, one microbatch at a time."""
    sizes = read_sizes(PROBLEM.full)
    orders = answer(sizes["P"], sizes["M"])
    units, most = play(orders, sizes["M"])
    forward = FLOPS / sizes["P"] * sizes["B"]
    busiest = max(sum(UNITS[kind] for kind, _ in order) for order in orders)
    seconds = {m: units * forward / parse_target(m).chip.flops_bf16 for m in PROBLEM.targets}
    basis = dict.fromkeys(seconds, "units of the schedule at the peak of the chip")
    return Figures({}, float(most * BYTES_OF_INPUT), busiest * forward, seconds, basis)


def picture():
    """What a naive order looks like: one microbatch after another is drawn by lesson 9; here is GPipe."""
    from meshwright.sharding.schedules import build_table
    from meshwright.views.draw import PipelineTimeline

    return PipelineTimeline(build_table("gpipe", 4, 8, 1))


PREDICTION = None


def answer(stages, microbatches):
    """Returns a list for each stage: its tasks in order, such as [("F", 0), ("F", 1), ("B", 0), ...]."""
    raise NotImplementedError
