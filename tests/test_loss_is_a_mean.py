"""Losses that are means over the examples, or not: measured on halves of the first batch."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.activity import Activity, watched_by
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import build_mesh
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.gradients import build_gradients
from meshwright.wrapped.step import check_mean

Loss = Callable[..., Any]
ROWS = 8
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


def masked(w: Any, x: jax.Array, y: jax.Array) -> Any:
    mask = (y > 1).astype(jnp.float32)
    return (entropy(w, x, y) * mask).sum() / jnp.maximum(mask.sum(), 1e-6), {"weight": mask.sum()}


def masked_sum(w: Any, x: jax.Array, y: jax.Array) -> Any:
    mask = (y > 1).astype(jnp.float32)
    return (entropy(w, x, y) * mask).sum(), {"weight": mask.sum()}


def normalised(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = net(w, x)
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean(h[:, 0] * y)


def each(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.map(lambda pair: squares(w, pair[0][None], pair[1][None])[0], (x, y))


def remembered(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.checkpoint(squares)(w, x, y)


def convolved(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    kernel = w["in"][:2, :1].reshape(2, 1, 1) * jnp.ones((2, 1, 2))
    return jax.lax.conv(x[:, None, :], kernel, (1,), "SAME").mean((1, 2)) * y


def recurrent(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Over the three features, from a state of zeros."""
    return (
        jax.lax.scan(
            lambda h, c: (jnp.tanh(h + c), None), jnp.zeros_like(y), (x * w["in"][:, 0]).T
        )[0]
        * y
    )


def carried(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.scan(
        lambda total, value: (total + value, None), jnp.zeros(()), squares(w, x, y)
    )[0]


def contrasted(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = net(w, x)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ h.T)))


