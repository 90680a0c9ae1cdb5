"""Meshwright trains very large transformers on any mesh of devices.

It plans the layout, checks it with the real compiler before a pod is rented, runs it, and shows
what every device holds and sends. Everything public is importable from here, and loaded when it is
first used:

    import meshwright as mw

    run = mw.recipe("llama3-8b", mesh="fsdp=8", steps=100)
    result = mw.train(run, out="runs/mine")
    best = mw.plan("llama3-70b", on="v5p:8x8x16", tokens_per_step="4M")
    report = mw.prove(best[0])
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.formatting import Shown

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshwright.analysis.programs import Census as Census
    from meshwright.analysis.programs import census as census
    from meshwright.api.convert import convert as convert
    from meshwright.api.evaluation import evaluate as evaluate
    from meshwright.api.finetuning import finetune as finetune
    from meshwright.api.generation import generate as generate
    from meshwright.api.generation import open_generator as open_generator
    from meshwright.api.layout import show as show
    from meshwright.api.parity import parity as parity
    from meshwright.api.planning import Offers as Offers
    from meshwright.api.planning import Plans as Plans
    from meshwright.api.planning import offers as offers
    from meshwright.api.planning import plan as plan
    from meshwright.api.proofs import Proof as Proof
    from meshwright.api.proofs import prove as prove
    from meshwright.api.training import train as train
    from meshwright.api.viewing import view as view
    from meshwright.checkpoint.conversion import Conversion as Conversion
    from meshwright.comm import collectives as collectives
    from meshwright.config import Data as Data
    from meshwright.config import Faults as Faults
    from meshwright.config import MeshShape as MeshShape
    from meshwright.config import Optimizer as Optimizer
    from meshwright.config import Training as Training
    from meshwright.errors import CensusError as CensusError
    from meshwright.errors import CheckpointError as CheckpointError
    from meshwright.errors import CompilerError as CompilerError
    from meshwright.errors import ConfigError as ConfigError
    from meshwright.errors import DataError as DataError
    from meshwright.errors import HostError as HostError
    from meshwright.errors import MeshwrightError as MeshwrightError
    from meshwright.errors import StorageError as StorageError
    from meshwright.errors import TrainingError as TrainingError
    from meshwright.errors import WeightsError as WeightsError
    from meshwright.fine_tuning import FineTune as FineTune
    from meshwright.generation.generator import Decoding as Decoding
    from meshwright.generation.sampling import Sampling as Sampling
    from meshwright.hardware.chips import Chip as Chip
    from meshwright.models.families.arcee import Arcee as Arcee
    from meshwright.models.families.cohere import Cohere as Cohere
    from meshwright.models.families.cohere import Cohere2 as Cohere2
    from meshwright.models.families.deepseek import Deepseek as Deepseek
    from meshwright.models.families.deepseek_sparse import DeepseekSparse as DeepseekSparse
    from meshwright.models.families.gemma import Gemma2 as Gemma2
    from meshwright.models.families.gemma import Gemma3 as Gemma3
    from meshwright.models.families.gemma4 import Gemma4 as Gemma4
    from meshwright.models.families.glm4_moe import Glm4Moe as Glm4Moe
    from meshwright.models.families.gpt2 import Gpt2 as Gpt2
    from meshwright.models.families.gpt_oss import GptOss as GptOss
    from meshwright.models.families.granite import Granite as Granite
    from meshwright.models.families.granite import GraniteMoe as GraniteMoe
    from meshwright.models.families.granite_hybrid import GraniteHybrid as GraniteHybrid
    from meshwright.models.families.hunyuan import Hunyuan as Hunyuan
    from meshwright.models.families.kimi_linear import KimiLinear as KimiLinear
    from meshwright.models.families.llama import Llama as Llama
    from meshwright.models.families.llama4 import Llama4 as Llama4
    from meshwright.models.families.ministral3 import Ministral3 as Ministral3
    from meshwright.models.families.mistral4 import Mistral4 as Mistral4
    from meshwright.models.families.mixtral import Mixtral as Mixtral
    from meshwright.models.families.nemotron_h import NemotronH as NemotronH
    from meshwright.models.families.olmo3 import Olmo3 as Olmo3
    from meshwright.models.families.qwen2_moe import Qwen2Moe as Qwen2Moe
    from meshwright.models.families.qwen3_5 import Qwen35 as Qwen35
    from meshwright.models.families.qwen3_5 import Qwen35Moe as Qwen35Moe
    from meshwright.models.families.qwen3_next import Qwen3Next as Qwen3Next
    from meshwright.models.families.smollm3 import SmolLM3 as SmolLM3
    from meshwright.models.model import Model as Model
    from meshwright.planner.offers import Offer as Offer
    from meshwright.planner.search import Plan as Plan
    from meshwright.runs.catalogue import list_recipes as recipes  # noqa: F401
    from meshwright.runs.recipe import recipe as recipe
    from meshwright.runs.run import Run as Run
    from meshwright.sharding.placement import Layout as Layout
    from meshwright.storage.tiers import LocalCheckpoints as LocalCheckpoints
    from meshwright.trainer.loop import Summary as Summary
    from meshwright.trainer.parity import Parity as Parity
    from meshwright.views.draw import draw as draw
    from meshwright.views.draw import local_view as local_view
    from meshwright.wrapped.model import wrap as wrap


def _public() -> dict[str, tuple[str, str]]:
    """Reads the module and the attribute of every public name from the imports above,
    which type checkers read too."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    blocks = (node.body for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in next(blocks) if isinstance(node, ast.ImportFrom))
    return {
        name.asname or name.name: (str(node.module), name.name)
        for node in imports
        for name in node.names
    }


_PUBLIC = _public()
__all__ = sorted((*_PUBLIC, "__version__"))


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    owner = importlib.import_module(module)
    value = (
        getattr(owner, attribute)
        if hasattr(owner, attribute)
        else importlib.import_module(f"{module}.{attribute}")
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


Shown.page_of = staticmethod(
    lambda result: importlib.import_module("meshwright.views.result_pages").page_of(result)
)
