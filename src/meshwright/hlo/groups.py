"""Mesh axes of a collective's replica groups.

XLA writes replica groups in three ways: as a list (`{{0,1},{2,3}}`), as a reshaped and transposed iota
(`[2,4]<=[4,2]T(1,0)`), or as axes of a mesh (`mesh['a'=4,'b'=2] {'b'}`). All are expanded to sets of device numbers,
which are compared with every subset of the mesh axes. Device i is the i-th of `mesh.devices.flat`.
"""

import itertools
import re
from collections.abc import Iterator

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices in each group."""

_MESH = re.compile(r"mesh\[(.*?)\]\s*(?:,?\s*device_ids=\(?\[?([\d,\s]*)\]?\)?)?\s*\{(.*?)\}", re.S)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def expand(text: str, num_devices: int) -> Groups:
    """Expands the text of replica groups; an empty list is one group of all `num_devices` devices."""
    text = text.strip()
    if (match := _MESH.match(text)) is not None:
        return _expand_mesh(match[1], match[2], match[3])
    if (match := _IOTA.match(text)) is not None:
        shape, source = _numbers(match[1]), _numbers(match[2])
        ids = np.arange(int(np.prod(source))).reshape(source)
        if match[3]:
            ids = ids.transpose(_numbers(match[3]))
        return _rows(ids.reshape(shape[0], -1) if len(shape) > 1 else ids.reshape(1, -1))
    listed = re.findall(r"\{([\d,\s]+)\}", text)
    return tuple(tuple(_numbers(group)) for group in listed) or (tuple(range(num_devices)),)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in array)


def _expand_mesh(axes: str, ids: str | None, grouped: str) -> Groups:
    """Expands groups over some axes of a mesh. axes: degrees of all axes; ids: order of the devices."""
    degrees = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", axes)}
    wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped)
    # Part of an axis is written 'a':(before)size: the axis is split into (before, size, after).
    shape: list[int] = []
    grouped_dims: list[int] = []
    for name, degree in degrees.items():
        cuts = {1, degree}
        for other, before, size in wanted:
            if other == name and before:
                cuts |= {int(before), int(before) * int(size)}
        ordered = sorted(cuts)
        for low, high in itertools.pairwise(ordered):
            whole = any(other == name and not before for other, before, _ in wanted)
            part = any(other == name and before and int(before) == low for other, before, _ in wanted)
            if whole or part:
                grouped_dims.append(len(shape))
            shape.append(high // low)
    flat = np.array(_numbers(ids)) if ids and _numbers(ids) else np.arange(int(np.prod(shape)))
    devices = flat.reshape(shape)
    other_dims = [i for i in range(len(shape)) if i not in grouped_dims]
    size = int(np.prod([shape[i] for i in grouped_dims]))
    return _rows(devices.transpose(*other_dims, *grouped_dims).reshape(-1, size))


def axes_of_groups(groups: Groups, mesh: dict[str, int]) -> tuple[str, ...] | None:
    """Finds the smallest set of mesh axes whose groups these are, in the mesh's order; None if there is none.

    Groups over part of an axis, as where the axis crosses slices or dimensions of a torus, are named `data within 4`
    (4 neighbours along the axis), `data between 2` (the devices at equal places of its 2 parts), or `data between 2
    within 8` (those of the 2 halves of each 8 neighbours).
    mesh: degree of each axis, outermost first.
    """
    whole = _whole_axes(groups, mesh)
    return whole if whole is not None else next(_parts_of_axes(groups, mesh), None)


def _parts_of_axes(groups: Groups, mesh: dict[str, int]) -> Iterator[tuple[str, ...]]:
    for axis, degree in mesh.items():
        divisors = [d for d in range(1, degree + 1) if degree % d == 0]
        # The axis as (outer, size, inner) devices, of which the groups are along `size`.
        for outer, inner in itertools.product(divisors, divisors):
            size = degree // (outer * inner)
            if outer * size * inner != degree or size in (1, degree):
                continue
            between = f"{axis} between {size}" if inner > 1 else f"{axis} within {size}"
            name = f"{between} within {size * inner}" if inner > 1 and outer > 1 else between
            pieces = {f"outer of {axis}": outer, name: size, f"inner of {axis}": inner}
            split: dict[str, int] = {}
            for other, n in mesh.items():
                split |= pieces if other == axis else {other: n}
            axes = _whole_axes(groups, split)
            if axes is not None and not any(" of " in a for a in axes):
                yield axes


def _whole_axes(groups: Groups, mesh: dict[str, int]) -> tuple[str, ...] | None:
    wanted = frozenset(frozenset(group) for group in groups)
    # The program of one of several slices lists only its own devices.
    listed = frozenset(device for group in groups for device in group)
    nontrivial = [axis for axis, degree in mesh.items() if degree > 1]
    ids = np.arange(int(np.prod(list(mesh.values()) or [1]))).reshape([mesh[a] for a in nontrivial] or [1])
    for n in range(len(nontrivial) + 1):
        for chosen in itertools.combinations(range(len(nontrivial)), n):
            others = [i for i in range(len(nontrivial)) if i not in chosen]
            size = int(np.prod([mesh[nontrivial[i]] for i in chosen], dtype=np.int64))
            rows = (ids.transpose(*others, *chosen) if nontrivial else ids).reshape(-1, size)
            candidate = (frozenset(int(i) for i in row) for row in rows)
            if frozenset(row for row in candidate if row <= listed) == wanted:
                return tuple(nontrivial[i] for i in chosen)
    return None


def axes_of_pairs(pairs: Groups, mesh: dict[str, int]) -> tuple[str, ...] | None:
    """Finds the axes along which a collective-permute's (source, target) pairs move; None if one leaves the mesh."""
    names, shape = list(mesh), list(mesh.values()) or [1]
    moved: set[str] = set()
    for source, target in pairs:
        if max(source, target) >= np.prod(shape):
            return None
        a, b = np.unravel_index(source, shape), np.unravel_index(target, shape)
        moved |= {name for name, x, y in zip(names, a, b, strict=False) if x != y}
    return tuple(name for name in names if name in moved)
