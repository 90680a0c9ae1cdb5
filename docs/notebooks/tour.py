# %% [markdown]
# # A tour in one notebook
#
# Plan a model for a machine that is not here, look at its layout, train a small one on simulated devices, and read what
# the compiler made of it. Every object shows its own page in a notebook: put its name on the last line of a cell.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import tempfile
from pathlib import Path

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step
from meshwright.trainer.loop import prepare_run
from meshwright.views.draw import picture_of, side_by_side

# %% [markdown]
# ## A Run is a value
#
# A recipe names one; keyword arguments change its fields.

# %%
large = mw.recipe("llama3-8b", seq=4096, vocab=128256)
print(large.model.width, large.model.layers, large.training.seq)

# %% [markdown]
# ## Plan it
#
# `mw.plan` prices every layout that the trainer accepts, with its pipelines, microbatches and remat policies.

# %%
plans = mw.plan(large, on="v5p:2x2x2", tokens_per_step="128k", at_most=3)
print(plans)

# %% [markdown]
# ## Show where it lies
#
# The layout of the best plan: every parameter at rest and in use. The picture draws one of them.

# %%
view = mw.show(large, mesh=plans[0].mesh)
print(str(view).splitlines()[0])
degrees = {"fsdp": plans[0].mesh.fsdp, "tensor": plans[0].mesh.tensor}
side_by_side(picture_of("up", (4096, 14336), "DF", (("fsdp",), ("tensor",)), degrees))

# %% [markdown]
# ## Train a small one
#
# The same loop, step and checkpoints on eight simulated devices; on real ones only the devices differ.

# %%
small = mw.Run(
    name="tour",
    model=mw.Gpt2(width=64, layers=2, heads=4, positions=64),
    mesh=mw.MeshShape(data=2, fsdp=2, tensor=2),
    training=mw.Training(steps=40, batch=16, seq=64, compute_dtype="float32", eval_samples=16, remat="none"),
    optimizer=mw.Optimizer(learning_rate=3e-3, warmup_steps=5),
    data=mw.Data(paths=("../ladder/coriolanus.txt",), tokenizer="chars", prompt="First", sample=40),
)
folder = Path(tempfile.mkdtemp())
summary = mw.train(small, out=folder / "run", progress="none", cache=folder / "cache")
print(f"{summary.steps} steps, loss {summary.loss:.2f}, held-out loss {summary.held_out_loss:.2f}")

# %% [markdown]
# ## Read what ran
#
# The census of the train step: what the compiler proved about one device. `census` on the last line of a cell shows the
# page with memory and ledger; here are the numbers.
# The lint has one finding here: this text has 59 characters, and the table has 128 rows. It says which option mends it.

# %%
census = census_of_train_step(prepare_run(small, cache=folder / "cache").device_run)
for axes in sorted({e.axes_label for e in census.ledger}):
    entries = [e for e in census.ledger if e.axes_label == axes]
    print(f"{axes:18} {sum(e.count for e in entries):3} collectives, {', '.join(sorted({e.kind for e in entries}))}")
for finding in census.findings:
    print(f"{finding.kind}: {finding.subject}\n  because: {finding.reason}\n  fix: {finding.fix}")

# %%
print(f"{census.memory.compiled.peak / 2**20:.1f} MiB at the peak, {len(census.ledger)} collectives")
census

# %% [markdown]
# ## Go on elsewhere
#
# The checkpoint belongs to no mesh. The same Run resumes on another one, and its numbers stay the same.

# %%
import dataclasses

elsewhere = dataclasses.replace(
    small, mesh=mw.MeshShape(fsdp=4, tensor=2), training=dataclasses.replace(small.training, steps=50)
)
summary = mw.train(elsewhere, out=folder / "run", start="resume", progress="none", cache=folder / "cache")
print(f"{summary.steps} steps, loss {summary.loss:.2f}")

# %% [markdown]
# Next: [the ladder](../ladder/index.md) teaches each of these steps from one array up; [your own
# model](your_own_model.md) trains a module that is not ours; [read a proof](read_a_proof.md).
