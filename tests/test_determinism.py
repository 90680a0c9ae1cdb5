"""What each platform keeps: options, sums in one order, refusals, and findings of what may differ between two runs."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import DEEPSEEK, MODELS, QWEN3_NEXT, device_run_of, tiny_run

from meshwright.config import Faults
from meshwright.errors import ConfigError
from meshwright.fine_tuning import FineTune
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.machine import DETERMINISM, Machine, determinism_of, fix_communication
from meshwright.launching.host_checks import check_bits
from meshwright.models.blocks.layers import SumRows, scatter_rows, take_rows
from meshwright.models.blocks.row_sums import few_rows, sorted_rows
from meshwright.models.families.gpt_oss import GptOss
from meshwright.runs.settle import settle
from meshwright.step.device_run import DeviceRun, local_model_of
from meshwright.step.train_step import build_train_step
from meshwright.views.run_tables import choices_facts
from xlacensus.hlo.ledger import read_ledger
from xlacensus.hlo.parser import parse_module
from xlacensus.jaxprs import all_jaxprs, lines_of
from xlacensus.lints import lint_determinism

ROOT = Path(__file__).parents[1]
H100 = Machine("cuda", "h100", True, "NVIDIA H100", chip=CHIPS["h100"])


def settled_for(device_run: DeviceRun, machine: Machine) -> DeviceRun:
    """The same devices, taken for another machine."""
    settled = settle(device_run, machine)
    return dataclasses.replace(device_run, machine=machine, local_model=local_model_of(settled))


def on(machine: Machine, **changes: Any) -> DeviceRun:
    device_run = device_run_of(
        tiny_run(changes.pop("model", MODELS["llama"]), changes.pop("mesh", "data=1"), **changes)
    )
    return settled_for(device_run, machine)


@pytest.mark.parametrize(
    ("number", "rows", "dtype"), [(1000, 37, "float32"), (600, 3, "bfloat16"), (7, 100, "float32")]
)
@pytest.mark.parametrize("summed", [sorted_rows, few_rows])
def test_rows_summed_in_one_order_are_the_sums_of_a_scatter(
    summed: SumRows, number: int, rows: int, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-8, 8, (number, 5)), dtype)  # sums of small integers are exact
    index = jnp.asarray(rng.integers(0, rows + 2, number), jnp.int32)  # some are out of bounds
    sums = summed(x, index, rows)
    assert sums.dtype == jnp.float32 and (sums == scatter_rows(x, index, rows)).all()

    def loss(table: jax.Array, how: Any) -> jax.Array:
        return (take_rows(table, index.reshape(-1, 1) % rows, how) ** 2).sum()

    table = jnp.asarray(rng.integers(-8, 8, (rows, 5)), dtype)
    assert (jax.grad(loss)(table, summed) == jax.grad(loss)(table, scatter_rows)).all()


def scatters_that_may_meet(device_run: DeviceRun) -> list[str]:
    """Lines of the float scatters of a train step whose indices may be equal."""
    step = jax.jit(build_train_step(device_run)).trace(
        device_run.abstract, device_run.abstract_batch
    )
    return [
        f"{equation.primitive.name} at {next(iter(lines_of(equation)), '?')}"
        for inner, _ in all_jaxprs(step.jaxpr.jaxpr)
        for equation in inner.eqns
        if equation.primitive.name.startswith("scatter") and not equation.params["unique_indices"]
        if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    ]


GPT_OSS = GptOss(
    50,
    64,
    2,
    16,
    vocab_multiple=16,
    kv_heads=8,
    head_size=8,
    experts=8,
    experts_per_token=2,
    expert_mlp=32,
)
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (MODELS["llama"], "data=1", {}),
    "gpt2": (MODELS["gpt2"], "data=1", {}),
    "mixtral": (MODELS["mixtral"], "fsdp=2,expert=2", {}),
    "capacity": (dataclasses.replace(MODELS["mixtral"], dispatch="capacity"), "data=1", {}),
    "gpt_oss": (GPT_OSS, "data=1", {}),
    "deepseek": (dataclasses.replace(DEEPSEEK, mtp_depth=1), "data=1", {}),
    "qwen3_next": (QWEN3_NEXT, "data=1", {}),
    "context": (MODELS["qwen-like"], "context=2,tensor=2", {}),
    "stages": (MODELS["gpt2"], "stage=2", {"microbatches": 2}),
    "preferences": (
        MODELS["llama"],
        "data=1",
        {"finetune": FineTune(objective="preferences"), "z_loss": 0.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_two_updates_of_a_deterministic_step_meet(name: str) -> None:
    model, mesh, changes = CASES[name]
    asked: dict[str, Any] = {"grouped_matmul": "ragged_dot", **changes}
    device_run = device_run_of(tiny_run(model, mesh, **asked, deterministic=True))
    assert scatters_that_may_meet(settled_for(device_run, H100)) == []
    if name == "llama":
        assert (
            len(scatters_that_may_meet(device_run)) == 1
        )  # on a CPU the scatter is in order, and its bits stay


def test_options_of_a_deterministic_run_are_those_of_its_machine() -> None:
    usual, fixed = on(H100), on(H100, deterministic=True)
    assert (
        usual.sum_rows is scatter_rows and "xla_gpu_deterministic_ops" not in usual.compiler_options
    )
    assert (
        fixed.sum_rows is sorted_rows
        and fixed.compiler_options["xla_gpu_deterministic_ops"] == "True"
    )
    own = on(H100, deterministic=True, compiler_options=("xla_gpu_deterministic_ops=False",))
    assert own.compiler_options["xla_gpu_deterministic_ops"] == "False"
    for machine in (Machine("cpu"), Machine("tpu", "v5p", kind="TPU v5p")):
        kept = on(machine, deterministic=True)
        assert (
            kept.sum_rows is scatter_rows
            and "xla_gpu_deterministic_ops" not in kept.compiler_options
        )
        kept.check()


@pytest.mark.parametrize(
    ("machine", "changes", "refused"),
    [
        (H100, {}, None),
        (
            H100,
            {"faults": Faults(check_every=100)},
            r"check-every 100 on NVIDIA H100(.|\n)*fix: +--training.determin",
        ),
        (H100, {"faults": Faults(check_every=100), "deterministic": True}, None),
        (
            H100,
            {"faults": Faults(check_replicas=50)},
            r"check-replicas 50 on NVIDIA H100(.|\n)*replicas may differ(.|\n)*fix: +--training.determin",
        ),
        (Machine("cpu"), {"faults": Faults(check_every=100)}, None),
        (
            Machine("rocm", kind="MI300"),
            {"deterministic": True},
            r"deterministic on MI300(.|\n)*not promised",
        ),
        (
            Machine("rocm", kind="MI300"),
            {"faults": Faults(check_every=9)},
            r"check-every 9 on MI300(.|\n)*fix: +--faults.check-every 0",
        ),
        (
            Machine("rocm", kind="MI300"),
            {"faults": Faults(check_replicas=9)},
            r"check-replicas 9 on MI300(.|\n)*fix: +--faults.check-replicas 0",
        ),
    ],
)
def test_who_counts_on_equal_bits_asks_for_them(
    machine: Machine, changes: dict[str, Any], refused: str | None
) -> None:
    settled = on(machine, attention_kernel="reference", **changes)
    if refused is None:
        settled.check()
    else:
        with pytest.raises(ConfigError, match=refused):
            settled.check()


def test_nccl_gets_one_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    fix_communication()
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    with pytest.raises(ConfigError, match=r"NCCL_ALGO=NVLS(.|\n)*fix: +NCCL_ALGO=Ring"):
        fix_communication()


PROGRAM = """HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%most (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %max = f32[] maximum(%c, %d)
}

