"""A placed run on devices: shardings, abstract state, optimizer and kernels, from which the steps are built."""

import dataclasses
import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.comm.hierarchical import Axes, DcnAxis
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import ring_order, torus_degrees
from meshwright.models.forward import LocalModel
from meshwright.models.kernels.choose import Hardware, Kernels, kernels_of
from meshwright.models.remat import REMAT_POLICIES, gathered_within_reason
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import Param, Tree, init_params, plan_gathers, shardings, trained_only, tree_map
from meshwright.sharding.placement import Placements, axes_of, to_spec
from meshwright.step.optimizers import ELEMENTWISE, UpdateRule, build_update_rule, place_optimizer_state
from meshwright.step.state import State

_RING = 4
"""Least chips along a dimension of a TPU slice that has wraparound links."""
BATCH_SPEC = PartitionSpec(BATCH_AXES, None)


@dataclasses.dataclass(frozen=True)
class DeviceRun:
    """A placed run on a mesh of devices, real, simulated, or described for compilation alone."""

    placed: PlacedRun
    mesh: Mesh
    optimizer: UpdateRule
    abstract: State
    """`ShapeDtypeStruct`s with their shardings."""
    kernels: Kernels
    """Attention kernels of these devices."""
    grouped_matmul: Any = None
    """`GroupedMatmul` of these devices (kernels/grouped.py); None for a model without experts."""

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

    def with_batch(self, sequences: int) -> "DeviceRun":
        """Returns the run with as many sequences per step; no placement depends on them."""
        run = dataclasses.replace(self.run, training=dataclasses.replace(self.run.training, batch=sequences))
        return dataclasses.replace(self, placed=dataclasses.replace(self.placed, run=run))

    @functools.cached_property
    def local_model(self) -> LocalModel:
        """Forward pass of one device."""
        training = self.run.training
        gather = plan_gathers(
            self.params,
            self.placements,
            compute_dtype=jnp.dtype(training.compute_dtype),
            reduce_dtype=jnp.dtype(training.reduce_dtype),
            dcn=self.links,
            summed=self.summed_in_backward,
        )
        if training.matmul_precision != "compute":
            from meshwright.models.blocks.quantised import low_precision_gather  # loaded for runs that ask for it

            gather = low_precision_gather(gather, self.params, self.placements, training.matmul_precision)
        if self.run.finetune.method == "lora":
            from meshwright.models.adapters import adapter_gather  # loaded for runs with adapters

            gather = adapter_gather(gather, self.run.finetune.scale)
        placed, ring = self.placed, self._tensor_ring()
        return LocalModel(
            self.run.model,
            training,
            gather,
            placed.sequence,
            placed.stages,
            self.kernels,
            self.grouped_matmul.multiply if self.grouped_matmul else jax.lax.ragged_dot,
            self._gathered_ahead(),
            ring,
            self._attention_pieces() if ring else 1,
            self._preferences(),
        )

    def _preferences(self) -> Any:
        if self.run.finetune.objective != "preferences":
            return None
        from meshwright.models.preferences import Preferences  # loaded for runs on preferences

        return Preferences(self.run.finetune.beta)

    @functools.cached_property
    def summed_in_backward(self) -> Tree:
        """Tree of the batch axes over which the backward pass sums a gradient, layer by layer.

        For the matmuls of layers that replicas share (`data`), whose sums then overlap with the rest of the backward
        pass. With several microbatches, or stages, or in low precision, they are summed once, at the end.
        """
        training = self.run.training
        at_the_end = training.microbatches > 1 or self.shape.stage > 1 or training.matmul_precision != "compute"

        def axes(p: Param, where: Placements) -> Axes:
            if at_the_end or p.role is None or "L" not in p.dims or p.frozen:
                return ()
            return tuple(a for a in BATCH_AXES if self.shape.degrees()[a] > 1 and a not in axes_of(where.optimizer))

        return tree_map(axes, self.params, self.placements)

    def _gathered_ahead(self) -> dict[str, tuple[str, ...]]:
        """Parameters that are gathered one layer ahead, by stack; none where nothing is gathered or recomputed."""
        training = self.run.training
        policy = REMAT_POLICIES[training.remat]
        frozen = self.run.finetune.method
        whole = gathered_within_reason(training, self.shape.stage, self.placed.spec.period, frozen) is not None
        # With offloading it is the setting that was compiled: Llama 3 8B on v6e (docs/overlap.md).
        automatic = bool(self.links.torus) or (bool(policy.offloaded) and self.mesh.devices.flat[0].platform == "tpu")
        if training.gather_ahead == "none" or whole or (training.gather_ahead == "auto" and not automatic):
            return {}
        from meshwright.models.gather_ahead import gathered_ahead  # not needed on simulated devices

        spec = self.placed.spec
        names = {stack: gathered_ahead(self.params[stack]) for stack, layers in spec.stacks.items() if layers > 1}
        return {
            stack: chosen
            for stack, chosen in names.items()
            if any(self.placements[stack][n].at_rest != self.placements[stack][n].in_use for n in chosen)
        }

    def _tensor_ring(self) -> tuple[int, ...]:
        """Devices of `tensor` in the order of a ring; () where its collectives are not split."""
        strategy, platform = self.run.training.tensor_strategy, self.mesh.devices.flat[0].platform
        if self.shape.tensor == 1 or strategy == "gather" or (strategy == "auto" and platform != "tpu"):
            return ()
        return ring_order(dict(torus_degrees(self.mesh)).get("tensor", (self.shape.tensor,)))

    def _attention_pieces(self) -> int:
        """Most pieces of the batch whose attention overlaps with another's sums over `tensor`."""
        training, shape, device = self.run.training, self.shape, self.mesh.devices.flat[0]
        if shape.context > 1 or training.matmul_precision != "compute":
            return 1
        if device.platform == "tpu":
            from meshwright.hardware.chips import chip_name  # not needed on simulated devices
            from meshwright.hardware.compiler_options import SPARSE_CORE_CHIPS

            if chip_name(device.device_kind) not in SPARSE_CORE_CHIPS:
                return 1
        return 4

    @functools.cached_property
    def links(self) -> DcnAxis:
        """Levels of links under the mesh axes: slices, and dimensions of the torus."""
        spans = torus_degrees(self.mesh)
        if not spans:
            return self.placed.dcn
        from meshwright.hardware.chips import chip_name  # not needed on simulated devices
        from meshwright.hardware.compiler_options import GATHERS_IN_LEVELS

        if chip_name(self.mesh.devices.flat[0].device_kind) not in GATHERS_IN_LEVELS:
            return self.placed.dcn
        torus = ((axis, _gather_levels(degrees)) for axis, degrees in spans)
        levels = tuple((axis, degrees) for axis, degrees in torus if len(degrees) > 1)
        return dataclasses.replace(self.placed.dcn, torus=levels)

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
        training, where = self.run.training, self.state_shardings.params
        return self.state_of(init_params(self.params, where, seed=training.seed, dtype=training.param_dtype))

    def state_of(self, params: Tree) -> State:
        """Returns the state before the first step with given parameters, in their shardings."""
        where = self.state_shardings
        if self.run.finetune.objective == "preferences" and self.run.finetune.method == "full":
            from meshwright.models.preferences import with_reference

            params = with_reference(params, where.params, self.params)
        sharded = shardings(self.mesh, self.placements, "optimizer")
        trained, sharded = (trained_only(self.params, tree) for tree in (params, sharded))
        optimizer = jax.jit(self.optimizer.init, out_shardings=where.optimizer)(jax.device_put(trained, sharded))
        step, healthy = jax.device_put((np.zeros((), np.int32), np.ones((), np.bool_)), (where.step, where.healthy))
        return State(step, healthy, params, optimizer)

    def compiler_options(self) -> dict[str, str]:
        """Returns the XLA options of run and chip that the installed compiler knows; none on simulated devices.

        Raises ConfigError for a word of the run that is no option.
        """
        refused = self.refused_compiler_options
        return {name: value for name, value in self._wanted_options.items() if name not in refused}

    @functools.cached_property
    def refused_compiler_options(self) -> tuple[str, ...]:
        """Options of the chip that the installed compiler does not know. Raises ConfigError for those of the run."""
        wanted, words = self._wanted_options, self.run.training.compiler_options
        if not wanted:
            return ()
        from meshwright.hardware.compiler_options import refused_options  # not needed on simulated devices

        refused = refused_options(self.mesh.devices.flat[0], tuple(wanted.items()))
        own = [name for name in refused if any(word.startswith(f"{name}=") for word in words)]
        if own:
            raise ConfigError(
                f"--training.compiler-options {own[0]}={wanted[own[0]]}",
                f"the compiler of {self.mesh.devices.flat[0].device_kind} has no such option",
                "leave it out, or install a compiler that has it",
            )
        return refused

    @functools.cached_property
    def _wanted_options(self) -> dict[str, str]:
        device, words = self.mesh.devices.flat[0], self.run.training.compiler_options
        if device.platform == "cpu" and words == ("auto",):
            return {}
        from meshwright.hardware.chips import chip_name  # not needed on simulated devices
        from meshwright.hardware.compiler_options import compiler_options_of

        options = compiler_options_of(chip_name(device.device_kind), words)
        return {} if device.platform == "cpu" else options


