"""What a layer saves for its backward pass where nothing is recomputed, counted in the step and as it is planned.

The step is traced and not compiled, at the real sizes of a recipe of each family: residuals are the outputs of the scan
over layers that its reversed scan reads.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var, jaxprs_in_params

from meshwright.config import MeshShape
from meshwright.fine_tuning import FineTune
from meshwright.hardware.machine import Machine
from meshwright.hardware.mesh import build_mesh
from meshwright.models.families.gpt_oss import GptOss
from meshwright.models.kernels.attention import FEATURES, Kernels
from meshwright.models.remat import ATTN_LSE, ATTN_OUT
from meshwright.planner.memory_model import memory_by_category
from meshwright.planner.work import work_of
from meshwright.runs.catalogue import catalogue
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.settle import settle
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.gradients import build_gradients

# A fused kernel saves what cuDNN's does: its inputs, its output in a layout of its own, and the log-sum-exp.


@jax.custom_vjp
def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """Returns an array of the shape and dependence of attention's output."""
    return _attend_fwd(q_BTNH, k_BSKH, v_BSKH)[0]


def _attend_fwd(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> tuple[jax.Array, Any]:
    total = q_BTNH.sum() + k_BSKH.sum() + v_BSKH.sum()
    shape = (*q_BTNH.shape[:-1], v_BSKH.shape[-1])
    out_BTNH = checkpoint_name(jnp.broadcast_to(total, shape), ATTN_OUT)
    lse_BNT = checkpoint_name(out_BTNH[..., 0].swapaxes(1, 2).astype(jnp.float32), ATTN_LSE)
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT)


