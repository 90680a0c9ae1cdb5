"""Picture of a pipeline schedule: rows for each stage, a column for each tick."""

import dataclasses
from typing import Any

from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IDLE,
    PLACE,
    TASK_NAMES,
    ScheduleTable,
    Task,
)
from meshwright.views.draw.colours import task_colour

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARKS = {FORWARD: "", BACKWARD: "'", BACKWARD_INPUT: "'", BACKWARD_WEIGHT: "w"}


@dataclasses.dataclass(frozen=True)
class PipelineTimeline:
    """Picture of a schedule table.

    A tick has a row for each of the forward pass, the backward pass and the gradient of the weights, where that is a
    task of its own. A cell shows the microbatch as a number and the virtual stage as a letter; `'` marks a backward
    pass, `w` the gradient of the weights.
    """

    table: ScheduleTable

    @property
    def title(self) -> str:
        """Name and size of the schedule."""
        t = self.table
        virtual_stages = f" of {t.virtual_stages} virtual stages" if t.virtual_stages > 1 else ""
        return f"{t.name}: {t.microbatches} microbatches through {t.stages} stages{virtual_stages}"

    @property
    def summary(self) -> str:
        """Ticks, bubble and live inputs of the schedule."""
        t = self.table
        return (
            f"{t.ticks} ticks, bubble {t.bubble():.1%} of the busy time, at most {t.input_slots} live inputs per stage"
        )

    @property
    def places(self) -> list[int]:
        """Places of a tick that the schedule uses, a row each."""
        return sorted({PLACE[kind] for kind in _kinds(self.table)})

    def task(self, tick: int, stage: int, place: int) -> Task | None:
        """Returns the task in a cell; None where the stage is idle."""
        return next((task for task in self.table.tasks(tick, stage) if PLACE[task.kind] == place), None)

    def label(self, task: Task) -> str:
        """Returns the text of a cell."""
        letter = _LETTERS[task.virtual_stage % 26] if self.table.virtual_stages > 1 else ""
        return f"{task.microbatch}{letter}{_MARKS[task.kind]}"

    def idle(self, stage: int) -> int:
        """Returns the number of cells in which a stage is idle."""
        return self.table.ticks * len(self.places) - int((self.table.kind[:, stage] != IDLE).sum())

    def svg(self) -> str:
        """Returns the picture as SVG."""
        from meshwright.views.draw.svg import timeline_svg  # svg.py needs this class

        return timeline_svg(self)

    def _repr_html_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        from meshwright.views.draw.terminal import timeline_text

        return timeline_text(self).plain

    def __rich__(self) -> Any:
        from meshwright.views.draw.terminal import timeline_text

        return timeline_text(self)


def fill(task: Task) -> str:
    """Returns the colour of a cell: that of the kind of task, lighter for later virtual stages."""
    return task_colour(TASK_NAMES[task.kind], task.virtual_stage)


def task_legend(table: ScheduleTable) -> list[str]:
    """Returns the marks of the task kinds in a table with their names."""
    return [f"0{_MARKS[kind]} {TASK_NAMES[kind]}" for kind in _kinds(table)]


def _kinds(table: ScheduleTable) -> list[int]:
    """Returns the kinds of tasks in a table."""
    return [kind for kind, count in table.task_counts.items() if count]