def _gather_levels(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the levels of gathers over an axis. degrees: along each dimension of the torus, outermost first.

    XLA compiles a gather over a closed torus of three dimensions to an all-reduce of the whole; where a dimension is
    open it does not. The outer level moves nearly all bytes, so it gets two dimensions.
    """
    closed = sum(degree >= _RING for degree in degrees) == 3
    return (math.prod(degrees[:2]), math.prod(degrees[2:])) if closed else (math.prod(degrees),)


def param_specs(placements: Tree, which: str) -> Tree:
    """Returns the same tree of PartitionSpecs; `which` is a field of `Placements`."""
    return jax.tree.map(lambda p: to_spec(getattr(p, which)), placements, is_leaf=lambda x: isinstance(x, Placements))


def place_on_devices(run: Run, mesh: Mesh) -> DeviceRun:
    """Places `run` on the devices of `mesh`.

    Raises ConfigError where the run does not fit the mesh, or these devices cannot do what it asks for.
    """
    platform = mesh.devices.flat[0].platform
    if run.training.matmul_precision != "compute":
        from meshwright.models.quantisation import check_devices

        check_devices(run.training.matmul_precision, platform, mesh.devices.flat[0].device_kind)
    # A JAX mesh does not say which axis crosses slices; the run's own mesh does.
    same = run.mesh is not None and run.mesh.degrees() == dict(mesh.shape)
    placed = place_run(run, run.mesh if same else MeshShape(**mesh.shape))
    _check_offload(placed.run, platform, mesh.devices.flat[0].device_kind)
    reason = gathered_within_reason(placed.run.training, placed.shape.stage, placed.spec.period, run.finetune.method)
    if run.training.gather_ahead == "layer" and reason is not None:
        raise ConfigError("--training.gather-ahead layer", reason, "--training.gather-ahead auto")
    training = placed.run.training
    dtype = jnp.dtype(training.param_dtype)
    sharded = shardings(mesh, placed.placements, "at_rest")
    params = tree_map(
        lambda p, where: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.stored or dtype), sharding=where),
        placed.params,
        sharded,
    )
    described, placements = (trained_only(placed.params, tree) for tree in (placed.params, placed.placements))
    layer_map = None
    if run.optimizer.name not in ELEMENTWISE:
        from meshwright.step.matrices import LayerMap  # loaded for optimizers of whole matrices

        layer_map = LayerMap(mesh, placed.shape, described, placements, jnp.dtype(training.compute_dtype))
    optimizer = build_update_rule(run.optimizer, training, described, layer_map)
    state, where = place_optimizer_state(optimizer, trained_only(placed.params, params), placements, placed.shape)
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, to_spec(placement)))
        for leaf, placement in zip(jax.tree.leaves(state), where, strict=True)
    ]
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)
    replicated = NamedSharding(mesh, PartitionSpec())
    step, healthy = (jax.ShapeDtypeStruct((), kind, sharding=replicated) for kind in (jnp.int32, jnp.bool_))
    abstract = State(cast(Any, step), cast(Any, healthy), params, state)
    chip = None
    if platform == "tpu":
        from meshwright.hardware.chips import chip_name

        chip = chip_name(mesh.devices.flat[0].device_kind)
    kernels = kernels_of(training, placed.spec, placed.sequence, Hardware(platform, chip))
    grouped = None
    if any(layer.experts for layer in placed.spec.layers):
        from meshwright.models.kernels.grouped import choose_grouped_matmul  # loaded for models with experts

        grouped = choose_grouped_matmul(training.grouped_matmul, platform, training.compute_dtype)
    return DeviceRun(placed, mesh, optimizer, abstract, kernels, grouped)


def _check_offload(run: Run, platform: str, kind: str) -> None:
    remat = run.training.remat
    if REMAT_POLICIES[remat].offloaded and platform not in ("tpu", "cpu"):
        raise ConfigError(
            f"--training.remat {remat} on {kind}",
            "it offloads activations to host memory, which XLA does on TPUs; on GPUs it keeps them on the device "
            "without an error",
            f"--training.remat {'full' if remat == 'offload' else 'projections'}",
        )
