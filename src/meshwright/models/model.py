"""The contract between a model family and the step, the planner and the census.

A family (a subclass of `Model`) states its facts in a `ModelSpec` and computes its forward pass
from a `ForwardContext`. Nothing above guesses from the names of its fields.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from meshwright.comm.collectives import TokenFunction, sequence_all_gather, sequence_reduce_scatter
from meshwright.config import MeshShape
from meshwright.declarations import changes
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import default_mesh_shape
from meshwright.models.blocks.layers import Dropout
from meshwright.models.execution import Execution
from meshwright.models.kernels.attention import Index, Scores

# The contract of a family is imported from here, its facts included.
from meshwright.models.layer_facts import AttentionSpec as AttentionSpec
from meshwright.models.layer_facts import ExpertBuffers as ExpertBuffers
from meshwright.models.layer_facts import ExpertSpec as ExpertSpec
from meshwright.models.layer_facts import Gathered as Gathered
from meshwright.models.layer_facts import IndexerSpec as IndexerSpec
from meshwright.models.layer_facts import IndexWork as IndexWork
from meshwright.models.layer_facts import LatentSpec as LatentSpec
from meshwright.models.layer_facts import LayerSpec as LayerSpec
from meshwright.models.layer_facts import MatmulSizes as MatmulSizes
from meshwright.models.layer_facts import Recurrence as Recurrence
from meshwright.models.layer_facts import Widths as Widths
from meshwright.models.layer_runs import LayerRun as LayerRun
from meshwright.plugins import resolve
from meshwright.ranges import PositiveInt, Ranged
from meshwright.sharding.params import GatherParams, Param, Tree
from meshwright.sharding.sequence import SequenceSplit

Metrics = dict[str, tuple[jax.Array, jax.Array]]
"""Metrics of a step as (sum, count); the value is sum / count."""
Aux = dict[str, jax.Array]
"""Auxiliary outputs of a layer (router statistics, auxiliary loss), summed over the tokens
of this device.

`aux_loss`, a scalar, is added to the loss after division by the sequences
of the global batch. Dense layers return {}.
"""
Layer = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Aux]]
"""One layer: `(x [B, T/tensor, D], its sharded parameters, its index) -> (x, aux)`."""
Pattern = Layer | tuple[Layer, ...]
"""Layer function of a stack, or one for each layer of a period that repeats."""
MTP = "mtp"
"""Subtree of the layer that predicts the token after the next,
with a leading dimension of one layer."""
Attend = Callable[..., jax.Array]
"""`(q [B, T, N, H], k [B, T, K, H], v, *, window, scores=None) -> [B, T, N, H]`: attention
to all visible keys.

window: sliding window, or None.
scores: soft cap, sinks and chunks (kernels/attention.py), or None.
"""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens and positions of a batch; each field is [B, T/context], int32."""

    ids: jax.Array
    positions: jax.Array
    """Position within the document."""
    padding: jax.Array | None = None
    """Whether a position is not text, bool; None where the batch has only text.

    Nothing that text reads, and no count, depends on padding: its embedding is zero whatever its
    id, it has no experts, and attention, convolutions and states do not cross from it into text."""
    segments: jax.Array | None = None
    """Document of each position; None in decoding."""


RecurrentStep = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""`(inputs, positions [B, T], state) -> (output [B, T, ...], state)`: tokens
of complete sequences, after a state.

