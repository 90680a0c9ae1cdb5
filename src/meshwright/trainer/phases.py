"""Phase of a training process: what it does now, for those who watch it."""

import time

BEATS = "MESHWRIGHT_BEATS"
"""Variable with the number of an open file that takes a process's signs, for the one that supervises it."""


class Phases:
    """Step and phase of a process, set by the training loop in one assignment and read by other threads."""

    def __init__(self) -> None:
        self.now: tuple[int, str, float] = (0, "start", time.monotonic())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase: start, data, compile, step, save, evaluate, sample. step: None stays in the same one."""
        self.now = (self.now[0] if step is None else step, phase, time.monotonic())
