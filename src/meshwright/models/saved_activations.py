"""Layers whose backward pass finds only activations saved: weights are gathered
and converted again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun  # type: ignore[attr-defined]


def saving_activations_only(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `layer(x, *inputs)` whose backward pass finds only what depends on `x` saved.

    Plain differentiation saves every array that the backward pass reads, gathered, converted and
    dequantised weights among them. In a scan over layers those are a second copy of the model,
    which frozen weights are not worth: their only use is the product with the gradient of an
    output. What depends on parameters alone is computed from them again, gathers included.
    """
    run = jax.custom_vjp(lambda x, inputs: layer(x, *inputs))
    run.defvjp(functools.partial(_forward, layer), _backward, symbolic_zeros=True)
    return lambda x, *inputs: run(x, inputs)


def _forward(layer: Callable[..., Any], x: Any, inputs: Any) -> tuple[Any, Any]:
    """Returns a layer's outputs, and its backward pass with what that reads."""
    treedef: Any
    leaves, treedef = jax.tree.flatten((x, inputs), is_leaf=_is_primal)
    values = [leaf.value for leaf in leaves]
    trained = [i for i, leaf in enumerate(leaves) if leaf.perturbed]
    of_x = len(jax.tree.leaves(x, is_leaf=_is_primal))
    split = _SplitVjp(layer, treedef, trained, of_x)
    outputs, consts, saved = split.forward(values)
    return outputs, jax.tree_util.Partial(split.backward, values[of_x:], consts, saved)


def _backward(backward: Callable[..., Any], g: Any) -> Any:
    return backward(g)


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


class _SplitVjp:
    """Forward and backward pass of a layer, whose residuals are split by whether they depend
    on its first inputs."""

    def __init__(
        self, layer: Callable[..., Any], treedef: Any, trained: Sequence[int], of_x: int
    ) -> None:
        """treedef: of `(x, inputs)`.  trained: leaves with a gradient.
        of_x: leaves that are x's, the first ones."""
        self._layer = layer
        self._treedef = treedef
        self._trained = trained
        self._of_x = of_x

    def forward(self, values: Sequence[jax.Array]) -> tuple[Any, list[Any], list[jax.Array]]:
        """Returns the layer's outputs, arrays that it closes over,
        and the arrays to save, which depend on x."""
        traced, (shapes, _) = jax.make_jaxpr(self._with_residuals, return_shape=True)(list(values))
        outputs: Any = jax.tree.structure(shapes)
        jaxpr = traced.jaxpr
        residuals = jaxpr.outvars[outputs.num_leaves :]
        of_x, of_inputs = jaxpr.invars[: self._of_x], jaxpr.invars[self._of_x :]
        dependence = _Dependence(jaxpr, of_x)
        saved = dependence.arrays_to_save(residuals)
        known = [*of_inputs, *jaxpr.constvars, *saved]
        self._residuals = jaxpr.replace(
            invars=[*of_inputs, *saved],
            outvars=residuals,
            eqns=_reachable(dependence.computed_again, known),
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


class _Dependence:
    """Dependence of a program's equations on some of its variables."""

    def __init__(self, jaxpr: Any, variables: Sequence[Any]) -> None:
        self._dependent = set(variables)
        # An array in another shape is the same array: products
        # that share an input would each save their own.
        self._shape_of = dict[Any, Any]()
        self.computed_again: list[Any] = []
        """Equations that depend on none of the variables, and changes of shape."""
        for equation in jaxpr.eqns:
            if not any(self._is_dependent(v) for v in equation.invars):
                self.computed_again.append(equation)
                continue
            self._dependent.update(equation.outvars)
            if equation.primitive is jax.lax.reshape_p:
                self._shape_of[equation.outvars[0]] = equation.invars[0]
                self.computed_again.append(equation)

    def _is_dependent(self, v: Any) -> bool:
        return isinstance(v, Var) and v in self._dependent

    def arrays_to_save(self, residuals: Sequence[Any]) -> list[Any]:
        """Returns the arrays that the residuals depending on the variables are shapes of."""
        saved = dict[Any, None]()
        for v in residuals:
            if self._is_dependent(v):
                while v in self._shape_of:
                    v = self._shape_of[v]
                saved[v] = None
        return list(saved)


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
