"""Adapters of a run's checkpoint as a folder in PEFT's format."""

import shutil
from pathlib import Path

from meshwright.checkpoint.blocks import StoredTensors
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.import_weights import Conversion
from meshwright.checkpoint.merged_tensors import MergedTensors
from meshwright.errors import ConfigError
from meshwright.hugging_face.folder import KEPT
from meshwright.hugging_face.hub import PREFIX, find_folder
from meshwright.hugging_face.peft_files import write_adapter
from meshwright.hugging_face.tokenizer_files import write_tokenizer
from meshwright.runs.run_file import run_in_folder


def export_adapter(source: Path, out: Path, *, at: int | None = None) -> Conversion:
    """Writes the adapters of the run in the folder `source` as the folder `out`, which `peft` loads.

    at: step of the checkpoint; None takes the last. The base that adapter_config.json names is that of the run.
    Raises ConfigError where the run has no adapters or `out` exists, CheckpointError for a damaged checkpoint,
    WeightsError for matrices of which PEFT has no adapter.
    """
    run = run_in_folder(source)
    if run.finetune.method != "lora":
        raise ConfigError(
            f"the adapters of {source}", "the run trains all of its parameters and has none",
            "its weights: without --weights adapter",
        )  # fmt: skip
    if out.exists():
        raise ConfigError(f"writing adapters to {out}", "it exists already", "a folder that does not exist yet")
    with Checkpoints(source / "checkpoints", max_to_keep=None) as checkpoints:
        manifest = checkpoints.manifest(at)
    merged = MergedTensors(StoredTensors(source / "checkpoints" / str(manifest.step), manifest))
    base = (run.init_from or "").removeprefix(PREFIX)
    if (run.init_from or "").startswith(PREFIX):
        folder = find_folder(run.init_from or "", weights=False)
        base = str(folder.resolve()) if Path(base).expanduser().is_dir() else base
    pairs = merged.pairs()
    scratch = out.with_name(f".{out.name}-part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    count = write_adapter(scratch, run.model, run.finetune, pairs, base)
    write_tokenizer(source / "tokenizer.json", source / KEPT, scratch)
    scratch.rename(out)
    parameters = sum(a.size + b.size for a, b in pairs.values())
    notes = () if (run.init_from or "").startswith(PREFIX) else (
        f"the base that adapter_config.json names, {base}, is a run: convert it too and change the name",
    )  # fmt: skip
    return Conversion(out, "LoRA", parameters, count, "float32", 0, notes)
