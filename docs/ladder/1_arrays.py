# %% [markdown]
# # 1. Distributed arrays
#
# **The question.** A feed-forward matrix of an 8B model has 4,096 x 14,336 numbers. Eight chips could hold one copy
# each, or an eighth each. Which block lies where, what does a product of two such arrays send, and who decides?
#
# A *mesh* arranges devices and names its axes. A *sharding* says which dimension of an array is split over which mesh
# axis. Those two are all there is: the same program runs on one device or on eight, and the placement of its arguments
# decides what is computed where. Everything here runs on eight simulated devices.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import itertools

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hardware.chips import CHIPS
from meshwright.views.draw import draw, draw_machine, picture_of, side_by_side

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
draw_machine(mesh)

# %% [markdown]
# ## The picture
#
# The same array on one device, then split over both axes, then with the axes exchanged. A box is a block of the array,
# equal colours are equal data, and the numbers are devices.

# %%
x = jax.random.normal(jax.random.key(0), (512, 512))


def put(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


y = put(x, "a", "b")
side_by_side(draw(x, "x"), draw(y, "y"), draw(put(x, "b", "a"), "y"))

# %% [markdown]
# An array is *replicated* over every axis that its spec does not name. With `P("a", None)` two devices hold each block,
# with `P(None, "b")` four do. One dimension can be split over both axes together.

# %%
side_by_side(*(draw(put(x, *spec), "x") for spec in (("a", None), (None, "b"), (None, "a"), (("a", "b"), None))))

# %% [markdown]
# `draw` needs no data. It takes an abstract array of any rank on a mesh of any size: here a stack of attention weights
# `w[L, D, N, H]` on eight devices, and a feed-forward matrix on 512.

# %%
abstract = jax.ShapeDtypeStruct((4, 64, 8, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, "a", "b")))
side_by_side(
    draw(abstract, "w", "LDNH"),
    picture_of("w", (8192, 28672), "DF", (("fsdp",), ("tensor",)), {"fsdp": 64, "tensor": 8}),
)

# %% [markdown]
# ## The arithmetic
#
# A block has the array's bytes divided by the degrees of the axes that split it: bytes / (product of named axes). Time
# has three bounds. A product of [M, K] by [K, N] takes 2MKN FLOPs; it cannot be faster than FLOPs / peak, nor than the
# bytes it touches / memory bandwidth, nor than the bytes it sends / link bandwidth. Here are the first two for a sine
# and a product of 8,192 x 8,192 numbers, on one TPU v5p and on eight: both are split evenly and send nothing, so eight
# chips take an eighth of the time.

# %%
v5p = CHIPS["v5p"]
n, elements = 8192, 8192**2
print(f"v5p: {v5p.flops_bf16 / 1e12:.0f} TFLOP/s in bfloat16, {v5p.hbm_bandwidth / 1e12:.3f} TB/s of memory")
for devices in (1, 8):
    sine = 2 * 4 * elements / devices / v5p.hbm_bandwidth
    product = 2 * n**3 / devices / v5p.flops_bf16
    print(f"{devices} x v5p: sin {sine * 1e6:5.0f} us = 2 x 4 x 8192^2 bytes / {devices} / bandwidth;", end=" ")
    print(f"product {product * 1e3:.2f} ms = 2 x 8192^3 / {devices} / peak")

# %% [markdown]
# ## Computation follows data
#
# `jit` splits work as its operands are split. An elementwise function keeps the layout. A product of rows over `a` with
# columns over `b` needs nothing from another device, because every device has its whole rows and whole columns.

# %%
rows, columns = put(x, "a", None), put(x, None, "b")
product = jnp.dot(rows, columns)
print("equal to one device:", np.allclose(product, jnp.dot(x, x), atol=1e-4))
print("copies keep the layout:", jnp.copy(product).sharding.spec)
print("sent:", mw.census(jnp.dot, rows, columns).ledger)
side_by_side(draw(jnp.sin(y), "sin(y)"), draw(rows, "rows"), draw(columns, "columns"), draw(product, "rows @ columns"))

# %% [markdown]
# One device against eight, timed. Simulated devices share the cores of this computer, so the ratio depends on how many
# it has, and says nothing of a real machine. What simulation tells exactly is the work of a device: an eighth.

# %%
alone, split = mw.census(jnp.dot, x, x), mw.census(jnp.dot, rows, columns)
print(f"FLOPs of a device: {alone.flops.compiled:,.0f} on one, {split.flops.compiled:,.0f} on eight")

# %% loose
import timeit

for name, operands in (("one device", (x, x)), ("eight devices", (rows, columns))):
    seconds = min(timeit.repeat(lambda o=operands: jnp.dot(*o).block_until_ready(), number=5, repeat=3)) / 5
    print(f"{name}: {seconds * 1e3:.1f} ms")

