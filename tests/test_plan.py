"""Predicted steps: arithmetic against the scaling book, the trainer's own descriptions, and compiled programs."""

import collections
import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_programs import (
    FLASH2,
    RAMP,
    RATED_KEYS,
    SOFTWARE,
    SPEEDS,
    TRITON,
    estimate_program,
    free_running,
    gathered_ring,
)
from report import fits
from rows import read_rows
from tiny_runs import MODELS, QWEN3_NEXT, device_run_of, tiny_run

from meshwright.analysis.run_census import census_of_train_step
from meshwright.config import MeshShape, Optimizer
from meshwright.errors import divisors
from meshwright.hardware.chips import CHIPS, Efficiency
from meshwright.hardware.interconnect import machine_of_target, map_axes
from meshwright.hardware.machine import Machine
from meshwright.hardware.targets import parse_target
from meshwright.models.flops import forward_flops, training_flops_per_token
from meshwright.models.kernels.chunks import causal_mask
from meshwright.models.model import AttentionSpec
from meshwright.planner.attention import visited_positions
from meshwright.planner.compute import WithoutCopies, matmul_seconds
from meshwright.planner.estimate import Estimate, StepModel, estimate
from meshwright.planner.memory_model import memory_by_category
from meshwright.planner.physics import PHYSICS
from meshwright.planner.pipeline import MicrobatchSeconds, lockstep
from meshwright.planner.traffic import movements
from meshwright.planner.work import Matmul, recomputed_roles, work_of
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import change_fields, find_recipe
from meshwright.runs.settle import settle
from meshwright.sharding.params import count_params
from meshwright.sharding.schedules import build_counts
from meshwright.step.device_memory import shard_bytes
from meshwright.update_rules import UPDATE_RULES
from meshwright.views.layout_page import layout_report
from xlacensus.interconnect import GroupSpan, route

WHOLE = Efficiency(1, 1, 1, 1, 1, 1, 1, 1)
"""Every peak is achieved."""


def placed_recipe(name: str, mesh: str, layout: str = "fsdp", **training: Any) -> PlacedRun:
    run = find_recipe(name)
    changed = dataclasses.replace(run.training, **training)
    return place_run(
        dataclasses.replace(run, training=changed, layout=layout), MeshShape.parse(mesh)
    )


def price(name: str, mesh: str, target: str, **training: Any) -> Estimate:
    return estimate(placed_recipe(name, mesh, **training), parse_target(target))


def test_the_first_gradient_of_gathered_experts_has_gone_when_the_others_are_there() -> None:
    """On TPUs, of three float32 matrices 8 x 4096 x 14336, split over `expert`; those that are not gathered stay."""
    for mesh, elements in (
        ("fsdp=128", 8 * 4096 * 14336),
        ("fsdp=32,expert=4", 2 * 4096 * 14336),
        ("expert=8", 0),
    ):
        placed = placed_recipe("mixtral-8x7b", mesh, batch=512, seq=4096, remat="full")
        alone, together = (
            memory_by_category(settle(placed, Machine(platform)), work_of(placed), 1.0)["one layer"]
            for platform in ("tpu", "cuda")
        )
        assert together - alone == 4 * elements


# The scaling book, applied-training.md and tpus.md: its worked examples.


def test_the_book_trains_llama_70b_in_44_days() -> None:
    # Without attention, which the book's six FLOPs per parameter leave out.
    items = forward_flops(find_recipe("llama3-70b").model, 1)
    flops = 3 * (sum(items.values()) - items["attention"]) * 15e12
    assert flops == pytest.approx(6.3e24, rel=0.02)
    days = flops / (8960 * parse_target("v5p:16x20x28").chip.flops_bf16 * 0.4) / 86400
    assert days == pytest.approx(44, abs=1.5)


def test_the_book_gathers_34_mb_over_four_chips_in_560_us() -> None:
    chip = parse_target("v5e:4x4").chip
    assert route(chip, (4, 4), GroupSpan(1, (4, 1)), WHOLE).seconds(
        "all-gather", 34e6
    ) == pytest.approx(560e-6, rel=0.03)


def test_a_ring_has_twice_the_links_of_a_chain() -> None:
    chip = parse_target("v5p:4x4x8").chip
    closed, opened = (
        route(chip, (4, 4, 8), GroupSpan(1, chips), WHOLE) for chips in ((4, 1, 1), (1, 1, 4))
    )
    assert closed.bandwidth == 2 * opened.bandwidth == 2 * 90e9
    assert (closed.medium, opened.medium) == ("ICI x", "ICI z (open)")
    whole = route(chip, (4, 4, 8), GroupSpan(1, (4, 4, 8)), WHOLE)
    assert whole.bandwidth == 3 * closed.bandwidth and whole.devices == 128


