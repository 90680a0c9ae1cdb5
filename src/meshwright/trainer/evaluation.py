"""Evaluation of a checkpoint on held-out or other text."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.initial_weights import load_initial_weights
from meshwright.checkpoint.manifest import steps_to_take
from meshwright.config import MeshShape
from meshwright.data.feed import Samples, held_out_order
from meshwright.data.tokenizers import Tokenizer
from meshwright.errors import ConfigError, shell_word
from meshwright.formatting import Shown, first_of
from meshwright.hardware.agreement import answer_of_the_first
from meshwright.hugging_face.hub import is_hugging_face
from meshwright.models.model import Model
from meshwright.runs.recipe import run_of_hugging_face
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.step.eval_step import compile_eval_step
from meshwright.storage.paths import path_of
from meshwright.trainer.prepare import sum_metrics


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Loss of a checkpoint."""

    step: int
    """Step of the checkpoint; 0 for a Hugging Face model."""
    loss: float
    """Mean loss per token, in nats."""
    samples: int
    """Sequences evaluated."""
    tokens: int
    """Tokens that were predicted: all but the first of each document."""
    text_bytes: int
    """UTF-8 bytes of their text; the end of a document has none."""

    def brief(self) -> str:
        """Returns the step, the loss, and how much text it is of."""
        return (
            f"step {self.step:,}: loss {self.loss:.4f}, perplexity {self.perplexity:.4g}, "
            f"{self.bits_per_byte:.4f} bits per byte, {self.tokens:,} tokens in {self.samples:,} "
            "sequences"
        )

    @property
    def perplexity(self) -> float:
        """Exponential of the loss: how many equally likely tokens would be as hard to predict."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits over all tokens, per byte of text: comparable between tokenizers.

        NaN for text without bytes.
        """
        return (
            self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else math.nan
        )


@dataclasses.dataclass(frozen=True, repr=False)
class BatchEvaluation(Shown):
    """Metrics of a checkpoint whose loss is not one per token: of arrays, or preferences."""

    step: int
    """Step of the checkpoint."""
    loss: float
    metrics: Mapping[str, float]
    """Mean of each metric that the loss returns; of preferences their number too."""

    def brief(self) -> str:
        """Returns the step, the loss and the first metrics."""
        named = [f"{name} {value:.4g}" for name, value in self.metrics.items() if name != "loss"]
        return ", ".join([f"step {self.step:,}: loss {self.loss:.4f}", *first_of(named)])


def run_to_evaluate(
    source: str | Path,
    data: Sequence[str] = (),
    mesh: MeshShape | None = None,
    model: Model | None = None,
) -> Run:
    """Returns the Run of a folder with its own tokenizer, on a mesh and text where they are given.

    source: output folder of a run, or hf:PATH of a Hugging Face model.
    model: that of the run, where its file cannot name it.
    """
    if is_hugging_face(str(source)):
        run = run_of_hugging_face(str(source))
        texts = run.data
    else:
        run = run_in_folder(path_of(source))
        run, texts = dataclasses.replace(run, model=model or run.model), run.data
        if run.model.reads_text:
            texts = dataclasses.replace(texts, tokenizer=str(path_of(source) / "tokenizer.json"))
    training = run.training
    if data:
        texts = dataclasses.replace(texts, paths=tuple(data))
        # A wrapped model is refused for the text, not for how much of it is evaluated.
        training = dataclasses.replace(
            training, eval_samples=0 if run.model.reads_text else training.eval_samples
        )
    return dataclasses.replace(run, data=texts, training=training, mesh=mesh or run.mesh)


def check_source(source: str | Path, at: int | None) -> None:
    """Raises an error where a source of weights has no checkpoint of a step.

    source: output folder of a run, or hf:PATH of a Hugging Face model.  at: None takes the last.
    """
    if not is_hugging_face(str(source)):
        answer_of_the_first(lambda: steps_to_take(path_of(source) / "checkpoints", at))
    elif at is not None:
        truth = "a Hugging Face folder has one version of its weights"
        raise ConfigError(
            f"{source} at step {at}", truth, f"meshwright evaluate {shell_word(source)}"
        )


def evaluate_prepared(
    prepared: Any, source: str | Path, whole: bool, at: int | None
) -> "Evaluation | BatchEvaluation":
    """Evaluates a checkpoint of a prepared run.

    source: folder of the run, or the Hugging Face model it starts from.  whole: evaluate all of the
    text instead of its held-out part.  at: step of the checkpoint; None takes the last.
    Raises CheckpointError where there is none, ConfigError where the run has no held-out data.
    """
    model = prepared.device_run.run.model
    return model.evaluate(prepared, source, whole, at, _evaluate_text)


def _evaluate_text(
    prepared: Any, source: str | Path, whole: bool, at: int | None
) -> Evaluation | BatchEvaluation:
    parts = prepared.held_out
    if whole:
        parts = tuple(part.whole() for part in prepared.train)
    if not parts:
        raise ConfigError(f"evaluating {source}", "the run has no held-out text", "--data PATH")
    device_run = prepared.device_run
    if is_hugging_face(str(source)):
        params, step = load_initial_weights(device_run), 0
    else:
        with Checkpoints(path_of(source) / "checkpoints", max_to_keep=None) as checkpoints:
            params, manifest = checkpoints.restore_params(device_run, at)
        step = manifest.step
    sums = sum_metrics(device_run, params, parts, compile_eval_step(device_run))
    total, count = sums["loss"]
    if device_run.run.finetune.objective == "preferences":
        means = {name: value / max(weight, 1.0) for name, (value, weight) in sums.items()}
        return BatchEvaluation(step, means["loss"], {**means, "pairs": count})
    windows = sum(len(part) for part in parts)
    samples = min(windows, device_run.run.training.eval_samples or windows)
    text_bytes = _count_bytes(parts, prepared.corpus.tokenizer, samples)
    return Evaluation(step, total / max(count, 1.0), samples, round(count), text_bytes)


def _count_bytes(parts: Sequence[Samples], tokenizer: Tokenizer, samples: int) -> int:
    """Returns the UTF-8 bytes of the tokens that the first windows of `parts`, in turn, predict.

    Where a window ends inside a character of several bytes, decoding puts U+FFFD in its place.
    """
    taken = collections.Counter(id(part) for part, _ in held_out_order(parts, samples))
    texts = (
        tokenizer.decode(map(int, tokens))
        for part in parts
        for tokens in part.texts(taken[id(part)])
    )
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
