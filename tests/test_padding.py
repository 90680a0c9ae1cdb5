"""Padding is not text: no number of a text depends on the tokens, the amount or the place of the padding around it.

Every family and every dispatch of experts is given the same documents with padding drawn by hypothesis, and has the
loss, the router's losses and counts, the gradients and the moved router bias of the documents without padding.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import MODELS, VOCAB, by_layers, device_run_of, largest_difference, tiny_run

from meshwright.config import MeshShape
from meshwright.data.batch import PADDING, Batch
from meshwright.models import families
from meshwright.models.blocks.experts import Routing, expert_capacity, look_up
from meshwright.models.decoder import DecoderModel
from meshwright.models.families.arcee import Arcee
from meshwright.models.families.cohere import Cohere, Cohere2
from meshwright.models.families.deepseek_sparse import DeepseekSparse
from meshwright.models.families.granite import GraniteMoe
from meshwright.models.families.granite_hybrid import GraniteHybrid
from meshwright.models.families.hunyuan import Hunyuan
from meshwright.models.families.kimi_linear import KimiLinear
from meshwright.models.families.ministral3 import Ministral3
from meshwright.models.families.mistral4 import Mistral4
from meshwright.models.families.nemotron_h import NemotronH
from meshwright.models.families.qwen2_moe import Qwen2Moe
from meshwright.models.layer_health import HEALTH
from meshwright.models.model import ExpertSpec, Model
from meshwright.runs.recipe import find_recipe
from meshwright.step.gradients import build_gradients

DOCUMENTS = (7, 4, 5)
"""Tokens of the documents of a sequence."""
TEXT, PADDED = sum(DOCUMENTS), 2 * sum(DOCUMENTS)

FAMILIES = {
    "gpt2": "gpt2",
    "llama": "llama3-8b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
    "gemma4": "gemma4-31b",
    "gemma4-experts": "gemma4-26b-a4b",
    "granite": "granite31-8b",
    "granite-moe": GraniteMoe(VOCAB, experts=8, width=64, heads=4, kv_heads=4, expert_mlp=32),
    "granite-hybrid": GraniteHybrid(VOCAB, width=64, heads=4, kv_heads=4, mamba_state=16),
    "nemotron-h": NemotronH(
        VOCAB,
        64,
        4,
        4,
        kv_heads=4,
        experts=8,
        expert_latent=16,
        mamba_state=16,
        mamba_step_floor=0.5,
    ),
    "hunyuan": Hunyuan(VOCAB, width=64, heads=4, kv_heads=4),
    "arcee": Arcee(VOCAB, width=64, heads=4, kv_heads=4),
    "cohere": Cohere(VOCAB, width=64, heads=4, kv_heads=4, qk_norm="layer_heads"),
    "cohere2": Cohere2(VOCAB, width=64, heads=4, kv_heads=4),
    "kimi-linear": KimiLinear(
        VOCAB, experts=8, width=64, heads=4, layers=2, full_attention_interval=2, expert_mlp=32
    ),
    "ministral3": Ministral3(VOCAB, width=64, heads=4, kv_heads=4, temperature_floor=2),
    "mistral4": Mistral4(VOCAB, experts=8, width=64, heads=4, expert_mlp=32, temperature_floor=2),
    "olmo3": "olmo3-7b",
    "smollm3": "smollm3-3b",
    "mixtral": "mixtral-8x7b",
    "qwen3-moe": "qwen3-30b-a3b",
    "deepseek": "deepseek-v3",
    "deepseek-sparse": DeepseekSparse(
        VOCAB, experts=8, width=64, heads=4, expert_mlp=32, index_n_heads=8, index_topk=4
    ),
    "glm4-moe": "glm45-air",
    "gpt-oss": "gpt-oss-20b",
    "llama4": "llama4-scout",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3.5": "qwen35-9b",
    "qwen3.5-moe": "qwen35-35b-a3b",
    "qwen2-moe": Qwen2Moe(
        VOCAB, experts=8, width=64, heads=4, kv_heads=4, expert_mlp=32, shared_mlp=48
    ),
}
"""A recipe of every family, or a model."""


@dataclasses.dataclass(frozen=True)
class Padding:
    """Padding of a batch."""

    tokens: tuple[int, ...]
    """Ids of padding tokens, in turn."""
    gaps: tuple[tuple[int, ...], ...]
    """Of sequences, in turn: weights of the padding before each document and after the last."""

    def before(self, row: int, total: int) -> list[int]:
        """Returns the padding before each document of a sequence, and after the last: `total` in all."""
        weights = np.array(self.gaps[row % len(self.gaps)]) + 1e-9
        ends = np.round(np.cumsum(weights) / weights.sum() * total).astype(int)
        return np.diff(ends, prepend=0).tolist()


paddings = st.builds(
    Padding,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple),
    st.lists(st.tuples(*[st.integers(0, 3)] * (len(DOCUMENTS) + 1)), min_size=1, max_size=3).map(
        tuple
    ),
)


def batch_of(sequences: int, padding: Padding | None) -> Batch:
    """The same documents, without padding or with as much of it as there is text."""
    rng, seq = np.random.default_rng(0), TEXT if padding is None else PADDED
    frequency = 1 / np.arange(1, VOCAB + 1)
    text = rng.choice(VOCAB, (sequences, TEXT + len(DOCUMENTS)), p=frequency / frequency.sum())
    weights = rng.integers(0, 3, (sequences, TEXT)) / 2
    ids = (0,) if padding is None else padding.tokens
    filler = np.resize(np.array(ids), (sequences, seq))
    batch = Batch(
        inputs=filler.astype(np.int32),
        targets=filler[:, ::-1].astype(np.int32),
        segments=np.full((sequences, seq), PADDING, np.int32),
        positions=np.zeros((sequences, seq), np.int32),
        weights=np.zeros((sequences, seq), np.float32),
    )
    for row in range(sequences):
        gaps = [0] * len(DOCUMENTS) if padding is None else padding.before(row, PADDED - TEXT)
        at = first = 0
        for document, length in enumerate(DOCUMENTS):
            at += gaps[document]
            here, there = slice(at, at + length), slice(first, first + length)
            tokens = text[row, first + document : first + document + length + 1]
            batch.inputs[row, here] = tokens[:-1]
            batch.targets[row, here] = tokens[1:]
            batch.segments[row, here] = document
            batch.positions[row, here] = np.arange(length)
            batch.weights[row, here] = weights[row, there]
            at, first = at + length, first + length
    return batch


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What a step makes of a batch."""

    metrics: dict[str, float]
    gradients: Any
    bias: Any
    """Router biases after the step; {} without."""


