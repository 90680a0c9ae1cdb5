# %% [markdown]
# # 8. The SPMD step
#
# **The question.** You have a train step that works on one device, with a vocabulary of 27, which no mesh divides. Can
# whole functions (train, evaluate, decode) be partitioned without touching them, and what does that cost against a step
# that is written for the mesh?
#
# This is how large models were trained before `shard_map`, in Lingvo and Praxis: specs for every array by its rank, a
# batch split over the whole mesh, and variables padded where they are stored and cut where they are used.
# A few functions do this for any step. Afterwards the same step is written by hand, and the two censuses
# are set side by side.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import functools
import math

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm.collectives import all_gather, all_reduce, ring_shift
from meshwright.errors import ConfigError
from meshwright.views.draw import draw, side_by_side

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
VOCAB, WIDTH = 27, 50

# %% [markdown]
# ## The partitioner
#
# Arrays are padded where they are stored, so that their specs divide them, and a step sees them in their true shapes.

# %%


def specs_by_rank(tree, specs):
    """Returns a spec for each array by its rank."""

    def spec(path, x):
        if x.ndim not in specs:
            name = jax.tree_util.keystr(path) or "the array"
            known = f"specs are given for rank {', '.join(map(str, sorted(specs))) or 'none'}"
            raise ConfigError(f"a spec for {name} of rank {x.ndim}", known, f"{x.ndim}: PartitionSpec(...)")
        return specs[x.ndim]

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(specs, mesh):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def pad(tree, specs, mesh):
    """Appends zeros to each array so that its spec divides it."""

    def pad_array(x, spec):
        degrees = [math.prod(mesh.shape[a] for a in jax.tree.leaves(axes)) for axes in spec] + [1] * x.ndim
        return jnp.pad(x, [(0, -size % n) for size, n in zip(x.shape, degrees, strict=False)]) if x.ndim else x

    return jax.tree.map(pad_array, tree, specs)


def unpad(tree, true):
    """Removes the padding of each array."""
    return jax.tree.map(lambda x, true: x[tuple(slice(n) for n in true.shape)], tree, true)


def partition_state(state, specs, mesh):
    """Pads a copy of a state and places it on the mesh: a step that donates it leaves the original alone."""
    copies = jax.tree.map(lambda x: jnp.array(x, copy=True), pad(state, specs, mesh))
    return jax.device_put(copies, shardings(specs, mesh))


def batch_specs(batch, mesh):
    """Splits the first dimension of each array over every axis of the mesh."""
    return jax.tree.map(lambda x: P(tuple(mesh.axis_names), *[None] * (x.ndim - 1)), batch)


def split_batch(batch, mesh):
    return jax.lax.with_sharding_constraint(batch, shardings(batch_specs(batch, mesh), mesh))


def partition_train_step(step, state, specs, mesh):
    """Jits `step(state, batch) -> (new state, results)`; the stored state is unpadded before it runs, and donated."""

    def run(stored, batch):
        new, results = step(unpad(stored, state), split_batch(batch, mesh))
        return pad(new, specs, mesh), results

    where = (shardings(specs, mesh), NamedSharding(mesh, P()))
    return jax.jit(run, out_shardings=where, donate_argnums=(0,))


def partition_eval_step(step, state, mesh):
    """Jits `step(state, batch) -> results` on the stored state."""

    def run(stored, batch):
        return step(unpad(stored, state), split_batch(batch, mesh))

    return jax.jit(run, out_shardings=NamedSharding(mesh, P()))


def take_microbatch(xs, ids, axis):
    """Takes the microbatch of this stage, inside a shard_map. xs: [M, ...], replicated; ids: one per stage, [P]."""
    return jnp.take(xs, ids[jax.lax.axis_index(axis)], axis=0)


# %% [markdown]
# ## Specs by rank
#
# Matrices are split over both axes, vectors over one, scalars not at all. A rank without a spec is refused, and the
# array is named.

# %%
optimizer = optax.adam(1e-2)
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)) * 0.1,
    "mix": jax.random.normal(keys[1], (WIDTH, WIDTH)) * 0.1,
    "out": jax.random.normal(keys[2], (WIDTH, VOCAB)) * 0.1,
    "bias": jnp.zeros((VOCAB,)),
}
state = {"params": params, "opt": optimizer.init(params)}
specs = specs_by_rank(state, {0: P(), 1: P("model"), 2: P("data", "model")})
for name, spec in specs["params"].items():
    print(f"{name:6} {params[name].shape!s:9} {spec}")
try:
    specs_by_rank({"kernel": jnp.zeros((2, 2, 2))}, {1: P("model")})
