"""Checkpoints of MaxText's Llama, Mistral and Mixtral (Orbax), read with TensorStore.

    _METADATA              JSON: the names of all arrays, and which of Orbax's formats they are in
    manifest.ocdbt, d/     Zarr arrays in one database of TensorStore (OCDBT), or
    params.params..../     a folder of each Zarr array

Arrays have the layers of a stack (`scan_layers`) as their second dimension,
and weights with inputs before outputs:

    decoder.layers.self_attention.query.kernel [D, L, N, H]
        -> model.layers.0.self_attn.q_proj.weight [N H, D], ...

MaxText divides no logits of the attention by sqrt(H): the query weights contain the factor, and are
multiplied by sqrt(H) here. Its rotary embedding turns numbers i and i + H/2 of a head, as Hugging
Face does; that of Llama 3.1 (`rope_type: llama3.1`) turns 2i and 2i + 1. MaxText's own conversions
are the source: `llama_or_mistral_ckpt.py`, and `llama_mistral_mixtral_orbax_to_hf.py`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from meshwright.documents import LARGE, check_inside, read_json
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.models.blocks.rotary import RopeScaling

METADATA = "_METADATA"
"""File by which a folder is known."""
ITEMS = "items"
"""Folder of a step that has the arrays."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures whose names in MaxText are known."""
_CODES = {"float32": "F32", "bfloat16": "BF16"}
_PARAMS = "params.params."
_STATES = re.compile(r"(opt_state|step)(\.|$)")
"""Start of the names of what a training has besides its model (Flax's TrainState)."""
_EVERY_CHUNK = "store_array_data_equal_to_fill_value"
"""Field of `_METADATA`: whether chunks of zeros were written too."""
_SCALING = RopeScaling()
"""The one scaling of MaxText's `rope_type: llama3.1`, whose numbers are constants there
(`_apply_scaling_factor`)."""
_BLOCK_BYTES = 2**26
"""Largest part of a tensor that is read at a time, where its rows can be divided."""
_CACHE_BYTES = 2**30
"""Chunks kept in memory: a chunk has several layers, which are read one after the other."""
_FIX = "the folder copied again from where MaxText saved it"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Hugging Face's tensor as a transposed and reshaped array of a layer."""

    order: tuple[int, ...]
    """Dimensions of the array in Hugging Face's order."""
    rows: int = 1
    """How many of them, in that order, are Hugging Face's rows."""
    heads: str = ""
    """Field of the model that the first of them is as long as;
    "": another size, compared with the model as a tensor."""
    scaled: bool = False
    """Whether the weight contains the factor 1 / sqrt(H) of the attention's logits."""
    rotary: bool = False
    """Whether the numbers of a head are rotated."""


_SAME = Layout((0, 1))
_VECTOR = Layout((0,))
_MATRIX = Layout((1, 0))
_OUTSIDE = {
    "token_embedder.embedding": ("model.embed_tokens.weight", _SAME),
    "decoder.decoder_norm.scale": ("model.norm.weight", _VECTOR),
    "decoder.logits_dense.kernel": ("lm_head.weight", _MATRIX),
}
"""Arrays outside of the layers: Hugging Face's name, and layout."""
_LAYER = {
    "pre_self_attention_layer_norm.scale": ("input_layernorm.weight", _VECTOR),
    "post_self_attention_layer_norm.scale": ("post_attention_layernorm.weight", _VECTOR),
    "self_attention.query.kernel": (
        "self_attn.q_proj.weight",
        Layout((1, 2, 0), 2, "heads", scaled=True, rotary=True),
    ),
    "self_attention.key.kernel": (
        "self_attn.k_proj.weight",
        Layout((1, 2, 0), 2, "kv_heads", rotary=True),
    ),
    "self_attention.value.kernel": ("self_attn.v_proj.weight", Layout((1, 2, 0), 2, "kv_heads")),
    "self_attention.out.kernel": ("self_attn.o_proj.weight", Layout((2, 0, 1))),
    "mlp.wi_0.kernel": ("mlp.gate_proj.weight", _MATRIX),
    "mlp.wi_1.kernel": ("mlp.up_proj.weight", _MATRIX),
    "mlp.wo.kernel": ("mlp.down_proj.weight", _MATRIX),
    "MoeBlock_0.gate.kernel": ("block_sparse_moe.gate.weight", _MATRIX),
}
"""Arrays of a layer."""
_EXPERTS = {
    "MoeBlock_0.wi_0": ("w1.weight", _MATRIX),
    "MoeBlock_0.wi_1": ("w3.weight", _MATRIX),
    "MoeBlock_0.wo": ("w2.weight", _MATRIX),
}
"""Arrays of all experts of a layer, with experts as their first dimension."""
_SCANNED = re.compile(r"decoder\.layers\.(.+)")
_UNSCANNED = re.compile(r"decoder\.layers_(\d+)\.(.+)")


