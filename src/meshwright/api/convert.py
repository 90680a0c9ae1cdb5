"""Weights in and out, from Python."""

from pathlib import Path
from typing import Literal

from meshwright.checkpoint.conversion import (
    LARGEST_FILE,
    Conversion,
    Say,
    export_adapter,
    export_weights,
    import_weights,
)
from meshwright.errors import ConfigError
from meshwright.hugging_face.hub import is_hugging_face
from meshwright.storage.paths import in_bucket, path_of, place_of


def convert(
    source: str | Path,
    out: str | Path,
    *,
    at: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    weights: Literal["merged", "adapter"] = "merged",
    largest_file: int = LARGEST_FILE,
    say: Say = lambda line: None,
) -> Conversion:
    """Converts weights: a Hugging Face folder into a run's output folder, or a run into a Hugging Face folder.

    source: a folder with config.json, `hf:PATH`, `hf:OWNER/MODEL` of the hub, or the output folder of a run.
    out: folder to write; it must not exist. An interrupted conversion goes on when it is called again.
    at, dtype, largest_file: of a run alone: step of its checkpoint (None takes the last), type of the weights (None
    keeps that of the checkpoint), largest file in bytes.  weights: of a run with adapters: the whole model with them
    merged, or the adapters alone in PEFT's format.  say: called with a line for each parameter.
    Raises WeightsError, CheckpointError, ConfigError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=1, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "to convert", progress="none", cache=tmp)
        >>> done = mw.convert(tmp / "to convert", tmp / "huggingface", dtype="bfloat16")
        >>> done.architecture, done.tensors, sorted(file.name for file in done.out.iterdir())[:3]
        ('LlamaForCausalLM', 12, ['SHA256SUMS', 'config.json', 'model.safetensors'])
    """
    text, folder, out = place_of(str(source)), path_of(str(source).removeprefix("hf:")), path_of(out)
    if in_bucket(text) or in_bucket(out):
        raise ConfigError(
            f"converting {source} into {out}",
            "a conversion maps files into memory, which those in a bucket are not",
            "local folders: `meshwright checkpoint move` and `aws s3 cp` or `gcloud storage cp` copy them",
        )
    if not is_hugging_face(text) and (folder / "run.json").is_file():
        if weights == "adapter":
            return export_adapter(folder, out, at=at)
        return export_weights(folder, out, at=at, dtype=dtype, largest_file=largest_file, say=say)
    if not is_hugging_face(text) and not (folder / "config.json").is_file():
        raise ConfigError(
            f"converting {text}",
            "it has neither config.json (a Hugging Face model) nor run.json (the output folder of a run)",
            "one of these, or hf:OWNER/MODEL",
        )
    if weights != "merged":
        raise ConfigError(f"the adapters of {text}", "it is no run with adapters", "the output folder of a run")
    if at is not None or dtype is not None:
        raise ConfigError(
            f"converting {text} at a step or into another type",
            "a Hugging Face folder has one version of its weights, and they keep their type",
            "leave --at and --dtype out; --training.param-dtype is the type in which a run keeps them",
        )
    return import_weights(text, out, say)
