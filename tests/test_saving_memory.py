"""What `prove` counts of a save and a restore is what they take."""

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.analysis.run_census import census_of_train_step
from meshwright.analysis.run_memory import compiled_phases
from meshwright.checkpoint.checkpoints import named_tensors
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import permuted_in_layer_order, permuted_params
from meshwright.checkpoint.manifest import TensorRecord
from meshwright.checkpoint.tensors import host_shards, read_shards, write_shards
from meshwright.hardware.targets import parse_target
from meshwright.planner.estimate import estimate
from meshwright.planner.memory_model import PHASES, checkpoint_bytes
from meshwright.sharding import placement
from meshwright.sharding.params import named_leaves

MESHES: dict[str, dict[str, Any]] = {
    "data=2,fsdp=2,tensor=2": {},
    "stage=4,fsdp=2": {"pipeline_schedule": "interleaved", "microbatches": 4},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_save_takes_what_was_counted_on_devices_and_on_the_host(mesh: str) -> None:
    layers = 8 if "stage" in mesh else 2
    device_run = device_run_of(
        tiny_run(dataclasses.replace(MODELS["gpt2"], layers=layers), mesh, **MESHES[mesh])
    )
    phases = compiled_phases(device_run, census_of_train_step(device_run))
    tensors = named_tensors(device_run.initial_state())
    device = jax.devices()[0]
    state = sum(
        s.data.nbytes for x in tensors.values() for s in x.addressable_shards if s.device == device
    )
    converted = dict(permuted_in_layer_order(tensors, device_run.layout.params))
    results = {name: x.addressable_shards[0].data.nbytes for name, x in converted.items()}
    permuted = {
        name for name, p in named_leaves(device_run.layout.params).items() if p.order is not None
    }
    assert len(results) == sum(name.endswith(tuple(permuted)) for name in tensors if permuted)
    stored = {**tensors, **converted}
    copies = sum(
        values.nbytes for parts in host_shards(stored, owned=True).values() for _, values in parts
    )
    assert copies == sum(x.nbytes for x in stored.values())
    assert copies == pytest.approx(checkpoint_bytes(device_run)[0], abs=64)
    assert tuple(phases) == PHASES and all(most >= state for most in phases.values())
    if not results:
        stats = fingerprints.lower(tensors).compile().memory_analysis()
        added = stats.temp_size_in_bytes + stats.output_size_in_bytes
        assert phases["save"] == phases["resume"] == state + added
        # One tensor after another is hashed, in two arrays of 32 bits.
        assert added <= 2 * max(
            x.addressable_shards[0].data.nbytes for x in tensors.values()
        ) + 256 * len(tensors)
        return
    # One tensor beside the state while its rows are moved or it is hashed; the whole state is hashed by a restore.
    largest = max(results.values())
    assert state + largest <= phases["save"] <= state + 3 * largest + 4096
    assert phases["resume"] > state


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of one of several hosts."""

    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class OnHosts:
    """A sharding whose devices are `each` to a host."""

    of: Any
    each: int

    @property
    def device_set(self) -> set[Device]:
        return {Device(d.id, d.id // self.each) for d in self.of.device_set}

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, Any]:
        slices = self.of.devices_indices_map(shape)
        return {Device(d.id, d.id // self.each): tuple(slice(*i.indices(n)) for i, n in zip(s, shape, strict=True))
                for d, s in slices.items()}  # fmt: skip

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        result: tuple[int, ...] = self.of.shard_shape(shape)
        return result


class OfHost:
    """An array as one of several hosts sees it: with the shards on its devices."""

    def __init__(self, x: jax.Array, each: int, host: int):
        self.shape, self.dtype, self.sharding = x.shape, x.dtype, OnHosts(x.sharding, each)
        self.addressable_shards = [s for s in x.addressable_shards if s.device.id // each == host]


LAYOUTS = {
    "stage=2,data=4": (8, {"pipeline_schedule": "interleaved", "microbatches": 4}),
    "stage=2,data=2,tensor=2": (7, {"microbatches": 2}),
    "stage=2,data=2,fsdp=2": (
        6,
        {"pipeline_schedule": "interleaved", "microbatches": 2, "layout": "zero1"},
    ),
    "data=4,fsdp=2": (2, {}),
}


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_hosts_copy_one_replica_between_them(
    mesh: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Interleaved and uneven pipelines with replicas, hosts of two devices: every byte once, evenly, and restored."""
    monkeypatch.setattr(placement, "_LEAST_PART", 64)
    layers, changes = LAYOUTS[mesh]
    device_run = device_run_of(
        tiny_run(dataclasses.replace(MODELS["llama"], layers=layers), mesh, **changes)
    )
    rng, permuted = (
        np.random.default_rng(0),
        permuted_params(named_tensors(device_run.abstract), device_run.layout.params),
    )
    tensors = {
        name: jax.device_put(rng.random(x.shape).astype(x.dtype), x.sharding)
        for name, x in named_tensors(device_run.abstract).items()
    }
    stored = {**tensors, **dict(permuted_in_layer_order(tensors, device_run.layout.params))}
    assert bool(permuted) == ("stage" in mesh)
    each, hosts = 2, 4
    copies = []
    # What a first call imports and keeps in caches is not of the copies.
    host_shards({name: OfHost(x, each, 0) for name, x in stored.items()}, owned=True)
    for host in range(hosts):
        seen: Any = {name: OfHost(x, each, host) for name, x in stored.items()}
        tracemalloc.start()
        copies.append(host_shards(seen, owned=True))
        traced = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        size = sum(values.nbytes for parts in copies[-1].values() for _, values in parts)
        assert (
            size <= traced <= 1.5 * size + 2**18
        )  # NumPy's arrays, and what Python needs for them
        write_shards(tmp_path, seen, copies[-1], creates=host == 0, wrote=lambda *_: None)
    sizes = [
        sum(values.nbytes for parts in each.values() for _, values in parts) for each in copies
    ]
    assert sum(sizes) == sum(x.nbytes for x in stored.values())
    assert (
        max(sizes) <= 1.25 * sum(sizes) / hosts
    )  # the first host had all of it where it has all slices
    whole, planned = (
        checkpoint_bytes(device_run)[0],
        estimate(device_run, parse_target("v5e:2x4")).phases["save"].host * each,
    )
    assert whole == pytest.approx(sum(sizes), abs=64) and 0.99 * max(
        sizes
    ) <= planned <= 1.25 * max(sizes)
    for name, x in stored.items():
        record = TensorRecord(x.shape, str(x.dtype), (0, 0))
        like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        restored = read_shards(tmp_path, name, like, record, owned=False)
        np.testing.assert_array_equal(np.asarray(restored), np.asarray(x))
