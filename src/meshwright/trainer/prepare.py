"""Runs as the training loop takes them, and a run of text placed on its devices."""

import abc
import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from meshwright.activity import activity
from meshwright.data.batch import Batch, Epochs, SourceSamples, ramp_of
from meshwright.data.corpus import Check, Corpus, load_corpus, parse_source
from meshwright.data.feed import (
    Feed,
    Samples,
    build_stream,
    held_out_batches,
    held_out_fraction,
    leave_out_first,
    split,
)
from meshwright.data.megatron_order import (
    MegatronOrder,
    megatron_order,
    parse_split,
    samples_of,
    weights_of,
)
from meshwright.data.tokenizers import Tokenizer
from meshwright.data.tokens import Progress
from meshwright.errors import ConfigError, DataError
from meshwright.hardware.mesh import (
    build_mesh,
    enable_compilation_cache,
    first_devices,
)
from meshwright.models.flops import training_flops_per_token
from meshwright.models.model import Metrics, Model
from meshwright.reporters import Reporter
from meshwright.runs.run import Run
from meshwright.sharding.params import count_params
from meshwright.signs import waiting
from meshwright.step.device_memory import check_state, shard_bytes
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.eval_step import compile_eval_step
from meshwright.step.health import HealthReader
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep
from meshwright.storage.paths import in_bucket, path_of
from meshwright.storage.transfer import local_copy
from meshwright.storage.writing import write_atomically
from meshwright.trainer.meter import Meter
from meshwright.trainer.relations import Output, check_run, with_stand_in_vocab
from meshwright.trainer.sample import check_prompt, write_sample

_SMALL_MODEL = 100_000_000
"""Most parameters of a model that is sampled from by default: where the run sets neither option."""
_SAMPLE = 200
"""Tokens of that sample."""


class Position(NamedTuple):
    """Place of a run in its training and in its data."""

    step: int
    """Steps taken."""
    cursor: int
    """Samples read, without those that were left out."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Samples that are left out: first index and number, ascending."""
    data: Any = None
    """Position of data that `cursor` does not tell: an iterator's own state."""
    norms: tuple[float, ...] = ()
    """Gradient norms of the steps before it, of which a spike is a multiple."""
    identity: str = ""
    """Identity of the run."""