except ConfigError as error:
    print(error)

# %% [markdown]
# ## Uneven dimensions
#
# 27 tokens do not divide by 4, nor by 2. Arrays are stored padded to 28; the step sees 27 and never the padding.

# %%
stored = partition_state(state, specs, mesh)
for name, array in stored["params"].items():
    print(f"{name:6} {params[name].shape} is stored as {array.shape}")
side_by_side(draw(stored["params"]["embed"], "embed", "VD"), draw(stored["params"]["bias"], "bias", "V"))

# %% [markdown]
# ## The arithmetic
#
# Padding to a multiple of the degree n wastes less than n rows. A vocabulary of 50,257 over 64 devices is stored as 786
# x 64 = 50,304: 47 rows, 0.1 %. Replicating it, because it does not divide, costs 63 further copies. Padding is safe
# only while nothing sees it: a padded *logit* of zero takes part in a softmax with weight exp(0) = 1.

# %%
padded = -(-50257 // 64) * 64
print(f"{padded} rows, {padded - 50257} of padding; bfloat16 of width 8,192:", end=" ")
print(f"{padded / 64 * 8192 * 2 / 2**20:.1f} MiB split, {50257 * 8192 * 2 / 2**20:.0f} MiB replicated")
logits = jnp.zeros(27)
seen = jax.nn.logsumexp(jnp.pad(logits, (0, 1))) - jax.nn.logsumexp(logits)
print(f"a padded logit that is seen raises the loss of a uniform guess by {seen:.4f} = log(28/27)")

# %% [markdown]
# ## Train, evaluate, decode
#
# One forward pass, three steps. The batch is split over all eight devices.

# %%


def logits_of(params, tokens):
    h = jnp.tanh(params["embed"][tokens] @ params["mix"])
    return h @ params["out"] + params["bias"]


def loss_of(params, batch):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch["tokens"]), batch["next"])
    return nll.mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def eval_step(state, batch):
    return loss_of(state["params"], batch)


def decode_step(state, batch):
    return logits_of(state["params"], batch["tokens"]).argmax(-1)


rng = np.random.default_rng(0)
tokens = rng.integers(0, VOCAB, (64, 16))
batch = {"tokens": tokens, "next": (tokens * 5 + 3) % VOCAB}
print("batch specs:", batch_specs(batch, mesh)["tokens"])
train = partition_train_step(train_step, state, specs, mesh)
evaluate = partition_eval_step(eval_step, state, mesh)
decode = partition_eval_step(decode_step, state, mesh)

reference_step = jax.jit(train_step)
reference = state
for step in range(40):
    stored, loss = train(stored, batch)
    reference, loss_alone = reference_step(reference, batch)
    if step % 13 == 0:
        print(f"step {step:2}: loss {loss:.4f}, on one device {loss_alone:.4f}")
print(f"evaluation {evaluate(stored, batch):.4f}")
correct = np.asarray(decode(stored, batch)) == batch["next"]
print(f"decoded {correct.mean():.0%} of the next tokens right")
print("the padding is still zero:", float(abs(stored["params"]["embed"][VOCAB:]).max()) == 0.0)

# %% [markdown]
# ## Microbatches by stage
#
# In a pipeline each stage works on a different microbatch at any moment. Inside a `shard_map` over the stages, each
# stage takes the microbatch that the schedule gives it, and passes its result to the next stage.

# %%
stages = Mesh(np.array(jax.devices()[:4]), ("stage",))
microbatches = jnp.arange(4 * 3.0).reshape(4, 3)
ids = jnp.array([2, 0, 3, 1])


@jax.jit
@functools.partial(jax.shard_map, mesh=stages, in_specs=(P(), P()), out_specs=P("stage"), check_vma=False)
def run_stage(xs, ids):
    microbatch = take_microbatch(xs, ids, "stage")
    return ring_shift(microbatch + 100 * jax.lax.axis_index("stage"), "stage", 1)[None]


print(run_stage(microbatches, ids))

# %% [markdown]
# ## What goes wrong: nobody wrote the communication
#
# The partitioned step is right, and the census of it is long. Only the placements of arguments and results are given;
# between them the compiler reshards whatever it has to, and the lint reports every collective that no line of the
# source contains, with its bytes and its cause.

# %%
partitioned = mw.census(train, stored, batch, mesh=dict(mesh.shape))
kinds = {f.kind for f in partitioned.findings}
print("collectives:", bool(partitioned.ledger), "findings of kind:", *sorted(kinds))

