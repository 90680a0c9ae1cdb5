"""Silent corruption named by its device, and notices of Google's metadata server."""

import dataclasses
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, NamedTuple, cast

import flipped
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ranks import ranks
from test_checkpoint import programs_are_compiled_once, text_run

from meshwright.config import Faults
from meshwright.errors import HostError
from meshwright.runs.run import Run
from meshwright.signs import Phases
from meshwright.trainer import loop, replicas, silent
from meshwright.trainer.preemption import Preemption
from meshwright.views.run_folder import RunFolder
from meshwright.views.run_page import run_page

__all__ = ["programs_are_compiled_once"]  # a fixture of this file too


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return text_run(tmp_path, "data=2,fsdp=2", steps=4, save_every=0, remat="none")


class Named(NamedTuple):
    """Tensors in another order than that of their names, as in the state of a run."""

    w: jax.Array
    b: jax.Array


def named(mesh: jax.sharding.Mesh) -> Named:
    """`w` is sharded over `fsdp`, `b` is on every device."""
    w = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(mesh, PartitionSpec("fsdp")))
    b = jax.device_put(np.arange(6, dtype=np.float32), NamedSharding(mesh, PartitionSpec()))
    return Named(w, b)


@pytest.mark.parametrize("name", Named._fields)
def test_a_flipped_bit_of_a_replica_is_named_and_replaced(name: str) -> None:
    whole = named(jax.make_mesh((4, 2), ("data", "fsdp")))
    assert not replicas.replicas_differ(whole)
    assert replicas.find_odd_replicas(whole, replicas.shard_sums(whole)) is None
    broken = flipped.with_flip(whole, (name, 5, 0))
    assert replicas.replicas_differ(broken)
    odd = replicas.find_odd_replicas(broken, replicas.shard_sums(broken))
    assert odd is not None
    assert (odd.names, odd.devices) == ([name], [jax.devices()[5]])
    assert odd.sources is not None
    mended = replicas.replace_replicas(broken, odd.sources)
    for tensor, true in zip(mended, whole, strict=True):
        assert tensor.sharding == true.sharding
        for shard, true_shard in zip(
            tensor.addressable_shards, true.addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(true_shard.data))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32"])
def test_every_type_is_sent_bit_by_bit(dtype: str) -> None:
    mesh = jax.make_mesh((4,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    values = [np.arange(64).reshape(8, 8) % 2 == 0 for _ in range(4)]
    if dtype != "bool":
        bits = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 4), np.uint8)
        bits[:, 0, 0] = 0xFF  # not a number, with bits of its own
        values = [each.reshape(-1).view(jnp.dtype(dtype)).reshape(8, -1) for each in bits]
    shards = [jax.device_put(x, d) for x, d in zip(values, jax.devices()[:4], strict=True)]
    shards[1] = jax.device_put(~values[1] if dtype == "bool" else values[1], jax.devices()[1])
    x = jax.make_array_from_single_device_arrays(shards[0].shape, sharding, shards)
    source = jax.devices()[2]
    (mended,) = replicas.replace_replicas([x], {"0": frozenset({source})})
    for shard in mended.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[2].tobytes()


def test_of_two_replicas_none_is_believed() -> None:
    whole = named(jax.make_mesh((2,), ("fsdp",)))
    odd = replicas.find_odd_replicas(
        whole, replicas.shard_sums(flipped.with_flip(whole, ("b", 1, 3)))
    )
    assert odd is not None
    assert (odd.names, odd.devices, odd.sources) == (["b"], jax.devices()[:2], None)


def test_a_step_with_two_results_is_named() -> None:
    whole = named(jax.make_mesh((4, 2), ("data", "fsdp")))
    broken = flipped.with_flip(whole, ("w", 5, 0))
    answers = iter([broken, whole])
    with pytest.raises(HostError, match=r"two results in w: device 5 of process 0\n"):
        silent.checked_step(lambda state, batch: (next(answers), {}), whole, None, 3)


