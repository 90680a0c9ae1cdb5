"""Layers of one half, in any order: the runs that they are computed in, what they keep and cost, what is refused."""

import dataclasses
from typing import Any

import pytest
from tiny_runs import assert_same_steps, tiny_run, train, train_on_one_device

import meshwright as mw
from meshwright.callers import command_line
from meshwright.cli.verbs import parse_verb
from meshwright.generation.cache import CachePlan
from meshwright.hardware.machine import Machine
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.layers import Norm
from meshwright.models.decoder import Block
from meshwright.models.families.kimi_linear import KimiLinear
from meshwright.models.families.nemotron_h import NemotronH
from meshwright.models.flops import forward_flops
from meshwright.models.layer_runs import shortest_runs
from meshwright.planner.traffic import movements
from meshwright.planner.work import recomputed_roles, work_of
from meshwright.runs.placed_run import place_run
from meshwright.runs.settle import settle

TINY = NemotronH(
    50, 32, 7, 4, vocab_multiple=16, kv_heads=2, pattern="M*MEME-", mlp=48, experts=4, expert_mlp=24,
    shared_mlp=48, mamba_heads=4, mamba_head_size=16, mamba_groups=2, mamba_state=8,
)  # fmt: skip
FEED_FORWARD = FeedForward(32, 48, 0.02)
NORM = Norm("rms", 1e-5)


