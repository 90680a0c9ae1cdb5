# %% [markdown]
# # 3. Data parallel and FSDP
#
# **The question.** Eight devices train one classifier on one batch. Each can have all parameters and an eighth of the
# batch, or an eighth of both. What does either send in a step, what does it keep, and when is the sending free?
#
# *Data parallel* replicates parameters and optimizer state, and averages the gradients. *FSDP* (ZeRO-3) splits all
# three, gathers each parameter where it is used, and scatters its gradient. Both use the same description of the
# parameters here; only the layout changes.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import functools

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm.collectives import (
    all_gather,
    all_reduce,
    axis_index,
    reduce_scatter,
    sum_gradients,
    with_transpose,
)
from meshwright.config import MeshShape
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.mesh import build_mesh
from meshwright.models.blocks.layers import Dropout, dropout_key
from meshwright.sharding.initial_values import init_params
from meshwright.sharding.params import Param, named_leaves, tree_map
from meshwright.sharding.placement import Layout, axes_of, notation, place_param, to_spec
from meshwright.views.draw import picture_of, side_by_side

mesh = build_mesh(MeshShape(data=8))
description = {
    "input_dense": {"kernel": Param((784, 512), "DF", std=784**-0.5), "bias": Param((512,), "F", "zeros")},
    "output_dense": {"kernel": Param((512, 10), "FV", std=512**-0.5), "bias": Param((10,), "V", "zeros")},
}

# %% [markdown]
# ## The picture: two layouts
#
# Data parallel splits no parameter. FSDP splits the largest dimension that divides, of every matrix with at least
# `2**4` elements: both kernels. The biases stay replicated, as all vectors do: they are few bytes, and a gather of 64
# floats takes as long as one of a thousand.

# %%
replicated = Layout({}, params_over=(), optimizer_over=(), summary="whole everywhere")
sharded = Layout({}, params_over=("data",), optimizer_over=("data",), summary="split over data")


def place(layout):
    shape = MeshShape(data=8)
    return tree_map(lambda p: place_param("", p.shape, p.dims, layout=layout, mesh=shape, min_size=2**4), description)


def specs_of(layout):
    placements = place(layout)
    return tree_map(lambda p, placement: to_spec(placement.at_rest), description, placements)


for name, layout in (("data parallel", replicated), ("FSDP", sharded)):
    print(name)
    placed, specs = named_leaves(place(layout)), named_leaves(specs_of(layout))
    for path, p in named_leaves(description).items():
        print(f"  {path:20} {notation('w', p.dims, placed[path].at_rest):15} {specs[path]}")
side_by_side(
    picture_of("replicated", (784, 512), "DF", ((), ()), {"data": 8}),
    picture_of("FSDP", (784, 512), "DF", (("data",), ()), {"data": 8}),
)

# %% [markdown]
# ## The arithmetic
#
# Let P be the number of parameters, n the devices. In float32 with Adam a parameter takes 4 bytes and two moments of 4:
# data parallel keeps 12 P bytes on every device, FSDP 12 P / n. With gradients sent in bfloat16 (2 bytes):
#
# - data parallel sends one all-reduce: 2 x 2P (n-1)/n bytes;
# - FSDP sends a gather for the forward pass, one for the backward pass, and a reduce-scatter: 3 x 2P (n-1)/n bytes.
#   That is half as much again, for an n-th of the memory.
#
# A device spends 6 P T FLOPs on T tokens, four of the six in the backward pass. The gradients' all-reduce is overlapped
# with it while 4 P T / peak > 4 P / bandwidth, so while **T > peak / bandwidth**: the size of the model cancels. For
# FSDP both sides are half as much again, and the answer is the same.

# %%
for name, chip, bandwidth in (
    ("TPU v5p, one ring", CHIPS["v5p"], 2 * CHIPS["v5p"].interconnect.link_bandwidth),
    ("H100, NVLink", CHIPS["h100"], CHIPS["h100"].interconnect.link_bandwidth),
    ("H100, network", CHIPS["h100"], CHIPS["h100"].network_bandwidth),
):
    tokens = chip.flops_bf16 / bandwidth
    print(
        f"{name:18} {chip.flops_bf16 / 1e12:.0f} TFLOP/s / {bandwidth / 1e9:.0f} GB/s = {tokens:,.0f} tokens a device"
    )
