"""What `prove` counts of a save and a restore is what they take."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.analysis.run_memory import host_bytes, saving_memory
from meshwright.checkpoint.checkpoints import named_tensors
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import permuted_in_layer_order
from meshwright.checkpoint.tensors import host_shards
from meshwright.hardware.targets import parse_target
from meshwright.planner.estimate import estimate
from meshwright.sharding.params import named_leaves

MESHES: dict[str, dict[str, Any]] = {
    "data=2,fsdp=2,tensor=2": {},
    "stage=4,fsdp=2": {"pipeline_schedule": "interleaved", "microbatches": 4},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_save_takes_what_was_counted_on_devices_and_on_the_host(mesh: str) -> None:
    layers = 8 if "stage" in mesh else 2
    device_run = device_run_of(tiny_run(dataclasses.replace(MODELS["gpt2"], layers=layers), mesh, **MESHES[mesh]))
    saving = saving_memory(device_run)
    tensors = named_tensors(device_run.initial_state())
    device = jax.devices()[0]
    on_device = sum(s.data.nbytes for x in tensors.values() for s in x.addressable_shards if s.device == device)
    assert saving.state == on_device
    converted = dict(permuted_in_layer_order(tensors, device_run.params))
    results = {name: x.addressable_shards[0].data.nbytes for name, x in converted.items()}
    permuted = {name for name, p in named_leaves(device_run.params).items() if p.order is not None}
    assert saving.reordered == len(results) == sum(name.endswith(tuple(permuted)) for name in tensors if permuted)
    stored = {**tensors, **converted}
    copies = sum(values.nbytes for parts in host_shards(stored, owned=True).values() for _, values in parts)
    assert copies == sum(x.nbytes for x in stored.values())
    assert saving.host == copies
    if not results:
        assert (saving.save_by, saving.restore_by) == ("fingerprints", "fingerprints")
        stats = fingerprints.lower(tensors).compile().memory_analysis()
        assert saving.save - saving.state == stats.temp_size_in_bytes + stats.output_size_in_bytes
        return
    # One tensor beside the state while its rows are moved or it is hashed; the whole state is hashed by a restore.
    largest = max(results.values())
    assert saving.state + largest <= saving.save <= saving.state + 3 * largest + 4096
    assert saving.restore_by == "fingerprints" and saving.restore > saving.state


def test_copies_are_counted_for_the_process_with_most() -> None:
    class Device:
        def __init__(self, process: int):
            self.process_index = process

    class Sharding:
        def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, tuple[slice, ...]]:
            # Two halves on the devices of process 0, and copies of them on those of process 1.
            return {Device(d // 2): (slice(4 * (d % 2), 4 * (d % 2) + 4),) for d in range(4)}

        def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
            return (4,)

    class Tensor:
        shape, dtype, sharding = (8,), np.dtype("float32"), Sharding()

    assert host_bytes({"x": Tensor()}) == 32


def test_a_plan_states_the_memory_of_the_host() -> None:
    run = tiny_run(MODELS["gpt2"], "data=2,fsdp=4")
    device_run = device_run_of(run)
    tensors = named_tensors(device_run.abstract)
    total = sum(np.prod(x.shape, dtype=np.int64) * x.dtype.itemsize for x in tensors.values() if x.shape)
    assert estimate(device_run.placed, parse_target("v5e:2x4")).saved * 8 == pytest.approx(total, rel=1e-3)