@pytest.mark.parametrize(
    ("kind", "factor", "across_nodes"),
    [
        # The eight devices of a node share the bytes that cross: 400 GB/s per node.
        ("all-gather", 1, 63 / 64 / 400e9),
        ("reduce-scatter", 1, 63 / 64 / 400e9),
        ("all-reduce", 2, 63 / 64 / 400e9),
        # Each device sends its own rows to the 56 others of 64 over its own 50 GB/s.
        ("all-to-all", 1, 56 / 64 / 50e9),
    ],
)
def test_nodes_are_as_fast_as_their_slowest_link(
    kind: str, factor: int, across_nodes: float
) -> None:
    chip = parse_target("h100:64").chip
    inside, across = (
        route(chip, (8, 8), GroupSpan(nodes, (n,)), WHOLE) for nodes, n in ((1, 8), (8, 8))
    )
    assert (inside.medium, across.medium) == ("NVLink", "network")
    size = 1e10
    assert inside.seconds(kind, size) == pytest.approx(factor * size * 7 / 8 / 450e9, rel=0.01)
    assert across.seconds(kind, size) == pytest.approx(factor * size * across_nodes, rel=0.05)


def test_slices_are_joined_by_the_dcn() -> None:
    chip = parse_target("2*v6e:16x16").chip
    across = route(chip, (16, 16), GroupSpan(2, (16, 1)), WHOLE)
    assert (across.medium, across.bandwidth) == ("DCN", min(2 * 90e9, 16 * chip.network_bandwidth))


def test_small_messages_are_all_latency() -> None:
    path = route(parse_target("h200:8").chip, (1, 8), GroupSpan(1, (8,)), CHIPS["h200"].efficiency)
    # stas00/ml-engineering: eight H200, all-reduce: 39.9 GB/s of bus bandwidth at 1 MiB, 463.6 with NVLS at 1 GiB.
    assert 2**20 * 1.75 / path.seconds("all-reduce", 2**20) == pytest.approx(39.9e9, rel=0.25)
    assert 2**30 * 1.75 / path.seconds("all-reduce", 2**30) > 300e9


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_axes_fill_the_machine(data: st.DataObject) -> None:
    target = parse_target(
        data.draw(
            st.sampled_from(("v5p:4x4x8", "v6e:16x16", "tpu7x:2x2x4", "h100:128", "gb200:144"))
        )
    )
    left, degrees = target.devices, {}
    for axis in ("tensor", "context", "fsdp", "stage"):
        degrees[axis] = data.draw(st.sampled_from(divisors(left)))
        left //= degrees[axis]
    mapping = map_axes(MeshShape(**degrees, data=left), target)
    nontrivial = {axis: n for axis, n in {**degrees, "data": left}.items() if n > 1}
    assert {axis: span.devices for axis, span in mapping.spans.items()} == nontrivial
    whole = mapping.span(tuple(mapping.spans))
    if whole is not None and len(whole.chips) > 1:
        assert whole.chips == target.topology


def test_axes_are_mapped_as_jax_maps_them() -> None:
    mapping = map_axes(MeshShape.parse("fsdp=32,tensor=4"), parse_target("v5p:4x4x8"))
    assert str(mapping) == "fsdp on ICI y4 z8, tensor on ICI x4"
    mapping = map_axes(MeshShape.parse("data=2*1,fsdp=256"), parse_target("2*v6e:16x16"))
    assert str(mapping) == "data on 2 slices (DCN), fsdp on ICI x16 y16"
    mapping = map_axes(MeshShape.parse("fsdp=16,tensor=4"), parse_target("h100:64"))
    assert str(mapping) == "fsdp on 8 nodes x 2 GPUs (NVLink), tensor on 4 GPUs (NVLink)"


# Work of a device, from the trainer's own descriptions.


@pytest.mark.parametrize("layout", ["fsdp", "folded"])
@pytest.mark.parametrize(
    "mesh", ["data=2,fsdp=2,tensor=2", "stage=2,fsdp=2,tensor=2", "fsdp=2,context=2,tensor=2"]
)
@pytest.mark.parametrize("model", MODELS)
def test_the_matmuls_of_all_devices_are_the_models(model: str, mesh: str, layout: str) -> None:
    changes = {"context_strategy": "all_gather", "microbatches": 2 if "stage" in mesh else 1}
    run = tiny_run(MODELS[model], mesh, seq=32, layout=layout, **changes)
    placed = place_run(run)
    work, items = work_of(placed), forward_flops(placed.run.model, 32)
    tokens = run.training.batch * 32
    # The stage with most layers is counted, once for each stage.
    fraction = (
        1
        if placed.layout.shape.stage == 1
        else work.layers * placed.layout.shape.stage / len(placed.layout.spec.layers)
    )
    layers = sum(n for item, n in items.items() if item not in ("unembedding", "attention"))
    flops = sum(matmul.flops for matmul in work.matmuls) + work.attention
    of_all = flops * placed.layout.shape.size * run.training.microbatches
    assert of_all == pytest.approx(fraction * (layers + items["attention"]) * tokens, rel=0.02)


