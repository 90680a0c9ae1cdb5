"""The verb `parity`: a run on two meshes, by two programs,
or on other devices, compared tensor by tensor."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Self

import jax
import tyro

from meshwright.api.verb import (
    SIMULATED,
    Base,
    Call,
    HostOptions,
    Outcome,
    RunOptions,
    refuse_options,
    start_devices,
)
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, by_class, reason_of
from meshwright.hardware.agreement import answer_of_the_first, failing_together
from meshwright.ranges import PositiveInt
from meshwright.runs.run import Run
from meshwright.storage.paths import default_cache_folder, path_of
from meshwright.trainer import loop
from meshwright.trainer.divergence import Difference
from meshwright.trainer.hosts import agree_on
from meshwright.trainer.other_program import (
    DEVICES,
    TRANSFORMERS,
    compare_devices,
    compare_program,
    compare_transformers,
    is_program,
)
from meshwright.trainer.parity import Parity, check_processes, compare_meshes
from meshwright.trainer.relations import check_run
from meshwright.trainer.transformers_source import check_installed
from meshwright.trust import own
from meshwright.views.result_pages import parity_page

_STEPS = 5
"""Steps that are compared where --steps does not say."""
_TOKENS = 128
"""Tokens that are compared with `transformers`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityOptions(RunOptions):
    """Compare RECIPE (by default `tiny`) with itself on another mesh, by another program or on
    other devices, in float32, and name the first tensor whose difference is more than rounding
    explains."""

    against: Annotated[str, tyro.conf.arg(metavar="MESH|transformers|devices|PATH")] = "data=1"
    """The other mesh, as axis=degree,...; `transformers`, for hf:PATH; `devices`, the same mesh
    with each part computed by another device; or the folder of another checkout or Python
    environment."""
    tensors: bool = False
    """Compare the tensors of the first step on two meshes even where losses and gradients agree."""
    tokens: PositiveInt = _TOKENS
    """Tokens that are compared with `transformers`, in two documents of one sequence."""
    text: Path | None = None
    """File whose beginning is compared with `transformers`, instead of a text of Meshwright's."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    json: bool = False
    """Print JSON."""

    @classmethod
    def of(cls, base: Base) -> Self:
        """Returns the options before any is given: a few steps, whatever the recipe has."""
        training = dataclasses.replace(base.run.training, steps=_STEPS)
        return cls(run=dataclasses.replace(base.run, training=training))

    @failing_together()
    def act(self, call: Call) -> Outcome:
        """Runs `meshwright parity`; the exit code is 1 where the two diverge."""
        run = self.run
        if self.against == TRANSFORMERS:
            check_installed()
            refuse_options(
                self, ["tensors"], "--against transformers", "leave it out: all are compared"
            )
            start_devices(1, None)
        else:
            refuse_options(
                self, ["tokens", "text"], f"--against {self.against}", "--against transformers"
            )
            size = run.mesh.size if run.mesh else SIMULATED
            if not (self.against == DEVICES or is_program(self.against)):
                size = max(size, MeshShape.parse(self.against).size)
            start_devices(size, None, self.hosts.hosts())
        result = parity(
            run,
            self.against,
            steps=run.training.steps,
            tensors=self.tensors,
            tokens=self.tokens,
            text=self.text,
        )
        record: dict[str, Any] = {
            "meshes": result.meshes,
            "unequal_initial": result.unequal_initial,
            "steps": [dataclasses.asdict(step) for step in result.steps],
            "devices": result.devices,
            "first_divergence": result.first_divergence,
            "first_tensor": _record(result.first_tensor),
        }
        if result.tensors is not None:
            record["tensors"] = [_record(difference) for difference in result.tensors.differences]
            record["not_compared"] = result.tensors.only
        return Outcome(parity_page(result).print, record, 1 if result.first_divergence else 0)


def _record(difference: Difference | None) -> dict[str, Any] | None:
    """Returns the difference of a tensor as JSON values."""
    if difference is None:
        return None
    return {
        "tensor": str(difference.name),
        "layer": difference.name.layer,
        "differs_by": difference.largest,
        "rounding_explains": difference.rounding,
        "explained": difference.is_explained,
        "place": difference.place,
    }


def parity(
    run: Run,
    against: MeshShape | str = "data=1",
    *,
    steps: int = 5,
    tensors: bool = False,
    tokens: int = _TOKENS,
    text: str | Path | None = None,
    cache: Path | None = None,
    devices: int | None = None,
) -> Parity:
    """Compares a run with itself on the mesh `against`,
    by another program or on other devices, in float32.

    against: a mesh, of which `steps` steps are compared; "transformers", for a run of hf:PATH;
    "devices", the same mesh with each part computed by another device; or the folder of another
    checkout or Python environment. All but meshes compare the tensors of one step, in the order of
    computation, with what rounding explains.
    tensors: whether those are compared on two meshes even where losses and gradients agree.
    tokens, text: length of what is compared with `transformers`, and a file that begins with it.
    cache: folder of token files and compiled programs; None takes the user's cache folder.
    devices: use the first so many; None uses all. A run without a mesh takes the default mesh over
    them. Of several processes all compute the run's mesh; a mesh `against` that fits process 0 is
    computed by it alone. Raises ConfigError where the run does not fit one of the meshes,
    DataError, HostError, and WeightsError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, batch=2, seq=32)
        >>> print(mw.parity(run, against="data=1", steps=1, cache=tmp).first_divergence)
        None
    """
    run = own(run)
    if against == TRANSFORMERS:
        check_installed()
        return compare_transformers(run, tokens, _read(text))
    folder = path_of(cache or default_cache_folder())
    names_program = answer_of_the_first(
        lambda: isinstance(against, str) and against != DEVICES and is_program(against)
    )
    if against == DEVICES or names_program:
        check_run(run, run.mesh, starts=False)
        prepared = loop.prepare_run(run, cache=folder, devices=devices, weights="")
        if against == DEVICES:
            return compare_devices(prepared)
        return compare_program(prepared, Path(str(against)), folder)
    other = MeshShape.parse(against) if isinstance(against, str) else against
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        agree_on(run)
    check_processes(run.mesh, other)
    check_run(run, other, starts=False)
    prepared = loop.prepare_run(run, cache=folder, devices=devices, weights="")
    return compare_meshes(prepared, other, steps=steps, tensors=tensors)


def _read(text: str | Path | None) -> str | None:
    """Returns the text of a file. Raises ConfigError where it cannot be read."""
    if text is None:
        return None
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise by_class(
            error, ConfigError(f"--text {text}", reason, "a file of plain text")
        ) from error
