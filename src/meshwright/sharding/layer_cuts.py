"""Cut of the layers into parts of equal cost, and the pipeline stage of each part."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np

from meshwright.errors import ConfigError
from meshwright.sharding.stages import PartMap, PartPlacement, StageAssignment


def loop_placement(part: int, stages: int) -> int:
    """Places part p on stage p mod P: interleaved stages.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    return part % stages


def v_placement(part: int, stages: int) -> int:
    """Places parts p and 2P-1-p on stage p: a V (ZB-V, arXiv:2405.15362; DualPipeV)."""
    lap, place = divmod(part, stages)
    return place if lap % 2 == 0 else stages - 1 - place


@functools.cache
def map_parts(
    stages: int, virtual_stages: int, placement: PartPlacement = loop_placement
) -> PartMap:
    """Maps every part of the model to a stage.

    Raises ConfigError for a placement that the pipeline cannot run: the first part must be on stage
    0, every stage must have `virtual_stages` parts, and consecutive parts must be on the same or
    neighbouring stages of the ring.
    """
    parts = PartMap(
        stages, virtual_stages, tuple(placement(p, stages) for p in range(stages * virtual_stages))
    )
    on_stages = f"parts on stages {', '.join(map(str, parts.stage_of))}"
    if parts.stage_of[0] != 0:
        raise ConfigError(
            on_stages,
            "stage 0 embeds the tokens, so the first part is on stage 0",
            "renumber the stages",
        )
    for stage, own in enumerate(parts.parts):
        if len(own) != virtual_stages:
            raise ConfigError(
                on_stages,
                f"stage {stage} has {len(own)} parts, and virtual_stages is {virtual_stages}",
                f"a placement with {virtual_stages} parts on every stage",
            )
    for part, (here, there) in enumerate(itertools.pairwise(parts.stage_of)):
        if (there - here) % stages not in (0, 1, stages - 1):
            raise ConfigError(
                on_stages,
                f"activations pass between neighbouring stages; parts {part} and {part + 1} are "
                f"on {here} and {there}",
                "a placement in which consecutive parts are on the same or on neighbouring stages",
            )
    return parts


@functools.cache
def assign_layers(
    costs: tuple[float, ...],
    stages: int,
    virtual_stages: int,
    placement: PartPlacement = loop_placement,
    period: int = 1,
) -> StageAssignment:
    """Cuts the layers into consecutive parts so that the costliest part costs least.

    Earlier parts are the larger.
    Where stages have several virtual stages, less than one part of each stage may be empty: Llama 3
    405B runs 126 layers as 128 parts (arXiv:2407.21783, section 3.3.2). Layers whose kinds repeat
    with a period (local and global attention in turn) are cut where a period begins, so that a row
    is of one kind on all stages; no part is empty then.

    costs: cost of each layer. Raises ConfigError where there are fewer layers, or periods, than
    that takes.
    """
    parts = stages * virtual_stages
    if period > 1:
        sums = _sums_of_periods(costs, stages, virtual_stages, period)
        cut = assign_layers(sums, stages, virtual_stages, placement)
        boundaries = tuple(min(period * first, len(costs)) for first in cut.boundaries)
        return dataclasses.replace(cut, layer_costs=costs, boundaries=boundaries)
    _check_enough_layers(len(costs), stages, virtual_stages)
    cumulative = np.concatenate([[0.0], np.cumsum(costs)])
    costliest = _best_cut(cumulative, parts, np.maximum)[0]
    # Among all cuts with that costliest part, take the most even one: the least sum of squares.
    boundaries = _best_cut(cumulative, parts, functools.partial(_add_squares, costliest))[1]
    stage_of = map_parts(stages, virtual_stages, placement).stage_of
    return StageAssignment(stages, virtual_stages, stage_of, costs, boundaries)


def _mesh_text(stages: int, virtual_stages: int) -> str:
    return f"stage={stages}" + (
        f" of {virtual_stages} virtual stages" if virtual_stages > 1 else ""
    )


