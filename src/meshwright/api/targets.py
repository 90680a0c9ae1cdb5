"""Machines by name with their measured rates, and runs as the planner takes them."""

import dataclasses
from collections.abc import Sequence

from meshwright.bench.calibration_file import read_calibration
from meshwright.config import MeshShape
from meshwright.data.corpus import vocab_of_corpus
from meshwright.errors import ConfigError
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.forecast import calibrate_target
from meshwright.planner.search import with_choices
from meshwright.runs.run import Run
from meshwright.storage.paths import default_cache_folder
from meshwright.trainer.relations import check_run


def refuse_wrapped(run: Run, asked: Sequence[str]) -> None:
    """Raises ConfigError if a wrapped model is asked for what only the package's families have."""
    if asked and not run.model.states_layers:
        raise ConfigError(
            f"{asked[0]} with a wrapped model", "it would not be used there", "leave it out"
        )


def find_target(text: str) -> Target:
    """Returns the machine that `text` names.

    Its efficiencies are those that `meshwright bench` measured on such a chip.
    """
    target = parse_target(text)
    for file in sorted((default_cache_folder() / "calibration").glob("*.json")):
        target = calibrate_target(target, read_calibration(file))
    return target


def with_vocab(run: Run, mesh: MeshShape | None = None) -> Run:
    """Returns a run with a vocabulary size, which some recipes leave to their tokenizer.

    mesh: that of `check_run`, which comes before a text is read. Raises ConfigError.
    """
    check_run(run, mesh)
    if run.model.vocab is not None:
        return run
    data, cache = run.data, default_cache_folder()
    vocab = vocab_of_corpus(
        data.paths, data.tokenizer, cache, run.faults.bad_records, data.text_field
    )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))


def run_on_mesh(run: Run, devices: int, target: Target | None) -> Run:
    """Returns the run with a vocabulary and a mesh: FSDP over a target, the default one here."""
    if run.mesh is None:
        shape = MeshShape(fsdp=devices)
        if target is None:
            shape = run.model.default_mesh(devices)
        run = dataclasses.replace(run, mesh=shape)
    return with_vocab(run, run.mesh)


def resolved_run(run: Run, devices: int, target: Target | None) -> Run:
    """Returns the run with a vocabulary and a mesh.

    For a target it has the choices of the best plan on it.
    """
    run = run_on_mesh(run, devices, target)
    return run if target is None else with_choices(run, target)
