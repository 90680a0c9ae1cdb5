# %% [markdown]
# # 6. Tensor parallelism
#
# **The question.** FSDP splits what a device *keeps*, yet every device still computes whole layers, and a step cannot
# be shorter than one sample on one device. How is a single layer split, so that eight devices work on the same tokens
# and talk as rarely as possible?
#
# Megatron-LM's answer ([arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3): the columns of a first matrix,
# the rows of a second, and one sum at the end.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)

import dataclasses
import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.comm.collectives import (
    all_gather,
    all_reduce,
    local_shard,
    sequence_all_gather,
    sequence_reduce_scatter,
)
from meshwright.config import Data, MeshShape, Optimizer, Training
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.mesh import build_mesh
from meshwright.models.blocks.layers import embed
from meshwright.models.families.gpt2 import Gpt2
from meshwright.models.loss import token_losses
from meshwright.runs.run import Run
from meshwright.views.draw import picture_of, side_by_side

mesh = build_mesh(MeshShape(data=4, tensor=2))
manual = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

# %% [markdown]
# ## The picture: columns, then rows
#
# In `gelu(x A) B` with A split by columns, each device has whole columns of the hidden layer, and the nonlinearity
# needs nothing from other devices. With B split by rows each device multiplies its own columns with its own rows, which
# gives a partial sum of the whole result, and one all-reduce completes the pair. Attention is such a pair too: heads
# are columns of the query, key and value projections, and rows of the output projection.

# %%
D, F = 64, 256
x = jax.random.normal(jax.random.key(0), (32, D))
a = jax.random.normal(jax.random.key(1), (D, F)) / D**0.5
b = jax.random.normal(jax.random.key(2), (F, D)) / F**0.5
SPLIT = (P("data"), P(None, "tensor"), P("tensor"))


@jax.jit
@functools.partial(manual, in_specs=SPLIT, out_specs=P("data"))
def pair(x, a, b):
    return all_reduce(jax.nn.gelu(x @ a) @ b, ("tensor",))


print("equal to one device:", np.allclose(pair(x, a, b), jax.nn.gelu(x @ a) @ b, atol=1e-5))
shape = mesh.shape
side_by_side(
    picture_of("a", (D, F), "DF", ((), ("tensor",)), shape), picture_of("b", (F, D), "FD", (("tensor",), ()), shape)
)

# %% [markdown]
# ## The arithmetic
#
# For T tokens on n devices the pair takes 4 T D F / n FLOPs on each device, and its all-reduce of T D bfloat16 numbers
# sends 2 x 2 T D (n-1)/n bytes. The computation covers the communication while 4 T D F / (n peak) > 4 T D / bandwidth,
# so while **n < F x bandwidth / peak**. Tokens and width cancel: the feed-forward width alone says over how many
# devices a layer can be split.

# %%
links = {
    "v5p, one ring": (CHIPS["v5p"], 2 * CHIPS["v5p"].interconnect.link_bandwidth),
    "H100, NVLink": (CHIPS["h100"], CHIPS["h100"].interconnect.link_bandwidth),
    "H100, network": (CHIPS["h100"], CHIPS["h100"].network_bandwidth),
}
for name, (chip, bandwidth) in links.items():
    print(f"{name:14}", *(f"F {F:6,}: n < {F * bandwidth / chip.flops_bf16:4.1f}  " for F in (14336, 28672, 53248)))

# %% [markdown]
# So tensor parallelism stays inside a node or along an axis of the torus: over the network it would never pay.
#
# ## What goes wrong: rows, then columns
#
# Split A by rows and B by columns, and the hidden layer is a partial sum. A nonlinearity of a partial sum is not part
# of the nonlinearity of the sum. Without a second all-reduce in the middle the shapes fit, and the numbers are wrong.

# %%


@functools.partial(
    manual, in_specs=(P("data", "tensor"), P("tensor"), P(None, "tensor")), out_specs=P("data", "tensor")
)
def rows_then_columns(x, a, b):
    return jax.nn.gelu(x @ a) @ b


