"""Location of a parameter in another program's tensors: name, order of dimensions,
and part of a fused tensor.

A parameter `[L, D, N, H]` is stored as one matrix `[N H, D]` per layer: its `StoredTensor` has the
name `model.layers.{layer}.self_attn.q_proj.weight` and the axes `("NH", "D")`. Both directions use
one view: the stored array with its merged dimensions split, of which a block is read or written. No
value is changed.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from meshwright.models.model import Model
from meshwright.sharding.params import Param, named_leaves

Index = tuple[slice, ...]
"""Block of an array: start and stop of each dimension, step 1."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One parameter in another program's files: a tensor, or one for each layer and expert."""

    name: str
    """Name of the tensor, with `{layer}` and `{expert}` where there is one for each."""
    axes: tuple[str, ...]
    """Dimension letters of each stored dimension, the slowest first;
    ("NH", "D") merges heads and head size."""
    layers: tuple[int, ...] = ()
    """Layer of each row of the stack, in the other program's numbers."""
    part: tuple[int, slice] | None = None
    """Dimension of a fused tensor, and the slice of it that is this parameter."""
    shape: tuple[int, ...] = ()
    """Shape of the stored tensor where it is fused; () is that of the parameter."""
    split: tuple[int, ...] = ()
    """Shape to which a fused tensor is split before `part` is taken: parts
    that alternate, head by head; () is none."""

    def stored_shape(self, p: Param) -> tuple[int, ...]:
        """Returns the shape of one stored tensor of the parameter `p`."""
        sizes = _sizes(p)
        return self.shape or tuple(
            math.prod(sizes[letter] for letter in group) for group in self.axes
        )

    def names(self, p: Param) -> Iterator[str]:
        """Yields the names of all stored tensors of the parameter `p`."""
        experts = _sizes(p)["E"] if "{expert}" in self.name else 1
        for layer, expert in itertools.product(self.layers or (0,), range(experts)):
            yield self.name.format(layer=layer, expert=expert)

    def blocks(self, p: Param, index: Index) -> Iterator[tuple[str, Index, Index]]:
        """Yields the stored tensors that hold a block of `p`: name, block
        of the result, block of the stored view.

        index: of the parameter with one row per layer.
        """
        ranges = dict(zip(p.dims, index, strict=True))
        inner = tuple(ranges[letter] for letter in "".join(self.axes))
        rows = range(ranges["L"].start, ranges["L"].stop) if self.layers else range(1)
        experts = (
            range(ranges["E"].start, ranges["E"].stop) if "{expert}" in self.name else range(1)
        )
        for row, expert in itertools.product(rows, experts):
            name = self.name.format(layer=self.layers[row] if self.layers else 0, expert=expert)
            at = {"L": row - rows.start, "E": expert - experts.start}
            outer = tuple(
                slice(at[letter], at[letter] + 1) if self._is_outer(letter) else slice(None)
                for letter in p.dims
            )
            yield name, outer, inner

    def view(self, p: Param, stored: np.ndarray) -> np.ndarray:
        """Returns one stored tensor with its merged dimensions split, without copying."""
        if self.split:
            stored = stored.reshape(self.split)
        if self.part is not None:
            stored = stored[(slice(None),) * self.part[0] + (self.part[1],)]
        sizes = _sizes(p)
        return stored.reshape([sizes[letter] for group in self.axes for letter in group])

    def to_param(self, p: Param, block: np.ndarray) -> np.ndarray:
        """Returns a block of the view in the order
        of the parameter's dimensions, without copying."""
        letters = "".join(self.axes)
        inner = [letter for letter in p.dims if not self._is_outer(letter)]
        block = block.transpose([letters.index(letter) for letter in inner])
        return block.reshape(
            [1 if self._is_outer(x) else block.shape[inner.index(x)] for x in p.dims]
        )

    def from_param(self, p: Param, block: np.ndarray) -> np.ndarray:
        """Inverts `to_param`: returns a block of the parameter, one layer and expert of it,
        as the view has it."""
        inner = [letter for letter in p.dims if not self._is_outer(letter)]
        squeezed = block.reshape(
            [size for letter, size in zip(p.dims, block.shape, strict=True) if letter in inner]
        )
        return squeezed.transpose([inner.index(letter) for letter in "".join(self.axes)])

    def _is_outer(self, letter: str) -> bool:
        """Whether the stored tensors are counted by this dimension, rather than having it."""
        return (letter == "L" and bool(self.layers)) or (letter == "E" and "{expert}" in self.name)


