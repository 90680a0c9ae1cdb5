"""Chunk kernels: masks between chunks, cuDNN's split by documents, and how often a forward kernel runs per policy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshwright.models.blocks.context import build_attend
from meshwright.models.kernels import cudnn
from meshwright.models.kernels.attention import reference_attention, sequence_positions
from meshwright.models.kernels.blocked import blocked_chunks
from meshwright.models.kernels.chunks import FULL, ChunkMask, pair_mask, self_attention_of
from meshwright.models.kernels.splash import splash_kernels
from meshwright.models.remat import QKV, REMAT_POLICIES
from meshwright.plugins import resolve
from meshwright.sharding.sequence import split_sequence


@pytest.mark.parametrize("window", [None, 1, 5, 8, 11, 40])
def test_masks_between_chunks_are_those_of_the_sequence(window: int | None) -> None:
    size, chunks = 8, 4
    distance = np.arange(size * chunks)[:, None] - np.arange(size * chunks)[None, :]
    whole = (distance >= 0) & (True if window is None else distance < window)
    for i, j in np.ndindex(chunks, chunks):
        part = whole[i * size : (i + 1) * size, j * size : (j + 1) * size]
        mask = pair_mask((i - j) * size, size, size, window)
        assert (mask is None) == (not part.any()) and (mask == FULL) == part.all()
        if mask is not None:
            documents = jnp.zeros((1, size), jnp.int32)
            np.testing.assert_array_equal(mask.visible(documents, documents)[0], part)
            assert mask.visible_fraction(size, size) == part.mean()


def draw(T: int, documents: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, T, n, 8)), jnp.float32) for n in (4, 2, 2))
    return q, k, v, jnp.asarray(np.sort(rng.integers(0, documents, (2, T)), axis=1), jnp.int32)


class CountedCudnn:
    """cuDNN's two kernels, computed by XLA; counts pairs with and without a mask of documents when they run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple[str, bool]] = []
        monkeypatch.setattr(cudnn, "_call_forward", self.forward)
        monkeypatch.setattr(cudnn, "_call_backward", self.backward)

    def count(self, kind: str, masked: bool) -> None:
        jax.debug.callback(lambda: self.calls.append((kind, masked)))

    def forward(self, queries: Any, keys: Any, mask: ChunkMask, masked: bool) -> Any:
        self.count("forward", masked)
        return blocked_chunks.forward(*self.documents(queries, keys, masked), mask)

    def backward(
        self, queries: Any, keys: Any, result: Any, g: Any, mask: ChunkMask, masked: bool
    ) -> Any:
        self.count("backward", masked)
        return blocked_chunks.backward(*self.documents(queries, keys, masked), result, g, mask)

    def documents(self, queries: Any, keys: Any, masked: bool) -> tuple[Any, Any]:
        """Without a mask cuDNN sees every document."""
        zeros = 1 if masked else 0
        return (
            queries._replace(segments_BT=queries.segments_BT * zeros),
            keys._replace(segments_BS=keys.segments_BS * zeros),
        )


