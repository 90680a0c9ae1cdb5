"""Census of a wrapped model's train step."""

import jax

from meshwright.analysis.census import Census, ProgramFacts, census
from meshwright.analysis.run_census import target_devices
from meshwright.comm import collectives, hierarchical
from meshwright.hardware.targets import Target
from meshwright.step.train_step import build_train_step
from meshwright.wrapped import step as wrapped_step
from meshwright.wrapped.flops import training_flops
from meshwright.wrapped.placing import WrappedRun
from meshwright.wrapped.step import build_wrapped_gradients

_CATEGORIES = {
    "state.params": "parameters", "state.optimizer": "optimizer state", "state.variables": "variables",
    "state": "counters", "batch": "batch",
}  # fmt: skip
_LIBRARY_FILES = tuple(str(module.__file__) for module in (collectives, hierarchical, wrapped_step))


def census_of_wrapped(wrapped_run: WrappedRun, target: Target | None = None) -> Census:
    """Compiles the train step of a wrapped model for its mesh and takes its census; nothing runs.

    target: hardware of the mesh's devices, on which a schedule is simulated; None simulates none.
    """
    example, where = wrapped_run.parts.source.example, wrapped_run.batch_sharding
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), example)
    facts = ProgramFacts(
        name="train step",
        model_flops={"matmuls of the loss": training_flops(wrapped_run.parts) / wrapped_run.mesh.size},
        library_files=_LIBRARY_FILES,
    )
    return census(
        build_train_step(wrapped_run, build_wrapped_gradients(wrapped_run)),
        wrapped_run.abstract,
        batch,
        mesh=wrapped_run.mesh.shape,
        categories=_CATEGORIES,
        target=None if target is None else target_devices(wrapped_run, target),
        facts=facts,
        compiler_options=wrapped_run.compiler_options(),
    )
