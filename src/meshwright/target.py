"""Hardware that is not here: slices of TPUs that their own compiler compiles for, without a TPU.

libtpu describes a topology to JAX, whose devices can be compiled for and nothing else. Compiling has a process
of its own (`cli/absent.py`): a compiler for hardware that is not there may end the process that calls it.
"""

import dataclasses
import importlib.util
import re
from typing import Any

from meshwright.errors import CensusError, ConfigError, nearest

ENVIRONMENT = {
    # No TPU is asked for, several processes may compile at once, and libtpu does not look for a cloud's metadata.
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}  # fmt: skip

CHIPS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}
"""Name of a TPU -> dimensions of its torus."""


@dataclasses.dataclass(frozen=True)
class Target:
    """`slices` slices of `chip`, each a torus of `topology` chips."""

    chip: str
    topology: tuple[int, ...]
    slices: int

    def __str__(self) -> str:
        size = "x".join(map(str, self.topology))
        return f"{self.slices}*{self.chip}:{size}" if self.slices > 1 else f"{self.chip}:{size}"


def parse_target(text: str) -> Target:
    """`v5p:4x4x8`, or `2*v6e:16x16` for two slices. Raises ConfigError with the nearest chip, or the right form."""
    found = re.fullmatch(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)", text.strip().lower())
    if not found:
        raise ConfigError(f"target {text!r}", "it is CHIP:SIZE, the sizes of the torus joined by x", "v5p:4x4x8")
    slices, chip, size = int(found[1] or 1), found[2], tuple(int(n) for n in found[3].split("x"))
    if chip not in CHIPS:
        raise ConfigError(f"target {text!r}", f"there is no compiler here for {chip!r}", nearest(chip, CHIPS))
    if len(size) != CHIPS[chip] or slices < 1 or min(size) < 1:
        example = "x".join(["4"] * CHIPS[chip])
        raise ConfigError(
            f"target {text!r}", f"the torus of a {chip} has {CHIPS[chip]} dimensions", f"{chip}:{example}"
        )
    return Target(chip, size, slices)


def require_compiler() -> None:
    """Raises CensusError with the one command that installs it where the TPU's compiler is missing."""
    if importlib.util.find_spec("libtpu") is None:
        raise CensusError(
            "compiling for a TPU",
            "its compiler, the package libtpu, is not installed here",
            "pip install 'meshwright[tpu]' (no TPU is needed)",
        )


def devices_of(target: Target) -> list[Any]:
    """Devices that can be compiled for and nothing else. Raises ConfigError for a size that is not built.

    Needs ENVIRONMENT to have been set before JAX was imported.
    """
    from jax.experimental import topologies  # libtpu is loaded here, and only where a target is asked for

    more = {"num_slices": target.slices} if target.slices > 1 else {}
    name = f"{target.chip}:{'x'.join(map(str, target.topology))}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices)
    except Exception as error:
        raise ConfigError(
            f"target {target}",
            f"libtpu knows no such slice: {str(error).splitlines()[0][:200]}",
            f"{target.chip}:{'x'.join('4' * CHIPS[target.chip])}, or another size that is built",
        ) from error
