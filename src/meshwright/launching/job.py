"""A job: one command that starts on every host, and what its hosts need."""

import dataclasses
import re
from collections.abc import Callable, Iterable

from meshwright.errors import ConfigError
from meshwright.launching.accelerators import Accelerators

GRACE_SECONDS = 120
"""Seconds between the signal to stop (SIGTERM) and the end, in which a run saves."""

Pairs = tuple[tuple[str, str], ...]
"""Names with their values, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One command on several hosts."""

    name: str
    """Name of the job: lower-case letters, digits and hyphens."""
    command: tuple[str, ...]
    """Words of the command, without quotes; every process runs it."""
    hosts: int = 1
    """Number of hosts."""
    processes_per_host: int = 1
    """Processes on each host."""
    accelerators: Accelerators | None = None
    """Chips of the hosts; None asks for none."""
    environment: Pairs = ()
    """Environment variables of every process."""
    image: str | None = None
    """Container image."""
    mounts: Pairs = ()
    """(source, path) of what the processes find at a path: a folder, a volume claim or a store."""
    restarts: int = 0
    """Most starts after the first."""
    fields: Pairs = ()
    """Further fields of the scheduler."""

    def __post_init__(self) -> None:
        check_name(self.name)
        for name, _ in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(
                    f"--env {name}=...", "a variable's name is letters, digits and underscores", "--env NAME=VALUE"
                )
        for word in (*self.command, *(part for pair in (*self.environment, *self.mounts) for part in pair)):
            if "\0" in word:
                raise ConfigError(f"{word!r} in a job", "no process can be given a null character", "without it")


def check_name(name: str) -> None:
    """Raises ConfigError where a name is not legal in every scheduler."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--name {name}", "a job is named by 1 to 40 lower-case letters, digits and hyphens, a letter first",
            f"--name {legal_name(name)}",
        )  # fmt: skip


def legal_name(text: str) -> str:
    """Returns the nearest legal name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^(?=[^a-z])", "run-", name)[:40].rstrip("-") or "run"


def pairs(option: str, texts: Iterable[str], split: Callable[[str], tuple[str, str, str]]) -> Pairs:
    """Splits the values of an option into pairs. Raises ConfigError where one lacks a half."""
    found = []
    for text in texts:
        first, _, second = split(text)
        if not first or not second:
            raise ConfigError(f"{option} {text!r}", "it has two halves", _EXAMPLES[option])
        found.append((first, second))
    return tuple(found)


_EXAMPLES = {"--env": "--env NAME=VALUE", "--mount": "--mount SOURCE:/path", "--set": "--set NAME=VALUE"}


def refuse(job: Job, scheduler: str, **instead: str) -> None:
    """Raises ConfigError where the job has a field that a scheduler cannot honour. instead: field -> fix."""
    for field, fix in instead.items():
        default = next(f.default for f in dataclasses.fields(Job) if f.name == field)
        if getattr(job, field) != default:
            option = {"fields": "--set", "mounts": "--mount", "processes_per_host": "--processes"}.get(field)
            raise ConfigError(
                f"--on {scheduler} with {option or '--' + field}", f"{scheduler} jobs have no such thing here", fix
            )
