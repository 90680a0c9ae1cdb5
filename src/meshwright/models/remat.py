"""Rematerialisation (activation checkpointing): which activations the backward pass reads, and which it recomputes.

A model names its activations with `jax.ad_checkpoint.checkpoint_name`; a policy lists the names that are saved on the
device or offloaded to host memory. Everything else is recomputed, layer by layer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun  # type: ignore[attr-defined]

from meshwright.comm.collectives import row_major

LAYER_INPUT = "layer input"
"""Name of a layer's input: the residual stream."""
QKV = "queries, keys, values"
"""Name of the queries, keys and values of attention, after rotary embedding."""
ATTN_RESIDUAL = "attention residual"
"""Name of the residual stream between the two halves of a layer."""
ATTN_OUT = "attention output"
"""Name of the attention output before its projection."""
FFN_HIDDEN = "feed-forward hidden"
"""Name of the outputs of the feed-forward's first matmuls (gate and up)."""
ATTN_LSE = "attention log-sum-exp"
"""Name of the log-sum-exp that a fused kernel saves with its output: a float32 per head and token, never offloaded."""
ATTN_SCORES = "attention scores"
"""Attention scores [B, N, T, S]. They have no checkpoint name: the kernel decides whether they are saved."""


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """Activations that the backward pass finds saved; all others are recomputed."""

    saved: tuple[str, ...] | None
    """Names saved on the device. None saves everything and recomputes no layer."""
    dropped: tuple[str, ...] = ()
    """Exceptions where everything else is saved."""
    offloaded: tuple[str, ...] = ()
    """Names offloaded to host memory."""

    @property
    def begins_inside(self) -> bool:
        """Whether a layer's backward pass begins with its feed-forward half: it recomputes nothing before that."""
        return self.saved is not None and ATTN_RESIDUAL in self.saved

    @property
    def policy(self) -> Callable[..., Any] | None:
        """Policy for `jax.checkpoint`; None where nothing is recomputed."""
        policies = jax.checkpoint_policies
        if self.saved is None:
            return None
        if self.offloaded:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.saved),
                names_which_can_be_offloaded=list(self.offloaded),
                offload_src="device",
                offload_dst="pinned_host",
            )
        return policies.save_only_these_names(*self.saved)


# In the order of what they recompute. A layer's input is the loop's carry: it is saved, unless it is offloaded.
REMAT_POLICIES: dict[str, RematPolicy] = {
    "none": RematPolicy(None),
    "attention": RematPolicy(None, dropped=(ATTN_SCORES,)),
    "projections": RematPolicy((QKV, ATTN_OUT, ATTN_LSE, ATTN_RESIDUAL, FFN_HIDDEN)),
    "feed_forward": RematPolicy((QKV, ATTN_OUT, ATTN_LSE, ATTN_RESIDUAL)),
    "attention_out": RematPolicy((ATTN_OUT, ATTN_LSE)),
    "offload_attention": RematPolicy((ATTN_LSE,), offloaded=(LAYER_INPUT, QKV, ATTN_OUT)),
    "full": RematPolicy(()),
    "offload": RematPolicy((), offloaded=(LAYER_INPUT,)),
}


SaveHidden = Callable[[jax.Array], jax.Array]
"""`x [B, T, F] -> x`, named for the remat policy."""


def save_as_it_is(x_BTF: jax.Array) -> jax.Array:
    """Names an output of the feed-forward's first matmuls."""
    return checkpoint_name(x_BTF, FFN_HIDDEN)


def save_tokens_last(x_BTF: jax.Array) -> jax.Array:
    """Names it too, and keeps it with tokens last in memory: so v6e's gradients of weights read it (docs/log.md)."""
    return jnp.swapaxes(checkpoint_name(row_major(jnp.swapaxes(x_BTF, -1, -2)), FFN_HIDDEN), -1, -2)


