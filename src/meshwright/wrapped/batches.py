"""Batches of a wrapped model: any pytree of arrays, from a function of the step, an iterable,
or an iterator."""

import base64
import dataclasses
import functools
import hashlib
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwright.errors import DataError

_MISSING = object()
_LISTED = 8
"""Most arrays that an error lists."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Global batches, read from any step on."""

    kind: str
    """Word for errors: data, held_out."""
    open: Callable[[int, Any], Iterator[Any]]
    """`(steps taken, saved position) -> batches from there on`."""
    example: Any
    """First batch, as `ShapeDtypeStruct`s."""
    first: str
    """Hash of the first batch."""
    once: Callable[[], Iterator[Any]] | None = None
    """Batches from the beginning to the end;
    None for data without an end, or that can be read once."""

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """Hash of the first batch;
        None where it is another when it is read again, as random batches are."""
        if getattr(self.open, "func", None) is _once:
            return self.first
        return self.first if hash_of(next(self.open(0, None))) == self.first else None

    @property
    def batch_size(self) -> int:
        """Examples of a batch."""
        return int(jax.tree.leaves(self.example)[0].shape[0])

    def abstract(self, rows: int | None = None, sharding: NamedSharding | None = None) -> Any:
        """Returns a batch of `rows` examples,
        by default as many as the data has, as `ShapeDtypeStruct`s."""
        rows = rows or self.batch_size
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=sharding),
            self.example,
        )


def find_source(data: Any, kind: str) -> Source:
    """Returns the source of batches that a user gave.
    Raises DataError where there is no batch of arrays."""
    _check_kind(data, kind)
    if callable(data):
        first = _of_step_0(data, kind)
        example = _described(first, kind)
        return Source(
            kind, lambda step, position: map(data, itertools.count(step)), example, hash_of(first)
        )
    iterator = iter(data)
    start = (
        iterator.get_state()
        if hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        else None
    )
    first = next(iterator, _MISSING)
    if first is _MISSING:
        raise DataError(f"{kind} of a wrapped model", "it has no batch", "at least one batch")
    opened: Callable[[int, Any], Iterator[Any]] = functools.partial(_repeated, data)
    if start is not None:
        iterator.set_state(start)
        opened = functools.partial(_at, data, start)
    elif iterator is data:
        opened = functools.partial(_once, [itertools.chain([first], iterator)])
    once = None if iterator is data else lambda: iter(data)
    return Source(kind, opened, _described(first, kind), hash_of(first), once)


