"""Hardware that is not here: what it is called, what is missing, and what happens where its compiler fails."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.cli import absent
from meshwright.cli.absent import compile_elsewhere
from meshwright.errors import CensusError, ConfigError
from meshwright.target import CHIPS, Target, devices_of, parse_target, require_compiler

V5P = Target("v5p", (4, 4, 8), 1)


@pytest.mark.parametrize("text", ["v5p:4x4x8", "2*v6e:16x16", "tpu7x:2x2x1"])
def test_targets_spell_as_they_are_read(text: str) -> None:
    assert str(parse_target(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5q:4x4", "did you mean 'v5p'?"),
        ("v5p:4x4", "the torus of a v5p has 3 dimensions"),
        ("v6e", "the sizes of the torus joined by x"),
        ("0*v6e:16x16", "v6e:4x4"),
    ],
)
def test_unknown_targets_teach(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_target(text)
    assert says in str(refused.value)


def test_a_missing_compiler_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CensusError, match=r"pip install 'meshwright\[tpu\]'"):
        require_compiler()


def test_a_size_that_is_not_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> object:
        raise RuntimeError("Topology layout is not divisible by chips_per_host_bounds")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(ConfigError, match=r"libtpu knows no such slice: Topology layout(.|\n)*v5p:4x4x4"):
        devices_of(Target("v5p", (3, 3, 3), 1))


def test_devices_are_asked_for_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def describe(**words: object) -> object:
        asked.update(words)
        return SimpleNamespace(devices=["device"])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", describe)
    assert devices_of(parse_target("2*v6e:16x16")) == ["device"]
    assert asked == {"platform": "tpu", "topology_name": "v6e:16x16", "num_slices": 2}
    assert set(CHIPS) == {"v5e", "v6e", "v5p", "tpu7x"}


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The process that compiles is this script."""

    def is_script(text: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    monkeypatch.setattr(absent, "require_compiler", lambda: None)
    monkeypatch.setattr(absent.tempfile, "gettempdir", lambda: str(tmp_path))
    return is_script


def test_a_compiler_that_dies_is_explained(child, tmp_path: Path) -> None:
    child("echo 'the last words' >&2; kill -SEGV $$")
    with pytest.raises(CensusError, match="the compiler gave up: SIGSEGV") as died:
        compile_elsewhere(V5P, 60)
    (log,) = tmp_path.glob("*.log")
    assert log.read_text() == "the last words\n" and str(log) in died.value.truth


def test_a_compiler_that_takes_too_long_is_stopped(child) -> None:
    child("exec sleep 60")
    with pytest.raises(CensusError, match="it took more than 1 s"):
        compile_elsewhere(V5P, 1)


def test_a_traceback_is_not_shown(child, capfd: pytest.CaptureFixture[str]) -> None:
    child("echo 'Traceback (most recent call last):' >&2; echo 'ValueError: no such layout' >&2; exit 1")
    with pytest.raises(CensusError, match="ValueError: no such layout"):
        compile_elsewhere(V5P, 60)
    assert capfd.readouterr().err == ""


def test_what_it_says_and_its_exit_code_come_through(child, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    child("echo 'libtpu chatters' >&2; echo 'error: it does not fit' >&2; echo \"on $MESHWRIGHT_COMPILES_FOR\"; exit 6")
    assert compile_elsewhere(V5P, 60) == 6
    said = capfd.readouterr()
    assert said.err == "error: it does not fit\n" and said.out == "on v5p:4x4x8\n"
    assert not list(tmp_path.glob("*.log"))
