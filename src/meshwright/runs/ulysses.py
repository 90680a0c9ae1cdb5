"""Ulysses: every device exchanges heads for positions, and needs an even share of the key/value heads."""

from typing import TYPE_CHECKING

from meshwright.errors import ConfigError, divisors

if TYPE_CHECKING:
    from meshwright.runs.placed_run import PlacedRun


def check_ulysses(placed: "PlacedRun") -> None:
    """Raises ConfigError where the devices of `context` have no even share of the key/value heads."""
    shape, heads = placed.shape, placed.spec.kv_heads
    if heads is None:
        return
    local = max(1, heads // shape.tensor)
    if local % shape.context:
        raise ConfigError(
            f"--training.context-strategy ulysses on {shape}",
            f"it gives each device some of the {heads} key/value heads; over tensor={shape.tensor} there are "
            f"{local} = {local // shape.context} * {shape.context} + {local % shape.context}",
            f"context of {', '.join(map(str, divisors(local)))}, or --training.context-strategy usp",
        )
