"""Losses of wrapped models: what they are given, and what they return."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import ConfigError

Arrays = dict[str, Any]
"""Arrays by dotted path, such as `Dense_0.kernel`."""
Annotations = dict[str, tuple[Any, ...]]
"""Axis name, several, or None of each dimension of a parameter, by path: as the module states them."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Return value of a loss."""

    loss: Any
    metrics: dict[str, Any]
    """Scalars by name; `weight` is the number of examples or tokens that the loss is a mean over."""
    variables: Arrays


def path_name(path: Any) -> str:
    """Returns the dotted path of an array in a tree."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value") or "array"


def _takes_key(parameter: inspect.Parameter) -> bool:
    """Whether an argument besides model and batch is for random numbers: by its name, and no default of its own."""
    named = parameter.name in ("key", "keys", "rng", "rngs") or parameter.name.endswith(("_key", "_rng"))
    return named and parameter.default in (None, inspect.Parameter.empty)


def call_loss(loss: Callable[..., Any], given: tuple[Any, ...], key: jax.Array) -> Any:
    """Calls `loss(model, [state,] batch[, key])`; one called `key` with a default gets the key too."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(loss).parameters.values()
    positional = [p for p in parameters if p.kind in kinds]
    count = sum(p.default is inspect.Parameter.empty for p in positional)
    by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and _takes_key(p)]
    optional = [p for p in positional[len(given) :] if p.default is not inspect.Parameter.empty and _takes_key(p)]
    if count not in (len(given), len(given) + 1) and len(positional) != len(given):
        names = "model, state, batch" if len(given) == 3 else "model, batch"
        raise ConfigError(
            f"loss {getattr(loss, '__name__', loss)}",
            f"it takes {count} arguments",
            f"loss({names}), or loss({names}, key) for one that draws random numbers",
        )
    if count > len(given):
        return loss(*given, key)
    by_name += [p.name for p in optional]
    return loss(*given, **{name: key for name in by_name[:1]})


def read_result(result: Any) -> tuple[Any, dict[str, Any]]:
    """Returns loss and metrics of what a loss returned. Raises ConfigError for anything else."""
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(metrics, dict):
        raise ConfigError(
            "the loss's second result",
            f"it is a {type(metrics).__name__}",
            "a dictionary of scalars: metrics by name; "
            "where value_and_grad made it, the loss itself: the step differentiates",
        )
    for name, value in {"loss": loss, **metrics}.items():
        if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise ConfigError(f"{name} of a wrapped model", f"it is a {type(value).__name__}", "a number")
        if jnp.shape(value) != ():
            raise ConfigError(
                f"{name} of a wrapped model",
                f"it has the shape {list(jnp.shape(value))}, and a gradient is that of one number",
                f"its mean over the examples: {name}.mean()",
            )
    reserved = sorted(set(metrics) & {"loss", "gradient norm", "learning rate"})
    if reserved:
        raise ConfigError(f"a metric called {reserved[0]!r}", "the step reports one of that name", "another name")
    return loss, metrics
