"""Weights of a checkpoint with adapters, merged block by block as they are read."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from meshwright.checkpoint.blocks import Index, StoredTensors
from meshwright.hugging_face.peft_files import Pair
from meshwright.models.adapters import ADAPTERS, dequantise, targets_of


@dataclasses.dataclass(frozen=True)
class MergedTensors:
    """Reader of W + (alpha / r) A B, in float32 where a weight has an adapter or is quantised."""

    tensors: StoredTensors

    def read_blocks(self, name: str, shape: tuple[int, ...], then: Callable[[Index, np.ndarray], None]) -> None:
        """Calls `then` with each block of the weight `name`, without its rows beyond `shape`.

        A quantised weight is read in its few bits as a whole, and dequantised layer by layer. Raises CheckpointError
        where a tensor cannot be read, or is not what was saved.
        """
        pair = self.pair(name)
        scale = self.tensors.manifest.run.finetune.scale

        def add(index: Index, block: np.ndarray) -> None:
            if pair is not None:
                block = block.astype(np.float32) + scale * _product(*pair, index)
            then(index, block)

        if name in self.tensors.manifest.tensors:
            self.tensors.read_blocks(name, shape, add)
            return
        parts = ("codes", "scales") if f"{name}.codes" in self.tensors.manifest.tensors else ("values", "scales")
        arrays = {part: self.tensors.read(f"{name}.{part}") for part in parts}
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            for layer in range(shape[0]):
                row = {part: array[layer : layer + 1] for part, array in arrays.items()}
                index = (slice(layer, layer + 1), *(slice(0, size) for size in shape[1:]))
                add(index, np.asarray(dequantise(row, np.float32)))

    def pair(self, name: str) -> Pair | None:
        """Returns A and B of a weight, whole; None where it has no adapter."""
        stack, _, weight = name.removeprefix("params.").partition(".")
        prefix = f"params.{stack}.{ADAPTERS}.{weight}"
        if f"{prefix}.a" not in self.tensors.manifest.tensors:
            return None
        a, b = (self.tensors.read(f"{prefix}.{side}").astype(np.float32) for side in "ab")
        return a, b

    def pairs(self) -> dict[str, Pair]:
        """Returns A and B of every adapted weight, by path."""
        run = self.tensors.manifest.run
        found = {}
        for stack, names in targets_of(run.model.params(), run.finetune).items():
            for name in names:
                pair = self.pair(f"params.{stack}.{name}")
                if pair is not None:
                    found[f"{stack}.{name}"] = pair
        return found


def _product(a: np.ndarray, b: np.ndarray, index: Index) -> np.ndarray:
    """Returns a block of A B. a: [L, in..., r].  b: [L, r, out...].  index: of the block of [L, in..., out...]."""
    contracted = a.ndim - 2
    rows = a[index[: 1 + contracted]]
    columns = b[(index[0], slice(None), *index[1 + contracted :])]
    flat = rows.reshape(rows.shape[0], -1, rows.shape[-1]) @ columns.reshape(*columns.shape[:2], -1)
    return flat.reshape(*rows.shape[:-1], *columns.shape[2:])
