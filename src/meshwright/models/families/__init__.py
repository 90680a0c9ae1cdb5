"""Model families by name, as run.json keeps them (`plugins.PARTS`)."""

from meshwright.errors import ConfigError
from meshwright.models.model import Model
from meshwright.plugins import PARTS, name_of, resolve


def family_name(model: Model) -> str:
    """Returns the name of a model's family: a row of `PARTS`, or module:attribute of its class."""
    path = f"{type(model).__module__}:{type(model).__qualname__}".removeprefix("meshwright.")
    builtin = next((name for name, known in PARTS["model family"].items() if known == path), None)
    return builtin or name_of(type(model))


def find_family(name: str) -> type[Model]:
    """Returns the class of a family.
    Raises ConfigError with the nearest name, and for what is not such a class."""
    if not isinstance(name, str):
        raise ConfigError(f"model family {name!r}", "it is not text", '"family": "llama"')
    family = resolve("model family", name)
    if not (isinstance(family, type) and issubclass(family, Model)):
        raise ConfigError(
            f"model family {name!r}", "it is not a model class", "a subclass of mw.Model"
        )
    return family