def hash_of(batch: Any) -> str:
    """Returns the SHA-256 of a pytree of arrays and texts."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        x = np.asarray(str(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {x.dtype}{x.shape}".encode() + x.tobytes())
    return digest.hexdigest()[:32]


def find_held_out(data: Any) -> Source:
    """Returns the source of held-out batches,
    which are read from the first to the last at each evaluation.

    Raises DataError for batches without an end, or that can only be read once.
    """
    if callable(data) or (hasattr(data, "__iter__") and iter(data) is data):
        truth = (
            "it is a function, so it has no end" if callable(data) else "it can only be read once"
        )
        raise DataError(
            "held_out of a wrapped model",
            f"{truth}, and each evaluation reads all of it",
            "a list of batches: held_out=[batches(10**6 + i) for i in range(8)], or list(iterator)",
        )
    return find_source(data, "held_out")


def _check_kind(data: Any, kind: str) -> None:
    if callable(data) or (
        hasattr(data, "__iter__")
        and not isinstance(data, (Mapping, str, bytes))
        and not _ndim(data)
    ):
        return
    if isinstance(data, Mapping) or _ndim(data):
        truth = "it is one array" if _ndim(data) else f"it is one {type(data).__name__}"
        fix = (
            "an iterable of batches: [batch], or a function of the step that takes its rows: "
            "lambda step: data[...]"
        )
    else:
        truth, fix = (
            f"it is a {type(data).__name__}",
            "a function of the step that returns a batch, an iterable, or an iterator",
        )
    raise DataError(f"{kind} of a wrapped model", truth, fix)


def _ndim(data: Any) -> bool:
    return hasattr(data, "ndim") and hasattr(data, "shape")


def _of_step_0(data: Callable[[int], Any], kind: str) -> Any:
    """Returns the first batch of a function.
    Raises DataError for a function of something else than the step."""
    try:
        inspect.signature(data).bind(0)
    except TypeError as error:
        made = (
            f", or the iterator that it returns: {data.__name__}()"
            if inspect.isgeneratorfunction(data)
            else ""
        )
        fix = f"lambda step: batch{made}"
        raise DataError(
            f"{kind} of a wrapped model", f"as a function of the step it fails: {error}", fix
        ) from None
    except ValueError:  # of a function without a signature
        pass
    first = data(0)
    if isinstance(first, Iterator):
        raise DataError(
            f"{kind} of a wrapped model",
            f"the function of the step returned a {type(first).__name__}, and no batch",
            "a function that returns the batch of one step, or the iterator itself",
        )
    return first


def _repeated(data: Any, step: int, position: Any) -> Iterator[Any]:
    """Reads an iterable from its start, again and again, and drops the first `step` batches."""
    taken = 0
    while True:
        before = taken
        for batch in data:
            taken += 1
            if taken > step:
                yield batch
        if taken == before:
            raise DataError(
                "data of a wrapped model",
                "it has no batch when it is read again",
                "an iterable that has",
            )


def _at(data: Any, start: Any, step: int, position: Any) -> Iterator[Any]:
    """Opens an iterator with a state (Grain). start: its first state.
    position: that of a `BatchFeed`."""
    iterator = iter(data)
    if position is None and step:
        raise DataError(
            f"continuing after step {step}",
            "the data is an iterator with a state, and the checkpoint has none of it",
            "the data that the checkpoint was trained with, or a new run",
        )
    if position is not None:
        start = base64.b64decode(position["base64"]) if "base64" in position else position["json"]
    iterator.set_state(start)
    return iterator


def _once(left: list[Iterator[Any]], step: int, position: Any) -> Iterator[Any]:
    """Opens an iterator that can be read once: a generator. left: holds it until it is opened."""
    if step or not left:
        raise DataError(
            f"batches from step {step} on",
            "the data is an iterator that can be read once, from its beginning",
            "a function of the step, an iterable such as a list, or an iterator with get_state and "
            "set_state (Grain)",
        )
    return left.pop()


def _described(batch: Any, kind: str) -> Any:
    """Returns the batch as ShapeDtypeStructs.
    Raises DataError where its arrays have no common first dimension."""
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    for path, leaf in leaves:
        _check_leaf(leaf, jax.tree_util.keystr(path) or "it", kind)
    shapes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in leaves}
    sizes = {shape[0] if shape else None for shape in shapes.values()}
    if not shapes or None in sizes or len(sizes) > 1:
        first = [f"{name or 'batch'} {list(shape)}" for name, shape in shapes.items()]
        listed = ", ".join(first[:_LISTED]) + (
            f" and {len(first) - _LISTED} more" if len(first) > _LISTED else ""
        )
        raise DataError(
            f"a batch of {kind}",
            f"its arrays are {listed or 'none'}",
            "arrays whose first dimension is the batch, the same for all; a list of numbers as "
            "np.array; a constant in the loss",
        )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), _dtype(x)), batch)


def _check_leaf(leaf: Any, name: str, kind: str) -> None:
    if _is_jax(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise DataError(
                f"a batch of {kind}",
                f"{name} is an array of keys, and the step has keys of its own",
                "loss(model, batch, key), whose key does not depend on the mesh; or "
                "jax.random.key_data of them",
            )
        return
    fix = "arrays of numbers: texts as their tokens"
    if dataclasses.is_dataclass(leaf):
        fix = (
            f"jax.tree_util.register_dataclass({type(leaf).__name__}), or a dictionary of its "
            "fields"
        )
    try:
        dtype = np.asarray(leaf).dtype
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"a batch of {kind}", f"{name} is a {type(leaf).__name__}: {error}", fix
        ) from None
    if dtype.kind in "USOMm":
        what = f"an array of {dtype}" if _ndim(leaf) else f"a {type(leaf).__name__}"
        raise DataError(
            f"a batch of {kind}", f"{name} is {what}, and devices hold only numbers", fix
        )


def _is_jax(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _dtype(leaf: Any) -> Any:
    """Type that an array has on a device; arrays of other libraries are read as NumPy's."""
    return jax.dtypes.canonicalize_dtype(
        jnp.result_type(leaf if _is_jax(leaf) else np.asarray(leaf))
    )


