"""Whether a text is in the tokens that weights were trained on, by comparing tokenizers."""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from meshwright.config import Data
from meshwright.data.corpus import local_text, parse_source
from meshwright.data.tokenizers import Tokenizer, build_tokenizer
from meshwright.data.tokens import is_token_file
from meshwright.data.vocabularies import tokenizer_file
from meshwright.errors import DataError
from meshwright.hugging_face.hub import PREFIX, find_folder, is_hugging_face
from meshwright.hugging_face.tokenizer_files import published_text
from meshwright.runs.run import Run
from meshwright.storage.attempts import is_file
from meshwright.storage.paths import default_cache_folder, in_bucket, path_of

_EXAMPLES = ("The weights know these tokens.", "def f(x): return 2 * x", "Größe 12,5 €")
"""Texts of which the first with other tokens is shown."""
_SHOWN = 6
"""Most tokens of it that are shown."""


@dataclasses.dataclass(frozen=True)
class TokensOfWeights:
    """Check of a tokenizer against that of the weights that are trained or evaluated.

    Tokens of other texts under the same numbers train without an error, and the weights are lost.
    """

    weights: str
    """Source of the weights: hf:PATH, or the output folder of a run."""
    cache: Path
    accepted: bool = False
    """Whether the user accepts another tokenizer (`Data.other_tokenizer`)."""
    trains: bool = True
    """Whether a run starts from the weights; else they are evaluated, and nothing can be
    accepted."""
    own: Path | None = None
    """Tokenizer of an earlier start of the run, whose weights are then those of its checkpoint."""

    def __call__(self, tokenizer: Tokenizer, name: str) -> None:
        """Checks the tokenizer of a text before the text is tokenised.

        name: its file, `bytes`, or a folder of tokens.
        Prints what is not known, added or accepted. Raises DataError where a token of the weights
        has another number, or a text is divided otherwise, and the user has not accepted that.
        """
        if self.own is not None and self.own.is_file():
            return
        note = self.compare(tokenizer, name)
        if note:
            print(note, file=sys.stderr, flush=True)

    def compare(self, tokenizer: Tokenizer, name: str) -> str:
        """Returns a note about the tokenizer; "" where it is that of the weights.

        Raises DataError as a call does.
        """
        file = tokenizer_of_weights(self.weights)
        if not file.is_file():
            return (
                f"the tokenizer of {self.weights} is not known, since it has none: that it was "
                "trained on the tokens "
                f"of {name} is taken for granted"
            )
        theirs = build_tokenizer(local_text(str(file), self.cache))
        added = added_tokens(theirs, tokenizer)
        if added == 0:
            return ""
        if added is not None:
            tokens = "1 token" if added == 1 else f"{added:,} tokens"
            return (
                f"{name} adds {tokens} to the tokenizer of {self.weights}, and has all of its "
                "own: the embeddings of "
                "the added ones are not trained yet"
            )
        both = (
            f"the tokenizer of the weights is {_described(str(file), theirs)}, that of the text is "
            f"{_described(name, tokenizer)}"
        )
        shown = f"{both}: {different_example(theirs, tokenizer)}"
        if self.accepted:
            return f"{shown}; accepted with --data.other-tokenizer"
        raise DataError(*self._refusal(name, str(file), shown))

    def _refusal(self, name: str, file: str, truth: str) -> tuple[str, str, str]:
        verb = "training" if self.trains else "evaluating"
        fix = f"--data.tokenizer {file}"
        if not self.trains or is_token_file(name):
            folder = f"--tokenizer {file} --out FOLDER"
            fix = f"--data FOLDER, written by `meshwright tokenize TEXT {folder}`"
        if self.trains:
            fix += "; or --data.other-tokenizer, to train the embeddings anew"
        return f"{verb} the weights of {self.weights} on the tokens of {name}", truth, fix


def check_tokens_here(run: Run) -> None:
    """Checks the tokenizers of a run's text, as far as they are on this host, against its weights'.

    A tokenizer that is learned from the text, and files of other hosts, are compared where the run
    starts.
    Raises DataError as `TokensOfWeights` does.
    """
    source = run.init_from
    if source is None or run.data.other_tokenizer or not run.model.reads_text:
        return
    if in_bucket(source) or not path_of(source.removeprefix(PREFIX)).is_dir():
        return
    theirs = tokenizer_of_weights(source)
    if not theirs.is_file():
        return
    check = TokensOfWeights(source, default_cache_folder())
    for name, spec in _tokenizers_of(run.data).items():
        is_other_file = is_file(spec) and not theirs.samefile(path_of(spec))
        if spec == "bytes" or is_other_file:
            check.compare(build_tokenizer(spec), name)


