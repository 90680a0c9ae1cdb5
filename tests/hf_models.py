"""Hugging Face folders of the golden files, and what Meshwright makes of them.

`transformers` and `torch` are not needed: `golden/peers` wrote down what they make of the same folders.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from meshwright.comm.collectives import all_gather
from meshwright.config import MeshShape, Optimizer, Training
from meshwright.data.batch import Batch
from meshwright.generation.decoder import Bucket, Decoder
from meshwright.generation.sampling import Sampling
from meshwright.generation.weights import lay_out
from meshwright.hardware.mesh import build_mesh
from meshwright.hugging_face.folder import load_params, open_folder
from meshwright.hugging_face.names import write_block
from meshwright.models.blocks.layers import no_dropout
from meshwright.models.kernels.attention import cap
from meshwright.runs.recipe import run_of_hugging_face
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import named_leaves, rows_to_layers, trained_only, tree_map
from meshwright.step.device_run import DeviceRun, param_specs, place_on_devices
from meshwright.step.pipeline import PipelineModel
from meshwright.step.state import BATCH_SPEC, State
from meshwright.step.train_step import CompiledTrainStep

PEERS = Path(__file__).parent / "golden" / "peers"
sys.path.insert(0, str(PEERS))
from drawn import (
    BATCH,
    BETAS,
    DECAY,
    EPSILON,
    GREEDY,
    LEARNING_RATE,
    PROMPT,
    SEQ,
    STEPS,
    TOKENS,
    VOCAB,
    draw_tensors,
    gap,
    names_under,
    read,
)
from drawn import PROMPTS as PROMPTS
from drawn import split_fused as split_fused

ROWS = (
    "llama", "llama-3.1", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "gpt2", "olmo-2", "gpt-oss", "llama-4",
    "llama-4-scout", "gemma-2", "olmo-3", "gemma-3", "deepseek-v3", "deepseek-v2-lite", "qwen3-next",
    "phi-4", "smollm3", "glm-4.5", "qwen3.5", "qwen3.5-moe",
    "gemma-4", "gemma-4-dense", "granite", "granite-moe", "granite-4", "granite-4-moe", "nemotron-h", "nemotron-3-super",
    "arcee", "cohere", "cohere2", "hunyuan", "ministral-3", "mistral-4",
    "qwen2-moe", "olmoe", "glm-4.7-flash", "seed-oss", "minimax-m2", "dots1", "deepseek-v3.2", "glm-5",
    "kimi-linear",
)  # fmt: skip
"""Architectures, each with a golden file."""

LARGER = (
    "gemma-3-larger", "llama-4-larger", "mistral-3-larger", "kimi-k2.5-larger", "qwen3-vl-larger",
    "gemma-4-larger", "gemma-4-unified-larger", "ministral-3-larger",
    "qwen3.5-larger", "qwen3.5-moe-larger", "qwen3-vl-moe-larger",
)  # fmt: skip
"""Larger models, whose text model is computed, each with a golden file."""

WRITTEN_SPLIT = ("phi-4",)
"""Rows whose model is written as another architecture, with the same values in tensors that are not fused."""
WRITTEN_UNDER = {"kimi-linear": (r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj")}
"""Rows that are written as the published files have them: pattern of names in the files of `transformers` -> the name."""

EIGHT_DEVICES = "fsdp=2,tensor=2,data=2"
# Stages of Gemma 3 are of unequal length and begin with a period; four devices of `tensor` have two key/value heads.
MESHES = {
    "cohere": "stage=2,fsdp=2,tensor=2", "cohere2": "fsdp=2,context=2,tensor=2",
    "gemma-2": "fsdp=2,context=2,tensor=2", "gemma-3": "stage=2,fsdp=2,tensor=2",
    "gemma-4": "expert=2,context=2,tensor=2", "gemma-4-dense": "stage=2,context=2,tensor=2",
    "granite-4-moe": "fsdp=2,expert=2,tensor=2", "nemotron-h": "fsdp=2,expert=2,tensor=2",
    "nemotron-3-super": "fsdp=2,expert=2,tensor=2",
    "gpt-oss": "expert=2,context=2,tensor=2", "llama-4": "stage=2,expert=2,tensor=2",
    "llama-4-scout": "expert=2,context=2,tensor=2", "olmo-2": "tensor=4,fsdp=2", "olmo-3": "stage=2,fsdp=2,tensor=2",
    "kimi-linear": "expert=2,context=2,tensor=2",
    "qwen2": "tensor=4,data=2", "qwen3-next": "stage=2,expert=2,tensor=2",
    "qwen3.5": "stage=2,fsdp=2,tensor=2", "qwen3.5-moe": "fsdp=2,expert=2,tensor=2",
}  # fmt: skip
"""Mesh of a row's gradients, where it is not EIGHT_DEVICES."""


