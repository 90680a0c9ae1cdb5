"""Both tiers of checkpoints on several hosts: whatever is damaged on one, all go on from one step that all can read."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from test_watchdog import free_port
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.checkpoint import checkpoints as checkpoints_module
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.trainer import tiers as tiers_module
from meshwright.trainer.tiers import Tiers

TIERS = """
import faulthandler, os, shutil, sys, traceback
faulthandler.dump_traceback_later(150, exit=True)
def fail(*error):  # the others must not wait for this one at the exit
    traceback.print_exception(*error)
    os._exit(1)
sys.excepthook = fail
import dataclasses, json
from pathlib import Path
folder, port, process, processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
import jax
from meshwright.api.verb import start_devices
from meshwright.hardware.hosts import Hosts
from meshwright.config import MeshShape
shape = MeshShape(data=processes, fsdp=2)
start_devices(2 * processes, shape, Hosts("test", processes, process, "127.0.0.1:" + port))
from jax.experimental.multihost_utils import sync_global_devices
from meshwright.checkpoint import tensors
from meshwright.errors import MeshwrightError
from meshwright.hardware.mesh import build_mesh
from meshwright.runs.recipe import find_recipe
from meshwright.step.device_run import place_on_devices
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.trainer.tiers import Tiers

run = find_recipe("tiny")
model = dataclasses.replace(run.model, vocab=64, width=32, layers=1, heads=2, kv_heads=2, mlp=32)
training = dataclasses.replace(run.training, seq=16, batch=12)
run = dataclasses.replace(run, model=model, mesh=shape, training=training)
device_run = place_on_devices(run, build_mesh(shape, jax.devices()))
first = device_run.initial_state()
LOCAL = LocalCheckpoints(path=str(folder / "disk"), every=1)
SHARD = "params.blocks.up"
ZARRAY = SHARD + "/.zarray"

def state_of(step):
    scaled = jax.tree.map(lambda w: w * step, first.params)
    return dataclasses.replace(first, params=scaled, step=first.step + step)

def tiers():
    return Tiers(folder / "out", device_run, max_to_keep=3, local=LOCAL)

def own(host):
    return next((folder / "disk").glob("out-*")) / f"process-{host}"

def shared(step):
    return folder / "out" / "checkpoints" / str(step)

def shard(state):
    return next(p for p in sorted((state / SHARD).iterdir()) if p.name[0] != ".")

def edit(file, change):
    file.write_bytes(change(bytearray(file.read_bytes())))

