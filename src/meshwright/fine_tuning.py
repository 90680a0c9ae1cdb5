"""Configuration of fine-tuning: what is trained, in which form the rest is kept, and on which loss.

It is a field of the `Run`, so that plan, prove, checkpoints and a resumed run know of it. The
mechanism is in `models.adapters` (LoRA), `models.preferences` (DPO) and `data.conversations` (chat
data).
"""

import dataclasses
from typing import Annotated, Literal

import tyro

from meshwright.declarations import TEXT_ONLY, changes, refused
from meshwright.ranges import PositiveFloat, PositiveInt, Ranged

Method = Literal["full", "lora"]
Objective = Literal["text", "answers", "preferences"]
BaseType = Literal["compute", "float32", "int8", "nf4"]
TooLong = Literal["refuse", "truncate", "drop"]


_ADAPTERS_ONLY = refused(
    "full",
    because="it is about adapters, and the method trains all parameters",
    instead="--finetune.method lora",
)
_CONVERSATIONS_ONLY = refused(
    "text",
    because="it is about conversations",
    instead="--finetune.objective answers or preferences",
)


@dataclasses.dataclass(frozen=True)
class FineTune(Ranged, part="finetune"):
    """Fine-tuning of a run: LoRA or all parameters, on text, answers or preferences.

    Example:
        >>> tuning = mw.FineTune(method="lora", rank=8, alpha=16.0, targets=("query", "value"))
        >>> tuning.scale
        2.0
    """

    method: Annotated[
        Method,
        tyro.conf.arg(aliases=["--method"]),
        changes("program", "evaluation", "plan", resumes=False),
        TEXT_ONLY,
    ] = "full"
    """Parameters that are trained: all of them (full), or low-rank adapters of the layers' matrices
    beside the frozen model (lora: LoRA, arXiv:2106.09685)."""
    objective: Annotated[
        Objective,
        tyro.conf.arg(aliases=["--objective"]),
        changes("program", "evaluation", "data", "plan", resumes=False),
        TEXT_ONLY,
    ] = "text"
    """Loss: all tokens of text (text), the assistant's answers in conversations (answers), or
    preferences of one answer over another (preferences: DPO, arXiv:2305.18290)."""
    rank: Annotated[
        PositiveInt,
        changes("program", "evaluation", "plan", resumes=False),
        _ADAPTERS_ONLY,
        TEXT_ONLY,
    ] = 16
    """Rank of the adapters."""
    alpha: Annotated[
        PositiveFloat,
        changes("program", "evaluation", resumes=False),
        _ADAPTERS_ONLY,
        TEXT_ONLY,
    ] = 32.0
    """Scale of the adapters times their rank: a weight W acts as W + (alpha / rank) A B."""
    targets: Annotated[
        tuple[str, ...],
        changes("program", "evaluation", "plan", resumes=False),
        _ADAPTERS_ONLY,
        TEXT_ONLY,
    ] = ("all",)
    """Matrices that get an adapter, by name or pattern (`query value`, `blocks.*`); `all` is every
    projection of attention and feed-forward, those of routed experts excepted."""
    base: Annotated[
        BaseType,
        changes("program", "evaluation", "plan", resumes=False),
        refused(
            "full",
            because=(
                "trained weights need gradients, which quantised values do not have: the frozen "
                "base is quantised"
            ),
            instead="--finetune.method lora",
        ),
        TEXT_ONLY,
    ] = "compute"
    """Type in which the frozen matrices of lora are kept: the run's compute dtype, float32, int8 (a
    scale per column), or nf4 (4 bits in blocks of 64 with a float32 scale: QLoRA,
    arXiv:2305.14314). The first two hold all parameters."""
    beta: Annotated[
        PositiveFloat,
        changes("program", "evaluation"),
        refused(
            "text",
            "answers",
            because="it weighs the reference in the loss of preferences",
            instead="--finetune.objective preferences",
        ),
        TEXT_ONLY,
    ] = 0.1
    """Weight of the distance to the reference in the loss of preferences."""
    template: Annotated[
        str | None, changes("evaluation", "data"), _CONVERSATIONS_ONLY, TEXT_ONLY
    ] = None
    """Chat template in the place of the tokenizer's own: a file (Jinja),
    or `chatml` for a tokenizer without one."""
    too_long: Annotated[
        TooLong,
        changes("evaluation", "data", resumes=False),
        _CONVERSATIONS_ONLY,
        TEXT_ONLY,
    ] = "refuse"
    """Conversations longer than a sequence: refuse the file, truncate their end (the two answers of
    a preference share the sequence; without a token of an answer left they are dropped), or drop
    them."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's product A B."""
        return self.alpha / self.rank
