"""The comparison with MaxText (bench/peers.py): its second reading, its search, its tables. Neither needs MaxText."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.hardware.chips import CHIPS
from meshwright.hardware.machine import compiler_options_of

BENCH = Path(__file__).parents[1] / "bench"
TEXTS = Path(__file__).parent / "analysis" / "texts"


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest):
    """Imports the modules of bench/ by name, as its scripts do among themselves."""
    sys.path.insert(0, str(BENCH))
    request.addfinalizer(lambda: sys.path.remove(str(BENCH)))

    def find(name: str) -> ModuleType:
        return importlib.import_module(name)

    return find


@pytest.mark.parametrize("name", ["second_reading", "hlo_lines", "maxtext_compile"])
def test_the_second_reading_shares_nothing_with_meshwright(name: str) -> None:
    tree = ast.parse((BENCH / f"{name}.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not {module for module in imported if module.startswith("meshwright")}


# A windowed einsum: eight shards, two a trip, so four trips of one matmul and one permute, then a synchronous gather.
_WINDOWED = """HloModule windowed, is_scheduled=true

%body (p: (bf16[1024,512], bf16[512,256], u32[])) -> (bf16[1024,512], bf16[512,256], u32[]) {
  %p = (bf16[1024,512]{1,0}, bf16[512,256]{1,0}, u32[]) parameter(0)
  %two = u32[] constant(2)
  %x = bf16[1024,512]{1,0} get-tuple-element(%p), index=0
  %w = bf16[512,256]{1,0} get-tuple-element(%p), index=1
  %i = u32[] get-tuple-element(%p), index=2
  %start = (bf16[512,256]{1,0}, bf16[512,256]{1,0}) collective-permute-start(%w), source_target_pairs={{0,1},{1,0}}
  %y = bf16[1024,256]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={CYCLES}
  %done = bf16[512,256]{1,0} collective-permute-done(%start)
  %next = u32[] add(%i, %two)
  ROOT %out = (bf16[1024,512]{1,0}, bf16[512,256]{1,0}, u32[]) tuple(%x, %done, %next)
}

%condition (q: (bf16[1024,512], bf16[512,256], u32[])) -> pred[] {
  %q = (bf16[1024,512]{1,0}, bf16[512,256]{1,0}, u32[]) parameter(0)
  %eight = u32[] constant(8)
  %j = u32[] get-tuple-element(%q), index=2
  ROOT %less = pred[] compare(%j, %eight), direction=LT
}

