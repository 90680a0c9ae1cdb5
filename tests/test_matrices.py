"""Optimizers of whole matrices: optax's numbers, an even share of the work on every device, no more than a layer."""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from optax.contrib import MuonDimensionNumbers
from outside.extensions.min_gru import MinGru
from outside.extensions.soap import soap
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.config import MeshShape, MuonHeads, Optimizer
from meshwright.models.model import Model
from meshwright.planner.optimizer import update_exchanges, update_matmuls, update_temporaries
from meshwright.sharding.layouts import find_layout
from meshwright.sharding.params import Param, named_leaves, tree_map
from meshwright.sharding.placed_params import place_params, shardings
from meshwright.sharding.placement import to_spec
from meshwright.step.device_run import DeviceRun
from meshwright.step.matrices import LayerMap
from meshwright.step.muon import newton_schulz_flops, orthogonalise, orthogonalised, plan_muon
from xlacensus.compilation import compile_function
from xlacensus.hlo.buffers import buffers_of
from xlacensus.hlo.flops import read_matmuls
from xlacensus.hlo.ledger import read_ledger

NINE = dataclasses.replace(MODELS["llama"], layers=9)
exhaustive = pytest.mark.exhaustive


def newton_schulz_of(x: np.ndarray, rows: tuple[int, ...], columns: tuple[int, ...]) -> np.ndarray:
    """The scaled iteration in float64, matrix by matrix: K. Jordan's coefficients, Moonlight's scale."""
    batch = tuple(i for i in range(x.ndim) if i not in rows + columns)
    order = (*batch, *rows, *columns)
    turned = x.astype(np.float64).transpose(order)
    y = turned.reshape(
        -1, math.prod(x.shape[i] for i in rows), math.prod(x.shape[i] for i in columns)
    )
    y = y / np.linalg.norm(y, axis=(1, 2), keepdims=True)
    for _ in range(5):
        square = y @ y.transpose(0, 2, 1)
        y = 3.4445 * y - 4.7750 * square @ y + 2.0315 * square @ square @ y
    return 0.2 * max(y.shape[1:]) ** 0.5 * y.reshape(turned.shape).transpose(np.argsort(order))


@pytest.mark.parametrize(
    ("model", "mesh", "heads", "layout"),
    [
        (MODELS["llama"], "fsdp=8", "each", "fsdp"),
        (NINE, "data=2,fsdp=2,tensor=2", "together", "fsdp"),
        pytest.param(NINE, "data=2,fsdp=2,tensor=2", "each", "zero1", marks=exhaustive),
        (MODELS["mixtral"], "fsdp=2,expert=2,tensor=2", "each", "fsdp"),
        pytest.param(
            MODELS["deepseek-like"], "fsdp=2,expert=2,tensor=2", "each", "fsdp", marks=exhaustive
        ),
        (MODELS["gpt2"], "stage=2,data=2,tensor=2", "together", "fsdp"),
        pytest.param(NINE, "context=2,fsdp=4", "together", "fsdp", marks=exhaustive),
        pytest.param(NINE, "fsdp=2,tensor=3", "together", "fsdp", marks=exhaustive),
    ],
)
def test_every_matrix_is_orthogonalised_for_itself(
    model: Model, mesh: str, heads: MuonHeads, layout: str
) -> None:
    """Whole layers, layers that are left, matrices that all devices split; heads and experts each for themselves."""
    if "tensor=3" in mesh:
        model = dataclasses.replace(NINE, width=96, heads=12, kv_heads=6, vocab_multiple=48)
    d = device_run_of(
        tiny_run(model, mesh, layout=layout, batch=12 if "tensor=3" in mesh else 16, seq=24)
    )
    layer_map = LayerMap(d.mesh, d.layout.shape, d.layout.params, d.layout.placements, jnp.float32)
    params = {path: p for path, p in named_leaves(d.layout.params).items() if orthogonalised(p)}
    wheres, rng = named_leaves(d.layout.placements), np.random.default_rng(0)
    arrays = {path: rng.normal(size=p.shape).astype(np.float32) for path, p in params.items()}
    placed = {
        path: jax.device_put(x, NamedSharding(d.mesh, to_spec(wheres[path].optimizer)))
        for path, x in arrays.items()
    }
    found = jax.jit(lambda x: orthogonalise(x, layer_map, heads))(placed)
    assert not {"embed", "blocks.router", "blocks.attention_norm"} & found.keys()
    for path, p in params.items():
        first = 2 if "E" in p.dims else 1
        rows, columns = (
            tuple(i for i in dims if heads == "together" or p.dims[i] not in "NK")
            for dims in (range(first, first + p.contract), range(first + p.contract, len(p.dims)))
        )
        expected = newton_schulz_of(arrays[path], rows, columns)
        np.testing.assert_allclose(
            found[path], expected, atol=2e-5 * np.abs(expected).max(), err_msg=path
        )
        assert found[path].sharding.is_equivalent_to(placed[path].sharding, found[path].ndim)


