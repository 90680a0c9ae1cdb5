"""XLA compiler options per chip: the defaults of every verb that compiles for an accelerator.

Found by compiling stacks of layers and whole steps for each chip and simulating their schedules (docs/log.md). A Run's
`compiler_options` start with `auto`, which stands for these; leaving it out gives the compiler's own defaults.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import ConfigError

AUTO = "auto"
"""Word of a Run that stands for the options of the chip."""


@dataclasses.dataclass(frozen=True)
class OptionSet:
    """Compiler options that belong together."""

    summary: str
    """Effect, in a few words."""
    options: Mapping[str, str]
    """Value of each XLA option."""


def _sparse_core(*kinds: str) -> OptionSet:
    """SparseCores move the bytes of a collective while the matrix units compute."""
    return OptionSet(
        "collectives on SparseCore",
        {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in kinds},
    )


def _vmem(mib: int) -> OptionSet:
    """A larger limit lets matmuls and fusions have larger tiles."""
    return OptionSet(f"{mib} MiB of VMEM per operation", {"xla_tpu_scoped_vmem_limit_kib": str(mib * 1024)})


_KINDS = ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter", "all_reduce")

COMPILER_OPTIONS: dict[str, tuple[OptionSet, ...]] = {
    "v5p": (_sparse_core(*_KINDS), _vmem(48)),
    "v6e": (_sparse_core(*_KINDS), _vmem(96)),
    "tpu7x": (_vmem(48),),
}
"""Option sets by chip name (`chips.CHIPS`)."""

SPARSE_CORE_CHIPS = frozenset({"v5p", "v6e", "tpu7x"})
"""Chips whose collectives run on SparseCores beside the matrix units; tpu7x does so without an option."""

GATHERS_IN_LEVELS = frozenset({"v5p"})
"""Chips on which a gather over a closed three-dimensional torus goes in two levels: their compiler makes an all-reduce
of one over all dimensions. On tpu7x it does not, and one gather is faster (docs/log.md)."""


def compiler_options_of(chip: str | None, words: Sequence[str]) -> dict[str, str]:
    """Returns XLA options by name.

    chip: name in `chips.CHIPS`; None has no options of its own.  words: `auto` for the options of the chip, and
    NAME=VALUE, which replaces one of them. Raises ConfigError for a word that is neither.
    """
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word == AUTO:
            for group in COMPILER_OPTIONS.get(chip or "", ()):
                options |= group.options
        elif not equals:
            raise ConfigError(f"compiler option {word!r}", "an option has a name and a value", f"{word}=true, or auto")
        else:
            options[name] = value
    return options


_UNKNOWN = re.compile(r"No such compile option: '?([\w]+)'?")


@functools.lru_cache(maxsize=64)
def refused_options(device: Any, options: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Returns the names of those `options` that the installed compiler of `device` does not know.

    It compiles an empty program with them; older and newer compilers know other options. Raises ConfigError for a value
    that an option does not take.
    """
    import jax  # not needed to look an option up

    sharding = jax.sharding.SingleDeviceSharding(device)
    nothing = jax.ShapeDtypeStruct((), "float32", sharding=sharding)
    refused: list[str] = []
    while True:
        left = {name: value for name, value in options if name not in refused}
        try:
            jax.jit(lambda x: x).lower(nothing).compile(compiler_options=left)
            return tuple(refused)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is None or unknown[1] not in left:
                raise ConfigError(
                    f"compiler options {', '.join(f'{name}={value}' for name, value in left.items())}",
                    str(error).splitlines()[0][:300],
                    "another value, or --training.compiler-options auto",
                ) from error
            refused.append(unknown[1])
