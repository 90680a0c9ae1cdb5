"""A placed run on devices: shardings, abstract state, optimizer and kernels, from which the steps are built."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.config import MeshShape, Run
from meshwright.errors import ConfigError
from meshwright.models.forward import LocalModel
from meshwright.models.kernels.choose import Kernels, kernels_of
from meshwright.models.remat import REMAT_POLICIES
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import Tree, init_params, plan_gathers, shardings, tree_map
from meshwright.sharding.placement import Placements, to_spec
from meshwright.step.optimizers import build_optimizer, place_optimizer_state
from meshwright.step.state import State

BATCH_SPEC = PartitionSpec(BATCH_AXES, None)


@dataclasses.dataclass(frozen=True)
class DeviceRun:
    """A placed run on a mesh of devices, real, simulated, or described for compilation alone."""

    placed: PlacedRun
    mesh: Mesh
    optimizer: optax.GradientTransformation
    abstract: State
    """`ShapeDtypeStruct`s with their shardings."""
    kernels: Kernels
    """Attention kernels of these devices."""

    @property
    def run(self) -> Run:
        """Run, its mesh filled in and its vocabulary padded."""
        return self.placed.run

    @property
    def shape(self) -> MeshShape:
        """Degrees of the mesh axes."""
        return self.placed.shape

    @property
    def params(self) -> Tree:
        """Descriptions of the parameters."""
        return self.placed.params

    @property
    def placements(self) -> Tree:
        """Placements of the parameters."""
        return self.placed.placements

    @functools.cached_property
    def local_model(self) -> LocalModel:
        """Forward pass of one device."""
        training = self.run.training
        gather = plan_gathers(
            self.params,
            self.placements,
            compute_dtype=jnp.dtype(training.compute_dtype),
            reduce_dtype=jnp.dtype(training.reduce_dtype),
            dcn=self.placed.dcn,
        )
        placed = self.placed
        return LocalModel(self.run.model, training, gather, placed.sequence, placed.stages, self.kernels)

    @property
    def state_shardings(self) -> State:
        """Sharding of every array of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every field of a batch, [B, T]."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    def initial_state(self) -> State:
        """Returns the state before the first step; every array is created in its sharding, never whole."""
        run, where = self.run, self.state_shardings
        params = init_params(self.params, where.params, seed=run.training.seed, dtype=run.training.param_dtype)
        optimizer = jax.jit(self.optimizer.init, out_shardings=where.optimizer)(
            jax.device_put(params, shardings(self.mesh, self.placements, "optimizer"))
        )
        step, healthy = jax.device_put((np.zeros((), np.int32), np.ones((), np.bool_)), (where.step, where.healthy))
        return State(step, healthy, params, optimizer)

    def compiler_options(self) -> dict[str, str]:
        """Returns the run's XLA options; none on simulated devices, whose compiler does not have them.

        Raises ConfigError for an option without a value.
        """
        options = {}
        for text in self.run.training.compiler_options:
            name, equals, value = text.partition("=")
            if not equals:
                raise ConfigError(f"compiler option {text!r}", "it has a name and a value", f"{text}=true")
            options[name] = value
        return {} if self.mesh.devices.flat[0].platform == "cpu" else options


def param_specs(placements: Tree, which: str) -> Tree:
    """Returns the same tree of PartitionSpecs; `which` is a field of `Placements`."""
    return jax.tree.map(lambda p: to_spec(getattr(p, which)), placements, is_leaf=lambda x: isinstance(x, Placements))


def place_on_devices(run: Run, mesh: Mesh) -> DeviceRun:
    """Places `run` on the devices of `mesh`.

    Raises ConfigError where the run does not fit the mesh, or these devices cannot do what it asks for.
    """
    platform = mesh.devices.flat[0].platform
    _check_offload(run, platform, mesh.devices.flat[0].device_kind)
    # A JAX mesh does not say which axis crosses slices; the run's own mesh does.
    same = run.mesh is not None and run.mesh.degrees() == dict(mesh.shape)
    placed = place_run(run, run.mesh if same else MeshShape(**mesh.shape))
    training = placed.run.training
    dtype = jnp.dtype(training.param_dtype)
    sharded = shardings(mesh, placed.placements, "at_rest")
    params = tree_map(lambda p, where: jax.ShapeDtypeStruct(p.shape, dtype, sharding=where), placed.params, sharded)
    optimizer = build_optimizer(run.optimizer, training.steps, placed.params)
    state, where = place_optimizer_state(optimizer, params, placed.placements, placed.shape)
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, to_spec(placement)))
        for leaf, placement in zip(jax.tree.leaves(state), where, strict=True)
    ]
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)
    replicated = NamedSharding(mesh, PartitionSpec())
    step, healthy = (jax.ShapeDtypeStruct((), kind, sharding=replicated) for kind in (jnp.int32, jnp.bool_))
    abstract = State(cast(Any, step), cast(Any, healthy), params, state)
    return DeviceRun(placed, mesh, optimizer, abstract, kernels_of(training, placed.spec, placed.sequence, platform))


def _check_offload(run: Run, platform: str, kind: str) -> None:
    remat = run.training.remat
    if REMAT_POLICIES[remat].offloaded and platform not in ("tpu", "cpu"):
        raise ConfigError(
            f"--training.remat {remat} on {kind}",
            "it offloads activations to host memory, which XLA does on TPUs; on GPUs it keeps them on the device "
            "without an error",
            f"--training.remat {'full' if remat == 'offload' else 'projections'}",
        )
