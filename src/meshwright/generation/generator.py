"""Texts that continue prompts: tokens in, tokens and text out, with a report of time and memory."""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_gather, all_reduce, all_reduce_max, axis_index
from meshwright.data.tokenizers import with_begin
from meshwright.errors import ConfigError
from meshwright.formatting import Brief, Shown, first_of, format_bytes, shortened
from meshwright.generation.decoder import (
    Bucket,
    Decoder,
    DecodeState,
    bucket_for,
    check_decodable,
    stop_array,
)
from meshwright.generation.sampling import Sampling
from meshwright.generation.source import OpenedModel
from meshwright.generation.weights import LaidOut, WeightsLayout, lay_out, weight_bytes
from meshwright.hugging_face.folder import note_of_length
from meshwright.models.blocks.context import CONTEXT
from meshwright.models.kernels.attention import cap
from meshwright.models.loss import chunk_tokens, join_chunks, split_chunks
from meshwright.models.model import vocab_size
from meshwright.ranges import PositiveInt, Ranged
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import Tree
from meshwright.step.device_run import DeviceRun

OnText = Callable[[int, str], None]
"""Called with the index of a prompt and the text that was added to it."""
_FITS = 0.8
"""Fraction of a device's memory that gathered weights may take,
in addition to the ones they are gathered from."""
_BEFORE = 16
"""Tokens of a prompt that are decoded before a text."""
_SIMULATED_BYTES = 2**30
"""Most bytes of gathered weights on a simulated device."""


@dataclasses.dataclass(frozen=True)
class Decoding(Ranged, part="decoding"):
    """How texts are computed; the numbers are those of the forward pass.

    Example:
        >>> mw.Decoding(weights="gathered").prefill_chunk
        512
    """

    weights: Literal["auto", "gathered", "sharded"] = "auto"
    """Layout of the weights: as in training, gathered over `fsdp` layer by layer for each token
    (sharded); gathered once, in the compute dtype (gathered). `auto` is `gathered` where that fits
    the device's memory, else `sharded`."""
    prefill_chunk: PositiveInt = 512
    """Most tokens of each prompt that one prefill step computes."""
    stream_every: PositiveInt = 8
    """Tokens that the compiled loop decodes before the host looks at them: for streaming,
    and to stop early."""


@dataclasses.dataclass(frozen=True)
class GenerationReport:
    """Time and memory of one generation, compilation apart."""

    prompts: int
    """Number of prompts."""
    prompt_tokens: int
    """Tokens of all prompts."""
    new_tokens: int
    """Tokens generated for all of them."""
    compile_seconds: float
    """Seconds that compiling prefill and decode took;
    0 where a prompt of the same bucket had come before."""
    first_token_seconds: float
    """Seconds from the prompts to the first token of all texts."""
    decode_seconds: float
    """Seconds from the first token to the last."""
    weights: WeightsLayout
    """Layout of the weights."""
    weight_bytes: int
    """Bytes of the weights on one device."""
    cache_bytes: int
    """Bytes of the cache on one device, as the compiled program has it."""
    planned_cache_bytes: int
    """The same by arithmetic on the model's facts."""
    temporary_bytes: int
    """Bytes of temporaries of the compiled decode loop on one device, by the compiler."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / max(self.first_token_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second after the first of each text, all texts together."""
        return (self.new_tokens - self.prompts) / max(self.decode_seconds, 1e-9)


