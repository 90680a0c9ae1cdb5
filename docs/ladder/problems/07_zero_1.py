"""An eighth of the optimizer

Data parallel devices all have the whole weight, and each its own gradient. But nobody has to keep the whole momentum:
each device updates an eighth of the rows (ZeRO-1). The rule is

    m = 0.9 m + mean of the gradients        w = w - 0.1 m

An all-reduce of the gradient would be 2 V. Can the whole step cost no more than that?
"""

from grading import Problem

PROBLEM = Problem(
    lesson="4_memory",
    mesh="data=8",
    takes="w[D, F]; m[D/data, F]; g[N/data, D, F]",
    gives="new_w[D, F]; new_m[D/data, F]",
    small="D=16 F=3 N=8",
    other="D=24 F=5 N=8",
    full="D=8192 F=8192 N=8",
    predict="sent: MB that a device sends in the step",
    arithmetic="2 * 4 * D * F * 7/8",
    because="A reduce-scatter of the gradient, V (n-1)/n, then an all-gather of the weight, the same: together one "
    "all-reduce. The state is an eighth, and no byte was paid for it.",
    hints=(
        "Each device needs the summed gradient of its own rows only. Which collective gives that?",
        "reduce_scatter(g[0], ('data',), 0) / 8, update m, and update the same rows of w: local_shard gives them.",
        "Last, all_gather the updated rows of w. Leave m where it is.",
    ),
)


def one_device(w, m, g):
    """The update with the mean gradient."""
    m = 0.9 * m + g.mean(0)
    return w - 0.1 * m, m


PREDICTION = None


def answer(w, m, g):
    """w: [D, F], alike on all devices; m: [D/8, F], own rows; g[0]: [D, F], the gradient of this device's batch."""
    raise NotImplementedError