def _sums_of_periods(
    costs: tuple[float, ...], stages: int, virtual_stages: int, period: int
) -> tuple[float, ...]:
    """Returns the cost of each period of layers.

    Raises ConfigError for fewer periods than parts.
    """
    parts = stages * virtual_stages
    periods = -(-len(costs) // period)
    if parts > periods:
        raise _too_few_periods(len(costs), stages, virtual_stages, period)
    return tuple(sum(costs[i : i + period]) for i in range(0, len(costs), period))


def _too_few_periods(layers: int, stages: int, virtual_stages: int, period: int) -> ConfigError:
    """Returns the error of layers with fewer periods than parts: with one, they repeat nowhere."""
    mesh = _mesh_text(stages, virtual_stages)
    parts = stages * virtual_stages
    needed = f"{parts} parts"
    if virtual_stages > 1:
        needed = f"{stages} * {virtual_stages} = {needed}"
    program = "all stages run one program, so every part begins where the kinds of layers repeat"
    periods = -(-layers // period)
    if periods == 1:
        return ConfigError(
            f"{layers} layers of several kinds, whose order never repeats, on {mesh}",
            f"{program}: without a period {layers} layers are 1 part, and {mesh} needs {needed}",
            f"stage=1, and {stages} times the fsdp of this mesh (fsdp={stages} where it has none)",
        )
    fix = f"stage={max(1, periods // virtual_stages)}"
    if virtual_stages > 1:
        fix += f", or {periods // stages or 1} virtual stages"
    return ConfigError(
        f"{layers} layers of several kinds, which repeat every {period}, on {mesh}",
        f"{program}: {layers} / {period} are {periods} periods, and {mesh} needs {needed}",
        fix,
    )


def _check_enough_layers(layers: int, stages: int, virtual_stages: int) -> None:
    """Raises ConfigError for fewer layers than every stage needs."""
    fewest = stages
    most = layers
    truth = f"every stage has a layer at least, and {stages} > {layers}"
    if virtual_stages > 1:
        fewest = stages * virtual_stages - stages + 1
        most = (layers - 1) // (virtual_stages - 1)
        truth = (
            "every stage has a layer at least, and fewer than one part of each stage may be empty: "
            f"{fewest} layers or more"
        )
    if layers < fewest:
        fix = (
            f"stage of at most {most}" if most > 1 else f"{fewest} layers, or fewer virtual stages"
        )
        raise ConfigError(f"{layers} layers on {_mesh_text(stages, virtual_stages)}", truth, fix)


def _add_squares(costliest: float, before: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Returns the sums of squares with one more part; infinity for a part above the costliest."""
    return np.where(part > costliest * (1 + 1e-9), np.inf, before + part**2)


def _best_cut(
    sums: np.ndarray, parts: int, join: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, tuple[int, ...]]:
    """Finds the cut of least price by dynamic programming.

    join: `(price of the parts before, cost of a part)` -> price.
    sums: cumulative cost of the layers, from 0. Returns the price and the first layer of each part.
    """
    layers = len(sums) - 1
    price = np.full((parts + 1, layers + 1), np.inf)
    cut = np.zeros((parts + 1, layers + 1), np.int64)
    price[0, 0] = 0.0
    for p in range(1, parts + 1):
        for i in range(min(p, layers), layers + 1):
            # A part is empty where there are fewer layers than parts.
            first, end = min(p - 1, layers), i + (parts > layers)
            prices = join(price[p - 1, first:end], sums[i] - sums[first:end])
            # Of equal prices the last one: it gives the earlier parts more layers.
            choice = len(prices) - 1 - int(np.argmin(prices[::-1]))
            price[p, i], cut[p, i] = prices[choice], first + choice
    boundaries = [layers]
    for p in range(parts, 0, -1):
        boundaries.append(int(cut[p, boundaries[-1]]))
    return float(price[parts, layers]), tuple(reversed(boundaries))
