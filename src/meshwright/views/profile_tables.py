"""Tables of a profile: measured seconds of a step beside the simulated."""

from rich.console import Console
from rich.markup import escape

from meshwright.bench.step_profile import Profile, longest
from meshwright.formatting import format_step
from meshwright.views.plain_table import plain_table

_MOST = 12
"""Most rows of a kind that are printed; profile.json has all."""
_KINDS = {"step": "", "part": "", "collective": "collectives", "scope": "scopes"}


def print_profile(console: Console, profile: Profile) -> None:
    """Prints a profile: the step, its parts, its collectives and the scopes of its program, the longest first."""
    steps = f"steps {profile.first} to {profile.last}"
    console.print(f"\n[bold]profile[/] of {steps}, of one device in one step")
    table = plain_table("", "measured", "simulated", right=("measured", "simulated"))
    for kind, heading in _KINDS.items():
        rows = longest(profile, kind, _MOST)
        if heading and rows:
            table.add_row(f"[dim]{heading}[/]", "", "")
        for row in rows:
            simulated = "" if row.simulated is None else format_step(row.simulated)
            table.add_row(escape(row.name), format_step(row.measured), simulated)
    console.print(table)
    console.print(profile.note, markup=False)
