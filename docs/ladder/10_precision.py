# %% [markdown]
# # 10. Precision
#
# **The question.** Half the bits are half the bytes on every link and in every memory, and twice the FLOP/s. Which
# numbers of a training step can be small, what does each lose, and what breaks without a word?
#
# A float has a sign, an exponent, which says how large, and a significand, which says how exactly. bfloat16 has the
# exponent of float32 and 8 bits of significand: nothing overflows, and every number is wrong by up to 0.4 %.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm.collectives import all_gather
from meshwright.hardware.chips import CHIPS
from meshwright.views.draw import Box, Panel, PanelPicture

FORMATS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10), "e4m3": (4, 3), "e5m2": (5, 2)}
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}

# %% [markdown]
# ## The picture
#
# Bits of each format: sign, exponent, significand.


# %%
def bits(name, row):
    exponent, significand = FORMATS[name]
    for column in range(1 + exponent + significand):
        kind = 0 if column == 0 else 1 if column <= exponent else 2
        yield Box(row, column, (), kind, f"{name}: bit {column}", "see"[kind] if kind < 2 else "m")


cells = tuple(box for row, name in enumerate(FORMATS) for box in bits(name, row))
PanelPicture("s sign, e exponent, m significand", tuple(FORMATS), (Panel("", len(FORMATS), 32, cells, 560, 110, 1),))

# %% [markdown]
# ## The arithmetic
#
# With m stored bits of significand, neighbours are 2^-m apart between 1 and 2, and rounding is wrong by half of that at
# most. A product of sums of K terms averages the errors out: the result is relatively as wrong as one operand, not K
# times. A *sum in low precision* is another matter: once it is 2^(m+1) times the addend, adding changes nothing.

# %%
for name, dtype in DTYPES.items():
    info = jnp.finfo(dtype)
    print(f"{name:9} step {float(info.eps):8.4%} of the value, largest {float(info.max):.3g}")
total = jnp.bfloat16(0)
for _ in range(1000):
    total += jnp.bfloat16(1)
print("1 + 1 + ... a thousand times in bfloat16:", total)

# %% [markdown]
# ## The few lines: a product with small operands
#
# Operands are scaled so that the largest just fits, rounded, multiplied, and added up **in float32**. One scale for a
# tensor is enough for a float; an integer, whose step is the same everywhere, wants one for each row or column.

# %%
x = jax.random.normal(jax.random.key(0), (256, 1024))
w = jax.random.normal(jax.random.key(1), (1024, 256)) / 32
exact = x @ w


def rounded(a, dtype, axis):
    """The values of a, rounded to a format under a scale for each row or column."""
    largest = {jnp.int8: 127, jnp.float8_e4m3fn: 448, jnp.float8_e5m2: 57344}.get(dtype, 1)
    scale = jnp.abs(a).max(axis, keepdims=True) / largest
    scaled = a / scale
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype).astype(jnp.float32) * scale


for name, dtype in {**DTYPES, "int8": jnp.int8}.items():
    product = rounded(x, dtype, 1) @ rounded(w, dtype, 0)
    error = float(jnp.linalg.norm(product - exact) / jnp.linalg.norm(exact))
    print(f"{name:9} relative error of the product {error:.3%}")

# %% [markdown]
# ## What each number can be
#
# | number | in | because |
# |---|---|---|
# | operands of matrix products | bfloat16; fp8 or int8 with scales | errors average out over thousands of terms |
# | sums inside a product, log-sum-exp, norms | float32 | a long sum stops growing |
# | gathered weights | bfloat16 or less | multiplied once, then dropped |
# | sums of gradients over devices | float32 or bfloat16 | n addends: an error of each, no drift |
# | weights and moments | float32, or 16 bits with care | a step changes them by less than a rounding |
#
# ## What the census says
#
# FSDP gathers what it multiplies with: cast first, then gather, and half of the bytes cross. The other order is as
# exact, and sends twice as much. (XLA for CPUs gathers bfloat16 as float32; here its bits travel as integers.)

# %%
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
whole = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
ways = {
    "gather, then cast": lambda w: w,
    "cast, then gather": lambda w: jax.lax.bitcast_convert_type(w.astype(jnp.bfloat16), jnp.uint16),
    "int8, then gather": lambda w: jnp.round(w / jnp.abs(w).max() * 127).astype(jnp.int8),
}
for name, way in ways.items():
    (entry,) = mw.census(jax.jit(whole(lambda w, way=way: all_gather(way(w), ("fsdp",), 0))), w).ledger
    print(f"{name}: {entry.kind} of {entry.operands[0]}, {entry.sent:,.0f} bytes sent")

