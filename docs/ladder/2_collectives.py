# %% [markdown]
# # 2. Collectives by hand
#
# **The question.** In chapter 1 the compiler put an all-reduce here and a gather there. What does each of them move,
# how many bytes, how long does that take on a TPU or a GPU, and what is its derivative?
#
# `jax.shard_map` runs a function once on every device, each with its own blocks. Nothing moves unless a collective is
# called, so the source shows all communication. `meshwright.comm.collectives` has collectives whose docstrings give their
# derivative, cost and picture.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm import collectives
from meshwright.hardware.chips import CHIPS
from meshwright.views.draw import draw, local_view, side_by_side

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"))
x = jax.random.normal(jax.random.PRNGKey(0), (192, 64))
w = jax.random.normal(jax.random.PRNGKey(1), (64, 128))
b = jax.random.normal(jax.random.PRNGKey(2), (128,))

# %% [markdown]
# ## The picture: what a device sees
#
# Rows of `x` are split over `i`, columns of `w` over `j`. Inside the function the shapes are those of one device.
# `local_view` draws a value from inside: devices of equal colour hold equal values. Four different blocks of `x` lie on
# two devices each, two of `w` on four each, and every pair of them meets once.

# %%
views = []


def product(x, w, b):
    print("local shapes", x.shape, w.shape, b.shape)
    views.extend([local_view(x, "x"), local_view(w, "w")])
    return jnp.dot(x, w) + b


specs = (P("i", None), P(None, "j"), P("j"))
y = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P("i", "j")))(x, w, b)
print("whole", y.shape, "equal to one device:", np.allclose(y, jnp.dot(x, w) + b, atol=1e-4))
side_by_side(*views, draw(y, "y"))

# %% [markdown]
# ## The arithmetic
#
# Let V be the bytes of the whole array and n the devices of the group. On a ring each device passes blocks of V/n to
# its neighbour n - 1 times:
#
# | collective | before | after | a device sends |
# |---|---|---|---|
# | all-gather | a block each | everything | V (n-1)/n |
# | reduce-scatter | a partial sum each | a block of the sum | V (n-1)/n |
# | all-reduce | a partial sum each | the sum | 2V (n-1)/n: a reduce-scatter, then an all-gather |
# | all-to-all | split one way | split the other way | V/n (n-1)/n |
# | shift | a block each | the neighbour's block | V/n |
#
# Time is bytes / bandwidth, as long as the array is large; below about a megabyte the latency of the hops decides. Here
# V is a feed-forward matrix of an 8B model in bfloat16, on links that are used one way or both ways.

# %%
V, n = 4096 * 14336 * 2, 8
v5p, h100 = CHIPS["v5p"], CHIPS["h100"]
links = {
    "TPU v5p, a ring of ICI links": 2 * v5p.interconnect.link_bandwidth,
    "H100, NVLink inside a node": h100.interconnect.link_bandwidth,
    "H100, network between nodes": h100.network_bandwidth,
}
print(f"V = 4096 x 14336 x 2 = {V / 1e6:.0f} MB; all-gather: V x 7/8 = {V * 7 / 8 / 1e6:.0f} MB")
for name, bandwidth in links.items():
    gather = V * (n - 1) / n / bandwidth
    print(
        f"{name:29} {bandwidth / 1e9:3.0f} GB/s: all-gather {gather * 1e6:5.0f} us, all-reduce {2 * gather * 1e6:5.0f}"
    )

# %% [markdown]
# ## Gather a weight, then multiply
#
# The weight is split over `i` between uses, and gathered for the product. This one line is FSDP, chapter 3.

# %%
manual = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)


@jax.jit
@functools.partial(manual, in_specs=(P("i", None), P("i", None)), out_specs=P("i", None))
def gather_then_multiply(x, w):
    whole = collectives.all_gather(w, ("i",), 0)
    print("at rest", w.shape, "in use", whole.shape)
    return jnp.dot(x, whole)


print("equal to one device:", np.allclose(gather_then_multiply(x, w), jnp.dot(x, w), atol=1e-4))

# %% [markdown]
# ## Reduce: sums over devices
#
# The columns of a row are on two devices, so its mean is a sum over `j`, divided by the number of columns.

# %%


@jax.jit
@functools.partial(manual, in_specs=P("i", "j"), out_specs=P("i", "j"))
def normalise(x):
    count = x.shape[1] * jax.lax.axis_size("j")
    mean = collectives.all_reduce(x.sum(1, keepdims=True), ("j",)) / count
    variance = collectives.all_reduce(((x - mean) ** 2).sum(1, keepdims=True), ("j",)) / count
    return (x - mean) / jnp.sqrt(variance)


