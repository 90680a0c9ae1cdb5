"""The verb `tokenize`: text into a token file, once."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.cli.output import write, write_json
from meshwright.cli.parse import parse
from meshwright.data.tokenizing import tokenize
from meshwright.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """Tokenise DATA once into a folder that --data takes. The folder's tokenizer.json serves as --data.tokenizer."""

    data: Annotated[str, tyro.conf.Positional]
    """Text: a file, folder, glob, `stdlib`, or module:attribute of a function that yields documents."""
    out: Path
    """Folder to write."""
    tokenizer: str = "bpe:4096"
    """Tokenizer: `bytes`, `chars`, `bpe:SIZE` (trained on the text), or a tokenizer.json file."""
    bad_records: float = 0.0
    """Largest share of records (lines, rows, text files) that may be skipped because they cannot be read. 0 refuses the
    first, with its file and line."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright tokenize`. Raises ConfigError where the folder exists, DataError where there is no text."""
    options = parse(TokenizeOptions, "tokenize", args)
    if options.out.exists():
        raise ConfigError(f"--out {options.out}", "it exists already", "a folder that does not exist yet")
    file = tokenize(options.data, options.tokenizer, options.out, bad_records=options.bad_records)
    if options.json:
        write_json(
            {"out": options.out, "tokens": len(file.tokens), "documents": len(file.ends), "vocab": file.vocab,
             "skipped": file.skipped}
        )  # fmt: skip
    else:
        write(
            f"{options.out}: {len(file.tokens):,} tokens in {len(file.ends):,} documents, "
            f"vocabulary of {file.vocab:,}\n"
        )
        if file.skipped["bad"]:
            first = "; ".join(file.skipped["examples"][:3])
            write(f"skipped {file.skipped['bad']:,} of {file.skipped['read']:,} records; the first: {first}\n")
    return 0