@functools.cache
def step_of(model: Model, mesh: str, seq: int, sequences: int) -> Any:
    """Returns a function from a batch to its `Numbers`."""
    run = tiny_run(model, mesh, batch=sequences, seq=seq, dropout=0.0, eval_samples=0)
    device_run = device_run_of(run)
    params = device_run.initial_state().params
    gradients = jax.jit(build_gradients(device_run))

    def numbers(batch: Batch) -> Numbers:
        placed = jax.device_put(batch, device_run.batch_sharding)
        grads, metrics, aux = gradients(params, np.int32(0), placed)
        moved = model.post_update(params, aux)
        biases = {
            path: np.asarray(stack["router_bias"])
            for path, stack in moved.items()
            if isinstance(stack, dict) and "router_bias" in stack
        }
        metrics.pop(HEALTH, None)
        means = {name: float(total / count) for name, (total, count) in metrics.items()}
        return Numbers(means, by_layers(device_run, grads), biases)

    return numbers


@functools.cache
def without_padding(model: Model, mesh: str, sequences: int) -> Numbers:
    return step_of(model, mesh, TEXT, sequences)(batch_of(sequences, None))


def assert_padding_changes_nothing(
    model: Model, mesh: str, padding: Padding, sequences: int = 4
) -> None:
    expected = without_padding(model, mesh, sequences)
    found = step_of(model, mesh, PADDED, sequences)(batch_of(sequences, padding))
    assert found.metrics == pytest.approx(expected.metrics, rel=2e-5, abs=1e-6)
    assert largest_difference(found.gradients, expected.gradients) < 2e-5
    for path, bias in expected.bias.items():
        np.testing.assert_array_equal(found.bias[path], bias)


