"""Training: prepare and restore, then feed, step, report, save, evaluate."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from meshwright.checkpoint.checkpoints import Checkpoints, check_disk_space, committed_steps
from meshwright.config import Run
from meshwright.data.batch import Batch
from meshwright.data.feed import Feed, Windows, build_stream, held_out_batches, split
from meshwright.data.ramp import BatchRamp, ramp_of
from meshwright.data.tokens import Corpus, load_corpus
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.hardware.mesh import build_mesh, default_mesh_shape, enable_compilation_cache
from meshwright.models.model import Metrics
from meshwright.report import Reporter, Values
from meshwright.report.files import JsonLines
from meshwright.runs.write_run import write_run
from meshwright.sharding.params import count_params
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep, build_eval_step
from meshwright.trainer.meter import Meter
from meshwright.trainer.preemption import Preemption


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run on its devices with its tokenised text: everything there is before the first array."""

    device_run: DeviceRun
    corpus: Corpus
    train: tuple[Windows, ...]
    held_out: tuple[Windows, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of a training run.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=1, sample=0, eval_samples=16)
        >>> summary = mw.train(run, out=tmp / "summary", progress="none", cache=tmp, devices=1)
        >>> summary.steps, summary.tokens, summary.interrupted_by
        (1, 2048, 0)
    """

    out: Path
    steps: int
    """Steps taken so far, earlier parts of a resumed run included."""
    loss: float
    """Mean of the last steps' losses (up to 20)."""
    held_out_loss: float | None
    """Mean loss per token on held-out text."""
    steps_taken: int
    """Steps since the start or the resume."""
    tokens: int
    """Tokens trained on, since the start or the resume."""
    seconds: float
    data_wait_seconds: float
    """Seconds that the loop waited for data."""
    start_seconds: float
    """Seconds from the beginning to the end of the first step: initial values or restore, compilation, that step."""
    compile_seconds: float
    """Seconds that compiling the train step took."""
    save_seconds: float
    """Seconds that the loop waited for checkpoints."""
    step_seconds: float
    """Median seconds from one step to the next, waiting for data included."""
    interrupted_by: int
    """Number of the signal that ended the run early; 0 where it came to its end."""
    sample: str
    """Text sampled from the model at the end."""


SMALL_MODEL = 100_000_000
"""Most parameters of a model that is sampled from where the run does not say."""
_SAMPLE = 200
"""Tokens of that sample."""

Choose = Callable[[Run, Sequence[Any]], Run]
"""`(run, devices) -> run` with the choices filled in that it leaves to the machine (remat policy)."""


def prepare_run(
    run: Run,
    *,
    cache: Path,
    devices: int | None = None,
    choose: Choose = lambda run, devices: run,
    own: Path | None = None,
) -> PreparedRun:
    """Tokenises the text, chooses the mesh where the run leaves it open, and places the run on devices.

    cache: folder of token files and compiled programs.  devices: use the first so many; None uses all.  choose: makes
    the choices that need the planner; without it a run that leaves the remat policy open recomputes whole layers.
    own: tokenizer.json of a run that goes on, whose vocabulary it keeps where its text has changed.
    Raises ConfigError or DataError before anything is traced.
    """
    enable_compilation_cache(cache / "compiled")
    available = jax.devices()[:devices]
    mesh = build_mesh(run.mesh or default_mesh_shape(len(available)), available)
    if run.mesh is None:
        run = dataclasses.replace(run, mesh=default_mesh_shape(len(available)))
    corpus = load_corpus(run.data.paths, run.data.tokenizer, cache, own=own, bad_records=run.faults.bad_records)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=_common_vocab(run, corpus)))
    device_run = place_on_devices(choose(run, list(mesh.devices.flat)), mesh)
    parts = [split(file, run.training.seq, run.data.held_out) for file in corpus.files]
    return PreparedRun(device_run, corpus, tuple(p[0] for p in parts), tuple(p[1] for p in parts if len(p[1])))


def _common_vocab(run: Run, corpus: Corpus) -> int:
    """Vocabulary size of model and text."""
    vocab = run.model.vocab
    if vocab is not None and corpus.vocab > vocab:
        raise DataError(
            f"training a model of {vocab} tokens on {corpus.files[0].folder}",
            f"its tokenizer has {corpus.vocab} tokens, so tokens {vocab} to {corpus.vocab - 1} have no embedding",
            f"--model.vocab {corpus.vocab}, or the model's own tokenizer with --data.tokenizer",
        )
    return corpus.vocab if vocab is None else vocab


