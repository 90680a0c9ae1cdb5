"""Custom calls: priced from their shapes, or named; a census that cannot be right says so."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.hardware.chips import CHIPS, Efficiency
from meshwright.views.census_page import census_page, schedule_blocks
from xlacensus.hlo.flops import (
    KernelWork,
    Skipped,
    kernel_work,
    least_flops,
    read_matmuls,
    unpriced_kernels,
)
from xlacensus.hlo.parser import Module, parse_module
from xlacensus.program_census import FlopsBand, ProgramFacts, doubts_of
from xlacensus.schedule import (
    CostModel,
    SimulatedSchedule,
    TargetDevices,
    peak_flops,
    simulate_schedule,
)

TEXTS = Path(__file__).parent / "texts"
WHOLE = Efficiency(1, 1, 1, 1, 1, 1, 1, 1)
V5P = TargetDevices(CHIPS["v5p"], (1, 1, 1), ((0, 0, 0, 0),), WHOLE)


@pytest.fixture(scope="module")
def second_reading(request: pytest.FixtureRequest) -> ModuleType:
    """The second reading of bench/, which shares no code with the package."""
    bench = str(Path(__file__).parents[2] / "bench")
    sys.path.insert(0, bench)
    request.addfinalizer(lambda: sys.path.remove(bench))
    return importlib.import_module("second_reading")


def text_of(name: str) -> str:
    return (TEXTS / "kernels" / f"{name}.hlo").read_text()


def call(operands: str, result: str, target: str, name: str = "call", more: str = "") -> Module:
    """A program of one custom call; operands: shapes separated by semicolons."""
    given = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(operands.split(";"))]
    names = ", ".join(f"%p{i}" for i in range(len(given)))
    line = f'  ROOT %{name} = {result} custom-call({names}), custom_call_target="{target}"{more}'
    return parse_module(
        "\n".join(["HloModule step", "", "ENTRY %main () -> f32[] {", *given, line, "}"])
    )


def work_of(module: Module) -> KernelWork:
    return kernel_work(module.entry.root)


def total_flops(module: Module, skipped: Skipped | None = None) -> float:
    return sum(matmul.flops for matmul in read_matmuls(module, skipped or Skipped()))


def test_a_grouped_matmul_and_its_gradients_are_counted_from_their_shapes() -> None:
    text = text_of("ragged-dot")
    product = 2 * 2048 * 512 * 1024
    assert total_flops(parse_module(text)) == 3 * product
    # Written in the program by the kernels' author; JAX's cost analysis adds 6.3 M elementwise operations to them.
    assert [int(n) for n in re.findall(r'"flops":"(\d+)"', text)] == [product] * 3
    assert 3 * product == pytest.approx(6_448_742_400, rel=1e-3)
    assert unpriced_kernels(parse_module(text)) == {}


def test_a_flash_attention_kernel_is_counted_from_its_shapes() -> None:
    module, product = parse_module(text_of("attention")), 2 * 2 * 8 * 1024 * 1024 * 128
    # Two products forward, four and three in the backward kernels; half of the pairs are visible.
    assert total_flops(module) == 9 * product / 2
    assert total_flops(module, Skipped(causal_fraction=1.0)) == 9 * product
    # The author's estimate of the forward kernel is of all pairs, with the softmax.
    assert 2 * product == pytest.approx(8_640_266_240, rel=0.01)


def test_a_kernel_is_priced_by_its_authors_estimate_or_named() -> None:
    module = parse_module(text_of("pallas"))
    assert total_flops(module) == 123456789
    assert unpriced_kernels(module) == {"without_cost": 1}
    schedule = simulate_schedule(module, V5P, {})
    assert schedule.unpriced == {"without_cost": 1}
    assert "Not priced: without_cost (1 x)." in schedule_blocks(schedule)[-1].paragraphs


@pytest.mark.parametrize("name", ["ragged-dot", "attention"])
def test_a_second_reading_counts_the_same(second_reading: ModuleType, name: str) -> None:
    reading = second_reading.read_program(text_of(name), "v5p:1x1x1")
    assert reading["flops"] == total_flops(parse_module(text_of(name)))
    assert reading["doubts"] == [] and reading["above_floor"]


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("convForward", "f32[8,28,28,1];f32[3,4,4,1]", "f32[8,25,25,3]"),
        ("convBiasActivationForward", "f32[8,28,28,1];f32[3,4,4,1];f32[3]", "f32[8,25,25,3]"),
        ("convBackwardFilter", "f32[8,28,28,1];f32[8,25,25,3]", "f32[3,4,4,1]"),
        ("convBackwardInput", "f32[8,25,25,3];f32[3,4,4,1]", "f32[8,28,28,1]"),
    ],
)
def test_the_three_convolutions_of_cudnn_have_the_same_flops(
    target: str, operands: str, result: str
) -> None:
    """8 images, 25 x 25 positions of a kernel of 4 x 4, from 1 to 3 channels."""
    labels = ", window={size=4x4}, dim_labels=b01f_o01i->b01f"
    module = call(operands, f"({result}, u8[0])", f"__cudnn${target}", "cudnn-conv.1", labels)
    assert work_of(module).kind == "matmul" and unpriced_kernels(module) == {}
    assert total_flops(module) == 2 * 8 * 25 * 25 * 4 * 4 * 1 * 3


# MaxText's Mixtral 8x7B: 32,768 rows of 4,096 to 14,336 features, eight experts, kernels of megablox.
GROUPS = "s32[];s32[9];s32[71];s32[71];s32[1];"
ROWS = 2 * 32768 * 4096 * 14336


@pytest.mark.parametrize(
    ("name", "operands", "result"),
    [
        ("gmm.10", "bf16[32768,4096];bf16[8,4096,14336]", "bf16[32768,14336]"),
        ("gmm.5", "bf16[32768,4096];bf16[8,14336,4096]", "bf16[32768,14336]"),  # weights transposed
        ("gmm.8", "bf16[32768,14336];bf16[8,14336,4096]", "bf16[32768,4096]"),
        ("tgmm.3", "bf16[32768,14336];bf16[32768,4096]", "bf16[8,14336,4096]"),
        ("tgmm.1", "bf16[4096,32768];bf16[32768,14336]", "bf16[8,4096,14336]"),
        (
            "gmm.11",
            "bf16[32768,4096];bf16[8,4096,14336];bf16[32768,14336]",
            "bf16[32768,14336]",
        ),  # adds to a result
    ],
)
def test_megablox_multiplies_every_row_once(name: str, operands: str, result: str) -> None:
    module = call(GROUPS + operands, result, "tpu_custom_call", name)
    assert work_of(module) == KernelWork("grouped matmul", name.partition(".")[0], ROWS)
    # A buffer with room for the worst load is filled in part.
    assert total_flops(module, Skipped(group_fraction=0.25)) == ROWS / 4
    slow = dataclasses.replace(WHOLE, matmul=0.9, grouped_matmul=0.5)
    cost = CostModel(CHIPS["v5p"], slow).cost_of(module.entry.root)
    assert cost.kind == "matmul" and cost.seconds == pytest.approx(ROWS / (459e12 * 0.9 * 0.5))


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        ("bf16[65536,2048];bf16[128,2048,768];s32[641];s32[641];s32[641]", "bf16[65536,768]"),
        (
            "bf16[65536,768];bf16[128,2048,768];s32[641];s32[641];s32[641]",
            "bf16[65536,2048]",
        ),  # weights transposed
        ("bf16[65536,2048];bf16[65536,768];s32[128];s32[128]", "bf16[128,2048,768]"),
    ],
)
def test_our_triton_kernel_is_a_grouped_matmul_by_its_scope(operands: str, result: str) -> None:
    scope = ', metadata={op_name="jit(step)/experts/grouped_matmul/pallas_call"}'
    module = call(operands, result, "__gpu$xla.gpu.triton", "pallas_call.1", scope)
    assert work_of(module).kind == "grouped matmul"
    assert total_flops(module) == 2 * 65536 * 2048 * 768


@pytest.mark.parametrize(
    ("target", "operands", "result", "kind", "flops", "rate"),
    [
        ("__cublas$gemm", "bf16[64,32];bf16[32,128]", "bf16[64,128]", "matmul", 2 * 64 * 32 * 128, "bf16"),
        ("__cublas$lt$matmul", "f32[64,32];f32[128,32]", "f32[64,128]", "matmul", 2 * 64 * 32 * 128, "bf16"),
        ("__cublas$lt$matmul$f8", "f8e4m3fn[64,32];f8e5m2[128,32]", "f32[64,128]", "matmul", 2 * 64 * 32 * 128, "fp8"),
        ("__onednn$matmul", "f32[64,32];f32[32,128]", "f32[64,128]", "matmul", 2 * 64 * 32 * 128, "bf16"),
        (
            "__cudnn$blockScaledDot", "f8e4m3fn[1,64,32];f8e4m3fn[1,128,32];f8e8m0fnu[1,64,1];f8e8m0fnu[1,128,1]",
            "(bf16[1,64,128], u8[0])", "matmul", 2 * 64 * 32 * 128, "mxfp8",
        ),
        (
            "__cudnn$fmhaSoftmax", "bf16[1,512,8,64];bf16[1,512,2,64];bf16[1,512,2,64]",
            "(bf16[1,8,512,64], f32[1,8,512], u8[0])", "attention", 2 * 2 * 8 * 512 * 512 * 64, "bf16",
        ),
        ("AllocateBuffer", "f32[8]", "f32[8]", "hint", 0, "bf16"),
        ("AsyncCollectiveStart", "f32[8]", "f32[8]", "hint", 0, "bf16"),
        ("__gpu$TopK", "f32[8,128]", "(f32[8,4], s32[8,4])", "memory", 0, "bf16"),
        ("cusolver_potrf_ffi", "f32[64,64]", "(f32[64,64], s32[])", "unknown", 0, "bf16"),
        ("__cudnn$convForward", "f32[8,3,32,32];f32[16,3,3,3]", "(f32[8,16,32,32], u8[0])", "unknown", 0, "bf16"),
    ],
)  # fmt: skip
def test_routines_of_libraries(
    target: str, operands: str, result: str, kind: str, flops: float, rate: str
) -> None:
    module = call(operands, result, target)
    assert work_of(module) == KernelWork(kind, target, flops, rate)  # type: ignore[arg-type]
    assert list(unpriced_kernels(module)) == ([target] if kind == "unknown" else [])


def test_a_kernel_without_floating_point_numbers_has_no_products() -> None:
    assert (
        work_of(call("s32[8]", "(s32[9], s32[23])", "tpu_custom_call", "ragged-dot-metadata")).kind
        == "memory"
    )


def test_a_grouped_matmul_in_name_only_is_named() -> None:
    assert (
        work_of(call("bf16[64,32];bf16[16,8]", "bf16[4,4]", "tpu_custom_call", "my_gmm")).kind
        == "unknown"
    )


# A product of 2^31 FLOPs, which takes 4.7 us at the peak of a v5p, with an estimate of one cycle.
FAST = """HloModule step, is_scheduled=true

