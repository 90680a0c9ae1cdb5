"""DeepSeek-V3: latent attention on every kind of mesh, published sizes, multi-token prediction, fp8 weights."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import hf_models
import jax
import ml_dtypes
import numpy as np
import pytest
from tiny_runs import (
    DEEPSEEK,
    assert_same_steps,
    largest_difference,
    tiny_run,
    train,
    train_on_one_device,
)

import meshwright as mw
from meshwright.config import MeshShape
from meshwright.data.batch import Batch
from meshwright.errors import ConfigError, WeightsError
from meshwright.generation.cache import CachePlan
from meshwright.hardware.targets import parse_target
from meshwright.hugging_face.folder import open_folder
from meshwright.hugging_face.safetensors_files import SafetensorsFile
from meshwright.models.adapters import AdaptedWeight
from meshwright.models.blocks.latent import absorb_keys, absorb_values
from meshwright.models.families.deepseek import Deepseek
from meshwright.models.flops import layer_flops, training_flops_per_token
from meshwright.models.further_loss import shift
from meshwright.planner.search import price_run
from meshwright.runs.recipe import find_recipe
from meshwright.sharding.params import count_params, named_leaves

exhaustive = pytest.mark.exhaustive
STEPS = 3
FURTHER = dataclasses.replace(DEEPSEEK, mtp_depth=1, mtp_weight=0.5)
"""With a layer that predicts the token after the next."""


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("expert=2,fsdp=2,tensor=2", {"remat": "projections"}),
        ("stage=2,fsdp=2,expert=2", {"microbatches": 4}),
        ("context=4,tensor=2", {"context_strategy": "ring"}),
        pytest.param(
            "context=2,data=2,tensor=2", {"context_strategy": "ulysses"}, marks=exhaustive
        ),
        pytest.param(
            "context=2,data=2,tensor=2", {"context_strategy": "all_gather"}, marks=exhaustive
        ),
        pytest.param(
            "data=2,tensor=4", {"tensor_strategy": "ring", "remat": "none"}, marks=exhaustive
        ),
        pytest.param("stage=2,context=2,tensor=2", {"context_strategy": "usp"}, marks=exhaustive),
    ],
    ids=str,
)
def test_the_numbers_of_one_device(mesh: str, changes: dict[str, Any]) -> None:
    run = tiny_run(DEEPSEEK, mesh, **changes)
    one = train_on_one_device(run, STEPS)
    many = train(run, STEPS, initial=one.initial)
    assert_same_steps(many, one)
    assert largest_difference(many.params, one.params) < 1e-4


def test_tokens_after_the_next_stay_in_their_document() -> None:
    row = [
        np.array([x])
        for x in ([1, 2, 3, 4], [2, 3, 4, 5], [0, 0, 1, 1], [0, 1, 0, 1], [1.0, 0.5, 2.0, 3.0])
    ]
    found = shift(jax.tree.map(np.asarray, Batch(*row)))
    # Position 1 predicts the end of a document, and position 3 has no token after the next.
    np.testing.assert_array_equal(found.inputs, [[2, 3, 4, 5]])
    np.testing.assert_array_equal(found.targets, [[3, 4, 5, 0]])
    np.testing.assert_array_equal(found.weights, [[0.5, 0, 3.0, 0]])


@pytest.mark.parametrize(
    "mesh",
    ["expert=2,fsdp=2,tensor=2", pytest.param("data=2,context=2,tensor=2", marks=exhaustive)],
)
def test_multi_token_prediction_has_the_numbers_of_one_device(mesh: str) -> None:
    run = tiny_run(FURTHER, mesh, context_strategy="ring", microbatches=2)
    one = train_on_one_device(run, STEPS)
    many = train(run, STEPS, initial=one.initial)
    assert_same_steps(many, one)
    assert largest_difference(many.params, one.params) < 1e-4
    # The bias of its router is balanced as those of the others.
    assert np.abs(one.params["mtp"]["router_bias"] - one.initial["mtp"]["router_bias"]).max() > 0


def released(folder: Path, **config: Any) -> dict[str, np.ndarray]:
    """Writes a small model as DeepSeek-V3 is released, with its multi-token prediction; returns its tensors."""
    about, _ = hf_models.read("further-token")
    tensors = hf_models.draw_tensors(about["tensors"])
    shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    tensors |= {
        f"model.layers.3.{own}.weight": tensors[f"{name}.weight"] for own, name in shared.items()
    }
    folder.mkdir(exist_ok=True)
    hf_models.write_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps({**about["config"], **config}))
    return tensors


def test_multi_token_prediction_has_the_numbers_of_transformers(tmp_path: Path) -> None:
    """The gradients of all parameters with the released layer, of `transformers`' own class for it."""
    released(tmp_path)
    _, golden = hf_models.read("further-token")
    _, found, _ = hf_models.steps_of(tmp_path, "fsdp=2,expert=2,tensor=2", steps=1)
    assert len(hf_models.names_under("gradient", golden)) > 100
    hf_models.assert_near("gradient", found, golden, 1e-5)


