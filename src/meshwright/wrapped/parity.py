"""Parity of a wrapped model: one run on two meshes, compared tensor by tensor in float32."""

import dataclasses
from pathlib import Path

from meshwright.config import MeshShape
from meshwright.runs.run import Run
from meshwright.trainer.parity import Parity, Side, compare_sides, in_float32, other_side
from meshwright.wrapped.batches import BatchFeed
from meshwright.wrapped.placing import WrappedRun, put_on_devices
from meshwright.wrapped.prepared import prepare_wrapped
from meshwright.wrapped.step import build_wrapped_gradients


def compare_wrapped(run: Run, other: MeshShape, *, cache: Path, devices: int | None, steps: int) -> Parity:
    """Compares `steps` steps of `run` on its own mesh with the same steps on the mesh `other`.

    Data that can be read once alone cannot be compared: both meshes read it from the beginning.
    """
    run = dataclasses.replace(run, training=in_float32(run.training))
    first = prepare_wrapped(run, cache=cache, devices=devices).device_run

    def side(wrapped_run: WrappedRun) -> Side:
        feed = BatchFeed(wrapped_run.parts.source, 0, None, wrapped_run.batch_sharding)
        return Side(wrapped_run, feed, build_wrapped_gradients(wrapped_run))

    second = other_side(other, lambda mesh: side(put_on_devices(dataclasses.replace(first.run, mesh=other), mesh)))
    return compare_sides(side(first), second, str(other), steps=steps)