def small(family: str) -> Model:
    named = FAMILIES[family]
    model = find_recipe(named).model if isinstance(named, str) else named
    has_turns = hasattr(model, "full_attention_interval") or isinstance(model, GraniteHybrid)
    model = model.shrunk(MeshShape(), 2 if has_turns else 1)
    return dataclasses.replace(model, vocab=VOCAB, vocab_multiple=16)


def with_experts(**fields: Any) -> Model:
    """A layer with experts and a bias that balances their load."""
    return dataclasses.replace(
        MODELS["deepseek-like"],
        layers=1,
        dense_layers=0,
        aux_loss_weight=0.01,
        router_z_loss_weight=0.01,
        **fields,
    )


CAPACITY = {"dispatch": "capacity", "capacity_factor": 0.75}
BUFFERS = {"expert_buffer_factor": 0.3}
DISPATCHES: dict[str, tuple[dict[str, Any], str, int]] = {
    "capacity": (CAPACITY, "data=1", 4),
    "dropless": ({}, "data=1", 4),
    "capacity over devices": (CAPACITY, "expert=4", 4),
    "capacity, split sequences": (CAPACITY, "context=2,expert=2,tensor=2", 4),
    "ragged exchange": ({}, "expert=2,tensor=2", 4),
    "ragged exchange, split sequences": ({}, "context=2,expert=2", 4),
    "ragged exchange with buffers": (BUFFERS, "expert=4", 64),
    "ragged exchange with buffers, width split": (BUFFERS, "expert=2,tensor=2", 32),
}
"""Fields of the model, mesh, sequences."""


@pytest.mark.compiles
@pytest.mark.parametrize("row", DISPATCHES)
@settings(max_examples=6, derandomize=True)
@given(padding=paddings)
def test_no_dispatch_of_experts_sees_padding(row: str, padding: Padding) -> None:
    fields, mesh, sequences = DISPATCHES[row]
    model = with_experts(**fields)
    assert_padding_changes_nothing(model, mesh, padding, sequences)
    dropped = without_padding(model, mesh, sequences).metrics.get("choices dropped")
    assert dropped is None if not fields else dropped > 0, "the row has to drop choices"


@pytest.mark.compiles
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, derandomize=True)
@given(padding=paddings)
def test_no_family_sees_padding(family: str, padding: Padding) -> None:
    model = small(family)
    assert_padding_changes_nothing(model, "data=1", padding)
    if hasattr(model, "dispatch"):
        capacity = dataclasses.replace(model, **CAPACITY)
        assert_padding_changes_nothing(capacity, "data=1", padding)


def test_every_family_is_tried() -> None:
    """A family that is added gets a row."""
    found = set()
    for module in pkgutil.iter_modules(families.__path__):
        members = vars(importlib.import_module(f"{families.__name__}.{module.name}")).values()
        found |= {
            member
            for member in members
            if inspect.isclass(member)
            and issubclass(member, DecoderModel)
            and member.build is not DecoderModel.build
        }
    assert found == {type(small(family)) for family in FAMILIES}


@settings(max_examples=30, derandomize=True)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.floats(0.1, 4, allow_nan=False),
    st.integers(1, 300),
)
def test_capacity_and_buffers_are_shares_of_the_text(
    experts: int, k: int, factor: float, tokens: int
) -> None:
    """Their tables have, for each amount of text, what a batch of that much text without padding has."""
    k = min(k, experts)
    routing = Routing(experts, k)
    capacities = expert_capacity(routing, np.arange(tokens + 1), factor)
    spec = ExpertSpec(experts, k, factor)
    rooms = spec.rooms(np.arange(tokens + 1), experts)
    for text in {0, 1, tokens // 3, tokens // 2, tokens - 1, tokens}:
        assert capacities[text] == expert_capacity(routing, text, factor)
        limited = min(rooms.experts[text], text * experts)
        assert limited == spec.buffers(text, experts).experts
        assert int(look_up(capacities, np.int32(text))) == capacities[text]
        assert int(look_up(rooms.experts, np.int32(text))) == rooms.experts[text]
