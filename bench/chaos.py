"""Seeded chaos: runs of two processes with four simulated devices each, under --supervise, with one fault each.

Each run must end by itself with the checkpoint of an undisturbed run, bit by bit, and with its losses, so that no
sample is read twice or lost; within float error where a host is lost and the mesh shrinks. As root each process has a
network namespace of its own, whose cable a fault pulls. Prints a line for each run and adds it to a file:

    python bench/chaos.py --runs 30 --results bench/results/chaos.json
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from chaos_runs import SAVE, SILENCE, STEPS, Pair, compare, result
from page_table import put_rows, put_table


def newest(out: Path) -> list[Path]:
    """Returns the files of tensors of the newest of two checkpoints or more."""
    steps = [
        p
        for p in (out / "checkpoints").glob("[0-9]*")
        if p.name.isdigit() and (p / "manifest/metadata").exists()
    ]
    if len(steps) < 2:
        return []
    last = max(steps, key=lambda p: int(p.name))
    return [
        p for p in (last / "state").rglob("*") if p.is_file() and p.name.replace(".", "").isdigit()
    ]


def inject(kind: str, pair: Pair, victim: int, rng: random.Random) -> float:
    """Waits for the moment and injects the fault into the host `victim`; returns the time of the injection."""
    at = rng.randrange(SAVE + 1, STEPS - 3)
    if kind.startswith("hang in "):
        pair.wait_for(lambda: (pair.folder.parent / f"{pair.folder.name}-site" / "once").exists())
        return time.time()
    if kind in LOCAL:
        pair.wait_for(
            lambda: pair.steps() >= SAVE + 2
        )  # the hosts alone have the newest checkpoint
    elif kind == "SIGKILL of one":
        # Before a checkpoint is committed the survivors truly say that there is none.
        pair.wait_for(lambda: pair.steps() >= at and pair.committed())
    elif kind == "killed while saving":
        pair.wait_for(lambda: any((pair.out / "checkpoints").glob("*tmp*")) or pair.steps() > at)
    elif kind in ("flipped byte", "truncated file"):
        pair.wait_for(lambda: newest(pair.out))
    else:
        pair.wait_for(lambda: pair.steps() >= at)
    children, now = [pair.child(0), pair.child(1)], time.time()
    if kind in ("SIGKILL of one", "killed while saving", "poisoned batch", *LOCAL):
        os.kill(children[victim], signal.SIGKILL)
    elif kind == "SIGKILL of all":
        for child in children:
            os.kill(child, signal.SIGKILL)
    elif kind == "SIGSTOP":
        os.kill(children[victim], signal.SIGSTOP)
    elif kind == "SIGTERM":
        os.kill(children[victim], signal.SIGTERM)
    elif kind == "full disk":
        resource.prlimit(children[victim], resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    elif kind == "network cut":
        if pair.hosts is None:
            raise RuntimeError(Pair.apart)
        pair.hosts.pull(victim)
        pair.wait_for(lambda: sum(e["event"] == "ended" for e in pair.events()) >= 2)
        pair.hosts.plug(victim)
    elif kind == "host lost":
        pair.processes[victim].kill()
        os.kill(children[victim], signal.SIGKILL)
    elif kind == "slow host":
        for _ in range(10):
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[victim], signal.SIGSTOP)
                time.sleep(0.5)
                os.kill(children[victim], signal.SIGCONT)
            time.sleep(0.1)
    else:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for file in newest(pair.out):
            damage(file, kind, rng)
    return now


def damage(file: Path, kind: str, rng: random.Random) -> None:
    """Flips a bit of a file, or cuts it in half."""
    content = bytearray(file.read_bytes())
    if kind == "flipped byte":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[len(content) // 2 :]
    file.write_bytes(content)


LOCAL = ("local tier", "full local disk")
"""Faults of runs whose hosts keep checkpoints on their own disks; in the second of 64 KiB, which are full."""
HANGS = {
    "its start": 1,
    "joining": 1,
    "metrics.jsonl": 0,
    "events.jsonl": 0,
    "data": 1,
    "shared save": 1,
    "sample.txt": 0,
    "local tier": 1,
    "the end": 1,
}
"""Place in which a host stops to answer -> process that does."""
UNHARMED = ("hang in local tier", "hang in the end")
"""Hangs after which nothing is started again: the run does without that disk, or has come to its end."""
KINDS = (
    "SIGKILL of one", "SIGSTOP", "SIGKILL of all", "SIGTERM", "killed while saving", "flipped byte", "full disk",
    "network cut", "truncated file", "slow host", "poisoned batch", "host lost", *LOCAL,
    *(f"hang in {place}" for place in HANGS),
)  # fmt: skip
OF_ONE = ("SIGKILL of one", "SIGSTOP", "SIGTERM", "killed while saving", "full disk", "network cut", "slow host",
          "poisoned batch", "host lost", *LOCAL, *(f"hang in {place}" for place in HANGS))  # fmt: skip
"""Faults of one of the hosts."""
NAMED = (
    "SIGKILL of one",
    "SIGSTOP",
    "killed while saving",
    "full disk",
    "network cut",
    "poisoned batch",
    "host lost",
)
"""Faults of a host that the other has to name in its error."""
HANG = """
import os, time
place, victim, once = os.environ["HANG"].split("|")

