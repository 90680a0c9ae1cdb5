"""Roll call of the processes of a run, before JAX joins them: who has come, and who has not.

JAX's own join does not tell. Process 0 listens on the address where it opens JAX's service
afterwards; every other process connects and gives its number. Process 0 sends the absent ones to
those that are there, and `go` when none is absent; then it closes the port and opens it for JAX.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from meshwright.errors import reason_of

_GO = "go"
_ABSENT = "absent"
_NEWS = 1.0
"""Seconds between two looks at who is absent."""
_AGAIN = 0.2
"""Seconds between two attempts to connect."""
_ANSWER = 3.0
"""Seconds in which a connection is opened."""
_GREETING = "meshwright process"


class AbsentError(Exception):
    """Processes that have not come in time, in words."""


def call_roll(
    port: int, processes: int, seconds: float, news: Callable[[str], None] = lambda absent: None
) -> None:
    """Waits in process 0 until all other processes have come.

    news: called once in a while with the processes that are absent. Raises AbsentError after
    `seconds`, and OSError where the port cannot be opened.
    """
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(port))
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        texts: dict[socket.socket, str] = {}
        came: dict[socket.socket, int] = {}
        sent: dict[socket.socket, str] = {}
        seen: set[int] = set()
        while True:
            seen |= set(came.values())
            absent = _absent(set(came.values()), seen, processes)
            for connection in list(came):
                if sent.get(connection) != absent:
                    sent[connection] = absent
                    _send(connection, f"{_ABSENT} {absent}" if absent else _GO)
            if not absent:
                return
            if time.monotonic() > until:
                raise AbsentError(absent)
            news(absent)
            for key, _ in selector.select(min(_NEWS, max(0.0, until - time.monotonic()))):
                readable = key.fileobj
                assert isinstance(readable, socket.socket)
                if readable is server:
                    arrived, _ = server.accept()
                    stack.enter_context(arrived)
                    selector.register(arrived, selectors.EVENT_READ)
                    texts[arrived] = ""
                    continue
                received = _receive(readable)
                texts[readable] += received
                process = _process_in(texts[readable], processes)
                if process is not None:
                    came[readable] = process
                if not received:  # it has gone
                    selector.unregister(readable)
                    came.pop(readable, None)


def answer_roll(
    host: str, port: int, process: int, seconds: float, news: Callable[[str], None]
) -> None:
    """Says to process 0 that this process has come, and waits until all have.

    news: called with the processes that are absent, as process 0 tells them. Raises AbsentError
    after `seconds`.
    """
    until = time.monotonic() + seconds
    absent, refusal = "", "nothing answers there"
    while time.monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=_ANSWER) as connection:
                connection.sendall(f"{_GREETING} {process}\n".encode())
                text = ""
                while time.monotonic() < until:
                    connection.settimeout(max(0.01, min(_NEWS, until - time.monotonic())))
                    try:
                        received = connection.recv(4096)
                    except TimeoutError:
                        continue
                    if b"\0" in received:  # JAX's service: the others have been called already
                        return
                    text += received.decode(errors="replace")
                    lines = text.split("\n")[:-1]
                    if lines and lines[-1] == _GO:
                        return
                    if lines and lines[-1].startswith(_ABSENT):
                        absent = lines[-1].removeprefix(_ABSENT).strip()
                        news(absent)
                    if not received:
                        refusal = "process 0 has closed the connection"
                        break
        except (OSError, UnicodeError) as error:
            refusal = f"nothing answers there: {reason_of(error)}"
        time.sleep(min(_AGAIN, max(0.0, until - time.monotonic())))
    raise AbsentError(absent or refusal)


def _absent(came: set[int], seen: set[int], processes: int) -> str:
    """Names those that never came; where there are none, those that have come and left again."""
    others = set(range(1, processes))
    if others - seen:
        return describe(others - seen, processes)
    left = sorted(others - came)
    if not left:
        return ""
    return f"{len(left)} of {processes} have come and left again, the first is process {left[0]}"


def describe(absent: set[int], processes: int) -> str:
    """Names the processes that have not come; "" where all have.

    Example:
        >>> describe({2, 5}, 8)
        'processes 2 and 5 have not come, 6 of 8 have'
        >>> describe(set(), 8)
        ''
    """
    if not absent:
        return ""
    shown = sorted(absent)[:8]
    names = " and ".join(filter(None, [", ".join(map(str, shown[:-1])), str(shown[-1])]))
    if len(absent) > len(shown):
        names = f"{', '.join(map(str, shown))} and {len(absent) - len(shown)} more"
    verb = "process {} has" if len(absent) == 1 else "processes {} have"
    return f"{verb.format(names)} not come, {processes - len(absent)} of {processes} have"


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _process_in(text: str, processes: int) -> int | None:
    """Returns the process that a greeting names.

    None for another text, which something else on the network sends.
    """
    line, ended, _ = text.partition("\n")
    number = line.removeprefix(_GREETING).strip()
    if not (ended and line.startswith(_GREETING) and number.isdigit()):
        return None
    return int(number) if 0 < int(number) < processes else None


def _send(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(_ANSWER)
        connection.sendall(f"{line}\n".encode())


def _receive(connection: socket.socket) -> str:
    """Returns what a connection has; "" where it has ended."""
    try:
        return connection.recv(4096).decode(errors="replace")
    except OSError:
        return ""
