"""Entry point of the command line: finds the verb, imports its module, prints errors."""

import contextlib
import difflib
import importlib
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType

from meshwright import last_words
from meshwright.activity import activity, watched_by
from meshwright.callers import command_line
from meshwright.cli.interrupt import EXIT_CODE, acknowledge_interrupts
from meshwright.cli.output import Notices, Stream, columns, write, write_json
from meshwright.errors import (
    FOR_NOW,
    ConfigError,
    MeshwrightError,
    by_class,
    class_of,
    first_error,
    nearest,
    reason_of,
)
from meshwright.formatting import printable, relative_paths
from meshwright.launching import LIMIT
from meshwright.runs.catalogue import families, list_recipes, matching, size_of
from meshwright.signs import give_signs
from meshwright.trust import TRUST, is_reference, take_options

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
    "cache": (
        "api.cache",
        "List or delete the token files and copies of buckets that runs keep on this machine.",
    ),
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
        "Compile the step, also for hardware that is not here: memory, communication, FLOPs, "
        "faults.",
    ),
    "launch": ("cli.launch", "Write a scheduler's job file that runs a verb on several hosts."),
    "doctor": ("api.doctor", "Find what is wrong with this host before a run does."),
    "rehearse": (
        "api.rehearsal",
        "Run a plan with a small model on simulated devices: train, stop, resume, evaluate.",
    ),
    "parity": (
        "api.parity",
        "Compare a run on two meshes, with another commit, or with transformers, tensor by tensor.",
    ),
    "view": (
        "api.viewing",
        "Show runs on a page: curves, times, events, samples; --live updates it while they train.",
    ),
    "bench": ("api.benchmarks", "Time collectives or matrix products on the devices found."),
    "recipes": ("", "List the recipes: families in order, each from small to large."),
}
"""Verb -> module with its options, `TrainOptions` of `train` or `ACTIONS` with those of each, and
one line about it."""

_STANDARD_ERROR = 2
"""Number of the last standard stream."""
_OPEN_FILES = 65536
"""Files that a process may have open, where the system lets it."""


def main() -> None:
    """Runs the command `meshwright` and exits."""
    _choose_working_directory(sys.argv[1:])
    _open_closed_streams()
    _own_standard_output()
    _allow_open_files()
    acknowledge_interrupts()
    give_signs()
    counts = LIMIT in os.environ
    code, words = _run_counted(sys.argv[1:]) if counts else _run_explained(sys.argv[1:])
    _leave(code, words)


def _run_counted(args: Sequence[str]) -> tuple[int, str]:
    """Runs a start of a scheduler's job.

    Returns the exit code, which tells the scheduler whether to start it again.
    Returns the last words too, as `_run_explained` does.
    """
    from meshwright.launching.job_starts import job_starts  # only jobs count

    words = ""
    try:
        starts = job_starts(args)
        if starts is None:
            return _run_explained(args)
        starts.begin()
        try:
            code, words = _run_explained(args)
        except Exception:
            code, words = 1, traceback.format_exc()
        return starts.ended(code), words
    except MeshwrightError as error:
        return error.exit_code, words + _error_line(error)


def _run_explained(args: Sequence[str]) -> tuple[int, str]:
    """Runs one command line.

    Returns the exit code and the last words, about the error that ended it.
    Raises what is neither an error of the package nor one of the system that may pass, but for a
    process that trains with others: that leaves without waiting for them, with the traceback as its
    last words.
    """
    try:
        with watched_by(Notices(" ".join(["meshwright", *args[:1]]))):
            return run(args), ""
    except MeshwrightError as error:
        return error.exit_code, _error_line(error)
    except KeyboardInterrupt:
        return EXIT_CODE, ""
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0, ""
    except Exception as error:
        with command_line():
            first = first_error(error) or _unavailable(error)
        if first is not None:
            return first.exit_code, _error_line(first)
        if not _trains_with_others():
            raise
        return 1, traceback.format_exc()


def _unavailable(error: Exception) -> MeshwrightError | None:
    """Returns what to say about an unexplained error of the system that may pass.

    None for other errors.
    """
    if not isinstance(error, OSError | MemoryError) or class_of(error) not in FOR_NOW:
        return None
    file = getattr(error, "filename", None)
    asked = " ".join(["meshwright", *sys.argv[1:2]]) + (f", with the file {file}" if file else "")
    return by_class(error, ConfigError(asked, reason_of(error), "the same command"))


def run(args: Sequence[str]) -> int:
    """Runs one command line; returns its exit code. Raises MeshwrightError, which names options."""
    with command_line():
        return _run(args)


def _run(args: Sequence[str]) -> int:
    args = take_options(args)
    if not args or args[0] in ("-h", "--help"):
        _write_overview()
        return 0
    if args[0] == "--version":
        write(
            f"meshwright {version('meshwright')} (jax {version('jax')}, Python "
            f"{sys.version.split()[0]})\n"
        )
        return 0
    verb = args[0]
    if verb not in VERBS:
        raise ConfigError(f"meshwright {verb}", "there is no such verb", nearest(verb, VERBS))
    if verb == "recipes":
        return _list_recipes(args[1:])
    with activity("load", "loading libraries", "loaded libraries"):
        verbs = _import_verbs()
    return verbs.run_verb(verb, args[1:])


