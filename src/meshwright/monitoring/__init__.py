"""Counters that a machine keeps of itself, read once a minute beside a run: GPUs, TPUs,
links, network, host."""
