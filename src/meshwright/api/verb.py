"""Options that verbs share (the Run, devices, processes), and what a verb is given and returns.

A verb is a frozen dataclass of options with a method `act(call: Call) -> Outcome`. `cli.verbs`
parses the options, calls the method, and prints the outcome.
"""

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import jax
import tyro
from rich.console import Console

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, unwritable_file
from meshwright.hardware import mesh
from meshwright.hardware.hosts import ALONE, Hosts, hosts_of, join
from meshwright.ranges import NonNegativeInt, PositiveInt, Ranged
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run
from meshwright.storage.paths import path_of
from meshwright.storage.removing import remove_file
from meshwright.trust import own

SIMULATED = 8
"""Devices simulated where there is no accelerator and neither --devices nor a mesh is given."""

_MOST_SIMULATED = 1024


@dataclasses.dataclass(frozen=True)
class Call:
    """A verb as it was called."""

    words: tuple[str, ...]
    """The verb and its arguments."""
    console: Console
    """Standard output, or standard error with --json; quiet in all processes of a run but the
    first."""
    write_json: Callable[[Any], None]
    """Writes a line of JSON on standard output, for what cannot wait until the end."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Output of a verb and its exit code; the command line prints it."""

    shown: str | Callable[[Console], None] = ""
    """Text, or a function that prints the result."""
    record: Any = None
    """The result as JSON values, which --json writes."""
    code: int = 0
    """Exit code."""


@dataclasses.dataclass(frozen=True)
class Base:
    """The Run before the options are applied, and the arguments that are left."""

    run: Run
    args: Sequence[str]
    target: str | None = None
    """Hardware of a plan, as `--on` names it."""


