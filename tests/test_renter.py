"""What a renter asks: what bounds a step, its error, days, cost, failures, limits."""

import dataclasses
import itertools
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import in_process

import meshwright as mw
from meshwright.api.planning import parse_budget, read_market, with_batches
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.targets import expand_targets, parse_target
from meshwright.planner.estimate import Estimate, estimate, largest_bound
from meshwright.planner.explain import nearest_batches, notes
from meshwright.planner.offers import (
    CHIP_HOURS_PER_FAILURE,
    ERRORS_FILE,
    EVERY,
    PRICES_FILE,
    UNSEEN,
    Goodput,
    Offer,
    Reliability,
    band_of,
    cheapest,
    choose,
    daly_period,
    goodput,
    kinds_of,
    make_offer,
    rank,
    read_bands,
    read_prices,
)
from meshwright.planner.search import search, with_choices
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.views.blocks import Table
from meshwright.views.plan_page import offer_page

FORESIGHT = Path(__file__).parents[1] / "bench" / "foresight"


def placed(recipe: str, mesh: str, **training: Any) -> PlacedRun:
    run = find_recipe(recipe)
    changed = dataclasses.replace(run.training, **training)
    return place_run(dataclasses.replace(run, training=changed), MeshShape.parse(mesh))


def price(recipe: str, mesh: str, target: str, **training: Any) -> Estimate:
    return estimate(placed(recipe, mesh, **training), parse_target(target))


def read_json(*args: str) -> dict[str, Any]:
    return dict(json.loads(in_process(*args, "--json").splitlines()[-1]))


# What bounds a step. Seconds of the largest part, by hand: 8.03e9 parameters, 32 layers of 4096, 32 heads.

