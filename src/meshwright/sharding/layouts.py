"""Sharding strategies as a table of layouts.

A new strategy is a new row, or a `Layout` from outside the package.
"""

from meshwright import plugins
from meshwright.errors import ConfigError
from meshwright.sharding.placement import Layout
from meshwright.words import AXES, DIMENSIONS

# Axes that shard the vocabulary. Embedding and loss are spread over all pipeline stages, so that no
# stage has more of them than another and none waits (Yeung et al. 2024, arXiv:2411.05288).
VOCAB_AXES: tuple[str, ...] = ("stage", "tensor")

# Tensor parallelism as Megatron does it (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the
# first matrix of a pair by columns, the second by rows. Layers lie on pipeline stages (stages.py).
MEGATRON: dict[str, tuple[str, ...]] = {
    "L": ("stage",),
    "N": ("tensor",),
    "K": ("tensor",),
    "F": ("tensor",),
    "V": VOCAB_AXES,
    "E": ("expert",),
}

# Parallel folding (Liu et al. 2025, arXiv:2504.14960): the devices that split a sequence and its
# heads for attention split the experts too, innermost in the mesh. An expert keeps its full width:
# F takes the axes that E leaves.
FOLDED: dict[str, tuple[str, ...]] = {**MEGATRON, "E": ("expert", "context", "tensor")}

_FSDP = ("fsdp", "expert")
LAYOUTS: dict[str, Layout] = {
    "fsdp": Layout(
        MEGATRON,
        _FSDP,
        _FSDP,
        "parameters and optimizer state over fsdp (ZeRO-3), replicated over data (HSDP)",
    ),
    "zero1": Layout(
        MEGATRON,
        _FSDP,
        (*_FSDP, "data"),
        "as fsdp, with the optimizer state sharded over data as well (ZeRO-1)",
    ),
    "folded": Layout(
        FOLDED,
        _FSDP,
        _FSDP,
        "as fsdp, with experts split over expert, context and tensor (parallel folding)",
    ),
    "folded_zero1": Layout(
        FOLDED,
        _FSDP,
        (*_FSDP, "data"),
        "as folded, with the optimizer state sharded over data as well (ZeRO-1)",
    ),
}

# Axes that shard the batch, outermost first. Outside of experts, `expert` shards parameters and
# batch like `fsdp`, so that no two devices do the same work.
BATCH_AXES: tuple[str, ...] = ("data", "fsdp", "expert")

# Axes that shard tokens: sums over all tokens go over these.
TOKEN_AXES: tuple[str, ...] = (*BATCH_AXES, "context")


def find_layout(name: str) -> Layout:
    """Returns the layout called `name`: a row of LAYOUTS, or a `Layout` as `module:attribute`.

    Raises ConfigError with the nearest name, and for a layout that the step cannot compute with.
    """
    found = plugins.resolve("layout", name, LAYOUTS)
    layout = plugins.expect(found, Layout, f"layout {name!r}", "a meshwright `Layout`")
    _check_layout(name, layout)
    return layout


def _check_layout(name: str, layout: Layout) -> None:
    asked = f"layout {name!r}"
    for letter, axes in (*layout.table.items(), *layout.at_rest.items()):
        if letter not in DIMENSIONS or not set(axes) <= AXES.keys():
            raise ConfigError(
                asked,
                f"{letter}: {axes} is not a dimension letter with mesh axes",
                f"letters {', '.join(DIMENSIONS)}; axes {', '.join(AXES)}",
            )
    for letter, axes in MEGATRON.items():
        # The model's collectives are written for these axes; another table would give wrong
        # numbers, not an error.
        if layout.table.get(letter, ()) not in (axes, FOLDED[letter]):
            raise ConfigError(
                asked,
                f"it shards {letter} in use over {layout.table.get(letter, ())}, and the models "
                f"compute with {letter} over {axes}",
                f"{letter}: {axes} as in meshwright.sharding.layouts.MEGATRON, and other axes in "
                "`at_rest`",
            )
    if "L" in layout.at_rest:
        raise ConfigError(
            asked,
            "layers are gathered one at a time, so L is sharded over stage only",
            "`at_rest` without L",
        )
    missing = set(layout.params_over) - set(layout.optimizer_over)
    if missing:
        raise ConfigError(
            asked,
            f"optimizer_over lacks {', '.join(sorted(missing))} of params_over",
            "optimizer state sharded over all axes that shard the parameters",
        )