@dataclasses.dataclass(frozen=True, repr=False)
class Generated(Shown):
    """Texts of one generation, one for each prompt."""

    texts: tuple[str, ...]
    """Generated text without the prompt, cut before a stop string."""
    tokens: tuple[tuple[int, ...], ...]
    """Generated tokens, without the token that ended a text."""
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probability of each of them, before temperature and filters."""
    report: GenerationReport

    def brief(self) -> str:
        """Returns the beginning of each text."""
        texts = ", ".join(first_of([shortened(text) for text in self.texts]))
        return f"{len(self.texts)} texts, {self.report.new_tokens:,} tokens: {texts}"


class Generator(Brief):
    """Model with its weights laid out for decoding,
    and the programs of the buckets that prompts have had so far."""

    def __init__(self, opened: OpenedModel, decoding: Decoding | None = None):
        self.device_run, self.tokenizer, self.chat = (
            opened.device_run,
            opened.tokenizer,
            opened.chat,
        )
        self.origin, self.decoding = opened.origin, decoding or Decoding()
        self._positions, self._said = opened.positions, False
        self._stops = opened.stops
        check_decodable(self.device_run)
        self.layout: WeightsLayout = _choose_layout(self.device_run, self.decoding.weights)
        self._weights: LaidOut = lay_out(self.device_run, opened.params, self.layout)
        self._decoders: dict[Bucket, Decoder] = {}
        self._scorers: dict[Bucket, Any] = {}

    def brief(self) -> str:
        """Returns whose weights it has, and where they lie."""
        return f"of {self.origin} on {self.device_run.layout.shape}: weights {self.layout}"

    @property
    def compilations(self) -> int:
        """Buckets that programs have been compiled for."""
        return len(self._decoders)

    def encode(self, prompt: str | Sequence[int]) -> np.ndarray:
        """Returns the tokens of a prompt, of a text with those that a document begins with.

        An empty one is the end of the document before.
        """
        if isinstance(prompt, str):
            tokens = with_begin(self.tokenizer, self.tokenizer.encode(prompt))
        else:
            tokens = np.asarray(prompt, np.int32)
        if not len(tokens):
            tokens = np.array([self.tokenizer.end], np.int32)
        vocab = self.device_run.run.model.vocab or 0
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise ConfigError(
                f"a prompt with token {tokens.max() if tokens.max() >= vocab else tokens.min()}",
                f"the model has tokens 0 to {vocab - 1}",
                "tokens of the model's own tokenizer",
            )
        return tokens

    def decoder(self, lengths: Sequence[int], max_tokens: int) -> Decoder:
        """Returns the programs for prompts of `lengths` tokens, those of other prompts
        of the same bucket."""
        bucket = bucket_for(self.device_run, lengths, max_tokens, self.decoding.prefill_chunk)
        note = note_of_length(max(lengths) + max_tokens, self._positions, self.origin)
        if note and not self._said:
            self._said = True
            if jax.process_index() == 0:
                print(f"note: {note}", file=sys.stderr, flush=True)
        if bucket not in self._decoders:
            decoder = Decoder(self.device_run, self._weights, bucket)
            _check_cache(decoder, max(lengths), max_tokens)
            self._decoders[bucket] = decoder
        return self._decoders[bucket]

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Generated:
        """Continues each prompt by up to `max_tokens` tokens.

        stop: texts that end a text, besides the tokenizer's end of a document; they are left out of
        it. Raises ConfigError where the texts would be longer than the model's table of positions;
        with rotary positions a note on standard error tells that they are longer than those it was
        trained on.
        """
        _check_request(len(prompts), max_tokens, stop)
        sampling = sampling or Sampling()
        encoded = [self.encode(prompt) for prompt in prompts]
        began = time.perf_counter()
        known = self.compilations
        decoder = self.decoder([len(tokens) for tokens in encoded], max_tokens).compile()
        compile_seconds = time.perf_counter() - began if self.compilations > known else 0.0
        texts = [_Text(self.tokenizer.decode, tokens, stop, self._stops) for tokens in encoded]
        began = first = last = time.perf_counter()
        for number, state in enumerate(self._pieces(decoder, encoded, max_tokens, sampling)):
            tokens, logprobs, _ = decoder.read(state)
            last = time.perf_counter()
            if number == 0:
                first = last
            _add_tokens(texts, tokens, logprobs, max_tokens, on_text)
            if all(text.ended for text in texts):
                break
        memory = decoder.memory()
        report = GenerationReport(
            prompts=len(encoded),
            prompt_tokens=sum(map(len, encoded)),
            new_tokens=sum(len(text.tokens) for text in texts),
            compile_seconds=compile_seconds,
            first_token_seconds=first - began,
            decode_seconds=last - first,
            weights=self.layout,
            weight_bytes=weight_bytes(self.device_run, self.layout),
            cache_bytes=decoder.cache_bytes(memory),
            planned_cache_bytes=decoder.plan.bytes_per_device,
            temporary_bytes=int(memory.temp_size_in_bytes),
        )
        return Generated(
            tuple(text.shown for text in texts),
            tuple(tuple(text.tokens) for text in texts),
            tuple(tuple(text.logprobs) for text in texts),
            report,
        )

    def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores whole texts, given as tokens: what the model makes of each token
        after those before it.

        Returns for each text the log-probability of every token after its first, float32, and
        whether it is the most probable one, bool.
        """
        encoded = [self.encode(text) for text in texts]
        decoder = self.decoder([len(text) for text in encoded], 0)
        if decoder.bucket not in self._scorers:
            score_chunk = functools.partial(_score_chunk, decoder)
            outputs = (decoder.specs, PartitionSpec(), PartitionSpec())
            self._scorers[decoder.bucket] = decoder.compiled(score_chunk, outputs)
        state, scores = decoder.start(encoded), []
        first_slot = int(state.slot)
        arguments = (Sampling().settings(), stop_array(()), np.int32(0))
        for _ in range(first_slot, decoder.end, decoder.bucket.chunk):
            state, *found = self._scorers[decoder.bucket](decoder.weights.params, state, *arguments)
            scores.append([np.asarray(x) for x in found])
        logprobs_BT, greedy_BT = (np.concatenate(parts, 1) for parts in zip(*scores, strict=True))
        # What slot s scores is the token in slot s + 1.
        end = decoder.end - 1 - first_slot
        results = []
        for row, text in enumerate(encoded):
            start = end - len(text) + 1
            results.append((logprobs_BT[row, start:end], greedy_BT[row, start:end]))
        return results

    def _pieces(
        self, decoder: Decoder, encoded: Sequence[np.ndarray], max_tokens: int, sampling: Sampling
    ) -> Iterator[DecodeState]:
        state = decoder.prefill(decoder.start(encoded), sampling, self._stops)
        yield state
        left = max_tokens - 1
        while left:
            piece = min(left, self.decoding.stream_every)
            state = decoder.decode(state, sampling, self._stops, piece)
            left -= piece
            yield state


