"""Layers whose kinds are given by a pattern of letters, in any order."""

import dataclasses
from typing import Any, ClassVar

from meshwright.config import MeshShape
from meshwright.errors import refuse
from meshwright.models.decoder import DecoderModel
from meshwright.models.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternOfLayers(DecoderModel):
    """Kinds of layers by a letter each."""

    KINDS: ClassVar[dict[str, str]]
    """Letter of a pattern -> what its layer has."""

    pattern: str
    """Kinds of the layers, a letter each, repeated where there are more layers."""

    @property
    def kinds(self) -> str:
        """Kind of each layer, a letter of `pattern`."""
        return "".join(self.pattern[i % len(self.pattern)] for i in range(self.layers))

    def check_pattern(self) -> None:
        """Raises ConfigError for a pattern with other letters,
        or with more of them than there are layers."""
        kinds = ", ".join(f"{letter} ({half})" for letter, half in self.KINDS.items())
        known = "".join(letter for letter in self.pattern.upper() if letter in self.KINDS)
        letters = len(self.pattern)
        refuse(
            (
                not self.pattern or not set(self.pattern) <= set(self.KINDS),
                f"layers of the pattern {self.pattern!r}",
                f"a pattern has at least one letter, of {kinds}",
                f"--model.pattern '{known or ''.join(self.KINDS)}'",
            ),
            (
                letters > self.layers,
                f"{self.layers} layers of a pattern of {letters}",
                "each letter is a layer, and none is left out",
                f"--model.layers {letters}, or --model.pattern '{self.pattern[: self.layers]}'",
            ),
        )

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns a small model that has each kind of layers `layers` times.

        That of a model whose layers have no period has none either, and a run of two:

            M E *    [M E] twice, *
            M E      [M] twice, E
        """
        kinds = "".join(dict.fromkeys(self.kinds))
        pattern = kinds * layers
        if self.decoder.runs:
            looped = kinds[: max(1, min(2, len(kinds) - 1))]
            pattern = looped + kinds
        one_layer = dataclasses.replace(self, pattern=kinds[0], layers=1)
        small: Any = DecoderModel.shrunk(one_layer, shape, 1)
        changed: Model = dataclasses.replace(small, pattern=pattern, layers=len(pattern))
        return changed
