"""The command line: parsing, and printing what the rooms below return."""

from meshwright.cli.main import main

__all__ = ["main"]