def _check_request(prompts: int, max_tokens: int, stop: Sequence[str]) -> None:
    """Raises ConfigError for no prompts, no tokens, and stops that are not texts."""
    if max_tokens < 1 or not prompts:
        raise ConfigError(
            f"{max_tokens} tokens after {prompts} prompts",
            "there is at least one of each",
            "--max-tokens 1",
        )
    if isinstance(stop, str) or "" in stop:
        raise ConfigError(
            f"stop {stop!r}", "it lists texts, of a character or more", 'stop=["\n\n"]'
        )


def _add_tokens(
    texts: "Sequence[_Text]",
    tokens_BT: np.ndarray,
    logprobs_BT: np.ndarray,
    max_tokens: int,
    on_text: OnText | None,
) -> None:
    """Gives each text its tokens so far, and `on_text` what can be shown of them."""
    final = tokens_BT.shape[1] >= max_tokens
    for row, text in enumerate(texts):
        added = text.add(tokens_BT[row], logprobs_BT[row], final=final)
        if added and on_text is not None:
            on_text(row, added)


class _Text:
    """One text in progress: its tokens, and what of it has been shown.

    decode: text of tokens.
    prompt: tokens before it.
    stop: texts that end it.
    stops: tokens that end it.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: np.ndarray,
        stop: Sequence[str],
        stops: Sequence[int],
    ):
        self._whole, self._stop, self._stops = decode, tuple(stop), frozenset(stops)
        # A decoder may drop the space that a text begins with (Llama 2): the prompt's last
        # tokens stand before it.
        self._before = [int(token) for token in prompt[-_BEFORE:]]
        self._prefix = decode(self._before)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.shown = ""
        self.ended = False
        self._read = 0

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, *, final: bool) -> str:
        """Takes all generated tokens so far; returns the text that can be shown now.

        final: no more tokens follow. Otherwise text that may still change is kept back: a character
        whose bytes are incomplete, and what may be the beginning of a stop string.
        """
        while not self.ended and self._read < len(tokens):
            token = int(tokens[self._read])
            if token in self._stops:
                self.ended = True
                break
            self.tokens.append(token)
            self.logprobs.append(float(logprobs[self._read]))
            self._read += 1
        final = final or self.ended
        text = self._decode()
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            text, final, self.ended = text[: min(found)], True, True
            # Tokens of the piece that were decoded after the stop.
            while any(stop in self._decode(-1) for stop in self._stop):
                del self.tokens[-1], self.logprobs[-1]
        elif not final:
            text = text.rstrip("\ufffd")
            kept = [
                n
                for stop in self._stop
                for n in range(len(stop) - 1, 0, -1)
                if text.endswith(stop[:n])
            ]
            text = text[: len(text) - max(kept, default=0)]
        self.ended = self.ended or final
        if not text.startswith(self.shown):
            # The decoder has changed what it said;
            # what follows is not shown, and the whole text is right at its end.
            self.shown = text if final else self.shown
            return ""
        added, self.shown = text[len(self.shown) :], text
        return added

    def _decode(self, stop: int | None = None) -> str:
        """Text of the tokens up to `stop`, without that of the prompt."""
        tokens = self.tokens[:stop]
        both = self._whole(self._before + tokens)
        return both[len(self._prefix) :] if both.startswith(self._prefix) else self._whole(tokens)


def _score_chunk(
    decoder: Decoder, params: Tree, state: DecodeState, settings: Any, stops: Any, number: Any
) -> tuple[DecodeState, jax.Array, jax.Array]:
    chunk, batch, run = decoder.bucket.chunk, state.first.shape[0], decoder.device_run.run
    x_BTD, table_VD, cache = decoder.hidden(params, state, chunk)
    labels_BT = lax.dynamic_slice_in_dim(state.tokens, state.slot + 1, chunk, 1)
    labels_T = decoder.local_tokens(jnp.maximum(labels_BT, 0))
    size = chunk_tokens(labels_T.shape[0], table_VD.shape[0], run.training.logits_mib)
    softcap = decoder.device_run.layout.spec.logit_softcap
    scores = _token_scores(x_BTD[0], table_VD, labels_T, vocab_size(run.model), size, softcap)
    logprobs_BT, greedy_BT = (
        all_gather(all_gather(x, CONTEXT, 0)[: batch * chunk].reshape(batch, chunk), BATCH_AXES, 0)
        for x in scores
    )
    return dataclasses.replace(state, cache=cache, slot=state.slot + chunk), logprobs_BT, greedy_BT


def _token_scores(
    x_TD: jax.Array,
    table_VD: jax.Array,
    labels_T: jax.Array,
    vocab: int,
    chunk: int,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of each label, float32 [T],
    and whether no token has a larger logit, int32 [T].

    table_VD: this device's block of the unembedding.
    chunk: tokens at a time. As `models.loss.token_losses` without a derivative,
    and with the comparison.
    """
    rows = table_VD.shape[0]
    row_V = axis_index(VOCAB_AXES) * rows + jnp.arange(rows)

    def scores(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_TD, labels_T = inputs
        logits_TV = jnp.einsum("td,vd->tv", x_TD, table_VD, preferred_element_type=jnp.float32)
        logits_TV = jnp.where(row_V < vocab, cap(logits_TV, softcap), -1e30)
        largest_T = all_reduce_max(logits_TV.max(-1), VOCAB_AXES)
        sum_T, label_T = all_reduce(
            (
                jnp.exp(logits_TV - largest_T[:, None]).sum(-1),
                jnp.where(labels_T[:, None] == row_V, logits_TV, 0.0).sum(-1),
            ),
            VOCAB_AXES,
        )
        return label_T - largest_T - jnp.log(sum_T), (label_T >= largest_T).astype(jnp.int32)

    parts = split_chunks((x_TD, labels_T), chunk)
    return join_chunks(lax.map(scores, parts), x_TD.shape[0])


def _check_cache(decoder: Decoder, longest: int, max_tokens: int) -> None:
    device, bucket = decoder.device_run.mesh.local_devices[0], decoder.bucket
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    if device.platform == "cpu":
        memory = (
            os.sysconf("SC_PAGE_SIZE")
            * os.sysconf("SC_PHYS_PAGES")
            // len(decoder.device_run.mesh.local_devices)
        )
    need = decoder.plan.bytes_per_device
    if not memory or need <= memory:
        return
    fits = bucket.slots * memory // need // 2 - longest
    raise ConfigError(
        f"{max_tokens} tokens after a prompt of {longest}",
        f"a cache of {bucket.batch} text(s) of {bucket.slots} tokens takes {format_bytes(need)} on "
        f"a device, which has {format_bytes(memory)}",
        f"--max-tokens {fits}"
        if 0 < fits < max_tokens
        else "fewer or shorter prompts at once, or more devices",
    )


def _choose_layout(device_run: DeviceRun, asked: str) -> WeightsLayout:
    if asked != "auto":
        return asked  # type: ignore[return-value]
    device = device_run.mesh.local_devices[0]
    needed = weight_bytes(device_run, "gathered")
    if device.platform == "cpu":
        return "gathered" if needed <= _SIMULATED_BYTES else "sharded"
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return (
        "gathered" if needed + weight_bytes(device_run, "sharded") <= _FITS * limit else "sharded"
    )