def flip(content):
    content[len(content) // 2] ^= 16
    return content

half = lambda content: content[: len(content) // 2]
saved = tiers()
for step in (2, 4):
    saved.save(state_of(step), device_run, step=step, cursor=0)
    saved.wait()
for step in (4, 10, 12):
    saved.save_locally(state_of(step), device_run, step=step, cursor=0)
    saved.wait()
saved.close()
sync_global_devices("saved")
if process == 0:
    shutil.copytree(folder, folder.parent / "kept")
sync_global_devices("kept")
if process == 1:  # with max_to_keep 2 the local tier has 10 and 12
    assert sorted(p.name for p in own(1).iterdir()) == ["10", "12"]

LAST, ONE = processes - 1, 1
ROWS = {
    # name: (what is damaged, step that all restore; None: an error)
    "nothing": (lambda: None, 12),
    "manifest cut off": (lambda: edit(own(ONE) / "12/manifest/metadata", half), 10),
    "manifest cut off on host 0": (lambda: edit(own(0) / "12/manifest/metadata", half), 10),
    "manifest empty": (lambda: edit(own(ONE) / "12/manifest/metadata", lambda c: b""), 10),
    "one entry of a manifest": (lambda: edit(own(ONE) / "12/manifest/metadata", lambda c: bytes(c).replace(
        b'"cursor": 0', b'"cursor": 9')), 12),  # that of host 0 counts for all
    "description missing": (lambda: (own(ONE) / "12/state" / ZARRAY).unlink(), 10),
    "description of another array": (lambda: edit(own(ONE) / "12/state" / ZARRAY, lambda c: bytes(c).replace(
        b'"dtype":"<f4"', b'"dtype":"<i4"')), 10),
    "description no JSON": (lambda: edit(own(ONE) / "12/state" / ZARRAY, half), 10),
    "a bit": (lambda: edit(shard(own(ONE) / "12/state"), flip), 10),
    "shard cut off": (lambda: edit(shard(own(LAST) / "12/state"), half), 10),
    "shard missing": (lambda: shard(own(LAST) / "12/state").unlink(), 10),
    "layout cut off": (lambda: edit(own(LAST) / "12/layout.json", half), 10),
    "step missing": (lambda: shutil.rmtree(own(ONE) / "12"), 10),
    "host replaced": (lambda: shutil.rmtree(own(ONE)), 4),
    "a bit on each of two steps": (
        lambda: [edit(shard(own(h) / s / "state"), flip) for h, s in ((0, "12"), (LAST, "10"))], 4),
    "host replaced, shared shard cut off": (
        lambda: (shutil.rmtree(own(ONE)), edit(shard(shared(4) / "state"), half)), 2),
    "host replaced, shared manifest cut off": (
        lambda: (shutil.rmtree(own(ONE)), edit(shared(4) / "manifest/metadata", half)), 2),
    "host replaced, shared description missing": (
        lambda: (shutil.rmtree(own(ONE)), (shared(4) / "state" / ZARRAY).unlink()), 2),
    "everything": (lambda: [shutil.rmtree(folder / "disk"),
        *(edit(shard(shared(s) / "state"), flip) for s in (2, 4))], None),
    "no local disks": (lambda: shutil.rmtree(folder / "disk"), 4),
}
opened, real = [], tensors.open_array
tensors.open_array = lambda state, name: opened.append(state) or real(state, name)
for name, (damage, expected) in ROWS.items():
    if process == 0:
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / "kept", folder)
        damage()
    sync_global_devices(name)
    opened.clear()
    checkpoints = tiers()
    try:
        state, manifest = checkpoints.restore(device_run)
        want = state_of(manifest.step)
        equal = all(bool((a == b).all()) for a, b in zip(
            (s.data for x in jax.tree.leaves(state.params) for s in x.addressable_shards),
            (s.data for x in jax.tree.leaves(want.params) for s in x.addressable_shards), strict=True))
        found = [manifest.step, int(state.step) - int(first.step), equal]
    except MeshwrightError as error:
        found = [None, type(error).__name__, " ".join(str(error).split())[:90]]
    finally:
        checkpoints.close()
    print("ROW", json.dumps([name, found, expected, len(opened), checkpoints.left_out]), flush=True)
sync_global_devices("end")
os._exit(0)
"""


@pytest.mark.parametrize("processes", [2, 3])
def test_every_kind_of_damage_leads_all_hosts_to_one_step(tmp_path: Path, processes: int) -> None:
    (tmp_path / "run").mkdir()
    command, port = [sys.executable, "-c", TIERS, str(tmp_path / "run")], free_port()
    hosts = [
        subprocess.Popen(
            [*command, port, str(i), str(processes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    outputs = [process.communicate(timeout=240) for process in hosts]
    for out, err in outputs:
        rows = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("ROW ")]
        assert len(rows) == 20, err[-3000:]
        for name, found, expected, _, left_out in rows:
            if expected is None:
                assert found[:2] == [None, "DamagedError"], (name, found)
            else:
                assert found == [expected, expected, True], (name, found, left_out)
                # What a host cannot even list is none; all else that is left out is said, with the host.
                said = (
                    "cut off" in name or "bit" in name or "shard" in name or "description" in name
                )
                listed = name.startswith(("manifest", "layout")) or not said
                assert listed or left_out, name
    # Without local disks each host reads its shards of what is split; what all have is read by the first of them.
    opened = [json.loads(out.splitlines()[-1][4:])[3] for out, _ in outputs]
    assert opened[0] > 0 and opened[1:] == [0] * (processes - 1), opened


@pytest.mark.parametrize("place", ["opening", "writing", "listing", "reading"])
def test_a_disk_of_a_host_that_hangs_ends_no_run(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The host goes on without its own checkpoints, and says so once; the shared ones are whole."""
    device_run = device_run_of(tiny_run(MODELS["llama"]))
    state = device_run.initial_state()
    local = LocalCheckpoints(path=str(tmp_path / "disk"), every=1)
    out = tmp_path / "out"
    answers = threading.Event()

    def hangs(module: Any, name: str) -> None:
        function = getattr(module, name)

        def replaced(*arguments: Any, **options: Any) -> Any:
            if any(str(tmp_path / "disk") in str(argument) for argument in arguments):
                answers.wait(60)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, replaced)

    def tiers() -> Tiers:
        return Tiers(out, device_run, max_to_keep=2, local=local, patience=2.0)

    if place == "opening":
        hangs(checkpoints_module, "in_bucket")
    with tiers() as checkpoints:
        if place == "writing":
            hangs(checkpoints_module, "write_shards")
        for step in (1, 2):
            checkpoints.save_locally(state, device_run, step=step, cursor=step)
        checkpoints.save(state, device_run, step=3, cursor=3)
        checkpoints.wait()
    if place == "listing":
        hangs(tiers_module, "committed_steps")
    if place == "reading":
        with tiers() as checkpoints:
            checkpoints.save_locally(state, device_run, step=4, cursor=4)
        hangs(checkpoints_module, "read_shards")
    with tiers() as checkpoints:
        _, manifest = checkpoints.restore(device_run)
        assert manifest.step == 3
        checkpoints.forget_local()
    said = capfd.readouterr().err
    answers.set()
    if place == "reading":
        assert "step 4 on the hosts' own disks is left out" in said
    else:
        assert said.count("its own disk has not answered for") == (2 if place == "opening" else 1)


def test_no_barrier_is_named_after_what_a_host_saves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may leave its own checkpoints out: the next shared save must meet the others at the same barrier."""
    device_run = device_run_of(tiny_run(MODELS["llama"]))
    state = device_run.initial_state()
    local = LocalCheckpoints(path=str(tmp_path / "disk"), every=1)
    names: list[str] = []

    def barrier(self: checkpoints_module.Checkpoints, name: str) -> None:
        if self._reach == "shared":
            names.append(name)

    monkeypatch.setattr(checkpoints_module.Checkpoints, "_barrier", barrier)
    with Tiers(tmp_path / "out", device_run, max_to_keep=2, local=local) as checkpoints:
        checkpoints.save(state, device_run, step=1, cursor=1)
        checkpoints.wait()
        checkpoints.save_locally(state, device_run, step=2, cursor=2)
        checkpoints.save(state, device_run, step=3, cursor=3)
    first, second = (int(n.removeprefix("begun-")) for n in names if n.startswith("begun-"))
    assert second == first + 1
