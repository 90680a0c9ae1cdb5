"""A planted mistake of each kind is found and its line named; clean steps report nothing."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_runs import MODELS, device_run_of, tiny_run

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step
from meshwright.analysis.run_lints import lint_attention_kernel
from meshwright.errors import CensusError
from xlacensus.collective_lints import lint_unexpected_collectives
from xlacensus.findings import Finding
from xlacensus.hlo.ledger import LedgerEntry
from xlacensus.hlo.parser import parse_module
from xlacensus.jaxprs import JaxprCollective
from xlacensus.layout_lints import lint_tiles
from xlacensus.peak_memory import Argument
from xlacensus.program_census import ProgramFacts


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def line_of(function: Any, words: str) -> str:
    """FILE:LINE of the first line of `function` that has `words` in it."""
    lines, first = inspect.getsourcelines(function)
    return f"test_lint.py:{first + next(i for i, line in enumerate(lines) if words in line)}"


def only(findings: tuple[Finding, ...], kind: str) -> Finding:
    assert {f.kind for f in findings} == {kind}, findings
    return findings[0]


@pytest.mark.parametrize(
    "mesh_text",
    [
        *(pytest.param(m, marks=pytest.mark.exhaustive) for m in ("data=1", "fsdp=8")),
        "data=2,fsdp=2,tensor=2",
    ],
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_clean_step_reports_nothing(family: str, mesh_text: str) -> None:
    model = dataclasses.replace(MODELS[family], vocab=64)
    assert census_of_train_step(device_run_of(tiny_run(model, mesh_text))).findings == ()


def test_a_parameter_laid_out_otherwise_than_declared(mesh: Mesh) -> None:
    def step(params: jax.Array, x: jax.Array) -> jax.Array:
        return x @ params

    census = mw.census(
        step, array(mesh, (64, 64)), array(mesh, (8, 64), "fsdp"), declared={"params": P("fsdp", "tensor")}
    )  # fmt: skip
    found = only(census.findings, "layout")
    assert found.subject == "params" and "P('fsdp', 'tensor')" in found.reason
    assert found.bytes == 64 * 64 * 4 - 64 * 64 * 4 // 8
    assert found.line == line_of(test_a_parameter_laid_out_otherwise_than_declared, "def step")


def test_a_result_that_loses_its_layout(mesh: Mesh) -> None:
    def step(params: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(params * 2, NamedSharding(mesh, P()))

    census = mw.census(step, array(mesh, (64, 64), "fsdp"), declared={"result": P("fsdp")})
    assert {f.kind for f in census.findings} == {"layout", "unexpected"}
    gathered = next(f for f in census.findings if f.kind == "unexpected")
    assert gathered.line == line_of(test_a_result_that_loses_its_layout, "with_sharding_constraint")


def test_a_declared_layout_of_nothing_is_refused(mesh: Mesh) -> None:
    with pytest.raises(CensusError, match="no argument or result"):
        mw.census(lambda x: x, array(mesh, (8,)), declared={"y": P()})


def test_a_large_result_replicated_unasked(mesh: Mesh) -> None:
    census = mw.census(lambda: jnp.ones((512, 1024)) * 2, mesh=dict(mesh.shape))
    assert census.findings == ()  # on one device there is nothing to replicate over

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x.sum(0), jnp.sin(jnp.arange(2**19, dtype=jnp.float32))

    census = mw.census(step, array(mesh, (64, 64), None, "tensor"))
    found = only(census.findings, "replicated")
    assert found.subject == "result.1" and found.bytes == 2**21
    assert found.line == line_of(test_a_large_result_replicated_unasked, "def step")


def test_a_dimension_that_wastes_padding(mesh: Mesh) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x[:17] + 1, NamedSharding(mesh, P("fsdp"))).sum()

    findings = mw.census(step, array(mesh, (64, 64), "fsdp")).findings
    found = next(f for f in findings if f.kind == "padding")
    assert (
        found.subject == "constraint of float32[17,64]"
        and "17 over 4 is padded to 20 = 4 * 5" in found.reason
    )
    assert found.line == line_of(test_a_dimension_that_wastes_padding, "with_sharding_constraint(")


def test_a_vocabulary_that_wastes_padding() -> None:
    found = only(
        census_of_train_step(device_run_of(tiny_run(MODELS["llama"], "tensor=2"))).findings,
        "padding",
    )
    assert found.subject == "vocabulary" and "50 tokens are padded to 64" in found.reason


def test_blocks_that_fill_a_tpus_tiles_badly() -> None:
    def argument(*local: int) -> Argument:
        return Argument("params.w", "parameters", "", local, local, 4 * int(np.prod(local)))

    assert list(lint_tiles([argument(1024, 1024), argument(8, 64)])) == []
    (found,) = lint_tiles([argument(4096, 80)])
    assert "padded to 4096 x 128, 60% padding" in found.reason
    assert found.fix.startswith("last dimension on each device of 128")
    (found,) = lint_tiles([argument(4096, 1, 128)])
    assert "700% padding" in found.reason and found.fix.startswith(
        "second-last dimension on each device of 8"
    )


@pytest.mark.filterwarnings("ignore")
def test_an_involuntary_full_rematerialisation(mesh: Mesh) -> None:
    def loss(x: jax.Array) -> jax.Array:
        y = jnp.einsum("ij,kj->ik", x, x)
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(("fsdp", "tensor"), None)))
        return jax.lax.with_sharding_constraint(
            jnp.sin(y), NamedSharding(mesh, P("tensor", "fsdp"))
        ).sum()

    findings = mw.census(jax.grad(loss), array(mesh, (64, 64), "fsdp", "tensor")).findings
    found = [f for f in findings if f.kind == "rematerialised"]
    assert found and found[0].bytes == 64 * 64 * 4
    first = line_of(test_an_involuntary_full_rematerialisation, "P((")
    assert found[0].line == first


def test_a_collective_that_nobody_wrote(mesh: Mesh) -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    census = mw.census(step, array(mesh, (64, 64), None, "tensor"), array(mesh, (64, 64), "tensor"))
    found = only(census.findings, "unexpected")
    assert "all-reduce over tensor" in found.subject and found.bytes == 64 * 64 * 4
    assert found.line == line_of(test_a_collective_that_nobody_wrote, "tanh")


def test_a_host_transfer_in_the_step(mesh: Mesh) -> None:
    def step(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            jax.debug.callback(lambda v: None, x[0, 0])
            return jnp.sin(x), None

        return jax.lax.scan(layer, x, None, length=3)[0]

    census = mw.census(step, array(mesh, (64, 64), None, None))
    found = only(census.findings, "host")
    assert "3 x in a step" in found.reason
    assert found.line == line_of(test_a_host_transfer_in_the_step, "debug.callback")


def test_every_expert_computed_for_every_row() -> None:
    """XLA:CPU has no kernel for grouped matmuls: it multiplies each row by the weights of all eight groups."""

    def loss(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.ragged_dot(x, w, rows)).sum()

    x, w = (
        jax.ShapeDtypeStruct((256, 64), jnp.float32),
        jax.ShapeDtypeStruct((8, 64, 128), jnp.float32),
    )
    census = mw.census(jax.grad(loss, (0, 1)), x, w, jax.ShapeDtypeStruct((8,), jnp.int32))
    found = only(census.findings, "experts")
    assert "8.0 times" in found.reason
    assert census.flops.compiled == 8 * 3 * 2 * 256 * 64 * 128
    assert found.line == line_of(test_every_expert_computed_for_every_row, "ragged_dot(x")


def test_experts_with_a_capacity_compute_what_they_need() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.square(jnp.einsum("ecd,edf->ecf", x, w)).sum()

    x, w = (
        jax.ShapeDtypeStruct((8, 32, 64), jnp.float32),
        jax.ShapeDtypeStruct((8, 64, 128), jnp.float32),
    )
    census = mw.census(jax.grad(loss, (0, 1)), x, w)
    assert census.findings == () and census.flops.compiled == 3 * 2 * 256 * 64 * 128


def test_a_written_gather_does_not_hide_a_larger_one(mesh: Mesh) -> None:
    def step(small: jax.Array, large: jax.Array) -> tuple[jax.Array, jax.Array]:
        gather = jax.shard_map(
            lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), mesh=mesh, in_specs=P("fsdp"), out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        whole = jnp.sin(jax.lax.with_sharding_constraint(large, NamedSharding(mesh, P())))
        return gather(small), whole

    census = mw.census(step, array(mesh, (64, 16), "fsdp"), array(mesh, (256, 256), "fsdp"))
    found = only(census.findings, "unexpected")
    assert "all-gather over fsdp" in found.subject and found.bytes == 256 * 256 * 4 * 3 // 4
    assert found.line == line_of(
        test_a_written_gather_does_not_hide_a_larger_one, "with_sharding_constraint"
    )
    assert "shard the operands" in found.fix


def test_each_kind_of_collective_has_its_fix(mesh: Mesh) -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    census = mw.census(step, array(mesh, (64, 64), None, "tensor"), array(mesh, (64, 64), "tensor"))
    assert "psum" in only(census.findings, "unexpected").fix


def test_data_parallelism_left_to_the_compiler_is_clean(mesh: Mesh) -> None:
    """The gradients of replicated parameters are summed over the batch axis, as everyone expects."""

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"]).mean()

    params = {"w": array(mesh, (64, 64)), "v": array(mesh, (64, 32))}
    census = mw.census(jax.grad(loss), params, array(mesh, (64, 64), "fsdp"))
    assert [e.kind for e in census.ledger if e.sent > 1024] and census.findings == ()


def test_written_collectives_in_loops_are_known(mesh: Mesh) -> None:
    """`fori_loop` becomes a while loop, whose trips the jaxpr does not tell."""

    def shard(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(jax.lax.psum(x, "fsdp")), x)

    step = jax.shard_map(shard, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    census = mw.census(step, array(mesh, (64, 64), "fsdp"))
    assert sum(e.count for e in census.ledger) == 5 and census.findings == ()


def test_small_collectives_are_below_the_floor(mesh: Mesh) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.square(x).sum(1))

    x = array(mesh, (32, 64), None, "fsdp")
    assert mw.census(step, x).findings == ()
    exact = mw.census(step, x, facts=ProgramFacts(min_sent=0))
    assert only(exact.findings, "unexpected").bytes == 2 * 32 * 4 * 3 // 4


@pytest.mark.parametrize(
    ("axes", "op_name", "payload", "found"),
    [
        (("fsdp",), "", 50_000, 0), (None, "", 50_000, 0), (("fsdp",), "jit(f)/mul", 50_000, 1),
        (("tensor",), "", 50_000, 1), (("fsdp",), "", 5_000_000, 1),
    ],
)  # fmt: skip
def test_parts_of_a_written_collective_are_not_the_compilers_own(
    axes: tuple[str, ...] | None, op_name: str, payload: int, found: int
) -> None:
    """A reduce-scatter of 64 x 2,374 rows in tiles shifts rows; a gather may go over factors of its axis."""
    written = JaxprCollective(
        "reduce-scatter", ("fsdp",), 1, 1_000_000, frozenset({"llama.py:203"})
    )
    shift = LedgerEntry(
        "collective-permute",
        axes,
        2,
        payload,
        1,
        True,
        False,
        ("f32[1222,5120]",),
        "",
        "",
        op_name,
        True,
        (),
    )
    assert len(lint_unexpected_collectives([shift], [written])) == found


def test_state_that_is_not_donated(mesh: Mesh) -> None:
    def step(
        params: dict[str, jax.Array], batch: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        return {"w": params["w"] - 0.1 * batch.sum()}, batch.mean()

    params, batch = {"w": array(mesh, (1024, 512), "fsdp", "tensor")}, array(mesh, (8, 8))
    found = only(mw.census(step, params, batch).findings, "donation")
    assert found.subject == "params" and found.bytes == 1024 * 512 * 4 // 8
    assert found.line == line_of(test_state_that_is_not_donated, "def step")
    assert "donate_argnums" in found.fix
    assert mw.census(jax.jit(step, donate_argnums=0), params, batch).findings == ()
    # A function that only has the shape of its argument is no step.
    assert mw.census(lambda x: jnp.tanh(x), params["w"]).findings == ()


def test_a_donation_that_cannot_be_used(mesh: Mesh) -> None:
    def step(params: jax.Array) -> jax.Array:
        return params.astype(jnp.bfloat16).sum(0)

    census = mw.census(jax.jit(step, donate_argnums=0), array(mesh, (1024, 512), "fsdp"))
    found = only(tuple(f for f in census.findings if f.kind != "unexpected"), "donation")
    assert "no result" in found.reason and found.bytes == 1024 * 512 * 4 // 4


def test_a_product_that_leaks_into_float32(mesh: Mesh) -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w)
        scale = jnp.float32(0.5) * hidden.astype(jnp.float32)
        return jnp.einsum("ij,jk->ik", scale, w.astype(jnp.float32))

    half = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    found = only(mw.census(step, half, half).findings, "precision")
    assert "float32" in found.reason and "50%" in found.reason
    assert found.line == line_of(test_a_product_that_leaks_into_float32, "einsum")

    def meant(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w).astype(jnp.float32)
        return jnp.einsum("ij,jk->ik", hidden, w.astype(jnp.float32), precision="highest")

    assert mw.census(meant, half, half).findings == ()  # asked for
    full = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert mw.census(step, full, full).findings == ()  # all in float32


def test_float64_that_nobody_asked_for() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x * jnp.asarray(np.linspace(0.0, 1.0, 512))

    with jax.enable_x64(True):
        found = only(
            mw.census(step, jax.ShapeDtypeStruct((512, 512), jnp.float32)).findings, "precision"
        )
    assert "float64" in found.reason
    assert found.line == line_of(test_float64_that_nobody_asked_for, "linspace")


def test_a_constraint_that_does_not_divide(mesh: Mesh) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh, P("fsdp"))).sum()

    found = only(mw.census(step, array(mesh, (17, 64))).findings, "padding")
    assert "17 over 4 is padded to 20" in found.reason
    assert found.line == line_of(test_a_constraint_that_does_not_divide, "with_sharding_constraint")


def test_a_kernel_that_is_not_in_the_program() -> None:
    texts = Path(__file__).parent / "texts"
    found = list(
        lint_attention_kernel(parse_module((texts / "v5p" / "fsdp.hlo").read_text()), "splash")
    )
    assert only(tuple(found), "kernel").subject == "attention by splash"
    module = parse_module((texts / "kernels" / "attention.hlo").read_text())
    assert list(lint_attention_kernel(module, "splash")) == []