@pytest.mark.parametrize("layout", ["fsdp", "zero1"])
def test_parameters_and_optimizer_state_are_those_of_the_layout(layout: str) -> None:
    placed = placed_recipe("llama3-8b", "data=2,fsdp=8,tensor=4", layout, batch=64)
    memory, report = estimate(placed, parse_target("v5p:4x4x4")).memory, layout_report(placed)
    assert memory["parameters"] == pytest.approx(report.bytes_parameters)
    assert memory["optimizer state"] == pytest.approx(report.bytes_optimizer, rel=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        *(({"name": name}, {}) for name in UPDATE_RULES),
        ({"name": "adamw", "moment_dtype": "bfloat16"}, {}),
        ({"name": "adamw"}, {"param_dtype": "bfloat16"}),
        (
            {"name": "lion", "moment_dtype": "bfloat16"},
            {"param_dtype": "bfloat16", "param_rounding": "stochastic"},
        ),
    ],
    ids=str,
)
def test_the_layout_report_counts_the_state_that_optax_makes(optimizer: Any, params: Any) -> None:
    run = tiny_run(
        MODELS["llama"], "data=2,fsdp=2,tensor=2", optimizer=Optimizer(**optimizer), **params
    )
    placed = place_run(run)
    # Without the scalars that count steps.
    assert layout_report(placed).bytes_optimizer == pytest.approx(
        shard_bytes(device_run_of(run).abstract.optimizer), abs=64
    )
    assert (
        estimate(placed, parse_target("v5e:2x4")).memory["optimizer state"]
        == layout_report(placed).bytes_optimizer
    )


@pytest.mark.parametrize("remat", ["full", "none"])
def test_planned_traffic_of_segments_is_the_compiled_programs(remat: str) -> None:
    """What linear attention shares over `context`: each gather of the plan, by payload, and as many times."""
    run = tiny_run(QWEN3_NEXT, "fsdp=2,context=4", batch=8, seq=32, remat=remat, unroll=1)
    device_run = device_run_of(run)
    purposes = ("inputs of the convolution", "changes of states")
    planned = collections.Counter[float]()
    for m in movements(device_run, work_of(device_run), recomputed_roles(remat)):
        if m.purpose in purposes and m.kind == "all-gather":
            planned[m.payload] += round(m.times)
    compiled = collections.Counter[float]()
    for entry in census_of_train_step(device_run).ledger:
        if entry.kind == "all-gather" and entry.axes == ("context",):
            compiled[entry.payload] += entry.count
    # Two layers; what is gathered inside the recomputed function is gathered again without remat, too.
    assert sorted(planned.values()) == ([4, 4] if remat == "full" else [2, 4])
    assert {payload: compiled[payload] for payload in planned} == planned


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=4", "fsdp=4,tensor=2", "fsdp=2,context=4"])
@pytest.mark.parametrize(
    "remat", ["full", pytest.param("projections", marks=pytest.mark.exhaustive)]
)
def test_planned_traffic_is_the_compiled_programs(mesh: str, remat: str) -> None:
    """Payloads of weights and activations, float32 throughout, against the ledger of XLA's own program."""
    device_run = device_run_of(
        tiny_run(
            MODELS["llama"],
            mesh,
            batch=8,
            seq=32,
            remat=remat,
            dropout=0.0,
            z_loss=0.0,
            context_strategy="all_gather",
        )
    )
    planned: dict[tuple[str, ...], float] = {}
    for m in movements(device_run, work_of(device_run), recomputed_roles(remat)):
        if m.purpose != "loss softmax":
            # On XLA:CPU a reduce-scatter is an all-reduce of which most is dropped.
            planned[m.axes] = planned.get(m.axes, 0.0) + m.payload * m.times
    compiled: dict[tuple[str, ...], float] = {}
    for entry in census_of_train_step(device_run).ledger:
        axes = tuple(entry.axes or ())
        compiled[axes] = compiled.get(axes, 0.0) + entry.total
    for axes, payload in planned.items():
        assert compiled[axes] == pytest.approx(payload, rel=0.08), axes


