"""Replicas of the state, which must be equal bit by bit: compared, named, and replaced.

A tensor that is not sharded over a mesh axis has a replica on every device of that axis:

    mesh data=4, a tensor without `data`     device 0   device 1   device 2   device 3
    sums of bits after a step                a          a          b          a
    after the replacement                    a          a          a          a

Every device sums the bits of its own shards, and one all-reduce of a few bytes tells whether any
differ. Only then all sums are gathered, and every process decides the same from them
(`Replicas.make_equal`).
"""

import collections
import functools
import math
import operator
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.activity import activity
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.errors import HostError
from meshwright.hardware.agreement import choose_together
from meshwright.sharding.params import named_leaves
from meshwright.signs import waiting
from meshwright.trainer.tiers import say

EVENT = "replica"
"""Kind of the event of replicas that differ."""
_SHOWN = 4
"""Tensors and devices that a text names."""
_ON_DEVICES = (None, "device", "unpinned_host")
"""Kinds of memory that a program on the devices reads;
those that are offloaded are not compared."""

Specs = tuple[tuple[str, PartitionSpec], ...]
"""Name and sharding of each tensor."""
Sums = dict[str, dict[jax.Device, int]]
"""Name of a tensor -> device -> sum over the bits of its shard."""


class OddReplicas(NamedTuple):
    """Replicas of a state that differ from others."""

    names: list[str]
    """Tensors of which they are."""
    devices: list[jax.Device]
    """Devices that have other bits than most of their group;
    the entire group where as many have others."""
    sources: dict[str, frozenset[jax.Device]] | None
    """Devices of each tensor from which every group takes its bits; None without a majority."""


def have_replicas(tree: Any) -> bool:
    """Returns whether a tensor with at least one dimension is on several devices.

    Scalars, such as the count of steps, are replicated on every mesh.
    """
    return any(
        leaf.ndim > 0 and _replicated_devices(_sharding_of(leaf)) > 1
        for leaf in _on_devices(tree).values()
    )


def replicas_differ(tree: Any) -> bool:
    """Returns whether any device has other bits than its replicas; the same in every process."""
    compare, tensors = comparison_of(tree)
    if not tensors:
        return False
    with waiting("the devices"):
        differing = jax.device_get(compare(tensors))
    return bool(differing > 0)


def comparison_of(
    tree: Any,
) -> tuple[Callable[[dict[str, jax.Array]], jax.Array], dict[str, jax.Array]]:
    """Returns the program that compares the replicas of a tree, and the tensors that it takes.

    The program counts the pairs of a tensor and a device whose bits are not those of all replicas.

    tree: arrays, or abstract arrays with shardings.
    """
    tensors = _on_devices(tree)
    if not tensors:
        return lambda none: jnp.int32(0), {}
    return _build_comparison(_mesh_of(tensors), _specs_of(tensors)), tensors


def shard_sums(tree: Any) -> Sums:
    """Returns a sum over the bits of each device's shard of each tensor: name -> device -> sum.

    Each device sums its own shard; 8 bytes per tensor and device are gathered. Tensors kept in the
    host's memory are left out.
    """
    tensors = _on_devices(tree)
    if not tensors:
        return {}
    mesh = _mesh_of(tensors)
    specs = _specs_of(tensors)
    with waiting("the devices"):
        sums = _build_sums(mesh, specs)(tensors)
        gathered = np.asarray(multihost_utils.process_allgather(sums, tiled=True))
    of_tensor: Sums = {}
    for column, (name, _) in enumerate(specs):
        high = gathered[:, column, 0].astype(np.uint64) << np.uint64(32)
        both = high | gathered[:, column, 1]
        of_tensor[name] = dict(zip(mesh.devices.flat, both.tolist(), strict=True))
    return of_tensor


def find_odd_replicas(tree: Any, sums: Sums) -> OddReplicas | None:
    """Returns the replicas of a tree that differ; None where all are equal.

    sums: of `shard_sums(tree)`.
    """
    names: list[str] = []
    devices: set[jax.Device] = set()
    sources: dict[str, frozenset[jax.Device]] = {}
    has_majority = True
    leaves = named_leaves(tree)
    for name, of_device in sums.items():
        chosen: set[jax.Device] = set()
        is_odd = False
        for group in _replica_groups(leaves[name]):
            ranked = collections.Counter(of_device[device] for device in group).most_common(2)
            most, number = ranked[0]
            chosen.add(next(device for device in group if of_device[device] == most))
            if len(ranked) == 1:
                continue
            is_odd = True
            has_majority &= 2 * number > len(group)
            is_tie = number == ranked[1][1]
            devices |= {device for device in group if is_tie or of_device[device] != most}
        if is_odd:
            names.append(name)
            sources[name] = frozenset(chosen)
    if not names:
        return None
    ordered = sorted(devices, key=operator.attrgetter("id"))
    return OddReplicas(names, ordered, sources if has_majority else None)


