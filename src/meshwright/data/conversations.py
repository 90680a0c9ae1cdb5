"""Chat data as packed sequences: tokenised once into the cache, then packed for a run.

A token file of chat data has two more arrays: `answers.bin`, 1 for each token that is an answer,
and `places.bin`, where each record is from. `data.chat_records` makes documents of records, and
`data.packing` makes sequences of documents; attention and positions are confined to a document.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.config import Data
from meshwright.data.chat import (
    ChatTemplate,
    check_jinja,
    read_chat_template,
    read_end_tokens,
    read_template,
)
from meshwright.data.chat_files import find_chat_files, read_records, unit_of
from meshwright.data.chat_records import RecordRenderer
from meshwright.data.corpus import Check, Corpus, Source, local_text, parse_source, share
from meshwright.data.feed import held_out_border
from meshwright.data.packing import Packed, fit, pack
from meshwright.data.sources import Place
from meshwright.data.token_writer import TokenWriter, write_description
from meshwright.data.tokenizers import Tokenizer, build_tokenizer
from meshwright.data.tokens import TokenFile, is_token_file, open_tokens
from meshwright.documents import LARGE, read_json
from meshwright.errors import DataError
from meshwright.fine_tuning import FineTune, Objective
from meshwright.storage.removing import remove_tree, rename
from meshwright.storage.transfer import held_folder, sha256_of

_FORMAT = 5
_PLACE = np.dtype([("file", "<u4"), ("number", "<u8")])
"""Place of a record in `places.bin`: the number of its file in `files.json`, and its line or row.
"""
_GROUP_SIZES: dict[Objective, int] = {"answers": 1, "preferences": 2}
"""Documents of a record, which stay in one sequence."""


def load_conversations(
    data: Data,
    seq: int,
    tuning: FineTune,
    cache: Path,
    check: Check = lambda tokenizer, name: None,
) -> tuple[Corpus, list[tuple[Packed, Packed]]]:
    """Loads chat data: its token files, and the sequences of each to train and to evaluate on.

    Tokens are kept in `cache`. Records that are longer than a sequence are refused, cut or dropped
    (`FineTune.too_long`), and how many is printed.
    check: as of `load_corpus`.
    Raises DataError with file and line for a record that is malformed, has no answer, or is
    refused.
    """
    spec = local_text(data.tokenizer, cache)
    if not Path(spec).is_file() and spec != "bytes":
        truth = "it is learned from text, and chat data is not text"
        fix = "--data.tokenizer FILE, the tokenizer.json of the model, or bytes"
        raise DataError(f"chat data with the tokenizer {spec!r}", truth, fix)
    template = template_of(spec, tuning.template)
    if template is not None:
        check_jinja()
    sources = [parse_source(path) for path in data.paths]
    paths = [source.path for source in sources]
    tokenisation = _Tokenisation(spec, template, tuning.objective, cache)
    make = functools.partial(tokenisation.make, paths, data.tokenizer, check)
    folders = share(paths, cache, None, make)
    files = []
    parts = []
    for source in sources:
        folder = folders[source.path]
        file = open_tokens(folder)
        files.append(file)
        parts.append(_split(source, file, folder, data.held_out, seq, tuning))
    return Corpus(tuple(files), tuple(source.weight for source in sources)), parts


def _split(
    source: Source,
    file: TokenFile,
    folder: Path,
    held_out: float | None,
    seq: int,
    tuning: FineTune,
) -> tuple[Packed, Packed]:
    """Returns the packed sequences to train on, and the held-out ones, of one source."""
    answers: Any = np.memmap(folder / "answers.bin", np.uint8, mode="r")
    group_size = _GROUP_SIZES[tuning.objective]
    place = functools.partial(_read_place, folder)
    used, summary = fit(file, answers, seq, group_size, place, tuning.too_long)
    if summary and jax.process_index() == 0:
        print(f"{source.path}: {summary}", file=sys.stderr, flush=True)
    order = np.random.default_rng(0).permutation(used.groups)
    border = held_out_border(len(order), held_out)
    if held_out != 0 and len(order) > 1:
        border = min(max(border, 1), len(order) - 1)
    if not border or (held_out != 0 and border == len(order)):
        evaluated = len(order) - border
        truth = f"it has {len(order)} record(s): {border} to train on and {evaluated} to evaluate"
        if summary:
            truth += f" ({summary})"
        raise DataError(f"--data {source.path}", truth, "more records, or --data.held-out 0")
    train = pack(file, answers, seq, order[:border], group_size, used)
    rest = pack(file, answers, seq, order[border:], group_size, used)
    # Training draws its own order; an evaluation takes the first sequences.
    return train, rest.shuffled()


def _read_place(folder: Path, record: int) -> str:
    """Returns file and line of a record; the places of the others are not read."""
    places: Any = np.memmap(folder / "places.bin", _PLACE, mode="r")
    place = places[record]
    file = Path(read_json(folder / "files.json", LARGE)[place["file"]])
    return str(Place(file, unit_of(file), int(place["number"])))


def template_of(tokenizer: str, name: str | None) -> ChatTemplate | None:
    """Returns the chat template of a run, or that of its tokenizer if it names none.

    A name is one of `TEMPLATES`, or a file.
    """
    own = read_chat_template(Path(tokenizer).parent) if Path(tokenizer).is_file() else None
    if name is None:
        return own
    text = read_template(f"--finetune.template {name}", name)
    return ChatTemplate(text, own.special_tokens if own else ())


def stops_of(tokenizer: Tokenizer, spec: str) -> tuple[int, ...]:
    """Returns the tokens at which the model of a tokenizer's file stops."""
    if not Path(spec).is_file():
        return (tokenizer.end,)
    folder = Path(spec).parent
    stops = read_end_tokens(folder) or read_end_tokens(folder / "huggingface")
    return tuple(stop for stop in stops if stop < tokenizer.vocab) or (tokenizer.end,)


