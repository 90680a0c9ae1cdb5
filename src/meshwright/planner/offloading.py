"""How far the memory of programs that offload activations was from their plans, for each version of libtpu."""

from meshwright.planner.search import Plan, SearchResult

MORE_MEMORY = {"libtpu 0.0.52": (-0.02, 0.31), "libtpu 0.0.50.1": (0.11, 0.73)}
"""Memory of compiled programs over the planned, less one: least and most of four programs that offload, from 3B on 16
v5e to 405B on 1,024 v5p (docs/plan.md, 2026-11-23)."""


def offloads(plan: Plan) -> bool:
    """Whether a plan keeps activations in the host's memory."""
    return plan.run.training.remat.startswith("offload")


def offloading_note(result: SearchResult) -> str | None:
    """Says how far compiled programs that offload were from their plan, where the best plan does; None elsewhere."""
    if not result.plans or not offloads(best := result.plans[0]):
        return None
    ranges = (f"{_more(low)} to {_more(high)} with {name}" for name, (low, high) in MORE_MEMORY.items())
    note = (
        "the best plan offloads activations, and four compiled programs that do needed another memory than planned: "
        f"{', '.join(ranges)}; prove it"
    )
    other = next((plan for plan in result.plans if not offloads(plan)), None)
    if other is None:
        return note
    slower = other.estimate.seconds / best.estimate.seconds - 1
    return f"{note}, or take {other.name}, {slower:.1%} slower by plan"


def _more(share: float) -> str:
    return f"{abs(share):.0%} {'less' if share < 0 else 'more'}"
