"""The planner's search against every plan there is, and what must hold of the best plan of any machine."""

import dataclasses
import functools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, divisors
from meshwright.hardware.chips import Nodes
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.estimate import estimate, with_remat
from meshwright.planner.search import (
    CHOSEN_REMAT,
    Plan,
    candidate_schedules,
    is_roomy,
    price_mesh,
    price_run,
    search,
    split_size,
    tensor_degrees,
    with_open_choices,
)
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run


def run_of(recipe: str, batch: int, seq: int) -> Run:
    run = find_recipe(recipe)
    return dataclasses.replace(
        run, training=dataclasses.replace(run.training, batch=batch, seq=seq)
    )


def every_placement(run: Run, target: Target) -> list[PlacedRun]:
    """Every mesh without a pipeline that the trainer takes, with every number of microbatches."""
    placements, devices = [], target.devices
    node = target.topology[-1] if isinstance(target.chip.interconnect, Nodes) else devices
    for tensor in [t for t in tensor_degrees(run) if t <= node]:
        for context in [c for c in divisors(devices) if run.training.seq // c >= 1024]:
            for expert in divisors(split_size(run, "expert")):
                rest, left_over = divmod(devices, tensor * context * expert)
                for data in divisors(rest) if rest and not left_over else ():
                    shape = MeshShape(
                        data=data, fsdp=rest // data, expert=expert, context=context, tensor=tensor
                    )
                    scheduled = next(candidate_schedules(run, shape))
                    for microbatches in divisors(run.training.batch):
                        training = dataclasses.replace(
                            scheduled.training, microbatches=microbatches, remat="full"
                        )
                        try:
                            placements.append(
                                place_run(dataclasses.replace(scheduled, training=training))
                            )
                        except ConfigError:
                            continue
    return placements


def exhaustive_seconds(run: Run, target: Target) -> float:
    """Step time of the best of all plans without a pipeline, of all remat policies and numbers of saved layers.

    Plans that leave a GPU a quarter of its memory come before all others.
    """
    best, without_room, layers = math.inf, math.inf, len(run.model.spec().layers)
    saves = isinstance(target.chip.interconnect, Nodes) or target.name == "v5p"
    for placed in every_placement(run, target):
        prices = {remat: estimate(with_remat(placed, remat), target) for remat in CHOSEN_REMAT}
        for remat, whole in prices.items():
            if not whole.fits:
                continue
            if whole.bytes <= target.chip.roomy_bytes:
                best = min(best, whole.seconds)
            else:
                without_room = min(without_room, whole.seconds)
            # With some layers saved the time is between this policy's and that of saving all projections.
            for saved in (
                range(1, layers + 1) if saves and prices["projections"].seconds < best else ()
            ):
                some = estimate(with_remat(placed, remat, saved), target)
                if some.bytes > target.chip.roomy_bytes:
                    break
                best = min(best, some.seconds)
    return best if best < math.inf else without_room


@pytest.mark.parametrize(
    ("recipe", "target", "batch", "seq"),
    [
        ("llama2-7b", "a100:8", 64, 4096),
        ("llama3-8b", "b200:8", 64, 8192),
        ("llama32-1b", "v5p:2x2x1", 12, 4096),
        pytest.param("llama3-8b", "h100:8", 64, 8192, marks=pytest.mark.exhaustive),
        pytest.param("llama2-13b", "a100:16", 96, 4096, marks=pytest.mark.exhaustive),
        pytest.param("mixtral-8x7b", "v5p:2x2x4", 64, 4096, marks=pytest.mark.exhaustive),
    ],
)
def test_the_search_finds_the_best_of_all_plans(
    recipe: str, target: str, batch: int, seq: int
) -> None:
    run, machine = run_of(recipe, batch, seq), parse_target(target)
    found, best = search(run, machine), exhaustive_seconds(run, machine)
    assert 0.9 * best < found.bound <= best and found.plans[0].estimate.seconds <= 1.01 * best
    assert found.bound <= min(
        plan.estimate.seconds for plan in found.plans if is_roomy(plan) >= is_roomy(found.plans[0])
    )


@pytest.mark.parametrize(
    ("recipe", "target", "batch", "mesh"),
    [
        ("llama3-8b", "h100:16", 96, "stage=4,data=2,tensor=2"),
        ("mixtral-8x7b", "b200:32", 240, "stage=4,data=2,expert=4"),
        ("llama3-8b", "v5p:4x4x4", 256, "stage=8,fsdp=8"),
        ("glm45-air", "h100:64", 480, "stage=8,expert=4,tensor=2"),
    ],
)
def test_no_schedule_is_below_1f1b_without_its_bubble(
    recipe: str, target: str, batch: int, mesh: str
) -> None:
    """By which the search leaves other schedules out before it tabulates them."""
    machine = parse_target(target)
    least: dict[tuple[int, str], float] = {}
    shape = MeshShape.parse(mesh)
    for scheduled in candidate_schedules(with_open_choices(run_of(recipe, batch, 4096)), shape):
        training = dataclasses.replace(scheduled.training, remat="full", stage_saves="input")
        parts = price_run(dataclasses.replace(scheduled, training=training), machine).estimate.parts
        seconds = sum(parts.values()) - parts["bubble"]
        pipeline = (training.microbatches, scheduled.layout)
        if training.pipeline_schedule == "1f1b":
            least[pipeline] = seconds
        assert seconds >= least[pipeline] * (1 - 1e-9)
    assert least


def test_groups_of_nodes_that_shard_are_tried() -> None:
    """HSDP with several nodes in a group of FSDP: neither one node in each nor all in one."""
    found = search(run_of("llama3-8b", 512, 8192), parse_target("h100:64"))
    assert {(2, 32), (4, 16), (8, 8)} <= {
        (p.mesh.data, p.mesh.fsdp) for p in (*found.plans, *found.too_large)
    }


@functools.lru_cache(maxsize=256)
def best_plan(run: Run, target: Target) -> Plan:
    return search(run, target).plans[0]


def with_chip(target: Target, **factors: float) -> Target:
    """The target with some numbers of its chip multiplied."""
    chip = target.chip
    changed = {
        name: getattr(chip, name) * factor
        for name, factor in factors.items()
        if hasattr(chip, name)
    }
    links = dataclasses.replace(
        chip.interconnect,
        link_bandwidth=chip.interconnect.link_bandwidth * factors.get("links", 1.0),
    )
    return dataclasses.replace(
        target, chip=dataclasses.replace(chip, **changed, interconnect=links)
    )


MACHINES = st.sampled_from(
    ["h100:8", "a100:8", "v5p:2x2x2", "v6e:2x4", "b200:8", "h100:16", "2*v6e:2x4"]
)
MODELS = st.sampled_from(["llama32-1b", "llama2-7b"])
BETTER = st.sampled_from(
    ["hbm_bytes", "hbm_bandwidth", "links", "flops_bf16", "network_bandwidth", "host_bandwidth"]
)
"""Numbers of a chip, each of which makes no step slower when it grows."""


@settings(max_examples=8, deadline=None)
@given(
    recipe=MODELS,
    machine=MACHINES,
    batch=st.sampled_from([8, 16, 24, 32, 64]),
    times=st.integers(2, 4),
)
@example(recipe="llama2-7b", machine="a100:8", batch=32, times=2)
def test_tokens_per_second_do_not_fall_as_the_batch_grows(
    recipe: str, machine: str, batch: int, times: int
) -> None:
    small, large = (
        best_plan(run_of(recipe, n, 4096), parse_target(machine)) for n in (batch, times * batch)
    )
    assert large.estimate.tokens_per_second >= small.estimate.tokens_per_second * 0.999


@settings(max_examples=8, deadline=None)
@given(recipe=MODELS, machine=MACHINES, what=BETTER)
def test_no_better_chip_is_slower(recipe: str, machine: str, what: str) -> None:
    run, target = run_of(recipe, 64, 4096), parse_target(machine)
    better = best_plan(run, with_chip(target, **{what: 1.5}))
    assert better.estimate.seconds <= best_plan(run, target).estimate.seconds * 1.001


@settings(max_examples=8, deadline=None)
@given(
    recipe=MODELS,
    sizes=st.sampled_from(
        [
            ("h100:8", "h100:16"),
            ("h100:16", "h100:32"),
            ("v5p:2x2x2", "v5p:2x2x4"),
            ("v6e:2x4", "v6e:4x4"),
        ]
    ),
)
def test_chip_hours_per_token_do_not_fall_as_chips_grow(
    recipe: str, sizes: tuple[str, str]
) -> None:
    """At a fixed batch, where memory does not bind: more memory in all lets a step recompute less."""
    run = run_of(recipe, 64, 4096)
    fewer, more = (with_chip(parse_target(size), hbm_bytes=100.0) for size in sizes)
    hours = [best_plan(run, target).estimate.seconds * target.devices for target in (fewer, more)]
    assert hours[1] >= hours[0] * 0.999


@settings(max_examples=12, deadline=None)
@given(
    recipe=st.sampled_from(["llama32-1b", "deepseek-v2-lite", "nemotron-h-8b", "gemma3-4b"]),
    case=st.sampled_from(
        [
            ("h100:2x4", "fsdp=4,tensor=2"),
            ("a100:2x4", "stage=2,fsdp=4"),
            ("b200:8", "fsdp=4,context=2"),
            ("v5p:2x2x2", "data=2,fsdp=4"),
            ("2*v6e:2x4", "fsdp=8,tensor=2"),
            ("rubin:8", "fsdp=8"),
        ]
    ),
    sequences=st.sampled_from([8, 24, 64]),
)
def test_the_figures_of_a_plan_agree(recipe: str, case: tuple[str, str], sequences: int) -> None:
    """Parts, bounds and exposed seconds are sums of one step, which no chip is faster than."""
    target, shape = parse_target(case[0]), MeshShape.parse(case[1])
    shape = dataclasses.replace(
        shape, slices=target.slices, dcn_axis="fsdp" if target.slices > 1 else shape.dcn_axis
    )
    try:
        best, smallest = price_mesh(
            with_open_choices(run_of(recipe, sequences, 4096)), target, shape
        )
    except ConfigError:
        return
    plan = best or smallest
    assert plan is not None
    e = plan.estimate
    waits = {kind: n for kind, n in e.seconds_by_bound.items() if kind != "input"}
    assert sum(e.parts.values()) == pytest.approx(e.seconds, rel=1e-9)
    assert sum(waits.values()) == pytest.approx(e.seconds, rel=1e-6)
    assert sum(e.exposed.values()) == pytest.approx(e.parts["exposed"], abs=1e-9)
    assert all(0 <= n <= e.busy[axes] * 1.0001 for axes, n in e.exposed.items())
    assert min([*e.parts.values(), *e.bounds.values(), *e.memory.values()]) >= 0
    assert 0 < e.mfu < 1 and e.tokens == sequences * 4096
    assert e.bytes_in(e.peak_phase) >= e.bytes_in("start") > 0