out = normalise(x)
print("mean of every row below 1e-6:", bool((abs(out.mean(1)) < 1e-6).all()))
print(f"standard deviation {out.std():.4f}")

# %% [markdown]
# Where each device needs only its own block of the sum, a reduce-scatter costs half. Each device has a row here, and
# gets one element of the sum of all rows.

# %%
rows = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 1, 2]])
scatter = manual(lambda x: collectives.reduce_scatter(x[0], ("i",), 0), in_specs=P("i", None), out_specs=P("i"))
print(scatter(rows))

# %% [markdown]
# ## Move: shift, all-to-all, broadcast
#
# A shift passes blocks along the ring; pipelines and ring attention are made of it. All-to-all changes which dimension
# is split: rows over the devices become columns over the devices. Experts and Ulysses attention are made of that.

# %%
print(manual(lambda x: collectives.ring_shift(x, "i", 1), in_specs=P("i"), out_specs=P("i"))(np.arange(4)))
square = np.arange(16).reshape(4, 4)
exchange = manual(lambda x: collectives.all_to_all(x, ("i",), 1, 0), in_specs=P("i", None), out_specs=P(None, "i"))
print("the same array, split the other way:", np.array_equal(exchange(square), square))
print(manual(lambda x: collectives.broadcast(x, ("i",), 2), in_specs=P("i"), out_specs=P())(np.arange(4) * 10))
side_by_side(draw(jax.device_put(square, jax.NamedSharding(mesh, P("i"))), "rows"), draw(exchange(square), "columns"))

# %% [markdown]
# ## Which device am I?
#
# Every device runs the same program; its indices along the axes tell it apart.

# %%


def indices():
    return jnp.stack([jax.lax.axis_index("i"), jax.lax.axis_index("j")], axis=-1)[None]


for device, (i, j) in enumerate(manual(indices, in_specs=(), out_specs=P(("i", "j")))()):
    print(f"Device {device}: i-axis={i}, j-axis={j}")

# %% [markdown]
# A key is folded with an index so that devices along `i` draw different numbers, for instance of dropout on different
# samples, while devices along `j`, which work on the same sample, share them.


# %%
def folded(key):
    return jax.random.fold_in(key, collectives.axis_index(("i",)))


fold = manual(folded, in_specs=P(), out_specs=P(("i", "j")))
keys = fold(jax.random.PRNGKey(0)).reshape(8, 2)
for device, key in enumerate(np.asarray(keys)):
    print(f"Device {device}: key={key}")

# %% [markdown]
# ## Derivatives
#
# The transpose of a gather is a reduce-scatter: every device used the gathered value in its own way, so the cotangents
# are summed, and each device keeps the part that belongs to its block. With `all_gather_mean` they are averaged, for
# losses that are means over each device's own batch.

# %%


def slope(gather):
    @functools.partial(manual, in_specs=(P("i"), P("i")), out_specs=P("i"))
    def of(x, weights):
        return jax.grad(lambda x: (gather(x, ("i",), 0) * weights[0]).sum())(x)

    return of


@collectives.with_transpose(lambda g, axes, dim: collectives.reduce_scatter(g, axes, dim) / jax.lax.axis_size(axes))
def all_gather_mean(x, axes, dim):
    return collectives.all_gather(x, axes, dim)


values, weights = np.arange(4.0), np.arange(16.0).reshape(4, 4)
print("sum ", slope(collectives.all_gather)(values, weights), "=", weights.sum(0))
print("mean", slope(all_gather_mean)(values, weights), "=", weights.mean(0))

# %% [markdown]
# ## What goes wrong: the derivative of a sum
#
# Four devices have one number each, and the loss is their sum, so every derivative is 1. Inside `shard_map` without
# `check_vma`, JAX cannot know that the sum is the same value on all devices. It takes it for four values with a
# cotangent each, and the transpose of `lax.psum`, another `psum`, adds them: four times the gradient, and no error.
# With `check_vma` JAX records which values vary over which axes, and is right. `collectives.all_reduce` states its
# derivative: the sum is one value, and each addend gets its cotangent. Forward a sum, backward the identity, nothing
# sent: this is Megatron's g, which chapter 6 uses.

# %%


def gradient_of(total, check):
    gradient = jax.grad(lambda x: total(x).sum())
    return jax.shard_map(gradient, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)(np.ones(4))


