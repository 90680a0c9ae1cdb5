"""Importing the package changes nothing in the process: loggers, hooks, warnings, environment, options, signals."""

import json
import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import importlib, importlib.util, json, logging, os, pkgutil, signal, sys, threading, warnings

    # Effects of other packages' imports come first.
    for name in (
        "jax", "jax.experimental.pallas", "jax.experimental.mesh_utils", "jax.experimental.multihost_utils",
        "jax.experimental.shard_map", "grain", "msgspec", "numpy", "optax", "optax.contrib",
        "pyarrow", "rich.console", "tokenizers", "tyro", "libtpu", "matplotlib", "tensorboardX",
    ):
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    import jax

    def snapshot():
        loggers = {"root": logging.getLogger(), **logging.Logger.manager.loggerDict}
        return {
            "loggers": {
                name: [
                    logger.level, logger.disabled, logger.propagate,
                    [repr(h) for h in logger.handlers], [repr(f) for f in logger.filters],
                ]
                for name, logger in loggers.items()
                # A logger that a module merely names has no effect.
                if isinstance(logger, logging.Logger)
                and (logger.level or logger.disabled or logger.handlers or logger.filters or not logger.propagate)
            },
            "disabled below": logging.root.manager.disable,
            "hooks": [
                repr(hook) for hook in (
                    sys.unraisablehook, sys.excepthook, threading.excepthook, sys.displayhook, sys.breakpointhook,
                )
            ],
            "tracing": [repr(sys.gettrace()), repr(sys.getprofile())],
            "streams": [repr(sys.stdin), repr(sys.stdout), repr(sys.stderr)],
            "warnings": [repr(f) for f in warnings.filters],
            "environment": dict(os.environ),
            "jax": {name: repr(value) for name, value in jax.config.values.items()},
            "backends": sorted(jax._src.xla_bridge._backends),
            "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
            "path": list(sys.path),
            "folder": os.getcwd(),
            "recursion limit": sys.getrecursionlimit(),
            "threads": sorted(thread.name for thread in threading.enumerate()),
        }

    before = snapshot()
    import meshwright

    modules = [module.name for module in pkgutil.walk_packages(meshwright.__path__, "meshwright.")]
    for module in modules:
        importlib.import_module(module)
    for name in meshwright.__all__:
        getattr(meshwright, name)
    after = snapshot()
    changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
    print(json.dumps({"modules": modules, "changed": changed}, default=repr))
    """
)


def test_importing_every_module_changes_nothing_in_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert {
        "meshwright.checkpoint.checkpoints",
        "meshwright.cli.main",
        "meshwright.__main__",
    } <= set(result["modules"])
    assert result["changed"] == {}
    assert not done.stderr
