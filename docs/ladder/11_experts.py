# %% [markdown]
# # 11. Experts
#
# **The question.** A mixture of experts has many feed-forward networks in a layer, and each token uses a few of them:
# with eight experts, of which a token uses two, the layer has eight times the parameters for twice the FLOPs. But which
# expert a token needs is known only when the token arrives.
# How do tokens get to experts that lie on other devices, and what if all of them want the same one?
#
# *Expert parallelism* splits the experts over an axis of the mesh, and sends tokens instead of weights: an all-to-all
# to the experts, and one back (GShard, [arXiv:2006.16668](https://arxiv.org/abs/2006.16668)).

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm.collectives import all_gather, all_to_all
from meshwright.hardware.chips import CHIPS
from meshwright.views.draw import picture_of, side_by_side

mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
n, E, K, D, F = 4, 8, 2, 32, 64  # devices, experts, experts of a token, width, width of an expert

# %% [markdown]
# ## The picture
#
# Tokens and experts are split over the same four devices: each has a quarter of the tokens, and two experts whole. What
# goes through the network is a buffer of rows `[E, C, D]`: for each expert, room for C tokens of this device. Before
# the all-to-all a device has rows for all experts; after it, the rows of all devices for its own two.

# %%
shape, C = {"expert": 4}, 24
side_by_side(
    picture_of("experts", (E, D, F), "EDF", (("expert",), (), ()), shape),
    picture_of("rows of all senders", (n * E, C, D), "ECD", (("expert",), (), ()), shape),
)

# %% [markdown]
# ## The arithmetic
#
# A token's row of D bfloat16 numbers travels to each of its k experts and back, unless the expert is on its own device:
# 2 x 2 k D (n-1)/n bytes for each token and layer, twice that with the backward pass. There it meets 6 k D F FLOPs
# (three matrices), three times that in training. Computation covers it while 18 k D F / peak > 8 k D / bandwidth, or
# **F > 0.44 peak / bandwidth**: the width of one expert decides, and fine-grained experts are the hard ones.

# %%
h100 = CHIPS["h100"]
for name, bandwidth in (("NVLink", h100.interconnect.link_bandwidth), ("network", h100.network_bandwidth)):
    print(f"H100, {name}: F > 8/18 x 989e12 / {bandwidth / 1e9:.0f}e9 = {8 / 18 * h100.flops_bf16 / bandwidth:,.0f}")
for name, width, expert, k, active, total in (
    ("Mixtral 8x7B", 4096, 14336, 2, 12.9e9, 46.7e9),
    ("DeepSeek-V3", 7168, 2048, 8, 37e9, 671e9),
):
    sent = 2 * 2 * k * width
    print(
        f"{name}: F = {expert:,}; a token sends {sent / 1024:.0f} KiB a layer, uses {active / total:.0%} of parameters"
    )

# %% [markdown]
# Mixtral's experts are wide enough even for the network. DeepSeek-V3's are wide enough for NVLink only: it sends 8-bit
# rows, limits a token to four nodes, and overlaps two batches.
#
# ## The few lines
#
# The router gives each token its k best experts and their weights. For each expert a device puts its tokens into the
# expert's C places, in order. Tokens beyond C are *dropped*: their row stays zero, and the residual stream passes them
# by.

# %%


def route(x, router):
    weights, experts = jax.lax.top_k(jax.nn.softmax(x @ router), K)
    return weights / weights.sum(-1, keepdims=True), experts


def mixture(x, router, up, down, capacity):
    """The layer on one device: x [T, D] are its tokens, up and down its experts; an all-to-all there and one back."""
    weights, experts = route(x, router)
    mine = jax.nn.one_hot(experts, E, dtype=jnp.int32)  # [T, K, E]
    order = mine.reshape(-1, E).cumsum(0).reshape(mine.shape) - mine
    place = (order * mine).sum(-1)  # how many of this device's tokens chose the same expert before
    rows = jnp.zeros((E, capacity, D)).at[experts, place].set(x[:, None], mode="drop")
    at_experts = all_to_all(rows, ("expert",), 0, 1)  # [E/n, n C, D]
    hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", at_experts, up))
    back = all_to_all(jnp.einsum("ecf,efd->ecd", hidden, down), ("expert",), 1, 0)
    kept = place < capacity
    outputs = back[experts, jnp.minimum(place, capacity - 1)] * kept[..., None]
    return (outputs * weights[..., None]).sum(1), kept


