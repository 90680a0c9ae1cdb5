"""A placed run on devices: shardings, abstract state and optimizer, from which steps are built."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.data.batch import Batch
from meshwright.errors import ConfigError
from meshwright.hardware.machine import fix_communication, machine_of_mesh, refused_options
from meshwright.mesh_shape import MeshShape
from meshwright.models.forward import LocalModel
from meshwright.models.model import Model
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.runs.settle import Settled, execution_of, settle
from meshwright.sharding.initial_values import init_params
from meshwright.sharding.params import Param, Tree, trained_only, tree_map
from meshwright.sharding.placed_params import shardings, with_reference
from meshwright.sharding.placement import Placements, to_spec
from meshwright.step.optimizers import (
    build_lr_schedule,
    build_update_rule,
    place_optimizer_state,
)
from meshwright.step.state import BATCH_SPEC, State, UpdateRule
from meshwright.update_rules import takes_layers


@dataclasses.dataclass(frozen=True)
class DeviceRun(Settled):
    """A settled run that knows its devices: mesh, state and optimizer.

    The devices are real, simulated, or described for compilation only.
    """

    mesh: Mesh
    optimizer: UpdateRule
    abstract: State
    """`ShapeDtypeStruct`s with their shardings."""
    update_shardings: Tree
    """Shardings of trained parameters, and of their gradients, in the update; those of the
    optimizer state."""
    learning_rate: optax.Schedule
    """Learning rate as a function of the updates so far (step/optimizers.py)."""
    local_model: LocalModel
    """Forward pass of one device; None for a wrapped model, whose loss has its own."""
    profile_of: "Callable[[DeviceRun, Any], Mapping[str, Any]]" = lambda device_run, lowered: {}
    """Returns the compiler option with the times of a lowered step, which XLA schedules it by; by
    default none."""

    def with_batch(self, sequences: int) -> "DeviceRun":
        """Returns the run with as many sequences per step; no placement depends on them."""
        training = dataclasses.replace(self.run.training, batch=sequences)
        run = dataclasses.replace(self.run, training=training)
        settled = settle(PlacedRun(run, self.layout), self.machine)
        return dataclasses.replace(self, run=run, local_model=local_model_of(settled))

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every array of a batch, [B, ...]."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    @property
    def abstract_batch(self) -> Any:
        """A batch as `ShapeDtypeStruct`s with their shardings."""
        return abstract_batch_of(self)

    def initial_state(self) -> State:
        """Returns the state before the first step.

        Every array is created in its sharding, never whole.
        """
        params, variables = initial_arrays(self)
        return dataclasses.replace(self.state_of(params), variables=variables)

    def state_of(self, params: Tree) -> State:
        """Returns the state before the first step with given parameters, in their shardings."""
        if self.run.finetune.objective == "preferences" and self.run.finetune.method == "full":
            params = with_reference(params, self.abstract.shardings.params, self.layout.params)
        trained = jax.device_put(trained_only(self.layout.params, params), self.update_shardings)
        where = self.abstract.shardings
        optimizer = jax.jit(self.optimizer.init, out_shardings=where.optimizer)(trained)
        step, healthy = jax.device_put(
            (np.zeros((), np.int32), np.ones((), np.bool_)), (where.step, where.healthy)
        )
        return State(step, healthy, params, optimizer)

    def accepted_compiler_options(self) -> dict[str, str]:
        """Returns the XLA options of run and chip that the installed compiler knows.

        Simulated devices have none.

        Raises ConfigError for a word of the run that is no option.
        """
        refused = self.refused_compiler_options
        return {name: value for name, value in self.compiler_options.items() if name not in refused}

    @functools.cached_property
    def refused_compiler_options(self) -> tuple[str, ...]:
        """Options of the chip that the installed compiler does not know.

        Raises ConfigError for those of the run.
        """
        wanted, words = self.compiler_options, self.run.training.compiler_options
        if not wanted:
            return ()
        refused = refused_options(self.mesh.devices.flat[0], tuple(wanted.items()))
        fixed = self.machine.determinism.compiler_options if self.fixes_bits else {}
        own = [
            name
            for name in refused
            if name in fixed or any(word.startswith(f"{name}=") for word in words)
        ]
        if own:
            option = "deterministic" if own[0] in fixed else "compiler-options"
            raise ConfigError(
                f"--training.{option} {own[0]}={wanted[own[0]]}",
                f"the compiler of {self.mesh.devices.flat[0].device_kind} has no such option",
                "leave it out, or install a compiler that has it",
            )
        return refused


def initial_arrays(device_run: "DeviceRun") -> tuple[Tree, tuple[Tree, ...]]:
    """Returns parameters and variables before the first step."""
    return device_run.run.model.initial_arrays(device_run, _draw_params)


# A model may bring four functions of its own: `gradients`, `initial_arrays`, `abstract_batch`,
# `local_model`. Each gets the one of this room that a model made of layers calls, and a wrapped
# model does not.


def _draw_params(model: Model, device_run: "DeviceRun") -> tuple[Tree, tuple[Tree, ...]]:
    """Draws the parameters of a model made of layers; it has no variables."""
    training, where = device_run.run.training, device_run.abstract.shardings.params
    return init_params(
        device_run.layout.params, where, seed=training.seed, dtype=training.param_dtype
    ), ()


def abstract_batch_of(device_run: "DeviceRun") -> Any:
    """Returns a batch of a run as abstract arrays."""
    return device_run.run.model.abstract_batch(device_run, _abstract_tokens)


def _abstract_tokens(model: Model, device_run: "DeviceRun") -> Batch:
    training, where = device_run.run.training, device_run.batch_sharding
    tokens, weights = (
        jax.ShapeDtypeStruct((training.batch, training.seq), dtype, sharding=where)
        for dtype in (jnp.int32, jnp.float32)
    )
    return Batch(tokens, tokens, tokens, tokens, weights)


def param_specs(placements: Tree, which: str) -> Tree:
    """Returns the PartitionSpecs of a tree of placements. which: field of `Placements`."""
    return jax.tree.map(
        lambda p: to_spec(getattr(p, which)),
        placements,
        is_leaf=lambda x: isinstance(x, Placements),
    )


def local_model_of(settled: Settled) -> LocalModel:
    """Returns the forward pass of one device, with every decision made."""
    found: LocalModel = settled.run.model.local_model(settled, _local_model_by_layers)
    return found


def _local_model_by_layers(model: Model, settled: Settled) -> LocalModel:
    """Returns the forward pass of a model made of layers."""
    execution = execution_of(settled)
    return LocalModel(model, settled.run.training, settled.layout.stages, execution)


def place_on_devices(run: Run, mesh: Mesh) -> DeviceRun:
    """Places `run` on the devices of `mesh`.

    Raises ConfigError where the run does not fit the mesh, or these devices cannot do what it asks
    for.
    """
    settled = _settle_on(run, mesh)
    layout = settled.layout
    optimizer = _build_update_rule(settled, mesh)
    optimizer_shardings = shardings(mesh, layout.placements, "optimizer")
    return DeviceRun(
        settled.run,
        layout,
        settled.machine,
        mesh,
        optimizer,
        _abstract_state(settled, mesh, optimizer),
        update_shardings=trained_only(layout.params, optimizer_shardings),
        learning_rate=build_lr_schedule(run.optimizer, settled.run.training.steps),
        local_model=local_model_of(settled),
    )


def _settle_on(run: Run, mesh: Mesh) -> Settled:
    """Returns the run with every decision made for the devices of `mesh`."""
    # A JAX mesh does not say which axis crosses slices; the run's own mesh does.
    shape = run.mesh
    if shape is None or shape.degrees() != dict(mesh.shape):
        shape = MeshShape(**mesh.shape)
    settled = settle(place_run(run, shape), machine_of_mesh(mesh))
    settled.check()
    if settled.fixes_bits:
        fix_communication()
    return settled


def _build_update_rule(settled: Settled, mesh: Mesh) -> UpdateRule:
    """Returns the update of the trained parameters, with a layer map if the optimizer takes one."""
    run = settled.run
    layout = settled.layout
    described = trained_only(layout.params, layout.params)
    layer_map = None
    if takes_layers(run.optimizer.name) and run.model.states_layers:
        from meshwright.step.matrices import LayerMap

        placements = trained_only(layout.params, layout.placements)
        compute_dtype = jnp.dtype(run.training.compute_dtype)
        layer_map = LayerMap(mesh, layout.shape, described, placements, compute_dtype)
    return build_update_rule(run.optimizer, run.training, described, layer_map)


def _abstract_state(settled: Settled, mesh: Mesh, optimizer: UpdateRule) -> State:
    """Returns the state of the run as `ShapeDtypeStruct`s with their shardings."""
    replicated = NamedSharding(mesh, PartitionSpec())
    params = _abstract_params(settled, mesh)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    healthy: Any = jax.ShapeDtypeStruct((), jnp.bool_, sharding=replicated)
    variables = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
        for path, x in settled.run.model.variables().items()
    }
    state = State(
        step, healthy, params, _abstract_optimizer_state(settled, mesh, optimizer, params)
    )
    if not variables:
        return state
    return dataclasses.replace(state, variables=(variables,))


def _abstract_params(settled: Settled, mesh: Mesh) -> Tree:
    """Returns the sharded parameters as `ShapeDtypeStruct`s."""
    layout = settled.layout
    param_dtype = settled.run.training.param_dtype

    def abstract(p: Param, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.stored or param_dtype), sharding=sharding)

    return tree_map(abstract, layout.params, shardings(mesh, layout.placements, "at_rest"))


def _abstract_optimizer_state(
    settled: Settled, mesh: Mesh, optimizer: UpdateRule, params: Tree
) -> Any:
    """Returns the optimizer state as `ShapeDtypeStruct`s. params: all parameters, abstract."""
    layout = settled.layout
    trained = trained_only(layout.params, params)
    placements = trained_only(layout.params, layout.placements)
    state, places = place_optimizer_state(optimizer, trained, placements, layout.shape)
    leaves, treedef = jax.tree.flatten(state)
    placed = []
    for leaf, place in zip(leaves, places, strict=True):
        sharding = NamedSharding(mesh, to_spec(place))
        placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
    return jax.tree.unflatten(treedef, placed)
