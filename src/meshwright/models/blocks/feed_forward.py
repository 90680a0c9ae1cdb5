"""Dense feed-forward half of a layer: gated (SwiGLU, arXiv:2002.05202; GeGLU) or a plain MLP with
GELU or the square of ReLU."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwright.models.blocks.layers import linear, linears
from meshwright.models.model import Aux, ForwardContext, Kind
from meshwright.models.remat import recomputed, save_as_it_is
from meshwright.sharding.params import Param


@dataclasses.dataclass(frozen=True)
class FeedForward(Kind):
    """Dense feed-forward of one kind of layers."""

    hidden: int
    """Feed-forward width F."""
    out_std: float
    """Initial standard deviation of the projection down."""
    kind: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    """Hidden features: silu(gate) * up, gelu(gate) * up, gelu(up),
    or relu(up)^2 (Primer, arXiv:2109.08668)."""
    bias: bool = False
    """Whether all projections have biases."""

    scope = "feed-forward"

    @property
    def _names(self) -> tuple[str, ...]:
        return ("up",) if self.kind in ("gelu", "relu2") else ("gate", "up")

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, F = layers, self.width, self.hidden
        params = {name: Param((L, D, F), "LDF", role="ffn_in") for name in self._names}
        params["down"] = Param((L, F, D), "LFD", std=self.out_std, role="ffn_out")
        if self.bias:
            params |= {f"{name}_bias": Param((L, F), "LF", "zeros") for name in self._names}
            params["down_bias"] = Param((L, D), "LD", "zeros")
        return params

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        return {"hidden_products": 1 / len(self._names)}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the feed-forward of a step's tokens."""

        def feed(h_BTD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, Aux]:
            products = ctx.column_parallel(linears, h_BTD, [w[name] for name in self._names])
            if self.bias:
                biases = [w[f"{name}_bias"] for name in self._names]
                products = [x + bias for x, bias in zip(products, biases, strict=True)]
            hidden_BTF = _HIDDEN[self.kind](*map(ctx.save_hidden, products))
            y_BTD = ctx.row_parallel(linear, hidden_BTF, w["down"])
            if self.bias:
                y_BTD = y_BTD + w["down_bias"]
            return y_BTD, {}

        return feed


def swiglu(h_BTD: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    """Returns (silu(h gate) * h up) down, unreduced over `tensor`."""
    gate_BTF, up_BTF = map(save_as_it_is, linears(h_BTD, [gate, up]))
    return linear(_HIDDEN["swiglu"](gate_BTF, up_BTF), down)


def relu2_mlp(h_BTD: jax.Array, up: Any, down: Any) -> jax.Array:
    """Returns relu(h up)^2 down, unreduced over `tensor`."""
    up_BTF = save_as_it_is(linear(h_BTD, up))
    return linear(_relu2(up_BTF), down)


@recomputed
def _silu_product(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_BTF) * up_BTF


@recomputed
def _gelu_product(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate_BTF, approximate=True) * up_BTF


@recomputed
def _gelu(up_BTF: jax.Array) -> jax.Array:
    return jax.nn.gelu(up_BTF)


@recomputed
def _relu2(up_BTF: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(up_BTF))


_HIDDEN: dict[str, Callable[..., jax.Array]] = {
    "swiglu": _silu_product,
    "geglu": _gelu_product,
    "gelu": _gelu,
    "relu2": _relu2,
}
