"""Pipeline stages of models whose layers repeat with a period, such as local and global attention by turns."""

from meshwright.errors import ConfigError
from meshwright.sharding.stages import PartPlacement, StageAssignment, assign_layers


def assign_periods(
    costs: tuple[float, ...], period: int, stages: int, virtual_stages: int, placement: PartPlacement
) -> StageAssignment:
    """Cuts the layers into parts that begin with a whole period, so that a row is of one kind on all stages.

    costs: cost of each layer. Raises ConfigError where there are fewer periods than parts.
    """
    periods = tuple(sum(costs[i : i + period]) for i in range(0, len(costs), period))
    parts = stages * virtual_stages
    if parts > len(periods):
        raise ConfigError(
            f"{len(costs)} layers that repeat every {period} on stage={stages}"
            + (f" of {virtual_stages} virtual stages" if virtual_stages > 1 else ""),
            f"every part begins with a period, and {parts} parts > {len(periods)} periods",
            f"stage of at most {max(1, len(periods) // virtual_stages)}",
        )
    whole = assign_layers(periods, stages, virtual_stages, placement)
    boundaries = tuple(min(period * first, len(costs)) for first in whole.boundaries)
    return StageAssignment(whole.parts, costs, boundaries)
