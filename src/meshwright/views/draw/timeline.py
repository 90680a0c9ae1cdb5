"""Picture of a pipeline schedule: rows for each stage, a column for each tick."""

import dataclasses

from rich.text import Text

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
from meshwright.views.colours import task_colour
from meshwright.views.draw.picture import MAX_ROWS, WIDTH, Canvas, Picture, filled

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARKS = {FORWARD: "", BACKWARD: "'", BACKWARD_INPUT: "'", BACKWARD_WEIGHT: "w"}
_TASK_HEIGHT, _LIVE_HEIGHT, _STAGE_LEFT, _STAGE_TOP = 24.0, 22.0, 66.0, 62.0
"""Pixels of a schedule's rows: tasks, live inputs below them, and the margins of the first."""


@dataclasses.dataclass(frozen=True)
class PipelineTimeline(Picture):
    """Picture of a schedule table.

    A tick has a row for each of the forward pass, the backward pass and the gradient of the weights, where that is a
    task of its own. A cell shows the microbatch as a number and the virtual stage as a letter; `'` marks a backward
    pass, `w` the gradient of the weights.
    """

    table: ScheduleTable

    @property
    def title(self) -> str:  # type: ignore[override]
        """Name and size of the schedule."""
        return self.table.title

    @property
    def lines(self) -> tuple[str, ...]:
        """Ticks, bubble and live inputs of the schedule."""
        return (self.table.summary,)

    @property
    def _kinds(self) -> list[int]:
        return [kind for kind, count in self.table.task_counts.items() if count]

    @property
    def _places(self) -> list[int]:
        """Places of a tick that the schedule uses, a row each."""
        return sorted({PLACE[kind] for kind in self._kinds})

    def _label(self, task: Task) -> str:
        letter = _LETTERS[task.virtual_stage % 26] if self.table.virtual_stages > 1 else ""
        return f"{task.microbatch}{letter}{_MARKS[task.kind]}"

    def svg(self) -> str:
        """Returns the picture as SVG; the grey bars below the tasks of a stage are its live inputs."""
        table, canvas, places = self.table, Canvas(self.title, self.lines), self._places
        tick_width = 26.0 if table.ticks <= 48 else max(7.0, 1240.0 / table.ticks)
        tasks_height = _TASK_HEIGHT * len(places)
        right = _STAGE_LEFT + table.ticks * tick_width + 6
        y = _STAGE_TOP
        for s in range(table.stages):
            canvas.text(4, y + 16, f"stage {s}", 12)
            for t in range(table.ticks):
                self._draw_tick(canvas, t, s, _STAGE_LEFT + t * tick_width, y, tick_width)
            idle = table.ticks * len(places) - int((table.kind[:, s] != IDLE).sum())
            canvas.text(right, y + 16, f"{idle} idle", 11)
            live = int(table.live_inputs[:, s].max())
            canvas.text(right, y + tasks_height + _LIVE_HEIGHT - 4, f"{live} live", 11)
            y += tasks_height + _LIVE_HEIGHT + 6
        x, y = _STAGE_LEFT, y + 12
        for name in (TASK_NAMES[kind] for kind in self._kinds):
            canvas.box(x, y - 11, 14, 14, task_colour(name, 0), "", name)
            canvas.text(x + 20, y, name, 11)
            x += 34 + len(name) * 7
        canvas.text(x, y, "grey: live inputs", 11)
        return canvas.render()

    def _draw_tick(self, canvas: Canvas, t: int, s: int, x: float, y: float, width: float) -> None:
        table, places = self.table, self._places
        live = int(table.live_inputs[t, s])
        for task in table.tasks(t, s):
            virtual_stage = f", virtual stage {task.virtual_stage}" if table.virtual_stages > 1 else ""
            name = TASK_NAMES[task.kind]
            tip = f"tick {t}: {name} of microbatch {task.microbatch}{virtual_stage}; {live} live inputs"
            top = y + _TASK_HEIGHT * places.index(PLACE[task.kind])
            canvas.box(x, top, width, _TASK_HEIGHT, task_colour(name, task.virtual_stage), self._label(task), tip)
        if live:
            height = _LIVE_HEIGHT * live / max(1, int(table.live_inputs.max()))
            top = y + _TASK_HEIGHT * len(places) + _LIVE_HEIGHT - height
            canvas.shapes.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="currentColor" '
                f'opacity="0.18"><title>{live} live inputs</title></rect>'
            )

    def text(self) -> Text:
        """Returns lines for each stage with a column for each tick, and below them the number of live inputs."""
        table = self.table
        cells = {(t, s): table.tasks(t, s) for t in range(table.ticks) for s in range(table.stages)}
        width = max(len(self._label(task)) for tasks in cells.values() for task in tasks) + 1
        shown = min(table.ticks, max(8, (WIDTH - 12) // width))
        text = Text(f"{self.title}\n", style="bold")
        text.append(f"{table.summary}\n")
        for s in range(min(table.stages, MAX_ROWS)):
            for row, place in enumerate(self._places):
                text.append(f"stage {s:<3} " if row == 0 else " " * 10)
                for t in range(shown):
                    task = next((task for task in cells[t, s] if PLACE[task.kind] == place), None)
                    if task is None:
                        text.append("·".rjust(width), style="dim")
                    else:
                        style = filled(task_colour(TASK_NAMES[task.kind], task.virtual_stage))
                        text.append(self._label(task).rjust(width), style=style)
                text.append("\n" if shown == table.ticks else " ...\n")
            live = "".join((str(n) if n else "").rjust(width) for n in table.live_inputs[:shown, s])
            text.append(f"{'live':>9} {live}\n", style="dim")
        if table.stages > MAX_ROWS:
            text.append(f"... and {table.stages - MAX_ROWS} more stages\n", style="dim")
        if shown < table.ticks:
            text.append(f"... and {table.ticks - shown} more ticks\n", style="dim")
        legend = ", ".join(f"0{_MARKS[kind]} {TASK_NAMES[kind]}" for kind in self._kinds)
        text.append(f"{legend}; live: inputs that a stage holds\n", style="dim")
        return text