ENTRY %main (a: bf16[1024,512], b: bf16[512,256]) -> bf16[4096,512] {
  %a = bf16[1024,512]{1,0} parameter(0)
  %b = bf16[512,256]{1,0} parameter(1)
  %zero = u32[] constant(0)
  %state = (bf16[1024,512]{1,0}, bf16[512,256]{1,0}, u32[]) tuple(%a, %b, %zero)
  %loop = (bf16[1024,512]{1,0}, bf16[512,256]{1,0}, u32[]) while(%state), condition=%condition, body=%body
  %z = bf16[1024,512]{1,0} get-tuple-element(%loop), index=0
  ROOT %all = bf16[4096,512]{1,0} all-gather(%z), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""


def _windowed(cycles: int) -> str:
    return _WINDOWED.replace("CYCLES", f'"estimated_cycles":"{cycles}"')


def test_a_windowed_einsum_that_steps_by_two_counts_right(bench) -> None:
    # 2 * 1024 * 512 * 256 FLOPs, four times; 1,750 cycles at 1.75 GHz are 1 us, the permute's 262,144 bytes 2.9 us.
    reading = bench("second_reading").read_program(_windowed(1750), "v5p:2x2x1")
    gather = 4 * 1024 * 512 * 2 * 3 / 4 / (2 * 90e9)
    permute = 512 * 256 * 2 / 90e9
    assert reading["flops"] == 4 * 2 * 1024 * 512 * 256
    assert reading["seconds"] == pytest.approx(4 * permute + gather)
    assert reading["exposed"] == pytest.approx(4 * (permute - 1e-6) + gather)
    assert reading["sent"] == 4 * 512 * 256 * 2 + 4 * 1024 * 512 * 2 * 3 / 4
    assert reading["above_floor"] and not reading["doubts"]


def test_a_collective_that_fits_behind_a_matmul_is_not_exposed(bench) -> None:
    reading = bench("second_reading").read_program(_windowed(17500), "v5p:2x2x1")
    assert reading["by_kind"]["matmul"] == pytest.approx(4 * 10e-6)
    assert reading["exposed"] == pytest.approx(4 * 1024 * 512 * 2 * 3 / 4 / (2 * 90e9))


def test_a_known_trip_count_is_believed(bench) -> None:
    text = _windowed(1750).replace(
        ", body=%body", ', body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    )
    assert (
        bench("second_reading").read_program(text, "v5p:2x2x1")["flops"] == 3 * 2 * 1024 * 512 * 256
    )


def test_a_loop_that_ends_on_data_is_named_as_a_doubt(bench) -> None:
    text = _windowed(1750).replace(
        "%eight = u32[] constant(8)", "%eight = u32[] get-tuple-element(%q), index=1"
    )
    assert "no trip count" in bench("second_reading").read_program(text, "v5p:2x2x1")["doubts"][0]


def test_no_matmul_is_faster_than_the_peak(bench) -> None:
    reading = bench("second_reading").read_program(_windowed(1), "v5p:2x2x1")
    assert reading["by_kind"]["matmul"] == pytest.approx(reading["floor"])


# Bytes that one device of fsdp=4, tensor=2 sends, by hand from analysis/programs.py and what TPU compilers make of
# it (test_ledger.py): payload * (n - 1) / n for a gather or scatter over n, twice that for a sum, a block for a shift.
_SENT = {
    "v5p/fsdp-layers.hlo": 5120 * 3 / 4,
    "v5p/fsdp-gradient.hlo": 256 * 3 / 4 + 2 * 512 * 3 / 4,
    "v5p/megatron.hlo": 2 * 512 / 2,
    "v5p/ring.hlo": 4 * 128,
    "v5p/nested-loops.hlo": 2 * 15 * 128 / 2 + 3 * 128,
    "v5p/large-layers.hlo": 3 * 2**19 * 3 / 4 + 3 * 2**20 * 3 / 4,
    "v5e/large-layers.hlo": 3 * 2**19 * 3 / 4 + 3 * 2**20 * 3 / 4,
    "sparsecore/v5p.hlo": 3 * 2**25 * 3 / 4 + 3 * 2**26 * 3 / 4,
}


@pytest.mark.parametrize("text", _SENT)
def test_sent_bytes_are_those_counted_by_hand(bench, text: str) -> None:
    machine = "v5e:2x4" if "v5e" in text else "v5p:2x2x1" if "sparse" in text else "v5p:2x2x2"
    reading = bench("second_reading").read_program((TEXTS / text).read_text(), machine)
    assert reading["sent"] == _SENT[text]
    assert reading["above_floor"]


def test_flops_of_a_gradient_through_three_layers(bench) -> None:
    # Forward, and the gradients of input and weight, each [1024, 4096] x [4096, 4096].
    text = (TEXTS / "sparsecore" / "v5p.hlo").read_text()
    reading = bench("second_reading").read_program(text, "v5p:2x2x1")
    assert reading["flops"] == 3 * 3 * 2 * 1024 * 4096 * 4096
    assert 0 < reading["exposed"] < reading["seconds"]


def test_a_dump_is_read_as_its_program(bench) -> None:
    # A dump writes `%p#2` for what the text of a compiled program has an instruction for.
    dumped = _WINDOWED
    for name, tuple_and_index in re.findall(
        r"\n  %(\w+) = \S+ get-tuple-element\((%\w+\), index=\d+)", _WINDOWED
    ):
        dumped = re.sub(rf"\n  %{name} = \S+ get-tuple-element.*", "", dumped)
        dumped = re.sub(rf"%{name}\b", tuple_and_index.replace("), index=", "#"), dumped)
    assert "#" in dumped and "get-tuple-element" not in dumped
    restored = bench("hlo_lines").with_elements(dumped)
    read = bench("second_reading").read_program
    assert read(restored, "v5p:2x2x2") == read(_WINDOWED, "v5p:2x2x2")
    assert read(dumped, "v5p:2x2x2")["doubts"]


def test_taps_on_padding_multiply_nothing(bench) -> None:
    # TPUs write an output of two dimensions, 32 x 8, as a window of 32 that slides over padding.
    rest = ", window={size=1x32 pad=0_0x31_31 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f"
    flops = bench("hlo_lines").convolution_flops(
        (4, 64, 512, 1), (512, 32, 8, 1), (4, 64, 32, 8), rest
    )
    assert flops == 2 * 4 * 64 * 512 * 32 * 8


@pytest.mark.parametrize(
    "rest, size",
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['data'=1,'fsdp'=16] {'fsdp'}, dimensions={0}", 16),
        ("replica_groups=mesh['a'=4,'b'=4] {'a','b':(1)2}", 8),
        ("replica_groups={}", 8),
    ],
)
def test_group_sizes(bench, rest: str, size: int) -> None:
    assert bench("hlo_lines").group_size(rest, 8) == size


def test_links_of_a_group(bench) -> None:
    cube, board = (bench("second_reading").machine_of(text) for text in ("v5p:4x4x8", "v5p:2x2x4"))
    assert cube.ring_bandwidth(4) == 2 * 90e9  # one closed ring
    assert cube.ring_bandwidth(16) == 4 * 90e9
    assert cube.ring_bandwidth(128) == 6 * 90e9
    assert board.ring_bandwidth(16) == 3 * 90e9  # no dimension closes below a cube of 4 x 4 x 4
    assert bench("second_reading").machine_of("v6e:16x16").ring_bandwidth(256) == 4 * 90e9


def test_both_sides_are_searched_alike(bench) -> None:
    cases = bench("peer_cases")
    for case in cases.CASES.values():
        options = {side: list(cases.option_settings(side, case)) for side in ("maxtext", "ours")}
        assert [s.options for s in options["ours"]] == [s.options for s in options["maxtext"]]
        for side, settings in options.items():
            assert {s.remat for s in settings} <= {"full", None}
            found = {s.remat for s in cases.remat_settings(side, settings[-1])}
            assert found | {"full"} == set(cases.REMAT[side])
            every = list(cases.all_settings(side, case))
            assert side == "ours" or cases.SHIPPED in settings
            assert len({s.slug() for s in every}) == len(every)
            assert {*settings, *cases.remat_settings(side, settings[-1])} <= set(every)


def test_the_search_has_the_options_that_ours_takes_by_default(bench) -> None:
    for chip, sets in bench("peer_cases").OPTION_SETS.items():
        taken = {"v5p": bench("peer_cases").QUEUED, "v6e": bench("peer_cases").ALL}[chip]
        assert dict(option.split("=") for option in sets[taken]) == compiler_options_of(
            CHIPS[chip], ("auto",)
        )


def test_arguments_of_both_sides(bench) -> None:
    cases = bench("peer_cases")
    case, tuned = cases.CASES["7b"], cases.Setting("full", cases.VMEM, windowed=False)
    assert cases.arguments("ours", case, cases.SHIPPED) == [
        "llama2-7b", "--on", "v5p:2x2x4", "--mesh", "fsdp=16", "--batch", "64", "--seq", "4096",
    ]  # fmt: skip
    assert not [
        word
        for word in cases.arguments("maxtext", case, cases.SHIPPED)
        if "xla" in word or "remat" in word
    ]
    assert cases.arguments("ours", case, cases.Setting("full"))[-1] == "--training.compiler-options"
    flags = cases.arguments("maxtext", case, tuned)[-1].removeprefix("compile_xla_flags=").split()
    ours = cases.arguments("ours", case, cases.Setting("full", cases.VMEM))
    assert [flag.removeprefix("--") for flag in flags] == [*ours[ours.index("--training.compiler-options") + 1 :],
                                                           cases.NOT_WINDOWED]  # fmt: skip


def _row(side: str, remat: str | None, seconds: float) -> dict[str, object]:
    read = {"seconds": seconds, "exposed": 0.1, "sent": 1e9, "doubts": [], "floor": 0.5}
    return {
        "case": "7b", "side": side, "setting": remat or "as shipped", "remat": remat, "census": read, "second": read,
        "flops": 1e12, "flops_ratio": 1.3, "peak": 2**30, "heap": 2**30, "above_floor": True, "compile_seconds": 60.0,
        "theory": {"model": 7e14},
    }  # fmt: skip


def test_the_page_has_the_tables_of_the_results_and_the_records_of_now(bench) -> None:
    """Each of our predictions stands beside the highest measured MFU, and says whether it is above."""
    page = (BENCH.parent / "docs" / "peers.md").read_text(encoding="utf-8")
    rows = json.loads((BENCH / "results" / "peers.json").read_text(encoding="utf-8"))
    assert bench("peer_tables").fill(page, rows) == page
    assert "llama2-70b" in page and "87.6% (above)" in page


def test_a_ratio_stands_beside_both_settings(bench) -> None:
    tables = bench("peer_tables")
    rows = [_row("maxtext", None, 3.0), _row("maxtext", "minimal", 2.0), _row("ours", None, 1.8),
            _row("ours", "projections", 1.9)]  # fmt: skip
    lines = tables.comparison(rows).splitlines()
    assert "as shipped | 3.00, 3.00 | as shipped | 1.80, 1.80 | 0.60, 0.60" in tables.comparison(
        rows
    )
    assert "minimal | 2.00, 2.00 | as shipped | 1.80, 1.80 | 0.90, 0.90" in lines[-1]
    page = tables.fill(f"before\n{tables.BEGIN}old\n{tables.END}after\n", rows)
    assert page.startswith("before") and page.endswith("after\n") and "old" not in page


def test_a_program_that_does_not_fit_has_no_ratio(bench) -> None:
    tables = bench("peer_tables")
    failed = {
        "case": "7b",
        "side": "ours",
        "setting": "as shipped",
        "remat": None,
        "error": "RESOURCE_EXHAUSTED: HBM",
    }
    rows = [_row("maxtext", None, 3.0), failed]
    assert "does not fit" in tables.evidence(rows)
    assert "|" not in tables.comparison(rows)


def test_two_sides_are_timed_by_turns(bench) -> None:
    turns = bench("turns")
    worker = "import sys, time; sys.path.insert(0, {!r}); import turns; turns.serve(lambda n: time.sleep(n * {}))"
    sides = {name: ([sys.executable, "-c", worker.format(str(BENCH), seconds)], {}) for name, seconds in
             (("one", 0.002), ("two", 0.004))}  # fmt: skip
    times = turns.by_turns(sides, rounds=4, steps=5)
    found = turns.summary(times, "one", "two")
    assert [len(side) for side in times.values()] == [4, 4]
    assert 0.4 < found["ratio"] < 0.75
    assert "paired ratio" in turns.line_of(found, "one", "two")


def test_a_side_that_ends_is_named(bench) -> None:
    with pytest.raises(SystemExit, match="before its first step"):
        bench("turns").by_turns({"gone": ([sys.executable, "-c", "print('hello')"], {})})
