# %% [markdown]
# # 9. Pipeline
#
# **The question.** FSDP gathers every layer on every device, and tensor parallelism ends at the edge of a node. Over a
# slow network one wants to send neither weights nor partial sums. What if each node keeps whole layers and passes only
# activations on? And what do the nodes do while they wait?
#
# A *pipeline* splits the model by depth into P *stages*, and the batch into M *microbatches*, which follow each other
# through the stages (GPipe, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965)).

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm.collectives import ring_shift
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.targets import parse_target
from meshwright.planner.search import price_run
from meshwright.sharding.schedules import bubble_formula, build_table
from meshwright.views.draw import PipelineTimeline, draw, side_by_side

# %% [markdown]
# ## The picture
#
# Four stages, twelve microbatches. A column is a tick, the number is the microbatch, the darker cells are backward
# passes. In GPipe all forward passes come first, so the first stage keeps the inputs of twelve microbatches (the grey
# bars) until their backward passes. In 1F1B ("one forward, one backward") a backward pass begins as soon as it can, and
# a stage runs one of each in a tick: the same bubble, and at most eight live inputs, however large M is.

# %%
side_by_side(*(PipelineTimeline(build_table(name, 4, 12, 1)) for name in ("gpipe", "1f1b")))

# %% [markdown]
# ## The arithmetic
#
# A stage has M forward passes to run, and the pipeline takes M + P - 1 ticks of them: P - 1 ticks pass before the last
# stage has anything to do. Idle over busy time, the *bubble*, is therefore **(P - 1) / M**. What a stage sends for each
# microbatch is the activations of its last layer, b T D numbers, once forward and once (their gradient) backward. No
# other parallelism sends so little: the layers of the stage compute 6 x parameters x b T FLOPs meanwhile.

# %%
h100, width, stage_parameters = CHIPS["h100"], 8192, 70.6e9 / 8
for stages, microbatches in ((8, 1), (8, 8), (8, 32), (8, 128)):
    bubble = (stages - 1) / microbatches
    best = 1 / (1 + bubble)
    print(f"P = {stages}, M = {microbatches:3}: bubble {bubble:6.1%} of the busy time, {best:4.0%} of the peak at best")
tokens = 4096
compute = 6 * stage_parameters * tokens / (8 * h100.flops_bf16)  # a stage is a node of eight
send = 2 * 2 * tokens * width / (8 * h100.network_bandwidth)
print(f"70B over 8 nodes of H100, 4,096 tokens: compute {compute * 1e3:.0f} ms, send {send * 1e3:.2f} ms")

# %% [markdown]
# ## The few lines
#
# Eight layers on four devices. In every tick a stage takes a microbatch, the first from the batch and the others from
# their neighbour, runs its layers, and shifts the result on. Stage s works on microbatch t - s in tick t. The last
# stage keeps what comes out.

# %%
stages = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
STAGES, M = 4, 8
weights = jax.random.normal(jax.random.key(0), (8, 32, 32)) / 32**0.5
xs = jax.random.normal(jax.random.key(1), (M, 16, 32))


def run_layers(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return x


@functools.partial(jax.shard_map, mesh=stages, in_specs=(P("stage"), P()), out_specs=P("stage"), check_vma=False)
def pipeline(weights, xs):
    stage, count = jax.lax.axis_index("stage"), len(xs)

    def tick(carry, t):
        received, outputs = carry
        y = run_layers(weights, jnp.where(stage == 0, xs[jnp.minimum(t, count - 1)], received))
        finished = jnp.clip(t - (STAGES - 1), 0, count - 1)
        outputs = jnp.where(t >= STAGES - 1, outputs.at[finished].set(y), outputs)
        return (ring_shift(y, "stage", 1), outputs), None

    start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs))
    (_, outputs), _ = jax.lax.scan(tick, start, jnp.arange(count + STAGES - 1))
    return outputs[None]


one_after_another = jnp.stack([run_layers(weights, x) for x in xs])
print("equal to one device:", np.allclose(jax.jit(pipeline)(weights, xs)[-1], one_after_another, atol=1e-5))
draw(jax.device_put(weights, jax.NamedSharding(stages, P("stage"))), "weights", "LDF")

# %% [markdown]
# The gradient needs no more lines. The transpose of a shift is the shift back, so the derivative of this loop is a
# pipeline in the other direction. Autodiff saves every microbatch's activations on the way: that is GPipe. 1F1B needs a
# schedule of its own, because it begins backward passes while forward passes are still to come; Meshwright's engine
# runs any such table inside the step.

# %%


def loss_of(run):
    return lambda weights: (run(weights) ** 2).sum()


by_pipeline = jax.jit(jax.grad(loss_of(lambda w: pipeline(w, xs)[-1])))(weights)
alone = jax.grad(loss_of(lambda w: jnp.stack([run_layers(w, x) for x in xs])))(weights)
print("equal gradients:", np.allclose(by_pipeline, alone, rtol=1e-4, atol=1e-3))

# %% [markdown]
# ## What the census says
#
# One permutation in each of the M + P - 1 = 11 ticks, of a microbatch of 16 x 32 float32: 2,048 bytes. No weights, no
# sums.

