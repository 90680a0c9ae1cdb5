"""Attention kernels give the numbers of the reference; the choice of a kernel is made before tracing."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from outside.extensions.row_attention import row_kernel
from tiny_runs import MODELS, assert_same_steps, device_run_of, tiny_run, train, train_on_one_device

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.hardware.machine import Machine
from meshwright.models.kernels import blocked
from meshwright.models.kernels.attention import Kernels, reference_attention, sequence_positions
from meshwright.models.kernels.choose import choose_kernels
from meshwright.models.kernels.splash import block_size, splash_kernels
from meshwright.models.kernels.tokamax_splash import tokamax_splash_kernels
from meshwright.models.remat import REMAT_POLICIES
from meshwright.plugins import resolve
from meshwright.sharding.sequence import split_sequence
from meshwright.step.device_run import place_on_devices
from meshwright.trust import own

STRATEGIES = ("ring", "all_gather", "ulysses", "usp")


def inputs(T: int, N: int, K: int, H: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, T, n, H), jnp.float32)
        for key, n in zip(keys, (N, K, K), strict=True)
    )
    # Three documents, one of which begins in the middle of a block.
    return (
        q,
        k,
        v,
        jnp.asarray(np.repeat([[0, 1, 2], [0, 0, 1]], [T // 4, T // 2, T // 4], axis=1), jnp.int32),
    )


def reference(q: Any, k: Any, v: Any, segments: Any, *, window: int | None) -> Any:
    positions = sequence_positions(segments)
    return reference_attention(q, k, v, positions, positions, window=window)


def value_and_gradients(
    function: Any, q: Any, k: Any, v: Any, segments: Any, window: int | None
) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        out = function(q, k, v, segments, window=window)
        return jnp.sin(out).sum(), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)


def assert_close(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-5 * float(jnp.abs(y).max()))


def splash_attention(block: int = 128, backward_kernels: int = 2) -> Any:
    return splash_kernels(block, backward_kernels, interpret=True).self_attention


def splash_of(kernel: str) -> Any:
    """Splash attention of one of the libraries, interpreted."""
    if kernel == "tokamax":
        pytest.importorskip("tokamax")
        return tokamax_splash_kernels(128, interpret=True).self_attention
    return splash_attention(backward_kernels=int(kernel))


@pytest.mark.parametrize("kernel", ["2", "1", "tokamax"])
@pytest.mark.parametrize(
    ("heads", "kv", "size", "window"),
    [(4, 2, 128, None), (2, 2, 128, 40), (2, 1, 64, None)],
    ids=["grouped", "window", "heads of 64"],
)
def test_splash_matches_the_reference(
    heads: int, kv: int, size: int, window: int | None, kernel: str
) -> None:
    arrays = inputs(256, heads, kv, size)
    run = splash_of(kernel)
    # As in the step: inside a shard_map that is manual over every axis.
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))

    def sharded(q: Any, k: Any, v: Any, segments: Any, *, window: int | None) -> Any:
        body = functools.partial(run, window=window)
        spec = PartitionSpec()
        return jax.shard_map(
            body, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False
        )(q, k, v, segments)

    assert_close(
        value_and_gradients(sharded, *arrays, window),
        value_and_gradients(reference, *arrays, window),
    )


@pytest.mark.parametrize("window", [None, 20])
def test_blocked_matches_the_reference(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs(96, 4, 2, 16)
    # Scores of 24 queries and 24 keys fit, with 2 x 4 heads: four blocks of each.
    monkeypatch.setattr(blocked, "_SCORE_BYTES", 24 * 24 * 4 * 2 * 4)

    attend = resolve("attention kernel", "blocked")(512).self_attention
    text = str(jax.make_jaxpr(functools.partial(attend, window=window))(*arrays))
    # Of the 16 pairs, 10 are causal; a window of 20 reaches the block before alone.
    assert "f32[2,2,2,24,24]" in text and f"length={10 if window is None else 7}" in text
    assert_close(
        value_and_gradients(attend, *arrays, window),
        value_and_gradients(reference, *arrays, window),
    )


def test_blocked_computes_the_visible_blocks_only() -> None:
    """FLOPs of the compiled program: of 8 x 8 pairs of blocks 36 are causal, and 15 within a window of one block."""
    arrays = inputs(1024, 2, 1, 16)

    def flops(attend: Any, window: int | None) -> float:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, arrays[3], window=window).sum()

        return mw.census(jax.jit(jax.grad(loss, (0, 1, 2))), *arrays[:3]).flops.compiled

    attend = resolve("attention kernel", "blocked")(512).self_attention
    whole = flops(reference, None)
    # The reference's gradients take five matmuls; blocked attention computes output and scores as well: seven.
    assert flops(attend, None) / whole == pytest.approx(7 / 5 * 36 / 64, rel=0.02)
    assert flops(attend, 128) / whole == pytest.approx(7 / 5 * 15 / 64, rel=0.02)


def test_memory_of_blocked_attention_is_linear_in_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocked, "_SCORE_BYTES", 128 * 128 * 4 * 2 * 2)

    def temporaries(T: int) -> int:
        q, k, v, segments = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(T, 2, 1, 16))

        def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
            return (
                resolve("attention kernel", "blocked")(512)
                .self_attention(q, k, v, segments, window=None)
                .sum()
            )

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v, segments).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporaries(8192) <= 4.1 * temporaries(2048)


@pytest.mark.parametrize(
    ("tokens", "heads", "block"),
    [(131072, 32, 1024), (4096, 32, 512), (1024, 1, 128), (100, 1, 100), (4099, 1, 4099)],
)
def test_blocks_divide_the_tokens(tokens: int, heads: int, block: int) -> None:
    assert blocked.block_size(tokens, 4 * heads) == block


@pytest.mark.parametrize(
    ("seq", "largest", "block"),
    [(4096, 512, 512), (640, 512, 128), (384, 1024, 384), (128, 64, 128)],
)
def test_splash_blocks_divide_the_sequence(seq: int, largest: int, block: int) -> None:
    assert block_size(seq, largest) == block


def choose(name: str, platform: str, chip: str | None = None, **changes: Any) -> Kernels:
    settings: dict[str, Any] = {
        "block": 512, "remat": "full", "head_sizes": (128,), "dtype": "bfloat16",
        "sequence": split_sequence("ring", 256, 1, 1), **changes,
    }  # fmt: skip
    return choose_kernels(name, Machine(platform, chip), **settings)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.models.kernels.cudnn.has_cudnn", lambda: True)


@pytest.mark.usefixtures("cudnn")
def test_auto_chooses_by_platform_shapes_and_dtype() -> None:
    for platform, name in (
        ("cpu", "reference"), ("tpu", "splash"), ("gpu", "cudnn"), ("cuda", "cudnn"), ("rocm", "blocked"),
    ):  # fmt: skip
        assert choose("auto", platform).name == name
    for chip, name in (
        ("v5p", "splash"),
        ("v6e", "splash_fused"),
        ("tpu7x", "splash_fused"),
        (None, "splash"),
    ):
        assert choose("auto", "tpu", chip=chip).name == name
    for head_sizes in ((64,), (128, 64), (256,)):
        assert choose("auto", "tpu", head_sizes=head_sizes).name == "splash"
    assert choose("auto", "tpu", sequence=split_sequence("ring", 96, 1, 1)).name == "blocked"
    assert choose("auto", "gpu", dtype="float32").name == "blocked"
    assert choose("auto", "gpu", head_sizes=(256,)).name == "blocked"
    assert [choose("auto", "cpu", remat=remat).name for remat in ("none", "attention")] == [
        "reference",
        "blocked",
    ]


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("platform", "name"), [("tpu", "splash"), ("gpu", "cudnn"), ("rocm", "blocked")]
)
def test_every_strategy_runs_the_platforms_kernel(platform: str, name: str) -> None:
    names = {
        s: choose("auto", platform, sequence=split_sequence(s, 1024, 4, 2)).name for s in STRATEGIES
    }
    assert names == {
        "ring": f"ring of {name}",
        "all_gather": name,
        "ulysses": name,
        "usp": f"ring of {name}",
    }


def test_auto_states_why_it_passed_over_the_platforms_kernel() -> None:
    assert choose("auto", "tpu").summary == "splash"
    assert choose("auto", "tpu", head_sizes=(80,)).summary == (
        "blocked (splash attention takes a head size divisible by 64: 80 = 1 * 64 + 16)"
    )
    ring = choose("auto", "tpu", sequence=split_sequence("ring", 640, 4, 2))
    assert ring.summary == (
        "ring of blocked (splash attention takes a chunk of the sequence divisible by 128: 80 = 0 * 128 + 80)"
    )
    assert (
        "which reference lacks"
        in choose("auto", "cpu", sequence=split_sequence("ring", 64, 4, 2)).summary
    )


def test_without_cudnn_gpus_use_blocked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.models.kernels.cudnn.has_cudnn", lambda: False)
    assert choose("auto", "cuda").name == "blocked"
    with pytest.raises(ConfigError, match=r"libcudnn.so.9"):
        choose("cudnn", "cuda")


def test_without_tokamax_its_kernel_is_refused_and_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hardware that a plan is for counts as having the libraries of its kernels."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'meshwright\[tokamax\]'"):
        choose("tokamax_splash", "tpu")
    planned = choose_kernels(
        "tokamax_splash",
        Machine("tpu", "v6e", installed=True),
        block=None,
        remat="full",
        head_sizes=(128,),
        dtype="bfloat16",
        sequence=split_sequence("ring", 8192, 1, 1),
    )
    assert planned.name == "tokamax_splash"


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("name", "platform", "changes", "reason"),
    [
        ("splash", "gpu", {}, "a TPU kernel"),
        ("tokamax_splash", "gpu", {}, "a TPU kernel"),
        ("splash", "tpu", {"head_sizes": (80,)}, "80 = 1 \\* 64 \\+ 16"),
        (
            "splash",
            "tpu",
            {"sequence": split_sequence("ring", 160, 1, 1)},
            "160 = 1 \\* 128 \\+ 32",
        ),
        ("splash", "tpu", {"sequence": split_sequence("ring", 256, 2, 1)}, "64 = 0 \\* 128 \\+ 64"),
        (
            "reference",
            "cpu",
            {"sequence": split_sequence("ring", 256, 2, 1)},
            "in a ring, which reference lacks",
        ),
        ("cudnn", "tpu", {}, "NVIDIA GPUs"),
        ("cudnn", "gpu", {"dtype": "float32"}, "the compute dtype is float32"),
        ("cudnn", "gpu", {"head_sizes": (192,)}, "the head size is 192"),
        ("reference", "cpu", {"remat": "attention"}, "saves its scores"),
        (
            own("outside.extensions.row_attention:row_kernel"),
            "gpu",
            {},
            "written for TPUs and interpreted on CPUs",
        ),
        (own("outside.extensions.zbv:zbv"), "cpu", {}, "it is a PipelineSchedule"),
        ("splsh", "tpu", {}, "did you mean 'splash'"),
    ],
)
def test_a_named_kernel_is_used_or_refused(
    name: str, platform: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(name, platform, **changes)
    assert choose("blocked", platform).name == "blocked"


def test_a_run_with_a_kernel_that_its_shapes_cannot_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--training\.attention-kernel splash"):
        device_run_of(tiny_run(MODELS["llama"], attention_kernel="splash"))


@pytest.mark.exhaustive
def test_pallas_kernel_from_outside_gives_the_numbers_of_the_reference() -> None:
    run = tiny_run(MODELS["qwen-like"], "data=2,fsdp=2,tensor=2", attention_kernel=row_kernel)
    assert device_run_of(run).kernels.name == "row"
    one = train_on_one_device(run, 20)
    assert_same_steps(train(run, 3, initial=one.initial), one)


@pytest.mark.parametrize("score_bytes", [2**28, 24 * 24 * 4 * 4], ids=["one block", "four blocks"])
def test_dropped_scores_are_not_saved(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_SCORE_BYTES", score_bytes)
    q, k, v, segments = (x[:1] for x in inputs(96, 4, 2, 16))

    def saved(remat: str) -> int:
        attend = choose("auto", "cpu", remat=remat).self_attention
        _, vjp = jax.vjp(
            lambda q, k, v: jnp.sin(attend(jnp.sin(q), k, v, segments, window=None)), q, k, v
        )
        return sum(x.nbytes for x in jax.tree.leaves(vjp))

    scores = 4 * 4 * 96 * 96
    assert saved("none") > 3 * scores and saved("attention") < scores


def test_splash_saves_its_output_once() -> None:
    q, k, v, segments = (x[:1] for x in inputs(256, 4, 2, 128))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jnp.sin(splash_attention()(q, k, v, segments, window=None))

    policy = REMAT_POLICIES["projections"].policy
    _, vjp = jax.vjp(jax.checkpoint(attend, policy=policy), q, k, v)
    # The queries and the attention output, once.
    assert sum(x.size == q.size for x in jax.tree.leaves(vjp)) == 2


@pytest.mark.parametrize(
    ("remat", "instead"), [("offload", "full"), ("offload_attention", "projections")]
)
def test_offload_on_gpus_is_refused(remat: Any, instead: str) -> None:
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    mesh: Any = SimpleNamespace(
        axis_names=("data",), devices=np.array([device], dtype=object), shape={"data": 1}
    )
    with pytest.raises(ConfigError, match="on NVIDIA H100") as error:
        place_on_devices(tiny_run(MODELS["llama"], "data=1", remat=remat), mesh)
    assert f"--training.remat {instead}" in str(error.value)
