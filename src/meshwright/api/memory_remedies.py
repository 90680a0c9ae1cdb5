"""Errors about memory with their numbers and the cheapest changes that help.

The planner and the census are imported when a step does not fit, not by every training.
"""

import contextlib
from collections.abc import Iterator

import jax

from meshwright.errors import ConfigError
from meshwright.formatting import format_bytes
from meshwright.hardware.mesh import default_cache_folder
from meshwright.step.device_memory import OutOfDeviceMemory, Room
from meshwright.trainer.loop import Trainable

_GENERAL = "a smaller --batch, more --training.microbatches, or --training.remat full (see meshwright prove)"


@contextlib.contextmanager
def memory_explained(prepared: Trainable) -> Iterator[None]:
    """Raises OutOfDeviceMemory with remedies in the place of one without, and of XLA's RESOURCE_EXHAUSTED."""
    try:
        yield
    except OutOfDeviceMemory as error:
        over = 0 if error.needed is None or error.available is None else error.needed - error.available.bytes
        fix = _remedies(prepared, over)
        raise OutOfDeviceMemory(error.asked, error.needed, error.available, fix) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        from meshwright.analysis.compile import OutOfMemory, compiler_error

        run, shape = prepared.device_run.run, prepared.device_run.shape
        refused = compiler_error(error)
        needed, available = None, None
        if isinstance(refused, OutOfMemory):  # the compiler's own sizes
            needed, available = int(refused.required), Room(int(refused.available), "a device")
        over = 0 if needed is None or available is None else needed - available.bytes
        fix = _remedies(prepared, over)
        raise OutOfDeviceMemory(f"training {run.name} on mesh {shape}", needed, available, fix) from error


def _remedies(prepared: Trainable, over: int) -> str:
    """Returns the cheapest options that save `over` bytes per device, with their cost where the chip is known."""
    from meshwright.bench.calibration_file import calibration_path, read_calibration
    from meshwright.planner.explain import memory_remedies
    from meshwright.planner.forecast import local_target

    placed = getattr(prepared.device_run, "placed", None)
    file = calibration_path(default_cache_folder())
    devices = list(prepared.device_run.mesh.devices.flat)
    known = local_target(devices, read_calibration(file) if file.is_file() else None)
    if placed is None or known is None:
        return _GENERAL
    try:
        remedies = memory_remedies(placed.run, known[0], placed.shape, over)
    except ConfigError:
        return _GENERAL
    if not remedies:
        return _GENERAL
    return "one of\n" + "\n".join(
        f"    {r.option}: saves {format_bytes(r.saved_bytes)} per device, {r.extra_seconds:+.3g} s per step"
        for r in remedies
    )
