"""Silent corruption named by its device, and notices of Google's metadata server."""

import dataclasses
import http.server
import json
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_checkpoint import programs_are_compiled_once, text_run

from meshwright.config import Faults
from meshwright.errors import HostError
from meshwright.runs.run import Run
from meshwright.trainer import loop, silent
from meshwright.trainer.preemption import Preemption

__all__ = ["programs_are_compiled_once"]  # a fixture of this file too


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return text_run(tmp_path, "data=2", steps=4, save_every=0, remat="none")


def test_a_flipped_bit_of_a_replica_is_named() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
    where = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = jax.device_put(np.arange(16, dtype=np.float32), where)
    silent.check_replicas({"w": whole}, silent.shard_sums({"w": whole}), 3)
    parts = [np.asarray(shard.data).copy() for shard in whole.addressable_shards]
    parts[5].view(np.uint32)[2] ^= 1
    devices = [shard.device for shard in whole.addressable_shards]
    arrays = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    broken = {"w": jax.make_array_from_single_device_arrays(whole.shape, where, arrays)}
    with pytest.raises(
        HostError, match=f"its replicas differ in w: device {devices[5].id} of process 0\n"
    ):
        silent.check_replicas(broken, silent.shard_sums(broken), 3)
    with pytest.raises(
        HostError, match=rf"two results in w: device {devices[5].id} of process 0\n"
    ):
        silent.check_equal(silent.shard_sums({"w": whole}), silent.shard_sums(broken), 3)
    answers = iter([broken, {"w": whole}])
    with pytest.raises(HostError, match="computed twice"):
        silent.checked_step(lambda state, batch: (next(answers), {}), {"w": whole}, None, 3)


def test_checked_steps_change_nothing(run: Run, cache: Path, tmp_path: Path) -> None:
    def losses(run: Run, out: Path) -> list[float]:
        loop.train(loop.prepare_run(run, cache=cache), out)
        return [
            json.loads(line).get("loss")
            for line in (out / "metrics.jsonl").read_text().splitlines()
        ]

    checked = dataclasses.replace(run, faults=Faults(check_every=2))
    assert losses(run, tmp_path / "plain") == losses(checked, tmp_path / "checked")


def test_the_metadata_server_announces_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.trainer import preemption

    events = ["NONE", "TERMINATE_ON_HOST_MAINTENANCE"]
    answers = {"preempted": iter(["FALSE", "FALSE"]), "maintenance-event": iter(events)}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(answers[self.path.rpartition("/")[2]]).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(preemption, "PERIOD", 0.05)
    try:
        with Preemption().listening() as preemption:
            until = time.monotonic() + 20
            while not preemption.stops() and time.monotonic() < until:
                time.sleep(0.01)
            assert preemption.stopped_by == signal.SIGTERM
    finally:
        server.shutdown()
        server.server_close()
