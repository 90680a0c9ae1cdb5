"""Models of Flax NNX, Flax Linen and Equinox, and plain pytrees,
as named arrays and a loss of them."""

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import ConfigError
from meshwright.reporters import BETWEEN
from meshwright.reporters.goodput import METRICS as GOODPUT

Arrays = dict[str, Any]
"""Arrays by dotted path, such as `Dense_0.kernel`."""
Annotations = dict[str, tuple[Any, ...]]
"""Axis name, several, or None of each dimension of a parameter,
by path: as the module states them."""


_OF_STEPS = ("loss", "gradient norm", "learning rate", "held-out loss", "batch", "examples")
_OF_TIMES = ("step", "time", "examples/s", "MFU", "step seconds", "input wait seconds")
RESERVED = {*_OF_STEPS, *_OF_TIMES, *(f"{name} seconds" for name in BETWEEN), *GOODPUT}
"""Names in a line of metrics that the step and the loop write themselves."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Return value of a loss."""

    loss: Any
    metrics: dict[str, Any]
    """Scalars by name; `weight` is the number of examples or tokens
    that the loss is a mean over."""
    variables: Arrays


def path_name(path: Any) -> str:
    """Returns the dotted path of an array in a tree."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value") or "array"


def _takes_key(parameter: inspect.Parameter) -> bool:
    """Whether an argument besides model and batch is for random numbers: by its name,
    and no default of its own."""
    named = parameter.name in ("key", "keys", "rng", "rngs") or parameter.name.endswith(
        ("_key", "_rng")
    )
    return named and parameter.default in (None, inspect.Parameter.empty)


def call_loss(loss: Callable[..., Any], given: tuple[Any, ...], key: jax.Array) -> Any:
    """Calls `loss(model, [state,] batch[, key])`;
    one called `key` with a default gets the key too."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(loss).parameters.values()
    positional = [p for p in parameters if p.kind in kinds]
    count = sum(p.default is inspect.Parameter.empty for p in positional)
    by_name = [
        p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and _takes_key(p)
    ]
    optional = [
        p
        for p in positional[len(given) :]
        if p.default is not inspect.Parameter.empty and _takes_key(p)
    ]
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
            raise ConfigError(
                f"{name} of a wrapped model", f"it is a {type(value).__name__}", "a number"
            )
        if jnp.shape(value) != ():
            raise ConfigError(
                f"{name} of a wrapped model",
                f"it has the shape {list(jnp.shape(value))}, and a gradient is that of one number",
                f"its mean over the examples: {name}.mean()",
            )
    reserved = sorted(set(metrics) & RESERVED)
    if reserved:
        raise ConfigError(
            f"a metric called {reserved[0]!r}", "the step reports one of that name", "another name"
        )
    return loss, metrics


def find_adapter(
    model: Any, loss: Callable[..., Any], evaluate: Callable[..., Any] | None, example: Any
) -> "Adapter":
    """Returns the adapter of a model: by its type, or for a function of a key,
    by the type of what it returns.

    Raises ConfigError for a model that is neither a module
    of a known framework nor a pytree of arrays.
    """
    losses = (loss, evaluate or loss)
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        parts = LinenParts(model)
        return Adapter(None, functools.partial(parts.draw, loss, example), losses, parts)
    if inspect.isroutine(model) or inspect.isclass(model) or isinstance(model, functools.partial):
        return Adapter(None, model, losses)
    return Adapter(model, None, losses)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or type(leaf).__module__ == "numpy"


