"""An embedding in rows

Each of eight devices has an eighth of the rows of the embedding table: device 0 those of the tokens 0 to V/8 - 1, and
so on. All devices have the same tokens. Look them up.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="6_tensor_parallel",
    mesh="tensor=8",
    takes="tokens<V[T]; w[V/tensor, D]",
    gives="x[T, D]",
    gradients="w",
    small="T=24 V=32 D=5",
    other="T=40 V=48 D=7",
    full="T=16384 V=131072 D=4096",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="2 * 4 * T * D * 7/8",
    because="One all-reduce of the embedded tokens, in which every row is zero on all devices but one. The table, "
    "eight times as large here, stays where it is; backward each device scatters into its own rows and sends "
    "nothing.",
    hints=(
        "A device knows the rows of its own tokens. What should it contribute for the others, if contributions are "
        "summed?",
        "Subtract the first token of the device; outside of 0 to V/8 - 1 look up anything (clip) and replace it by "
        "zero.",
        "jnp.where(mask[:, None], rows, 0), then all_reduce. The cotangent of x is the same everywhere: not psum.",
    ),
)


def one_device(tokens, w):
    """Rows of the whole table."""
    return w[tokens]


PREDICTION = None


def answer(tokens, w):
    """tokens: [T], alike on all devices; w: the rows of this device, [V/8, D]. Returns [T, D], complete."""
    raise NotImplementedError