%product (a: bf16[1024,1024]) -> bf16[1024,1024] {
  %a = bf16[1024,1024]{1,0:S(1)} parameter(0)
  ROOT %dot = bf16[1024,1024] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0:S(1)} parameter(0)
  ROOT %y = bf16[1024,1024]{1,0:S(1)} fusion(%x), kind=kOutput, calls=%product, config={"estimated_cycles":"1"}
}
"""


def test_a_step_faster_than_its_flops_does_not_trust_itself() -> None:
    schedule = simulate_schedule(parse_module(FAST), V5P, {})
    assert schedule.floor_seconds == pytest.approx(2**31 / 459e12)
    assert (
        "shorter than its matrix products take" in schedule.doubt
        and "4.679e-06 s" in schedule.doubt
    )
    assert "Not to be trusted" in schedule_blocks(schedule)[-1].paragraphs[0]
    slower = simulate_schedule(parse_module(FAST.replace('"1"', '"17500"')), V5P, {})
    assert slower.doubt == ""


def test_the_floor_is_at_the_peak_of_each_type() -> None:
    assert least_flops(parse_module(FAST.replace("bf16", "f8e4m3fn"))) == {"fp8": 2.0**31}
    h100, v5p = CHIPS["h100"], CHIPS["v5p"]
    assert (
        peak_flops(h100, "fp8")
        == h100.flops_fp8
        == pytest.approx(2 * peak_flops(h100, "bf16"), rel=1e-3)
    )
    assert peak_flops(v5p, "fp8") == v5p.flops_bf16  # a v5p converts float8


def small_step(**facts: Any) -> mw.Census:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return mw.census(lambda x, w: jnp.tanh(x @ w), x, x, facts=ProgramFacts(**facts))


def test_flops_outside_of_the_models_band_are_doubted() -> None:
    flops = 2 * 64**3
    assert (
        small_step().doubts
        == small_step(flops_band=FlopsBand(0.9 * flops, 1.1 * flops)).doubts
        == ()
    )
    low, high = (
        small_step(flops_band=FlopsBand(least * flops, most * flops, "of the model"))
        for least, most in ((2, 3), (0, 0.5))
    )
    assert "the model needs at least" in low.doubts[0] and "explains at most" in high.doubts[0]
    assert (
        "does not trust itself" in str(census_page(low))
        and "does not trust itself" in census_page(low).html()
    )
    assert json.loads(json.dumps(low.to_json()))["doubts"] == list(low.doubts)


def test_a_doubt_names_the_kernels_that_are_not_counted() -> None:
    (doubt,) = doubts_of(1e9, 0.0, {"my_kernel": 3}, FlopsBand(2e9, 3e9), None)
    assert "my_kernel" in doubt
    assert (
        doubts_of(9e9, 7e9, {}, FlopsBand(1e9, 3e9), None) == ()
    )  # the excess has a finding of its own


def test_an_unpriced_kernel_stands_beside_the_total() -> None:
    census = small_step()
    census = dataclasses.replace(
        census, flops=dataclasses.replace(census.flops, unpriced={"my_kernel": 3})
    )
    assert "FLOPs unknown: my_kernel (3 x)" in str(census_page(census))
    assert "FLOPs unknown: my_kernel (3 x)" in census_page(census).html()
    assert census.to_json()["flops"]["unpriced"] == {"my_kernel": 3}


def test_a_schedule_in_json_says_whether_it_is_trusted() -> None:
    schedule: SimulatedSchedule = simulate_schedule(parse_module(FAST), V5P, {})
    census = dataclasses.replace(small_step(), schedule=schedule)
    assert census.to_json()["simulated_schedule"]["doubt"] == schedule.doubt != ""
