"""Training: prepare and restore, then feed, step, report, save, evaluate."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import jax

from meshwright.checkpoint.checkpoints import Checkpoints, check_disk_space, committed_steps
from meshwright.config import Run
from meshwright.data.batch import Batch
from meshwright.data.feed import Feed, Samples, build_stream, held_out_batches, split
from meshwright.data.ramp import BatchRamp, ramp_of
from meshwright.data.tokens import Corpus, load_corpus
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.hardware.mesh import build_mesh, default_mesh_shape, enable_compilation_cache
from meshwright.models.flops import training_flops_per_token
from meshwright.models.model import Metrics
from meshwright.report import Reporter, Values
from meshwright.report.files import JsonLines
from meshwright.runs.run_file import write_run
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep, build_eval_step
from meshwright.trainer.meter import Meter
from meshwright.trainer.preemption import Preemption


class Batches(Protocol):
    """Batches on the devices, seconds waited for them, and their position: JSON, or None where steps tell it."""

    wait_seconds: float
    position: Any

    def __next__(self) -> Any: ...


class Trainable(Protocol):
    """A run as the loop trains it: one of text (`PreparedRun`), or of a wrapped model (`wrapped.prepared`)."""

    @property
    def device_run(self) -> DeviceRun:
        """The run on its devices."""

    def write_files(self, out: Path) -> None:
        """Writes what the output folder has besides run.json, metrics and checkpoints."""

    def meter(self, reporters: list[Reporter]) -> Meter:
        """Returns the meter of its steps."""

    def feed(self, first: int, cursor: int, position: Any) -> Batches:
        """Returns the batches after `first` steps and `cursor` samples; `position` is the saved one of the data."""

    def compile(self, batch: Any) -> CompiledTrainStep:
        """Compiles the train step for batches like this one."""

    def evaluator(self) -> Callable[[State], float] | None:
        """Returns the loss on held-out data as a function of the state; None without such data."""

    def sample(self, state: State, out: Path) -> str:
        """Samples from the model and writes the sample to `out`."""


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run on its devices with its tokenised text: everything there is before the first array."""

    device_run: DeviceRun
    corpus: Corpus
    train: tuple[Samples, ...]
    held_out: tuple[Samples, ...]

    def write_files(self, out: Path) -> None:
        """Writes the tokenizer."""
        (out / "tokenizer.json").write_text(self.corpus.tokenizer.to_json(), encoding="utf-8")

    def meter(self, reporters: list[Reporter]) -> Meter:
        """Returns a meter of tokens."""
        run = self.device_run.run
        seq, flops = run.training.seq, training_flops_per_token(run.model, run.training.seq, run.finetune.method)
        return Meter(reporters, run.training, self.device_run.mesh, unit="tokens", per_sample=seq, flops=flops)

    def feed(self, first: int, cursor: int, position: Any) -> Feed:
        """Returns the batches from the global sample `cursor` on."""
        training = self.device_run.run.training
        return Feed(
            build_stream(list(self.train), list(self.corpus.weights), training.seed),
            ramp_of(training),
            seq=training.seq,
            taken=first,
            cursor=cursor,
            steps=max(training.steps - first, 1),
            sharding=self.device_run.batch_sharding,
        )

    def compile(self, batch: Batch) -> CompiledTrainStep:
        """Compiles the train step for as many sequences as the batch has."""
        return CompiledTrainStep(self.device_run.with_batch(batch.inputs.shape[0]), batch)

    def evaluator(self) -> Callable[[State], float] | None:
        """Returns the mean loss per token on held-out text as a function of the state."""
        if not self.held_out:
            return None
        eval_step = build_eval_step(self.device_run)

        def held_out_loss(state: State) -> float:
            total, count = sum_losses(self.device_run, state.params, self.held_out, eval_step)
            return total / max(count, 1.0)

        return held_out_loss

    def sample(self, state: State, out: Path) -> str:
        """Samples text where the run asks for it or the model is small, and writes it to `out`."""
        from meshwright.trainer.sample import write_sample  # it generates, which the steps before do not

        return write_sample(self.device_run, self.corpus.tokenizer, state.params, out)


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


Choose = Callable[[Run, Sequence[Any]], Run]
"""`(run, devices) -> run` with the choices filled in that it leaves to the machine (remat policy)."""


def prepare_run(
    run: Run, *, cache: Path, devices: int | None = None, choose: Choose = lambda run, devices: run
) -> PreparedRun:
    """Tokenises the text, chooses the mesh where the run leaves it open, and places the run on devices.

    cache: folder of token files and compiled programs.  devices: use the first so many; None uses all.  choose: makes
    the choices that need the planner; without it a run that leaves the remat policy open recomputes whole layers.
    Raises ConfigError or DataError before anything is traced.
    """
    enable_compilation_cache(cache / "compiled")
    available = jax.devices()[:devices]
    mesh = build_mesh(run.mesh or default_mesh_shape(len(available)), available)
    if run.mesh is None:
        run = dataclasses.replace(run, mesh=default_mesh_shape(len(available)))
    parts: Sequence[tuple[Samples, Samples]]
    if run.finetune.objective == "text":
        corpus = load_corpus(run.data.paths, run.data.tokenizer, cache)
        parts = [split(file, run.training.seq, run.data.held_out) for file in corpus.files]
    else:
        from meshwright.data.conversations import load_conversations  # most runs train on all of a text

        corpus, parts = load_conversations(run, cache)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=_common_vocab(run, corpus)))
    device_run = place_on_devices(choose(run, list(mesh.devices.flat)), mesh)
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


