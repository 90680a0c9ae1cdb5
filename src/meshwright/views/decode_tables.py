"""Tables of predicted and compiled decoding."""

from collections.abc import Sequence

from rich.console import Console

from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.hardware.targets import Target
from meshwright.planner.decoding import DecodePrice
from meshwright.views.plain_table import plain_table


def print_decode_prices(console: Console, prices: Sequence[DecodePrice], target: Target, name: str) -> None:
    """Prints tokens per second and chip against context and batch, with the best mesh of each."""
    console.print(f"[bold]decoding {name} on {target}[/], weights gathered once; predicted by arithmetic")
    table = plain_table(
        "context", "batch", "mesh", "a token", "tokens/s/chip", "prefill tokens/s/chip", "bound by", "weights", "cache",
        "fits",
    )  # fmt: skip
    for price in prices:
        table.add_row(
            f"{price.context:,}",
            f"{price.batch:,}",
            str(price.mesh),
            format_step(price.seconds),
            format_count(round(price.tokens_per_second_per_chip, 1)),
            format_count(round(price.prefill_per_second_per_chip)),
            price.bound_by,
            format_bytes(price.weights),
            format_bytes(price.cache),
            "yes" if price.fits else "no",
        )
    console.print(table)


def print_decode_proof(console: Console, price: DecodePrice, compiled: dict[str, float], target: Target | None) -> None:
    """Prints the memory of a compiled program beside its plan, and the predicted speed."""
    table = plain_table("per device", "planned", "compiled")
    table.add_row("weights", format_bytes(price.weights), format_bytes(compiled["weights"]))
    table.add_row("cache", format_bytes(price.cache), format_bytes(compiled["cache"]))
    table.add_row("temporaries", "", format_bytes(compiled["temporaries"]))
    table.add_row("all", "", format_bytes(compiled["bytes"]))
    console.print(table)
    if target is None:
        return
    console.print(
        f"predicted: {format_step(price.seconds)} a token ({price.bound_by} most of it), "
        f"{format_count(round(price.tokens_per_second_per_chip, 1))} tokens/s per chip; prefill "
        f"{format_count(round(price.prefill_per_second_per_chip))} tokens/s per chip",
        markup=False,
    )
    fits = compiled["bytes"] <= target.chip.hbm_bytes
    console.print(
        f"[bold]{'it fits' if fits else 'it does not fit'}[/]: {format_bytes(compiled['bytes'])} of the "
        f"{format_bytes(target.chip.hbm_bytes)} of a {target.chip.name}"
    )
