"""Linear attention by the gated delta rule: the recurrence of `transformers`, documents, states, arithmetic."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiny_runs import QWEN3_NEXT, assert_same_steps, tiny_run, train, train_on_one_device

import meshwright as mw
from meshwright.generation.cache import CachePlan
from meshwright.hugging_face.folder import open_folder
from meshwright.hugging_face.safetensors_files import NewSafetensorsFile, SafetensorsFile
from meshwright.models.blocks.delta_net import (
    DeltaInputs,
    DeltaSpec,
    delta_net,
    delta_net_of_segments,
    gated_delta_rule,
)
from meshwright.models.blocks.delta_net import unit_lower_inverse as inverse_of
from meshwright.models.flops import forward_flops
from meshwright.planner.work import RECURRENCE, tokens_per_device, work_of
from meshwright.runs.placed_run import place_run
from meshwright.sharding.params import count_params
from meshwright.sharding.sequence import SequenceSplit, split_sequence

B, T, N, G, H, F, W = 2, 150, 2, 2, 8, 16, 4
SPEC = DeltaSpec(N, G, H, F, W)


CHANNELS = dataclasses.replace(SPEC, groups=1, decays=H)
"""Linear attention with a decay for each channel of a key (Kimi Linear)."""
RULES = {"delta-rule": SPEC, "kimi-delta-rule": CHANNELS}
GOLDEN = {name: hf_models.read(name)[1] for name in RULES}


def inputs_of(name: str) -> DeltaInputs:
    golden, groups = GOLDEN[name], RULES[name].groups
    given = {n: golden[f"input/{n}"] for n in ("q", "k", "v", "decay", "rate")}
    heads = {
        n: given[n].reshape(B, T, N, groups, *given[n].shape[3:]) for n in ("v", "decay", "rate")
    }
    return DeltaInputs(given["q"], given["k"], heads["v"], heads["decay"], heads["rate"])


@pytest.fixture(scope="module")
def inputs() -> DeltaInputs:
    return inputs_of("delta-rule")


@pytest.mark.parametrize("name", RULES)
def test_chunks_are_the_recurrence_of_transformers(name: str) -> None:
    """Output, states and gradients, in float32; and the FLOPs of the compiled program are those of the formula."""
    inputs, golden, spec = inputs_of(name), GOLDEN[name], RULES[name]
    starts_BT, empty = np.arange(T)[None].repeat(B, 0) == 0, jnp.zeros((N, B, spec.groups, H, F))

    def loss(x: DeltaInputs) -> tuple[jax.Array, Any]:
        out, states = gated_delta_rule(x, starts_BT, empty)
        return jnp.sin(out).sum(), (out, states)

    (_, (out, states)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    np.testing.assert_allclose(out, golden["output"].reshape(out.shape), atol=1e-5)
    np.testing.assert_allclose(
        states.swapaxes(0, 1), golden["state"].reshape(B, N, spec.groups, H, F), atol=1e-5
    )
    for part in ("q", "k", "v", "decay", "rate"):
        found = np.asarray(getattr(grads, part))
        gap = hf_models.largest_gap(found, golden[f"gradient/{part}"].reshape(found.shape))
        assert gap < 1e-5, part
    program = mw.census(jax.jit(lambda x: gated_delta_rule(x, starts_BT, empty)), inputs)
    # 150 tokens are three chunks of 64; products of one number by one are no matmuls.
    assert program.flops.compiled == pytest.approx(spec.flops(T) * B * 192, rel=1e-3)


@pytest.mark.parametrize("name", RULES)
def test_documents_of_a_row_are_rows_of_their_own(name: str) -> None:
    """Packed as separate; and in two steps, the second from what the first carries."""
    inputs, channels = inputs_of(name), RULES[name].channels
    rng, cut = np.random.default_rng(1), 67
    taps_NFW, net = rng.normal(size=(N, channels, W)).astype(np.float32), jax.jit(delta_net)
    positions_BT = np.concatenate([np.arange(cut), np.arange(T - cut)])[None].repeat(B, 0)
    packed, _ = net(inputs, taps_NFW, positions_BT)
    swapped = jax.tree.map(lambda a: np.concatenate([a[:, cut:], a[:, :cut]], 1), inputs)
    others_BT = np.concatenate([np.arange(T - cut), np.arange(cut)])[None].repeat(B, 0)
    alone, _ = net(swapped, taps_NFW, others_BT)
    largest = np.abs(packed).max()
    assert np.abs(packed[:, cut:] - alone[:, : T - cut]).max() < 1e-5 * largest
    assert np.abs(packed[:, :cut] - alone[:, T - cut :]).max() < 1e-5 * largest
    first, carried = net(jax.tree.map(lambda a: a[:, :75], inputs), taps_NFW, positions_BT[:, :75])
    assert carried.inputs.shape == (N, B, W - 1, channels)
    second, _ = net(
        jax.tree.map(lambda a: a[:, 75:], inputs), taps_NFW, positions_BT[:, 75:], carried
    )
    assert np.abs(np.concatenate([first, second], 1) - packed).max() < 1e-5 * largest


def _positions(T: int, begins: tuple[int, ...]) -> np.ndarray:
    """Positions in the documents of a sequence that begin at 0 and at `begins`, [B, T]."""
    positions_T = np.arange(T)
    for begin in begins:
        positions_T[begin:] = np.arange(T - begin)
    return positions_T[None].repeat(B, 0)


def _on_devices(
    x: DeltaInputs, taps_NFW: np.ndarray, positions_BT: np.ndarray, sequence: SequenceSplit
) -> tuple[Any, Any, Any]:
    """Returns the output of sequences that `context` splits, and gradients of the sum of its sines."""
    order_T, T = sequence.position_order(), sequence.seq
    back_T = np.argsort(order_T)

    def loss(x: DeltaInputs, taps_NFW: jax.Array, positions_BT: jax.Array) -> tuple[Any, Any]:
        out = delta_net_of_segments(x, taps_NFW, positions_BT, sequence)
        return jnp.sin(out).sum(), out

    def device(x: DeltaInputs, taps_NFW: jax.Array, positions_BT: jax.Array) -> tuple[Any, ...]:
        grads, out = jax.grad(loss, (0, 1), has_aux=True)(x, taps_NFW, positions_BT)
        return out, grads[0], jax.lax.psum(grads[1], "context")

    mesh = jax.make_mesh((sequence.shards,), ("context",), axis_types=(AxisType.Auto,))
    split, everywhere = P(None, "context"), P()
    run = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(split, everywhere, split),
        out_specs=(split, split, everywhere),
        check_vma=False,
    )
    ordered = jax.tree.map(lambda a: a[:, :T][:, order_T], x)
    out, of_inputs, of_taps = jax.jit(run)(ordered, taps_NFW, positions_BT[:, order_T])
    in_order = jax.tree.map(lambda a: np.asarray(a)[:, back_T], (out, of_inputs))
    return *in_order, np.asarray(of_taps)


@pytest.mark.parametrize(
    ("strategy", "shards", "T", "begins"),
    [
        ("ring", 4, 144, (5, 50, 89, 90, 108)),
        ("ring", 2, 144, ()),
        ("ulysses", 2, 144, (71,)),
        # A segment of two tokens is shorter than the three that the convolution reads before it.
        ("ring", 4, 16, (7,)),
    ],
)
def test_segments_on_devices_are_the_sequence(
    inputs: DeltaInputs, strategy: str, shards: int, T: int, begins: tuple[int, ...]
) -> None:
    """Output and every gradient, with documents that end inside segments, between them and at the end of one."""
    rng = np.random.default_rng(2)
    taps_NFW = rng.normal(size=(N, SPEC.channels, W)).astype(np.float32)
    positions_BT = _positions(T, begins)
    sequence = split_sequence(strategy, T, shards, shards)
    found = _on_devices(inputs, taps_NFW, positions_BT, sequence)

    def loss(x: DeltaInputs, taps_NFW: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, _ = delta_net(x, taps_NFW, positions_BT)
        return jnp.sin(out).sum(), out

    x = jax.tree.map(lambda a: a[:, :T], inputs)
    grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, taps_NFW)
    for one, many in zip(jax.tree.leaves((out, *grads)), jax.tree.leaves(found), strict=True):
        assert np.abs(one - many).max() < 1e-5 * np.abs(one).max()


def test_flops_of_segments_are_those_of_the_compiled_program(inputs: DeltaInputs) -> None:
    """And of the plan: segments of two chunks, of which every device composes all eight."""
    T, shards = 1024, 4
    sequence = split_sequence("ring", T, shards, 1)
    x = jax.tree.map(lambda a: np.concatenate([a] * 7, 1)[:, :T], inputs)
    taps_NFW = np.zeros((N, SPEC.channels, W), np.float32)
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,))
    split, everywhere = P(None, "context"), P()
    run = jax.shard_map(
        lambda *operands: delta_net_of_segments(*operands, sequence),
        mesh=mesh,
        in_specs=(split, everywhere, split),
        out_specs=split,
        check_vma=False,
    )
    program = mw.census(jax.jit(run), x, taps_NFW, _positions(T, ()))
    tokens = B * T // shards
    compiled = program.flops.compiled / tokens
    assert SPEC.computed_flops(T, shards) == pytest.approx(compiled, rel=1e-3)

    model = dataclasses.replace(QWEN3_NEXT, linear_key_size=64, linear_value_size=64)
    placed = place_run(tiny_run(model, "context=4,fsdp=2", seq=T))
    layout = placed.layout
    planned = sum(m.flops for m in work_of(placed).matmuls if m.role == RECURRENCE)
    per_token = sum(spec.computed_flops(T, shards) for spec in layout.spec.recurrences)
    assert planned == pytest.approx(per_token * tokens_per_device(placed))


def test_a_document_sees_no_other_on_devices(inputs: DeltaInputs) -> None:
    """Another text before a document changes nothing of it; without the boundary, it does."""
    rng, T, begin = np.random.default_rng(3), 144, 40
    taps_NFW = rng.normal(size=(N, SPEC.channels, W)).astype(np.float32)
    sequence = split_sequence("ring", T, 4, 1)

    def other_text(a: np.ndarray) -> np.ndarray:
        changed = np.array(a)
        changed[:, :begin] = changed[:, begin : 2 * begin]
        return changed

    other = jax.tree.map(other_text, inputs)

    def change(begins: tuple[int, ...]) -> float:
        positions_BT = _positions(T, begins)
        first, _, _ = _on_devices(inputs, taps_NFW, positions_BT, sequence)
        second, _, _ = _on_devices(other, taps_NFW, positions_BT, sequence)
        return float(np.abs(first - second)[:, begin:].max() / np.abs(first).max())

    assert change((begin,)) < 1e-5
    assert change(()) > 1e-2


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("fsdp=2,context=2,tensor=2", "ring"),
        ("context=4,tensor=2", "all_gather"),
        ("data=2,context=4", "ulysses"),
    ],
)
def test_a_split_sequence_trains_as_on_one_device(mesh: str, strategy: str) -> None:
    run = tiny_run(QWEN3_NEXT, mesh, context_strategy=strategy)
    one = train_on_one_device(run, 20)
    assert_same_steps(train(run, 3, initial=one.initial), one)


def test_the_inverse_is_as_exact_as_its_entries() -> None:
    """The same key in all 64 tokens: powers of the matrix grow to 1e18, its inverse has ones and minus ones."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    inverse = jax.jit(inverse_of)(lower)
    np.testing.assert_array_equal(inverse, np.eye(64) - np.eye(64, k=-1))


