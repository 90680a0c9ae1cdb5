"""Adapter of a generator to EleutherAI's `lm-eval`: log-likelihoods of answers, of whole texts, and generated text.

github.com/EleutherAI/lm-evaluation-harness (MIT licence), an optional dependency. Tasks, metrics and few-shot
prompts are its own; what is here answers its three kinds of requests. lm-eval itself is imported where tasks run
(`api.benchmarks`): it changes loggers and the environment of the process.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.errors import ConfigError
from meshwright.generation.generator import Generator
from meshwright.generation.sampling import Sampling

_MAX_TOKENS = 256
"""Tokens that a request generates where its task gives no number."""


class RequestAnswers:
    """Answers of a `Generator` to the requests of lm-eval, to be mixed into its `TemplateLM`.

    longest: tokens of the longest text; longer ones lose their beginning.  batch: requests computed together.
    """

    def __init__(self, generator: Generator, *, longest: int, batch: int):
        super().__init__()
        self.generator, self.longest, self.batch = generator, longest, batch

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document."""
        return int(self.generator.tokenizer.end)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that has nothing before it: that which a document begins with, or ends with."""
        return next(iter(self.generator.tokenizer.begin), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Name under which prompts in a chat template are cached."""
        return self.generator.origin.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the tokens of a text; no token is put before it."""
        return [int(token) for token in self.generator.tokenizer.encode(string)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation in the tokenizer's chat template. Raises ConfigError where it has none."""
        if self.generator.chat is None:
            raise ConfigError("--apply-chat-template", "the tokenizer has no chat template", "leave it out")
        return self.generator.chat.render(chat_history, answer=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the chat template, which lm-eval records."""
        return self.generator.chat.source if chat_template and self.generator.chat else ""

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        texts = [[*context, *continuation][-self.longest :] for _, context, continuation in requests]
        answers = []
        for request, (logprobs, greedy) in zip(requests, self._scores(texts), strict=True):
            continuation = request[2]
            # A continuation as long as the longest text has lost its first token, which cannot be scored then.
            count = min(len(continuation), len(logprobs))
            answers.append((float(logprobs[-count:].sum()), bool(greedy[-count:].all())) if count else (0.0, True))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of whole texts, in windows of the longest text that overlap by one token."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = [self.prefix_token_id, *self.tok_encode(request.args[0])]
            for start in range(0, max(1, len(tokens) - 1), self.longest - 1):
                windows.append(tokens[start : start + self.longest])
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (logprobs, _) in zip(owners, self._scores(windows), strict=True):
            totals[number] += float(logprobs.sum())
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that follows each prompt, up to a text of its `until`."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for members in groups.values():
            stop, tokens, sampling = _settings(requests[members[0]].args[1], self.longest)
            room = self.longest - tokens
            prompts = {n: self.tok_encode(requests[n].args[0])[-room:] for n in members}
            for batch in _batches(members, self.batch, lambda n: len(prompts[n])):  # noqa: B023 - used at once
                given = [prompts[n] for n in batch]
                texts = self.generator.generate(given, max_tokens=tokens, sampling=sampling, stop=stop).texts
                for n, text in zip(batch, texts, strict=True):
                    answers[n] = text
        return answers

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores texts in batches of about equal length, in their order."""
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for batch in _batches(range(len(texts)), self.batch, lambda n: len(texts[n])):
            # The last batch is filled up, so that it has the programs of the others.
            filled = [texts[n] for n in batch] + [texts[batch[-1]]] * (self.batch - len(batch))
            found |= dict(zip(batch, self.generator.score(filled), strict=False))
        return [found[n] for n in range(len(texts))]


def _batches(numbers: Sequence[int], size: int, length: Callable[[int], int]) -> Iterator[list[int]]:
    """Yields the numbers in batches, longest first: memory that is too small shows at the beginning."""
    order = sorted(numbers, key=lambda n: -length(n))
    for first in range(0, len(order), size):
        yield order[first : first + size]


def _settings(given: dict[str, Any], longest: int) -> tuple[list[str], int, Sampling]:
    until = given.get("until") or []
    stop = [until] if isinstance(until, str) else [text for text in until if text]
    tokens = int(given.get("max_gen_toks") or given.get("max_new_tokens") or _MAX_TOKENS)
    sampled = bool(given.get("do_sample", float(given.get("temperature") or 0.0) > 0))
    sampling = Sampling(
        temperature=float(given.get("temperature") or 1.0) if sampled else 0.0,
        top_k=int(given.get("top_k") or 0),
        top_p=float(given.get("top_p") or 1.0),
        min_p=float(given.get("min_p") or 0.0),
        repetition_penalty=float(given.get("repetition_penalty") or 1.0),
    )
    return stop, min(tokens, longest // 2), sampling
