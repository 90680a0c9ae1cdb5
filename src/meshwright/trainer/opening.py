"""Opening of a training: what is between a prepared run and its first step, phase by phase.

What a phase opens is closed by the exit stack that it is given, in reverse order, however the
training ends.
"""

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax

from meshwright.activity import activity, watched_by
from meshwright.checkpoint.checkpoints import check_room
from meshwright.checkpoint.steps import committed_steps, explained_writing
from meshwright.data.batch import ramp_of
from meshwright.hardware.agreement import (
    agree,
    answer_of_the_first,
    choose_together,
    versions_of_program,
)
from meshwright.hardware.hosts import store
from meshwright.monitoring.processes import keeping_processes
from meshwright.monitoring.watch import watching_machines
from meshwright.reporters import Reporter, build_reporters
from meshwright.reporters.files import EventLog, JsonLines, last_start, last_step
from meshwright.reporters.health import NAME as HEALTH_FILE
from meshwright.reporters.health import HealthLog
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.signs import PREPARING, Phases, in_phases
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.trainer.alarms import Alarms
from meshwright.trainer.heartbeat import beating
from meshwright.trainer.lock import locked
from meshwright.trainer.prepare import Position, Trainable
from meshwright.trainer.recovery import Resumed, begin, resume, run_identity
from meshwright.trainer.relations import check_new
from meshwright.trainer.tiers import Tiers, say
from meshwright.trainer.watchdog import Watchdog

Start = Literal["fresh", "resume", "resume if exists"]
"""How a run begins; the last resumes where all hosts can read a checkpoint, and is fresh where
there is none."""


def hosts_module() -> ModuleType | None:
    """Returns `trainer.hosts`, which a process needs that has others; None in one that is alone."""
    if jax.process_count() == 1:
        return None
    from meshwright.trainer import hosts  # most runs have one process

    return hosts


@contextlib.contextmanager
def to_the_end(out: Path, watchdog: Watchdog | None) -> Iterator[None]:
    """Holds the processes of a run together: while the context is open they watch each other.

    For a program that ends with the run; what it prints at the end belongs inside.
    """
    with contextlib.ExitStack() as stack:
        phases = stack.enter_context(in_phases(Phases(PREPARING)))
        hosts = hosts_module()
        if hosts is not None:
            stack.enter_context(hosts.watching(out, phases, watchdog or Watchdog()))
        yield
        if hosts is not None:
            hosts.leave_together()


def watch_hosts(
    stack: contextlib.ExitStack,
    prepared: Trainable,
    out: Path,
    phases: Phases,
    watchdog: Watchdog,
) -> None:
    """Lets the processes of a run watch each other.

    Raises HostError where they do not train the same run.
    """
    hosts = hosts_module()
    if hosts is None:
        return
    stack.enter_context(hosts.watching(out, phases, watchdog))
    agree("run, versions, data or tokenizer", hosts.same_fields(prepared))


def check_folder(out: Path, device_run: DeviceRun, start: Start, at: int | None) -> None:
    """Checks that a run may write into its output folder, and that all processes have the same one.

    Raises ConfigError for a new run where another has checkpoints, and RoomError where there is no
    room.
    """
    answer_of_the_first(lambda: _check_own_folder(out, device_run, start, at))
    hosts = hosts_module()
    if hosts is not None:
        hosts.check_shared(out)


def _check_own_folder(out: Path, device_run: DeviceRun, start: Start, at: int | None) -> None:
    """Checks the output folder as one process sees it."""
    steps = committed_steps(out / "checkpoints")
    if start == "fresh":
        check_new(out)
    replaced = sum(at is None or step <= at for step in steps)
    check_room(out, device_run, device_run.run.training.max_to_keep, replaced)


def lock_folder(stack: contextlib.ExitStack, out: Path) -> None:
    """Locks the output folder. If another run holds it, all processes stop alike."""
    answer_of_the_first(lambda: stack.enter_context(locked(out)))


