"""Batch script of a Slurm job."""

import re
import shlex

from meshwright.errors import ConfigError
from meshwright.launching.exit_codes import REFUSED, STOPPED
from meshwright.launching.job import GRACE_SECONDS, Job

_STRAGGLERS = 120
"""Seconds that tasks have to end after the first one has: the others notice a dead neighbour, and say so."""


def slurm_script(job: Job) -> str:
    """Returns the script for `sbatch`.

    Values of directives are limited to characters that need no quotes, everything else is quoted for the shell. Raises
    ConfigError for a directive that is not.
    """
    lines = ["#!/bin/bash", "#SBATCH --requeue", *_directives(job)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment]
    lines += [
        "",
        _srun(job),
        "code=$?",
        "# A refusal would be refused again, and Ctrl-C is meant. Everything else starts again from the checkpoint.",
        'case "$code" in',
        f"  0 | {' | '.join(map(str, (*REFUSED, STOPPED)))}) ;;",
        "  *)",
        f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then',
        '      echo "exit code $code: starting again" >&2',
        '      scontrol requeue "$SLURM_JOB_ID"',
        "    fi",
        "    ;;",
        "esac",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _directives(job: Job) -> list[str]:
    gpus = job.accelerators is not None and not job.accelerators.tpu
    directives = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": str(job.processes_per_host),
        **({"gpus-per-node": str(job.accelerators.chips_per_host)} if gpus and job.accelerators else {}),
        "output": "%x-%j.out",
        "open-mode": "append",
        # To the tasks, not to this script, which has to ask for the next start.
        "signal": f"TERM@{GRACE_SECONDS}",
    }
    directives |= dict(job.fields)
    for name, value in directives.items():
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not re.fullmatch(r"[\w.,:/=+@%\[\]*&|()-]+", value, re.ASCII):
            raise ConfigError(
                f"#SBATCH --{name}={value!r}",
                "a directive is a word, and its value letters, digits and . , : / = + @ % [ ] * & | ( ) - _",
                "--set NAME=VALUE of such characters, as in --set partition=gpu --set time=24:00:00",
            )
    return [f"#SBATCH --{name}={value}" for name, value in directives.items()]


def _srun(job: Job) -> str:
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={_STRAGGLERS}"]
    mounts = [f"{source}:{path}" for source, path in job.mounts]
    if job.image is None:
        if mounts:
            raise ConfigError("--mount without --image", "processes see the files of their host", "--image, or neither")
        return shlex.join([*words, *job.command])
    for mount in mounts:
        if "," in mount:
            raise ConfigError(f"--mount {mount}", "a comma separates mounts", "a folder without a comma in its name")
    if job.image.endswith(".sif"):
        binds = ["--bind", ",".join(mounts)] if mounts else []
        return shlex.join([*words, "apptainer", "exec", "--nv", *binds, job.image, *job.command])
    container = [f"--container-image={job.image}", *([f"--container-mounts={','.join(mounts)}"] if mounts else [])]
    return shlex.join([*words, *container, *job.command])
