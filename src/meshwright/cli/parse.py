"""Parser of a verb's options into its dataclass: tyro converts the values, and every mistake is one of our errors."""

import contextlib
import dataclasses
import difflib
import io
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from meshwright.aliases import MESH_OPTIONS, OPTIONS, SETTINGS
from meshwright.cli.help import format_help
from meshwright.cli.options import REQUIRED, Option, Values, options_of, part_of
from meshwright.cli.output import write
from meshwright.errors import ConfigError

_RECIPE_OPTIONS = ("model", "recipe", "preset", "model_name", "model_name_or_path")
"""Options elsewhere for what is the first argument here."""


def parse[Options](kind: type[Options], verb: str, args: Sequence[str], *, default: Options | None = None) -> Options:
    """Parses the arguments of a verb.

    verb: the verb, and `[RECIPE]` where it takes one.  default: an instance whose fields are the defaults.
    Prints the help and raises SystemExit for `--help`. Raises ConfigError for an unknown option, an illegal value, or
    a missing option.
    """
    options = list(options_of(kind, default, args=args))
    command = f"meshwright {verb.split()[0]}"
    if "-h" in args or "--help" in args:
        positional = "".join(f" {option.names[0]}" for option in options if option.positional)
        write(format_help(f"meshwright {verb}{positional} [options]", kind.__doc__ or "", options) + "\n")
        raise SystemExit(0)
    given = _scan(command, args, options)
    for option in options:
        if option.default is REQUIRED and option not in given:
            raise ConfigError(command, f"{option.names[0]} is missing.{_gist(option)}", f"{command} {option.example}")
    fields = {option.path: _convert(command, option, *given[option]) for option in given}
    try:
        return _set(default, fields) if default is not None else _make(kind, fields)
    except ValueError as error:  # the checks of a configuration from outside the package
        raise ConfigError(f"{command} {' '.join(args)}", str(error), f"{command} --help") from error


def refuse_options(options: Any, names: Sequence[str], mode: str, fix: str) -> None:
    """Raises ConfigError where an option that a mode of a verb does not use was given.

    names: fields of the options.  mode: what was asked for, such as `--decode`.  fix: the smallest change.
    """
    for field in dataclasses.fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise ConfigError(f"--{field.name.replace('_', '-')} with {mode}", "it would not be used there", fix)


def _make[Owner](kind: type[Owner], fields: dict[tuple[str, ...], Any]) -> Owner:
    """Makes a dataclass of the fields at some paths; nested ones begin with the default of their field."""
    nested = {path[0] for path in fields if len(path) > 1}
    defaults = {f.name: f.default for f in dataclasses.fields(kind) if f.name in nested}  # type: ignore[arg-type]
    values = {path[0]: value for path, value in fields.items() if len(path) == 1}
    for name, default in defaults.items():
        values[name] = _set(default, {path[1:]: value for path, value in fields.items() if path[0] == name})
    return kind(**values)


def _set[Owner](owner: Owner, fields: dict[tuple[str, ...], Any]) -> Owner:
    """Returns a dataclass with the fields at some paths replaced, all fields of a nested one at once."""
    changes = {path[0]: value for path, value in fields.items() if len(path) == 1}
    for first in {path[0] for path in fields if len(path) > 1}:
        nested = {path[1:]: value for path, value in fields.items() if path[0] == first}
        part = getattr(owner, first)
        if part is None:  # an optional one, of which an option was given
            kind = part_of(typing.get_type_hints(type(owner), include_extras=True)[first])
            assert kind is not None
            changes[first] = _make(kind, nested)
            continue
        changes[first] = _set(part, nested)
    return dataclasses.replace(owner, **changes)  # type: ignore[type-var]


def _convert(command: str, option: Option, name: str, values: list[str]) -> Any:
    """Converts the values of an option to its type. Raises ConfigError where tyro does not accept them."""
    if option.values.count == 0:
        return True
    one = dataclasses.make_dataclass("One", [("value", Annotated[option.annotation, tyro.conf.arg(name="value")])])
    args = [f"--value={values[0]}"] if len(values) == 1 else ["--value", *values]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(one, args=args, config=(tyro.conf.FlagConversionOff,)).value
    except SystemExit as error:
        message = " ".join(complaint.getvalue().translate(_BOX).replace("--value", name).split())
        fix = f"{name} {option.values.metavar}"
        raise ConfigError(f"{command} {name} {' '.join(values)}".rstrip(), message, fix) from error


_BOX = str.maketrans("╭─╮│╰╯", "      ")


def _scan(command: str, args: Sequence[str], options: Sequence[Option]) -> dict[Option, tuple[str, list[str]]]:
    """Returns the name and the values given for each option; those of a repeated list are joined."""
    by_name = {name: option for option in options for name in option.names}
    free = [option for option in options if option.positional]
    given: dict[Option, tuple[str, list[str]]] = {}
    tokens = list(args)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--"):
            if not free:
                raise _stray(command, token, args, options)
            option = free[0] if free[0].values.count is None else free.pop(0)
            before = given[option][1] if option in given else []
            given[option] = (option.names[0], [*before, token])
            _check(command, option, option.names[0], [token])
            continue
        name, equals, value = token.partition("=")
        followers = [value] if equals else _values_after(tokens)
        known = by_name.get(name.replace("_", "-"))
        if known is None:
            raise _unknown(command, name, followers, by_name)
        taken = followers if known.values.count is None or equals else followers[: known.values.count]
        _check(command, known, name, taken)
        if not equals:
            del tokens[: len(taken)]
        before = given[known][1] if known in given and known.values.count is None else []
        given[known] = (name.replace("_", "-"), [*before, *taken])
    return given


