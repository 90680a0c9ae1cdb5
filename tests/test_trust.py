"""Names of code: the type of a name states whose it is, through every transformation, and only the user's resolves."""

import ast
import contextlib
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import outside_parts
import pytest

from meshwright import plugins, trust
from meshwright.cli.verbs import parse_verb
from meshwright.config import Training
from meshwright.data.corpus import local_text, parse_source
from meshwright.data.sources import open_source
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.hardware.hosts import ALONE
from meshwright.hardware.targets import expand_targets, parse_target
from meshwright.launching import supervise
from meshwright.launching.restarts import Restarts
from meshwright.models.families.gpt2 import Gpt2
from meshwright.planner.plan_file import read_plan
from meshwright.runs.recipe import change_fields, find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run, run_from_dict, run_to_dict, with_absolute_paths
from meshwright.storage.paths import place_of
from meshwright.trust import ForeignName, OwnName, derive, foreign, own, own_references

ROOT = Path(__file__).parents[1]
RUN = Run(
    model=Gpt2(257, 32, 1, 4, positions=32),
    training=Training(seq=32, batch=4),
    reporters=("tensorboard",),
    init_from="weights",
)

BOUNDARIES = {
    "api/evaluation.py": {"evaluate"},
    "api/finetuning.py": {"finetune"},
    "api/layout.py": {"show"},
    "api/parity.py": {"parity"},
    "api/planning.py": {"offers", "plan"},
    "api/proofs.py": {"prove"},
    "api/training.py": {"train"},
    "api/verb.py": {"base_run"},
    "cli/parse.py": {"_own_value"},
    "plugins.py": {"name_of", "_find", "resolve"},
    # Its parent has resolved every name of the run that it is given.
    "trainer/recorded_child.py": {"main"},
    "runs/recipe.py": {"_builder", "find_recipe", "recipe"},
    "trust.py": {"_owned", "accept", "give", "take_options"},
    "wrapped/model.py": {"run"},
}
"""Functions that make a user's own name: public ones of Python, the command line, recipes, and names of objects."""


@pytest.fixture(autouse=True)
def nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_user", trust._User())


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files and modules from outside that a name leads to; none of them is imported."""
    asked: list[str] = []

    def record(*names: Any) -> Any:
        asked.append(" ".join(map(str, names)))
        raise ConfigError("importing", "it is recorded", "nothing")

    real = plugins._import

    def import_module(kind: str, name: OwnName, module: str) -> Any:
        return real(kind, name, module) if module.startswith("meshwright.") else record(module)

    monkeypatch.setattr(plugins, "load_file", record)
    monkeypatch.setattr(plugins, "_import", import_module)
    return asked


def texts_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every text in JSON values."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from texts_of(item, (*path, key))


def with_text(document: Any, path: tuple[Any, ...], text: str) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = text
    return copy


SPECIAL = [chr(code) for code in range(1, 128) if not chr(code).isalnum()] + ["é", "\u2028", "²"]


def hostile_names(folder: Path) -> Iterator[str]:
    """Yields names of code in a file of the folder, spelt with every special character."""
    file = f"{folder}/evil"
    for character in SPECIAL:
        name = f"evil{character}.py:attack"
        yield from (name, f"{folder}/{name}", f"~/{name}", f"./{name}")
        yield f"{character}{file}.py:attack{character}"
        yield f"{file}.py:attack{character}{file}.py:attack"
        yield f"{file}.py:attack{character}2"
    yield from (
        f"{file}.py:attack:8,{file}.py:attack:8",
        f"2*{file}.py:attack:8",
        f"{file}.py:attack:8..64",
    )
    yield from ("os:abort", "evil:attack", "meshwright.trust:_user.names.clear", "mine[1].py:docs")


NAMES = list(hostile_names(Path("/tmp/from elsewhere")))


def references() -> list[str]:
    """Returns the names that have the form of a name of code outside the package."""
    return [name for name in NAMES if trust.is_reference(name) and "meshwright" not in name]


def use(text: str) -> None:
    """Uses a text of a run or a plan as every part of the package would that resolves names."""
    for kind in (*plugins.PARTS, "layout", "chip", "wrapped model"):
        with contextlib.suppress(MeshwrightError):
            plugins.resolve(kind, text, None if kind in plugins.PARTS else {})
    for source in (text, place_of(text)):
        with contextlib.suppress(MeshwrightError):
            open_source(local_text(parse_source(source).path, Path("/tmp/no cache")))
    for name in (text, derive(text, f"{text}:8")):
        with contextlib.suppress(MeshwrightError):
            for target in expand_targets(name):
                parse_target(target)
    with contextlib.suppress(MeshwrightError, OSError):
        find_recipe(text)


def read_as_run(folder: Path, document: Any) -> list[Run]:
    file = folder / "run.json"
    file.write_text(json.dumps(document))
    run = with_absolute_paths(read_run(file))
    words = ["--run", str(file), "--training.steps", "3", "--data.held-out", "0.5"]
    return [run, own(change_fields(run, "fsdp=2", {"seed": 3})), parse_verb("show", words).run]


def read_as_plan(folder: Path, document: Any) -> list[Any]:
    file = folder / "plan.json"
    file.write_text(json.dumps(document))
    plan = read_plan(file)
    typed = parse_verb("prove", [str(file), "--training.steps", "3"])
    return [plan.run, plan.target, typed.run, typed.on, own(plan)]


def read_as_manifest(folder: Path, document: Any) -> list[Run]:
    return [run_from_dict(document["run"], str(folder / "metadata"))]


def read_as_config(folder: Path, document: Any) -> list[Run]:
    (folder / "config.json").write_text(json.dumps(document))
    return [find_recipe(own(f"hf:{folder}"))]


GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 257, "n_embd": 32, "n_layer": 1,
    "n_head": 4, "n_positions": 32, "activation_function": "gelu_new", "torch_dtype": "float32",
}  # fmt: skip
DOCUMENT = run_to_dict(RUN)
READERS: dict[str, tuple[Any, Callable[[Path, Any], list[Any]]]] = {
    "run.json": (DOCUMENT, read_as_run),
    "plan": ({"plan": 2, "run": DOCUMENT, "target": "h100:8", "predicted": {}}, read_as_plan),
    "manifest": ({"run": DOCUMENT}, read_as_manifest),
    "config.json": (GPT2, read_as_config),
}
"""What a file that names code is read as: a document, and its reader, which returns what verbs get of it."""


@pytest.mark.parametrize("reader", READERS)
def test_no_text_of_a_file_is_imported(reader: str, tmp_path: Path, imported: list[str]) -> None:
    """Every text field takes names with every special character in turn; some of all pairs are tried each time."""
    document, read = READERS[reader]
    pairs = list(itertools.product(texts_of(document), NAMES))
    seen = 0
    for path, name in random.Random(0).sample(pairs, 24):
        with contextlib.suppress(MeshwrightError):
            for value in read(tmp_path, with_text(document, path, name)):
                seen += 1
                assert own_references(value) == [], (path, name)
                for text in texts_in(value):
                    assert not isinstance(text, OwnName) or text.startswith("hf:"), (path, text)
                    if text not in PLAIN and not text.startswith("hf:"):
                        use(text)
        assert imported == [], (path, name)
    assert seen


def texts_in(value: Any) -> list[str]:
    """Returns every text in a value."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    trust._mapped(value, note)
    return found


