"""Tables of an architecture, used in both directions: fields of config.json, and tensors of each parameter."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.fields import REQUIRED, Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.models.decoder import head_size_of
from meshwright.models.model import Model
from meshwright.sharding.params import Param, named_leaves

_Read = Callable[[Fields], dict[str, Any]]
_Write = Callable[[Any], dict[str, Any] | None]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One fact that a config.json and a model both state."""

    read: _Read
    """Returns fields of the model. Raises WeightsError for a value that the family does not compute."""
    write: _Write = lambda c: {}
    """Returns fields of config.json; None where the architecture cannot express the model."""


def same(name: str, field: str, default: Any = REQUIRED, *, other: str | None = None, kind: Any = None) -> Entry:
    """Returns the entry of a number that both have.

    name: in config.json.  field: of the model.  default: where config.json lacks it; a function is called with the
    fields.  other: a second name to look for.  kind: type that the number is converted to.
    """

    def read(fields: Fields) -> dict[str, Any]:
        value = default(fields) if callable(default) else default
        found = fields.get(name, value) if other is None else fields.first(name, other, default=value)
        return {field: found if kind is None else kind(found)}

    return Entry(read, lambda c: {name: getattr(c, field)})


def choice(name: str, field: str, values: Mapping[Any, Any], default: Any = False) -> Entry:
    """Returns the entry of a choice. values: of config.json -> of the model."""
    names = {value: key for key, value in values.items()}
    return Entry(
        lambda fields: {field: values[bool(fields.get(name, default))]}, lambda c: {name: names[getattr(c, field)]}
    )


def flag(name: str, *fields_of_model: str) -> Entry:
    """Returns the entry of biases that are there together: true is `learned` in all of the fields."""

    def read(fields: Fields) -> dict[str, Any]:
        return dict.fromkeys(fields_of_model, "learned" if fields.flag(name) else "none")

    def write(c: Any) -> dict[str, Any] | None:
        found = {getattr(c, field) for field in fields_of_model}
        return None if len(found) > 1 else {name: found == {"learned"}}

    return Entry(read, write)


def fixed(name: str, *allowed: Any, written: bool = True) -> Entry:
    """Returns the entry of a field that has one of the values that the family computes, the first where it lacks."""

    def read(fields: Fields) -> dict[str, Any]:
        fields.require(name, *allowed)
        return {}

    return Entry(read, lambda c: {name: allowed[0]} if written else {})


def must(**values: Any) -> Entry:
    """Returns the entry of model fields that have one value in this architecture."""

    def write(c: Any) -> dict[str, Any] | None:
        return {} if all(getattr(c, name) == value for name, value in values.items()) else None

    return Entry(lambda fields: values, write)


def given(**values: Any) -> Entry:
    """Returns the entry of model fields that config.json does not state, with the values of the published training."""
    return Entry(lambda fields: values)


def without_effect(*names: str) -> Entry:
    """Returns the entry of fields that change no number of the forward pass."""

    def read(fields: Fields) -> dict[str, Any]:
        fields.without_effect(*names)
        return {}

    return Entry(read)


def only_if(condition: Callable[[Any], bool]) -> Entry:
    """Returns the entry of a condition on models that the architecture can express."""
    return Entry(lambda fields: {}, lambda c: {} if condition(c) else None)


def head_size(default: Any = None) -> Entry:
    """Returns the entry of `head_dim`, which models have where it is not width / heads."""

    def read(fields: Fields) -> dict[str, Any]:
        size = fields.get("head_dim", default)
        usual = size is None or size * fields.get("num_attention_heads") == fields.get("hidden_size")
        return {"head_size": None if usual else size}

    return Entry(read, lambda c: {"head_dim": head_size_of(c)})


def layer_types(layers: int, local_layers: int, local: str = "sliding_attention") -> list[str]:
    """Returns the kinds of layers of which every `local_layers + 1`-th is global."""
    return ["full_attention" if (i + 1) % (local_layers + 1) == 0 else local for i in range(layers)]