def check_batch(batch: Any, example: Any, what: str) -> None:
    """Raises DataError naming the first array that differs from those of the first batch."""
    expected, given = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (example, batch))
    if str(jax.tree.structure(batch)) != str(jax.tree.structure(example)):
        raise DataError(
            what,
            f"it is {jax.tree.structure(batch)}, and the first is {jax.tree.structure(example)}",
            "equal trees",
        )
    for (path, want), (_, x) in zip(expected, given, strict=True):
        dtype = _dtype(x)
        if (np.shape(x), dtype) != (want.shape, want.dtype):
            raise DataError(
                what,
                f"{jax.tree_util.keystr(path) or 'it'} is {dtype}{list(np.shape(x))}, and in the "
                f"first batch {want.dtype}{list(want.shape)}: the step would be compiled again",
                "batches of one shape: drop or fill up the last one of an epoch",
            )


def put_batch(batch: Any, example: Any, sharding: NamedSharding) -> Any:
    """Places a global batch on the devices; every process has all of it, and puts its own rows."""

    def place(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        given = np.asarray(x)
        if given.dtype.kind in "iu" and given.dtype != like.dtype and given.size:
            limits, least, most = np.iinfo(like.dtype), int(given.min()), int(given.max())
            if least < limits.min or most > limits.max:
                raise DataError(
                    f"{given.dtype} numbers of a batch",
                    f"devices have them as {like.dtype}, up to {limits.max}, and there is "
                    f"{most if most > limits.max else least}",
                    "smaller numbers: indices into a table, or two arrays",
                )
        array = given.astype(like.dtype, copy=False)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, batch, example)


def read_epoch(source: Source, sharding: NamedSharding) -> Iterator[Any]:
    """Yields held-out batches on the devices, from the first to the last."""
    assert source.once is not None, "find_held_out refuses data that cannot be read again"
    for batch in source.once():
        check_batch(batch, source.example, f"a batch of {source.kind}")
        yield put_batch(batch, source.example, sharding)


class BatchFeed:
    """Batches on the devices from a step on, each checked against the first."""

    def __init__(self, source: Source, first: int, position: Any, sharding: NamedSharding):
        self.wait_seconds = 0.0
        self._source, self._step, self._sharding = source, first, sharding
        self._batches = source.open(first, position)
        self.position: Any = position
        """Position after the last batch, as JSON; None where the number of steps tells it."""

    def __iter__(self) -> "BatchFeed":
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise DataError(
                f"the batch of step {self._step + 1}",
                f"the {self._source.kind} ended after {self._step} batches",
                f"fewer steps (steps={self._step}), or an iterable, which is read again at its end",
            ) from None
        check_batch(batch, self._source.example, f"the batch of step {self._step + 1}")
        self._step += 1
        if hasattr(self._batches, "get_state"):
            state = self._batches.get_state()
            encoded = (
                {"base64": base64.b64encode(state).decode()}
                if isinstance(state, bytes)
                else {"json": state}
            )
            self.position = encoded
        placed = put_batch(batch, self._source.example, self._sharding)
        self.wait_seconds += time.perf_counter() - began
        return placed