wrong, right = rows_then_columns(x, a, b), pair(x, a, b)
print(f"largest difference {abs(wrong - right).max():.2f}, where the values are of size {abs(right).mean():.2f}")

# %% [markdown]
# ## f and g: the derivatives of the pair
#
# Megatron writes two functions around the pair. **g**, at its end: forward a sum, backward the identity, since every
# device's addend gets the same cotangent. **f**, at its beginning: forward the identity, since `x` is already whole on
# all devices, backward a sum, since each device has the cotangent of its own columns only. `all_reduce` is g; f is four
# lines. Without f nothing fails, and each device trains what lies before the pair with its own part of the gradient.

# %%


@jax.custom_vjp
def f(x):
    return x


f.defvjp(lambda x: (x, None), lambda _, g: (all_reduce(g, ("tensor",)),))


def gradient_of_x(enter):
    @functools.partial(manual, in_specs=SPLIT, out_specs=P("data", "tensor"))
    def of(x, a, b):
        loss = lambda x: (all_reduce(jax.nn.gelu(enter(x) @ a) @ b, ("tensor",)) ** 2).sum()  # noqa: E731
        return jax.grad(loss)(x)[:, None]

    return of(x, a, b)


reference = jax.grad(lambda x: ((jax.nn.gelu(x @ a) @ b) ** 2).sum())(x)
for name, enter in (("with f", f), ("without", lambda x: x)):
    errors = [float(abs(part - reference).max()) for part in gradient_of_x(enter).swapaxes(0, 1)]
    print(f"{name}: largest error of dL/dx on each device of tensor", *(f"{e:.5f}" for e in errors))

# %% [markdown]
# Between pairs the sequence can be split as well (sequence parallel): the all-reduce becomes a reduce-scatter, and the
# next pair begins with a gather. The same bytes are sent, and norms and dropout work on half of the sequence
# ([arXiv:2205.05198](https://arxiv.org/abs/2205.05198)).

# %%


@functools.partial(
    manual,
    in_specs=(P("data", "tensor"), P(None, "tensor"), P("tensor")),
    out_specs=P("data", "tensor"),
)
def pair_of_sequence(x_BTD, a, b):
    return sequence_reduce_scatter(jax.nn.gelu(sequence_all_gather(x_BTD, 1) @ a) @ b, 1)


x_BTD = x.reshape(4, 8, D)
print("equal:", np.allclose(pair_of_sequence(x_BTD, a, b).reshape(32, D), pair(x, a, b), atol=1e-5))
for name, function, first in (("whole", pair, x), ("split", pair_of_sequence, x_BTD)):
    (entry, *more) = mw.census(jax.jit(function), first, a, b, mesh=dict(mesh.shape)).ledger
    print(f"sequence {name}:", " + ".join(f"{e.kind} {e.sent:.0f} bytes" for e in (entry, *more)))

# %% [markdown]
# ## Vocabulary-parallel embedding
#
# Each device has the rows of one part of the vocabulary. It looks up the tokens of its part, and has zero for all
# others; the sum over devices is the embedding.

# %%
table = jax.random.normal(jax.random.key(3), (50, 16))
tokens = jax.random.randint(jax.random.key(4), (4, 8), 0, 50)
embedded = manual(embed, in_specs=(P("data"), P("tensor")), out_specs=P("data", "tensor"))(tokens, table)
print("equal to table[tokens]:", np.array_equal(embedded, table[tokens]))

# %% [markdown]
# The other way to split the table, by columns, needs a gather instead of a sum. It is right for a *positional* table:
# its T rows are used by every sequence, so each device keeps D/n columns, and one gather of T x D numbers serves all
# sequences of the batch.

# %%
positions = jax.random.normal(jax.random.key(5), (8, 16))


@functools.partial(manual, in_specs=P(None, "tensor"), out_specs=P("tensor"))
def rows_of_sequence(columns):
    return local_shard(all_gather(columns, ("tensor",), 1), ("tensor",), 0)


print("equal to the table:", np.array_equal(rows_of_sequence(positions), positions))
side_by_side(
    picture_of("embed", (50, 16), "VD", (("tensor",), ()), shape),
    picture_of("positions", (8, 16), "TD", ((), ("tensor",)), shape),
)

