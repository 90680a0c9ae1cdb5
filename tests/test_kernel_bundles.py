"""Attention kernels priced by their VLIW bundles: the counts, the choice of blocks, and both readers of the price."""

import csv
import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import pytest

from meshwright.config import MeshShape
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.interconnect import machine_of_target
from meshwright.hardware.targets import parse_target
from meshwright.models.kernels.attention import AttentionShapes
from meshwright.models.kernels.splash import JAX_SPLASH, best_blocks
from meshwright.planner.estimate import estimate
from meshwright.runs.placed_run import place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.settle import settle
from xlacensus.hlo.parser import parse_module
from xlacensus.kernel_bundles import (
    STALLS,
    KernelBlocks,
    VisiblePairs,
    causal_pairs,
    find_bundles,
    kernel_of,
    kernel_seconds,
    pairs_of_fraction,
    read_bundles,
)
from xlacensus.schedule import CostModel

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))
kernel_bundles = importlib.import_module("kernel_bundles")
sys.path.remove(str(BENCH))
KERNELS = BENCH / "foresight" / "v6e-kernels.csv"
V6E = CHIPS["v6e"]
SHAPES = AttentionShapes("tpu", (128,), 8192, 8192, "bfloat16", "full", "v6e")

# Two bundles before the loop; in its body a part of 4 bundles, one of 8, one of 2, and 7 others.
DUMP = """
     0   :  { %a = first }
   0x1   :  { %b = second }
   0x2 LB: > { %c = header } /* Start region 9 */
   0x3   : > { %d = sbr.rel (%p1) target = $region1 }
   0x4   : > { body }
   0x7 PF: > { %e = after } /* Start/End empty region 1 */
   0x8   : > { %f = sbr.rel (%p2) target = $region2 }
  0x10 PF: > { %g = after } /* Start/End empty region 2 */
  0x11   : > { %h = sbr.rel (%p3) target = $region3 }
  0x13 PF: > { %i = after } /* Start/End empty region 3 */
  0x16   : > { %j = sbr.rel (!%p4) target = $region9 }
"""


def test_bundles_are_counted_by_part_of_the_grid_loop() -> None:
    parts = kernel_bundles.count_parts(DUMP)
    assert parts == {"start": 4, "run": 8, "full": 8, "finish": 2, "step": 0x16 - 0x2 + 1 - 14}
    with pytest.raises(ValueError, match="2 parts, not 3"):
        kernel_bundles.count_parts(DUMP.replace("(%p3) target = $region3", "gone"))


