"""Arguments of the verbs whose one option is `--json`; needs neither tyro nor rich."""

from collections.abc import Sequence

from meshwright.cli.output import write
from meshwright.errors import ConfigError


def wants_json(verb: str, summary: str, args: Sequence[str]) -> bool:
    """Returns whether `--json` is given. Prints the help and raises SystemExit for `--help`.

    Raises ConfigError for anything else.
    """
    if "-h" in args or "--help" in args:
        write(f"usage: meshwright {verb} [options]\n\n{summary}\n\noptions:\n  --json  Print JSON.\n")
        raise SystemExit(0)
    for arg in args:
        if arg != "--json":
            raise ConfigError(f"meshwright {verb} {arg}", f"{verb} has one option, --json", f"meshwright {verb}")
    return "--json" in args