def _sizes(p: Param) -> dict[str, int]:
    """Size of each dimension, without padding of vocabulary and stacks."""
    shape = p.logical_shape if p.rows is None else (p.rows, *p.shape[1:])
    return dict(zip(p.dims, shape, strict=True))


def unpadded_shape(p: Param) -> tuple[int, ...]:
    """Returns the shape of a parameter with one row per layer and without padding
    of the vocabulary."""
    return tuple(_sizes(p).values())


ReadTensor = Callable[[str], np.ndarray]
"""`name -> stored tensor`, a view of a mapped file."""


def read_block(
    p: Param, stored: StoredTensor, index: Index, read: ReadTensor, dtype: Any
) -> np.ndarray:
    """Returns a block of a parameter from the stored tensors, in `dtype`, its own memory.

    index: block of the parameter with one row per layer;
    rows beyond the vocabulary are padding, which is zero.
    """
    out = np.zeros([part.stop - part.start for part in index], dtype)
    inside = tuple(
        slice(min(part.start, size), min(part.stop, size))
        for part, size in zip(index, unpadded_shape(p), strict=True)
    )
    target = out[tuple(slice(0, part.stop - part.start) for part in inside)]
    for name, outer, inner in stored.blocks(p, inside):
        target[outer] = stored.to_param(p, stored.view(p, read(name))[inner])
    return out


def write_block(
    p: Param, stored: StoredTensor, index: Index, block: np.ndarray, tensor: ReadTensor
) -> None:
    """Inverts `read_block`: writes a block without padding into the stored tensors.
    tensor: returns writable views."""
    for name, outer, inner in stored.blocks(p, index):
        stored.view(p, tensor(name))[inner] = stored.from_param(p, block[outer])


Names = Mapping[str, tuple[str, tuple[str, ...]]]
"""Parameter, or stack and parameter -> its tensor after the layer's number,
and the letters of its dimensions.

A stored dimension of several parameters is marked with how they share it: `+` one after another,
`%` by turns, `/` one after another within each head. An empty dimension has one element."""

LLAMA: Names = {
    "embed": ("model.embed_tokens.weight", ("V", "D")),
    "final_norm": ("model.norm.weight", ("D",)),
    "unembed": ("lm_head.weight", ("V", "D")),
    "attention_norm": ("input_layernorm.weight", ("D",)),
    "query": ("self_attn.q_proj.weight", ("NH", "D")),
    "key": ("self_attn.k_proj.weight", ("KH", "D")),
    "value": ("self_attn.v_proj.weight", ("KH", "D")),
    "attention_out": ("self_attn.o_proj.weight", ("D", "NH")),
    "query_bias": ("self_attn.q_proj.bias", ("NH",)),
    "key_bias": ("self_attn.k_proj.bias", ("KH",)),
    "value_bias": ("self_attn.v_proj.bias", ("KH",)),
    "attention_out_bias": ("self_attn.o_proj.bias", ("D",)),
    "query_norm": ("self_attn.q_norm.weight", ("H",)),
    "key_norm": ("self_attn.k_norm.weight", ("H",)),
    "mlp_norm": ("post_attention_layernorm.weight", ("D",)),
    "gate": ("mlp.gate_proj.weight", ("F", "D")),
    "up": ("mlp.up_proj.weight", ("F", "D")),
    "down": ("mlp.down_proj.weight", ("D", "F")),
    "gate_bias": ("mlp.gate_proj.bias", ("F",)),
    "up_bias": ("mlp.up_proj.bias", ("F",)),
    "down_bias": ("mlp.down_proj.bias", ("D",)),
    "router": ("mlp.gate.weight", ("R", "D")),
    "expert_gate": ("mlp.experts.{expert}.gate_proj.weight", ("F", "D")),
    "expert_up": ("mlp.experts.{expert}.up_proj.weight", ("F", "D")),
    "expert_down": ("mlp.experts.{expert}.down_proj.weight", ("D", "F")),
}
"""Names of Llama, and of the experts of most architectures."""


