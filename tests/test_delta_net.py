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
from tiny_runs import QWEN3_NEXT, tiny_run

import meshwright as mw
from meshwright.generation.cache import CachePlan
from meshwright.hugging_face.folder import open_folder
from meshwright.hugging_face.safetensors_files import NewSafetensorsFile, SafetensorsFile
from meshwright.models.blocks.delta_net import DeltaInputs, DeltaSpec, delta_net, gated_delta_rule
from meshwright.models.blocks.delta_net import unit_lower_inverse as inverse_of
from meshwright.models.flops import forward_flops
from meshwright.runs.placed_run import place_run
from meshwright.sharding.params import count_params

B, T, N, G, H, F, W = 2, 150, 2, 2, 8, 16, 4
SPEC = DeltaSpec(N, G, H, F, W)


GOLDEN = hf_models.read("delta-rule")[1]


@pytest.fixture(scope="module")
def inputs() -> DeltaInputs:
    given = {n: GOLDEN[f"input/{n}"] for n in ("q", "k", "v", "decay", "rate")}
    heads = {n: given[n].reshape(B, T, N, G, *given[n].shape[3:]) for n in ("v", "decay", "rate")}
    return DeltaInputs(given["q"], given["k"], heads["v"], heads["decay"], heads["rate"])


def test_chunks_are_the_recurrence_of_transformers(inputs: DeltaInputs) -> None:
    """Output, states and gradients, in float32; and the FLOPs of the compiled program are those of the formula."""
    starts_BT, empty = np.arange(T)[None].repeat(B, 0) == 0, jnp.zeros((N, B, G, H, F))

    def loss(x: DeltaInputs) -> tuple[jax.Array, Any]:
        out, states = gated_delta_rule(x, starts_BT, empty)
        return jnp.sin(out).sum(), (out, states)

    (_, (out, states)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    np.testing.assert_allclose(out, GOLDEN["output"].reshape(out.shape), atol=1e-5)
    np.testing.assert_allclose(
        states.swapaxes(0, 1), GOLDEN["state"].reshape(B, N, G, H, F), atol=1e-5
    )
    for name in ("q", "k", "v", "decay", "rate"):
        found = getattr(grads, name)
        assert (
            hf_models.largest_gap(
                np.asarray(found), GOLDEN[f"gradient/{name}"].reshape(found.shape)
            )
            < 1e-5
        )
    program = mw.census(jax.jit(lambda x: gated_delta_rule(x, starts_BT, empty)), inputs)
    # 150 tokens are three chunks of 64; products of one number by one are no matmuls.
    assert program.flops.compiled == pytest.approx(SPEC.flops(T) * B * 192, rel=1e-3)


def test_documents_of_a_row_are_rows_of_their_own(inputs: DeltaInputs) -> None:
    """Packed as separate; and in two steps, the second from what the first carries."""
    rng, cut = np.random.default_rng(1), 67
    taps_NFW, net = rng.normal(size=(N, SPEC.channels, W)).astype(np.float32), jax.jit(delta_net)
    positions_BT = np.concatenate([np.arange(cut), np.arange(T - cut)])[None].repeat(B, 0)
    packed, _ = net(inputs, taps_NFW, positions_BT)
    swapped = jax.tree.map(lambda a: np.concatenate([a[:, cut:], a[:, :cut]], 1), inputs)
    others_BT = np.concatenate([np.arange(T - cut), np.arange(cut)])[None].repeat(B, 0)
    alone, _ = net(swapped, taps_NFW, others_BT)
    largest = np.abs(packed).max()
    assert np.abs(packed[:, cut:] - alone[:, : T - cut]).max() < 1e-5 * largest
    assert np.abs(packed[:, :cut] - alone[:, T - cut :]).max() < 1e-5 * largest
    first, carried = net(jax.tree.map(lambda a: a[:, :75], inputs), taps_NFW, positions_BT[:, :75])
    assert carried.inputs.shape == (N, B, W - 1, SPEC.channels)
    second, _ = net(
        jax.tree.map(lambda a: a[:, 75:], inputs), taps_NFW, positions_BT[:, 75:], carried
    )
    assert np.abs(np.concatenate([first, second], 1) - packed).max() < 1e-5 * largest


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
        ({}, "context=2", "state passes from token to token"),
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