def _import_verbs() -> ModuleType:
    """Imports the runner of verbs, and JAX with it.

    Raises ConfigError for a variable of the environment that JAX refuses while it is imported.
    """
    try:
        return importlib.import_module("meshwright.cli.verbs")
    except ValueError as error:
        variables = " ".join(f"{k}={v}" for k, v in os.environ.items() if k.startswith("JAX_"))
        if not variables:
            raise
        fix = "a value that JAX knows, or unset the variable"
        raise ConfigError(variables, reason_of(error), fix) from error


def _list_recipes(args: Sequence[str]) -> int:
    """Prints the recipes that match the words.

    Libraries that take longer than the answer are not loaded.
    """
    if "-h" in args or "--help" in args:
        write(
            f"usage: meshwright recipes [WORD ...] [options]\n\n{VERBS['recipes'][1]}\n\n"
            "WORD: only recipes with every word in their name or description, such as `qwen` or "
            "`experts`.\n\n"
            "options:\n  --json  Print JSON.\n"
        )
        return 0
    words = [arg for arg in args if not arg.startswith("-")]
    for arg in args:
        if arg.startswith("-") and arg != "--json":
            raise ConfigError(
                f"meshwright recipes {arg}", "recipes has one option, --json", "meshwright recipes"
            )
    every = list_recipes()
    found = matching(every, words)
    if not found:
        raise ConfigError(
            f"meshwright recipes {' '.join(words)}",
            f"none of the {len(every)} recipes has all of these words",
            " ".join(
                ["meshwright recipes", *difflib.get_close_matches(words[0], families(every), 1)]
            ),
        )
    if "--json" in args:
        write_json(found)
        return 0
    widest = max(map(len, found))
    write(columns({f"{name:{widest}} {size_of(text):>7}": text for name, text in found.items()}))
    return 0


def module_of(verb: str) -> ModuleType:
    """Imports the module of a verb."""
    return importlib.import_module(f"meshwright.{VERBS[verb][0]}")


def _choose_working_directory(words: Sequence[str]) -> None:
    """Makes modules in the working directory importable where the words name code, and only then.

    Libraries import what is in a folder of theirs there (`jax_plugins`), and a folder may come from
    a stranger.
    """
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # of `python -m`, which would shadow installed packages
    parts = [part for word in words for part in word.split("=") if not word.startswith("hf:")]
    if any(part == TRUST or part.endswith(".py") or is_reference(part) for part in parts):
        sys.path.append(os.getcwd())


def _open_closed_streams() -> None:
    """Opens standard streams that were closed (`>&-`), so that what is written there is discarded.

    Otherwise the next file that is opened would have their number, and get what C libraries print.
    """
    number = os.open(os.devnull, os.O_RDWR)
    while number <= _STANDARD_ERROR:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STANDARD_ERROR, "w", closefd=False)


def _own_standard_output() -> None:
    """Reserves standard output for this program.

    What C libraries print there goes to standard error.
    Gloo prints on file descriptor 1, in pieces that break lines of --json.
    """
    ours = os.dup(sys.stdout.fileno())
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    errors = sys.stdout.errors
    if errors == "strict":  # PYTHONIOENCODING=ascii: what it lacks is escaped, as on standard error
        errors = "backslashreplace"
    sys.stdout = Stream(os.fdopen(ours, "wb"), sys.stdout.encoding, errors, line_buffering=True)
    sys.stderr = Stream(
        sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True
    )


def _allow_open_files() -> None:
    """Raises the soft limit of open files, often 1,024.

    Tensors, shards of tokens and other hosts each take some.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _write_overview() -> None:
    write("usage: meshwright VERB [options]\n\n")
    write(columns({name: summary for name, (_, summary) in VERBS.items()}))
    write(
        f"\n{TRUST} with any verb: run files, plans and checkpoints that it reads may name code "
        f"to run; with\n"
    )
    write(f"{TRUST}=NAME the code module:attribute or FILE.py:attribute of that name alone.\n")
    write(
        "meshwright VERB --help lists the options of a verb; meshwright --version prints the "
        "version.\n"
    )


def _error_line(error: MeshwrightError) -> str:
    notes = "".join(f"\n  note:    {note}" for note in getattr(error, "__notes__", ()))
    text = printable(relative_paths(f"{error}{notes}"), keep="\n\t")
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return ("\033[1;31merror:\033[0m" if colored else "error:") + f" {text}\n"


def _trains_with_others() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def _leave(code: int, words: str) -> None:
    """Prints the last words and exits.

    After a failure among other processes it waits for none of them.
    """
    if (code and _trains_with_others()) or last_words.waits_for_nothing():
        last_words.leave(code, words)
    if words:
        with contextlib.suppress(OSError):  # a log on a full disk: the exit code remains
            print(words, end="", file=sys.stderr, flush=True)
    _drop_unwritten_output()
    sys.exit(code)


def _drop_unwritten_output() -> None:
    """Discards output that could not be written, such as to a full disk, after its error was said.

    Python would flush it again at its end, fail, and exit with 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