def centred(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of features whose statistics are the batch's; the output weights are 0 at first, so no value shows it."""
    h = net(w, x)
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean((h @ (w["layers"][0, :, 0] - 0.2) - y) ** 2)


def gathered(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = jax.lax.all_gather(net(w, x), ("data", "fsdp"), tiled=True)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ h.T)))


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """Passes its argument on, and clips the cotangent."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.02, 0.02),))


def clipping(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return (clipped(net(w, x)[:, 0] - y) ** 2).mean()


def penalty(w: Any) -> jax.Array:
    return 0.1 * (w["in"] ** 2).sum()


def noisy(w: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    return squares(w, x + jax.random.normal(key, x.shape), y)


LOSSES: dict[str, tuple[Loss, bool]] = {
    "mean": (lambda *a: entropy(*a).mean(), False),
    "sum": (lambda *a: entropy(*a).sum(), True),
    "sum over a number": (lambda *a: entropy(*a).sum() / 64, True),
    "sum over the size": (lambda w, x, y: squares(w, x, y).sum() / x.shape[0], False),
    "sum and a penalty": (lambda w, x, y: squares(w, x, y).sum() + penalty(w), True),
    "mean and a penalty": (lambda w, x, y: squares(w, x, y).mean() + penalty(w), False),
    "mean of a mask": (masked, False),
    "sum of a mask": (masked_sum, True),
    "batch norm": (normalised, False),
    "vmap and sum": (
        lambda w, x, y: jax.vmap(lambda a, b: squares(w, a[None], b[None])[0])(x, y).sum(),
        True,
    ),
    "one by one, mean": (lambda *a: each(*a).mean(), False),
    "one by one, sum": (lambda *a: each(*a).sum(), True),
    "checkpoint and sum": (lambda *a: remembered(*a).sum(), True),
    "convolution and mean": (lambda *a: convolved(*a).mean(), False),
    "convolution and sum": (lambda *a: convolved(*a).sum(), True),
    "by a product": (lambda w, x, y: squares(w, x, y) @ jnp.ones_like(y), True),
    "jit and sum": (lambda *a: jax.jit(squares)(*a).sum(), True),
    "huber and mean": (lambda w, x, y: optax.huber_loss(net(w, x)[:, 0], y).mean(), False),
    "bfloat16 and mean": (lambda w, x, y: squares(w, x, y).astype(jnp.bfloat16).mean(), False),
    "bfloat16 and sum": (lambda w, x, y: squares(w, x, y).astype(jnp.bfloat16).sum(), True),
    "mean and zeros": (lambda w, x, y: squares(w, x, y).mean() + 0 * y.sum(), False),
    "recurrent, sum": (lambda *a: recurrent(*a).sum(), True),
    "recurrent, mean": (lambda *a: recurrent(*a).mean(), False),
    "a sum that is carried": (carried, True),
    "root of a mean": (lambda *a: jnp.sqrt(squares(*a).mean()), False),
    "root of a sum": (lambda *a: jnp.sqrt(squares(*a).sum()), False),
    "pairs": (contrasted, False),
    "statistics that no value shows": (centred, False),
    "gathered pairs": (gathered, False),
    "a clipped cotangent": (clipping, False),
    "dropout and mean": (lambda w, x, y, key: noisy(w, x, y, key).mean(), False),
    "dropout and sum": (lambda w, x, y, key: noisy(w, x, y, key).sum(), True),
}


class Announced:
    """Results of the activities that it watches."""

    def __init__(self) -> None:
        self.results: list[str] = []

    def began(self, activity: Activity) -> None:
        pass

    def ended(self, activity: Activity, *, failed: bool) -> None:
        self.results.append(activity.result)


TOGETHER = (
    "batch norm",
    "root of a mean",
    "root of a sum",
    "pairs",
    "statistics that no value shows",
)
"""Losses that depend on which examples are together."""


def placed(
    name: str, mesh: str, microbatches: int = 1, local_batch: bool = False
) -> tuple[DeviceRun, Any]:
    """A loss of the table on a mesh, and its batch."""
    loss = LOSSES[name][0]
    rng = np.random.default_rng(1)
    integers = "entropy" in loss.__code__.co_names
    y = rng.integers(0, 5, ROWS).astype(np.int32 if integers else np.float32)
    batch = {"x": rng.standard_normal((ROWS, 3)).astype(np.float32), "y": y}

    def of_batch(w: Any, batch: Any) -> Any:
        return loss(w, batch["x"], batch["y"])

    def of_key(w: Any, batch: Any, key: jax.Array) -> Any:
        return loss(w, batch["x"], batch["y"], key)

    function = of_key if "dropout" in name else of_batch
    model = mw.wrap(W, function, lambda step: batch, local_batch=local_batch)
    run = model.run(mesh=mesh, microbatches=microbatches, grad_clip_norm=0.0)
    device_run = place_on_devices(run, build_mesh(run.mesh, jax.devices()))  # type: ignore[arg-type]
    return device_run, jax.device_put(batch, device_run.batch_sharding)


def check(name: str, mesh: str, microbatches: int = 1, local_batch: bool = False) -> str:
    """Checks a loss of the table; returns what was announced."""
    announced = Announced()
    with watched_by(announced):
        check_mean(*placed(name, mesh, microbatches, local_batch))
    return "".join(announced.results)


def gradient(name: str, mesh: str, microbatches: int = 1) -> Any:
    """Gradient of a loss of the table, as the step computes it."""
    device_run, batch = placed(name, mesh, microbatches)
    params = device_run.initial_state().params
    step = jnp.zeros((), jnp.int32)
    return jax.device_get(jax.jit(build_gradients(device_run))(params, step, batch)[0])


@pytest.mark.parametrize(
    ("name", "microbatches"), [("gathered pairs", 1), ("a clipped cotangent", 2)]
)
def test_the_gradient_is_that_of_one_device(name: str, microbatches: int) -> None:
    alone, split = gradient(name, "data=1"), gradient(name, "data=2,fsdp=2", microbatches)
    for path, value in alone.items():
        np.testing.assert_allclose(
            split[path], value, atol=3e-6 * np.abs(value).max(), err_msg=path
        )


@pytest.mark.parametrize("name", TOGETHER)
def test_a_loss_of_examples_together_is_refused_or_accepted_by_a_word(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(name, "data=2")
    assert "lax.all_gather(x, (" in refused.value.fix
    assert "local_batch=True" in refused.value.fix
    assert "over each device's examples" in check(name, "data=2", local_batch=True)


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_is_refused_and_a_mean_passes(name: str) -> None:
    if not LOSSES[name][1]:
        if name not in TOGETHER:
            assert check(name, "data=2").startswith(
                "the loss communicates" if name == "gathered pairs" else "the loss is a mean"
            )
        return
    with pytest.raises(ConfigError) as caught:
        check(name, "data=2")
    assert "a sum over the 4 of 8 examples" in str(caught.value)


def test_the_arithmetic_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        check("sum", "data=2", microbatches=2)
    numbers = re.search(
        r"it is ([\d.]+) for 4 examples, and ([\d.]+) and ([\d.]+) for", caught.value.truth
    )
    assert numbers is not None
    both, first, second = map(float, numbers.groups())
    assert both == pytest.approx(first + second, rel=1e-4)


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=1"])
def test_what_one_device_has_is_compared_where_it_has_one_example_or_all(mesh: str) -> None:
    announced = check("mean", mesh)
    assert announced.startswith("the loss is a mean") if mesh != "data=1" else not announced
    if mesh == "data=1":
        assert check("sum", mesh) == ""
        return
    with pytest.raises(ConfigError, match="a sum over the 1 of 8"):
        check("sum", mesh)