inputs: tree of [B, T, ...].
positions: within each document; a token at position 0 begins one.
state: as `Recurrence.carried` has it for one layer and this device;
None before the first token of a sequence.
"""

SplitStep = Callable[[Any, jax.Array, SequenceSplit], jax.Array]
"""`(inputs, positions [B, T/context], split) -> output [B, T/context, ...]`: this device's tokens
of sequences that `context` splits, inside the `shard_map`. It exchanges what its segments need of
those before them.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardContext(Execution):
    """An execution on the tokens of one batch: what every layer needs besides its parameters."""

    tokens: Tokens
    dropout: Dropout
    attend: Attend
    """Attention of this device's queries to the complete sequence."""
    attend_pieces: tuple[Attend, ...] = ()
    """Attention of each piece of the batch, for `attend_row_parallel`; () for no pieces."""
    batch_pieces: tuple["ForwardContext", ...] = ()
    """Inputs of each piece of the batch, for layers with experts: the rows of one travel while
    another computes; () for no pieces."""
    attend_latent: Callable[[jax.Array, jax.Array, int, Index | None], jax.Array] | None = None
    """In decoding: `(q [B, T, N, Z], new latents [B, T, Z], kv_rank, index) -> [B, T, N, kv_rank]`,
    to cached latents."""
    cached_recur: Callable[[RecurrentStep, Any], jax.Array] | None = None
    """In decoding: `recur` from the cached state of the layer, and to it."""
    observed: list[jax.Array] = dataclasses.field(default_factory=list)
    """Log-sum-exps of the attention that a layer has computed, while it is traced
    (models/layer_health.py)."""

    @classmethod
    def of(cls, execution: Execution, **batch: Any) -> "ForwardContext":
        """Returns an execution on one batch. batch: the fields that this class adds."""
        decisions = {
            field.name: getattr(execution, field.name) for field in dataclasses.fields(Execution)
        }
        return cls(**(decisions | batch))

    def record(self, name: str, x_BTD: jax.Array, split: str | None = None) -> jax.Array:
        """Returns x; where a step's tensors are recorded, it has this
        name (models/recording.py)."""
        return x_BTD if self.tap is None else self.tap(name, x_BTD, split)

    def of_layer(self, layer: jax.Array) -> "ForwardContext":
        """Returns the inputs of one layer: these, unless the step's tensors are recorded."""
        return self if self.tap is None else dataclasses.replace(self, tap=self.tap.of_layer(layer))

    @functools.cached_property
    def angles(self) -> Callable[[Any], tuple[jax.Array, jax.Array]]:
        """Function from a `Rotary` to its cosine and sine
        at the tokens' positions, computed once for all layers."""
        return functools.cache(lambda rotary: rotary.angles(self.tokens.positions))

    @functools.cached_property
    def half(self) -> Callable[["Kind"], Callable[..., Any]]:
        """Function from a kind to the function of its half of a layer, built once
        for all layers."""
        return functools.cache(lambda kind: kind.build(self))

    def recur(
        self, step: RecurrentStep, inputs: Any, split_step: SplitStep | None = None
    ) -> jax.Array:
        """Returns the output of a recurrence for this step's tokens, [B, T/context, ...].

        Training begins every sequence without a state;
        decoding goes on from the state of the tokens before.
        split_step: for sequences that `context` splits;
        of a kind whose `Recurrence.gathered` states what it sends.
        """
        if self.cached_recur is not None:
            return self.cached_recur(step, inputs)
        if self.sequence.shards > 1:
            assert split_step is not None
            return split_step(inputs, self.tokens.positions, self.sequence)
        output, _ = step(inputs, self.tokens.positions, None)
        return output

    def column_parallel(self, f: TokenFunction, x_BTD: jax.Array, weights: Any) -> Any:
        """Returns `f(x, weights)` for the complete sequence, gathered
        over `tensor`: column-parallel matmuls.

        x_BTD: this device's positions [B, T/tensor, D].  f: matmuls, the same for every token.
        """
        if self.tensor_strategy == "ring":
            return resolve("tensor strategy", "ring").column_parallel(f, x_BTD, weights)
        return f(sequence_all_gather(x_BTD, 1), weights)

    def row_parallel(self, f: TokenFunction, y_BTF: jax.Array, weights: Any) -> jax.Array:
        """Returns `f(y, weights)` summed over `tensor`, this device's positions
        of it [B, T/tensor, D].

        y_BTF: the complete sequence, features split over `tensor`.
        f: matmuls, the same for every token.
        """
        if self.tensor_strategy == "ring":
            return resolve("tensor strategy", "ring").row_parallel(f, y_BTF, weights)
        return sequence_reduce_scatter(f(y_BTF, weights), 1)

    def attend_row_parallel(
        self,
        f: TokenFunction,
        qkv: tuple[jax.Array, jax.Array, jax.Array],
        weights: Any,
        window: int | None,
        scores: Scores | None = None,
        factor_BTNH: jax.Array | None = None,
    ) -> jax.Array:
        """Returns `row_parallel(f, attend(q, k, v), weights)`: attention
        and its output projection [B, T/tensor, D].

        In pieces of the batch, the sums of one piece travel while the next attends: the projection
        is too short a matmul to hide its own sums.
        factor_BTNH: multiplies the attention output (an output gate); None is 1.
        """
        if not self.attend_pieces:
            out_BTNH = self.attend(*qkv, window=window, scores=scores)
            out_BTNH = self.record("attention heads", out_BTNH, split="tensor")
            return self.row_parallel(
                f, out_BTNH if factor_BTNH is None else out_BTNH * factor_BTNH, weights
            )
        count = len(self.attend_pieces)
        factors = [None] * count if factor_BTNH is None else jnp.split(factor_BTNH, count)
        pieces = (jnp.split(x, count) for x in qkv)
        of_pieces = [None] * count if scores is None else scores.split(count)
        done: list[jax.Array] = []
        for i, (attend, factor, q, k, v) in enumerate(
            zip(self.attend_pieces, factors, *pieces, strict=True)
        ):
            if len(done) > 1:
                # XLA would attend to all pieces first and send all sums after.
                q, done[-2] = jax.lax.optimization_barrier((q, done[-2]))
            out = attend(q, k, v, window=window, scores=of_pieces[i])
            if self.tap is not None:
                out = self.tap.of_piece(i, count)("attention heads", out, split="tensor")
            done.append(
                sequence_reduce_scatter(f(out if factor is None else out * factor, weights), 1)
            )
        return jnp.concatenate(done)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Half of a layer, a frozen value: attention in any form, feed-forward, or experts."""

    width: int
    """Model width D."""

    scope: ClassVar[str]
    """Name of the half in profiles and in compiled programs."""

    @property
    def has_loss(self) -> bool:
        """Whether the function of a first half returns `(output, aux)`,
        with a loss of its own in `aux`."""
        return False

    reads_residual: ClassVar[bool] = False
    """Whether the function of a second half takes the residual stream
    as a third argument, besides its norm."""

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        return {}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the half for a step's tokens, `(normalised x [B, T/tensor, D], weights) -> output
        [B, T/tensor, D]`.

        A second half returns `(output, aux)`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Facts of a model that layouts, planner and census need."""

    width: int
    """Model width D: features of the residual stream."""
    layers: tuple[LayerSpec, ...]
    """All layers, in order."""
    max_seq: int | None = None
    """Longest sequence; None has no limit."""
    embedding: str = "embed"
    """Path of the parameter that the unembedding multiplies by;
    equal to the embedding where they are tied."""
    logit_softcap: float | None = None
    """Soft cap of the logits (`kernels.attention.cap`), or None."""
    further: tuple[LayerSpec, ...] = ()
    """Layers after the last that predict further tokens in training (models/forward.py)."""
    period: int = 1
    """Layers after which the kinds of layers repeat (local and global attention): pipeline parts
    begin with a period. Above 1 the stacks of a model take turns within it. Kinds in any order have
    that of all layers."""
    runs: tuple[LayerRun, ...] = ()
    """Runs of layers in any order, of which each stack has one kind; () follows from `period`."""

    @functools.cached_property
    def stacks(self) -> dict[str, int]:
        """Layers of each stack, in the order of the layers."""
        count: dict[str, int] = {}
        for layer in self.layers:
            count[layer.stack] = count.get(layer.stack, 0) + 1
        return count

    def layers_of(self, stack: str) -> tuple[int, ...]:
        """Returns the layers that a stack holds, in order."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.stack == stack)

    @functools.cached_property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Attention of the layers that have one, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @functools.cached_property
    def trains_only_indexers(self) -> bool:
        """Whether indexers are in their warm-up: no loss but theirs has a backward pass."""
        indexers = [a.indexer for a in self.attention if a.indexer is not None]
        return any(indexer.training == "warmup" for indexer in indexers)

    @functools.cached_property
    def recurrences(self) -> tuple[Recurrence, ...]:
        """Recurrences of the layers that have one, in order."""
        return tuple(layer.recurrence for layer in self.layers if layer.recurrence is not None)

    @functools.cached_property
    def has_latents(self) -> bool:
        """Whether keys and values are projections of latents."""
        return any(a.latent is not None for a in self.attention)

    @functools.cached_property
    def head_sizes(self) -> tuple[int, ...]:
        """Sizes of the layers' keys and values, each once."""
        return tuple(sorted({size for a in self.attention for size in (a.head_size, a.value_size)}))

    @functools.cached_property
    def kv_heads(self) -> int | None:
        """Fewest key/value heads of any layer; None for a model without attention."""
        return min((a.kv_heads for a in self.attention), default=None)