def on_mesh(capacity):
    layer = functools.partial(mixture, capacity=capacity)
    specs = (P("expert"), P(), P("expert"), P("expert"))
    return jax.jit(
        jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(P("expert"), P("expert")), check_vma=False)
    )


def one_after_another(x, router, up, down):
    """The same without a mesh: every expert on every token, weighted."""
    weights, experts = route(x, router)
    everything = jnp.einsum("etf,efd->etd", jax.nn.silu(jnp.einsum("td,edf->etf", x, up)), down)
    chosen = everything[experts, jnp.arange(len(x))[:, None]]
    return (chosen * weights[..., None]).sum(1)


keys = jax.random.split(jax.random.key(0), 4)
x = jax.random.normal(keys[0], (256, D))
router = jax.random.normal(keys[1], (D, E)) / D**0.5
up, down = (jax.random.normal(keys[i], s) / s[1] ** 0.5 for i, s in ((2, (E, D, F)), (3, (E, F, D))))
out, kept = on_mesh(64)(x, router, up, down)
print("nothing dropped:", bool(kept.all()))
print("equal to one device:", np.allclose(out, one_after_another(x, router, up, down), atol=1e-5))

# %% [markdown]
# ## What the census says
#
# Two all-to-alls of the buffer, whatever the tokens choose: E x C x D float32 on each of four devices, of which a
# quarter stays. Their payload is that of the *places*, not of the tokens: capacity is paid for in full.

# %%
for capacity in (24, 64):
    ledger = mw.census(on_mesh(capacity), x, router, up, down, mesh={"expert": 4}).ledger
    for e in ledger:
        print(f"C = {capacity}: {e.kind} over {e.axes_label}: {e.count} x {e.payload:,} bytes, {e.sent:,.0f} sent")

# %% [markdown]
# A device has 64 tokens with two experts each: 128 rows for 8 experts, 16 for each if the load is even. C = 24 is a
# *capacity factor* of 24 / 16 = 1.5.
#
# ## What goes wrong: everybody wants the same expert
#
# Nothing makes a router balanced. An expert that is a little better gets more tokens, learns more, and gets better: the
# others starve, and the tokens beyond the capacity are dropped without an error. Here one expert's logits are raised.

# %%
for shift in (0.0, 1.0, 2.0):
    tokens = x + shift * router[:, 0] / (router[:, 0] ** 2).sum()
    _, kept = on_mesh(24)(tokens, router, up, down)
    _, experts = route(tokens, router)
    load = np.bincount(np.asarray(experts).ravel(), minlength=E)
    print(f"expert 0 raised by {shift}: rows of each expert {load}, dropped {1 - kept.mean():.0%}")

# %% [markdown]
# The *load-balancing loss* is E times the sum over experts of (fraction of rows) x (mean probability). It is 1 where
# both are even, and its gradient lowers the probability of what is overused. Dropless mixtures (MegaBlocks,
# [arXiv:2211.15841](https://arxiv.org/abs/2211.15841)) sort rows by expert instead, and multiply groups of unequal
# size: nothing is dropped, and the device of the popular expert is the one for which all others wait.

# %%


def balance_loss(router, tokens):
    probabilities = jax.nn.softmax(tokens @ router)
    _, experts = jax.lax.top_k(probabilities, K)
    fraction = jax.nn.one_hot(experts, E).mean((0, 1))
    return E * (fraction * probabilities.mean(0)).sum()


balanced = router
print(f"balance loss {balance_loss(router, x):.3f}, of the raised tokens {balance_loss(router, tokens):.3f}", end="")
for _ in range(200):
    balanced -= 0.3 * jax.grad(balance_loss)(balanced, tokens)