@pytest.mark.parametrize("layout", [pytest.param("fsdp", marks=pytest.mark.exhaustive), "folded"])
def test_planned_traffic_beside_the_exchange_is_the_compiled_programs(layout: str) -> None:
    """XLA:CPU pads the exchange of experts: over its axes counts only what is sent besides."""
    run = tiny_run(
        MODELS["mixtral"],
        "fsdp=2,expert=2,tensor=2",
        layout=layout,
        batch=8,
        seq=32,
        dropout=0.0,
        z_loss=0.0,
    )
    device_run = device_run_of(run)
    planned: dict[tuple[str, ...], float] = {}
    work = work_of(device_run)
    for m in movements(device_run, work, recomputed_roles("full")):
        if m.purpose not in ("loss softmax", "tokens to experts"):
            planned[m.axes] = planned.get(m.axes, 0.0) + m.payload * m.times
    compiled: dict[tuple[str, ...], float] = {}
    for entry in census_of_train_step(device_run).ledger:
        if entry.kind != "all-to-all":
            axes = tuple(entry.axes or ())
            compiled[axes] = compiled.get(axes, 0.0) + entry.total
    assert ("tensor",) in planned and ("fsdp",) in planned
    for axes, payload in planned.items():
        assert compiled[axes] == pytest.approx(payload, rel=0.08), axes


@pytest.mark.parametrize(
    ("recipe", "stages", "within"),
    [
        ("deepseek-v3", "stage=16,data=2", "expert=64"),
        ("glm45-air", "stage=4,data=1", "fsdp=2,expert=8"),
        ("llama2-7b", "stage=3,data=1", "fsdp=4"),
    ],
)
def test_rows_that_pad_the_stages_are_neither_layers_nor_gathered(
    recipe: str, stages: str, within: str
) -> None:
    """Three dense layers over 16 stages are 48 rows of a stack, of which 45 are zeros that no tick reads."""
    machine = Machine("cuda", "h100", True, chip=CHIPS["h100"])
    one_layer, gathered, fraction = [], [], []
    for mesh in (f"{stages},{within}", within):
        shape = MeshShape.parse(mesh)
        placed = placed_recipe(
            recipe,
            mesh,
            batch=8 * shape.data * shape.fsdp * shape.expert,
            seq=4096,
            microbatches=8,
            remat="full",
            stage_saves="layers",
            pipeline_schedule="1f1b",
        )
        settled, work = settle(placed, machine), work_of(placed)
        tasks = build_counts("1f1b", shape.stage, 8, 1) if shape.stage > 1 else None
        traffic = movements(settled, work, recomputed_roles("full"), tasks)
        one_layer.append(memory_by_category(settled, work, 1.0)["one layer"])
        gathered.append(
            sum(m.payload * m.times for m in traffic if m.purpose.startswith("weights"))
        )
        fraction.append(
            work.layers / (len(placed.layout.spec.layers) + len(placed.layout.spec.further))
        )
    assert one_layer[0] == pytest.approx(one_layer[1], rel=1e-9)
    assert gathered[0] == pytest.approx(gathered[1] * fraction[0], rel=1e-9)
    assert fraction[1] == 1


def test_a_stage_keeps_rows_of_every_stack() -> None:
    """As `prove` compiled it (CUDA plugin 0.12.0.1): of 97.0 GiB live 34 parts keep two dense rows and two of experts."""
    run = find_recipe("deepseek-v3")
    training = dataclasses.replace(
        run.training,
        batch=15_360,
        seq=4096,
        microbatches=120,
        remat="projections",
        stage_saves="layers",
        pipeline_schedule="zbv",
        matmul_precision="fp8",
    )
    run = dataclasses.replace(run, training=training, layout="zero1")
    run = change_fields(run, None, {"expert_exchange": "fp8"})
    placed = place_run(run, MeshShape.parse("stage=16,data=2,expert=64"))
    planned = estimate(placed, parse_target("h100:2048")).bytes
    assert planned == pytest.approx(104_146_173_231, rel=0.05)


@pytest.mark.parametrize("chip", ["b200", "h100", "v5p"])
def test_weights_of_experts_in_low_precision_travel_with_a_byte_for_each_element(chip: str) -> None:
    """Where float8 may make their products faster: not on TPUs and Hopper. Gradients have the type of the reduction."""
    machine = Machine(CHIPS[chip].platform, chip, True, chip=CHIPS[chip])
    sent = {}
    for precision in ("compute", "fp8"):
        placed = placed_recipe(
            "qwen3-30b-a3b", "fsdp=8", batch=8, seq=4096, matmul_precision=precision
        )
        settled = settle(placed, machine)
        traffic = movements(settled, work_of(placed), recomputed_roles("full"))
        sent[precision] = [(m.kind, m.payload) for m in traffic if m.purpose.endswith("weights")]
    layer = 3 * 128 * 2048 * 768
    saved = {"all-gather": layer if chip == "b200" else 0, "reduce-scatter": 0}
    dense = 2048 * (32 + 2 * 4 + 32) * 128
    for (kind, whole), (_, halved) in zip(sent["compute"], sent["fp8"], strict=True):
        assert whole - halved == saved[kind] + (dense if kind == "all-gather" else 0)


