"""Conversion between Hugging Face folders and runs, block by block: resumable,
with checksums, in bounded memory."""

import dataclasses
import fcntl
import functools
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint.blocks import StoredTensors, stored_tensors, write_tensor
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.checkpoint.tensors import Index
from meshwright.documents import LARGE, check_inside, read_json, read_text
from meshwright.errors import ConfigError, WeightsError
from meshwright.formatting import Brief, first_of, format_count, shortened
from meshwright.hugging_face.architectures import Architecture, architecture_of
from meshwright.hugging_face.folder import (
    ModelFolder,
    OtherParts,
    TensorReader,
    WeightsFolder,
    check_tied,
    keep_files,
    open_folder,
    read_form,
    read_model,
    read_other_parts,
)
from meshwright.hugging_face.hub import PREFIX, find_folder
from meshwright.hugging_face.names import StoredTensor, read_block, unpadded_shape, write_block
from meshwright.hugging_face.peft_files import Pair, write_adapter
from meshwright.hugging_face.safetensors_files import (
    DTYPES,
    INDEX,
    NewSafetensorsFile,
    file_names,
    split_into_files,
    tensor_bytes,
)
from meshwright.hugging_face.text_models import TEXT_PREFIXES
from meshwright.hugging_face.tokenizer_files import write_tokenizer
from meshwright.models.adapters import ADAPTERS, dequantise, targets_of
from meshwright.path_kinds import KEPT
from meshwright.runs.recipe import run_of_hugging_face
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder, write_run
from meshwright.sharding.params import Param, named_leaves
from meshwright.storage.attempts import may_pass
from meshwright.storage.removing import remove_file, remove_tree, rename
from meshwright.storage.transfer import sha256_of
from meshwright.storage.writing import (
    copy_file,
    make_folder,
    refuse_links,
    write_atomically,
    write_text,
)

_CODES = {"float32": "F32", "bfloat16": "BF16"}
LARGEST_FILE = 5 * 10**9
"""Largest file in bytes, as `transformers` has it."""
SUMS = "SHA256SUMS"
"""File of checksums, as `sha256sum --check` reads it."""
_JOURNAL = "progress.json"
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, repr=False)
class Conversion(Brief):
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

    def brief(self) -> str:
        """Returns what was written, and where."""
        notes = "".join(f"; {shortened(note, 200)}" for note in first_of(self.notes))
        return (
            f"{self.architecture}: {format_count(self.parameters)} parameters in {self.tensors:,} "
            f"tensors of {self.dtype}, in {self.out}{notes}"
        )