def decode_mesh_of(folder: Path) -> str:
    """Returns the mesh of a row's greedy text: layers with a state or an indexer go without `context`."""
    spec = run_of_hugging_face(f"hf:{folder}").model.spec()
    if spec.recurrences or any(attention.indexer for attention in spec.attention):
        return "data=2,fsdp=2,tensor=2"
    return "fsdp=2,context=2,tensor=2"


def write_folder(row: str, folder: Path, files: int = 1) -> dict[str, Any]:
    """Writes the Hugging Face folder of a golden file; returns what describes it. files: over how many."""
    about, _ = read(row)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about["config"]))
    write_tensors(folder, draw_tensors(about["tensors"]), files)
    return about


def write_tensors(folder: Path, tensors: dict[str, np.ndarray], files: int = 1) -> None:
    """Writes tensors as a Hugging Face folder has them: in one file, or in several and an index of them."""
    names = list(tensors)
    for number in range(files):
        file = (
            "model.safetensors"
            if files == 1
            else f"model-{number + 1:05}-of-{files:05}.safetensors"
        )
        save_file({n: tensors[n] for n in names[number::files]}, folder / file, {"format": "pt"})
    if files > 1:
        where = {
            n: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, n in enumerate(names)
        }
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_near(
    prefix: str, found: dict[str, np.ndarray], golden: dict[str, np.ndarray], tolerance: float
) -> None:
    """Every array under `prefix` of a golden file is the one found, within a tolerance of its largest element."""
    names = names_under(prefix, golden)
    assert names
    for name in names:
        assert gap(f"{prefix}/{name}", found[name], golden) < tolerance, name


def run_of(folder: Path, mesh: str) -> Run:
    """The run of a folder, in float32 and without anything but the loss."""
    run = run_of_hugging_face(f"hf:{folder}")
    training = Training(batch=BATCH, seq=SEQ, compute_dtype="float32", remat="none")
    model: Any = run.model
    names = {field.name for field in dataclasses.fields(model)}
    rest = names & {"aux_loss_weight", "router_z_loss_weight", "bias_update_rate"}
    model = dataclasses.replace(model, **dict.fromkeys(rest, 0.0))
    return dataclasses.replace(
        run, model=model, mesh=MeshShape.parse(mesh), training=training, fsdp_min_size=64,
        optimizer=Optimizer(grad_clip_norm=0.0),
    )  # fmt: skip


def load(folder: Path, mesh: str, run: Run | None = None) -> tuple[DeviceRun, Any]:
    """The run of a folder on the first simulated devices, and its weights. run: instead of `run_of`."""
    run = run or run_of(folder, mesh)
    assert run.mesh is not None
    device_run = place_on_devices(run, build_mesh(run.mesh))
    params = load_params(
        open_folder(f"hf:{folder}"),
        device_run.layout.params,
        device_run.abstract.shardings.params,
        "float32",
    )
    return device_run, params


def batch_of(device_run: DeviceRun) -> Batch:
    """The tokens as one document for each sequence."""
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ))
    fields = (TOKENS[:, :-1], TOKENS[:, 1:], np.zeros((BATCH, SEQ), np.int32), positions)
    return jax.device_put(
        Batch(*fields, np.ones((BATCH, SEQ), np.float32)), device_run.batch_sharding
    )