ByLayers = Callable[..., Any]
"""The way in which a room works from the layers of a model;
its arguments are those of the method of `Model`."""


@dataclasses.dataclass(frozen=True)
class Model(Ranged, part="model"):
    """Configuration and forward pass of a model family: the base class
    of every family (models/families/).

    A family is a frozen dataclass with fields of its own. It describes its parameters before they
    exist (`params`), states what the planner and the census need to know (`spec`), and computes the
    forward pass of one device in the parts that a pipeline may hold apart (`embed`,
    `layer_functions`, `unembed`).

    Example:
        >>> model = mw.Llama(vocab=32000, width=512, layers=8, heads=8)
        >>> isinstance(model, mw.Model), sorted(model.params())
        (True, ['blocks', 'embed', 'final_norm', 'unembed'])
    """

    unit: ClassVar[str] = "tokens"
    """What a step's speed counts."""
    reads_text: ClassVar[bool] = True
    """Whether batches are sequences of tokens made of text (`Data`);
    otherwise the model has batches of its own."""
    states_layers: ClassVar[bool] = True
    """Whether `spec` lists the layers and their parts: layouts, remat policies
    and meshes are chosen by it."""
    vocab: PositiveInt | None = None
    """Vocabulary size V; None takes the tokenizer's."""
    vocab_multiple: Annotated[PositiveInt, changes("program", "evaluation", "plan")] = (
        dataclasses.field(default=128, kw_only=True)
    )
    """The embedding tables are padded to a multiple of this;
    padding rows are masked and change no number."""

    def params(self) -> Tree:
        """Returns the descriptions of all parameters, a nested dictionary of `Param`."""
        raise NotImplementedError

    def spec(self) -> ModelSpec:
        """Returns the facts that layouts, planner and census need: width,
        and what each layer is made of."""
        raise NotImplementedError

    def variables(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays that the forward pass changes besides, such
        as running averages, by path."""
        return {}

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the hidden states [B, T/tensor, D] before the first layer, on the first stage."""
        raise NotImplementedError

    def layer_functions(self, ctx: ForwardContext) -> Mapping[str, Pattern]:
        """Returns the layer function of each stack, or one per layer of its period,
        by the stack's name in `params`."""
        raise NotImplementedError

    def unembed(
        self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the final hidden states [B, T, D], all positions,
        and the unembedding [V/stage+tensor, D]."""
        raise NotImplementedError

    def layer_metrics(self, aux: dict[str, Aux], sequences: int) -> Metrics:
        """Returns metrics of a step from the layers' auxiliary outputs, [L, ...] per stack,
        summed over the batch."""
        return {}

    def post_update(self, params: Tree, aux: dict[str, Aux]) -> Tree:
        """Returns `params` with what a step changes besides the optimizer, such
        as a router's bias."""
        return params

    def shrunk(self, shape: MeshShape, layers: int) -> "Model":
        """Returns a small model that `shape` divides as it divides this one, for rehearsals;
        by default this one."""
        return self

    def default_mesh(self, devices: int) -> MeshShape:
        """Returns the mesh of a run that names none, over that many devices of this machine."""
        return default_mesh_shape(devices)

    def units(self, seq: int) -> int:
        """Returns the units (`unit`) in one sample of a batch: the tokens of a sequence."""
        return seq

    # The rooms above work from a model's layers. Each gives the way in which it does so,
    # `by_layers`, to the method that is named after the work; a model whose layers are not known
    # does that work in a way of its own.

    def place(self, run: Any, shape: MeshShape, by_layers: ByLayers) -> Any:
        """Returns the run placed on a mesh, a `PlacedRun` (runs/placed_run.py)."""
        return by_layers(self, run, shape)

    def forward_flops(self, seq: int, by_layers: ByLayers) -> dict[str, float]:
        """Returns the FLOPs of one unit's forward pass by item (models/flops.py)."""
        return by_layers(self, seq)

    def local_model(self, settled: Any, by_layers: ByLayers) -> Any:
        """Returns the forward pass on one device, a `LocalModel` (models/forward.py);
        None where there is no such."""
        return by_layers(self, settled)

    def abstract_batch(self, device_run: Any, by_layers: ByLayers) -> Any:
        """Returns a batch of a placed run as abstract arrays (step/device_run.py)."""
        return by_layers(self, device_run)

    def initial_arrays(self, device_run: Any, by_layers: ByLayers) -> tuple[Any, tuple[Any, ...]]:
        """Returns parameters and variables before the first step (step/device_run.py)."""
        return by_layers(self, device_run)

    def gradients(self, device_run: Any, by_layers: ByLayers) -> Callable[..., Any]:
        """Returns the function that computes the gradients of a step (step/gradients.py)."""
        return by_layers(self, device_run)

    def prepare(self, run: Any, devices: list[Any], by_layers: ByLayers) -> Any:
        """Returns the run on its devices, with its batches, a `Trainable` (trainer/prepare.py)."""
        return by_layers(self, run, devices)

    def evaluate(
        self, prepared: Any, source: Any, whole: bool, at: int | None, by_layers: ByLayers
    ) -> Any:
        """Returns the metrics of a checkpoint on held-out data (trainer/evaluation.py)."""
        return by_layers(prepared, source, whole, at)

    def work(self, placed: Any, by_layers: ByLayers) -> Any:
        """Returns the work of a step as the planner prices it (planner/work.py)."""
        return by_layers(self, placed)

    def train_step_facts(self, device_run: Any, by_layers: ByLayers) -> Any:
        """Returns what the census knows of the compiled train step (analysis/run_census.py)."""
        return by_layers(self, device_run)

    def options_of_child(self) -> list[str]:
        """Returns the options that a process needs besides a plan file to have the same model."""
        return []


def vocab_size(model: Model) -> int:
    """Returns the vocabulary size. Raises ConfigError where it is not set."""
    if model.vocab is None:
        raise ConfigError(
            "a model without a vocabulary",
            "model.vocab is not set",
            "for example --model.vocab 32000",
        )
    return model.vocab


def padded_vocab(model: Model) -> int:
    """Returns the rows of the embedding tables: the vocabulary rounded up to `vocab_multiple`."""
    return -(-vocab_size(model) // model.vocab_multiple) * model.vocab_multiple
