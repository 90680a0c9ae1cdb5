"""Meshwright's and MaxText's train step of one small model on this machine's CPU, by turns, on one and eight devices.

    python bench/maxtext_clock.py VENV/bin/python [ROUNDS]

VENV has MaxText (README.md). Both sides: a Llama of 1.3 M parameters (width 128, 4 layers, 4 heads, feed-forward 352,
vocabulary 1,024), 16 sequences of 128 tokens, float32, no rematerialisation, AdamW with clipping; eight devices are
simulated, with parameters fully sharded. Writes results/peers-cpu.json.
"""

import json
import os
import sys
from pathlib import Path

import turns

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "peers-cpu.json"

OURS = (
    "--model.vocab", "1024", "--model.kv_heads", "4", "--training.remat", "none", "--training.compute_dtype", "float32",
)  # fmt: skip
THEIRS = (
    "run_name=clock", "hardware=cpu", "dataset_type=synthetic", "enable_checkpointing=false",
    "enable_tensorboard=false", "skip_jax_distributed_system=true", "attention=dot_product",
    "decoder_block=llama2", "base_emb_dim=128",
    "base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=32", "base_mlp_dim=352", "base_num_decoder_layers=4",
    "mlp_activations=[silu,linear]", "vocab_size=1024", "max_target_length=128", "dtype=float32", "remat_policy=none",
    "adam_b2=0.98", "gradient_clipping_threshold=1.0", "steps=1000000", "enable_goodput_recording=false",
    "monitor_goodput=false",
)  # fmt: skip


def sides(python: str, devices: int) -> dict[str, turns.Command]:
    """Returns both sides on so many simulated devices."""
    common = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")
    }
    simulated = f"--xla_force_host_platform_device_count={devices}"
    theirs = {**common, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": simulated, "DECOUPLE_GCLOUD": "TRUE"}
    degrees = (f"per_device_batch_size={16 // devices}", f"ici_fsdp_parallelism={devices}")
    return {
        "meshwright": (
            [sys.executable, str(HERE / "our_step.py"), "tiny", str(devices), *OURS],
            os.environ,
        ),
        "maxtext": ([python, str(HERE / "maxtext_step.py"), *THEIRS, *degrees], theirs),
    }


def main(python: str, rounds: int) -> None:
    results = {}
    for devices in (1, 8):
        times = turns.by_turns(sides(python, devices), rounds=rounds)
        results[f"{devices} devices"] = turns.summary(times, "meshwright", "maxtext")
        print(
            f"{devices} devices:",
            turns.line_of(results[f"{devices} devices"], "meshwright", "maxtext"),
            flush=True,
        )
    load = os.getloadavg()[0]
    RESULTS.write_text(
        json.dumps(
            {"ours": OURS, "maxtext": THEIRS, "load_after": load, "results": results}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30)
