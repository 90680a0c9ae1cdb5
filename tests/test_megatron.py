"""Megatron's datasets: their files as Megatron writes them, its order of samples as it draws them."""

import dataclasses
import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
from drawn import read
from golden.megatron_inputs import (
    CASES,
    CODES,
    DATASETS,
    ENDS,
    SPLITS,
    documents_of,
    write_dataset,
)
from tiny_runs import MODELS, tiny_run

from meshwright.config import Data
from meshwright.data import megatron
from meshwright.data.corpus import load_corpus, parse_source
from meshwright.data.feed import Windows, build_stream
from meshwright.data.megatron import INDEX, TOKENS, open_megatron
from meshwright.data.megatron_order import (
    Epochs,
    megatron_order,
    parse_split,
    samples_of,
    sequences_of,
)
from meshwright.data.sources import open_source
from meshwright.data.tokenizers import Bytes
from meshwright.data.tokens import TokenFile
from meshwright.errors import ConfigError, DataError, MeshwrightError
from meshwright.runs.run_file import read_run, with_absolute_paths, write_run
from meshwright.trainer import prepare
from meshwright.trainer.relations import check_run
from meshwright.views.run_tables import _text_summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all datasets of the golden file."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, (dtype, _) in DATASETS.items():
        write_dataset(folder / name, documents_of(name), dtype)
    return folder


@pytest.fixture(scope="module")
def golden() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return read("megatron-order")


def opened(folder: Path, name: str) -> TokenFile:
    return open_megatron(folder / name, Bytes())


def text_of(sample: dict[str, np.ndarray]) -> np.ndarray:
    """All tokens of a sample, [T + 1]."""
    return np.append(sample["inputs"], sample["targets"][-1])


def orders_of(folder: Path, case: dict[str, Any]) -> list[np.ndarray | None]:
    """The samples of each split of a case that asks for some, [samples, T + 1]."""
    files = [opened(folder, name) for name in case["data"]]
    found: list[np.ndarray | None] = []
    for split, asked in zip(parse_split(case["split"]), case["samples"], strict=True):
        if split is None or asked == 0:
            found.append(None)
            continue
        order = megatron_order(
            files, case["weights"], split, seq=case["seq"], seed=case["seed"], samples=asked
        )
        found.append(np.array([text_of(order.stream[number]) for number in range(asked)]))
    return found


