"""A signal to one of three processes, in every phase of a run: all of them end alike, and none blames another."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ranks

PROCESS = """
import os, signal, sys
from meshwright import signs

victim, number, phase, step = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
sys.argv[1:] = sys.argv[5:]

sent = False

def send(entered, at):
    # The first time that the phase begins: a second Ctrl-C asks for something else.
    global sent
    if int(os.environ["RANK"]) == victim and (entered, at) == (phase, step) and not sent:
        sent = True
        os.kill(os.getpid(), number)

enter = signs.Phases.enter

def entered(self, phase, step=None):
    enter(self, phase, step)
    send(phase, self.now[0])

signs.Phases.enter = entered

from meshwright.trainer import prepare
load = prepare.load_corpus

def loaded(*arguments, **options):
    send("prepare", 0)
    return load(*arguments, **options)

prepare.load_corpus = loaded

from meshwright.step.device_run import DeviceRun
make = DeviceRun.initial_state

def made(self):
    send("start", 0)
    return make(self)

DeviceRun.initial_state = made

from meshwright.trainer.meter import Meter
close = Meter.sample

def sampled(self, step, text):
    close(self, step, text)
    send("after the sample", step)

Meter.sample = sampled

from meshwright.cli.main import main
main()
"""
STEPS = 4
PHASES = {
    "prepare": (0, "stopped"),
    "start": (0, "stopped"),
    "compile": (0, "stopped"),
    "data": (1, "stopped"),
    "step": (2, "stopped"),
    "save": (2, "stopped"),
    "last data": (STEPS - 1, "any"),
    "last step": (STEPS, "any"),
    "last save": (STEPS, "any"),
    "evaluate": (STEPS, "any"),
    "sample": (STEPS, "any"),
    "after the sample": (STEPS, "ended"),
}
"""Phase -> step in which the signal comes, and whether the run is stopped by it or has come to its end."""


def ended(
    tmp_path: Path, count: int, phase: str, step: int, number: signal.Signals
) -> tuple[list[int], str]:
    """Trains in `count` processes, of which the second gets a signal; returns their exit codes and what they said."""
    text = tmp_path / "text.txt"
    text.write_text("She sells sea shells by the sea shore. " * 200)
    words = [
        "train", "--data", str(text), "--model.width", "16", "--model.layers", "1", "--model.heads", "1",
        "--model.kv-heads", "1", "--model.mlp", "16", "--data.tokenizer", "bytes", "--data.sample", "4",
        "--training.seq", "16", "--batch", "12", "--training.eval-samples", "12", "--training.eval-every", "0",
        "--devices", str(count), "--mesh", f"data={count}", "--steps", str(STEPS), "--training.save-every", "2",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    command = [sys.executable, "-c", PROCESS, "1", str(int(number)), phase, str(step), *words]
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**rank, **quick},
        )
        for rank in ranks(count)
    ]
    logs = [process.communicate(timeout=300)[0] for process in processes]
    said = "\n\n".join(log[-3000:] for log in logs)
    return [process.returncode for process in processes], said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_to_one_of_three_processes(
    tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    step, expected = PHASES[phase]
    codes, said = ended(tmp_path, 3, phase.removeprefix("last "), step, number)
    allowed = {"stopped": [{128 + number}], "ended": [{0}], "any": [{0}, {128 + number}]}
    assert set(codes) in allowed[expected], said
    assert "error:" not in said and "Traceback" not in said, said


def test_four_processes_leave_together(tmp_path: Path) -> None:
    """More processes than processors: none takes for a failure that another is through before it."""
    codes, said = ended(tmp_path, 4, "step", 2, signal.SIGTERM)
    assert codes == [143] * 4, said
    assert "error:" not in said and "Traceback" not in said, said
