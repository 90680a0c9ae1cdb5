"""Modules of Flax Linen as named arrays and a loss of them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import ConfigError
from meshwright.wrapped.losses import Annotations, Arrays, Result, call_loss, path_name, read_result


class LinenModule:
    """A module of Flax Linen: the loss gets it bound to its variables, and calls it as a function."""

    framework, drawn = "Flax Linen", True

    def __init__(self, module: Any, losses: tuple[Callable[..., Any], Callable[..., Any]], example: Any):
        self._module, self._losses, self._example = module, losses, example
        self._treedef: Any = None
        self._names: list[str] = []
        """Paths of the variables, in the order of the tree."""
        self._sown: frozenset[str] = frozenset()
        """Collections that each call makes anew (`sow`): no state."""

    def build(self, key: jax.Array) -> tuple[Arrays, Arrays, Annotations]:
        """Draws the variables by the module's calls in the loss."""
        from flax.core import meta

        bound = BoundLinen(self._module, None, key, True)
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._example)
        call_loss(self._losses[0], (bound, batch), key)
        if bound.variables is None:
            raise ConfigError(
                f"wrapping {type(self._module).__name__}", "the loss does not call the module", "model(batch[...])"
            )
        self._sown = frozenset(bound.sown)
        state = {name: tree for name, tree in bound.variables.items() if name not in bound.sown}
        flat = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, meta.AxisMetadata))[0]
        arrays, annotations = {path_name(path): meta.unbox(leaf) for path, leaf in flat}, {}
        for path, leaf in flat:
            if getattr(leaf, "names", None) is not None:
                annotations[path_name(path).removeprefix("params.")] = tuple(leaf.names)
        self._treedef, self._names = jax.tree.structure(meta.unbox(state)), list(arrays)
        params = {name.removeprefix("params."): x for name, x in arrays.items() if name.startswith("params.")}
        return params, {name: x for name, x in arrays.items() if not name.startswith("params.")}, annotations

    def call(self, arrays: tuple[Arrays, Arrays], batch: Any, key: jax.Array, train: bool) -> Result:
        """Computes the loss; collections besides `params` may change in training."""
        variables = arrays[1]
        bound = BoundLinen(self._module, self.made_of(*arrays), key, train, self._sown)
        loss, metrics = read_result(call_loss(self._losses[0 if train else 1], (bound, batch), key))
        after = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(bound.variables)[0]}
        return Result(loss, metrics, {name: after[name] for name in variables})

    def made_of(self, params: Arrays, variables: Arrays) -> Any:
        """Returns the module's variables, by collection."""
        named = {**{f"params.{name}": x for name, x in params.items()}, **variables}
        return jax.tree.unflatten(self._treedef, [named[name] for name in self._names])


class BoundLinen:
    """A Linen module with its variables, as a loss calls it: `model(x, train=model.training)`.

    training: whether the call is one of training; else it is an evaluation.  variables: the collections, `params`
    among them, and what the calls so far have sown.  Every other keyword (`method`, arguments of the module) goes to
    the module.
    """

    def __init__(
        self, module: Any, variables: Any, key: jax.Array, training: bool, sown: Collection[str] = frozenset()
    ):
        self.module, self.variables, self.training = module, variables, training
        self.sown: set[str] = {*sown}
        """Collections that grow by each call."""
        self._key, self._calls, self._makes = key, 0, variables is None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        # Linen takes `params` for every stream of random numbers that has no key of its own.
        rngs = {"params": jax.random.fold_in(self._key, self._calls)}
        self._calls += 1
        if self._makes:
            return self._make(rngs, args, keywords)
        state = [name for name in self.variables if name != "params"] if self.training else []
        mutable = list({*state, *self.sown, "intermediates"})
        output, changed = self.module.apply(self.variables, *args, rngs=rngs, mutable=mutable, **keywords)
        self.variables = {**self.variables, **changed}
        return output

    def _make(self, rngs: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Makes the variables that a call needs, and keeps those of the calls before as they were made."""
        before = self.variables or {}
        output, after = self._initialise(before, rngs, args, keywords)
        self.variables = made = _joined(after, before)
        if set(made) <= {"params"}:
            return output
        # What was sown is longer after another call.
        _, again = jax.eval_shape(lambda variables: self._initialise(variables, rngs, args, keywords), made)
        self.sown |= {name for name in again if _structure(again[name]) != _structure(made[name])}
        return output

    def _initialise(self, variables: Any, rngs: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Calls the module as its `init` does: missing variables are made, and running averages stay."""
        from flax import core

        keywords = dict(keywords)
        method = keywords.pop("method", None) or "__call__"
        method = getattr(type(self.module), method) if isinstance(method, str) else method

        def call(scope: Any, *args: Any, **keywords: Any) -> Any:
            return method(self.module.clone(parent=scope, _deep_clone=True), *args, **keywords)

        mutable = core.DenyList("intermediates")
        return core.apply(call, mutable=mutable, flags={"initializing": True})(variables, *args, rngs=rngs, **keywords)


def _structure(tree: Any) -> str:
    return str(jax.tree.structure(tree))


def _joined(new: Any, kept: Any) -> Any:
    """Returns the dictionary `kept` with what `new` alone has."""
    if not isinstance(kept, Mapping):
        return kept
    return {**kept, **{name: _joined(x, kept[name]) if name in kept else x for name, x in new.items()}}
