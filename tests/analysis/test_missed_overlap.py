"""Exposed collectives that computation could hide are found at their line, with that computation; others are not."""

import re
from pathlib import Path

import pytest

from meshwright.hardware.chips import CHIPS, Efficiency
from xlacensus.collective_lints import MIN_SENT_BYTES
from xlacensus.hlo.ledger import read_ledger
from xlacensus.hlo.parser import parse_module
from xlacensus.interconnect import all_coordinates
from xlacensus.overlap_lint import lint_missed_overlap
from xlacensus.schedule import TargetDevices, simulate_schedule

V5P = CHIPS["v5p"]
WHOLE = Efficiency(1, 1, 1, 1, 1, 1, 1, 1)
TARGET = TargetDevices(V5P, (4, 1, 1), tuple(all_coordinates(V5P, (4, 1, 1), 1)), WHOLE)

# Of two products one needs the gathered array, the other does not. 8 MiB over four chips of a ring take about 50 us, a
# product of 175,000 cycles at 1.75 GHz 100 us.
ENTRY = """HloModule step, is_scheduled=true, num_partitions=4

%product (a: bf16[2048,2048], b: bf16[2048,2048]) -> bf16[2048,2048] {
  %a = bf16[2048,2048] parameter(0)
  %b = bf16[2048,2048] parameter(1)
  ROOT %dot = bf16[2048,2048] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (w: bf16[512,2048], x: bf16[2048,2048]) -> bf16[2048,2048] {
  %w = bf16[512,2048] parameter(0)
  %x = bf16[2048,2048] parameter(1)
LINES
}
"""
GATHER = 'replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="gather" source_file="layer.py" source_line=7}'
COST = 'kind=kOutput, calls=%product, config={"estimated_cycles":"175000"}'
SYNC = f"""  %whole = bf16[2048,2048] all-gather(%w), {GATHER}
  %other = bf16[2048,2048] fusion(%x, %x), {COST}
  ROOT %out = bf16[2048,2048] fusion(%other, %whole), {COST}"""
ASYNC = f"""  %start = (bf16[512,2048], bf16[2048,2048]) all-gather-start(%w), {GATHER}
  %other = bf16[2048,2048] fusion(%x, %x), {COST}
  %whole = bf16[2048,2048] all-gather-done(%start)
  ROOT %out = bf16[2048,2048] fusion(%other, %whole), {COST}"""
TOO_LATE = f"""  %other = bf16[2048,2048] fusion(%x, %x), {COST}
  %start = (bf16[512,2048], bf16[2048,2048]) all-gather-start(%w), {GATHER}
  %whole = bf16[2048,2048] all-gather-done(%start)
  ROOT %out = bf16[2048,2048] fusion(%other, %whole), {COST}"""
NEEDED = f"""  %whole = bf16[2048,2048] all-gather(%w), {GATHER}
  %other = bf16[2048,2048] fusion(%whole, %x), {COST}
  ROOT %out = bf16[2048,2048] fusion(%other, %whole), {COST}"""
TOO_SHORT = SYNC.replace("175000", "1750")

# Ten layers: each gathers its slice of the stacked weights, multiplies, and reduces something.
LOOP = """HloModule step, is_scheduled=true, num_partitions=4

%product (a: bf16[2048,2048], b: bf16[2048,2048]) -> bf16[2048,2048] {
  %a = bf16[2048,2048] parameter(0)
  %b = bf16[2048,2048] parameter(1)
  ROOT %dot = bf16[2048,2048] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], bf16[2048,2048], bf16[10,512,2048])) -> (s32[], bf16[2048,2048], bf16[10,512,2048]) {
  %p = (s32[], bf16[2048,2048], bf16[10,512,2048]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[2048,2048] get-tuple-element(%p), index=1
  %stack = bf16[10,512,2048] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
LINES
  ROOT %out = (s32[], bf16[2048,2048], bf16[10,512,2048]) tuple(%next, %y, %stack)
}

%condition (p: (s32[], bf16[2048,2048], bf16[10,512,2048])) -> pred[] {
  %p = (s32[], bf16[2048,2048], bf16[10,512,2048]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[2048,2048], w: bf16[10,512,2048]) -> bf16[2048,2048] {
  %x = bf16[2048,2048] parameter(0)
  %w = bf16[10,512,2048] parameter(1)
  %zero = s32[] constant(0)
  %state = (s32[], bf16[2048,2048], bf16[10,512,2048]) tuple(%zero, %x, %w)
  %loop = (s32[], bf16[2048,2048], bf16[10,512,2048]) while(%state), condition=%condition, body=%body
  ROOT %result = bf16[2048,2048] get-tuple-element(%loop), index=1
}
"""
LAYER = f"""  %slice = bf16[512,2048] fusion(%stack, %i), kind=kLoop, calls=%slicing
  %whole = bf16[2048,2048] all-gather(%slice), {GATHER}
  %y = bf16[2048,2048] fusion(%x, %whole), {COST}"""
