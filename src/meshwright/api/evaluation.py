"""The verb `evaluate`: the loss of a checkpoint."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.api.verb import (
    Call,
    CheckpointOptions,
    Outcome,
    start_devices,
)
from meshwright.config import MeshShape
from meshwright.hardware.agreement import failing_together
from meshwright.models.model import Model
from meshwright.storage.paths import default_cache_folder, path_of, place_of
from meshwright.trainer import evaluation, loop
from meshwright.trust import own


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CheckpointOptions):
    """Compute loss, perplexity and bits per byte of a run's last checkpoint, or of hf:PATH, on its
    held-out text or on --data.
    """

    folder: Annotated[str, tyro.conf.Positional]
    """Output folder of a run, or hf:PATH of a Hugging Face model."""
    data: tuple[str, ...] = ()
    """Other text, all of which is evaluated: what `train --data` takes."""
    json: bool = False
    """Print JSON."""

    @failing_together()
    def act(self, call: Call) -> Outcome:
        """Runs `meshwright evaluate`.

        Raises CheckpointError where there is no run, ConfigError without a text.
        """
        shape = self.shape()
        run = evaluation.run_to_evaluate(self.folder, self.data, shape)
        start_devices(self.devices, run.mesh, self.hosts.hosts())
        found = evaluate(self.folder, data=self.data, at=self.at, mesh=shape, devices=self.devices)
        if isinstance(found, evaluation.BatchEvaluation):
            return Outcome(
                "".join(f"{name:<20} {value:.6g}\n" for name, value in found.metrics.items()),
                found.metrics,
            )
        text = (
            f"step {found.step}: loss {found.loss:.4f} per token over {found.samples} samples "
            f"({found.tokens:,} tokens, {found.text_bytes:,} bytes)\n"
            f"perplexity {found.perplexity:.5g} per token, {found.bits_per_byte:.4f} bits per "
            f"byte\n"
        )
        more = {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        return Outcome(text, {**dataclasses.asdict(found), **more})


def evaluate(
    out: str | Path,
    *,
    data: Sequence[str] = (),
    at: int | None = None,
    mesh: str | MeshShape | None = None,
    devices: int | None = None,
    model: Model | None = None,
    cache: Path | None = None,
) -> evaluation.Evaluation | evaluation.BatchEvaluation:
    """Evaluates a run's checkpoint on its held-out text or batches, or on the text `data`.

    out: output folder of the run, or hf:PATH of a Hugging Face model.  data: other text, all of
    which is evaluated.
    at: step of the checkpoint; None takes the last.  mesh: mesh to evaluate on; None takes the
    run's own.
    devices: use the first so many; None uses all.  model: wrapped model of the run, where run.json
    cannot name it.
    Raises CheckpointError, ConfigError, DataError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "evaluated", progress="none", cache=tmp)
        >>> evaluation = mw.evaluate(tmp / "evaluated", mesh="fsdp=2", cache=tmp)
        >>> evaluation.step, abs(evaluation.loss - result.held_out_loss) < 1e-3
        (2, True)
    """
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    out = place_of(str(out))
    run = evaluation.run_to_evaluate(out, own(tuple(data)), shape, model)
    evaluation.check_source(out, at)
    prepared = loop.prepare_run(
        run, cache=path_of(cache or default_cache_folder()), devices=devices, weights=out
    )
    return evaluation.evaluate_prepared(prepared, out, bool(data), at)
