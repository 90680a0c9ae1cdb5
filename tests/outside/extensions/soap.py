"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.config import Optimizer


class SoapState(NamedTuple):
    """State of `scale_by_soap`; each field but `step` has the tree of the parameters."""

    step: jax.Array
    """Updates so far; int32 scalar."""
    momentum: Any
    """Mean gradient, like the parameters."""
    second_moment: Any
    """Mean square of the rotated gradient, like the parameters."""
    factors: Any
    """Mean covariance [L, d, d] of the gradient along each dimension d of a matrix; () for other parameters."""
    bases: Any
    """Approximate eigenvectors of `factors`, in columns."""


def soap(config: Optimizer, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns SOAP with the betas, epsilon and weight decay of `config`; weight decay applies to stacked matrices."""
    return optax.chain(
        scale_by_soap(config.beta1, config.beta2, config.epsilon, every=10),
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda params: jax.tree.map(_is_matrix, params)
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_soap(
    beta1: float, beta2: float, epsilon: float, *, every: int
) -> optax.GradientTransformationExtraArgs:
    """Scales gradients of stacked matrices as Adam does in a rotated basis; other parameters get plain Adam.

    The gradient G [L, D, F] of a stack of matrices is rotated to U' G V, where U and V are eigenvectors of the factors
    E[G G'] and E[G' G]. They are refreshed every `every` steps by one step of orthogonal iteration (QR), section 3.
    """

    def init(params: optax.Params) -> SoapState:
        momentum, second_moment = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        factors = jax.tree.map(
            lambda p: tuple(jnp.zeros((p.shape[0], n, n), p.dtype) for n in _sides(p)), params
        )
        bases = jax.tree.map(
            lambda f: jnp.broadcast_to(jnp.eye(f.shape[1], dtype=f.dtype), f.shape), factors
        )
        return SoapState(jnp.zeros((), jnp.int32), momentum, second_moment, factors, bases)

    def update(
        grads: optax.Updates,
        state: SoapState,
        params: optax.Params | None = None,
        *,
        layer_map: Any = None,
        **_: Any,
    ) -> tuple[optax.Updates, SoapState]:
        step, refresh = state.step + 1, state.step % every == 0
        momentum = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.momentum, grads)

        def adam(m: jax.Array, v: jax.Array) -> jax.Array:
            return m / (1 - beta1**step) / (jnp.sqrt(v / (1 - beta2**step)) + epsilon)

        # Rotations and factors take whole matrices: with a layer map each device computes those of its own layers.
        @jax.default_matmul_precision(
            "float32"
        )  # The matrix units of accelerators would round to bfloat16.
        def of_layers(
            g: jax.Array, m: jax.Array, v: jax.Array, factors: Any, bases: Any
        ) -> tuple[Any, ...]:
            factors = tuple(
                beta2 * f + (1 - beta2) * c for f, c in zip(factors, _covariances(g), strict=True)
            )
            bases = jax.lax.cond(
                refresh, lambda: tuple(map(_orthogonal_step, factors, bases)), lambda: bases
            )
            v = beta2 * v + (1 - beta2) * _rotate(g, bases) ** 2
            return (
                _rotate(adam(_rotate(m, bases), v), tuple(q.mT for q in bases)),
                v,
                factors,
                bases,
            )

        def of_others(g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[Any, ...]:
            v = beta2 * v + (1 - beta2) * g * g
            return adam(m, v), v, (), ()

        matrices = jax.tree.map(lambda g: g if _is_matrix(g) else None, grads)
        arguments = (momentum, state.second_moment, state.factors, state.bases)
        found = (layer_map or _all_here)(of_layers, matrices, *arguments)
        results = jax.tree.map(
            lambda g, m, v, layers: of_others(g, m, v) if layers is None else layers,
            grads, momentum, state.second_moment, found,
        )  # fmt: skip
        treedef: Any = jax.tree.structure(grads)
        columns = zip(*treedef.flatten_up_to(results), strict=True)
        updates, *rest = (treedef.unflatten(column) for column in columns)
        return updates, SoapState(step, momentum, *rest)

    return optax.GradientTransformationExtraArgs(init, update)


def _all_here(function: Any, *trees: Any) -> Any:
    """Applies a function of layers to whole stacks on this device."""
    return jax.tree.map(
        lambda g, *rest: None if g is None else function(g, *rest),
        *trees,
        is_leaf=lambda x: x is None,
    )


def _is_matrix(p: jax.Array) -> bool:
    """Whether an array is a stack of matrices [L, ...]; tables, norms and biases have fewer dimensions."""
    return p.ndim >= 3


def _sides(p: jax.Array) -> tuple[int, ...]:
    """Dimensions of each matrix of a stack: D and F of [L, D, F]; D, N and H of [L, D, N, H]."""
    return p.shape[1:] if _is_matrix(p) else ()


def _covariances(g: jax.Array) -> tuple[jax.Array, ...]:
    """Returns G G' [L, d, d] along each dimension d of the gradient of a stack."""

    def along(dim: int) -> jax.Array:
        rows = jnp.moveaxis(g, dim, 1).reshape(g.shape[0], g.shape[dim], -1)
        return rows @ rows.mT

    return tuple(along(dim) for dim in range(1, 1 + len(_sides(g))))


def _orthogonal_step(factor: jax.Array, basis: jax.Array) -> jax.Array:
    """Takes one step of orthogonal iteration towards the eigenvectors of a factor, in float32."""
    c, q = factor.astype(jnp.float32), basis.astype(jnp.float32)
    # The shift changes no eigenvector. It leaves directions without a gradient as they are, where rounding errors would
    # turn them, differently on every mesh.
    shift = 1e-3 * jnp.trace(c, axis1=1, axis2=2)[:, None, None] / c.shape[1]
    return jnp.linalg.qr(c @ q + shift * q).Q.astype(basis.dtype)


def _rotate(x: jax.Array, bases: tuple[jax.Array, ...]) -> jax.Array:
    """Multiplies each dimension of a stack by its basis: the first one is contracted, and comes back as the last."""
    for basis in bases:
        x = jnp.einsum("la...,lab->l...b", x, basis)
    return x