class Journal:
    """A folder under construction: `OUT.partial`, with the tensors that are done.

    Continues where an earlier conversion of the same `source` was interrupted: JSON values that
    identify what is converted. Raises ConfigError where `out` exists.
    """

    def __init__(self, out: Path, source: Any, total: int, say: Say):
        if out.exists():
            raise ConfigError(
                f"converting into {out}", "it exists already", "a folder that does not exist yet"
            )
        self.out = out
        self.folder = out.with_name(f"{out.name}.partial")
        self._file = self.folder / _JOURNAL
        self._source = json.loads(json.dumps(source))
        self._total = total
        self._say = say
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._held()
        self.done: dict[str, Any] = self._read()
        self.resumed = len(self.done)
        refuse_links(self.folder, depth=4)
        self._write()
        if self.resumed:
            say(f"going on in {self.folder}: {self.resumed} of {total} parameters are done")

    def _held(self) -> int:
        """Holds the lock on the folder until this process ends.
        Raises ConfigError where another process has it."""
        number = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, number)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            truth = f"another conversion writes {self.folder} now"
            raise ConfigError(f"converting into {self.out}", truth, "another folder") from error
        except OSError:
            pass  # a file system without locks
        return number

    def _read(self) -> dict[str, Any]:
        try:
            journal = read_json(self._file, LARGE)
            if journal["source"] == self._source:
                return dict(journal["done"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if may_pass(error):  # what is converted is not begun again for that
                raise
        if not self._file.is_file() and any(self.folder.iterdir()):
            truth = f"{self.folder} exists, and no conversion wrote it"
            raise ConfigError(f"converting into {self.out}", truth, "another folder")
        # Another source, or another version of it: what is there is of no use.
        # The lock is on the folder itself.
        for path in self.folder.iterdir():
            remove_tree(path, below=self.folder.parent)
        return {}

    def convert(self, params: dict[str, Param], convert_one: Callable[[str, Param], Any]) -> None:
        """Converts the parameters that are not done.
        convert_one: returns what is recorded of a parameter on disk."""
        for number, (path, p) in enumerate(params.items(), 1):
            if path not in self.done:
                self._say(f"{number}/{self._total} {path} {list(unpadded_shape(p))}")
                self.note(path, convert_one(path, p))

    def note(self, name: str, record: Any) -> None:
        """Notes that a part is done, and what is recorded of it."""
        self.done[name] = record
        self._write()

    def _write(self) -> None:
        write_atomically(self._file, json.dumps({"source": self._source, "done": self.done}))

    def commit(self) -> None:
        """Moves the folder to its name."""
        remove_file(self._file, below=self.folder.parent)
        os.sync()
        rename(self.folder, self.out, below=self.out.parent)


def check_sums(folder: Path, say: Say) -> None:
    """Compares the files of a folder with its checksums, where it has them.
    Raises WeightsError where one differs."""
    if not (folder / SUMS).is_file():
        return
    try:
        check_inside(folder, [folder / SUMS])
        lines = read_text(folder / SUMS).splitlines()
    except ValueError as error:
        raise WeightsError(f"checksums of {folder}", str(error), "copy it again") from error
    for line in lines:
        expected, _, name = line.partition("  ")
        if "\0" in name or Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(
                f"checksums of {folder}",
                f"{SUMS} names {name!r}, and there is no such file",
                "copy it",
            )
        digest = sha256_of(folder / name)
        if digest != expected:
            truth = f"its SHA-256 is {digest[:16]}..., and {SUMS} has {expected[:16]}..."
            raise WeightsError(f"reading {folder / name}", truth, "copy the file again")
    say(f"checksums of {len(lines)} file{'s' if len(lines) > 1 else ''} agree")


def write_sums(folder: Path) -> None:
    """Writes the checksums of a folder's safetensors files."""
    lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(folder.glob("*.safetensors"))]
    write_text(folder / SUMS, "".join(lines))


def import_weights(source: str, out: Path, say: Say = lambda line: None) -> Conversion:
    """Converts the model `hf:NAME` into the output folder `out`: Run, tokenizer,
    and a checkpoint of step 0.

    The weights keep their type: bfloat16, or float32 for any other. Memory is bounded by the
    largest block (`BLOCK_BYTES`) and the stored tensor that it is part of. Raises WeightsError for
    anything missing, unknown or damaged, ConfigError where `out` exists.
    """
    weights = open_folder(source)
    dtypes = {path: DTYPES[_CODES[p.stored or weights.dtype]] for path, p in weights.params.items()}
    source_id = ["from hugging face", weights.dtype, _identity_of_files(weights)]
    journal = Journal(out, source_id, len(weights.params), say)
    check_sums(weights.folder.path, say)
    check_tied(weights)

    run = run_of_hugging_face(source)
    training = dataclasses.replace(run.training, param_dtype=weights.dtype)
    run = dataclasses.replace(run, init_from=None, training=training)
    step = journal.folder / "checkpoints" / "0"
    make_folder(journal.folder, *step.relative_to(journal.folder).parts, "state")
    with weights.reader() as reader:
        importer = _Importer(weights, reader, dtypes, step / "state")
        journal.convert(weights.params, importer.convert)

    records: dict[str, TensorRecord] = {}
    stored_names: set[str] = set()
    for path, p in weights.params.items():
        fingerprint = tuple(journal.done[path])
        record = TensorRecord(unpadded_shape(p), dtypes[path].name, fingerprint)
        records[f"params.{path}"] = record
        stored_names.update(weights.stored[path].names(p))
    Manifest(0, 0, run, records).write(step)
    _write_run_folder(weights.folder, run, journal.folder)
    journal.commit()
    return Conversion(
        out,
        weights.folder.architecture.name,
        count_parameters(weights.params),
        len(stored_names),
        weights.dtype,
        journal.resumed,
        weights.notes,
    )


def _identity_of_files(weights: WeightsFolder) -> list[list[Any]]:
    """Returns path, size and time of each file that a conversion reads,
    by which it knows its source again."""
    files = {entry.file.resolve() for entry in weights.entries.values()}
    files.add(weights.folder.path / "config.json")
    return [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(files)]


@dataclasses.dataclass(frozen=True)
class _Importer:
    """Converter of the parameters of a Hugging Face folder into the tensors of a checkpoint."""

    weights: WeightsFolder
    reader: TensorReader
    dtypes: dict[str, np.dtype[Any]]
    """Type of each parameter in the checkpoint."""
    state: Path
    """Folder of the checkpoint's tensors."""

    def convert(self, path: str, p: Param) -> tuple[int, int]:
        """Converts one parameter; returns the fingerprint of its tensor."""
        read = functools.partial(self._read, path, p)
        name = f"params.{path}"
        return write_tensor(self.state, name, unpadded_shape(p), self.dtypes[path], read)

    def _read(self, path: str, p: Param, index: Index) -> np.ndarray:
        stored = self.weights.stored[path]
        block = read_block(p, stored, index, self.reader, self.dtypes[path])
        self.reader.release()
        return block


def _write_run_folder(source: ModelFolder, run: Run, out: Path) -> None:
    """Writes run file, tokenizer and the files that a later export gives back."""
    write_run(run, out / "run.json")
    if source.tokenizer.is_file():
        copy_file(source.tokenizer, out / "tokenizer.json")
    keep_files(source.path, out)


def count_parameters(params: dict[str, Param]) -> int:
    """Returns the elements of all parameters, without padding."""
    return sum(int(np.prod(unpadded_shape(p))) for p in params.values())


# Parameter by parameter, and block by block of each;
# a parameter that is done is recorded in the journal:
#
#   checkpoint                        Hugging Face files (in OUT.partial, moved to OUT at the end)
#   params.blocks.query [L, D, N H]   model.layers.0.self_attn.q_proj.weight [N H, D] of layer 0,
#     block [0:1]  --- transposed -->   then of layer 1, ...: views of memory-mapped files of
#     block [1:2]  --- transposed -->   at most `largest_file` bytes, which are written in place
def export_weights(
    source: Path,
    out: Path,
    *,
    at: int | None = None,
    dtype: str | None = None,
    largest_file: int = LARGEST_FILE,
    say: Say = lambda line: None,
) -> Conversion:
    """Converts the checkpoint of a run in the folder `source` into the Hugging Face folder `out`.

    at: step of the checkpoint; None takes the last.
    dtype: float32 or bfloat16; None keeps that of the checkpoint. Adapters are merged, W + (alpha /
    r) A B in float32 (`export_adapter` writes them by themselves). Memory is bounded by the
    checkpoint's largest chunk. Every tensor is compared with the checkpoint's fingerprint. Raises
    CheckpointError for a damaged checkpoint, WeightsError for a model that no architecture
    expresses, ConfigError where `out` exists.
    """
    tensors = stored_tensors(source / "checkpoints", at)
    run = tensors.manifest.run
    if dtype is None:
        dtype = _dtype_at_rest(run)
    architecture, config = _configuration(run, source)
    # `transformers` 4 calls it torch_dtype, 5 calls it dtype and reads both.
    dtype_field = "dtype" if "dtype" in config else "torch_dtype"
    config = {**config, dtype_field: dtype}
    params = named_leaves(run.model.params())
    stored = architecture.tensors(run.model, read_form(source / KEPT, architecture))
    others, notes = _other_parts(source, config)

    plan = _plan_files(params, stored, others, dtype, largest_file)
    journal = Journal(out, _identity_of_export(tensors, plan), len(params), say)
    files = plan.open(journal.folder)
    exporter = _Exporter(_merged(tensors), stored, others, files)
    journal.convert(params, exporter.convert)
    exporter.copy_other_parts()
    if len(plan.groups) > 1:
        write_json(journal.folder / INDEX, plan.index())
    _write_description(source, journal.folder, config)
    journal.commit()
    return Conversion(
        out,
        architecture.name,
        count_parameters(params),
        len(plan.tensors),
        dtype,
        journal.resumed,
        notes,
    )


def _dtype_at_rest(run: Run) -> str:
    """Returns the type in which a run's weights are exported, where no other is asked for."""
    if run.finetune.method != "lora":
        return run.training.param_dtype
    if run.finetune.base == "float32":
        return "float32"
    return run.training.compute_dtype


def _merged(tensors: StoredTensors) -> "StoredTensors | MergedTensors":
    """Returns the reader of a checkpoint's weights, with adapters merged into them."""
    if tensors.manifest.run.finetune.method == "lora":
        return MergedTensors(tensors)
    return tensors


def _other_parts(source: Path, config: dict[str, Any]) -> tuple[OtherParts | None, tuple[str, ...]]:
    """Returns the other parts of a larger model that an export gives back,
    and what to say of them."""
    others = read_other_parts(source / KEPT)
    if others is None:
        return None, ()
    count = len(others.file.entries)
    if "text_config" in config:
        return others, (f"other parts of the model: {count} tensors, given back as they came",)
    note = (
        f"other parts of the model: {count} tensors are left out, since the text model has other "
        "fields than the one that came with them"
    )
    return None, (note,)


def _identity_of_export(tensors: StoredTensors, plan: "FilePlan") -> list[Any]:
    """Returns what identifies an export, by which an interrupted one knows its source again."""
    return [
        str(tensors.step_folder.resolve()),
        tensors.manifest.to_dict()["tensors"],
        {name: code for name, (code, _) in plan.tensors.items()},
        plan.groups,
    ]


def _name_in_files(name: str, others: OtherParts | None) -> str:
    """Returns the name under which a tensor of the text model is written: that
    of the larger model, if it has one."""
    if others is None:
        return name
    return others.prefix.name_in_larger_model(name)


@dataclasses.dataclass(frozen=True)
class _Exporter:
    """Converter of the weights of a checkpoint into the tensors of safetensors files."""

    weights: "StoredTensors | MergedTensors"
    stored: Mapping[str, StoredTensor]
    """Tensors in which each parameter is stored."""
    others: OtherParts | None
    files: dict[str, NewSafetensorsFile]
    """File of each tensor."""

    def convert(self, path: str, p: Param) -> bool:
        """Writes one parameter into the tensors that it is stored in."""
        touched: set[NewSafetensorsFile] = set()
        tensor = functools.partial(self._tensor, touched)
        for index, block in self.weights.blocks(f"params.{path}", unpadded_shape(p)):
            write_block(p, self.stored[path], index, block, tensor)
            for file in touched:
                file.release()
            touched.clear()
        return True

    def _tensor(self, touched: set[NewSafetensorsFile], name: str) -> np.ndarray:
        """Returns the writable tensor of a name, and adds its file to those that were touched."""
        name = _name_in_files(name, self.others)
        file = self.files[name]
        touched.add(file)
        return file.tensor(name)

    def copy_other_parts(self) -> None:
        """Copies the tensors of the other parts of a larger model."""
        if self.others is None:
            return
        for name, entry in self.others.file.entries.items():
            self.files[name].copy(name, self.others.file, entry)


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """The files of weights that an export writes."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each tensor by its name in the files."""
    groups: list[list[str]]
    """Names of the tensors of each file."""

    def index(self) -> dict[str, Any]:
        """Returns the index of several files: size of all tensors, and the file of each."""
        weight_map: dict[str, str] = {}
        for file_name, tensors in self._files():
            weight_map |= dict.fromkeys(tensors, file_name)
        total = sum(tensor_bytes(code, shape) for code, shape in self.tensors.values())
        return {"metadata": {"total_size": total}, "weight_map": weight_map}

    def open(self, folder: Path) -> dict[str, NewSafetensorsFile]:
        """Opens or creates the files; returns the file of each tensor."""
        files: dict[str, NewSafetensorsFile] = {}
        for file_name, names in self._files():
            tensors = {name: self.tensors[name] for name in names}
            file = NewSafetensorsFile(folder / file_name, tensors)
            files |= dict.fromkeys(names, file)
        return files

    def _files(self) -> Iterator[tuple[str, list[str]]]:
        """Yields the name of each file and the names of its tensors."""
        return zip(file_names(len(self.groups)), self.groups, strict=True)


def _plan_files(
    params: dict[str, Param],
    stored: Mapping[str, StoredTensor],
    others: OtherParts | None,
    dtype: str,
    largest_file: int,
) -> FilePlan:
    """Returns the tensors of an export and their files.
    others: parts of a larger model, which come last."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, p in params.items():
        # What is float32 at rest is so in the folder: `transformers` keeps the bias
        # of DeepSeek's router so too.
        code = _CODES[p.stored or dtype]
        shape = stored[path].stored_shape(p)
        for name in stored[path].names(p):
            tensors[_name_in_files(name, others)] = (code, shape)
    if others is not None:
        for name, entry in others.file.entries.items():
            tensors[name] = (entry.dtype, entry.shape)
    sizes = {name: tensor_bytes(code, shape) for name, (code, shape) in tensors.items()}
    return FilePlan(tensors, split_into_files(sizes, largest_file))


def _write_description(source: Path, folder: Path, config: dict[str, Any]) -> None:
    """Writes checksums, tokenizer and configuration of an export."""
    write_sums(folder)
    end_of_text = write_tokenizer(source / "tokenizer.json", source / KEPT, folder)
    if "eos_token_id" not in config and end_of_text is not None:
        config = config | {"eos_token_id": end_of_text}
    write_json(folder / "config.json", config)
    generation = source / KEPT / "generation_config.json"
    if generation.is_file():
        copy_file(generation, folder / generation.name)


def write_json(file: Path, document: Any) -> None:
    """Writes a JSON file that people may read."""
    write_text(file, json.dumps(document, indent=2) + "\n")


def _configuration(run: Run, source: Path) -> tuple[Architecture, dict[str, Any]]:
    """Returns architecture and config.json of a run's model: those it came with,
    where the model is still the same."""
    # The longest sequence is a field of a model with learned positions,
    # and else the longest that was trained on.
    longest = 0 if run.model.spec().max_seq else run.training.seq
    ids: dict[str, Any] = {}
    kept = source / KEPT
    if (kept / "config.json").is_file():
        folder = read_model(str(kept.absolute()))
        config = read_json(kept / "config.json")
        config.pop("quantization_config", None)  # weights go out as numbers
        if _is_same_model(folder, run):
            return folder.architecture, config
        fields = config | config.get("text_config", {})
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if name in fields:
                ids[name] = fields[name]
        if longest:
            longest = max(folder.max_seq or 0, longest)
    architecture, config = architecture_of(run.model)
    if longest:  # the configuration's own longest sequence is longer where YaRN extended it
        ids["max_position_embeddings"] = max(longest, config.get("max_position_embeddings", 0))
    return architecture, {**config, **ids}


def _is_same_model(folder: ModelFolder, run: Run) -> bool:
    """Returns whether a folder's configuration describes the model of a run."""
    if type(folder.model) is not type(run.model):
        return False
    write = folder.architecture.write
    return write(folder.model) == write(run.model)


def export_adapter(source: Path, out: Path, *, at: int | None = None) -> Conversion:
    """Writes the adapters of the run in the folder `source` as the folder `out`,
    which `peft` loads.

    at: step of the checkpoint; None takes the last. The base that adapter_config.json names is that
    of the run. Raises ConfigError where the run has no adapters or `out` exists, CheckpointError
    for a damaged checkpoint, WeightsError for matrices of which PEFT has no adapter.
    """
    run = run_in_folder(source)
    if run.finetune.method != "lora":
        truth = "the run trains all of its parameters and has none"
        raise ConfigError(
            f"the adapters of {source}", truth, "its weights: without --weights adapter"
        )
    if out.exists():
        raise ConfigError(
            f"writing adapters to {out}", "it exists already", "a folder that does not exist yet"
        )
    pairs = MergedTensors(stored_tensors(source / "checkpoints", at)).pairs()
    base, notes = _base_of_adapter(run)
    make_folder(out.parent)
    # A folder of this process: another may write adapters under the same name.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        scratch = make_folder(Path(name), "adapter")
        is_larger = read_other_parts(source / KEPT) is not None
        prefix = TEXT_PREFIXES[0] if is_larger else None
        count = write_adapter(scratch, run.model, run.finetune, pairs, base, prefix)
        write_tokenizer(source / "tokenizer.json", source / KEPT, scratch)
        rename(scratch, out, below=out.parent)
    parameters = sum(a.size + b.size for a, b in pairs.values())
    return Conversion(out, "LoRA", parameters, count, "float32", 0, notes)


def _base_of_adapter(run: Run) -> tuple[str, tuple[str, ...]]:
    """Returns the base that adapter_config.json names, and what to say of it."""
    start = run.init_from or ""
    base = start.removeprefix(PREFIX)
    if not start.startswith(PREFIX):
        note = (
            f"the base that adapter_config.json names, {base}, is a run: convert it too and change "
            "the name"
        )
        return base, (note,)
    folder = find_folder(start, weights=False)
    if Path(base).expanduser().is_dir():
        base = str(folder.resolve())
    return base, ()


@dataclasses.dataclass(frozen=True)
class MergedTensors:
    """Reader of a checkpoint's W + (alpha / r) A B,
    in float32 where a weight has an adapter or is quantised."""

    tensors: StoredTensors

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields the blocks of the weight `name`, without its rows beyond `shape`.

        All codes of a quantised weight are read, and dequantised layer by layer. Raises
        CheckpointError where a tensor cannot be read, or is not what was saved.
        """
        manifest = self.tensors.manifest
        blocks = self._dequantised(name, shape)
        if name in manifest.tensors:
            blocks = self.tensors.blocks(name, shape)
        pair = self.pair(name)
        for index, block in blocks:
            if pair is not None:
                a, b = pair
                block = block.astype(np.float32) + manifest.run.finetune.scale * _product(
                    a, b, index
                )
            yield index, block

    def _dequantised(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields the layers of a quantised weight in float32."""
        numbers = "values"
        if f"{name}.codes" in self.tensors.manifest.tensors:
            numbers = "codes"
        stacks = {part: self.tensors.read(f"{name}.{part}") for part in (numbers, "scales")}
        rest = tuple(slice(0, size) for size in shape[1:])
        cpu = jax.local_devices(backend="cpu")[0]
        for layer in range(shape[0]):
            quantised = {part: stack[layer : layer + 1] for part, stack in stacks.items()}
            with jax.default_device(cpu):
                block = np.asarray(dequantise(quantised, np.float32))
            yield (slice(layer, layer + 1), *rest), block

    def pair(self, name: str) -> Pair | None:
        """Returns A and B of a weight; None where it has no adapter."""
        stack, _, weight = name.removeprefix("params.").partition(".")
        prefix = f"params.{stack}.{ADAPTERS}.{weight}"
        if f"{prefix}.a" not in self.tensors.manifest.tensors:
            return None
        a, b = (self.tensors.read(f"{prefix}.{side}").astype(np.float32) for side in "ab")
        return a, b

    def pairs(self) -> dict[str, Pair]:
        """Returns A and B of every adapted weight, by path."""
        run = self.tensors.manifest.run
        pairs: dict[str, Pair] = {}
        for stack, names in targets_of(run.model.params(), run.finetune).items():
            for name in names:
                path = f"{stack}.{name}"
                pair = self.pair(f"params.{path}")
                if pair is not None:
                    pairs[path] = pair
        return pairs


def _product(a: np.ndarray, b: np.ndarray, index: Index) -> np.ndarray:
    """Returns a block of A B. a: [L, in..., r].  b: [L, r, out...].
    index: of the block of [L, in..., out...]."""
    layers = index[0]
    input_dims = a.ndim - 2
    inputs = index[1 : 1 + input_dims]
    outputs = index[1 + input_dims :]
    a = a[(layers, *inputs)]
    b = b[(layers, slice(None), *outputs)]
    flat_a = a.reshape(a.shape[0], -1, a.shape[-1])
    flat_b = b.reshape(*b.shape[:2], -1)
    product = flat_a @ flat_b
    return product.reshape(*a.shape[:-1], *b.shape[2:])