print(f", after 200 steps on it alone {balance_loss(balanced, tokens):.3f}")
_, kept = on_mesh(24)(tokens, balanced, up, down)
print(f"dropped {1 - kept.mean():.0%}")

# %% [markdown]
# ## Instead of tokens, the weights?
#
# FSDP would gather all experts on every device: E x 3 D F x 2 bytes in each layer. Tokens are cheaper while 2 x 2 k D T
# < 3 x 2 E D F, so while a device has fewer than T = 1.5 E F / k tokens: 86,016 for Mixtral. Large batches of small
# experts may well gather. The census of both, at the size of this page:

# %%


@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("expert"), P(), P("expert"), P("expert")),
    out_specs=P("expert"),
    check_vma=False,
)
def gathered(x, router, up, down):
    return one_after_another(x, router, *(all_gather(w, ("expert",), 0) for w in (up, down)))


print("equal:", np.allclose(gathered(x, router, up, down), out, atol=1e-5))
for name, function in (("tokens", on_mesh(24)), ("weights", jax.jit(gathered))):
    census = mw.census(function, x, router, up, down, mesh={"expert": 4})
    print(f"{name:7} {sum(e.sent for e in census.ledger):8,.0f} bytes sent, findings: {len(census.findings)}")

# %% [markdown]
# ## Exercises
#
# **1.** Mixtral 8x7B: 32 layers, D = 4,096, F = 14,336, 8 experts, 2 of a token. Attention has 41.9M parameters a
# layer, embedding and unembedding 262M. How many parameters has it, and how many does a token use?

# %% answer
dense = 32 * 41.9e6 + 262e6
total, active = (dense + 32 * experts * 3 * 4096 * 14336 for experts in (8, 2))
print(f"{total / 1e9:.1f}B, {active / 1e9:.1f}B")
assert round(total / 1e9, 1) == 46.7 and round(active / 1e9, 1) == 12.9

# %% [markdown]
# **2.** With an even router, does a capacity factor of 1 drop nothing?

# %% [markdown] answer
# It drops plenty: "even" is an average. 128 rows thrown at 8 experts scatter around 16 with a standard deviation of
# sqrt(128 x 1/8 x 7/8) = 3.7, and what is above 16 is dropped, nearly a tenth. Factors of 1.25 to 2 are usual.

# %% answer
rng = np.random.default_rng(0)
loads = rng.multinomial(128, [1 / 8] * 8, size=10000)
for factor in (1.0, 1.25, 1.5, 2.0):
    print(factor, f"{np.maximum(loads - 16 * factor, 0).sum() / loads.sum():.1%}")
assert 0.08 < np.maximum(loads - 16, 0).sum() / loads.sum() < 0.1

# %% [markdown]
# **3.** DeepSeek-V3 sends a token's 7,168 numbers to 8 experts in 8 bits and gets them back in 16, in 58 layers. How
# long does a GPU of 50 GB/s to the network need for 4,096 tokens, if none of the experts is near? And if a token goes
# to at most four nodes, where NVLink distributes it?

# %% answer
rows = 4096 * 7168 * (1 + 2) * 58
direct, by_node = 8 * rows / 50e9, 4 * rows / 50e9
print(f"{direct:.2f} s, {by_node:.2f} s forward; 6 x 37e9 x 4096 FLOPs take {6 * 37e9 * 4096 / 989e12:.2f} s")
assert round(direct, 2) == 0.82 and by_node == direct / 2

# %% [markdown] answer
# 8 x 4,096 x 7,168 x 3 x 58 bytes / 50 GB/s = 0.82 s, about the time of all its FLOPs at peak, 0.92 s. Limiting the
# nodes halves it.

# %% [markdown]
# ## Summary
#
# - Experts split over an axis: tokens travel, by two all-to-alls in each layer, 4 k D bytes of a token forward.
# - Above F = 0.44 peak / bandwidth computation covers them. Finer experts need fewer bytes, fewer nodes, or overlap.
# - Capacity is paid for in full and drops the rest; dropless waits for the most popular expert. Balance is trained.
# - `--mesh expert=8` in a Run: [dispatch, capacity, exchange types](../parallelism.md#experts-expert).