def evaluate(
    device_run: DeviceRun, params: Any, parts: tuple[Windows, ...], eval_step: Callable[[Any, Batch], Metrics]
) -> float:
    """Returns the mean loss per token over held-out text."""
    total, count = sum_losses(device_run, params, parts, eval_step)
    return total / max(count, 1.0)


def sum_losses(
    device_run: DeviceRun, params: Any, parts: tuple[Windows, ...], eval_step: Callable[[Any, Batch], Metrics]
) -> tuple[float, float]:
    """Returns the loss summed over the tokens of held-out text, and their number."""
    training = device_run.run.training
    total = count = 0.0
    batches = held_out_batches(
        list(parts), samples=training.eval_samples, batch=training.batch, sharding=device_run.batch_sharding
    )
    for metrics in [eval_step(params, batch)["loss"] for batch in batches]:
        total, count = total + float(metrics[0]), count + float(metrics[1])
    return total, count


def train(
    prepared: PreparedRun,
    out: Path,
    *,
    start: Literal["fresh", "resume"] = "fresh",
    at: int | None = None,
    reporters: Callable[[int], list[Reporter]] = lambda first: [],
) -> Summary:
    """Trains a prepared run, writing checkpoints, metrics, the Run and a text sample into `out`.

    start: `resume` continues from the last checkpoint in `out`, or from that of step `at`.
    reporters: called with the number of steps already taken, returns further reporters.
    Raises CheckpointError, TrainingError, DataError.
    """
    device_run, began = prepared.device_run, time.perf_counter()
    run = device_run.run
    _check_folder(out, start)
    check_disk_space(out, device_run, run.training.max_to_keep)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(out / "checkpoints", max_to_keep=run.training.max_to_keep))
        state, first, cursor = _initial_state(device_run, checkpoints, start, at)
        chief = jax.process_index() == 0
        if chief:
            write_run(run, out / "run.json")
            (out / "tokenizer.json").write_text(prepared.corpus.tokenizer.to_json(), encoding="utf-8")
        sinks = list(reporters(first))
        if chief and run.reporters:
            from meshwright.report.reporters import build_reporters  # most runs name none

            sinks += build_reporters(out, run)
        if chief:
            sinks += [JsonLines(out / "metrics.jsonl", upto=first)]
        for sink in sinks:
            stack.callback(sink.close)
        preemption = stack.enter_context(Preemption().listening())
        return _Loop(prepared, out, checkpoints, Meter(device_run, sinks), preemption, first, cursor, began).run(state)


def _check_folder(out: Path, start: str) -> None:
    steps = committed_steps(out / "checkpoints")
    if start == "fresh" and steps:
        raise ConfigError(
            f"a new run in {out}",
            f"it holds the checkpoint of step {steps[-1]} of another",
            "--resume to continue that one, or another --out",
        )
    if start == "resume" and not steps:
        raise CheckpointError(
            f"resuming the run in {out}", "no checkpoint was committed there", "leave --resume out, or another --out"
        )


def _initial_state(
    device_run: DeviceRun, checkpoints: Checkpoints, start: str, at: int | None
) -> tuple[State, int, int]:
    """State, steps taken, and samples read."""
    if start == "fresh":
        if device_run.run.init_from is None:
            return device_run.initial_state(), 0, 0
        from meshwright.checkpoint.initial_weights import load_initial_weights  # most runs start from initial values

        return device_run.state_of(load_initial_weights(device_run, checkpoints.folder.parent)), 0, 0
    state, manifest = checkpoints.restore(device_run, at)
    checkpoints.set_aside(after=manifest.step)
    return state, manifest.step, manifest.cursor