def hang():
    import jax
    if place == "joining":
        process = int(os.environ["CHAOS_PROCESS"])
    else:
        process = jax.process_index()
    if process == int(victim) and not os.path.exists(once):
        open(once, "x").close()
        time.sleep(3600)

def hangs(owner, name, when=lambda *arguments: True):
    function = getattr(owner, name)
    def replaced(*arguments, **options):
        if when(*arguments):
            hang()
        return function(*arguments, **options)
    setattr(owner, name, replaced)

if "MESHWRIGHT_BEATS" in os.environ:
    if place == "its start" and os.environ["CHAOS_PROCESS"] == victim and not os.path.exists(once):
        open(once, "x").close()
        time.sleep(3600)
    elif place == "joining":
        from meshwright.api import verb
        hangs(verb, "join")
    elif place == "metrics.jsonl":
        from meshwright.reporters.files import JsonLines
        hangs(JsonLines, "write", lambda self, step, values: step == 5)
    elif place == "events.jsonl":
        from meshwright.reporters.files import EventLog
        hangs(EventLog, "ended", lambda self, activity, **more: activity.step == 3)
    elif place == "data":
        from meshwright.data import feed
        hangs(feed.Windows, "__getitem__")
    elif place in ("shared save", "local tier"):
        from meshwright.checkpoint import checkpoints
        inside = os.environ.get("HANG_DISK", "/out/")
        hangs(checkpoints, "write_shards", lambda folder, *more: inside in str(folder))
    elif place == "sample.txt":
        from meshwright.trainer import prepare
        hangs(prepare, "write_sample")
    elif place == "the end":
        from meshwright import signs
        from meshwright.trainer.tiers import Tiers
        hangs(Tiers, "forget_local", lambda self, after=-1: signs.whole() is not None)
"""
"""Module that a process imports at its start: it does not come back from one place, once."""
POISON = """
import numpy as np
from meshwright.data import feed
read = feed.Windows.__getitem__
def poisoned(self, index):
    sample = read(self, index)
    if index == 5:  # a window of the text, wherever it comes
        sample["weights"] = np.full_like(sample["weights"], np.nan)
    return sample
