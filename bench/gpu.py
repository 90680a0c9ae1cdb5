"""Our train step, a `torch.compile` step with flash attention, and Hugging Face's `Trainer`: one model, by turns.

    python bench/gpu.py --torch VENV/bin/python [--size 1b] [--batch 4] [--seq 4096] [--rounds 5] [--out FILE.json]

VENV has torch, transformers and accelerate; this process has meshwright. Each side is a worker process that keeps its
compiled step and waits; the workers measure by turns, so that a slow moment of the machine meets all of them. The model
is a Llama with equal sizes, parameters and FLOPs on every side, on one device, in bfloat16 with float32 parameters
(bfloat16 autocast in torch), with AdamW and a clipped gradient. `--size tiny --dtype float32` runs on a CPU.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"vocab": 512, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 128},
    "300m": {"vocab": 32000, "width": 1024, "layers": 16, "heads": 16, "kv_heads": 8, "mlp": 2816},
    "1b": {"vocab": 32000, "width": 2048, "layers": 18, "heads": 16, "kv_heads": 8, "mlp": 5632},
    "3b": {"vocab": 32000, "width": 2560, "layers": 32, "heads": 20, "kv_heads": 4, "mlp": 8704},
}
"""Name -> sizes of the Llama, heads of 128 from 1b on."""
SIDES = ("meshwright", "torch.compile", "Trainer")


@dataclasses.dataclass(frozen=True)
class Job:
    """Step that every side takes."""

    size: str
    batch: int
    seq: int
    dtype: str
    remat: str
    """Remat policy of ours; torch recomputes each layer where it is not `none`."""
    steps: int
    """Steps of a measurement."""

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of the model."""
        return SIZES[self.size]


def parameter_count(shape: Mapping[str, int]) -> int:
    """Returns the parameters of the Llama: both tables, projections, SwiGLU, norms."""
    D, F, V, L = (shape[name] for name in ("width", "mlp", "vocab", "layers"))
    kv = D // shape["heads"] * shape["kv_heads"]
    return 2 * V * D + D + L * (2 * D * D + 2 * D * kv + 3 * D * F + 2 * D)


def step_flops(job: Job) -> float:
    """Returns the model FLOPs of a step: 6 per parameter of a matmul and token, and causal attention."""
    shape, tokens = job.shape, job.batch * job.seq
    norms = shape["width"] * (2 * shape["layers"] + 1)
    matmuls = parameter_count(shape) - shape["vocab"] * shape["width"] - norms
    return tokens * (6.0 * matmuls + 12.0 * shape["layers"] * shape["width"] * (job.seq + 1) / 2)


class OurStep:
    """Our compiled train step on the first device."""

    def __init__(self, job: Job):
        import jax
        from loop_cost import StepRunner

        from meshwright.config import MeshShape, Training
        from meshwright.hardware.mesh import build_mesh
        from meshwright.models.families.llama import Llama
        from meshwright.runs.run import Run
        from meshwright.sharding.params import count_params
        from meshwright.step.device_run import place_on_devices
        from meshwright.step.train_step import CompiledTrainStep

        training = Training(
            steps=100_000, batch=job.batch, seq=job.seq, compute_dtype=_dtype(job), remat=_remat(job),
            logits_mib=1024,
        )  # fmt: skip
        run = Run(model=Llama(**job.shape), mesh=MeshShape(), training=training)
        device_run = place_on_devices(run, build_mesh(MeshShape()))
        self._runner, self._steps = StepRunner(device_run, steps=1), job.steps
        began = time.perf_counter()
        step = CompiledTrainStep(device_run, self._runner.batch)
        compiled = time.perf_counter() - began
        self._runner.start(step, device_run.initial_state())
        self._runner.bare(2)
        self.facts = {
            "parameters": count_params(device_run.layout.params), "compile_seconds": compiled,
            "device": jax.devices()[0].device_kind, "attention": device_run.kernels.name,
            "versions": f"meshwright {version('meshwright')}, jax {jax.__version__}, "
            f"{jax.devices()[0].client.platform_version.splitlines()[0]}",
        }  # fmt: skip

    def measure(self) -> float:
        """Returns seconds per step."""
        return self._runner.bare(self._steps)


def _dtype(job: Job) -> Any:
    return job.dtype


def _remat(job: Job) -> Any:
    return job.remat


def serve(job: Job) -> None:
    """Runs as the worker of our side: a line of facts, then a line of seconds for each line that it reads."""
    from meshwright.hardware.mesh import prepare_host

    prepare_host(1)
    worker = OurStep(job)
    print(json.dumps(worker.facts), flush=True)
    for _ in sys.stdin:
        print(json.dumps(worker.measure()), flush=True)


