"""Relations between the fields of a run, its mesh and its folder, checked by every verb.

It is arithmetic on shapes and a look at a folder, and comes before a text is opened, a program
traced or a plan priced. The relations inside a layer belong to its kind (models/blocks), and are
checked when the kind is made.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from meshwright.config import Data, MeshShape, Optimizer
from meshwright.errors import CheckpointError, ConfigError, nearest, shell_word
from meshwright.hardware.agreement import answer_of_the_first, flatten
from meshwright.reporters import find_reporters
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.runs.run_file import fields_to_compare
from meshwright.sharding.params import trained_only
from meshwright.storage.paths import in_bucket

STAND_IN_VOCAB = 256
"""Vocabulary of a run whose tokenizer decides it, before its text is read: no relation depends on
its size."""
SKIPPED = "skipped.json"
"""File of an output folder with the samples that its run leaves out."""
_OTHER_DIFFERENCES = (
    "identity",
    "cursor",
    SKIPPED,
    "text",
    "weights",
    "tokenizer",
    "held_out",
    "order",
    "loss",
    "batches",
)
"""Names of differences between a checkpoint and a run that are in no field of the Run."""


@dataclasses.dataclass(frozen=True)
class Output:
    """Output folder of a training, and how the training begins in it."""

    folder: Path
    resumes: bool = False
    """Whether it continues from a checkpoint that has to be there."""
    may_resume: bool = False
    """Whether it continues where there is a checkpoint, and else starts."""
    at: int | None = None
    """Step of that checkpoint; None takes the last."""
    accept: Sequence[str] = ()
    """Differences from the checkpoint with which it resumes."""

    @property
    def tokenizer(self) -> Path | None:
        """Tokenizer of the run that is resumed; None of a new run."""
        return self.folder / "tokenizer.json" if self.resumes or self.may_resume else None


def check_run(
    run: Run,
    mesh: MeshShape | None = None,
    output: Output | None = None,
    *,
    starts: bool = True,
) -> PlacedRun:
    """Checks every relation of a run that is known without its text and its devices.

    Returns it on its mesh.

    mesh: None takes the run's own, or one device where it leaves the mesh open.  output: of a
    training.
    starts: whether the run begins with the weights that it names, and not with some that are
    evaluated.
    Raises ConfigError where fields do not go together or nothing has a name that the run gives,
    DataError where its text is in other tokens than its weights, and CheckpointError where the
    folder cannot be written or has no such checkpoint.
    """
    placed = place_run(with_stand_in_vocab(run), mesh)
    checked = ("name", "lr_schedule", "moment_dtype", "lr_groups")
    if any(getattr(run.optimizer, name) != getattr(Optimizer(), name) for name in checked):
        from meshwright.step.optimizers import build_optimizer  # plans load no optax

        trained = trained_only(placed.layout.params, placed.layout.params)
        build_optimizer(run.optimizer, run.training.steps, trained)
    if run.data.other_tokenizer and run.init_from is None:
        raise ConfigError(
            "--data.other-tokenizer",
            "the run starts from no weights, whose tokenizer could be another",
            "--init-from hf:PATH, or no --data.other-tokenizer",
        )
    if run.faults.check_bits and not run.training.health:
        raise ConfigError(
            "--faults.check-bits with --training.no-health",
            "sums of bits are figures of a step's health, and this run measures none",
            "no --training.no-health, or no --faults.check-bits",
        )
    _check_order(run.data)
    if run.data.order == "megatron":
        answer_of_the_first(lambda: _check_megatron_order(run))
    if run.init_from is not None and starts:
        answer_of_the_first(lambda: _check_tokens(run, output))
    if output is not None:
        check_accepted(run, output.accept)
        find_reporters(output.folder, run)
        answer_of_the_first(lambda: check_output(run, output))
    return placed


def _check_order(data: Data) -> None:
    """Raises ConfigError for options that Megatron's order excludes or does not use."""
    if data.order == "megatron":
        if data.held_out is not None:
            raise ConfigError(
                f"--data.held-out {data.held_out} with --data.order megatron",
                "Megatron's order evaluates the second part of --data.split",
                f"--data.split {100 * (1 - data.held_out):g},{100 * data.held_out:g},0",
            )
        return
    defaults = Data()
    for name in ("split", "order_samples"):
        value = getattr(data, name)
        if value != getattr(defaults, name):
            option = f"--data.{name.replace('_', '-')} {value}"
            truth = f"it is about Megatron's order, and --data.order is {data.order}"
            raise ConfigError(option, truth, f"{option} --data.order megatron; or leave it out")


def _check_megatron_order(run: Run) -> None:
    """Raises ConfigError where a run's data on this host have no order of Megatron."""
    from meshwright.data.corpus import parse_source  # plans load no data
    from meshwright.data.megatron_order import check_sources, parse_split

    parse_split(run.data.split)
    check_sources([parse_source(path) for path in run.data.paths])


def _check_tokens(run: Run, output: Output | None) -> None:
    """Raises DataError where a run's text is in other tokens than its weights.

    A run that continues keeps its own.
    """
    if output is not None and output.tokenizer is not None and output.tokenizer.is_file():
        return
    from meshwright.trainer.tokens_of_weights import check_tokens_here  # reads other files

    check_tokens_here(run)


def with_stand_in_vocab(run: Run) -> Run:
    """Returns the run with a vocabulary of some size, where its tokenizer decides it."""
    if run.model.vocab is not None:
        return run
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=STAND_IN_VOCAB))


def check_output(run: Run, output: Output) -> None:
    """Raises an error where a training cannot begin in its output folder as it is asked to.

    Leaves nothing there.
    """
    from meshwright.checkpoint.checkpoints import check_writable  # plans load no TensorStore
    from meshwright.checkpoint.manifest import steps_to_take
    from meshwright.checkpoint.steps import committed_steps

    checkpoints = output.folder / "checkpoints"
    # Hosts may have the checkpoint on disks of their own, which they compare later.
    if output.resumes and run.local_checkpoints.path is None:
        if not committed_steps(checkpoints):
            raise CheckpointError(
                f"resuming the run in {output.folder}",
                "no checkpoint was committed there",
                f"--resume-if-exists --out {shell_word(output.folder)}, "
                "which starts where there is none",
                'start="fresh"',
            )
        steps_to_take(checkpoints, output.at)
    if not output.resumes and not output.may_resume:
        check_new(output.folder)
    if not in_bucket(output.folder):
        check_writable(output.folder)


def check_new(folder: Path) -> None:
    """Raises ConfigError for a new run in a folder where another has checkpoints."""
    from meshwright.checkpoint.steps import committed_steps

    steps = committed_steps(folder / "checkpoints")
    if steps:
        raise ConfigError(
            f"a new run in {folder}",
            f"it holds the checkpoint of step {steps[-1]} of another",
            "--resume to continue that one, or another --out",
        )


def check_accepted(run: Run, accept: Sequence[str]) -> None:
    """Raises ConfigError for a name of a difference that a resume compares nothing of."""
    known = set(_OTHER_DIFFERENCES)
    for field in flatten(fields_to_compare(run)):
        known |= set(parts_of(field))
    for word in accept:
        if word not in known:
            truth = "a resume compares nothing of that name"
            raise ConfigError(f"--accept {word}", truth, nearest(word, known))


def parts_of(name: str) -> list[str]:
    """Returns a dotted name and those of what holds it."""
    if name == SKIPPED:
        return [name]
    return list(itertools.accumulate(name.split("."), "{}.{}".format))
