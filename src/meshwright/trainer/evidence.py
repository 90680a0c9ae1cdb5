"""Evidence of a step whose loss or gradient is not finite: the state before it, its batch, its metrics."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.data.ramp import ramp_of
from meshwright.errors import TrainingError
from meshwright.report import Values
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State


@dataclasses.dataclass(frozen=True)
class Evidence:
    """State and batch of a step, kept until its metrics are known to be finite."""

    out: Path
    device_run: DeviceRun
    state: State
    """State before that step: an unhealthy step changes nothing, nor does any after it."""
    batch: Any

    def save(self, step: int, values: Values) -> NoReturn:
        """Writes the evidence into the output folder and raises TrainingError."""
        folder, training = self.out / f"evidence-step-{step}", self.device_run.run.training
        with Checkpoints(folder / "checkpoints", max_to_keep=1) as checkpoints:
            checkpoints.save(self.state, self.device_run, step=step - 1, cursor=ramp_of(training).read_before(step - 1))
        if self.batch is not None:
            np.savez(folder / f"batch-process-{jax.process_index()}.npz", **_local_rows(self.batch))
        metrics = {"step": step, **{name: str(value) for name, value in values.items()}}
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=1), encoding="utf-8")
        raise TrainingError(
            f"step {step}",
            f"its loss is {values['loss']} and its gradient norm {values['gradient norm']}; the state before it and "
            f"its batch are saved in {folder}",
            "a lower --lr, more --optimizer.warmup-steps, or a look at that batch",
        )


def _local_rows(batch: Any) -> dict[str, Any]:
    """The rows of the batch on this process, by field."""
    return {
        name or "batch": np.concatenate(
            [np.asarray(shard.data) for shard in field.addressable_shards if shard.replica_id == 0]
        )
        for name, field in named_leaves(batch).items()
    }
