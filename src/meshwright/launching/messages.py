"""Messages between hosts before JAX has joined them: lines of JSON over TCP, with a deadline."""

import contextlib
import json
import socket
import threading
import time
from typing import Any

_LONGEST = 2**20
"""Bytes of the longest message that is read."""
_BLOCK = 2**20


class Deadline:
    """Moment at which waiting ends. seconds: from now."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self, most: float = 1e9) -> float:
        """Returns the seconds until then, at most `most`. Raises TimeoutError where it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return min(left, most)


class Line:
    """Connection to another host."""

    def __init__(self, connection: socket.socket, deadline: Deadline):
        self.connection, self._deadline = connection, deadline
        self._read = b""

    def send(self, value: Any) -> None:
        """Sends a message."""
        self.connection.settimeout(self._deadline.left())
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Receives a message. Raises OSError where the other end has gone, ValueError where it sends anything else."""
        while b"\n" not in self._read:
            if len(self._read) > _LONGEST:
                raise ValueError("a message without an end")
            self.connection.settimeout(self._deadline.left())
            more = self.connection.recv(65536)
            if not more:
                raise ConnectionError("the connection was closed")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        try:
            value = json.loads(line)
        except RecursionError as error:
            raise ValueError("a message of too many levels") from error
        if not isinstance(value, dict):
            raise ValueError("a message that is no object")
        return value


def reach(address: str, deadline: Deadline) -> socket.socket:
    """Connects to host:port, again and again until the deadline. Raises OSError with the last reason."""
    host, _, port = address.rpartition(":")
    reason: OSError = TimeoutError("the deadline has passed")
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=deadline.left(5.0))
        except socket.gaierror as error:
            reason = error
        except OSError as error:
            if isinstance(error, TimeoutError) and str(error) == "the deadline has passed":
                raise reason from error
            reason = error
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        time.sleep(0.2)


class DataServer:
    """Receiver of one stream of bytes, on a port of its own."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(60)
                while connection.recv(_BLOCK):
                    pass
                connection.sendall(b".")
        except OSError:
            return  # the sender measures, and names what went wrong

    def close(self) -> None:
        """Stops listening."""
        # close() alone leaves accept() waiting.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def bandwidth(host: str, port: int, size: int, deadline: Deadline) -> float:
    """Sends bytes to a `DataServer` and returns bytes/s, until the other end has all of them. Raises OSError."""
    block = bytes(_BLOCK)
    with socket.create_connection((host, port), timeout=deadline.left(10.0)) as connection:
        began = time.perf_counter()
        sent = 0
        while sent < size:
            connection.settimeout(deadline.left())
            connection.sendall(block[: min(_BLOCK, size - sent)])
            sent += min(_BLOCK, size - sent)
            if time.perf_counter() - began > 5:
                break
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return sent / (time.perf_counter() - began)