class Batches(Protocol):
    """Batches on the devices, seconds waited, and a position: JSON, or None where steps tell it."""

    wait_seconds: float
    position: Any

    def __next__(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Trainable(abc.ABC):
    """A run as the loop takes it: of text (`PreparedRun`), or of a wrapped model."""

    device_run: DeviceRun
    """The run on its devices."""

    def meter(self, reporters: list[Reporter]) -> Meter:
        """Returns a meter of its steps, in the model's unit."""
        run, units = self.device_run.run, self.device_run.units
        flops = training_flops_per_token(run.model, units, run.finetune.method)
        health = HealthReader(self.device_run)
        return Meter(
            reporters,
            run,
            self.device_run.mesh,
            per_sample=units,
            flops=flops,
            health=health,
            epochs=self.epochs(),
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of a run of text;
        None of a wrapped model, whose batches are its author's own."""
        return None

    def epochs(self) -> Epochs | None:
        """Returns the passes over the training data; None where these have no end."""
        return None

    def sources(self) -> Sequence[SourceSamples]:
        """Returns the sources of the training samples; none where these have no end."""
        return ()

    @abc.abstractmethod
    def feed(self, start: Position) -> Batches:
        """Returns the batches from a place in the training on."""

    @abc.abstractmethod
    def compile(self, batch: Any) -> CompiledTrainStep:
        """Compiles the train step for batches like this one."""

    def write_files(self, out: Path) -> None:
        """Writes what the output folder has besides run.json, metrics and checkpoints."""
        return None

    def fingerprint(self) -> dict[str, Any] | None:
        """Returns what the Run names but does not hold, as JSON, which a resume compares."""
        return None

    def abstract_batches(self, step: int) -> Sequence[Any]:
        """Returns a batch of each size that steps after `step` take, as far as sizes are known."""
        return ()

    def evaluator(self) -> Callable[[State], float] | None:
        """Compiles the loss on held-out data as a function of the state; None without such data."""
        return None

    def sample(self, state: State, out: Path) -> str:
        """Samples from the model where the run asks for it, and writes the text to `out`."""
        return ""


@dataclasses.dataclass(frozen=True)
class PreparedRun(Trainable):
    """A run on its devices with its tokenised text: everything there is before the first array."""

    corpus: Corpus
    train: tuple[Samples, ...]
    held_out: tuple[Samples, ...]
    order: MegatronOrder | None = None
    """Megatron's order of the samples, where the run asks for it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the text."""
        return self.corpus.tokenizer

    def stream(self) -> Any:
        """Returns the training samples by their global index: `stream[i]`."""
        run = self.device_run.run
        if self.order is not None:
            stream: Any = self.order.stream
        else:
            stream = build_stream(list(self.train), list(self.corpus.weights), run.training.seed)
        return leave_out_first(stream, run.data.first_sample)

    def sources(self) -> Sequence[SourceSamples]:
        """Returns the sources of the training samples that have a share of them."""
        run = self.device_run.run
        if self.order is None:
            samples = [len(part) for part in self.train]
        else:
            samples = [len(file.tokens) // run.training.seq for file in self.corpus.files]
        weights = self.corpus.weights
        total = sum(weights)
        names = [parse_source(path).path for path in run.data.paths]
        if len(names) != len(weights):
            names = [f"source {number}" for number in range(len(weights))]
        return [
            SourceSamples(name, count, weight / total)
            for name, count, weight in zip(names, samples, weights, strict=True)
            if weight
        ]

    def epochs(self) -> Epochs:
        """Returns the passes over the source that begins again first."""
        shortest = min(source.lasts for source in self.sources())
        return Epochs(ramp_of(self.device_run.run.training), max(shortest, 1))

    def feed(self, start: Position) -> Feed:
        """Returns the batches from a global sample on."""
        training = self.device_run.run.training
        return Feed(
            self.stream(),
            ramp_of(training),
            seq=training.seq,
            taken=start.step,
            cursor=start.cursor,
            steps=max(training.steps - start.step, 1),
            sharding=self.device_run.batch_sharding,
            skipped=start.skipped,
        )

    def compile(self, batch: Batch) -> CompiledTrainStep:
        """Compiles the train step for as many sequences as the batch has."""
        return CompiledTrainStep(self.device_run.with_batch(batch.inputs.shape[0]), batch)

    def write_files(self, out: Path) -> None:
        """Writes the tokenizer, unless it is there."""
        tokenizer, file = self.corpus.tokenizer.to_json(), out / "tokenizer.json"
        if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != tokenizer:
            write_atomically(file, tokenizer)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the text, and its held-out fraction."""
        if self.order is not None:
            return {**self.corpus.fingerprint, "order": self.order.fingerprint()}
        counts = [len(file.tokens) for file in self.corpus.files]
        held_out = held_out_fraction(counts, self.device_run.run.data.held_out)
        return {**self.corpus.fingerprint, "held_out": held_out}

    def abstract_batches(self, step: int) -> Sequence[Any]:
        """Returns a batch of each size of the ramp that is ahead."""
        training = self.device_run.run.training
        sizes = ramp_of(training).sizes_of(step, training.steps)
        return [self.device_run.with_batch(size).abstract_batch for size in sizes]

    def evaluator(self) -> Callable[[State], float] | None:
        """Compiles the mean loss per token on held-out text as a function of the state."""
        if not self.held_out:
            return None
        eval_step = compile_eval_step(
            self.device_run, shard_bytes(self.device_run.abstract.optimizer)
        )

        def held_out_loss(state: State) -> float:
            total, count = sum_metrics(self.device_run, state.params, self.held_out, eval_step)[
                "loss"
            ]
            return total / max(count, 1.0)

        return held_out_loss

    def sample(self, state: State, out: Path) -> str:
        """Samples text where the run asks for it or the model is small."""
        data, count = self.device_run.run.data, self.device_run.run.data.sample
        if count is None and (
            data.sample_every or count_params(self.device_run.layout.params) <= _SMALL_MODEL
        ):
            count = _SAMPLE
        if not count:
            return ""
        if _cannot_decode(self.device_run):  # `check_sample` refuses what was asked for
            with activity("note", "looking for what it decodes with", "looked") as work:
                work.result = "no sample: its layers have no attention to decode with"
            return ""
        with waiting("the devices"):
            step = int(jax.device_get(state.step))
        return write_sample(self.device_run, self.corpus.tokenizer, state.params, count, out, step)


def sum_metrics(
    device_run: DeviceRun,
    params: Any,
    parts: tuple[Samples, ...],
    eval_step: Callable[[Any, Batch], Metrics],
) -> dict[str, tuple[float, float]]:
    """Returns each metric summed over the tokens (or pairs) of held-out text, and their number."""
    training = device_run.run.training
    sums: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(2))
    batches = held_out_batches(
        list(parts),
        samples=training.eval_samples,
        batch=training.batch,
        sharding=device_run.batch_sharding,
    )

    def evaluate(batch: Batch) -> Metrics:
        with waiting("the devices"):
            return eval_step(params, batch)

    results = map(evaluate, batches)
    # One batch is computed while the next is read; no more are in memory at once.
    for metrics, _ in itertools.pairwise(itertools.chain(results, [{}])):
        with waiting("the devices"):
            on_host = jax.device_get(metrics)
        for name, pair in on_host.items():
            sums[name] += np.array([float(value) for value in pair])
    return {name: (float(total), float(count)) for name, (total, count) in sums.items()}


def check_sample(device_run: DeviceRun) -> None:
    """Raises ConfigError where the run asks for a sample that its model cannot give.

    Before it trains, not after.
    """
    data, without = device_run.run.data, _cannot_decode(device_run)
    if data.sample == 0 and data.sample_every:
        truth = "--data.sample 0 is no text at all"
        raise ConfigError(
            f"--data.sample-every {data.sample_every}", truth, f"--data.sample {_SAMPLE}"
        )
    asked = (
        f"--data.sample-every {data.sample_every}"
        if data.sample_every
        else f"--data.sample {data.sample}"
    )
    if without and (data.sample or data.sample_every):
        raise ConfigError(
            f"{asked} with layers of stack {without!r}",
            "they have no attention, and what they carry from token to token is not known",
            "--data.sample 0, and no --data.sample-every",
        )


def _cannot_decode(device_run: DeviceRun) -> str:
    """The first stack of layers that state nothing to decode with; "" where all do."""
    layers = device_run.layout.spec.layers
    return next((layer.stack for layer in layers if not layer.decodes), "")


Choose = Callable[[Run, Sequence[Any]], Run]
"""`(run, devices) -> run` with the choices filled in that it leaves to the machine (remat
policy)."""


def prepare_run(
    run: Run,
    *,
    cache: Path,
    devices: int | None = None,
    choose: Choose = lambda run, devices: run,
    output: Output | None = None,
    weights: str | None = None,
    progress: Progress | None = None,
) -> Trainable:
    """Tokenises the text, chooses the mesh if it is open, and places the run on devices.

    cache: folder of token files and compiled programs.  devices: use the first so many; None uses
    all.  choose: makes the choices that need the planner; without it a run that leaves the remat
    policy open recomputes whole layers.
    output: folder of a training; a run that is resumed there keeps its vocabulary where its text
    has changed.
    weights: source of weights that are evaluated, in the place of those the run starts from; "" for
    none.
    progress: shows the tokenisation.
    Raises ConfigError or DataError before anything is traced.
    """
    available = first_devices(devices)
    shape = run.mesh
    if shape is None:
        shape = run.model.default_mesh(len(available))
    check_run(run, shape, output, starts=weights is None)
    enable_compilation_cache(cache / "compiled")
    prepare_text = functools.partial(
        _prepare_text,
        cache=cache,
        choose=choose,
        output=output,
        weights=weights,
        progress=progress,
    )
    run = dataclasses.replace(run, mesh=shape)
    prepared: Trainable = run.model.prepare(run, available, prepare_text)
    return prepared


def _prepare_text(
    model: Model,
    run: Run,
    devices: list[jax.Device],
    *,
    cache: Path,
    choose: Choose,
    output: Output | None,
    weights: str | None,
    progress: Progress | None,
) -> PreparedRun:
    """Prepares a run that trains on text. run: with its mesh.

    The other arguments are those of `prepare_run`.
    """
    assert run.mesh is not None
    mesh = build_mesh(run.mesh, devices)
    own = None if output is None else output.tokenizer
    if own is not None and in_bucket(own):
        own = local_copy(path_of(own), cache)
    # What these devices cannot do is refused before the text is read too.
    known = run.model.vocab is not None
    first = _place(run, mesh, choose) if known else place_on_devices(with_stand_in_vocab(run), mesh)
    if run.data.sample or run.data.sample_every:
        check_sample(first)
    check = _check_of_tokens(run, weights, cache, own)
    parts: Sequence[tuple[Samples, Samples]] = ()
    order: MegatronOrder | None = None
    if run.finetune.objective == "text":
        corpus = load_corpus(
            run.data.paths,
            run.data.tokenizer,
            cache,
            own=own,
            bad_records=run.faults.bad_records,
            text_field=run.data.text_field,
            progress=progress,
            check=check,
        )
        if run.data.order == "megatron":
            order = _megatron_order(run, corpus)
        else:
            seq, held_out = run.training.seq, run.data.held_out
            sources = zip(corpus.files, run.data.paths, strict=True)
            parts = [split(file, seq, held_out, path) for file, path in sources]
    else:
        from meshwright.data.conversations import load_conversations

        corpus, parts = load_conversations(run.data, run.training.seq, run.finetune, cache, check)
    if run.data.sample != 0:
        check_prompt(run.data, corpus.tokenizer)
    vocab = run.model.vocab
    if vocab is not None and corpus.vocab > vocab:
        fix = f"--model.vocab {corpus.vocab}"
        if run.init_from is not None:  # weights have the embeddings that they have
            folder = run.init_from.removeprefix("hf:")
            fix = f"the tokenizer of the weights: --data.tokenizer {folder}/tokenizer.json"
        raise DataError(
            f"training a model of {vocab} tokens on {corpus.files[0].folder}",
            f"its tokenizer has {corpus.vocab} tokens, so tokens {vocab} to {corpus.vocab - 1} "
            "have no embedding",
            fix,
        )
    run = dataclasses.replace(
        run, model=dataclasses.replace(run.model, vocab=vocab or corpus.vocab)
    )
    device_run = first if known else _place(run, mesh, choose)
    if order is not None:
        return PreparedRun(device_run, corpus, order.parts, _held_out_of_split(run, corpus), order)
    return PreparedRun(
        device_run, corpus, tuple(p[0] for p in parts), tuple(p[1] for p in parts if len(p[1]))
    )


def _megatron_order(run: Run, corpus: Corpus) -> MegatronOrder:
    """Returns Megatron's order of a run's samples.

    Raises DataError where it has fewer than the run reads.
    """
    data, training = run.data, run.training
    read = ramp_of(training).read_before(training.steps)
    last = data.first_sample + read
    train_split, _, _ = parse_split(data.split)
    order = megatron_order(
        corpus.files,
        weights_of([parse_source(path) for path in data.paths]),
        train_split,
        seq=training.seq,
        seed=training.seed,
        samples=data.order_samples or last,
    )
    if len(order.stream) < last:
        raise DataError(
            f"--data.order-samples {data.order_samples}",
            f"the order has {len(order.stream):,} samples, and {training.steps:,} steps read "
            f"{read:,} "
            f"from sample {data.first_sample:,} on, up to {last:,}",
            f"--data.order-samples {last}",
        )
    return order


def _held_out_of_split(run: Run, corpus: Corpus) -> tuple[Samples, ...]:
    """Returns an epoch of each dataset's validation split, in Megatron's order.

    Nothing without such a split.
    """
    _, valid_split, _ = parse_split(run.data.split)
    if valid_split is None:
        return ()
    seq, seed = run.training.seq, run.training.seed
    return tuple(
        samples_of(file, valid_split, seq=seq, seed=seed, samples=None) for file in corpus.files
    )


def _check_of_tokens(run: Run, weights: str | None, cache: Path, own: Path | None) -> Check:
    """Returns the check of tokenizers against that of the weights.

    weights, own: as of `prepare_run`.
    """
    source = run.init_from if weights is None else weights
    if not source:
        return lambda tokenizer, name: None
    from meshwright.trainer.tokens_of_weights import (
        TokensOfWeights,
    )  # reads files of other programs

    accepted = weights is None and run.data.other_tokenizer
    return TokensOfWeights(source, cache, accepted, trains=weights is None, own=own)


def _place(run: Run, mesh: jax.sharding.Mesh, choose: Choose) -> DeviceRun:
    """Places a run on a mesh. Raises OutOfDeviceMemory where its devices cannot hold the state."""
    devices = list(mesh.devices.flat)
    device_run = place_on_devices(choose(run, devices), mesh)
    asked = f"training {run.name} on mesh {run.mesh}"
    check_state(
        device_run.abstract, devices, asked, "a smaller model, or more devices with fsdp over them"
    )
    return device_run
