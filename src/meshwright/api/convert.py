"""The verb `convert`: weights in and out."""

import dataclasses
import resource
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from meshwright.api.verb import Call, Outcome
from meshwright.checkpoint.conversion import (
    LARGEST_FILE,
    Conversion,
    Say,
    export_adapter,
    export_weights,
    import_weights,
)
from meshwright.checkpoint.other_programs import (
    import_maxtext_checkpoint,
    import_torch_checkpoint,
)
from meshwright.errors import ConfigError
from meshwright.formatting import format_bytes, format_count
from meshwright.hugging_face.hub import is_hugging_face
from meshwright.hugging_face.maxtext_checkpoints import items_of
from meshwright.hugging_face.torch_checkpoints import is_torch_checkpoint
from meshwright.ranges import NonNegativeInt, PositiveInt, Ranged
from meshwright.storage.paths import in_bucket, path_of, place_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(Ranged):
    """Convert SOURCE into OUT: a Hugging Face folder (or hf:OWNER/MODEL) into the output folder of
    a run, or a run's checkpoint, or one of torchtitan, Megatron or MaxText, into a Hugging Face
    folder. It goes tensor by tensor, and on where it was interrupted.
    """

    source: Annotated[str, tyro.conf.Positional]
    """Folder with config.json and safetensors, hf:OWNER/MODEL, the output folder of a run, or a
    folder of torch.distributed.checkpoint (torchtitan, Megatron) or of Orbax (MaxText) to which the
    model's config.json was copied."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to write; it appears when it is whole."""
    at: NonNegativeInt | None = None
    """Step of the run's checkpoint; by default the last."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the whole model written from a run; by default that of its checkpoint."""
    weights: Literal["merged", "adapter"] = "merged"
    """Weights of a run with adapters (finetune): the whole model with adapters merged, or the
    adapters alone in PEFT's format."""
    max_file_mib: PositiveInt | None = None
    """Largest safetensors file of a Hugging Face folder that is written, in MiB, by default 5 GB; a
    larger tensor has a file of its own."""
    json: bool = False
    """Print JSON."""

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright convert`.

        Raises WeightsError, CheckpointError, and ConfigError where OUT exists.
        """
        # Fingerprints are all that is computed.
        jax.config.update("jax_platforms", "cpu")
        largest_file = None if self.max_file_mib is None else self.max_file_mib * 2**20
        done = convert(
            self.source,
            self.out,
            at=self.at,
            dtype=self.dtype,
            weights=self.weights,
            largest_file=largest_file,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        notes = "".join(f"note: {note}\n" for note in done.notes)
        shown = (
            f"{notes}{done.out}: {done.architecture}, {format_count(done.parameters)} parameters "
            f"in {done.tensors} "
            f"tensors, {done.dtype}; {format_bytes(peak)} of memory at most\n"
        )
        return Outcome(shown, {**dataclasses.asdict(done), "out": self.out, "peak_bytes": peak})


def convert(
    source: str | Path,
    out: str | Path,
    *,
    at: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    weights: Literal["merged", "adapter"] = "merged",
    largest_file: int | None = None,
    say: Say = lambda line: None,
) -> Conversion:
    """Converts weights between a Hugging Face folder and a run,
    or from another program's checkpoint.

    source: a folder with config.json, `hf:PATH`, `hf:OWNER/MODEL` of the hub, the output folder of
    a run, or a folder of `torch.distributed.checkpoint` (torchtitan, Megatron) or of Orbax
    (MaxText) with the config.json of its model.
    out: folder to write; it must not exist. An interrupted conversion goes on when it is called
    again.
    at: step of a run's checkpoint; None takes the last.
    dtype: type of the whole model written from a run; None keeps that of its checkpoint.
    weights: of a run with adapters: the whole model with them merged,
    or the adapters alone in PEFT's format.
    largest_file: largest safetensors file of a whole model in a Hugging Face folder that is
    written, in bytes; None is 5e9.
    say: called with a line for each parameter. Raises WeightsError, CheckpointError, and
    ConfigError, also for an option that has no effect on this conversion.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=1, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "to convert", progress="none", cache=tmp)
        >>> done = mw.convert(tmp / "to convert", tmp / "huggingface", dtype="bfloat16")
        >>> done.architecture, done.tensors, sorted(file.name for file in done.out.iterdir())[:3]
        ('LlamaForCausalLM', 12, ['SHA256SUMS', 'config.json', 'model.safetensors'])
    """
    text = place_of(str(source))
    folder = path_of(str(source).removeprefix("hf:"))
    out = path_of(out)
    if in_bucket(text) or in_bucket(out):
        raise ConfigError(
            f"converting {source} into {out}",
            "a conversion maps files into memory, which those in a bucket are not",
            "local folders: `meshwright checkpoint move OUT TARGET` and `aws s3 cp` or `gcloud "
            "storage cp` copy them",
        )
    most = LARGEST_FILE if largest_file is None else largest_file
    if not is_hugging_face(text) and (folder / "run.json").is_file():
        if weights == "adapter":
            _check_adapter(text, dtype, largest_file)
            return export_adapter(folder, out, at=at)
        return export_weights(folder, out, at=at, dtype=dtype, largest_file=most, say=say)
    if weights != "merged":
        raise ConfigError(
            f"the adapters of {text}", "it is no run with adapters", "the output folder of a run"
        )
    if is_torch_checkpoint(folder):
        _check_other(folder, "torch.distributed.checkpoint", at, dtype)
        return import_torch_checkpoint(folder, out, largest_file=most, say=say)
    if items_of(folder) is not None:
        _check_other(folder, "MaxText", at, dtype)
        return import_maxtext_checkpoint(folder, out, largest_file=most, say=say)
    if not is_hugging_face(text) and not (folder / "config.json").is_file():
        raise ConfigError(
            f"converting {text}",
            "it has neither config.json (a Hugging Face model) nor run.json (the output folder of "
            "a run)",
            "one of these, or hf:OWNER/MODEL",
        )
    if at is not None or dtype is not None:
        raise ConfigError(
            f"converting {text} at a step or into another type",
            "a Hugging Face folder has one version of its weights, and they keep their type",
            "leave --at and --dtype out; --training.param-dtype is the type in which a run keeps "
            "them",
        )
    if largest_file is not None:
        raise ConfigError(
            f"converting {text} into files of at most {format_bytes(largest_file)}",
            "a Hugging Face folder becomes the output folder of a run, whose checkpoint has no "
            "safetensors files",
            "leave --max-file-mib out",
            "leave largest_file out",
        )
    return import_weights(text, out, say)