SUM = 'replica_groups={{0,1,2,3}}, to_apply=%add, metadata={op_name="sum" source_file="layer.py" source_line=9}'
# The gathered array goes into a sum that only the end of the loop needs.
BEHIND = f"""  %y = bf16[2048,2048] fusion(%x, %x), {COST}
  %part = bf16[512,2048] slice(%y), slice={{[0:512], [0:2048]}}
  %whole = bf16[2048,2048] all-gather(%part), {GATHER}
  %kept = bf16[10,512,2048] bitcast(%whole)"""
CRITICAL = f"""  %z = bf16[2048,2048] fusion(%x, %x), {COST}
  %y = bf16[2048,2048] all-reduce(%z), {SUM}"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            ENTRY.replace("LINES", SYNC),
            "other (100 us), which does not depend on it, could run beside it",
        ),
        (
            ENTRY.replace("LINES", TOO_LATE),
            "other (100 us), which does not depend on it, could run beside it",
        ),
        (LOOP.replace("LINES", LAYER), "could run in the iteration before"),
        (
            LOOP.replace("LINES", BEHIND).replace("%y, %stack)", "%y, %kept)"),
            "could run in the iteration after",
        ),
    ],
)
def test_a_planted_wait_is_found(text: str, reason: str) -> None:
    module = parse_module(text)
    schedule = simulate_schedule(module, TARGET, {"fsdp": 4})
    (found,) = lint_missed_overlap(module, schedule, read_ledger(module, {"fsdp": 4}))
    assert (
        found.kind == "overlap"
        and found.line == "layer.py:7"
        and "all-gather over fsdp" in found.subject
    )
    assert reason in found.reason and found.fix
    (waited,) = re.findall(r"waits ([\d.]+) us|$", found.reason)[:1]
    exposed = sum(schedule.exposed.values())
    assert not waited or float(waited) == pytest.approx(1e6 * exposed, abs=1)
    assert found.bytes == 2048 * 2048 * 2 * 3 // 4 * (10 if "while" in text else 1)


@pytest.mark.parametrize(
    "text",
    [
        ENTRY.replace("LINES", ASYNC),  # hidden already
        ENTRY.replace("LINES", NEEDED),  # all work needs it
        ENTRY.replace("LINES", TOO_SHORT),  # the other work is too short
        LOOP.replace("LINES", CRITICAL),  # the next iteration needs it at once
    ],
)
def test_a_wait_that_nothing_could_hide_is_not_reported(text: str) -> None:
    module = parse_module(text)
    schedule = simulate_schedule(module, TARGET, {"fsdp": 4})
    assert list(lint_missed_overlap(module, schedule, read_ledger(module, {"fsdp": 4}))) == []


def test_work_hides_one_collective_only() -> None:
    """Two gathers beside one product: the second has nothing left to hide it."""
    second = (
        SYNC.replace("%whole =", "%again =")
        .replace("%out =", "%ignored =")
        .replace("ROOT %ignored", "%ignored")
    )
    lines = "\n".join([*second.splitlines()[:1], *SYNC.splitlines()[:2]])
    lines += f"\n  %sum = bf16[2048,2048] fusion(%again, %whole), {COST}"
    lines += f"\n  ROOT %out = bf16[2048,2048] fusion(%other, %sum), {COST}"
    module = parse_module(ENTRY.replace("LINES", lines))
    schedule = simulate_schedule(module, TARGET, {"fsdp": 4})
    (found,) = lint_missed_overlap(module, schedule, read_ledger(module, {"fsdp": 4}))
    assert "1 x" in found.reason


@pytest.mark.parametrize("target", ["v5p", "v5e", "h100"])
def test_small_programs_of_the_compilers_have_nothing_to_hide_behind(target: str) -> None:
    """Their collectives are latency, and their products are shorter."""
    chip, shape = CHIPS[target], {"v5p": (2, 2, 2), "v5e": (2, 4), "h100": (1, 8)}[target]
    devices = TargetDevices(chip, shape, tuple(all_coordinates(chip, shape, 1)), WHOLE)
    for file in sorted((Path(__file__).parent / "texts" / target).glob("*.hlo")):
        module, mesh = parse_module(file.read_text()), {"fsdp": 4, "tensor": 2}
        schedule = simulate_schedule(module, devices, mesh)
        found = list(
            lint_missed_overlap(module, schedule, read_ledger(module, mesh), MIN_SENT_BYTES)
        )
        assert found == [], file.name