@pytest.mark.parametrize(
    ("documents", "window", "forward"),
    [
        # One document: one kernel for the whole sequence. With three, of 10 causal pairs of chunks of 8 tokens, three
        # have no document in common, and two a single one.
        (1, None, {False: 1}), (1, 10, {False: 1}), (3, None, {True: 5, False: 2}), (3, 10, {True: 5, False: 2}),
    ],
)  # fmt: skip
def test_cudnn_runs_documents_pair_by_pair(
    documents: int, window: int | None, forward: dict[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "CHUNK", 8)
    counted = CountedCudnn(monkeypatch)
    q, k, v, segments = draw(32, documents)
    positions = sequence_positions(segments)

    def value_and_gradients(attend: Any) -> Any:
        return jax.jit(
            jax.value_and_grad(lambda q, k, v: jnp.sin(attend(q, k, v)).sum(), (0, 1, 2))
        )(q, k, v)

    attention = self_attention_of(cudnn.cudnn_chunks)
    ours = value_and_gradients(lambda q, k, v: attention(q, k, v, segments, window=window))
    jax.effects_barrier()
    truth = value_and_gradients(
        lambda q, k, v: reference_attention(q, k, v, positions, positions, window=window)
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for kind in ("forward", "backward"):
        ran = [masked for name, masked in counted.calls if name == kind]
        assert {masked: ran.count(masked) for masked in set(ran)} == forward


def test_masks_of_documents_are_not_kept_for_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs only documents is the same in every layer, and would be computed before the loop over layers."""
    monkeypatch.setattr(cudnn, "CHUNK", 8)
    _, k, _, segments = draw(64, 3)

    def loss(x: Any, segments: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            return x + self_attention_of(cudnn.cudnn_chunks)(x, x, x, segments, window=None), None

        layer = jax.checkpoint(
            layer, prevent_cse=False, policy=REMAT_POLICIES["attention_out"].policy
        )
        return jax.lax.scan(layer, x, length=2)[0].sum()

    # 36 causal pairs: 8 on the diagonal and 28 below it, each with a mask [batch, 1, 8, 8].
    program = str(jax.make_jaxpr(jax.grad(loss))(k, segments))
    assert "f32[2,1,8,8]" in program
    assert not [pairs for pairs in (8, 28) if f"f32[{pairs},2,1,8,8]" in program]


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_cudnn_in_context_parallelism(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "CHUNK", 8)
    CountedCudnn(monkeypatch)
    T, shards = 64, 2
    q, k, v, segments = draw(T, 3)
    split = split_sequence(strategy, T, shards, 2)
    order = split.position_order()
    mesh, spec = Mesh(np.array(jax.devices()[:shards]), ("context",)), P(None, "context")

    def body(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return build_attend(split, segments, resolve("attention kernel", "cudnn")(512))(
            q, k, v, window=None
        )

    sharded = jax.shard_map(
        body, mesh=mesh, in_specs=(*(spec,) * 3, P()), out_specs=spec, check_vma=False
    )
    out = jax.jit(sharded)(q[:, order], k[:, order], v[:, order], segments)[:, np.argsort(order)]
    positions = sequence_positions(segments)
    np.testing.assert_allclose(
        out, reference_attention(q, k, v, positions, positions, window=None), rtol=1e-5, atol=1e-5
    )


def calls(jaxpr: Any, name: str) -> int:
    """Executions of the primitives of a name in a jaxpr, loops included."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        leaves = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        )
        inner = sum(
            calls(getattr(leaf, "jaxpr", leaf), name) for leaf in leaves if hasattr(leaf, "eqns")
        )
        total += times * inner + (
            equation.primitive.name == "pallas_call" and name in str(equation.params["name"])
        )
    return total


@pytest.mark.parametrize(("remat", "forward"), [("full", 2), ("projections", 1), ("none", 1)])
@pytest.mark.parametrize(("strategy", "shards"), [("ring", 1), ("ring", 4), ("all_gather", 2)])
def test_a_saved_output_is_not_computed_again(
    strategy: str, shards: int, remat: str, forward: int
) -> None:
    kernels = splash_kernels(128, interpret=True)
    split = split_sequence(strategy, 256 * shards, shards, 1)
    mesh, spec = Mesh(np.array(jax.devices()[:shards]), ("context",)), P(None, "context")
    policy = REMAT_POLICIES[remat].policy

    def body(x: Any, segments: Any) -> Any:
        def layer(x: Any) -> Any:
            q, k, v = (jax.ad_checkpoint.checkpoint_name(jnp.sin(n * x), QKV) for n in (1, 2, 3))
            return jnp.sin(build_attend(split, segments, kernels)(q, k, v, window=None))

        wrapped = layer if policy is None else jax.checkpoint(layer, policy=policy)
        return jax.grad(lambda x: wrapped(x).sum())(x)

    function = jax.shard_map(body, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((1, split.seq, 1, 128), jnp.float32)
    jaxpr = jax.make_jaxpr(function)(x, jax.ShapeDtypeStruct((1, split.seq), jnp.int32)).jaxpr
    # A ring of n: own keys, and two pairs for every other device; gathered keys: two own chunks, 2n - 1 pairs.
    pairs = (
        1
        if shards == 1
        else {"ring": 1 + 2 * (shards - 1), "all_gather": 2 + 2 * shards - 1}[strategy]
    )
    assert calls(jaxpr, "splash_mha_fwd") == forward * pairs
    assert calls(jaxpr, "splash_mha_dkv") == pairs
