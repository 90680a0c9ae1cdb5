"""Text from a model: key/value cache, prefill, decode loop, sampling of tokens."""
