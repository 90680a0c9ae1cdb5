"""Targets: names and legal sizes, chips from outside, missing compilers, and compilers that fail."""

import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_cli import meshwright

from meshwright.activity import Activity, watched_by
from meshwright.api import proofs as absent
from meshwright.api.proofs import _took_before, compile_in_subprocess
from meshwright.errors import CensusError, CompilerError, ConfigError, MeshwrightError
from meshwright.hardware import aot as compilers
from meshwright.hardware.aot import (
    compiler_environment,
    gpu_target_config,
    require_compiler,
    topology_devices,
)
from meshwright.hardware.chips import CHIPS, GPU_EFFICIENCY, Nodes, Torus, read_chip
from meshwright.hardware.targets import parse_target
from meshwright.planner.explain import announced_note
from meshwright.planner.plan_file import read_plan, write_plan
from meshwright.planner.search import search, with_tokens_per_step
from meshwright.runs.recipe import find_recipe
from meshwright.trust import own

V5P = parse_target("v5p:4x4x8")
H100 = parse_target("h100:16")


@pytest.mark.parametrize(
    "text",
    [
        "v5p:4x4x8",
        "2*v6e:16x16",
        "tpu7x:2x2x1",
        "v5p:16x20x28",
        "v5e:1x1",
        "h100:8x8",
        "gb200:4x64",
    ],
)
def test_targets_print_as_they_are_parsed(text: str) -> None:
    assert str(parse_target(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5q:4x4", "did you mean 'v5p'?"),
        ("v5p:4x4", "a slice of v5p has 3 dimensions"),
        ("v6e", "a target is CHIP:SIZE"),
        ("h100:12x16", "a node of h100 has at most 8 GPUs"),
        ("2*h100:8", "it has nodes, not slices"),
        ("h100:13", "13 = 1 * 8 + 5"),
        ("v5p:64x4x4", "the largest slice of v5p is 16x20x28"),
        ("0*v6e:16x16", "v6e:4x4"),
        # Slices that Google Cloud does not offer: the nearest that exist.
        ("v5e:3x5", "write v5e:2x4 (8 chips) or v5e:4x4 (16 chips)"),
        ("v5e:4x2", "write v5e:2x4"),
        ("v6e:16x32", "2*v6e:16x16"),
        ("v5p:3x3x3", "write v5p:2x2x4 (16 chips) or v5p:2x4x4 (32 chips)"),
        ("v5p:8x4x4", "write v5p:4x4x8"),
        ("v5p:128", "write v5p:4x4x8"),
        ("tpu7x:4x4x6", "write tpu7x:4x4x4 (64 chips) or tpu7x:4x4x8 (128 chips)"),
        # Accelerator types of Google Cloud, which count cores or chips, and names of products.
        ("v5litepod-16", "write v5e:4x4"),
        ("v5p-256", "write v5p:4x4x8 (v5p-256 counts 256 TensorCores, which are 128 chips)"),
        ("v6e-256", "write v6e:16x16"),
        ("tpu7x-128", "write tpu7x:4x4x4"),
        ("tpu-v5p:8x4x4", "write v5p:4x4x8"),
        ("trillium:4x4", "write v6e:4x4"),
        ("h100-80gb-64", "write h100:64"),
    ],
)
def test_unknown_targets_teach(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_target(text)
    assert says in str(refused.value)


def test_a_missing_compiler_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CensusError, match=r"pip install 'meshwright\[tpu\]'"):
        require_compiler(V5P)


def test_a_size_that_is_not_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> object:
        raise RuntimeError("Topology layout is not divisible by chips_per_host_bounds")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(
        ConfigError,
        match=r"the compiler does not know this topology: Topology layout(.|\n)*v5p:4x4x4",
    ):
        topology_devices(parse_target("v5p:4x4x8"))


def test_devices_are_asked_for_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def describe(**words: object) -> object:
        asked.update(words)
        return SimpleNamespace(devices=["device"])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", describe)
    assert topology_devices(parse_target("2*v6e:16x16")) == ["device"]
    assert asked == {"platform": "tpu", "topology_name": "v6e:16x16", "num_slices": 2}
    assert all(bool(chip.compiler) != bool(chip.announced) for chip in CHIPS.values())


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The process that compiles is this script."""

    def is_script(text: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    monkeypatch.setattr(absent, "require_compiler", lambda target: None)
    monkeypatch.setattr(absent, "compiler_environment", lambda target: {})
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return is_script


SAID = "meshwright prove: compiling an evaluation ..."


UNNOTICED = (
    *("SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP"),
    *("SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH"),
)
"""Signals that end no process."""
CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP", "SIGXCPU")
"""Signals of a compiler's own fault, and of the limit on its time."""
ENDING = {each.name: int(each) for each in signal.Signals if each.name not in UNNOTICED}


