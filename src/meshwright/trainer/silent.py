"""Silent corruption: steps computed twice and replicas, which must be equal bit by bit."""

import collections
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.checkpoint.fingerprints import SALTS, sum_of_hashes
from meshwright.errors import HostError
from meshwright.sharding.params import named_leaves
from meshwright.signs import Phases, waiting

Step = Callable[[Any, Any], tuple[Any, Any]]
_SHOWN = 4
"""Tensors and devices that an error names."""


def checked(step: Step, every: int, phases: Phases) -> Step:
    """Returns a train step that is checked once in `every` steps."""

    def take(state: Any, batch: Any) -> tuple[Any, Any]:
        number = phases.now[0]  # the step that the loop has begun
        return step(state, batch) if number % every else checked_step(step, state, batch, number)

    return take


def checked_step(step: Step, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
    """Takes a step twice from the same state, and returns the second result.

    The step is deterministic: another result, or replicas that differ, come from a device that
    computes wrongly or from memory that lost a bit. Takes as much more memory as the state, once.
    Raises HostError naming the devices.
    """
    spare = jax.tree.map(jnp.copy, state)
    first = shard_sums(step(spare, batch)[0])
    del spare
    state, metrics = step(state, batch)
    second = shard_sums(state)
    check_equal(first, second, number)
    check_replicas(state, second, number)
    return state, metrics


def shard_sums(tree: Any) -> dict[str, dict[Any, int]]:
    """Returns a sum over the bits of each device's shard of each tensor: name -> device -> sum.

    Each device sums its own shard; 4 bytes per tensor and device are gathered. Tensors kept in the
    host's memory are left out.
    """
    kinds = (None, "device", "unpinned_host")
    leaves = named_leaves(tree).items()
    tensors = {
        n: x
        for n, x in leaves
        if isinstance(x.sharding, NamedSharding) and x.sharding.memory_kind in kinds
    }
    if not tensors:
        return {}
    mesh = next(iter(tensors.values())).sharding.mesh
    everywhere = PartitionSpec(mesh.axis_names)

    def sums(shards: dict[str, jax.Array]) -> jax.Array:
        flat = [x.reshape(-1) for x in shards.values()]
        return jnp.stack(
            [sum_of_hashes(x, jax.lax.iota(jnp.uint32, x.size), SALTS[0]) for x in flat]
        )[None]

    specs = {name: x.sharding.spec for name, x in tensors.items()}
    mapped = jax.shard_map(
        sums, mesh=mesh, in_specs=(specs,), out_specs=everywhere, check_vma=False
    )
    with waiting("the devices"):
        rows = np.asarray(multihost_utils.process_allgather(jax.jit(mapped)(tensors), tiled=True))
    devices = list(mesh.devices.flat)
    return {
        name: {d: int(rows[i, j]) for i, d in enumerate(devices)} for j, name in enumerate(tensors)
    }


def check_equal(
    first: dict[str, dict[Any, int]], second: dict[str, dict[Any, int]], step: int
) -> None:
    """Raises HostError where a step that was computed twice gave two results."""
    names = [name for name in first if first[name] != second[name]]
    devices = {d for name in names for d in first[name] if first[name][d] != second[name][d]}
    _refuse(step, "computed twice, it gave two results", names, devices)


def check_replicas(tree: Any, sums: dict[str, dict[Any, int]], step: int) -> None:
    """Raises HostError where devices that have the same shard of a tensor have other bits in it.

    sums: of `shard_sums(tree)`.
    """
    names, odd = odd_replicas(tree, sums)
    _refuse(step, "its replicas differ", names, set(odd))


def odd_replicas(tree: Any, sums: dict[str, dict[Any, int]]) -> tuple[list[str], list[jax.Device]]:
    """Returns the tensors of which devices have other bits in the same shard, and those devices.

    sums: of `shard_sums(tree)`. With three replicas or more, those that differ from most are named.
    """
    names, odd, leaves = [], set(), named_leaves(tree)
    for name, of_device in sums.items():
        groups: dict[str, list[Any]] = collections.defaultdict(list)
        for device, part in leaves[name].sharding.devices_indices_map(leaves[name].shape).items():
            groups[str(part)].append(device)
        for group in groups.values():
            counts = collections.Counter(of_device[device] for device in group)
            if len(counts) > 1:
                (most, number), (_, next_number) = counts.most_common(2)
                names.append(name)
                odd |= {d for d in group if number == next_number or of_device[d] != most}
    devices = sorted(odd, key=operator.attrgetter("id"))
    return list(dict.fromkeys(names)), devices


def _refuse(step: int, what: str, names: list[str], odd: set[Any]) -> None:
    if not names:
        return
    devices = [
        f"device {d.id} of process {d.process_index}"
        for d in sorted(odd, key=operator.attrgetter("id"))
    ]

    def shown(words: list[str]) -> str:
        return ", ".join(words[:_SHOWN]) + (
            f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        )

    raise HostError(
        f"step {step}, checked for silent corruption",
        f"{what} in {shown(names)}: {shown(devices)}",
        "--resume, from a checkpoint before it, without the host of that device",
    )