feed.Windows.__getitem__ = poisoned
"""
"""Module that a process imports at its start: one sample is not finite."""


def start(kind: str, folder: Path) -> Pair:
    """Starts the run that the fault `kind` is for."""
    if kind == "host lost":
        return Pair(folder, more=("--restarts.hosts", "left", "--restarts.wait", "20"))
    if kind in LOCAL:
        disk = folder.parent / f"{folder.name}-disk"
        disk.mkdir(parents=True)
        if kind == "full local disk":
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=64k", "meshwright", str(disk)], check=True
            )
        return Pair(
            folder, more=("--local-checkpoints.path", str(disk), "--local-checkpoints.every", "1")
        )
    if kind.startswith("hang in "):
        return _hanging(kind.removeprefix("hang in "), folder)
    if kind != "poisoned batch":
        return Pair(folder)
    site = folder.parent / "poison"
    site.mkdir(exist_ok=True)
    (site / "usercustomize.py").write_text(POISON)
    path = f"{site}:{os.environ.get('PYTHONPATH', '')}"
    return Pair(
        folder, more=("--faults.bad-step", "roll_back"), PYTHONPATH=path, PYTHONNOUSERSITE=""
    )


def _hanging(place: str, folder: Path) -> Pair:
    """Starts the run of which one host hangs in a place."""
    site = folder.parent / f"{folder.name}-site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(HANG)
    environment = {
        "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
        "HANG": f"{place}|{HANGS[place]}|{site / 'once'}",
    }
    more = ["--watchdog.stall", "30"]
    if place == "local tier":
        disk = folder.parent / f"{folder.name}-disk"
        disk.mkdir()
        environment["HANG_DISK"] = str(disk)
        more += ["--local-checkpoints.path", str(disk), "--local-checkpoints.every", "2"]
    if place == "sample.txt":
        more += ["--data.sample", "4"]
    return Pair(folder, more=tuple(more), **environment)


def row(seed: int, kind: str, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """One run with one fault, compared with the undisturbed one."""
    rng, victim = (
        random.Random(seed),
        HANGS.get(kind.removeprefix("hang in "), seed // len(KINDS) % 2),
    )  # each kind of fault meets both processes
    lost = victim if kind == "host lost" else None
    pair = start(kind, folder)
    began, at, why = time.time(), 0.0, ""
    try:
        at = inject(kind, pair, victim, rng)
    except (RuntimeError, TimeoutError, OSError, IndexError) as error:
        why = f"not injected: {error}"
    codes = pair.finish()
    events = [event for event in pair.events() if event["time"] > at]
    first = {e["process"]: e for e in reversed(events) if e["event"] == "ended"}
    ended = [first[i] if i in first and first[i]["code"] else None for i in range(2)]
    again = [e["time"] - at for e in events if e["event"] == "training" and e["attempt"]]
    equal, tensors, losses = False, "no", "no"
    try:
        equal, tensors, losses = compare(result(pair.out), expected, shrunk=lost is not None)
    except (OSError, ValueError) as error:
        why = f"{why} {error}".strip()
    return {
        "seed": seed,
        "fault": kind,
        "host": victim if kind in OF_ONE else None,
        "ended by itself": codes == [-signal.SIGKILL if i == lost else 0 for i in range(2)],
        "equal": equal and not why,
        "tensors": tensors,
        "losses": losses,
        "named by the other": _named(kind, pair, victim),
        "exit codes": [e and e["code"] for e in ended],
        "diagnosis (s)": [e and round(e["time"] - at, 1) for e in ended],
        "training again (s)": round(min(again), 1) if again else None,
        "starts": max((event["attempt"] for event in events), default=0) + 1,
        "seconds": round(time.time() - began),
        "note": why,
    }


def _named(kind: str, pair: Pair, victim: int) -> bool | None:
    """Returns whether the host with the fault was named; None where nobody has to name it."""
    if kind == "hang in joining":
        return pair.says(1 - victim, rf"because: .*process {victim} has not come")
    if kind == "hang in its start":
        return pair.says(victim, "gave no sign for .* last at its start: it is killed")
    if kind == "hang in local tier":
        return pair.says(victim, rf"process {victim}: its own disk has not answered")
    if kind == "hang in the end":
        return pair.says(1 - victim, rf"nothing of it is missing: process {victim} ")
    return pair.names(victim) if kind in NAMED or kind.startswith("hang in ") else None


def page_table(record: dict[str, Any]) -> tuple[str, str]:
    """Returns the result in one sentence, with its date and machine, and a table of the runs."""
    rows = record["rows"]
    whole = sum(row["ended by itself"] and row["equal"] for row in rows)
    summary = (
        f"`python bench/chaos.py --runs {len(rows)}`, {record['date']}, source {record['source']}, {record['cores']} "
        f"cores of an AMD EPYC (KVM, shared by other work), processes on {record['hosts']}: {whole} of {len(rows)} "
        "runs ended by themselves with equal tensors, losses and place in the data."
    )
    lines = [
        "| seed | fault | host | ended by itself | tensors | losses | named | exit codes | diagnosis (s) "
        "| training again (s) | starts |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        words = [
            row["seed"], row["fault"], row["host"], row["ended by itself"], row["tensors"], row["losses"],
            row["named by the other"], row["exit codes"], row["diagnosis (s)"], row["training again (s)"],
            row["starts"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(_cell, words)) + " |")
    return summary, "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return (
            ""
            if value == [None, None]
            else ", ".join("-" if v is None else f"{v:g}" for v in value)
        )
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def source() -> str:
    """The commit of the package that runs."""
    words = ["git", "describe", "--always", "--dirty"]
    return (
        subprocess.run(
            words, capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
        or "unknown"
    )


def main() -> None:
    """Runs the faults in turn and writes a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument(
        "--first", type=int, default=0, help="seed of the first run; the rows before it are kept"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/meshwright-chaos"))
    parser.add_argument("--results", type=Path)
    parser.add_argument(
        "--table", action="store_true", help="only write the table of the page from --results"
    )
    options = parser.parse_args()
    if options.table:
        record = json.loads(options.results.read_text())
        summary, rows = page_table(record)
        page = Path(__file__).parents[1] / "docs" / "faults.md"
        put_table(page, "chaos.py", f"{summary} `bench/results/chaos.md` has each row.\n")
        put_rows("chaos.py", "Thirty runs with a fault each", f"{summary}\n\n{rows}")
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    os.environ.setdefault("MESHWRIGHT_CACHE", str(options.folder / "cache"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    expected: dict[bool, dict[str, Any]] = {}
    rows = []
    if options.first and options.results and options.results.is_file():
        rows = [
            row
            for row in json.loads(options.results.read_text())["rows"]
            if row["seed"] < options.first
        ]
    for seed in range(options.first, options.first + options.runs):
        kind = KINDS[seed % len(KINDS)]
        poisoned = kind == "poisoned batch"
        if poisoned not in expected:
            reference = start(
                kind if poisoned else "none", options.folder / f"reference-{poisoned}"
            )
            codes = reference.finish()
            assert codes == [0, 0], f"the undisturbed run: {codes}"
            expected[poisoned] = result(reference.out)
            if Pair.apart:
                print(
                    f"both processes on one host, and no network is cut: {Pair.apart}", flush=True
                )
        rows.append(row(seed, kind, options.folder / f"run-{seed}", expected[poisoned]))
        print(json.dumps(rows[-1]), flush=True)
        if options.results:
            record = {
                "date": time.strftime("%Y-%m-%d"), "source": source(), "cores": os.cpu_count(), "silence": SILENCE,
                "hosts": f"one host ({Pair.apart})" if Pair.apart else "two network namespaces", "rows": rows,
            }  # fmt: skip
            options.results.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
