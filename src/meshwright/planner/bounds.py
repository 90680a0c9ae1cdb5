"""Resources that bound a step: the matrix unit by kind of work, HBM by what it moves, links by mesh axis, and waits."""

from collections.abc import Mapping

MATMULS, ATTENTION = "matmuls", "attention"
OPERANDS, SCORES = "HBM: matmul operands", "HBM: attention scores"
ELEMENTWISE, OPTIMIZER = "HBM: norms and activations", "HBM: optimizer"
TOKEN_BYTES = 4
"""Bytes of a token that a device reads."""
_COMPUTE, _HBM = (MATMULS, ATTENTION), (OPERANDS, SCORES, ELEMENTWISE, OPTIMIZER)


def bounds_of_pass(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of one pass of a microbatch (`LayerTime.seconds`) by what bounds them."""
    return {
        MATMULS: seconds["matmul"] - seconds["operands"],
        ATTENTION: seconds["attention"] - seconds["scores"],
        OPERANDS: seconds["operands"],
        SCORES: seconds["scores"],
        ELEMENTWISE: seconds["elementwise"],
    }


def add_bounds(
    passes: Mapping[str, Mapping[str, float]],
    microbatches: int,
    unembedding: float,
    recomputation: float,
    *,
    stages_repeat: bool,
) -> dict[str, float]:
    """Returns the seconds of a step's computation by what bounds them.

    passes: `bounds_of_pass` of each pass. unembedding: seconds of a microbatch. recomputation: seconds of a step.
    stages_repeat: whether backward tasks repeat their stage's forward pass, which recomputation then holds too.
    """
    total = {kind: microbatches * (n + passes["backward"][kind]) for kind, n in passes["forward"].items()}
    total[MATMULS] += microbatches * unembedding
    repeated = {kind: n + stages_repeat * passes["forward"][kind] for kind, n in passes["recomputation"].items()}
    all_of_it = sum(repeated.values())
    for kind, n in repeated.items():
        total[kind] += recomputation * n / all_of_it if all_of_it else 0.0
    return total


def largest_bound(seconds: Mapping[str, float]) -> str:
    """Names what takes most of a step: of matrix unit, HBM, each link and each wait the largest, then its kind.

    HBM is one resource: what moves through it is added before it is compared, and its largest kind is named.
    """
    groups: dict[str, tuple[str, ...]] = {kind: (kind,) for kind in seconds if kind not in (*_COMPUTE, *_HBM)}
    groups |= {MATMULS: _COMPUTE, OPERANDS: _HBM}
    largest = max(groups.values(), key=lambda kinds: sum(seconds.get(kind, 0.0) for kind in kinds))
    return max(largest, key=lambda kind: seconds.get(kind, 0.0))