# %% [markdown]
# ## Vocabulary-parallel loss
#
# The logits are never whole either: the maximum, the sum of exponentials and the label's logit are one small reduction
# each (a distributed log-sum-exp). The example has two tokens and a vocabulary of three, padded to four and split over
# two devices, with ten steps of gradient descent on the logits themselves.

# %%
labels = jnp.array([0, 2])


@jax.jit
@functools.partial(manual, in_specs=(P("tensor"), P("tensor")), out_specs=(P(), P("tensor")))
def toy(logits, table):
    def loss(logits):
        nll, _ = token_losses(sequence_all_gather(logits, 0), table, labels, 3, 2)
        return nll.sum()

    return jax.value_and_grad(loss)(logits)


logits = jnp.array([[-0.3, 1, 0.1, 0], [0.1, 2, 0.4, 0]])
for _ in range(10):
    value, gradient = toy(logits, jnp.eye(4))
    logits -= gradient
    print(f"{value:.6f}")

# %% [markdown]
# ## z-loss
#
# Adding a constant to all logits of a token changes no probability, so nothing keeps the logits near zero. In bfloat16,
# with 8 bits of precision, logits around 100 are rounded to halves. The *z-loss* adds z x lse^2 with z = 1e-4 (PaLM,
# [arXiv:2204.02311](https://arxiv.org/abs/2204.02311), section 5). The log-sum-exp is there already, on every device,
# so it costs no communication: `token_losses` returns it as its second result. Here the logits start 30 too high. At z
# = 1e-4 they sink slowly, over thousands of steps; z = 1e-2 shows it in sixty. The option in a Run is
# `training.z_loss`.

# %%


def train_logits(z, logits, steps=60):
    @jax.jit
    @functools.partial(manual, in_specs=(P("tensor"), P("tensor")), out_specs=P("tensor"))
    def gradient(logits, table):
        def loss(logits):
            nll, lse = token_losses(sequence_all_gather(logits, 0), table, labels, 3, 2)
            return (nll + z * lse**2).sum()

        return jax.grad(loss)(logits)

    for _ in range(steps):
        logits -= gradient(logits, jnp.eye(4))
    return jax.nn.logsumexp(logits[:, :3], -1)


high = jnp.array([[29.7, 31, 30.1, 0], [30.1, 32, 30.4, 0]])
for z in (0.0, 1e-4, 1e-2):
    print(f"z = {z}: log-sum-exp after 60 steps", np.round(train_logits(z, high), 2))

# %% [markdown]
# ## All pieces, by hand
#
# Embedding, sharded positions, one pair with sequence parallelism, the loss with z-loss: a model in twelve lines, on
# four replicas of two devices. It learns to copy its input, and stops where the loss of a sequence of 32 tokens falls
# below 0.0962, the number at which a well-known notebook of this lesson leaves its larger model.

# %%
V, T, D, F = 64, 32, 64, 128
keys = jax.random.split(jax.random.key(7), 5)
stored = {
    "embed": (jax.random.normal(keys[0], (V, D)) * 0.1, P("tensor")),
    "positions": (jax.random.normal(keys[1], (T, D)) * 0.1, P(None, "tensor")),
    "up": (jax.random.normal(keys[2], (D, F)) / D**0.5, P(None, "tensor")),
    "down": (jax.random.normal(keys[3], (F, D)) / F**0.5, P("tensor")),
}
params, specs = ({name: pair[i] for name, pair in stored.items()} for i in (0, 1))


def loss_of_sequences(params, tokens):
    x_BTD = embed(tokens, params["embed"])
    x_BTD += local_shard(all_gather(params["positions"], ("tensor",), 1), ("tensor",), 0)
    hidden = jax.nn.gelu(sequence_all_gather(x_BTD, 1) @ params["up"])
    x_BTD += sequence_reduce_scatter(hidden @ params["down"], 1)
    x_TD = sequence_all_gather(x_BTD, 1).reshape(-1, D)
    nll, lse = token_losses(x_TD, params["embed"], tokens.reshape(-1), V, len(x_TD))
    return (nll + 1e-4 * lse**2).sum() / len(tokens), nll.sum() / len(tokens)


