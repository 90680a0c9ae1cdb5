"""Checkpoints of a run: in the output folder, and often on each host's own disk too.

On its own disk every process has a folder with the shards on its devices: saving sends nothing over
the network. What each host can read is gathered after every step that a host does alone (its list,
the manifest, the shards), and all of them take the newest checkpoint that all can read, each from
its own disk or from the output folder.
"""

import contextlib
import hashlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright import last_words
from meshwright.checkpoint.checkpoints import LAYOUT, Checkpoints, UnreadableError, named_tensors
from meshwright.checkpoint.layer_order import abstract_in_layer_order
from meshwright.checkpoint.manifest import Manifest, steps_to_take
from meshwright.checkpoint.steps import MANIFEST, committed_steps, remove_checkpoint
from meshwright.checkpoint.tensors import layout_of
from meshwright.documents import LARGE, read_json
from meshwright.errors import (
    CheckpointError,
    DamagedError,
    MeshwrightError,
    UnavailableError,
)
from meshwright.hardware.agreement import answer_of_the_first, choose_together
from meshwright.signs import NOBODY, waiting
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.storage.attempts import may_pass
from meshwright.storage.removing import remove_empty_folder, remove_tree
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.trainer.watchdog import PATIENCE

_LOOK = 0.01
"""Seconds between two looks at a save in progress."""
Choice = tuple[int, str, bool]
"""Step of a checkpoint; checksum of the manifest with which hosts take it from their own disks ("":
none does); whether another host takes it from the output folder."""


