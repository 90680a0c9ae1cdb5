"""Entry point of the command line: finds the verb, imports its module, prints errors."""

import contextlib
import importlib
import os
import re
import resource
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType

from meshwright.activity import activity, watched_by
from meshwright.cli.interrupt import EXIT_CODE, acknowledge_interrupts
from meshwright.cli.output import Notices, Stream, columns, write, write_json
from meshwright.errors import ConfigError, MeshwrightError, by_class, nearest, reason_of
from meshwright.formatting import printable
from meshwright.launching import LIMIT
from meshwright.plugins import is_reference
from meshwright.runs.catalogue import list_recipes
from meshwright.trust import TRUST, take_options

VERBS = {
    "train": (
        "api.training",
        "Train a recipe, or resume a run: on the accelerators found, or on simulated devices.",
    ),
    "finetune": (
        "api.finetuning",
        "Fine-tune a model on conversations or preferences, with LoRA adapters or all parameters.",
    ),
    "evaluate": (
        "api.evaluation",
        "Compute the loss of a run's checkpoint on held-out or other text, or benchmarks.",
    ),
    "generate": ("api.generation", "Continue prompts with a run's model, or chat with it."),
    "tokenize": ("api.tokenizing", "Tokenise text once, into a folder that --data takes."),
    "convert": (
        "api.convert",
        "Convert weights: a Hugging Face folder into a run, or a run into a Hugging Face folder.",
    ),
    "checkpoint": (
        "api.checkpoints",
        "List, inspect, verify and move checkpoints; needs no device.",
    ),
    "show": ("api.layout", "Show how the parameters lie on a mesh; needs no device."),
    "plan": ("api.planning", "Find the fastest mesh and layout for hardware that is not here."),
    "prove": (
        "api.proving",
        "Compile the step, also for hardware that is not here: memory, communication, FLOPs, faults.",
    ),
    "launch": ("cli.launch", "Write a scheduler's job file that runs a verb on several hosts."),
    "doctor": ("api.doctor", "Find what is wrong with this host before a run does."),
    "rehearse": (
        "api.rehearsal",
        "Run a plan with a small model on simulated devices: train, stop, resume, evaluate.",
    ),
    "parity": ("api.evaluation", "Compare a run on two meshes: initial values, losses, gradients."),
    "view": (
        "api.viewing",
        "Show runs on a page: curves, times, events, samples; --live updates it while they train.",
    ),
    "bench": ("api.benchmarks", "Time collectives or matrix products on the devices found."),
    "recipes": ("", "List the recipes."),
}
"""Verb -> module with its options, `TrainOptions` of `train` or `ACTIONS` with those of each, and one line about it."""

_OPEN_FILES = 65536
"""Files that a process may have open, where the system lets it."""


def main() -> None:
    """Runs the command `meshwright` and exits."""
    _choose_working_directory(sys.argv[1:])
    _own_standard_output()
    _allow_open_files()
    acknowledge_interrupts()
    counts = LIMIT in os.environ
    _leave(_run_counted(sys.argv[1:]) if counts else _run_explained(sys.argv[1:]))


def _run_counted(args: Sequence[str]) -> int:
    """Runs a start of a scheduler's job; returns the exit code, after which the scheduler starts it again or not."""
    from meshwright.launching.job_starts import job_starts  # only jobs count

    try:
        starts = job_starts(args)
        if starts is None:
            return _run_explained(args)
        starts.begin()
        try:
            code = _run_explained(args)
        except Exception:
            traceback.print_exc()
            code = 1
        return starts.ended(code)
    except MeshwrightError as error:
        _print_error(_relative(str(error)))
        return error.exit_code


def _run_explained(args: Sequence[str]) -> int:
    """Runs one command line; prints the error that ends it, and returns the exit code.

    Raises what is neither an error of the package nor one of the system that may pass.
    """
    try:
        with watched_by(Notices(" ".join(["meshwright", *args[:1]]))):
            code = run(args)
    except MeshwrightError as error:
        _print_error(_relative(str(error)))
        code = error.exit_code
    except (OSError, MemoryError) as error:
        code = _unclassified(error)
    except KeyboardInterrupt:
        code = EXIT_CODE
    return code


