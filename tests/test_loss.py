"""Vocabulary-parallel cross-entropy against optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from meshwright.config import MeshShape
from meshwright.hardware.mesh import build_mesh
from meshwright.models.loss import chunk_tokens, join_chunks, split_chunks, token_losses


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("chunk", [24, 6, 1, 5])
def test_matches_unsharded_loss(tensor: int, chunk: int) -> None:
    tokens, vocab, width = 24, 45, 8
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(tokens, width)).astype(np.float32), np.zeros((48, width), np.float32)
    w[:vocab] = rng.normal(size=(vocab, width))
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    weight = rng.normal(size=(2, tokens)).astype(np.float32)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = x @ w[:vocab].T
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (nll * weight[0] + jax.nn.logsumexp(logits, -1) * weight[1]).sum()

    def split(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def total(x: jax.Array, w: jax.Array) -> jax.Array:
            nll, lse = token_losses(x, w, labels, vocab, chunk)
            return (nll * weight[0] + lse * weight[1]).sum()

        value, (gx, gw) = jax.value_and_grad(total, (0, 1))(x, w)
        return value, (
            jax.lax.psum(gx, "tensor"),
            gw,
        )  # as the backward pass of sequence_all_gather sums it

    mesh = build_mesh(MeshShape(tensor=tensor))
    sharded = jax.jit(
        functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), P("tensor")),
            out_specs=(P(), (P(), P("tensor"))),
            check_vma=False,
        )(split)
    )(x, w)
    value, grads = jax.value_and_grad(plain, (0, 1))(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(sharded[0], value, rtol=1e-5)
    np.testing.assert_allclose(sharded[1][0], grads[0], atol=1e-5)
    np.testing.assert_allclose(sharded[1][1], grads[1], atol=1e-5)


@given(tokens=st.integers(1, 5000), vocab=st.integers(1, 200_000), mib=st.integers(0, 64))
def test_chunks_fit_the_limit_and_are_few(tokens: int, vocab: int, mib: int) -> None:
    """At most twice the chunks that the limit asks for, also where the tokens are a prime number."""
    chunk = chunk_tokens(tokens, vocab, mib)
    assert chunk == 1 or chunk * vocab * 4 <= mib * 2**20
    most = min(tokens, max(1, mib * 2**20 // (4 * vocab)))
    chunks, fewest = -(-tokens // chunk), -(-tokens // most)
    assert fewest <= chunks <= 2 * fewest
    assert chunks * chunk - tokens < chunks


def test_chunks_of_a_prime_number_of_tokens() -> None:
    # 512 MiB are the logits of 1,046 tokens of Llama 3's vocabulary.
    assert [chunk_tokens(tokens, 128_256, 512) for tokens in (8192, 8191, 8186)] == [
        1024,
        1024,
        1024,
    ]


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 1), (7, 3), (8, 4), (5, 9)])
def test_chunks_are_joined_again(tokens: int, chunk: int) -> None:
    x = np.arange(2 * tokens).reshape(tokens, 2)
    np.testing.assert_array_equal(join_chunks(split_chunks(x, chunk), tokens), x)


def test_chunks_bound_the_memory_of_logits() -> None:
    """Logits of 1024 tokens x 8192 words take 32 MiB in float32, and 2 MiB in chunks of 64 tokens."""
    mesh = build_mesh(MeshShape())

    def peak(chunk: int) -> int:
        def total(x: jax.Array, w: jax.Array) -> jax.Array:
            return token_losses(x, w, jnp.zeros((1024,), jnp.int32), 8192, chunk)[0].sum()

        grad = jax.shard_map(
            jax.grad(total, (0, 1)), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        shapes = (
            jax.ShapeDtypeStruct((1024, 16), jnp.float32),
            jax.ShapeDtypeStruct((8192, 16), jnp.float32),
        )
        return jax.jit(grad).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert peak(1024) > 32 * 2**20
    assert peak(64) < 10 * 2**20
