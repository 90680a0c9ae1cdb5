"""Colours of every picture, page and terminal: eight that the colour-blind tell apart,
of work, of blocks."""

PALETTE = {
    "c1": ("#2f7de1", "#3f93d8"),  # blue
    "c2": ("#b5480a", "#f07f2e"),  # orange
    "c3": ("#5aa084", "#7edcac"),  # green
    "c4": ("#8a2ba0", "#e3a0f5"),  # purple
    "c5": ("#b38819", "#efd081"),  # gold
    "c6": ("#1f6478", "#cfe8f0"),  # teal
    "c7": ("#242a35", "#8f96a6"),  # slate
    "c8": ("#8a6a55", "#b98a68"),  # brown
}
"""Colours of series on light and on dark paper. The contrast of each to its paper is at least 3,
and any two are at least 11 apart (CIE76) for normal sight, deuteranopia, protanopia and tritanopia;
a test checks both."""

WORK = {
    "matmul": ("c1", "matrix products"),
    "attention": ("c4", "attention"),
    "memory": ("c3", "memory-bound"),
    "collective": ("c5", "collective"),
    "exposed": ("exposed", "exposed communication"),
    "host": ("c6", "host transfer"),
    "loop": ("quiet", "loop"),
    "bubble": ("c8", "pipeline bubble"),
}
"""Kind of work -> name of its colour, and what a legend calls it."""

_PAPER = {
    "paper": ("#fbfbfa", "#0f1115"),
    "card": ("#ffffff", "#16191f"),
    "surface": ("#f1f2f4", "#20242c"),
    "line": ("#e3e5e9", "#2b303a"),
    "edge": ("#9aa1ac", "#5b6472"),
    "ink": ("#15181d", "#e9ebef"),
    "muted": ("#5a626e", "#a0a8b5"),
    "accent": ("#1f5fb8", "#6db3f2"),
    "good": ("#17754b", "#5ed39a"),
    "warn": ("#a86a00", "#efb14a"),
    "bad": ("#b42318", "#ff8a75"),
    "limit": ("#b42318", "#ff8a75"),
    "exposed": ("#c8321f", "#ff6b57"),
    "quiet": ("#cfd4dc", "#3a414d"),
    "tip": ("#1b1f26", "#eceef2"),
    "tip-ink": ("#f4f5f7", "#15181d"),
}
"""Colours of paper, ink and lines, on light and on dark paper."""

TURNS = (0.85, 0.62, 0.44, 0.3)
"""Part of the colour, the rest paper: the first eight blocks have the palette, the next
eight lighter turns of it."""

TASKS = {"forward": "c1", "backward": "c2", "input gradient": "c2", "weight gradient": "c3"}
"""Kind of a pipeline's task -> name of its colour; later virtual stages are lighter."""


def css_variables() -> str:
    """Returns the colours as CSS variables: light, dark by preference,
    and either by the page's own switch."""
    colours = PALETTE | _PAPER
    colours |= {kind: colours[name] for kind, (name, _) in WORK.items()}
    light, dark = (
        ";".join(f"--{name}:{pair[i]}" for name, pair in colours.items()) for i in (0, 1)
    )
    return (
        f":root{{--turns:{' '.join(map(str, TURNS))}}}\n"
        f":root{{color-scheme:light;{light}}}\n"
        "@media(prefers-color-scheme:dark)"
        f"{{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        "@media print{:root,:root[data-theme=dark],:root:not([data-theme=light])"
        f"{{color-scheme:light;{light}}}}}\n"
    )


def series_colour(index: int) -> str:
    """Returns the name of the colour of series number `index`."""
    return f"c{index % len(PALETTE) + 1}"


def block_colour(number: int) -> str:
    """Returns the colour `#rrggbb` of blocks with a number, on light paper;
    it comes again after 32 numbers."""
    return _on_paper(series_colour(number), TURNS[number // len(PALETTE) % len(TURNS)])


def task_colour(kind: str, virtual_stage: int) -> str:
    """Returns the colour `#rrggbb` of a pipeline's task, on light paper."""
    return _on_paper(TASKS[kind], 0.9 - 0.125 * (virtual_stage % 4))


def _on_paper(name: str, part: float) -> str:
    pairs = zip(_channels(PALETTE[name][0]), _channels(_PAPER["card"][0]), strict=True)
    return "#" + "".join(f"{round(own * part + paper * (1 - part)):02x}" for own, paper in pairs)


def ink_on(colour: str) -> str:
    """Returns the colour of text on a colour `#rrggbb`: dark or light, whichever is readable."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (v / 255 for v in _channels(colour))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (
        "#10131a" if luminance > 0.19 else "#ffffff"
    )  # above it dark ink has the greater contrast


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