BLOCK = (16, 32)


def in_float8(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rewrites the matrices of layers in float8 with a scale for each block; returns their values in bfloat16."""
    stored, values, rng = {}, {}, np.random.default_rng(0)
    for name, w in tensors.items():
        if (
            w.ndim != 2
            or "layers" not in name
            or any(part in name for part in ("mlp.gate.", "embed_tokens", "head"))
        ):
            stored[name] = w if "correction_bias" in name else w.astype(ml_dtypes.bfloat16)
            continue
        rows, columns = (-(-size // n) for size, n in zip(w.shape, BLOCK, strict=True))
        scale = (0.01 * (1 + rng.random((rows, columns)))).astype(np.float32)
        whole = scale.repeat(BLOCK[0], 0).repeat(BLOCK[1], 1)[: w.shape[0], : w.shape[1]]
        stored[name], stored[f"{name}_scale_inv"] = (
            (w / whole).astype(ml_dtypes.float8_e4m3fn),
            scale,
        )
        values[name] = (
            (stored[name].astype(np.float32) * whole).astype(ml_dtypes.bfloat16).astype(np.float32)
        )
    codes = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    file = folder / "model.safetensors"
    header, data = {}, b""
    for name, tensor in stored.items():
        place = [len(data), len(data) + tensor.nbytes]
        header[name] = {
            "dtype": codes[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": place,
        }
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return values


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def test_float8_weights_come_in_dequantised(tmp_path: Path) -> None:
    folder = tmp_path / "released"
    values = in_float8(folder, released(folder, quantization_config=FP8))
    weights = open_folder(f"hf:{folder}")
    assert "weights in fp8 are read as the bfloat16 numbers that they stand for" in weights.notes
    with weights.reader() as read:
        for name, value in values.items():
            np.testing.assert_array_equal(read(name).astype(np.float32), value)
    # In and out again, the weights are no longer quantised.
    mw.convert(folder, tmp_path / "run")
    back = mw.convert(tmp_path / "run", tmp_path / "back").out
    file = SafetensorsFile(back / "model.safetensors")
    for name, value in values.items():
        np.testing.assert_array_equal(np.array(file.tensor(name)), value)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"weight_block_size": None}, "blocks of None"),
        ({"weight_block_size": [16, 16]}, r"weight_scale_inv' is \[\d, \d\], and .* needs"),
    ],
    ids=str,
)
def test_other_quantisations_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    in_float8(tmp_path, released(tmp_path, quantization_config={**FP8, **change}))
    with pytest.raises(WeightsError, match=message):
        open_folder(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("recipe", "parameters", "used", "cached"),
    [
        # arXiv:2412.19437, section 4.2; arXiv:2507.20534, table 2; arXiv:2405.04434, appendix B.
        ("deepseek-v3", 671.0e9, 37.6e9, 61 * 576),
        ("kimi-k2", 1.026e12, 32.9e9, 61 * 576),
        ("deepseek-v2-lite", 15.7e9, 2.66e9, 27 * 576),
    ],
)
def test_published_sizes(recipe: str, parameters: float, used: float, cached: int) -> None:
    model = find_recipe(recipe).model
    assert isinstance(model, Deepseek)
    leaves = named_leaves(model.params())
    total = count_params(model.params())
    idle = sum(p.size for p in leaves.values() if "E" in p.dims) * (
        1 - model.experts_per_token / model.experts
    )
    assert total == pytest.approx(parameters, rel=2e-3) and total - idle == pytest.approx(
        used, rel=2e-3
    )
    # Latents and rotary keys of every layer in bfloat16, whole on each device of `tensor`.
    plan = CachePlan(model.spec(), MeshShape(tensor=2), 1, 128, "bfloat16")
    assert plan.bytes_per_device == 128 * cached * 2
    # One layer more, its projection of two widths, and one more unembedding.
    further = dataclasses.replace(model, mtp_depth=1)
    more = training_flops_per_token(further, 4096) - training_flops_per_token(model, 4096)
    forward = (
        layer_flops(model, 4096)[-1] + 2 * 2 * model.width**2 + 2 * model.width * (model.vocab or 0)
    )
    assert more == pytest.approx(3 * forward)


def test_planned_memory_is_that_of_the_compiler() -> None:
    """DeepSeek-V3 on 2,048 H100, compiled whole: 59.3 GiB live at the peak (docs/log.md)."""
    run = find_recipe("deepseek-v3")
    training = dataclasses.replace(
        run.training, remat="feed_forward", microbatches=15, pipeline_schedule="interleaved", virtual_stages=2,
        stage_saves="layers",
    )  # fmt: skip
    mesh = MeshShape.parse("stage=2,data=4,expert=256")
    plan = price_run(
        dataclasses.replace(run, mesh=mesh, layout="zero1", training=training),
        parse_target("h100:2048"),
    )
    assert plan.estimate.bytes / 2**30 == pytest.approx(59.3, rel=0.1) and plan.estimate.fits


def test_an_odd_rotation_is_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of 2"):
        dataclasses.replace(DEEPSEEK, qk_rope_head_dim=5).params()


def test_no_family_has_fields_that_it_does_not_use() -> None:
    names = {field.name for field in dataclasses.fields(Deepseek)}
    assert not names & {
        "kv_heads",
        "head_size",
        "sliding_window",
        "qk_norm",
        "qkv_bias",
        "rope_factor",
    }


@pytest.mark.parametrize("kind", ["array", "adapter"])
def test_absorbed_projections_are_the_expanded_ones(kind: str) -> None:
    """q (W c) = (W^T q) c, with every form in which decoding has weights."""
    rng = np.random.default_rng(0)
    q, up, latent = (
        rng.standard_normal(shape, np.float32) for shape in ((1, 3, 4, 6), (5, 4, 6 + 7), (1, 3, 5))
    )
    weight: Any = up
    if kind == "adapter":
        a, b = rng.standard_normal((5, 2), np.float32), rng.standard_normal((2, 4, 13), np.float32)
        weight = AdaptedWeight(jax.numpy.asarray(up), a, b, 0.5)
        up = up + 0.5 * np.einsum("zr,rnh->znh", a, b)
    expanded = np.einsum("btz,znh->btnh", latent, up)
    scores = np.einsum("btnz,bsz->bnts", absorb_keys(q, weight), latent)
    np.testing.assert_allclose(
        scores, np.einsum("btnh,bsnh->bnts", q, expanded[..., :6]), atol=1e-4
    )
    each = np.repeat(latent[:, :, None], 4, 2)
    np.testing.assert_allclose(absorb_values(each, weight, 7), expanded[..., 6:], atol=1e-4)