def sum_losses(
    device_run: DeviceRun, params: Any, parts: tuple[Samples, ...], eval_step: Callable[[Any, Batch], Metrics]
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
    prepared: Trainable,
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
        state, first, cursor, position = _initial_state(device_run, checkpoints, start, at)
        chief = jax.process_index() == 0
        if chief:
            write_run(run, out / "run.json")
            prepared.write_files(out)
        sinks = list(reporters(first))
        if chief and run.reporters:
            from meshwright.report.reporters import build_reporters  # most runs name none

            sinks += build_reporters(out, run)
        if chief:
            sinks += [JsonLines(out / "metrics.jsonl", upto=first)]
        for sink in sinks:
            stack.callback(sink.close)
        preemption = stack.enter_context(Preemption().listening())
        feed, meter = prepared.feed(first, cursor, position), prepared.meter(sinks)
        return _Loop(prepared, out, checkpoints, feed, meter, preemption, first, cursor, began).run(state)


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
) -> tuple[State, int, int, Any]:
    """State, steps taken, samples read, and position of the data."""
    if start == "fresh":
        if device_run.run.init_from is None:
            return device_run.initial_state(), 0, 0, None
        from meshwright.checkpoint.initial_weights import load_initial_weights  # most runs start from initial values

        return device_run.state_of(load_initial_weights(device_run, checkpoints.folder.parent)), 0, 0, None
    state, manifest = checkpoints.restore(device_run, at)
    if at is not None:
        checkpoints.set_aside(after=at)
    return state, manifest.step, manifest.cursor, manifest.data


@dataclasses.dataclass
class _Loop:
    """The training loop and what it measures."""

    prepared: Trainable
    out: Path
    checkpoints: Checkpoints
    feed: Batches
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
        training, held_out_loss = self.prepared.device_run.run.training, self.prepared.evaluator()
        began, saved, step = time.perf_counter(), self.first, self.first
        compiled: dict[int, CompiledTrainStep] = {}
        batch: Any = None
        while step < training.steps and not self.preemption.stops_before(step):
            previous, batch = batch, next(self.feed)
            size = jax.tree.leaves(batch)[0].shape[0]
            if size not in compiled:
                compiled[size] = self._compile(batch)
            state, metrics = compiled[size](state, batch)
            step += 1
            # While this step runs, the metrics of the previous one are read: the device never waits for the host.
            self.meter.read(functools.partial(self._not_finite, state, previous))
            self.meter.push(step, metrics)
            if training.eval_every and step % training.eval_every == 0 and step < training.steps:
                self._evaluate(step, state, held_out_loss)
            if training.save_every and step % training.save_every == 0 and step < training.steps:
                self.meter.read(functools.partial(self._not_finite, state, batch))
                self._save(step, state)
                saved = step
        self.meter.read(functools.partial(self._not_finite, state, batch))
        if step > saved:
            self._save(step, state)
        sample = ""
        if not self.preemption.signal:
            self._evaluate(step, state, held_out_loss)
            sample = self.prepared.sample(state, self.out)
        self.checkpoints.wait()
        return Summary(
            out=self.out,
            steps=step,
            loss=self.meter.recent_loss,
            held_out_loss=self.held_out_loss,
            steps_taken=step - self.first,
            tokens=(self._samples_read(step) - self.cursor) * self.meter.per_sample,
            seconds=time.perf_counter() - began,
            data_wait_seconds=self.feed.wait_seconds,
            start_seconds=(self.meter.first_read_at or began) - self.began,
            compile_seconds=self.compile_seconds,
            save_seconds=self.save_seconds,
            step_seconds=self.meter.step_seconds,
            interrupted_by=self.preemption.signal,
            sample=sample,
        )

    def _compile(self, batch: Any) -> CompiledTrainStep:
        began = time.perf_counter()
        compiled = self.prepared.compile(batch)
        self.compile_seconds += time.perf_counter() - began
        return compiled

    def _samples_read(self, step: int) -> int:
        return self.cursor + self.ramp.read_before(step) - self.ramp.read_before(self.first)

    def _save(self, step: int, state: State) -> None:
        began = time.perf_counter()
        cursor, position = self._samples_read(step), self.feed.position
        self.checkpoints.save(state, self.prepared.device_run, step=step, cursor=cursor, data=position)
        self.save_seconds += time.perf_counter() - began

    def _not_finite(self, state: State, batch: Any, step: int, values: Values) -> NoReturn:
        from meshwright.trainer.evidence import Evidence  # loaded for a run that fails

        Evidence(self.out, self.prepared.device_run, state, batch).save(step, values)

    def _evaluate(self, step: int, state: State, held_out_loss: Callable[[State], float] | None) -> None:
        if held_out_loss is not None:
            self.held_out_loss = held_out_loss(state)
            self.meter.report(step, {"held-out loss": self.held_out_loss})
