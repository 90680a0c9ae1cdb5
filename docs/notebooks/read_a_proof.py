# %% [markdown]
# # Read a proof
#
# A proof is the census of a compiled train step: memory, collectives, FLOPs, findings. This notebook takes one apart,
# and compares two. It is compiled here for eight simulated devices; `meshwright prove` does the same with the compiler
# of a TPU or GPU that is not here ([check before renting](../howto/check-before-renting.md)).

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import dataclasses

import meshwright as mw
from meshwright.analysis.compare import compare
from meshwright.analysis.run_census import census_of_train_step
from meshwright.hardware.mesh import build_mesh
from meshwright.step.device_run import place_on_devices

run = mw.Run(
    model=mw.Gpt2(vocab=256, width=128, layers=2, heads=4, positions=64),
    mesh=mw.MeshShape(data=2, fsdp=4),
    training=mw.Training(steps=1, batch=16, seq=64, compute_dtype="float32", remat="none"),
    fsdp_min_size=64,
)


def prove(run):
    return census_of_train_step(place_on_devices(run, build_mesh(run.mesh)))


census = prove(run)
print(f"{census.memory.compiled.peak / 2**20:.1f} MiB at the peak, {len(census.ledger)} collectives")
census

# %% [markdown]
# ## Who fills the memory?
#
# The peak by category adds up to what the compiler allocates. Parameters and optimizer state are arguments: they are
# what the layout declares, 12 bytes of each parameter over the four devices of `fsdp`. The rest is the compiler's.

# %%
categories = census.memory.by_category()
count = 2 * 12 * 128**2 + 256 * 128 + 64 * 128 + 2 * 13 * 128 + 2 * 128  # matrices, tables, biases and norms
print(f"parameters {categories['parameters']:,} bytes, about 4 x {count:,} / 4 = {count:,}")
print("optimizer state is twice that:", abs(categories["optimizer state"] / categories["parameters"] - 2) < 0.01)
print("categories add up to the peak:", sum(part.bytes for part in census.memory.parts) == census.memory.compiled.peak)

# %% [markdown]
# ## Who sends what over which axis?
#
# Over `fsdp` parameters are gathered and gradients scattered. Over `data` gradients are summed once, after the backward
# pass. An axis that you do not expect in this table is the first thing to look for.

# %%
for axes in sorted({e.axes_label for e in census.ledger}):
    for kind in sorted({e.kind for e in census.ledger if e.axes_label == axes}):
        entries = [e for e in census.ledger if (e.axes_label, e.kind) == (axes, kind)]
        number, sent = sum(e.count for e in entries), sum(e.sent for e in entries)
        print(f"{axes:10} {kind:15} {number:3} x, {sent / 1024:7.1f} KiB sent")

# %% [markdown]
# ## What does the lint say?
#
# Nothing: each collective is a line of the source, and no array is whole that should be split. For a program that
# leaves its communication to the compiler it lists each surprise with bytes and cause ([chapter
# 7](../ladder/7_spmd_step.md)).

# %%
print("findings:", list(census.findings), "doubts:", list(census.doubts), "unread:", list(census.unread))

# %% [markdown]
# ## Two programs
#
# Full rematerialisation saves activations, and gathers and computes more. The difference of the two censuses says how
# much of each.

# %%
full = prove(dataclasses.replace(run, training=dataclasses.replace(run.training, remat="full")))
print(f"FLOPs {full.flops.compiled / census.flops.compiled:.2f} times")
saved = [c.memory.by_category().get("saved activations", 0) for c in (census, full)]
peak = full.memory.compiled.peak / census.memory.compiled.peak
print(f"saved activations {saved[0] / saved[1]:.0f} times less, peak {peak:.2f} times")
for change in compare(census.to_json(), full.to_json()):
    if change.part == "traffic":
        print(f"{change.quantity}: {change.before:,.0f} -> {change.after:,.0f} bytes sent")