@dataclasses.dataclass(frozen=True)
class _Tokenisation:
    """How chat data is tokenised, and where its tokens are kept."""

    spec: str
    template: ChatTemplate | None
    objective: Objective
    cache: Path

    def make(self, paths: Sequence[str], name: str, check: Check) -> dict[str, Path]:
        """Returns the folders with the tokens of sources.

        name: the tokenizer as the run names it.
        """
        check(build_tokenizer(self.spec), name)
        texts = {path: local_text(path, self.cache) for path in paths}
        return {path: self.tokenise(text) for path, text in texts.items()}

    def tokenise(self, path: str) -> Path:
        """Returns the folder with the tokens of one source, which is made if it does not exist."""
        tokenizer = build_tokenizer(self.spec)
        stops = stops_of(tokenizer, self.spec)
        found = find_chat_files(path)
        if found.note:
            print(f"{path}: {found.note}", file=sys.stderr, flush=True)
        folder = self._folder_of(found.files, tokenizer, stops)
        if is_token_file(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            with held_folder(scratch):
                writer = self._write(scratch, path, found.files, tokenizer, stops)
            (scratch / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
            names = json.dumps([str(file) for file in found.files])
            (scratch / "files.json").write_text(names, encoding="utf-8")
            described = writer.description(
                tokenizer.vocab, source=path, tokenizer=self.spec, skipped={}
            )
            write_description(scratch, described, "answers.bin", "places.bin", "files.json")
            try:
                rename(scratch, folder, below=folder.parent)
            except OSError:  # another process was first
                if not is_token_file(folder):
                    raise
        finally:
            with contextlib.suppress(OSError):
                remove_tree(scratch, below=folder.parent)
        return folder

    def _folder_of(
        self, files: Sequence[Path], tokenizer: Tokenizer, stops: tuple[int, ...]
    ) -> Path:
        """Returns the folder of the tokens, named by all that they depend on."""
        contents = [f"{file.resolve()} {sha256_of(file)}" for file in files]
        settings = [str(_FORMAT), self.objective, tokenizer.to_json(), repr(self.template)]
        key = "\n".join([*settings, repr(stops), *contents])
        return self.cache / "tokens" / f"chat-{hashlib.sha256(key.encode()).hexdigest()[:24]}"

    def _write(
        self,
        folder: Path,
        path: str,
        files: list[Path],
        tokenizer: Tokenizer,
        stops: tuple[int, ...],
    ) -> TokenWriter:
        """Writes tokens, answers and places of all records. Raises DataError without a record."""
        writer = TokenWriter(folder, "<u4")
        with (
            contextlib.closing(writer),
            (folder / "answers.bin").open("wb") as answers,
            (folder / "places.bin").open("wb") as places,
        ):
            for number, place, record in read_records(files):
                renderer = RecordRenderer(str(place), tokenizer, self.template, stops)
                for document in renderer.render(record, self.objective):
                    writer.add(document.tokens, np.array([len(document.tokens)]))
                    answers.write(document.answers.astype(np.uint8).tobytes())
                places.write(np.array((number, place.number), _PLACE).tobytes())
            if not places.tell():
                raise DataError(f"--data {path}", "it has no records", "JSON lines with `messages`")
            writer.finish()
        return writer
