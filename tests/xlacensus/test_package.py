"""xlacensus is usable by itself: without Meshwright, from its own documentation, and from its command line."""

import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xlacensus
from xlacensus.__main__ import main, parse_mesh
from xlacensus.errors import CensusError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "xlacensus"
MODULES = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "xlacensus.")]

ALONE = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "meshwright":
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuse())
import xlacensus
assert "jax" not in sys.modules, "importing the package loads JAX"
for name in sys.argv[1:]:
    importlib.import_module(name)
for name in xlacensus.__all__:
    getattr(xlacensus, name)

import jax.numpy as jnp
from xlacensus.__main__ import census_of_name

def step(params, x):
    return {"w": params["w"] - x.T @ (x @ params["w"])}

args = {"w": jnp.ones((512, 512))}, jnp.ones((8, 512))
gpu = xlacensus.ChipRates("GPU", 989e12, 3.35e12, xlacensus.Nodes(450e9, 8), 50e9, 55e9)
target = xlacensus.TargetDevices.grid(gpu, (8,))
report = xlacensus.census(step, *args, target=target)
assert report.flops.compiled == 2 * 2 * 8 * 512 * 512
assert xlacensus.memory(step, *args).compiled.arguments == 4 * (512 * 512 + 8 * 512)
assert [finding.kind for finding in xlacensus.lint(step, *args)] == ["donation"]
assert xlacensus.simulate(step, *args, target=target).step_seconds > 0
changes = xlacensus.compare(report.to_json(), report.to_json())
assert changes and all(change.ratio == 1 for change in changes)
assert "parameters" in str(report)
try:
    xlacensus.Ledger.read("no program")
except xlacensus.CensusError as error:
    assert "fix:" in str(error)
assert not any(name.split(".")[0] == "meshwright" for name in sys.modules)
"""


def test_it_works_where_meshwright_is_not_installed() -> None:
    modules = [name for name in MODULES if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *modules], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["xlacensus", *MODULES])
def test_examples_of_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_every_public_function_and_class_has_a_docstring() -> None:
    assert all(getattr(xlacensus, name).__doc__ for name in xlacensus.__all__)


def fences(language: str) -> list[str]:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_the_readme_runs() -> None:
    names: dict[str, Any] = {}
    for code in fences("python"):
        exec(code, names)
    assert names["schedule"].chip == "H100"


def test_the_distribution_contains_both_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    found = [f"src/{file.parent.name}" for file in sorted(ROOT.glob("src/*/__init__.py"))]
    assert packages == found == ["src/meshwright", "src/xlacensus"]
    assert all((ROOT / package / "py.typed").is_file() for package in packages)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


@pytest.fixture
def summed(mesh: Mesh) -> Any:
    """A program of eight devices whose products are summed over `model`."""
    x = jax.ShapeDtypeStruct(
        (16, 64), jnp.float32, sharding=NamedSharding(mesh, P("data", "model"))
    )
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("model", None)))
    return (
        jax.jit(jnp.dot, out_shardings=NamedSharding(mesh, P("data", None))).lower(x, w).compile()
    )


def test_a_ledger_of_a_text_is_that_of_the_function(mesh: Mesh, summed: Any) -> None:
    ledger = xlacensus.Ledger.read(summed.as_text(), dict(mesh.shape))
    assert tuple(ledger) == xlacensus.census(summed).ledger
    assert [(entry.kind, entry.axes, entry.payload) for entry in ledger] == [
        ("all-reduce", ("model",), 8 * 32 * 4)
    ]
    assert [row["total"] for row in ledger.traffic()] == [1024] and not ledger.unread
    header, line = str(ledger).splitlines()
    assert header.split()[:3] == ["kind", "axes", "times"] and line.split()[:3] == [
        "all-reduce",
        "model",
        "1",
    ]


def test_the_command_line_reads_a_text(
    summed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.txt"
    file.write_text(summed.as_text())
    assert main([str(file), "--mesh", "data=2,model=4"]) == 0
    printed = capsys.readouterr().out
    assert f"{2 * 8 * 16 * 32}  FLOPs" in printed  # 8 x 16 by 16 x 32 on each device
    assert "all-reduce  model" in printed


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "made_here.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def pair(): return jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8))\n"
        "def lowered(): return jax.jit(jnp.dot).lower(jnp.ones((8, 8)), jnp.ones((8, 8)))\n"
        "def together(): return (lambda x, y: x), (1, 2)\n"
        "def needs(x): return x\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "made_here"
    sys.modules.pop("made_here", None)


@pytest.mark.parametrize("attribute", ["pair", "lowered"])
def test_the_command_line_reads_a_function(
    module: str, attribute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{module}:{attribute}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"]["compiled"] == 2 * 8**3


@pytest.mark.parametrize(
    "words",
    [
        ["absent.txt"],
        ["absent_module:f"],
        ["made_here:absent"],
        ["made_here:needs"],
        ["made_here:together"],
        ["made_here.py:needs"],
        ["made_here.py"],
        ["made_here.py", "--json"],
        ["made_here.py", "--mesh", "data"],
    ],
)
def test_what_cannot_be_read_is_refused(
    module: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "because:" in printed.err and "fix:" in printed.err and not printed.out


@pytest.mark.parametrize("text", ["data", "data=0", "data=2,data=4", "data=-1", "=2", "data=2,"])
def test_a_mesh_is_axes_and_degrees(text: str) -> None:
    assert parse_mesh("data=2,model=4") == {"data": 2, "model": 4} and parse_mesh("") is None
    with pytest.raises(CensusError):
        parse_mesh(text)
