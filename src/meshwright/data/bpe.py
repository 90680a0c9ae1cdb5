"""Byte-level BPE learned from text."""

from collections.abc import Iterable

import tokenizers

from meshwright.data.subwords import Subwords
from meshwright.data.tokenizers import END
from meshwright.errors import DataError


def train_bpe(documents: Iterable[str], size: int) -> Subwords:
    """Trains a byte-level BPE vocabulary of at most `size` tokens (Sennrich et al. 2016, arXiv:1508.07909)."""
    if size < 257:
        raise DataError(f"bpe:{size}", "256 bytes and the end of a document take 257 tokens", "bpe:257 or more")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return Subwords(tokenizer.to_str())