def replace_replicas(tree: Any, sources: Mapping[str, frozenset[jax.Device]]) -> Any:
    """Returns a tree in which all replicas of some tensors have the bits of a source.

    sources: devices of each tensor that is replaced, one for each shard.  All processes call it
    together. One tensor after another is sent, as whole numbers, by an all-reduce to which only the
    sources contribute: no float is added. The tree's own tensors of these names are given up.
    """
    names = list(named_leaves(tree))
    flat, structure = jax.tree.flatten(tree)
    for position, name in enumerate(names):
        if name not in sources:
            continue
        tensor = flat[position]
        sharding = _sharding_of(tensor)
        marks = _marks(_devices_of(sharding), sources[name])
        with waiting("the devices"):
            replaced = _build_broadcast(sharding)(tensor, marks)
            flat[position] = jax.block_until_ready(replaced)
    return jax.tree.unflatten(structure, flat)


def name_devices(devices: Iterable[jax.Device], hosts: Sequence[str]) -> str:
    """Names devices with process and host. hosts: name of each process's."""
    return shown([full_name(f"device {d.id}", d.process_index, hosts) for d in devices])


def full_name(device: str, process: int, hosts: Sequence[str]) -> str:
    """Names a device with its process and host: `device 2 of process 1 (node7)`."""
    return f"{device} of process {process} ({hosts[process]})"


class Replicas:
    """Comparison of the replicas of a run's state, and what follows where they differ."""

    def __init__(self, step: int) -> None:
        """Begins after `step`, where all replicas have been read from the same files."""
        self.compared = step
        """Step after which the replicas were last equal, or made equal."""
        self._odd_before: set[jax.Device] = set()

    def make_equal(self, state: Any, step: int) -> Any | None:
        """Returns the state after a step with equal replicas; None without a majority.

        All processes call it together, and all return alike. Raises HostError for a device whose
        replicas differ for the second time since this object was made.
        """
        if not replicas_differ(state):
            self.compared = step
            return state
        with activity(EVENT, "comparing replicas", "compared replicas", step) as work:
            hosts = choose_together("host name", socket.gethostname(), list)
            odd = find_odd_replicas(state, shard_sums(state))
            if odd is None:  # a sum is exact, and nothing has changed the state since
                raise HostError(
                    f"step {step}, replicas compared",
                    "two sums over the same bits differ, on a device or on a link",
                    "--resume",
                )
            again = self._odd_before & set(odd.devices)
            text = f"step {step}: {name_devices(odd.devices, hosts)} had other bits than "
            text += "most replicas of " if odd.sources else "the other replicas of "
            text += f"{shown(odd.names)}: {self._what_follows(odd, step, is_again=bool(again))}"
            work.result = text
            work.record = {
                "bad": step,
                "lines": [text],
                "devices": [device.id for device in odd.devices],
                "tensors": odd.names,
            }
            say(text)
            if again:
                raise HostError(
                    f"step {step}, replicas compared",
                    f"{name_devices(odd.devices, hosts)} had other bits in {shown(odd.names)}, and "
                    f"{name_devices(again, hosts)} had before in this start of the run",
                    "--resume without the host of that device; replicas were compared before every "
                    "save",
                )
            self._odd_before |= set(odd.devices)
            if odd.sources is None:
                return None
            state = replace_replicas(state, odd.sources)
        self.compared = step
        return state

    def _what_follows(self, odd: OddReplicas, step: int, *, is_again: bool) -> str:
        """Returns what is done about replicas that differ,
        and which gradients they were part of."""
        if is_again:
            return "as before in this start of the run, which ends"
        if odd.sources is None:
            return "no more than half are equal, so the run returns to its last checkpoint"
        first = self.compared + 1
        steps = f"step {step}" if first >= step else f"steps {first} to {step}"
        return f"replaced from an equal one; gradients of {steps} may have been computed with them"


def _on_devices(tree: Any) -> dict[str, jax.Array]:
    """Returns the tensors of a tree that a program on the devices reads, by name."""
    return {
        name: leaf
        for name, leaf in named_leaves(tree).items()
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.memory_kind in _ON_DEVICES
    }


def _sharding_of(tensor: jax.Array) -> NamedSharding:
    assert isinstance(tensor.sharding, NamedSharding)
    return tensor.sharding


