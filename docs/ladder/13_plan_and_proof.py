# %% [markdown]
# # 13. Plan and proof
#
# **The question.** Five axes, six remat policies, pipelines, microbatches: thousands of layouts for one model on one
# machine, and every wrong one costs rent. Which is best, and how do we know *before* renting that it compiles, fits,
# and how long its step will take?
#
# A *plan* is arithmetic: chapters 1 to 12 summed up, for every layout that the trainer accepts. A *proof* is the real
# compiler's: the very train step, compiled for the machine without the machine, and read by the census.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step
from meshwright.config import MeshShape, Optimizer, Training
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import parse_target
from meshwright.models.families.gpt2 import Gpt2
from meshwright.planner.search import price_run
from meshwright.runs.run import Run
from meshwright.step.device_run import place_on_devices
from meshwright.views.draw import draw_machine, machine_of_target, picture_of, side_by_side

# %% [markdown]
# ## The picture
#
# Eight v5p chips are a 2 x 2 x 2 torus. A mesh of `fsdp=4,tensor=2` lays axes over it: neighbours along `tensor` are
# one link apart, and a feed-forward matrix is cut by both.

# %%
degrees = {"fsdp": 4, "tensor": 2}
side_by_side(
    draw_machine(degrees, machine_of_target(parse_target("v5p:2x2x2"))),
    picture_of("up", (4096, 14336), "DF", (("fsdp",), ("tensor",)), degrees),
)

# %% [markdown]
# ## The arithmetic
#
# *Time of the FLOPs*: 6 P for each token (2 forward, 4 backward), and attention's scores. *Memory*: 12 bytes of state
# for each parameter, split; a gathered layer; activations by the remat policy. *Communication*: the formulas of
# chapters 3, 6, 9, 11, 12, minus what computation overlaps. Here by hand for Llama 3 8B on eight v5p with 128k
# tokens a step.

# %%
parameters, tokens, chips, v5p = 8.03e9, 128 * 1024, 8, CHIPS["v5p"]
flops = 6 * parameters * tokens
print(f"6 P T = {flops:.2e} FLOPs; / (8 x 459e12) = {flops / chips / v5p.flops_bf16:.2f} s at the peak")
print(f"state 12 P / 8 = {12 * parameters / chips / 2**30:.1f} GiB of 95")
weights = 3 * 2 * parameters * 7 / 8
print(f"weights: 3 x 2 P x 7/8 = {weights / 1e9:.0f} GB over three open links of 90 GB/s: {weights / 270e9:.2f} s")

# %% [markdown]
# ## The few lines: a plan
#
# `mw.plan(run, on=...)` prices every layout and returns the best; `price_run` prices one. Each estimate says what it is
# made of.

# %%


def priced(mesh, remat, on="v5p:2x2x2"):
    run = mw.recipe("llama3-8b", mesh=mesh, seq=4096, batch=32, vocab=128256, remat=remat)
    return price_run(run, parse_target(on)).estimate


layouts = (("fsdp=8", "projections"), ("fsdp=8", "full"), ("fsdp=4,tensor=2", "projections"), ("data=8", "full"))
for mesh, remat in layouts:
    e = priced(mesh, remat)
    print(f"{mesh:16} {remat:12} {e.seconds:5.2f} s, MFU {e.mfu:4.0%}, {e.bytes / 2**30:5.0f} GiB, fits {e.fits}")

# %%
best = priced("fsdp=8", "projections")
for part, seconds in best.parts.items():
    if seconds > 1e-3:
        print(f"{part:22} {seconds:6.3f} s")
print(f"{'sum':22} {best.seconds:6.3f} s; bound by {best.bound_by}")

# %% [markdown]
# The matrix products take 1.9 s instead of the 1.72 of the arithmetic above, since nothing reaches the peak: a plan
# uses achieved fractions, measured with `meshwright bench`. Of the 0.16 s of gathers and scatters 0.04 s are exposed.
# The 0.015 s of recomputation buy memory.
#
# ## What goes wrong without a plan
#
# `data=8` needs 96 GB for the state alone, and ends with an out-of-memory error once the pod is rented. A mesh that the
# model does not divide ends even before. Both are known from shapes, and errors say what to do.

# %%
try:
    priced("fsdp=4,tensor=3", "full")
except mw.ConfigError as error:
    print(error)

# %% [markdown]
# ## The few lines: a proof
#
# `mw.prove(plan)` compiles the train step with the machine's own compiler, in a process of its own, on a computer that
# has none of its chips ([how](../plan.md)). This page may not have that compiler, so it proves a
# small GPT for the eight simulated devices, with the compiler that is here. It is the same census.

