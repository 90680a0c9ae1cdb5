"""Pipeline schedules: every table runs all passes once, in a possible order, with the published bubble and memory."""

import itertools
import re
import runpy
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import outside_parts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.sharding.layer_cuts import assign_layers, map_parts, v_placement
from meshwright.sharding.schedule_table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NOTHING,
    PLACE,
    ScheduleTable,
    Task,
)
from meshwright.sharding.schedules import (
    SCHEDULES,
    PipelineSchedule,
    bubble_formula,
    build_forward_table,
    build_table,
    find_schedule,
)
from meshwright.sharding.stages import NO_LAYER
from meshwright.trust import own
from meshwright.views.draw import PipelineTimeline

ZBV = own("outside.extensions.zbv:zbv")
HALF_SPLIT = own("outside_parts:half_split")


def tasks(table: ScheduleTable) -> Iterator[tuple[int, int, Task]]:
    for tick in range(table.ticks):
        for stage in range(table.stages):
            for task in table.tasks(tick, stage):
                yield tick, stage, task


def check_slots(table: ScheduleTable) -> int:
    """Runs the table with text in place of arrays: every read finds what was meant for it. Returns the tasks run."""
    parts, stages = table.parts, table.stages
    inputs = [[""] * table.input_slots for _ in range(stages)]
    gradients = [[""] * table.gradient_slots for _ in range(stages)]
    done = set()
    for tick in range(table.ticks):
        output, gradient = [""] * stages, [""] * stages
        for s, task in [
            (stage, task) for stage in range(stages) for task in table.tasks(tick, stage)
        ]:
            at = (tick, s, PLACE[task.kind])
            slot, part = int(table.input_slot[at]), parts.part(s, task.virtual_stage)
            if task.kind == FORWARD and part == 0:
                inputs[s][slot] = f"x0 of {task.microbatch}"
            assert inputs[s][slot] == f"x{part} of {task.microbatch}"
            if task.kind == FORWARD:
                output[s] = f"x{part + 1} of {task.microbatch}"
            else:
                assert (
                    gradients[s][int(table.gradient_slot[at])]
                    == f"g{part + 1} of {task.microbatch}"
                )
            if task.kind in (BACKWARD, BACKWARD_INPUT):
                gradient[s] = f"g{part} of {task.microbatch}"
            assert (s, task) not in done
            done.add((s, task))
        if table.loss_arrives[tick] != NOTHING:
            gradients[parts.last_stage][int(table.loss_arrives[tick])] = output[
                parts.last_stage
            ].replace("x", "g")
        for arrivals in table.arrivals:
            for s in range(stages):
                sender = (s - arrivals.hop) % stages
                if arrivals.inputs[tick, s] != NOTHING:
                    inputs[s][int(arrivals.inputs[tick, s])] = output[sender]
                if arrivals.gradients[tick, s] != NOTHING:
                    gradients[s][int(arrivals.gradients[tick, s])] = gradient[sender]
    assert table.live_inputs.max() <= table.input_slots
    return len(done)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*SCHEDULES, ZBV, HALF_SPLIT]),
    st.integers(1, 6),
    st.integers(1, 13),
    st.integers(2, 3),
)
def test_slots_hold_the_expected_values(
    name: str, stages: int, microbatches: int, virtual_stages: int
) -> None:
    virtual_stages = find_schedule(name).virtual_stages_for(virtual_stages)
    split = {"zero_bubble": microbatches, ZBV: microbatches, HALF_SPLIT: microbatches // 2}.get(
        name, 0
    )
    table = build_table(name, stages, microbatches, virtual_stages)
    assert check_slots(table) == (2 * microbatches + split) * stages * virtual_stages
    forward = build_forward_table(name, stages, microbatches, virtual_stages)
    assert check_slots(forward) == stages * microbatches * virtual_stages
    assert forward.parts == table.parts


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_matches_the_formula(name: str, stages: int) -> None:
    for microbatches in (stages, 2 * stages, 4 * stages):
        if name == "zbv" and microbatches == stages:
            continue  # it idles less than its formula there
        for asked in (2, 4):
            virtual_stages = find_schedule(name).virtual_stages_for(asked)
            table = build_table(name, stages, microbatches, virtual_stages)
            for backward in (2.0, 3.0):
                formula = bubble_formula(name, stages, microbatches, virtual_stages, backward)
                assert table.bubble(backward) == pytest.approx(formula)
    if name in ("gpipe", "1f1b"):
        assert build_table(name, stages, 3, 1).bubble() == pytest.approx((stages - 1) / 3)


