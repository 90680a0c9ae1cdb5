"""A decoder of layer kinds: embedding, a pattern of layers (attention, then feed-forward
or experts), unembedding.

A kind (blocks/attention.py, latent.py, delta_net.py, feed_forward.py, experts.py) is a frozen value
that describes its parameters, states its facts, and computes its half of a layer. A family is a
table of fields and the `Decoder` that they make (families/). One layer, with norms before its
halves:

    x += attention(norm(x));  x += feed_forward(norm(x))

one with parallel halves (GPT-J, Cohere), which have one norm:

    h = norm(x);  x += attention(h) + feed_forward(h)

and one with a single half (Nemotron-H): either of the first two sums.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import msgspec
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import local_shard, sequence_all_gather
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, refuse
from meshwright.models.adapters import AdapterGather, adapters_of, with_adapters
from meshwright.models.blocks.layers import Norm, embed, take_rows
from meshwright.models.layer_health import add_aux
from meshwright.models.layer_runs import LayerRun, shortest_runs
from meshwright.models.model import (
    Aux,
    ForwardContext,
    Kind,
    Layer,
    LayerSpec,
    Model,
    ModelSpec,
    Pattern,
    padded_vocab,
    vocab_size,
)
from meshwright.models.remat import ATTN_RESIDUAL
from meshwright.ranges import PositiveInt
from meshwright.sharding.params import GatherParams, Param, Tree
from meshwright.words import AXES

Opening = Callable[[jax.Array, Tree], tuple[jax.Array, Tree]]
"""What comes before a layer: `(x [B, T/tensor, D], weights) -> x, weights`."""


def _unchanged(x_BTD: jax.Array, weights: Tree) -> tuple[jax.Array, Tree]:
    return x_BTD, weights


def _both_halves(attention: Aux, feed_forward: Aux) -> Aux:
    """Returns the aux of a layer: the losses of its halves added, everything else under its
    own name."""
    if "aux_loss" not in attention or "aux_loss" not in feed_forward:
        return {**attention, **feed_forward}
    loss = attention["aux_loss"] + feed_forward["aux_loss"]
    return {**attention, **feed_forward, "aux_loss": loss}


@dataclasses.dataclass(frozen=True)
class Block:
    """One kind of layers."""

    stack: str
    """Subtree of the parameters that holds its layers."""
    attention: Kind | None
    """First half; None for layers that have only a second one."""
    feed_forward: Kind | None
    """Second half; None for layers that have only a first one."""
    norm: Norm
    """Norm of the halves."""
    norm_place: Literal["before", "after", "both", "shared"] = "before"
    """Whether the halves normalise what they read, what they add (OLMo 2), or both (Gemma);
    `shared`: they are parallel and read one norm of the layer's input (Cohere)."""
    branch_factor: float | None = None
    """Factor on what each half adds (Granite)."""
    output_scale: bool = False
    """Whether a number of each layer multiplies its output;
    no training changes it (Gemma 4: `layer_scalar`)."""

    def __post_init__(self) -> None:
        if self.attention is None or self.feed_forward is None:
            self._check_single_half()
            return
        if self.norm_place != "shared":
            return
        of_layers = f'of layers in {self.stack!r} with norm_place="shared"'
        truth = "parallel halves do not compute it"
        fix = 'norm_place="before"'
        reads_residual = self.feed_forward.reads_residual
        refuse(
            (self.output_scale, f"an output scale {of_layers}", truth, fix),
            (self.attention.has_loss, f"the loss of attention {of_layers}", truth, fix),
            (
                reads_residual,
                f"a feed-forward that reads the residual stream {of_layers}",
                truth,
                fix,
            ),
        )

    def _check_single_half(self) -> None:
        """Raises ConfigError for a layer without halves,
        or with one where its norm is that of two."""
        asked = f"layers in {self.stack!r}"
        refuse(
            (
                self.attention is None and self.feed_forward is None,
                f"{asked} without halves",
                "a layer adds at least one half to the residual stream",
                "an attention or a feed_forward",
            ),
            (
                self.norm_place == "shared",
                f'{asked} with one half and norm_place="shared"',
                "parallel halves are two",
                'norm_place="before"',
            ),
        )

    @property
    def halves(self) -> dict[str, Kind]:
        """Halves that the layers have, in order, by the name that their norms begin with."""
        halves = {"attention": self.attention, "mlp": self.feed_forward}
        return {name: half for name, half in halves.items() if half is not None}

    @property
    def normalises_outputs(self) -> bool:
        """Whether the halves normalise what they add."""
        return self.norm_place in ("after", "both")

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        params = dict[str, Param]()
        norms = ("norm", "out_norm") if self.norm_place == "both" else ("norm",)
        for name, half in self.halves.items():
            params |= half.params(layers)
            if self.norm_place == "shared" and name == "mlp":
                continue
            for norm in norms:
                params |= self.norm.params(f"{name}_{norm}", (layers, half.width), "LD")
        if self.output_scale:
            params["output_scale"] = Param((layers, 1), "LQ", "ones")
        return params

    def spec(self) -> LayerSpec:
        """Returns the facts of a layer."""
        facts = dict[str, Any]()
        for half in self.halves.values():
            facts |= half.facts()
        return LayerSpec(
            self.stack,
            **facts,
            normalises_inputs=self.norm_place != "after",
            normalises_outputs=self.normalises_outputs,
            has_parallel_halves=self.norm_place == "shared",
            has_first_half=self.attention is not None,
            has_second_half=self.feed_forward is not None,
            attention_scope="" if self.attention is None else self.attention.scope,
            feed_forward_scope="" if self.feed_forward is None else self.feed_forward.scope,
        )

    def layer(self, ctx: ForwardContext, opening: Opening = _unchanged) -> Layer:
        """Returns the layer function. opening: what comes before the layer."""
        pieces = ctx.batch_pieces if self.spec().experts else ()
        halves = self._parallel_halves if self.norm_place == "shared" else self._halves
        runs = [halves(piece) for piece in pieces or (ctx,)]

        def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            x_BTD, w = opening(x_BTD, ctx.gather_params(params, self.stack))
            if not pieces:
                return runs[0](x_BTD, w, index)
            # No piece needs another, so the compiler's scheduler sends the rows
            # of one while another computes.
            outputs = []
            aux = []
            for run, piece_BTD in zip(runs, jnp.split(x_BTD, len(pieces)), strict=True):
                out_BTD, piece_aux = run(piece_BTD, w, index)
                outputs.append(out_BTD)
                aux.append(piece_aux)
            return jnp.concatenate(outputs), functools.reduce(add_aux, aux)

        return layer

    def _halves(self, ctx: ForwardContext) -> Layer:
        """Returns the halves of a layer, one after another, as a function of gathered weights."""
        # Built outside of the loop over layers: what a half computes
        # of the tokens is computed once.
        for half in self.halves.values():
            ctx.half(half)

        def run(x_BTD: jax.Array, w: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            local = ctx.of_layer(index)
            x_BTD = local.record("input", x_BTD)
            attention_aux: Aux = {}
            aux: Aux = {}
            if self.attention is not None:
                with jax.named_scope(self.attention.scope):
                    y_BTD, attention_aux = self._attention_output(self.attention, local, x_BTD, w)
                    x_BTD += ctx.dropout(y_BTD, 2 * index + 1)
                    if self.feed_forward is not None:
                        x_BTD = checkpoint_name(x_BTD, ATTN_RESIDUAL)
                        x_BTD = local.record("attention residual", x_BTD)
            if self.feed_forward is not None:
                with jax.named_scope(self.feed_forward.scope):
                    y_BTD, aux = self._feed_forward_output(self.feed_forward, local, x_BTD, w)
                    x_BTD += ctx.dropout(y_BTD, 2 * index + 2)
            if self.output_scale:
                x_BTD *= jax.lax.stop_gradient(w["output_scale"])
            return local.record("output", x_BTD), _both_halves(attention_aux, aux)

        return run

    def _attention_output(
        self, attention: Kind, ctx: ForwardContext, x_BTD: jax.Array, w: Tree
    ) -> tuple[jax.Array, Aux]:
        """Returns what the first half adds to the residual stream, and its aux."""
        mix = ctx.half(attention)
        h_BTD = ctx.record("attention input", self._norm_before("attention", x_BTD, w))
        y_BTD, aux = mix(h_BTD, w) if attention.has_loss else (mix(h_BTD, w), {})
        y_BTD = self._scaled(
            ctx.record("attention output", self._norm_after("attention", y_BTD, w))
        )
        return y_BTD, aux

    def _feed_forward_output(
        self, feed_forward: Kind, ctx: ForwardContext, x_BTD: jax.Array, w: Tree
    ) -> tuple[jax.Array, Aux]:
        """Returns what the second half adds to the residual stream, and its aux."""
        feed = ctx.half(feed_forward)
        h_BTD = ctx.record("feed-forward input", self._norm_before("mlp", x_BTD, w))
        y_BTD, aux = feed(h_BTD, w, x_BTD) if feed_forward.reads_residual else feed(h_BTD, w)
        y_BTD = ctx.record("feed-forward output", self._norm_after("mlp", y_BTD, w))
        return self._scaled(y_BTD), aux

    def _parallel_halves(self, ctx: ForwardContext) -> Layer:
        """Returns the two halves of a layer as `_halves` does, both of the norm
        of the layer's input."""
        attention, feed_forward = self.attention, self.feed_forward
        assert attention is not None and feed_forward is not None
        ctx.half(attention)
        ctx.half(feed_forward)

        def run(x_BTD: jax.Array, w: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            local = ctx.of_layer(index)
            mix = local.half(attention)
            feed = local.half(feed_forward)
            x_BTD = local.record("input", x_BTD)
            h_BTD = self._norm_before("attention", x_BTD, w)
            with jax.named_scope(attention.scope):
                mixed_BTD = mix(local.record("attention input", h_BTD), w)
                mixed_BTD = self._scaled(local.record("attention output", mixed_BTD))
                mixed_BTD = ctx.dropout(mixed_BTD, 2 * index + 1)
            with jax.named_scope(feed_forward.scope):
                fed_BTD, aux = feed(local.record("feed-forward input", h_BTD), w)
                fed_BTD = self._scaled(local.record("feed-forward output", fed_BTD))
                fed_BTD = ctx.dropout(fed_BTD, 2 * index + 2)
            return local.record("output", x_BTD + mixed_BTD + fed_BTD), aux

        return run

    def _scaled(self, y_BTD: jax.Array) -> jax.Array:
        """Returns what a half adds."""
        return y_BTD if self.branch_factor is None else y_BTD * self.branch_factor

    def _norm_before(self, half: str, x_BTD: jax.Array, w: Tree) -> jax.Array:
        """Returns the input of a half, normalised where the block does."""
        if self.norm_place == "after":
            return x_BTD
        return self.norm(x_BTD, w[f"{half}_norm"], w.get(f"{half}_norm_bias"))

    def _norm_after(self, half: str, y_BTD: jax.Array, w: Tree) -> jax.Array:
        """Returns the output of a half, normalised where the block does."""
        if not self.normalises_outputs:
            return y_BTD
        name = f"{half}_out_norm" if self.norm_place == "both" else f"{half}_norm"
        return self.norm(y_BTD, w[name], w.get(f"{name}_bias"))


@jax.custom_vjp
def _weight_gradients_first(x_BTD: jax.Array, weights: Tree) -> tuple[jax.Array, Tree]:
    """Returns its arguments; the backward pass leaves a layer when it has the gradients
    of the layer's weights.

    XLA:GPU would compute those of all layers of a loop's body at its end,
    and keep what they multiply (docs/log.md).
    """
    return x_BTD, weights


def _leave(_: None, g: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
    if jax.lax.axis_size("stage") > 1:  # a pipeline may compute the two apart
        return g
    g_x, g_weights = g
    gradients = [x for x in jax.tree.leaves(g_weights) if jnp.issubdtype(x.dtype, jnp.inexact)]
    g_x, _ = jax.lax.optimization_barrier((g_x, gradients))
    return g_x, g_weights


_weight_gradients_first.defvjp(lambda x_BTD, weights: ((x_BTD, weights), None), _leave)


def _adapter_gradients_first(x_BTD: jax.Array, weights: Tree) -> tuple[jax.Array, Tree]:
    """Returns its arguments as `_weight_gradients_first` does,
    for weights of which only the adapters are trained.

    Passed through that function, frozen weights would have gradients: a product each, as large as
    the one that the backward pass needs, behind a barrier that keeps it.
    """
    adapters = adapters_of(weights)
    x_BTD, adapters = _weight_gradients_first(x_BTD, adapters)
    return x_BTD, with_adapters(weights, adapters)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Embedding, layers and unembedding of a model."""

    width: int
    layers: tuple[Block, ...]
    """Kind of every layer, in order."""
    norm: Norm
    """Norm after the last layer."""
    period: int = 1
    """Layers after which the kinds repeat;
    1 for stacks that follow each other, all layers for kinds in any order."""
    runs: tuple[LayerRun, ...] = ()
    """Runs of kinds in any order; each stack then has layers of one kind. () is one run of all
    layers, or one for each stack."""
    tied: bool = False
    """Whether the embedding table is the unembedding too."""
    positions: int | None = None
    """Rows of a learned table of positions; None for no table."""
    embedding_factor: float | None = None
    logit_factor: float | None = None
    """Factor on the logits: it multiplies the hidden states before the unembedding."""
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        mixed = [stack for stack, blocks in self.stacks.items() if len(set(blocks)) > 1]
        refuse(
            (
                bool(self.runs and mixed),
                f"layers of several kinds in {', '.join(mixed)}, in any order",
                "a loop over layers in any order takes one kind of layers from each stack",
                "a stack for each kind of layers",
            )
        )

    @functools.cached_property
    def stacks(self) -> dict[str, tuple[Block, ...]]:
        """Layers of each stack, in the order of the layers."""
        names = dict.fromkeys(block.stack for block in self.layers)
        return {
            stack: tuple(block for block in self.layers if block.stack == stack) for stack in names
        }

    @property
    def table(self) -> str:
        """Parameter that the unembedding multiplies by."""
        return "embed" if self.tied else "unembed"


@dataclasses.dataclass(frozen=True)
class DecoderModel(Model):
    """Model whose forward pass is that of a `Decoder` made of its fields: the base
    of the families of this package."""

    width: PositiveInt = 128
    """Model width D."""
    layers: Annotated[int, msgspec.Meta(ge=1, le=10**5)] = 4
    """Layers L."""
    heads: PositiveInt = 4
    """Query heads N."""

    def build(self) -> Decoder:
        """Returns the decoder. Raises ConfigError for fields that do not go together."""
        raise NotImplementedError

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The decoder that the fields describe."""
        return self.build()

    def repeat(self, *kinds: Block, **fields: Any) -> Decoder:
        """Returns a decoder whose layers repeat `kinds`. fields: of `Decoder`."""
        layers = tuple(kinds[i % len(kinds)] for i in range(self.layers))
        tied = getattr(self, "embedding", "untied") == "tied"
        return Decoder(
            self.width, layers, kinds[0].norm, **{"period": len(kinds), "tied": tied, **fields}
        )

    def in_order(self, layers: Sequence[Block]) -> Decoder:
        """Returns a decoder of layers that need not repeat;
        of those that do, one with their period.

        Layers of one stack are equal.
        """
        repeated = next(p for p in range(1, len(layers) + 1) if _repeats(layers, p))
        if 2 * repeated <= len(layers):
            return self.repeat(*layers[:repeated])
        runs = shortest_runs(layers)
        return dataclasses.replace(self.repeat(*layers), runs=runs)

    @property
    def out_std(self) -> float:
        """Initial standard deviation of projections into the residual stream (GPT-2: 0.02 /
        sqrt(2 L))."""
        return float(0.02 / (2 * self.layers) ** 0.5)

    def params(self) -> Tree:
        """Returns the parameter descriptions; layers are stacked."""
        d = self.decoder
        scale, *bias = d.norm.params("scale", (d.width,), "D").values()
        final: Any = scale
        if d.norm.kind == "layer":
            final = {"scale": scale}
        if d.norm.kind == "layer" and bias:
            final["bias"] = bias[0]
        table = Param((padded_vocab(self), d.width), "VD", rows=vocab_size(self))
        tables = {name: table for name in ("embed", d.table)}
        if d.positions is not None:
            tables["positions"] = Param((d.positions, d.width), "TD")
        stacks = {stack: blocks[0].params(len(blocks)) for stack, blocks in d.stacks.items()}
        return {**tables, **stacks, "final_norm": final}

    def spec(self) -> ModelSpec:
        """Returns the facts of all layers."""
        return _spec_of(self)

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens [B, T/tensor, D], on the first stage."""
        d = self.decoder
        table_VD = ctx.gather_params(params["embed"], "embed")
        positions_TD: Any = None
        if d.positions is not None:
            positions_TD = ctx.gather_params(params["positions"], "positions")
        with jax.named_scope("embedding"):
            x_BTD = embed(ctx.tokens.ids, table_VD, ctx.sum_rows, ctx.tokens.padding)
            if d.embedding_factor is not None:
                x_BTD *= jnp.asarray(d.embedding_factor, x_BTD.dtype)
            if positions_TD is not None:
                local_positions_BT = local_shard(ctx.tokens.positions, ("tensor",), 1)
                x_BTD += take_rows(positions_TD, local_positions_BT, ctx.sum_rows)
            return ctx.dropout(x_BTD, 0)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Pattern]:
        """Returns the layer function of each stack,
        or those of the stack's layers in a period, in order."""
        stacks = self.decoder.stacks
        if self.decoder.period == 1:
            return {stack: blocks[0].layer(ctx) for stack, blocks in stacks.items()}
        frozen = isinstance(ctx.gather_params, AdapterGather)
        opening = _adapter_gradients_first if frozen else _weight_gradients_first
        if self.decoder.runs:
            return {stack: blocks[0].layer(ctx, opening) for stack, blocks in stacks.items()}
        layer = functools.cache(lambda block: block.layer(ctx, opening))
        pattern: dict[str, tuple[Layer, ...]] = {}
        for block in self.decoder.layers[: self.decoder.period]:
            pattern[block.stack] = (*pattern.get(block.stack, ()), layer(block))
        return dict(pattern)

    def unembed(
        self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D]
        and the unembedding [V/stage+tensor, D]."""
        d = self.decoder
        final: Any = gather_params(params["final_norm"], "final_norm")
        table = params["embed"] if d.tied else params["unembed"]
        # Two gradients of a tied table are added before they are scattered,
        # and a frozen table has none.
        if not d.tied and not isinstance(gather_params, AdapterGather):
            x_BTD, table = _weight_gradients_first(x_BTD, table)
        table_VD = gather_params(table, d.table)
        scale = final
        bias = None
        if d.norm.kind == "layer":
            scale = final["scale"]
            bias = final.get("bias")
        with jax.named_scope("unembedding"):
            x_BTD = d.norm(x_BTD, scale, bias)
            if d.logit_factor is not None:
                x_BTD *= d.logit_factor
            return sequence_all_gather(x_BTD, 1), table_VD

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these,
        with periods of two layers at most."""
        fields = {field.name for field in dataclasses.fields(self)}
        sizes = self.small_sizes(shape, layers)
        small: DecoderModel = dataclasses.replace(
            self, **{name: sizes[name] for name in fields & sizes.keys()}
        )
        if small.decoder.runs:
            return small.with_a_loop(self.decoder.stacks)
        return dataclasses.replace(small, layers=small.layers * small.decoder.period)

    def with_a_loop(self, stacks: Iterable[str]) -> "DecoderModel":
        """Returns this model with the fewest layers that have all `stacks` and a loop.

        It has 8 times its layers at most, and its own where those have none.
        """
        for layers in range(self.layers, 8 * self.layers + 1):
            model = dataclasses.replace(self, layers=layers)
            loops = any(run.layers > run.period for run in model.decoder.runs)
            if loops and set(stacks) <= model.decoder.stacks.keys():
                return model
        return self

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns values of fields for `shrunk`,
        which skips the fields that the family does not have.

        layers: periods of layers.
        """
        every = math.prod(
            shape.degrees()[axis] for axis in AXES if axis not in ("stage", "context")
        )
        old_heads: int = getattr(self, "kv_heads", self.heads)
        kv_heads = math.gcd(old_heads, shape.tensor * shape.context)
        heads = kv_heads * (self.heads // old_heads)
        few = {name: min(1, getattr(self, name, 0)) for name in ("local_layers", "dense_layers")}
        intervals = ("no_rope_interval", "expert_interval", "full_attention_interval")
        return {
            **few,
            **{name: min(2, getattr(self, name, 2)) for name in intervals},
            **dict.fromkeys(("mlp", "expert_mlp", "shared_mlp"), 2 * every),
            **dict.fromkeys(("head_size", "linear_key_size", "linear_value_size"), 8),
            **dict.fromkeys(("rope_scaling", "yarn", "query_scale")),
            "rope_factor": 1.0,
            "rotary_fraction": 0.5,
            "layers": max(layers, 1 + few["dense_layers"]),
            "heads": heads,
            "kv_heads": kv_heads,
            "width": math.lcm(every, 8 * heads),
            "linear_heads": shape.tensor,
            "linear_value_heads": 2 * shape.tensor,
            "sliding_window": None if getattr(self, "sliding_window", None) is None else 16,
            "attention_chunk": 16,
        }


def _repeats(layers: Sequence[Block], period: int) -> bool:
    """Whether layers repeat with a period, the last of them perhaps a part of it."""
    return all(layer == layers[i % period] for i, layer in enumerate(layers))


@functools.lru_cache(maxsize=256)
def _spec_of(model: DecoderModel) -> ModelSpec:
    d = model.decoder
    facts = {block: block.spec() for block in set(d.layers)}
    layers = tuple(facts[block] for block in d.layers)
    return ModelSpec(
        d.width, layers, d.positions, d.table, d.logit_softcap, period=d.period, runs=d.runs
    )


def head_size_of(c: Any) -> int:
    """Returns `c.head_size`, or width / heads. Raises ConfigError where that is not an integer."""
    size = getattr(c, "head_size", None)
    if size is not None:
        return int(size)
    width = c.width
    heads = c.heads
    if width % heads:
        even = 2 * heads  # features of a head rotate in pairs
        raise ConfigError(
            f"width {width} in {heads} heads",
            f"{width} = {width // heads} * {heads} + {width % heads}",
            f"--model.width {max(1, round(width / even)) * even}",
        )
    return int(width // heads)
