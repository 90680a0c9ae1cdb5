"""Plants numeric faults in small runs, and says which are named: `python bench/faults.py [--clean RUNS] [--only TEXT ...]`.

A run of each family and mesh learns a text of its own for `WARM` steps. Every fault begins from the state there: it is
planted before step `WARM` + 1, and the run goes on for `AFTER` steps or until its first alarm. Faults of the program
(scale, mask, epsilon) go on with another compiled step. The rows of the part `apart` were not looked at while the rules
of `trainer/first_tensor.py` were chosen; those of `later` were planted afterwards.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import contextlib
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.comm.collectives import axis_index
from meshwright.config import Faults, Optimizer
from meshwright.data.batch import Batch
from meshwright.models.decoder import DecoderModel
from meshwright.models.families.llama import Llama
from meshwright.sharding.params import named_leaves
from meshwright.step import gradients
from meshwright.step.health import HealthReader
from meshwright.step.train_step import CompiledTrainStep
from meshwright.trainer.first_tensor import Alarm, First, Watch, name_first
from meshwright.trainer.recovery import changed_fields
from meshwright.trainer.replicas import find_odd_replicas, shard_sums
from meshwright.words import AXES

WARM = 120
AFTER = 15
VOCAB = 50
STEPS = 500


class Place(NamedTuple):
    """Family and mesh of a run."""

    family: str
    mesh: str
    changes: tuple[tuple[str, Any], ...] = ()


TENSOR = Place("llama", "fsdp=2,tensor=2")
EXPERTS = Place("mixtral", "fsdp=2,expert=2")
REPLICAS = Place("qwen-like", "data=4")
STAGES = Place("gpt2", "stage=2,fsdp=2", (("microbatches", 2),))
PLACES = {"tensor": TENSOR, "experts": EXPERTS, "replicas": REPLICAS, "stages": STAGES}


def text(seed: int, run: Any) -> Batch:
    """Returns a batch of a language: the next token follows from the last, with some noise."""
    rng = np.random.default_rng(seed)
    shape = (run.training.batch, run.training.seq)
    ids = np.empty((shape[0], shape[1] + 1), np.int32)
    ids[:, 0] = rng.integers(0, VOCAB, shape[0])
    for t in range(shape[1]):
        noise = rng.random(shape[0]) < 0.1
        ids[:, t + 1] = np.where(
            noise, rng.integers(0, VOCAB, shape[0]), (7 * ids[:, t] + 3) % VOCAB
        )
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    ones = np.ones(shape, np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], ones, positions, ones.astype(np.float32))


class Runner:
    """A small run that has warmed up, from whose state faults begin."""

    def __init__(self, place: Place, seed: int = 0, **changes: Any):
        self.place = place
        options: dict[str, Any] = {
            "dropout": 0.0,
            "steps": STEPS,
            "batch": 16,
            "seq": 16,
            "attention_kernel": "blocked",
            "optimizer": Optimizer(learning_rate=5e-3, warmup_steps=10),
        }
        options |= dict(place.changes) | changes
        model = options.pop("model", MODELS[place.family])
        run = tiny_run(model, place.mesh, **options)
        self.run = dataclasses.replace(run, faults=Faults(check_bits=True))
        self.device_run = device_run_of(self.run)
        self.seed = seed
        self.step = CompiledTrainStep(self.device_run, self.batch(0))
        self.reader = HealthReader(self.device_run)

    def batch(self, number: int) -> Batch:
        """Returns the batch of a step, on the devices."""
        return self.placed(text(1000 * self.seed + number, self.run))

    def placed(self, batch: Batch) -> Batch:
        """Returns a batch on the devices."""
        placed: Batch = jax.device_put(batch, self.device_run.batch_sharding)
        return placed

    def advance(
        self, state: Any, batch: Batch, number: int, watch: Watch
    ) -> tuple[Any, Alarm | None]:
        """Takes a step and looks at it."""
        state, metrics = self.step(state, batch)
        on_host = jax.device_get(metrics)
        record = self.reader.read(on_host.pop("health"))
        loss = float(on_host["loss"][0] / on_host["loss"][1])
        norm = float(on_host["gradient norm"][0])
        finite = bool(np.isfinite(loss) and np.isfinite(norm))
        return state, watch.look(number, loss, norm, record, finite)

    def warm(self) -> None:
        """Takes the first steps, without an alarm."""
        watch = Watch()
        state = self.device_run.initial_state()
        for number in range(1, WARM + 1):
            state, alarm = self.advance(state, self.batch(number), number, watch)
            assert alarm is None, alarm
        print(f"{self.place.family} {self.place.mesh}: warm", flush=True)
        self.kept = jax.device_get(state)
        self.watch = watch

    def start(self) -> tuple[Any, Watch]:
        """Returns a copy of the state after the warm-up, and of the history."""
        shardings = self.device_run.abstract.shardings
        state = jax.tree.map(
            lambda x, s: jax.device_put(np.array(x), s, may_alias=False), self.kept, shardings
        )
        return state, copy.deepcopy(self.watch)


class Fault(NamedTuple):
    """A fault, and what has to be named."""

    name: str
    place: str
    expected: tuple[str, ...]
    """Words of which one has to be in what is said."""
    state: Callable[[Any], Any] | None = None
    batch: Callable[[Runner, int], Batch] | None = None
    program: dict[str, Any] | None = None
    code: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """Changes the code while the step is compiled."""
    device: int | None = None
    """The device that has to be named."""
    part: str = "tuned"
    """Rows on which the rules were chosen ("tuned"), which were not looked at then ("apart"), and planted afterwards."""


def changed(
    path: str, function: Callable[[np.ndarray], np.ndarray], where: str = "params"
) -> Callable[[Any], Any]:
    """Returns a function that changes one array of a state."""

    def change(state: Any) -> Any:
        trees = {"params": state.params, "optimizer": state.optimizer}
        names = named_leaves(trees[where])
        chosen = next(name for name in names if name.endswith(path))
        target = names[chosen]
        new = jax.device_put(function(np.array(target)), target.sharding)
        tree = jax.tree.map(lambda x: new if x is target else x, trees[where])
        return dataclasses.replace(state, **{where: tree})

    return change


def flipped(path: str, layer: int, bit: int, where: str = "params") -> Callable[[Any], Any]:
    """Returns a function that flips a bit of an element of a layer of an array."""

    def flip(x: np.ndarray) -> np.ndarray:
        x = np.array(x, np.float32)
        row = x[layer] if x.ndim > 1 and path not in ("embed", "unembed") else x
        flat = row.reshape(-1)
        index = int(np.argmax(np.abs(flat))) if bit < 23 else flat.size // 3
        bits = flat[index : index + 1].view(np.uint32)
        bits ^= np.uint32(1 << bit)
        return x

    return changed(path, flip, where)


def one_replica(path: str, device: int) -> Callable[[Any], Any]:
    """Returns a function that changes an element of one device's copy of a replicated parameter."""

    def change(state: Any) -> Any:
        names = named_leaves(state.params)
        target = names[path]
        shards = []
        for i, shard in enumerate(target.addressable_shards):
            data = np.array(shard.data)
            if i == device:
                data.reshape(-1)[5] += 0.5
            shards.append(jax.device_put(data, shard.device))
        new = jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)
        return dataclasses.replace(
            state, params=jax.tree.map(lambda x: new if x is target else x, state.params)
        )

    return change


