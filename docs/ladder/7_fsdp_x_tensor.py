# %% [markdown]
# # 7. FSDP x tensor parallelism
#
# **The question.** Tensor parallelism stops at six or eight devices, FSDP needs many tokens on each. Large runs use
# both: 64 x 8, 128 x 8. How do two axes share one weight, what is sent over which, and does the compiler find the same
# program if it is only told where the arrays lie?
#
# On a 2 x 2 mesh the same pair of matrices is written by `shard_map`, by `jit`, and unsharded. All three agree in their
# numbers, and not in what they send.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.bench.microbenchmarks import COLLECTIVES, time_collectives
from meshwright.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from meshwright.hardware.chips import CHIPS
from meshwright.views.draw import draw, picture_of, side_by_side
from xlacensus.comparison import compare

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
manual = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
x = jax.random.normal(jax.random.PRNGKey(0), (4, 10))
w1 = jax.random.normal(jax.random.PRNGKey(1), (10, 40))
w2 = jax.random.normal(jax.random.PRNGKey(2), (40, 10))
unsharded = x @ w1 @ w2

# %% [markdown]
# ## The picture
#
# Columns of `w1` and rows of `w2` are split over `model`, as in chapter 6. The other dimension of each is split over
# `data`, as in chapter 3. At rest a device holds a quarter; in use, after a gather over `data`, half.

# %%
shape = mesh.shape
side_by_side(
    picture_of("w1", (10, 40), "DF", (("data",), ("model",)), shape),
    picture_of("w1 in use", (10, 40), "DF", ((), ("model",)), shape),
    picture_of("w2", (40, 10), "FD", (("model",), ("data",)), shape),
    picture_of("w2 in use", (40, 10), "FD", (("model",), ()), shape),
)

# %% [markdown]
# ## The arithmetic
#
# Let the mesh be X x Y: X over `data`, Y over `model`. For T tokens on all devices and a pair of D x F matrices in
# bfloat16, a device computes 4 T D F / (X Y) FLOPs. It gathers weights over `data`, 2 x 2 D F / Y bytes, and
# activations over `model`, 2 x 2 T D / X bytes. More X makes the second smaller, more Y the first. Where both use links
# of the same bandwidth they are balanced at **X = sqrt(N T / F)** for N = X Y devices (scaling-book, training.md).

# %%
D, F, T = 8192, 28672, 4 * 2**20
bandwidth, peak = 2 * CHIPS["v5p"].interconnect.link_bandwidth, CHIPS["v5p"].flops_bf16
for N in (512, 4096, 32768):
    X = (N * T / F) ** 0.5
    print(f"{N:6,} devices, {T / N:6,.0f} tokens each: X = sqrt({N:,} x {T:,} / {F:,}) = {X:,.0f}, Y = {N / X:.1f}")
for X, Y in ((4096, 1), (512, 8), (64, 64)):
    compute = 4 * T * D * F / (X * Y) / peak
    weights, activations = 4 * D * F / Y / bandwidth, 4 * T * D / X / bandwidth * (Y > 1)
    compute, weights, activations = (f"{seconds * 1e3:5.2f} ms" for seconds in (compute, weights, activations))
    print(f"{X:4} x {Y:2}: compute {compute}, weights {weights}, activations {activations}")

# %% [markdown]
# With FSDP alone the weights take two and a half times as long as the computation. With 512 x 8 neither transfer takes
# longer than it: on links of their own, both can be overlapped. With 64 x 64 the step waits for the activations.
#
# ## FSDP alone
#
# The batch and the weight are split over `data`; the weight is gathered.

# %%
square = jax.random.normal(jax.random.PRNGKey(3), (10, 10))


@functools.partial(manual, in_specs=(P("data", None), P("data", None)), out_specs=P("data", None))
def fsdp(x, w):
    return x @ all_gather(w, ("data",), 0)


print("equal to unsharded:", np.allclose(fsdp(x, square), x @ square, atol=1e-5))
draw(fsdp(x, square), "x @ w")

# %% [markdown]
# ## Tensor parallel alone
#
# Activations are split by features. They are gathered, multiplied by columns, then by rows, and the partial sums are
# reduce-scattered back into features: `[B, D/model]` -> `[B, D]` -> `[B, F/model]` -> `[B, D]{U/model}` -> `[B,
# D/model]`.

# %%


@functools.partial(manual, in_specs=(P(None, "model"), P(None, "model"), P("model", None)), out_specs=P(None, "model"))
def tensor(x, w1, w2):
    hidden = all_gather(x, ("model",), 1) @ w1
    return reduce_scatter(hidden @ w2, ("model",), 1)