def _unclassified(error: OSError | MemoryError) -> int:
    """Prints an error of the system that is not explained, where it may pass; returns its exit code, or raises it."""
    if isinstance(error, BrokenPipeError):  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    file = getattr(error, "filename", None)
    asked = " ".join(["meshwright", *sys.argv[1:2]]) + (f", with the file {file}" if file else "")
    refusal = ConfigError(asked, reason_of(error), "the same command")
    found = by_class(error, refusal)
    if found is refusal:
        raise error
    _print_error(_relative(str(found)))
    return found.exit_code


def run(args: Sequence[str]) -> int:
    """Runs one command line; returns its exit code. Raises MeshwrightError."""
    args = take_options(args)
    if not args or args[0] in ("-h", "--help"):
        _write_overview()
        return 0
    if args[0] == "--version":
        write(
            f"meshwright {version('meshwright')} (jax {version('jax')}, Python {sys.version.split()[0]})\n"
        )
        return 0
    verb = args[0]
    if verb not in VERBS:
        raise ConfigError(f"meshwright {verb}", "there is no such verb", nearest(verb, VERBS))
    if verb == "recipes":
        return _list_recipes(args[1:])
    with activity("load", "loading libraries", "loaded libraries"):
        verbs = importlib.import_module("meshwright.cli.verbs")
    return verbs.run_verb(verb, args[1:])


def _list_recipes(args: Sequence[str]) -> int:
    """Prints the name of every recipe and its summary, without the libraries that take longer than the answer."""
    if "-h" in args or "--help" in args:
        write(
            f"usage: meshwright recipes [options]\n\n{VERBS['recipes'][1]}\n\noptions:\n  --json  Print JSON.\n"
        )
        return 0
    for arg in args:
        if arg != "--json":
            raise ConfigError(
                f"meshwright recipes {arg}", "recipes has one option, --json", "meshwright recipes"
            )
    recipes = list_recipes()
    write_json(recipes) if args else write(columns(recipes))
    return 0


def module_of(verb: str) -> ModuleType:
    """Imports the module of a verb."""
    return importlib.import_module(f"meshwright.{VERBS[verb][0]}")


def _choose_working_directory(words: Sequence[str]) -> None:
    """Makes modules in the working directory importable where the words name code, and only then.

    Libraries import what is in a folder of theirs there (`jax_plugins`), and a folder may come from a stranger.
    """
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # of `python -m`, which would shadow installed packages
    parts = [part for word in words for part in word.split("=") if not word.startswith("hf:")]
    if any(part == TRUST or part.endswith(".py") or is_reference(part) for part in parts):
        sys.path.append(os.getcwd())


def _own_standard_output() -> None:
    """Leaves standard output to this program: what libraries in C print there goes to standard error.

    Gloo prints on file descriptor 1, in pieces that break lines of --json.
    """
    if sys.stdout is None or sys.stderr is None:
        return
    ours = os.dup(sys.stdout.fileno())
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = Stream(
        os.fdopen(ours, "wb"), sys.stdout.encoding, sys.stdout.errors, line_buffering=True
    )
    sys.stderr = Stream(
        sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True
    )


def _allow_open_files() -> None:
    """Raises the soft limit of open files, often 1,024: tensors, shards of tokens and other hosts each take some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _write_overview() -> None:
    write("usage: meshwright VERB [options]\n\n")
    write(columns({name: summary for name, (_, summary) in VERBS.items()}))
    write(
        f"\n{TRUST} with any verb: run files, plans and checkpoints that it reads may name code to run; with\n"
    )
    write(f"{TRUST}=NAME the code module:attribute or FILE.py:attribute of that name alone.\n")
    write(
        "meshwright VERB --help lists the options of a verb; meshwright --version prints the version.\n"
    )


def _relative(text: str) -> str:
    """Returns a text in which paths in the working directory begin there; parts of other paths stay."""
    return re.sub(rf"(?<![\w./:~-]){re.escape(os.getcwd())}/", "", text)


def _print_error(text: str) -> None:
    text = printable(text, keep="\n\t")
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    with contextlib.suppress(OSError):  # a log on a full disk: the exit code remains
        print("\033[1;31merror:\033[0m" if colored else "error:", text, file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """Exits. Where other processes train along and this one failed, it leaves without waiting for them."""
    jax = sys.modules.get("jax")
    if code and jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
