"""Training: prepare and restore, then feed, step, report, save, evaluate."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from meshwright.checkpoint.checkpoints import Checkpoints, check_disk_space, committed_steps
from meshwright.config import Run
from meshwright.data.batch import Batch
from meshwright.data.feed import Feed, Samples, build_stream, split
from meshwright.data.ramp import BatchRamp, ramp_of
from meshwright.data.tokens import Corpus, load_corpus
from meshwright.documents import write_atomically
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.hardware.mesh import build_mesh, default_mesh_shape, enable_compilation_cache
from meshwright.models.model import Metrics
from meshwright.report import Reporter
from meshwright.report.files import JsonLines
from meshwright.runs.write_run import write_run
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep, build_eval_step
from meshwright.trainer.losses import evaluate
from meshwright.trainer.meter import Meter
from meshwright.trainer.preemption import Preemption


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run on its devices with its tokenised text: everything there is before the first array."""

    device_run: DeviceRun
    corpus: Corpus
    train: tuple[Samples, ...]
    held_out: tuple[Samples, ...]

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """Fingerprint of what determines the samples of the run, as JSON values: kept with every checkpoint."""
        run = self.device_run.run
        order = {"held_out": run.data.held_out, "sequence": run.training.seq, "seed": run.training.seed}
        return {**self.corpus.fingerprint, **order}


class Position(NamedTuple):
    """Place of a run in its training and in its data."""

    step: int
    """Steps taken."""
    cursor: int
    """Samples read, without those that were left out."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Samples that are left out: first index and number, ascending."""


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
    parts: Sequence[tuple[Samples, Samples]]
    if run.finetune.objective == "text":
        corpus = load_corpus(run.data.paths, run.data.tokenizer, cache, own=own, bad_records=run.faults.bad_records)
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


def train(
    prepared: PreparedRun,
    out: Path,
    *,
    start: Literal["fresh", "resume"] = "fresh",
    at: int | None = None,
    data: Literal["same", "new"] = "same",
    reporters: Callable[[int], list[Reporter]] = lambda first: [],
) -> Summary:
    """Trains a prepared run, writing checkpoints, metrics, the Run and a text sample into `out`.

    start: `resume` continues from the last checkpoint in `out`, or from that of step `at`.
    data: `new` resumes on data, or in an order, that differ from those of the checkpoint.
    reporters: called with the number of steps already taken, returns further reporters.
    Raises CheckpointError, TrainingError, DataError.
    """
    device_run, began = prepared.device_run, time.perf_counter()
    run = device_run.run
    _check_folder(out, start)
    check_disk_space(out, device_run, run.training.max_to_keep)
    with contextlib.ExitStack() as stack:
        preemption = stack.enter_context(Preemption().listening())
        chief = jax.process_index() == 0
        if chief:
            from meshwright.trainer.lock import locked  # process 0 alone takes it

            stack.enter_context(locked(out))
        checkpoints = stack.enter_context(Checkpoints(out / "checkpoints", max_to_keep=run.training.max_to_keep))
        if start == "fresh":
            state, position = _first_state(device_run, out), Position(0, 0)
        else:
            from meshwright.trainer.resume import resume  # a new run has nothing to resume

            state, position = resume(device_run, checkpoints, at, prepared.data, data)
        if chief:
            _write_description(prepared, out)
        sinks = list(reporters(position.step))
        if chief and run.reporters:
            from meshwright.report.reporters import build_reporters  # most runs name none

            sinks += build_reporters(out, run)
        if chief:
            sinks += [JsonLines(out / "metrics.jsonl", upto=position.step)]
        for sink in sinks:
            stack.callback(sink.close)
        meter = Meter(device_run, sinks)
        return _Loop(prepared, out, checkpoints, meter, preemption, position, position, began).run(state)


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


def _first_state(device_run: DeviceRun, out: Path) -> State:
    """Initial values, or the weights that the run starts from."""
    if device_run.run.init_from is None:
        return device_run.initial_state()
    from meshwright.checkpoint.initial_weights import load_initial_weights  # most runs start from initial values

    return device_run.state_of(load_initial_weights(device_run, out))


def _write_description(prepared: PreparedRun, out: Path) -> None:
    """Writes Run and tokenizer, unless they are there: the output folder of a run that resumes keeps its vocabulary."""
    write_run(prepared.device_run.run, out / "run.json")
    tokenizer = prepared.corpus.tokenizer.to_json()
    file = out / "tokenizer.json"
    if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != tokenizer:
        write_atomically(file, tokenizer)