def open_events(stack: contextlib.ExitStack, out: Path) -> EventLog | None:
    """Opens the log of what the run does besides steps, which process 0 writes.

    The result is None in the others.
    """
    if jax.process_index() != 0:
        return None
    events = EventLog(out / "events.jsonl")
    stack.callback(events.release)
    stack.enter_context(watched_by(events))
    return events


def watch_machine(stack: contextlib.ExitStack, out: Path, events: EventLog | None) -> None:
    """Watches the counters of this host's devices, links and disks: one process
    of each host reads them.

    events: as of `open_events`.
    """
    names = choose_together("host name", socket.gethostname(), list)
    watched = watching_machines(
        out,
        None if events is None else events.add,
        store() if jax.process_count() > 1 else None,
        is_first_on_host=names.index(socket.gethostname()) == jax.process_index(),
    )
    stack.enter_context(watched)


def watch_steps(
    stack: contextlib.ExitStack,
    alarms: Alarms,
    phases: Phases,
    events: EventLog | None,
) -> None:
    """Watches in process 0 whether steps come, and passes the events of the run to its alarms.

    events: as of `open_events`.
    """
    if events is None:
        return
    events.listeners.append(alarms.note)
    stack.enter_context(alarms.watching(phases, events.add))


def open_checkpoints(
    stack: contextlib.ExitStack,
    device_run: DeviceRun,
    out: Path,
    phases: Phases,
    watchdog: Watchdog,
) -> Tiers:
    """Opens the checkpoints of the output folder and of the hosts' own disks."""
    checkpoints = Tiers(
        out,
        device_run,
        max_to_keep=device_run.run.training.max_to_keep,
        local=device_run.run.local_checkpoints,
        saves=phases.saves,
        patience=watchdog.patience,
        identity=answer_of_the_first(lambda: run_identity(out)),
    )
    stack.enter_context(contextlib.closing(checkpoints))
    stack.enter_context(beating(checkpoints.look, "identity of the output folder"))
    return checkpoints


def keep_processes(
    stack: contextlib.ExitStack, out: Path, phases: Phases, checkpoints: Tiers
) -> None:
    """Keeps the table of the processes of the run,
    with their usual seconds and their memory, in the output folder."""
    client = store() if jax.process_count() > 1 else None
    stack.enter_context(keeping_processes(out, phases, client, checkpoints.check_folder))


def begin_or_resume(
    prepared: Trainable,
    out: Path,
    checkpoints: Tiers,
    *,
    resumes: bool,
    at: int | None,
    accept: Sequence[str],
) -> Resumed:
    """Returns the state and the position from which the run starts. at, accept: as of `resume`."""
    if resumes:
        with activity(
            "restore", "restoring the last checkpoint", "restored the last checkpoint"
        ) as work:
            work.record = {"left out": checkpoints.left_out}
            resumed = resume(prepared, checkpoints, at, accept, work.record)
    else:
        checkpoints.forget_local()
        note = random_choice_note(prepared.device_run.run)
        if note:
            say(note)
        state = first_state(prepared.device_run, out)
        resumed = Resumed(state, begin(out), {}, 0)
    checkpoints.identity = resumed.position.identity
    return resumed


def random_choice_note(run: Run) -> str:
    """Returns what a run from random weights should know of indexers that it does not train with
    the rest; "" if nothing."""
    if run.init_from is not None or not run.model.states_layers:
        return ""
    seq = run.training.seq
    indexers = [a.indexer for a in run.model.spec().attention if a.indexer is not None]
    if any(indexer.training == "warmup" for indexer in indexers):
        return (
            "the warm-up trains only the indexer, and the attention that it learns is that of "
            "random weights: --init-from WEIGHTS begins with trained ones, --model.index-training "
            "sparse trains everything"
        )
    fewest = min((i.top_k for i in indexers if i.training == "frozen"), default=seq)
    if fewest >= seq:
        return ""
    return (
        f"the indexer has random weights and is not trained: of up to {seq} keys each query sees "
        f"{fewest} that are chosen at random; --model.index-training sparse trains it, "
        f"--model.index-topk {seq} sees all keys"
    )


