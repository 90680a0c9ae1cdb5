"""Head size of models that do not give it."""

from meshwright.errors import ConfigError


def even_head_size(width: int, heads: int) -> int:
    """Returns width / heads. Raises ConfigError where it is not a whole number."""
    if width % heads:
        raise ConfigError(
            f"width {width} in {heads} heads",
            f"{width} = {width // heads} * {heads} + {width % heads}",
            f"a width of {width // heads * heads or heads}, or give model.head_size",
        )
    return width // heads