@functools.partial(manual, in_specs=(specs, P("data")), out_specs=(specs, P()))
def gradients(params, tokens):
    grads, loss = jax.grad(loss_of_sequences, has_aux=True)(params, tokens)
    return jax.tree.map(lambda x: x / 4, all_reduce((grads, loss), ("data",)))


adam = optax.adam(1e-2)


@jax.jit
def step(params, opt_state, tokens):
    grads, loss = gradients(params, tokens)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


tokens = jax.random.randint(keys[4], (16, T), 0, V)
start, losses, opt_state = params, [], adam.init(params)
while not losses or losses[-1] > 0.0962:
    params, opt_state, loss = step(params, opt_state, tokens)
    losses.append(float(loss))
whole = manual(loss_of_sequences, in_specs=(specs, P()), out_specs=P())(start, tokens)[1]
print(f"first loss {losses[0]:.2f}, without data parallelism {whole:.2f}; below 0.0962: {losses[-1] <= 0.0962}")

# %% loose
print(f"{len(losses)} steps, last loss {losses[-1]:.4f}")

# %% [markdown]
# ## The same at full size, by plan
#
# That notebook's model has two layers of width 3,072, a vocabulary of 5,000 and 32 positions, trained by Adam in
# float32 on a 4 x 2 mesh. Its memory profile says 23.9 GB on all devices, 2.9 on each, and later 12.4, 1.5 on each.
# Both follow from one multiplication: 12 bytes of state for each parameter, stored once or, where an old state is kept,
# twice. Nothing has to be allocated to know it. The planner says the same of Meshwright's GPT-2, which has one table
# for both ends and so 15 M parameters less: 1.35 GiB. FSDP over the four replicas holds a quarter.

# %%
from meshwright.hardware.targets import parse_target
from meshwright.planner.search import price_run

width, vocab = 3072, 5000
count = 2 * 12 * width**2 + 2 * vocab * width
print(f"parameters: 2 x 12 x 3072^2 + 2 x 5000 x 3072 = {count / 1e6:.0f} M")
state = 12 * count / 2 / 2**30
print(f"state of a device: 12 bytes x {count / 1e6:.0f} M / 2 = {state:.2f} GiB; kept twice {2 * state:.2f} GiB")
for degrees in (MeshShape(data=4, tensor=2), MeshShape(fsdp=4, tensor=2)):
    large = Run(
        model=Gpt2(vocab=vocab, width=width, layers=2, heads=4, positions=32), mesh=degrees,
        training=Training(batch=16, seq=32),
    )  # fmt: skip
    memory = price_run(large, parse_target("v4:2x2x2")).estimate.memory
    planned = {name: f"{memory[name] / 2**30:.2f} GiB" for name in ("parameters", "optimizer state")}
    print(degrees, planned)

# %% [markdown]
# ## A sharded GPT on Shakespeare
#
# A GPT of two layers, with heads, feed-forward and vocabulary split over two devices and four replicas, is trained on
# the opening of *Coriolanus*, one character per token, then saved and restored on another mesh. This is Meshwright's
# own model and step: the pieces above, in a loop with data, evaluation and checkpoints.

# %%
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.trainer.loop import prepare_run, train

run = Run(
    name="shakespeare",
    model=Gpt2(width=64, layers=2, heads=4, positions=64, vocab_multiple=2),
    mesh=MeshShape(data=4, tensor=2),
    training=Training(steps=80, batch=16, seq=64, compute_dtype="float32", eval_samples=16),
    optimizer=Optimizer(learning_rate=3e-3, warmup_steps=10),
    data=Data(paths=("coriolanus.txt",), tokenizer="chars", prompt="First", sample=60),
)
with tempfile.TemporaryDirectory() as folder:
    prepared = prepare_run(run, cache=Path(folder) / "cache")
    summary = train(prepared, out=Path(folder) / "run")
    print(f"loss {summary.loss:.2f}, on held-out text {summary.held_out_loss:.2f}")
    other_mesh = prepare_run(dataclasses.replace(run, mesh=MeshShape(fsdp=8)), cache=Path(folder) / "cache")
    with Checkpoints(Path(folder) / "run" / "checkpoints", max_to_keep=2) as checkpoints:
        saved_params, _ = checkpoints.restore_params(prepared.device_run, None)
        restored_params, manifest = checkpoints.restore_params(other_mesh.device_run, None)
