"""Placements as arithmetic; layouts from outside the package train to the numbers of one device."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import outside_parts
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outside.extensions.fsdp_2d import fsdp_2d
from tiny_runs import MODELS, assert_same_steps, device_run_of, tiny_run, train, train_on_one_device

from meshwright.api.layout import show
from meshwright.comm.hierarchical import ONE_SLICE
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.runs.catalogue import list_recipes, parameters_of
from meshwright.runs.placed_run import place_run
from meshwright.runs.recipe import find_recipe
from meshwright.sharding.layouts import LAYOUTS, MEGATRON, find_layout
from meshwright.sharding.params import Param, count_params, named_leaves
from meshwright.sharding.placed_params import plan_gathers
from meshwright.sharding.placement import (
    Layout,
    Placements,
    axes_of,
    local_shape,
    notation,
    place_param,
)
from meshwright.trust import own
from meshwright.views.layout_page import layout_report, layout_sections, tensor_pictures

degree = st.sampled_from([1, 2, 4, 8])
ALL_LAYOUTS = {**LAYOUTS, "two_dimensional": fsdp_2d}


@given(
    dims=st.sampled_from(["VD", "LDF", "LFD", "LDNH", "LNHD", "LD", "D"]),
    sizes=st.lists(st.sampled_from([8, 16, 24, 64]), min_size=4, max_size=4),
    data=degree, fsdp=degree, tensor=degree,
    layout=st.sampled_from(sorted(ALL_LAYOUTS)),
    min_size=st.sampled_from([1, 100, 10**6]),
)  # fmt: skip
def test_every_placement_divides_and_uses_an_axis_once(
    dims, sizes, data, fsdp, tensor, layout, min_size
) -> None:
    shape, mesh = tuple(sizes[: len(dims)]), MeshShape(data=data, fsdp=fsdp, tensor=tensor)
    try:
        placed = place_param(
            "w", shape, dims, layout=ALL_LAYOUTS[layout], mesh=mesh, min_size=min_size
        )
    except ConfigError as error:
        assert "no dimension divides" in str(error) or "does not divide" in str(error)
        return
    for placement in (placed.in_use, placed.at_rest, placed.optimizer):
        axes = axes_of(placement)
        assert len(axes) == len(set(axes))
        local = local_shape(shape, placement, mesh)
        assert math.prod(local) * mesh.over(axes) == math.prod(shape)
    per_layer = math.prod(n for n, d in zip(shape, dims, strict=True) if d != "L")
    # Norms and biases are whole.
    is_matrix = len(dims.replace("L", "")) > 1
    assert ("fsdp" in axes_of(placed.at_rest)) == (fsdp > 1 and per_layer >= min_size and is_matrix)
    assert all(axes == () for axes, d in zip(placed.optimizer, dims, strict=True) if d == "L")


def test_folded_experts_keep_their_width() -> None:
    """Experts over the axes of a sequence too; the other weights, and experts in other layouts, are cut by `tensor`."""
    mesh, shape = MeshShape(fsdp=2, expert=2, context=2, tensor=2), (3, 16, 64, 32)
    for name, in_use in (
        ("fsdp", "w[L, E/expert, D, F/tensor]"),
        ("folded", "w[L, E/expert+context+tensor, D, F]"),
    ):
        placed = place_param("w", shape, "LEDF", layout=LAYOUTS[name], mesh=mesh, min_size=1)
        assert notation("w", "LEDF", placed.in_use) == in_use
        assert placed.at_rest[1] == (*placed.in_use[1], "fsdp")
        dense = place_param("w", shape[1:], "LDF", layout=LAYOUTS[name], mesh=mesh, min_size=1)
        assert dense.in_use[2] == ("tensor",)
    with pytest.raises(
        ConfigError, match=r"E=12 does not divide: 12 = 1 \* 8 \+ 4(.|\n)*E of 8 or 16"
    ):
        place_param("w", (3, 12, 64, 32), "LEDF", layout=LAYOUTS["folded"], mesh=mesh, min_size=1)


def test_notation_of_the_scaling_book() -> None:
    placed = place_param(
        "w", (32, 64), "DF", layout=LAYOUTS["fsdp"], mesh=MeshShape(fsdp=2, tensor=2), min_size=1
    )
    assert notation("w", "DF", placed.at_rest) == "w[D/fsdp, F/tensor]"
    assert notation("w", "DF", placed.in_use) == "w[D, F/tensor]"


@pytest.mark.exhaustive
def test_two_dimensional_fsdp_gives_the_numbers_of_one_device() -> None:
    run = tiny_run(MODELS["llama"], "data=2,fsdp=2,tensor=2", layout=fsdp_2d)
    placements = named_leaves(device_run_of(run).layout.placements)
    assert notation("w", "LDF", placements["blocks.up"].at_rest) == "w[L, D/fsdp, F/tensor+data]"
    assert (
        notation("w", "LDNH", placements["blocks.query"].at_rest)
        == "w[L, D/fsdp, N/tensor, H/data]"
    )
    one = train_on_one_device(run, 20)
    many = train(run, 20, initial=one.initial)
    assert_same_steps(many, one)
    np.testing.assert_allclose(many.evaluate(), one.evaluate(), rtol=1e-5)


def test_zero1_with_parameters_sharded_by_letter() -> None:
    """ZeRO-1 over the axes that a parameter's own placement leaves: `data`, where only D is sharded at rest."""
    layout = Layout(MEGATRON, ("fsdp",), ("fsdp", "data"), "", at_rest={"D": ("fsdp",)})
    placed = place_param(
        "w", (8, 16), "DF", layout=layout, mesh=MeshShape(data=4, fsdp=2), min_size=1
    )
    assert placed.at_rest == (("fsdp",), ()) and placed.optimizer == (("fsdp",), ("data",))