@pytest.mark.parametrize(("name", "number"), [*ENDING.items(), ("signal 40", 40)])
def test_a_compiler_that_is_ended_says_nothing_of_the_program(
    child, tmp_path: Path, name: str, number: int
) -> None:
    """Of each signal that ends a process: not the code of what does not fit, and no other mesh as its remedy."""
    child(f"echo '{SAID}' >&2; kill -{number} $$; sleep 60")
    with pytest.raises(MeshwrightError) as died:
        compile_in_subprocess(V5P, 60, ["prove"], sys.stdout)
    error = died.value
    assert error.exit_code == (12 if name in CRASHES else 75)
    assert "mesh" not in error.fix and "fit" not in error.fix.split()
    assert name in error.truth or number == signal.SIGXCPU
    assert "while compiling an evaluation" in error.truth
    (log,) = tmp_path.glob("cache/proofs/*.log")
    assert log.read_text().startswith(SAID) and str(log) in error.truth
    # A search that proves its best plans does not take the end of a compiler for a refusal of the plan.
    assert isinstance(error, CensusError) == (name in CRASHES)


def test_what_it_says_that_it_does_is_announced(child) -> None:
    """The programs of a training's other phases take longer than its step, and each is named while it is compiled."""
    child(f"echo chatter >&2; echo '{SAID}' >&2; sleep 2; echo '{{}}'")
    doing = list[str]()

    class Watch:
        def began(self, activity: Activity) -> None:
            doing.append(activity.doing)

        def ended(self, activity: Activity, *, failed: bool) -> None:
            assert not failed

    with watched_by(Watch()), open(os.devnull, "w") as out:
        assert compile_in_subprocess(V5P, 60, ["prove"], out) == (0, "")
    assert doing == [f"compiling for {V5P}", "compiling an evaluation"]


def test_a_compiler_that_takes_too_long_is_stopped(child) -> None:
    child("while :; do :; done")
    with pytest.raises(CompilerError, match="it took more than 1 s of processor time") as stopped:
        compile_in_subprocess(V5P, 1, ["prove"], sys.stdout)
    assert stopped.value.exit_code == 12


def test_a_traceback_is_not_shown(child, capfd: pytest.CaptureFixture[str]) -> None:
    child(
        "echo 'Traceback (most recent call last):' >&2; echo 'ValueError: no such layout' >&2; exit 1"
    )
    with pytest.raises(CensusError, match="ValueError: no such layout"):
        compile_in_subprocess(V5P, 60, ["prove"], sys.stdout)
    assert capfd.readouterr().err == ""