print("equal to unsharded:", np.allclose(tensor(x, w1, w2), unsharded, atol=1e-4))

# %% [markdown]
# ## Both, three ways

# %%
LAYOUT = {"x": P("data", "model"), "w1": P("data", "model"), "w2": P("model", "data")}


@functools.partial(manual, in_specs=tuple(LAYOUT.values()), out_specs=P("data", "model"))
def by_hand(x, w1, w2):
    hidden = all_gather(x, ("model",), 1) @ all_gather(w1, ("data",), 0)
    return reduce_scatter(hidden @ all_gather(w2, ("data",), 1), ("model",), 1)


@functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P("data", "model")))
def by_compiler(x, w1, w2):
    return x @ w1 @ w2


arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w1, w2), LAYOUT.values(), strict=True)]
for name, function in (("shard_map", jax.jit(by_hand)), ("jit", by_compiler)):
    print(f"{name:9} equal to unsharded:", np.allclose(function(*arrays), unsharded, atol=1e-4))
draw(by_hand(*arrays), "y")

# %% [markdown]
# ## What the census says, and what goes wrong by leaving it to the compiler
#
# By hand, the program sends what was written: two weight gathers over `data`, one gather and one reduce-scatter of
# activations over `model`. The two weight gathers have the same size, so a summary by kind and bytes would show one;
# the ledger has an entry for each operand. The compiler, which is told the placements alone, gathers the same, and then
# sums with an all-reduce where a reduce-scatter is enough: twice the bytes over `model` for that sum. At the sizes
# above, with 512 x 8, that is 0.75 ms more for every pair of every layer, beside 2.1 ms of computation.

# %%
by_hand_census, by_compiler_census = mw.census(jax.jit(by_hand), *arrays), mw.census(by_compiler, *arrays)
for name, census in (("shard_map", by_hand_census), ("jit", by_compiler_census)):
    for e in census.ledger:
        print(f"{name:9} {e.kind:18} over {e.axes_label:10} {e.count} x {e.payload} bytes: {', '.join(e.operands)}")
weight_gathers = sum(e.count for e in by_hand_census.ledger if e.axes_label == "data")
print("weight gathers by hand:", weight_gathers)
for change in compare(by_hand_census.to_json(), by_compiler_census.to_json()):
    if change.part == "traffic":
        print(f"  {change.quantity}: {change.before:.0f} -> {change.after:.0f} bytes sent by a device")

# %% [markdown]
# ## All collectives, timed
#
# Every collective over both axes, with a megabyte each. The clock stops when the result is available, not when the call
# returns, and each result is checked. `meshwright bench collectives` does this for any mesh and writes CSV, JSON and a
# plot.

# %% loose
for t in time_collectives(mesh, tuple(COLLECTIVES), (2**20,)):
    result = "correct" if t.correct else "WRONG"
    print(f"{t.kind:15} over {t.axis:6} {t.seconds * 1e6:8.0f} us  {t.bus_bandwidth / 1e9:6.2f} GB/s  {result}")

# %% [markdown]
# Two all-to-alls cancel: rows over devices, columns over devices, rows again.

# %%
big = jax.random.normal(jax.random.PRNGKey(4), (1000, 1000))
exchange = manual(lambda x: all_to_all(x, ("data",), 1, 0), in_specs=P("data", None), out_specs=P(None, "data"))
back = manual(lambda x: all_to_all(x, ("data",), 0, 1), in_specs=P(None, "data"), out_specs=P("data", None))
print("there and back:", np.array_equal(back(exchange(big)), big))

# %% [markdown]
# ## An attention and MLP layer
#
# Sixteen heads of 64 are split over two devices, the batch over the other two. Queries, keys and values are split by
# columns, the output projection by rows, and so are the two matrices of the MLP. Two all-reduces complete the two
# pairs.

# %%
HIDDEN, HEADS = 1024, 16
names = ("wq", "wk", "wv", "wo", "up", "down")
shapes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)]
keys = jax.random.split(jax.random.PRNGKey(0), len(names))
weights = {n: jax.random.normal(k, s) * (2 / s[0]) ** 0.5 for n, k, s in zip(names, keys, shapes, strict=True)}
layouts = {n: P("model", None) if n in ("wo", "down") else P(None, "model") for n in names}


def layer(w, x, reduce):
    """One layer on the heads and features that `w` holds; `reduce` sums what is partial."""
    batch, seq, _ = x.shape
    q, k, v = ((x @ w[n]).reshape(batch, seq, -1, HIDDEN // HEADS) for n in ("wq", "wk", "wv"))
    scores = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q / HIDDEN**0.5, k), axis=-1)
    attention = jnp.einsum("bnqk,bknh->bqnh", scores, v).reshape(batch, seq, -1)
    x = x + reduce(attention @ w["wo"])
    return x + reduce(jax.nn.relu(x @ w["up"]) @ w["down"])


