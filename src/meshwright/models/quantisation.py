"""Recipes of low-precision matmuls: formats, scales, and the chips that gain from them (`--training.matmul-precision`).

Sources: fp8 formats and training with them, Micikevicius et al. 2022 (arXiv:2209.05433); MXFP8, OCP
Microscaling Formats 1.0. The products are in blocks/quantised.py.
"""

import dataclasses
from typing import Literal

from meshwright import plugins
from meshwright.errors import ConfigError
from meshwright.hardware.chips import CHIPS, Chip
from meshwright.hardware.machine import Machine
from meshwright.sharding.params import LOW_PRECISION_ROLES, Param

SCOPE = "low precision"
"""Named scope of the matmuls, by which the census finds them in the compiled program."""
IN_COMPUTE_DTYPE = "embedding, unembedding, norms, router, attention itself and the experts' grouped matmuls"
"""Computations that stay in the compute dtype."""


@dataclasses.dataclass(frozen=True)
class MatmulPrecision:
    """Recipe of low-precision matmuls: formats of the operands, and what shares a scale.

    Example:
        >>> from meshwright.models.quantisation import MatmulPrecision
        >>> MatmulPrecision("fp8_e4m3", "e4m3 for gradients too", "fp8", "tensor", gradient="float8_e4m3fn").operand
        'float8_e4m3fn'
    """

    name: str
    """Name in options, logs and lints."""
    summary: str
    """One-line description."""
    rate: Literal["fp8", "int8", "mxfp8", "nvfp4"]
    """Peak of a chip that it uses: the field `flops_fp8`, `flops_int8`, `flops_mxfp8` or `flops_nvfp4`."""
    scaling: Literal["tensor", "row", "mx"]
    """What shares a scale: a device's block of a tensor; a row or column of an operand; or MX blocks of `block`
    elements along the contracted dimension, with exponents for scales."""
    operand: str = "float8_e4m3fn"
    """Format of activations and weights."""
    gradient: str = "float8_e5m2"
    """Format of the gradients of activations."""
    block: int = 0
    """Elements of a block, for the scaling `mx`."""

    def __post_init__(self) -> None:
        if self.scaling != "row" and "int8" in (self.operand, self.gradient):
            raise ConfigError(
                f"matmul precision {self.name!r}: int8 scaled by {self.scaling}",
                "an integer's step is its scale, which rows and columns must share",
                'scaling="row"',
            )


RECIPES: dict[str, MatmulPrecision] = {
    recipe.name: recipe
    for recipe in (
        MatmulPrecision("fp8", "e4m3, gradients e5m2, one scale per tensor and device", "fp8", "tensor"),
        MatmulPrecision("fp8_rowwise", "e4m3, gradients e5m2, a scale per row and column", "fp8", "row"),
        MatmulPrecision(
            "mxfp8", "e4m3 in blocks of 32 with e8m0 scales (OCP MX)", "mxfp8", "mx", gradient="float8_e4m3fn", block=32
        ),
        MatmulPrecision("int8", "int8, a scale per row and column", "int8", "row", operand="int8", gradient="int8"),
    )
}
"""Recipes by the name that `--training.matmul-precision` takes."""


def find_precision(name: str) -> MatmulPrecision:
    """Returns the recipe called `name`: a row of RECIPES, or a `MatmulPrecision` named as `module:attribute`."""
    recipe = plugins.resolve("matmul precision", name, {**RECIPES, "compute": None})
    if not isinstance(recipe, MatmulPrecision):
        raise ConfigError(
            f"--training.matmul-precision {name}", f"it is a {type(recipe).__name__}", "a meshwright MatmulPrecision"
        )
    return recipe


def is_low_precision(p: Param) -> bool:
    """Whether the matmuls of a weight are in low precision where the Run asks for it."""
    return p.role in LOW_PRECISION_ROLES and "E" not in p.dims


def check_precision(name: str, machine: Machine) -> None:
    """Raises ConfigError where a machine gains nothing from a recipe; the CPU simulates them all.

    An accelerator that is not in `CHIPS` is left to its compiler.
    """
    if name == "compute":
        return
    recipe, chip = find_precision(name), machine.chip
    if recipe.rate == "nvfp4" and not machine.installed:
        raise ConfigError(
            f"--training.matmul-precision {name}",
            "it is in NVFP4, of which XLA has no product: its steps can be priced, and not run",
            "--training.matmul-precision mxfp8",
        )
    if not machine.simulated and chip is not None and peak_flops(chip, recipe) is None:
        fast = [n for n, r in RECIPES.items() if peak_flops(chip, r) is not None]
        having = [n for n, c in CHIPS.items() if peak_flops(c, recipe) is not None]
        raise ConfigError(
            f"--training.matmul-precision {name} on {chip.name}",
            f"it has no flops_{recipe.rate} (hardware/chips.py): its compiler gains nothing from such operands; "
            f"{', '.join(having)} have",
            f"--training.matmul-precision {' or '.join((*fast, 'compute'))}",
        )


def peak_flops(chip: Chip, recipe: MatmulPrecision) -> float | None:
    """Returns the peak FLOP/s of a chip in a recipe, None where it gains nothing."""
    peak: float | None = getattr(chip, f"flops_{recipe.rate}")
    return peak