def test_one_device_takes_optaxs_steps() -> None:
    """Three steps against optax.contrib.muon, whole projections; its AdamW for the others has Nesterov's momentum."""
    o = Optimizer("muon", 1e-2, "constant", weight_decay=0.1, beta1=0.8, muon_heads="together")
    d = device_run_of(tiny_run(MODELS["llama"], optimizer=o))

    def dimensions(p: Param) -> MuonDimensionNumbers | None:
        inputs = tuple(range(1, 1 + p.contract))
        return (
            MuonDimensionNumbers(inputs, tuple(range(1 + p.contract, len(p.dims))))
            if orthogonalised(p)
            else None
        )

    theirs = optax.contrib.muon(
        1e-2, beta=0.8, weight_decay=0.1, consistent_rms=0.2,
        muon_weight_dimension_numbers=tree_map(dimensions, d.layout.params),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = tree_map(lambda p: rng.normal(size=p.shape).astype(np.float32), d.layout.params)
    mine, other, state, its = params, params, d.optimizer.init(params), theirs.init(params)
    update, optax_update = jax.jit(d.optimizer.update), jax.jit(theirs.update)
    for _ in range(3):
        grads = tree_map(lambda p: rng.normal(size=p.shape).astype(np.float32), d.layout.params)
        mine, state = update(grads, state, mine, jnp.zeros((), jnp.int32))
        change, its = optax_update(grads, its, other)
        other = optax.apply_updates(other, change)
    for path, p in named_leaves(d.layout.params).items():
        if orthogonalised(p):
            np.testing.assert_allclose(
                named_leaves(mine)[path], named_leaves(other)[path], atol=2e-5, err_msg=path
            )


def compiled_update(d: DeviceRun) -> Any:
    """The update alone, compiled: gradients, state and parameters where the step has them."""
    where = shardings(d.mesh, d.layout.placements, "optimizer")
    params = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=s),
        d.abstract.params,
        where,
    )
    state, step = d.abstract.optimizer, jax.ShapeDtypeStruct((), jnp.int32)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    update = jax.jit(d.optimizer.update, donate_argnums=(1, 2), out_shardings=out)
    return compile_function(update, params, state, params, step)


def flops_of(program: Any) -> float:
    return sum(matmul.flops for matmul in read_matmuls(program.module))


WIDE = dataclasses.replace(MODELS["llama"], width=128, mlp=256)
MATRIX_RULES = {
    "muon": Optimizer("muon"),
    "muon of projections": Optimizer("muon", muon_heads="together"),
    "soap": Optimizer(soap),
}


@pytest.mark.parametrize(
    ("rule", "layers", "mesh"),
    [
        ("muon", 8, "fsdp=8"),
        ("muon of projections", 2, "data=2,fsdp=2,tensor=2"),
        pytest.param("muon", 12, "data=2,fsdp=2,tensor=2", marks=exhaustive),
        ("soap", 8, "fsdp=8"),
        pytest.param("soap", 8, "data=2,fsdp=2,tensor=2", marks=exhaustive),
    ],
)
def test_every_device_has_an_even_share_and_no_more_than_a_layer(
    rule: str, layers: int, mesh: str
) -> None:
    """FLOPs of the compiled update against an eighth of one device's; its largest array against a layer's bytes."""
    model = MinGru(50, 32, layers, 64, vocab_multiple=16)
    if "muon" in rule:
        model = dataclasses.replace(WIDE, layers=layers)
    runs = [
        device_run_of(tiny_run(model, m, optimizer=MATRIX_RULES[rule])) for m in ("data=1", mesh)
    ]
    program = compiled_update(runs[1])
    if rule == "soap":
        even = flops_of(compiled_update(runs[0])) / 8
    else:
        heads = runs[0].run.optimizer.muon_heads
        even = (
            plan_muon(
                runs[0].layout.params, runs[0].layout.placements, runs[0].layout.shape, heads
            ).flops()[0]
            / 8
        )
    assert even <= flops_of(program) <= 1.2 * even
    layer = sum(
        4 * math.prod(p.shape[1:])
        for p in named_leaves(runs[0].layout.params).values()
        if "L" in p.dims
    )
    largest = max(buffers_of(program.module, program.assignment), key=lambda buffer: buffer.size)
    assert largest.size <= layer, largest.instruction
    # All temporaries together: a few copies of what a device has of gradients and state, and a layer.
    assert program.memory.temporary <= program.memory.arguments + layer
    if rule != "soap":
        assert_planned(runs[1], program)