def scaled(path: str, factor: float, where: str = "params") -> Callable[[Any], Any]:
    """Returns a function that multiplies an array."""
    return changed(path, lambda x: (x * factor).astype(x.dtype), where)


def spoilt(path: str, value: float) -> Callable[[Any], Any]:
    """Returns a function that replaces an element of a parameter."""

    def spoil(x: np.ndarray) -> np.ndarray:
        x = np.array(x)
        x.reshape(-1)[7] = value
        return x

    return changed(path, spoil)


def layer_zeroed(path: str, layer: int) -> Callable[[Any], Any]:
    """Returns a function that zeroes a layer of a parameter."""

    def zero(x: np.ndarray) -> np.ndarray:
        x = np.array(x)
        x[layer] = 0
        return x

    return changed(path, zero)


def repeated(runner: Runner, number: int) -> Batch:
    """Returns the batch of some steps before."""
    return runner.batch(WARM - 5 + number % 3)


def stuck(runner: Runner, number: int) -> Batch:
    """Returns a batch whose last quarter is that of one step: a host's data do not move."""
    fresh, old = text(number, runner.run), text(WARM, runner.run)
    rows = 3 * runner.run.training.batch // 4
    return runner.placed(
        jax.tree.map(lambda a, b: np.concatenate([a[:rows], b[rows:]]), fresh, old)
    )