for name, devices in (("data parallel", 1), ("FSDP on 8", 8), ("FSDP on 64", 64)):
    print(f"8B parameters, {name:13} 12 x 8.03e9 / {devices:2} = {12 * 8.03 / devices:5.1f} GB of an H100's 80 GB")

# %% [markdown]
# ## The step
#
# Parameters are gathered where they are used; the derivative of the gather scatters the mean of the gradients.
# Gradients of replicated parameters are averaged by `mean_gradients`. Four microbatches are accumulated. Metrics are
# (sum, count), so that they add up over devices and microbatches. Dropout depends on the step and on a sample's index
# in the batch, not on the device that holds the sample.

# %%
optimizer = optax.adamw(1e-3)
MICROBATCHES = 4


def forward(params, x, dropout):
    h = x.astype(jnp.bfloat16) @ params["input_dense"]["kernel"].astype(jnp.bfloat16)
    h = jax.nn.silu(h + params["input_dense"]["bias"].astype(jnp.bfloat16))
    h = dropout(h[:, None], 0)[:, 0]
    out = h @ params["output_dense"]["kernel"].astype(jnp.bfloat16)
    return (out + params["output_dense"]["bias"].astype(jnp.bfloat16)).astype(jnp.float32)


@with_transpose(lambda g, axes, dim: reduce_scatter(g, axes, dim) / jax.lax.axis_size(axes))
def all_gather_mean(x, axes, dim):
    return all_gather(x, axes, dim)


def mean_gradients(grads, axes):
    return jax.tree.map(lambda g, over: g / jax.lax.axis_size(over) if over else g, sum_gradients(grads, axes), axes)