def figures(out: Path) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of a run."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["gradient norm"]) for line in lines if "loss" in line]


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_a_run_goes_on_as_without_the_flips_of_replicas(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A parameter's copy on device 2 after step 2, a moment's on device 3 after step 4, four replicas.

    Bits are summed within the steps too, which find nothing afterwards.
    """

    def train(out: Path, every: int) -> None:
        faults = Faults(check_replicas=every, check_bits=True)
        run = flipped.replicated_run(tmp_path, "data=4", every, faults=faults, health=True)
        loop.train(loop.prepare_run(run, cache=cache), out)

    train(tmp_path / "clean", 1)
    flips = {2: [(flipped.QUERY, 2, 20)], 4: [(flipped.MOMENT, 3, 7)]}
    flipped.plant(monkeypatch.setattr, flips)
    train(tmp_path / "flipped", 1)
    assert figures(tmp_path / "flipped") == figures(tmp_path / "clean")
    found = events(tmp_path / "flipped", "replica")
    host = socket.gethostname()
    assert [event["lines"] for event in found] == [
        [
            f"step {step}: device {device} of process 0 ({host}) had other bits than most replicas of {tensor}: "
            f"replaced from an equal one; gradients of step {step} may have been computed with them"
        ]
        for step, device, tensor in [(2, 2, flipped.QUERY), (4, 3, flipped.MOMENT)]
    ]
    assert not events(tmp_path / "flipped", "first tensor")
    folder = RunFolder(tmp_path / "flipped")
    folder.refresh()
    page = " ".join(str(run_page([folder])).split())
    assert found[0]["lines"][0] in page
    assert found[0]["lines"][0] in capfd.readouterr().err

    # With three steps between two comparisons, step 3 is taken with the flipped copy.
    flipped.plant(monkeypatch.setattr, {2: [(flipped.QUERY, 2, 30)]})
    train(tmp_path / "later", 3)
    (event,) = events(tmp_path / "later", "replica")
    assert event["bad"] == 3
    assert event["lines"][0].endswith("gradients of steps 1 to 3 may have been computed with them")
    assert figures(tmp_path / "later")[:2] == figures(tmp_path / "clean")[:2]
    assert figures(tmp_path / "later")[2] != figures(tmp_path / "clean")[2]


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_of_two_replicas_the_run_returns_to_its_checkpoint(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A flip after step 3, of which the comparison before the save after step 4 is the first."""
    run = flipped.replicated_run(tmp_path, "data=2", 100, save_every=2)

    def train(out: Path) -> None:
        loop.train(loop.prepare_run(run, cache=cache), out)

    train(tmp_path / "clean")
    flipped.plant(monkeypatch.setattr, {3: [(flipped.MOMENT, 1, 20)]})
    train(tmp_path / "flipped")
    assert figures(tmp_path / "flipped") == figures(tmp_path / "clean")
    (back,) = events(tmp_path / "flipped", "roll back")
    assert (back["step"], back["to"]) == (4, 2)
    capfd.readouterr()
    flipped.plant(monkeypatch.setattr, {3: [(flipped.MOMENT, 1, 20)], 6: [(flipped.QUERY, 0, 1)]})
    with pytest.raises(HostError, match=r"device 0 (.|\n)*had before in this start"):
        train(tmp_path / "twice")


@pytest.mark.exhaustive
@pytest.mark.processes
def test_replicas_of_two_processes_are_replaced_across_them(tmp_path: Path, cache: Path) -> None:
    """The copy of device 1 from the other process; of three that all differ the run returns to its checkpoint."""
    words = [sys.executable, flipped.__file__, str(tmp_path)]
    processes = [
        subprocess.Popen(
            words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        for environment in ranks(2)
    ]
    run = flipped.replicated_run(tmp_path, "data=3,fsdp=2", 1, save_every=2)
    loop.train(loop.prepare_run(run, cache=cache), tmp_path / "clean")
    for process in processes:
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 0, said[-3000:]
    first, second = events(tmp_path / "out", "replica")
    assert first["bad"] == 3
    assert "device 1 of process 0 (node0) had other bits" in first["lines"][0]
    assert second["bad"] == 5
    said = second["lines"][0]
    assert "device 2 of process 0 (node0), device " in said
    assert "of process 1 (node1) had other bits than the other replicas" in said
    (back,) = events(tmp_path / "out", "roll back")
    assert back["to"] == 4
    ours = np.array(figures(tmp_path / "out"))
    np.testing.assert_allclose(ours, np.array(figures(tmp_path / "clean")), rtol=1e-5)


def test_checked_steps_change_nothing(run: Run, cache: Path, tmp_path: Path) -> None:
    def losses(run: Run, out: Path) -> list[float]:
        loop.train(loop.prepare_run(run, cache=cache), out)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    checked = dataclasses.replace(run, faults=Faults(check_every=2, check_replicas=3))
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


def test_a_step_and_the_comparison_after_it_are_timed_as_one() -> None:
    """The table of hosts has the median of the steps, of which every second would be a comparison."""
    phases = Phases()
    equal = types.SimpleNamespace(make_equal=lambda state, step: state)
    run = types.SimpleNamespace(phases=phases, replicas=equal)
    for step in range(1, 4):
        phases.enter("step", step)
        time.sleep(0.02)
        loop._Loop._with_equal_replicas(cast(Any, run), step, cast(Any, "state"))
        phases.enter("data", step)
    usual = phases.usual_seconds("step")
    assert usual is not None and usual >= 0.02
