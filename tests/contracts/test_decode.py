"""Decoding from the cache is the forward pass, position by position: every family, on every kind of mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from outside.extensions.short_conv import ShortConvModel
from tiny_runs import (
    DEEPSEEK,
    DEEPSEEK_SPARSE,
    MODELS,
    QWEN3_NEXT,
    VOCAB,
    by_layers,
    device_run_of,
    keep,
    place_params,
    tiny_run,
)

from meshwright.data.batch import Batch
from meshwright.generation.decoder import Bucket, Decoder
from meshwright.generation.weights import WeightsLayout, lay_out
from meshwright.models.blocks.layers import no_dropout
from meshwright.models.blocks.yarn import Yarn
from meshwright.models.families.gemma import Gemma2, Gemma3
from meshwright.models.families.gpt2 import Gpt2
from meshwright.models.families.gpt_oss import GptOss
from meshwright.models.families.granite_hybrid import GraniteHybrid
from meshwright.models.families.kimi_linear import KimiLinear
from meshwright.models.families.llama import Llama
from meshwright.models.families.llama4 import Llama4
from meshwright.models.families.olmo3 import Olmo3
from meshwright.models.kernels.attention import cap
from meshwright.models.model import Model
from meshwright.step.device_run import DeviceRun, param_specs
from meshwright.step.state import BATCH_SPEC

FAMILIES: dict[str, Model] = {
    **MODELS,
    "olmo-2": Llama(
        VOCAB, 64, 2, 16, vocab_multiple=16, kv_heads=8, mlp=96, qk_norm="rms_heads", norm_place="after"
    ),
    "gemma-3": Gemma3(
        VOCAB, 64, 5, 16, vocab_multiple=16, kv_heads=8, mlp=96, local_layers=1, sliding_window=5
    ),
    "deepseek": DEEPSEEK,
    "deepseek-sparse": DEEPSEEK_SPARSE,
    "gemma-2": Gemma2(
        VOCAB, 64, 3, 16, vocab_multiple=16, kv_heads=8, mlp=96, sliding_window=5, softcap=0.5, logit_softcap=2.0
    ),
    "gpt-oss": GptOss(
        VOCAB, 64, 3, 16, vocab_multiple=16, kv_heads=8, experts=8, experts_per_token=2, expert_mlp=32,
        sliding_window=5, rope_scaling=Yarn(original_max_position_embeddings=64),
    ),
    "olmo-3": Olmo3(
        VOCAB, 64, 3, 16, vocab_multiple=16, kv_heads=8, mlp=96, local_layers=1, sliding_window=5,
        yarn=Yarn(original_max_position_embeddings=64),
    ),
    "llama-4": Llama4(
        VOCAB, 64, 6, 16, vocab_multiple=16, kv_heads=8, mlp=96, attention_chunk=6, temperature_floor=4, experts=4,
        expert_mlp=32, expert_interval=2,
    ),
    "qwen3-next": QWEN3_NEXT,
    "granite-hybrid": GraniteHybrid(
        VOCAB, 64, 4, 16, vocab_multiple=16, kv_heads=8, mlp=96, mamba_heads=16, mamba_head_size=8, mamba_state=16,
    ),
    "kimi-linear": KimiLinear(
        VOCAB, 64, 4, 16, vocab_multiple=16, mlp=96, experts=8, experts_per_token=2, expert_mlp=32, dense_layers=1,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, linear_heads=8, linear_head_size=8,
    ),
    "layer kind from outside": ShortConvModel(VOCAB, 64, 4, 16, vocab_multiple=16, kv_heads=8, mlp=96),
}  # fmt: skip
WITHOUT_CONTEXT = tuple(
    name
    for name, model in FAMILIES.items()
    if any(kind.gathered(1, 1, "float32") is None for kind in model.spec().recurrences)
    or any(attention.indexer for attention in model.spec().attention)
)
"""Families with an indexer, or with a recurrence that states no exchange between the segments of a sequence."""
TWO_KV_HEADS = {"two-kv-heads": dataclasses.replace(MODELS["llama"], kv_heads=2)}  # type: ignore[call-arg]
"""Fewer key/value heads than devices of `tensor`."""
SEQ, CHUNK = 24, 8
LENGTHS = (24, 17, 9)
"""Tokens of each text: prompts are ragged."""


def model_of(name: str) -> Model:
    model = (FAMILIES | TWO_KV_HEADS)[name]
    if isinstance(model, Gpt2):
        return model
    return dataclasses.replace(model, rope_theta=100.0)  # angles that differ within a few positions


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in LENGTHS]


def run_of(name: str, mesh: str) -> DeviceRun:
    mesh, _, folded = mesh.partition(" ")
    return device_run_of(tiny_run(model_of(name), mesh, batch=8, seq=32, layout=folded or "fsdp"))


def forward_logits(device_run: DeviceRun, params: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of the forward pass that trains, on one device."""
    model = device_run.local_model

    def logits(params: Any, tokens_BT: jax.Array) -> jax.Array:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        batch = Batch(
            tokens_BT, tokens_BT, jnp.zeros_like(tokens_BT), positions_BT, jnp.ones(tokens_BT.shape)
        )
        x_BTD, _ = model.hidden(params, batch, no_dropout())
        x_BTD, table_VD = model.unembed(params, x_BTD)
        return cap(
            jnp.einsum("btd,vd->btv", x_BTD, table_VD)[..., :VOCAB],
            model.model.spec().logit_softcap,
        )

    specs = (param_specs(device_run.layout.placements, "at_rest"), BATCH_SPEC)
    mapped = jax.shard_map(
        logits, mesh=device_run.mesh, in_specs=specs, out_specs=BATCH_SPEC, check_vma=False
    )
    return np.asarray(jax.jit(mapped)(params, tokens_BT))


