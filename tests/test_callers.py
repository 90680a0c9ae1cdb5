"""An error speaks to its caller: options to the command line, arguments to Python."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from printed_fixes import OPTION, known_options
from test_fixes import MISTAKES, SOURCE, fixes_in

import meshwright as mw
from meshwright.callers import AMBIGUOUS, ARGUMENTS, CALLS, FIELDS, argument_of, in_python
from meshwright.cli.main import VERBS, run
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.hardware.mesh import first_devices
from meshwright.runs.recipe import _PARTS, _fields_of

FUNCTIONS = {
    name: list(inspect.signature(value).parameters)
    for name, value in ((name, getattr(mw, name)) for name in mw.__all__)
    if inspect.isfunction(value)
}

REFUSALS: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "a batch that does not divide": (
        ["train", "tiny", "--mesh", "fsdp=8", "--batch", "9"],
        lambda: mw.train(mw.recipe("tiny", mesh="fsdp=8", batch=9), progress="none"),
    ),
    "key/value heads": (
        ["show", "tiny", "--model.kv-heads", "3"],
        lambda: mw.show(mw.recipe("tiny", kv_heads=3)),
    ),
    "head size": (
        ["show", "tiny", "--model.head-size", "7"],
        lambda: mw.show(mw.recipe("tiny", head_size=7)),
    ),
    "steps below one": (["show", "tiny", "--steps", "0"], lambda: mw.recipe("tiny", steps=0)),
    "a batch below one": (["show", "tiny", "--batch", "0"], lambda: mw.recipe("tiny", batch=0)),
    "a sequence below one": (["show", "tiny", "--seq", "0"], lambda: mw.recipe("tiny", seq=0)),
    "a rate below zero": (
        ["show", "tiny", "--lr", "-1"],
        lambda: mw.recipe("tiny", learning_rate=-1.0),
    ),
    "too many samples": (
        ["train", "tiny", "--steps", "9000000000000000000"],
        lambda: mw.train(mw.recipe("tiny", steps=9 * 10**18), progress="none"),
    ),
    "a log period": (
        ["train", "tiny", "--log-every", "x"],
        lambda: mw.train(mw.recipe("tiny"), progress="x"),
    ),
    "steps of a profile": (
        ["train", "tiny", "--profile", "9:1"],
        lambda: mw.train(mw.recipe("tiny"), profile="9:1", progress="none"),
    ),
    "an accepted name": (
        ["train", "tiny", "--out", "{tmp}/a", "--accept", "nonsense"],
        lambda: mw.train(mw.recipe("tiny"), accept=["nonsense"], progress="none"),
    ),
    "a spike with skip": (
        ["train", "tiny", "--faults.spike", "3", "--faults.bad-step", "skip"],
        lambda: mw.recipe("tiny", spike=3.0, bad_step="skip"),
    ),
    "a spike below one": (
        ["train", "tiny", "--faults.spike", "0.5"],
        lambda: mw.recipe("tiny", spike=0.5),
    ),
    "local checkpoints": (
        ["train", "tiny", "--local-checkpoints.path", "/x"],
        lambda: mw.recipe("tiny", path="/x"),
    ),
    "tokens per step": (
        ["plan", "tiny", "--on", "v6e:2x2", "--tokens-per-step", "x"],
        lambda: mw.plan("tiny", on="v6e:2x2", tokens_per_step="x"),
    ),
    "a range that holds nothing": (
        ["plan", "tiny", "--on", "v6e:2x2", "--tokens-per-step", "4M..1M"],
        lambda: mw.offers("tiny", on="v6e:2x2", tokens_per_step="4M..1M"),
    ),
    "tokens of a training": (
        ["plan", "tiny", "--on", "v6e:2x2,v6e:4x4", "--tokens", "x"],
        lambda: mw.offers("tiny", on="v6e:2x2", tokens="x"),
    ),
    "a machine": (["plan", "tiny", "--on", "v6e"], lambda: mw.plan("tiny", on="v6e")),
    "an empty text": (
        ["train", "tiny", "--data", "{tmp}/none"],
        lambda: mw.train(mw.recipe("tiny", paths=("/nowhere/none",)), progress="none"),
    ),
    "an attention kernel": (
        ["train", "tiny", "--training.attention-kernel", "splash"],
        lambda: mw.train(mw.recipe("tiny", attention_kernel="splash"), progress="none"),
    ),
    "a folder of another recipe": (
        ["train", "{tmp}"],
        lambda: mw.recipe("/tmp"),
    ),
}
"""Refusal -> the command that meets it, and the call of Python."""


def ours(text: str) -> list[str]:
    """Returns the options of a text that Python has as arguments."""
    return [found[1] for found in OPTION.finditer(text) if argument_of(found[1]) is not None]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_speaks_to_its_caller(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, call = REFUSALS[name]
    with pytest.raises(MeshwrightError) as typed:
        run([word.format(tmp=tmp_path) for word in words])
    with pytest.raises(MeshwrightError) as called:
        call()
    assert not ours(str(called.value)), str(called.value)
    assert "meshwright " not in called.value.fix
    assert "mw." not in str(typed.value)
    for argument in {argument_of(option) for option in ours(str(typed.value))}:
        assert f"{argument}=" not in str(typed.value) or argument in ("include", "seed")


def test_the_table_is_long_and_most_rows_name_an_option(tmp_path: Any) -> None:
    assert len(REFUSALS) >= 20
    assert set(MISTAKES)  # what only the command line meets


def test_every_option_is_an_argument_a_field_or_of_the_command_line() -> None:
    every = {argument for arguments in FUNCTIONS.values() for argument in arguments}
    base = mw.recipe("tiny")
    fields = {field for part in ("run", *_PARTS) for field in _fields_of(base, part)}
    sampling = set(mw.Sampling.__dataclass_fields__)
    for option in ARGUMENTS:
        assert option in known_options(), option
        assert ARGUMENTS[option] in every | fields | sampling, option
    for option, known in known_options().items():
        if known.path[0] != "run" or len(known.path) < 3 or not option.startswith("--"):
            continue
        part, field = known.path[1], known.path[2]
        assert part.replace("_", "-") in FIELDS, option
        holder = next(each for each in ("run", *_PARTS) if field in _fields_of(base, each))
        found = argument_of(option)
        if holder == part and len(known.path) == 3:
            assert found == ARGUMENTS.get(option, field), option
        else:
            assert option.removeprefix("--") in AMBIGUOUS or "." in (found or ""), option
    for verb in CALLS:
        assert verb in VERBS and verb in FUNCTIONS


def test_no_fix_of_the_sources_names_an_option_to_python() -> None:
    texts = [text for file in SOURCE.rglob("*.py") for _, text in fixes_in(file)]
    assert len(texts) > 300
    for text in texts:
        found = in_python(text.replace("\0", "8"))
        outside = re.sub(r"meshwright [a-z]+[^;`]*", "", found)
        assert not ours(outside), (text, found)
        assert in_python(found) == found, "a text that was translated stays"


@pytest.mark.parametrize(
    ("text", "python"),
    [
        (
            "--mesh fsdp=2,tensor=4, or a larger --batch",
            'mesh="fsdp=2,tensor=4", or a larger batch',
        ),
        ("--optimizer.name muon", 'optimizer.name="muon"'),
        ("another --out may do", "another out may do"),
        ("--on 'h100:8'.", 'on="h100:8".'),
        ("--data PATH", "data=PATH"),
        ("--report wandb", 'reporters=("wandb",)'),
        ("pip install --no-deps x", "pip install --no-deps x"),
        ("--watchdog.stall 60", "--watchdog.stall 60"),
        ("`meshwright tokenize runs/a --out runs/b`", "`meshwright tokenize runs/a --out runs/b`"),
        ("meshwright train --out x1 --at 3", 'mw.train(run, out="x1", start=3)'),
        ("meshwright evaluate runs/a --at 3", 'mw.evaluate("runs/a", at=3)'),
    ],
)
def test_options_become_arguments(text: str, python: str) -> None:
    assert in_python(text) == python


def test_more_devices_than_there_are_are_refused() -> None:
    assert len(first_devices(3)) == 3
    for count in (0, 9):
        with pytest.raises(ConfigError, match=f"devices={count}"):
            first_devices(count)
    with pytest.raises(ConfigError, match="jax_num_cpu_devices"):
        mw.train(mw.recipe("tiny"), devices=9, progress="none")
    with pytest.raises(ConfigError, match="jax_num_cpu_devices"):
        mw.train(mw.recipe("tiny", mesh="fsdp=16"), devices=8, progress="none")


def test_the_fix_of_too_few_devices_works() -> None:
    with pytest.raises(ConfigError) as refused:
        first_devices(9)
    setting = re.search(r"jax\.config\.update\(.*?\)", refused.value.fix)
    assert setting is not None
    program = (
        f"import json, jax; {setting[0]}\n"
        "from meshwright.hardware.mesh import first_devices\n"
        "print(json.dumps(len(first_devices(9))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 9


def test_a_proof_without_its_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    best = mw.plan("llama32-1b", on="v6e:2x2", at_most=1)[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(mw.CensusError, match="libtpu, is not installed"):
        mw.prove(best)
    with pytest.raises(mw.CensusError, match="libtpu, is not installed"):
        run(["plan", "llama32-1b", "--on", "v6e:2x2", "--prove", "1"])