inputs = jax.random.normal(jax.random.PRNGKey(9), (2, 128, HIDDEN))
split_layer = jax.jit(
    manual(
        functools.partial(layer, reduce=lambda y: all_reduce(y, ("model",))),
        in_specs=(layouts, P("data")),
        out_specs=P("data"),
    )
)
placed = {n: jax.device_put(w, NamedSharding(mesh, layouts[n])) for n, w in weights.items()}
split_inputs = jax.device_put(inputs, NamedSharding(mesh, P("data")))
reference = layer(weights, inputs, reduce=lambda y: y)
sharded = split_layer(placed, split_inputs)
print("equal to one device:", np.allclose(reference, sharded, rtol=1e-3, atol=1e-3))
draw(sharded, "y", "BTD")

# %% [markdown]
# ## The census
#
# Two all-reduces of [1, 128, 1024] float32 over `model`: half a megabyte each.

# %%
census = mw.census(split_layer, placed, split_inputs)
for e in census.ledger:
    print(f"{e.kind} over {e.axes_label}: {e.count} x {e.payload:,} bytes")
print("findings:", len(census.findings))

# %% [markdown]
# ## Exercises
#
# **1.** The layer above has a batch of 2 and a sequence of 128. With `model=4, data=1` instead, what does a device
# send?

# %% [markdown] answer
# The all-reduces are of the whole batch now, 2 x 128 x 1,024 x 4 = 1 MiB each, over four devices: 2 x (2 MiB x 3/4) = 3
# MiB in all, against 2 x (1 MiB x 1/2) = 1 MiB on 2 x 2. Twice the payload, and a longer ring.

# %% answer
line = Mesh(np.array(jax.devices()), ("model",))
on_line = jax.shard_map(
    functools.partial(layer, reduce=lambda y: all_reduce(y, ("model",))),
    mesh=line, in_specs=(layouts, P()), out_specs=P(), check_vma=False,
)  # fmt: skip
sent = sum(e.sent for e in mw.census(jax.jit(on_line), weights, inputs, mesh={"model": 4}).ledger)
print(f"{sent / 2**20} MiB, on 2 x 2 {sum(e.sent for e in census.ledger) / 2**20} MiB")
assert sent == 3 * 2**20

# %% [markdown]
# **2.** A 70B model (F = 28,672) trains with 4M tokens a step on 1,024 devices whose links are all alike. Which X x Y?

# %% answer
X = (1024 * 4 * 2**20 / 28672) ** 0.5
print(f"X = {X:.0f}, Y = {1024 / X:.1f}")
assert 256 < X < 512  # powers of two: 256 x 4 or 512 x 2

# %% [markdown] answer
# sqrt(1,024 x 4,194,304 / 28,672) = 387: 256 x 4 or 512 x 2, whichever the planner's memory prefers.

# %% [markdown]
# **3.** Write the pair so that `w2` is gathered over `data` along its rows instead of its columns. Where must the spec
# change, and does the ledger?

# %% [markdown] answer
# `P(("model", "data"), None)`: both axes split the rows, `model` outermost, so that a gather over `data` gives the rows
# of one part of `model`. The bytes are the same.

# %% answer


@functools.partial(
    manual, in_specs=(P("data", "model"), P("data", "model"), P(("model", "data"), None)), out_specs=P("data", "model")
)
def other_layout(x, w1, w2):
    hidden = all_gather(x, ("model",), 1) @ all_gather(w1, ("data",), 0)
    return reduce_scatter(hidden @ all_gather(w2, ("data",), 0), ("model",), 1)


assert np.allclose(jax.jit(other_layout)(x, w1, w2), unsharded, atol=1e-4)
sent = {
    name: sum(e.sent for e in mw.census(jax.jit(f), x, w1, w2, mesh=dict(mesh.shape)).ledger)
    for name, f in (("columns", by_hand), ("rows", other_layout))
}
print(sent)
assert sent["rows"] == sent["columns"]

# %% [markdown]
# ## Summary
#
# - Each weight is split by both axes: one is gathered for use, the other stays split while it is used.
# - X = sqrt(N T / F) balances weights against activations, where links are alike; inside a node Y is cheaper still.
# - `shard_map` sends what is written; `jit` sends what the compiler thinks best. Compare both with an unsharded run and
#   with the census: numbers alone do not show a superfluous collective.