def _mesh_of(tensors: Mapping[str, jax.Array]) -> Mesh:
    return _devices_of(_sharding_of(next(iter(tensors.values()))))


def _devices_of(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _specs_of(tensors: Mapping[str, jax.Array]) -> Specs:
    return tuple((name, _sharding_of(x).spec) for name, x in tensors.items())


def _replicated_axes(mesh: Mesh, spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the axes over which a tensor is replicated."""
    sharded: set[str] = set()
    for axes in spec:
        if axes is not None:
            sharded |= {axes} if isinstance(axes, str) else set(axes)
    return tuple(axis for axis in mesh.axis_names if axis not in sharded)


def _replicated_devices(sharding: NamedSharding) -> int:
    mesh = _devices_of(sharding)
    return math.prod(mesh.shape[axis] for axis in _replicated_axes(mesh, sharding.spec))


def _replica_groups(tensor: jax.Array) -> list[list[jax.Device]]:
    """Returns the devices of each shard of a tensor."""
    groups: dict[str, list[jax.Device]] = collections.defaultdict(list)
    for device, part in tensor.sharding.devices_indices_map(tensor.shape).items():
        groups[str(part)].append(device)
    return list(groups.values())


def _marks(mesh: Mesh, devices: frozenset[jax.Device]) -> jax.Array:
    """Returns a bool for each device of a mesh, on that device: whether it is one of `devices`."""
    marked = np.vectorize(lambda device: device in devices, otypes=[np.bool_])(mesh.devices)
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    return jax.make_array_from_callback(marked.shape, sharding, lambda part: marked[part])


def shown(words: Sequence[str]) -> str:
    """Returns the first of several names, and how many more there are."""
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


# Programs: each is compiled once for the tensors of a run


def _sums_of_shards(shards: dict[str, jax.Array], specs: Specs) -> jax.Array:
    """Returns the sums of one device's shards in the order of `specs`, uint32[tensors, 2].

    JAX sorts the names of a dictionary that a program takes, so the order is stated.
    """
    sums = fingerprints(shards)
    return jnp.stack([sums[name] for name, _ in specs])


@functools.lru_cache(maxsize=4)
def _build_comparison(mesh: Mesh, specs: Specs) -> Callable[[dict[str, jax.Array]], jax.Array]:
    """Builds the count of (tensor, device) whose bits are not those of all replicas.

    Replicas are equal where the largest of their sums is that of each.
    """
    by_axes: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for number, (_, spec) in enumerate(specs):
        by_axes[_replicated_axes(mesh, spec)].append(number)

    def count(shards: dict[str, jax.Array]) -> jax.Array:
        sums = _sums_of_shards(shards, specs)
        differing = jnp.int32(0)
        for axes, numbers in by_axes.items():
            if not axes:
                continue
            mine = sums[np.array(numbers)]
            largest = jax.lax.pmax(mine, axes)
            differing += jnp.sum(jnp.any(mine != largest, axis=1), dtype=jnp.int32)
        return jax.lax.psum(differing, mesh.axis_names)

    mapped = jax.shard_map(
        count, mesh=mesh, in_specs=(dict(specs),), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(mapped)


@functools.lru_cache(maxsize=4)
def _build_sums(mesh: Mesh, specs: Specs) -> Callable[[dict[str, jax.Array]], jax.Array]:
    """Builds the sums of every device, uint32[devices, tensors, 2]."""

    def sums(shards: dict[str, jax.Array]) -> jax.Array:
        return _sums_of_shards(shards, specs)[None]

    mapped = jax.shard_map(
        sums,
        mesh=mesh,
        in_specs=(dict(specs),),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(mapped)


def _build_broadcast(sharding: NamedSharding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Builds the broadcast of the marked replica of each shard to its other replicas."""
    mesh = _devices_of(sharding)
    spec = sharding.spec
    axes = _replicated_axes(mesh, spec)

    def broadcast(shard: jax.Array, mark: jax.Array) -> jax.Array:
        bits = _bits(shard)
        contribution = jnp.where(mark.reshape(()), bits, jnp.zeros_like(bits))
        return _from_bits(jax.lax.psum(contribution, axes), shard.dtype)

    mapped = jax.shard_map(
        broadcast,
        mesh=mesh,
        in_specs=(spec, PartitionSpec(*mesh.axis_names)),
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(mapped, out_shardings=sharding, donate_argnums=0)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of elements as whole numbers of 32 bits, which every platform adds."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    unsigned = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    return jax.lax.bitcast_convert_type(bits.astype(unsigned), dtype)
