"""Constants of a train step's price that belong neither to the chip nor to arithmetic.

A chip's peaks and achieved fractions are in hardware/chips.toml, latencies
of links in hardware/interconnect.py.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Physics:
    """Constants of a train step, each with its unit and the measurement or count
    that it comes from.

    "GPU" in a name means that the constant has no effect on a TPU,
    where one compiler fuses a whole step.
    """

    gpu_launch_seconds: float = 4e-6
    """Seconds from one kernel's start to the next that a GPU's host can reach: 3.8 us in a row of
    short kernels (NVIDIA, "Getting Started with CUDA Graphs")."""
    collective_launches: int = 3
    """Launches that a collective of GPUs takes besides its bytes and hops: its event, its kernel,
    and the wait for the last device's kernel."""

    residual_copies: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"forward": 10, "recomputation": 8, "backward": 20}
    )
    """Copies of the residual stream, by pass, that a layer's norms, sums and rotations read and
    write besides its matmuls. With sequence parallelism each device has its part of them over
    `tensor`. Each copy takes a launch."""
    gpu_hidden_copies: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"forward": 1.5, "recomputation": 1.5, "backward": 3.0}
    )
    """Copies of the feed-forward's first outputs, gate and up together, that a GPU moves
    in the activation function.

    SwiGLU reads two and writes one; its gradient reads three and writes three, the product among
    them. Compilers of TPUs fuse it into the matmuls."""
    gpu_elementwise: float = 1.1
    """HBM traffic of elementwise kernels on GPUs over the copies counted above. Fitted with the
    published steps of MaxText, which the same compiler writes (bench/foresight/fit.py)."""
    tpu_elementwise: float = 1.5
    """HBM traffic of loop fusions and relayouts on TPUs over the copies counted above: that of the
    fastest step of Llama 3 8B on v6e by its profile; 1.1 in MaxText's, 2 at the median of seven
    (bench/foresight/kinds.py)."""
    sorting_copies: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"forward": 6, "recomputation": 3, "backward": 10}
    )
    """Copies, by pass, of the rows of experts that are read and written besides their matmuls:
    sorted by expert, scaled by the router's weight, sent back and summed."""
    sorting: float = 1.0
    """HBM traffic of the rows of experts over the copies counted above."""
    quantise_bytes: int = 5
    """HBM bytes per element that is quantised: read for the maximum, read and written
    for the conversion, bfloat16."""
    chunk_bytes: Mapping[str, Mapping[str, float]] = dataclasses.field(
        default_factory=lambda: {
            "ring": {"forward": 11, "backward": 23},
            "all_gather": {"forward": 23, "backward": 46},
        }
    )
    """HBM bytes per element of queries, for each device of `context`, in which a GPU sums attention
    to each chunk of keys in float32, by `context_strategy`. Counted in one compiled program each,
    Qwen3-235B on 64 B200 with `context=4`, and divided by `gpu_elementwise`. Recomputed attention
    moves the forward pass' bytes once more."""
    gpu_score_bytes: Mapping[str, tuple[float, float]] = dataclasses.field(
        default_factory=lambda: {
            "forward": (24, 33),
            "recomputation": (24, 33),
            "backward": (26, 72),
        }
    )
    """HBM bytes per attention score, and per element of a block of queries, where a GPU has no
    fused kernel (`Kernels.fused`): XLA writes and reads scores, probabilities, and of each pair of
    blocks queries, keys and sums (models/kernels/blocked.py). Counted in one compiled program,
    Gemma 3 12B on 16 A100, and divided by `gpu_elementwise`."""
    tpu_score_bytes: Mapping[str, tuple[float, float]] = dataclasses.field(
        default_factory=lambda: {"forward": (14, 0), "recomputation": (14, 0), "backward": (32, 0)}
    )
    """The same bytes on a TPU."""

    logit_bytes: int = 4
    """Bytes of a logit, and of its gradient while it is computed: float32."""
    gpu_loss_bytes: float = 24
    """HBM bytes per logit that the loss moves on a GPU: float32 logits written, read for their
    log-sum-exp and for their gradient, and the gradient, written and read by two matmuls. Compilers
    of TPUs fuse it."""
    expert_copies: int = 2
    """Arrays of the rows sent to experts that the backward pass of a layer holds at once: rows in
    the order of their experts, and their gradient (Qwen3-30B-A3B on 8 H100, compiled:
    docs/log.md)."""

    gpu_overlap: float = 0.35
    """Overlapped communication on GPUs over what the chip can overlap (`Efficiency.overlap`).
    Fitted with the published steps of MaxText (bench/foresight/fit.py)."""
    tensor_overlap: float = 1.0
    """Overlapped communication over `tensor` over what the chip can overlap
    (`Efficiency.tensor_overlap`)."""
    overlapped_compute: float = 0.5
    """Fraction of a pass' computation that has transfers beside it, gathers and rows in pieces of
    the batch alike, in programs that are scheduled by predicted times
    (`Settled.scheduled_by_price`). Three compiled programs with more to send than to compute: 0.51
    to 0.58 (docs/log.md)."""
    exchange_overlap: float = 0.4
    """Most of the transfers of such a program that overlap where rows of experts are among them: 32
    to 46 % in five compiled programs (docs/log.md)."""

    communication_multiprocessors: int = 20
    """Multiprocessors of a GPU that collectives take from the computation beside them, a fraction
    of the chip's: DeepSeek-V3 gives 20 of an H800's 132 to its exchange (arXiv:2412.19437, section
    3.2.1). Counted where overlap is that of compiled schedules (`Settled.scheduled_by_price`), in
    which nothing slows; overlap that is fitted to measured steps has it in itself."""


PHYSICS = Physics()
"""Constants of this package's train step."""

MATMUL_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles of a GPU's matmul, rows by columns (NVIDIA, "Matrix Multiplication Background
User's Guide")."""
TILE_REUSE = 16
"""Rows of a tile at which loading its operands takes as long as multiplying them."""