def _tokenizers_of(data: Data) -> dict[str, str]:
    """Returns the tokenizers of texts that are not in buckets: owner, and file or kind."""
    found = {}
    for path in data.paths:
        text = parse_source(path).path
        if in_bucket(text):
            continue
        if is_token_file(text):
            found[text] = str(path_of(text) / "tokenizer.json")
        else:
            found[data.tokenizer] = data.tokenizer
    return found


def tokenizer_of_weights(weights: str) -> Path:
    """Returns the file with the tokenizer of a source of weights, whether or not there is one."""
    if is_hugging_face(weights):
        return tokenizer_file(find_folder(weights, weights=False))
    return path_of(weights) / "tokenizer.json"


def added_tokens(weights: Tokenizer, text: Tokenizer) -> int | None:
    """Returns how many tokens the tokenizer of a text has besides those of weights.

    The result is None where it is another one.

    It is the same, or an extension, where every text without the added tokens has the tokens that
    the weights know: all shared numbers agree, the merges begin with those of the weights, and a
    text is normalised and divided alike. Special tokens that the weights alone have do not matter.
    """
    before, after = _description(weights), _description(text)
    for part in ("normalizer", "pre_tokenizer"):
        if before[part] != after[part]:
            return None
    theirs, ours = before["model"], after["model"]
    settings = (theirs.keys() | ours.keys()) - {"vocab", "merges"}
    if any(theirs.get(name) != ours.get(name) for name in settings):
        return None
    merges = theirs.get("merges") or []
    if (ours.get("merges") or [])[: len(merges)] != merges:
        return None
    scores = _scores(theirs["vocab"])
    if _scores(ours["vocab"])[: len(scores)] != scores:
        return None
    known, given = _numbers(theirs["vocab"]), _numbers(ours["vocab"])
    if any(given.get(token) != number for token, number in known.items()):
        return None
    known |= {row["content"]: row["id"] for row in before["added_tokens"]}
    given |= {row["content"]: row["id"] for row in after["added_tokens"]}
    names = {number: token for token, number in known.items()}
    for token, number in given.items():
        if known.get(token, number) != number or names.get(number, token) != token:
            return None
    return len(given.keys() - known.keys())


def different_example(weights: Tokenizer, text: Tokenizer) -> str:
    """Returns a text with its tokens by two tokenizers that differ."""
    for example in _EXAMPLES:
        theirs, ours = _encoded(weights, example), _encoded(text, example)
        if theirs != ours:
            return f"{example!r} is {theirs} by the first, and {ours} by the second"
    last = min(weights.vocab, text.vocab)
    for number in range(last):
        pieces = weights.decode([number]), text.decode([number])
        if pieces[0] != pieces[1]:
            return f"token {number} is {pieces[0]!r} by the first, and {pieces[1]!r} by the second"
    return "they divide texts otherwise"


def _encoded(tokenizer: Tokenizer, text: str) -> str:
    """Returns the first tokens of a text, or why the tokenizer refuses it."""
    try:
        tokens = tokenizer.encode(text).tolist()
    except DataError as error:
        return f"not a text ({error.truth})"
    more = f", and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
    return f"{', '.join(map(str, tokens[:_SHOWN]))}{more}"


def _described(name: str, tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:12]
    return f"{name} ({tokenizer.vocab:,} tokens, SHA-256 {digest})"


def _description(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a tokenizer as the file that other programs read."""
    described: dict[str, Any] = json.loads(published_text(tokenizer))
    return described


def _numbers(vocab: Any) -> dict[str, int]:
    """Returns the number of each token of a vocabulary."""
    if isinstance(vocab, dict):
        return dict(vocab)
    return {row[0]: number for number, row in enumerate(vocab)}


def _scores(vocab: Any) -> list[float]:
    """Returns the scores of the tokens of Unigram, by number; other vocabularies have none."""
    return [] if isinstance(vocab, dict) else [row[1] for row in vocab]
