"""Validates job files of `meshwright launch` with the real tools, where they are installed.

    python bench/launch_files.py                                # bash, sbatch where a slurmctld answers, hadolint
    python bench/launch_files.py --sky /path/to/sky-venv/bin/python

Debian's packages slurm-client, slurmctld and slurmd are enough for `sbatch --test-only`; SkyPilot belongs into an
environment of its own. docs/log.md has what was validated with which version.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOSTILE = 'it\'s "$(id)" `id` $HOME\n- a: b'


def launch(scheduler: str, *words: str) -> str:
    command = [sys.executable, "-m", "meshwright", "launch", "--on", scheduler, "--env", f"V={HOSTILE}", *words,
               "tiny", "--out", "/shared/my runs/$(x)"]  # fmt: skip
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def check(name: str, command: list[str], program: str) -> bool:
    if shutil.which(program) is None:
        print(f"{name}: {program} is not installed")
        return True
    done = subprocess.run(command, text=True, capture_output=True)
    lines = (done.stderr + done.stdout).strip().splitlines()
    print(
        f"{name}: {'valid' if done.returncode == 0 else 'REFUSED'} by {program}: {lines[-1] if lines else ''}"
    )
    return done.returncode == 0


SKY = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
assert task.envs["V"] == sys.argv[2], task.envs
print(sky.__version__, task.resources)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sky", default="sky-python", help="Python of an environment with SkyPilot"
    )
    sky = parser.parse_args().sky
    good = []
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("job.sh", "gpu.yaml", "tpu.yaml")}
        files["job.sh"].write_text(launch("slurm", "--set", "time=01:00:00"))
        files["gpu.yaml"].write_text(
            launch("skypilot", "--target", "h100:16", "--image", "image:tag")
        )
        files["tpu.yaml"].write_text(launch("skypilot", "--target", "v5p:4x4x8"))
        good.append(check("job.sh", ["bash", "-n", str(files["job.sh"])], "bash"))
        good.append(check("job.sh", ["sbatch", "--test-only", str(files["job.sh"])], "sbatch"))
        for name in ("gpu.yaml", "tpu.yaml"):
            good.append(check(name, [sky, "-c", SKY, str(files[name]), HOSTILE], sky))
    good.append(
        check(
            "Dockerfile",
            ["hadolint", str(Path(__file__).parents[1] / "docker" / "Dockerfile")],
            "hadolint",
        )
    )
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
