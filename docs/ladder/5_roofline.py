# %% [markdown]
# # 5. Roofline
#
# **The question.** In a second a v5p computes 459e12 FLOPs at best, reads 2.8e12 bytes from its memory, and sends
# 180e9 around a ring: 90e9 over the link of each direction. A layer needs all three. Which of them does it wait for,
# and what would have to change for another one to be the limit?
#
# A *roofline* is the largest of three quotients: FLOPs / peak, bytes of HBM / its bandwidth, bytes sent / link
# bandwidth ([Williams et al. 2009](https://doi.org/10.1145/1498765.1498785)). It is the best that a program can do.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hardware.chips import CHIPS
from meshwright.views.draw import Box, Panel, PanelPicture, side_by_side

chips = {name: CHIPS[name] for name in ("v5p", "h100")}
# Bytes per second that a device sends in a collective: both directions of one ring of a TPU's torus, or NVLink.
rings = {
    "v5p": 2 * chips["v5p"].interconnect.link_bandwidth,
    "h100": chips["h100"].interconnect.link_bandwidth,
}
for name, chip in chips.items():
    print(
        f"{name:5} {chip.flops_bf16 / 1e12:.0f} TFLOP/s; FLOPs for a byte of HBM: "
        f"{chip.flops_bf16 / chip.hbm_bandwidth:.0f}, for a byte sent: {chip.flops_bf16 / rings[name]:,.0f}"
    )

# %% [markdown]
# ## The arithmetic
#
# A product of `x[T, D]` and `w[D, F]` in bfloat16 has 2 T D F FLOPs, and reads and writes 2 (T D + D F + T F) bytes.
# While T is small, the weight is nearly all of them: 2 T D F FLOPs for 2 D F bytes, so T FLOPs for a byte. **It waits
# for HBM while T < peak / bandwidth**: 166 tokens on a v5p, 295 on an H100, whatever the width.
#
# The pair of matrices of a layer on n devices (the next chapter splits it) has 4 T D F / n FLOPs, reads 4 D F / n bytes
# of weights, and sums an array of T x D: 4 T D (n-1)/n bytes sent. FLOPs and weights shrink with n, the sum does not:
# **it waits for the links while n > F x bandwidth / peak**, with the bandwidth of a ring.

# %%
D, F = 8192, 28672


def seconds(name, T, n):
    """The three quotients of a pair of matrices for T tokens on n devices."""
    chip = chips[name]
    flops = 4 * T * D * F / n / chip.flops_bf16
    hbm = 2 * (2 * D * F / n + 2 * T * D + 2 * T * F / n) / chip.hbm_bandwidth
    sent = 4 * T * D * (n - 1) / n / rings[name]
    return {"FLOPs": flops, "HBM": hbm, "link": sent}


for T, n in ((16, 1), (4096, 1), (4096, 8), (4096, 64)):
    of_pair = seconds("v5p", T, n)
    parts = ", ".join(f"{limit} {s * 1e3:.3f}" for limit, s in of_pair.items())
    print(f"T {T:5}, n {n:3}: {parts} ms: waits for {max(of_pair, key=of_pair.get)}")

# %% [markdown]
# ## The picture: who is the limit
#
# Rows are tokens, columns devices. At the top the weights are read for a few tokens; at the right the sum is all that
# is left. Training lives in the lower left.


# %%
def limits(name):
    tokens, devices = [4**k for k in range(1, 8)], [1, 2, 4, 8, 16, 32]
    cells = []
    for row, T in enumerate(tokens):
        for column, n in enumerate(devices):
            of_pair = seconds(name, T, n)
            limit = max(of_pair, key=of_pair.get)
            tip = f"{T} tokens on {n} devices: {of_pair[limit] * 1e3:.3f} ms"
            cells.append(Box(row, column, (), list(of_pair).index(limit), tip, limit))
    panel = Panel("", len(tokens), len(devices), tuple(cells), 330, 190, 2, "tokens 4 to 16,384", "devices 1 to 32")
    return PanelPicture(f"limit of a layer on {name}", (), (panel,))


side_by_side(limits("v5p"), limits("h100"))

# %% [markdown]
# ## What the census says
#
# FLOPs and bytes of a compiled product, for three T: the quotient, the *arithmetic intensity*, is what the formula
# says. (float32 here, so half as many FLOPs for a byte.)

# %%
for T in (8, 128, 2048):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((T, 1024), (1024, 4096)))
    flops = mw.census(jnp.dot, x, w).flops
    formula = 2 * T * 1024 * 4096 / (4 * (T * 1024 + 1024 * 4096 + T * 4096))
    print(f"T {T:4}: {flops.compiled / 1e6:8.1f} MFLOPs, {flops.intensity:5.1f} for a byte, by formula {formula:5.1f}")