# %%
census = mw.census(jax.jit(pipeline), weights, xs, mesh={"stage": 4})
for e in census.ledger:
    print(f"{e.kind} over {e.axes_label}: {e.count} x {e.payload:,} bytes")
print("findings:", len(census.findings))

# %% [markdown]
# ## What goes wrong: too few microbatches
#
# The batch as one microbatch works, and three of four devices always wait. The FLOPs show it: every device computes in
# every tick, M + P - 1 of them, and only M count. (What a stage computes in its idle ticks is thrown away. On a real
# pipeline it would wait instead; the time is the same.)

# %%
for count in (1, 2, 4, 8, 32):
    parts = xs.reshape(-1, 32)[:128].reshape(count, -1, 32)
    flops = mw.census(jax.jit(pipeline), weights, parts, mesh={"stage": 4}).flops.compiled
    useful = 2 * 128 * 32 * 32 * len(weights) / STAGES
    print(
        f"M = {count:2}: {flops:9,.0f} FLOPs on a device, {useful:,.0f} useful: {flops / useful - 1:4.0%} = 3/{count}"
    )

# %% [markdown]
# More microbatches make the bubble small, and each of them must still be large enough to fill the matrix units. The
# other ways out shrink the bubble itself. *Interleaved* stages hold v parts of the model each, and pass a microbatch
# around v times: (P - 1) / (v M), for v times the sends. *Zero bubble* splits backward passes, and fills idle ticks
# with the gradients of weights, which nobody waits for.

# %%
for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2)):
    table = build_table(name, 4, 8, v)
    inputs = f"at most {table.input_slots} inputs of 1/{v} stage"
    print(f"{name:12} {table.ticks} ticks, bubble {table.bubble():5.1%}, {inputs}")
PipelineTimeline(build_table("interleaved", 4, 8, 2))

# %% [markdown]
# ## At full size, by plan
#
# Llama 3 70B on eight nodes of eight H100, 1M tokens a step: stages between nodes, tensor parallelism inside. The
# planner prices what this chapter counted.

# %%
for microbatches in (8, 32, 128):
    run = mw.recipe(
        "llama3-70b", mesh="stage=8,tensor=8", seq=8192, batch=128, vocab=128256, microbatches=microbatches,
        pipeline_schedule="1f1b", remat="full",
    )  # fmt: skip
    e = price_run(run, parse_target("h100:64")).estimate
    step = f"step {e.seconds:.1f} s, of it bubble {e.parts['bubble']:.1f} s"
    print(f"M = {microbatches:3}: {step}, MFU {e.mfu:.0%}, {e.bytes / 1e9:.0f} GB")

# %% [markdown]
# ## Exercises
#
# **1.** How many microbatches does a pipeline of 16 stages need for a bubble of 5 %, plain and with four virtual
# stages?

# %% answer
plain, interleaved = (next(m for m in range(16, 999, 16) if 15 / (v * m) <= 0.05) for v in (1, 4))
print(plain, interleaved)
assert (plain, interleaved) == (304, 80)
assert bubble_formula("interleaved", 16, interleaved, 4) <= 0.05

# %% [markdown] answer
# 15 / M = 5 % gives M = 300; in whole groups of 16 stages, 304. With v = 4 it is 75, so 80.

# %% [markdown]
# **2.** GPipe keeps M inputs on a stage, 1F1B at most 2P here. When does 1F1B keep fewer, and what does that cost?

# %% [markdown] answer
# For M > 2P. It costs nothing: the bubble is the same.

# %% answer
for microbatches in (4, 8, 32):
    gpipe, one_f_one_b = (build_table(name, 4, microbatches, 1) for name in ("gpipe", "1f1b"))
    print(microbatches, gpipe.input_slots, one_f_one_b.input_slots, gpipe.bubble() == one_f_one_b.bubble())
    assert gpipe.input_slots == microbatches and one_f_one_b.input_slots <= 2 * 4

# %% [markdown]
# **3.** Against FSDP over the same eight nodes, what does a device send in a step of 1M tokens for the 70B model?

# %% [markdown] answer
# FSDP over 64 gathers the weights twice and scatters gradients once, 3 x 2 x 70.6e9 x 63/64 bytes = 417 GB for each
# device; the part of it that crosses the network is an eighth, 52 GB, if the node shares what it brings in. The
# pipeline sends 2 x 2 bytes x 1M tokens x 8,192 / 8 devices of a stage = 4.3 GB.

# %% answer
fsdp, passed_on = 3 * 2 * 70.6e9 * 63 / 64, 2 * 2 * 2**20 * 8192 / 8
print(f"{fsdp / 1e9:.0f} GB, {passed_on / 1e9:.1f} GB")
assert round(fsdp / 1e9) == 417 and round(passed_on / 1e9, 1) == 4.3

# %% [markdown]
# ## Summary
#
# - Stages send activations only: the parallelism for slow links.
# - Bubble (P - 1) / M, divided by v with interleaving. Memory of inputs: M in GPipe, 2P in 1F1B.
# - A pipeline is a shift in a loop, and its derivative is a pipeline.
# - [Schedules of the package](../parallelism.md#pipeline-stage), with their pictures and memory.
