"""Every number and every path that a verb takes, found in the verbs' own parsers: a new option is covered by itself."""

import dataclasses
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tyro

from meshwright.api import finetuning
from meshwright.cli import verbs
from meshwright.cli.main import VERBS, run
from meshwright.cli.parse import Option, options_of
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.ranges import check_words, number_in
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run_file import write_run

NUMBERS = ("0", "-1", "nan", "inf", "1e30", "", "3x", "1e-300", str(2**40))
GIVEN = {"CHIP:SIZE,...": "h100:1", "PATH ...": "x", "PATH": "x", "TEXT": "x"}
"""Values of arguments that must be given, by metavar."""
_RUN_FIRST = "show"
"""Cheapest verb with the options of a Run, which are the same in all."""
_ARITHMETIC = ("plan", "show", "launch", "recipes")
"""Verbs that are cheap enough to run with what they accept; of the others the command line is parsed."""


class Parsed(Exception):
    """Ends a verb once its arguments are parsed."""


def tables() -> Iterator[tuple[list[str], list[Option]]]:
    """Yields the words of every verb, and of every action of one, with its options."""
    recipe = find_recipe("qwen3-0-6b")
    for verb in sorted(VERBS.keys() - {"recipes"}):
        found = verbs.kind_of(verb)
        kinds = (
            {f"{verb} {name}": kind for name, kind in found.items()}
            if isinstance(found, dict)
            else {verb: found}
        )
        for words, kind in kinds.items():
            fields = [
                f
                for f in dataclasses.fields(kind)
                if f.default is f.default_factory is dataclasses.MISSING
            ]
            with_run = any(field.name == "run" for field in fields)
            default = {field.name: tyro.MISSING for field in fields} | (
                {"run": recipe} if with_run else {}
            )
            yield words.split(), list(options_of(kind, kind(**default), parts=True))


def numeric() -> dict[str, tuple[list[str], Option]]:
    """Returns the command line before each numeric option; an option of a Run once, for the cheapest verb."""
    found = {}
    for words, options in tables():
        given = [
            word
            for option in options
            if option.default is tyro.MISSING
            for word in required(option)
        ]
        recipe = ["qwen3-0-6b"] if any(option.path[0] == "run" for option in options) else []
        after = {"launch": ["tiny", "--out", "/x"], "train": ["--out", "x"]}.get(words[0], [])
        for option in options:
            own = option.path[0] != "run" or words == [_RUN_FIRST]
            own = own and words != ["finetune"]  # it has the options of train
            is_number = option.numbers is not None or option.metavar.startswith(
                ("COUNT", "DOLLARS")
            )
            if is_number and own:
                found[f"{' '.join(words)} {option.names[0]}"] = (
                    [*words, *recipe, *given, "\0", *after],
                    option,
                )
    return found


def required(option: Option) -> list[str]:
    value = option.choices[0] if option.choices else GIVEN[option.metavar]
    return [value] if option.positional else [option.names[0], value]


NUMERIC = numeric()