def _values_after(tokens: Sequence[str]) -> list[str]:
    """Returns the tokens before the next option."""
    end = next((i for i, token in enumerate(tokens) if token.startswith("--")), len(tokens))
    return list(tokens[:end])


def _check(command: str, option: Option, name: str, values: Sequence[str]) -> None:
    """Raises ConfigError where `values` are too few or not legal."""
    takes = option.values
    label = "" if option.positional else f"{name} "
    asked = f"{command} {label}{' '.join(values)}".rstrip()
    if takes.count is not None and len(values) != takes.count:
        if takes.count == 0:
            raise ConfigError(asked, f"{name} is a switch and takes no value", name)
        plural = "a value" if takes.count == 1 else f"{takes.count} values"
        raise ConfigError(asked, f"{name} takes {plural}.{_gist(option)}", f"{name} {takes.metavar}")
    for value in values:
        if not value and takes.metavar.startswith("PATH"):
            truth = "its value is empty, as of a shell variable that is not set"
            raise ConfigError(asked, truth, f"{label}{takes.metavar}, or leave it out")
        if not _is_legal(takes, value):
            because = f"{value!r} is not {_expected(takes)}"
            raise ConfigError(asked, because, f"{label or command + ' '}{_legal_value(takes, value)}")


def _is_legal(takes: Values, value: str) -> bool:
    if takes.optional and value == "None":
        return True
    if takes.choices:
        return value in takes.choices
    if takes.kind is None:
        return True
    try:
        takes.kind(value)
    except ValueError:
        return False
    return True


def _expected(takes: Values) -> str:
    if takes.choices:
        return f"one of {', '.join(takes.choices)}"
    return "a whole number" if takes.kind is int else "a number"


def _legal_value(takes: Values, value: str) -> str:
    """Returns the legal value nearest to `value`."""
    if takes.choices:
        close = difflib.get_close_matches(value, takes.choices, n=1, cutoff=0.4)
        return close[0] if close else takes.metavar
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value)
        return str(round(number)) if takes.kind is int else f"{number:g}"
    return takes.metavar


def _stray(command: str, token: str, args: Sequence[str], options: Sequence[Option]) -> ConfigError:
    """Builds the error for a word that belongs to no option."""
    asked, rest = f"{command} {' '.join(args)}", list(args)
    rest.remove(token)
    takes_recipe = any(option.group == "run" for option in options)
    # What came first was taken for the recipe before the options are read; a second one has no place.
    if not takes_recipe or args[0] == token:
        if takes_recipe:
            asked, before = f"{command} RECIPE {' '.join(args)}", "a recipe was given before it"
        else:
            before = "the verb takes no further word"
        return ConfigError(asked, f"{token!r} belongs to no option, and {before}", f"leave {token!r} out")
    return ConfigError(
        asked, f"{token!r} belongs to no option; a recipe comes before the options",
        f"{' '.join([command, token, *rest])}, or leave it out",
    )  # fmt: skip


def _unknown(command: str, name: str, values: Sequence[str], by_name: dict[str, Option]) -> ConfigError:
    """Builds the error for an option that does not exist, with the option that was probably meant."""
    asked, because = " ".join([command, name, *values]), f"there is no option {name}"
    word = name.lstrip("-").replace("-", "_").lower()
    last = word.rpartition(".")[2]
    if last in _RECIPE_OPTIONS and any(option.group == "run" for option in by_name.values()):
        recipe = values[0] if values else "RECIPE"
        return ConfigError(asked, because, f"{command} {recipe}: a recipe is the first argument")
    for meant in _candidates(word, last, values):
        option = by_name.get(meant.split()[0])
        if option is not None:
            example = meant if " " in meant or option.values.count == 0 else " ".join([meant, *values])
            return ConfigError(asked, because, f"did you mean {example}?{_gist(option)}")
    names = {key.lstrip("-").replace("-", "_"): key for key in by_name if key.startswith("--")}
    ends = {key.rpartition(".")[2]: name for key, name in names.items()}
    for key, known in ((word, names), (last, ends)):
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if close:
            return ConfigError(asked, because, f"did you mean {known[close[0]]}?{_gist(by_name[known[close[0]]])}")
    return ConfigError(asked, because, f"{command} --help, which lists all options")


def _gist(option: Option) -> str:
    """Returns the first sentence of an option's description, after a space."""
    sentence = option.doc.partition(". ")[0].rstrip(".")
    return f" {sentence}." if sentence else ""


def _candidates(word: str, last: str, values: Sequence[str]) -> list[str]:
    """Returns the options that `word` of another trainer may mean here, the likeliest first."""
    candidates = []
    if last in MESH_OPTIONS and (not values or values[0].isdigit()) and (values or last not in SETTINGS):
        candidates.append(f"--mesh {MESH_OPTIONS[last]}={values[0] if values else 'N'}")
    candidates += [SETTINGS[key] for key in (word, last) if key in SETTINGS]
    candidates += [OPTIONS[key] for key in (word, last) if key in OPTIONS]
    sections = ("model", "training", "optimizer", "data")
    return [*candidates, *(f"--{section}.{last.replace('_', '-')}" for section in sections)]
