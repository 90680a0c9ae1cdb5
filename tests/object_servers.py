"""Servers of buckets on this machine: S3 (moto) and Google Cloud Storage (gcp-storage-emulator), with planted faults.

`python tests/object_servers.py s3|gcs PORT` runs one until it is killed; each has an empty bucket named `bucket`.
"""

import contextlib
import http.client
import http.server
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

BUCKET = "bucket"


def serve(kind: str, port: int) -> None:
    """Runs a server until the process ends."""
    if kind == "s3":
        from moto.server import ThreadedMotoServer

        ThreadedMotoServer("127.0.0.1", port, verbose=False).start()
        url = f"http://127.0.0.1:{port}/{BUCKET}"
        for _ in range(100):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
                break
            time.sleep(0.1)
    else:
        from gcp_storage_emulator.handlers import objects
        from gcp_storage_emulator.server import create_server

        download = objects.download

        def download_with_generation(request: Any, response: Any, storage: Any) -> None:
            """Answers a read with the object's version, as Google does: TensorStore makes conditions of it."""
            download(request, response, storage)
            if response.status in (200, 206):
                found = storage.get_file_obj(
                    request.params["bucket_name"], request.params["object_id"]
                )
                response["x-goog-generation"] = found["generation"]

        objects.download = download_with_generation
        # The emulator answers one request at a time: more than five that wait must not be turned away.
        http.server.HTTPServer.request_queue_size = 256
        create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET).start()
    print("ready", flush=True)
    while os.getppid() != 1:
        time.sleep(1)
    os._exit(0)


@contextlib.contextmanager
def object_server(kind: str) -> Iterator[int]:
    """Starts a server in a process of its own; yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, kind, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline(), f"the {kind} server did not start"
        yield port
    finally:
        process.kill()
        process.communicate()


class FaultyProxy:
    """Server in front of another that answers some requests with 500 or 503, and all of them late; by a seed."""

    def __init__(self, port: int, *, share: float = 0.0, latency: float = 0.0, seed: int = 0):
        self.share, self.latency, self.failed, self.passed, self.refuses = (
            share,
            latency,
            0,
            0,
            False,
        )
        self.sent = 0
        """Bytes of content that were answered."""
        self._random, self._target = random.Random(seed), port
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                time.sleep(proxy.latency * proxy._random.random() * 2)
                if proxy.refuses or proxy._random.random() < proxy.share:
                    proxy.failed += 1
                    self._answer(proxy._random.choice((500, 503)), [], b"")
                    return
                # The emulator of Google's store ignores the range of a listing, here always that of a prefix.
                path = re.sub(r"startOffset=([^&]*)&endOffset=[^&]*", r"prefix=\1", self.path)
                with contextlib.closing(
                    http.client.HTTPConnection("127.0.0.1", proxy._target, timeout=60)
                ) as target:
                    try:
                        target.request(self.command, path, body or None, dict(self.headers))
                        with target.getresponse() as answer:
                            content = answer.read()
                    except (
                        OSError,
                        http.client.HTTPException,
                    ):  # as a balancer does whose server does not answer
                        proxy.failed += 1
                        self._answer(503, [], b"")
                        return
                proxy.passed += 1
                proxy.sent += len(content)
                kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in _HOP]
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self._answer(answer.status, kept, content, length)

            def _answer(
                self,
                status: int,
                headers: list[tuple[str, str]],
                content: bytes,
                length: str | None = None,
            ) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in headers:
                        self.send_header(name, value)
                    self.send_header("Content-Length", length or str(len(content)))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


_HOP = ("content-length", "transfer-encoding", "connection", "date", "server")

if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
