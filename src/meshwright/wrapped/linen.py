"""Modules of Flax Linen as named arrays and a loss of them."""

from collections.abc import Callable
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
        self._paths: dict[str, tuple[str, ...]] = {}

    def build(self, key: jax.Array) -> tuple[Arrays, Arrays, Annotations]:
        """Draws the variables by the module's first call in the loss."""
        from flax.core import meta

        bound = BoundLinen(self._module, None, key, True)
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._example)
        call_loss(self._losses[0], (bound, batch), key)
        if bound.variables is None:
            raise ConfigError(
                f"wrapping {type(self._module).__name__}", "the loss does not call the module", "model(batch[...])"
            )
        flat = jax.tree_util.tree_flatten_with_path(
            bound.variables, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)
        )[0]
        params: Arrays = {}
        variables: Arrays = {}
        annotations: Annotations = {}
        for path, leaf in flat:
            array = meta.unbox(leaf)
            name = path_name(path)
            self._paths[name] = tuple(part.key for part in path)
            if name.startswith("params."):
                params[name.removeprefix("params.")] = array
                if getattr(leaf, "names", None) is not None:
                    annotations[name.removeprefix("params.")] = tuple(leaf.names)
            else:
                variables[name] = array
        return params, variables, annotations

    def call(self, arrays: tuple[Arrays, Arrays], batch: Any, key: jax.Array, train: bool) -> Result:
        """Computes the loss; collections besides `params` may change in training."""
        variables = arrays[1]
        bound = BoundLinen(self._module, self.made_of(*arrays), key, train)
        loss, metrics = read_result(call_loss(self._losses[0 if train else 1], (bound, batch), key))
        after = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(bound.variables)[0]}
        return Result(loss, metrics, {name: after[name] for name in variables})

    def made_of(self, params: Arrays, variables: Arrays) -> Any:
        """Returns the module's variables, by collection."""
        named = {**{f"params.{name}": x for name, x in params.items()}, **variables}
        return _nest({self._paths[name]: x for name, x in named.items()})


class BoundLinen:
    """A Linen module with its variables, as a loss calls it: `model(x, train=model.training)`.

    training: whether the call is one of training; else it is an evaluation.  variables: the collections, `params`
    among them.  Every other keyword (`method`, arguments of the module) goes to the module.
    """

    def __init__(self, module: Any, variables: Any, key: jax.Array, training: bool):
        self.module, self.variables, self.training = module, variables, training
        self._key, self._calls = key, 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        # Linen takes `params` for every stream of random numbers that has no key of its own.
        rngs = {"params": jax.random.fold_in(self._key, self._calls)}
        self._calls += 1
        if self.variables is None:
            output, variables = self.module.init_with_output(rngs, *args, **keywords)
            self.variables = variables
            return output
        mutable = [name for name in self.variables if name != "params"] if self.training else []
        if not mutable:
            return self.module.apply(self.variables, *args, rngs=rngs, **keywords)
        output, changed = self.module.apply(self.variables, *args, rngs=rngs, mutable=mutable, **keywords)
        self.variables = {**self.variables, **changed}
        return output


def _nest(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (*folders, last), x in flat.items():
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = x
    return nested