@pytest.mark.parametrize(
    ("table", "at_rest", "message"),
    [
        ({**MEGATRON, "V": ("tensor",)}, {}, "it shards V in use over"),
        (MEGATRON, {"L": ("data",)}, "layers are gathered one at a time"),
        (MEGATRON, {"D": ("replica",)}, "not a dimension letter with mesh axes"),
    ],
)
def test_layouts_that_the_step_cannot_compute_with_are_refused(
    table: Mapping[str, Any],
    at_rest: Mapping[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(table, ("fsdp",), ("fsdp",), "", at_rest=at_rest)
    monkeypatch.setattr(outside_parts, "broken", layout, raising=False)
    with pytest.raises(ConfigError, match=message):
        find_layout(own("outside_parts:broken"))


def test_unknown_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'zero1'"):
        find_layout("zero")
    with pytest.raises(ConfigError, match="it is a PipelineSchedule"):
        find_layout(own("outside.extensions.zbv:zbv"))


@pytest.mark.parametrize(
    ("in_use", "at_rest"),
    [((("tensor",), ()), ((), ())), ((("tensor",), ()), (("fsdp", "tensor"), ()))],
)
def test_placements_that_no_all_gather_connects_are_refused(in_use: Any, at_rest: Any) -> None:
    placements = Placements(in_use, at_rest, at_rest)
    with pytest.raises(ConfigError, match="an all-gather removes the last axes"):
        plan_gathers(
            {"w": Param((8, 8), "FD")},
            {"w": placements},
            compute_dtype=None,
            reduce_dtype=None,
            dcn=ONE_SLICE,
        )


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2", 0.124), ("gpt2-xl", 1.558), ("llama2-7b", 6.738), ("llama2-13b", 13.016), ("llama2-70b", 68.977),
     ("llama3-8b", 8.030), ("llama3-70b", 70.554), ("llama3-405b", 405.853), ("llama32-1b", 1.236),
     ("llama32-3b", 3.213), ("mistral-7b", 7.242), ("qwen2-0-5b", 0.494), ("qwen2-7b", 7.616), ("qwen2-72b", 72.706),
     ("qwen3-0-6b", 0.596), ("qwen3-8b", 8.191), ("qwen3-32b", 32.762), ("llama1-7b", 6.738), ("llama1-65b", 65.286),
     ("qwen2-1-5b", 1.544), ("qwen25-3b", 3.086), ("qwen25-14b", 14.770), ("qwen25-32b", 32.764), ("qwen3-1-7b", 1.721),
     ("qwen3-4b", 4.022), ("qwen3-14b", 14.768), ("olmo2-1b", 1.485), ("olmo2-7b", 7.299), ("olmo2-13b", 13.716),
     ("olmo2-32b", 32.234), ("gemma3-270m", 0.268), ("gemma3-1b", 1.000), ("gemma3-4b", 3.880), ("gemma3-12b", 11.766),
     ("gemma3-27b", 27.009), ("gemma2-2b", 2.614), ("gemma2-9b", 9.242), ("gemma2-27b", 27.227),
     ("gpt-oss-20b", 20.915), ("gpt-oss-120b", 116.829), ("olmo3-7b", 7.298), ("olmo3-32b", 32.234),
     ("llama4-scout", 107.770), ("llama4-maverick", 400.712), ("qwen35-9b", 8.954), ("qwen35-27b", 26.896),
     ("qwen35-35b-a3b", 34.661), ("gemma4-12b", 11.907), ("gemma4-26b-a4b", 25.233), ("gemma4-31b", 30.697),
     ("granite31-8b", 8.171), ("ministral3-8b", 8.490),
     ("command-r-plus", 103.811), ("granite4-h-350m", 0.340), ("nemotron3-super-120b-a12b", 120.669),
     ("command-r7b", 8.028), ("command-a", 111.058), ("granite4-h-micro", 3.191),
     ("granite4-h-tiny", 6.939), ("granite4-h-small", 32.207),
     ("nemotron-h-8b", 8.101), ("nemotron-nano2-9b", 8.888), ("nemotron3-nano-30b-a3b", 31.578),
     ("kimi-linear-48b-a3b", 49.123)],
)  # fmt: skip
def test_recipes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert count_params(find_recipe(name).model.params()) / 1e9 == pytest.approx(billions, abs=6e-4)