def _is_key(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Adapter:
    """A model of some framework as two dictionaries of arrays, trained parameters
    and variables, and a loss of them."""

    def __init__(
        self,
        model: Any,
        factory: Callable[[jax.Array], Any] | None,
        losses: tuple[Callable[..., Any], Callable[..., Any]],
        parts: Any = None,
    ):
        self._model, self._factory, self._losses = model, factory, losses
        self.drawn = factory is not None
        """Whether `build` draws initial values, and can be traced;
        else it returns arrays that exist."""
        self.parts: Any = parts
        """What is not an array: how to build the model from its arrays."""

    def build(self, key: jax.Array) -> tuple[Arrays, Arrays, Annotations]:
        """Calls the function that makes the model, or takes the arrays of the given one."""
        model = self._model if self._factory is None else _made(self._factory, key)
        if not isinstance(self.parts, LinenParts):
            self.parts = _parts_of(model)
        return self.parts.split(model)

    def call(
        self, arrays: tuple[Arrays, Arrays], batch: Any, key: jax.Array, train: bool
    ) -> Result:
        """Computes the loss with a model that is made of the arrays."""
        given = self.parts.merge(*arrays, key, train)
        with _constants_in_state() if len(given) == 2 else contextlib.nullcontext():
            result = call_loss(self._losses[0 if train else 1], (*given, batch), key)
        after = given
        if len(given) == 2:  # Equinox: the loss returns (loss, state) or (loss, metrics, state)
            if not isinstance(result, tuple) or len(result) not in (2, 3):
                raise ConfigError(
                    "the loss of an Equinox module with state",
                    f"it returned {type(result).__name__}",
                    "return (loss, state) or (loss, metrics, state)",
                )
            *result, state = result
            after, result = (given[0], state), tuple(result) if len(result) == 2 else result[0]
        loss, metrics = read_result(result)
        return Result(loss, metrics, self.parts.variables(after, arrays[1]))

    def made_of(self, params: Arrays, variables: Arrays) -> Any:
        """Returns the model, an Equinox module and its state,
        or the variables of a Linen module."""
        made = self.parts.merge(params, variables, jax.random.key(0), False)
        if isinstance(made[0], BoundLinen):
            return made[0].variables
        return made if len(made) > 1 else made[0]


@contextlib.contextmanager
def _constants_in_state() -> Iterator[None]:
    """Lets modules put constants into an Equinox state while a loss is traced,
    as `eqx.nn.BatchNorm` does.

    `State.set` compares old and new value, sharding included. Inside a `shard_map` a traced value
    has the mesh's, and a constant has none.
    """
    import equinox

    states: Any = equinox.nn.State
    original = states.set

    def set_traced(self: Any, item: Any, value: Any) -> Any:
        old = self.get(item)
        value = jax.tree.map(
            lambda new, old: jnp.where(jnp.ones_like(old, bool), new, old), value, old
        )
        return original(self, item, value)

    states.set = set_traced
    try:
        yield
    finally:
        states.set = original


def _made(factory: Callable[[jax.Array], Any], key: jax.Array) -> Any:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return factory(key)
    if isinstance(key, jax.core.Tracer):
        # An array that a constructor assigns as it is becomes data of the module, but not where it
        # is traced, as here: Flax looks at the type.
        nnx.register_data_type(type(key))
    # Annotated variables would be put on a mesh as they are created; this package places them.
    with nnx.use_eager_sharding(False):
        return factory(key)


def _parts_of(model: Any) -> Any:
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(model, nnx.Module):
        return NnxParts()
    with_state = (
        isinstance(model, tuple)
        and len(model) == 2
        and equinox
        and isinstance(model[1], equinox.nn.State)
    )
    if equinox is not None and (with_state or isinstance(model, equinox.Module)):
        return TreeParts("Equinox", bool(with_state))
    others = [leaf for leaf in jax.tree.leaves(model) if not _is_array(leaf)]
    if others or not jax.tree.leaves(model):
        what = others[0] if others else model
        raise ConfigError(
            f"wrapping a {type(model).__module__}.{type(model).__name__}",
            "it is neither a module of Flax or Equinox nor a pytree of arrays: it has a "
            f"{type(what).__name__}",
            "a module of Flax NNX, Flax Linen or Equinox, a pytree of arrays, or a function of a "
            "key that makes one",
        )
    return TreeParts("pytree", False)


class TreeParts:
    """Arrays of a pytree or an Equinox module: floating-point ones are parameters, all
    others variables.

    NumPy arrays of an Equinox module are constants, as they are to Equinox.
    """

    def __init__(self, framework: str, with_state: bool):
        self.framework, self._with_state = framework, with_state
        self._leaves: list[tuple[str, Any]] = []
        self._treedef: Any = None

    def split(self, model: Any) -> tuple[Arrays, Arrays, Annotations]:
        """Returns parameters and variables; keeps everything else."""
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(model)
        params: Arrays = {}
        variables: Arrays = {}
        self._leaves = []
        for path, leaf in leaves:
            name = self._name(path)
            # Equinox has NumPy arrays for constants: its filters take only those of JAX.
            constant = self.framework == "Equinox" and type(leaf).__module__ == "numpy"
            if constant or not _is_array(leaf):
                self._leaves.append(("", leaf))
                continue
            if name in params or name in variables:
                raise ConfigError(
                    f"the path {name!r} of a wrapped model",
                    "two of its arrays have it: a key has a dot",
                    "keys without dots",
                )
            trained = jnp.issubdtype(leaf.dtype, jnp.floating) and not (
                self._with_state and path[0].idx == 1
            )
            self._leaves.append((name, str(jax.random.key_impl(leaf)) if _is_key(leaf) else None))
            (params if trained else variables)[name] = (
                jax.random.key_data(leaf) if _is_key(leaf) else leaf
            )
        return params, variables, {}

    def _name(self, path: Any) -> str:
        if self._with_state:
            return ("state." if path[0].idx else "") + path_name(path[1:])
        return path_name(path)

    def merge(
        self, params: Arrays, variables: Arrays, key: jax.Array, train: bool
    ) -> tuple[Any, ...]:
        """Returns the model, and its state where it has one."""
        arrays = {**params, **variables}

        def leaf(name: str, kept: Any) -> Any:
            if not name:
                return kept
            return (
                arrays[name] if kept is None else jax.random.wrap_key_data(arrays[name], impl=kept)
            )

        model = jax.tree.unflatten(self._treedef, [leaf(name, kept) for name, kept in self._leaves])
        if self.framework == "Equinox" and not train:
            import equinox

            model = equinox.nn.inference_mode(model)
        return model if self._with_state else (model,)

    def variables(self, model: tuple[Any, ...], before: Arrays) -> Arrays:
        """Returns the variables after the loss: those of an Equinox state change, and no others."""
        if not self._with_state:
            return before
        after = {
            "state." + path_name(path): x
            for path, x in jax.tree_util.tree_flatten_with_path(model[1])[0]
        }
        return {name: after.get(name, x) for name, x in before.items()}


class NnxParts:
    """Arrays of an NNX module: `nnx.Param` are parameters; keys are given anew each step;
    the others are variables."""

    framework = "Flax NNX"

    def __init__(self) -> None:
        self._graphdef: Any = None
        self._trees: tuple[Any, ...] = ()
        self._names: tuple[list[str], ...] = ()
        self._rngs: list[Any] = []

    def split(self, model: Any) -> tuple[Arrays, Arrays, Annotations]:
        """Returns parameters, variables, and the parameters' own annotations."""
        from flax import nnx

        self._graphdef, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
        flat = [jax.tree_util.tree_flatten_with_path(state) for state in states]
        self._trees = tuple(treedef for _, treedef in flat)
        self._names = tuple([path_name(path) for path, _ in leaves] for leaves, _ in flat)
        # Of keys and counts only kind and shape are kept: values may be those of a trace
        # that has ended.
        self._rngs = [
            (jnp.shape(leaf), None if _is_key(leaf) else leaf.dtype) for _, leaf in flat[1][0]
        ]
        annotations = {}
        for path, variable in nnx.to_flat_state(states[0]):
            metadata = variable.get_metadata()
            names = (
                metadata.get("out_sharding")
                or metadata.get("sharding_names")
                or metadata.get("sharding")
            )
            if names is not None:
                annotations[".".join(map(str, path))] = tuple(names)
        params = {path_name(path): leaf for path, leaf in flat[0][0]}
        variables = {path_name(path): leaf for path, leaf in flat[2][0]}
        return params, variables, annotations

    def merge(self, params: Arrays, variables: Arrays, key: jax.Array, train: bool) -> tuple[Any]:
        """Returns the module with keys of this step, in training or evaluation mode."""
        from flax import nnx

        rngs = []
        for name, (shape, dtype) in zip(self._names[1], self._rngs, strict=True):
            if dtype is None:
                folded = jax.random.fold_in(key, zlib.crc32(name.encode()))
                rngs.append(_key_for(folded, shape))
            else:
                rngs.append(jnp.zeros(shape, dtype))
        leaves = (
            [params[name] for name in self._names[0]],
            rngs,
            [variables[name] for name in self._names[2]],
        )
        states = [
            jax.tree.unflatten(tree, values)
            for tree, values in zip(self._trees, leaves, strict=True)
        ]
        module = nnx.merge(self._graphdef, *states)
        module.train() if train else module.eval()
        return (module,)

    def variables(self, model: tuple[Any, ...], before: Arrays) -> Arrays:
        """Returns the variables after the loss."""
        from flax import nnx

        states: Any = nnx.split(model[0], nnx.Param, nnx.RngState, ...)
        after = {
            path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(states[-1])[0]
        }
        return {name: after[name] for name in before}


def _key_for(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not shape:
        return key
    # Modules that are made by `nnx.vmap` have a key for each of them.
    flat = jnp.stack([jax.random.fold_in(key, i) for i in range(math.prod(shape))])
    return flat.reshape(shape)


class LinenParts:
    """Variables of a Flax Linen module: the loss gets it bound to them,
    and calls it as a function."""

    framework = "Flax Linen"

    def __init__(self, module: Any):
        self._module = module
        self._treedef: Any = None
        self._names: list[str] = []
        """Paths of the variables, in the order of the tree."""
        self._sown: frozenset[str] = frozenset()
        """Collections that each call makes anew (`sow`): no state."""

    def draw(self, loss: Callable[..., Any], example: Any, key: jax.Array) -> Any:
        """Draws the variables by the module's calls in the loss."""
        bound = BoundLinen(self._module, None, key, True)
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example)
        call_loss(loss, (bound, batch), key)
        if bound.variables is None:
            raise ConfigError(
                f"wrapping {type(self._module).__name__}",
                "the loss does not call the module",
                "model(batch[...])",
            )
        self._sown = frozenset(bound.sown)
        return {name: tree for name, tree in bound.variables.items() if name not in bound.sown}

    def split(self, state: Any) -> tuple[Arrays, Arrays, Annotations]:
        """Returns parameters, all other variables, and the parameters' own annotations."""
        from flax.core import meta

        flat = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)
        )[0]
        arrays, annotations = {path_name(path): meta.unbox(leaf) for path, leaf in flat}, {}
        for path, leaf in flat:
            if getattr(leaf, "names", None) is not None:
                annotations[path_name(path).removeprefix("params.")] = tuple(leaf.names)
        self._treedef, self._names = jax.tree.structure(meta.unbox(state)), list(arrays)
        params = {
            name.removeprefix("params."): x
            for name, x in arrays.items()
            if name.startswith("params.")
        }
        return (
            params,
            {name: x for name, x in arrays.items() if not name.startswith("params.")},
            annotations,
        )

    def merge(self, params: Arrays, variables: Arrays, key: jax.Array, train: bool) -> tuple[Any]:
        """Returns the module bound to its variables."""
        named = {**{f"params.{name}": x for name, x in params.items()}, **variables}
        tree = jax.tree.unflatten(self._treedef, [named[name] for name in self._names])
        return (BoundLinen(self._module, tree, key, train, self._sown),)

    def variables(self, model: tuple[Any, ...], before: Arrays) -> Arrays:
        """Returns the variables after the loss;
        collections besides `params` may change in training."""
        after = {
            path_name(path): x
            for path, x in jax.tree_util.tree_flatten_with_path(model[0].variables)[0]
        }
        return {name: after[name] for name in before}


