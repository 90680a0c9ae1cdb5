"""The command line: parsing, and printing what the rooms below return."""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright import loop, mesh, parity, show
from meshwright.check import fit_to_mesh
from meshwright.checkpoint import Checkpoints
from meshwright.config import MeshShape, Run
from meshwright.data.tokens import load_tokens, tokenize
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError, nearest
from meshwright.recipe import find_recipe, list_recipes
from meshwright.report import Reporter
from meshwright.report.console import ConsoleReport, open_console
from meshwright.report.files import TensorBoard
from meshwright.runfile import read_run
from meshwright.step import build_eval_step
from meshwright.tables import print_parity, print_picture, print_setting, print_summary
from meshwright.words import AXES, DIMENSIONS

_SIMULATED = 8
"""Devices simulated where there is no accelerator and neither --devices nor a mesh is given."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Train RECIPE (or `tiny`): a small Llama on Python's own source over eight simulated devices, or the
    accelerators found. RECIPE is a name (`meshwright recipes`) or FILE.py:FUNCTION and comes first."""

    run: Annotated[Run, tyro.conf.arg(name="")]
    out: Path | None = None
    """Output folder; None makes a new one under `runs`."""
    devices: int | None = None
    """Devices of the whole run: simulated ones on a CPU, the first so many accelerators otherwise."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on from the last checkpoint in --out, with the Run that is kept there."""
    at: int | None = None
    """Resume from the checkpoint of this step; newer ones are set aside."""
    run_file: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Take the Run from this file (every run writes one) rather than from a recipe."""
    tensorboard: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also write TensorBoard events into --out."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for a run of several processes."""
    processes: int = 1
    """Processes that train together."""
    process: int = 0
    """Which of them this one is."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the summary as JSON on standard output, everything else on standard error."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Mean loss per token of a run's last checkpoint on its held-out text, or on --data."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    data: tuple[str, ...] = ()
    """Other text: all of it is evaluated."""
    at: int | None = None
    """Step of the checkpoint; None takes the last."""
    mesh: str | None = None
    """Mesh to evaluate on, as axis=degree,...; None takes the run's own."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Tokenise text once into a folder that --data takes; its tokenizer.json serves --data.tokenizer."""

    data: Annotated[str, tyro.conf.Positional]
    """A file, folder, glob, or `stdlib`."""
    out: Path
    """Folder to write."""
    tokenizer: str = "bpe:4096"
    """`bytes`, `chars`, `bpe:SIZE` (trained on the text), or a tokenizer.json file."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class Show:
    """Show how RECIPE's parameters lie on a mesh, from abstract shapes alone: no device is needed."""

    run: Annotated[Run, tyro.conf.arg(name="")]
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class CompareMeshes:
    """Run RECIPE (or `tiny`) on two meshes in float32: initial values bit for bit, loss, gradients."""

    run: Annotated[Run, tyro.conf.arg(name="")]
    against: str = "data=1"
    """The other mesh, as axis=degree,..."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class Words:
    """Print the vocabulary: mesh axes and dimension letters."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class Recipes:
    """List the recipes."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


def _say(told: dict[str, Any], asked_json: bool, draw: Callable[[], None]) -> None:
    if asked_json:
        print(json.dumps(told))
    else:
        draw()


def _train(args: Train) -> int:
    chief = args.process == 0
    console = open_console(sys.stderr if args.json else sys.stdout)
    console.quiet = not chief
    _start_devices(args.devices, args.run, args.processes)
    if args.coordinator:
        mesh.join_processes(args.coordinator, args.processes, args.process)
    elif args.processes > 1:
        raise ConfigError(f"{args.processes} processes", "they need a place to meet", "--coordinator HOST:PORT")
    out = args.out or Path("runs") / f"{args.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    setting = loop.set_up(args.run, cache=mesh.default_cache(), devices=args.devices)
    print_setting(console, setting)

    def reporters(start: int) -> list[Reporter]:
        found: list[Reporter] = []
        if chief:
            found.append(ConsoleReport(console, start=start, steps=setting.program.run.training.steps))
            found += [TensorBoard(out / "tensorboard")] if args.tensorboard else []
        return found

    summary = loop.train(
        setting, out, start="resume" if args.resume or args.at is not None else "fresh", at=args.at, reporters=reporters
    )
    if chief:
        told = {**dataclasses.asdict(summary), "out": str(out)}
        _say(told, args.json, lambda: print_summary(console, summary))
    # As a shell reports a process that a signal ended, so a supervisor can tell this from the run's own end.
    return 128 + summary.interrupted if summary.interrupted else 0


def _start_devices(devices: int | None, run: Run, processes: int = 1) -> None:
    total = devices or (run.mesh.size if run.mesh else _SIMULATED)
    if total < 1 or total % processes:
        raise ConfigError(
            f"{total} devices over {processes} processes", "each process has equally many, at least one",
            f"--devices {max(1, total // processes) * processes}",
        )  # fmt: skip
    mesh.prepare_host(total // processes)


def _evaluate(args: Evaluate) -> int:
    run = _run_of(args.folder)
    if args.mesh:
        run = dataclasses.replace(run, mesh=MeshShape.parse(args.mesh))
    data = dataclasses.replace(run.data, tokenizer=str(args.folder / "tokenizer.json"))
    training = run.training
    if args.data:
        # Everything but the one window that training would need at least.
        data = dataclasses.replace(data, paths=args.data)
        training = dataclasses.replace(training, eval_samples=0)
    run = dataclasses.replace(run, data=data, training=training)
    _start_devices(None, run)
    setting = loop.set_up(run, cache=mesh.default_cache())
    parts = setting.held_out
    if args.data:
        parts = tuple(dataclasses.replace(part, start=0, stop=len(part.file.tokens)) for part in setting.train)
    if not parts:
        raise ConfigError(f"evaluating {args.folder}", "the run held nothing out", "--data PATH")
    with Checkpoints(args.folder / "checkpoints", keep=10**6) as checkpoints:
        params, manifest = checkpoints.restore_params(setting.program, args.at)
    loss = loop.evaluate(setting.program, params, parts, build_eval_step(setting.program))
    windows = sum(len(part) for part in parts)
    told = {"step": manifest.step, "loss": loss, "samples": min(windows, training.eval_samples or windows)}
    _say(
        told, args.json,
        lambda: open_console().print(f"step {told['step']}: loss {loss:.4f} per token over {told['samples']} samples"),
    )  # fmt: skip
    return 0


def _run_of(folder: Path) -> Run:
    if not (folder / "run.json").is_file():
        raise CheckpointError(f"the run in {folder}", "it has no run.json", "the output folder of a run")
    return read_run(folder / "run.json")


def _tokenize(args: Tokenize) -> int:
    if args.out.exists():
        raise ConfigError(f"--out {args.out}", "it is there already", "a folder that is not there yet")
    file = tokenize(args.data, args.tokenizer, args.out)
    told = {
        "out": str(args.out), "tokens": len(file.tokens), "documents": len(file.ends), "vocab": file.vocab,
    }  # fmt: skip
    _say(
        told, args.json,
        lambda: open_console().print(
            f"{args.out}: {len(file.tokens):,} tokens of {len(file.ends):,} documents, vocabulary {file.vocab:,}"
        ),
    )  # fmt: skip
    return 0


def _show(args: Show) -> int:
    run = args.run
    if run.model.vocab is None:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=_vocab(run)))
    shape = run.mesh or MeshShape()
    # Whether the batch divides is no question of what the parameters look like.
    fitting = dataclasses.replace(run.training, batch=shape.size * run.training.microbatches)
    fitted = fit_to_mesh(dataclasses.replace(run, training=fitting), shape)
    seen = show.picture(fitted)
    told = {**dataclasses.asdict(seen), "mesh": str(seen.mesh)}
    _say(told, args.json, lambda: print_picture(fitted, seen))
    return 0


def _vocab(run: Run) -> int:
    return load_tokens(run.data.paths[0], run.data.tokenizer, mesh.default_cache()).vocab


def _parity(args: CompareMeshes) -> int:
    other = MeshShape.parse(args.against)
    _start_devices(max(other.size, (args.run.mesh or MeshShape()).size, 8 if args.run.mesh is None else 1), args.run)
    setting = loop.set_up(args.run, cache=mesh.default_cache())
    found = parity.compare(setting.program, other, setting.train, setting.corpus.weights, args.run.training.steps)
    _say(
        {**dataclasses.asdict(found), "first_divergence": found.first_divergence}, args.json,
        lambda: print_parity(found),
    )  # fmt: skip
    return 1 if found.first_divergence else 0


def _words(args: Words) -> int:
    def draw() -> None:
        console = open_console()
        for title, words in (("mesh axes", AXES), ("dimensions", DIMENSIONS)):
            table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
            table.add_column(style="bold")
            for word, means in words.items():
                table.add_row(word, means)
            console.print(table)
            console.print()

    _say({"axes": AXES, "dimensions": DIMENSIONS}, args.json, draw)
    return 0


def _recipes(args: Recipes) -> int:
    found = list_recipes()

    def draw() -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        for name, says in found.items():
            table.add_row(name, says)
        open_console().print(table)

    _say(found, args.json, draw)
    return 0


_VERBS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "train": (Train, _train),
    "evaluate": (Evaluate, _evaluate),
    "tokenize": (Tokenize, _tokenize),
    "show": (Show, _show),
    "parity": (CompareMeshes, _parity),
    "words": (Words, _words),
    "recipes": (Recipes, _recipes),
}
_WITH_RECIPE = ("train", "show", "parity")


def _base_run(verb: str, rest: list[str]) -> tuple[Run, list[str]]:
    """The Run that the options are laid over, and the options."""
    recipe = rest.pop(0) if rest and not rest[0].startswith("-") else None
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--run", type=Path)
    early.add_argument("--out", type=Path)
    early.add_argument("--resume", action="store_true")
    early.add_argument("--at")
    told = early.parse_known_args(rest)[0]
    if verb == "train" and told.run:
        if recipe:
            raise ConfigError(f"recipe {recipe} and --run {told.run}", "each gives a whole Run", "one of them")
        return read_run(told.run), rest
    if verb == "train" and (told.resume or told.at is not None):
        if told.out is None:
            raise ConfigError("--resume", "it goes on with a run in a folder", "--out DIR --resume")
        if recipe is None:
            return _run_of(told.out), rest
    base = find_recipe(recipe or "tiny")
    if verb == "parity":
        base = dataclasses.replace(base, training=dataclasses.replace(base.training, steps=5))
    return base, rest


def _overview(console: Console) -> None:
    console.print("usage: meshwright VERB [options]; meshwright VERB --help says more\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    for verb, (kind, _) in _VERBS.items():
        table.add_row(verb, " ".join((kind.__doc__ or "").split()))
    console.print(table)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _overview(open_console())
        return 0
    verb, rest = argv[0], argv[1:]
    if verb not in _VERBS:
        raise ConfigError(f"meshwright {verb}", "there is no such verb", nearest(verb, _VERBS))
    kind, act = _VERBS[verb]
    if verb not in _WITH_RECIPE:
        return act(tyro.cli(kind, args=rest, prog=f"meshwright {verb}"))
    base, rest = _base_run(verb, rest)
    # The recipe decides the family: its options are those of that family's configuration.
    return act(tyro.cli(kind, args=rest, prog=f"meshwright {verb} [RECIPE]", default=kind(run=base)))


def main() -> None:
    """Entry point of the command `meshwright`."""
    try:
        code = _dispatch(sys.argv[1:])
    except MeshwrightError as error:
        open_console(sys.stderr).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    if code and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the others are gone or waiting: leaving in order would wait for them
    sys.exit(code)
