"""Bits that flip in replicas while a run trains: `python flipped.py OUT` trains one in one process of two.

    mesh data=3,fsdp=2    process 0           process 1
    first shard           device 0   2                  4
    second shard                   1             3        5

call 3  the copy of device 1: the two that are right are those of the other process
call 5  the copies of devices 0 and 2, each in another bit: none of three is equal to another
"""

import dataclasses
import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from planted import TEXT, with_shards
from tiny_runs import MODELS, tiny_run

import meshwright as mw
from meshwright.api.verb import start_devices
from meshwright.config import Data, Faults
from meshwright.hardware.hosts import hosts_of
from meshwright.sharding.params import named_leaves
from meshwright.step.train_step import CompiledTrainStep

QUERY, MOMENT = "params.blocks.query", "optimizer.0.nu.blocks.query"
Flip = tuple[str, int, int]
"""Name of a tensor, index of a device, bit."""
OF_TWO_PROCESSES: dict[int, Sequence[Flip]] = {
    3: [(QUERY, 1, 12)],
    5: [(MOMENT, 0, 3), (MOMENT, 2, 4)],
}


def with_flip(tree: Any, flip: Flip) -> Any:
    """Returns a tree in which one bit of one device's copy of a tensor is flipped."""
    name, index, bit = flip

    def change(device: jax.Device, shard: np.ndarray, start: int) -> None:
        if device == jax.devices()[index]:
            shard.reshape(-1).view(np.uint32)[5] ^= np.uint32(1 << bit)

    flat, structure = jax.tree.flatten(tree)
    position = list(named_leaves(tree)).index(name)
    flat[position] = with_shards(flat[position], change)
    return jax.tree.unflatten(structure, flat)


def plant(setattr: Callable[..., None], flips: Mapping[int, Sequence[Flip]]) -> None:
    """Flips bits after some calls of the step. setattr: of `pytest.MonkeyPatch`, or the builtin."""
    take = CompiledTrainStep.__call__
    calls = itertools.count(1)

    def take_planted(self: CompiledTrainStep, state: Any, batch: Any) -> Any:
        state, metrics = take(self, state, batch)
        for flip in flips.get(next(calls), ()):
            state = with_flip(state, flip)
        return state, metrics

    setattr(CompiledTrainStep, "__call__", take_planted)


def replicated_run(folder: Path, mesh: str, every: int, **changes: Any) -> mw.Run:
    """Returns a run whose replicas are compared every so many steps. folder: for its text."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.txt"
    if not file.exists():
        file.write_text(TEXT)
    model = dataclasses.replace(MODELS["llama"], vocab=None, layers=2)
    data = Data(paths=(str(file),), tokenizer="chars", sample=0)
    faults = changes.pop("faults", Faults(check_replicas=every))
    options: dict[str, Any] = {"steps": 6, "batch": 12, "save_every": 0, "remat": "none"}
    return tiny_run(model, mesh, data=data, faults=faults, **options | changes)


if __name__ == "__main__":
    socket.gethostname = lambda: f"node{os.environ['RANK']}"
    start_devices(6, None, hosts_of(os.environ))
    plant(setattr, OF_TWO_PROCESSES)
    folder = Path(sys.argv[1])
    mw.train(
        replicated_run(folder, "data=3,fsdp=2", 1, save_every=2), out=folder / "out",
        cache=folder / "cache", devices=6, progress="none",
    )  # fmt: skip
