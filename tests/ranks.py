"""Environments of several processes of one run on this machine."""

import os
import socket


def ranks(count: int) -> list[dict[str, str]]:
    """Returns the environment of each of `count` processes, as torchrun has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
    }
    return [{**shared, "RANK": str(rank)} for rank in range(count)]
