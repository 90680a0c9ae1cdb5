"""Low-precision matmuls: products near float32, the numbers of one device on every mesh; float32 that is float32."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import MODELS, Trained, device_run_of, random_batch, tiny_run, train

import meshwright
from meshwright.analysis.run_lints import lint_precision
from meshwright.errors import ConfigError
from meshwright.formatting import format_count
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.machine import Machine
from meshwright.hardware.targets import parse_target
from meshwright.models import quantisation as products
from meshwright.models.blocks.experts import round_rows
from meshwright.models.blocks.layers import linear
from meshwright.models.kernels import choose
from meshwright.models.kernels.choose import GroupedProducts
from meshwright.models.kernels.grouped_triton import multiply, multiply_transposed
from meshwright.models.quantisation import (
    RECIPES,
    SCOPE,
    LowPrecisionWeight,
    MatmulPrecision,
    WeightPlan,
    check_precision,
)
from meshwright.planner.estimate import estimate
from meshwright.runs.placed_run import place_run
from meshwright.sharding.layouts import TOKEN_AXES
from meshwright.sharding.params import named_leaves
from meshwright.step.eval_step import build_eval_step
from meshwright.step.gradients import build_gradients
from meshwright.step.train_step import build_train_step
from meshwright.trust import own
from meshwright.views.layout import precision_blocks
from xlacensus.hlo.parser import parse_module

exhaustive = pytest.mark.exhaustive
TEXTS = Path(__file__).parent / "analysis" / "texts" / "precision"


def on_one_device(function: Any) -> Any:
    """Maps `function` over a mesh of one device: int8 takes maxima over the axes that split tokens."""
    mesh, whole = (
        jax.make_mesh((1,) * 4, TOKEN_AXES, devices=jax.devices()[:1]),
        jax.sharding.PartitionSpec(),
    )
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def quantised(w_DF: jax.Array, recipe: MatmulPrecision) -> LowPrecisionWeight:
    """The weight as one device gathers it."""
    plan = WeightPlan(recipe, 1, (), (), (0,) if recipe.scaling == "row" else None)
    if recipe.scaling not in ("tensor", "row"):
        return LowPrecisionWeight(w_DF, None, None, plan)
    amax = products.largest_along(w_DF, (0,) if recipe.scaling == "row" else None)
    return LowPrecisionWeight(
        *products.quantise(jax.lax.stop_gradient(w_DF), amax, recipe.operand), w_DF, plan
    )


def three_products(recipe: MatmulPrecision | None, x: Any, w: Any, g: Any) -> Any:
    """A linear layer's result, and the gradients of its input and weight."""

    def both(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(
            lambda x, w: linear(x, w if recipe is None else quantised(w, recipe)), x, w
        )
        return y, *pull(g)

    return jax.tree.map(np.asarray, jax.jit(on_one_device(both))(x, w, g))


def operands() -> tuple[np.ndarray, ...]:
    """Activations (rows of different sizes), weight and gradient; no size is a multiple of all block sizes."""
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 96, 160), (160, 224), (2, 96, 224))
    )
    return x * 2.0 ** rng.integers(-2, 2, (2, 96, 1)).astype(np.float32), w, g


HALF_STEP = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
"""Half the distance between two neighbours at the bottom of a binade: 3 and 2 bits of mantissa."""


def rounding(dtype: str) -> float:
    """Largest root mean square of a format's relative error. An int8 row's largest is at most 5 standard deviations."""
    return 5 / 127 / 12**0.5 if dtype == "int8" else HALF_STEP[dtype] / 3**0.5


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_products_are_within_the_rounding_of_the_formats(recipe: MatmulPrecision) -> None:
    """Errors of two operands are independent, so their squares add up."""
    o, g = rounding(recipe.operand), rounding(recipe.gradient)
    low, exact = (three_products(r, *operands()) for r in (recipe, None))
    for bound, a, b in zip(
        (np.hypot(o, o), np.hypot(g, o), np.hypot(g, o)), low, exact, strict=True
    ):
        assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(b) < bound


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_what_is_not_finite_stays_so(name: str) -> None:
    x, w, g = operands()
    for bad in (np.inf, np.nan):
        x[0, 3, 5] = g[1, 2, 3] = bad
        assert not any(np.isfinite(a).all() for a in three_products(RECIPES[name], x, w, g))
    assert not three_products(RECIPES[name], 0 * operands()[0], w, operands()[2])[0].any()


