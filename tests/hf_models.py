"""Small random models of `transformers`, one for each architecture, and what Meshwright makes of their weights."""

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.comm.collectives import all_gather
from meshwright.config import MeshShape, Optimizer, Training
from meshwright.data.batch import Batch
from meshwright.generation.decoder import Bucket, Decoder
from meshwright.generation.sampling import Sampling
from meshwright.generation.weights import lay_out
from meshwright.hardware.mesh import build_mesh
from meshwright.hugging_face.folder import open_folder
from meshwright.hugging_face.load import load_params
from meshwright.hugging_face.names import write_block
from meshwright.models.blocks.dropout import no_dropout
from meshwright.models.kernels.scores import cap
from meshwright.runs.hugging_face import run_of_hugging_face
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import named_leaves, rows_to_layers, tree_map
from meshwright.step.device_run import BATCH_SPEC, DeviceRun, param_specs, place_on_devices
from meshwright.step.gradients import build_gradients
from meshwright.step.pipeline import PipelineModel, run_forward
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep

BATCH, SEQ, VOCAB = 4, 16, 50

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
_LATENT_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 10000.0,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
_SHORT_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "moe_intermediate_size": 32,
}  # fmt: skip

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "llama-3.1": ("Llama", {
        **_SIZES, "rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 24, "attention_bias": True,
        "mlp_bias": True,
    }),
    "mistral": ("Mistral", {**_SIZES, "sliding_window": 5, "rope_parameters": _LINEAR}),
    "qwen2": ("Qwen2", {**_SIZES, "rope_parameters": _SHORT_YARN}),
    "qwen3": ("Qwen3", {**_SIZES, "head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
    "phi-4": ("Phi3", {**_SIZES, "sliding_window": 5}),
    "smollm3": ("SmolLM3", {**_SIZES, "num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "glm-4.5": ("Glm4Moe", {
        **_SIZES, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "num_mtp_layers": 0,
    }),
    "mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 4, "head_dim": 16, "rope_parameters": _SHORT_YARN}),
    "qwen3-moe": ("Qwen3Moe", {
        **_SIZES, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "mlp_only_layers": [0], "attention_bias": True,
        "rope_parameters": {**_SHORT_YARN, "attention_factor": 0.9},
    }),
    "gpt2": ("GPT2", {
        "vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "olmo-2": ("Olmo2", {
        **_SIZES, "attention_bias": True, "rope_parameters": {**_SHORT_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    }),
    "gpt-oss": ("GptOss", {
        **_SIZES, "num_hidden_layers": 5, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 5, "swiglu_limit": 0.1, "rope_parameters": {**_YARN, "truncate": False},
    }),
    "llama-4": ("Llama4", {
        **_SIZES, "num_hidden_layers": 6, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1,
        "intermediate_size": 32, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4, "attention_chunk_size": 6, "floor_scale": 4,
    }),
    "llama-4-scout": ("Llama4", {
        **_SIZES, "num_hidden_layers": 3, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 32, "no_rope_layer_interval": 2, "attention_chunk_size": 5, "floor_scale": 4,
        "use_qk_norm": False, "rope_parameters": {**_LLAMA3, "high_freq_factor": 1.0},
    }),
    "gemma-2": ("Gemma2", {
        **_SIZES, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7,
    }),
    "olmo-3": ("Olmo3", {
        **_SIZES, "num_hidden_layers": 5, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {**_YARN, "rope_theta": 10000.0},
        },
    }),
    "gemma-3": ("Gemma3", {
        **_SIZES, "num_hidden_layers": 5, "head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 40,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    }),
    "deepseek-v3": ("DeepseekV3", {
        **_SIZES, **_LATENT, "num_key_value_heads": 4, "q_lora_rank": 24, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "rope_parameters": _LATENT_YARN,
        "num_mtp_layers": 0,
    }),
    "deepseek-v2-lite": ("DeepseekV2", {
        **_SIZES, **_LATENT, "num_key_value_heads": 4, "q_lora_rank": None, "n_routed_experts": 8,
        "n_shared_experts": 2, "num_experts_per_tok": 3, "topk_method": "greedy", "first_k_dense_replace": 1,
    }),
    "qwen3-next": ("Qwen3Next", {
        **_SIZES, "num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }),
}  # fmt: skip
"""Row -> class of `transformers`, and its configuration."""

WRITTEN_AS = {"phi-4": "MistralForCausalLM"}
"""Row -> architecture that a configuration is written as from the model only, where it is not the same one."""

EIGHT_DEVICES = "fsdp=2,tensor=2,data=2"
# Stages of Gemma 3 are of unequal length and begin with a period; four devices of `tensor` have two key/value heads.
MESHES = {
    "gemma-2": "fsdp=2,context=2,tensor=2", "gemma-3": "stage=2,fsdp=2,tensor=2",
    "gpt-oss": "expert=2,context=2,tensor=2", "llama-4": "stage=2,expert=2,tensor=2",
    "llama-4-scout": "expert=2,context=2,tensor=2", "olmo-2": "tensor=4,fsdp=2", "olmo-3": "stage=2,fsdp=2,tensor=2",
    "qwen2": "tensor=4,data=2", "qwen3-next": "stage=2,expert=2,tensor=2",
}  # fmt: skip
"""Mesh of a row's gradients, where it is not EIGHT_DEVICES."""

DECODE_MESHES = {"qwen3-next": "data=2,fsdp=2,tensor=2"}
"""Mesh of a row's greedy text, where it is not `fsdp=2,context=2,tensor=2`: linear attention goes without `context`."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of `transformers` and `torch`, which are theirs."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(row: str) -> Any:
    """A model in float32 whose parameters are all random, so that no bias is zero and no norm one."""
    name, config = ROWS[row]
    return _make(name, **config)


def _make(name: str, **config: Any) -> Any:
    with quiet():
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        model_class = getattr(transformers, f"{name}{head}")
        model_class.config_class = transformers.Llama4TextConfig if name == "Llama4" else model_class.config_class
        settings = model_class.config_class(**config)
        settings._attn_implementation = "eager"
        model = model_class(settings).float().eval()
        for parameter_name, parameter in model.named_parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
            if parameter_name.endswith("A_log"):
                # States that last: drawn as they are, most are forgotten within a token, and their gradients rounding.
                parameter.data -= 4.0
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer += 0.05 * torch.randn_like(buffer)
    return model


@functools.cache
def tokens() -> np.ndarray:
    """Random tokens, int32 [B, T + 1]."""
    return np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)


def stored_elements(model: Any) -> int:
    """Elements of a model's parameters, and of its buffers that are stored."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored = [buffer for name, buffer in model.state_dict().items() if name not in names]
    return sum(x.numel() for x in (*model.parameters(), *stored))


def save(row: str, folder: Path, **how: Any) -> Any:
    """Writes the model of a row as `transformers` does; returns it."""
    model = make(row)
    with quiet():
        model.save_pretrained(folder, **how)
    return model


def reference(model: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits [B, T, V] of a model of `transformers`, and the gradient of the mean loss by the name of its tensor."""
    with quiet():
        import torch

        inputs = torch.tensor(tokens()[:, :-1], dtype=torch.long)
        targets = torch.tensor(tokens()[:, 1:], dtype=torch.long)
        logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
        model.zero_grad()
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return logits.detach().numpy(), {n: g.numpy() for n, g in grads.items()}


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
    params = load_params(open_folder(f"hf:{folder}"), device_run.params, device_run.state_shardings.params, "float32")
    return device_run, params


def batch_of(device_run: DeviceRun) -> Batch:
    """The tokens as one document for each sequence."""
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ))
    fields = (tokens()[:, :-1], tokens()[:, 1:], np.zeros((BATCH, SEQ), np.int32), positions)
    return jax.device_put(Batch(*fields, np.ones((BATCH, SEQ), np.float32)), device_run.batch_sharding)


def build_logits(device_run: DeviceRun) -> Callable[[Any, Batch], jax.Array]:
    """The jitted `(params, batch) -> logits [B, T, V]` of all positions."""
    placed, model = device_run.placed, device_run.local_model

    def run(params: Any, batch: Batch) -> jax.Array:
        ctx = model.context(batch, no_dropout())

        def logits(params: Any, x_BTD: jax.Array, microbatch: Any) -> tuple[jax.Array, jax.Array]:
            x_BTD, table_VD = model.unembed(params, x_BTD)
            positions_T = all_gather(placed.sequence.local_positions(), ("context",), 0)
            x_BTD = all_gather(x_BTD, ("context",), 1)[:, jnp.argsort(positions_T)]
            logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, table_VD, preferred_element_type=jnp.float32)
            return jnp.zeros(()), cap(logits_BTV, placed.spec.logit_softcap)

        pipeline = PipelineModel(
            embed=lambda params, microbatch: model.embed(params, ctx),
            layers=lambda params, x, virtual_stage, microbatch: model.layers(params, x, ctx, virtual_stage),
            loss=logits,
            aux_loss=lambda aux: 0.0,
            stacks=tuple(model.stacks),
            together=model.permutes,
        )
        logits_BTV = run_forward(placed.forward_table(1), pipeline, params)
        return all_gather(all_gather(logits_BTV, VOCAB_AXES, 2), BATCH_AXES, 0)[..., :VOCAB]

    specs = (param_specs(device_run.placements, "at_rest"), BATCH_SPEC)
    return jax.jit(jax.shard_map(run, mesh=device_run.mesh, in_specs=specs, out_specs=P(), check_vma=False))


def logits_of(folder: Path, mesh: str) -> np.ndarray:
    """Logits of a folder's model on a mesh."""
    device_run, params = load(folder, mesh)
    return np.asarray(build_logits(device_run)(params, batch_of(device_run)))


def gradients_of(folder: Path, mesh: str) -> dict[str, np.ndarray]:
    """Gradients of the mean loss by the name of the stored tensor."""
    device_run, params = load(folder, mesh)
    grads, _, _ = jax.jit(build_gradients(device_run))(params, jnp.int32(0), batch_of(device_run))
    return _by_tensor(folder, device_run, grads)


def _by_tensor(folder: Path, device_run: DeviceRun, tree: Any) -> dict[str, np.ndarray]:
    """A tree of the parameters' shape by the name of the stored tensor."""
    weights = open_folder(f"hf:{folder}")
    by_layer = named_leaves(tree_map(rows_to_layers, device_run.params, jax.device_get(tree)))
    found: dict[str, np.ndarray] = {}
    for path, p in weights.params.items():
        stored = weights.stored[path]
        for name in stored.names(p):
            found.setdefault(name, np.zeros(stored.stored_shape(p), np.float32))
        whole = by_layer[path] if p.rows is None else by_layer[path][: p.rows]
        write_block(p, stored, tuple(slice(0, size) for size in whole.shape), whole, found.__getitem__)
    return found


STEPS, LEARNING_RATE, EPSILON, DECAY = 8, 1e-3, 1e-4, 0.1
"""AdamW of the comparison of steps. A smaller epsilon would divide gradients that are rounding alone by themselves."""


def steps_of(folder: Path, mesh: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of eight AdamW steps on the same batch, and what the parameters are then, by the name of their tensor."""
    run = run_of(folder, mesh)
    o = Optimizer(
        learning_rate=LEARNING_RATE, lr_schedule="constant", epsilon=EPSILON, weight_decay=DECAY, grad_clip_norm=0.0
    )
    device_run, params = load(folder, mesh, dataclasses.replace(run, optimizer=o))
    where = device_run.state_shardings
    moments = jax.jit(device_run.optimizer.init, out_shardings=where.optimizer)(params)
    number, healthy = jax.device_put((np.zeros((), np.int32), np.ones((), np.bool_)), (where.step, where.healthy))
    batch, losses = batch_of(device_run), []
    state, step = State(number, healthy, params, moments), CompiledTrainStep(device_run, batch)
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    return losses, _by_tensor(folder, device_run, state.params)


def reference_steps(row: str, folder: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same by `torch.optim.AdamW` on a model of `transformers`."""
    weights, model = open_folder(f"hf:{folder}"), make(row)
    decayed = {n for path, p in weights.params.items() if p.init == "normal" for n in weights.stored[path].names(p)}
    with quiet():
        import torch

        groups: dict[bool, list[Any]] = {True: [], False: []}
        for name, p in model.named_parameters():
            groups[not decayed.isdisjoint(stored_gradients(row, {name: p.detach().numpy()}))].append(p)
        rest = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": EPSILON}
        parts = [{"params": groups[d], "weight_decay": DECAY * d} for d in (True, False)]
        optimizer = torch.optim.AdamW(parts, **rest)
        inputs = torch.tensor(tokens()[:, :-1], dtype=torch.long)
        targets, losses = torch.tensor(tokens()[:, 1:], dtype=torch.long), []
        for _ in range(STEPS):
            logits = model(inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        values = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return losses, stored_gradients(row, values)


def decoder_of(folder: Path, mesh: str) -> Decoder:
    """Decoder of a folder's model in float32."""
    device_run, params = load(folder, mesh)
    share = device_run.shape.over(BATCH_AXES)
    bucket = Bucket(-(-BATCH // share) * share, 128 * device_run.shape.context, device_run.shape.context)
    return Decoder(device_run, lay_out(device_run, params, "gathered"), bucket, "compute")


def decoded_logits_of(folder: Path, mesh: str) -> np.ndarray:
    """Logits [B, T, V] of a folder's model, each position from the cache of those before it."""
    decoder = decoder_of(folder, mesh)
    state = dataclasses.replace(decoder.start(list(tokens()[:, :-1])), slot=np.int32(0))

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


def greedy_of(folder: Path, mesh: str, count: int) -> np.ndarray:
    """Greedy text after the first five tokens of each text, [B, count]."""
    decoder, sampling = decoder_of(folder, mesh), Sampling(temperature=0.0)
    state = decoder.prefill(decoder.start(list(tokens()[:, :5])), sampling, ())
    state = decoder.decode(state, sampling, (), count - 1)
    return decoder.read(state)[0][:BATCH]


def reference_greedy(model: Any, count: int) -> np.ndarray:
    """The same by `transformers`, each token from a forward pass over all before it."""
    with quiet():
        import torch

        text = torch.tensor(tokens()[:, :5], dtype=torch.long)
        for _ in range(count):
            with torch.no_grad():
                chosen = model(text, use_cache=False).logits[:, -1].argmax(-1)
            text = torch.cat([text, chosen[:, None]], 1)
    return text[:, 5:].numpy()


def largest_gap(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference of any element, over the largest element of the second."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def stored_gradients(row: str, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of a model's parameters by the names under which it is stored, which `transformers` 5 fuses."""
    found = {}
    for name, gradient in gradients.items():
        experts = name.partition(".mlp.experts.")
        if not experts[1] or row == "gpt-oss":
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if row == "mixtral" else name] = gradient
            continue
        fused = np.split(gradient, 2, axis=1) if experts[2] == "gate_up_proj" else [gradient]
        parts = ("gate_proj", "up_proj") if len(fused) == 2 else ("down_proj",)
        for part, values in zip(parts, fused, strict=True):
            for expert, value in enumerate(values):
                inner = f"mlp.experts.{expert}.{part}"
                if row == "mixtral":
                    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
                    inner = f"block_sparse_moe.experts.{expert}.{short}"
                found[f"{experts[0]}.{inner}.weight"] = value
    return found
