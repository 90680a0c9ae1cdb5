"""Text into batches: sources, tokenizers, token files, and the feed."""
