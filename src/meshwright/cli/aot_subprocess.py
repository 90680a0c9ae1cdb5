"""Ahead-of-time compilation in a child process: `prove --on TARGET` runs the same command again, under a time limit."""

import os
import signal
import subprocess
import sys

from meshwright.errors import CensusError
from meshwright.hardware.aot import compiler_environment, require_compiler
from meshwright.hardware.mesh import default_cache_folder
from meshwright.hardware.targets import Target

_VARIABLE = "MESHWRIGHT_COMPILES_FOR"
"""Environment variable that marks the child process, with its target."""
_COMPILER_EXIT = 1
"""Exit code of a process that its compiler ends; errors of this package have others."""


def is_compiling_process(target: Target) -> bool:
    """Whether this is the child process that compiles for `target`."""
    return os.environ.get(_VARIABLE) == str(target)


def compile_in_subprocess(target: Target, limit: int) -> int:
    """Runs this command again in a process that compiles for `target`; returns its exit code.

    limit: most seconds.  Raises CensusError where the compiler is missing, takes too long or crashes; its log is kept
    in the cache, in a file that the error names.
    """
    require_compiler(target)
    log = default_cache_folder() / "proofs" / f"compiler-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    asked = f"compiling for {target}"
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", *sys.argv[1:]],
                env={**os.environ, **compiler_environment(target), _VARIABLE: str(target)},
                stdout=sys.stdout.fileno(),  # which is no longer file descriptor 1 (cli/main.py)
                stderr=output,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CensusError(asked, f"it took more than {limit} s; its log is {log}", "a larger --limit") from error
        except KeyboardInterrupt:
            log.unlink()
            raise
    text = log.read_text(encoding="utf-8")
    if done.returncode < 0 or done.returncode == _COMPILER_EXIT or "Traceback (most recent call last)" in text:
        last = next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "it gave no message")
        reason = signal.Signals(-done.returncode).name if done.returncode < 0 else last
        raise CensusError(asked, f"the compiler failed: {reason}; its log is {log}", "another mesh or target")
    log.unlink()
    # Without a TPU or GPU the compilers warn about the machine; only this package's own messages matter.
    sys.stderr.write(_own_messages(text))
    return done.returncode


def _own_messages(text: str) -> str:
    """Returns this package's error, and what follows it."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith("error:")), len(lines))
    return "".join(lines[first:])