# %% [markdown]
# ## What the census says of the three ways to multiply
#
# The *census* compiles a function and reads the compiled program. Its ledger lists every collective with its mesh axes
# and payload. A product needs communication exactly when the dimension that is summed is split:
#
# 1. not split: no communication;
# 2. split the same way on both sides: each device has a partial sum of the whole result, and an all-reduce adds them;
# 3. split on one side only: the compiler slices or gathers, whatever it thinks cheaper.

# %%
cases = {
    "1. rows x columns": (("a", None), (None, "b")),
    "2. both summed over a": ((None, "a"), ("a", None)),
    "3. one side over a": (("a", None), ("a", None)),
}
for name, (left, right) in cases.items():
    ledger = mw.census(jnp.dot, put(x, *left), put(x, *right)).ledger
    print(f"{name:22}", [f"{e.kind} over {e.axes_label}, {e.payload:,} bytes" for e in ledger] or "nothing")

# %% [markdown]
# Case 2 reduces 512 x 512 x 4 = 1,048,576 bytes: the result. Case 3 gathers as many: the right operand. Chapter 2
# writes both by hand.
#
# ## What goes wrong: placements that disagree
#
# JAX moves no array between devices on its own. Arrays on different devices, or on the same devices in another order,
# cannot be combined.

# %%
devices = jax.devices()
halves = [Mesh(np.array(half), ("x",)) for half in (devices[:4], devices[4:])]
first, second = (jax.device_put(jnp.arange(8.0), NamedSharding(half, P("x"))) for half in halves)
try:
    first + second
except ValueError as error:
    print(str(error)[:82], "...")

permuted = Mesh(np.array([devices[i] for i in (0, 1, 2, 3, 6, 7, 4, 5)]), ("x",))
first = jax.device_put(jnp.arange(8.0), NamedSharding(Mesh(np.array(devices), ("x",)), P("x")))
second = jax.device_put(jnp.arange(8.0), NamedSharding(permuted, P("x")))
try:
    first + second
except ValueError as error:
    print(str(error)[:82], "...")

# %% [markdown]
# Only *uncommitted* arrays, which were not placed explicitly, go where they are needed.

# %%
print(first + jnp.ones_like(first) + jnp.arange(8))

# %% [markdown]
# ## Constraints
#
# Inside `jit` the compiler chooses the layout of every value; `with_sharding_constraint` fixes it. The ledger shows the
# price: exchanging the axes is an all-to-all and a permutation, replicating is a gather over both.

# %%


def exchange(x):
    return jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh, P("b", "a")))


def replicate(x):
    return jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh, P()))


for function in (exchange, replicate):
    for entry in mw.census(function, y).ledger:
        print(f"{function.__name__}: {entry.kind} over {entry.axes_label}: {entry.count} x {entry.payload:,} bytes")
side_by_side(*(draw(jax.jit(function)(y), function.__name__) for function in (exchange, replicate)))

# %% [markdown]
# ## A network, split by its data and by its layers
#
# The same four-layer network and gradient run in two ways: first with the batch split over all devices and the weights
# replicated (data parallel), then on a 4 x 2 mesh whose second axis splits two of the weights by columns and rows
# (tensor parallel). The code does not change; the placement of its arguments does.

# %%


def predict(params, inputs):
    for w, b in params:
        outputs = jnp.dot(inputs, w) + b
        inputs = jnp.maximum(outputs, 0)
    return outputs


def loss(params, batch):
    inputs, targets = batch
    return jnp.mean(jnp.sum((predict(params, inputs) - targets) ** 2, axis=-1))


def initial(sizes, batch_size):
    keys = jax.random.split(jax.random.key(0), 2 * len(sizes))
    pairs = list(itertools.pairwise(sizes))
    params = [
        (jax.random.normal(keys[2 * i], pair) / jnp.sqrt(pair[0]), jax.random.normal(keys[2 * i + 1], pair[1:]))
        for i, pair in enumerate(pairs)
    ]
    inputs = jax.random.normal(keys[-1], (batch_size, sizes[0]))
    return params, (inputs, jax.random.normal(keys[-2], (batch_size, sizes[-1])))


params, batch = initial([784, 256, 256, 256, 10], 256)
on_one_device = loss(params, batch)

by_data = Mesh(np.array(devices), ("batch",))
split = jax.device_put(batch, NamedSharding(by_data, P("batch")))
replicated_params = jax.device_put(params, NamedSharding(by_data, P()))
print(f"one device {on_one_device:.4f}, data parallel {jax.jit(loss)(replicated_params, split):.4f}")

both = Mesh(np.array(devices).reshape(4, 2), ("batch", "model"))
specs = [(P(), P()), (P(None, "model"), P("model")), (P("model", None), P()), (P(), P())]
sharded_params = [
    tuple(jax.device_put(p, NamedSharding(both, s)) for p, s in zip(layer, spec, strict=True))
    for layer, spec in zip(params, specs, strict=True)
]
split_rows = jax.device_put(batch, NamedSharding(both, P("batch", None)))
print(f"data x tensor parallel {jax.jit(loss)(sharded_params, split_rows):.4f}")