def first_state(device_run: DeviceRun, out: Path) -> State:
    """Returns the state before the first step, of initial values or of given weights."""
    with activity("initialise", "making the first state", "made the first state") as work:
        if device_run.run.init_from is None:
            return device_run.initial_state()
        from meshwright.checkpoint.initial_weights import (
            describe_initial_weights,
            load_initial_weights,
        )

        work.result = describe_initial_weights(device_run.run)
        return device_run.state_of(load_initial_weights(device_run, out))


def open_reporters(
    stack: contextlib.ExitStack,
    prepared: Trainable,
    out: Path,
    events: EventLog | None,
    resumed: Resumed,
    start: Start,
    reporters: Callable[[int], list[Reporter]],
) -> list[Reporter]:
    """Writes the Run, and opens the destinations of its metrics: process 0 has files and trackers.

    start: `fresh` or `resume`.  reporters: as of `train`.
    """
    opened = list(reporters(resumed.position.step))
    if events is not None:
        opened += _open_files(prepared, out, events, resumed, start)
    for reporter in opened:
        stack.callback(reporter.close)
    return opened


_MOST_SOURCES = 100
"""Sources that an event names."""


def _place_in_data(prepared: Trainable, position: Position) -> dict[str, Any]:
    """Returns what places a run in its data: the units that it trains on in all,
    and what its samples are of.

    How often each source was read follows from it and from the units in a line of metrics.
    """
    device_run = prepared.device_run
    training = device_run.run.training
    ramp = ramp_of(training)
    ahead = ramp.read_before(training.steps) - ramp.read_before(position.step)
    sources = prepared.sources()
    return {
        "unit": device_run.run.model.unit,
        "units": (position.cursor + ahead) * device_run.units,
        "per sample": device_run.units,
        "first sample": device_run.run.data.first_sample,
        "sources": [dataclasses.asdict(source) for source in sources[:_MOST_SOURCES]],
        "more sources": max(0, len(sources) - _MOST_SOURCES),
    }


def _open_files(
    prepared: Trainable, out: Path, events: EventLog, resumed: Resumed, start: Start
) -> list[Reporter]:
    """Writes run.json, and opens trackers, events and metrics.jsonl."""
    device_run = prepared.device_run
    position = resumed.position
    with explained_writing(out):
        write_run(device_run.run, out / "run.json")
        prepared.write_files(out)
    # Before a file is open, as names may be refused.
    trackers = build_reporters(out, device_run.run)
    if start != "fresh":
        for tracker in trackers:
            getattr(tracker, "rewind", lambda step: None)(position.step)
    optional: dict[str, Any] = {}
    lost = last_step(out) - position.step if start == "fresh" else 0
    if lost > 0:
        # An earlier start of this folder left no checkpoint.
        optional["taken again"] = lost
    with explained_writing(out):
        lines = JsonLines(
            out / "metrics.jsonl",
            upto=position.step,
            every=resumed.log_every,
            since=last_start(out).get("checked"),
        )
    if resumed.changes:
        optional["changes"] = resumed.changes
    if lines.hole:
        optional["metrics"] = lines.hole
    events.start(
        position.step,
        mesh=str(device_run.layout.shape),
        devices=device_run.mesh.size,
        processes=jax.process_count(),
        kind=device_run.mesh.devices.flat[0].device_kind,
        how=start,
        versions=versions_of_program(),
        identity=position.identity,
        checked=lines.checked,
        data=_place_in_data(prepared, position),
        **optional,
    )
    files: list[Reporter] = [*trackers, events, lines]
    if device_run.run.training.health:
        with explained_writing(out):
            files.append(HealthLog(out / HEALTH_FILE, upto=position.step))
    return files