@pytest.mark.parametrize("backward", [2.0, 3.0])
def test_the_v_idles_less_than_1f1b_and_1f1b_no_longer_than_gpipe(backward: float) -> None:
    for stages, microbatches in itertools.product((2, 4, 8, 16), (16, 32, 128)):
        gpipe, one, v = (
            build_table(name, stages, microbatches, n)
            for name, n in (("gpipe", 1), ("1f1b", 1), ("zbv", 2))
        )
        assert one.bubble(backward) == pytest.approx(gpipe.bubble(backward))
        assert v.bubble(backward) < one.bubble(backward) < stages / microbatches
        assert one.input_slots <= 2 * stages and v.input_slots <= 2 * stages + 2


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (3, 12), (4, 4), (4, 16)])
def test_v_shaped_zero_bubble_schedule_from_outside(stages: int, microbatches: int) -> None:
    """Weight gradients wait for no neighbour: stages idle in the other two passes alone."""
    table = build_table(ZBV, stages, microbatches, 2)
    assert table.parts.stage_of == tuple(range(stages)) + tuple(reversed(range(stages)))
    assert bubble_formula(ZBV, stages, microbatches, 2) == table.bubble()
    assert table.bubble() <= bubble_formula("zero_bubble", stages, microbatches, 1) * (1 + 1e-9)
    # Both neighbours send activations and gradients, and the turn of the V stays on its stage.
    assert {a.hop for a in table.arrivals if a.has_inputs} == ({1, -1, 0} if stages > 2 else {1, 0})
    assert table.input_slots <= 3 * stages + 1


def test_published_tables() -> None:
    one = build_table("1f1b", 4, 8, 1)
    assert one.ticks == 8 + 2 * 4 - 1
    # Stage s runs microbatch m forward in tick m + s, and backward in tick m + 2P - 1 - s.
    ticks = {(s, task): t for t, s, task in tasks(one)}
    for s, m in itertools.product(range(4), range(8)):
        assert (ticks[s, Task(FORWARD, 0, m)], ticks[s, Task(BACKWARD, 0, m)]) == (m + s, m + 7 - s)
    assert [len(ticks) for _, ticks in one.segments] == [4, 7, 4]
    assert [name for name, _ in build_table("gpipe", 4, 8, 1).segments] == ["fill", "drain"]
    split = build_table("zero_bubble", 4, 8, 1)
    weights = [
        [t for t, at, task in tasks(split) if at == s and task.kind == BACKWARD_WEIGHT]
        for s in range(4)
    ]
    assert weights == [list(range(7, 15))] * 4


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 16), (8, 32)])
def test_live_inputs(stages: int, microbatches: int) -> None:
    slots = {
        name: build_table(name, stages, microbatches, schedule.virtual_stages_for(2)).input_slots
        for name, schedule in SCHEDULES.items()
    }
    assert slots["1f1b"] == 2 * stages
    assert slots["zbv"] <= 2 * stages + 2
    assert slots["gpipe"] == microbatches
    assert slots["zero_bubble"] == 2 * stages
    assert slots["circular"] == 2 * microbatches
    # Another virtual stage of P microbatches.
    assert stages < slots["interleaved"] <= 3 * stages


@pytest.mark.parametrize(
    ("stages", "microbatches", "virtual_stages"), [(4, 13, 3), (6, 13, 2), (8, 13, 3)]
)
def test_interleaved_runs_with_a_short_last_group(
    stages: int, microbatches: int, virtual_stages: int
) -> None:
    table = build_table("interleaved", stages, microbatches, virtual_stages)
    assert check_slots(table) == 2 * stages * microbatches * virtual_stages


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            lambda p, m, v: [[Task(FORWARD, 0, i) for i in range(m)]] * (p - 1) + [[]],
            "runs nothing for virtual stage 0",
        ),
        (
            lambda p, m, v: [[Task(FORWARD, 0, 0), Task(BACKWARD_INPUT, 0, 0)]] * p,
            "runs forward, input gradient for",
        ),
        (
            lambda p, m, v: [[Task(BACKWARD, 0, 0), Task(FORWARD, 0, 0)]] * p,
            "all stages wait: stage 0 for backward",
        ),
        (lambda p, m, v: [[Task(FORWARD, 0, 0)]] * p, "no backward pass"),
    ],
)
def test_impossible_orders_are_refused(
    order: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        outside_parts, f"broken_{abs(hash(message))}", PipelineSchedule(order), raising=False
    )
    with pytest.raises(ConfigError, match=message):
        build_table(own(f"outside_parts:broken_{abs(hash(message))}"), 2, 1, 1)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (lambda part, stages: (part + 1) % stages, "the first part is on stage 0"),
        (lambda part, stages: 0, "stage 0 has 8 parts"),
        (lambda part, stages: part * 3 % stages if part < stages else part % stages, None),
        (lambda part, stages: (0, 2, 1, 3)[part % stages], "pass between neighbouring stages"),
    ],
)
def test_placements_that_a_pipeline_cannot_run_are_refused(
    placement: Any, message: str | None
) -> None:
    if message is None:
        assert map_parts(4, 2, placement).hop(0) == -1
        return
    with pytest.raises(ConfigError, match=message):
        map_parts(4, 2, placement)


