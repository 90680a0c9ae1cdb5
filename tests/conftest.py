"""Eight simulated devices in every test, warnings as errors, programs compiled once for the whole session."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# A shell starts background programs with interrupts ignored, and what a test starts would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process that a test starts parses all of its modules
# anew: importing them takes 2.5 CPU seconds instead of 0.8.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The programs of tests run a few times: not optimising their machine code takes nearly half off the time that compiling
# them takes (level 1 a third).
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import hypothesis
import jax
import pytest
from shared_programs import share_programs

from meshwright.callers import command_line
from meshwright.errors import MeshwrightError
from meshwright.hardware.mesh import enable_compilation_cache, prepare_host

pytest_plugins = ["measured"]
# How fast examples are drawn depends on what else the machine does.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

prepare_host(8)
_COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
_COMPILED.mkdir(parents=True, exist_ok=True)
enable_compilation_cache(_COMPILED)
share_programs()


_NOT_FAST = (
    "tests/browser/",
    "tests/seeds/test_notebooks.py",
    "tests/test_stores.py",
    "tests/test_trackers.py",
)
"""Files that have no fast test, and import what only the extra `dev-all` installs."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files without a fast test unread where the fast tests run."""
    where = collection_path.relative_to(config.rootpath).as_posix()
    return (
        True if "not exhaustive" in config.option.markexpr and where.startswith(_NOT_FAST) else None
    )


def pytest_collection_finish() -> None:
    """Leaves what was imported out of every later search for garbage: a seventh of the time that tracing takes."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test's token files go."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True, scope="session")
def environment(cache: Path) -> None:
    """Programs that a test starts use the same caches, and no accelerator."""
    (cache / "compiled").symlink_to(_COMPILED)
    os.environ.update(MESHWRIGHT_CACHE=str(cache), JAX_PLATFORMS="cpu", COLUMNS="200", NO_COLOR="1")
    assert len(jax.devices()) == 8


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for this test alone: what it measures of this machine must not become the calibration of other tests."""
    folder = tmp_path / "own-cache"
    folder.mkdir()
    (folder / "compiled").symlink_to(_COMPILED)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder))


@pytest.fixture(autouse=True)
def errors_of_a_command(request: pytest.FixtureRequest) -> Iterator[None]:
    """Errors are those that somebody reads who typed a command; `test_callers.py` reads each in Python as well."""
    if request.path.name == "test_callers.py":
        yield
        return
    with command_line():
        yield


_READ_IN = (
    "test_bad_inputs.py",
    "test_callers.py",
    "test_cli.py",
    "test_fields.py",
    "test_fixes.py",
    "test_launch.py",
    "test_plan_refusals.py",
    "test_tokens_of_weights.py",
)
"""Files of tests whose errors have fixes that are read as the command line reads them."""
_FIXES: list[str] = []
"""Fixes of the errors of the present test."""
_CHECKED: set[str] = set()


def _record_fixes() -> None:
    """Makes every error note its fix."""
    original = MeshwrightError.__init__

    def noted(self: MeshwrightError, asked: str, truth: str, fix: str, *more: str) -> None:
        _FIXES.append(fix)
        original(self, asked, truth, fix, *more)

    MeshwrightError.__init__ = noted  # type: ignore[method-assign]


_record_fixes()


@pytest.fixture(autouse=True)
def fixes_are_commands_that_parse(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every fix that a test meets names options that there are, with legal values, and commands that parse."""
    _FIXES.clear()
    yield
    if request.path.name not in _READ_IN:
        return
    met = {fix for fix in _FIXES if "--" in fix or "meshwright " in fix} - _CHECKED
    _CHECKED.update(met)
    if not met:
        return
    from printed_fixes import wrong_commands, wrong_in

    wrong = [(fix, each) for fix in sorted(met) for each in (*wrong_in(fix), *wrong_commands(fix))]
    assert not wrong, f"fixes that do not work: {wrong}"