LONG = {"batch": 2, "seq": 131072, "remat": "full"}
SCORES = 32 * 32 * (131072 / 2) * 131072 * 2 / 8
"""Causal scores of a device: heads, layers, half the keys, queries of two sequences over eight devices."""
BOUND: dict[str, tuple[tuple[str, str, str], dict[str, Any], str, float]] = {
    # 6 FLOPs and 2 recomputed for each of 7.5e9 parameters and token; matmuls of this size reach 0.9 of the best rate.
    "matmuls": (
        ("llama3-8b", "fsdp=8", "h100:8"), {"batch": 64, "seq": 4096, "microbatches": 8, "remat": "full"},
        "matmuls", 8 * 7.5e9 * 64 * 4096 / 8 / (989e12 * 0.7 * 0.9),
    ),
    # 4 FLOPs for each score and element of a head; backward 2.5 times, and once more recomputed.
    "attention": (
        ("llama3-8b", "fsdp=2,context=4", "h100:8"), {**LONG, "attention_kernel": "cudnn"},
        "attention", 4 * SCORES * 128 * 4.5 / (989e12 * 0.45),
    ),
    # Without a fused kernel, in blocks of 1,024: 26 bytes of each score forward and recomputed, 28 backward, and 36 and
    # 79 of each element of a block's queries, 1/8 as many (head 128).
    "scores": (
        ("llama3-8b", "fsdp=2,context=4", "h100:8"), {**LONG, "attention_kernel": "blocked"},
        "HBM: attention scores", SCORES * (2 * (26 + 36 / 8) + 28 + 79 / 8) / (3.35e12 * 0.85),
    ),
    # Keys and values around a ring of 64 hardly take time; scores of 80 layers and 64 heads do.
    "scores of a ring": (
        ("llama3-70b", "context=64", "v5p:4x4x4"),
        {"batch": 1, "seq": 131072, "context_strategy": "ring", "attention_kernel": "blocked", "remat": "full"},
        "HBM: attention scores", 80 * 64 * (131072 / 2) * 131072 / 64 * 60 / (2.765e12 * 0.85),
    ),
    # 32 bytes of AdamW for each parameter; 16 tokens are nothing.
    "optimizer": (
        ("llama3-8b", "data=1", "b200:1"), {"batch": 1, "seq": 16}, "HBM: optimizer", 8.03e9 * 32 / (8e12 * 0.85)
    ),
    # Gathered forward and backward in bfloat16, reduced in float32, over eight nodes: 8 GPUs of 50 GB/s each.
    "network": (
        ("llama3-8b", "fsdp=64", "h100:64"), {"batch": 64, "seq": 256, "remat": "full"},
        "fsdp over network", 8 * 8.03e9 * 63 / 64 / (8 * 50e9 * 0.75),
    ),
    # The same over six links of 90 GB/s.
    "links": (
        ("llama3-8b", "fsdp=64", "v5p:4x4x4"), {"batch": 64, "seq": 128, "remat": "full"},
        "fsdp over ICI x+y+z", 8 * 8.03e9 * 63 / 64 / (6 * 90e9 * 0.85),
    ),
    # Two microbatches through eight stages: 7 ticks wait for every 2 that work. Those take 8 FLOPs of 8.03e9 parameters
    # and 16384 tokens over 8 devices (0.21 s), attention (0.045 s) and norms (0.04 s).
    "bubble": (
        ("llama3-8b", "stage=8", "h100:8"),
        {"batch": 2, "seq": 8192, "microbatches": 2, "pipeline_schedule": "1f1b", "remat": "full"},
        "bubble", 7 / 2 * (8 * 8.03e9 * 16384 / 8 / (989e12 * 0.7 * 0.9) + 0.045 + 0.04),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BOUND)
def test_bound_by_names_what_takes_most_of_the_step(case: str) -> None:
    (recipe, mesh, target), training, expected, seconds = BOUND[case]
    e = price(recipe, mesh, target, **training)
    assert e.bound_by == expected, e.seconds_by_bound
    # Links by the time that they are busy; what is bound by them overlaps a little.
    axes = expected.partition(" over ")[0]
    assert e.busy.get(axes, e.seconds_by_bound[expected]) == pytest.approx(seconds, rel=0.12)
    assert sum(e.seconds_by_bound.values()) == pytest.approx(e.seconds)


def test_hbm_is_one_resource_and_its_largest_kind_is_named() -> None:
    assert (
        largest_bound({"matmuls": 3, "HBM: optimizer": 2, "HBM: attention scores": 2.5})
        == "HBM: attention scores"
    )
    assert largest_bound({"matmuls": 3, "attention": 2, "HBM: optimizer": 4}) == "matmuls"
    assert (
        largest_bound({"matmuls": 3, "fsdp over ICI x": 4, "tensor over ICI y": 2})
        == "fsdp over ICI x"
    )


def test_input_bounds_where_tokens_are_read_more_slowly_than_they_are_used() -> None:
    e = price("gpt2", "data=8", "h100:8", batch=64, seq=1024)
    assert "input" not in e.seconds_by_bound  # 64 * 1024 * 4 / 8 bytes at 50 GB/s: 0.7 us
    slow = dataclasses.replace(
        e.target, chip=dataclasses.replace(e.target.chip, network_bandwidth=1e4)
    )
    assert dataclasses.replace(e, target=slow).bound_by == "input"


# Error bands.


def test_the_error_bands_are_those_of_the_published_runs() -> None:
    """`python bench/foresight/errors.py` writes them again."""
    sys.path.insert(0, str(FORESIGHT))
    try:
        import errors
    finally:
        sys.path.remove(str(FORESIGHT))
    assert json.loads(ERRORS_FILE.read_text(encoding="utf-8"))["kinds"] == errors.bands()


def test_8_of_10_runs_of_programs_that_no_constant_was_fitted_to_lie_in_their_range() -> None:
    """Errors as left_out.py has them: constants fitted on the other programs' runs."""
    sys.path.insert(0, str(FORESIGHT))
    try:
        from report import LEFT_OUT
        from rows import read_rows
    finally:
        sys.path.remove(str(FORESIGHT))
    errors = json.loads(LEFT_OUT.read_text(encoding="utf-8"))["errors"]
    rows, _ = read_rows()
    covered = 0
    for row in rows:
        band = band_of(row.placed, row.target)
        assert band is not None
        covered += band.low <= 1 / (1 + errors[row.id]) <= band.high
    assert covered >= 0.8 * len(rows)


@pytest.mark.parametrize("name", ["tpu8t:2x2x2", "rubin:8"])
def test_an_announced_chip_has_no_range(name: str) -> None:
    run = placed("llama3-8b", "fsdp=8", batch=8, seq=4096)
    assert band_of(run, parse_target(name)) is None
    said = in_process("plan", "llama32-1b", "--on", name, "--tokens", "1B")
    assert "no range of days:" in said and "is announced" in said
    assert "published runs" not in said
    training = read_json("plan", "llama32-1b", "--on", name, "--tokens", "1B")["training"]
    assert training["error_band"] is None


def test_a_plan_has_the_ends_of_all_its_kinds() -> None:
    moe = placed("mixtral-8x7b", "fsdp=4,expert=2", batch=64, seq=4096)
    kinds = kinds_of(moe, parse_target("h100:8"))
    assert kinds == [EVERY, "h100", "bfloat16", "experts"]
    bands, band = read_bands(), band_of(moe, parse_target("h100:8"))
    assert band is not None
    assert band.low == min(bands[kind].low for kind in kinds)
    assert band.high == max(bands[kind].high for kind in kinds)
    staged = placed(
        "llama3-8b", "stage=2,fsdp=2,context=2,tensor=2", batch=64, seq=4096, microbatches=8
    )
    assert kinds_of(staged, parse_target("h100:16"))[3:] == [
        "stage axis",
        "context axis",
        "tensor axis",
    ]
    unknown = dataclasses.replace(parse_target("h100:8"), name="mine.toml")
    band = band_of(moe, unknown)
    assert UNSEEN in kinds_of(moe, unknown) and band is not None
    assert band.high >= bands[UNSEEN].high


# Prices.


def test_every_price_has_its_source_and_date() -> None:
    prices = read_prices()
    assert len(prices) > 20
    for entry in prices:
        assert entry.source.startswith("https://") and len(entry.read_on) == len("2026-11-22")
    # Known list prices: a v5p is 4.20 dollars on demand, a v6e 2.70, in us-central1.
    for chip, dollars in (("v5p", 4.2), ("v6e", 2.7)):
        price = cheapest(prices, chip, "on-demand")
        assert price is not None and price.dollars == dollars
    assert cheapest(prices, "tpu7x", "on-demand") is None  # no source was found: none is invented


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chip,provider\n", "no column 'region'"),
        ("{columns}\nh100,Us,here,monthly,1,s,2026-01-01\n", "no terms 'monthly'"),
        ("{columns}\nh100,Us,here,spot,-1,s,2026-01-01\n", "usd_per_chip_hour is '-1'"),
        ("{columns}\nh100,Us,here,spot,1,,2026-01-01\n", "source is empty"),
    ],
)
def test_a_table_of_prices_that_is_wrong_teaches(text: str, said: str, tmp_path: Path) -> None:
    file, columns = (
        tmp_path / "prices.csv",
        PRICES_FILE.read_text(encoding="utf-8").partition("\n")[0],
    )
    file.write_text(text.replace("{columns}", columns))
    with pytest.raises(ConfigError, match=said):
        read_prices(file)


