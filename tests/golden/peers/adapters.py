"""Writes golden files of adapters by `peft`: one that it wrote, the loss of preferences with it, one that we wrote."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import theirs
import torch
from drawn import digests, draw_tensors, write
from safetensors.numpy import save_file

HERE = Path(__file__).resolve()
SCRIPTS = [HERE, HERE.parent / "theirs.py"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PAIRS = HERE.parent / "written" / "preferences.npz"
"""Packed pairs of answers as Meshwright makes them: inputs, targets, segments and weights, [B, T]."""
OURS = HERE.parent / "written" / "adapter.json"
"""Configuration and tensors (name -> shape) of an adapter that Meshwright writes for the row `llama`."""
BETA = 0.3


def preferences(adapted: Any, rows: list[dict[str, np.ndarray]]) -> tuple[float, float, float]:
    """Loss, reward margin and accuracy of packed pairs, each document by itself."""

    def log_probability(row: dict[str, np.ndarray], segment: int) -> torch.Tensor:
        here = np.flatnonzero(row["segments"] == segment)
        ids, targets = (
            torch.tensor(row[name][here][None].astype(np.int64)) for name in ("inputs", "targets")
        )
        scores = torch.log_softmax(adapted(ids).logits, -1).gather(-1, targets[..., None])[0, :, 0]
        return (scores * torch.tensor(row["weights"][here])).sum()

    def ratios(row: dict[str, np.ndarray], segment: int) -> torch.Tensor:
        with torch.no_grad():
            own = log_probability(row, segment)
            with adapted.disable_adapter():
                return own - log_probability(row, segment)

    margins = torch.stack(
        [
            BETA * (ratios(row, pair) - ratios(row, pair + 1))
            for row in rows
            for pair in range(0, int(row["segments"][row["weights"] > 0].max()) + 1, 2)
        ]
    )
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    return float(loss), float(margins.mean()), float((margins > 0).float().mean())


def table_of(shapes: dict[str, Any]) -> dict[str, Any]:
    return {name: ("float32", list(shape), 0.0, 0.1) for name, shape in sorted(shapes.items())}


def load(folder: Path, config: dict[str, Any], table: dict[str, Any]) -> Any:
    """The base of a folder with an adapter of drawn weights, as `peft` reads it."""
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "adapter" / CONFIG).write_text(json.dumps(config))
    save_file(draw_tensors(table), folder / "adapter" / WEIGHTS, {"format": "pt"})
    adapted = peft.PeftModel.from_pretrained(
        theirs.load(folder / "base"), folder / "adapter"
    ).eval()
    # No tensor of the adapter is left out.
    read = peft.get_peft_model_state_dict(adapted)
    for name, value in draw_tensors(table).items():
        assert np.array_equal(read[name].numpy(), value), name
    return adapted


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save("qwen3", folder / "base")
        config = peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=["q_proj", "o_proj", "down_proj"], use_rslora=True
        )
        peft.get_peft_model(theirs.load(folder / "base"), config).save_pretrained(
            folder / "adapter"
        )
        written = json.loads((folder / "adapter" / CONFIG).read_text())
        written = {
            **written,
            "base_model_name_or_path": "base",
            "target_modules": sorted(written["target_modules"]),
        }
        table = table_of(
            {n: t.shape for n, t in theirs.load_file(folder / "adapter" / WEIGHTS).items()}
        )
        adapted = load(folder, written, table)
        arrays = {"logits": theirs.logits_of(adapted).detach().numpy()}
        scripts = list(SCRIPTS)
        if PAIRS.exists():
            scripts.append(PAIRS)
            with np.load(PAIRS) as pairs:
                rows = [{n: pairs[n][i] for n in pairs} for i in range(len(pairs["inputs"]))]
            arrays["preferences"] = np.array(preferences(adapted, rows), np.float64)
        about = {"config": written, "tensors": table, "beta": BETA}
        write(out, "adapter", scripts, theirs.versions(peft), about, arrays)
    if not OURS.exists():
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save("llama", folder / "base")
        ours = json.loads(OURS.read_text())
        table = table_of(ours["tensors"])
        adapted = load(folder, ours["config"], table)
        logits = theirs.logits_of(adapted).detach().numpy()
        adapted.merge_and_unload().save_pretrained(folder / "merged")
        merged = theirs.load_tensors(folder / "merged")
        about = {"config": ours["config"], "tensors": table}
        arrays = {"logits": logits} | digests("merged", merged)
        write(out, "adapter-written", [*SCRIPTS, OURS], theirs.versions(peft), about, arrays)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))
