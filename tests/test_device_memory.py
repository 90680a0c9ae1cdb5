"""Memory that a step needs beside what there is: refused before it runs, with numbers and remedies."""

import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.api import local_planner, training
from meshwright.cli.main import run
from meshwright.errors import MeshwrightError
from meshwright.hardware import mesh
from meshwright.hardware.targets import parse_target
from meshwright.step import device_memory
from meshwright.step.device_memory import OutOfDeviceMemory, Room, check_memory

GIB = 2**30


@pytest.mark.parametrize(
    "given", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]
)
def test_a_run_takes_what_plans_count_of_a_gpu(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment says otherwise, by either of JAX's names: it refuses both together."""
    environment = {given: "0.5"} if given else {}
    monkeypatch.setattr("meshwright.hardware.mesh.os", types.SimpleNamespace(environ=environment))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    mesh.prepare_host(8)
    assert environment == {
        "NPROC": "32",
        **({given: "0.5"} if given else {"XLA_CLIENT_MEM_FRACTION": "0.92"}),
    }


def gpu(limit: int | None) -> types.SimpleNamespace:
    """A GPU of this process; limit: bytes that XLA may use on it."""
    client = types.SimpleNamespace(process_index=lambda: 0)
    stats = None if limit is None else {"bytes_limit": limit}
    return types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100", process_index=0, client=client, memory_stats=lambda: stats
    )  # fmt: skip


@pytest.fixture(scope="module")
def product() -> object:
    """A compiled product of two matrices of 4 MiB, with a temporary of 4 MiB between."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    return jax.jit(lambda a, b: jnp.sin(a @ b) @ b).lower(x, x).compile()


def test_a_step_beyond_the_limit_of_its_devices_is_refused(product: object) -> None:
    stats = product.memory_analysis()  # type: ignore[attr-defined]
    needed = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert needed >= 12 * 2**20  # two arguments and the result
    check_memory(product, [gpu(needed)], "a product")
    check_memory(product, [gpu(None)], "a product")  # nothing is known of the device
    with pytest.raises(OutOfDeviceMemory, match="each NVIDIA H100 has") as refused:
        check_memory(product, [gpu(needed - 2**20)], "a product")
    assert refused.value.needed == needed and "1 MiB too much" in str(refused.value)


def _without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OutOfDeviceMemory:
    monkeypatch.setattr(
        device_memory, "_host_memory", lambda: Room(2**23, "this host")
    )  # for the state, and not for a step
    run = mw.recipe("tiny", mesh="fsdp=2", layers=1, steps=2, sample=0, eval_samples=16)
    with pytest.raises(OutOfDeviceMemory) as refused:
        mw.train(run, out=tmp_path / "run", progress="none")
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()  # refused before its first step
    return refused.value


def test_training_refuses_it_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = _without_room(monkeypatch, tmp_path)
    assert (
        error.exit_code == 5
        and "this host has 8 MiB" in str(error)
        and "--training.remat full" in error.fix
    )


def test_remedies_have_numbers_where_the_chip_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        local_planner, "local_target", lambda devices, calibration: (parse_target("h100:2"), "")
    )
    monkeypatch.setattr(
        training, "_local_planner", lambda devices: local_planner.LocalPlanner(devices, None)
    )
    fix = _without_room(monkeypatch, tmp_path).fix
    options = [line.split()[0] for line in fix.splitlines()[1:]]
    assert 1 <= len(options) <= 3 and set(options) <= {
        "--training.remat",
        "--training.microbatches",
        "--mesh",
    }
    assert all("per device" in line and "s per step" in line for line in fix.splitlines()[1:])


def test_what_a_device_raises_while_it_runs_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exhausted(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."
        )

    monkeypatch.setattr(device_memory, "_host_memory", lambda: None)
    monkeypatch.setattr("meshwright.trainer.opening.first_state", exhausted)
    run = mw.recipe("tiny", mesh="fsdp=2", layers=1, steps=2, sample=0, eval_samples=16)
    with pytest.raises(OutOfDeviceMemory, match="a device ran out of memory"):
        mw.train(run, out=tmp_path / "run", progress="none")


def test_what_this_machine_cannot_compile_or_hold_is_refused_before_the_compiler(
    tmp_path: Path,
) -> None:
    """XLA's compiler for CPUs died of SIGFPE on the first, without a word; the second went on to read its text."""
    for words, truth, fix in (
        (
            ["prove", "llama3-70b"],
            r"256 x 4096 x 8192 = 8,589,934,592 activations",
            "--on v5p:2x2x4",
        ),
        (["prove", "llama3-405b"], r"256 x 4096 x 16384 = 17,179,869,184", r"--on v5p:8x8x\d+"),
        (
            ["train", "llama3-70b", "--out", str(tmp_path / "out")],
            r"needs 1.54 TiB, and this host",
            "--on v5p:2x2x4",
        ),
        (
            ["prove", "tiny", "--mesh", "fsdp=16384"],
            "at most 1,024 are simulated",
            r"prove --on CHIP:SIZE",
        ),
    ):
        with pytest.raises(MeshwrightError) as refused:
            run(words)
        assert re.search(truth, refused.value.truth) and re.search(fix, refused.value.fix), str(
            refused.value
        )
