"""Prefill and decode, compiled once for a batch and a number of slots.

Both are one `shard_map`, manual over every mesh axis, as the train step is, and run the layers that
the train step runs: a family meets the cache as `ForwardContext.attend` and nothing else. The
tokens of all sequences are one dimension, which is split over `context` and `tensor` wherever
training splits the sequence. A step of one token for each of B sequences therefore needs no second
form of tensor parallelism, and no device repeats another's work.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.comm.collectives import all_gather, axis_index, local_shard
from meshwright.errors import ConfigError
from meshwright.generation.cache import SLOT_MULTIPLE, CachedAttend, CachePlan, Slots
from meshwright.generation.sampling import Sampling, Settings, choose_tokens
from meshwright.generation.weights import LaidOut
from meshwright.models.blocks.context import CONTEXT, with_own_kv_head
from meshwright.models.blocks.layers import no_dropout
from meshwright.models.kernels.attention import cap
from meshwright.models.layer_scan import scan_layers, sections
from meshwright.models.model import Attend, ForwardContext, Layer, Tokens, vocab_size
from meshwright.models.remat import save_as_it_is
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import Tree
from meshwright.sharding.sequence import SequenceSplit
from meshwright.step.device_run import DeviceRun
from meshwright.step.gradients import matmuls_of

MAX_STOPS = 8
"""Most tokens that end a text."""
NO_TOKEN = -1
"""Token of padding before a prompt, and of slots that are not filled."""
_ROWS, _ALL = PartitionSpec(BATCH_AXES), PartitionSpec()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Texts in progress. Slots up to `slot` are in the cache;
    the token in `slot` is chosen, and goes in next."""

    cache: Any
    """`KeyValues` of each stack, or `Carried`."""
    tokens: Any
    """Tokens of each slot, int32 [B, slots + 1]; NO_TOKEN where there is none."""
    logprobs: Any
    """Log-probability of each generated token,
    before temperature and filters, float32 [B, slots + 1]."""
    first: Any
    """First slot of each sequence, int32 [B]; those before are padding."""
    done: Any
    """Whether a sequence has met a stop token, bool [B]; it continues with that token."""
    slot: Any
    """Slots in the cache, int32."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Sizes that a compiled decoder is made for; prompts of the same bucket share the programs."""

    batch: int
    """Sequences, filled up to the devices that share the batch."""
    slots: int
    """Slots of the cache for each sequence."""
    chunk: int
    """Tokens of each sequence in one prefill step."""


def bucket_for(
    device_run: DeviceRun, lengths: Sequence[int], max_tokens: int, chunk: int
) -> Bucket:
    """Returns the bucket of prompts of `lengths` tokens that `max_tokens` follow;
    chunk: most tokens of a prefill step.

    Raises ConfigError where the texts would be longer than the model's positions.
    """
    longest, most = max(lengths), device_run.layout.spec.max_seq
    if most is not None and longest + max_tokens > most:
        fix = (
            f"--max-tokens {most - longest}"
            if longest < most
            else f"a prompt of at most {most - 1} tokens"
        )
        raise ConfigError(
            f"{max_tokens} tokens after a prompt of {longest}",
            f"the model has {most} positions, and {longest} + {max_tokens} = "
            f"{longest + max_tokens}",
            fix,
        )
    context = device_run.layout.shape.context
    smallest = 1 << max(0, longest - 1).bit_length()
    chunk = math.ceil(min(chunk, smallest) / context) * context
    multiple = math.lcm(SLOT_MULTIPLE * context, chunk)
    need = math.ceil(longest / chunk) * chunk + max_tokens
    share = device_run.layout.shape.over(BATCH_AXES)
    return Bucket(
        math.ceil(len(lengths) / share) * share, math.ceil(need / multiple) * multiple, chunk
    )