same = jax.tree.map(lambda p, q: np.array_equal(jax.device_get(p), jax.device_get(q)), saved_params, restored_params)
print(f"step {manifest.step} restored on fsdp=8: every tensor equal", all(jax.tree.leaves(same)))
print(restored_params["blocks"]["up"].sharding.spec, "was", saved_params["blocks"]["up"].sharding.spec)

# %% [markdown]
# ## The census
#
# The census of the GPT's train step, of the same program that just ran. Each layer's two pairs gather and scatter the
# sequence over `tensor`; the gradients are summed over `data`, and those of what is replicated over `tensor` over both.

# %%
from meshwright.analysis.run_census import census_of_train_step

census = census_of_train_step(prepared.device_run)
sent = {}
for e in census.ledger:
    sent[e.axes_label] = sent.get(e.axes_label, 0) + e.sent
print("findings:", len(census.findings), *(f"{axes}: {n / 2**20:.2f} MiB sent" for axes, n in sent.items()), sep="\n")

# %% [markdown]
# ## Exercises
#
# **1.** Llama 3.1 405B has F = 53,248. Its authors trained with `tensor=8` on H100. Would 16 have paid, on two nodes?

# %% [markdown] answer
# Inside a node n < 53,248 x 450e9 / 989e12 = 24, so eight is well covered. Sixteen leave the node: over the network n <
# 2.7, and two nodes of eight are far more than that.

# %% answer
bounds = {name: 53248 * bandwidth / chip.flops_bf16 for name, (chip, bandwidth) in links.items()}
print({name: round(bound, 1) for name, bound in bounds.items()})
assert bounds["H100, NVLink"] > 8 and bounds["H100, network"] < 16

# %% [markdown]
# **2.** What is the gradient of z x lse^2 with respect to the logits, and in which direction does it push them?

# %% [markdown] answer
# 2 z lse p: down, in proportion to their probabilities, as long as lse is positive. It is as strong as the likelihood's
# gradient, p - 1, where lse is about 1 / 2z: 5,000 for z = 1e-4. At sane sizes it is a nudge.

# %% answer
z, values = 1e-4, jnp.array([3.0, 1.0, -2.0])
derivative = jax.grad(lambda v: z * jax.nn.logsumexp(v) ** 2)(values)
assert np.allclose(derivative, 2 * z * jax.nn.logsumexp(values) * jax.nn.softmax(values))
print(derivative)

# %% [markdown]
# **3.** Sequence parallelism replaces an all-reduce by a reduce-scatter and a gather, which send the same bytes. What
# is won? Count the bytes that a layer's norms keep for the backward pass, for T = 8,192, D = 4,096, bfloat16,
# `tensor=8`.

# %% [markdown] answer
# The input of each norm is 8,192 x 4,096 x 2 = 64 MiB, kept by all eight devices, and 8 MiB each where the sequence is
# split. Two norms in each of 32 layers: 4 GiB against 0.5.

# %% answer
kept = 8192 * 4096 * 2 * 2 * 32
print(kept / 2**30, kept / 8 / 2**30)
assert kept == 4 * 2**30

# %% [markdown]
# ## Summary
#
# - Columns, then rows, then one sum: g. The entry needs f, whose backward pass is that sum; sequence parallelism has
#   both as a gather and a reduce-scatter.
# - n < F x bandwidth / peak, whatever the batch: 6 for an 8B model inside an H100 node, less than 1 over its network.
# - Tables are split too: the vocabulary by rows, positions by columns. The loss needs two small reductions for a token,
#   and z-loss none.
# - State is 12 bytes of a parameter / (tensor x fsdp): multiply before you allocate.
