"""One step of a Hugging Face model on one device, forward and backward,
of which one layer is in memory at a time.

    forward     read layer 0, run it, drop it; read layer 1, ...      every layer's input is kept
    loss        final norm, logits, loss
    backward    read layer L-1, run it again, differentiate it, drop it; read layer L-2, ...

The parts are those of the train step, `Model.embed`, `Model.layer_functions` and `LocalModel.loss`,
with the taps of `models.recording`. So the tensors have the names, the order and the numbers of a
recorded step.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.config import MeshShape
from meshwright.data.batch import Batch
from meshwright.hardware.mesh import build_mesh
from meshwright.hugging_face.folder import TensorReader, WeightsFolder
from meshwright.hugging_face.names import read_block
from meshwright.models.blocks.layers import Dropout
from meshwright.models.model import ForwardContext, Layer
from meshwright.models.recording import Recorder, Tap, TensorName
from meshwright.runs.run import Run
from meshwright.sharding.params import Param, Tree, named_leaves
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.gradients import matmuls_of
from meshwright.trainer.divergence import perturb

Named = tuple[TensorName, np.ndarray]


def packed_batch(documents: np.ndarray) -> Batch:
    """Returns one sequence of documents of equal length. documents: tokens [documents, T + 1]."""
    count, length = documents.shape
    tokens = length - 1
    inputs = documents[:, :-1].reshape(1, -1)
    targets = documents[:, 1:].reshape(1, -1)
    segments = np.repeat(np.arange(count), tokens)[None]
    positions = np.tile(np.arange(tokens), count)[None]
    return Batch(
        inputs.astype(np.int32),
        targets.astype(np.int32),
        segments.astype(np.int32),
        positions.astype(np.int32),
        np.ones(inputs.shape, np.float32),
    )


@dataclasses.dataclass(frozen=True)
class LayerByLayer:
    """Source of the named tensors of one step, in float32.

    Iterating takes the step: it reads every layer twice and holds one, the tables of the
    vocabulary, and activations.
    """

    run: Run
    """Run of the folder's model, whose sequence has the length of all documents together."""
    weights: WeightsFolder
    documents: np.ndarray
    """Tokens of the documents of one sequence, [documents, T + 1]."""
    perturbed: bool = False
    """Whether parameters are changed by one unit in the last place (trainer/divergence.py)."""

    def __iter__(self) -> Iterator[Named]:
        with self.weights.reader() as reader, matmuls_of("float32"):
            yield from _Step(self, reader).tensors()


_TABLES = ("embed", "positions")
"""Parameters that are read before the layers."""