print("lax.psum, unchecked   ", gradient_of(lambda x: jax.lax.psum(x, "i"), check=False))
print("lax.psum, checked     ", gradient_of(lambda x: jax.lax.psum(x, "i"), check=True))
print("collectives.all_reduce", gradient_of(lambda x: collectives.all_reduce(x, ("i",)), check=False))

# %% [markdown]
# A model trained with gradients four times too large still learns under Adam, which divides them by their own size.
# Only the clipping of gradients acts differently. That is why such a mistake lives for months, and why chapter 7
# compares with an unsharded program.
#
# ## The census
#
# The ledger of the gathered product, forward and backward: one gather and its transpose. `w` is 64 x 128 float32, 32
# KiB in all, of which a device sends three quarters, as the table says for n = 4.

# %%


@functools.partial(manual, in_specs=(P("i", None), P("i", None)), out_specs=P("i", None))
def weight_gradient(x, w):
    return jax.grad(lambda w: jnp.sin(x @ collectives.all_gather(w, ("i",), 0)).sum())(w)


census = mw.census(jax.jit(weight_gradient), x, w, mesh=dict(mesh.shape))
for e in census.ledger:
    print(f"{e.kind} over {e.axes_label}: {e.count} x {e.payload:,} bytes, {e.sent:,.0f} sent by a device")
print("findings:", len(census.findings))

# %% [markdown]
# ## Exercises
#
# **1.** Write an all-gather over `i` from three ring shifts, and check in the census that it sends the bytes that the
# table gives for `all_gather`.

# %% [markdown] answer
# After k shifts a device holds the block of the device k places before it. Each shift sends one block, 8 KiB of `w`;
# three of them are 24,576 bytes, the same as V (n-1)/n.

# %% answer


@functools.partial(manual, in_specs=P("i", None), out_specs=P(None))
def ring_gather(block):
    me, blocks = jax.lax.axis_index("i"), jnp.zeros((4, *block.shape))
    for k in range(4):
        blocks = blocks.at[(me - k) % 4].set(block)
        block = collectives.ring_shift(block, "i", 1) if k < 3 else block
    return blocks.reshape(-1, block.shape[1])


assert np.array_equal(jax.jit(ring_gather)(w), w)
sent = sum(e.sent for e in mw.census(jax.jit(ring_gather), w, mesh=dict(mesh.shape)).ledger)
print(f"{sent:,.0f} bytes sent")
assert sent == w.nbytes * 3 / 4

# %% [markdown]
# **2.** An all-reduce of V bytes over two axes of 4 and 2 devices: is it cheaper as one collective over eight, or as
# reduce-scatter over 4, all-reduce over 2, all-gather over 4?

# %% [markdown] answer
# In bytes they are equal: 2V 7/8 = 1.75 V, and 0.75 V + 2 (V/4) 1/2 + 0.75 V = 1.75 V. But the second sends only 0.25 V
# over the second axis. If that is the network between nodes, nine times slower than NVLink, this is what makes it fast;
# `meshwright.comm.hierarchical` does it.

# %% answer
flat, nested = 2 * 7 / 8, 3 / 4 + 2 * (1 / 4) * (1 / 2) + 3 / 4
print(flat, nested)
assert flat == nested == 1.75

# %% [markdown]
# **3.** What is the derivative of `all_to_all(x, split=1, join=0)`, and how many bytes does it send?

# %% [markdown] answer
# An all-to-all permutes numbers, so its transpose is the inverse permutation: the all-to-all with `split` and `join`
# exchanged, with the same bytes.

# %% answer


@functools.partial(manual, in_specs=(P("i", None), P(None, "i")), out_specs=P("i", None))
def pull_back(x, cotangent):
    return jax.vjp(lambda x: collectives.all_to_all(x, ("i",), 1, 0), x)[1](cotangent)[0]


back = manual(lambda x: collectives.all_to_all(x, ("i",), 0, 1), in_specs=P(None, "i"), out_specs=P("i", None))
numbers = np.random.default_rng(0).normal(size=(4, 4))
print(np.array_equal(pull_back(square * 1.0, numbers), back(numbers)))
assert np.array_equal(pull_back(square * 1.0, numbers), back(numbers))

# %% [markdown]
# ## Summary
#
# - Inside `shard_map`, shapes are local and every byte sent is a call in the source.
# - A gather or reduce-scatter sends V (n-1)/n, an all-reduce twice that, an all-to-all an n-th of a gather.
# - Transposes: gather and reduce-scatter are each other's; a sum's is the identity; all-to-all's is its inverse.
# - `lax.psum` under `check_vma=False` multiplies gradients by n, silently.
