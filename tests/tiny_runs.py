"""Runs small enough to compile in seconds, wide enough to be split eight ways, and what one device makes of them."""

import dataclasses
import fcntl
import functools
import hashlib
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import meshwright
from meshwright.config import Data, MeshShape, Optimizer, Training
from meshwright.data.batch import Batch
from meshwright.hardware.mesh import build_mesh
from meshwright.models.blocks.yarn import LatentYarn
from meshwright.models.families.deepseek import Deepseek
from meshwright.models.families.deepseek_sparse import DeepseekSparse
from meshwright.models.families.gpt2 import Gpt2
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.families.qwen3_next import Qwen3Next
from meshwright.models.model import Model
from meshwright.runs.run import Run
from meshwright.sharding.params import Param, rows_to_layers, trained_only, tree_map
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.eval_step import build_eval_step
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep

VOCAB = 50

MODELS: dict[str, Model] = {
    "gpt2": Gpt2(VOCAB, 64, 2, 16, vocab_multiple=16, positions=32),
    "llama": Llama(VOCAB, 64, 2, 16, vocab_multiple=16, kv_heads=8, mlp=96),
    "qwen-like": Llama(
        VOCAB, 64, 2, 16, vocab_multiple=16, kv_heads=8, mlp=96, qkv_bias="learned", qk_norm="rms",
        embedding="tied", sliding_window=5, head_size=8,
    ),
    "mixtral": Mixtral(
        VOCAB, 64, 2, 16, vocab_multiple=16, kv_heads=8, experts=8, experts_per_token=2, expert_mlp=32,
    ),
    "deepseek-like": Mixtral(
        VOCAB, 64, 3, 16, vocab_multiple=16, kv_heads=8, mlp=96, experts=8, experts_per_token=3, expert_mlp=16,
        shared_experts=2, dense_layers=1, router_score="sigmoid", routed_scaling=2.5, expert_groups=4, topk_groups=2,
        bias_update_rate=0.01, embedding="tied",
    ),
}  # fmt: skip

DEEPSEEK = Deepseek(
    VOCAB, 64, 3, 16, vocab_multiple=16, mlp=96, experts=8, experts_per_token=3, expert_mlp=16, shared_experts=1,
    dense_layers=1, router_score="sigmoid", routed_scaling=2.5, expert_groups=4, topk_groups=2, bias_update_rate=0.01,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    yarn=LatentYarn(factor=4.0, original_max_position_embeddings=8, mscale_all_dim=0.7),
)  # fmt: skip
"""Latent attention in the layers of DeepSeek-V3."""

DEEPSEEK_SPARSE = DeepseekSparse(
    **{field.name: getattr(DEEPSEEK, field.name) for field in dataclasses.fields(DEEPSEEK)},
    index_n_heads=8, index_head_dim=8, index_topk=5,
)  # fmt: skip
"""The same layers with an indexer (DeepSeek-V3.2)."""

QWEN3_NEXT = Qwen3Next(
    VOCAB, 64, 4, 16, vocab_multiple=16, kv_heads=8, head_size=8, experts=4, experts_per_token=2, expert_mlp=32,
    shared_mlp=48, full_attention_interval=2, linear_heads=4, linear_value_heads=8, linear_key_size=8,
    linear_value_size=8, rotary_fraction=0.5,
)  # fmt: skip
"""Linear and full attention by turns."""

DENSE = ("gpt2", "llama", "qwen-like")

TRAINING = Training(
    steps=20,
    batch=16,
    seq=16,
    compute_dtype="float32",
    dropout=0.1,
    z_loss=1e-3,
    remat="full",
    eval_samples=32,
    # A seventh of what compiling a tiny step takes. Tests of health, and pairs of features, have it.
    health=False,
)


def tiny_run(model: Model, mesh: str = "data=1", **changes: Any) -> Run:
    """A run of `model`; keyword arguments that are fields of Training change it, others change the Run."""
    in_training = {f.name for f in dataclasses.fields(Training)}
    training = dataclasses.replace(
        TRAINING, **{k: v for k, v in changes.items() if k in in_training}
    )
    rest: dict[str, Any] = {
        "optimizer": Optimizer(learning_rate=3e-3, warmup_steps=2),
        "data": Data(sample=8),
    }
    rest |= {k: v for k, v in changes.items() if k not in in_training}
    return Run(model=model, mesh=MeshShape.parse(mesh), fsdp_min_size=64, training=training, **rest)


def device_run_of(run: Run) -> DeviceRun:
    """The run on the first simulated devices."""
    assert run.mesh is not None
    return place_on_devices(run, build_mesh(run.mesh))


def random_batch(device_run: DeviceRun, seed: int = 0) -> Batch:
    """Random tokens in up to three documents per sequence, some of them without weight."""
    training = device_run.run.training
    rng, shape = np.random.default_rng(seed), (training.batch, training.seq)
    frequency = 1 / np.arange(1, VOCAB + 1)  # Zipf's law: something to learn
    tokens = rng.choice(VOCAB, (shape[0], shape[1] + 1), p=frequency / frequency.sum()).astype(
        np.int32
    )
    segments = np.sort(rng.integers(0, 3, shape).astype(np.int32), axis=1)
    starts = np.stack([np.searchsorted(row, row) for row in segments])
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        segments,
        (np.arange(shape[1]) - starts).astype(np.int32),
        rng.integers(0, 3, shape).astype(np.float32) / 2,
    )
    return jax.device_put(batch, device_run.batch_sharding)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Results of a few steps. Trees have one row per layer, in order, wherever the mesh puts the layers."""

    initial: Any
    gradients: Any
    """Clipped gradients of the first step; None for optimizers other than AdamW."""
    losses: list[float]
    params: Any
    evaluate: Callable[[], float]
    """Computes the loss of the evaluation step on one more batch."""


def by_layers(device_run: DeviceRun, tree: Any) -> Any:
    """Copies a tree of the parameters' shape to the host, one row per layer in order; gradients lack the frozen ones."""
    return tree_map(
        lambda p, x: None if x is None else rows_to_layers(p, x),
        device_run.layout.params,
        jax.device_get(tree),
    )