# %% [markdown]
# And what is sent: the same pair on eight devices, its sum once for all of F.

# %%
mesh = Mesh(jax.devices(), ("tensor",))
shapes = {"x": ((2048, 512), P()), "a": ((512, 2048), P(None, "tensor")), "b": ((2048, 512), P("tensor"))}
arrays = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in shapes.values()]
pair = jax.jit(lambda x, a, b: jax.nn.gelu(x @ a) @ b, out_shardings=NamedSharding(mesh, P()))
census = mw.census(pair, *arrays)
for e in census.ledger:
    print(
        f"{e.kind} over {e.axes_label}: {e.sent:,.0f} bytes sent, {census.flops.compiled / e.sent:.0f} FLOPs for each"
    )

# %% [markdown]
# 4 T D F / n over 8 T D (n-1)/n bytes of float32 is F / (2 (n-1)) = 146. A v5p computes 2,550 FLOPs while a byte
# is sent around a ring: this width waits for its links.
#
# ## What goes wrong: peak FLOPs that nobody can use
#
# Generating text multiplies one token of each sequence with all weights. Twice the FLOP/s would change nothing: 70e9
# parameters in bfloat16 are 140 GB, read for every token.

# %%
for name, chip in chips.items():
    for batch in (1, 64, 1024):
        reading, computing = 2 * 70e9 / 8 / chip.hbm_bandwidth, 2 * 70e9 * batch / 8 / chip.flops_bf16
        step = max(reading, computing)
        print(f"{name:5} batch {batch:4}: {step * 1e3:5.1f} ms for a token, {computing / step:4.0%} of the peak")

# %% [markdown]
# The same holds for everything that is not a matrix product: a norm, an activation, an optimizer. AdamW reads and
# writes some 28 bytes for each parameter and computes a dozen FLOPs: it takes the time of its bytes. Compilers fuse
# such work into its neighbours, which saves the bytes in between, and that is all that fusing does.
#
# ## Exercises
#
# **1.** A norm of T x D numbers in bfloat16 is read once and written once. Which fraction of a layer's time is it, with
# 4,096 tokens, D = 8,192, F = 28,672, on one v5p?

# %% answer
chip = chips["v5p"]
norm = 2 * 2 * 4096 * 8192 / chip.hbm_bandwidth
layer = seconds("v5p", 4096, 1)["FLOPs"]
print(f"{norm * 1e6:.0f} us of {layer * 1e3:.1f} ms: {norm / layer:.1%}")
assert round(norm / layer, 3) == 0.006

# %% [markdown] answer
# Little, as long as it is not split differently: the layer shrinks by n under tensor parallelism, and a norm of whole
# rows does not. That is what sequence parallelism mends.

# %% [markdown]
# **2.** A kernel multiplies two 8,192 x 8,192 matrices in float32 with tiles of 128 x 128, then of 1,024 x 1,024. Each
# tile of the result reads its rows of one and its columns of the other. What is the limit on a v5p?

# %% [markdown] answer
# 4 N^3 (1/b + 1/b) bytes: b / 4 FLOPs for a byte. 32 is below 166, 256 above. [Problem 9](problems/index.md) is this
# kernel.

# %% answer
N = 8192
for tile in (128, 1024):
    hbm, flops = 4 * N**3 * 2 / tile / chip.hbm_bandwidth, 2 * N**3 / chip.flops_bf16
    print(f"tile {tile:4}: HBM {hbm * 1e3:.1f} ms, FLOPs {flops * 1e3:.1f} ms")
    assert (hbm > flops) == (tile == 128)

# %% [markdown]
# **3.** A chip of the next generation has four times the FLOP/s, twice the bandwidth of HBM and the same links. What
# happens to the number of tokens from which a product computes, and to the number of devices for a layer?

# %% answer
tokens, devices = chip.flops_bf16 / chip.hbm_bandwidth, F * rings["v5p"] / chip.flops_bf16
print(f"tokens {tokens:.0f} -> {tokens * 4 / 2:.0f}; devices {devices:.1f} -> {devices / 4:.1f}")
assert round(tokens * 2) == 332

# %% [markdown]
# ## Summary
#
# - Time is at least the largest of FLOPs / peak, HBM bytes / bandwidth, sent bytes / link bandwidth.
# - A product waits for HBM below peak / bandwidth tokens: 166 on a v5p, 295 on an H100.
# - Splitting a layer shrinks its FLOPs and weights, and not its sum: at some n the links are the limit.
# - What is not a matrix product waits for HBM.
