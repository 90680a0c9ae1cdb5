"""The verb `tokenize`: text into a token file, once."""

import dataclasses
import hashlib
import re
import sys
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.api.verb import Call, Outcome
from meshwright.data.token_writer import SHARD_TOKENS
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import DESCRIPTION, is_token_file
from meshwright.errors import ConfigError, DataError, shell_word
from meshwright.formatting import parse_count
from meshwright.ranges import Fraction, Ranged
from meshwright.reporters.console import TokenizeReport, open_console
from meshwright.storage.paths import default_cache_folder, in_bucket, path_of
from meshwright.storage.transfer import move_tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeOptions(Ranged):
    """Tokenise DATA once into a folder that --data takes. The folder's tokenizer.json serves as
    --data.tokenizer. The same command goes on where it was interrupted.
    """

    data: Annotated[str, tyro.conf.Positional]
    """Text: a file, folder, glob, `hf://datasets/OWNER/NAME`, `stdlib`, or module:attribute of a
    function that yields documents."""
    out: Path
    """Folder to write, or to go on with; one in a bucket (`s3://`, `gs://`) is made in the cache
    and moved."""
    tokenizer: str = "bpe:4096"
    """Tokenizer: `bytes`, `chars`, `bpe:SIZE` (trained on the text), or a tokenizer.json file."""
    text_field: str = "text"
    """Field or column with the text in JSON lines and tables, `body.text` of nested ones."""
    shard_tokens: Annotated[str, tyro.conf.arg(metavar="COUNT")] = str(SHARD_TOKENS)
    """Tokens of a shard, `256M` for instance, rounded up to whole blocks of 131,072. An interrupted
    tokenisation goes on after its last whole shard."""
    bad_records: Fraction = 0.0
    """Largest share of records (lines, rows, text files) that may be skipped because they cannot be
    read. 0 refuses the first, with its file and line."""
    json: bool = False
    """Print JSON."""

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright tokenize`.

        Raises ConfigError where the folder exists, DataError where there is no text.
        """
        out, folder = path_of(self.out), self.out
        if in_bucket(out):
            folder = (
                default_cache_folder()
                / "tokens"
                / f"for-{hashlib.sha256(str(out).encode()).hexdigest()[:24]}"
            )
        if is_token_file(out):
            raise ConfigError(
                f"--out {self.out}", "it exists already", "a folder that does not exist yet"
            )
        try:
            file = tokenize(
                self.data,
                self.tokenizer,
                folder,
                text_field=self.text_field,
                bad_records=self.bad_records,
                shard_tokens=parse_count(self.shard_tokens, "--shard-tokens"),
                progress=TokenizeReport(open_console(sys.stderr)),
            )
        except DataError as error:
            asked, truth, fix = (
                _in_own_words(part, self.out) for part in (error.asked, error.truth, error.fix)
            )
            raise DataError(asked, truth, fix) from error
        if folder != out:
            move_tree(folder, out, last=(DESCRIPTION,))
        tokens, documents, skipped = len(file.tokens), file.documents, file.skipped
        text = (
            f"{self.out}: {tokens:,} tokens in {documents:,} documents, vocabulary of "
            f"{file.vocab:,}\n"
        )
        if skipped["bad"]:
            counts = f"{skipped['bad']:,} of {skipped['read']:,} records"
            first = "; ".join(skipped["examples"][:3])
            text += f"skipped {counts}, all in {out / 'skipped.jsonl'}; the first: {first}\n"
        figures = {
            "tokens": tokens,
            "documents": documents,
            "vocab": file.vocab,
            "skipped": skipped,
        }
        return Outcome(text, {"out": self.out, **figures})


_DATA = re.compile(r"--data (\S+)")


def _in_own_words(text: str, out: str | Path) -> str:
    """Returns a part of an error of reading text with the options of this verb."""
    text = text.replace("--faults.bad-records", "--bad-records").replace("--data.", "--")
    return _DATA.sub(lambda found: f"meshwright tokenize {found[1]} --out {shell_word(out)}", text)