def place_params(device_run: DeviceRun, params: Any) -> Any:
    """Inverts `by_layers`: puts host arrays with one row per layer on the devices, zeros in padding rows."""

    def rows(p: Param, x: np.ndarray) -> np.ndarray:
        if p.order is None:
            return x
        return np.stack([x[layer] if layer >= 0 else np.zeros_like(x[0]) for layer in p.order])

    return jax.device_put(
        tree_map(rows, device_run.layout.params, params), device_run.abstract.shardings.params
    )


def state_of(device_run: DeviceRun, params: Any) -> State:
    """The state before the first step with the given parameters (one row per layer): no initialiser is compiled."""
    where = device_run.abstract.shardings
    on_devices = place_params(device_run, params)
    trained = trained_only(device_run.layout.params, on_devices)
    optimizer = jax.jit(device_run.optimizer.init, out_shardings=where.optimizer)(trained)
    step, healthy = jax.device_put(
        (np.zeros((), np.int32), np.ones((), np.bool_)), (where.step, where.healthy)
    )
    return State(step, healthy, on_devices, optimizer)


def evaluate(device_run: DeviceRun, params: Any, number: int) -> float:
    """Loss of the evaluation step on batch `number`."""
    total, weight = build_eval_step(device_run)(params, random_batch(device_run, number))["loss"]
    return float(total / weight)


def train(run: Run, steps: int, *, initial: Any = None) -> Trained:
    """Takes `steps` steps on random batches. initial: parameters to start from, one row per layer."""
    device_run = device_run_of(run)
    state = device_run.initial_state() if initial is None else state_of(device_run, initial)
    first = by_layers(device_run, state.params)
    step, losses, gradients = CompiledTrainStep(device_run, random_batch(device_run)), [], None
    for number in range(steps):
        state, metrics = step(state, random_batch(device_run, number))
        if number == 0 and run.optimizer.name == "adamw":
            # Adam's first moment after one step is (1 - beta1) times the gradient: no second program to compile.
            adam = getattr(state.optimizer, "inner", state.optimizer)[0]
            moments = by_layers(device_run, adam.mu)
            gradients = jax.tree.map(lambda mu: mu / (1 - run.optimizer.beta1), moments)
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    return Trained(
        first,
        gradients,
        losses,
        by_layers(device_run, state.params),
        lambda: evaluate(device_run, state.params, steps),
    )


def on_one_device(run: Run) -> Run:
    """The same model, data and optimizer on one device, without anything that may not change the numbers."""
    training = dataclasses.replace(
        run.training, microbatches=1, remat="full", unroll=1, pipeline_schedule="1f1b", context_strategy="ring",
        attention_kernel="auto",
    )  # fmt: skip
    return dataclasses.replace(run, mesh=MeshShape(), layout="fsdp", training=training)


def train_on_one_device(run: Run, steps: int) -> Trained:
    """Trains `run` on one device, once for all tests, workers and sessions of the same sources (see `keep`)."""
    alone = on_one_device(run)

    def trained() -> tuple[Any, ...]:
        found = train(alone, steps)
        return found.initial, found.gradients, found.losses, found.params

    def evaluated() -> float:
        device_run = device_run_of(alone)
        return evaluate(device_run, place_params(device_run, params), steps)

    initial, gradients, losses, params = keep(("train", repr(alone), steps), trained)
    return Trained(
        initial,
        gradients,
        losses,
        params,
        lambda: keep(("evaluate", repr(alone), steps), evaluated),
    )


def assert_same_steps(many: Trained, one: Trained) -> None:
    """The contract of every mesh: losses within 1e-5, gradients within 1e-5 of the largest."""
    np.testing.assert_allclose(many.losses, one.losses[: len(many.losses)], rtol=1e-5)
    assert largest_difference(many.gradients, one.gradients) < 1e-5


def assert_same_initial(many: Trained, one: Trained) -> None:
    """Initial values are bitwise those of one device."""
    for a, b in zip(jax.tree.leaves(many.initial), jax.tree.leaves(one.initial), strict=True):
        np.testing.assert_array_equal(a, b)


def largest_difference(a: Any, b: Any) -> float:
    """Largest difference of any element of two trees, over the largest element of the second."""
    apart = max(
        float(np.abs(x - y).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    return apart / max(float(np.abs(y).max()) for y in jax.tree.leaves(b))


REFERENCES = Path(__file__).parents[1] / ".pytest_cache" / "references"
"""Results of one device, in a folder per state of the sources."""
DAY = 24 * 3600


@functools.cache
def sources_digest() -> str:
    """Hash of everything that may change a number: the package, this file, and the versions of JAX and its compiler."""
    digest = hashlib.sha256(
        f"{jax.__version__} {jaxlib.__version__} {os.environ.get('XLA_FLAGS')}".encode()
    )
    for path in (Path(__file__), *sorted((Path(meshwright.__file__).parent).rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def keep(key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """Returns `compute()`, from disk where a test of the same sources has computed it; one process at a time does."""
    folder = REFERENCES / sources_digest()
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for other in REFERENCES.iterdir():
            if time.time() - other.stat().st_mtime > DAY:
                shutil.rmtree(other, ignore_errors=True)
    file = folder / hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            found = compute()
            part = file.with_suffix(".part")
            part.write_bytes(pickle.dumps(found))
            part.replace(file)
            return found
    return pickle.loads(file.read_bytes())