def expected(name: str) -> tuple[Any, list[np.ndarray]]:
    """Parameters, and the logits of each text by the forward pass on one device."""

    def compute() -> Any:
        device_run = run_of(name, "data=1")
        params = device_run.initial_state().params
        rows = np.stack([np.pad(text, (0, SEQ - len(text))) for text in texts()])
        logits = forward_logits(device_run, params, rows)
        return by_layers(device_run, params), [
            row[: len(text)] for row, text in zip(logits, texts(), strict=True)
        ]

    return keep(("forward", name, SEQ), compute)


def decoded_logits(decoder: Decoder, params: Any) -> list[np.ndarray]:
    """Logits after each position from the cache: two prefill steps, then a token at a time, of texts that are given."""
    state = decoder.start(texts())
    first_step = decoder.end - CHUNK

    @functools.partial(
        jax.shard_map,
        mesh=decoder.device_run.mesh,
        in_specs=(decoder.weights.specs, decoder.specs),
        out_specs=PartitionSpec(None, *BATCH_SPEC),
        check_vma=False,
    )
    def steps(params: Any, state: Any) -> jax.Array:
        def filled(state: Any, _: Any) -> tuple[Any, jax.Array]:
            logits, cache = decoder.next_logits(params, state, CHUNK)
            return dataclasses.replace(state, cache=cache, slot=state.slot + CHUNK), logits

        def step(state: Any, _: Any) -> tuple[Any, jax.Array]:
            logits, cache = decoder.next_logits(params, state, 1)
            return dataclasses.replace(state, cache=cache, slot=state.slot + 1), logits

        state, filling = jax.lax.scan(filled, state, None, length=first_step // CHUNK)
        return jnp.concatenate([filling, jax.lax.scan(step, state, None, length=CHUNK)[1]])

    logits = np.asarray(jax.jit(steps)(params, state))
    ends = [*range(CHUNK, first_step + 1, CHUNK), *range(first_step + 1, decoder.end + 1)]
    found = []
    for row, text in enumerate(texts()):
        padding = decoder.end - len(text)
        found.append(
            {
                end - padding - 1: logits[number, row]
                for number, end in enumerate(ends)
                if end > padding
            }
        )
    return found


COMPARED = ("gemma-2", "gpt-oss", "llama-4", "olmo-3", "qwen3-next")
"""Families whose decoding is compared with `transformers` too (test_families.py): one mesh in every run."""


def row_of(name: str, mesh: str, layout: WeightsLayout) -> Any:
    marks = pytest.mark.exhaustive if name in COMPARED and "context" not in mesh else ()
    return pytest.param(name, mesh, layout, marks=marks)


ROWS: list[Any] = [
    *(row_of(name, "data=1", "sharded") for name in FAMILIES),
    *(row_of(name, "data=2,fsdp=2,tensor=2", "gathered") for name in FAMILIES),
    *(
        row_of(name, "fsdp=2,context=2,tensor=2", "sharded")
        for name in FAMILIES
        if name not in WITHOUT_CONTEXT
    ),
    ("llama", "context=8", "sharded"),
    ("mixtral", "fsdp=2,expert=2,tensor=2", "sharded"),
    ("llama", "data=2,tensor=4", "gathered"),
    ("two-kv-heads", "data=2,tensor=4", "gathered"),
    ("deepseek-like", "expert=4,context=2", "gathered"),
    ("deepseek", "fsdp=2,context=2,tensor=2", "gathered"),
    ("deepseek-like", "expert=2,context=2,tensor=2 folded", "sharded"),
    pytest.param("gpt-oss", "context=2,tensor=4 folded", "gathered", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("name", "mesh", "layout"), ROWS, ids=lambda value: str(value))
def test_decoding_is_the_forward_pass(name: str, mesh: str, layout: WeightsLayout) -> None:
    params, want = expected(name)
    device_run = run_of(name, mesh)
    weights = lay_out(device_run, place_params(device_run, params), layout)
    bucket = Bucket(8 if "data=1" not in mesh else 3, 128 * device_run.layout.shape.context, CHUNK)
    decoder = Decoder(device_run, weights, bucket)
    for text, logits in zip(decoded_logits(decoder, weights.params), want, strict=True):
        largest = np.abs(logits).max()
        for position, found in text.items():
            assert np.abs(found - logits[position]).max() < 1e-5 * largest, position
