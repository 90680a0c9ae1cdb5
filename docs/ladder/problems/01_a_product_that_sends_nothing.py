"""A product that sends nothing

The compiler multiplies sharded arrays wherever they are, and sends what it must. Here it multiplies `x` by `w` on a
4 x 2 mesh and has to leave `y` split over both axes. Place `x` and `w` so that no device sends a single byte, and none
holds more of either than it uses.

Return two `PartitionSpec`s, for `x[B, D]` and for `w[D, F]`.
"""

from grading import Problem
from jax.sharding import PartitionSpec as P

PROBLEM = Problem(
    lesson="1_arrays",
    mesh="data=4, tensor=2",
    takes="x[B, D]; w[D, F]",
    gives="y[B/data, F/tensor]",
    small="B=16 D=8 F=8",
    other="B=24 D=12 F=16",
    full="B=16384 D=4096 F=16384",
    predict="memory: MB that a device holds of x, w and y together",
    arithmetic="4 * (B/4 * D + D * F/2 + B/4 * F/2)",
    because="A block has the array's bytes over the product of the axes that split it. Every device needs the rows "
    "of x that its block of y has, and the columns of w: nothing else, and all of it is at home.",
    hints=(
        "y[i, j] needs row i of x and column j of w. Which rows and columns does the block of one device need?",
        "The contracted dimension D must be complete on every device, or partial sums have to be added.",
        "An axis that splits the rows of y splits the rows of x; one that splits its columns splits those of w.",
    ),
)


def one_device(x, w):
    """The product."""
    return x @ w


def program(answer, mesh):
    """The product as the compiler partitions it, with the placements of `answer`."""
    return one_device, list(answer()), [P("data", "tensor")]


PREDICTION = None


def answer():
    """Returns the PartitionSpec of x and that of w."""
    raise NotImplementedError