def _check_adapter(source: str, dtype: str | None, largest_file: int | None) -> None:
    """Raises ConfigError for options of a whole model, of which the adapters alone have no use."""
    if dtype is not None:
        raise ConfigError(
            f"the adapters of {source} in {dtype}",
            "adapters are written in float32",
            "leave --dtype out, or --weights merged for the whole model in that type",
        )
    if largest_file is not None:
        raise ConfigError(
            f"the adapters of {source} in files of at most {format_bytes(largest_file)}",
            "adapters are one file",
            "leave --max-file-mib out, or --weights merged for the whole model in several files",
            'leave largest_file out, or weights="merged" for the whole model in several files',
        )


def _check_other(folder: Path, program: str, at: int | None, dtype: str | None) -> None:
    """Raises ConfigError for a folder of another program that has no config.json,
    and for options of a run."""
    if at is not None or dtype is not None:
        raise ConfigError(
            f"converting {folder} at a step or into another type",
            f"a folder of {program} has one step, and its weights keep their type",
            "leave --at and --dtype out",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"converting {folder}",
            f"it is a checkpoint of {program}, whose tensors do not tell heads, norms and "
            "frequencies",
            f"the model's config.json copied to {folder}: for Llama 3, that of its Hugging Face "
            "folder",
        )
