"""Layers of several kinds in a config.json: `layer_types`."""

from meshwright.errors import WeightsError
from meshwright.hugging_face.fields import Fields


def layer_types(layers: int, local_layers: int, local: str = "sliding_attention") -> list[str]:
    """Returns the kinds of layers of which every `local_layers + 1`-th is global."""
    return ["full_attention" if (i + 1) % (local_layers + 1) == 0 else local for i in range(layers)]


def read_local_layers(fields: Fields, layers: int, default: int, local: str = "sliding_attention") -> int:
    """Returns the local layers before each global one. default: where the configuration names no kinds.

    Raises WeightsError for layers that do not repeat so.
    """
    kinds = fields.get("layer_types", layer_types(layers, default, local))
    number = kinds.index("full_attention") if "full_attention" in kinds else default
    if kinds != layer_types(layers, number, local):
        raise WeightsError(
            f"reading {fields.file}",
            f"layer_types does not repeat every {number + 1} layers: {kinds}",
            "a model with the same number of local layers before each global one",
        )
    return int(number)
