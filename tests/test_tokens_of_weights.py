"""Tokens of a text against those that weights were trained on: the same, more, or another tokenizer's."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import meshwright as mw
from meshwright.api import proofs
from meshwright.api.finetuning import source_run
from meshwright.checkpoint.manifest import Manifest
from meshwright.cli.main import run
from meshwright.config import MeshShape
from meshwright.data.subwords import END, train_bpe
from meshwright.data.tokenizers import Bytes, Chars, Tokenizer, tokenizer_from_json
from meshwright.data.tokenizing import tokenize
from meshwright.errors import ConfigError, DataError
from meshwright.hugging_face.tokenizer_files import published_text
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.trainer import prepare
from meshwright.trainer.relations import Output
from meshwright.trainer.tokens_of_weights import added_tokens, different_example

TEXT = "The weights know these tokens, and two and two are four. " * 40
WEIGHTS = train_bpe([TEXT], 300)
OTHER = train_bpe([TEXT.upper()], 300)


def changed(change: Callable[[dict[str, Any]], Any], tokenizer: Tokenizer = WEIGHTS) -> Tokenizer:
    """The tokenizer with its file changed."""
    file = json.loads(published_text(tokenizer))
    change(file)
    return tokenizer_from_json(json.dumps(file))


def with_token(tokenizer: Tokenizer = WEIGHTS, text: str = "<|user|>") -> Tokenizer:
    described = tokenizers.Tokenizer.from_str(published_text(tokenizer))
    described.add_special_tokens([text])
    return tokenizer_from_json(described.to_str())


def with_merge(file: dict[str, Any]) -> None:
    """One merge after those of the weights, and its token with the next number."""
    file["model"]["vocab"]["QZ"] = max(file["model"]["vocab"].values()) + 1
    file["model"]["merges"].append(["Q", "Z"])


def with_early_merge(file: dict[str, Any]) -> None:
    with_merge(file)
    file["model"]["merges"].insert(0, file["model"]["merges"].pop())


def with_swapped(file: dict[str, Any]) -> None:
    vocab = file["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def unigram(*rows: tuple[str, float]) -> Tokenizer:
    described = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), *rows], unk_id=0))
    described.add_special_tokens([END])
    return tokenizer_from_json(described.to_str())


CASES: dict[str, tuple[Tokenizer, Tokenizer, int | None]] = {
    "itself": (WEIGHTS, WEIGHTS, 0),
    "bytes and their file": (Bytes(), tokenizer_from_json(published_text(Bytes())), 0),
    "characters and their file": (
        Chars("abc"),
        tokenizer_from_json(published_text(Chars("abc"))),
        0,
    ),
    "another decoder": (WEIGHTS, changed(lambda file: file.update(decoder=None)), 0),
    "an added token": (WEIGHTS, with_token(), 1),
    "an added token of the weights": (with_token(), WEIGHTS, 0),
    "two added tokens": (WEIGHTS, with_token(with_token(), "<|tool|>"), 2),
    "a later merge": (WEIGHTS, changed(with_merge), 1),
    "an earlier merge": (WEIGHTS, changed(with_early_merge), None),
    "a merge less": (changed(with_merge), WEIGHTS, None),
    "two numbers swapped": (WEIGHTS, changed(with_swapped), None),
    "an added token in the place of another": (
        with_token(),
        with_token(text="<|assistant|>"),
        None,
    ),
    "another normalizer": (
        WEIGHTS,
        changed(lambda file: file.update(normalizer={"type": "NFC"})),
        None,
    ),
    "another division": (
        WEIGHTS,
        changed(lambda file: file["pre_tokenizer"].update(add_prefix_space=True)),
        None,
    ),
    "as many tokens of other text": (WEIGHTS, OTHER, None),
    "more characters": (Chars("abc"), Chars("abcd"), None),
    "bytes and characters": (Bytes(), Chars("abc"), None),
    "bytes and subwords": (Bytes(), WEIGHTS, None),
    "scores": (unigram(("a", -1.0), ("b", -2.0)), unigram(("a", -2.0), ("b", -1.0)), None),
    "a later piece": (
        unigram(("a", -1.0)),
        changed(
            lambda file: file["model"]["vocab"].append(["b", -3.0]),
            unigram(("a", -1.0), (END, -99.0)),
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_added_tokens_are_counted_and_other_tokens_are_shown(name: str) -> None:
    weights, text, expected = CASES[name]
    assert added_tokens(weights, text) == expected
    if expected is None:
        example = different_example(weights, text)
        assert "by the first, and" in example or example == "they divide texts otherwise"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder of a run that was trained on the tokens of `WEIGHTS`."""
    model = mw.Llama(vocab=320, width=32, layers=1, heads=2, kv_heads=2, mlp=32)
    training = mw.Training(steps=1, batch=2, seq=128)
    run = Run(model=model, mesh=MeshShape(data=2), training=training, name="base")
    folder = tmp_path / "base"
    (folder / "checkpoints" / "1").mkdir(parents=True)
    write_run(run, folder / "run.json")
    Manifest(1, 0, run, {}).write(folder / "checkpoints" / "1")
    (folder / "tokenizer.json").write_text(WEIGHTS.to_json())
    (tmp_path / "other.json").write_text(OTHER.to_json())
    (tmp_path / "more.json").write_text(with_token().to_json())
    (tmp_path / "text.txt").write_text(TEXT)
    records = [{"prompt": "Two and two?", "chosen": " Four.", "rejected": " Five."}] * 40
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    chats = [{"prompt": "Two and two?", "completion": " Four."}] * 40
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


FILES = {"text": "text.txt", "answers": "chat.jsonl", "preferences": "pairs.jsonl"}


