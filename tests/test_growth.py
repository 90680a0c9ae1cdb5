"""How losses grow with the number of examples: read from jaxprs, and measured on batches with repeated examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.wrapped.growth import growth

Loss = Callable[..., Any]
W = {
    "in": jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)), jnp.float32),
    "layers": jnp.ones((2, 5, 5)) / 5,
}


def net(w: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ w["in"])
    return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer) + h, None), hidden, w["layers"])[0]


def entropy(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(net(w, x), y)


def squares(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return (net(w, x)[:, 0] - y) ** 2


def masked(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    mask = (y > 0).astype(jnp.float32)
    return (entropy(w, x, y) * mask).sum() / jnp.maximum(mask.sum(), 1e-6)


def normalised(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = net(w, x)
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean(h[:, 0] * y)


def each(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.map(lambda pair: squares(w, pair[0][None], pair[1][None])[0], (x, y))


def remembered(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.checkpoint(squares)(w, x, y)


def convolved(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.conv(x[:, None, :], jnp.ones((2, 1, 2)), (1,), "SAME").mean((1, 2)) * y


def recurrent(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Over the three features, from a state of zeros."""
    return jax.lax.scan(lambda h, c: (jnp.tanh(h + c), None), jnp.zeros_like(y), x.T)[0] * y


def carried(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda total, value: (total + value, None), jnp.zeros(()), squares(w, x, y))[0]


def contrasted(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = net(w, x)
    scores = h @ h.T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


LOSSES: dict[str, tuple[Loss, int | None]] = {
    "mean": (lambda *a: entropy(*a).mean(), 0),
    "sum": (lambda *a: entropy(*a).sum(), 1),
    "sum over a number": (lambda *a: entropy(*a).sum() / 64, 1),
    "sum over the size": (lambda w, x, y: squares(w, x, y).sum() / x.shape[0], 0),
    "sum and a penalty": (lambda w, x, y: squares(w, x, y).sum() + 0.1 * (w["in"] ** 2).sum(), 1),
    "mean and a penalty": (lambda w, x, y: squares(w, x, y).mean() + 0.1 * (w["in"] ** 2).sum(), 0),
    "mean of a mask": (masked, 0),
    "batch norm": (normalised, 0),
    "vmap and sum": (lambda w, x, y: jax.vmap(lambda a, b: squares(w, a[None], b[None])[0])(x, y).sum(), 1),
    "vmap and mean": (lambda w, x, y: jax.vmap(lambda a, b: squares(w, a[None], b[None])[0])(x, y).mean(), 0),
    "one by one, mean": (lambda *a: each(*a).mean(), 0),
    "one by one, sum": (lambda *a: each(*a).sum(), 1),
    "checkpoint and sum": (lambda *a: remembered(*a).sum(), 1),
    "convolution and mean": (lambda *a: convolved(*a).mean(), 0),
    "convolution and sum": (lambda *a: convolved(*a).sum(), 1),
    "by a product": (lambda w, x, y: squares(w, x, y) @ jnp.ones_like(y), 1),
    "jit and sum": (lambda *a: jax.jit(squares)(*a).sum(), 1),
    "huber and mean": (lambda w, x, y: optax.huber_loss(net(w, x)[:, 0], y).mean(), 0),
    "bfloat16 and mean": (lambda w, x, y: squares(w, x, y).astype(jnp.bfloat16).mean(), 0),
    "mean and zeros": (lambda w, x, y: squares(w, x, y).mean() + 0 * y.sum(), 0),
    "recurrent, sum": (lambda *a: recurrent(*a).sum(), 1),
    "recurrent, mean": (lambda *a: recurrent(*a).mean(), 0),
    "a sum that is carried": (carried, None),
    "root of a mean": (lambda *a: jnp.sqrt(squares(*a).mean()), 0),
    "root of a sum": (lambda *a: jnp.sqrt(squares(*a).sum()), None),
    "pairs": (contrasted, None),
}  # fmt: skip


def batch(rows: int, labels: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((rows, 3)), jnp.float32), jnp.asarray(rng.integers(0, 5, rows), labels)


@pytest.mark.parametrize("name", LOSSES)
def test_a_degree_is_what_repeated_examples_measure(name: str) -> None:
    loss, expected = LOSSES[name]
    x, y = batch(4, jnp.int32 if "entropy" in loss.__code__.co_names or loss is masked else jnp.float32)
    twice = jnp.concatenate([x, x]), jnp.concatenate([y, y])
    traces = [jax.make_jaxpr(loss)(W, *data) for data in ((x, y), twice)]
    assert growth(*traces, [0] * len(traces[0].jaxpr.invars)) == [expected]
    if expected is not None and "penalty" not in name:
        ratio = float(loss(W, *twice)) / float(loss(W, x, y))
        assert ratio == pytest.approx(2.0**expected, rel=1e-2 if "bfloat16" in name else 1e-4)