def build(layout, average=mean_gradients):
    placements, specs = place(layout), specs_of(layout)
    replicated_over = tree_map(
        lambda p, placement: () if "data" in axes_of(placement.at_rest) else ("data",), description, placements
    )

    def gather(param, placement):
        dim = next((d for d, axes in enumerate(placement.at_rest) if axes), None)
        return param if dim is None else all_gather_mean(param, ("data",), dim)

    def loss(params, x, labels, dropout):
        logits = forward(jax.tree.map(gather, params, placements), x, dropout)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        correct = (logits.argmax(-1) == labels).sum()
        return nll.mean(), {"loss": (nll.sum(), labels.size), "accuracy": (correct, labels.size)}

    def gradients(params, step, x, labels):
        rows = (axis_index(("data",)) * len(x) + jnp.arange(len(x))).astype(jnp.uint32)

        def add_microbatch(total, microbatch):
            rows, x, labels = microbatch
            dropout = Dropout(0.1, dropout_key(42, step), rows, jnp.arange(1))
            grads, metrics = jax.grad(loss, has_aux=True)(params, x, labels, dropout)
            return jax.tree.map(jnp.add, total, (grads, metrics)), None

        microbatches = jax.tree.map(lambda a: a.reshape(MICROBATCHES, -1, *a.shape[1:]), (rows, x, labels))
        zero = (jax.tree.map(jnp.zeros_like, params), {k: (jnp.zeros(()), 0) for k in ("loss", "accuracy")})
        zero[1]["accuracy"] = (0, 0)
        (grads, metrics), _ = jax.lax.scan(add_microbatch, zero, microbatches)
        grads = average(jax.tree.map(lambda g: g / MICROBATCHES, grads), replicated_over)
        return grads, all_reduce(metrics, ("data",))

    sharded_gradients = jax.shard_map(
        gradients, mesh=mesh, in_specs=(specs, P(), P("data"), P("data")), out_specs=(specs, P()), check_vma=False
    )

    @jax.jit
    def train_step(params, opt_state, step, inputs, labels):
        grads, metrics = sharded_gradients(params, step, inputs, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    shardings = tree_map(lambda p, s: NamedSharding(mesh, s), description, specs)
    params = init_params(description, shardings, seed=42, dtype=jnp.float32)
    return train_step, params, jax.jit(optimizer.init)(params)


# %% [markdown]
# ## Training both
#
# Sixteen steps on one batch of 128 random samples. The two layouts give the same losses. With FSDP the parameters take
# an eighth of the memory of each device.

# %%
inputs_key, labels_key = jax.random.split(jax.random.PRNGKey(42))
inputs = jax.device_put(jax.random.normal(inputs_key, (128, 784)), NamedSharding(mesh, P("data")))
labels = jax.device_put(jax.random.randint(labels_key, (128,), 0, 10), NamedSharding(mesh, P("data")))
results, bytes_on_device = {}, {}
for name, layout in (("data parallel", replicated), ("FSDP", sharded)):
    train_step, params, opt_state = build(layout)
    losses = []
    for step in range(16):
        params, opt_state, metrics = train_step(params, opt_state, jnp.int32(step), inputs, labels)
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    accuracy = float(metrics["accuracy"][0] / metrics["accuracy"][1])
    results[name] = losses
    print(f"{name:13} first loss {losses[0]:.4f}, last {losses[-1]:.5f}, accuracy {accuracy:.2f}")
    device = jax.devices()[0]
    bytes_on_device[name] = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
print("equal losses:", np.allclose(results["data parallel"], results["FSDP"], rtol=2e-3))
print("bytes of parameters on a device:", bytes_on_device)

# %% [markdown]
# ## What goes wrong: gradients that are not averaged
#
# Leave out the average, and each device trains on its own sixteen samples. The output is declared replicated, and
# nothing checks that it is: `float(loss)` prints a plausible number, every device holds another model, and a checkpoint
# saves the one of device 0.

# %%
train_step, params, opt_state = build(replicated, average=lambda grads, over: grads)
for step in range(16):
    params, opt_state, metrics = train_step(params, opt_state, jnp.int32(step), inputs, labels)
copies = [np.asarray(shard.data) for shard in params["output_dense"]["kernel"].addressable_shards]
print("declared:", params["output_dense"]["kernel"].sharding.spec)
print("largest difference from device 0:", [f"{abs(copy - copies[0]).max():.2f}" for copy in copies])

# %% [markdown]
# ## PyTorch's `DataParallel` compared
#
# `torch.nn.DataParallel` also splits the batch, but from one process: device 0 sends the whole model to all others in
# every step, collects their outputs, computes the loss, and collects all gradients. For V bytes of parameters device 0
# sends (n-1) V and receives (n-1) V over its own links, where a ring's device sends 2V (n-1)/n. The others have one
# copy to receive and one gradient to send. With n = 8 that is 14 V through one device against 1.75 V through each:
# eight times the time, and device 0 alone holds outputs and loss. (Its successor `DistributedDataParallel` does the
# ring.)
#
# The pattern is easily written with permutations between pairs. The census counts a star of 7 + 7 transfers of V.

# %%
model = jnp.ones((2**20,), jnp.float32)
devices = range(1, 8)


@functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
def star(gradient):
    """Sums on device 0, then sends the sum to every other device, as `DataParallel` moves gradients and parameters."""
    total = gradient
    for k in devices:
        total = total + jax.lax.ppermute(gradient, "data", [(k, 0)])
    received = [jax.lax.ppermute(total, "data", [(0, k)]) for k in devices]
    return jnp.where(axis_index(("data",)) == 0, total, sum(received))


@functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
def ring(gradient):
    return all_reduce(gradient, ("data",))


for name, function in (("star", star), ("ring", ring)):
    ledger = mw.census(jax.jit(function), model, mesh={"data": 8}).ledger
    (kind,) = {e.kind for e in ledger}
    through = sum(e.count * (e.payload if name == "star" else e.sent) for e in ledger)
    print(
        f"{name}: {kind}, {through / model.nbytes:.2f} V through device 0, sum {float(jax.jit(function)(model)[0]):.0f}"
    )

# %% loose
import timeit

for name, function in (("star", jax.jit(star)), ("ring", jax.jit(ring))):
    seconds = min(timeit.repeat(lambda f=function: f(model).block_until_ready(), number=3, repeat=3)) / 3
    print(f"{name}: {seconds * 1e3:.1f} ms for 4 MiB, on simulated devices")

# %% [markdown]
# ## The census
#
# The ledgers of both layouts. Data parallel sums all gradients once, after accumulation. FSDP gathers its parameters
# for every microbatch (XLA hoists the gathers out of the loop, since the parameters are the same for all microbatches)
# and scatters the gradients of all.

# %%
for name, layout in (("data parallel", replicated), ("FSDP", sharded)):
    train_step, params, opt_state = build(layout)
    census = mw.census(train_step, params, opt_state, jnp.int32(0), inputs, labels)
    print(name)
    for e in census.ledger:
        if e.payload > 100:
            print(f"  {e.kind}: {e.count} x {e.payload:,} bytes of {e.operands[0]}")

# %% [markdown]
# ## Exercises
#
# **1.** Two devices have 1 and 3 samples with losses 4.0 and 0.0, 0.0, 0.0. What is the mean loss, what is the mean of
# the devices' means, and how does the step above get it right?

# %% [markdown] answer
# The mean is 4 / 4 = 1. The mean of means is (4 + 0) / 2 = 2. The step sums (sum, count) pairs over devices and divides
# once, at the end.

# %% answer
per_device = [(4.0, 1), (0.0, 3)]
total, count = (sum(column) for column in zip(*per_device, strict=True))
print(total / count, np.mean([s / n for s, n in per_device]))
assert total / count == 1.0

# %% [markdown]
# **2.** Eight nodes of eight H100, 4,096 tokens on each GPU, FSDP over all 64. Is the network fast enough? What if the
# parameters are split over the eight GPUs of a node only, and replicated over nodes (HSDP)?

# %% [markdown] answer
# A ring over 64 devices passes the network, at 50 GB/s for each GPU: T > 989e12 / 50e9 = 19,780 tokens would be needed,
# so with 4,096 the network takes 4.8 times as long as the FLOPs. With HSDP the gathers stay on NVLink (2,198
# tokens, enough), and only an eighth of the gradients, the part that a GPU holds, is reduced over the network: 19,780 /
# 8 = 2,472 tokens, enough.

# %% answer
h100 = CHIPS["h100"]
over_network = h100.flops_bf16 / h100.network_bandwidth
inside = h100.flops_bf16 / h100.interconnect.link_bandwidth
print(f"{over_network:,.0f} {inside:,.0f} {over_network / 8:,.0f}")
assert over_network > 4096 > max(inside, over_network / 8)

# %% [markdown]
# **3.** The biases stay replicated, of 512 and of ten elements. What would splitting them save and cost, and who
# averages their gradients?

# %% [markdown] answer
# Of the first a device would keep 64 of 512 floats: 1.8 kB saved of 1.6 MB, for a gather and a reduce-scatter of 2 kB
# in every microbatch, a hop latency each. Ten do not divide by eight at all. `mean_gradients` averages their gradients
# over `data`, with an all-reduce, as for every parameter that is replicated over an axis of the batch.

# %% answer
placements = named_leaves(place(sharded))
whole = [path for path, placement in placements.items() if "data" not in axes_of(placement.at_rest)]
print("replicated under FSDP:", whole)
assert whole == ["input_dense.bias", "output_dense.bias"]

# %% [markdown]
# ## Summary
#
# - Data parallel: 12 P bytes on each device, 2V (n-1)/n sent. FSDP: 12 P / n bytes, 3V (n-1)/n sent.
# - Above peak / bandwidth tokens on a device, computation can overlap all of it, whatever the model's size.
# - A gradient that nobody averages raises no error. Compare replicas, or write the layout's spec so that they cannot
#   differ.
# - Metrics are sums and counts, random numbers depend on the sample, and neither on the device.