def build_logits(device_run: DeviceRun) -> Callable[[Any, Batch], jax.Array]:
    """The jitted `(params, batch) -> logits [B, T, V]` of all positions."""
    placed, model = device_run, device_run.local_model

    class Logits(PipelineModel):
        def loss(self, params: Any, x: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_BTD, table_VD = model.unembed(params, x)
            positions_T = all_gather(placed.sequence.local_positions(), ("context",), 0)
            x_BTD = all_gather(x_BTD, ("context",), 1)[:, jnp.argsort(positions_T)]
            logits_BTV = jnp.einsum(
                "btd,vd->btv", x_BTD, table_VD, preferred_element_type=jnp.float32
            )
            return jnp.zeros(()), cap(logits_BTV, placed.layout.spec.logit_softcap)

    def run(params: Any, batch: Batch) -> jax.Array:
        batch_M = jax.tree.map(lambda x: x[None], batch)
        pipeline = Logits(
            model, (batch_M.positions[:, :, 0], batch_M), lambda _: no_dropout(), jnp.ones(())
        )
        logits_BTV = pipeline.sums(placed.forward_table(1), params)
        return all_gather(all_gather(logits_BTV, VOCAB_AXES, 2), BATCH_AXES, 0)[..., :VOCAB]

    specs = (param_specs(device_run.layout.placements, "at_rest"), BATCH_SPEC)
    return jax.jit(
        jax.shard_map(run, mesh=device_run.mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )


def logits_of(folder: Path, mesh: str) -> np.ndarray:
    """Logits of a folder's model on a mesh."""
    device_run, params = load(folder, mesh)
    return np.asarray(build_logits(device_run)(params, batch_of(device_run)))


def _by_tensor(folder: Path, device_run: DeviceRun, tree: Any) -> dict[str, np.ndarray]:
    """A tree of the parameters' shape by the name of the stored tensor; gradients lack the frozen ones."""
    weights = open_folder(f"hf:{folder}")
    described = device_run.layout.params
    if any(leaf is None for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)):
        described = trained_only(described, described)
    by_layer = named_leaves(tree_map(rows_to_layers, described, jax.device_get(tree)))
    found: dict[str, np.ndarray] = {}
    for path, p in weights.params.items():
        if path not in by_layer:
            continue
        stored = weights.stored[path]
        for name in stored.names(p):
            found.setdefault(name, np.zeros(stored.stored_shape(p), np.float32))
        whole = by_layer[path] if p.rows is None else by_layer[path][: p.rows]
        write_block(
            p, stored, tuple(slice(0, size) for size in whole.shape), whole, found.__getitem__
        )
    if weights.prefix is None:
        return found
    return {weights.prefix.name_in_larger_model(name): values for name, values in found.items()}


def steps_of(
    folder: Path, mesh: str, steps: int = STEPS, model: Mapping[str, Any] = MappingProxyType({})
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Losses of AdamW steps on one batch; the first gradients and the last parameters by the name of their tensor."""
    run = run_of(folder, mesh)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, **model))
    o = Optimizer(
        learning_rate=LEARNING_RATE,
        lr_schedule="constant",
        epsilon=EPSILON,
        weight_decay=DECAY,
        grad_clip_norm=0.0,
    )
    assert (o.beta1, o.beta2) == BETAS
    device_run, params = load(folder, mesh, dataclasses.replace(run, optimizer=o))
    where = device_run.abstract.shardings
    trained = trained_only(device_run.layout.params, params)
    moments = jax.jit(device_run.optimizer.init, out_shardings=where.optimizer)(trained)
    number, healthy = jax.device_put(
        (np.zeros((), np.int32), np.ones((), np.bool_)), (where.step, where.healthy)
    )
    batch, losses = batch_of(device_run), []
    state, step = State(number, healthy, params, moments), CompiledTrainStep(device_run, batch)
    gradients: Any = None
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
        if gradients is None:
            # Adam's first moment after one step is (1 - beta1) times the gradient: no second program to compile.
            adam = getattr(state.optimizer, "inner", state.optimizer)[0]
            gradients = jax.tree.map(lambda mu: mu / (1 - o.beta1), jax.device_get(adam.mu))
    return (
        losses,
        _by_tensor(folder, device_run, gradients),
        _by_tensor(folder, device_run, state.params),
    )


def decoder_of(folder: Path, mesh: str) -> Decoder:
    """Decoder of a folder's model in float32."""
    device_run, params = load(folder, mesh)
    share = device_run.layout.shape.over(BATCH_AXES)
    bucket = Bucket(
        -(-BATCH // share) * share,
        128 * device_run.layout.shape.context,
        device_run.layout.shape.context,
    )
    return Decoder(device_run, lay_out(device_run, params, "gathered"), bucket)


def decoded_logits_of(folder: Path, mesh: str) -> np.ndarray:
    """Logits [B, T, V] of a folder's model, each position from the cache of those before it."""
    decoder = decoder_of(folder, mesh)
    state = dataclasses.replace(decoder.start(list(TOKENS[:, :-1])), slot=np.int32(0))

    def steps(params: Any, state: Any) -> jax.Array:
        def step(state: Any, _: Any) -> tuple[Any, jax.Array]:
            logits, cache = decoder.next_logits(params, state, 1)
            return dataclasses.replace(state, cache=cache, slot=state.slot + 1), logits

        return jax.lax.scan(step, state, None, length=SEQ)[1]

    mapped = jax.shard_map(
        steps, mesh=decoder.device_run.mesh, in_specs=(decoder.weights.specs, decoder.specs),
        out_specs=P(None, *BATCH_SPEC), check_vma=False,
    )  # fmt: skip
    return np.asarray(jax.jit(mapped)(decoder.weights.params, state)).swapaxes(0, 1)[:BATCH]


def greedy_of(folder: Path, mesh: str) -> np.ndarray:
    """Greedy text of GREEDY tokens after the first PROMPT tokens of each text."""
    decoder, sampling = decoder_of(folder, mesh), Sampling(temperature=0.0)
    state = decoder.prefill(decoder.start(list(TOKENS[:, :PROMPT])), sampling, ())
    state = decoder.decode(state, sampling, (), GREEDY - 1)
    return decoder.read(state)[0][:BATCH]


def largest_gap(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference of any element, over the largest element of the second."""
    return float(np.abs(a - b).max() / np.abs(b).max())
