"""Report of predicted decoding, and of a compiled decoder against its plan."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.hardware.targets import Target
from meshwright.planner.decoding import DecodePrice
from meshwright.views.blocks import Column, Table, Text
from meshwright.views.terminal import print_blocks


def print_decode_prices(console: Console, prices: Sequence[DecodePrice], target: Target, name: str) -> None:
    """Prints tokens per second and chip against context and batch, with the best mesh of each."""
    columns = [
        Column("context", "integer", lambda price: price.context),
        Column("batch", "integer", lambda price: price.batch),
        Column("mesh", cell=lambda price: str(price.mesh)),
        Column("a token", "seconds", lambda price: price.seconds),
        Column("tokens/s/chip", "count", lambda price: round(price.tokens_per_second_per_chip, 1)),
        Column("prefill tokens/s/chip", "count", lambda price: round(price.prefill_per_second_per_chip)),
        Column("bound by", cell=lambda price: price.bound_by),
        Column("weights", "bytes", lambda price: price.weights),
        Column("cache", "bytes", lambda price: price.cache),
        Column("fits", cell=lambda price: "yes" if price.fits else "no"),
    ]
    title = f"decoding {name} on {target}, weights gathered once; predicted by arithmetic"
    print_blocks(console, title, "", [Table.of(prices, columns, printed=len(prices))])


def print_decode_proof(
    console: Console, price: DecodePrice, compiled: Mapping[str, float], target: Target | None
) -> None:
    """Prints the memory of a compiled program against its plan, and the predicted speed."""
    planned = {"weights": price.weights, "cache": price.cache}
    names = {"weights": "weights", "cache": "cache", "temporaries": "temporaries", "bytes": "all"}
    columns = [
        Column("per device", cell=lambda name: names[name]),
        Column("planned", "bytes", planned.get),
        Column("compiled", "bytes", lambda name: compiled[name]),
    ]
    print_blocks(console, "", "", [Table.of(names, columns)])
    if target is None:
        return
    fits = "it fits" if compiled["bytes"] <= target.chip.hbm_bytes else "it does not fit"
    speed = (
        f"predicted: {format_step(price.seconds)} a token ({price.bound_by} most of it), "
        f"{format_count(round(price.tokens_per_second_per_chip, 1))} tokens/s per chip; prefill "
        f"{format_count(round(price.prefill_per_second_per_chip))} tokens/s per chip"
    )
    memory = f"{format_bytes(compiled['bytes'])} of the {format_bytes(target.chip.hbm_bytes)} of a {target.chip.name}"
    print_blocks(console, "", "", [Text([speed, f"{fits}: {memory}"])])