def corrupt(runner: Runner, number: int) -> Batch:
    """Returns tokens drawn at random."""
    batch = text(number, runner.run)
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCAB, batch.inputs.shape, np.int32)
    return runner.placed(dataclasses.replace(batch, inputs=ids, targets=np.roll(ids, -1, 1)))


def wrong_labels(runner: Runner, number: int) -> Batch:
    """Returns a batch with the labels of other positions."""
    batch = text(number, runner.run)
    return runner.placed(dataclasses.replace(batch, targets=np.roll(batch.targets, 3, 1)))


def another_tokenizer(runner: Runner, number: int) -> Batch:
    """Returns the text in other ids."""
    batch = text(number, runner.run)
    ids = np.random.default_rng(1).permutation(VOCAB).astype(np.int32)
    return runner.placed(
        dataclasses.replace(batch, inputs=ids[batch.inputs], targets=ids[batch.targets])
    )


def corrupt_sample(runner: Runner, number: int) -> Batch:
    """Returns a batch with a weight that is not a number in one sequence."""
    batch = text(number, runner.run)
    weights = np.array(batch.weights)
    weights[5] = np.nan
    return runner.placed(dataclasses.replace(batch, weights=weights))


def unshuffled(runner: Runner, number: int) -> Batch:
    """Returns a batch of one kind of text: every sequence begins with the same token, without noise."""
    batch = text(number, runner.run)
    ids = np.empty((*batch.inputs.shape[:1], batch.inputs.shape[1] + 1), np.int32)
    ids[:, 0] = number % VOCAB
    for t in range(batch.inputs.shape[1]):
        ids[:, t + 1] = (7 * ids[:, t] + 3) % VOCAB
    return runner.placed(dataclasses.replace(batch, inputs=ids[:, :-1], targets=ids[:, 1:]))


def rounded(path: str) -> Callable[[Any], Any]:
    """Returns a function that rounds a parameter to bfloat16, as a save in the wrong dtype does."""
    return changed(path, lambda x: x.astype(ml_dtypes.bfloat16).astype(x.dtype))


