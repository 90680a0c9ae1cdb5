"""Report of a bad step: five lines on the console, in events.jsonl and on the page of the run.

step 120: its loss is nan
first tensor: gradient of layer 3, attention output: not finite in 12 values
samples: 4512 in sequence 3, which begins "The cat sat on" (ids 464 3797 3332 319)
device: device 5 of process 1 (node7)
figures of every tensor: meshwright view runs/mine
"""

import socket
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.activity import activity
from meshwright.data.batch import Batch
from meshwright.errors import shell_word
from meshwright.hardware.agreement import choose_together
from meshwright.step.health import PARAMETER
from meshwright.trainer.first_tensor import VALUES, Alarm, First, name_first
from meshwright.trainer.prepare import Trainable
from meshwright.trainer.replicas import find_odd_replicas, full_name, name_devices, shard_sums
from meshwright.trainer.tiers import say

EVENT = "first tensor"
"""Kind of the event."""
MOST_RECORDED = 3
"""Bad steps of one start of a run that are taken again: each compiles a program."""
_TOKENS = 12
_CHARACTERS = 60
_SEQUENCES = 2


def explain_step(
    prepared: Trainable,
    out: Path,
    alarm: Alarm,
    state: Any,
    batch: Any,
    reference: Any,
    first_sample: int,
    records: bool,
) -> list[str]:
    """Prints the first bad tensor of a step; returns the lines. All processes call it together.

    state: before the step where it is not finite, else after it.
    batch: of the step, None where it is not known.
    reference: another batch.
    first_sample: index of the batch's first sample.
    records: whether the step is taken again.
    """
    doing = f"looking for the first bad tensor of step {alarm.step}"
    with activity(EVENT, doing, "looked for the first bad tensor", alarm.step) as work:
        device_run = prepared.device_run
        hosts = choose_together("host name", socket.gethostname(), list)
        first = None
        if records and batch is not None:
            first = name_first(device_run, state, batch, alarm, reference)
        lines = [
            f"step {alarm.step}: {alarm.reason}",
            f"first tensor: {_tensor_line(alarm, first)}",
            f"samples: {_sample_line(prepared, batch, first, first_sample)}",
            f"device: {_device_line(state, first, hosts)}",
            f"figures of every tensor: meshwright view {shell_word(out)}",
        ]
        work.result = lines[1]
        work.record = {
            "bad": alarm.step,
            "lines": lines,
            "suspects": [f"{suspect}: {suspect.what}" for suspect in alarm.suspects[:8]],
        }
    for line in lines:
        say(line)
    return lines


def _tensor_line(alarm: Alarm, first: First | None) -> str:
    """Names the first tensor: a parameter that is wrong comes before what is computed from it."""
    suspect = alarm.suspects[0] if alarm.suspects else None
    if suspect is not None and (first is None or suspect.series.figure in (PARAMETER, VALUES)):
        return f"{suspect} is {suspect.what}"
    if first is not None:
        return f"{first.tensor}: {first.what}"
    text = "none: every tensor is within its own history"
    if alarm.closest is not None:
        text += f"; closest to its limit: {alarm.closest} is {alarm.closest.what}"
    return text


def _device_line(state: Any, first: First | None, hosts: list[str]) -> str:
    """Names the device, where it is one: by its replicas, or by what it has computed.
    hosts: name of each process's."""
    odd = find_odd_replicas(state.params, shard_sums(state.params))
    if odd is not None:
        devices = name_devices(odd.devices, hosts)
        return f"{devices}: its copy of {odd.names[0]} differs from the others"
    if first is not None and first.device:
        return full_name(first.device, first.host, hosts)
    return "no single one"


def _sample_line(prepared: Trainable, batch: Any, first: First | None, first_sample: int) -> str:
    """Names the samples of the bad sequences, with their ids and text."""
    if batch is None:
        return "not known"
    number = jax.tree.leaves(batch)[0].shape[0]
    row = "sequence" if isinstance(batch, Batch) else "row"
    everything = f"{first_sample} to {first_sample + number - 1}, all {number} of the batch"
    if first is None or len(first.sequences) > number // 2:
        return everything
    shown = first.sequences[:_SEQUENCES]
    texts = choose_together("text of samples", _texts(prepared, batch, shown), _merged)
    parts = [f"{first_sample + s} in {row} {s}{texts.get(str(s), '')}" for s in shown]
    more = len(first.sequences) - len(shown)
    return "; ".join(parts) + (f"; and {more} more" if more else "")


def _texts(prepared: Trainable, batch: Any, sequences: list[int]) -> dict[str, str]:
    """Returns how the sequences that this process has begin."""
    tokenizer = prepared.tokenizer
    if not isinstance(batch, Batch) or tokenizer is None:
        return {}
    found = {}
    for shard in batch.inputs.addressable_shards:
        start = shard.index[0].start or 0
        rows = np.asarray(shard.data)
        for sequence in sequences:
            if start <= sequence < start + rows.shape[0]:
                ids = rows[sequence - start].tolist()
                text = tokenizer.decode(ids)[:_CHARACTERS]
                shown = " ".join(map(str, ids[:_TOKENS]))
                found[str(sequence)] = f", which begins {text!r} (ids {shown})"
    return found


def _merged(answers: list[dict[str, str]]) -> dict[str, str]:
    return {sequence: text for answer in answers for sequence, text in answer.items()}
