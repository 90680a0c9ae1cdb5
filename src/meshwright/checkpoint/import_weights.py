"""Conversion of a Hugging Face folder into an output folder with a checkpoint of step 0, in bounded memory."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshwright.checkpoint.blocks import commit, write_tensor
from meshwright.checkpoint.journal import Journal, check_sums
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.hugging_face.folder import TensorReader, WeightsFolder, check_tied, keep_files, open_folder
from meshwright.hugging_face.names import Index, read_block, unpadded_shape
from meshwright.hugging_face.safetensors_files import DTYPES
from meshwright.runs.recipe import run_of_hugging_face
from meshwright.runs.run_file import write_run

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Example:
        >>> mw.convert.__name__
        'convert'
    """

    out: Path
    """Folder written."""
    architecture: str
    """Architecture on Hugging Face's side."""
    parameters: int
    """Parameters, each counted once."""
    tensors: int
    """Tensors read or written on Hugging Face's side."""
    dtype: str
    """Type of the weights written."""
    resumed: int
    """Tensors that an interrupted conversion had finished."""
    notes: tuple[str, ...]
    """What was left out, and why."""


def import_weights(source: str, out: Path, say: Say = lambda line: None) -> Conversion:
    """Converts the model `hf:NAME` into the output folder `out`: Run, tokenizer, and a checkpoint of step 0.

    The weights keep their type: bfloat16, or float32 for any other. Memory is bounded by the largest block
    (`BLOCK_BYTES`) and the stored tensor that it lies in. Raises WeightsError for anything missing, unknown or damaged,
    ConfigError where `out` exists.
    """
    weights = open_folder(source)
    folder = weights.folder
    dtype = DTYPES["BF16" if weights.dtype == "bfloat16" else "F32"]
    files = sorted({file.resolve() for file in weights.files.values()} | {folder.path / "config.json"})
    identity = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    journal = Journal(out, ["from hugging face", weights.dtype, identity])
    if journal.resumed:
        say(f"going on in {journal.folder}: {journal.resumed} of {len(weights.params)} parameters are done")
    check_sums(folder.path, say)
    check_tied(weights)
    run = run_of_hugging_face(source)
    training = dataclasses.replace(run.training, param_dtype=weights.dtype)
    run = dataclasses.replace(run, init_from=None, training=training)
    step = journal.folder / "checkpoints" / "0"
    (step / "state").mkdir(parents=True, exist_ok=True)
    with weights.reader() as reader:
        for number, path in enumerate(weights.params, 1):
            if path not in journal.done:
                say(f"{number}/{len(weights.params)} {path} {list(unpadded_shape(weights.params[path]))}")
                journal.add(path, _convert_one(weights, path, dtype, step / "state", reader))
    records = {
        f"params.{path}": TensorRecord(unpadded_shape(p), dtype.name, tuple(journal.done[path]))
        for path, p in weights.params.items()
    }
    commit(step, Manifest(0, 0, run, records).to_dict())
    write_run(run, journal.folder / "run.json")
    if folder.tokenizer.is_file():
        shutil.copyfile(folder.tokenizer, journal.folder / "tokenizer.json")
    keep_files(folder.path, journal.folder)
    journal.commit()
    count = sum(int(np.prod(unpadded_shape(p))) for p in weights.params.values())
    tensors = len({name for path, p in weights.params.items() for name in weights.stored[path].names(p)})
    return Conversion(
        out, folder.architecture.name, count, tensors, weights.dtype, journal.resumed, weights.notes
    )  # fmt: skip


def _convert_one(
    weights: WeightsFolder, path: str, dtype: np.dtype[np.generic], state: Path, reader: TensorReader
) -> tuple[int, int]:
    """Writes one parameter; returns its fingerprint."""
    p, stored = weights.params[path], weights.stored[path]

    def read(index: Index) -> np.ndarray:
        block = read_block(p, stored, index, reader, dtype)
        reader.release()
        return block

    return write_tensor(state, f"params.{path}", unpadded_shape(p), dtype, read)