@pytest.mark.parametrize(
    "remat, arrays", [("full", 0), ("attention_out", 1), ("projections", 1), ("none", 0)]
)
def test_an_exchange_of_heads_saves_the_output_of_attention_twice(remat: str, arrays: int) -> None:
    """Where it is named: as the kernel made it and as the projection reads it. A ring makes it where it is read."""
    settled = [
        settle(
            placed_recipe(
                "llama3-8b",
                "fsdp=4,context=2",
                batch=8,
                seq=8192,
                remat=remat,
                context_strategy=strategy,
                microbatches=1,
            ),
            Machine("tpu"),
        )
        for strategy in ("ring", "ulysses")
    ]
    ring, ulysses = (
        memory_by_category(each, work_of(each), 1.0)["activations"] for each in settled
    )
    assert ulysses - ring == arrays * 32 * 2 * 4096 * 4096 * 2


def test_policies_recompute_what_they_do_not_save() -> None:
    names = (
        "none",
        "attention",
        "projections",
        "feed_forward",
        "full",
        "offload_attention",
        "offload",
    )
    again = {remat: recomputed_roles(remat) for remat in names}
    assert again["none"] == frozenset() and again["attention"] == {"scores"}
    assert again["projections"] < again["feed_forward"] < again["full"]
    assert (
        again["offload_attention"] == again["feed_forward"] | {"attention_out"}
        and again["offload"] == again["full"]
    )
    seconds = {
        remat: price("llama3-8b", "fsdp=8", "v5p:2x2x2", batch=8, remat=remat).seconds
        for remat in names
    }
    assert (
        seconds["attention"] <= seconds["projections"] < seconds["feed_forward"] < seconds["full"]
    )


