"""Counts, bytes and durations as text."""


def format_count(n: float) -> str:
    """Formats a count in decimal units: `70.6 B`, `1.05 M`, `312`."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if n >= size:
            return f"{n / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{n:g}"


def format_bytes(n: float) -> str:
    """Formats bytes in binary units: `1.5 GiB`, `640 KiB`."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= size:
            return f"{n / size:.3g} {unit}" if n / size < 1000 else f"{n / size:.0f} {unit}"
    return f"{n:.0f} B"


def format_step(seconds: float) -> str:
    """Formats the time of a step: `812 us`, `35 ms`, `4.2 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"
