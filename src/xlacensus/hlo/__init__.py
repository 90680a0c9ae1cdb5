"""Parser and analyses of compiled XLA programs, read from their text."""
