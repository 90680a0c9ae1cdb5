"""Objects named in a Run: a built-in of `PARTS`, `module:attribute`, or `FILE.py:attribute`.

A Run is data: it is written to run.json and read back on other hosts. Whatever a user adds from
outside the package (a model family, an optimizer, a layout, a schedule, an attention kernel, a data
source, a reporter, a chip) is therefore kept by name. `resolve` turns a name into the object,
`name_of` an object into its name. What is named is imported when it is used, so a run loads only
its own parts.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright import trust
from meshwright.errors import ConfigError, nearest
from meshwright.update_rules import UPDATE_RULES

PARTS: dict[str, dict[str, str]] = {
    "model family": {
        "arcee": "models.families.arcee:Arcee",
        "cohere": "models.families.cohere:Cohere",
        "cohere2": "models.families.cohere:Cohere2",
        "deepseek": "models.families.deepseek:Deepseek",
        "deepseek_sparse": "models.families.deepseek_sparse:DeepseekSparse",
        "gemma2": "models.families.gemma:Gemma2",
        "gemma3": "models.families.gemma:Gemma3",
        "gemma4": "models.families.gemma4:Gemma4",
        "glm4_moe": "models.families.glm4_moe:Glm4Moe",
        "gpt2": "models.families.gpt2:Gpt2",
        "gpt_oss": "models.families.gpt_oss:GptOss",
        "granite": "models.families.granite:Granite",
        "granite_hybrid": "models.families.granite_hybrid:GraniteHybrid",
        "granite_moe": "models.families.granite:GraniteMoe",
        "hunyuan": "models.families.hunyuan:Hunyuan",
        "kimi_linear": "models.families.kimi_linear:KimiLinear",
        "llama": "models.families.llama:Llama",
        "llama4": "models.families.llama4:Llama4",
        "ministral3": "models.families.ministral3:Ministral3",
        "mistral4": "models.families.mistral4:Mistral4",
        "mixtral": "models.families.mixtral:Mixtral",
        "nemotron_h": "models.families.nemotron_h:NemotronH",
        "olmo3": "models.families.olmo3:Olmo3",
        "qwen2_moe": "models.families.qwen2_moe:Qwen2Moe",
        "qwen3_5": "models.families.qwen3_5:Qwen35",
        "qwen3_5_moe": "models.families.qwen3_5:Qwen35Moe",
        "qwen3_next": "models.families.qwen3_next:Qwen3Next",
        "smollm3": "models.families.smollm3:SmolLM3",
    },
    "attention kernel": {
        "reference": "models.kernels.attention:reference_kernels",
        "blocked": "models.kernels.blocked:blocked_kernels",
        "splash": "models.kernels.splash:splash_kernels",
        "splash_fused": "models.kernels.splash:splash_fused_kernels",
        "tokamax_splash": "models.kernels.tokamax_splash:tokamax_splash_kernels",
        "cudnn": "models.kernels.cudnn:cudnn_kernels",
    },
    "grouped matmul": {
        "ragged_dot": "models.kernels.choose:ragged_dot",
        "triton": "models.kernels.choose:triton",
    },
    "optimizer": {name: row.build for name, row in UPDATE_RULES.items()},
    "parameter rounding": {
        "master": "step.bfloat16_params:with_masters",
        "stochastic": "step.bfloat16_params:with_random_rounding",
    },
    "tensor strategy": {"ring": "comm.collective_matmul:RING"},
    "reporter": {
        "tensorboard": "reporters.trackers:_TensorBoard",
        "wandb": "reporters.trackers:_WeightsAndBiases",
    },
}
"""Kind -> name -> module of the package and attribute."""

_FILE_MODULE = "meshwright_file_"
"""Prefix of the modules made from files given by path."""


def resolve(kind: str, name: str, builtin: Mapping[str, Any] | None = None) -> Any:
    """Returns the object called `name`: built in, or an attribute of a module or file.

    kind: the word used in errors, such as "optimizer".
    builtin: objects by name; None takes the rows of PARTS.
    Raises ConfigError with the nearest built-in name.
    """
    rows = PARTS[kind] if builtin is None else builtin
    if name in rows:
        if builtin is not None:
            return rows[name]
        return _find(kind, trust.OwnName(f"meshwright.{rows[name]}"))[1]
    if not name.partition(":")[0] or ":" not in name:
        raise ConfigError(
            f"{kind} {name!r}",
            f"no {kind} has that name",
            f"{nearest(name, rows)} or module:attribute",
        )
    return load(kind, name)


def expect[T](value: Any, kind: type[T], asked: str, fix: str) -> T:
    """Returns what a name led to. Raises ConfigError where it is no `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(asked, f"it is a {type(value).__name__}", fix)
    return value


def load(kind: str, name: str) -> Any:
    """Imports `module:attribute` or `FILE.py:attribute`.

    Raises ConfigError where either is missing,
    and for a name that the user did not give (`trust.accept`).
    """
    accepted = trust.accept(kind, name)
    holder, value = _find(kind, accepted)
    trust.check_value(kind, name, holder, value)
    return value


def _find(kind: str, name: trust.OwnName) -> tuple[Any, Any]:
    """Imports what a name of the user's names;
    returns it, and the module or the class that has it."""
    module_name, _, path = name.rpartition(":")
    if module_name.endswith(".py"):
        value: Any = load_file(trust.OwnName(module_name))
    else:
        value = _import(kind, name, module_name)
    holder = value
    for attribute in path.split("."):
        holder = value
        if not hasattr(value, attribute):
            known = [name for name in vars(value) if not name.startswith("_")] or [
                "an attribute of the module"
            ]
            raise ConfigError(
                f"{kind} {str(name)!r}", f"{module_name} has no {path!r}", nearest(attribute, known)
            )
        value = getattr(value, attribute)
        if isinstance(value, ModuleType):
            truth = f"{attribute!r} of {module_name} is the module {value.__name__!r}"
            raise ConfigError(f"{kind} {str(name)!r}", truth, f"{value.__name__}:ATTRIBUTE")
    return holder, value


def _import(kind: str, name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise ConfigError(
                f"{kind} {name!r}", f"importing it failed: {error}", "install what it needs"
            ) from error
        raise ConfigError(
            f"{kind} {name!r}",
            f"no module {error.name!r} can be imported from here",
            "install it, or name its file: "
            f"{module_name.rpartition('.')[2]}.py:{name.rpartition(':')[2]}",
        ) from error


def load_file(path: trust.OwnName) -> ModuleType:
    """Imports a Python file that the user gave, once per process.

    Raises ConfigError where it is missing or fails.
    """
    file = Path(path).expanduser().resolve()
    # A script that names objects of its own must not run a second time.
    script = sys.modules["__main__"]
    if file == Path(getattr(script, "__file__", None) or "").resolve():
        return script
    name = f"{_FILE_MODULE}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise ConfigError(f"{file}", "there is no such file", "the path of a .py file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}", "Python cannot load it", "a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def keep_names(config: Any, *fields: str) -> None:
    """Replaces objects given for `fields` of a frozen configuration by their names,
    so that it stays data."""
    for field in fields:
        object.__setattr__(config, field, name_of(getattr(config, field)))


def name_of(value: Any) -> str:
    """Returns the name under which `resolve` finds `value` again: `module:attribute`
    or `FILE.py:attribute`.

    Strings are names already; an object is the user's own, and so is its name. Raises ConfigError
    for an object without one: a lambda, a local function, or one of an interactive session, which
    no other process could import.
    """
    if isinstance(value, str):
        return value
    attribute = getattr(value, "__qualname__", None)
    module = sys.modules.get(getattr(value, "__module__", ""))
    if attribute is None or module is None or _attribute(module, attribute) is not value:
        module, attribute = _holder(value)
    place, file = module.__name__, getattr(module, "__file__", None)
    if place == "__main__" or place.startswith(_FILE_MODULE):
        if file is None:
            raise _nameless(value, "it is defined in an interactive session")
        place = str(Path(file).resolve())
    return trust.own(trust.OwnName(f"{place}:{attribute}"))


def _attribute(module: ModuleType, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _holder(value: Any) -> tuple[ModuleType, str]:
    """Returns the module and attribute of an object that does not know its own name, such
    as an instance.

    The script comes last: what it imports is found in the module that another process would import.
    """
    for module in sorted(
        sys.modules.values(), key=lambda module: module is sys.modules["__main__"]
    ):
        for attribute, candidate in (
            list(vars(module).items()) if isinstance(module, ModuleType) else ()
        ):
            if candidate is value and not attribute.startswith("_"):
                return module, attribute
    raise _nameless(value, "it is not an attribute of any module")


def _nameless(value: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"{value!r} in a Run",
        f"{reason}, so run.json could not name it and no other process could import it",
        "define it at the top level of a .py file",
    )