def base_run(args: Sequence[str]) -> Base:
    """Reads the Run that the options change, from the first argument or `--run`.

    The default is the recipe `tiny`.
    The first argument is a recipe (a name, FILE.py:FUNCTION, module:function) or a plan
    (FILE.json).
    Raises ConfigError where both are given, or where there is no such recipe or file.
    """
    args = list(args)
    recipe = args.pop(0) if args and not args[0].startswith("-") else None
    file = value_of(args, "--run")
    if file is not None:
        if recipe is not None:
            raise ConfigError(
                f"recipe {recipe} and --run {file}", "each gives a whole Run", "one of them"
            )
        return Base(read_run(path_of(file)), args)
    if recipe == "":
        raise ConfigError(
            "a recipe without a name", "the first argument is empty", "leave it out for tiny"
        )
    if recipe is not None and recipe.endswith(".json"):
        from meshwright.planner.plan_file import read_plan

        plan = read_plan(path_of(recipe))
        return Base(plan.run, args, plan.target)
    return Base(find_recipe(own(recipe or "tiny")), args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Ranged):
    """Options of every verb that takes a recipe."""

    usage: ClassVar[str] = "[RECIPE]"
    without: ClassVar[Sequence[str]] = ()
    """Parts of the Run whose options other verbs have."""
    run: Annotated[Run, tyro.conf.arg(name="")]
    run_file: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Take the Run from this run.json instead of a recipe; every training writes one."""

    @classmethod
    def base(cls, args: Sequence[str]) -> Base:
        """Returns the Run that the options change, and the arguments that are options."""
        return base_run(args)

    @classmethod
    def of(cls, base: Base) -> Self:
        """Returns the options before any is given."""
        return cls(run=base.run)


def value_of(args: Sequence[str], name: str) -> str | None:
    """Returns the value of the option `name` in `args`, before they are parsed.

    None without it.
    Raises ConfigError for an empty one.
    """
    for token, following in zip(args, [*args[1:], ""], strict=False):
        if token.partition("=")[0] == name:
            value = token.partition("=")[2] if "=" in token else following
            if not value:
                raise empty_error(name)
            return value
    return None


def empty_error(name: str) -> ConfigError:
    """Builds the error for an option, or a positional argument, whose value is empty."""
    truth = "its value is empty, as of a shell variable that is not set"
    fix = f"a value for {name}" + (", or leave it out" if name.startswith("--") else "")
    return ConfigError(f"{name} ''", truth, fix)


def refuse_options(options: Any, names: Sequence[str], mode: str, fix: str) -> None:
    """Raises ConfigError where an option was given that a mode of a verb does not use.

    names: fields of the options.  mode: what was asked for, such as `--compare`.  fix: the smallest
    change.
    """
    for name in given_options(options, names):
        raise ConfigError(f"{name} with {mode}", "it would not be used there", fix)


def given_options(options: Any, fields: Sequence[str]) -> list[str]:
    """Returns the options among `fields` that differ from their defaults, as they are typed."""
    default = {field.name: field.default for field in dataclasses.fields(options)}
    return [
        f"--{name.replace('_', '-')}" for name in fields if getattr(options, name) != default[name]
    ]


def require_writable(files: Iterable[Path | None]) -> None:
    """Raises ConfigError for a file that cannot be written, before what it is to hold is computed.

    Nothing is left behind, and what a file has is kept. Pipes and devices are not opened. Of a file
    that does not exist, one with a random name of the same length is made and deleted: another
    process may write the file meanwhile.
    """
    for file in files:
        if file is None:
            continue
        try:
            if file.is_file() or file.is_dir():
                file.open("ab").close()
            elif not file.exists():
                length = max(8, len(os.fsencode(file.name)))
                probe = file.with_name(secrets.token_hex(length)[:length])
                probe.open("xb").close()
                remove_file(probe, below=probe.parent)
        except OSError as error:
            raise unwritable_file(file, error) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions(Ranged):
    """Processes of a run on several hosts. Slurm, Cloud TPU, GKE, SkyPilot, Open MPI, torchrun and
    Ray tell it by themselves.
    """

    coordinator: str | None = None
    """HOST:PORT of process 0, where the environment does not tell."""
    processes: PositiveInt | None = None
    """Number of processes, one on each host; 1 computes alone, whatever the environment tells."""
    process: NonNegativeInt | None = None
    """Index of this process."""

    def hosts(self) -> Hosts:
        """Returns the processes by these options, or by the environment.

        Raises ConfigError where one is missing.
        """
        if self.processes == 1:
            return ALONE
        given = {
            "--coordinator": self.coordinator,
            "--processes": self.processes,
            "--process": self.process,
        }
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return hosts_of(os.environ)
        if self.coordinator is None or self.processes is None or self.process is None:
            raise ConfigError(
                " ".join(f"{name} {value}" for name, value in given.items() if value is not None),
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given",
                "--coordinator HOST:PORT --processes N --process I, with I from 0 to N - 1",
            )
        return Hosts("--coordinator", self.processes, self.process, self.coordinator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Ranged):
    """Options of the verbs that load a checkpoint onto a mesh."""

    at: NonNegativeInt | None = None
    """Step of the checkpoint; by default the last."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Mesh to compute on, as axis=degree,...; by default the run's own."""
    devices: PositiveInt | None = None
    """Devices to use; simulated where there is no accelerator."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()

    def shape(self) -> MeshShape | None:
        """Parses the mesh; None takes the run's own."""
        return MeshShape.parse(self.mesh) if self.mesh else None


def start_devices(devices: int | None, shape: MeshShape | None, hosts: Hosts = ALONE) -> None:
    """Joins the processes; simulates this one's part of `devices` where there is no accelerator.

    devices: None takes the size of the mesh. Raises ConfigError where the processes cannot have
    equally many.
    """
    total = devices or (shape.size if shape else SIMULATED)
    if total % hosts.processes:
        raise ConfigError(
            f"{total} devices over {hosts.processes} processes",
            "each process has the same number, at least one",
            f"--devices {max(1, total // hosts.processes) * hosts.processes}",
        )
    each = total // hosts.processes
    if each > _MOST_SIMULATED:
        raise ConfigError(
            f"{each:,} devices in one process",
            f"no host has as many, and at most {_MOST_SIMULATED:,} are simulated",
            "a smaller mesh; meshwright plan, and prove --on CHIP:SIZE, need no devices",
        )
    try:
        mesh.prepare_host(each)
    except RuntimeError as error:
        enough = jax.default_backend() != "cpu" or jax.device_count() >= each
        if enough and hosts.processes == 1:
            return
        raise ConfigError(
            f"{hosts.processes} processes" if enough else f"{each} simulated devices",
            "the recipe computed with JAX while it was imported, and devices are simulated or "
            "joined before that",
            "create models and arrays in functions: mw.wrap(lambda key: Model(key), ...)",
        ) from error
    join(hosts)
    mesh.open_devices()
