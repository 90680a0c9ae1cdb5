"""Placement of every tensor dimension on the mesh.

At rest, gathered for compute, and in the optimizer.
FSDP (ZeRO-3) is the difference between a parameter's two placements, at rest and in use; ZeRO-1
shards only the optimizer state further (Rajbhandari et al. 2020, arXiv:1910.02054, section 5).
Everything here is arithmetic on shapes: no device and no array is needed.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from meshwright.errors import ConfigError, divisors
from meshwright.mesh_shape import MeshShape

_LANES = 128
"""Lanes of a TPU's vector unit."""
_LARGE = 16
"""An array of at least this fraction (1/16) of its parameter's elements is worth splitting."""

Placement = tuple[tuple[str, ...], ...]
"""Mesh axes that shard each dimension, outermost first; () is unsharded."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sharding strategy: mesh axes of each dimension letter in use, and more axes at rest.

    Example:
        >>> from meshwright.sharding.layouts import MEGATRON
        >>> axes = ("fsdp", "expert", "data")
        >>> summary = "ZeRO-3 over data as well"
        >>> layout = mw.Layout(MEGATRON, params_over=axes, optimizer_over=axes, summary=summary)
        >>> layout.table["F"]
        ('tensor',)
    """

    table: Mapping[str, tuple[str, ...]]
    """Dimension letter -> mesh axes that shard a parameter in use."""
    params_over: tuple[str, ...]
    """Axes that shard a parameter further at rest (FSDP): experts where they divide, else the
    largest dimension."""
    optimizer_over: tuple[str, ...]
    """Axes that shard the optimizer state; contains `params_over`, and more for ZeRO-1."""
    summary: str
    """One-line description."""
    at_rest: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Dimension letter -> axes that shard this dimension further at rest, ahead of `params_over`.
    With {"D": ("fsdp",), "F": ("data",)} a feed-forward weight is FSDP-sharded over both of its
    dimensions."""


@dataclasses.dataclass(frozen=True)
class Placements:
    """Three placements of one parameter."""

    in_use: Placement
    """Gathered, for compute."""
    at_rest: Placement
    """Sharded, between steps and layers."""
    optimizer: Placement
    """Optimizer state and reduced gradients."""


def place_param(
    name: str, shape: tuple[int, ...], dims: str, *, layout: Layout, mesh: MeshShape, min_size: int
) -> Placements:
    """Returns the placements of the parameter `name`.

    dims: its dimension letters.
    min_size: parameters of fewer elements per layer, and vectors, are not sharded further at rest.
    Raises ConfigError with tensor, axis and arithmetic where a dimension does not divide.
    """
    # Of experts that `tensor` splits each keeps its width F.
    taken = layout.table.get("E", ()) if "E" in dims else ()
    in_use = tuple(
        _unused(layout.table.get(x, ()), () if x == "E" else (taken,), mesh) for x in dims
    )
    in_use = tuple(
        () if letter == "K" and replicates_kv_heads(size, mesh.over(axes)) else axes
        for letter, size, axes in zip(dims, shape, in_use, strict=True)
    )
    _check(name, shape, dims, in_use, mesh)
    if _elements_per_layer(shape, dims) < min_size or len(dims.replace("L", "")) == 1:
        return Placements(in_use, in_use, in_use)
    at_rest = tuple(
        axes + _unused(layout.at_rest.get(letter, ()), in_use, mesh)
        for letter, axes in zip(dims, in_use, strict=True)
    )
    _check(name, shape, dims, at_rest, mesh)
    at_rest = _shard_largest(
        name, shape, dims, at_rest, _unused(layout.params_over, at_rest, mesh), mesh
    )
    optimizer = _shard_largest(
        name, shape, dims, at_rest, _unused(layout.optimizer_over, at_rest, mesh), mesh
    )
    return Placements(in_use, at_rest, optimizer)


def replicates_kv_heads(kv_heads: int, degree: int) -> bool:
    """Whether every device computes all key/value heads and attends with one.

    There are fewer heads than devices.
    """
    return kv_heads < degree and degree % kv_heads == 0


def _elements_per_layer(shape: tuple[int, ...], dims: str) -> int:
    return math.prod(size for letter, size in zip(dims, shape, strict=True) if letter != "L")


def _unused(axes: tuple[str, ...], placement: Placement, mesh: MeshShape) -> tuple[str, ...]:
    degrees, used = mesh.degrees(), axes_of(placement)
    return tuple(axis for axis in axes if degrees[axis] > 1 and axis not in used)


def _check(
    name: str, shape: tuple[int, ...], dims: str, placement: Placement, mesh: MeshShape
) -> None:
    for letter, size, axes in zip(dims, shape, placement, strict=True):
        degree = mesh.over(axes)
        if size % degree:
            product = "*".join(axes)
            legal = [d for d in divisors(size) if d <= 64]
            below, above = size // degree * degree, (size // degree + 1) * degree
            raise ConfigError(
                f"{name} laid out as {notation('w', dims, placement)} with {product}={degree}",
                f"{letter}={size} does not divide: {size} = {size // degree} * {degree} + "
                f"{size % degree}",
                f"{product} of {', '.join(map(str, legal))}, or {letter} of "
                + (f"{below} or {above}" if below else f"{above}"),
            )
    used = axes_of(placement)
    if len(set(used)) < len(used):
        raise ConfigError(
            f"layout of {name}",
            f"{notation('w', dims, placement)} uses a mesh axis for two dimensions",
            "each axis for at most one dimension of a tensor",
        )


def _shard_largest(
    name: str,
    shape: tuple[int, ...],
    dims: str,
    placement: Placement,
    axes: tuple[str, ...],
    mesh: MeshShape,
) -> Placement:
    """Shards one more dimension by `axes`: experts (E), else the largest; never layers (L)."""
    if not axes or not shape:  # scalars are replicated
        return placement
    degree = mesh.over(axes)
    local = local_shape(shape, placement, mesh)
    # XLA:GPU gathers and scatters the outermost dimension in memory. For an inner one it transposes
    # the gathered weight and its gradient, so weights [E, D, F] are sharded by experts. Of other
    # dimensions unsharded ones come first, largest first: a sharded one is sharded again only where
    # no other divides. XLA reduces the last dimension whole where its blocks are not whole lanes of
    # a TPU's vector unit.
    uneven_lanes = {len(shape) - 1} if local[-1] // degree % _LANES else set()
    order = sorted(
        range(len(shape)),
        key=lambda i: (dims[i] != "E", len(placement[i]), i in uneven_lanes, -local[i]),
    )
    for i in order:
        if dims[i] != "L" and local[i] % degree == 0:
            return (*placement[:i], placement[i] + axes, *placement[i + 1 :])
    product = "*".join(axes)
    sizes = ", ".join(f"{letter}={size}" for letter, size in zip(dims, local, strict=True))
    larger = _elements_per_layer(shape, dims) + 1
    raise ConfigError(
        f"{name} {list(shape)} sharded over {product}={degree}",
        f"no dimension divides by {degree}: local sizes are {sizes}",
        f"a degree of {product} that divides one of them, or --fsdp-min-size {larger}, which "
        "leaves it whole",
    )


def to_spec(placement: Placement) -> PartitionSpec:
    """Converts a placement to a `PartitionSpec`."""
    dimensions: list[Any] = []
    for axes in placement:
        if len(axes) > 1:
            dimensions.append(axes)
        else:
            dimensions.append(axes[0] if axes else None)
    return PartitionSpec(*dimensions)


@functools.cache
def axes_of(placement: Placement) -> tuple[str, ...]:
    """Returns all mesh axes that a placement uses."""
    return tuple(axis for axes in placement for axis in axes)


def local_shape(shape: tuple[int, ...], placement: Placement, mesh: MeshShape) -> tuple[int, ...]:
    """Returns the shape of one device's block."""
    return tuple(size // mesh.over(axes) for size, axes in zip(shape, placement, strict=True))


_LEAST_PART = 16 * 2**20
"""Bytes of a part of a slice below which its replicas do not divide it further."""


def replica_parts(shape: tuple[int, ...], itemsize: int, replicas: int) -> tuple[int, int]:
    """Returns how the replicas of a slice divide a parameter to save it.

    The dimension, and the number of parts.
    Part i of n is that of replica i * replicas // n, so that all hosts have about as much. shape:
    of the slice.
    """
    most = max(1, min(replicas, math.prod(shape) * itemsize // _LEAST_PART))
    counts = [_largest_divisor(size, most) for size in shape] or [1]
    return counts.index(max(counts)), max(counts)


def _largest_divisor(size: int, most: int) -> int:
    """Returns the largest divisor of a size that is at most `most`."""
    return max(n for n in range(1, most + 1) if size % n == 0)


def notation(name: str, dims: str, placement: Placement) -> str:
    """Formats a placement in the scaling book's notation: `w[D/fsdp, N/tensor, H]`."""
    dimensions = []
    for letter, axes in zip(dims, placement, strict=True):
        dimensions.append(f"{letter}/{'+'.join(axes)}" if axes else letter)
    return f"{name}[{', '.join(dimensions)}]"


def like_param(
    shape: tuple[int, ...], of: tuple[int, ...], placement: Placement, mesh: MeshShape
) -> Placement:
    """Returns the placement of an array that an optimizer derives from a parameter.

    of: the parameter's shape.
    Dimensions are matched by size, in order: moments, and Adafactor's row and column means, lie
    like the parameter. A large array of another shape (SOAP's factors [L, D, D]) is split by layers
    where the devices that share the parameter divide them, else over the axes that are left, on its
    largest dimension that divides.
    """
    if shape == of:
        return placement
    large = math.prod(shape) * _LARGE >= math.prod(of)
    owners, blocks = mesh.size // mesh.over(placement[0]), mesh.over(axes_of(placement))
    if (
        large
        and len(shape) > 2
        and shape[0] == of[0]
        and not (shape[0] % owners or shape[0] % blocks)
    ):
        return (axes_of(placement), *((),) * (len(shape) - 1))
    dims = list(zip(of, placement, strict=True))
    axes: list[tuple[str, ...]] = []
    for size in shape:
        match = next((i for i, (n, _) in enumerate(dims) if n == size), None)
        axes.append(() if match is None else dims[match][1])
        if match is not None:
            dims = dims[match + 1 :]
    left = _unused(axes_of(placement), tuple(axes), mesh)
    if left and large:
        for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
            if shape[dim] % mesh.over(axes[dim] + left) == 0:
                axes[dim] += left
                break
    return tuple(axes)
