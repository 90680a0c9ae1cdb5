"""Ranked plans and offers: lists that print as a table, and show their page in a notebook."""

from collections.abc import Iterable

from rich.console import Console

from meshwright.planner.offers import Offer
from meshwright.planner.search import Plan, SearchResult
from meshwright.views.offer_page import offer_page
from meshwright.views.offer_tables import offers_table
from meshwright.views.pages import inline
from meshwright.views.plan_page import plan_page
from meshwright.views.plan_tables import plans_table


class Plans(list[Plan]):
    """Plans, the fastest predicted step first.

    Example:
        >>> plans = mw.plan("llama32-1b", on="v6e:2x2", tokens_per_step="128k", at_most=2)
        >>> print(str(plans).splitlines()[1])
        1  fsdp=4, projections, 2 microbatches         0.864 s  37%     152 k  21 of 30  matmuls   v6e:2x2
        >>> plans._repr_html_()[:7]
        '<iframe'
    """

    def __init__(self, plans: Iterable[Plan], searches: Iterable[SearchResult] = ()):
        super().__init__(plans)
        self.searches = tuple(searches)
        """Searches that the plans come from, with all that was priced; none of a wrapped model."""

    def __repr__(self) -> str:
        return _text(plans_table(self))

    def _repr_html_(self) -> str | None:
        """Returns the page of the best plan and of the search that it comes from; None of a wrapped model's."""
        for search in self.searches:
            if self and self[0].target == search.target:
                return inline(plan_page(self[0], search))
        return None


class Offers(list[Offer]):
    """Offers, the best first: print as a table, and show days against cost in a notebook.

    Example:
        >>> offers = mw.offers("llama32-1b", on="v6e:2x2", tokens="10B")
        >>> len(str(offers).splitlines()), offers._repr_html_()[:7]
        (2, '<iframe')
    """

    def __repr__(self) -> str:
        return _text(offers_table(self))

    def _repr_html_(self) -> str:
        return inline(offer_page(self))


def _text(table: object) -> str:
    console = Console(width=120, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
