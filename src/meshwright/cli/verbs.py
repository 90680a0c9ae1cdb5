"""Runner of every verb.

It parses the options, calls the verb's `act`, and prints the result, or writes it as JSON.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from meshwright.api.verb import Call, HostOptions, Outcome, RunOptions
from meshwright.cli.main import module_of
from meshwright.cli.output import columns, write, write_json
from meshwright.cli.parse import parse
from meshwright.errors import ConfigError, nearest
from meshwright.reporters.console import open_console
from meshwright.runs.recipe import with_prompt_for_data


def kind_of(verb: str) -> Any:
    """Imports the dataclass of a verb's options, or a mapping of its actions to theirs."""
    module = module_of(verb)
    return getattr(module, "ACTIONS", None) or getattr(module, f"{verb.capitalize()}Options")


def parse_verb(verb: str, args: Sequence[str]) -> Any:
    """Returns the options of a verb.

    Prints the help and raises SystemExit for `--help`; raises ConfigError.
    """
    kind, name = kind_of(verb), verb
    if isinstance(kind, Mapping):
        if not args:
            actions = ", ".join(kind)
            raise ConfigError(
                f"meshwright {verb}",
                f"it takes one of {actions}, then OUT",
                f"meshwright {verb} {next(iter(kind))} OUT",
            )
        if args[0] in ("-h", "--help"):
            write(f"usage: meshwright {verb} {'|'.join(kind)} OUT [options]\n\n")
            summaries = {
                name: " ".join(str(action.__doc__).split()) for name, action in kind.items()
            }
            write(columns(summaries))
            raise SystemExit(0)
        if args[0] not in kind:
            raise ConfigError(
                f"meshwright {verb} {args[0]}", "there is no such action", nearest(args[0], kind)
            )
        name, kind, args = f"{verb} {args[0]}", kind[args[0]], args[1:]
    usage = f"{name} {getattr(kind, 'usage', '')}".rstrip()
    if issubclass(kind, RunOptions):
        base = kind.base(list(args))
        options = parse(kind, usage, base.args, default=kind.of(base))
        return dataclasses.replace(options, run=with_prompt_for_data(options.run, base.run))
    required = []
    for field in dataclasses.fields(kind):
        if field.default is field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    default = kind(**dict.fromkeys(required, tyro.MISSING))
    args = kind.own(args) if hasattr(kind, "own") else args
    return parse(kind, usage, args, default=default)


def run_verb(verb: str, args: Sequence[str]) -> int:
    """Runs a verb; returns its exit code."""
    try:
        options = parse_verb(verb, args)
    except SystemExit as help_request:
        return int(help_request.code or 0)
    as_json, hosts = getattr(options, "json", False), getattr(options, "hosts", None)
    console = open_console(sys.stderr if as_json else sys.stdout)
    console.quiet = isinstance(hosts, HostOptions) and hosts.hosts().process != 0
    outcome: Outcome = options.act(Call((verb, *args), console, write_json))
    if console.quiet or (as_json and outcome.record is None):
        return outcome.code
    if as_json:
        write_json(outcome.record)
    elif callable(outcome.shown):
        outcome.shown(console)
    else:
        write(outcome.shown)
    return outcome.code