# %% [markdown]
# ## What goes wrong: a step that rounds away
#
# Adam changes a weight by about the learning rate. In bfloat16 the neighbours of 0.02 are 0.00012 apart: a step of 3e-5
# rounds back to where it was, a thousand times in a row, and the loss just stops falling.

# %%
start, rate = jnp.full(1000, 0.02, jnp.bfloat16), 3e-5
nearest, random, master = start, start, start.astype(jnp.float32)
for step in range(100):
    nearest = (nearest.astype(jnp.float32) + rate).astype(jnp.bfloat16)
    master = master + rate
    exactly = random.astype(jnp.float32) + rate
    noise = jax.random.randint(jax.random.key(step), (1000,), 0, 1 << 16).astype(jnp.uint32)
    up = jax.lax.bitcast_convert_type(exactly, jnp.uint32) + noise  # carries with the probability of the remainder
    random = jax.lax.bitcast_convert_type((up >> 16).astype(jnp.uint16), jnp.bfloat16)
for name, weight in (("to the nearest", nearest), ("stochastic", random), ("float32 master", master)):
    print(f"{name:15} 0.02 + 100 x 3e-5 = {float(weight.astype(jnp.float32).mean()):.4f}")

# %% [markdown]
# Two ways out: a float32 master of every weight, or rounding up with the probability of the remainder, right on
# average. Both are options of the [trainer](../precision.md#bfloat16-parameters).
#
# ## Exercises
#
# **1.** From which size of a weight is a step of 3e-5 lost in bfloat16?

# %% answer
sizes = 2.0 ** jnp.arange(-12, 0)
lost = [float(s) for s in sizes if jnp.bfloat16(s) + jnp.bfloat16(3e-5) == jnp.bfloat16(s)]
print(f"from {min(lost)} = 2^{np.log2(min(lost)):.0f}")
assert min(lost) == 2.0**-7

# %% [markdown] answer
# Neighbours of 2^-7 are 2^-14 = 6.1e-5 apart, and 3e-5 is less than half of that.

# %% [markdown]
# **2.** Gradients are about 1e-4. How many become zero in e4m3 without a scale, in e5m2 without one, and in e4m3 with
# one?

# %% answer
gradient = jax.random.normal(jax.random.key(2), (100_000,)) * 1e-4
scale = jnp.abs(gradient).max() / 448
cases = {"e4m3": gradient.astype(jnp.float8_e4m3fn), "e5m2": gradient.astype(jnp.float8_e5m2)}
cases["e4m3, scaled"] = (gradient / scale).astype(jnp.float8_e4m3fn)
zeros = {name: float((case.astype(jnp.float32) == 0).mean()) for name, case in cases.items()}
print(", ".join(f"{name} {share:.1%}" for name, share in zeros.items()))
assert zeros["e4m3"] == 1 and zeros["e4m3, scaled"] < 0.001

# %% [markdown] answer
# All, a few, none. The smallest e4m3 is 2^-9: an exponent of four bits needs a scale.

# %% [markdown]
# **3.** Llama 3 8B on eight H100, 65,536 tokens in a step: what do fp8 products save at most, in time and in gathered
# bytes?

# %% answer
h100, tokens, parameters = CHIPS["h100"], 65536, 8.03e9
full, low = (6 * parameters * tokens / 8 / peak for peak in (h100.flops_bf16, h100.flops_fp8))
print(f"{full:.2f} s -> {low:.2f} s at the peak; 2 gathers of {parameters * 2 / 1e9:.0f} -> {parameters / 1e9:.0f} GB")
assert round(full / low) == 2

# %% [markdown] answer
# Half of each. Compiled, the step goes from 1.14 to 0.81 s ([Precision](../precision.md)): attention, norms and sums
# stay as they were.

# %% [markdown]
# ## Summary
#
# - Operands may be small, sums may not: errors of operands average out, those of a long sum pile up.
# - Scales put the numbers of a tensor where its format is dense: fp8 and int8 need them, bfloat16 does not.
# - Cast before a gather: bytes on the links are those of the type that travels.
# - A step smaller than half a rounding is no step: masters, or stochastic rounding.
