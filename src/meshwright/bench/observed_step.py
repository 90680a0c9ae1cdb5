"""A compiled train step as the training loop takes it, with a measurement around each call."""

from collections.abc import Callable
from typing import Any

from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep

Take = Callable[[CompiledTrainStep, State, Any], tuple[State, Any]]
"""`(step, state, batch) -> (state, metrics)`: takes the step."""


class ObservedStep:
    """A compiled train step that something else takes."""

    def __init__(self, step: CompiledTrainStep, take: Take):
        self._step = step
        self._take = take

    @property
    def device_bytes(self) -> int | None:
        """Bytes of a device that the step takes, as of `CompiledTrainStep`."""
        return self._step.device_bytes

    def __call__(self, state: State, batch: Any) -> tuple[State, Any]:
        return self._take(self._step, state, batch)
