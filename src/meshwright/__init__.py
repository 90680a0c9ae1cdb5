"""Meshwright trains very large transformers on any mesh of devices.

It plans the layout, checks it with the real compiler before a pod is rented, runs it, and shows what every device holds
and sends. Everything public is importable from here, and loaded when it is first used:

    import meshwright as mw

    run = mw.recipe("llama3-8b", mesh="fsdp=8", steps=100)
    result = mw.train(run, out="runs/mine")
    best = mw.plan("llama3-70b", on="v5p:8x8x16", tokens_per_step="4M")
    report = mw.prove(best[0])
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshwright.analysis.census import Census as Census
    from meshwright.analysis.census import census as census
    from meshwright.api.convert import convert as convert
    from meshwright.api.finetuning import finetune as finetune
    from meshwright.api.generation import generate as generate
    from meshwright.api.generation import open_generator as open_generator
    from meshwright.api.layout import show as show
    from meshwright.api.planning import Proof as Proof
    from meshwright.api.planning import plan as plan
    from meshwright.api.planning import prove as prove
    from meshwright.api.renting import offers as offers
    from meshwright.api.training import evaluate as evaluate
    from meshwright.api.training import parity as parity
    from meshwright.api.training import train as train
    from meshwright.checkpoint.import_weights import Conversion as Conversion
    from meshwright.comm import collectives as collectives
    from meshwright.config import Data as Data
    from meshwright.config import MeshShape as MeshShape
    from meshwright.config import Model as Model
    from meshwright.config import Optimizer as Optimizer
    from meshwright.config import Run as Run
    from meshwright.config import Training as Training
    from meshwright.errors import CensusError as CensusError
    from meshwright.errors import CheckpointError as CheckpointError
    from meshwright.errors import ConfigError as ConfigError
    from meshwright.errors import DataError as DataError
    from meshwright.errors import MeshwrightError as MeshwrightError
    from meshwright.errors import TrainingError as TrainingError
    from meshwright.errors import WeightsError as WeightsError
    from meshwright.faults import Faults as Faults
    from meshwright.fine_tuning import FineTune as FineTune
    from meshwright.generation.generator import Decoding as Decoding
    from meshwright.generation.sampling import Sampling as Sampling
    from meshwright.hardware.chips import Chip as Chip
    from meshwright.models.families.deepseek import Deepseek as Deepseek
    from meshwright.models.families.gemma import Gemma2 as Gemma2
    from meshwright.models.families.gemma import Gemma3 as Gemma3
    from meshwright.models.families.gpt2 import Gpt2 as Gpt2
    from meshwright.models.families.gpt_oss import GptOss as GptOss
    from meshwright.models.families.llama import Llama as Llama
    from meshwright.models.families.llama4 import Llama4 as Llama4
    from meshwright.models.families.mixtral import Mixtral as Mixtral
    from meshwright.models.families.olmo3 import Olmo3 as Olmo3
    from meshwright.planner.offers import Offer as Offer
    from meshwright.planner.search import Plan as Plan
    from meshwright.runs.changes import recipe as recipe
    from meshwright.runs.recipe import list_recipes as recipes  # noqa: F401
    from meshwright.sharding import partition as partition
    from meshwright.sharding.placement import Layout as Layout
    from meshwright.trainer.loop import Summary as Summary
    from meshwright.trainer.parity import Parity as Parity
    from meshwright.views.draw import draw as draw
    from meshwright.views.draw import local_view as local_view
    from meshwright.wrapped.model import wrap as wrap

_PUBLIC: dict[str, tuple[str, str]] = {
    "Census": ("analysis.census", "Census"),
    "CensusError": ("errors", "CensusError"),
    "CheckpointError": ("errors", "CheckpointError"),
    "Chip": ("hardware.chips", "Chip"),
    "ConfigError": ("errors", "ConfigError"),
    "Data": ("config", "Data"),
    "Conversion": ("checkpoint.import_weights", "Conversion"),
    "DataError": ("errors", "DataError"),
    "Decoding": ("generation.generator", "Decoding"),
    "Faults": ("faults", "Faults"),
    "Deepseek": ("models.families.deepseek", "Deepseek"),
    "FineTune": ("fine_tuning", "FineTune"),
    "Gemma2": ("models.families.gemma", "Gemma2"),
    "Gemma3": ("models.families.gemma", "Gemma3"),
    "GptOss": ("models.families.gpt_oss", "GptOss"),
    "Gpt2": ("models.families.gpt2", "Gpt2"),
    "Layout": ("sharding.placement", "Layout"),
    "Llama": ("models.families.llama", "Llama"),
    "Llama4": ("models.families.llama4", "Llama4"),
    "MeshShape": ("config", "MeshShape"),
    "MeshwrightError": ("errors", "MeshwrightError"),
    "Mixtral": ("models.families.mixtral", "Mixtral"),
    "Model": ("config", "Model"),
    "Olmo3": ("models.families.olmo3", "Olmo3"),
    "Offer": ("planner.offers", "Offer"),
    "Optimizer": ("config", "Optimizer"),
    "Parity": ("trainer.parity", "Parity"),
    "Plan": ("planner.search", "Plan"),
    "Proof": ("api.planning", "Proof"),
    "Run": ("config", "Run"),
    "Sampling": ("generation.sampling", "Sampling"),
    "Summary": ("trainer.loop", "Summary"),
    "Training": ("config", "Training"),
    "TrainingError": ("errors", "TrainingError"),
    "WeightsError": ("errors", "WeightsError"),
    "census": ("analysis.census", "census"),
    "collectives": ("comm.collectives", ""),
    "convert": ("api.convert", "convert"),
    "draw": ("views.draw", "draw"),
    "evaluate": ("api.training", "evaluate"),
    "finetune": ("api.finetuning", "finetune"),
    "generate": ("api.generation", "generate"),
    "local_view": ("views.draw", "local_view"),
    "offers": ("api.renting", "offers"),
    "open_generator": ("api.generation", "open_generator"),
    "parity": ("api.training", "parity"),
    "partition": ("sharding.partition", ""),
    "plan": ("api.planning", "plan"),
    "prove": ("api.planning", "prove"),
    "recipe": ("runs.changes", "recipe"),
    "recipes": ("runs.recipe", "list_recipes"),
    "show": ("api.layout", "show"),
    "train": ("api.training", "train"),
    "wrap": ("wrapped.model", "wrap"),
}
"""Public name -> module, and attribute of it; the module itself where none is given."""

__all__ = sorted((*_PUBLIC, "__version__"))


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name]
    module = importlib.import_module(f"meshwright.{module_name}")
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
