"""`prove --on TARGET`: the same command again, in a process that may compile for hardware that is not here."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from meshwright.errors import CensusError
from meshwright.target import ENVIRONMENT, Target, require_compiler

_INSIDE = "MESHWRIGHT_COMPILES_FOR"


def is_inside(target: Target) -> bool:
    """Whether this is the process that compiles."""
    return os.environ.get(_INSIDE) == str(target)


def compile_elsewhere(target: Target, limit: int) -> int:
    """Runs this command in a process for `target`, at most `limit` seconds; its exit code.

    Raises CensusError where the compiler is missing, takes too long or dies; what it said is kept in a file.
    """
    require_compiler()
    log = Path(tempfile.gettempdir()) / f"meshwright-{os.getpid()}.log"
    asked = f"compiling for {target}"
    with log.open("w", encoding="utf-8") as said:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", *sys.argv[1:]],
                env={**os.environ, **ENVIRONMENT, _INSIDE: str(target)},
                stderr=said,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CensusError(asked, f"it took more than {limit} s; its log is {log}", "a larger --limit") from error
    text = log.read_text(encoding="utf-8")
    if done.returncode < 0 or "Traceback (most recent call last)" in text:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else text.strip().splitlines()[-1][:300]
        raise CensusError(asked, f"the compiler gave up: {how}; its log is {log}", "another mesh or target")
    log.unlink()
    # What libtpu says of a machine without a TPU is nobody's business.
    sys.stderr.write(text[text.index("error:") :] if "error:" in text else "")
    return done.returncode
