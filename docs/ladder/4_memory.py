# %% [markdown]
# # 4. Memory
#
# **The question.** A chip has 80 or 95 GB, and a run that needs one byte more ends before its first step. How much
# memory do a product, its gradient and its optimizer need on each device, can we know it before any array exists, and
# why is device 0 so often the one that runs out?
#
# The compiler knows: it lays out every buffer of a program before the program runs. The census reads that layout. Later
# we measure real arrays and find the same numbers.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hardware.chips import CHIPS
from meshwright.views.draw import draw, side_by_side

MiB = 2**20
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def abstract(shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def report(name, census):
    memory = census.memory
    categories = {k: f"{v / MiB:.0f}" for k, v in memory.by_category().items() if v >= MiB}
    print(f"{name}: {memory.compiled.peak / MiB:.0f} MiB on each device {categories}")


# %% [markdown]
# ## The arithmetic
#
# An array on a device takes elements x bytes of an element / product of the axes that split it. A program needs its
# arguments, its results, and the most temporaries that are alive at once. For Adam in float32:
#
# | | bytes of a parameter | whole on each device, 70B | split over 64 |
# |---|---|---|---|
# | parameters | 4 | 280 GB | 4.4 GB |
# | gradients, alive from the backward pass to the update | 4 | 280 GB | 4.4 GB |
# | two moments | 8 | 560 GB | 8.8 GB |
#
# What moves takes time: an optimizer step reads and writes 28 bytes of each parameter (it reads 16, writes 12), so on a
# v5p it takes 28 x 70.6e9 / 64 / 2.765e12 = 11 ms of a step, and the gathered copy of one layer of 856 million
# parameters in bfloat16 takes 1.7 GB for as long as the layer computes.

# %%
parameters, layer = 70.6e9, 856e6
print(f"{28 * parameters / 64 / CHIPS['v5p'].hbm_bandwidth * 1e3:.1f} ms, {2 * layer / 1e9:.1f} GB")

# %% [markdown]
# ## The same product, replicated and sharded
#
# 16,384 inputs of 4,096 features are multiplied by weights of 4,096 x 8,192. With only the inputs split, every device
# holds all of the weights: 32 + 128 MiB of operands and 64 MiB of results, 224 MiB, which is what eight TPU cores
# measured.

# %%
batch, embed, hidden = 16384, 4096, 8192
inputs = abstract((batch, embed), ("x", "y"))
weights = abstract((embed, hidden))
report("weights whole  ", mw.census(jnp.matmul, inputs, weights))

# %% [markdown]
# With the inputs split over four devices and the columns of the weights over two, no device holds more than 64 MiB of
# any array, and nothing is sent.

# %%
rows = abstract((batch, embed), "x")
columns = abstract((embed, hidden), None, "y")
tiled = mw.census(jnp.matmul, rows, columns)
report("weights halved ", tiled)
print("sent:", tiled.ledger)
side_by_side(draw(inputs, "inputs"), draw(weights, "weights"), draw(rows, "inputs"), draw(columns, "weights"))

# %% [markdown]
# Weights that are split over all eight devices and gathered for the product (FSDP) are small between uses and whole
# during it. The peak is that of the replicated product and more, but lasts no longer than the product.

# %%


def fsdp(inputs, weights):
    whole = jax.lax.with_sharding_constraint(weights, NamedSharding(mesh, P()))
    return inputs @ whole


gathered = mw.census(fsdp, inputs, abstract((embed, hidden), ("x", "y")))
report("weights split  ", gathered)

# %% [markdown]
# ## What goes wrong: arrays made whole on one device
#
# An array is made where its generator runs. Without a sharding that is device 0, and what is split afterwards was whole
# there first. Two ways of preparing the product above, as one meets them in notebooks:
#
# - the weights are made on device 0 and stacked once for each device, for a map over devices: 128 MiB of weights and 8
#   x 128 MiB of copies, and then its 32 MiB of inputs and 64 MiB of results: **1.2 GB on device 0, 96 MiB on the
#   others** (32 + 64, as their copies last only for the call);
# - inputs and weights are made whole, and the product is split over a 4 x 2 mesh: 256 + 128 + 64 = **448 MiB on device
#   0, and 64 MiB of results on the others.**
#
# Both run. They fail at eight times the size, on device 0, while the plan for the split program says that there is
# room. Here they are at a sixteenth of the size, with every array of the process counted; x 16 gives the numbers above.

# %%


def on_each_device(*arrays):
    stored = np.zeros(8)
    for shard in (shard for array in arrays for shard in array.addressable_shards):
        stored[shard.device.id] += shard.data.nbytes
    return " ".join(f"{16 * b / MiB:.0f}" for b in stored)


rows_of_x, all_devices, tiles = (NamedSharding(mesh, P(*s)) for s in (("x",), (("x", "y"),), ("x", "y")))
made = jax.random.normal(jax.random.key(0), (embed // 4, hidden // 4))
inputs_of_all = jax.jit(lambda k: jax.random.normal(k, (8, 512, embed // 4)), out_shardings=all_devices)(
    jax.random.key(1)
)
stacked = jnp.stack([made] * 8)
result = jax.jit(jnp.matmul, out_shardings=all_devices)(inputs_of_all, jax.device_put(stacked, all_devices))
print("stacked on device 0, MiB x 16:", on_each_device(made, stacked, inputs_of_all, result))

whole_inputs = jax.random.normal(jax.random.key(1), (batch // 4, embed // 4))
product = jax.jit(jnp.matmul, in_shardings=(rows_of_x, NamedSharding(mesh, P(None, "y"))), out_shardings=tiles)
print("made whole, then split       :", on_each_device(made, whole_inputs, product(whole_inputs, made)))

# %% [markdown]
# The remedy is to declare the sharding where the array is made: `jit(init, out_shardings=...)` draws each block on its
# device, as chapter 1 showed for random numbers. Meshwright makes every parameter in this way.

# %%
draws = (((batch // 4, embed // 4), rows_of_x), ((embed // 4, hidden // 4), NamedSharding(mesh, P(None, "y"))))
blocks = [
    jax.jit(lambda k, shape=shape: jax.random.normal(k, shape), out_shardings=s)(jax.random.key(0))
    for shape, s in draws
]
print("declared where it is made    :", on_each_device(*blocks, product(*blocks)))

# %% [markdown]
# ## Memory of a gradient
#
# The gradient with respect to the inputs is as large as they are: 32 + 128 + 32 = 192 MiB of operands and results. With
# respect to both operands it is 320 MiB; and since each device has its own inputs, the gradient of the weights is
# summed over all devices.

# %%


def mean(inputs, weights):
    return jnp.mean(inputs @ weights)


value = NamedSharding(mesh, P())
for wanted, name in (((0,), "of the inputs"), ((0, 1), "of both      ")):
    shardings = tuple((inputs, weights)[i].sharding for i in wanted)
    function = jax.jit(jax.value_and_grad(mean, wanted), out_shardings=(value, shardings))
    census = mw.census(function, inputs, weights)
    compiled = census.memory.compiled
    total = (compiled.arguments + compiled.results) / MiB
    sent = {e.kind: f"{e.payload / MiB:.0f} MiB" for e in census.ledger if e.payload > 4}
    print(f"gradient {name}: {total:.0f} MiB of operands and results; summed over devices: {sent or 'nothing'}")

# %% [markdown]
# ## Memory of Adam
#
# Adam has two moments as large as the parameters. Replicated parameters and their state take three times the parameters
# on every device; split over eight devices they take an eighth of that. The categories are the compiler's arguments,
# sorted by the tree that they come from.

# %%
adam = optax.adam(1e-3)


def step(params, opt_state, batch):
    grads = jax.grad(lambda p: mean(batch, p["w"]))(params)
    updates, opt_state = adam.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


for name, spec in (("whole", P()), ("split", P("x", "y"))):
    params = {"w": abstract((1024, 1024), *spec)}
    sharding = NamedSharding(mesh, spec)
    moments = jax.eval_shape(adam.init, params)
    moments = jax.tree.map(
        lambda m, sharding=sharding: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=sharding) if m.ndim else m, moments
    )
    moment_shardings = jax.tree.map(lambda m: m.sharding or value, moments)
    jitted_step = jax.jit(step, out_shardings=(sharding, moment_shardings))
    census = mw.census(jitted_step, params, moments, abstract((512, 1024), ("x", "y")), mesh=dict(mesh.shape))
    categories = census.memory.by_category()
    print(name, {k: f"{categories[k] / MiB:.2f} MiB" for k in ("parameters", "optimizer state")})

# %% [markdown]
# ## Measured
#
# The same with real arrays, in bytes of one device. The moments are zeros, so nothing tells `jit` how to split them: by
# default it makes them whole on every device, sixteen times the sharded parameters.

# %%
params = {"w": jax.device_put(jnp.ones((1024, 1024)), NamedSharding(mesh, P("x", "y")))}
for name, init in (
    ("chosen by jit", jax.jit(adam.init)),
    ("declared", jax.jit(adam.init, out_shardings=moment_shardings)),
):
    trees = {"parameters": params, "optimizer state": init(params)}
    shards = {k: [x.addressable_shards[0].data for x in jax.tree.leaves(tree)] for k, tree in trees.items()}
    print(name, {k: f"{sum(x.nbytes for x in parts) / MiB:.2f} MiB" for k, parts in shards.items()})

# %% [markdown]
# ## The census
#
# The census of the step with sharded moments. The lint reports that the batch is gathered whole: a batch split over `x`
# and `y`, multiplied by weights split over the same axes, leaves the compiler no better way. Chapter 7 has the remedy:
# gather the weights instead of the activations, and write the gather down.

# %% loose
for finding in census.findings:
    print(f"{finding.kind}: {finding.subject}\n  because: {finding.reason}\n  fix: {finding.fix}")

# %% [markdown]
# ## Exercises
#
# **1.** Derive the 224 MiB of the product with replicated weights, and the figure when the batch alone is doubled.

# %% [markdown] answer
# Inputs 16,384 x 4,096 x 4 / 8 = 32 MiB, weights 4,096 x 8,192 x 4 = 128, results 16,384 x 8,192 x 4 / 8 = 64. Twice
# the batch doubles the first and the last: 64 + 128 + 128 = 320 MiB.

# %% answer
doubled = mw.census(jnp.matmul, abstract((2 * batch, embed), ("x", "y")), weights).memory.compiled.peak
print(f"{doubled / MiB:.0f} MiB")
assert round(doubled / MiB) == 320

# %% [markdown]
# **2.** A model of 8.03e9 parameters trains in float32 with Adam. On how many H100 of 80 GB does its state (parameters,
# moments, gradients) leave 40 GB free, if all of it is split?

# %% [markdown] answer
# 16 x 8.03e9 = 128.5 GB; / n <= 40 GB gives n >= 3.2, so four. Activations are not in it: they grow with the tokens of
# a device, and chapters 9 and 12 split them.

# %% answer
n = next(n for n in (1, 2, 4, 8) if 16 * 8.03e9 / n <= CHIPS["h100"].hbm_bytes - 40e9)
print(n)
assert n == 4

# %% [markdown]
# **3.** `jax.jit(step)` of the Adam step above takes the old state and returns the new one. How many bytes of results
# overwrite arguments if the old state is donated (`donate_argnums`)?

# %% [markdown] answer
# All of the state: parameters and two moments of 1024 x 1024 x 4 / 8 = 0.5 MiB each. Without donation a run holds its
# state twice in every step.

# %% answer
stored = ({"w": abstract((1024, 1024), "x", "y")}, moments)
new_shardings = ({"w": NamedSharding(mesh, P("x", "y"))}, moment_shardings)
for donated, mebibytes in (((), 0), ((0, 1), 1.5)):
    jitted = jax.jit(step, out_shardings=new_shardings, donate_argnums=donated)
    compiled = mw.census(jitted, *stored, abstract((512, 1024), ("x", "y")), mesh=dict(mesh.shape)).memory.compiled
    print(f"donated {donated}: {compiled.results / MiB:.2f} MiB of results, {compiled.aliased / MiB:.2f} in place")
    assert round(compiled.aliased / MiB, 2) == mebibytes

# %% [markdown]
# ## Summary
#
# - Peak = arguments + results + live temporaries, known to the compiler before anything is allocated.
# - Declare the sharding where an array is made; what is made whole is whole on device 0 first.
# - A gathered weight lives for one product; replicated moments live for the whole run, and cost twice the weights.
# - Donate the state, or hold it twice.
