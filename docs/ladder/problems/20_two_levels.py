"""Two levels

Two nodes of four GPUs. Inside a node NVLink carries 450 GB/s for each GPU, between nodes the network 50. Each GPU has a
gradient of V numbers, and all need the sum. One all-reduce over both axes is right; how many bytes must really go
through the slow link?
"""

from grading import Problem

PROBLEM = Problem(
    lesson="13_plan_and_proof",
    mesh="node=2, gpu=4",
    takes="g[N/node+gpu, V]",
    gives="total[V]",
    small="N=8 V=24",
    other="N=8 V=40",
    full="N=8 V=268435456",
    predict="sent: MB that a device sends over both axes together",
    arithmetic="2 * (4 * V * 3/4) + 2 * (4 * V/4 * 1/2)",
    because="A reduce-scatter inside the node leaves a quarter on each GPU; only that quarter crosses the network, "
    "2 x V/4 x 1/2; a gather inside the node completes it. All eight GPUs share the crossing, and 1/7 of the bytes "
    "are on the slow link instead of all.",
    machines="h100:2x4 2*v5p:2x2x1",
    hints=(
        "After a reduce-scatter over gpu, each GPU has a quarter of its node's sum. Who has the other node's same "
        "quarter?",
        "An all_reduce over node of that quarter gives the quarter of the total.",
        "Last, all_gather over gpu. Three collectives, dimension 0, and g[0] is the device's gradient.",
    ),
)


def one_device(g):
    """The sum."""
    return g.sum(0)


PREDICTION = None


def answer(g):
    """g[0]: the gradient of this device, [V]. Returns the sum over all eight, [V]. Axes: `node`, `gpu`."""
    raise NotImplementedError