@pytest.mark.parametrize(
    ("kinds", "bodies"),
    [
        ("MEMEM*E" * 5 + "MEMEMEM*E" + "ME" * 4, 14),  # Nemotron 3 Nano
        ("M-M-M-M*-M-" * 4 + "M-" * 4, 13),  # Nemotron-H 8B
        ("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 19),  # Nemotron Nano 2 9B
        (
            "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
            24,
        ),  # Nemotron 3 Super
        ("M*-E", 4),
        ("MMMM", 1),
    ],
)
def test_runs_have_all_layers_in_order_and_the_fewest_bodies(kinds: str, bodies: int) -> None:
    runs = shortest_runs(kinds)
    written = [kinds[run.first : run.first + run.period] for run in runs]
    repeated = [body * (run.layers // run.period) for body, run in zip(written, runs, strict=True)]
    assert "".join(repeated) == kinds
    assert sum(run.period for run in runs) == bodies
    assert [run.first for run in runs] == [
        sum(r.layers for r in runs[:i]) for i in range(len(runs))
    ]


def test_the_published_model() -> None:
    """Weights that a token meets, a cache that grows in the layers with attention alone, and states."""
    model: Any = mw.recipe("nemotron3-nano-30b-a3b").model
    width, inner, keys = 2688, 4096, 2 * 8 * 128
    space = width * (2 * inner + keys + 64) + inner * width
    attention = 2 * width * (32 + 2) * 128
    experts = width * 128 + 2 * width * (6 * 1856 + 3712)
    weights = 23 * space + 6 * attention + 23 * experts + 131072 * width
    items = forward_flops(model, 8192)
    matmuls = sum(items.values()) - items["attention"] - items["state space"]
    assert matmuls == pytest.approx(2 * weights)
    short, long = (
        CachePlan(model.spec(), mw.MeshShape(), 1, slots, "bfloat16").bytes_per_device
        for slots in (128, 256)
    )
    assert long - short == 6 * 128 * 2 * 2 * 128 * 2
    assert 2 * short - long == 23 * 4 * 64 * (64 * 128 + 3 * (64 + 2 * 128))


def test_a_pattern_that_repeats_has_a_period() -> None:
    twice = dataclasses.replace(TINY, pattern="M*E-", layers=8)
    assert twice.decoder.period == 4 and not twice.decoder.runs
    place_run(tiny_run(twice, "stage=2"))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("stage=2", "without a period 7 layers are 1 part, and stage=2 needs 2 parts"),
        ("context=2", "state passes from token to token"),
    ],
)
def test_what_is_not_computed_is_refused(mesh: str, message: str) -> None:
    with pytest.raises(mw.ConfigError, match=message):
        place_run(tiny_run(TINY, mesh))


def test_a_stack_of_several_kinds_in_any_order_is_refused() -> None:
    blocks = [Block("blocks", None, FeedForward(32, width, 0.02), NORM) for width in (48, 48, 96)]
    with pytest.raises(mw.ConfigError, match="several kinds in blocks, in any order"):
        TINY.in_order(blocks)


@pytest.mark.parametrize(
    ("halves", "place", "message"),
    [
        ((None, None), "before", "without halves"),
        ((None, FEED_FORWARD), "shared", "parallel halves are two"),
    ],
)
def test_a_layer_without_what_it_needs_is_refused(halves: Any, place: Any, message: str) -> None:
    with pytest.raises(mw.ConfigError, match=message):
        Block("blocks", *halves, NORM, place)


@pytest.mark.parametrize(
    ("fields", "truth", "fix"),
    [
        ({"pattern": "MXM"}, "at least one letter, of M", "--model.pattern 'MM'"),
        ({"pattern": "me"}, "at least one letter, of M", "--model.pattern 'ME'"),
        ({"pattern": "M\n"}, "at least one letter, of M", "--model.pattern 'M'"),
        ({"pattern": ""}, "at least one letter, of M", "--model.pattern 'ME*-'"),
        ({"layers": 3}, "none is left out", "--model.layers 7, or --model.pattern 'M*M'"),
    ],
)
def test_a_pattern_that_is_not_computed_is_refused(
    fields: dict[str, Any], truth: str, fix: str
) -> None:
    with command_line(), pytest.raises(mw.ConfigError) as refused:
        dataclasses.replace(TINY, **fields).spec()
    assert truth in refused.value.truth
    assert refused.value.fix == fix


def test_a_pattern_may_begin_with_a_feed_forward() -> None:
    """On the command line too, where a word with a dash is an option."""
    for words in (["--model.pattern", "-M"], ["--model.pattern=-M"]):
        options: Any = parse_verb("show", ["nemotron-h-8b", *words, "--model.layers", "2"])
        assert options.run.model.kinds == "-M"


def test_the_fix_of_one_layer_of_kimi_linear_is_a_model() -> None:
    with command_line(), pytest.raises(mw.ConfigError) as refused:
        KimiLinear(layers=1).spec()
    assert refused.value.fix == "--model.layers 2 --model.full-attention-interval 2"
    assert len(KimiLinear(layers=2, full_attention_interval=2).spec().layers) == 2


@pytest.mark.parametrize(
    "model", [NemotronH(50, 32, 5, 4, kv_heads=4, pattern="ME*M-"), KimiLinear(50, 32, 27, 4)],
    ids=["nemotron", "kimi"],
)  # fmt: skip
def test_a_model_without_a_period_is_rehearsed_with_a_loop_and_without_a_period(model: Any) -> None:
    """With every kind of layers that it has: a rehearsal compiles the loops that the run will have."""
    assert model.decoder.runs
    small: Any = model.shrunk(mw.MeshShape(fsdp=2), 2)
    assert any(run.layers >= 2 * run.period for run in small.decoder.runs)
    assert len(small.decoder.runs) > 1
    assert small.decoder.stacks.keys() == model.decoder.stacks.keys()


LATENT = dataclasses.replace(TINY, pattern="*E", layers=2, kv_heads=4, expert_latent=16)


@pytest.mark.long
def test_experts_in_a_latent_have_the_numbers_of_one_device() -> None:
    """Split over `tensor` and `context` too, where rows leave from each device's own positions."""
    model = dataclasses.replace(LATENT, experts=8)
    run = tiny_run(model, "expert=2,context=2,tensor=2", layout="folded")
    one = train_on_one_device(run, 3)
    assert_same_steps(train(run, 3, initial=one.initial), one)


def test_experts_in_a_latent_send_less_and_are_counted() -> None:
    """Rows of 16 for 32 features; the output is sent again where their hidden layer is not saved."""
    wide = dataclasses.replace(LATENT, expert_latent=None)
    bytes_of = {}
    for name, model in (("latent", LATENT), ("wide", wide)):
        settled = settle(place_run(tiny_run(model, "expert=2,tensor=2")), Machine("cuda"))
        traffic = movements(settled, work_of(settled), recomputed_roles("none"))
        bytes_of[name] = [m.payload for m in traffic if "experts" in m.purpose]
        gathered = [m for m in traffic if m.purpose == "sequence gathered"]
        halves = {"latent": 2.5, "wide": 2.0}[name]
        assert sum(m.times for m in gathered if m.during == "forward") == halves + 1
    assert bytes_of["latent"] == [payload / 2 for payload in bytes_of["wide"]]
    items = forward_flops(LATENT, 32)
    assert items["projections"] == 2 * 2 * 32 * 16
    assert items["experts"] == 2 * 2 * 16 * 24 * LATENT.experts_per_token


def test_layers_with_experts_are_counted_in_all_stacks() -> None:
    placed = place_run(tiny_run(KimiLinear(50, 32, 8, 4, dense_layers=1), "expert=2"))
    assert {layer.stack for layer in placed.layout.spec.layers if layer.experts} == {
        "blocks", "linear_blocks",
    }  # fmt: skip
    assert work_of(placed).expert_layers == pytest.approx(7)


def test_a_half_moves_as_much_over_tensor_whichever_it_is() -> None:
    moved = []
    for pattern in ("M*", "M-"):
        model = dataclasses.replace(TINY, pattern=pattern, layers=2)
        settled = settle(place_run(tiny_run(model, "tensor=2")), Machine("cuda"))
        traffic = movements(settled, work_of(settled), recomputed_roles("none"))
        moved.append([m for m in traffic if m.purpose == "sequence gathered"])
    assert moved[0] == moved[1]
    halves, unembedding = 2, 1
    assert [m.times for m in moved[0]] == [halves + unembedding]
