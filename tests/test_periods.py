"""Layers of several kinds that repeat: their scan against a loop, their stages, and Gemma 3 on meshes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (
    MODELS,
    QWEN3_NEXT,
    assert_same_steps,
    device_run_of,
    tiny_run,
    train,
    train_on_one_device,
)

import meshwright as mw
from meshwright.models.blocks.rotary import RopeScaling
from meshwright.models.blocks.yarn import Yarn
from meshwright.models.flops import layer_flops
from meshwright.models.layer_scan import join, scan_layers, sections
from meshwright.runs.placed_run import place_run
from meshwright.sharding.layer_cuts import assign_layers, loop_placement
from meshwright.step.train_step import build_train_step
from xlacensus.jaxprs import all_jaxprs

GEMMA = mw.Gemma3(
    50,
    64,
    5,
    8,
    4,
    8,
    96,
    vocab_multiple=16,
    local_layers=1,
    sliding_window=5,
    query_scale=6,
    rope_factor=4.0,
)


LLAMA4 = mw.Llama4(
    50, 64, 6, 8, vocab_multiple=16, kv_heads=4, mlp=96, attention_chunk=6, temperature_floor=4, experts=4,
    expert_mlp=32, expert_interval=2,
)  # fmt: skip
PATTERNS: dict[str, mw.Model] = {
    "gemma2": mw.Gemma2(
        50, 64, 3, 8, 4, 8, 96, vocab_multiple=16, sliding_window=5, softcap=0.5, logit_softcap=2.0
    ),
    "gpt_oss": mw.GptOss(
        50, 64, 5, 8, 4, 8, vocab_multiple=16, sliding_window=5, experts=4, experts_per_token=2, expert_mlp=32,
        rope_scaling=Yarn(original_max_position_embeddings=64),
    ),
    "llama4": LLAMA4,
    "qwen3_next": QWEN3_NEXT,
    "olmo3": mw.Olmo3(50, 64, 3, 8, vocab_multiple=16, kv_heads=8, mlp=96, local_layers=1, sliding_window=5),
}  # fmt: skip


def test_the_scan_saves_no_parameters() -> None:
    """The backward pass reads the parameters themselves, not rows that each layer of a period has taken of them."""
    kinds = [("blocks", lambda x, w, i, k=k: (jnp.sin(x @ w) + k, {})) for k in range(3)]
    w_LDD, x = jnp.ones((6, 8, 8)), jnp.ones((4, 8))

    def loss(w_LDD: Any) -> Any:
        return scan_layers(kinds, x, {"blocks": w_LDD}, {"blocks": np.arange(6)}, remat="full")[
            0
        ].sum()

    assert "f32[2,8,8]" not in str(jax.make_jaxpr(jax.grad(loss))(w_LDD))


@pytest.mark.parametrize("kinds", [1, 3])
def test_a_scan_over_some_rows_copies_none(kinds: int) -> None:
    """What a program holds besides its gradients is a row of each kind, not the six that are scanned."""
    turns = [("blocks", lambda x, w, i, k=k: (jnp.sin(x @ w) + k, {})) for k in range(kinds)]
    w_LDD, rows = jnp.ones((8, 256, 256)), {"blocks": slice(1, 7)}

    def loss(w_LDD: Any, rows: Any = rows) -> Any:
        stacked, index = {"blocks": w_LDD}, {"blocks": np.arange(len(w_LDD))}
        return scan_layers(turns, jnp.ones((4, 256)), stacked, index, rows=rows, remat="full")[
            0
        ].sum()

    gradients, layer = jax.grad(loss)(w_LDD), w_LDD[0].nbytes
    np.testing.assert_allclose(
        gradients[1:7], jax.grad(lambda w: loss(w, None))(w_LDD[1:7]), rtol=1e-6
    )
    assert not gradients[0].any() and not gradients[7].any()
    memory = jax.jit(loss).lower(w_LDD).compile().memory_analysis()
    assert memory.temp_size_in_bytes < (kinds + 1) * layer
    lines = jax.jit(jax.grad(loss)).lower(w_LDD).as_text().splitlines()
    assert not [line for line in lines if "stablehlo.slice" in line and "x256x256x" in line]


@pytest.mark.parametrize(
    ("kinds", "rows", "barriers"), [(3, 6, 3), (3, 7, 4), (1, 6, 0), (1, 1, 1)]
)
def test_a_layer_is_recomputed_when_its_gradient_is_there(
    kinds: int, rows: int, barriers: int
) -> None:
    """Where a body has other layers, or XLA inlines it; a loop over one layer keeps the recomputation apart itself."""
    turns = [("blocks", lambda x, w, i, k=k: (jnp.sin(x @ w) + k, {})) for k in range(kinds)]

    def loss(w_LDD: Any) -> Any:
        x = jnp.ones((4, 8))
        return scan_layers(turns, x, {"blocks": w_LDD}, {"blocks": np.arange(rows)}, remat="full")[
            0
        ].sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((rows, 8, 8))).as_text()
    assert text.count("optimization_barrier") == barriers


@pytest.mark.parametrize(("model", "barriers"), [("gemma2", 3), ("llama", 0)])
def test_a_layer_of_a_period_has_its_gradients_before_the_next(model: str, barriers: int) -> None:
    """The gradient of a layer's input waits for those of its weights: two in the loop, and one after it."""
    device_run = device_run_of(
        tiny_run(PATTERNS.get(model) or MODELS[model], "data=1", remat="none")
    )
    step = jax.jit(build_train_step(device_run)).trace(
        device_run.abstract, device_run.abstract_batch
    )
    equations = (equation for inner, _ in all_jaxprs(step.jaxpr.jaxpr) for equation in inner.eqns)
    assert (
        sum(e.primitive.name == "optimization_barrier" and len(e.invars) > 5 for e in equations)
        == barriers
    )


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("layers", [6, 8, 2])
def test_the_scan_is_a_loop_over_layers(layers: int, remat: str) -> None:
    """Layers after the last whole period, and fewer layers than a period."""
    kinds = tuple(
        lambda x, w, i, k=k: (jnp.sin(x * w) + k * i, {"kind": k * jnp.ones(()), "x": x})
        for k in range(3)
    )
    w_L, x = jnp.linspace(0.5, 1.5, layers), jnp.arange(4.0)

    def scanned(x: Any, w_L: Any) -> Any:
        period = [("blocks", kind) for kind in kinds]
        x, aux = scan_layers(period, x, {"blocks": w_L}, {"blocks": np.arange(layers)}, remat=remat)
        return x, aux["blocks"]

    def looped(x: Any, w_L: Any) -> Any:
        aux = []
        for i in range(layers):
            x, more = kinds[i % 3](x, w_L[i], i)
            aux.append(more)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *aux)

    for a, b in zip(jax.tree.leaves(scanned(x, w_L)), jax.tree.leaves(looped(x, w_L)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    grads = [
        jax.grad(lambda *args, f=f: f(*args)[0].sum(), (0, 1))(x, w_L) for f in (scanned, looped)
    ]
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(grads[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_parts_begin_with_a_period() -> None:
    assignment = assign_layers((1.0,) * 26, 2, 1, loop_placement, 6)
    assert assignment.boundaries == (0, 12, 26)
    rows = assignment.rows(range(26))[:, 0]
    assert all(
        layer % 6 == row % 6 for stage in rows for row, layer in enumerate(stage) if layer >= 0
    )
    with pytest.raises(
        mw.ConfigError,
        match=r"26 / 6 are 5 periods, and stage=4 of 2 virtual stages needs 4 \* 2 = 8 parts",
    ):
        assign_layers((1.0,) * 26, 4, 2, loop_placement, 6)


def test_a_global_layer_costs_more_than_a_local_one() -> None:
    model = dataclasses.replace(GEMMA, sliding_window=64)
    local, whole = layer_flops(model, 4096)[:2]
    seen = (64 * 65 / 2 + (4096 - 64) * 64) / 4096
    assert whole - local == pytest.approx(4 * 8 * 8 * (4097 / 2 - seen))


def test_gathering_ahead_is_refused_for_several_kinds() -> None:
    run = tiny_run(GEMMA, "fsdp=2", gather_ahead="layer")
    with pytest.raises(mw.ConfigError, match="the model's layers repeat with a period of 2"):
        device_run_of(run)


def test_stacks_take_turns_as_in_a_loop_over_layers() -> None:
    """Two stacks, layers after the last whole period, parts that begin inside of one."""
    model = dataclasses.replace(LLAMA4, layers=7)
    spec = model.spec()
    assert [layer.stack for layer in spec.layers[:4]] == [
        "dense_blocks",
        "blocks",
    ] * 2 and spec.period == 4
    kinds = {stack: [lambda x, w, i, k=k: (jnp.sin(x * w) + k * i, {"x": x}) for k in (c, c + 2)]
             for c, stack in enumerate(("dense_blocks", "blocks"))}  # fmt: skip
    w = {"dense_blocks": jnp.linspace(0.5, 0.8, 4), "blocks": jnp.linspace(0.9, 1.5, 3)}
    index = {stack: np.array(spec.layers_of(stack)) for stack in w}
    x, aux = jnp.arange(4.0), dict[str, list[Any]](dense_blocks=[], blocks=[])
    found = []
    for parts in ([(slice(0, 7), "none")], [(slice(0, 3), "projections"), (slice(3, 7), "full")]):
        (section,), last, outputs = sections(spec, kinds), x, []
        assert (section.first, section.layers) == (0, 7)
        for part, remat in parts:
            rows = section.rows(spec, part)
            at = (part.start or 0) % spec.period
            last, more = scan_layers(
                section.period[at:] + section.period[:at], last, w, index, rows=rows, remat=remat
            )
            outputs.append(more)
        found.append((last, join(outputs)))
    for i, layer in enumerate(spec.layers):
        row = spec.layers_of(layer.stack).index(i)
        aux[layer.stack].append(x)
        x = kinds[layer.stack][row % 2](x, w[layer.stack][row], i)[0]
    for last, given in found:
        np.testing.assert_allclose(last, x, rtol=1e-6)
        for stack, values in aux.items():
            np.testing.assert_allclose(given[stack]["x"], jnp.stack(values), rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        ("llama4", "stage=2,context=2,tensor=2", {"microbatches": 2}),
        pytest.param("llama4", "fsdp=2,expert=2,tensor=2", {"saved_layers": 3, "remat": "full"},
                     marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", "stage=2,expert=2,tensor=2", {"microbatches": 2}, marks=pytest.mark.exhaustive),
        ("gpt_oss", "stage=2,context=2,tensor=2", {"microbatches": 2, "context_strategy": "ulysses"}),
        pytest.param("gpt_oss", "fsdp=2,expert=2,context=2", {"context_strategy": "all_gather"},
                     marks=pytest.mark.exhaustive),
        pytest.param("gemma2", "stage=2,context=2,tensor=2", {"microbatches": 2}, marks=pytest.mark.exhaustive),
        pytest.param("olmo3", "stage=2,context=2,tensor=2", {"microbatches": 2}, marks=pytest.mark.exhaustive),
        ("llama4", "stage=2,context=2,tensor=2", {"microbatches": 2, "layout": "folded"}),
        pytest.param("qwen3_next", "fsdp=2,expert=2,tensor=2", {"layout": "folded"}, marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss", "fsdp=2,expert=2,tensor=2", {"layout": "folded"}, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_every_pattern_has_the_numbers_of_one_device(
    family: str, mesh: str, changes: dict[str, Any]
) -> None:
    run = tiny_run(PATTERNS[family], mesh, **changes)
    one = train_on_one_device(run, 3)
    assert_same_steps(train(run, 3, initial=one.initial), one)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no experts": ("llama4", {"layers": 1}, "fix: .*--model.expert-interval 1"),
    "no chunk": ("llama4", {"attention_chunk": 0}, "a whole number of at least 1"),
    "few experts": ("llama4", {"experts_per_token": 5}, "5 experts per token of 4 experts"),
    "none of the experts": (
        "gpt_oss",
        {"experts_per_token": 0},
        "--model.experts-per-token 0.*at least 1",
    ),
    "sees nothing": ("gpt_oss", {"sliding_window": 0}, "--model.sliding-window 0.*at least 1"),
    "no local layer": ("olmo3", {"local_layers": 0}, "--model.local-layers 0.*at least 1"),
    "negative base": ("olmo3", {"rope_theta": -1.0}, "fix: .*--model.rope-theta 500000.0"),
    "two scalings": (
        "llama4",
        {"rope_scaling": RopeScaling(), "rope_factor": 2.0},
        "scales the same rotary freq",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_patterns_are_refused(case: str) -> None:
    family, changes, message = WRONG[case]
    with pytest.raises(mw.ConfigError, match=f"(?s){message}"):
        place_run(tiny_run(dataclasses.replace(PATTERNS[family], **changes)), mw.MeshShape())


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss-20b",
        "gemma2-2b",
        "gemma4-26b-a4b",
        "olmo3-7b",
        "llama4-maverick",
        "qwen3-next-80b-a3b",
    ],
)
def test_patterns_shrink(name: str) -> None:
    shape = mw.MeshShape(stage=2, tensor=2)
    small = mw.recipe(name).model.shrunk(shape, 2)
    assert small.spec().period == 2
    run = dataclasses.replace(tiny_run(small), model=small, mesh=shape)
    assert place_run(run, shape).layout.stages.boundaries == (0, 2, 4)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("stage=2,context=2,tensor=2", {"microbatches": 2}),
        pytest.param("fsdp=4,data=2", {"saved_layers": 3}, marks=pytest.mark.exhaustive),
        pytest.param("stage=2,fsdp=2", {"microbatches": 2, "pipeline_schedule": "zero_bubble"},
                     marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_gemma_has_the_numbers_of_one_device(mesh: str, changes: dict[str, Any]) -> None:
    """Stages of unequal length with padding rows, a window across chunks of a ring, a part that begins in a period."""
    run = tiny_run(GEMMA, mesh, **changes)
    one = train_on_one_device(run, 3)
    assert_same_steps(train(run, 3, initial=one.initial), one)


def test_gemma_shrinks_with_its_pattern() -> None:
    shape = mw.MeshShape(stage=2, tensor=2)
    small = mw.recipe("gemma3-4b").model.shrunk(shape, 2)
    assert small.spec().period == 2
    run = dataclasses.replace(tiny_run(small), model=small, mesh=shape)
    assert place_run(run, shape).layout.stages.boundaries == (0, 2, 4)
