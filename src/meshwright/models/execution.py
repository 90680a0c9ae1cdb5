"""How a run's forward and backward pass are computed on its machine: kernels, gathers, sums,
splits and pieces.

`runs.settle.execution_of` makes these decisions once, and they are passed on as they are: to the
model on one device (`models.forward.LocalModel`), and to every layer as a part of its
`ForwardContext`.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from meshwright.comm.hierarchical import DcnAxis
from meshwright.models.blocks.layers import SumRows, scatter_rows
from meshwright.models.kernels.attention import Kernels
from meshwright.models.remat import SaveHidden, save_as_it_is
from meshwright.sharding.sequence import SequenceSplit

if TYPE_CHECKING:
    from meshwright.models.preferences import Preferences
    from meshwright.models.recording import Tap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Decisions that every forward and backward pass of a run follows;
    they hold for every batch."""

    gather_params: Any
    """`(params, path) -> weights`: gathers a subtree over `fsdp` in the compute dtype."""
    links: DcnAxis
    """Levels of links under the mesh axes, over which gradients are summed."""
    summed_in_backward: Any
    """Tree of the batch axes over which the backward pass sums each parameter's
    gradient (runs/settle.py)."""
    sequence: SequenceSplit
    """Positions of the sequence on each device of `context`."""
    kernels: Kernels
    """Attention kernel."""
    grouped_matmul: Any = None
    """`(rows, weights, rows of each expert) -> rows times each of their expert's weights`
    (kernels/choose.py); None in models without experts."""
    sum_rows: SumRows = scatter_rows
    """Sums the gradients of the rows of a table that are taken several times (blocks/layers.py)."""
    save_hidden: SaveHidden = save_as_it_is
    """Names the outputs of the feed-forward's first matmuls (models/remat.py)."""
    expert_axes: tuple[str, ...] = ("expert",)
    """Axes that split experts (sharding/layouts.py)."""
    expert_nodes: int = 1
    """Groups of their devices between which a token has one row (runs/settle.py)."""
    gathered_ahead: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = dataclasses.field(
        default_factory=dict
    )
    """Parameters that are gathered one layer ahead, by stack: for passes that begin at a layer's
    start, and for those that begin with its feed-forward half. Other stacks gather all in their own
    layer."""
    tensor_strategy: Literal["gather", "ring"] = "gather"
    """Whether the sequence is gathered over `tensor` and scattered,
    or its chunks go around a ring during matmuls."""
    attention_pieces: int = 1
    """Most pieces of the batch in which attention and its output projection are computed;
    1 is all at once."""
    exchange_pieces: int = 1
    """Most pieces of the batch that layers with experts compute one after another;
    1 is all at once."""
    saves_weights: bool = True
    """Whether a remat policy that saves everything saves gathered weights;
    frozen ones are computed again."""
    preferences: "Preferences | None" = None
    """Loss of preferences, instead of that of tokens (models/preferences.py)."""
    tap: "Tap | None" = None
    """Records the step's named tensors (models/recording.py);
    None records none and adds nothing to the program."""

    @property
    def permutes(self) -> bool:
        """Whether a layer sends values around a ring of devices: attention
        in a ring, collective matmuls."""
        return self.sequence.is_ring or self.tensor_strategy == "ring"