def items_of(folder: Path) -> Path | None:
    """Returns the folder of the arrays, `folder` or its `items`; None where Orbax wrote neither."""
    for place in (folder, folder / ITEMS):
        if (place / METADATA).is_file():
            return place
    return None


@dataclasses.dataclass(frozen=True)
class MaxTextTensor:
    """One of Hugging Face's tensors in an array of MaxText."""

    own_name: str
    array: Any
    """TensorStore's array of one layer, and of one expert."""
    layout: Layout
    code: str
    interleaved: bool
    """Whether a rotary pair is numbers 2i and 2i + 1 of a head."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Hugging Face's tensor."""
        sizes = [self.array.shape[dim] for dim in self.layout.order]
        rows = math.prod(sizes[: self.layout.rows])
        if len(sizes) == self.layout.rows:
            return (rows,)
        return rows, math.prod(sizes[self.layout.rows :])

    def blocks(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields rows of Hugging Face's tensor: where they are in it, and their values."""
        divided = self.layout.order[0]
        count = self.array.shape[divided]
        rows_each = self.shape[0] // count
        step = max(1, count * _BLOCK_BYTES // max(1, self.array.size * 4))
        for start in range(0, count, step):
            stop = min(count, start + step)
            index: list[Any] = [slice(None)] * self.array.ndim
            index[divided] = slice(start, stop)
            values = self._read(tuple(index))
            yield slice(start * rows_each, stop * rows_each), values

    def _read(self, index: tuple[Any, ...]) -> np.ndarray:
        """Returns rows in Hugging Face's layout. Raises WeightsError where they cannot be read."""
        try:
            values: np.ndarray = self.array[index].read().result()
        except (OSError, ValueError) as error:
            truth = reason_of(error)
            asked = f"reading {self.own_name}"
            raise by_class(error, WeightsError(asked, truth, _FIX)) from error
        head_size = values.shape[-1]
        if self.layout.rotary and self.interleaved:
            values = np.concatenate((values[..., 0::2], values[..., 1::2]), axis=-1)
        if self.layout.scaled:
            scaled = values.astype(np.float32) * np.float32(math.sqrt(head_size))
            values = scaled.astype(values.dtype)
        values = values.transpose(self.layout.order)
        if values.ndim == self.layout.rows:
            return values.reshape(-1)
        columns = math.prod(values.shape[self.layout.rows :])
        return values.reshape(-1, columns)


def read_maxtext(
    folder: Path, items: Path, model: Any
) -> tuple[dict[str, MaxTextTensor], tuple[str, ...]]:
    """Returns the tensors of a checkpoint by Hugging Face's names, and notes on what is not read.

    folder: as the user named it.
    items: folder of the arrays.
    model: of the config.json. Raises WeightsError for an array of another model, for one that
    contradicts its description, and for a rotary embedding that MaxText does not have.
    """
    metadata, names = _read_names(items)
    _check_rotary(folder, model)
    opened = _Opened(folder, items, metadata, model)
    found: dict[str, MaxTextTensor] = {}
    states: list[str] = []
    for name in sorted(names):
        if _STATES.match(name):
            states.append(name)
            continue
        for theirs, tensor in opened.tensors(name):
            if theirs in found:
                truth = f"{name!r} and {found[theirs].own_name!r} are the same tensor"
                raise WeightsError(f"converting {folder}", truth, "one of the two")
            found[theirs] = tensor
    notes = list(_notes(states, found, model))
    if not _has_every_chunk(metadata):
        notes.append(
            f"the Orbax that wrote it leaves chunks of zeros out ({METADATA} has no "
            f"{_EVERY_CHUNK}), so that a lost chunk and one of zeros look the same"
        )
    return found, tuple(notes)


def _has_every_chunk(metadata: Mapping[str, Any]) -> bool:
    """Whether Orbax wrote the chunks of zeros too, according to `_METADATA`."""
    return metadata.get(_EVERY_CHUNK, False) is True


def _check_rotary(folder: Path, model: Any) -> None:
    """Raises WeightsError for a rotary embedding of config.json
    that MaxText's Llama, Mistral and Mixtral do not have."""
    if getattr(model, "yarn", None) is not None:
        raise WeightsError(
            f"converting {folder}",
            "its config.json has a rotary embedding by YaRN, whose pairs in MaxText are not known",
            "the config.json of this model, if it is another one",
        )
    scaling = _scaling_of(model)
    if scaling is not None and scaling != _SCALING:
        raise WeightsError(
            f"converting {folder}",
            "its config.json scales the rotary embedding by other numbers than MaxText's "
            f"llama3.1: {_numbers(scaling)}, and MaxText has {_numbers(_SCALING)}",
            f"the config.json of this model, with {_numbers(_SCALING)}",
        )


def _scaling_of(model: Any) -> RopeScaling | None:
    """Returns Llama 3.1's scaling of the rotary embedding; None: another one, or none."""
    return getattr(model, "rope_scaling", None)


def _numbers(scaling: RopeScaling) -> str:
    """Returns the numbers of a scaling, as config.json names them."""
    return ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(scaling).items())


def _notes(states: list[str], found: Mapping[str, MaxTextTensor], model: Any) -> Iterator[str]:
    """Yields what is not read, and what the arrays do not tell."""
    if states:
        states_read = f"{len(states)} arrays of the training, such as {states[0]}"
        yield f"{states_read}, are not read: optimizer, step"
    pairs, has = "half a head apart", "no"
    if _scaling_of(model) is not None:
        pairs, has = "numbers 2i and 2i + 1", "a"
    yield (
        f"rotary pairs are taken to be {pairs}, as config.json has {has} rope_scaling, and queries "
        "to contain 1/sqrt(H); a model with another rope_type, with rope_use_scale=False or with "
        "query_pre_attn_scalar computes something else"
    )
    if "lm_head.weight" not in found:
        yield (
            "the output layer is the embedding; where MaxText trained it with "
            "normalize_embedding_logits, its logits were divided by the square root of the model's "
            "width, and config.json has no field for that"
        )


def _read_names(items: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns Orbax's description of the folder, and the names of its arrays.
    Raises WeightsError."""
    file = items / METADATA
    try:
        check_inside(items, [path for path in items.rglob("*")])
        metadata = read_json(file, LARGE)
        tree = metadata["tree_metadata"]
        names = []
        for entry in tree.values():
            if not entry["value_metadata"].get("skip_deserialize", False):
                names.append(".".join(str(key["key"]) for key in entry["key_metadata"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        truth = reason_of(error)
        raise by_class(error, WeightsError(f"reading {file}", truth, _FIX)) from error
    return metadata, names


@dataclasses.dataclass(frozen=True)
class _Opened:
    """Arrays of a folder, opened one by one."""

    folder: Path
    items: Path
    metadata: Mapping[str, Any]
    model: Any
    context: Any = dataclasses.field(
        default_factory=lambda: tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}}
        )
    )

    def tensors(self, name: str) -> Iterator[tuple[str, MaxTextTensor]]:
        """Yields Hugging Face's names and tensors of an array.
        Raises WeightsError for one of another model."""
        if not name.startswith(_PARAMS):
            raise self._unknown(name)
        inner = name.removeprefix(_PARAMS)
        if inner in _OUTSIDE:
            theirs, layout = _OUTSIDE[inner]
            yield theirs, self._tensor(name, self._open(name, layout, 0), layout)
            return
        scanned = _SCANNED.fullmatch(inner)
        unscanned = _UNSCANNED.fullmatch(inner)
        part = scanned[1] if scanned else unscanned[2] if unscanned else ""
        if part in _LAYER:
            theirs, layout = _LAYER[part]
            array = self._open(name, layout, 1 if scanned else 0)
            for layer, of_layer in self._layers(name, array, 1, unscanned):
                yield f"model.layers.{layer}.{theirs}", self._tensor(name, of_layer, layout)
        elif part in _EXPERTS:
            theirs, layout = _EXPERTS[part]
            array = self._open(name, layout, 2 if scanned else 1)
            self._check_size(name, array, 0, "experts", getattr(self.model, "experts", 0))
            for layer, of_layer in self._layers(name, array, 1, unscanned):
                for expert in range(array.shape[0]):
                    expert_name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{theirs}"
                    yield expert_name, self._tensor(name, of_layer[expert], layout)
        else:
            raise self._unknown(name)

    def _unknown(self, name: str) -> WeightsError:
        return WeightsError(
            f"converting {self.folder}",
            f"it has an array {name!r}, which is none of MaxText's Llama, Mistral or Mixtral",
            "MaxText's own maxtext.checkpoint_conversion.to_huggingface for this model",
        )

    def _layers(
        self, name: str, array: Any, axis: int, unscanned: re.Match[str] | None
    ) -> Iterator[tuple[int, Any]]:
        """Yields the number and the array of each layer.
        axis: of the layers, where they are stacked."""
        if unscanned is not None:
            yield int(unscanned[1]), array
            return
        self._check_size(name, array, axis, "layers", self.model.layers)
        index: list[Any] = [slice(None)] * array.ndim
        for layer in range(array.shape[axis]):
            index[axis] = layer
            yield layer, array[tuple(index)]

    def _check_size(self, name: str, array: Any, axis: int, what: str, expected: int) -> None:
        if array.shape[axis] != expected:
            raise WeightsError(
                f"converting {self.folder}",
                f"{name!r} has the shape {list(array.shape)}: {array.shape[axis]} {what} in "
                f"dimension {axis}, and config.json has {expected}",
                "the config.json of this model, and arrays with param_scan_axis=1",
            )

    def _tensor(self, name: str, array: Any, layout: Layout) -> MaxTextTensor:
        """Returns the tensor of an array without stacked dimensions. Raises WeightsError for
        another number of heads."""
        if layout.heads:
            self._check_size(name, array, 1, "heads", getattr(self.model, layout.heads))
        interleaved = _scaling_of(self.model) is not None
        if layout.rotary and array.shape[-1] % 2:
            truth = f"{name!r} has heads of {array.shape[-1]} numbers, which make no pairs"
            raise WeightsError(f"converting {self.folder}", truth, _FIX)
        return MaxTextTensor(name, array, layout, _CODES[array.dtype.name], interleaved)

    def _open(self, name: str, layout: Layout, stacked: int) -> Any:
        """Opens an array. stacked: its dimensions besides those of a layer's.
        Raises WeightsError."""
        driver = "zarr3" if self.metadata.get("use_zarr3") else "zarr"
        base = {"driver": "file", "path": f"{self.items.resolve()}/"}
        kvstore: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        if not self.metadata.get("use_ocdbt", True):
            kvstore = {"driver": "file", "path": f"{self.items.resolve() / name}/"}
        # Where Orbax wrote every chunk, one that is missing is damage,
        # and not the array's fill value.
        fill = not _has_every_chunk(self.metadata)
        spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": fill}
        try:
            array = tensorstore.open(spec, read=True, open=True, context=self.context).result()
            self._check_array(array, len(layout.order) + stacked)
        except (OSError, ValueError) as error:
            truth = reason_of(error)
            asked = f"opening {name} in {self.items}"
            raise by_class(error, WeightsError(asked, truth, _FIX)) from error
        return array

    @staticmethod
    def _check_array(array: Any, dims: int) -> None:
        """Raises ValueError for another type or number of dimensions,
        and for chunks larger than the array."""
        if array.dtype.name not in _CODES:
            raise ValueError(
                f"its numbers are {array.dtype.name}, and {' or '.join(_CODES)} are read"
            )
        if array.ndim != dims:
            raise ValueError(
                f"it has the shape {list(array.shape)}, and {dims} dimensions are expected"
            )
        chunk = array.chunk_layout.read_chunk.shape or array.shape
        if any(size > max(1, total) for size, total in zip(chunk, array.shape, strict=True)):
            raise ValueError(
                f"its chunks are {list(chunk)}, larger than itself, {list(array.shape)}"
            )