def _attend_bwd(saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    *inputs, out, lse = saved
    total = (g.sum() + out.sum() + lse.sum()).astype(g.dtype)
    return tuple(total * x for x in inputs)


attend.defvjp(_attend_fwd, _attend_bwd)


def self_attention(
    q: Any, k: Any, v: Any, segments: Any, *, window: Any, scores: Any = None
) -> Any:
    """The kernel, for layers of any kind."""
    return attend(q, k, v)


KERNEL = Kernels("counted", self_attention, features=frozenset(FEATURES))


class Residuals(NamedTuple):
    """Bytes that the scans over layers save for their backward passes."""

    activations: int
    """Of arrays that depend on the layers' input, each once in each shape: compilers merge equal reshapes, and keep an
    attention output as the kernel wrote it beside its reshape (GPT-2 XL and OLMo 2 13B, compiled for A100 and B200)."""
    weights: int
    """Of arrays with dimensions that depend on parameters alone."""


def scans(jaxpr: Any) -> Iterator[Any]:
    """Yields the scans of a program, those inside of others too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from scans(inner)


def residuals_of(device_run: DeviceRun) -> Residuals:
    """Counts the residuals of a run's gradients."""
    gradients = build_gradients(device_run)
    abstract = device_run.abstract
    traced = jax.make_jaxpr(gradients)(abstract.params, abstract.step, device_run.abstract_batch)
    activations = weights = 0
    for scan in scans(traced.jaxpr):
        body, length = scan.params["jaxpr"], scan.params["length"]
        body = getattr(body, "jaxpr", body)
        groups = scan.params["ft_in"].update(list(range(len(body.invars)))).unpack()
        consts, carry, _ = (len(list(group)) for group in groups)
        carried = [v.aval.shape for v in body.invars[consts : consts + carry]]
        widths = [shape[-1] for shape in carried if len(shape) == 3]
        if scan.params["reverse"] or device_run.run.model.spec().width not in widths:
            continue  # the backward pass, or a scan of something else: chunks of the loss or of attention
        dependent = set(body.invars[consts : consts + carry])
        source = dict[Any, Any]()
        for equation in body.eqns:
            if any(isinstance(v, Var) and v in dependent for v in equation.invars):
                dependent.update(equation.outvars)
                if equation.primitive.name == "reshape":
                    source[equation.outvars[0]] = equation.invars[0]
        saved = dict[Any, int]()
        for v in body.outvars[carry:]:
            if not isinstance(v, Var):
                continue
            if v in dependent:
                size = v.aval.size * v.aval.dtype.itemsize
                shape = v.aval.shape
                while v in source:
                    v = source[v]
                saved[v, shape] = size
                continue
            weights += length * v.aval.size * v.aval.dtype.itemsize * (v.aval.ndim > 0)
        activations += length * sum(saved.values())
    return Residuals(activations, weights)


def device_run_of(
    recipe: str,
    tuning: FineTune = FineTune(),  # noqa: B008
    **fields: Any,
) -> DeviceRun:
    """A recipe on one device with sequences of 1,024 tokens, that recomputes nothing.

    fields: of the model.
    """
    run = find_recipe(recipe)
    training = dataclasses.replace(
        run.training, batch=1, seq=1024, microbatches=1, remat="none", dropout=0.0,
        compute_dtype="bfloat16", param_dtype="float32", attention_kernel=KERNEL,
    )  # fmt: skip
    model = dataclasses.replace(run.model, vocab=run.model.vocab or 50257, **fields)
    run = dataclasses.replace(
        run, model=model, training=training, mesh=MeshShape(), finetune=tuning
    )
    return place_on_devices(run, build_mesh(MeshShape()))


def planned_activations(device_run: DeviceRun) -> float:
    """Bytes of activations as they are planned, and of frozen weights that are kept."""
    placed = device_run
    memory = memory_by_category(settle(placed, Machine("cuda")), work_of(placed), 1.0)
    return memory["activations"]


RECIPES = (
    "llama3-8b", "qwen2-7b", "qwen3-14b", "phi4", "gpt2-xl", "olmo2-13b", "olmo3-7b", "gemma2-9b", "gemma3-12b",
    "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3", "glm45-air", "llama4-scout",
    "smollm3-3b", "qwen3-next-80b-a3b", "qwen35-9b", "qwen35-35b-a3b", "gemma4-31b", "gemma4-26b-a4b",
    "granite31-8b", "ministral3-8b", "command-r-plus", "command-r7b",
    "granite4-h-micro", "granite4-h-tiny", "nemotron-h-8b", "nemotron3-nano-30b-a3b", "nemotron3-super-120b-a12b",
    "kimi-linear-48b-a3b",
)  # fmt: skip
"""At least one of each family."""


def test_every_family_is_counted() -> None:
    families = {type(find_recipe(name).model) for name in catalogue()}
    assert families <= {type(find_recipe(name).model) for name in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_layer_saves_is_planned(recipe: str) -> None:
    """Within 6 %: GELU, norms before and after a half, latents, gates, convolutions, experts and their router."""
    device_run = device_run_of(recipe)
    counted = residuals_of(device_run).activations
    assert planned_activations(device_run) == pytest.approx(counted, rel=0.06)


@pytest.mark.parametrize("base", ["compute", "int8", "nf4"])
@pytest.mark.parametrize("recipe", ["llama3-8b", "gpt2-xl", "gpt-oss-20b", "deepseek-v2-lite"])
def test_frozen_weights_are_not_saved(recipe: str, base: Any) -> None:
    """Neither as they are kept, gathered nor dequantised: they are read again where they lie."""
    device_run = device_run_of(recipe, FineTune(method="lora", base=base))
    counted = residuals_of(device_run)
    layers = len(device_run.layout.spec.layers)
    assert counted.weights <= layers * 4096, "as many bytes as a layer's index and frequencies take"
    assert planned_activations(device_run) == pytest.approx(counted.activations, rel=0.07)
    memory = memory_by_category(settle(device_run, Machine("cuda")), work_of(device_run), 1.0)
    assert memory["gathered weights"] == 0


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("nemotron-h-8b", {"pattern": "M-M*", "layers": 4}),
        ("kimi-linear-48b-a3b", {"layers": 4, "experts": 16}),
        pytest.param(
            "qwen3-next-80b-a3b", {"layers": 4, "experts": 16}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_recurrent_layers_save_what_their_adapters_read(
    recipe: str, fields: dict[str, Any]
) -> None:
    """The gated output of a recurrence, which no policy names, and products as wide as the rank."""
    device_run = device_run_of(recipe, FineTune(method="lora", rank=256), **fields)
    counted = residuals_of(device_run).activations
    assert planned_activations(device_run) == pytest.approx(counted, rel=0.05)


TINY = {
    "llama": tiny_runs.MODELS["llama"],
    "periods": GptOss(
        tiny_runs.VOCAB, 64, 4, 16, vocab_multiple=16, kv_heads=8, head_size=8, experts=4, experts_per_token=2,
        expert_mlp=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "base"),
    [("llama", "nf4"), pytest.param("periods", "compute", marks=pytest.mark.exhaustive)],
)
def test_gradients_of_adapters_do_not_depend_on_what_is_saved(model: str, base: Any) -> None:
    """On two devices that share the frozen weights, which are gathered again."""

    def gradients(remat: str) -> list[np.ndarray]:
        tuning = FineTune(method="lora", base=base, rank=4)
        run: Run = tiny_runs.tiny_run(TINY[model], "fsdp=2", finetune=tuning, remat=remat)
        device_run = tiny_runs.device_run_of(run)
        generator = np.random.default_rng(0)

        def draw(like: Any) -> np.ndarray:
            if jnp.issubdtype(like.dtype, jnp.integer):
                return generator.integers(0, 100, like.shape).astype(like.dtype)
            return (0.1 * generator.standard_normal(like.shape)).astype(like.dtype)

        abstract = device_run.abstract
        params = jax.tree.map(
            lambda like: jax.device_put(draw(like), like.sharding), abstract.params
        )
        compute = jax.jit(build_gradients(device_run))
        found = compute(params, jnp.int32(0), tiny_runs.random_batch(device_run))[0]
        return [np.asarray(x) for x in jax.tree.leaves(found)]

    saved, recomputed = gradients("none"), gradients("full")
    assert saved and max(float(np.abs(x).max()) for x in saved) > 0
    for a, b in zip(saved, recomputed, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
