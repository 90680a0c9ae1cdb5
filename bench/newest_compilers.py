"""Does the census read what the newest compilers write? New JAX, libtpu and CUDA plugin in an environment of their own.

`python bench/newest_compilers.py [--folder FOLDER] [--on cpu,...]`. Made to run once a week. It installs the newest
releases without constraints.txt, runs the tests of texts and of the census, takes the census of foreign
programs on CPU, TPUs and an H100 (bench/foreign_programs.py), and prints the versions beside those of constraints.txt.
It ends with 1 where a test fails, a ledger differs from the second count, or an instruction that looks like a
collective is not read: the day a compiler writes something new. Needs the network for pip, no accelerator.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/analysis/test_ledger.py", "tests/analysis/test_trip_count.py", "tests/analysis/test_custom_calls.py",
    "tests/analysis/test_simulate.py", "tests/analysis/test_conditionals.py", "tests/analysis/test_missed_overlap.py",
    "tests/analysis/test_any_function.py", "tests/analysis/test_foreign.py",
)  # fmt: skip
PACKAGES = ("jax", "libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
# The plugin's own requirements are a whole CUDA; to compile, these are enough.
GPU_WHEELS = (
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cudnn-cu13",
)
TARGETS = ("cpu", "v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1", "h100:1x8")
PROGRAMS = "jax_shard_map_fsdp,jax_model_parallel,jax_training_cookbook,maxtext_step,optax_gradient_accumulation"


def install(folder: Path) -> Path:
    """Makes the environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--upgrade"]
    wanted = [f"{ROOT}[tpu]", "pytest", "hypothesis", "flax", "equinox", "matplotlib"]
    subprocess.run([*pip, *wanted], check=True)
    subprocess.run([*pip, "--no-deps", *GPU_WHEELS], check=True)
    return folder / "bin" / "python"


def versions(python: Path) -> dict[str, str]:
    """Returns the installed versions."""
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {row["name"].lower(): row["version"] for row in json.loads(listed.stdout)}
    return {name: found.get(name, "not installed") for name in PACKAGES}


def pinned() -> dict[str, str]:
    """Returns the versions of constraints.txt, which were tested."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return {m[1].lower(): m[2] for m in re.finditer(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def foreign(python: Path, on: str) -> list[str]:
    """Takes the census of foreign programs; returns what is wrong, one line each."""
    words = [
        str(python),
        str(ROOT / "bench" / "foreign_programs.py"),
        "--child",
        on,
        "--only",
        PROGRAMS,
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"program"')]
    wrong = []
    for row in rows:
        if "ledger" not in row:
            wrong.append(f"{on} {row['program']}: {row.get('error') or row.get('missing')}")
        elif row["ledger"] != row["second_ledger"] or row["unread"]:
            wrong.append(f"{on} {row['program']}: ledger {row['ledger']}, second count {row['second_ledger']}, "
                         f"{row['unread']} unread")  # fmt: skip
        elif abs(row["flops"] - row["second_flops"]) > 1e-9 * row["flops"]:
            wrong.append(
                f"{on} {row['program']}: {row['flops']} FLOPs, second count {row['second_flops']}"
            )
    missing = len(PROGRAMS.split(",")) - len(rows)
    if missing:
        wrong.append(
            f"{on}: the compiler's process ended, {missing} programs are missing: {done.stderr[-300:]}"
        )
    print(f"{on}: {len(rows)} programs, {len(wrong)} wrong", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="environment to make, or to use if it is there")
    parser.add_argument("--on", default=",".join(TARGETS), help="targets of the foreign programs")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="newest-"))
    python = folder / "bin" / "python"
    python = python if python.is_file() else install(folder)
    tested = pinned()
    for name, version in versions(python).items():
        print(f"{name} {version} (constraints.txt: {tested.get(name, 'not pinned')})", flush=True)
    tests = [str(python), "-m", "pytest", "-q", "-m", "not exhaustive", *TESTS]
    failed = subprocess.run(tests, cwd=ROOT, check=False).returncode
    wrong = [line for on in given.on.split(",") for line in foreign(python, on)]
    for line in wrong:
        print(line)
    print(
        "the newest compilers are read"
        if not failed and not wrong
        else "the newest compilers are NOT read"
    )
    sys.exit(bool(failed or wrong))


if __name__ == "__main__":
    main()
