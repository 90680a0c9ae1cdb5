"""The verb `convert`: weights in and out."""

import dataclasses
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from meshwright.api.convert import convert
from meshwright.cli.output import write, write_json
from meshwright.cli.parse import parse
from meshwright.formatting import format_bytes, format_count
from meshwright.ranges import NonNegativeInt, PositiveInt, Ranged


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(Ranged):
    """Convert SOURCE into OUT: a Hugging Face folder (or hf:OWNER/MODEL) into the output folder of a run, or a run's
    checkpoint into a Hugging Face folder. It goes tensor by tensor, and on where it was interrupted."""

    source: Annotated[str, tyro.conf.Positional]
    """Folder with config.json and safetensors, hf:OWNER/MODEL, or the output folder of a run."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to write; it appears when it is whole."""
    at: NonNegativeInt | None = None
    """Step of the run's checkpoint; by default the last."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights written from a run; by default that of its checkpoint."""
    weights: Literal["merged", "adapter"] = "merged"
    """Weights of a run with adapters (finetune): the whole model with adapters merged, or the adapters alone in PEFT's
    format."""
    max_file_mib: PositiveInt = 4768
    """Largest safetensors file, in MiB; a larger tensor has a file of its own."""
    json: bool = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright convert`. Raises WeightsError, CheckpointError, and ConfigError where OUT exists."""
    options = parse(ConvertOptions, "convert", args)
    # Fingerprints are all that is computed.
    jax.config.update("jax_platforms", "cpu")

    done = convert(
        options.source,
        options.out,
        at=options.at,
        dtype=options.dtype,
        weights=options.weights,
        largest_file=options.max_file_mib * 2**20,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.json:
        write_json({**dataclasses.asdict(done), "out": options.out, "peak_bytes": peak})
        return 0
    for note in done.notes:
        write(f"note: {note}\n")
    write(
        f"{done.out}: {done.architecture}, {format_count(done.parameters)} parameters in {done.tensors} tensors, "
        f"{done.dtype}; {format_bytes(peak)} of memory at most\n"
    )
    return 0
