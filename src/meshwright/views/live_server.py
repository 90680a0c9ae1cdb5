"""Server of a run's page on this machine: only the loopback address, only the page
and its data, while files grow."""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, by_class, reason_of
from meshwright.views.report import Live, Report
from meshwright.views.run_folder import RunFolder, open_folders
from meshwright.views.run_status import run_status

_ADDRESS = "127.0.0.1"
_DATA = "data.json"
_AGED = 2.0
"""Seconds after which a page is made anew although no file has changed."""
_SELDOM = 10.0
"""Seconds between two requests of a page of which nothing new is expected."""


class LivePage:
    """Report of runs that are under way;
    it is made anew when their files have changed, or while they should.

    The page of a run that ended or went silent shows so,
    and is asked for rarely: a resume makes it live again.
    """

    def __init__(
        self, paths: Sequence[Path], make: Callable[[Sequence[RunFolder], Live | None], Report]
    ):
        self._folders, self._make = open_folders(paths), make
        self._version: Any = None
        self._made_at = -math.inf
        self._live = Live(_DATA)
        self._document: tuple[str, bytes] = ("", b"")
        self._lock = threading.Lock()

    def data(self) -> tuple[str, bytes]:
        """Returns a version and the page's data as JSON."""
        with self._lock:
            version = tuple(folder.version for folder in self._folders)
            # Ages grow while no file changes.
            aged = time.monotonic() - self._made_at >= _AGED and self._live.active
            if version != self._version or aged:
                for folder in self._folders:
                    folder.refresh()
                self._live = _live_of(self._folders)
                self._made_at = time.monotonic()
                document = json.dumps(self._page().to_json(), allow_nan=False).encode()
                self._document = (f'"{hashlib.sha256(document).hexdigest()[:16]}"', document)
                self._version = version
            return self._document

    def html(self) -> bytes:
        """Returns the page, which asks for new data."""
        self.data()
        with self._lock:
            return self._page().html().encode()

    def _page(self) -> Report:
        return self._make(self._folders, self._live)


def _live_of(folders: Sequence[RunFolder]) -> Live:
    """Returns the state of a page's runs: `live` while something is expected of one of them."""
    statuses = [run_status(folder) for folder in folders]
    if any(status.progresses for status in statuses):
        return Live(_DATA)
    words = list(dict.fromkeys(status.word for status in statuses))
    return Live(_DATA, seconds=_SELDOM, state=" and ".join(words), active=False)


class _Handler(BaseHTTPRequestHandler):
    """Answers two addresses: the page and its data."""

    server: "LiveServer"
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        # A page of another site whose name was made to point here has its own name in the header.
        port = self.server.server_address[1]
        if self.headers.get("Host") not in {
            f"{name}:{port}" for name in (_ADDRESS, "localhost", "[::1]")
        }:
            self._answer(
                421,
                "text/plain; charset=utf-8",
                b"this server answers to 127.0.0.1 and localhost alone\n",
            )
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page.html())
        elif self.path == f"/{_DATA}":
            version, document = self.server.page.data()
            if self.headers.get("If-None-Match") == version:
                self._answer(304, "application/json", b"", version)
            else:
                self._answer(200, "application/json", document, version)
        else:
            self._answer(
                404, "text/plain; charset=utf-8", b"there is the page at / and nothing else\n"
            )

    def _answer(self, status: int, kind: str, content: bytes, version: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            **({"ETag": version} if version else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing for every request."""


class LiveServer(ThreadingHTTPServer):
    """Server of one page on the loopback address. port: 0 takes any that is free."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0):
        self.page = page
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except OSError as error:
            raise by_class(
                error,
                ConfigError(
                    f"--live on port {port}", reason_of(error), "--port 0, which takes a free one"
                ),
            ) from error

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{_ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leaves out readers that went away."""