def test_chips_of_a_table_are_named_as_targets_are(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    columns = PRICES_FILE.read_text(encoding="utf-8").partition("\n")[0]
    file.write_text(f"{columns}\nH100,Us,here,on-demand,2,s,2026-01-01\n")
    price = cheapest(read_prices(file), "h100", "on-demand")
    assert price is not None and price.dollars == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", "1e12"), "--tokens 1e12"),
        (("--prices", "nowhere.csv"), "nowhere.csv"),
        (("--compare", "fsdp=4", "fsdp=8"), "mesh fsdp=4 on h100:1x8"),
        (("--training.matmul-precision", "int8"), "fix:     --training.matmul-precision fp8"),
        (("--on", "tpu7x:2x2x1", "--budget", "9k"), "no on-demand price of tpu7x; the table has"),
        (("--on", "tpu7x:2x2x1,2x2x2", "--rank-by", "cost"), "--prices FILE with a row of the chip tpu7x"),
        (("--on", "v5p:2x2x1", "--terms", "committed", "--budget", "9k"), "--terms on-demand, or"),
    ],
)  # fmt: skip
def test_what_no_search_can_answer_is_refused_before_one(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def price(*_: object) -> None:
        raise AssertionError("a plan was priced")

    monkeypatch.setattr("meshwright.planner.search.estimate", price)
    on = () if "--on" in words else ("--on", "h100:8")
    assert said in in_process("plan", "llama32-1b", *on, *words, code=2)


# Goodput.


def test_goodput_is_that_of_simulated_failures() -> None:
    random.seed(1)
    good = Goodput(
        failure_seconds=3600, save_seconds=30, write_seconds=0, restart_seconds=300, period=400
    )
    useful = elapsed = 0.0
    for _ in range(20_000):  # failures, which come during restarts too
        left = random.expovariate(1 / good.failure_seconds)
        elapsed += left
        left -= good.restart_seconds
        useful += max(0, left // (good.period + good.save_seconds)) * good.period
    assert good.fraction == pytest.approx(useful / elapsed, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(save=st.floats(0.01, 100), failure=st.floats(1e3, 1e6))
def test_dalys_period_wastes_least(save: float, failure: float) -> None:
    def fraction(period: float) -> float:
        return Goodput(failure, save, 0, 300, period).fraction

    best = daly_period(save, failure)
    assert fraction(best) >= max(fraction(best * factor) for factor in (0.5, 0.8, 1.25, 2)) * (
        1 - 1e-6
    )
    assert best == pytest.approx(math.sqrt(2 * save * failure), rel=0.4)  # Young's


def test_llama_405b_on_16384_h100_is_interrupted_every_three_hours() -> None:
    """54 days of 24 hours and 419 interruptions; its report says more than 90 % effective time (arXiv:2407.21783)."""
    run = placed("llama3-405b", "stage=16,fsdp=128,tensor=8", batch=2048, seq=8192, microbatches=16)
    good = goodput(run, parse_target("h100:16384"), Reliability())
    assert good.failure_seconds == pytest.approx(54 * 86400 / 419) and 0.9 < good.fraction < 0.97
    # Parameters and two moments in float32: 12 bytes of 4.06e11, a 16384th over 64 GB/s to the host.
    assert good.save_seconds == pytest.approx(12 * 4.06e11 / 16384 / 64e9, rel=0.05)
    assert good.write_seconds == pytest.approx(12 * 4.06e11 / 2e12, rel=0.05)
    assert Reliability().chip_hours_per_failure == CHIP_HOURS_PER_FAILURE == 50_677
    with pytest.raises(ConfigError, match="above 0"):
        Reliability(restart_minutes=0)


# Targets and batches.


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("v5p:4x4x8,h100:64", ["v5p:4x4x8", "h100:64"]),
        ("h100:64,128", ["h100:64", "h100:128"]),
        ("h100:64..300", ["h100:64", "h100:128", "h100:256"]),
        ("v5p:64..600", ["v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8", "v5p:8x8x8"]),
        ("v6e:16..256", ["v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16"]),
        ("2*v6e:16x16,h100:8", ["2*v6e:16x16", "h100:8"]),
        ("v5p:4x4x4", ["v5p:4x4x4"]),
    ],
)
def test_lists_and_ranges_of_targets(text: str, targets: list[str]) -> None:
    assert expand_targets(text) == targets
    for target in targets:
        parse_target(target)


@pytest.mark.parametrize(
    ("text", "said"),
    [("64,h100:8", "'64' names no chip"), ("h100:64..8", "fix:     h100:8..64"), ("v5p:65..70", "no such number"),
     ("2*v6e:64..256", "how slices divide")],
)  # fmt: skip
def test_lists_that_name_nothing_teach(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        expand_targets(text)


def test_batches_of_a_range_double() -> None:
    run = find_recipe("llama3-8b")
    assert [r.training.batch for r in with_batches(run, "1M..5M")] == [128, 256, 512]
    assert [r.training.batch for r in with_batches(run, "1M,3M")] == [128, 384]
    assert with_batches(run, None) == [run]


# Offers.


@pytest.fixture(scope="module")
def found() -> list[Offer]:
    return mw.offers(
        "llama32-1b", "h100:8,16,v5p:2x2x2,tpu7x:2x2x1", tokens="100B", tokens_per_step="1M"
    )


def test_offers_follow_from_their_speed(found: list[Offer]) -> None:
    assert [offer.days for offer in found] == sorted(offer.days for offer in found)
    for offer in found:
        e, chips = offer.plan.estimate, offer.plan.target.chips
        days = 100e9 / e.tokens_per_second / 86400 / offer.goodput.fraction
        assert offer.days == pytest.approx(days) and offer.chip_hours == pytest.approx(
            days * 24 * chips
        )
    by_name = {str(offer.plan.target): offer for offer in found}
    h100 = by_name["h100:1x8"]
    assert h100.dollars == pytest.approx(h100.chip_hours * 2.95)  # cheapest of three providers
    assert by_name["tpu7x:2x2x1"].dollars is None
    assert rank(found, "cost")[-1] is by_name["tpu7x:2x2x1"]


def test_the_page_of_offers_tells_what_it_left_out(found: list[Offer]) -> None:
    error = ConfigError(
        "a plan", "no mesh has the memory; the closest:\n  fsdp=4", "about 2.2 times the chips"
    )
    sections = offer_page(
        found[:1], {"v5e:2x2 with 8 x 8 tokens per step": error}, found[1:]
    ).sections
    assert [section.title for section in offer_page(found).sections] == [
        s.title for s in sections[:-1]
    ]
    (table,) = sections[-1].blocks
    assert isinstance(table, Table) and len(table.rows) == len(found)
    assert table.rows[0][0] == "v5e:2x2 with 8 x 8 tokens per step" and error.truth in table.rows[0]
    assert error.fix in table.rows[0] and str(found[1].plan.target) == table.rows[1][0]


def test_the_cheapest_under_a_deadline_and_the_fastest_under_a_budget(found: list[Offer]) -> None:
    priced = [offer for offer in found if offer.dollars is not None]
    for days, dollars in itertools.product(
        (None, *(o.days for o in found)), (None, *(o.dollars for o in priced))
    ):
        if days is None and dollars is None:
            continue
        kept = [o for o in found if days is None or o.days <= days]
        kept = [
            o for o in kept if dollars is None or (o.dollars is not None and o.dollars <= dollars)
        ]
        if not kept:
            with pytest.raises(ConfigError, match="none of the plans"):
                choose(found, days, dollars)
        elif days is None:
            assert choose(found, days, dollars)[0].days == min(o.days for o in kept)
        else:
            prices = [o.dollars for o in kept if o.dollars is not None]
            assert choose(found, days, dollars)[0].dollars == (min(prices) if prices else None)


def test_an_impossible_deadline_names_the_nearest_that_is_possible(found: list[Offer]) -> None:
    fastest = found[0].days
    with pytest.raises(ConfigError) as error:
        choose(found, fastest / 2, None)
    asked = float(error.value.fix.split()[1].strip(","))
    assert fastest <= asked <= fastest + 0.1 and choose(found, asked, None)
    with pytest.raises(ConfigError) as error:
        choose(found, fastest / 2, 10.0)
    words = error.value.fix.replace(",", "").split()
    assert choose(found, float(words[1]), float(words[3]))
    without = make_offer(found[0].plan, 10**9, dataclasses.replace(read_market(), prices=()))
    with pytest.raises(ConfigError, match="no price for"):
        choose([without], None, 1e6)


@pytest.mark.parametrize(
    ("text", "dollars"), [("500k", 5e5), ("$2.5M", 2.5e6), ("3e5", 3e5), ("1.5 b", 1.5e9)],
)  # fmt: skip
def test_budgets_are_money(text: str, dollars: float) -> None:
    assert parse_budget(text) == dollars


# The command.


def test_the_command_ranks_targets_and_shows_its_arithmetic(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = in_process("plan", "llama32-1b", "--on", "h100:8,v5p:2x2x2", "--tokens-per-step", "1M", "--tokens", "100B",
                      "--out", str(plan))  # fmt: skip
    for words in ("h100:1x8: 100 B tokens /", "days of steps; /", "goodput =", "x 24 h x 8 chips =", "x $2.95 = $",
                  "as 8 of 10 published runs of programs that no constant was fitted to ("):  # fmt: skip
        assert words in " ".join(done.split()), done
    assert json.loads(plan.read_text())["target"] == "h100:1x8"


def test_json_holds_all_that_the_figures_follow_from(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    columns = PRICES_FILE.read_text(encoding="utf-8").partition("\n")[0]
    prices.write_text(f"{columns}\nh100,Ours,here,committed,1.5,contract,2026-01-01\n")
    options = ("plan", "llama32-1b", "--on", "h100:8", "--tokens-per-step", "1M", "--prices", str(prices), "--terms",
               "committed", "--restart-minutes", "20")  # fmt: skip
    training = read_json(*options)["training"]
    assert (
        training["price"]["provider"] == "Ours" and training["goodput"]["restart_seconds"] == 1200
    )
    assert training["dollars"] == pytest.approx(1.5 * training["chip_hours"])
    offers = read_json(*options, "--days", "1000")["offers"]
    assert offers[0]["days"] == pytest.approx(training["days"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "h100:8", "--days", "0.1"), "none of the plans keeps it"),
        (("--on", "h100:8", "--budget", "1e22flops"), "a finite sum of dollars"),
        (("--on", "h100:8", "--budget", "much"), "a finite sum of dollars"),
        (("--on", "h100:8,16", "--why", "fsdp=8"), "with several plans to rank"),
        (("--on", "h100:8", "--days", "99", "--rank-by", "cost"), "the cheapest comes first"),
    ],
)
def test_questions_without_an_answer_teach(words: tuple[str, ...], said: str) -> None:
    assert said in in_process("plan", "llama32-1b", "--tokens-per-step", "1M", *words, code=2)


# Devices with factors that divide little.


def notes_on(recipe: str, target: str, batch: int) -> list[str]:
    run = find_recipe(recipe)
    run = dataclasses.replace(
        run, training=dataclasses.replace(run.training, batch=batch, seq=4096)
    )
    return notes(run, search(run, parse_target(target)))


def test_a_batch_that_the_devices_do_not_divide_is_named_with_the_nearest() -> None:
    batch, rates = notes_on("llama32-1b", "h100:12", 64)[:2]
    assert (
        "12 devices do not divide a batch of 64 sequences: 64 = 5 * 12 + 4" in batch
        and "--batch 60 or 72" in batch
    )
    assert "a factor of 3" in batch and "batch 60:" in rates and "against" in rates
    for target, batch in (("h100:8", 64), ("h100:16", 24)):
        assert not [note for note in notes_on("llama32-1b", target, batch) if "divide" in note]


def test_a_factor_that_shards_no_parameter_is_named() -> None:
    """2048 = 2^11, 8192 = 2^13: nothing of a Llama divides by 9, and parameters are split evenly or not at all."""
    (note,) = notes_on("llama32-1b", "gb200:72", 288)
    assert "72 = 8 * 9: 9 divides no dimension" in note and "fsdp has at most 8" in note


def test_offloading_is_not_chosen() -> None:
    """What it saves depends on the version of libtpu; it runs where it is named."""
    run, machine = find_recipe("llama3-8b"), parse_target("v6e:4x4")
    found = search(run, machine)
    assert found.plans and not [
        plan for plan in (*found.plans, *found.too_large) if "offload" in plan.name
    ]
    named = dataclasses.replace(run.training, remat="offload")
    named_run = dataclasses.replace(run, mesh=MeshShape(fsdp=16), training=named)
    assert with_choices(named_run, machine).training.remat == "offload"


def test_an_odd_domain_is_not_slower_than_the_power_of_two_below_it() -> None:
    """At a batch that both divide: the factor of 9 is in `data`, whose gradients NVLink sums."""
    run = find_recipe("llama32-1b")
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=576, seq=4096))
    of_64, of_72 = (
        search(run, parse_target(target)).plans[0].estimate.seconds
        for target in ("gb200:64", "gb200:72")
    )
    assert of_72 <= of_64


def test_nothing_that_divides_is_an_error_with_the_nearest_batches() -> None:
    run = find_recipe("llama32-1b")
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=64, seq=1024))
    assert nearest_batches(run, parse_target("h100:40")) == [40, 80]
    assert nearest_batches(run, parse_target("h100:128")) == []  # tensor takes a factor of two
