"""Compiler options of a chip: what a Run adds or leaves out, and what the installed compiler refuses."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.errors import ConfigError
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.machine import Machine, compiler_options_of, refused_options


def test_options_of_chips_are_those_of_xla() -> None:
    for chip in CHIPS.values():
        assert all(name.startswith("xla_") for name in chip.compiler_options)


def test_words_of_a_run() -> None:
    chip = compiler_options_of(CHIPS["v5p"], ("auto",))
    assert chip["xla_tpu_scoped_vmem_limit_kib"] == "49152"
    assert compiler_options_of(CHIPS["v5p"], ()) == {} == compiler_options_of(None, ("auto",))
    changed = compiler_options_of(CHIPS["v5p"], ("auto", "xla_tpu_scoped_vmem_limit_kib=1024"))
    assert changed == {**chip, "xla_tpu_scoped_vmem_limit_kib": "1024"}
    with pytest.raises(ConfigError, match="xla_foo=true"):
        compiler_options_of(CHIPS["v5p"], ("xla_foo",))


def test_the_installed_compiler_refuses_what_it_does_not_know() -> None:
    known = ("xla_cpu_enable_fast_math", "False")
    assert refused_options(jax.devices()[0], (known, ("xla_no_such_option", "1"))) == (
        "xla_no_such_option",
    )
    assert refused_options(jax.devices()[0], (known,)) == ()
    with pytest.raises(ConfigError, match="not a valid bool"):
        refused_options(jax.devices()[0], (("xla_cpu_enable_fast_math", "perhaps"),))


def device_run_with(*words: str) -> Any:
    """A run whose devices say that they are a chip; its compiler is that of the CPU."""
    device_run = device_run_of(tiny_run(MODELS["llama"], "data=1", compiler_options=words))
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5p")
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[device]))
    machine = Machine("tpu", "v5p", kind="TPU v5p")
    return dataclasses.replace(device_run, mesh=mesh, machine=machine)  # type: ignore[arg-type]


def test_refused_options_of_the_chip_are_left_out_and_those_of_the_run_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = "xla_tpu_scoped_vmem_limit_kib"
    monkeypatch.setattr(
        "meshwright.step.device_run.refused_options", lambda device, options: (refused,)
    )
    device_run = device_run_with("auto")
    assert device_run.refused_compiler_options == (refused,)
    assert (
        refused not in device_run.accepted_compiler_options()
        and len(device_run.accepted_compiler_options()) > 1
    )
    with pytest.raises(ConfigError, match="has no such option"):
        device_run_with("auto", f"{refused}=1").accepted_compiler_options()
    assert (
        device_run_of(tiny_run(MODELS["llama"], "data=1")).accepted_compiler_options() == {}
    )  # simulated
