"""Writes the order of samples of Megatron's GPT datasets, and the files of the datasets that they are drawn from.

Run by `make golden` with megatron-core, which needs no device. Long orders are kept as a SHA-256, short ones as tokens.
"""

import hashlib
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import theirs
import torch
from drawn import write
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).resolve()
INPUTS = HERE.parents[1] / "megatron_inputs.py"
sys.path.append(str(INPUTS.parent))

from megatron_inputs import CASES, DATASETS, ENDS, SPLITS, documents_of

END = 0


class Tokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    vocab_size = 120
    eod = END
    unique_identifiers: ClassVar = {"class": "Tokenizer"}


def write_dataset(folder: Path, name: str) -> None:
    """Writes PREFIX.bin and PREFIX.idx as Megatron's preprocess_data.py does."""
    dtype, _ = DATASETS[name]
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.dtype(dtype).type)
    for sequences in documents_of(name):
        for tokens in sequences:
            builder.add_item(torch.tensor(tokens.astype(np.int64)))
        builder.end_document()
    builder.finalize(str(folder / f"{name}.idx"))


def datasets_of(folder: Path, case: dict[str, Any]) -> list[Any]:
    """Returns Megatron's datasets of train, valid and test; None for an empty split."""
    prefixes = [str(folder / name) for name in case["data"]]
    config = GPTDatasetConfig(
        random_seed=case["seed"], sequence_length=case["seq"], blend=(prefixes, case["weights"]),
        split=case["split"], tokenizer=Tokenizer(), reset_position_ids=True, reset_attention_mask=True,
        eod_mask_loss=True,
    )  # fmt: skip
    builder = BlendedMegatronDatasetBuilder(GPTDataset, case["samples"], lambda: True, config)
    return list(builder.build())


def samples_of(dataset: Any, samples: int | None) -> np.ndarray:
    """Returns the first samples of a dataset, [samples, T + 1]; None takes all."""
    rows = []
    for number in range(len(dataset) if samples is None else samples):
        sample = dataset[number]
        rows.append(np.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1]))
    return np.array(rows)


def fields_of(dataset: Any) -> dict[str, np.ndarray]:
    """Returns positions, weights and attention of the first samples. attention_mask: True where a key is not seen."""
    samples = [dataset[number] for number in range(12)]
    return {
        "position_ids": np.array([sample["position_ids"].numpy() for sample in samples]),
        "loss_mask": np.array([sample["loss_mask"].numpy() for sample in samples]),
        "attention_mask": np.array([sample["attention_mask"].numpy()[0] for sample in samples]),
    }


def main(out: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {"files": {}, "orders": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for prefix in DATASETS:
            write_dataset(folder, prefix)
            for end in ("bin", "idx"):
                content = (folder / f"{prefix}.{end}").read_bytes()
                about["files"][f"{prefix}.{end}"] = hashlib.sha256(content).hexdigest()
        for key, case in CASES.items():
            rows = []
            for split, dataset, asked in zip(
                SPLITS, datasets_of(folder, case), case["samples"], strict=True
            ):
                if dataset is None or asked == 0:
                    rows.append(None)
                    continue
                samples = samples_of(dataset, asked)
                content = samples.astype("<i4").tobytes()
                rows.append([*samples.shape, hashlib.sha256(content).hexdigest()])
                if case.get("kept"):
                    arrays[f"{key}/{split}"] = samples.astype(np.uint8)
            about["orders"][key] = rows
        fields = fields_of(datasets_of(folder, CASES[ENDS])[0])
        arrays |= {f"fields/{name}": values for name, values in fields.items()}
    versions = {**theirs.versions(), "megatron-core": version("megatron-core")}
    write(out, "megatron-order", [HERE, INPUTS], versions, about, arrays)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))
