"""The verb `launch`: a scheduler's job file that runs a command on several hosts."""

import dataclasses
import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

import tyro

from meshwright.api.finetuning import FinetuneOptions, check_start
from meshwright.api.training import TrainOptions
from meshwright.api.verb import Call, Outcome, RunOptions, value_of
from meshwright.cli.parse import options_of
from meshwright.cli.verbs import kind_of, parse_verb
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, unwritable_file
from meshwright.hardware.targets import parse_target, refuse_announced
from meshwright.launching.schedulers import SCHEDULERS, Job, accelerators_of, legal_name, pairs
from meshwright.ranges import NonNegativeInt, PositiveInt, Ranged
from meshwright.trainer.relations import check_run
from meshwright.trust import is_reference, trust_options

VERBS = ("train", "finetune", "evaluate", "generate", "parity", "bench", "doctor")
"""Verbs that join their hosts."""
_TRAINING = ("train", "finetune")
_NAMES_RUN = {"--resume", "--at", "--run"}
"""Options that name the run in a folder or in a file: `train --out DIR --resume`."""
_RESTARTS = 10
"""Starts without progress where --restarts is not given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions(Ranged):
    """Run RUN on several hosts: a recipe, a run file or a plan, followed by the options of `train`;
    or another verb with its own arguments. Prints the job file of a scheduler. Options that launch
    and the other verb both have are those of launch before RUN, and of the verb after it.
    """

    usage: ClassVar[str] = "[launch options] RUN"
    on: Literal["slurm", "jobset", "skypilot"]
    """Scheduler: Slurm, a Kubernetes JobSet, or SkyPilot."""
    target: Annotated[str | None, tyro.conf.arg(metavar="CHIP:SIZE")] = None
    """Hardware, as `plan --on` names it: v5p:8x8x16, 2*v6e:16x16, h100:64. Gives the hosts and what
    each of them has. By default that of a plan."""
    hosts: PositiveInt | None = None
    """Number of hosts; by default those of --target, else one."""
    processes: PositiveInt | None = None
    """Processes in all; by default one on each host."""
    name: str | None = None
    """Name of the job; by default that of RUN."""
    image: str | None = None
    """Container image; docker/Dockerfile makes one. With Slurm a FILE.sif is run by Apptainer,
    others by Pyxis."""
    env: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Environment variable of every process; may be repeated. With one, only you may read the file
    --write."""
    mount: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE:PATH")] = ()
    """What is found at a path in the container: a folder (Slurm), a persistent volume claim
    (JobSet), a bucket (SkyPilot); may be repeated."""
    cache: str | None = None
    """Folder of token files and compiled programs, which all hosts reach; by default each user's
    own."""
    restarts: NonNegativeInt | None = None
    """Most starts in a row without progress (a checkpoint of a later step), after the first; by
    default 10 for training, else none."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Further field of the scheduler: a directive of sbatch, a node label, a resource of SkyPilot;
    may be repeated."""
    write: Path | None = None
    """File to write; by default the job is printed."""
    overwrite: bool = False
    """Replace the file --write where there is one."""

    @classmethod
    def own(cls, args: Sequence[str]) -> Sequence[str]:
        """Returns the arguments before RUN."""
        return _split(args)[0]

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright launch`.

        Raises ConfigError for a job that a scheduler cannot run, or a file that exists.
        """
        own, rest = _split(call.words[1:])
        if not rest:
            fix = "meshwright launch --on slurm tiny --out /shared/runs/tiny"
            raise ConfigError(f"meshwright launch {' '.join(own)}", "there is no RUN", fix)
        job, parsed, hardware = _job(self, rest)
        write_job, start = SCHEDULERS[self.on]
        text = write_job(job)
        _check_relations(parsed, hardware)
        _check_data(self.on, parsed, rest)
        if self.write is None:
            return Outcome(text)
        try:
            with _opened(self.write, self.overwrite, private=bool(job.environment)) as opened:
                opened.write(text)
        except FileExistsError as error:
            raise ConfigError(
                f"--write {self.write}", "it exists", "another file, or --overwrite"
            ) from error
        except OSError as error:
            raise unwritable_file(self.write, error) from error
        hosts = "1 host" if job.hosts == 1 else f"{job.hosts:,} hosts"
        return Outcome(f"{self.write}: {hosts}. Start it with: {start} {self.write}\n")


def _opened(file: Path, overwrite: bool, private: bool) -> IO[str]:
    """Opens a job file.

    private: only its owner may read it, because environment variables may be passwords.
    """

    def opener(path: str, flags: int) -> int:
        opened = os.open(path, flags, 0o600 if private else 0o666)
        if private and stat.S_ISREG(os.fstat(opened).st_mode):
            os.fchmod(opened, 0o600)  # of a file that there was already
        return opened

    return open(file, "w" if overwrite else "x", encoding="utf-8", opener=opener)


def _split(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits the arguments into those of launch and those of the command that runs.

    Options before RUN are those of launch. Behind it so are options that the verb does not have.
    """
    launch_options = list(options_of(LaunchOptions))
    switches = {name for option in launch_options if not option.metavar for name in option.names}
    end = 0
    while end < len(args) and args[end].startswith("-"):
        is_one_word = args[end] in (*switches, "--help", "-h") or "=" in args[end]
        end += 1 if is_one_word else 2
    rest = list(args[end:])
    verb = rest[0] if rest and rest[0] in VERBS else "train"
    of_verb = {name for option in options_of(kind_of(verb)) for name in option.names}
    of_launch = {name for option in launch_options for name in option.names} - of_verb
    moved: list[str] = []
    at = 0
    while at < len(rest):
        name, equals, _ = rest[at].partition("=")
        if name not in of_launch:
            at += 1
            continue
        length = 1 if equals or name in switches else 2
        moved += rest[at : at + length]
        del rest[at : at + length]
    return [*args[:end], *moved], rest


def _names(words: Sequence[str]) -> set[str]:
    """Returns the words without the values that are joined to them: `--out` of `--out=DIR`."""
    return {word.partition("=")[0] for word in words}


def _job(options: LaunchOptions, words: Sequence[str]) -> tuple[Job, Any, str | None]:
    """Returns the job, the options of the command in it, and its hardware where that is known."""
    verb = words[0] if words[0] in VERBS else "train"
    arguments = list(words[1:] if words[0] in VERBS else words)
    run = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if words[0] in _TRAINING and run is None and not _names(arguments) & _NAMES_RUN:
        fix = f"launch {verb} RUN, or launch {verb} --out DIR --resume"
        raise ConfigError(f"launch {verb}", "it names no run", fix)
    name = options.name or _job_name(verb, run)
    if verb in _TRAINING:
        arguments = _with_out(options, name, arguments)
    parsed, target = _parse_command(verb, arguments)
    hardware = options.target or target
    accelerators = None
    if hardware is not None:
        machine = parse_target(hardware)
        refuse_announced(machine, f"launching on {machine}")
        accelerators = accelerators_of(machine)
    hosts = options.hosts or (accelerators.hosts if accelerators else 1)
    if accelerators is not None and hosts != accelerators.hosts:
        raise ConfigError(
            f"--hosts {hosts} --target {hardware}",
            f"it has {accelerators.hosts} hosts of {accelerators.chips_per_host} chips",
            f"--hosts {accelerators.hosts}, or leave it out",
        )
    restarts = options.restarts
    if restarts is None:  # other verbs have no checkpoint to resume from
        restarts = _RESTARTS if verb in _TRAINING else 0
    environment = pairs("--env", options.env)
    if options.cache:
        environment += (("MESHWRIGHT_CACHE", options.cache),)
    job = Job(
        name=name,
        command=("meshwright", verb, *arguments, *trust_options()),
        hosts=hosts,
        processes_per_host=_processes_per_host(options.processes, hosts),
        accelerators=accelerators,
        environment=environment,
        image=options.image,
        mounts=pairs("--mount", options.mount),
        restarts=restarts,
        fields=pairs("--set", options.set),
    )
    return job, parsed, hardware


def _job_name(verb: str, run: str | None) -> str:
    """Returns the name of a job: that of its run, which may be FILE.py:FUNCTION, or of its verb."""
    file = run or verb
    if ".py:" in file:
        file = file.partition(":")[0]
    return legal_name(Path(file).stem)


def _processes_per_host(processes: int | None, hosts: int) -> int:
    """Returns the processes of each host; None is one. Raises ConfigError where some have more."""
    if processes is None:
        return 1
    if processes % hosts:
        raise ConfigError(
            f"--processes {processes} on {hosts} hosts",
            "each host has the same number",
            f"--processes {hosts}",
        )
    return processes // hosts


def _with_out(options: LaunchOptions, name: str, arguments: list[str]) -> list[str]:
    """Returns the arguments with an option with which a restart resumes.

    Raises ConfigError without an output folder, which all processes share.
    """
    if value_of(arguments, "--out") is None:
        raise ConfigError(
            f"launch --on {options.on} without --out",
            "hosts and restarts share one folder, whatever the time",
            f"--out /shared/runs/{name}, a path that every host reaches",
        )
    if _names(arguments) & {"--resume", "--at", "--resume-if-exists"}:
        return arguments
    return [*arguments, "--resume-if-exists"]


def _parse_command(verb: str, arguments: list[str]) -> tuple[Any, str | None]:
    """Parses the command as its processes will, so that a mistake does not wait in a queue.

    Returns its options, and the target of a plan.
    """
    arguments = [word for word in arguments if word != "--resume-if-exists"]
    kind = kind_of(verb)
    options = parse_verb(verb, arguments)
    if not issubclass(kind, RunOptions):
        return options, None
    return options, kind.base(arguments).target


def _check_relations(options: Any, hardware: str | None) -> None:
    """Raises ConfigError for a run that its hosts would refuse.

    hardware: None if it is not known.
    """
    if not isinstance(options, RunOptions):
        return
    if isinstance(options, FinetuneOptions):
        check_start(options.run)
    devices = 1 if hardware is None else parse_target(hardware).devices
    shape = options.run.mesh or MeshShape(fsdp=devices)
    if hardware is not None and shape.size > devices:
        raise ConfigError(
            f"mesh {shape} on {hardware}",
            f"the mesh has {shape.size} devices, and {hardware} has {devices}",
            f"--mesh fsdp={devices}",
        )
    check_run(options.run, shape)


def _check_data(scheduler: str, options: Any, words: Sequence[str]) -> None:
    """Raises ConfigError for a training on text that was not chosen, or that its hosts cannot have.

    A recipe of a real model names files that stand for the user's, `data/*.parquet`, and hf:PATH
    names no text at all: it would train on Python's standard library. What --data names is the
    user's word, and so are absolute paths.
    """
    if not isinstance(options, TrainOptions | FinetuneOptions):
        return
    run = options.run
    if not run.model.reads_text or _names(words) & {"--data", "--data.paths"}:
        return
    fix = (
        "--data PATH of your text, or of a folder that `meshwright tokenize` wrote, which every "
        "host reaches"
    )
    for path in run.data.paths:
        source = path.rpartition("=")[0] or path
        if source == "stdlib":
            if run.init_from is None:
                continue  # the text of recipes such as `tiny`, and of files that name it
            truth = "it names no text, and would train on the source of Python's standard library"
            raise ConfigError(f"launch of {run.name} without --data", truth, fix)
        if "://" in source or is_reference(source) or Path(source).is_absolute():
            continue
        here = scheduler == "slurm" and any(glob.iglob(source, recursive=True))
        if not here:
            where = "here" if scheduler == "slurm" else "in a container"
            truth = f"its own text is {source}, and there is no such file {where}"
            raise ConfigError(f"launch of {run.name} without --data", truth, fix)
