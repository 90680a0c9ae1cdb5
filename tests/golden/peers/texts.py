"""Writes golden files of greedy text by `generate` of `transformers`, whose tokens come from its own cache."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import theirs
import torch
from drawn import GREEDY, PROMPTS, VOCAB, draw_tensors, write
from safetensors.numpy import save_file

HERE = Path(__file__).resolve()
ENDLESS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
"""Texts continue for the tokens that are asked for."""
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "intermediate_size": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False, **ENDLESS,
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, **ENDLESS}),
    "llama": ("Llama", COMMON),
    "qwen-like": ("Qwen2", {
        **COMMON, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
    }),
    "mixtral": ("Mixtral", {
        **COMMON, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    }),
}  # fmt: skip


def main(out: Path) -> None:
    for name, (class_name, settings) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder_name:
            folder = Path(folder_name)
            found = theirs.model_class(class_name)
            found(found.config_class(**settings)).float().save_pretrained(folder)
            # Matrices large enough that texts differ, no bias zero, no norm one.
            table = {
                n: (dtype, shape, 4 * center, 0.13 if center == 0 else 0.1)
                for n, (dtype, shape, center, _) in theirs.table_of(folder).items()
            }
            save_file(draw_tensors(table), folder / "model.safetensors", {"format": "pt"})
            model, texts = theirs.load(folder), []
            for prompt in PROMPTS:
                ids = torch.tensor(prompt[None].astype(np.int64))
                mask = torch.ones_like(ids)
                text = model.generate(
                    ids, attention_mask=mask, max_new_tokens=GREEDY, do_sample=False
                )
                texts.append(text[0, len(prompt) :].numpy().astype(np.int32))
            assert (
                len({int(token) for text in texts for token in text}) > 8
            )  # one token repeated shows little
            about = {
                "config": theirs.json.loads((folder / "config.json").read_text()),
                "tensors": table,
            }
        scripts = [HERE, HERE.parent / "theirs.py"]
        write(out, f"text-{name}", scripts, theirs.versions(), about, {"greedy": np.stack(texts)})


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))
