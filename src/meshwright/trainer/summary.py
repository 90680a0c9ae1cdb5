"""Result of a training run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from meshwright.formatting import Shown, format_step, format_time


@dataclasses.dataclass(frozen=True, repr=False)
class Summary(Shown):
    """Result of a training run.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=1, sample=0, eval_samples=16)
        >>> summary = mw.train(run, out=tmp / "summary", progress="none", cache=tmp, devices=1)
        >>> summary.steps, summary.tokens, summary.interrupted_by
        (1, 2048, 0)

    In a notebook it shows the run's page:
        >>> summary._repr_html_()[:7]
        '<iframe'
    """

    out: Path
    steps: int
    """Steps taken so far, earlier parts of a resumed run included."""
    loss: float
    """Mean of the last steps' losses (up to 20)."""
    held_out_loss: float | None
    """Mean loss per token on held-out text."""
    steps_taken: int
    """Steps since the start or the resume."""
    tokens: int
    """Tokens trained on, since the start or the resume."""
    seconds: float
    """Seconds from the first compilation to the end."""
    data_wait_seconds: float
    """Seconds that the loop waited for data, on the host that waited most: the others wait for
    it."""
    data_wait_host: int
    """Process that waited most for its data."""
    start_seconds: float
    """Seconds from the call of `train` to the end of its first step: opening, initial values or
    restore, compilation, that step."""
    compile_seconds: float
    """Seconds that compiling the train step and the evaluation took."""
    save_seconds: float
    """Seconds that the loop waited for saves, without the last one at the end of the run."""
    step_seconds: float
    """Median seconds from one step to the next, waiting for data included."""
    goodput: Mapping[str, float]
    """Shares of the time since its first event, restarts included: `goodput` in steps that count,
    and where the rest went (docs/formats.md). Empty until a second step has a time."""
    interrupted_by: int
    """Number of the signal that ended the run early; 0 where it came to its end."""
    sample: str
    """Text sampled from the model at the end."""

    def brief(self) -> str:
        """Returns the step, the losses, the time and the folder."""
        lines = [f"{self.steps:,} steps, loss {self.loss:.4f}"]
        if self.held_out_loss is not None:
            lines[0] += f", held-out loss {self.held_out_loss:.4f}"
        speed = f", {format_step(self.step_seconds)} per step" if self.steps_taken else ""
        lines.append(f"{format_time(self.seconds)}{speed}")
        if self.goodput:
            lines.append(f"goodput {self.goodput['goodput']:.1%}")
        if self.interrupted_by:
            lines.append(f"ended by signal {self.interrupted_by}")
        lines.append(f"in {self.out}")
        return "; ".join(lines)