class _Step:
    """One step, with the files of the weights open."""

    def __init__(self, source: LayerByLayer, reader: TensorReader) -> None:
        self._source = source
        self._reader = reader
        self._recorder = Recorder()
        device_run = place_on_devices(
            source.run, build_mesh(MeshShape(data=1), jax.devices("cpu")[:1])
        )
        execution = dataclasses.replace(device_run.local_model.execution, tap=Tap(self._recorder))
        local_model = dataclasses.replace(device_run.local_model, execution=execution)
        self._device_run: DeviceRun = dataclasses.replace(device_run, local_model=local_model)
        self._spec = source.run.model.spec()
        self._described = named_leaves(device_run.layout.params)
        self._batch = packed_batch(source.documents)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def tensors(self) -> Iterator[Named]:
        """Yields every tensor in the order of computation."""
        others = self._other_params()
        inputs: list[np.ndarray] = []
        x_BTD = yield from self._forward(others, inputs)
        g_others, g_x = self._call("loss", self._loss_gradients, others, x_BTD)
        received = list(self._received("forward", "backward"))
        yield from (tensor for tensor in received if tensor[0].of == "forward")
        yield from (tensor for tensor in received if tensor[0].of == "backward")
        yield from self._gradients(g_others, lambda path: path not in _TABLES)
        g_x = yield from self._backward(inputs, g_x)
        g_embed = self._call("embed gradients", self._embed_gradients, others, g_x)
        yield from self._received("backward")
        if "unembed" not in others:
            # The tables are tied: the logits have a gradient of the same table.
            g_embed = jax.tree.map(jnp.add, g_embed, g_others)
        yield from self._gradients(g_embed, lambda path: path in _TABLES)

    def _forward(self, others: Tree, inputs: list[np.ndarray]) -> Generator[Named, None, jax.Array]:
        """Yields the tensors of the forward pass, keeps the input of every layer,
        and returns the output of the last."""
        x_BTD: jax.Array = self._call("embed", self._embed, others)
        yield from self._received("forward")
        for layer in range(len(self._spec.layers)):
            inputs.append(np.asarray(x_BTD))
            x_BTD = self._call(*self._layer(layer), self._layer_params(layer), x_BTD, layer)
            yield from self._received("forward")
        return x_BTD

    def _backward(
        self, inputs: list[np.ndarray], g_x: jax.Array
    ) -> Generator[Named, None, jax.Array]:
        """Yields the gradients of all layers, the last first,
        and returns that of the first layer's input."""
        for layer in reversed(range(len(self._spec.layers))):
            name, run = self._layer(layer)
            backward = functools.partial(self._layer_gradients, run)
            arguments = (self._layer_params(layer), inputs.pop(), layer, g_x)
            g_params, g_x = self._call(("backward", name), backward, *arguments)
            yield from self._received("backward")
            yield from self._gradients(g_params, lambda path: True, layer)
        return g_x

    # Parts of the step, as functions of parameters, inside the `shard_map` of the one device.

    def _context(self, batch: Batch) -> ForwardContext:
        return self._device_run.local_model.context(batch, self._dropout())

    def _dropout(self) -> Dropout:
        """Returns no dropout, with the indices of the tokens, by which they are recorded."""
        positions_T = self._device_run.local_model.execution.sequence.local_positions()
        return Dropout(0.0, jnp.zeros(2, jnp.uint32), jnp.zeros(1, jnp.uint32), positions_T)

    def _embed(self, batch: Batch, params: Tree) -> jax.Array:
        return self._device_run.local_model.embed(params, self._context(batch))

    def _layer(self, layer: int) -> tuple[Any, Callable[..., Any]]:
        """Returns a name for the program of a layer, and `(batch, params, x, index) -> x`."""
        stack = self._spec.layers[layer].stack
        row = self._spec.layers_of(stack).index(layer)
        period = sum(1 for block in self._spec.layers[: self._spec.period] if block.stack == stack)
        place = row % max(period, 1) if self._spec.period > 1 and not self._spec.runs else 0
        return (stack, place), functools.partial(self._run_layer, stack, place)

    def _run_layer(
        self, stack: str, place: int, batch: Batch, params: Tree, x_BTD: jax.Array, index: Any
    ) -> jax.Array:
        functions = self._source.run.model.layer_functions(self._context(batch))
        pattern = functions[stack]
        function: Layer = pattern[place] if isinstance(pattern, tuple) else pattern
        return function(x_BTD, params, index)[0]

    def _loss(self, params: Tree, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        model = self._device_run.local_model.recorded(self._dropout())
        return model.loss(params, x_BTD, batch, batch.weights.sum())[0]

    def _loss_gradients(self, batch: Batch, params: Tree, x_BTD: jax.Array) -> Any:
        return jax.grad(self._loss, argnums=(0, 1))(params, x_BTD, batch)

    def _layer_gradients(
        self,
        run: Callable[..., Any],
        batch: Batch,
        params: Tree,
        x_BTD: jax.Array,
        index: Any,
        g_BTD: jax.Array,
    ) -> Any:
        _, vjp = jax.vjp(lambda params, x_BTD: run(batch, params, x_BTD, index), params, x_BTD)
        return vjp(g_BTD)

    def _embed_gradients(self, batch: Batch, params: Tree, g_BTD: jax.Array) -> Any:
        _, vjp = jax.vjp(functools.partial(self._embed, batch), params)
        (gradients,) = vjp(g_BTD)
        return gradients

    def _call(self, name: Any, part: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a part of the step, compiled once by its name."""
        self._recorder.clear()
        if name not in self._compiled:
            everywhere = PartitionSpec()
            sharded = jax.shard_map(
                part,
                mesh=self._device_run.mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                check_vma=False,
            )
            self._compiled[name] = jax.jit(sharded)
        return jax.block_until_ready(self._compiled[name](self._batch, *arguments))

    def _received(self, *of: str) -> Iterator[Named]:
        """Yields what the last call has recorded in these passes."""
        for name, pieces in self._recorder.pieces().items():
            if name.of in of:
                yield name, pieces[0].values

    def _gradients(
        self, gradients: Tree, wanted: Callable[[str], bool], layer: int | None = None
    ) -> Iterator[Named]:
        """Yields gradients of parameters, in the order of a recorded step."""
        found = {
            TensorName("parameters", path, layer): np.asarray(gradient)
            for path, gradient in named_leaves(gradients).items()
            if wanted(path)
        }
        for name in sorted(found, key=lambda name: (name.order, name)):
            yield name, found[name]

    # Parameters from the files.

    def _other_params(self) -> Tree:
        """Reads the parameters outside of the layers."""
        paths = [path for path in self._described if path.partition(".")[0] not in self._stacks]
        return _tree({path: self._read(path, None) for path in paths})

    def _layer_params(self, layer: int) -> Tree:
        """Reads the parameters of one layer."""
        stack = self._spec.layers[layer].stack
        row = self._spec.layers_of(stack).index(layer)
        paths = [path for path in self._described if path.partition(".")[0] == stack]
        return _tree({path.partition(".")[2]: self._read(path, row) for path in paths})

    @property
    def _stacks(self) -> set[str]:
        """Subtrees with a row for each layer, those of layers
        that predict further tokens included."""
        return {block.stack for block in (*self._spec.layers, *self._spec.further)}

    def _read(self, path: str, row: int | None) -> np.ndarray:
        p: Param = self._described[path]
        index = [slice(0, size) for size in p.shape]
        if row is not None:
            index[0] = slice(row, row + 1)
        stored = self._source.weights.stored[path]
        block = read_block(p, stored, tuple(index), self._reader, np.float32)
        self._reader.release()
        if self._source.perturbed:
            seed = [zlib.crc32(path.encode()), -1 if row is None else row]
            block = perturb(block, np.random.default_rng(np.abs(seed)))
        return block if row is None else block[0]


def _tree(leaves: dict[str, Any]) -> Tree:
    """Returns the tree of leaves by dotted path."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *folders, name = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree
