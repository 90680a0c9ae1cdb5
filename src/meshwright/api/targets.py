"""Machines by name with their measured rates, and runs as the planner takes them."""

import dataclasses
from collections.abc import Sequence

from meshwright.bench.calibration_file import read_calibration
from meshwright.data.corpus import vocab_of_corpus
from meshwright.errors import ConfigError
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.forecast import calibrate_target
from meshwright.runs.run import Run
from meshwright.storage.paths import default_cache_folder


def refuse_wrapped(run: Run, asked: Sequence[str]) -> None:
    """Raises ConfigError where something is asked of a wrapped model that only the package's own families have."""
    if asked and run.model.unit != "tokens":
        raise ConfigError(f"{asked[0]} with a wrapped model", "it would not be used there", "leave it out")


def find_target(text: str) -> Target:
    """Returns the machine that `text` names, with the efficiencies that `meshwright bench` measured on such a chip."""
    target = parse_target(text)
    for file in sorted((default_cache_folder() / "calibration").glob("*.json")):
        target = calibrate_target(target, read_calibration(file))
    return target


def with_vocab(run: Run) -> Run:
    """Returns the run with a vocabulary size, which some recipes leave to their tokenizer."""
    if run.model.vocab is not None:
        return run
    data, cache = run.data, default_cache_folder()
    vocab = vocab_of_corpus(data.paths, data.tokenizer, cache, run.faults.bad_records, data.text_field)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))
