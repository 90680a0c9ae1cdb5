"""Memory by category adds up to the compiler's own figures; the buffers alive explain its allocation."""

import functools
import gc
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

import meshwright as mw
from meshwright.analysis.programs import Census
from meshwright.analysis.run_census import census_of_eval_step, census_of_train_step
from meshwright.runs.run import Run
from meshwright.step.device_run import DeviceRun
from meshwright.step.train_step import build_train_step

LAYOUTS = [
    ("fsdp", "data=1"),
    pytest.param("fsdp", "data=8", marks=pytest.mark.exhaustive),
    ("fsdp", "fsdp=8"),
    pytest.param("fsdp", "tensor=8", marks=pytest.mark.exhaustive),
    ("fsdp", "data=2,fsdp=2,tensor=2"),
    ("zero1", "data=2,fsdp=2,tensor=2"),
]


@functools.cache
def train_step_census(run: Run) -> tuple[DeviceRun, Census]:
    """Compiles a train step once for the tests that read it."""
    device_run = device_run_of(run)
    return device_run, census_of_train_step(device_run)


@pytest.mark.parametrize(("layout", "mesh"), LAYOUTS)
def test_categories_add_up(layout: str, mesh: str) -> None:
    device_run, census = train_step_census(
        tiny_run(MODELS["llama"], mesh, layout=layout, remat="none")
    )
    memory, compiled = census.memory, census.memory.compiled
    stats = memory.by_category()
    assert compiled.peak == sum(stats.values()) == sum(memory.by_module().values())
    assert (
        compiled.peak
        == compiled.arguments + compiled.results - compiled.aliased + compiled.temporary
    )
    # Parameters, optimizer state and batch are exactly the blocks that a device is given.
    blocks = {
        "parameters": device_run.abstract.params, "optimizer state": device_run.abstract.optimizer,
    }  # fmt: skip
    for category, tree in blocks.items():
        held = sum(
            int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
        assert stats[category] == held
    # What no buffer accounts for is small: the liveness of buffers explains the compiler's allocation.
    assert abs(stats.get("packing", 0)) < 0.12 * compiled.temporary
    assert stats["saved activations"] > 0
    assert stats["temporaries"] < 0.5 * compiled.temporary


def test_remat_moves_bytes_from_saved_to_recomputed() -> None:
    saved = {}
    for remat in ("none", "full"):
        _, census = train_step_census(tiny_run(MODELS["llama"], "fsdp=8", remat=remat))
        saved[remat] = census.memory.by_category().get("saved activations", 0)
    assert saved["full"] < 0.5 * saved["none"]


def test_the_evaluation_step_has_no_gradients() -> None:
    census = census_of_eval_step(device_run_of(tiny_run(MODELS["gpt2"], "data=2,fsdp=2,tensor=2")))
    categories = census.memory.by_category()
    assert sum(census.memory.by_category().values()) == census.memory.compiled.peak
    assert {"parameters", "batch"} <= set(categories)
    assert not {"gradients", "saved activations", "optimizer state"} & set(categories)
    assert {p.phase for p in census.flops.matmuls} == {"forward"}
    assert not [f for f in census.findings if f.kind != "padding"]


def test_a_function_of_the_users_own() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def step(params: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            return (jnp.tanh(batch @ params["up"]) @ params["down"]).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    where = NamedSharding(mesh, P("data"))
    params = {
        k: jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
        for k in ("up", "down")
    }
    batch = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=where)
    census = mw.census(step, params, batch)
    categories = census.memory.by_category()
    assert categories["parameters"] == 2 * 64 * 64 * 4
    assert categories["batch"] == 128 // 8 * 64 * 4
    assert sum(census.memory.by_category().values()) == census.memory.compiled.peak
    # Backwards, [64, 64] gradients of both weights are summed: plain data parallelism, which is no finding.
    assert {(e.kind, e.axes) for e in census.ledger} == {("all-reduce", ("data",))}
    assert census.findings == ()


def resident(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM the most since it was reset."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s*(\d+)", text)[1])  # type: ignore[index]


@pytest.mark.exhaustive
def test_real_steps_use_the_memory_that_was_predicted() -> None:
    # Large enough to stand out from what the process itself holds: 8 devices of about 20 MB each.
    device_run = device_run_of(tiny_run(MODELS["llama"], "data=8", batch=64, seq=256, remat="none"))
    predicted = 8 * census_of_train_step(device_run).memory.compiled.peak
    step = (
        build_train_step(device_run).lower(device_run.abstract, device_run.abstract_batch).compile()
    )
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    state, batch = device_run.initial_state(), random_batch(device_run)
    for _ in range(2):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
    assert 0.6 < (resident("VmHWM") - before) / predicted < 1.4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["data=1", "data=2,fsdp=2,tensor=2"])
def test_matrix_products_are_those_of_the_formula(family: str, mesh: str) -> None:
    """The compiled program has the model's FLOPs, three passes of them, and the other half of every causal mask."""
    device_run, census = train_step_census(tiny_run(MODELS[family], mesh, remat="none"))
    training, model = device_run.run.training, device_run.run.model
    formula = dict(census.flops.model)
    # XLA's attention multiplies all T positions where the formula counts (T + 1) / 2; the vocabulary is padded.
    formula["attention"] *= training.seq / ((training.seq + 1) / 2)
    formula["unembedding"] *= 64 / model.vocab
    assert census.flops.compiled == pytest.approx(sum(formula.values()), rel=1e-6)