@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise", "int8"])
def test_the_dots_themselves_have_operands_of_one_byte(name: str) -> None:
    def gradients(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: linear(x, quantised(w, RECIPES[name])), x, w)
        return y, *pull(g)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 32), (32, 16), (64, 16))]
    dots = dots_of(jax.jit(on_one_device(gradients)).lower(*shapes).as_text())
    assert len(dots) == 3
    assert {dtype for types, _ in dots for dtype in types} <= {"i8", "f8E4M3FN", "f8E5M2"}


def dots_of(text: str) -> list[tuple[tuple[str, ...], str]]:
    """Types of both operands, and the line, of each `dot_general` of a lowered program."""
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    found = [re.findall(r"tensor<(?:\d+x)*(\w+)>", line.rpartition(" : ")[2])[:2] for line in lines]
    return [(tuple(types), line) for types, line in zip(found, lines, strict=True)]


@functools.cache
def trained(name: str, mesh: str) -> Trained:
    initial = (
        None if (name, mesh) == ("compute", "data=1") else trained("compute", "data=1").initial
    )
    return train(
        tiny_run(MODELS["llama"], mesh, dropout=0.0, matmul_precision=name), 2, initial=initial
    )


def difference(a: Any, b: Any) -> float:
    """Frobenius norm of the difference, over that of the second."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


MESHES = ("data=2,fsdp=2,tensor=2", "fsdp=4,context=2")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name, mesh, marks=() if name in ("fp8", "int8") and mesh == MESHES[0] else exhaustive
        )
        for name in RECIPES
        for mesh in MESHES
    ],
)
def test_same_numbers_as_one_device(name: str, mesh: str) -> None:
    """Equal to float error, but for roundings that it makes fall the other way: far less than the format's own error.

    Scales that each device computed for itself would change every rounding of int8.
    """
    one, many = trained(name, "data=1"), trained(name, mesh)
    own = difference(one.gradients, trained("compute", "data=1").gradients)
    assert 1e-3 < own < 0.15
    assert difference(many.gradients, one.gradients) < own / 10
    assert many.losses[0] == pytest.approx(one.losses[0], rel=1e-5)
    if RECIPES[name].operand != "int8":
        assert difference(many.gradients, one.gradients) < 1e-4


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(
            "llama", {"mesh": "stage=2,fsdp=2,tensor=2", "microbatches": 2}, marks=exhaustive
        ),
        pytest.param(
            "llama", {"mesh": "stage=2,data=2,tensor=2", "microbatches": 2}, marks=exhaustive
        ),
        ("mixtral", {"mesh": "stage=2,expert=2,tensor=2", "microbatches": 2}),
        pytest.param(
            "llama",
            {"layout": "zero1", "mesh": "data=4,tensor=2", "remat": "none"},
            marks=exhaustive,
        ),
    ],
    ids=str,
)
def test_goes_with_pipelines_and_other_layouts(model: str, changes: dict[str, Any]) -> None:
    one = trained("fp8", "data=1") if model == "llama" else trained_experts("fp8", "data=1")
    run = tiny_run(MODELS[model], **{"dropout": 0.0, "matmul_precision": "fp8", **changes})
    many = train(run, 1, initial=one.initial)
    assert difference(many.gradients, one.gradients) < 1e-4


@pytest.mark.parametrize(("name", "experts"), [("fp8", True), ("mxfp8", True), ("int8", False)])
def test_experts_follow_in_fp8_and_the_router_never(name: str, experts: bool) -> None:
    run = device_run_of(tiny_run(MODELS["deepseek-like"], matmul_precision=name, dropout=0.0))
    gather: Any = run.local_model.execution.gather_params
    names = {path.partition(".")[2] for path in gather.plans}
    assert {"query", "attention_out", "shared_gate", "gate", "down"} < names
    assert "router" not in names
    assert names.isdisjoint({"expert_gate", "expert_up", "expert_down"}) != experts
    assert run.low_precision_experts == experts
    quantised = sum(
        p.size for p in named_leaves(run.layout.params).values() if run.in_low_precision(p)
    )
    (text,) = precision_blocks(run, run.in_low_precision)
    assert f"matmuls of {format_count(quantised)} parameters" in str(text)


@functools.cache
def trained_experts(name: str, mesh: str) -> Trained:
    initial = (
        None
        if (name, mesh) == ("compute", "data=1")
        else trained_experts("compute", "data=1").initial
    )
    run = tiny_run(MODELS["mixtral"], mesh, dropout=0.0, matmul_precision=name)
    return train(run, 1, initial=initial)


@pytest.mark.parametrize("mesh", ["fsdp=2,expert=2,tensor=2", "fsdp=8"])
def test_experts_in_fp8_have_the_numbers_of_one_device(mesh: str) -> None:
    one, many = trained_experts("fp8_rowwise", "data=1"), trained_experts("fp8_rowwise", mesh)
    assert 1e-3 < difference(one.gradients, trained_experts("compute", "data=1").gradients) < 0.15
    assert difference(many.gradients, one.gradients) < 1e-4


EXPERT_PLAN = WeightPlan(RECIPES["fp8"], 1, (), (), (1, 2))


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        ("ragged_dot", [5, 0, 58, 1]),
        ("triton", [5, 0, 58, 1]),
        ("triton", [0, 0, 64, 0]),
        ("triton", [20, 7, 10, 3]),
    ],
    ids=str,
)
def test_experts_in_fp8_are_a_loop_over_quantised_experts(kernel: str, sizes: list[int]) -> None:
    """The same roundings as the product of each expert's own rows; rows past the last expert give zeros."""
    grouped, rng = choose.ragged_dot(), np.random.default_rng(0)
    if kernel == "triton":
        found = [functools.partial(f, interpret=True) for f in (multiply, multiply_transposed)]
        grouped = dataclasses.replace(grouped, float8=GroupedProducts(("cpu",), *found))
    x, w, g = (rng.standard_normal(s).astype(np.float32) for s in ((64, 96), (4, 96, 48), (64, 48)))
    g[sum(sizes) :] = 0
    e4m3 = functools.partial(products.quantise, dtype="float8_e4m3fn")

    def scaled(a: Any, dims: Any) -> Any:
        values, scale = e4m3(a, products.largest_along(a, dims))
        return values.astype(jnp.float32) * scale

    values, scale = e4m3(jnp.asarray(w), products.largest_along(jnp.asarray(w), EXPERT_PLAN.shares))

    def out(x: Any, w: Any) -> Any:
        weight = LowPrecisionWeight(values, scale, w, EXPERT_PLAN)
        return products.with_low_precision(grouped)(x, (weight,), jnp.asarray(sizes, jnp.int32))[0]

    y, pull = jax.vjp(out, jnp.asarray(x), jnp.asarray(w))
    g_x, g_w = pull(jnp.asarray(g))
    x_scale = e4m3(jnp.asarray(x), products.largest_along(jnp.asarray(x), (1,)))[1]
    low_x, low_w, low_g = (
        scaled(jnp.asarray(x), (1,)),
        scaled(jnp.asarray(w), (1, 2)),
        scaled(jnp.asarray(g), (1,)),
    )
    columns = scaled(jnp.asarray(g) * x_scale, (0,)) / x_scale
    start = 0
    for e, size in enumerate(sizes):
        own = slice(start, start + size)
        np.testing.assert_allclose(y[own], low_x[own] @ low_w[e], rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(g_x[own], low_g[own] @ low_w[e].T, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(g_w[e], low_x[own].T @ columns[own], rtol=1e-5, atol=1e-4)
        start += size
    assert not np.any(y[start:])


def test_rows_are_rounded_alike_where_they_leave_and_where_they_arrive() -> None:
    """So experts in low precision have rows in a byte per element, and the numbers of rows that are not rounded."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 96)) * np.logspace(-20, 20, 64)[:, None]).astype(jnp.bfloat16)
    x[3] = 0
    rows, exact = round_rows(jnp.asarray(x)), x.astype(np.float64)
    assert rows.rounded is not None
    # The least power of two with which a row is at most 448, the largest number of the format; any for zeros.
    scale = 2.0 ** np.ceil(
        np.log2(np.where(exact == 0, 1e-300, np.abs(exact)).max(1, keepdims=True) / 448)
    )
    scale[3] = rows.rounded[1][3]
    np.testing.assert_array_equal(rows.rounded[1], scale)
    low = (exact / scale).astype(np.float32).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(rows.rounded[0].astype(jnp.float32), low.astype(np.float32))
    w, sizes = (
        jnp.asarray(rng.standard_normal((4, 96, 48)), jnp.bfloat16),
        jnp.asarray([20, 7, 10, 3], jnp.int32),
    )
    weight = LowPrecisionWeight(
        *products.quantise(w, products.largest_along(w, (1, 2)), "float8_e4m3fn"), w, EXPERT_PLAN
    )
    multiply = products.with_low_precision(choose.ragged_dot())

    def product_and_gradient(given: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(lambda given: multiply(given, (weight,), sizes)[0], given)
        return y, pull(jnp.ones_like(y))[0]

    (y, g), (same, g_rows) = product_and_gradient(jnp.asarray(x)), product_and_gradient(rows)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(same))
    np.testing.assert_array_equal(np.asarray(g), np.asarray(g_rows.values))


def test_a_family_that_does_not_use_linear_is_told_so() -> None:
    weight = quantised(jnp.ones((4, 4)), RECIPES["fp8"])
    with pytest.raises(ConfigError, match="linear"):
        jnp.einsum("td,df->tf", jnp.ones((2, 4)), weight)


e4m3 = MatmulPrecision("e4m3", "e4m3 for gradients too", "fp8", "tensor", gradient="float8_e4m3fn")
"""A recipe from outside the package."""


def test_a_recipe_from_outside() -> None:
    run = tiny_run(MODELS["llama"], dropout=0.0, matmul_precision=e4m3)
    assert run.training.matmul_precision == "test_precision:e4m3"
    gradients = train(run, 1, initial=trained("compute", "data=1").initial).gradients
    assert 1e-3 < difference(gradients, trained("fp8", "data=1").gradients) < 0.1


NVFP4 = MatmulPrecision(
    "nvfp4", "e2m1 in blocks of 16", "nvfp4", "mx", gradient="float8_e4m3fn", block=16
)


def planned(chip: str) -> Machine:
    return Machine(CHIPS[chip].platform, chip, installed=True, chip=CHIPS[chip])


def test_chips_that_gain_nothing_refuse() -> None:
    simulated = Machine("cpu", kind="cpu")
    for name, chip in (("fp8", "v5p"), ("int8", "tpu7x"), ("mxfp8", "h100"), ("fp8", "a100")):
        with pytest.raises(ConfigError, match="matmul-precision"):
            check_precision(name, planned(chip))
    for name, chip in (
        ("fp8", "tpu7x"),
        ("fp8_rowwise", "h100"),
        ("mxfp8", "b200"),
        ("int8", "v6e"),
    ):
        check_precision(name, planned(chip))
    check_precision("mxfp8", simulated)
    with pytest.raises(ConfigError, match="XLA has no product"):
        check_precision(own(f"{__name__}:NVFP4"), Machine("cuda", "b200", chip=CHIPS["b200"]))
    with pytest.raises(ConfigError, match="fp8"):
        check_precision("fb8", simulated)
    with pytest.raises(ConfigError, match="row"):
        MatmulPrecision(
            "int8_tensor", "one scale", "int8", "tensor", operand="int8", gradient="int8"
        )


@pytest.mark.parametrize(
    ("target", "name", "ratio"), [("h100:8", "fp8", 0.8), ("v5p:2x2x2", "int8", 0.85)]
)
def test_the_planner_prices_the_precision(target: str, name: str, ratio: float) -> None:
    run = meshwright.recipe("llama3-8b", mesh="fsdp=8", batch=16, seq=4096)
    seconds, traffic = {}, {}
    for precision in ("compute", name):
        changed = dataclasses.replace(
            run, training=dataclasses.replace(run.training, matmul_precision=precision)
        )
        found = estimate(place_run(changed, changed.mesh), parse_target(target))
        seconds[precision], traffic[precision] = found.seconds, found.busy["fsdp"]
    assert 0.5 < seconds[name] / seconds["compute"] < ratio
    assert traffic[name] < traffic["compute"]


@pytest.mark.parametrize(("program", "found"), [("quantised", ""), ("dequantised", "3 of 3")])
def test_lint_of_compiled_programs(program: str, found: str) -> None:
    """Planted: operands converted back before the product, which XLA simplifies to bfloat16; compiled for an H100."""
    findings = list(
        lint_precision(parse_module((TEXTS / f"{program}.hlo").read_text()), SCOPE, "fp8")
    )
    assert [found in f.reason for f in findings] == [True] * bool(found)
    assert all(f.kind == "precision" and f.bytes > 0 for f in findings)


def test_lint_of_a_program_without_such_matmuls() -> None:
    text = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile().as_text()
    (finding,) = lint_precision(parse_module(text), SCOPE, "fp8")
    assert "no such matmul" in finding.reason


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek-like", marks=exhaustive)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_float32_on_accelerators(family: str, dtype: str) -> None:
    """By default TPUs multiply float32 in one pass of bfloat16; `HIGHEST` keeps all bits."""
    name = "muon" if dtype == "float32" else "adamw"
    run = tiny_run(MODELS[family], compute_dtype=dtype, optimizer=meshwright.Optimizer(name=name))
    device_run = device_run_of(run)
    text = (
        build_train_step(device_run).lower(device_run.abstract, random_batch(device_run)).as_text()
    )
    dots = [line for types, line in dots_of(text) if types == ("f32", "f32")]
    # Muon's own matmuls are defined in low precision (K. Jordan 2024), so that only the router's are looked for.
    own = (
        dots
        if dtype == "float32"
        else [line for line in dots if "8xf32>" in line and family != "llama"]
    )
    assert dtype == "bfloat16" or len(dots) > 20
    assert all("HIGHEST" in line for line in own)


def lowered_gradients(device_run: Any) -> str:
    """The program of gradients as `parity` and the recording of a step trace it."""
    state = device_run.abstract
    batch = random_batch(device_run)
    return str(jax.jit(build_gradients(device_run)).lower(state.params, 0, batch).as_text())


def lowered_evaluation(device_run: Any) -> str:
    """The program of an evaluation."""
    params = device_run.abstract.params
    return str(build_eval_step(device_run).lower(params, random_batch(device_run)).as_text())


@pytest.mark.parametrize("lowered", [lowered_gradients, lowered_evaluation])
def test_whoever_traces_a_float32_model_multiplies_in_float32(lowered: Any) -> None:
    """A comparison of two meshes on a GPU would otherwise be one of TF32."""
    device_run = device_run_of(tiny_run(MODELS["llama"], compute_dtype="float32"))
    dots = [line for types, line in dots_of(lowered(device_run)) if types == ("f32", "f32")]
    assert len(dots) > 5
    assert all("HIGHEST" in line for line in dots)
