# %% [markdown]
# # 12. Context
#
# **The question.** A document of 131,072 tokens is one sample: the batch cannot split it, so 64 devices need 64 of
# them in every step, or several devices have to share one. Splitting the sequence is easy for every layer that treats
# tokens alike. Attention does not: each token looks at all before it. What must move, and who has how much work?
#
# *Context parallelism* splits the sequence over devices. Either keys and values travel around a ring (ring attention,
# [arXiv:2310.01889](https://arxiv.org/abs/2310.01889)), or heads are exchanged for positions (Ulysses,
# [arXiv:2309.14509](https://arxiv.org/abs/2309.14509)).

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm.collectives import all_to_all, axis_index, ring_shift
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.targets import parse_target
from meshwright.planner.search import price_run
from meshwright.sharding.sequence import SequenceSplit
from meshwright.views.draw import ArrayPicture, side_by_side

n, T, N, H = 4, 64, 8, 16  # devices, tokens, heads, size of a head
mesh = jax.make_mesh((n,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))

# %% [markdown]
# ## The picture
#
# Two ways to give eight chunks of a sequence to four devices: in order, or *zigzag*, one from the front and one from
# the back. The reason is the causal mask, below.

# %%
zigzag = SequenceSplit("ring", seq=T, shards=n, group=1)
orders = {"in order": np.arange(T).reshape(n, -1), "zigzag": zigzag.position_order().reshape(n, -1)}


