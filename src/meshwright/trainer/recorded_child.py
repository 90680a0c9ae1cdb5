"""Records the first step of a run by the Meshwright that this Python imports: a program, run
as a file.

    python recorded_child.py RUN.json OUT.npz CACHE DEVICES

It imports only what commits have had for long,
so that a commit without recorded tensors still gives its gradients.
"""

import sys
from pathlib import Path
from typing import Any


def main(run_file: str, out: str, cache: str, devices: str) -> None:
    """Takes the step and writes initial values, tokens and tensors."""
    from meshwright.hardware.mesh import prepare_host

    prepare_host(int(devices))
    import numpy as np

    from meshwright.runs.run_file import read_run
    from meshwright.sharding.params import named_leaves, rows_to_layers
    from meshwright.trainer.loop import prepare_run
    from meshwright.trainer.prepare import Position
    from meshwright.trust import own

    run = own(read_run(Path(run_file)))
    prepared = prepare_run(run, cache=Path(cache), weights="")
    device_run = prepared.device_run
    state = device_run.initial_state()
    batch = next(prepared.feed(Position(0, 0)))
    described = named_leaves(device_run.layout.params)
    arrays: dict[str, Any] = {"tokens": np.asarray(batch.inputs)}
    for name, x in named_leaves(state.params).items():
        arrays[f"initial|{name}"] = rows_to_layers(described[name], np.asarray(x))
    arrays |= _tensors(device_run, state, batch)
    np.savez(out, **arrays)


def _tensors(device_run: Any, state: Any, batch: Any) -> dict[str, Any]:
    """Returns the tensors of the step, or the gradients alone of a commit
    that records no others."""
    import jax
    import numpy as np

    try:
        from meshwright.step.recorded_step import by_key, record_step
    except ImportError:
        from meshwright.sharding.params import named_leaves, rows_to_layers
        from meshwright.step.gradients import build_gradients

        described = named_leaves(device_run.layout.params)
        spec = device_run.run.model.spec()
        found: dict[str, Any] = {}
        with jax.default_matmul_precision("highest"):
            gradients, *_ = jax.jit(build_gradients(device_run))(state.params, state.step, batch)
        for path, gradient in named_leaves(gradients).items():
            rows = rows_to_layers(described[path], np.asarray(gradient))
            stack, _, name = path.partition(".")
            if stack not in spec.stacks:
                found[f"parameters||{path}"] = rows
                continue
            for layer, row in zip(spec.layers_of(stack), rows, strict=True):
                found[f"parameters|{layer}|{name}"] = row
        return found
    recording = record_step(device_run, state.params, state.step, batch, *state.variables)
    return by_key(recording)


if __name__ == "__main__":
    main(*sys.argv[1:])
