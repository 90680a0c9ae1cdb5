"""Description of the array for which a step that is compiled once would be compiled again."""

from typing import Any

import jax


def changed_array(expected: Any, given: Any) -> str | None:
    """Describes the first array whose shape, type or sharding is not what the step was compiled for."""
    want, got = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (expected, given))
    if len(want) != len(got):
        return f"{len(want)} arrays became {len(got)}"
    for (path, before), (_, after) in zip(want, got, strict=True):
        name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            return f"{name} was {before.dtype}{list(before.shape)} and is {after.dtype}{list(after.shape)}"
        if not before.sharding.is_equivalent_to(after.sharding, len(before.shape)):
            return f"{name} was sharded as {before.sharding.spec} and is {after.sharding}"
    return None
