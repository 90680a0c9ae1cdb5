"""Adapters: fresh or read ones on a frozen base, and merged into it on devices, or block by block from a checkpoint."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.checkpoint.blocks import Index, StoredTensors
from meshwright.fine_tuning import FineTune
from meshwright.hugging_face.peft_files import Pair, read_adapter
from meshwright.models.adapters import ADAPTERS, dequantise, merged, quantise, targets_of
from meshwright.sharding.params import (
    Param,
    Tree,
    init_params,
    is_param,
    layers_to_rows,
    named_leaves,
    trained_only,
)
from meshwright.step.device_run import DeviceRun, place_on_devices

Then = Callable[[str, jax.Array], Any]
"""`(path, weight) -> what is kept of it`."""


def without_adapters(device_run: DeviceRun) -> DeviceRun:
    """Returns the run without adapters or reference on the same devices.

    Its parameters have the type of those of the run; with a frozen base that is the compute dtype, or float32.
    """
    run = device_run.run
    dtype = "float32" if run.finetune.base == "float32" else run.training.compute_dtype
    dtype = dtype if run.finetune.method == "lora" else run.training.param_dtype
    training = dataclasses.replace(run.training, param_dtype=dtype)
    return place_on_devices(dataclasses.replace(run, finetune=FineTune(), training=training), device_run.mesh)


def merge_adapters(device_run: DeviceRun, params: Tree) -> tuple[DeviceRun, Tree]:
    """Returns the run without adapters or reference, and its parameters W + (alpha / r) A B, summed in float32."""
    base = without_adapters(device_run)
    dtype = jnp.dtype(base.run.training.param_dtype)
    together = functools.partial(merged, scale=device_run.run.finetune.scale, dtype=dtype)
    return base, jax.jit(together, out_shardings=base.state_shardings.params)(params)


def add_adapters(device_run: DeviceRun, load: Callable[[DeviceRun, Then], Tree]) -> Tree:
    """Returns the parameters of a run with adapters: its base, kept as the run asks, and adapters to begin with.

    load: `(run without adapters, then) -> weights`, which gives each weight to `then` before it loads the next, so
    that only one at a time is unquantised. The adapters are drawn from the run's seed, or read from the folder that
    `FineTune.adapter` names. Raises WeightsError where that is not an adapter of this model.
    """
    tuning, where = device_run.run.finetune, device_run.state_shardings.params
    base = without_adapters(device_run)
    before = named_leaves(base.params)

    def keep(path: str, w: jax.Array) -> Any:
        described: Any = device_run.params
        target: Any = where
        for name in path.split("."):
            described, target = described[name], target[name]
        if is_param(described) or tuning.base not in ("int8", "nf4"):
            return w.astype(described.stored)
        convert = functools.partial(quantise, path, before[path], base=tuning.base)
        quantised = jax.block_until_ready(jax.jit(convert, out_shardings=target)(w))
        w.delete()
        return quantised

    params = load(base, keep)
    described = trained_only(device_run.params, device_run.params)
    training, placed = device_run.run.training, trained_only(device_run.params, where)
    fresh = init_params(described, placed, seed=training.seed, dtype=training.param_dtype)
    if tuning.adapter is not None:
        found = read_adapter(Path(tuning.adapter), device_run.run.model, tuning)

        def place(keys: Any, p: Param, x: jax.Array) -> jax.Array:
            stack, _, name, side = (key.key for key in keys)
            matrix = layers_to_rows(p, jnp.asarray(found[f"{stack}.{name}"][0 if side == "a" else 1]))
            return jax.device_put(matrix.astype(x.dtype), x.sharding)

        fresh = jax.tree_util.tree_map_with_path(place, described, fresh, is_leaf=is_param)
    return {
        path: {**tree, ADAPTERS: fresh[path][ADAPTERS]} if isinstance(tree, dict) and ADAPTERS in fresh[path] else tree
        for path, tree in params.items()
    }


@dataclasses.dataclass(frozen=True)
class MergedTensors:
    """Reader of a checkpoint's W + (alpha / r) A B, in float32 where a weight has an adapter or is quantised."""

    tensors: StoredTensors

    def read_blocks(self, name: str, shape: tuple[int, ...], then: Callable[[Index, np.ndarray], None]) -> None:
        """Calls `then` with each block of the weight `name`, without its rows beyond `shape`.

        All codes of a quantised weight are read, and dequantised layer by layer. Raises CheckpointError where a tensor
        cannot be read, or is not what was saved.
        """
        stored = self.tensors.manifest.tensors
        pair, scale = self.pair(name), self.tensors.manifest.run.finetune.scale

        def add(index: Index, block: np.ndarray) -> None:
            if pair is not None:
                block = block.astype(np.float32) + scale * _product(*pair, index)
            then(index, block)

        if name in stored:
            self.tensors.read_blocks(name, shape, add)
            return
        parts = ("codes", "scales") if f"{name}.codes" in stored else ("values", "scales")
        arrays = {part: self.tensors.read(f"{name}.{part}") for part in parts}
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            for layer in range(shape[0]):
                row = {part: array[layer : layer + 1] for part, array in arrays.items()}
                index = (slice(layer, layer + 1), *(slice(0, size) for size in shape[1:]))
                add(index, np.asarray(dequantise(row, np.float32)))

    def pair(self, name: str) -> Pair | None:
        """Returns A and B of a weight; None where it has no adapter."""
        stack, _, weight = name.removeprefix("params.").partition(".")
        prefix = f"params.{stack}.{ADAPTERS}.{weight}"
        if f"{prefix}.a" not in self.tensors.manifest.tensors:
            return None
        a, b = (self.tensors.read(f"{prefix}.{side}").astype(np.float32) for side in "ab")
        return a, b

    def pairs(self) -> dict[str, Pair]:
        """Returns A and B of every adapted weight, by path."""
        run = self.tensors.manifest.run
        targets = targets_of(run.model.params(), run.finetune)
        paths = (f"{stack}.{name}" for stack, names in targets.items() for name in names)
        return {path: pair for path in paths if (pair := self.pair(f"params.{path}")) is not None}


def _product(a: np.ndarray, b: np.ndarray, index: Index) -> np.ndarray:
    """Returns a block of A B. a: [L, in..., r].  b: [L, r, out...].  index: of the block of [L, in..., out...]."""
    contracted = a.ndim - 2
    rows = a[index[: 1 + contracted]]
    columns = b[(index[0], slice(None), *index[1 + contracted :])]
    flat = rows.reshape(rows.shape[0], -1, rows.shape[-1]) @ columns.reshape(*columns.shape[:2], -1)
    return flat.reshape(*rows.shape[:-1], *columns.shape[2:])