class Tiers(Checkpoints):
    """Checkpoints of the output folder, and those of the run's layout on the hosts' own disks."""

    def __init__(
        self,
        out: Path,
        device_run: DeviceRun,
        *,
        max_to_keep: int,
        local: LocalCheckpoints,
        saves: Callable[[str], None] = lambda phase: None,
        patience: float = PATIENCE,
        identity: str | None = None,
    ):
        super().__init__(out / "checkpoints", max_to_keep=max_to_keep, saves=saves, root=out)
        self._layout = layout_of(
            abstract_in_layer_order(named_tensors(device_run.abstract), device_run.layout.params)
        )
        self._local: Checkpoints | None = None
        self._own_patience, self._answered = patience, time.monotonic()
        self.left_out: list[str] = []
        """Checkpoints that the last restore left out, and why."""
        self.newer: list[int] = []
        """Steps that some host has, newer than what all have, as of the last restore."""
        self.identity = identity
        """Identity of the run in the output folder (`recovery.run_identity`). Of the hosts' own
        checkpoints only those that have it are read: the folder may have been deleted, and begun by
        another run. None reads all."""
        if local.path is not None:
            # The folder `local.path` may be shared by several runs and processes.
            name = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:16]
            folder = Path(local.path) / f"{out.name}-{name}" / f"process-{jax.process_index()}"

            def answered(phase: str) -> None:
                self._answered = time.monotonic()
                saves(phase)

            self._local = self._on_own_disk(
                lambda: Checkpoints(
                    folder,
                    max_to_keep=local.max_to_keep,
                    reach="process",
                    saves=answered,
                    patience=patience,
                    root=Path(local.path),  # type: ignore[arg-type]
                ),
                # Of a disk that does not answer nothing is opened, and all processes save alike.
                lambda: Checkpoints(folder, max_to_keep=None, reach="process"),
            )

    def save_locally(self, state: State, device_run: DeviceRun, **place: Any) -> None:
        """Starts to write the state to the hosts' disks. place: as of `save`."""
        self._locally(Checkpoints.wait)
        self._locally(lambda local: local.save(state, device_run, **place))

    def _locally(self, do: Callable[[Checkpoints], None]) -> None:
        """Does something with this host's own checkpoints.

        Where its disk fails, the run goes on without that one.
        """
        if self._local is None:
            return
        self._wait_for_own_disk(self._local)
        try:
            do(self._local)
        except (CheckpointError, UnavailableError) as error:
            for partial in self._local.folder.glob("*.tmp"):
                remove_tree(partial, below=self._local.folder.parent, ignore_errors=True)
            print(
                f"process {jax.process_index()}: a local checkpoint is left out, and the run "
                f"goes on: {error.truth}",
                file=sys.stderr,
                flush=True,
            )

    def _wait_for_own_disk(self, local: Checkpoints) -> None:
        """Waits for the save in progress on this host's own disk, unless that does not answer."""
        self._answered = max(self._answered, time.monotonic() if not local.is_saving else 0.0)
        with waiting(f"its own disk, {local.folder}", NOBODY):
            while local.is_saving and not local.abandoned:
                if time.monotonic() - self._answered > self._own_patience:
                    self._give_up(local)
                time.sleep(_LOOK)

    def _on_own_disk[T](self, do: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Returns `do()` on this host's own disk, or `otherwise()` where that does not answer."""
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(do())
            except Exception as error:
                errors.append(error)

        if self._local is not None and self._local.abandoned:
            return otherwise()
        thread = threading.Thread(target=run, daemon=True, name="own disk")
        thread.start()
        with waiting("its own disk", NOBODY):
            thread.join(self._own_patience)
        if errors:
            raise errors[0]
        if answers:
            return answers[0]
        found = otherwise()
        self._give_up(found if isinstance(found, Checkpoints) else self._local)
        return found

    def _give_up(self, local: Checkpoints | None) -> None:
        """Says that this host's own disk does not answer, and saves nothing more there."""
        if local is None or local.abandoned:
            return
        local.abandon()
        last_words.say(
            f"process {jax.process_index()}: its own disk has not answered for "
            f"{self._own_patience:.0f} s "
            f"({local.folder}); its local checkpoints are left out from here on, and the run "
            "goes on"
        )

    def forget_local(self, after: int = -1) -> None:
        """Deletes the hosts' checkpoints of later steps, of other runs and of other layouts.

        Their folders go too where nothing else is in them.
        """
        self._locally(Checkpoints.wait)
        if self._local is not None:
            self._on_own_disk(lambda: self._forget_own(after), lambda: None)

    def steps(self) -> list[int]:
        """Returns the steps that all hosts have, in one tier or the other, newest first."""
        return list(dict.fromkeys(step for step, _, _ in self._choices(None, strict=False)))

    def output_has(self, step: int) -> bool:
        """Returns whether the output folder has a checkpoint of a step;
        the same in every process."""
        return answer_of_the_first(lambda: step in committed_steps(self.folder))

    def restore(
        self,
        device_run: DeviceRun,
        step: int | None = None,
        accept: Callable[[Manifest], None] = lambda manifest: None,
    ) -> tuple[State, Manifest]:
        """Returns the newest state that all hosts can read, or that of `step`, verified.

        Of equal ones the hosts'.

        accept: refuses a manifest by raising an error.  What is damaged, and what a host cannot
        read on its own disk, is left out with a line on standard error. A checkpoint of the output
        folder that a host cannot read for now is not left out for an older one: another start may
        read it. Raises UnavailableError then, and DamagedError of the newest where none is left.
        """
        self.left_out.clear()
        errors = list[MeshwrightError]()
        choices, mine = self._choices(step, strict=True), self._mine()
        if step is None:
            self._name_newer(choices[0][0])
        for number, checksum, shared in choices:
            own = checksum != "" and mine.get(number) == checksum
            source = self._local if own and self._local is not None else self
            try:
                manifest = source.manifest(number)
                accept(manifest)
                state = source.read(device_run, manifest, sends=shared)
            except (DamagedError, UnreadableError, UnavailableError) as error:
                if not checksum and not isinstance(error, DamagedError):
                    raise
                errors.append(error)
                where = "on the hosts' own disks" if checksum else "in the output folder"
                self.left_out.append(f"step {number} {where}: {error.truth}")
                say(f"step {number} {where} is left out: {error.truth}")
                continue
            if checksum:
                say(f"step {number} is restored from the hosts' own disks")
            return state, manifest
        # What another start may read is not called damaged.
        raise next((error for error in errors if isinstance(error, UnavailableError)), errors[0])

    def _name_newer(self, newest: int) -> None:
        """Names the later steps that only some hosts have: a disk is new, or a save was cut off."""

        def choose(answers: list[list[int]]) -> list[list[Any]]:
            found = []
            for step in sorted({step for host in answers for step in host}):
                lacking = [str(i) for i, host in enumerate(answers) if step not in host]
                named = ", ".join(lacking[:8]) + " and others" * (len(lacking) > 8)
                found.append(
                    [step, f"step {step} on the hosts' own disks: process {named} has none of it"]
                )
            return found

        mine = [step for step in self._mine() if step > newest]
        found = choose_together("newer checkpoints", mine, choose)
        self.newer = [int(step) for step, _ in found]
        for _, text in found:
            self.left_out.append(text)
            say(f"{text}; it is left out")

    def _mine(self) -> dict[int, str]:
        """Returns the steps of this run and layout on this host's disk, with manifests' checksums.

        Those whose description cannot be read are none.
        """
        if self._local is None:
            return {}
        return self._on_own_disk(self._read_own, dict)

    def _read_own(self) -> dict[int, str]:
        found: dict[int, str] = {}
        assert self._local is not None
        for step in self._own_steps():
            with contextlib.suppress(OSError):
                checksum = self._own_checksum(step)
                if checksum is not None:
                    found[step] = checksum
        return found

    def _own_checksum(self, step: int) -> str | None:
        """Returns the manifest's checksum of a step; None for another run, layout, or damage.

        Raises OSError where it cannot be read for now.
        """
        assert self._local is not None
        folder = self._local.folder / str(step)
        try:
            manifest = read_json(folder / MANIFEST, LARGE)
            known = self.identity is None or manifest.get("identity") == self.identity != ""
            if known and read_json(folder / LAYOUT)["layout"] == self._layout:
                return str(manifest["checksum"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if may_pass(error):
                raise
        return None

    def _forget_own(self, after: int) -> None:
        """Deletes this host's checkpoints of later steps, of other runs and of other layouts.

        One that cannot be read for now stays: whose it is is not known.
        """
        assert self._local is not None
        local = self._local.folder
        for step in self._own_steps():
            with contextlib.suppress(OSError):
                if step > after or self._own_checksum(step) is None:
                    remove_checkpoint(local, step)
        for folder in (local, local.parent):
            with contextlib.suppress(OSError):
                remove_empty_folder(folder, below=folder.parent)

    def _own_steps(self) -> list[int]:
        """Returns the steps with a checkpoint on this host's own disk.

        The result is None where that disk cannot be read.
        """
        if self._local is None:
            return []
        try:
            return committed_steps(self._local.folder)
        except (CheckpointError, UnavailableError) as error:
            print(
                f"process {jax.process_index()}: its own checkpoints are left out: {error.truth}",
                file=sys.stderr,
                flush=True,
            )
            return []

    def _choices(self, step: int | None, *, strict: bool) -> list[Choice]:
        """Returns the checkpoints that all hosts have, newest first, and the hosts' own first.

        strict: raises CheckpointError where there is none, or not that of `step`.
        """

        def choose(answers: list[dict[str, str]]) -> list[Choice]:
            shared = committed_steps(self.folder)
            choices: list[Choice] = [(s, "", True) for s in shared]
            # Process 0 reads the manifest for all: what it lacks is taken from the output folder.
            for text, checksum in answers[0].items():
                have = sum(host.get(text) == checksum for host in answers)
                if have == len(answers) or int(text) in shared:
                    choices.append((int(text), checksum, have < len(answers)))
            choices = [choice for choice in choices if step in (None, choice[0])]
            if strict and not choices and not shared:
                of_some = any(answers)
                raise CheckpointError(
                    f"resuming the run in {self.folder.parent}",
                    "no checkpoint was committed there"
                    + (", and no host's own is on all that need it" * of_some),
                    "leave --resume out, or another --out",
                )
            if strict and {c[0] for c in choices} <= set(shared):
                steps_to_take(self.folder, step)
            return sorted(choices, key=lambda choice: (choice[0], choice[1] != ""), reverse=True)

        mine = {str(s): checksum for s, checksum in self._mine().items()}
        return [(s, c, shared) for s, c, shared in choose_together("checkpoints", mine, choose)]

    def look(self) -> None:
        """Compares the path of the output folder with the folder that was opened.

        Called while the run trains.
        """
        if self._root is not None:
            self._root.look()

    def check_folder(self, action: str) -> None:
        """Raises CheckpointError where the path of the folder leads to another folder now."""
        self._check_root(action)

    def set_aside(self, after: int) -> None:
        """Moves newer checkpoints into `set-aside`, and deletes those of the hosts."""
        super().set_aside(after)
        self.forget_local(after)

    def wait(self) -> None:
        """Waits until every save is committed, on the hosts and in the output folder."""
        self._locally(Checkpoints.wait)
        super().wait()

    def check(self) -> None:
        """Raises CheckpointError where a save into the output folder has failed on this host."""
        self._locally(Checkpoints.check)
        super().check()
        if self._root is not None:
            self._root.check_seen("training")

    def close(self) -> None:
        """Waits like `wait`, and releases the threads of both."""
        self._locally(Checkpoints.close)
        super().close()


def say(text: str) -> None:
    """Prints a line on standard error, once for all processes."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)