%count (e: s32[], f: s32[]) -> s32[] {
  %e = s32[] parameter(0)
  %f = s32[] parameter(1)
  ROOT %total = s32[] add(%e, %f)
}

%product (g: f32[8,8]) -> f32[8,8] {
  %g = f32[8,8] parameter(0)
  ROOT %dot = f32[8,8] dot(%g, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,8], i: s32[8,1], n: s32[8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %i = s32[8,1] parameter(1)
  %n = s32[8] parameter(2)
  %meets = f32[8,8] scatter(%x, %i, %x), to_apply=%add, metadata={source_file="/a/model.py" source_line=7}
  %apart = f32[8,8] scatter(%x, %i, %x), unique_indices=true, to_apply=%add
  %counts = s32[8] scatter(%n, %i, %n), to_apply=%count
  %tuned = f32[8,8] fusion(%x), kind=kCustom, calls=%product, backend_config={"kind":"__triton_nested_gemm_fusion"}
  %blas = f32[8,8] custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %attention = f32[8,8] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %atomics = f32[8,8] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = "tt.atomic_rmw"}
  %stores = f32[8,8] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = "tt.store"}
  %all = f32[8,8] all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %pairs = f32[8,8] all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %largest = f32[8,8] all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%most
  ROOT %parts = f32[1,8] reduce-scatter(%all), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
}
"""
DETERMINISTIC_OPS = {"xla_gpu_deterministic_ops": "True"}


@pytest.mark.parametrize(
    ("options", "flags", "algorithm", "expected"),
    [
        ({}, "", "", "meets; tuned, blas; attention, atomics; all, parts"),
        ({}, "", "Ring", "meets; tuned, blas; attention, atomics"),
        (
            DETERMINISTIC_OPS,
            "",
            "Ring",
            "meets; atomics",
        ),  # what is in the program in spite of the option
        ({}, "--xla_gpu_deterministic_ops", "NVLS", "meets; atomics; all, parts"),
        ({"xla_gpu_exclude_nondeterministic_ops": True}, "", "Ring", "meets; tuned, blas; atomics"),
        ({"xla_gpu_load_autotune_results_from": "f"}, "", "Ring", "meets; attention, atomics"),
    ],
)
def test_the_census_names_what_may_differ(
    options: dict[str, Any],
    flags: str,
    algorithm: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("NCCL_ALGO", algorithm)
    module = parse_module(PROGRAM)
    found = list(lint_determinism(module, read_ledger(module), options))
    assert "; ".join(f.subject.partition(": ")[2] for f in found) == expected
    assert {f.kind for f in found} == {"determinism"} and found[0].line == "model.py:7"


def test_readme_docs_doctor_and_prove_say_the_same() -> None:
    assert [row.keeps for row in DETERMINISM] == [
        "bitwise",
        "bitwise",
        "bitwise with options",
        "not promised",
    ]
    assert (
        determinism_of("cuda") is determinism_of("gpu") is DETERMINISM[2]
        and determinism_of("rocm") is DETERMINISM[3]
    )
    for page in ("README.md", "docs/determinism.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split()).replace("`", "")
        assert all(row.sentence in text for row in DETERMINISM), page
    assert check_bits([{"platform": "tpu"}])[0].found == DETERMINISM[1].sentence
    assert ("bits", DETERMINISM[0].sentence) in choices_facts(
        device_run_of(tiny_run(MODELS["llama"]))
    )