def run_on(weights: Path, objective: Any, tokenizer: str, **data: Any) -> Run:
    """A run that starts from the weights, on text with a tokenizer."""
    run = source_run(str(weights))
    texts = dataclasses.replace(
        run.data,
        paths=(str(weights.parent / FILES[objective]),),
        tokenizer=tokenizer,
        held_out=0.25,
        **data,
    )
    return dataclasses.replace(run, data=texts, finetune=mw.FineTune(objective=objective))


@pytest.mark.parametrize("objective", FILES)
def test_another_tokenizer_is_refused_before_a_text_is_tokenised(
    objective: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other.json")
    for given in (other, "bytes"):
        with pytest.raises(DataError, match="by the first, and") as refused:
            prepare.prepare_run(run_on(weights, objective, given), cache=tmp_path / "cache")
        assert f"--data.tokenizer {weights}/tokenizer.json" in refused.value.fix
        assert "--data.other-tokenizer" in refused.value.fix
        assert f"{other} ({OTHER.vocab} tokens, SHA-256" in refused.value.truth or given == "bytes"
    assert not (tmp_path / "cache" / "tokens").exists()
    accepted = run_on(weights, objective, other, other_tokenizer=True)
    assert prepare.prepare_run(accepted, cache=tmp_path / "cache").corpus.vocab == OTHER.vocab  # type: ignore[attr-defined]
    assert "accepted with --data.other-tokenizer" in capsys.readouterr().err


def test_added_tokens_and_an_unknown_tokenizer_are_said(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = run_on(weights, "text", str(tmp_path / "more.json"))
    prepare.prepare_run(more, cache=tmp_path / "cache")
    assert "adds 1 token to the tokenizer of" in capsys.readouterr().err
    same = run_on(weights, "text", f"{weights}/tokenizer.json")
    prepare.prepare_run(same, cache=tmp_path / "cache")
    assert "tokenizer" not in capsys.readouterr().err
    (weights / "tokenizer.json").unlink()
    prepare.prepare_run(more, cache=tmp_path / "cache")
    assert f"the tokenizer of {weights} is not known" in capsys.readouterr().err


def test_a_learned_tokenizer_is_refused_and_a_resumed_run_keeps_its_own(
    weights: Path, tmp_path: Path
) -> None:
    learned = run_on(weights, "text", "bpe:290")
    with pytest.raises(DataError, match="that of the text is bpe:290"):
        prepare.prepare_run(learned, cache=tmp_path / "cache")
    out = tmp_path / "out"
    out.mkdir()
    output = Output(out, may_resume=True)
    with pytest.raises(DataError, match="that of the text is bpe:290"):
        prepare.prepare_run(learned, cache=tmp_path / "cache", output=output)
    (out / "tokenizer.json").write_text(train_bpe([TEXT], 290).to_json())
    prepare.prepare_run(learned, cache=tmp_path / "cache", output=output)


def test_tokens_that_were_written_before_are_compared_by_every_verb(
    weights: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tokens"
    tokenize(str(tmp_path / "text.txt"), str(tmp_path / "other.json"), folder)
    run = run_on(weights, "text", f"{weights}/tokenizer.json")
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, paths=(str(folder),)))
    fix = f"meshwright tokenize TEXT --tokenizer {weights}/tokenizer.json --out FOLDER"
    with pytest.raises(DataError, match=f"tokens of {folder}") as refused:
        mw.train(run, tmp_path / "out", progress="none", cache=tmp_path / "cache")
    assert fix in refused.value.fix and "--data.other-tokenizer" in refused.value.fix
    with pytest.raises(DataError, match=f"evaluating the weights of {weights}") as refused:
        mw.evaluate(weights, data=[str(folder)], cache=tmp_path / "cache")
    assert fix in refused.value.fix and "--data.other-tokenizer" not in refused.value.fix


VERBS = {
    "plan": ["plan", "--run", "RUN", "--on", "h100:2"],
    "show": ["show", "--run", "RUN"],
    "prove": ["prove", "--run", "RUN"],
    "prove without a compiler": ["prove", "--run", "RUN", "--on", "h100:2"],
    "launch": ["launch", "--on", "slurm", "train", "--run", "RUN", "--out", "/shared/x"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_train_nothing_refuse_other_tokens_too(
    verb: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    monkeypatch.setattr(proofs, "require_compiler", lambda target: pytest.fail("before the run"))
    words = [str(file) if word == "RUN" else word for word in VERBS[verb]]
    write_run(run_on(weights, "text", str(tmp_path / "other.json")), file)
    with pytest.raises(DataError, match="by the first, and") as refused:
        run(words)
    assert f"--data.tokenizer {weights}/tokenizer.json" in refused.value.fix
    if verb.startswith("prove"):
        return
    # What these verbs accept: the weights' own tokens, a word of the user's, and files of other hosts.
    for accepted in (
        run_on(weights, "text", f"{weights}/tokenizer.json"),
        run_on(weights, "text", str(tmp_path / "other.json"), other_tokenizer=True),
        dataclasses.replace(run_on(weights, "text", "bytes"), init_from="/elsewhere/base"),
    ):
        write_run(accepted, file)
        assert run(words) == 0


def test_the_word_for_another_tokenizer_needs_weights_and_does_not_pass_to_another_run(
    weights: Path, tmp_path: Path
) -> None:
    run = run_on(weights, "text", "bytes", other_tokenizer=True)
    with pytest.raises(ConfigError, match="starts from no weights"):
        prepare.prepare_run(dataclasses.replace(run, init_from=None), cache=tmp_path / "cache")
    write_run(run, weights / "run.json")
    assert not source_run(str(weights)).data.other_tokenizer