class Worker:
    """Worker process of one side."""

    def __init__(self, side: str, job: Job, python: str):
        script = Path(__file__) if side == SIDES[0] else Path(__file__).with_name("gpu_torch.py")
        # Three processes share the device: ours must not take most of its memory at the start.
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [
            python,
            str(script),
            "--worker",
            side,
            json.dumps({**dataclasses.asdict(job), "shape": job.shape}),
        ]
        self.side = side
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )  # fmt: skip
        self.facts: dict[str, Any] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", "0.", *"123456789")):
                return json.loads(line)
        raise SystemExit(
            f"{self.side}: its worker ended with exit code {self._process.wait()}; its error is above"
        )

    def measure(self) -> float:
        """Returns seconds per step."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """Ends the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def check_equal(job: Job, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises SystemExit where a side has another model: a ratio would then mean nothing."""
    expected = parameter_count(job.shape)
    for side, its in facts.items():
        if its["parameters"] != expected:
            raise SystemExit(
                f"{side} has {its['parameters']:,} parameters, and the model has {expected:,}"
            )


def summarise(
    job: Job,
    facts: Mapping[str, Mapping[str, Any]],
    rounds: Mapping[str, Sequence[float]],
    peak: float | None,
) -> list[dict[str, Any]]:
    """Returns a row per side: median seconds, tokens/s and MFU per device, and the ratio to ours, round by round.

    peak: bfloat16 FLOP/s of a device; None where it is not known.
    """
    rows = []
    for side, seconds in rounds.items():
        median = statistics.median(seconds)
        ratios = [its / ours for its, ours in zip(seconds, rounds[SIDES[0]], strict=True)]
        rows.append({
            "side": side, "seconds": median, "fastest": min(seconds), "tokens_per_second": job.batch * job.seq / median,
            "mfu": None if peak is None else step_flops(job) / median / peak, "ratio": statistics.median(ratios),
            "rounds": list(seconds), **facts[side],
        })  # fmt: skip
    return rows


def format_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Formats the rows for a terminal: seconds over ours above 1 means that ours is faster."""
    lines = [
        f"{'':16}{'step':>11}{'tokens/s':>12}{'MFU':>8}{'over ours':>11}{'compiled in':>13}  attention"
    ]
    for row in rows:
        utilisation = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(
            f"{row['side']:16}{row['seconds'] * 1e3:>8.1f} ms{row['tokens_per_second']:>12,.0f}{utilisation:>8}"
            f"{row['ratio']:>11.2f}{row['compile_seconds']:>11.1f} s  {row['attention']}"
        )
    return "\n".join(lines)


def compare(job: Job, pythons: Mapping[str, str], rounds: int) -> list[dict[str, Any]]:
    """Runs the workers by turns and returns the rows. pythons: interpreter of each side."""
    from meshwright.hardware.chips import find_chip

    workers = [Worker(side, job, python) for side, python in pythons.items()]
    try:
        facts = {worker.side: worker.facts for worker in workers}
        check_equal(job, facts)
        seconds: dict[str, list[float]] = {worker.side: [] for worker in workers}
        for _ in range(rounds):
            for worker in workers:
                seconds[worker.side].append(worker.measure())
    finally:
        for worker in workers:
            worker.close()
    chip = find_chip(facts[SIDES[0]]["device"])
    return summarise(job, facts, seconds, None if chip is None else chip.flops_bf16)


def main() -> None:
    """Parses the arguments, compares, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--torch", help="Python with torch, transformers, accelerate; without it ours alone runs"
    )
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a device")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--remat", default="none", help="ours; torch checkpoints its layers unless it is none"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of a measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    job = Job(options.size, options.batch, options.seq, options.dtype, options.remat, options.steps)
    sides = {SIDES[0]: sys.executable} | (
        dict.fromkeys(SIDES[1:], options.torch) if options.torch else {}
    )
    rows = compare(job, sides, options.rounds)
    print(f"Llama of {parameter_count(job.shape):,} parameters, {job.batch} x {job.seq} tokens, {job.dtype}, "
          f"{options.rounds} rounds of {job.steps} steps by turns")  # fmt: skip
    print(format_table(rows))
    print("\n".join(f"{row['side']}: {row['versions']}" for row in rows))
    if options.out:
        options.out.write_text(
            json.dumps({"job": dataclasses.asdict(job), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    if "--worker" in sys.argv:
        fields = json.loads(sys.argv[-1])
        serve(Job(**{field.name: fields[field.name] for field in dataclasses.fields(Job)}))
    else:
        main()
