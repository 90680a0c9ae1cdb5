"""Fields that families have in common, and the layer kinds that are made of them."""

import dataclasses
import math
from typing import Annotated, Any, Literal

import msgspec

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, refuse
from meshwright.models.blocks.attention import Attention
from meshwright.models.blocks.layers import Norm
from meshwright.models.blocks.mamba2 import Mamba2, SpaceSpec
from meshwright.models.blocks.rotary import RopeScaling, Rotary, RotaryBase
from meshwright.models.blocks.yarn import Yarn
from meshwright.models.decoder import Block, DecoderModel, head_size_of
from meshwright.models.model import LatentSpec
from meshwright.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Share
from meshwright.words import AXES

LEARNED = Literal["none", "learned"]


@dataclasses.dataclass(frozen=True)
class GroupedHeads(DecoderModel):
    """Grouped-query attention and RMSNorm."""

    kv_heads: PositiveInt = 4
    """Key/value heads K; fewer than `heads` is grouped-query attention (GQA, arXiv:2305.13245)."""
    head_size: PositiveInt | None = None
    """Head size H; None is width / heads."""
    norm_epsilon: NonNegativeFloat = dataclasses.field(default=1e-5, kw_only=True)
    """Constant added to the mean square in RMSNorm."""

    @property
    def norm(self) -> Norm:
        """Norm of all halves of layers, and after the last layer."""
        return Norm("rms", self.norm_epsilon)

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields, without rotary embedding.
        changes: of the fields of `Attention`."""
        sizes = (self.width, self.heads, self.kv_heads, head_size_of(self), self.out_std)
        return Attention(*sizes, **{"rotary": None, **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpace(GroupedHeads):
    """State space of Mamba-2, in layers beside those with attention."""

    mamba_heads: PositiveInt = 8
    """Heads of the state space, each with a state."""
    mamba_head_size: PositiveInt = 32
    """Size of a head of the state space."""
    mamba_groups: PositiveInt = 1
    """Groups of heads of the state space with one key and one query each."""
    mamba_state: PositiveInt = 32
    """Size of a key and a query of the state space."""
    convolution_taps: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 4
    """Tokens that the convolution before the state space reads, the token itself included."""

    def mamba(self, step_floor: float = 0.0) -> Mamba2:
        """Returns the state space of the fields."""
        sizes = (self.mamba_heads, self.mamba_head_size, self.mamba_groups, self.mamba_state)
        space = SpaceSpec(*sizes, self.convolution_taps)
        return Mamba2(self.width, space, self.norm_epsilon, self.out_std, step_floor)

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`."""
        return {
            **super().small_sizes(shape, layers),
            "mamba_heads": 2 * shape.tensor,
            "mamba_head_size": 8,
            "mamba_groups": math.gcd(self.mamba_groups, shape.tensor),
            "mamba_state": 8,
        }


