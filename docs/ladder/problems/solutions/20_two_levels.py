"""Solution of problem 20: try first, three hints are free."""

from grading import mistake

from meshwright.comm.collectives import all_gather, all_reduce, reduce_scatter

NODE, GPU = ("node",), ("gpu",)


def reference(g):
    return all_gather(all_reduce(reduce_scatter(g[0], GPU, 0), NODE), GPU, 0)


@mistake("result", "Each node has its own sum: nothing crosses the network, and two models train.")
def inside_only(g):
    return all_reduce(g[0], GPU)


@mistake("result", "A mean of eight, where the sum is asked.")
def mean(g):
    return reference(g) / 8


@mistake(
    "bytes",
    "One all-reduce over both axes: the ring goes through the network with all V numbers. As many bytes in all, seven "
    "times as many on the slow link.",
)
def flat(g):
    return all_reduce(g[0], (*NODE, *GPU))


@mistake(
    "bytes",
    "An all-reduce in the node, then one between nodes: each of the four GPUs sends the same V numbers over the "
    "network. Let each send a quarter.",
)
def each_sends_all(g):
    return all_reduce(all_reduce(g[0], GPU), NODE)
