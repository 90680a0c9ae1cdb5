"""Loss on held-out text."""

from collections.abc import Callable
from typing import Any

from meshwright.data.batch import Batch
from meshwright.data.feed import Samples, held_out_batches
from meshwright.models.model import Metrics
from meshwright.step.device_run import DeviceRun


def sum_losses(
    device_run: DeviceRun, params: Any, parts: tuple[Samples, ...], eval_step: Callable[[Any, Batch], Metrics]
) -> tuple[float, float]:
    """Returns the loss summed over the tokens of held-out text, and their number."""
    training = device_run.run.training
    total = count = 0.0
    batches = held_out_batches(
        list(parts), samples=training.eval_samples, batch=training.batch, sharding=device_run.batch_sharding
    )
    for metrics in [eval_step(params, batch)["loss"] for batch in batches]:
        total, count = total + float(metrics[0]), count + float(metrics[1])
    return total, count