PLAIN = {str(text) for text in texts_in(RUN)} | {"stdlib", "bytes", "h100:8", ""}
"""Texts of the documents as they were; what is in them is used elsewhere."""


@pytest.mark.parametrize("name", random.Random(0).sample(references(), 6))
def test_the_users_own_name_is_resolved_and_the_same_text_of_a_file_is_not(
    name: str, tmp_path: Path, imported: list[str]
) -> None:
    read = read_as_run(tmp_path, {**DOCUMENT, "layout": name})[-1]
    with pytest.raises(ConfigError, match="--trust-code="):
        plugins.load("layout", read.layout)
    with pytest.raises(ConfigError, match="no user gave"):
        plugins.load("layout", str(name))
    assert imported == []
    typed = parse_verb("show", ["--layout", name]).run
    with pytest.raises(ConfigError, match="it is recorded"):
        plugins.load("layout", typed.layout)
    assert len(imported) == 1


def test_a_transformation_that_forgets_the_type_loses_trust(imported: list[str]) -> None:
    given = own("mine.py:docs")
    assert isinstance(given, OwnName)
    for made in (f"{given}", given[:], given.strip(), "".join([given]), given.replace("d", "d")):
        assert type(made) is str
    name = foreign("mine[1].py:docs=2", "run.json")
    for made in (derive(name, "other"), place_of(name), parse_source(name).path, own(name)):
        assert isinstance(made, ForeignName) and made.origin == "run.json"
    assert all(
        isinstance(t, ForeignName) for t in expand_targets(foreign("a.py:b:4,c.py:d:4", "f"))
    )


@pytest.mark.parametrize(
    "name",
    [
        "meshwright.trust:_user.names.clear",
        "meshwright.trust:own",
        "meshwright.plugins:load_file",
        "meshwright.plugins:trust.own",
        "meshwright.plugins:PARTS.clear",
        "meshwright.plugins:PARTS",
        "meshwright.documents:os.abort",
        "meshwright.documents:json.loads",
        "meshwright.config:MeshShape.__init__",
        "meshwright.config:MeshShape.mro",
        "meshwright.words:AXES.update",
        "numpy:os.system",
        "optax:adamw.__globals__.clear",
        "builtins:exec",
    ],
)
def test_a_name_of_a_file_reaches_only_what_a_package_defines(name: str) -> None:
    with pytest.raises(ConfigError):
        plugins.load("data source", foreign(name, "run.json"))