class BoundLinen:
    """A Linen module with its variables, as a loss calls it: `model(x, train=model.training)`.

    training: whether the call is one of training; else it is an evaluation.
    variables: the collections, `params` among them, and what the calls so far have sown. Every
    other keyword (`method`, arguments of the module) goes to the module.
    """

    def __init__(
        self,
        module: Any,
        variables: Any,
        key: jax.Array,
        training: bool,
        sown: Collection[str] = frozenset(),
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
        output, changed = self.module.apply(
            self.variables, *args, rngs=rngs, mutable=mutable, **keywords
        )
        self.variables = {**self.variables, **changed}
        return output

    def _make(self, rngs: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Makes the variables that a call needs,
        and keeps those of the calls before as they were made."""
        before = self.variables or {}
        output, after = self._initialise(before, rngs, args, keywords)
        self.variables = made = _joined(after, before)
        if set(made) <= {"params"}:
            return output
        # What was sown is longer after another call.
        _, again = jax.eval_shape(
            lambda variables: self._initialise(variables, rngs, args, keywords), made
        )
        self.sown |= {
            n for n in again if len(jax.tree.leaves(again[n])) != len(jax.tree.leaves(made[n]))
        }
        return output

    def _initialise(
        self, variables: Any, rngs: Any, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Calls the module as its `init` does: missing variables are made,
        and running averages stay."""
        from flax import core

        keywords = dict(keywords)
        method = keywords.pop("method", None) or "__call__"
        method = getattr(type(self.module), method) if isinstance(method, str) else method

        def call(scope: Any, *args: Any, **keywords: Any) -> Any:
            return method(self.module.clone(parent=scope, _deep_clone=True), *args, **keywords)

        mutable = core.DenyList("intermediates")
        return core.apply(call, mutable=mutable, flags={"initializing": True})(
            variables, *args, rngs=rngs, **keywords
        )


def _joined(new: Any, kept: Any) -> Any:
    if not isinstance(kept, Mapping):
        return kept
    return {
        **kept,
        **{name: _joined(x, kept[name]) if name in kept else x for name, x in new.items()},
    }
