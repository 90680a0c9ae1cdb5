"""Meshes, pipeline schedules and numbers of microbatches that a search prices for a run on a target."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from meshwright.config import ContextStrategy, MeshShape
from meshwright.errors import ConfigError, divisors
from meshwright.hardware.chips import Nodes
from meshwright.hardware.targets import Target
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, find_layout
from meshwright.sharding.params import named_leaves
from meshwright.sharding.placement import replicates_kv_heads
from meshwright.sharding.schedules import find_schedule

_MAX_TENSOR, _MAX_STAGES, _MAX_CONTEXT = 64, 32, 64
_MAX_MICROBATCHES = 128
"""Microbatches of a pipeline."""
SCHEDULES_TRIED = ("1f1b", "interleaved", "zbv")
"""Pipeline schedules that are priced. Of the others gpipe and circular take as long as 1f1b and interleaved and hold
more inputs, and zero_bubble repeats work."""
_MIN_LOCAL_SEQ = 1024
"""Tokens per device below which a sequence is not split further."""


def check_size(shape: MeshShape, target: Target) -> None:
    """Raises ConfigError where a mesh has another number of devices than the target."""
    if shape.size != target.devices:
        raise ConfigError(
            f"mesh {shape} on {target}", f"it has {shape.size} devices, and {target} has {target.devices}",
            f"choose degrees that multiply to {target.devices}",
        )  # fmt: skip


def split_size(run: Run, axis: str) -> int:
    """Returns the number that the degree of a mesh axis must divide: the gcd of the parameter dimensions over it.

    The layout's table lists the axes of each dimension. The vocabulary is left out, because it is padded. 1 where
    the axis splits no parameter.
    """
    table = find_layout(run.layout).table
    sizes = (
        size
        for param in named_leaves(run.model.params()).values()
        for letter, size in zip(param.dims, param.shape, strict=True)
        if letter != "V" and axis in table.get(letter, ())
    )
    return math.gcd(*sizes) or 1


def tensor_degrees(run: Run) -> list[int]:
    """Returns the degrees of `tensor` that divide what it splits, in ascending order.

    Key/value heads are the exception: where they are fewer than the devices, and divide them, every device has all.
    """
    table = find_layout(run.layout).table
    sizes: dict[bool, set[int]] = {False: set(), True: set()}
    for param in named_leaves(run.model.params()).values():
        for letter, size in zip(param.dims, param.shape, strict=True):
            if letter != "V" and "tensor" in table.get(letter, ()):
                sizes[letter == "K"].add(size)
    degrees = divisors(math.gcd(*sizes[False]) or 1)
    return [t for t in degrees if all(k % t == 0 or replicates_kv_heads(k, t) for k in sizes[True])]


def candidate_meshes(run: Run, target: Target) -> Iterator[MeshShape]:
    """Yields the meshes over all devices of a target that are worth pricing.

    Degrees of `tensor` and `expert` divide the parameter dimensions they split; `tensor` stays inside a GPU node, so
    that its collectives use NVLink. `data` > 1 with `fsdp` > 1 is HSDP.
    """
    seq, devices, layers = run.training.seq, target.devices, len(run.model.spec().layers)
    node = target.topology[-1] if isinstance(target.chip.interconnect, Nodes) else _MAX_TENSOR
    tensors = [t for t in tensor_degrees(run) if t <= min(_MAX_TENSOR, node)]
    stages = [s for s in divisors(devices) if s <= min(layers, _MAX_STAGES)]
    contexts = [c for c in divisors(devices) if c == 1 or (c <= _MAX_CONTEXT and seq // c >= _MIN_LOCAL_SEQ)]
    experts = divisors(split_size(run, "expert"))
    for tensor, stage, context, expert in itertools.product(tensors, stages, contexts, experts):
        model_parallel = tensor * stage * context * expert
        if devices % model_parallel:
            continue
        for data in _replica_counts(devices // model_parallel, stage, target):
            fsdp = devices // model_parallel // data
            shape = MeshShape(stage=stage, data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor)
            sliced = _across_slices(shape, target)
            if sliced is not None and run.training.batch % sliced.over(BATCH_AXES) == 0:
                yield sliced


def _replica_counts(devices: int, stages: int, target: Target) -> list[int]:
    """Returns the degrees of `data`: 1 (FSDP), all devices, and between them groups of devices that shard (HSDP).

    A pipeline's groups are the slices or nodes alone: it has many more meshes, and its stages shard already.
    """
    counts = divisors(devices) if stages == 1 else (1, target.domains, devices)
    return sorted({data for data in counts if devices % data == 0})


def _across_slices(shape: MeshShape, target: Target) -> MeshShape | None:
    """Returns the mesh with its outermost possible axis across the slices (DCN), or None where no axis divides."""
    if isinstance(target.chip.interconnect, Nodes) or target.slices == 1:
        return shape
    for axis in ("data", "stage", "fsdp"):
        if shape.degrees()[axis] % target.slices == 0:
            return dataclasses.replace(shape, slices=target.slices, dcn_axis=axis)
    return None


def candidate_schedules(run: Run, shape: MeshShape) -> Iterator[Run]:
    """Yields the run on a mesh with each pipeline schedule and number of microbatches worth pricing."""
    training = run.training
    if shape.context > 1:
        training = dataclasses.replace(training, context_strategy=_context_strategy(run, shape))
    if shape.stage == 1:
        yield dataclasses.replace(run, mesh=shape, training=dataclasses.replace(training, microbatches=1))
        return
    local_batch = max(1, training.batch // shape.over(BATCH_AXES))
    counts = [m for m in divisors(local_batch) if shape.stage <= m <= _MAX_MICROBATCHES]
    counts = counts or [min(local_batch, shape.stage)]
    chosen = sorted({min(counts, key=lambda m: abs(m - k * shape.stage)) for k in (2, 4, 8)})
    for microbatches in chosen:
        for schedule in dict.fromkeys((*SCHEDULES_TRIED, training.pipeline_schedule)):
            if schedule == "auto":
                continue
            for virtual_stages in _virtual_stages(schedule, shape.stage, len(run.model.spec().layers)):
                changed = dataclasses.replace(
                    training, microbatches=microbatches, pipeline_schedule=schedule, virtual_stages=virtual_stages
                )
                yield dataclasses.replace(run, mesh=shape, layout=_layout(run, shape), training=changed)


def _layout(run: Run, shape: MeshShape) -> str:
    """Returns the layout of a pipeline: in the place of `fsdp`, replicas share the optimizer state too (`zero1`).

    The name of the plan tells it. Any other layout stays.

    They sum their gradients after the last microbatch in either layout, and a reduce-scatter and an all-gather send no
    more than the all-reduce.
    """
    return "zero1" if run.layout == "fsdp" and shape.data > 1 else run.layout


def _virtual_stages(schedule: str, stages: int, layers: int) -> list[int]:
    """Returns the virtual stages of a schedule that are priced: 2, 4, 8 and so on where it takes any number.

    Fewer than one part of each stage may be empty (sharding/stages.py).
    """
    asked = [2**n for n in range(1, layers.bit_length() + 1)]
    taken = dict.fromkeys(find_schedule(schedule).virtual_stages_for(number) for number in asked)
    return [number for number in taken if number == 1 or stages * number - layers < stages]


def _context_strategy(run: Run, shape: MeshShape) -> ContextStrategy:
    """Returns the context strategy of a mesh: Ulysses where the heads divide, else a ring."""
    kv_heads = run.model.spec().kv_heads
    if kv_heads is not None and max(1, kv_heads // shape.tensor) % shape.context == 0:
        return "ulysses"
    return "ring"


def accumulation_counts(run: Run, shape: MeshShape) -> list[int]:
    """Returns the numbers of microbatches of a mesh without a pipeline: the divisors of a device's sequences."""
    return divisors(max(1, run.training.batch // shape.over(BATCH_AXES)))
