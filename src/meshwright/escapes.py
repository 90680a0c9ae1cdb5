"""Text from elsewhere (names of files and what they hold), made safe for a terminal."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Returns the text with escapes such as `\x1b` for characters that a terminal obeys, except those in `keep`."""
    return "".join(c if c in keep or c.isprintable() else ascii(c)[1:-1] for c in text)