# %%
step_size = 1e-5
gradient = jax.jit(jax.grad(loss))
for _ in range(30):
    gradients = gradient(sharded_params, split_rows)
    sharded_params = [
        (w - step_size * dw, b - step_size * db) for (w, b), (dw, db) in zip(sharded_params, gradients, strict=True)
    ]
print(f"after 30 steps {jax.jit(loss)(sharded_params, split_rows):.4f}; the weights kept their layout:")
side_by_side(draw(sharded_params[1][0], "W2"), draw(sharded_params[2][0], "W3"))

# %% [markdown]
# ## Random numbers
#
# A counter-based generator can draw each element on the device that holds it. The partitionable form of threefry does;
# the older form communicates. The numbers differ between the two forms, and each form gives the same numbers on any
# layout.

# %%
key = jax.random.key(42)
numbers = jax.device_put(jnp.arange(24.0), NamedSharding(Mesh(np.array(devices), ("x",)), P("x")))


def noisy(key, x):
    return x + jax.random.uniform(key, x.shape)


for partitionable in (False, True):
    with jax.threefry_partitionable(partitionable):
        census = mw.census(noisy, key, numbers)
        same = np.array_equal(jax.jit(noisy)(key, numbers), jax.jit(noisy)(key, jnp.arange(24.0)))
    print(f"partitionable {partitionable}: communicates {bool(census.ledger)}, same numbers on one device {same}")

# %% [markdown]
# ## The census of the last step
#
# The census lists what one device of the data x tensor parallel gradient stores, computes and sends. The source has no
# collective: the compiler inserted all three. The lint knows one as the sum of gradients over the batch, which data
# parallelism asks for, and reports the other two, which follow from where the weights were put.

# %% loose
print(mw.census(jax.grad(loss), sharded_params, split_rows))

# %% [markdown]
# ## Exercises
#
# **1.** The feed-forward matrix w[8192, 28672] of a 70B model is in bfloat16. How many MiB does a device of the 4 x 2
# mesh hold under `P("a", "b")`, `P(("a", "b"), None)`, `P("a", None)` and `P()`?

# %% answer
for spec, mebibytes in ((P("a", "b"), 56), (P(("a", "b"), None), 56), (P("a", None), 112), (P(), 448)):
    block = NamedSharding(mesh, spec).shard_shape((8192, 28672))
    print(f"{spec!s:32} {block} x 2 bytes = {block[0] * block[1] * 2 / 2**20:.0f} MiB")
    assert block[0] * block[1] * 2 == mebibytes * 2**20

# %% [markdown]
# **2.** `x` is `P("a", None)` and `w` is `P(None, "a")`, both 512 x 512: one mesh axis splits the rows of one and the
# columns of the other. Can the product be free of communication, as in case 1? Predict the ledger.

# %% [markdown] answer
# No. Device i along `a` has rows i and columns i, so it can compute only the diagonal blocks of the result. The axis
# `a` can split rows or columns of the result, not both: one operand has to be gathered, 1 MiB.

# %% answer
(entry,) = mw.census(jnp.dot, put(x, "a", None), put(x, None, "a")).ledger
print(entry.kind, entry.axes_label, entry.payload)
assert (entry.kind, entry.axes_label, entry.payload) == ("all-gather", "a", 512 * 512 * 4)

# %% [markdown]
# **3.** Make a random array of 1 GiB that is never whole on any device, and prove it without allocating anything.

# %% [markdown] answer
# Declare the sharding of the *result*. `jax.device_put(jax.random.normal(...))` would first make all of it on device 0.

# %% answer
shape, sharding = (16384, 16384), NamedSharding(mesh, P("a", "b"))
whole = mw.census(jax.jit(lambda key: jax.random.uniform(key, shape)), key)
blocks = mw.census(jax.jit(lambda key: jax.random.uniform(key, shape), out_shardings=sharding), key)
for name, census in (("default", whole), ("declared", blocks)):
    print(f"{name}: {census.memory.compiled.results / 2**20:.0f} MiB of results on a device")
assert whole.memory.compiled.results == 2**30 and blocks.memory.compiled.results == 2**27 and not blocks.ledger

# %% [markdown]
# ## Summary
#
# - A sharding names, for each dimension, the mesh axes that split it. An axis that is not named replicates.
# - Bytes on a device: bytes of the array / product of the named axes.
# - `jit` follows the data. A product communicates exactly when the summed dimension is split, or when one axis is
#   wanted twice.
# - `device_put` moves; `with_sharding_constraint` moves inside `jit`; nothing else moves a committed array.
# - Read the ledger before you believe a layout: [chapter 2](2_collectives.md) writes its entries by hand.