@dataclasses.dataclass
class _Loop:
    """The training loop and what it measures."""

    prepared: PreparedRun
    out: Path
    checkpoints: Checkpoints
    meter: Meter
    preemption: Preemption
    started: Position
    """Place at which this start of the run began."""
    origin: Position
    """Place from which the feed counts: that, or the checkpoint that the run returned to."""
    began: float
    """Time at which `train` was called."""
    compile_seconds: float = 0.0
    save_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    held_out_loss: float | None = None
    bad_steps: int = 0

    @property
    def ramp(self) -> BatchRamp:
        return ramp_of(self.prepared.device_run.run.training)

    def run(self, state: State) -> Summary:
        device_run, training = self.prepared.device_run, self.prepared.device_run.run.training
        eval_step, began = build_eval_step(device_run), time.perf_counter()
        compiled: dict[int, CompiledTrainStep] = {}
        reached: State | Position = state
        while True:
            reached, step, saved = self._take_steps(reached, eval_step, compiled)
            if not isinstance(reached, Position):
                break
            reached = self._roll_back(reached)
        state = reached
        if step > saved:
            self._save(step, state)
        sample = ""
        if not self.preemption.signal and step > self.started.step:
            self._evaluate(step, state, eval_step)
            from meshwright.trainer.sample import write_sample  # it generates, which the steps before do not

            sample = write_sample(device_run, self.prepared.corpus.tokenizer, state.params, self.out)
        self.checkpoints.wait()
        return Summary(
            out=self.out,
            steps=step,
            loss=self.meter.recent_loss,
            held_out_loss=self.held_out_loss,
            steps_taken=step - self.started.step,
            tokens=(self._samples_read(step) - self.started.cursor) * training.seq,
            seconds=time.perf_counter() - began,
            data_wait_seconds=self.data_wait_seconds,
            start_seconds=(self.meter.first_read_at or began) - self.began,
            compile_seconds=self.compile_seconds,
            save_seconds=self.save_seconds,
            step_seconds=self.meter.step_seconds,
            interrupted_by=self.preemption.signal,
            sample=sample,
        )

    def _take_steps(
        self, state: State, eval_step: Callable[[Any, Batch], Metrics], compiled: dict[int, CompiledTrainStep]
    ) -> tuple[State | Position, int, int]:
        """Trains to the end, a signal, or a step that has to be undone.

        Returns the state, or the place to roll back to; the steps taken; and the step of the last checkpoint.
        """
        training, feed = self.prepared.device_run.run.training, self._feed()
        saved = step = self.origin.step
        batch: Batch | None = None
        reached: State | Position = state
        while step < training.steps and not self.preemption.stops_before(step):
            previous, batch = batch, next(feed)
            size = batch.inputs.shape[0]
            if size not in compiled:
                compiled[size] = self._compile(batch)
            state, metrics = compiled[size](state, batch)
            step += 1
            # While this step runs, the metrics of the previous one are read: the device never waits for the host.
            reached = self._settle(state, previous)
            if isinstance(reached, Position):
                break
            if reached is not state:  # the step before was left out, and this one with it
                state, metrics = compiled[size](reached, batch)
            self.meter.push(step, metrics)
            if training.eval_every and step % training.eval_every == 0 and step < training.steps:
                self._evaluate(step, state, eval_step)
            if training.save_every and step % training.save_every == 0 and step < training.steps:
                reached = self._settle(state, batch)
                if isinstance(reached, Position):
                    break
                state, saved = reached, step
                self._save(step, state)
        else:
            reached = self._settle(state, batch)
        self.data_wait_seconds += feed.wait_seconds
        return reached, step, saved

    def _settle(self, state: State, batch: Batch | None) -> State | Position:
        """Reads the pending step, whose batch is `batch`. Returns the state to go on with, or the place to return to.

        A step that has to be undone stops the run unless its policy is another.
        """
        bad = self.meter.read()
        if bad is None:
            return state
        from meshwright.trainer.evidence import handle  # loaded for a run with a bad step

        self.bad_steps += 1
        place = Position(bad.step - 1, self._samples_read(bad.step - 1), self.origin.skipped)
        return handle(self.out, self.prepared.device_run, bad, state, batch, place, self.bad_steps)

    def _roll_back(self, place: Position) -> State:
        """Returns the state of the last checkpoint, or the first state. place: has the samples that are left out."""
        self.checkpoints.wait()
        if committed_steps(self.checkpoints.folder):
            state, manifest = self.checkpoints.restore(self.prepared.device_run)
            self.origin = Position(manifest.step, manifest.cursor, place.skipped)
        else:
            state, self.origin = _first_state(self.prepared.device_run, self.out), Position(0, 0, place.skipped)
        self.meter.rewind(self.origin.step)
        return state

    def _feed(self) -> Feed:
        device_run, training = self.prepared.device_run, self.prepared.device_run.run.training
        return Feed(
            build_stream(list(self.prepared.train), list(self.prepared.corpus.weights), training.seed),
            self.ramp,
            seq=training.seq,
            taken=self.origin.step,
            cursor=self.origin.cursor,
            steps=max(training.steps - self.origin.step, 1),
            sharding=device_run.batch_sharding,
            skipped=self.origin.skipped,
        )

    def _compile(self, batch: Batch) -> CompiledTrainStep:
        began = time.perf_counter()
        compiled = CompiledTrainStep(self.prepared.device_run.with_batch(batch.inputs.shape[0]), batch)
        self.compile_seconds += time.perf_counter() - began
        return compiled

    def _samples_read(self, step: int) -> int:
        return self.origin.cursor + self.ramp.read_before(step) - self.ramp.read_before(self.origin.step)

    def _save(self, step: int, state: State) -> None:
        began = time.perf_counter()
        self.checkpoints.save(
            state, self.prepared.device_run, step=step, cursor=self._samples_read(step),
            skipped=self.origin.skipped, data=self.prepared.data,
        )  # fmt: skip
        self.save_seconds += time.perf_counter() - began

    def _evaluate(self, step: int, state: State, eval_step: Callable[[Any, Batch], Metrics]) -> None:
        if self.prepared.held_out:
            self.held_out_loss = evaluate(self.prepared.device_run, state.params, self.prepared.held_out, eval_step)
            self.meter.report(step, {"held-out loss": self.held_out_loss})