@contextlib.contextmanager
def flipped_gradient(name: str, row: int, bit: int) -> Iterator[None]:
    """Flips a bit of one element of a stacked parameter's gradient on the first device, after the sum over devices."""
    reduce = gradients._reduce

    def flip(device_run: Any, grads: Any) -> Any:
        summed = reduce(device_run, grads)
        g = summed["blocks"][name]
        flat = g.reshape(g.shape[0], -1)
        bits = jax.lax.bitcast_convert_type(flat[row, flat.shape[1] // 3], jnp.uint32)
        wrong = jax.lax.bitcast_convert_type(bits ^ jnp.uint32(1 << bit), jnp.float32)
        wrong = jnp.where(axis_index(tuple(AXES)) == 0, wrong, flat[row, flat.shape[1] // 3])
        new = flat.at[row, flat.shape[1] // 3].set(wrong).reshape(g.shape)
        return {**summed, "blocks": {**summed["blocks"], name: new}}

    with mock.patch.object(gradients, "_reduce", flip):
        yield


@contextlib.contextmanager
def untied() -> Iterator[None]:
    """Keeps the gradient of the unembedding from a table that is the embedding too."""
    unembed = DecoderModel.unembed

    def without_gradient(self: Any, params: Any, *others: Any) -> Any:
        table = jax.tree.map(jax.lax.stop_gradient, params["embed"])
        return unembed(self, {**params, "embed": table}, *others)

    with mock.patch.object(DecoderModel, "unembed", without_gradient):
        yield


@contextlib.contextmanager
def larger_queries(factor: float) -> Iterator[None]:
    """Multiplies the attention logits of all layers."""
    attention = Llama.attention

    def multiplied(self: Any, **changes: Any) -> Any:
        return attention(self, **{"query_factor": factor, **changes})

    with mock.patch.object(Llama, "attention", multiplied):
        yield


def llama(**fields: Any) -> dict[str, Any]:
    return {"model": dataclasses.replace(MODELS["llama"], **fields)}


FAULTS = [
    Fault(
        "a bit of a weight, exponent", "tensor", ("layer 1, query",), flipped("blocks.query", 1, 30)
    ),
    Fault(
        "a bit of a weight, exponent", "tensor", ("layer 0, down",), flipped("blocks.down", 0, 29)
    ),
    Fault(
        "a bit of a weight, mantissa", "tensor", ("layer 1, value",), flipped("blocks.value", 1, 22)
    ),
    Fault("a bit of a weight, sign of many", "tensor", ("embed",), scaled("embed", 1.01)),
    Fault(
        "a bit of a norm",
        "tensor",
        ("layer 1, attention_norm",),
        flipped("blocks.attention_norm", 1, 29),
    ),
    Fault("a weight that is not a number", "tensor", ("layer 0, up",), spoilt("blocks.up", np.nan)),
    Fault("an infinite weight", "stages", ("mlp_in", "layer", "up"), spoilt("blocks.up", np.inf)),
    Fault(
        "a bit of a weight on a stage",
        "stages",
        ("layer 1, query",),
        flipped("blocks.query", 1, 30),
    ),
    Fault(
        "a bit of an expert", "experts", ("layer 1, expert_up",), flipped("blocks.expert_up", 1, 30)
    ),
    Fault("a bit of a router", "experts", ("layer 0, router",), flipped("blocks.router", 0, 29)),
    Fault(
        "a bit of a second moment",
        "tensor",
        ("query",),
        flipped("nu.blocks.query", 1, 30, "optimizer"),
    ),
    Fault(
        "a bit of a first moment",
        "tensor",
        ("gate",),
        flipped("mu.blocks.gate", 0, 30, "optimizer"),
    ),
    Fault(
        "a bit of a first moment",
        "experts",
        ("expert_down",),
        flipped("mu.blocks.expert_down", 1, 30, "optimizer"),
    ),
    Fault(
        "a zeroed second moment",
        "tensor",
        ("nu.blocks.down",),
        changed("nu.blocks.down", np.zeros_like, "optimizer"),
    ),
    Fault(
        "a zeroed second moment",
        "stages",
        ("nu.blocks.value",),
        changed("nu.blocks.value", np.zeros_like, "optimizer"),
    ),
    Fault(
        "a zeroed first moment",
        "tensor",
        ("mu.embed",),
        changed("mu.embed", np.zeros_like, "optimizer"),
    ),
    Fault(
        "second moment a millionth",
        "replicas",
        ("nu.blocks.up",),
        scaled("nu.blocks.up", 1e-6, "optimizer"),
    ),
    Fault(
        "one replica of a weight",
        "replicas",
        ("query", "device 2"),
        one_replica("blocks.query", 2),
        device=2,
    ),
    Fault(
        "one replica of a norm",
        "replicas",
        ("final_norm", "device 1"),
        one_replica("final_norm", 1),
        device=1,
    ),
    Fault(
        "one replica of the embedding",
        "replicas",
        ("embed", "device 3"),
        one_replica("embed", 3),
        device=3,
    ),
    Fault("a dead router", "experts", ("layer 1, router",), layer_zeroed("blocks.router", 1)),
    Fault(
        "a zeroed layer",
        "tensor",
        ("layer 0, attention_out",),
        layer_zeroed("blocks.attention_out", 0),
    ),
    Fault("weights scaled", "tensor", ("layer 0, key",), scaled("blocks.key", 1.001)),
    Fault("weights scaled on stages", "stages", ("down", "out"), scaled("blocks.down", 2.0)),
    Fault("a repeated batch", "tensor", ("batch is that of step",), batch=repeated),
    Fault("a repeated batch", "stages", ("batch is that of step",), batch=repeated),
    Fault("a host's data stuck", "replicas", ("part 3 of 4",), batch=stuck),
    Fault("a host's data stuck", "experts", ("part 3 of 4",), batch=stuck),
    Fault("corrupt data", "tensor", ("loss",), batch=corrupt),
    Fault("corrupt data", "experts", ("loss",), batch=corrupt),
    Fault("wrong labels", "tensor", ("loss",), batch=wrong_labels),
    Fault("wrong labels", "replicas", ("loss",), batch=wrong_labels),
    Fault("another tokenizer", "stages", ("loss",), batch=another_tokenizer),
    Fault(
        "a weight of the loss that is not a number",
        "tensor",
        ("weights of the batch",),
        batch=corrupt_sample,
    ),
    Fault(
        "a weight of the loss that is not a number",
        "stages",
        ("weights of the batch",),
        batch=corrupt_sample,
    ),
    Fault("unshuffled data", "tensor", ("loss",), batch=unshuffled),
    Fault(
        "learning rate times 30",
        "tensor",
        ("update norm",),
        program={"optimizer": Optimizer(learning_rate=1.5e-1, warmup_steps=10)},
    ),
    Fault(
        "a norm's epsilon of 1",
        "tensor",
        ("layer 0", "residual", "loss"),
        program=llama(norm_epsilon=1.0),
    ),
    Fault("a changed rotary base", "tensor", ("layer", "loss"), program=llama(rope_theta=10.0)),
    Fault("a window in the mask", "tensor", ("layer", "loss"), program=llama(sliding_window=1)),
    # Planted after the rules were chosen.
    Fault(
        "a bit of a gradient, exponent",
        "tensor",
        ("gradient norm of layer 1, down",),
        code=lambda: flipped_gradient("down", 1, 30),
        part="later",
    ),
    Fault(
        "a bit of a gradient, exponent",
        "stages",
        ("gradient norm of layer 0, query",),
        code=lambda: flipped_gradient("query", 0, 30),
        part="later",
    ),
    Fault(
        "a bit of a gradient, low in the exponent",
        "experts",
        ("gradient norm of layer 1, expert_up",),
        code=lambda: flipped_gradient("expert_up", 1, 26),
        part="later",
    ),
    Fault("tied weights untied", "replicas", ("embed",), code=untied, part="later"),
    Fault(
        "attention logits times 8",
        "tensor",
        ("attention lse",),
        code=lambda: larger_queries(8),
        part="later",
    ),
    Fault(
        "attention logits times 100",
        "tensor",
        ("attention lse",),
        code=lambda: larger_queries(100),
        part="later",
    ),
    Fault("no z-loss", "tensor", ("loss", "unembed"), program={"z_loss": 0.0}, part="later"),
    Fault(
        "computed in bfloat16",
        "tensor",
        ("loss", "layer"),
        program={"compute_dtype": "bfloat16"},
        part="later",
    ),
    Fault(
        "a weight in bfloat16",
        "tensor",
        ("layer 0, query",),
        state=rounded("blocks.query"),
        part="later",
    ),
    # Apart from here on.
    Fault(
        "a bit of a weight, mantissa",
        "replicas",
        ("layer 0, gate",),
        flipped("blocks.gate", 0, 22),
        part="apart",
    ),
    Fault(
        "a bit of the unembedding", "tensor", ("unembed",), flipped("unembed", 0, 29), part="apart"
    ),
    Fault(
        "a bit of an expert's gate",
        "experts",
        ("layer 0, expert_gate",),
        flipped("blocks.expert_gate", 0, 28),
        part="apart",
    ),
    Fault(
        "a bit of a second moment",
        "experts",
        ("router",),
        flipped("nu.blocks.router", 0, 30, "optimizer"),
        part="apart",
    ),
    Fault(
        "one replica of a projection",
        "replicas",
        ("down", "device 0"),
        one_replica("blocks.down", 0),
        device=0,
        part="apart",
    ),
    Fault("another tokenizer", "experts", ("loss",), batch=another_tokenizer, part="apart"),
    Fault("corrupt data", "stages", ("loss",), batch=corrupt, part="apart"),
    Fault(
        "a weight of the loss that is not a number",
        "experts",
        ("weights of the batch",),
        batch=corrupt_sample,
        part="apart",
    ),
    Fault(
        "learning rate times 30",
        "replicas",
        ("update norm",),
        program={"optimizer": Optimizer(learning_rate=1.5e-1, warmup_steps=10)},
        part="apart",
    ),
    Fault(
        "queries scaled by the program",
        "tensor",
        ("layer", "attention", "loss"),
        program=llama(head_size=None, rope_theta=1e9),
        part="apart",
    ),
]


class Named(NamedTuple):
    """What came of a fault."""

    named: bool
    step: int | None
    said: str
    seconds: float
    resume: str = ""
    """What `--resume` prints of another program: a run has one for as long as it lives, so this
    fault begins with a start."""


def try_fault(runner: Runner, fault: Fault) -> Named:
    """Plants a fault and goes on to the first alarm."""
    began = time.perf_counter()
    state, watch = runner.start()
    resume = ""
    if fault.program is not None:
        before = runner.run
        runner = Runner(runner.place, runner.seed, **fault.program)
        resume = "; ".join(change.text for change in changed_fields(before, runner.run))
    if fault.code is not None:
        with fault.code():
            # Another object: what is worked out once for a model is worked out again.
            model = dataclasses.replace(runner.run.model)
            runner = Runner(runner.place, runner.seed, model=model)
    if fault.state is not None:
        state = fault.state(state)
    for number in range(WARM + 1, WARM + 1 + AFTER):
        batch = runner.batch(number)
        if fault.batch is not None:
            batch = fault.batch(runner, number)
        state, alarm = runner.advance(state, batch, number, watch)
        if alarm is not None:
            named = _named(runner, fault, alarm, state, batch, number, began)
            return named._replace(resume=resume)
    return Named(False, None, "nothing", time.perf_counter() - began, resume)


def _named(
    runner: Runner, fault: Fault, alarm: Alarm, state: Any, batch: Batch, number: int, began: float
) -> Named:
    suspects = [f"{suspect} is {suspect.what}" for suspect in alarm.suspects[:1]]
    first: First | None = None
    if not alarm.finite:
        first = name_first(runner.device_run, state, batch, alarm, None)
    odd = find_odd_replicas(state.params, shard_sums(state.params))
    said = "; ".join([alarm.reason, *suspects])
    if first is not None:
        said += f"; {first.tensor}: {first.what} in sequences {first.sequences} {first.device}"
    if odd is not None:
        said += f"; {odd.names[0]} of device {', '.join(str(d.id) for d in odd.devices)}"
    found = any(word in said for word in fault.expected)
    if fault.device is not None:
        found = f"device {fault.device}" in said
    close = number <= WARM + 2
    return Named(found and close, number, said, time.perf_counter() - began)


def clean_runs(runs: int, steps: int) -> list[str]:
    """Returns the alarms of runs without a fault."""
    found = []
    runners = [Runner(place) for place in PLACES.values()]
    for seed in range(1, runs + 1):
        runner = runners[seed % len(runners)]
        runner.seed = seed
        state = runner.device_run.initial_state()
        watch = Watch()
        for number in range(1, steps + 1):
            state, alarm = runner.advance(state, runner.batch(number), number, watch)
            if alarm is not None:
                found.append(f"seed {seed} {runner.place.family}: step {number}: {alarm.reason}")
                print(found[-1], flush=True)
        print(f"clean run {seed} of {runs} is over, {len(found)} alarms so far", flush=True)
    return found


def main() -> None:
    """Prints a line for each fault, and the sums."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT")
    parser.add_argument("--place", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.clean:
        alarms = clean_runs(given.clean, given.steps)
        print(f"{len(alarms)} alarms in {given.clean} clean runs of {given.steps} steps")
        return
    rows = []
    for name, place in PLACES.items():
        chosen = [f for f in FAULTS if f.place == name and any(t in f.name for t in given.only)]
        if not chosen or (given.place and given.place != name):
            continue
        runner = Runner(place)
        runner.warm()
        for fault in chosen:
            try:
                result = try_fault(runner, fault)
            except Exception as error:
                result = Named(False, None, f"{type(error).__name__}: {error}"[:200], 0.0)
            mark = "named" if result.named else "MISSED"
            print(
                f"{mark:6} {place.family} {place.mesh} | {fault.name} ({fault.part}) | step "
                f"{result.step} | {result.seconds:.1f} s | {result.said[:220]}"
                + (f" | --resume: {result.resume}" if result.resume else ""),
                flush=True,
            )
            rows.append(
                {"fault": fault.name, "place": name, "part": fault.part, **result._asdict()}
            )
    for part in ("tuned", "apart", "later"):
        results = [row for row in rows if row["part"] == part]
        named = sum(row["named"] for row in results)
        either = sum(row["named"] or bool(row["resume"]) for row in results)
        print(f"{part}: {named} of {len(results)} named, {either} with what a resume prints")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
