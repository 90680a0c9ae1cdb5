"""The simulated schedule: by hand on small programs, and on programs of the chips' own compilers."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step, profile_for, simulate_run
from meshwright.api import local_planner, training
from meshwright.hardware.chips import CHIPS, Efficiency
from meshwright.hardware.targets import Target, parse_target
from meshwright.runs.settle import Settled
from meshwright.sharding.schedule_table import IDLE
from meshwright.step.device_run import DeviceRun
from meshwright.step.pipeline import tick_scopes
from meshwright.step.train_step import CompiledTrainStep
from meshwright.views.blocks import Bars
from meshwright.views.census_page import schedule_blocks
from meshwright.views.charts import Drawing
from xlacensus.hlo.parser import parse_module
from xlacensus.hlo.scopes import BranchScope
from xlacensus.interconnect import all_coordinates
from xlacensus.schedule import (
    CostModel,
    SimulatedSchedule,
    TargetDevices,
    hbm_bytes_accessed,
    simulate_schedule,
)

WHOLE = Efficiency(1, 1, 1, 1, 1, 1, 1, 1)
V5P = Target("v5p", CHIPS["v5p"], (4, 1, 1))
TEXTS = Path(__file__).parent / "texts"

# 2 MiB of bfloat16 gathered over four chips of a ring, beside a product of a million cycles; a loop of ten copies.
PROGRAM = """HloModule step, is_scheduled=true, num_partitions=4