def recomputed[**P, R](elementwise: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of elementwise operations so that its inputs are saved for the backward pass, and no more.

    Without it, policies that save everything also save each float32 intermediate: for SwiGLU's product 6 arrays of the
    hidden width instead of 2. Reading the inputs again costs less than writing and reading the intermediates.
    """
    return jax.checkpoint(elementwise, prevent_cse=False)


def checkpoint_layer(
    layer: Callable[..., Any], remat: str, *, prevent_cse: bool = False, saves_weights: bool = True
) -> Callable[..., Any]:
    """Returns `layer(x, ...)` with the remat policy applied; it must run inside a scan.

    prevent_cse: needed where the scan has one iteration, which XLA inlines and then merges recomputation and forward
    pass, and where its body has other layers: the backward pass would recompute them all before it needs the first.
    saves_weights: whether a policy that saves everything saves weights as the layer reads them; if not, it saves what
    depends on `x` (`saving_activations_only`).
    """
    policy = REMAT_POLICIES[remat].policy
    if policy is None and not saves_weights:
        return saving_activations_only(layer)

    def named(x: jax.Array, *args: Any) -> Any:
        return layer(checkpoint_name(x, LAYER_INPUT), *args)

    return (
        layer if policy is None else jax.checkpoint(named, policy=policy, prevent_cse=prevent_cse)
    )


def saving_activations_only(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `layer(x, *inputs)` whose backward pass finds only what depends on `x` saved.

    Plain differentiation saves every array that the backward pass reads, gathered, converted and dequantised weights
    among them. In a scan over layers those are a second copy of the model, which frozen weights are not worth: their
    only use is the product with the gradient of an output. What depends on parameters alone is computed from them
    again, gathers included.
    """
    run = jax.custom_vjp(lambda x, inputs: layer(x, *inputs))

    def forward(x: Any, inputs: Any) -> tuple[Any, Any]:
        treedef: Any
        leaves, treedef = jax.tree.flatten((x, inputs), is_leaf=_is_primal)
        values = [leaf.value for leaf in leaves]
        trained = [i for i, leaf in enumerate(leaves) if leaf.perturbed]
        of_x = len(jax.tree.leaves(x, is_leaf=_is_primal))
        split = _SplitVjp(layer, treedef, trained, of_x)
        outputs, consts, saved = split.forward(values)
        return outputs, jax.tree_util.Partial(split.backward, values[of_x:], consts, saved)

    run.defvjp(forward, lambda backward, g: backward(g), symbolic_zeros=True)
    return lambda x, *inputs: run(x, inputs)


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


class _SplitVjp:
    """Forward and backward pass of a layer, whose residuals are split by whether they depend on its first inputs."""

    def __init__(
        self, layer: Callable[..., Any], treedef: Any, trained: Sequence[int], of_x: int
    ) -> None:
        """treedef: of `(x, inputs)`.  trained: leaves with a gradient.  of_x: leaves that are x's, the first ones."""
        self._layer = layer
        self._treedef = treedef
        self._trained = trained
        self._of_x = of_x

    def forward(self, values: Sequence[jax.Array]) -> tuple[Any, list[Any], list[jax.Array]]:
        """Returns the layer's outputs, arrays that it closes over, and the arrays to save, which depend on x."""
        traced, (shapes, _) = jax.make_jaxpr(self._with_residuals, return_shape=True)(list(values))
        outputs: Any = jax.tree.structure(shapes)
        jaxpr = traced.jaxpr
        residuals = jaxpr.outvars[outputs.num_leaves :]
        dependent = set(jaxpr.invars[: self._of_x])
        # An array in another shape is the same array: products that share an input would each save their own.
        shape_of = dict[Any, Any]()
        computed_again = []
        for equation in jaxpr.eqns:
            if not any(isinstance(v, Var) and v in dependent for v in equation.invars):
                computed_again.append(equation)
                continue
            dependent.update(equation.outvars)
            if equation.primitive is jax.lax.reshape_p:
                shape_of[equation.outvars[0]] = equation.invars[0]
                computed_again.append(equation)
        saved = dict[Any, None]()
        for v in residuals:
            if isinstance(v, Var) and v in dependent:
                while v in shape_of:
                    v = shape_of[v]
                saved[v] = None
        computed_again = _reachable(
            computed_again, [*jaxpr.invars[self._of_x :], *jaxpr.constvars, *saved]
        )
        self._residuals = jaxpr.replace(
            invars=[*jaxpr.invars[self._of_x :], *saved],
            outvars=residuals,
            eqns=computed_again,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        run = jaxpr.replace(
            outvars=[*jaxpr.outvars[: outputs.num_leaves], *saved],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        results = jaxpr_as_fun(ClosedJaxpr(run, traced.consts))(*values)
        layer_outputs = outputs.unflatten(results[: outputs.num_leaves])
        return layer_outputs, list(traced.consts), results[outputs.num_leaves :]

    def _with_residuals(self, values: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
        def run(trained: list[jax.Array]) -> Any:
            every = list(values)
            for i, value in zip(self._trained, trained, strict=True):
                every[i] = value
            x, inputs = self._treedef.unflatten(every)
            return self._layer(x, *inputs)

        outputs, vjp = jax.vjp(run, [values[i] for i in self._trained])
        treedef: Any
        residuals, treedef = jax.tree.flatten(vjp)
        self._vjp = treedef
        return outputs, residuals

    def backward(
        self, inputs: list[jax.Array], consts: list[Any], saved: list[jax.Array], g: Any
    ) -> Any:
        """Returns the gradients of `(x, inputs)`, None of those that have none."""
        residuals = jaxpr_as_fun(ClosedJaxpr(self._residuals, consts))(*inputs, *saved)
        (gradients,) = self._vjp.unflatten(residuals)(jax.tree.map(_instantiated, g))
        every: list[Any] = [None] * self._treedef.num_leaves
        for i, gradient in zip(self._trained, gradients, strict=True):
            every[i] = gradient
        return self._treedef.unflatten(every)


def _reachable(equations: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """Returns the equations, in order, that follow from known variables."""
    known_variables = set(known)
    reachable = []
    for equation in equations:
        if all(not isinstance(v, Var) or v in known_variables for v in equation.invars):
            reachable.append(equation)
            known_variables.update(equation.outvars)
    return reachable


def _instantiated(g: Any) -> Any:
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(g.shape, g.dtype)
    return g