def test_the_published_model() -> None:
    """Parameters, FLOPs of linear attention, and a cache that grows in every fourth layer alone."""
    run = mw.recipe("qwen3-next-80b-a3b")
    model: Any = run.model
    assert count_params(model.params()) == pytest.approx(79.67e9, rel=1e-3)
    inverse = 2 * (64**2 - 1) / 3
    head = inverse + 2 * 64 * (2 * 128 + 128) + 6 * 128 * 128
    assert forward_flops(model, 4096)["linear attention"] == pytest.approx(
        36 * (16 * 4 * 64 * 128 + 32 * head)
    )
    short, long = (
        CachePlan(model.spec(), mw.MeshShape(tensor=2), 1, s, "bfloat16").bytes_per_device
        for s in (128, 256)
    )
    assert long - short == 12 * 128 * 2 * 256 * 2 * 2 // 2
    assert 2 * short - long == 36 * 4 * (32 * 128 * 128 + 3 * 8192) // 2


def test_weights_of_another_prediction_are_left_out_with_a_note(tmp_path: Path) -> None:
    hf_models.write_folder("qwen3-next", tmp_path)
    file = tmp_path / "mtp.safetensors"
    NewSafetensorsFile(file, {"mtp.fc.weight": ("F32", (2, 2))}).tensor("mtp.fc.weight")[...] = 1.0
    # Without `model.safetensors`, which `transformers` would read alone.
    first = (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    names = dict.fromkeys(SafetensorsFile(first).entries, first.name)
    index = {"weight_map": {**names, "mtp.fc.weight": file.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    notes = open_folder(f"hf:{tmp_path}").notes
    assert any("1 tensors of the files, such as mtp.fc.weight" in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        ({"full_attention_interval": 5}, "data=1", "fix: .*--model.full-attention-interval 4"),
        ({"linear_value_heads": 6}, "data=1", "fix: .*--model.linear-value-heads 8"),
        (
            {"rotary_fraction": 0.4, "head_size": 8},
            "data=1",
            "3 features rotate, and they rotate in pairs",
        ),
        ({"convolution_taps": 1}, "data=1", "a whole number of at least 2"),
        ({}, "tensor=8", "N=4 does not divide"),
    ],
)
def test_what_does_not_go_is_refused(changes: dict[str, Any], mesh: str, message: str) -> None:
    with pytest.raises(mw.ConfigError, match=f"(?s){message}"):
        place_run(tiny_run(dataclasses.replace(QWEN3_NEXT, **changes), mesh))
