"""DeepSeek-V3.2 (DeepSeek-AI 2025) and GLM-5 (Zhipu AI 2026; its published configuration):
DeepSeek-V3's layers, in which an indexer (blocks/indexer.py) chooses the keys that each query
attends to.
"""

import dataclasses
from typing import Annotated, Any, Literal

from meshwright.config import MeshShape
from meshwright.declarations import changes
from meshwright.models.blocks.indexer import Indexer, divergence_metric
from meshwright.models.blocks.rotary import Rotary
from meshwright.models.families.deepseek import Deepseek
from meshwright.models.layer_facts import IndexTraining
from meshwright.models.model import Aux, Metrics
from meshwright.ranges import PositiveInt
from meshwright.sharding.params import Param, Tree


@dataclasses.dataclass(frozen=True)
class DeepseekSparse(Deepseek):
    """Configuration of a DeepSeek decoder whose attention is sparse.

    The loss of the text does not train the indexer: it stays as it is,
    or has a loss of its own (`index_training`).

    Example:
        >>> model = mw.DeepseekSparse(vocab=32000, width=512, layers=8, heads=8, experts=16)
        >>> model.spec().layers[0].attention.indexer.top_k
        2048
    """

    index_n_heads: PositiveInt = 4
    """Heads of the indexer."""
    index_head_dim: PositiveInt = 32
    """Size of a head of the indexer."""
    index_topk: PositiveInt = 2048
    """Keys that a query attends to."""
    index_pairs: Literal["halves", "neighbours"] = "halves"
    """Features that the indexer rotates in pairs: one of each half (DeepSeek-V3.2),
    or neighbours (GLM-5)."""
    index_training: Annotated[IndexTraining, changes("program", "evaluation", "plan")] = "frozen"
    """Stage of the indexer (DeepSeek-V3.2, section 2.1.1): `frozen` leaves it as it is; `warmup`
    trains it alone, with attention to all keys; `sparse` trains everything, the indexer on the keys
    that it chose."""

    @property
    def indexer(self) -> Indexer:
        """Chooses the keys of each query."""
        size, field = self.qk_rope_head_dim, "qk_rope_head_dim"
        rotary = Rotary(size, self.rope_theta, self.yarn, pairs=self.index_pairs, field=field)
        return Indexer(
            self.width,
            self.q_lora_rank or 0,
            self.index_n_heads,
            self.index_head_dim,
            self.index_topk,
            rotary,
            self.index_training,
        )

    def params(self) -> Tree:
        """Returns the parameter descriptions,
        of which the warm-up freezes all but the indexer's."""
        params = super().params()
        if self.index_training != "warmup":
            return params
        return {
            stack: {name: _frozen(name, p) for name, p in part.items()}
            if isinstance(part, dict)
            else _frozen(stack, part)
            for stack, part in params.items()
        }

    def post_update(self, params: Tree, aux: dict[str, Aux]) -> Tree:
        """Returns `params` with the router's bias moved, which the warm-up leaves as it is."""
        return params if self.index_training == "warmup" else super().post_update(params, aux)

    def layer_metrics(self, aux: dict[str, Aux], sequences: int) -> Metrics:
        """Returns the metrics of the experts,
        and the mean loss of the indexers that are trained."""
        return {**super().layer_metrics(aux, sequences), **divergence_metric(aux, sequences)}

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`."""
        return {**super().small_sizes(shape, layers), "index_n_heads": 2, "index_head_dim": 8}


def _frozen(name: str, p: Param) -> Param:
    return p if name.startswith("index_") else dataclasses.replace(p, frozen=True)