@dataclasses.dataclass(frozen=True)
class GroupedQuery(GroupedHeads):
    """Grouped-query attention with rotary embedding and RMSNorm."""

    rope_theta: RotaryBase = dataclasses.field(default=10000.0, kw_only=True)
    """Base of the rotary frequencies."""

    def rotary(self, **changes: Any) -> Rotary:
        """Returns the rotation of heads."""
        return Rotary(**{"size": head_size_of(self), "theta": self.rope_theta, **changes})

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields. changes: of the fields of `Attention`."""
        return super().attention(**{"rotary": self.rotary(), **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledRotary(GroupedQuery):
    """Rotary frequencies with a choice of scalings."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the low rotary frequencies (Llama 3.1 and later)."""
    rope_factor: PositiveFloat = 1.0
    """Factor by which all rotary frequencies are divided (linear position
    interpolation, arXiv:2306.15595)."""
    yarn: Yarn | None = None
    """Scaling of the low rotary frequencies for long contexts (YaRN;
    Qwen2.5 and Qwen3 beyond 32k tokens)."""

    def rotary(self, **changes: Any) -> Rotary:
        """Returns the rotation of heads, scaled.
        Raises ConfigError for two scalings of the same frequencies."""
        given = {
            "rope_scaling": self.rope_scaling is not None,
            "rope_factor": self.rope_factor != 1.0,
        }
        found = [
            f"model.{name}"
            for name, is_given in (given | {"yarn": self.yarn is not None}).items()
            if is_given
        ]
        if len(found) > 1:
            truth = "each of them scales the same rotary frequencies"
            raise ConfigError(" and ".join(found), truth, f"one of them, such as {found[-1]}")
        return super().rotary(
            scaling=self.rope_scaling or self.yarn, factor=self.rope_factor, **changes
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRotary(ScaledRotary):
    """Rotation of the first features of each head."""

    rotary_fraction: Share = 0.25
    """Fraction of a head that rotates."""

    def rotary(self, **changes: Any) -> Rotary:
        """Returns the rotation of a part of each head.
        Raises ConfigError for a part that does not rotate in pairs."""
        size = head_size_of(self)
        rotated = int(size * self.rotary_fraction)
        pairs = max(1, min(size // 2, round(size * self.rotary_fraction / 2)))
        # Rounded up in the last digit: a fraction of the head is rounded down to features.
        legal = math.ceil(1e4 * min(1.0, 2 * pairs / size)) / 1e4
        asked = f"a rotation of {self.rotary_fraction} of a head of {size} features"
        refuse(
            (size < 2, asked, "features rotate in pairs", "--model.head-size 8"),
            (
                rotated < 2 or rotated % 2 != 0,
                asked,
                f"{rotated} features rotate, and they rotate in pairs",
                f"--model.rotary-fraction {legal}",
            ),
        )
        return super().rotary(size=rotated, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiedOrNot(DecoderModel):
    """Choice of the unembedding."""

    embedding: Literal["untied", "tied"] = "untied"
    """Tied uses the embedding table as the unembedding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projections(GroupedQuery):
    """Window, biases and norms of Llama's relatives."""

    sliding_window: PositiveInt | None = None
    """Positions a token attends to, itself included (Mistral); None is all before it."""
    qkv_bias: LEARNED = "none"
    """Bias of the query, key and value projections (Qwen2)."""
    out_bias: LEARNED = "none"
    """Bias of the projection out of attention (`attention_bias` of Llama's
    and Qwen3's configurations)."""
    qk_norm: Literal["none", "rms", "rms_heads"] = "none"
    """Normalisation of queries and keys: each head (rms: Qwen3),
    or all heads together (rms_heads: OLMo 2)."""
    norm_place: Literal["before", "after"] = "before"
    """Whether attention and feed-forward normalise what they read, or what they add (OLMo 2)."""

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields. changes: of the fields of `Attention`."""
        made = {
            "window": self.sliding_window,
            "qkv_bias": self.qkv_bias == "learned",
            "out_bias": self.out_bias == "learned",
            "qk_norm": None if self.qk_norm == "none" else Norm(self.qk_norm, self.norm_epsilon),
        }
        return super().attention(**{**made, **changes})


def local_and_global(c: Any, block: Block, local: Attention) -> list[Block]:
    """Returns `c.local_layers` layers with the attention `local`, then `block`."""
    return [dataclasses.replace(block, attention=local)] * c.local_layers + [block]


@dataclasses.dataclass(frozen=True)
class LatentWidths(DecoderModel):
    """Widths of multi-head latent attention."""

    q_lora_rank: PositiveInt | None = 96
    """Width of the latent of queries; None projects queries from the layer's input (V2-Lite)."""
    kv_lora_rank: PositiveInt = 64
    """Width of the latent of keys and values."""
    qk_nope_head_dim: PositiveInt = 32
    """Part of a query and a key without rotation."""
    qk_rope_head_dim: Annotated[int, msgspec.Meta(ge=2, multiple_of=2)] = 16
    """Rotated part of a query, and of the key that all heads share."""
    v_head_dim: PositiveInt = 32
    """Size of a value."""

    @property
    def latent(self) -> LatentSpec:
        """Sizes of latents, rotary key and values."""
        return LatentSpec(
            self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim
        )

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`."""
        every = math.prod(
            shape.degrees()[axis] for axis in AXES if axis not in ("stage", "context")
        )
        heads, rank = math.lcm(shape.tensor * shape.context, 2), math.lcm(every, 8)
        sizes = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
        return {
            **super().small_sizes(shape, layers),
            **sizes,
            "heads": heads,
            "width": math.lcm(every, heads * 8),
            "q_lora_rank": None if self.q_lora_rank is None else rank,
            "kv_lora_rank": rank,
        }
