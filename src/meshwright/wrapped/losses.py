"""Losses of wrapped models: what they are given, and what they return."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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


def _arguments(loss: Callable[..., Any]) -> int:
    """Number of positional arguments of a loss without defaults."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(loss).parameters.values()
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def call_loss(loss: Callable[..., Any], given: tuple[Any, ...], key: jax.Array) -> Any:
    """Calls `loss(model, [state,] batch[, key])`."""
    count = _arguments(loss)
    if count not in (len(given), len(given) + 1):
        names = "model, state, batch" if len(given) == 3 else "model, batch"
        raise ConfigError(
            f"loss {getattr(loss, '__name__', loss)}",
            f"it takes {count} arguments",
            f"loss({names}), or loss({names}, key) for one that draws random numbers",
        )
    return loss(*given, *([key] if count > len(given) else []))


def read_result(result: Any) -> tuple[Any, dict[str, Any]]:
    """Returns loss and metrics of what a loss returned. Raises ConfigError for anything else."""
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(metrics, dict):
        raise ConfigError(
            "the loss's second result", f"it is a {type(metrics).__name__}", "a dictionary of scalars: metrics by name"
        )
    for name, value in {"loss": loss, **metrics}.items():
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
