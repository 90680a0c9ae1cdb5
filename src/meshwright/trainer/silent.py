"""Silent corruption: steps computed twice and replicas, which must be equal bit by bit."""

import collections
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshwright.activity import activity
from meshwright.checkpoint.fingerprints import SALTS, sum_of_hashes
from meshwright.errors import HostError
from meshwright.sharding.params import named_leaves
from meshwright.signs import Phases, waiting
from meshwright.trainer.tiers import say

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

    Before it, a replica that differs from most is replaced.
    The step is deterministic: another result, or replicas that differ, come from a device that
    computes wrongly or from memory that lost a bit. Takes as much more memory as the state, once.
    Raises HostError naming the devices.
    """
    state = replace_odd_replicas(state, number)
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
        for group in _replicas(leaves[name]):
            counts = collections.Counter(of_device[device] for device in group)
            if len(counts) > 1:
                (most, number), (_, next_number) = counts.most_common(2)
                names.append(name)
                odd |= {d for d in group if number == next_number or of_device[d] != most}
    devices = sorted(odd, key=operator.attrgetter("id"))
    return list(dict.fromkeys(names)), devices


def replace_odd_replicas(state: Any, step: int) -> Any:
    """Returns the state before a step, in which replicas of a shard that differ from most of them are replaced.

        sums of the replicas   a  a  b  a   ->   the third device gets the shard of the first

    Parameters and optimizer state alike: each tensor of which a device has other bits is copied from a replica in the
    same process. Raises HostError naming the devices where no more than half of the replicas agree, as of two, or where
    those that do are in other processes: the run then goes on from its last checkpoint.
    """
    sums = shard_sums(state)
    names, odd = odd_replicas(state, sums)
    if not names:
        return state
    leaves = named_leaves(state)
    sources = {name: _healthy_devices(leaves[name], sums[name]) for name in names}
    if any(None in source_of.values() for source_of in sources.values()):
        _refuse(step, "its replicas differ before it", names, set(odd))
    with activity(
        "replica", "replacing a replica that differs", "replaced a replica", step
    ) as work:
        text = (
            f"step {step}: before it, {_names_of_devices(odd)} had other bits than most replicas in "
            f"{_shown(names)}: replaced from another replica"
        )
        work.result = text
        work.record = {"reason": text}
        say(text)
        flat, structure = jax.tree.flatten(state)
        position_of = {name: position for position, name in enumerate(leaves)}
        for name, source_of in sources.items():
            flat[position_of[name]] = _copied(leaves[name], source_of)
        return jax.tree.unflatten(structure, flat)


def _healthy_devices(
    tensor: jax.Array, sums: Mapping[jax.Device, int]
) -> dict[jax.Device, jax.Device | None]:
    """Returns the devices whose shard differs from that of most, each with one that it is copied from.

    That is of the same process; None where there is none, or no majority.
    """
    found: dict[jax.Device, jax.Device | None] = {}
    for group in _replicas(tensor):
        counts = collections.Counter(sums[device] for device in group)
        if len(counts) == 1:
            continue
        most, number = counts.most_common(1)[0]
        healthy = [device for device in group if sums[device] == most]
        for device in group:
            if sums[device] == most:
                continue
            near = [each for each in healthy if each.process_index == device.process_index]
            found[device] = near[0] if near and 2 * number > len(group) else None
    return found


def _copied(tensor: jax.Array, source_of: Mapping[jax.Device, jax.Device | None]) -> jax.Array:
    """Returns a tensor in which the shards of some devices are those of others."""
    shards = {shard.device: shard.data for shard in tensor.addressable_shards}
    arrays = []
    for device in shards:
        source = source_of.get(device)
        if source is None:
            arrays.append(shards[device])
            continue
        memory = shards[device].sharding.memory_kind
        target = SingleDeviceSharding(device, memory_kind=memory)
        arrays.append(jax.device_put(shards[source], target))
    return jax.make_array_from_single_device_arrays(tensor.shape, tensor.sharding, arrays)


def _replicas(tensor: jax.Array) -> list[list[jax.Device]]:
    """Returns the devices of each shard of a tensor."""
    groups: dict[str, list[jax.Device]] = collections.defaultdict(list)
    for device, part in tensor.sharding.devices_indices_map(tensor.shape).items():
        groups[str(part)].append(device)
    return list(groups.values())


def _names_of_devices(devices: Iterable[jax.Device]) -> str:
    ordered = sorted(devices, key=operator.attrgetter("id"))
    return _shown([f"device {d.id} of process {d.process_index}" for d in ordered])


def _shown(words: Sequence[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


def _refuse(step: int, what: str, names: list[str], odd: set[Any]) -> None:
    if not names:
        return
    raise HostError(
        f"step {step}, checked for silent corruption",
        f"{what} in {_shown(names)}: {_names_of_devices(odd)}",
        "--resume, from a checkpoint before it, without the host of that device",
    )
