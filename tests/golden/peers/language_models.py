"""Writes the names of the language models of `transformers`: `language_models.py OUT.py`, formatted as it is committed."""

import sys
import textwrap
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto

_LINE = 98
_TEXT = '''"""Language models of `transformers` {version}: a name among them is not a misspelling of another.

Made by `tests/golden/peers/language_models.py`.
"""

_NAMES = """
{names}
"""

LANGUAGE_MODELS = frozenset(_NAMES.split())
"""Names of their classes, which config.json has as architectures."""
'''


def main(out: Path) -> None:
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    names = {name for mapping in mappings for name in mapping.values() if isinstance(name, str)}
    lines = textwrap.fill(" ".join(sorted(names)), _LINE)
    version = ".".join(transformers.__version__.split(".")[:2])
    out.write_text(_TEXT.format(version=version, names=lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