@pytest.mark.parametrize("name", NUMERIC)
def test_a_number_is_accepted_or_refused_with_its_option_and_its_range(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, option = NUMERIC[name]
    if words[0] not in _ARITHMETIC and option.numbers is not None:

        def ended(parse: Any) -> Any:
            def parsed(*args: Any, **kwargs: Any) -> Any:
                parse(*args, **kwargs)
                raise Parsed

            return parsed

        monkeypatch.setattr(verbs, "parse", ended(verbs.parse))
    for value in NUMBERS:
        count = option.metavar.count("N") if option.metavar.startswith("N N") else 1
        line = [
            part
            for word in words
            for part in ([option.names[0], *[value] * count] if word == "\0" else [word])
        ]
        legal = is_in_range(value, option)
        try:
            run(line)
        except Parsed:
            assert legal, f"{value!r} is accepted"
        except MeshwrightError as error:
            if not legal:
                assert option.names[0] in error.asked and option.names[0] in error.fix, str(error)
                assert re.fullmatch(
                    r"it takes a .* ?(of at least|above|at most|a multiple of) .*"
                    r"|its value is empty, as of a shell variable that is not set",
                    error.truth,
                ), str(error)
        else:
            assert legal, f"{value!r} is accepted"
        shown = capsys.readouterr().out
        assert not re.search(r"\bnan\b|\binf\b|-\d+(\.\d+)? [KMGT]?i?B\b", shown), (
            value,
            shown[:2000],
        )


def test_a_number_above_its_range_is_answered_with_the_largest_of_it() -> None:
    bounded = 0
    for _, option in NUMERIC.values():
        number = number_in(option.numbers)
        largest = None if number is None else number.__metadata__[0].le
        if largest is None or largest >= 2**40:
            continue
        bounded += 1
        with pytest.raises(ConfigError) as refused:
            check_words(option.names[0], [str(largest + 1)], option.numbers, option.default)
        assert float(refused.value.fix.split()[1]) == largest, option.names
    assert bounded > 3


def is_in_range(word: str, option: Option) -> bool:
    """Whether a word is a number that an option takes."""
    kind = option.numbers
    if kind is None:  # a count such as 4M
        return word == str(2**40) or (word == "1e30" and option.metavar == "DOLLARS")
    number = number_in(kind)
    try:
        msgspec.convert(typing.get_args(number)[0](word), number)
    except (ValueError, OverflowError):
        return False
    return True


def test_plan_refuses_what_it_chooses_itself() -> None:
    with pytest.raises(MeshwrightError, match=r"(?s)--mesh with plan.*--why fsdp=2"):
        run(["plan", "qwen3-0-6b", "--on", "h100:2", "--mesh=fsdp=2"])
    with pytest.raises(MeshwrightError, match=r"--training.remat with plan"):
        run(["plan", "qwen3-0-6b", "--on", "h100:2", "--training.remat", "full"])


def test_every_number_has_a_range_in_its_type() -> None:
    lacking = [
        f"{' '.join(words)} {option.names[0]}"
        for words, options in tables()
        for option in options
        if option.numbers is None and re.fullmatch(r"[NX]( [NX])*( \.\.\.)?", option.metavar)
    ]
    assert not lacking


SPELLINGS = (
    "..",
    "a link and ..",
    "links, a space, an umlaut, a trailing slash",
    "~ and a trailing slash",
)


def spelled(how: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns another name of `place`, a file or folder in `tmp_path`/real, which is the working directory."""
    real = tmp_path / "real"
    monkeypatch.chdir(real)
    inside = str(place.relative_to(real))
    for name in ("a b", "ü"):
        (tmp_path / name).symlink_to(real)
    (real / "deep").mkdir(exist_ok=True)
    (tmp_path / "deep-link").symlink_to(real / "deep")
    monkeypatch.setenv("HOME", str(tmp_path))
    return {
        "..": f"deep/../../real/{inside}",
        "a link and ..": f"{tmp_path}/deep-link/../{inside}",
        "links, a space, an umlaut, a trailing slash": f"../a b/../ü/{inside}/",
        "~ and a trailing slash": f"~/real/{inside}/",
    }[how]


def paths() -> dict[str, tuple[list[str], list[str], Option]]:
    """Returns the command line before and after each option that is a path."""
    found = {}
    for words, options in tables():
        for option in options:
            if option.metavar.startswith("PATH"):
                others = [o for o in options if o.default is tyro.MISSING and o is not option]
                at = options.index(option)
                before = [
                    word
                    for o in others
                    if options.index(o) < at or not option.positional
                    for word in required(o)
                ]
                after = [
                    word
                    for o in others
                    if options.index(o) > at and option.positional
                    for word in required(o)
                ]
                after += ["tiny", "--out", "/x"] if words == ["launch"] else []
                first = ["hf:x"] if words == ["finetune"] and option.names[0] != "--run" else []
                found[f"{' '.join(words)} {option.names[0]}"] = (
                    [*words, *first, *before],
                    after,
                    option,
                )
    return found


PATHS = paths()


@pytest.mark.parametrize("name", PATHS)
def test_every_path_enters_absolute_and_normal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, option = PATHS[name]
    given: list[Any] = []

    def ended(parse: Any) -> Any:
        def parsed(*args: Any, **kwargs: Any) -> Any:
            given.append(parse(*args, **kwargs))
            raise Parsed

        return parsed

    monkeypatch.setattr(verbs, "parse", ended(verbs.parse))
    (tmp_path / "real").mkdir()
    place = tmp_path / "real" / "my file"
    write_run(find_recipe("qwen3-0-6b"), place)  # for --run
    if before[0] == "finetune":
        monkeypatch.setattr(finetuning, "source_run", lambda source: find_recipe("tiny"))
    for how in SPELLINGS:
        with monkeypatch.context() as there:
            word = spelled(how, place, tmp_path, there)
            with pytest.raises(Parsed):
                run([*before, *([] if option.positional else [option.names[0]]), word, *after])
        value = getattr(given.pop(), option.path[-1])
        found = value[0] if isinstance(value, tuple) else value
        assert (
            isinstance(found, Path)
            and str(found) == os.path.normpath(found)
            and found.is_absolute()
        ), how
        assert found.resolve() == place.resolve(), how
        for link in ("a b", "ü", "deep-link"):
            (tmp_path / link).unlink()


READERS = {
    "evaluate": ["evaluate", "RUN", "--devices", "1"],
    "generate": ["generate", "RUN", "def f(", "--max-tokens", "2", "--devices", "1"],
    "resume": ["train", "--out", "RUN", "--resume", "--devices", "1"],
    "list": ["checkpoint", "list", "RUN"],
    "inspect": ["checkpoint", "inspect", "RUN"],
    "verify": ["checkpoint", "verify", "RUN"],
    "convert": ["convert", "RUN", "NEW"],
    "view": ["view", "RUN", "--html", "NEW.html"],
    "show": ["show", "--run", "RUN/run.json"],
    "plan": ["plan", "--run", "RUN/run.json", "--on", "v5e:2x2"],
}
"""Commands that read a run's folder; NEW is a path beside it."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps in a folder with a space and an umlaut, and a link to it."""
    folder = tmp_path_factory.mktemp("paths") / "mein Läufe"
    small = [
        "--model.width",
        "32",
        "--model.layers",
        "2",
        "--model.mlp",
        "64",
        "--training.save-every",
        "1",
    ]
    assert (
        run(["train", "--out", str(folder / "run"), "--steps", "2", "--devices", "1", *small]) == 0
    )
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(folder / "run")
    return folder


@pytest.mark.parametrize("command", READERS)
def test_every_reader_of_a_run_takes_every_spelling(
    command: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One run, by `..`, a link, a trailing slash and `~`, in a folder with a space and an umlaut."""
    monkeypatch.setenv("HOME", str(trained))
    monkeypatch.chdir(trained / "sub")
    for number, word in enumerate(
        ("../run", "../sub/../run/", "../link", "~/run", "../../mein Läufe/run")
    ):
        new = f"../new-{command}-{number}"
        assert (
            run([part.replace("RUN", word).replace("NEW", new) for part in READERS[command]]) == 0
        ), word
    found = capfd.readouterr()
    assert "Traceback" not in found.out + found.err
    if command in ("convert", "view"):
        assert len(list(trained.glob(f"new-{command}-*"))) == 5