@pytest.mark.parametrize(
    "remat", ["projections", pytest.param("feed_forward", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("norms", "read"), [("before", False), ("after", True)])
def test_recomputed_matmuls_are_the_compiled_programs(norms: Any, read: bool, remat: str) -> None:
    """Outputs that are normalised are computed again: the backward pass of their norm reads them."""
    model = dataclasses.replace(MODELS["llama"], norm_place=norms)
    device_run = device_run_of(tiny_run(model, batch=8, remat=remat, dropout=0.0))
    work = work_of(device_run)
    assert work.outputs_read == ({"attention_out", "ffn_out"} if read else set())
    again = (recomputed_roles(remat) | work.outputs_read) & {m.role for m in work.matmuls}
    planned = sum(m.flops for m in work.matmuls if m.role in again)
    found = census_of_train_step(device_run).flops.matmuls
    compiled = sum(
        m.flops
        for m in found
        if m.phase == "recomputed" and m.module in ("attention", "feed-forward")
    )
    scores = (
        2 * 8 * 16 * 16 * 64 * 2
    )  # of two layers, which the backward pass of blocked attention computes again
    assert compiled - scores == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(
    ("seq", "block", "window"),
    [(2048, 256, 1024), (2048, 128, 1000), (1024, 128, 129), (1024, 128, None)],
)
def test_blocked_attention_computes_the_blocks_that_its_mask_shows(
    seq: int, block: int, window: int | None
) -> None:
    mask, count = causal_mask(seq, window), seq // block
    pairs = sum(mask.between(i, j, block) is not None for i in range(count) for j in range(count))
    assert visited_positions(AttentionSpec(1, 1, 64, window), seq, block) * seq == pairs * block**2


@settings(max_examples=25, deadline=None)
@given(faster=st.sampled_from(["matmul", "attention", "hbm", "links", "overlap", "tensor_overlap"]))
def test_nothing_that_is_faster_makes_a_step_slower(faster: str) -> None:
    placed = placed_recipe("llama3-8b", "fsdp=8,tensor=2", batch=32)
    efficiency, target = CHIPS["v5p"].efficiency, parse_target("v5p:2x2x4")
    better = dataclasses.replace(
        efficiency, **{faster: min(1.0, getattr(efficiency, faster) * 1.1)}
    )
    other = dataclasses.replace(target, given_efficiency=better)
    assert estimate(placed, other).seconds <= estimate(placed, target).seconds


def test_the_parts_of_a_step_are_all_of_it() -> None:
    e = price("llama3-70b", "stage=4,fsdp=16,tensor=2", "h100:128", batch=128, microbatches=8)
    assert sum(e.parts.values()) == pytest.approx(e.seconds)
    assert sum(e.exposed.values()) == pytest.approx(e.parts["exposed"])
    flops = training_flops_per_token(find_recipe("llama3-70b").model, 8192) * 128 * 8192 / 128
    assert e.mfu == pytest.approx(flops / e.seconds / 989e12)


def test_a_free_running_pipeline_has_the_bubble_of_its_formula() -> None:
    busy = MicrobatchSeconds(
        forward=1.0, recomputation=0.0, backward=2.0, repeated=1.0, exposed=0.5
    )
    # Narayanan et al. 2021, section 2.2: (P - 1)/M of the work, and of what its layers wait for.
    free = free_running(build_counts("1f1b", 4, 8, 1), busy)
    assert free.bubble == pytest.approx(3 / 8 * 8 * 3.5) and free.live_inputs == 4
    # With two virtual stages the first stage warms up with 2 (P - 1) + P inputs, and one more is in flight.
    interleaved = free_running(build_counts("interleaved", 4, 8, 2), busy)
    assert interleaved.live_inputs == 2 * 3 + 4 + 1
    # In lockstep too, with backward passes that recompute their stage; on a V it is less, by half a forward pass.
    bubbles = {
        name: lockstep(build_counts(name, 4, 8, virtual_stages), busy).bubble
        for name, virtual_stages in (("1f1b", 1), ("gpipe", 1), ("zbv", 2))
    }
    assert bubbles["gpipe"] == pytest.approx(3 * (1.0 + 3.0))
    assert bubbles["1f1b"] == pytest.approx(bubbles["gpipe"])
    assert bubbles["zbv"] == pytest.approx(3 * (0.5 + 3.0))


def test_activations_travel_beside_the_other_half_of_a_tick() -> None:
    """In the ticks with one half only, which fill and drain the pipeline, the stages wait for them."""
    placed = placed_recipe(
        "llama3-8b", "stage=4", batch=16, microbatches=16, pipeline_schedule="1f1b"
    )
    tasks = build_counts("1f1b", 4, 16, 1)
    settled, work, again = (
        settle(placed, Machine("tpu")),
        work_of(placed),
        recomputed_roles("full"),
    )
    sent = [m for m in movements(settled, work, again, tasks) if m.times]
    permutes = {(m.during, m.blocking): m.times for m in sent if m.kind == "collective-permute"}
    # Microbatch m runs forward on stage s in tick m + s, backward in tick m + 2P - 1 - s (sharding/schedules.py).
    ticks, first_backward, last_forward = 16 + 2 * 4 - 1, 4, 16 + 4 - 2
    alone, both = (first_backward, ticks - 1 - last_forward), last_forward + 1 - first_backward
    assert permutes == {
        ("forward", True): alone[0], ("backward", False): both, ("backward", True): alone[1], ("forward", False): both,
    }  # fmt: skip
    # The embedding is summed at the first stage, the hidden states go to all, and both back; whole over nothing.
    shared = [
        m for m in sent if m.kind == "all-reduce" and m.purpose == "hidden states of all stages"
    ]
    assert [(m.times, m.payload) for m in shared] == [(4 * 16, 2 * 8192 * 4096)]
    megatron = SOFTWARE["Megatron-Core"].step
    others = megatron.traffic(settled, work, again, tasks).movements()
    assert not [m for m in others if m.kind == "all-reduce" and m.purpose == shared[0].purpose]


@pytest.mark.parametrize(
    ("on", "mesh", "kind", "alone"),
    [
        (
            "v5e:16x16",
            "fsdp=256",
            "all-reduce",
            True,
        ),  # over two dimensions of the torus: twice the bytes
        ("v5e:16x16", "data=16,fsdp=16", "reduce-scatter", True),
        ("v6e:16x16", "fsdp=256", "reduce-scatter", False),
    ],
)
def test_gradients_are_summed_beside_nothing_on_v5e(
    on: str, mesh: str, kind: str, alone: bool
) -> None:
    placed = placed_recipe("llama3-8b", mesh, batch=256, seq=4096, remat="full")
    settled = settle(placed, machine_of_target(parse_target(on), placed.layout.shape))
    sent = movements(settled, work_of(placed), recomputed_roles("full"))
    layers = [m for m in sent if m.purpose == "gradients of weights"]
    assert [(m.kind, m.blocking, m.times) for m in layers] == [(kind, alone, 32)]
    assert all(
        m.blocking == alone for m in sent if m.during == "backward" and m.kind != "all-gather"
    )


def test_microbatches_cost_the_sums_of_their_gradients() -> None:
    """Each sum is read and written in float32, and the new gradient read."""
    target = parse_target("h100:8")
    # As many tokens at a time.
    one, four = (
        estimate(
            placed_recipe(
                "llama3-8b", "fsdp=8", batch=8 * n, microbatches=n, seq=8192, remat="full"
            ),
            target,
        )
        for n in (1, 4)
    )
    summed = 4 * (4 + 4 + 2) * 8.03e9 / 8 / (target.chip.hbm_bandwidth * target.efficiency.hbm)
    assert four.parts["elementwise"] - 4 * one.parts["elementwise"] == pytest.approx(
        summed, rel=0.01
    )


def test_bound_by_names_what_bounds() -> None:
    """The largest of matrix unit, HBM, bubble, host and links; attention without a fused kernel is HBM's."""
    fused, blocked = (
        price(
            "llama3-8b",
            "fsdp=2,context=4",
            "h100:8",
            batch=2,
            seq=131072,
            remat="full",
            attention_kernel=kernel,
        )
        for kernel in ("cudnn", "blocked")
    )
    assert fused.bound_by == "attention" and blocked.bound_by == "HBM: attention scores"
    assert (
        fused.bounds["HBM: attention scores"]
        == 0
        < 0.5 * blocked.seconds
        < blocked.bounds["HBM: attention scores"]
    )
    pipeline = price(
        "llama3-8b", "stage=8", "h100:8", batch=2, microbatches=2, pipeline_schedule="1f1b"
    )
    assert pipeline.bound_by == "bubble"


class _LogitsOnce(WithoutCopies):
    logit_passes = 1  # type: ignore[assignment]


ONCE = StepModel(computation=_LogitsOnce)
"""This package's step, without copies of weights and with logits that are computed once."""


def test_software_differs_by_its_own_constants_alone() -> None:
    """Ours is XLA's on the same chip, and on TPUs, where one compiler writes all programs, only its options differ."""
    placed = placed_recipe("llama3-8b", "fsdp=8", batch=16, seq=8192)
    h100 = parse_target("h100:8")
    ours = estimate(placed, h100)
    once = estimate(placed, h100, ONCE)
    maxtext = estimate_program(placed, h100, SOFTWARE["MaxText"])
    assert once.parts["matmul"] == maxtext.parts["matmul"]
    assert once.parts["attention"] == maxtext.parts["attention"]
    # Ours cuts its layers' weights out of stacks: read in float32, written in bfloat16, twice.
    copied = 2 * (4 + 2) * 8.03e9 / 8 / (3.35e12 * 0.85)
    assert ours.parts["elementwise"] - maxtext.parts["elementwise"] == pytest.approx(
        copied, rel=0.01
    )
    triton = dataclasses.replace(SOFTWARE["PyTorch"], kernel=TRITON.at(RATED_KEYS, "h100"))
    older = estimate_program(placed, h100, triton)
    assert older.parts["attention"] == pytest.approx(
        maxtext.parts["attention"] / SPEEDS["h100", "triton"]
    )
    for name in ("v5p:2x2x2", "v6e:2x4"):
        target = parse_target(name)
        seconds = {round(estimate(placed, target, ONCE).seconds, 9)}
        for program in SOFTWARE.values():
            if program.name not in ("Megatron-LM", "vTrain"):
                seconds.add(round(estimate_program(placed, target, program).seconds, 9))
        assert len(seconds) == 1


# Seconds of FlashAttention-2 on GB200 and of cuDNN on H200 by keys, forward and backward, in ms: NVIDIA/cudnn-frontend,
# benchmark/ at d48a60e and 816ea45. Work grows with the square of the keys.
MEASURED_ATTENTION = {
    "flash2, GB200": {2048: 1.693, 4096: 5.836, 8192: 21.557, 16384: 82.842, 32768: 324.651},
    "cuDNN, H200": {2048: 1.113, 4096: 3.672, 8192: 13.805, 16384: 54.691},
}


@pytest.mark.parametrize("kernel", MEASURED_ATTENTION)
def test_fused_attention_is_faster_with_more_keys_as_measured(kernel: str) -> None:
    milliseconds = MEASURED_ATTENTION[kernel]
    longest = max(milliseconds)

    def relative(keys: int) -> float:
        return (keys / longest) ** 2 * milliseconds[longest] / milliseconds[keys]

    for keys in milliseconds:
        predicted = FLASH2.at(keys, "a100").speed / FLASH2.at(longest, "a100").speed
        assert predicted == pytest.approx(relative(keys), rel=0.08)
    assert FLASH2.at(RAMP, "a100").speed == pytest.approx(FLASH2.at(10**12, "a100").speed / 2)


def test_the_last_stage_of_others_multiplies_the_logits_of_all_columns() -> None:
    """Not one matmul of a quarter of the columns for each stage, whose tiles do not fill the chip."""
    target, megatron = parse_target("h100:4"), SOFTWARE["Megatron-LM"]
    sizes = {
        "batch": 64,
        "seq": 8192,
        "microbatches": 64,
        "remat": "none",
        "pipeline_schedule": "1f1b",
    }
    whole, staged = (
        estimate_program(
            placed_recipe("llama3-8b", mesh, **sizes), parse_target(f"h100:{n}"), megatron
        )
        for mesh, n in (("fsdp=1", 1), ("stage=4", 4))
    )
    logits = Matmul("unembedding", 8192.0, 4096, 128256)
    seconds = sum(matmul_seconds(m, target)[0] for m in (logits, *logits.gradients))
    seconds += PHYSICS.gpu_loss_bytes * 8192 * 128256 / (3.35e12 * 0.85)
    assert staged.parts["matmul"] - whole.parts["matmul"] / 4 == pytest.approx(
        64 * 0.75 * seconds, rel=1e-6
    )


def test_rows_go_once_to_each_device_with_experts_of_a_token() -> None:
    """128 experts on 8 devices: of a token's 8, none is on a given device with probability C(112, 8) / C(128, 8)."""
    placed = placed_recipe("qwen3-30b-a3b", "expert=8", batch=64, seq=4096, remat="none")
    settled, work, again = (
        settle(placed, Machine("cuda")),
        work_of(placed),
        recomputed_roles("none"),
    )

    def sent(rows_by: Any) -> float:
        software = dataclasses.replace(SOFTWARE["Megatron-Core"], rows_by=rows_by)
        return next(
            m.payload
            for m in software.step.traffic(settled, work, again, None).movements()
            if m.kind == "all-to-all"
        )

    devices = 8 * (1 - math.comb(112, 8) / math.comb(128, 8))
    assert sent("device") / sent("expert") == pytest.approx(devices / 8) and 5.3 < devices < 5.4


def test_transformer_engine_quantises_an_array_once_and_keeps_it() -> None:
    """4 bytes for each element, for others 5 of inputs and 10 of gradients; kept inputs have one byte, not two."""
    placed = placed_recipe(
        "llama3-8b", "fsdp=1", batch=1, seq=8192, remat="none", matmul_precision="mxfp8"
    )
    others = dataclasses.replace(SOFTWARE["Megatron-Core"], transformer_engine=False)
    once, twice = (
        estimate_program(placed, parse_target("b200:1"), p)
        for p in (SOFTWARE["Megatron-Core"], others)
    )
    inputs, outputs = 3 * 4096 + 14336, 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    moved = 32 * 8192 * (inputs * (5 - 4) + outputs * (10 - 4))
    assert twice.parts["elementwise"] - once.parts["elementwise"] == pytest.approx(
        moved / (8e12 * 0.85), rel=1e-3
    )
    # Two normalised inputs and SwiGLU's product in one byte; of the attention's output one more, for its projection.
    kept = 32 * 8192 * (2 * 4096 + 14336 - 4096)
    assert twice.memory["activations"] - once.memory["activations"] == kept


def test_rows_of_others_have_no_padding_and_fit_their_experts() -> None:
    """DeepSeek-V3's three dense layers are not sixteen for sixteen parts; of Qwen3 235B no device has all rows."""
    rows = {row.id: row for row in read_rows()[0]}
    assert count_params(rows["P410"].placed.layout.params) == sum(
        p.size for _, p, _ in rows["P410"].placed.layout.leaves
    )
    assert count_params(rows["P410"].placed.layout.params) == pytest.approx(671e9, rel=0.002)
    for row in (rows["P416"], rows["P417"]):
        assert fits(row, estimate_program(row.placed, row.target, row.software))
    # 131,072 keys and values of 16 of 128 heads of 128, in bfloat16; gradients of a fourth of them, in float32.
    gather, *_, gradients = gathered_ring(
        rows["P127"].placed, work_of(rows["P127"].placed), 1.0, 2, frozenset()
    )
    assert (
        gather.payload == 2 * 131072 * 16 * 128 * 2
        and gradients.payload * gradients.times == 2 * gather.payload
    )


def test_gathering_ahead_carries_gradients_and_weights_of_another_layer() -> None:
    training = {"batch": 512, "seq": 8192, "remat": "offload_attention"}
    ahead, within = (
        price("llama3-405b", "fsdp=512", "v5p:8x8x8", **training, gather_ahead=strategy)
        for strategy in ("auto", "none")
    )
    d, kv = 16384, 8 * 128
    attention, norms = 2 * d * d + 2 * d * kv, 3 * d * 2
    assert ahead.bytes - within.bytes == pytest.approx(2 * (2 * attention), abs=2 * norms)
    # Compiled: 80.7 GiB live (bench/results/compiled_plans.json).
    training = {"batch": 1024, "seq": 2048, "remat": "projections", "microbatches": 2}
    both = price("qwen3-14b", "fsdp=64", "v5p:4x4x4", **training, gather_ahead="auto")
    assert both.bytes / 2**30 == pytest.approx(80.7, rel=0.02)
    # Neither on a torus that is not closed, nor where nothing is recomputed.
    for mesh, target, remat in (("fsdp=16", "v5p:2x2x4", "full"), ("fsdp=64", "v5p:4x4x4", "none")):
        auto, none = (
            price("llama2-7b", mesh, target, batch=64, seq=4096, remat=remat, gather_ahead=strategy)
            for strategy in ("auto", "none")
        )
        assert auto.memory == none.memory