def test_every_recipe_has_a_summary_and_fits_one_device() -> None:
    for name, summary in list_recipes().items():
        run = find_recipe(name)
        model = run.model
        if (
            not model.vocab
        ):  # that of the tokenizer: of tiny Shakespeare's 65 characters, or bpe:1024
            vocab = int(run.data.tokenizer.partition(":")[2] or 65)
            model = dataclasses.replace(model, vocab=vocab)
        parameters = count_params(model.params())
        assert parameters_of(summary) == pytest.approx(parameters, rel=0.02), summary
        if run.model.vocab is not None:
            assert place_run(run, MeshShape()).layout.shape == MeshShape()


def test_bytes_add_up_over_the_mesh() -> None:
    run = find_recipe("llama3-70b")
    report = layout_report(place_run(run, MeshShape(fsdp=64, tensor=8)))
    # Only the norms are whole on every device.
    norms = (2 * 80 + 1) * 8192
    assert report.bytes_parameters * 512 / 4 == pytest.approx(
        report.parameters + 511 * norms, rel=1e-9
    )
    assert report.bytes_optimizer == pytest.approx(2 * report.bytes_parameters, rel=1e-4)
    assert set(named_leaves({"a": {"b": 1}})) == {"a.b"}


@pytest.mark.parametrize("mesh", ["context=2,fsdp=2", "data=2,fsdp=2"])
def test_a_batch_is_drawn_alike_on_a_terminal_and_on_a_page(mesh: str) -> None:
    placed = show("tiny", mesh=mesh).placed
    tensors = layout_sections(placed, None)[0].blocks[0].data["tensors"]  # type: ignore[attr-defined]
    picture = tensor_pictures(placed, ("embed",))[-1]
    assert f"tokens[{', '.join(picture.dims)}]" == tensors[-1]["sharded_text"]
    assert ("T/context" in picture.dims) == ("context" in mesh)