def measured_rows() -> list[dict[str, str]]:
    """Forward kernels that others timed alone on v6e: JAX's splash with blocks that the table has."""
    found = []
    with KERNELS.open(encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            if row["fwd_ms"] and row["bkv_compute"] and row["layout"] == "q HEAD_DIM_MINOR":
                blocks = KernelBlocks(int(row["bq"]), int(row["bkv"]), int(row["bkv_compute"]))
                if find_bundles("TPU v6e", "jax", "fwd", 128, blocks, segments=False):
                    found.append(row)
    return found


def test_measured_kernels_are_within_a_tenth_of_their_price() -> None:
    assert len(measured_rows()) >= 4
    for row in measured_rows():
        blocks = KernelBlocks(int(row["bq"]), int(row["bkv"]), int(row["bkv_compute"]))
        bundles = find_bundles("TPU v6e", "jax", "fwd", 128, blocks, segments=False)
        assert bundles is not None and V6E.clock_hz is not None
        tokens = int(row["seq"])
        heads = int(row["batch"]) * int(row["q_heads"])
        pairs = causal_pairs(tokens, blocks.q, blocks.kv)
        seconds = heads * kernel_seconds(bundles, V6E.clock_hz, tokens, tokens, pairs)
        assert seconds == pytest.approx(float(row["fwd_ms"]) / 1e3, rel=0.1), row["id"]


def test_tokamax_is_priced_within_what_was_measured() -> None:
    """Kernels in profiles of whole steps (k032, k034), 96 heads of 8,192 tokens, without documents and theirs with a bound
    on the logits: our forward pass, with documents and no bound, lies between tokamax's and JAX's."""
    with KERNELS.open(encoding="utf-8") as opened:
        measured = {row["id"]: row for row in csv.DictReader(opened)}
    tokamax = measured["k032"]
    jax_splash = measured["k034"]
    blocks = KernelBlocks(1024, 1024, 1024)
    pairs = causal_pairs(8192, 1024, 1024)
    milliseconds = {}
    for kernel in ("fwd", "fused"):
        bundles = find_bundles("TPU v6e", "tokamax", kernel, 128, blocks)
        assert bundles is not None and V6E.clock_hz is not None
        seconds = 96 * kernel_seconds(bundles, V6E.clock_hz, 8192, 8192, pairs)
        milliseconds[kernel] = 1e3 * seconds
    assert float(tokamax["fwd_ms"]) < milliseconds["fwd"] < float(jax_splash["fwd_ms"])
    assert milliseconds["fused"] == pytest.approx(float(tokamax["bwd_ms"]), rel=0.1)


def test_the_blocks_with_the_least_time_are_chosen() -> None:
    best = best_blocks(JAX_SPLASH, None, 1, SHAPES)
    assert best is not None
    assert best.forward == KernelBlocks(2048, 2048, 512)
    seconds = {}
    for row in read_bundles():
        if (row.chip, row.library, row.kernel, row.head_size, row.segments) == (
            "TPU v6e",
            "jax",
            "fwd",
            128,
            True,
        ):
            pairs = causal_pairs(8192, row.q, row.kv)
            seconds[row.blocks] = row.cycles(8192, 8192, pairs) / 1.75e9 * STALLS
    assert best.forward_seconds == pytest.approx(min(seconds.values()))
    assert seconds[best.forward] == min(seconds.values())
    # Two backward kernels take longer, and so do smaller blocks.
    two = best_blocks(JAX_SPLASH, None, 2, SHAPES)
    small = best_blocks(JAX_SPLASH, 512, 1, SHAPES)
    assert two is not None and two.backward_seconds > 1.4 * best.backward_seconds
    assert small is not None and small.forward == KernelBlocks(512, 512, 512)
    assert small.forward_seconds > best.forward_seconds


def test_windows_and_lengths_decide_the_blocks() -> None:
    """A window of 512 keys is nearly all of a block of 512, and a quarter of one of 2,048."""
    windowed = best_blocks(JAX_SPLASH, None, 1, dataclasses.replace(SHAPES, windows=(512,)))
    short = best_blocks(JAX_SPLASH, None, 1, dataclasses.replace(SHAPES, seq=1536, chunk=1536))
    assert windowed is not None and windowed.forward.q < 2048
    assert short is not None and short.forward == KernelBlocks(512, 512, 512)
    assert best_blocks(JAX_SPLASH, 256, 1, SHAPES) is None
    assert best_blocks(JAX_SPLASH, None, 1, dataclasses.replace(SHAPES, chip="v5p")) is None
    assert best_blocks(JAX_SPLASH, None, 1, dataclasses.replace(SHAPES, head_sizes=(80,))) is None


@pytest.mark.parametrize(
    ("tokens", "q", "kv", "window"),
    [(4096, 512, 512, None), (4096, 1024, 512, None), (4096, 512, 1024, 700)],
)
def test_visible_pairs_of_blocks(tokens: int, q: int, kv: int, window: int | None) -> None:
    cut = 0
    full = 0
    for row in range(0, tokens, q):
        for column in range(0, tokens, kv):
            distances = range(row - column - kv + 1, row + q - column)
            visible = [d >= 0 and (window is None or d < window) for d in distances]
            cut += any(visible) and not all(visible)
            full += all(visible)
    pairs = VisiblePairs(cut, full)
    assert causal_pairs(tokens, q, kv, window) == pairs
    if window is None and q == kv:
        assert pairs_of_fraction(0.5, tokens // q, tokens // kv) == pairs


def test_plan_and_census_price_the_same_kernel() -> None:
    """A plan's attention is the chosen kernel's seconds by head; the census reads blocks from the program's text."""
    run = find_recipe("llama3-8b")
    training = dataclasses.replace(
        run.training, batch=8, seq=8192, remat="attention_out", microbatches=1
    )
    run = dataclasses.replace(run, mesh=MeshShape(fsdp=8), training=training)
    target = parse_target("v6e:2x4")
    placed = place_run(run)
    settled = settle(placed, machine_of_target(target, MeshShape(fsdp=8)))
    kernels = settled.kernels
    named = dataclasses.replace(training, attention_kernel="tokamax_splash")
    tokamax = settle(
        place_run(dataclasses.replace(run, training=named)),
        machine_of_target(target, MeshShape(fsdp=8)),
    ).kernels
    assert "tokamax_splash (blocks" in tokamax.summary and tokamax.head_seconds is not None
    assert kernels.name == "splash_fused" and "2048 x 2048 by 512" in kernels.summary
    assert kernels.head_seconds is not None
    heads = 32 * 32
    attention = estimate(placed, target).parts["attention"]
    assert attention == pytest.approx(heads * sum(kernels.head_seconds), rel=1e-3)

    text = """HloModule program

ENTRY main {
  q = bf16[1,32,8192,128]{3,2,1,0} parameter(0)
  k = bf16[1,8,8192,128]{3,2,1,0} parameter(1)
  v = bf16[1,8,8192,128]{3,2,1,0} parameter(2)
  ROOT splash_mha_fwd_segmented_residuals.1 = bf16[1,32,8192,128]{3,2,1,0} custom-call(q, k, v), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={"xprof_metadata":"{BLOCKS}"}}, \
metadata={op_name="visible_0.500061/splash_mha_fwd"}
}
"""
    sizes = {
        "block_q": 2048,
        "block_kv": 2048,
        "block_kv_compute": 512,
        "block_q_dkv": 2048,
        "block_kv_dkv": 2048,
    }
    blocks = json.dumps(sizes).replace('"', '\\\\"').strip("{}")
    text = text.replace("\\\n", "").replace("BLOCKS", blocks)
    module = parse_module(text)
    (call,) = (i for i in module.entry if i.opcode == "custom-call")
    cost = CostModel(V6E, V6E.efficiency).cost_of(call)
    assert cost.kind == "attention"
    assert cost.seconds == pytest.approx(32 * kernels.head_seconds[0], rel=0.01)
    scheduler = text.replace("block_q_dkv", "use_experimental_scheduler")
    scheduler = scheduler.replace("2048,", "1024,").replace(": 512", ": 1024")
    (call,) = (i for i in parse_module(scheduler).entry if i.opcode == "custom-call")
    bundles = kernel_of(call, "TPU v6e")
    assert bundles is not None and bundles.library == "tokamax"
    unknown = functools.reduce(lambda t, old: t.replace(old, "256"), ("2048", "512"), text)
    (call,) = (i for i in parse_module(unknown).entry if i.opcode == "custom-call")
    by_fraction = CostModel(V6E, V6E.efficiency).cost_of(call).seconds
    flops = 4 * 128 * 8192**2 * 0.500061 * 32
    assert by_fraction == pytest.approx(flops / (918e12 * V6E.efficiency.attention))
