"""Name maps of the model families: one module for each, with its architectures."""
