"""Abstract arguments of the foreign programs, placed on the devices that they are compiled for."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(devices: Sequence[Any], explicit: bool = False, **axes: int) -> Mesh:
    """Returns a mesh of all devices, axes outermost first. explicit: axes whose shardings are part of types."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return Mesh(
        np.array(devices).reshape(tuple(axes.values())), tuple(axes), axis_types=(kind,) * len(axes)
    )


_WHOLE = P()


def on(mesh: Mesh, tree: Any, spec: P = _WHOLE) -> Any:
    """Returns a tree of abstract arrays with the shapes of `tree`, sharded by `spec`."""

    def place(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def array(
    mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: str = "float32"
) -> jax.ShapeDtypeStruct:
    """Returns an abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def without_filter(step: Any, mesh: Mesh, *trees: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a step of Equinox modules as a `jax.jit` of their arrays, and these.

    `equinox.filter_jit` takes abstract arrays for static values, and real arrays cannot be on absent hardware.
    """
    import equinox

    parts = [
        equinox.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        for tree in trees
    ]

    def arrays_alone(arrays: Any, *rest: Any) -> Any:
        whole = [
            equinox.combine(given, static) for given, (_, static) in zip(arrays, parts, strict=True)
        ]
        return equinox.filter(step(*whole, *rest), equinox.is_array)

    return jax.jit(arrays_alone), tuple(on(mesh, arrays) for arrays, _ in parts)


def traced(function: Any, mesh: Mesh, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a `Traced`, for functions that name axes of the mesh in their context."""
    with jax.set_mesh(mesh):
        return jax.jit(function).trace(*arguments), ()