def chunks(name, order):
    cuts = tuple(range(0, T + 1, T // (2 * n)))
    holder = {int(p): device for device, positions in enumerate(order) for p in positions}
    return ArrayPicture(name, (T,), ("T/context",), (cuts,), {(i,): (holder[cut],) for i, cut in enumerate(cuts[:-1])})


side_by_side(*(chunks(name, order) for name, order in orders.items()))

# %% [markdown]
# ## The arithmetic
#
# *Memory.* The scores of all pairs would be N T^2 numbers: 32 heads, 131,072 tokens, 2 bytes: 1.1 TB a layer. Nobody
# keeps them: attention works block by block with a running maximum and sum, and keeps T x D. What remains is linear in
# T, and an n-th of it lies on each of n devices.
#
# *Time.* In each of n hops a device multiplies its T/n queries with T/n keys and values, 4 (T/n)^2 N H FLOPs, while the
# next block of 2 x 2 (T/n) K H bytes is on its way (K key/value heads, bfloat16). It is overlapped while **T/n >
# peak / bandwidth x K / N**. Half of the pairs are masked, so count twice that.

# %%
print(f"scores: 32 x 131072^2 x 2 bytes = {32 * 131072**2 * 2 / 1e12:.1f} TB")
h100, v5p = CHIPS["h100"], CHIPS["v5p"]
for name, chip, bandwidth in (
    ("H100, NVLink", h100, h100.interconnect.link_bandwidth),
    ("H100, network", h100, h100.network_bandwidth),
    ("v5p, one direction of a ring", v5p, v5p.interconnect.link_bandwidth),
):
    tokens = chip.flops_bf16 / bandwidth * 8 / 32
    print(f"{name:28} T/n > {chip.flops_bf16 / bandwidth:6,.0f} x 8/32 = {tokens:5,.0f}, causal {2 * tokens:6,.0f}")

# %% [markdown]
# ## The few lines
#
# A block's softmax is not final: a later block may hold a larger score. So each device keeps its unnormalised output,
# the maximum so far, and the sum of exponentials so far, and rescales both when the maximum grows. After n blocks it
# divides.

# %%


def add_block(state, q, kv, visible):
    """Adds a block of keys and values to the running attention of queries q [Q, N, H]; visible [Q, K]."""
    out, largest, total = state
    scores = jnp.einsum("qnh,knh->nqk", q, kv[0]) / H**0.5
    scores = jnp.where(visible, scores, -1e30)
    new_largest = jnp.maximum(largest, scores.max(-1))
    weights = jnp.where(visible, jnp.exp(scores - new_largest[..., None]), 0)
    rescale = jnp.exp(largest - new_largest)
    out = out * rescale.T[..., None] + jnp.einsum("nqk,knh->qnh", weights, kv[1])
    return out, new_largest, total * rescale + weights.sum(-1)


def ring_attention(q, k, v, order):
    me, kv = axis_index(("context",)), jnp.stack([k, v])
    state = (jnp.zeros_like(q), jnp.full((N, len(q)), -1e30), jnp.zeros((N, len(q))))
    for hop in range(n):
        visible = order[me][:, None] >= order[(me - hop) % n][None]
        state = add_block(state, q, kv, visible)
        kv = ring_shift(kv, "context", 1) if hop < n - 1 else kv
    return state[0] / state[2].T[..., None]


def on_mesh(attention, order):
    """Attention of whole arrays [T, N, H], their rows split over the mesh in the given order of positions."""
    split = jax.shard_map(
        functools.partial(attention, order=jnp.asarray(order)),
        mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False,
    )  # fmt: skip
    back = np.argsort(order.ravel())
    return jax.jit(lambda q, k, v: split(*(x[order.ravel()] for x in (q, k, v)))[back])


def reference(q, k, v):
    scores = jnp.einsum("qnh,knh->nqk", q, k) / H**0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("nqk,knh->qnh", jax.nn.softmax(scores), v)


q, k, v = jax.random.normal(jax.random.key(0), (3, T, N, H))
for name, order in orders.items():
    out = on_mesh(ring_attention, order)(q, k, v)
    print(f"{name:8} equal to one device:", np.allclose(out, reference(q, k, v), atol=1e-5))

# %% [markdown]
# ## What the census says
#
# n - 1 = 3 shifts of keys and values: 2 x 16 x 8 x 16 float32 = 16,384 bytes each. The census is of the attention
# alone; outside, a loader puts tokens into zigzag order once, and nothing is ever put back.

# %%
split = jax.shard_map(
    functools.partial(ring_attention, order=jnp.asarray(orders["zigzag"])),
    mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False,
)  # fmt: skip
census = mw.census(jax.jit(split), q, k, v, mesh={"context": n})
for e in census.ledger:
    print(f"{e.kind} over {e.axes_label}: {e.count} x {e.payload:,} bytes")
print("findings:", len(census.findings))

# %% [markdown]
# ## What goes wrong: the last device has all the work
#
# Under a causal mask the first tokens see little and the last see everything. In order, the last of four devices has 7
# of 16 parts of the pairs and the first has one; all wait for the last in every layer, 1.75 times as long as an even
# share. The zigzag gives everyone a cheap and an expensive chunk.

# %%
for name, order in orders.items():
    pairs = (order + 1).sum(1)
    print(f"{name:8} visible pairs of each device {pairs}, slowest over mean {pairs.max() / pairs.mean():.2f}")

# %% [markdown]
# The other mistake is quieter: to average the blocks' own softmaxes. Each block's weights sum to one there, so a block
# of irrelevant tokens counts as much as the relevant one.

# %%


def without_rescaling(q, k, v, order):
    me, kv, out = axis_index(("context",)), jnp.stack([k, v]), 0
    for hop in range(n):
        start = (jnp.zeros_like(q), jnp.full((N, len(q)), -1e30), jnp.full((N, len(q)), 1e-30))
        block, _, total = add_block(start, q, kv, order[me][:, None] >= order[(me - hop) % n][None])
        out += block / total.T[..., None] / n
        kv = ring_shift(kv, "context", 1)
    return out


wrong = on_mesh(without_rescaling, orders["zigzag"])(q, k, v)
print(
    f"largest error {abs(wrong - reference(q, k, v)).max():.2f} in values of size {abs(reference(q, k, v)).mean():.2f}"
)

# %% [markdown]
# ## At full size, by plan
#
# Llama 3 8B with sequences of 131,072 tokens on 64 H100: one sequence on each device, or each over several. `context`
# splits activations and no parameters, so it is combined with `fsdp`. Without it the smallest step of 64 devices is 64
# sequences, 8.4M tokens, which is more than most runs want; with eight devices for a sequence it is 1M.

# %%
for degrees, batch in (("fsdp=64", 64), ("fsdp=32,context=2", 32), ("fsdp=8,context=8", 8)):
    run = mw.recipe("llama3-8b", mesh=degrees, seq=131072, batch=batch, vocab=128256, remat="full")
    e = price_run(run, parse_target("h100:64")).estimate
    memory = f"{e.bytes / 1e9:5.1f} of 80 GB, fits {e.fits!s:5}"
    print(f"{degrees:17} {batch} sequences: {memory}, step {e.seconds:5.1f} s, MFU {e.mfu:.0%}")

# %% [markdown]
# ## Exercises
#
# **1.** A window of 16 tokens, T = 64 on four devices in order. How many hops does the ring need?

# %% [markdown] answer
# A query sees 15 tokens back, so its own block of 16 and the one before: one hop instead of three.

# %% answer
positions = orders["in order"]
needed = []
for hop in range(n):
    distance = [positions[me][:, None] - positions[me - hop][None] for me in range(hop, n)]
    needed += [hop] if any(((d >= 0) & (d < 16)).any() for d in distance) else []
print("blocks needed, by hops away:", needed)
assert needed == [0, 1]

# %% [markdown]
# **2.** Write Ulysses: exchange heads for positions, attend to the whole sequence with N/n heads, and exchange back.
# What does it send against the ring, and what limits it?

# %% [markdown] answer
# Queries, keys, values and outputs, each T/n x N x H numbers of which 3/4 leave: 4 x 16 x 8 x 16 x 4 bytes x 3/4 =
# 24,576 against the ring's 3 x 16,384 = 49,152. It needs n to divide the key/value heads: with K = 8, n <= 8. With
# grouped queries (K = N/4) the ring sends a quarter of that.

# %% answer


def ulysses(q, k, v):
    q, k, v = (all_to_all(x, ("context",), 1, 0) for x in (q, k, v))  # [T, N/n, H]
    return all_to_all(reference(q, k, v), ("context",), 0, 1)


exchanged = jax.jit(jax.shard_map(ulysses, mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False))
assert np.allclose(exchanged(q, k, v), reference(q, k, v), atol=1e-5)
ledgers = [mw.census(f, q, k, v, mesh={"context": n}).ledger for f in (exchanged, jax.jit(split))]
sent = [sum(e.sent for e in ledger) for ledger in ledgers]
print("bytes sent, Ulysses and ring:", sent)
assert sent == [24576, 49152]

# %% [markdown]
# **3.** Over how many nodes of eight H100 can a sequence of 1M tokens be split in a ring, before the network is too
# slow? N = 32, K = 8, causal.

# %% answer
least = 2 * h100.flops_bf16 / h100.network_bandwidth * 8 / 32
print(f"T/n > {least:,.0f}: n < {2**20 / least:.0f}")
assert 104 < 2**20 / least < 108  # thirteen nodes; a ring of powers of two: 64 GPUs

# %% [markdown] answer
# T/n > 9,890, so n < 106: thirteen nodes, or eight in powers of two. (One transfer of a ring crosses the network at
# each node's edge, and all wait for the slowest.)

# %% [markdown]
# ## Summary
#
# - Split the sequence: activations by n, and attention moves keys and values (ring) or heads (Ulysses).
# - T/n > peak / bandwidth x K / N, twice that under a causal mask: long sequences overlap it.
# - Running maximum and sum make blocks exact; zigzag makes the work even.
# - `--mesh context=8` in a Run: [strategies and kernels](../parallelism.md#context).