def read_local_layers(fields: Fields, default: int, local: str = "sliding_attention") -> int:
    """Returns the local layers before each global one. default: where the configuration names no kinds.

    Raises WeightsError for layers that do not repeat so.
    """
    layers = fields.get("num_hidden_layers")
    kinds = fields.get("layer_types", layer_types(layers, default, local))
    number = kinds.index("full_attention") if "full_attention" in kinds else default
    if kinds != layer_types(layers, number, local):
        raise WeightsError(
            f"reading {fields.file}",
            f"layer_types does not repeat every {number + 1} layers: {kinds}",
            "a model with the same number of local layers before each global one",
        )
    return int(number)


def local_layers(default: int) -> Entry:
    """Returns the entry of local layers before each global one, and of their window."""
    return Entry(
        lambda fields: {"local_layers": read_local_layers(fields, default)},
        lambda c: {"layer_types": layer_types(c.layers, c.local_layers)},
    )


def read_table(table: tuple[Entry, ...], fields: Fields) -> dict[str, Any]:
    """Returns the fields of a model from a config.json."""
    found: dict[str, Any] = {}
    for entry in table:
        found |= entry.read(fields)
    return found


def write_table(table: tuple[Entry, ...], c: Any) -> dict[str, Any] | None:
    """Returns the config.json of a model, or None where one of the entries cannot express it."""
    found: dict[str, Any] = {}
    for entry in table:
        written = entry.write(c)
        if written is None:
            return None
        found |= written
    return found


Names = Mapping[str, tuple[str, tuple[str, ...]]]
"""Parameter, or stack and parameter -> its tensor after the layer's number, and the letters of its dimensions.

A stored dimension of several parameters is marked with how they share it: `+` one after another, `%` by turns, `/` one
after another within each head. An empty dimension has one element."""

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


def stored_tensors(c: Model, names: Names, layer: str) -> dict[str, StoredTensor]:
    """Returns where each parameter of a model is stored. layer: what precedes the names of a layer's tensors."""
    spec, params = c.spec(), named_leaves(c.params())
    rows = {stack: spec.layers_of(stack) for stack in spec.stacks}
    rows |= {block.stack: (len(spec.layers) + i,) for i, block in enumerate(spec.further)}
    groups: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    found: dict[str, StoredTensor] = {}
    for path in params:
        stack, _, name = path.rpartition(".")
        tensor, axes = names[path] if path in names else names[name]
        groups.setdefault((stack if stack in rows else "", tensor), {})[path] = axes
    order = list(names)
    for (stack, tensor), group in groups.items():
        where = (layer + tensor if stack else tensor, rows.get(stack, ()))
        paths = sorted(group, key=lambda path: order.index(path if path in names else path.rpartition(".")[2]))
        found |= _parts(*where, {path: (params[path], group[path]) for path in paths})
    return {path: found[path] for path in params}


def _parts(
    name: str, layers: tuple[int, ...], group: dict[str, tuple[Param, tuple[str, ...]]]
) -> dict[str, StoredTensor]:
    """Returns the places of the parameters of one tensor. group: their descriptions and axes, in their order."""
    found: dict[str, StoredTensor] = {}
    shapes = {path: _shape(p, axes) for path, (p, axes) in group.items()}
    first = 0
    for place, (path, (p, axes)) in enumerate(group.items()):
        plain = tuple(letters.rstrip(_MARKS) for letters in axes if letters)
        axis = next((i for i, letters in enumerate(axes) if letters[-1:] in tuple(_MARKS)), None)
        if axis is None:
            found[path] = StoredTensor(name, plain, layers)
            continue
        size, total = shapes[path][axis], sum(shape[axis] for shape in shapes.values())
        before, after = shapes[path][:axis], shapes[path][axis + 1 :]
        part, split = (axis, slice(first, first + size)), tuple[int, ...]()
        if axes[axis].endswith("%"):
            part = (axis, slice(place, None, len(group)))
        elif axes[axis].endswith("/"):
            heads = p.shape[p.dims.index("N")]
            split = (*before, heads, total // heads, *after)
            part = (axis + 1, slice(first // heads, (first + size) // heads))
        found[path] = StoredTensor(name, plain, layers, part, (*before, total, *after), split)
        first += size
    return found


_MARKS = "+%/"


def _shape(p: Param, axes: tuple[str, ...]) -> tuple[int, ...]:
    sizes = dict(zip(p.dims, p.logical_shape, strict=True))
    return tuple(math.prod(sizes[letter] for letter in letters.rstrip(_MARKS)) for letters in axes)