def locate_tensors(c: Model, names: Names, layer: str) -> dict[str, StoredTensor]:
    """Returns where each parameter of a model is stored.
    layer: what precedes the names of a layer's tensors."""
    spec = c.spec()
    params = named_leaves(c.params())
    layers_of = {stack: spec.layers_of(stack) for stack in spec.stacks}
    layers_of |= {block.stack: (len(spec.layers) + i,) for i, block in enumerate(spec.further)}
    # Parameters that share a tensor, by its stack and name.
    groups: dict[tuple[str, str], list[str]] = {}
    for path in params:
        stack = path.rpartition(".")[0]
        tensor, _ = names[_key(path, names)]
        groups.setdefault((stack if stack in layers_of else "", tensor), []).append(path)
    order = list(names)
    stored: dict[str, StoredTensor] = {}
    for (stack, tensor), paths in groups.items():
        paths.sort(key=lambda path: order.index(_key(path, names)))
        group = {path: (params[path], names[_key(path, names)][1]) for path in paths}
        name = layer + tensor if stack else tensor
        stored |= _parts(name, layers_of.get(stack, ()), group)
    return {path: stored[path] for path in params}


def _key(path: str, names: Names) -> str:
    """Returns the key of a parameter in a table of names: its path, or its last name."""
    return path if path in names else path.rpartition(".")[2]


def _parts(
    name: str, layers: tuple[int, ...], group: dict[str, tuple[Param, tuple[str, ...]]]
) -> dict[str, StoredTensor]:
    """Returns the places of the parameters of one tensor.
    group: their descriptions and axes, in their order.

        +   [ a a a a | b b ]   one after another
        %   [ a b a b a b ]     by turns
        /   [ a a b | a a b ]   one after another within each head
    """
    stored: dict[str, StoredTensor] = {}
    shapes = {path: _shape(p, axes) for path, (p, axes) in group.items()}
    first = 0
    for number, (path, (p, axes)) in enumerate(group.items()):
        plain = tuple(letters.rstrip(_MARKS) for letters in axes if letters)
        axis = _shared_axis(axes)
        if axis is None:
            shape = shapes[path] if "" in axes else ()
            stored[path] = StoredTensor(name, plain, layers, shape=shape)
            continue
        size = shapes[path][axis]
        total = sum(shape[axis] for shape in shapes.values())
        before = shapes[path][:axis]
        after = shapes[path][axis + 1 :]
        split: tuple[int, ...] = ()
        if axes[axis].endswith("%"):
            part = (axis, slice(number, None, len(group)))
        elif axes[axis].endswith("/"):
            heads = p.shape[p.dims.index("N")]
            split = (*before, heads, total // heads, *after)
            part = (axis + 1, slice(first // heads, (first + size) // heads))
        else:
            part = (axis, slice(first, first + size))
        stored[path] = StoredTensor(name, plain, layers, part, (*before, total, *after), split)
        first += size
    return stored


def _shared_axis(axes: tuple[str, ...]) -> int | None:
    """Returns the dimension that several parameters share, None where none is marked."""
    for axis, letters in enumerate(axes):
        if letters.endswith(tuple(_MARKS)):
            return axis
    return None


_MARKS = "+%/"


def _shape(p: Param, axes: tuple[str, ...]) -> tuple[int, ...]:
    sizes = dict(zip(p.dims, p.logical_shape, strict=True))
    return tuple(math.prod(sizes[letter] for letter in letters.rstrip(_MARKS)) for letters in axes)
