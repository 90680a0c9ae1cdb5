"""The `Run`: one frozen value that describes a training run.

Its parts: model, mesh, layout, training, optimizer, data.
"""

import dataclasses
import json
from typing import Annotated, Any

import tyro

from meshwright.config import Data, Faults, MeshShape, Optimizer, Training
from meshwright.declarations import TEXT_ONLY, changes
from meshwright.fine_tuning import FineTune
from meshwright.formatting import Shown
from meshwright.models.model import Model
from meshwright.plugins import keep_names, name_of
from meshwright.ranges import NonNegativeInt, Ranged
from meshwright.storage.tiers import LocalCheckpoints

# On the command line a mesh is one word.
_MESH = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="AXIS=N,...",
    instance_from_str=lambda words: MeshShape.parse(words[0]),
    is_instance=lambda value: value is None or isinstance(value, MeshShape),
    str_from_instance=lambda shape: [str(shape) if shape else "auto"],
)

# No option: without a form of its own, the command line would look for one in the values.
_CHOSEN = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda words: json.loads(words[0]),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda chosen: [json.dumps(chosen)],
)


@dataclasses.dataclass(frozen=True)
class Run(Shown, Ranged):
    """Training run. The same Run gives the same numbers on any mesh.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2,fsdp=2", steps=100)
        >>> run.training.steps
        100
    """

    model: Model
    """Model family and its configuration."""
    mesh: Annotated[MeshShape | None, _MESH] = None
    """Degrees of the mesh axes; None uses all devices found."""
    layout: Annotated[str, changes("program", "plan")] = "auto"
    """Layout of tensors on the mesh: fsdp, zero1, folded, folded_zero1, or module:attribute of a
    `Layout`. `auto` is fsdp; on a known chip zero1 for pipelines with `data`, and folded where that
    is predicted to be faster."""
    fsdp_min_size: Annotated[NonNegativeInt, changes("program", "evaluation", "plan")] = 2**12
    """Parameters of fewer elements (per layer), and norms and biases, are not sharded over `fsdp`.
    """
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    faults: Faults = Faults()
    local_checkpoints: LocalCheckpoints = LocalCheckpoints()
    finetune: FineTune = FineTune()
    reporters: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--report"]), changes("loop")] = ()
    """Metrics also to tensorboard, wandb, or module:attribute of `(Path, Run) -> Reporter`."""
    init_from: Annotated[str | None, changes("loop", resumes=False), TEXT_ONLY] = None
    """Weights to start from, at step 0: hf:PATH of a Hugging Face folder, or a run's output folder;
    None draws them."""
    name: Annotated[str, changes("loop")] = "run"
    """Name of the output folder."""
    chosen: Annotated[dict[str, Any], _CHOSEN, tyro.conf.Suppress] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    """Values that the user gave, by dotted field and as given (`runs.recipe.with_chosen`). Nothing
    is computed from them: they tell a choice from what was resolved on the machine and the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_names(self, "layout")
        object.__setattr__(
            self, "reporters", tuple(name_of(reporter) for reporter in self.reporters)
        )