def test_what_it_says_and_its_exit_code_come_through(
    child, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    child(
        "echo 'libtpu chatters' >&2; echo 'error: it does not fit' >&2; echo \"on $MESHWRIGHT_COMPILES_FOR\"; exit 6"
    )
    assert compile_in_subprocess(V5P, 60, ["prove"], sys.stdout) == (6, "error: it does not fit\n")
    said = capfd.readouterr()
    assert said.err == "" and said.out == "on v5p:4x4x8\n"
    assert not list(tmp_path.rglob("*.log"))
    (tmp_path / "cache" / "proofs" / "TPU-v5p.seconds").write_text("95\n310\n1020\n")
    assert (
        "3 programs for TPU v5p took 95 to 1020 s of processor time here, 310 in the middle"
        in _took_before(V5P)
    )


def test_it_writes_where_this_process_writes(
    child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's standard output is no longer file descriptor 1."""
    child("echo '{}'")
    with (tmp_path / "out").open("w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert compile_in_subprocess(V5P, 60, ["prove"], out) == (0, "")
    assert (tmp_path / "out").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("text", "chips", "devices", "domains"),
    [
        ("v5p:4x4x8", 128, 128, 1),
        ("2*v6e:16x16", 512, 512, 2),
        ("tpu7x:4x4x4", 64, 128, 1),  # two JAX devices a chip
        ("h100:64", 64, 64, 8),
        ("h100:4", 4, 4, 1),
        ("gb200:144", 144, 144, 2),  # two NVLink domains of 72
        ("gb200:256", 256, 256, 4),  # powers of two go in domains of 64
    ],
)
def test_a_target_counts_its_devices(text: str, chips: int, devices: int, domains: int) -> None:
    target = parse_target(text)
    assert (target.chips, target.devices, target.domains) == (chips, devices, domains)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_number_of_a_chip_has_its_source(chip: Any) -> None:
    given = {
        "flops_bf16",
        "hbm_bytes",
        "hbm_bandwidth",
        "interconnect",
        "network_bandwidth",
        "host_bandwidth",
    }
    given |= {"clock_hz"} if chip.clock_hz else set()
    if chip.family in ("v6e", "b300"):
        # Not of fit.py, which the head of chips.toml names for all others.
        given |= {"efficiency"}
    assert given <= set(chip.sources)
    assert all(chip.sources.values())
    has_clock = isinstance(chip.interconnect, Torus) and not chip.announced
    assert has_clock == (chip.clock_hz is not None)


ANNOUNCED = [name for name, chip in CHIPS.items() if chip.announced]


@pytest.mark.parametrize("name", ANNOUNCED)
def test_an_announced_chip_is_planned_and_never_compiled(name: str) -> None:
    chip = CHIPS[name]
    # Every figure says whether it was announced, derived or assumed.
    fields = ("flops_bf16", "hbm_bytes", "hbm_bandwidth", "interconnect", "network_bandwidth")
    for field in (*fields, "host_bandwidth", "efficiency"):
        assert chip.sources[field].startswith(("announced: ", "derived: ", "assumed ")), field
    size = "2x2x1" if chip.on_torus else "8"
    target = parse_target(f"{name}:{size}")
    with pytest.raises(ConfigError, match="only announced") as refused:
        require_compiler(target)
    # What it advises can be compiled for.
    assert not any(other in str(refused.value).partition("fix:")[2] for other in ANNOUNCED)
    assert "only announced" in meshwright("prove", "gpt2", "--on", str(target), code=2)
    words = ("--on", "jobset", "--target", str(target), "tiny", "--out", "/shared/out")
    assert "only announced" in meshwright("launch", *words, code=2)
    said = " ".join(meshwright("plan", "gpt2", "--on", str(target)).split())
    assert f"{chip.name} is announced, not measured" in said
    mesh = f"data={target.devices}"
    shown = " ".join(meshwright("show", "gpt2", "--machine", str(target), "--mesh", mesh).split())
    assert f"{chip.name} is announced, not measured" in shown


def test_the_plan_of_an_announced_chip_names_every_assumption() -> None:
    for name in ANNOUNCED:
        chip = CHIPS[name]
        size = "2x2x1" if chip.on_torus else "8"
        note = announced_note(parse_target(f"{name}:{size}"))
        assert note is not None
        for field, source in chip.sources.items():
            if "assumed" in source or "derived" in source:
                assert f"{field} is {source}" in note
        if chip.sparse_cores:
            assert "sparse_cores is assumed" in note
    tpu8t = announced_note(parse_target("tpu8t:2x2x1"))
    assert tpu8t is not None and "sides of 20, 20 and 24 are assumed" in tpu8t
    assert "multiples of 4" in tpu8t
    assert announced_note(parse_target("v5p:2x2x1")) is None


def test_a_derived_peak_states_its_arithmetic() -> None:
    chip = CHIPS["tpu8t"]
    assert chip.flops_bf16 == 12.6e15 / 4 and chip.flops_fp8 == 12.6e15 / 2
    assert "12.6 / 2 = 6.3" in chip.sources["flops_bf16"]
    assert math.prod(chip.interconnect.largest) == 9600  # type: ignore[union-attr]


CHIP = """
flops_bf16 = 1e15
hbm_bytes = 1e11
hbm_bandwidth = 4e12
network_bandwidth = 1e11
host_bandwidth = 5e10
"""
NODES = "[nodes]\nlink_bandwidth = 4e11\ndevices_per_node = 16\n"
EFFICIENCY = """
[efficiency]
matmul = 0.5
grouped_matmul = 0.5
attention = 0.5
hbm = 0.5
links = 0.5
network = 0.5
overlap = 0.5
tensor_overlap = 0.5
"""


def test_a_user_defined_chip_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(CHIP + NODES)
    target = parse_target(f"{file}:32")
    assert isinstance(target.chip.interconnect, Nodes)
    assert (target.topology, target.chip.flops_bf16) == ((2, 16), 1e15)
    assert target.efficiency == GPU_EFFICIENCY and str(target) == f"{file}:2x16"
    file.write_text(CHIP + NODES + EFFICIENCY)
    assert parse_target(f"{file}:32").efficiency.matmul == 0.5
    with pytest.raises(ConfigError, match="no installed compiler knows this chip"):
        require_compiler(target)


def test_a_torus_of_any_shape_is_read(tmp_path: Path) -> None:
    file = tmp_path / "torus.toml"
    file.write_text(
        CHIP + "[torus]\nlink_bandwidth = 4e11\nwraparound_multiple = 3\nlargest = [6, 9]\n"
    )
    assert parse_target(f"2*{file}:3x5").devices == 30
    with pytest.raises(ConfigError, match="the largest slice of"):
        parse_target(f"{file}:9x9")


OUTSIDE = """
import dataclasses
from meshwright.hardware.chips import CHIPS
from meshwright.trust import own

faster = dataclasses.replace(CHIPS["h100"], name="H100 x 2", flops_bf16=2 * CHIPS["h100"].flops_bf16)
measured = dataclasses.replace(faster, efficiency=dataclasses.replace(CHIPS["h100"].efficiency, matmul=0.5))
wrong = 3
"""


def test_a_chip_comes_from_outside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `Chip` object by module or by file plans, and the plan file names it."""
    file = tmp_path / "mychips.py"
    file.write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    by_module, by_file = (
        parse_target(own("mychips:faster:64")),
        parse_target(own(f"{file}:measured:8x8")),
    )
    assert by_module.chip.flops_bf16 == 2 * CHIPS["h100"].flops_bf16 and by_module.topology == (
        8,
        8,
    )
    assert by_module.efficiency == CHIPS["h100"].efficiency and by_file.efficiency.matmul == 0.5
    for target in (by_module, by_file):
        assert parse_target(own(str(target))) == target
    run = with_tokens_per_step(find_recipe("llama32-1b"), 2**19)
    here, there = search(run, parse_target("h100:8x8")), search(run, by_module)
    assert there.plans[0].estimate.seconds < here.plans[0].estimate.seconds
    write_plan(there.plans[0], by_module, tmp_path / "plan.json")
    assert parse_target(read_plan(tmp_path / "plan.json").target) == by_module
    with pytest.raises(
        ConfigError, match=r"mychips:wrong is a int, not a meshwright\.hardware\.chips\.Chip"
    ):
        parse_target(own("mychips:wrong:8"))
    with pytest.raises(ConfigError, match="did you mean 'faster'"):
        parse_target(own("mychips:fastre:8"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("flops_bf16 = 1e15", "it has no hbm_bytes"),
        ("flops_bf16 = [", "it cannot be read"),
        (CHIP.replace("1e15", "-1") + NODES, "flops_bf16 = -1 is not a positive number"),
        (CHIP + "[nodes]\nlink_bandwidth = 1", "missing 1 required"),
        ("hbm_bytse = 1\n" + CHIP + NODES, "'hbm_bytse' is not a field of a chip"),
        (CHIP + NODES + "[efficiency]\nmatmul = 1", "missing 7 required"),
    ],
)
def test_a_bad_chip_file_teaches(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_chip(file)
    assert says in str(refused.value)


def test_missing_tools_of_cuda_name_their_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilers, "_package", lambda name: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(
        CensusError, match=r"ptxas and libdevice and cuDNN cannot be found(.|\n)*nvidia-cudnn-cu13"
    ):
        require_compiler(H100)


def test_cuda_is_described_by_its_own_plugin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "ptxas").touch()
    (home / "nvvm" / "libdevice").mkdir(parents=True)
    (home / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9").touch()
    plugin = tmp_path / "xla_cuda13"
    plugin.mkdir()
    text = (
        'gpu_device_info {\n  core_count: 132\n}\ndevice_description_str: "NVIDIA H100 80GB HBM3"\n'
    )
    other = 'gpu_device_info {\n  core_count: 1\n}\ndevice_description_str: "NVIDIA H100 PCIe"\n'
    (plugin / "xla_cuda_plugin.so").write_bytes(
        b"\0" + other.encode() + b"\0\1" + text.encode() + b"\0"
    )
    folders = {"nvidia": tmp_path / "nvidia", "jax_plugins.xla_cuda13": plugin}
    monkeypatch.setattr(compilers, "_package", folders.get)
    require_compiler(H100)
    assert gpu_target_config("h100") == text
    assert f"--xla_gpu_cuda_data_dir={home}" in compiler_environment(H100)["XLA_FLAGS"]
    with pytest.raises(CensusError, match="no description of NVIDIA GB300"):
        gpu_target_config("gb300")