def assert_planned(d: DeviceRun, program: Any) -> None:
    """The planner's products, bytes by kind and axes, and temporaries of an update are those that were compiled."""
    assert sum(m.flops for m in update_matmuls(d)) == flops_of(program)
    planned, compiled = Counter[Any](), Counter[Any]()
    for exchange, payload in update_exchanges(d):
        planned[exchange.kind, exchange.axes] += payload * exchange.count
    for entry in read_ledger(program.module, d.layout.shape.degrees()):
        if entry.payload > 64:  # The norms of split matrices are a few numbers.
            compiled[entry.kind, entry.axes] += entry.total
    assert planned == compiled
    assert update_temporaries(d) == pytest.approx(program.memory.temporary, rel=0.2)


def test_flops_of_one_device_are_those_of_its_matrices() -> None:
    """Hand arithmetic: llama of 2 layers, D 64, N 16, K 8, H 4, F 96, heads each."""
    d = device_run_of(tiny_run(MODELS["llama"]))
    done, even = plan_muon(d.layout.params, d.layout.placements, d.layout.shape, "each").flops()
    heads, feed_forward = 16 + 16 + 8 + 8, 3
    expected = 2 * (heads * newton_schulz_flops(4, 64) + feed_forward * newton_schulz_flops(64, 96))
    assert done == even == expected
    assert newton_schulz_flops(64, 96) == 5 * (4 * 64 * 64 * 96 + 2 * 64**3)


@pytest.mark.parametrize(
    "mesh", ["fsdp=8", "data=2,fsdp=4", "fsdp=2,tensor=4", "fsdp=2,expert=2,tensor=2"]
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek-like"])
@pytest.mark.parametrize("layers", [2, 3, 5, 9, 36])
def test_no_plan_gives_a_device_a_fifth_more(family: str, mesh: str, layers: int) -> None:
    model, shape = dataclasses.replace(MODELS[family], layers=layers), MeshShape.parse(mesh)
    params = model.params()
    placements = place_params(params, layout=find_layout("fsdp"), mesh=shape, min_size=64)
    for heads in ("each", "together"):
        done, even = plan_muon(params, placements, shape, heads).flops()
        assert even * (1 - 1e-9) <= done <= 1.2 * even


def test_whole_layers_arrive_whole() -> None:
    """A function of layers sees every layer once and whole; arrays of another shape come along."""
    d = device_run_of(tiny_run(NINE, "data=2,fsdp=2,tensor=2"))
    layer_map = LayerMap(d.mesh, d.layout.shape, d.layout.params, d.layout.placements, jnp.float32)
    stacked = tree_map(lambda p: "L" in p.dims and p.init == "normal", d.layout.params)
    rng = np.random.default_rng(0)
    params = tree_map(lambda p: rng.normal(size=p.shape).astype(np.float32), d.layout.params)
    squares = jax.tree.map(
        lambda x: (
            x.reshape(9, -1)[:, :64, None] * np.ones((1, 1, 64), np.float32) if x.ndim > 2 else x
        ),
        params,
    )

    def function(x: jax.Array, square: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        assert x.shape[1:] in {p.shape[1:] for p in named_leaves(d.layout.params).values()}
        norm = jnp.sum(x, axis=tuple(range(1, x.ndim)))
        return jnp.cumsum(x, 1), square[0] * norm[:, None, None]

    chosen = jax.tree.map(lambda yes, x: x if yes else None, stacked, params)
    found = jax.jit(lambda a, b: layer_map(function, a, jax.tree.map(lambda x: (x,), b)))(
        chosen, squares
    )
    for path, x in named_leaves(params).items():
        if named_leaves(stacked)[path]:
            first, second = named_leaves(found)[f"{path}.0"], named_leaves(found)[f"{path}.1"]
            np.testing.assert_allclose(first, np.cumsum(x, 1), atol=1e-4)
            sums = x.sum(axis=tuple(range(1, x.ndim)))[:, None, None]
            np.testing.assert_allclose(
                second, named_leaves(squares)[path] * sums, atol=1e-2, rtol=1e-4
            )
