"""OLMo 3 (Allen Institute for AI 2025, arXiv:2512.13961): OLMo 2's layers, three of four with a sliding window.

A layer is Llama's with norms after both halves and of the queries and keys of all heads together (families/llama.py).
YaRN, where there is one, scales the rotary frequencies of the global layers alone.
"""

import dataclasses
from typing import Literal

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.rotary import rope_angles, rope_frequencies
from meshwright.models.blocks.yarn import yarn_angles
from meshwright.models.families.llama import Llama, attention_half, dense_layer
from meshwright.models.model import ForwardContext, Layer, LayerSpec, Model, ModelSpec, Pattern


@dataclasses.dataclass(frozen=True)
class Olmo3(Llama):
    """Configuration of an OLMo 3 decoder.

    Example:
        >>> model = mw.Olmo3(vocab=32000, width=512, layers=4, heads=8, kv_heads=8, mlp=1536)
        >>> [layer.attention.window for layer in model.spec().layers]
        [4096, 4096, 4096, None]
    """

    rope_theta: float = 500000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-6
    """Constant added to the mean square in RMSNorm."""
    sliding_window: int | None = 4096
    """Positions that a token attends to in local layers, itself included."""
    qk_norm: Literal["none", "rms", "rms_heads"] = "rms_heads"
    """Normalisation of queries and keys: all heads together."""
    norm_place: Literal["before", "after"] = "after"
    """Attention and feed-forward normalise what they add."""
    local_layers: int = 3
    """Layers with a sliding window before each layer without."""

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat."""
        return self.local_layers + 1

    def spec(self) -> ModelSpec:
        """Returns local and global layers by turns."""
        if self.local_layers < 1 or self.sliding_window is None:
            raise ConfigError(
                f"{self.local_layers} local layers with a window of {self.sliding_window}",
                "OLMo 3 has local layers, and they have a window",
                "--model.local-layers 3 --model.sliding-window 4096, or the family llama for layers of one kind",
            )
        if self.rope_scaling is not None or self.rope_factor != 1.0:
            raise ConfigError(
                f"{'rope_factor' if self.rope_scaling is None else 'rope_scaling'} in OLMo 3",
                "its rotary frequencies are scaled by YaRN, in global layers",
                "the field yarn",
            )
        last = dataclasses.replace(self.attention, window=None)
        kinds = [LayerSpec("blocks", self.attention)] * self.local_layers + [LayerSpec("blocks", last)]
        layers = tuple(kinds[i % self.period] for i in range(self.layers))
        return dataclasses.replace(super().spec(), layers=layers, period=self.period)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Pattern]:  # type: ignore[override]
        """Returns the layers of a period: local ones, then a global one."""
        H, theta, positions_BT = self.attention.head_size, self.rope_theta, ctx.tokens.positions
        plain = rope_angles(positions_BT, rope_frequencies(H, theta, None))
        scaled = plain if self.yarn is None else yarn_angles(positions_BT, H, theta, self.yarn)
        local, last = (
            dense_layer(self, ctx, "blocks", attention_half(self, ctx, window, cos_sin))
            for window, cos_sin in ((self.sliding_window, plain), (None, scaled))
        )
        period: tuple[Layer, ...] = (*[local] * self.local_layers, last)
        return {"blocks": period}

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these, with periods of two layers."""
        return dataclasses.replace(super().shrunk(shape, 2 * layers), local_layers=1)  # type: ignore[call-arg]