# %%
run = Run(
    name="proved",
    model=Gpt2(vocab=256, width=128, layers=2, heads=4, positions=64),
    mesh=MeshShape(fsdp=4, tensor=2),
    training=Training(steps=1, batch=16, seq=64, compute_dtype="float32", remat="none"),
    optimizer=Optimizer(),
    fsdp_min_size=64,
)
planned = price_run(run, parse_target("v5p:2x2x2")).estimate
device_run = place_on_devices(run, build_mesh(run.mesh))
census = census_of_train_step(device_run)
compiled = census.memory.by_category()
for category in ("parameters", "optimizer state"):
    print(f"{category:16} planned {planned.memory[category]:9,.0f} bytes, compiled {compiled[category]:9,.0f}")

# %% [markdown]
# State agrees to the byte, as both are declared. Temporaries are the compiler's choice, and a plan can only predict
# them: this is where a proof tells more.
#
# ## What the census says
#
# *Proved*, because the compiler did it: that the step compiles; every buffer at the peak; every collective, its axes
# and bytes; the FLOPs. *Predicted*: the time, by simulating the compiled schedule on the chip. Ask of a ledger: does
# each axis send what the formula says, and nothing else? Layers gather over `fsdp` forward and backward and scatter
# gradients; over `tensor` the sequence is gathered and scattered; what is over both axes is small.

# %%
sent = {}
for e in census.ledger:
    entry = sent.setdefault((e.axes_label, e.kind), [0, 0])
    entry[0], entry[1] = entry[0] + e.count, entry[1] + e.sent
for (axes, kind), (count, total) in sorted(sent.items(), key=lambda item: -item[1][1]):
    print(f"{axes:14} {kind:18} {count:3} x, {total / 1024:7.1f} KiB sent")
print("findings:", len(census.findings), "unread instructions:", len(census.unread))

# %% [markdown]
# By hand: the layers' matrices are 12 x 128^2 numbers in each of two layers, half of them on each device of `tensor`.
# With `remat none` FSDP gathers them once, keeps them for the backward pass, and scatters the gradients: 3/4 of each
# leaves a device.

# %%
matrices = 2 * 12 * 128**2 / 2 * 4
print(f"2 x {matrices / 1024:.0f} KiB x 3/4 = {2 * matrices * 3 / 4 / 1024:.0f} KiB, and embeddings, norms and biases")
by_fsdp = sum(total for (axes, _), (_, total) in sent.items() if axes == "fsdp") / 1024
print(f"over fsdp in the ledger: {by_fsdp:.0f} KiB")

# %% [markdown]
# ## Exercises
#
# **1.** A run of Llama 3 8B reports 55,800 tokens/s on eight v5p. What is its MFU, attention's scores left aside?

# %% answer
mfu = 6 * 8.03e9 * 55800 / (8 * 459e12)
print(f"{mfu:.0%}")
assert round(mfu, 2) == 0.73

# %% [markdown]
# **2.** 70.6B parameters, 15T tokens, 1,024 H100 at 40 % MFU and 2 dollars an hour: how long, and how much?

# %% answer
seconds = 6 * 70.6e9 * 15e12 / (1024 * 989e12 * 0.4)
print(f"{seconds / 86400:.0f} days, {seconds / 3600 * 1024 * 2 / 1e6:.1f} million dollars")
assert round(seconds / 86400) == 182

# %% [markdown]
# **3.** On how many v5p chips does Llama 3 70B fit with FSDP, full remat and one sequence of 4,096 tokens a chip?

# %% answer
for chips, slice_of in ((8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"), (64, "4x4x4")):
    run = mw.recipe("llama3-70b", mesh=f"fsdp={chips}", seq=4096, batch=chips, vocab=128256, remat="full")
    e = price_run(run, parse_target(f"v5p:{slice_of}")).estimate
    state = 12 * 70.6e9 / chips / 2**30
    print(f"{chips:2} chips: state {state:5.1f} GiB, planned {e.bytes / 2**30:5.1f} of 95 GiB, fits {e.fits}")
    assert e.fits == (chips >= 16)

# %% [markdown] answer
# The state alone decides: 12 x 70.6e9 / 8 = 99 GiB is too much, 49 on sixteen leaves room.

# %% [markdown]
# ## Summary
#
# - A plan is the sum of the lessons: bytes, FLOPs and links for every layout, in seconds, without hardware.
# - A proof is the compiler's word on memory and collectives, and a prediction of the time.
# - Compare the two, then the ledger with the formulas. What does not match is a bug of the program or of your head.
# - From the command line: [`meshwright plan`](../verbs/plan.md), [`prove`](../verbs/prove.md),
#   [`rehearse`](../verbs/rehearse.md).