def test_timeline_shows_every_task() -> None:
    table = build_table("interleaved", 2, 4, 2)
    picture = PipelineTimeline(table)
    text, svg = str(picture), picture.svg()
    assert "12.5%" in text and "10 idle" in svg
    cells = re.findall(r"(\d+[ab]'?)", text.split("stage 0")[1].split("live")[0])
    assert len(cells) == 16 and cells[0] == "0a" and set(cells) >= {"3b", "3b'", "0a'"}
    assert svg.count("tick ") == 32
    # The forward passes of a stage are a line above its backward passes.
    forward, backward = text.split("stage 0")[1].split("live")[0].strip().split("\n")
    assert "'" not in forward and backward.count("'") == 8


def test_a_page_draws_the_shapes_of_the_picture() -> None:
    """The script of a page places and colors no task: its boxes are those of the SVG, in number, place and color."""
    picture = PipelineTimeline(build_table("interleaved", 2, 4, 2))
    boxes = picture.page_data()["boxes"]
    placed = zip(boxes["x"], boxes["y"], boxes["fill"], boxes["tip"], strict=True)
    drawn = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)"[^>]* fill="(#\w{6})"[^>]*><title>([^<]*)', picture.svg()
    )
    assert [(f"{x:.1f}", f"{y:.1f}", fill, tip) for x, y, fill, tip in placed] == drawn
    assert sorted(set(boxes["group"])) == [-1, 0, 1, 2, 3]
    script = resources.files("meshwright.views").joinpath("assets/drawings.js").read_text()
    assert "backward" not in script and "microbatches in flight" not in script


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=14), st.integers(1, 5), st.integers(1, 2))
def test_layers_are_balanced(costs: list[int], stages: int, virtual_stages: int) -> None:
    fewest = stages if virtual_stages == 1 else stages * (virtual_stages - 1) + 1
    if len(costs) < fewest:
        with pytest.raises(ConfigError, match="every stage has a layer at least"):
            assign_layers(tuple(map(float, costs)), stages, virtual_stages)
        return
    assignment = assign_layers(tuple(map(float, costs)), stages, virtual_stages)
    parts = [list(assignment.layers_in(v, s)) for v in range(virtual_stages) for s in range(stages)]
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert sum(not part for part in parts) == max(0, len(parts) - len(costs)) or all(parts)
    assert all(any(assignment.layers_of(s)) for s in range(stages))
    assert sum(assignment.cost_fraction(s) for s in range(stages)) == pytest.approx(1)
    costliest = max(sum(costs[i] for i in part) for part in parts)
    # No cut has a cheaper costliest part: filling parts to just below that cost takes more parts than there are.
    filled, used = 1, 0
    for cost in costs:
        filled, used = (filled, used + cost) if used + cost < costliest else (filled + 1, cost)
    assert max(costs) == costliest or filled > len(parts)
    rows = assignment.rows(range(len(costs)))
    assert sorted(rows[rows != NO_LAYER]) == list(range(len(costs)))
    assert rows.shape[:2] == (stages, virtual_stages)


def test_uneven_layers() -> None:
    assert assign_layers((1.0,) * 7, 4, 1).boundaries == (0, 2, 4, 6, 7)
    assert np.array_equal(
        assign_layers((1.0,) * 3, 2, 1).rows(range(3)), [[[0, 1]], [[2, NO_LAYER]]]
    )
    # Three cheap layers and one costly layer share a stage.
    assert assign_layers((1.0,) * 3 + (3.0,) * 5, 4, 1).boundaries == (0, 4, 6, 7, 8)


def test_layers_on_a_v() -> None:
    assignment = assign_layers((1.0,) * 8, 2, 2, v_placement)
    assert assignment.layers_of(0) == [range(2), range(6, 8)] and assignment.layers_of(1) == [
        range(2, 4),
        range(4, 6),
    ]
    assert assignment.last_stage == 0
    assert np.array_equal(assignment.rows(range(8)), [[[0, 1], [6, 7]], [[2, 3], [4, 5]]])


def test_documentation_shows_the_current_tables() -> None:
    """The drawings and the list of features in the documentation are those that `python docs/parallelism.py` writes."""
    docs = Path(__file__).parents[1] / "docs"
    pages = runpy.run_path(str(docs / "parallelism.py"))
    for file, text in {**pages["schedules"](), "composition.md": pages["combinations"]()}.items():
        assert (docs / file).read_text(encoding="utf-8") == text, (
            f"{file}: python docs/parallelism.py"
        )