# %% loose
finding = partitioned.findings[0]
print(f"{finding.kind}: {finding.subject}\n  because: {finding.reason}\n  fix: {finding.fix}")
print(f"{len(partitioned.findings)} findings, {sum(e.count for e in partitioned.ledger)} collectives")

# %% [markdown]
# ## The same step, written for the mesh
#
# Each block is gathered once, over the axes of its spec, and cut to its true size. The derivative of the gather sums
# the gradients and scatters them into blocks. The bias is split over `model` only, so its gradient is summed over
# `data` as well. Adam works on blocks, and needs nothing from anyone. It is the layout of chapter 3, on the storage of
# this one.

# %%


def whole_of(blocks):
    whole = {}
    for name, block in blocks.items():
        for dim, axis in enumerate(specs["params"][name]):
            block = all_gather(block, (axis,), dim)
        whole[name] = block[tuple(slice(n) for n in params[name].shape)]
    return whole


@jax.jit
@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(specs, P(("data", "model"))), out_specs=(specs, P()), check_vma=False
)
def step_by_hand(state, batch):
    loss, grads = jax.value_and_grad(lambda blocks: loss_of(whole_of(blocks), batch))(state["params"])
    grads["bias"] = all_reduce(grads["bias"], ("data",))
    grads = jax.tree.map(lambda g: g / 8, grads)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    return new, all_reduce(loss, ("data", "model")) / 8


by_hand = partition_state(state, specs, mesh)
for _ in range(40):
    by_hand, loss = step_by_hand(by_hand, batch)
print(f"last loss {loss:.4f}, partitioned {loss_alone:.4f}: equal {np.allclose(loss, loss_alone, rtol=1e-3)}")

# %% [markdown]
# ## The census
#
# The census of the step by hand: a gather for each axis of each matrix, the scatters of their gradients, and one small
# sum. Nothing is unexpected, and the lint is silent. For this reason Meshwright's own step writes its collectives.

# %%
census = mw.census(step_by_hand, by_hand, batch, mesh=dict(mesh.shape))
for e in census.ledger:
    print(f"{e.kind:14} over {e.axes_label:10} {e.count} x {e.payload:,} bytes")
sent = {name: sum(e.sent for e in c.ledger) for name, c in (("left to the compiler", partitioned), ("by hand", census))}
print("findings:", len(census.findings), "less is sent:", sent["by hand"] < sent["left to the compiler"])

# %% loose
print({name: f"{n / 1024:.0f} KiB sent by a device" for name, n in sent.items()})

# %% [markdown]
# ## Exercises
#
# **1.** Which shapes are stored for a vocabulary of 27 and a width of 50 with `P("model", "data")` on the 4 x 2 mesh,
# and how many of the numbers are padding?

# %% [markdown] answer
# 27 to a multiple of 2, 50 to a multiple of 4: 28 x 52 = 1,456 numbers, of which 1,456 - 1,350 = 106 are padding.

# %% answer
turned = partition_state({"embed": params["embed"]}, {"embed": P("model", "data")}, mesh)["embed"]
print(turned.shape, turned.size - 27 * 50)
assert turned.shape == (28, 52)

# %% [markdown]
# **2.** Four stages of a pipeline pass microbatches on. Which `ids` does `run_stage` take in tick 3, when stage 0
# begins microbatch 3, and what does stage 3 receive?

# %% [markdown] answer
# Stage s is s ticks behind: microbatch 3 - s, so [3, 2, 1, 0]. Stage 3 receives what stage 2 made of microbatch 1: its
# numbers 3, 4, 5 plus 200.

# %% answer
received = np.asarray(run_stage(microbatches, jnp.array([3, 2, 1, 0])))
print(received[3])
assert np.array_equal(received[3], [203, 204, 205])

# %% [markdown]
# **3.** The step by hand gathers `mix` over `data` and then over `model`. Does the other order send less?

# %% [markdown] answer
# The last gather is of the whole array, and the first of a part. Over n devices the last sends V (n-1)/n: with `model`
# (2) last 1/2 V, after 3/4 of V/2 over `data`; with `data` (4) last 3/4 V, after 1/2 of V/4 over `model`. Together 7/8
# V either way, and only the hops differ.

# %% answer
data_first, model_first = (1 / 2) * (3 / 4) + 1 / 2, (1 / 4) * (1 / 2) + 3 / 4
print(data_first, model_first)
assert data_first == model_first == 7 / 8

# %% [markdown]
# ## Summary
#
# - Specs by rank, padding in storage, whole functions partitioned: right on any mesh, with no change to the model.
# - Padding costs less than a row for each device; not splitting costs a copy for each device. Nothing may see it.
# - What the compiler inserts is correct and not cheap. Let the lint list it, and write what is worth writing.