def test_the_files_are_those_that_megatron_writes(
    folder: Path, golden: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    assert (hf_models.PEERS / "megatron_order.py").is_file()
    files = golden[0]["files"]
    assert len(files) == 2 * len(DATASETS)
    for name, expected in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected, name


@pytest.mark.parametrize("name", CASES)
def test_the_order_is_that_of_megatron(
    name: str, folder: Path, golden: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    about, arrays = golden
    found = orders_of(folder, CASES[name])
    for split, expected, samples in zip(SPLITS, about["orders"][name], found, strict=True):
        assert (expected is None) == (samples is None)
        if samples is None:
            continue
        if CASES[name].get("kept"):
            np.testing.assert_array_equal(samples, arrays[f"{name}/{split}"])
        digest = hashlib.sha256(samples.astype("<i4").tobytes()).hexdigest()
        assert [*samples.shape, digest] == expected, split


def test_both_kinds_of_a_last_epoch_are_compared(folder: Path) -> None:
    epochs = set()
    for case in CASES.values():
        files = [opened(folder, name) for name in case["data"]]
        order = megatron_order(
            files, case["weights"], parse_split(case["split"])[0],
            seq=case["seq"], seed=case["seed"], samples=case["samples"][0],
        )  # fmt: skip
        epochs |= {part.epochs for part in order.parts}
    assert {Epochs(1, False), Epochs(3, True), Epochs(3, False)} <= epochs
    assert max(found.number for found in epochs) > 20


def test_documents_are_apart_as_with_resets_of_megatron(
    folder: Path, golden: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    """Equal to --reset-position-ids, --reset-attention-mask and --eod-mask-loss."""
    case = CASES[ENDS]
    samples = samples_of(
        opened(folder, case["data"][0]), parse_split(case["split"])[0],
        seq=case["seq"], seed=case["seed"], samples=case["samples"][0],
    )  # fmt: skip
    theirs = {
        name: golden[1][f"fields/{name}"]
        for name in ("position_ids", "loss_mask", "attention_mask")
    }
    seen = 0
    for number, (positions, weights, unseen) in enumerate(zip(*theirs.values(), strict=True)):
        sample = samples[number]
        np.testing.assert_array_equal(sample["positions"], positions)
        np.testing.assert_array_equal(sample["weights"], weights)
        together = sample["segments"][:, None] == sample["segments"][None, :]
        np.testing.assert_array_equal(np.tril(together), ~unseen)
        seen += int(sample["segments"].max())
    assert seen > 12


@pytest.mark.parametrize("stride", [2, 1024])
@pytest.mark.parametrize("name", DATASETS)
def test_tokens_and_ends_are_those_of_the_documents(
    name: str, stride: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the file, for every part of it; stride: entries of the index between two in memory."""
    monkeypatch.setattr(megatron, "STRIDE", stride)
    monkeypatch.setattr(megatron, "_CHUNK", 2 * stride)
    tokens = opened(folder, name).tokens
    documents = [np.concatenate([np.zeros(0), *document]) for document in documents_of(name)]
    whole = np.concatenate(documents).astype(np.int64)
    ends = np.unique(np.cumsum([len(document) for document in documents]))
    assert len(tokens) == len(whole)
    chance = np.random.default_rng(0)
    parts = [(0, len(whole)), (0, 1), (len(whole) - 1, len(whole))]
    parts += [tuple(np.sort(chance.choice(len(whole) + 1, 2, replace=False))) for _ in range(60)]
    for start, stop in parts:
        found, found_ends = tokens.read(int(start), int(stop))
        np.testing.assert_array_equal(found, whole[start:stop])
        np.testing.assert_array_equal(found_ends, ends[(ends > start) & (ends <= stop)])
    np.testing.assert_array_equal(tokens.ends, ends[ends > 0])


def megatron_run(*paths: Any, steps: int = 8, **data: Any) -> Any:
    run = tiny_run(MODELS["llama"], "data=2", steps=steps, batch=4, seq=16, seed=1234)
    given = {"order": "megatron", "split": "80,20,0", "tokenizer": "bytes", "sample": 0, **data}
    run = dataclasses.replace(run, data=Data(paths=tuple(map(str, paths)), **given))
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=None))


def prepared_run(run: Any, cache: Path) -> prepare.PreparedRun:
    prepared = prepare.prepare_run(run, cache=cache, devices=2)
    assert isinstance(prepared, prepare.PreparedRun)
    return prepared


def test_a_run_reads_the_order_from_any_step_on(folder: Path, cache: Path) -> None:
    """Batches of a run that goes on are those of one that was not interrupted; a run may begin after Megatron's samples."""
    run = megatron_run(f"{folder}/wide=0.3", f"{folder}/long.bin=0.7")
    prepared = prepared_run(run, cache)
    files = [opened(folder, name) for name in ("wide", "long")]
    order = megatron_order(
        files, (0.3, 0.7), parse_split("80,20,0")[0], seq=16, seed=1234, samples=32
    )
    feed = prepared.feed(prepare.Position(0, 0))
    batches = [np.asarray(next(feed).inputs) for _ in range(8)]
    for step, batch in enumerate(batches):
        expected = [order.stream[4 * step + row]["inputs"] for row in range(4)]
        np.testing.assert_array_equal(batch, expected)

    later = prepared.feed(prepare.Position(5, 20))
    np.testing.assert_array_equal(np.asarray(next(later).inputs), batches[5])

    moved = megatron_run(
        f"{folder}/wide=0.3", f"{folder}/long=0.7", steps=3, first_sample=20, order_samples=32
    )
    feed = prepared_run(moved, cache).feed(prepare.Position(0, 0))
    np.testing.assert_array_equal(np.asarray(next(feed).inputs), batches[5])


def test_a_change_of_the_order_is_noticed_and_more_steps_of_an_epoch_are_not(
    folder: Path, cache: Path
) -> None:
    def fingerprint(steps: int, *paths: str, **data: Any) -> Any:
        return prepared_run(megatron_run(*paths, steps=steps, **data), cache).fingerprint()

    many = f"{folder}/many"
    before = fingerprint(8, many)
    assert fingerprint(40, many) == before
    assert fingerprint(200, many) != before
    assert fingerprint(8, f"{many}=1", f"{folder}/long=1") != fingerprint(8, many, f"{folder}/long")
    assert json.loads(json.dumps(before)) == before


def test_held_out_samples_are_the_validation_part(folder: Path, cache: Path) -> None:
    prepared = prepared_run(megatron_run(f"{folder}/many", split="90,10,0"), cache)
    (held_out,) = prepared.held_out
    sequences = sequences_of((0.9, 1.0), 900)
    assert len(sequences) == 90
    lengths = opened(folder, "many").tokens.read_lengths(sequences.start, sequences.stop)  # type: ignore[attr-defined]
    assert len(held_out) == (int(lengths.sum()) - 1) // 16
    texts = np.concatenate(list(held_out.texts(2)))
    weights = [held_out[number]["weights"] > 0 for number in range(2)]
    targets = [held_out[number]["targets"][kept] for number, kept in enumerate(weights)]
    np.testing.assert_array_equal(texts, np.concatenate(targets))
    assert len(held_out.whole()) == (len(opened(folder, "many").tokens) - 1) // 16
    assert "held-out" in _text_summary(prepared)
    without = prepared_run(megatron_run(f"{folder}/many", split="1"), cache)
    assert without.held_out == () and without.evaluator() is None


def test_places_beyond_32_bits(tmp_path: Path) -> None:
    """Twelve sequences of 2^31 - 1 tokens, 24 GiB of which nearly all are holes of a sparse file."""
    longest = 2**31 - 1
    lengths = np.full(12, longest, "<i4")
    starts = np.arange(12, dtype="<i8") * longest
    marks = np.arange(13, dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES["uint8"], 12, 13)
    (tmp_path / "huge.idx").write_bytes(
        header + lengths.tobytes() + starts.tobytes() + marks.tobytes()
    )
    total = 12 * longest
    with open(tmp_path / "huge.bin", "wb") as file:
        file.truncate(total)
        for number in range(12):
            file.seek(number * longest)
            file.write(bytes([number + 1, 100]))
    tokens = open_megatron(tmp_path / "huge", Bytes())
    found, ends = tokens.tokens.read(11 * longest - 1, 11 * longest + 2)
    assert found.tolist() == [0, 12, 100] and ends.tolist() == [11 * longest]

    samples = samples_of(tokens, (0.0, 1.0), seq=2**16, seed=1, samples=total // 2**16 + 9)
    assert samples.epochs.number == 2 and len(samples) == (2 * total - 1) // 2**16
    last = samples.windows[len(samples) - 1]["inputs"]
    stream = samples.windows.file.tokens
    assert len(stream) == 2 * total and len(last) == 2**16
    documents = stream._documents  # type: ignore[attr-defined]
    for place in (1, 13, 23):
        assert stream.read(place * longest, place * longest + 2)[0].tolist() == [
            documents[place] + 1,
            100,
        ]


CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda x: b"XX" + x[2:], "begins with b'XXIDIDX"),
    "version": (lambda x: x[:9] + struct.pack("<Q", 2) + x[17:], "of version 2, and version 1 is read"),
    "type": (lambda x: x[:17] + b"\x09" + x[18:], "tokens of type 9, and the types are 1 to 8"),
    "floats": (lambda x: x[:17] + b"\x07" + x[18:], "tokens of type float32"),
    "sequences": (lambda x: x[:18] + struct.pack("<Q", 2**63) + x[26:], r"34 \+ 12 x 9,223,372"),
    "marks": (lambda x: x[:26] + struct.pack("<Q", 41) + x[34:], "and 41 sequences and 41 marks of documents take 34"),
    "modes": (lambda x: x + bytes(41), "a mode for each sequence: it is a multimodal dataset"),
    "cut": (lambda x: x[:-1], "take 34"),
    "short": (lambda x: x[:20], "has 20 bytes, and its header takes 34"),
    "length": (lambda x: x[:34] + struct.pack("<i", -1) + x[38:], "sequence 0 has the length -1"),
    "start": (lambda x: x[: 34 + 41 * 4] + struct.pack("<q", 8) + x[42 + 41 * 4 :], "sequence 0 begins at byte 8"),
    "first mark": (lambda x: x[: 34 + 41 * 12] + struct.pack("<q", 1) + x[42 + 41 * 12 :], "with sequence 1, and not 0"),
    "second mark": (
        lambda x: x[: 42 + 41 * 12] + struct.pack("<q", -7) + x[50 + 41 * 12 :], "document 1 begins with sequence -7",
    ),
    "last mark": (lambda x: x[:-8] + struct.pack("<q", 99), "end with sequence 99, and it has 41"),
    "nothing": (lambda x: x[:18] + struct.pack("<QQ", 0, 1) + bytes(8), "0 sequences and 1 marks"),
}  # fmt: skip
"""Damage of the index of `wide` (41 sequences) -> what its refusal says."""


@pytest.mark.parametrize("damage", CHANGES)
def test_a_damaged_index_is_refused_with_the_arithmetic(
    damage: str, folder: Path, tmp_path: Path
) -> None:
    change, truth = CHANGES[damage]
    (tmp_path / "a.idx").write_bytes(change((folder / "wide.idx").read_bytes()))
    shutil.copy(folder / "wide.bin", tmp_path / "a.bin")
    with pytest.raises(DataError, match=truth):
        opened(tmp_path, "a")


def test_any_byte_of_an_index_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    documents = [[np.array([1, 2]), np.array([3])], [np.array([4, 5, 6])], [np.array([7])]]
    content = write_dataset(tmp_path / "a", documents, "uint16").with_suffix(INDEX).read_bytes()
    chance = np.random.default_rng(0)
    refused = 0
    for place in range(len(content)):
        for value in (0, 255, content[place] ^ (1 << int(chance.integers(8)))):
            (tmp_path / "a.idx").write_bytes(
                content[:place] + bytes([value]) + content[place + 1 :]
            )
            try:
                tokens = opened(tmp_path, "a").tokens
                tokens.read(0, len(tokens))
            except MeshwrightError as error:
                refused += 1
                assert "\n  fix:" in str(error)
    assert refused > 1.5 * len(content)


def test_a_dataset_that_is_cut_off_while_it_is_read_is_an_error(
    folder: Path, tmp_path: Path
) -> None:
    for end in (INDEX, TOKENS):
        shutil.copy(folder / f"many{end}", tmp_path / f"a{end}")
    tokens = opened(tmp_path, "a").tokens
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"a\.bin had [\d,]+ bytes when it was opened, and has 0 now"
    ):
        tokens.read(0, 5)
    with pytest.raises(DataError, match=r"\d bytes, and a\.bin has 0"):
        (tmp_path / "a.bin").write_bytes(b"")
        opened(tmp_path, "a")


def test_tokens_beyond_the_vocabulary_are_named(folder: Path, tmp_path: Path, cache: Path) -> None:
    documents = [[np.array([5, 6, 300])], [np.array([7])]]
    write_dataset(tmp_path / "a", documents, "uint16")
    with pytest.raises(DataError, match=r"token 2 is 300, and the tokenizer of the run has 257"):
        load_corpus([str(tmp_path / "a")], "bytes", cache)
    write_dataset(tmp_path / "b", [[np.array([5, -6, 3])]], "int32")
    with pytest.raises(DataError, match="token 1 is -6"):
        load_corpus([str(tmp_path / "b")], "bytes", cache)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[MeshwrightError], str]] = {
    "a learned tokenizer": (
        lambda folder: load_corpus([f"{folder}/wide"], "bpe:300", folder / "c"), DataError, "no tokenizer can be learned",
    ),
    "to be tokenised": (lambda folder: open_source(f"{folder}/wide"), DataError, "has tokens and no text"),
    "one file of two": (
        lambda folder: load_corpus([f"{folder}/alone.bin"], "bytes", folder / "c"), DataError, "alone.idx is not there",
    ),
    "text in its order": (
        lambda folder: check_run(megatron_run("stdlib")), ConfigError, "it is no Megatron dataset",
    ),
    "a folder in its order": (
        lambda folder: check_run(megatron_run(folder)), ConfigError, "it is no Megatron dataset",
    ),
    "a weight for some": (
        lambda folder: check_run(megatron_run(f"{folder}/wide=2", f"{folder}/long")), ConfigError, "it has no weight",
    ),
    "a split that is none": (
        lambda folder: check_run(megatron_run(f"{folder}/wide", split="a,b")), ConfigError, "up to three weights",
    ),
    "four parts": (lambda folder: parse_split("1,2,3,4"), ConfigError, "up to three weights"),
    "nothing to train on": (lambda folder: parse_split("0,1,0"), ConfigError, "the first above 0"),
    "a split without the order": (
        lambda folder: check_run(megatron_run(order="shuffled")), ConfigError, "--data.order is shuffled",
    ),
    "samples without the order": (
        lambda folder: check_run(megatron_run(order="shuffled", split="969,30,1", order_samples=9)), ConfigError,
        "--data.order is shuffled",
    ),
    "held out by share": (
        lambda folder: check_run(megatron_run(f"{folder}/wide", held_out=0.25)), ConfigError, r"--data.split 75,25,0",
    ),
    "no text to evaluate": (
        lambda folder: prepared_run(megatron_run(f"{folder}/wide", split="99,1,0"), folder / "c"), DataError,
        r"0 of its 41 sequences are in a part of the split, with 0 tokens, and a sample of 16 takes 17",
    ),
    "more than an epoch without weights": (
        lambda folder: prepared_run(megatron_run(f"{folder}/wide", f"{folder}/long", steps=400), folder / "c"), DataError,
        "without weights each dataset is read once",
    ),
    "fewer samples than are read": (
        lambda folder: prepared_run(megatron_run(f"{folder}/wide", order_samples=2, steps=40), folder / "c"), DataError,
        r"steps read 160 from sample 0 on, up to 160",
    ),
    "in a bucket": (
        lambda folder: load_corpus(["s3://bucket/a.bin"], "bytes", folder / "c"), DataError, "in a bucket is not read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_read_or_ordered_is_refused(
    row: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("refused")
    for name in ("wide", "long"):
        for end in (INDEX, TOKENS):
            shutil.copy(folder / f"{name}{end}", copy)
    (copy / "alone.bin").write_bytes(b"ab")
    ask, kind, truth = REFUSED[row]
    with pytest.raises(kind, match=truth):
        ask(copy)


def test_a_run_names_a_dataset_from_any_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    run = megatron_run("wide=0.5", "long.bin=0.5", order_samples=64)
    write_run(with_absolute_paths(run), tmp_path / "run.json")
    monkeypatch.chdir(tmp_path)
    again = read_run(tmp_path / "run.json")
    assert again.data.paths == (f"{folder}/wide=0.5", f"{folder}/long.bin=0.5")
    check_run(again)


def test_datasets_mix_with_text_in_our_order(folder: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 200)
    corpus = load_corpus([f"{folder}/wide=2", str(tmp_path / "a.txt")], "bytes", cache)
    assert corpus.weights == (2.0, 1.0) and corpus.vocab == 257
    windows = [Windows(file, 16, 0, len(file.tokens)) for file in corpus.files]
    stream = build_stream(windows, list(corpus.weights), 0)
    assert {len(stream[number]["inputs"]) for number in range(20)} == {16}
    assert [parse_source(text).is_weighted for text in ("a=2", "a")] == [True, False]
