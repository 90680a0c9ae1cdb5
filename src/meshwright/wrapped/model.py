"""A model of one's own as a Run's model: `wrap`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

import jax

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import MeshShape, Training
from meshwright.declarations import changes
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.hardware.mesh import build_mesh
from meshwright.models.model import ByLayers, Model
from meshwright.planner.work import Work
from meshwright.plugins import expect, load, name_of
from meshwright.ranges import NonNegativeInt
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.recipe import change_fields
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.sharding.params import Param
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.storage.paths import path_of
from meshwright.trust import OwnName, own
from meshwright.wrapped import prepared, step
from meshwright.wrapped.batches import find_held_out, find_source
from meshwright.wrapped.modules import find_adapter
from meshwright.wrapped.parts import WrappedParts, describe_model
from meshwright.wrapped.placing import check_rules, describe_params, place_wrapped, read_rules
from meshwright.wrapped.work import forward_flops_of_loss, work_of_loss
from xlacensus.program_census import ProgramFacts

Rules = Mapping[str, Any]
"""Regular expression of paths -> a PartitionSpec, or axis names of the dimensions."""


@dataclasses.dataclass(frozen=True)
class Wrapped(Model):
    """A model of one's own as the model of a Run: made by `wrap`.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> def loss(params, batch):
        ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
        >>> batches = lambda step: {"x": np.ones((8, 4), "f"), "y": np.ones((8, 2), "f")}
        >>> model = mw.wrap({"w": jnp.zeros((4, 2))}, loss, batches)
        >>> run = model.run(mesh="fsdp=8", steps=3, learning_rate=0.1)
        >>> mw.train(run, out=tmp / "wrapped", progress="none", cache=tmp).steps
        3
    """

    unit: ClassVar[str] = "examples"
    reads_text: ClassVar[bool] = False
    states_layers: ClassVar[bool] = False
    vocab: NonNegativeInt | None = 0
    """No vocabulary: batches are arrays."""
    name: Annotated[str, changes()] = ""
    """`FILE.py:attribute` of the object, by which another process finds it;
    empty where it has no such name."""

    @functools.cached_property
    def parts(self) -> WrappedParts:
        """Module, loss and data.
        Raises ConfigError where a run file names no object that has them."""
        if not self.name:
            raise ConfigError(
                "the wrapped model of this run",
                "it was not a top-level object of a file, so run.json could not name it",
                "pass the model: model=mw.wrap(...), or define it at the top level of a .py file",
            )
        found = load("wrapped model", self.name)
        return expect(found, Wrapped, f"wrapped model {self.name}", "the result of mw.wrap").parts

    def named(self) -> "Wrapped":
        """Returns the model with its name, where it is a top-level object of a module or file."""
        if self.name:
            return self
        try:
            name = name_of(self)
        except MeshwrightError:
            return self
        return _with_parts(Wrapped(name=name), self.parts)

    def run(self, *, mesh: str | MeshShape | None = None, **changes: Any) -> Run:
        """Returns a Run of the model with the batch of its data, in the model's own precision.

        mesh: as `data=2,fsdp=4`; None takes all devices as `fsdp`.
        changes: fields of `Run`, or of its training or optimizer, by name.
        Raises ConfigError for an unknown field.
        """
        training = Training(batch=self.parts.source.batch_size, compute_dtype="float32")
        return change_fields(Run(model=self.named(), training=training), mesh, own(changes))

    def options_of_child(self) -> list[str]:
        """Returns the options by which another process imports the model,
        whose code this one runs already.

        Raises ConfigError for one that it could not import.
        """
        name = self.named().name if self.parts else ""
        if not name:
            raise ConfigError(
                "compiling a wrapped model in another process",
                "it is not a top-level object of a file, so that process cannot import it",
                "define it at the top level of a .py file: model = mw.wrap(...)",
            )
        # A name from a file stands in the file that the other process reads,
        # and is no word of the user's.
        return ["--model.name", name] if isinstance(name, OwnName) else []

    def restore(self, out: str | Path, *, at: int | None = None) -> Any:
        """Returns the trained model of an output folder on the first device, in evaluation mode.

        A module of NNX or Equinox, an Equinox module with its state, a pytree;
        of a Linen module its variables.
        at: step of the checkpoint; None takes the last. Raises CheckpointError.
        """
        folder = path_of(out)
        run = dataclasses.replace(run_in_folder(folder), model=self, mesh=MeshShape())
        placed = place_on_devices(run, build_mesh(MeshShape(), jax.devices()[:1]))
        with Checkpoints(folder / "checkpoints", max_to_keep=None) as checkpoints:
            state, _ = checkpoints.restore(placed, at)
        # In the module's own types.
        params = {name: x.astype(self.parts.params[name].dtype) for name, x in state.params.items()}
        return self.parts.adapter.made_of(params, state.variables[0] if state.variables else {})

    def default_mesh(self, devices: int) -> MeshShape:
        """Returns all devices as `fsdp`."""
        return MeshShape(fsdp=devices)

    def units(self, seq: int) -> int:
        """Returns 1: a sample is one example."""
        return 1

    def place(self, run: Run, shape: MeshShape, by_layers: ByLayers) -> PlacedRun:
        """Returns the run placed on a mesh, by rules and annotations."""
        return place_wrapped(self, run, shape)

    def forward_flops(self, seq: int, by_layers: ByLayers) -> dict[str, float]:
        """Returns the FLOPs of the loss's matmuls, read from its jaxpr."""
        return forward_flops_of_loss(self, seq)

    def local_model(self, settled: Any, by_layers: ByLayers) -> None:
        """A wrapped model has its forward pass in the loss (wrapped/step.py)."""

    def abstract_batch(self, device_run: DeviceRun, by_layers: ByLayers) -> Any:
        """Returns a batch of the model's own data as abstract arrays."""
        return self.parts.source.abstract(sharding=device_run.batch_sharding)

    def initial_arrays(
        self, device_run: DeviceRun, by_layers: ByLayers
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns the module's parameters and variables before the first step."""
        return step.draw_arrays(self, device_run)

    def gradients(self, device_run: DeviceRun, by_layers: ByLayers) -> Callable[..., Any]:
        """Returns the function that computes the gradients of the loss."""
        return step.wrapped_gradients(self, device_run)

    def prepare(
        self, run: Run, devices: list[jax.Device], by_layers: ByLayers
    ) -> prepared.PreparedModel:
        """Returns the run on its devices, with the model's own batches."""
        return prepared.prepare_wrapped(self, run, devices)

    def evaluate(
        self,
        prepared_run: prepared.PreparedModel,
        source: str | Path,
        whole: bool,
        at: int | None,
        by_layers: ByLayers,
    ) -> Any:
        """Returns the metrics of a checkpoint on held-out batches."""
        return prepared.evaluate_wrapped(prepared_run, source, whole, at)

    def work(self, placed: PlacedRun, by_layers: ByLayers) -> Work:
        """Returns the work of the loss as the planner prices it, read from its jaxpr."""
        return work_of_loss(self, placed)

    def train_step_facts(self, device_run: DeviceRun, by_layers: ByLayers) -> ProgramFacts:
        """Returns what the census knows of the compiled train step."""
        return prepared.train_step_facts(self, device_run)

    def spec(self) -> NoReturn:
        """Raises ConfigError: what is asked for needs to know the layers of a model."""
        raise ConfigError(
            "the layers of a wrapped model",
            "only the module knows them; show, rehearse, generate and convert are for model "
            "families",
            "train, evaluate, plan, prove or parity; or a family of your own (docs: Adding things)",
        )

    def shrunk(self, shape: MeshShape, layers: int) -> NoReturn:
        """Raises ConfigError, like `spec`."""
        self.spec()

    def params(self) -> dict[str, Param]:
        """Returns the descriptions of all parameters, by path."""
        return describe_params(self.parts)

    def variables(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns what the loss changes besides: batch statistics and the like, by path."""
        return self.parts.variables


def _with_parts(model: Wrapped, parts: WrappedParts) -> Wrapped:
    model.__dict__["parts"] = parts
    return model


def wrap(
    model: Any,
    loss: Callable[..., Any],
    data: Any,
    *,
    held_out: Any = None,
    evaluate: Callable[..., Any] | None = None,
    rules: Rules | None = None,
    axes: Mapping[str, str | None] | None = None,
    local_batch: bool = False,
) -> Wrapped:
    """Returns a module of Flax NNX, Flax Linen or Equinox, or a pytree of arrays,
    as the model of a Run.

    model: the module or pytree; an Equinox module with its state as `(module, state)`; or a
    function of a key that makes one, whose arrays are then created in their shardings.
    loss: `loss(model, batch)` or `loss(model, batch, key)` -> the mean
    over the batch's examples, or (mean, metrics).
    A Linen module is given bound to its variables: `model(x, train=model.training)`. With an
    Equinox state it is `loss(model, state, batch[, key])` -> (mean, state) or (mean, metrics,
    state). Where the metrics have a `weight`, means of devices are averaged by it.
    data: global batches, pytrees of arrays with the batch first: a function of the step (from 0),
    an iterable, or an iterator. `held_out`: a list, or another iterable that can be read again, of
    the batches that are evaluated.
    evaluate: loss on held-out batches; None takes `loss`.
    rules: regular expression of a parameter's path -> PartitionSpec or axis names
    over `fsdp` and `tensor`.
    axes: logical axis of the module's annotations -> mesh axis, or None for whole.
    local_batch: accept a loss that depends on which examples are together (batch statistics, pairs
    of examples), over the examples that a device has; without it such a loss is refused where a
    batch has several parts. Raises ConfigError for an unknown kind of module, a loss that is not
    scalar, or a rule that matches nothing.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, numpy as np
        >>> batches = lambda step: {"x": np.ones((8, 4), "f"), "y": np.zeros(8, int)}
        >>> def loss(model, batch):
        ...     log_probs = jax.nn.log_softmax(model(batch["x"]))
        ...     return -jnp.take_along_axis(log_probs, batch["y"][:, None], 1).mean()
        >>> sorted(mw.wrap(nn.Dense(3), loss, batches).params())
        ['bias', 'kernel']
    """
    source = find_source(data, "data")
    adapter = find_adapter(model, loss, evaluate, source.example)
    parts = describe_model(
        adapter, source, find_held_out(held_out) if held_out is not None else None
    )
    read = read_rules(rules or {})
    parts = dataclasses.replace(parts, rules=read, axes=dict(axes or {}), local_batch=local_batch)
    check_rules(parts)
    return _with_parts(Wrapped(), parts)