class Decoder:
    """Programs that continue a batch of texts, each compiled once: other prompts
    and settings are arguments."""

    def __init__(self, device_run: DeviceRun, weights: LaidOut, bucket: Bucket):
        """Plans the cache. Raises ConfigError for a mesh with stages,
        and for experts that drop tokens by capacity."""
        check_decodable(device_run)
        self.device_run, self.bucket, self.weights = device_run, bucket, weights
        dtype = device_run.run.training.compute_dtype
        self.plan = CachePlan(
            device_run.layout.spec, device_run.layout.shape, bucket.batch, bucket.slots, dtype
        )
        self.specs = DecodeState(self.plan.specs, _ROWS, _ROWS, _ROWS, _ROWS, _ALL)
        self.end = 0

    @functools.cached_property
    def _prefill(self) -> Any:
        return self.compiled(self._prefill_chunk, self.specs)

    @functools.cached_property
    def _decode(self) -> Any:
        return self.compiled(self._decode_tokens, self.specs)

    @functools.cached_property
    def _empty(self) -> Any:
        cache = self._abstract.cache
        where = jax.tree.map(lambda x: x.sharding, cache)
        zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache), out_shardings=where
        )
        return zeros.lower().compile()

    @functools.cached_property
    def _read(self) -> Any:
        """Function that copies tokens, log-probabilities, done and slot whole
        to every device and process."""
        state, everywhere = self._abstract, NamedSharding(self.device_run.mesh, _ALL)
        read = jax.jit(lambda *arrays: arrays, out_shardings=everywhere)
        return read.lower(state.tokens, state.logprobs, state.done, state.slot).compile()

    def compile(self) -> "Decoder":
        """Compiles everything, which otherwise happens when it is first called."""
        _ = self._prefill, self._decode, self._empty, self._read
        return self

    def start(self, prompts: Sequence[np.ndarray]) -> DecodeState:
        """Returns the state before the first prefill step.
        prompts: tokens of each sequence, at least one."""
        batch, slots, chunk = self.bucket.batch, self.bucket.slots, self.bucket.chunk
        self.end = math.ceil(max(map(len, prompts)) / chunk) * chunk
        tokens_BT = np.full((batch, slots + 1), NO_TOKEN, np.int32)
        first_B, done_B = np.full(batch, self.end - 1, np.int32), np.ones(batch, np.bool_)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, self.end - len(prompt) : self.end] = prompt
            first_B[row], done_B[row] = self.end - len(prompt), False
        cache = self._empty()
        # Chunks that are padding in every sequence are left out.
        slot = np.int32(int(first_B.min()) // chunk * chunk)
        logprobs_BT = np.zeros(tokens_BT.shape, np.float32)
        rest = DecodeState(None, tokens_BT, logprobs_BT, first_B, done_B, slot)
        placed = jax.tree.map(
            lambda x, like: jax.make_array_from_callback(
                x.shape, like.sharding, np.asarray(x).__getitem__
            ),
            rest,
            dataclasses.replace(self._abstract, cache=None),
        )
        return dataclasses.replace(placed, cache=cache)

    def prefill(self, state: DecodeState, sampling: Sampling, stops: Sequence[int]) -> DecodeState:
        """Fills the cache with the prompts, chunk by chunk,
        and chooses the first token of each text."""
        for slot in range(int(state.slot), self.end, self.bucket.chunk):
            last = np.int32(slot + self.bucket.chunk == self.end)
            state = self._prefill(
                self.weights.params, state, sampling.settings(), stop_array(stops), last
            )
        return state

    def decode(
        self, state: DecodeState, sampling: Sampling, stops: Sequence[int], tokens: int
    ) -> DecodeState:
        """Adds `tokens` tokens to every text, in one call of the compiled loop;
        a text that is done keeps its last."""
        return self._decode(
            self.weights.params, state, sampling.settings(), stop_array(stops), np.int32(tokens)
        )

    def read(self, state: DecodeState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the generated tokens [B, T], their log-probabilities and
        which texts are done, on every process."""
        tokens, logprobs, done, slot = (
            np.asarray(x) for x in self._read(state.tokens, state.logprobs, state.done, state.slot)
        )
        return tokens[:, self.end : int(slot) + 1], logprobs[:, self.end : int(slot) + 1], done

    def memory(self) -> Any:
        """Returns the compiler's memory figures of the loop: arguments, donated
        arguments, temporaries."""
        return self._decode.memory_analysis()

    def cache_bytes(self, memory: Any) -> int:
        """Returns the bytes of the cache in a program's memory figures: its donated state,
        less what is not cache."""
        rest = jax.tree.leaves(dataclasses.replace(self._abstract, cache=None))
        rows = self.device_run.layout.shape.over(BATCH_AXES)
        others = sum(math.prod(x.shape) // (rows if x.ndim else 1) * x.dtype.itemsize for x in rest)
        return int(memory.alias_size_in_bytes) - others

    def compiled(self, f: Callable[..., Any], out_specs: Any) -> Any:
        """Compiles `(params, state, settings, stops, integer) -> results` as a `shard_map`;
        the state is donated."""
        mesh, weights = self.device_run.mesh, self.weights
        mapped = jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(weights.specs, self.specs, _ALL, _ALL, _ALL),
            out_specs=out_specs,
            check_vma=False,
        )
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights.params
        )
        settings, stops = Sampling().settings(), stop_array(())
        with matmuls_of(self.device_run.run.training.compute_dtype):
            lowered = jax.jit(mapped, donate_argnums=(1,)).lower(
                params, self._abstract, settings, stops, np.int32(0)
            )
        return lowered.compile(compiler_options=self.device_run.accepted_compiler_options() or None)

    @functools.cached_property
    def _abstract(self) -> DecodeState:
        batch, slots = self.bucket.batch, self.bucket.slots
        tokens_BT = jax.ShapeDtypeStruct((batch, slots + 1), jnp.int32)
        logprobs_BT = jax.ShapeDtypeStruct((batch, slots + 1), jnp.float32)
        first_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
        done_B = jax.ShapeDtypeStruct((batch,), jnp.bool_)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.tree.map(
            lambda x, spec: x.update(sharding=NamedSharding(self.device_run.mesh, spec)),
            DecodeState(self.plan.abstract, tokens_BT, logprobs_BT, first_B, done_B, slot),
            self.specs,
        )

    def _prefill_chunk(
        self,
        params: Tree,
        state: DecodeState,
        settings: Settings,
        stops: jax.Array,
        last: jax.Array,
    ) -> DecodeState:
        logits_BV, cache = self.next_logits(params, state, self.bucket.chunk)
        state = dataclasses.replace(state, cache=cache, slot=state.slot + self.bucket.chunk)
        return self._choose(state, logits_BV, settings, stops, last > 0)

    def _decode_tokens(
        self,
        params: Tree,
        state: DecodeState,
        settings: Settings,
        stops: jax.Array,
        tokens: jax.Array,
    ) -> DecodeState:
        def step(_: Any, state: DecodeState) -> DecodeState:
            logits_BV, cache = self.next_logits(params, state, 1)
            state = dataclasses.replace(state, cache=cache, slot=state.slot + 1)
            return self._choose(state, logits_BV, settings, stops, jnp.bool_(True))

        return lax.fori_loop(0, tokens, step, state)

    def _choose(
        self,
        state: DecodeState,
        logits_BV: jax.Array,
        settings: Settings,
        stops: jax.Array,
        sampled: jax.Array,
    ) -> DecodeState:
        """Writes the token that follows, where it is `sampled` and not part of the prompt."""
        slot, batch = state.slot, logits_BV.shape[0]
        sequences_B = axis_index(BATCH_AXES) * batch + jnp.arange(batch)
        chosen_B = choose_tokens(logits_BV, settings, state.tokens, sequences_B, slot - state.first)
        previous_B = lax.dynamic_index_in_dim(state.tokens, slot - 1, 1, keepdims=False)
        chosen_B = jnp.where(state.done, previous_B, chosen_B)
        given_B = lax.dynamic_index_in_dim(state.tokens, slot, 1, keepdims=False)
        chosen_B = jnp.where(sampled, chosen_B, given_B)
        logprob_B = jnp.take_along_axis(
            jax.nn.log_softmax(logits_BV), jnp.maximum(chosen_B, 0)[:, None], 1
        )[:, 0]
        logprob_B = jnp.where(sampled & ~state.done, logprob_B, 0.0)
        stopped_B = state.done | (sampled & (chosen_B[:, None] == stops).any(-1))
        return dataclasses.replace(
            state,
            tokens=lax.dynamic_update_slice(state.tokens, chosen_B[:, None], (0, slot)),
            logprobs=lax.dynamic_update_slice(state.logprobs, logprob_B[:, None], (0, slot)),
            done=stopped_B,
        )

    def next_logits(
        self, params: Tree, state: DecodeState, tokens: int
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Feeds the `tokens` tokens from `state.slot` on;
        returns the logits [B, V] after them, and the cache.

        Call it inside a `shard_map`: B is this device's part of the batch.
        Logits are float32, of the whole vocabulary.
        """
        x_BTD, table_VD, cache = self.hidden(params, state, tokens)
        batch = state.first.shape[0]
        x_TD = all_gather(x_BTD[0], CONTEXT, 0)[: batch * tokens]
        x_BD = x_TD.reshape(batch, tokens, -1)[:, -1]
        logits_BV = jnp.einsum("bd,vd->bv", x_BD, table_VD, preferred_element_type=jnp.float32)
        logits_BV = cap(logits_BV, self.device_run.layout.spec.logit_softcap)
        vocab = vocab_size(self.device_run.run.model)
        return all_gather(logits_BV, VOCAB_AXES, 1)[:, :vocab], cache

    def hidden(
        self, params: Tree, state: DecodeState, tokens: int
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Feeds tokens as `next_logits` does;
        returns hidden states [1, tokens, D], unembedding [V/tensor, D], cache.

        The hidden states are this device's part (`local_tokens`) of the tokens
        of all its sequences.
        """
        model = self.device_run.local_model
        ids_BT = jnp.maximum(lax.dynamic_slice_in_dim(state.tokens, state.slot, tokens, 1), 0)
        slots = Slots(state.slot, state.first, tokens)
        attend = CachedAttend(slots)
        # Slots before a prompt are padding, and so are texts that have ended and rows
        # that fill the batch.
        begun_BT = state.slot + jnp.arange(tokens) >= state.first[:, None]
        text_BT = begun_BT & ~state.done[:, None]
        local = Tokens(
            self.local_tokens(ids_BT)[None],
            self.local_tokens(slots.positions_BT)[None],
            ~self.local_tokens(text_BT)[None],
        )
        sequence = SequenceSplit("all_gather", local.ids.shape[1], 1, 1)
        attend_heads: Attend = attend
        kv_heads = self.device_run.layout.spec.kv_heads
        if kv_heads and kv_heads < self.device_run.layout.shape.tensor:
            attend_heads = with_own_kv_head(attend)
        # The few tokens of a step are gathered at once, and nothing is saved for a backward pass.
        execution = dataclasses.replace(
            model.execution,
            gather_params=self.weights.gather,
            sequence=sequence,
            tensor_strategy="gather",
            save_hidden=save_as_it_is,
        )
        ctx = ForwardContext.of(
            execution,
            tokens=local,
            dropout=no_dropout(),
            attend=attend_heads,
            attend_latent=attend.latent,
            cached_recur=attend.recur,
        )
        x_BTD, cache = self._layers(params, state.cache, ctx, attend)
        return *model.model.unembed(params, x_BTD, self.weights.gather), cache

    def local_tokens(self, x_BT: jax.Array) -> jax.Array:
        """Returns this device's part of values of tokens, [tokens],
        as `context` splits the tokens of all sequences.

        They are padded with zeros so that `context` and `tensor` split them evenly.
        """
        shape = self.device_run.layout.shape
        parts = shape.context * shape.tensor
        return local_shard(jnp.pad(x_BT.reshape(-1), (0, -x_BT.size % parts)), CONTEXT, 0)

    def _layers(
        self, params: Tree, cache: dict[str, Any], ctx: ForwardContext, attend: CachedAttend
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Runs all layers; the cache is carried through the loop over them,
        so that it is written in place."""
        model = self.device_run.local_model
        spec = self.device_run.layout.spec
        functions = model.model.layer_functions(ctx)
        # Index of each layer in the model, and its row in the stack.
        positions = {}
        for stack, count in model.stacks.items():
            positions[stack] = (jnp.array(spec.layers_of(stack)), jnp.arange(count))

        x_BTD = model.model.embed(params, ctx)
        caches = dict(cache)
        for section in sections(spec, functions, functools.partial(_cached_layer, attend)):
            # The loop over a section's layers carries only the caches of its own stacks.
            section_caches = {stack: caches[stack] for stack in section.stacks}
            rows = section.rows(spec, slice(0, section.layers))
            carry: Any = (x_BTD, section_caches)
            carry, _ = scan_layers(section.period, carry, params, positions, rows=rows)
            x_BTD, section_caches = carry
            caches |= section_caches
        return x_BTD, caches


def _cached_layer(attend: CachedAttend, stack: str, layer: Layer) -> Any:
    """Returns a layer that reads and writes its row of the cache of its stack:
    `((x, caches), params, (index, row)) -> ((x, caches), None)`."""

    def step(carry: Any, layer_params: Tree, position: Any) -> tuple[Any, Any]:
        x_BTD, caches = carry
        index, row = position
        attend.open(caches[stack], row)
        x_BTD, _ = layer(x_BTD, layer_params, index)
        written = {**caches, stack: attend.close()}
        return (x_BTD, written), None

    return step


def check_decodable(device_run: DeviceRun) -> None:
    """Raises ConfigError for a mesh or a model that cannot generate,
    with the one to use instead."""
    shape, model = device_run.layout.shape, device_run.run.model
    if shape.stage > 1:
        other = dataclasses.replace(shape, stage=1, data=shape.data * shape.stage)
        raise ConfigError(
            f"generating on mesh {shape}",
            f"a token passes the {shape.stage} pipeline stages one after another and the next "
            f"token waits for it, so each stage would compute 1/{shape.stage} of the time",
            f"the same devices without stages, for example --mesh {other}",
        )
    if getattr(model, "dispatch", None) == "capacity":
        raise ConfigError(
            "generating with experts of limited capacity",
            "which tokens an expert drops depends on the tokens that follow, which are not there "
            "yet",
            "--model.dispatch dropless: the same parameters",
        )


def stop_array(stops: Sequence[int]) -> np.ndarray:
    """Returns the stop tokens as an argument of the compiled programs.
    Raises ConfigError for too many."""
    if len(stops) > MAX_STOPS:
        raise ConfigError(f"{len(stops)} stop tokens", f"there is room for {MAX_STOPS}", "fewer")
    return np.array([*stops, *[NO_TOKEN] * (MAX_STOPS - len(stops))], np.int32)