%body (p: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %p = (s32[], f32[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024,1024] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[1024,1024] negate(%x)
  ROOT %out = (s32[], f32[1024,1024]) tuple(%next, %y)
}

%condition (p: (s32[], f32[1024,1024])) -> pred[] {
  %p = (s32[], f32[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%product (a: bf16[1024,1024], b: bf16[1024,1024]) -> bf16[1024,1024] {
  %a = bf16[1024,1024] parameter(0)
  %b = bf16[1024,1024] parameter(1)
  ROOT %dot = bf16[1024,1024] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (w: bf16[256,1024], a: bf16[1024,1024], x: f32[1024,1024]) -> f32[1024,1024] {
  %w = bf16[256,1024] parameter(0)
  %a = bf16[1024,1024] parameter(1)
  %x = f32[1024,1024] parameter(2)
  %start = (bf16[256,1024], bf16[1024,1024]) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %before = bf16[1024,1024] fusion(%a, %a), kind=kOutput, calls=%product, config={"estimated_cycles":"CYCLES"}
  %done = bf16[1024,1024] all-gather-done(%start)
  %after = bf16[1024,1024] fusion(%before, %done), kind=kOutput, calls=%product, config={"estimated_cycles":"17500"}
  %zero = s32[] constant(0)
  %carry = (s32[], f32[1024,1024]) tuple(%zero, %x)
  %loop = (s32[], f32[1024,1024]) while(%carry), condition=%condition, body=%body
  ROOT %end = f32[1024,1024] get-tuple-element(%loop), index=1
}
"""
RING = 2**21 * 3 / 4 / (2 * 90e9) + 2e-6
"""Seconds of the gather: three quarters of it over both directions of a ring, two hops of latency."""
COPY = 10 * (2 * 2**22 + 3 * 4) / 2.765e12
"""Ten times 4 MiB read and written, and the counter."""


def devices_of(target: Target) -> TargetDevices:
    coordinates = all_coordinates(target.chip, target.topology, target.domains)
    return TargetDevices(target.chip, target.topology, tuple(coordinates), WHOLE)


def play(
    text: str, target: Target = V5P, mesh: dict[str, int] | None = None, **more: Any
) -> SimulatedSchedule:
    degrees = {"fsdp": target.devices} if mesh is None else mesh
    return simulate_schedule(parse_module(text), devices_of(target), degrees, **more)


@pytest.mark.parametrize(("cycles", "hidden"), [(1_750_000, True), (1_750, False)])
def test_a_gather_runs_beside_what_stands_before_its_done(cycles: int, hidden: bool) -> None:
    played = play(PROGRAM.replace("CYCLES", str(cycles)))
    # 17500 cycles at 1.75 GHz; the short product is as long as its bytes take.
    before = max(cycles / 1.75e9, 3 * 2**21 / 2.765e12)
    exposed = 0.0 if hidden else RING - before
    assert played.exposed.get("fsdp", 0.0) == pytest.approx(exposed, abs=1e-9)
    assert played.link_seconds["fsdp"] == pytest.approx(RING)
    assert played.by_kind["matmul"] == pytest.approx(before + 1e-5)
    assert played.by_kind["memory"] == pytest.approx(COPY, rel=0.01)
    assert played.step_seconds == pytest.approx(before + exposed + 1e-5 + COPY, rel=0.01)
    assert played.routes == {"fsdp": "ICI x"}


def test_a_loop_is_drawn_once_and_counted_as_often_as_it_runs() -> None:
    played = play(PROGRAM.replace("CYCLES", "1750"))
    (loop,) = [span for span in played.spans if span.kind == "loop"]
    (copy,) = [span for span in played.spans if span.depth == 1 and span.seconds > 1e-7]
    assert loop.count == copy.count == 10
    assert loop.seconds == pytest.approx(10 * copy.seconds, rel=0.01) and copy.start >= loop.start


def test_a_schedule_is_drawn_with_its_loops() -> None:
    timeline, parts = schedule_blocks(play(PROGRAM.replace("CYCLES", "1750")))
    assert isinstance(timeline, Drawing) and isinstance(parts, Bars)
    spans = timeline.data["spans"]
    assert ("loop", 10) in zip(spans["kind"], spans["count"], strict=True)
    assert "fsdp (ICI x)" in timeline.data["lanes"] and "exposed, fsdp (ICI x)" in parts.names


def test_a_slice_of_a_stack_is_read_and_written_alone() -> None:
    text = """HloModule step, is_scheduled=true

%update (stack: f32[80,1024], row: f32[1,1024], i: s32[]) -> f32[80,1024] {
  %stack = f32[80,1024] parameter(0)
  %row = f32[1,1024] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[80,1024] dynamic-update-slice(%stack, %row, %i, %zero)
}

ENTRY %main (stack: f32[80,1024], row: f32[1,1024], i: s32[]) -> f32[80,1024] {
  %stack = f32[80,1024] parameter(0)
  %row = f32[1,1024] parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = f32[80,1024] fusion(%stack, %row, %i), kind=kLoop, calls=%update
}
"""
    module = parse_module(text)
    assert hbm_bytes_accessed(module.entry.root) == 2 * 4096 + 4


NESTED = """HloModule step, is_scheduled=true

%row (stack: f32[80,1024], i: s32[]) -> f32[1,1024] {
  %stack = f32[80,1024] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,1024] dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,1024}
}

%same (x: f32[80,1024]) -> f32[81920] {
  %x = f32[80,1024] parameter(0)
  ROOT %flat = f32[81920] bitcast(%x)
}

%outer (stack: f32[80,1024], other: f32[80,1024], i: s32[]) -> f32[1,1024] {
  %stack = f32[80,1024] parameter(0)
  %other = f32[80,1024] parameter(1)
  %i = s32[] parameter(2)
  %read = f32[1,1024] fusion(%stack, %i), kind=kLoop, calls=%row
  %flat = f32[81920] fusion(%other), kind=kLoop, calls=%same
  %part = f32[1024] slice(%flat), slice={[0:1024]}
  %line = f32[1,1024] bitcast(%part)
  ROOT %sum = f32[1,1024] add(%read, %line)
}

ENTRY %main (stack: f32[80,1024], other: f32[80,1024], i: s32[]) -> f32[1,1024] {
  %stack = f32[80,1024] parameter(0)
  %other = f32[80,1024] parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = f32[1,1024] fusion(%stack, %other, %i), kind=kLoop, calls=%outer
}
"""


def test_a_nested_fusion_reads_what_it_uses() -> None:
    """One row of each stack, also through a nested fusion that passes it on or lays it out; an index; a row written."""
    for passed in ("bitcast", "copy"):
        module = parse_module(NESTED.replace("bitcast(%x)", f"{passed}(%x)"))
        assert hbm_bytes_accessed(module.entry.root) == 3 * 4096 + 4
    whole = parse_module(
        NESTED.replace("slice(%flat), slice={[0:1024]}", "reduce(%flat), to_apply=%add")
    )
    assert hbm_bytes_accessed(whole.entry.root) == 2 * 4096 + 80 * 4096 + 4


def test_a_fusion_on_another_stream_reads_and_writes_the_same() -> None:
    """XLA:GPU begins fusions asynchronously; the shape of the start repeats its operands, which it does not write."""
    fusion = "%out = f32[1,1024] fusion(%stack, %other, %i)"
    start = (
        "%start = ((f32[80,1024], f32[80,1024], s32[]), f32[1,1024], u32[]) fusion-start(%stack, %other, %i), "
        "kind=kLoop, calls=%outer\n  ROOT %done = f32[1,1024] fusion-done(%start)"
    )
    module = parse_module(NESTED.replace(f"ROOT {fusion}, kind=kLoop, calls=%outer", start))
    entry = module.entry
    assert hbm_bytes_accessed(entry.instructions["start"]) == 3 * 4096 + 4


def test_a_matmul_in_a_nested_fusion_is_a_matmul() -> None:
    text = PROGRAM.replace("CYCLES", "1750000").replace(
        "ROOT %dot = bf16[1024,1024] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT %nested = bf16[1024,1024] fusion(%a, %b), kind=kOutput, calls=%inner",
    )
    inner = PROGRAM[PROGRAM.index("%product") : PROGRAM.index("ENTRY")].replace(
        "%product", "%inner"
    )
    assert (
        play(text.replace("%product (", f"{inner}%product (")).by_kind
        == play(PROGRAM.replace("CYCLES", "1750000")).by_kind
    )


def test_a_transfer_on_another_core_begins_with_its_operands() -> None:
    """A start without operands occupies no link: the gather begins at the update that passes them."""
    text = PROGRAM.replace("CYCLES", "1750000")
    early = "%start = (bf16[256,1024], bf16[1024,1024]) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}"
    called = """%called (p: bf16[256,1024]) -> bf16[1024,1024] {
  %p = bf16[256,1024] parameter(0)
  ROOT %gather = bf16[1024,1024] all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

"""
    start = "%start = ((), (), (s32[1])) custom-call-start(), called_computations={%called}"
    update = "%update = ((bf16[256,1024]), bf16[1024,1024]) custom-call-update(%start, %w)"
    done = "%done = bf16[1024,1024] all-gather-done(%start)"
    offloaded = text.replace("ENTRY", f"{called}ENTRY").replace(
        done, done.replace("%start", "%update")
    )
    overlapped = play(offloaded.replace(early, f"{start}\n  {update}"))
    assert overlapped.exposed == {} and overlapped.link_seconds["fsdp"] == pytest.approx(RING)
    # Behind the matmul nothing is left to overlap with.
    late = play(offloaded.replace(early, start).replace("  %done", f"  {update}\n  %done"))
    assert late.exposed["fsdp"] == pytest.approx(RING)


def test_a_matmul_fused_with_a_piece_of_a_gather_is_a_matmul() -> None:
    """v5e prints the gather in each fusion that it overlaps with; start and done are fusions too."""
    text = PROGRAM.replace("CYCLES", "1750000")
    gather = "all-gather(%w), replica_groups={{0,1,2,3}}, dimensions={0}"
    begun = f"""%begun (w: bf16[256,1024]) -> bf16[1024,1024] {{
  %w = bf16[256,1024] parameter(0)
  ROOT %gather = bf16[1024,1024] {gather}
}}

%async_collective_fusion.1 (a: bf16[1024,1024], w: bf16[256,1024]) -> bf16[1024,1024] {{
  %a = bf16[1024,1024] parameter(0)
  %w = bf16[256,1024] parameter(1)
  %gather = bf16[1024,1024] {gather}
  ROOT %dot = bf16[1024,1024] dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%ended (g: bf16[1024,1024]) -> bf16[1024,1024] {{
  ROOT %g = bf16[1024,1024] parameter(0)
}}

ENTRY"""
    start = "%start = (bf16[256,1024], bf16[1024,1024]) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}"
    pieces = (
        text.replace("ENTRY", begun)
        .replace(
            start,
            "%async-collective-start = bf16[1024,1024] fusion(%w), kind=kCustom, calls=%begun",
        )
        .replace(
            "fusion(%a, %a), kind=kOutput, calls=%product",
            "fusion(%a, %w), calls=%async_collective_fusion.1",
        )
        .replace(
            "all-gather-done(%start)", "fusion(%async-collective-start), kind=kCustom, calls=%ended"
        )
        .replace("%done", "%async-collective-done")
    )
    whole, played = play(text), play(pieces)
    assert played.by_kind == whole.by_kind and played.step_seconds == pytest.approx(
        whole.step_seconds
    )


def test_what_lies_in_vmem_costs_no_hbm() -> None:
    text = PROGRAM.replace("CYCLES", "1750").replace(
        "%y = f32[1024,1024] negate", "%y = f32[1024,1024]{1,0:S(1)} negate"
    )
    assert play(text).by_kind["memory"] == pytest.approx(COPY / 2, rel=0.01)


TWO_GATHERS = """HloModule step, is_scheduled=true, num_partitions=16

ENTRY %main (w: bf16[1048576]) -> bf16[2097152] {
  %w = bf16[1048576] parameter(0)
  %first = (bf16[1048576], bf16[2097152]) all-gather-start(%w), replica_groups=FIRST, dimensions={0}
  %second = (bf16[1048576], bf16[2097152]) all-gather-start(%w), replica_groups=SECOND, dimensions={0}
  %one = bf16[2097152] all-gather-done(%first)
  ROOT %other = bf16[2097152] all-gather-done(%second)
}
"""
BETWEEN = "{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"
INSIDE = "{{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}"
ACROSS = "{{0,4},{1,5},{2,6},{3,7},{8,12},{9,13},{10,14},{11,15}}"


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [(BETWEEN, BETWEEN, True), (INSIDE, ACROSS, True), (BETWEEN, INSIDE, False)],
    ids=["the network of one axis", "NVLink of two axes", "network and NVLink"],
)
def test_links_carry_first_what_was_started_first(first: str, second: str, shared: bool) -> None:
    target, mesh = parse_target("h100:2x8"), {"data": 2, "fsdp": 2, "context": 2, "tensor": 2}

    def seconds(*groups: str) -> tuple[list[float], float]:
        text = TWO_GATHERS.replace("FIRST", groups[0]).replace("SECOND", groups[-1])
        text = (
            text
            if len(groups) > 1
            else "".join(s for s in text.splitlines(True) if "%second" not in s)
        )
        played = play(
            text.replace("%one =", "ROOT %one =") if len(groups) == 1 else text, target, mesh
        )
        return [
            span.seconds for span in played.spans if span.kind == "collective"
        ], played.step_seconds

    ((one,), _), ((other,), _) = seconds(first), seconds(second)
    both, step = seconds(first, second)
    if shared:
        assert both == pytest.approx([one, one + other]) and step == pytest.approx(one + other)
    else:
        assert both == pytest.approx([one, other]) and step == pytest.approx(max(one, other))


PERMUTES = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[1048576]) -> bf16[1048576] {
  %x = bf16[1048576] parameter(0)
  %first = (bf16[1048576], bf16[1048576]) collective-permute-start(%x), source_target_pairs=FIRST
  %second = (bf16[1048576], bf16[1048576]) collective-permute-start(%x), source_target_pairs=SECOND
  %one = bf16[1048576] collective-permute-done(%first)
  ROOT %other = bf16[1048576] collective-permute-done(%second)
}
"""


@pytest.mark.parametrize(
    ("chip", "ring", "forward", "both"),
    [
        # Messages on the busiest link of a permute, and of one each way around the ring.
        ("v5p", [0, 1, 2, 3], 1, 1),  # closed: one direction each
        ("v5p", [0, 2, 1, 3], 2, 4),  # messages of two hops; both directions have some of each way
        ("v5e", [0, 1, 2, 3], 1, 2),  # open: the last message goes back over all links
        ("v5e", [0, 2, 3, 1], 1, 2),  # along the line and back
    ],
)
def test_permutes_share_the_links_that_their_messages_pass(
    chip: str, ring: list[int], forward: int, both: int
) -> None:
    target = Target(chip, CHIPS[chip], (4, 1, 1)[: CHIPS[chip].interconnect.dims])  # type: ignore[union-attr]
    follows = {device: ring[(place + 1) % 4] for place, device in enumerate(ring)}
    ways = [
        ",".join(f"{{{a},{b}}}" for a, b in pairs)
        for pairs in (follows.items(), [(b, a) for a, b in follows.items()])
    ]
    played = play(
        PERMUTES.replace("FIRST", f"{{{ways[0]}}}").replace("SECOND", f"{{{ways[1]}}}"), target
    )
    spans = [span.seconds for span in played.spans if span.kind == "collective"]
    message = 2**21 / target.chip.interconnect.link_bandwidth
    assert spans[0] == pytest.approx(forward * message + 1e-6)
    assert played.step_seconds == pytest.approx(both * message, rel=0.1)


BESIDE = """HloModule step, is_scheduled=true, num_partitions=16

ENTRY %main (w: bf16[FLYING], x: bf16[WAITED]) -> bf16[OUT] {
  %w = bf16[FLYING] parameter(0)
  %x = bf16[WAITED] parameter(1)
  %first = (bf16[FLYING], bf16[OUT]) all-gather-start(%w), replica_groups=GROUPS, dimensions={0}
  %waited = bf16[2,WAITED] all-gather(%x), replica_groups=GROUPS, dimensions={0}
  ROOT %one = bf16[OUT] all-gather-done(%first)
}
"""


@pytest.mark.parametrize(("flying", "waited"), [(2**20, 2**12), (2**12, 2**20)])
def test_a_collective_that_the_program_waits_for_has_half_of_a_link_in_use(
    flying: int, waited: int
) -> None:
    target, mesh = parse_target("h100:2x8"), {"data": 2, "fsdp": 2, "context": 2, "tensor": 2}
    text = (
        BESIDE.replace("FLYING", str(flying))
        .replace("WAITED", str(waited))
        .replace("OUT", str(2 * flying))
    )

    def seconds(text: str) -> dict[str, float]:
        played = play(text.replace("GROUPS", BETWEEN), target, mesh)
        return {
            span.instruction: span.seconds for span in played.spans if span.kind == "collective"
        }

    both, one = (
        seconds(text),
        seconds("".join(line for line in text.splitlines(True) if "%waited" not in line)),
    )
    alone = seconds(
        "".join(line for line in text.splitlines(True) if "%first" not in line).replace(
            "%x = ", "ROOT %x = "
        )
    )
    first, second = one["first"], alone["waited"]
    assert both["waited"] == pytest.approx(second + min(first, second))
    assert both["first"] == pytest.approx(first + min(first, second))


BRANCHES = """HloModule step, is_scheduled=true

%skip (x: f32[1024,1024]) -> f32[1024,1024] {
  ROOT %x = f32[1024,1024] parameter(0)
}

%forward (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024] parameter(0)
  ROOT %y = f32[1024,1024] negate(%x), metadata={op_name="jit(f)/pipeline: forward/neg"}
}

%backward (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024] parameter(0)
  %y = f32[1024,1024] negate(%x), metadata={op_name="jit(f)/pipeline: backward/neg"}
  ROOT %z = f32[1024,1024] negate(%y)
}

ENTRY %main (runs: s32[], x: f32[1024,1024]) -> f32[1024,1024] {
  %runs = s32[] parameter(0)
  %x = f32[1024,1024] parameter(1)
  %y = f32[1024,1024] conditional(%runs, %x, %x), branch_computations={%skip, %forward}
  ROOT %out = f32[1024,1024] conditional(%runs, %y, %y), branch_computations={%skip, %backward}
}
"""


def test_a_tick_lasts_as_long_as_its_busiest_stage() -> None:
    taken = {
        "pipeline: forward": BranchScope(2, 5),
        "pipeline: backward": BranchScope(2, 5, recomputes=True),
    }
    module = parse_module(BRANCHES, taken)
    one = 2 * 2**22 / 2.765e12
    forward, backward = frozenset({"pipeline: forward"}), frozenset({"pipeline: backward"})
    # Of five ticks one has forward passes alone, two have each pass on another stage, one has both on one stage.
    ticks = {
        frozenset({forward}): 1, frozenset({backward, forward}): 2, frozenset({backward | forward}): 1,
        frozenset({backward}): 1,
    }  # fmt: skip
    played = simulate_schedule(module, devices_of(V5P), {"stage": 4}, ticks=ticks)
    assert played.step_seconds == pytest.approx((1 + 2 * 2 + 3 + 2) * one / 5)
    assert played.by_kind["memory"] == pytest.approx((2 * one + 2 * 2 * one) / 5)
    assert played.bubble == pytest.approx(played.step_seconds - played.by_kind["memory"])


@pytest.mark.parametrize(
    "file", sorted(TEXTS.rglob("*.hlo")), ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_programs_of_every_chip_are_played(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    sizes = {
        "v5e": "v5e:4x4", "v5p": "v5p:2x2x4", "tpu7x": "tpu7x:2x2x2", "h100": "h100:2x8", "slices": "2*v5e:4x4",
        "sparsecore": "v5p:2x2x4", "precision": "h100:2x8", "kernels": "v5p:2x2x1",
    }  # fmt: skip
    target = parse_target(sizes[file.parent.name])
    devices = max(parse_module(text).num_devices, 1)
    assert devices <= target.devices
    played = play(text, target, mesh={"fsdp": devices})
    assert played.step_seconds > 0
    assert sum(n for k, n in played.by_kind.items()) == pytest.approx(played.step_seconds, rel=1e-6)
    assert sum(played.exposed.values()) == pytest.approx(played.by_kind.get("exposed", 0.0))
    assert all(span.start <= played.step_seconds * (1 + 1e-9) for span in played.spans)
    assert played.doubt == "" and played.step_seconds >= played.floor_seconds


def test_costs_need_no_estimate() -> None:
    """A GPU's program carries no cycles: FLOPs over the peak."""
    target = parse_target("h100:4")
    module = parse_module(PROGRAM.replace("CYCLES", "9"))
    cost = CostModel(target.chip, WHOLE).cost_of(module.entry.instructions["after"])
    assert cost.kind == "matmul"
    assert cost.seconds == pytest.approx(max(2 * 1024**3 / 989e12, 3 * 2**21 / 3.35e12))


CUDNN = """HloModule step, is_scheduled=true, num_partitions=1

ENTRY %main (q: bf16[2,512,8,128], k: bf16[2,512,2,128], bias: bf16[2,1,512,512]) -> bf16[2,8,512,128] {
  %q = bf16[2,512,8,128] parameter(0)
  %k = bf16[2,512,2,128] parameter(1)
  %bias = bf16[2,1,512,512] parameter(2)
  %forward = (bf16[2,8,512,128], f32[2,8,512], u8[0]) custom-call(%q, %k, %k, %bias), custom_call_target="__cudnn$fmhaScaleBiasSoftmax", api_version=API_VERSION_STATUS_RETURNING
  %out = bf16[2,8,512,128] get-tuple-element(%forward), index=0
  %sums = f32[2,8,512] get-tuple-element(%forward), index=1
  %backward = (bf16[2,8,512,128], bf16[2,2,512,128], bf16[2,2,512,128], u8[0]) custom-call(%q, %k, %k, %sums, %out, %bias, %out), custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward", api_version=API_VERSION_STATUS_RETURNING
  ROOT %end = bf16[2,8,512,128] get-tuple-element(%backward), index=0
}
"""  # noqa: E501


def test_attention_of_cudnn_is_priced_by_its_shapes() -> None:
    target = parse_target("h100:1")
    module = parse_module(CUDNN)
    slow = dataclasses.replace(WHOLE, attention=0.01)
    forward, backward = (
        CostModel(target.chip, slow).cost_of(module.entry.instructions[name])
        for name in ("forward", "backward")
    )
    # Two products of [512, 128] and [128, 512] for each of 2 x 8 heads; half of the keys are seen.
    product = 2 * 2 * 8 * 512 * 512 * 128
    assert forward.kind == backward.kind == "attention"
    assert forward.seconds == pytest.approx(0.5 * 2 * product / (0.01 * 989e12), rel=1e-3)
    assert backward.seconds == pytest.approx(2.5 * forward.seconds)


def test_attention_between_chunks_is_priced_by_its_own_mask() -> None:
    """A pair of chunks of a split sequence is full or diagonal; the innermost scope states the visible fraction."""
    target = parse_target("h100:1")
    slow = dataclasses.replace(WHOLE, attention=0.01)

    def seconds(scope: str) -> float:
        module = parse_module(
            CUDNN.replace(
                "api_version=API_VERSION_STATUS_RETURNING",
                f'metadata={{op_name="jit(step)/{scope}/dot_product_attention"}}',
            )
        )
        instruction = module.entry.instructions["forward"]
        return CostModel(target.chip, slow).cost_of(instruction).seconds

    whole = seconds("visible_1.000000")
    assert seconds("layers") == pytest.approx(whole / 2)
    assert seconds("jvp(visible_0.501000)/cond/visible_0.250000") == pytest.approx(whole / 4)


def test_a_tick_takes_the_rows_that_hold_a_layer() -> None:
    """A conditional inside a tick's branch has its own frequency, or none, and no bubble."""
    text = BRANCHES.replace(
        '%y = f32[1024,1024] negate(%x), metadata={op_name="jit(f)/pipeline: backward/neg"}',
        "%y = f32[1024,1024] conditional(%row, %x, %x), branch_computations={%skip, %layer}, "
        'metadata={op_name="jit(f)/pipeline: backward/cond"}',
    )
    text = text.replace(
        "%backward (x: f32[1024,1024]) -> f32[1024,1024] {\n",
        "%layer (x: f32[1024,1024]) -> f32[1024,1024] {\n  %x = f32[1024,1024] parameter(0)\n"
        '  ROOT %y = f32[1024,1024] negate(%x), metadata={op_name="jit(f)/pipeline: backward/cond/SCOPEneg"}\n}\n\n'
        "%backward (x: f32[1024,1024]) -> f32[1024,1024] {\n  %row = s32[] constant({...})\n",
    )
    taken = {
        "pipeline: forward": BranchScope(2, 5),
        "pipeline: backward": BranchScope(2, 5, recomputes=True),
    }
    ticks = {frozenset({frozenset({"pipeline: backward"})}): 5}
    one = 2 * 2**22 / 2.765e12
    for scope, rows in (("", 1.0), ("layer of blocks./", 3 / 4)):
        module = parse_module(
            text.replace("SCOPE", scope), taken | {"layer of blocks.": BranchScope(3, 4)}
        )
        played = simulate_schedule(module, devices_of(V5P), {"stage": 4}, ticks=ticks)
        own = 2 * one / 5 + 2 * (1 + rows) * one / 5
        assert played.by_kind["memory"] == pytest.approx(own)
        assert played.bubble == pytest.approx((1 + rows) * one - 2 * (1 + rows) * one / 5)


@pytest.mark.parametrize(
    ("backward", "longest"), [(BranchScope(1, 2), 1.0), (BranchScope(0, 2), 0.0)]
)
def test_a_branch_that_is_never_taken_costs_nothing(backward: BranchScope, longest: float) -> None:
    """Such as attention over several documents (kernels/cudnn.py), which takes longer than over one."""
    module = parse_module(
        BRANCHES, {"pipeline: forward": BranchScope(2, 2), "pipeline: backward": backward}
    )
    one = 2 * 2**22 / 2.765e12
    played = simulate_schedule(module, devices_of(V5P), {"stage": 4})
    assert played.step_seconds == pytest.approx(one + longest * one)


@pytest.mark.exhaustive
def test_padding_rows_add_no_flops() -> None:
    model = dataclasses.replace(MODELS["llama"], layers=3)
    device_run = device_run_of(tiny_run(model, "stage=2", microbatches=8, pipeline_schedule="1f1b"))
    flops = census_of_train_step(device_run).flops
    assert flops is not None
    forward = next(
        m.flops for m in flops.matmuls if (m.phase, m.module) == ("forward", "feed-forward")
    )
    assert forward == pytest.approx(flops.model["feed-forward"] / 3)


@pytest.mark.exhaustive
def test_a_step_is_compiled_with_the_times_that_are_predicted_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA:CPU takes a profile and does not use it."""
    monkeypatch.setattr(Settled, "scheduled_by_price", True)
    target, given = parse_target("h100:4"), list[bytes]()
    plain = device_run_of(tiny_run(MODELS["llama"], "fsdp=4"))

    def profile_of(device_run: DeviceRun, lowered: Any) -> dict[str, Any]:
        given.append(profile_for(target)(device_run, lowered)["fdo_profile"])
        return {"fdo_profile": given[-1]}

    device_run = dataclasses.replace(plain, profile_of=profile_of)
    step = CompiledTrainStep(device_run, device_run.abstract_batch)
    rows = re.findall(r'costs { name: "([\w.-]+)" cost_us: ([\d.]+) }', given[0].decode())
    seconds = {name: float(us) / 1e6 for name, us in rows}
    played = simulate_run(parse_module(step.program_text()), device_run, target)
    sent = {span.instruction: span.seconds for span in played.spans if span.kind == "collective"}
    assert len(rows) == len(given[0].splitlines()) and len(sent) > 4
    assert {name: seconds[name] for name in sent} == pytest.approx(sent, abs=1e-9)
    batch = random_batch(device_run)
    unscheduled = CompiledTrainStep(plain, plain.abstract_batch)
    assert len(given) == 1
    losses = [each(plain.initial_state(), batch)[1]["loss"] for each in (unscheduled, step)]
    assert losses[0] == losses[1]
    census_of_train_step(device_run)  # without a target it is scheduled as `train` schedules it
    assert len(given) == 2 and len({*given}) == 1


@pytest.mark.exhaustive
def test_train_takes_them_where_the_chip_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, losses = list[int](), list[float]()
    profile = SimulatedSchedule.profile.fget  # type: ignore[attr-defined]

    def counted(schedule: SimulatedSchedule) -> bytes:
        made.append(len(schedule.spans))
        return bytes(profile(schedule))

    monkeypatch.setattr(SimulatedSchedule, "profile", property(counted))
    monkeypatch.setattr(Settled, "scheduled_by_price", True)
    monkeypatch.setattr(
        local_planner, "local_target", lambda devices, calibration: (parse_target("h100:2"), "")
    )
    for name, planner in (("plain", None), ("scheduled", local_planner.LocalPlanner([], None))):
        monkeypatch.setattr(training, "_local_planner", lambda devices, planner=planner: planner)
        monkeypatch.setattr(local_planner.LocalPlanner, "forecast", lambda *_: None)
        monkeypatch.setattr(local_planner.LocalPlanner, "choose", lambda planner, run: run)
        run = mw.recipe("tiny", mesh="fsdp=2", layers=2, steps=2, sample=0, eval_samples=16)
        losses.append(mw.train(run, out=tmp_path / name, progress="none").loss)
        assert bool(made) == (name == "scheduled")
    assert losses[0] == losses[1]


def test_a_tick_counts_as_much_as_its_costliest_stage() -> None:
    table = device_run_of(tiny_run(MODELS["llama"], "stage=2", microbatches=4)).schedule_table
    runs = (table.kind != IDLE).any(axis=2)
    assert sum(tick_scopes(table, [1.0] * len(table.parts.stage_of)).values()) == table.ticks
    costs = [1.5 if stage == 0 else 0.5 for stage in table.parts.stage_of]
    assert (
        sum(tick_scopes(table, costs).values())
        == 1.5 * runs[:, 0].sum() + 0.5 * (~runs[:, 0]).sum()
    )