@dataclasses.dataclass
class _Loop:
    """The training loop and what it measures."""

    prepared: PreparedRun
    out: Path
    checkpoints: Checkpoints
    meter: Meter
    preemption: Preemption
    first: int
    """Steps taken before this loop."""
    cursor: int
    """Samples read before this loop."""
    began: float
    """Time at which `train` was called."""
    compile_seconds: float = 0.0
    save_seconds: float = 0.0
    held_out_loss: float | None = None

    @property
    def ramp(self) -> BatchRamp:
        return ramp_of(self.prepared.device_run.run.training)

    def run(self, state: State) -> Summary:
        device_run, training = self.prepared.device_run, self.prepared.device_run.run.training
        eval_step, feed = build_eval_step(device_run), self._feed()
        began, saved, step = time.perf_counter(), self.first, self.first
        compiled: dict[int, CompiledTrainStep] = {}
        batch: Batch | None = None
        while step < training.steps and not self.preemption.stops_before(step):
            previous, batch = batch, next(feed)
            size = batch.inputs.shape[0]
            if size not in compiled:
                compiled[size] = self._compile(batch)
            state, metrics = compiled[size](state, batch)
            step += 1
            # While this step runs, the metrics of the previous one are read: the device never waits for the host.
            self.meter.read(functools.partial(self._not_finite, state, previous))
            self.meter.push(step, metrics)
            if training.eval_every and step % training.eval_every == 0 and step < training.steps:
                self._evaluate(step, state, eval_step)
            if training.save_every and step % training.save_every == 0 and step < training.steps:
                self.meter.read(functools.partial(self._not_finite, state, batch))
                self._save(step, state)
                saved = step
        self.meter.read(functools.partial(self._not_finite, state, batch))
        if step > saved:
            self.checkpoints.save(state, device_run, step=step, cursor=self._samples_read(step))
        sample = ""
        if not self.preemption.signal:
            self._evaluate(step, state, eval_step)
            sample = _write_sample(self.prepared, state, self.out)
        self.checkpoints.wait()
        return Summary(
            out=self.out,
            steps=step,
            loss=self.meter.recent_loss,
            held_out_loss=self.held_out_loss,
            steps_taken=step - self.first,
            tokens=(self._samples_read(step) - self.cursor) * training.seq,
            seconds=time.perf_counter() - began,
            data_wait_seconds=feed.wait_seconds,
            start_seconds=(self.meter.first_read_at or began) - self.began,
            compile_seconds=self.compile_seconds,
            save_seconds=self.save_seconds,
            step_seconds=self.meter.step_seconds,
            interrupted_by=self.preemption.signal,
            sample=sample,
        )

    def _feed(self) -> Feed:
        device_run, training = self.prepared.device_run, self.prepared.device_run.run.training
        return Feed(
            build_stream(list(self.prepared.train), list(self.prepared.corpus.weights), training.seed),
            self.ramp,
            seq=training.seq,
            taken=self.first,
            cursor=self.cursor,
            steps=max(training.steps - self.first, 1),
            sharding=device_run.batch_sharding,
        )

    def _compile(self, batch: Batch) -> CompiledTrainStep:
        began = time.perf_counter()
        compiled = CompiledTrainStep(self.prepared.device_run.with_batch(batch.inputs.shape[0]), batch)
        self.compile_seconds += time.perf_counter() - began
        return compiled

    def _samples_read(self, step: int) -> int:
        return self.cursor + self.ramp.read_before(step) - self.ramp.read_before(self.first)

    def _save(self, step: int, state: State) -> None:
        began = time.perf_counter()
        self.checkpoints.save(state, self.prepared.device_run, step=step, cursor=self._samples_read(step))
        self.save_seconds += time.perf_counter() - began

    def _not_finite(self, state: State, batch: Batch | None, step: int, values: Values) -> NoReturn:
        from meshwright.trainer.evidence import Evidence  # loaded for a run that fails

        Evidence(self.out, self.prepared.device_run, state, batch).save(step, values)

    def _evaluate(self, step: int, state: State, eval_step: Callable[[Any, Batch], Metrics]) -> None:
        if self.prepared.held_out:
            self.held_out_loss = evaluate(self.prepared.device_run, state.params, self.prepared.held_out, eval_step)
            self.meter.report(step, {"held-out loss": self.held_out_loss})


def _write_sample(prepared: PreparedRun, state: State, out: Path) -> str:
    """Samples text from the model and writes it to `out`."""
    device_run, data = prepared.device_run, prepared.device_run.run.data
    count = _SAMPLE if data.sample is None and _is_small(device_run) else data.sample
    if not count:
        return ""
    from meshwright.generation.training_sample import sample_tokens  # a run without a sample does not load it

    tokenizer = prepared.corpus.tokenizer
    prompt = tokenizer.encode(data.prompt)
    prompt = prompt if len(prompt) else np.array([tokenizer.end], np.int32)
    tokens = sample_tokens(device_run, state.params, prompt, tokens=count, seed=device_run.run.training.seed)
    text = data.prompt + tokenizer.decode(tokens)
    if jax.process_index() == 0:
        (out / "sample.txt").write_text(text, encoding="utf-8")
    return text


def _is_small(device_run: DeviceRun) -> bool:
    return count_params(device_run.params) <= SMALL_MODEL