def test_a_start_that_other_hosts_agreed_on_names_no_code(tmp_path: Path) -> None:
    meeting = supervise.Meeting(tmp_path, ALONE, Restarts())
    start = {"members": [0], "coordinator": None, "options": ["--layout", "evil.py:rows"]}
    (tmp_path / ".supervise" / "meeting-1").mkdir(parents=True)
    (tmp_path / ".supervise" / "start-1.json").write_text(json.dumps(start))
    with pytest.raises(ConfigError, match=r"'evil.py:rows' of .*start-1.json"):
        meeting.next_start(RUN, None)


def editable(site: Path, checkout: Path, files: dict[str, str], *, url: str = "") -> None:
    """Writes what an editable installation of the distribution `their-kit` leaves among the installed packages."""
    record = {"url": url or checkout.as_uri(), "dir_info": {"editable": not url}}
    facts = site / "their_kit-1.0.dist-info"
    facts.mkdir(parents=True)
    every = {
        "their_kit-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: their-kit\nVersion: 1.0\n",
        "their_kit-1.0.dist-info/direct_url.json": json.dumps(record),
        **files,
    }
    for name, text in every.items():
        (site / name).write_text(text)
    (facts / "RECORD").write_text("".join(f"{name},,\n" for name in every))


FINDER = "__editable___their_kit_1_0_finder.py"
INSTALLED = {
    "src layout": ("src", {"_editable_impl_their_kit.pth": "{checkout}/src"}),
    "flat layout, its own name": (".", {"_their_kit.pth": "{checkout}"}),
    "flat layout, names stated": (
        ".",
        {
            "their_kit.pth": "# a comment\n{checkout}\n",
            "their_kit-1.0.dist-info/top_level.txt": "their_kit\n",
        },
    ),
    "finder of setuptools": (
        "lib",
        {
            "__editable__.their_kit-1.0.pth": "import __editable___their_kit_1_0_finder",
            FINDER: "import abort\nMAPPING: dict[str, str] = {'their_kit': '{checkout}/lib/their_kit'}\n"
            "NAMESPACES: dict[str, list[str]] = {}\n",
        },
    ),
}
"""Kind of an editable installation -> folder of the checkout that has its package, and files that pip installs."""


@pytest.mark.parametrize("kind", INSTALLED)
def test_an_editable_installation_is_the_packages_that_it_maps(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests, examples, and folders of others in its checkout are not installed, wherever the path finds them."""
    place, files = INSTALLED[kind]
    site, checkout = tmp_path / "site", tmp_path / "their checkout"
    source = checkout / place
    files = {name: text.replace("{checkout}", str(checkout)) for name, text in files.items()}
    editable(site, checkout, files)
    ours = [source / "their_kit" / "rows.py", source / "their_kit" / "inner" / "rows.py"]
    others = [
        checkout / "tests" / "rows.py",
        checkout / "downloads" / "run" / "their_kit" / "rows.py",
        checkout / "downloads" / "rows.py",
        checkout / "setup.py",
    ]
    for file in (*ours, *others):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (source / "their_kit" / "link.py").symlink_to(others[0])
    monkeypatch.setattr(trust, "_site_folders", lambda: [site])
    for file in ours:
        assert trust._is_installed("their_kit", file), file
    for file in (*others, source / "their_kit" / "link.py"):
        for top in ("their_kit", "tests", "downloads", file.stem):
            assert not trust._is_installed(top, file), (top, file)


def test_what_calls_itself_installed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `.dist-info` beside a stranger's code on the path, and the folder of an installation that copied it."""
    site, theirs = tmp_path / "site", tmp_path / "theirs"
    file = theirs / "src" / "their_kit" / "rows.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    files = {"their_kit.pth": f"{theirs}/src"}
    editable(theirs, theirs, files)
    monkeypatch.setattr("sys.path", [str(theirs), str(theirs / "src"), *sys.path])
    assert not trust._is_installed("their_kit", file)
    editable(site, theirs, files, url=theirs.as_uri())
    monkeypatch.setattr(trust, "_site_folders", lambda: [site])
    assert not trust._is_installed("their_kit", file)
    (site / "their_kit").symlink_to(file.parent)
    assert trust._is_installed("their_kit", site / "their_kit" / "rows.py")


def test_code_beside_the_tests_is_not_installed() -> None:
    """It is in the checkout, and on the path of the tests."""
    with pytest.raises(ConfigError, match="it would run"):
        plugins.load("pipeline schedule", foreign("outside_parts:half_split", "run.json"))
    given = own("outside_parts:half_split")
    assert plugins.load("pipeline schedule", given) is outside_parts.half_split


def test_only_boundaries_make_a_name_the_users_own() -> None:
    """Anywhere else a name would change its class, and the text of a file become the user's."""
    found: dict[str, set[str]] = {}
    package = ROOT / "src" / "meshwright"
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not re.search(r"import trust|trust import .*\b(own|OwnName)\b|def own\b", text):
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if called.removeprefix("trust.") in ("own", "OwnName"):
                    name = str(file.relative_to(package))
                    found.setdefault(name, set()).add(function.name)
    assert found == BOUNDARIES
