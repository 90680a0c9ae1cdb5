"""Job files as their schedulers read them."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from packaging.requirements import Requirement

from meshwright.cli.main import VERBS, run
from meshwright.cli.parse import options_of
from meshwright.cli.verbs import kind_of
from meshwright.errors import ConfigError
from meshwright.hardware.targets import parse_target
from meshwright.launching.restarts import restarts
from meshwright.launching.schedulers import (
    REMOTE_SOURCE,
    Job,
    accelerators_of,
    jobset_manifest,
    legal_name,
    requirement,
    skypilot_task,
    slurm_script,
)
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run_file import write_run

HOSTILE = (
    "it's", 'a "b"', "$(touch PWNED)", "`touch PWNED`", "$HOME", "$(HOME)", "a\nb: c\n- d",
    "{}: &x *x !!python/name:os", "yes", "012", "# no", "%j", "\\", "", " ", "a;touch PWNED", "--- ",
    "é\u2028ü", "$$", "\ttab", "'\"'",
)  # fmt: skip


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "name": "hostile", "command": ("meshwright", "train", *HOSTILE), "hosts": 4, "restarts": 2,
        "environment": tuple((f"V{i}", value) for i, value in enumerate(HOSTILE)),
        "accelerators": accelerators_of(parse_target("h100:32")),
    }  # fmt: skip
    return Job(**{**fields, **changes})


@pytest.mark.parametrize(
    ("target", "hosts", "each", "labels"),
    [
        ("v5p:8x8x16", 256, 4, {"tpu-accelerator": "tpu-v5p-slice", "tpu-topology": "8x8x16"}),
        ("2*v6e:16x16", 128, 4, {"tpu-accelerator": "tpu-v6e-slice", "tpu-topology": "16x16"}),
        ("v6e:2x4", 1, 8, {"tpu-accelerator": "tpu-v6e-slice", "tpu-topology": "2x4"}),
        ("v5e:1x1", 1, 1, {"tpu-accelerator": "tpu-v5-lite-podslice", "tpu-topology": "1x1"}),
        ("h100:64", 8, 8, {"accelerator": "nvidia-h100-80gb"}),
        ("h100:2", 1, 2, {"accelerator": "nvidia-h100-80gb"}),
        ("gb200:144", 36, 4, {"accelerator": "nvidia-gb200"}),
    ],
)
def test_hosts_of_a_target(target: str, hosts: int, each: int, labels: dict[str, str]) -> None:
    found = accelerators_of(parse_target(target))
    assert (found.hosts, found.chips_per_host) == (hosts, each)
    assert found.node_selector == {
        f"cloud.google.com/gke-{name}": value for name, value in labels.items()
    }


def run_script(
    folder: Path, script: str, programs: dict[str, str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script in bash with other programs in the place of the real ones."""
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "script").write_text(script)
    subprocess.run(["bash", "-n", "script"], cwd=folder, check=True)
    done = subprocess.run(
        ["bash", "script"], cwd=folder, text=True, capture_output=True,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/root", **environment},
    )  # fmt: skip
    assert not (folder / "PWNED").exists()
    return done


RECORD = f"""{shlex.quote(sys.executable)} -c 'import json, os, sys
print(json.dumps([sys.argv[1:], [os.environ.get("V%d" % i) for i in range({len(HOSTILE)})]]))' "$@" """
"""Program that prints its arguments and variables as JSON."""


def test_slurm_passes_every_value_on(tmp_path: Path) -> None:
    done = run_script(tmp_path, slurm_script(job(fields=(("time", "24:00:00"),))), {"srun": RECORD})
    words, variables = json.loads(done.stdout)
    assert words[-len(HOSTILE) - 2 :] == ["meshwright", "train", *HOSTILE]
    assert variables == list(HOSTILE)


@pytest.mark.parametrize(
    ("code", "count", "again"),
    [
        (75, 0, True),
        (143, 1, True),
        (1, 199, True),
        (137, 200, False),
        (2, 0, False),
        (11, 0, False),
        (130, 0, False),
    ],
)
def test_slurm_starts_again_where_that_helps(
    code: int, count: int, again: bool, tmp_path: Path
) -> None:
    programs = {"srun": f"exit {code}", "scontrol": 'echo "scontrol $@"'}
    done = run_script(
        tmp_path, slurm_script(job()), programs, SLURM_RESTART_COUNT=str(count), SLURM_JOB_ID="7"
    )
    assert done.returncode == code
    assert done.stdout == ("scontrol requeue 7\n" if again else "")
    assert restarts(code) == (again or code == 137)


def test_slurm_directives_and_containers() -> None:
    lines = slurm_script(
        job(processes_per_host=8, image="nvcr.io/x:y", mounts=(("/data", "/data"),))
    ).splitlines()
    assert {"#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue",
            "#SBATCH --signal=TERM@120"} <= set(lines)  # fmt: skip
    srun = next(line for line in lines if line.startswith("srun"))
    assert "--container-image=nvcr.io/x:y --container-mounts=/data:/data meshwright train" in srun
    assert "apptainer exec --nv image.sif meshwright" in slurm_script(job(image="image.sif"))
    with pytest.raises(ConfigError, match="a directive is a word"):
        slurm_script(job(fields=(("partition", "gpu\n#SBATCH --wrap=touch PWNED"),)))


def expanded(text: str) -> str:
    """Expands `$(NAME)` as Kubernetes does where no variable has the name: `$$` is one dollar sign."""
    return text.replace("$$", "$")


@pytest.mark.parametrize("target", ["h100:32", "2*v5p:4x4x8", None])
def test_jobset_is_one_by_the_schema(target: str | None) -> None:
    chips = accelerators_of(parse_target(target)) if target else None
    asked = job(
        hosts=chips.hosts if chips else 3,
        accelerators=chips,
        image="i",
        mounts=(("claim", "/data"),),
    )
    manifest = yaml.safe_load(jobset_manifest(asked))
    # The models drop fields that they do not know: what comes back is what the schema has.
    model = JobsetV1alpha2JobSet.from_dict(manifest)
    assert model is not None and json.loads(model.to_json()) == manifest
    [replicated] = manifest["spec"]["replicatedJobs"]
    work = replicated["template"]["spec"]
    [container] = work["template"]["spec"]["containers"]
    assert [expanded(word) for word in container["command"]] == list(asked.command)
    assert not any("$(" in word.replace("$$", "") for word in container["command"])
    variables = {v["name"]: v.get("value") for v in container["env"]}
    assert [expanded(variables[f"V{i}"]) for i in range(len(HOSTILE))] == list(HOSTILE)
    assert replicated["replicas"] * work["parallelism"] == asked.hosts and work["backoffLimit"] == 0
    assert ("MESHWRIGHT_COORDINATOR" in variables) == (target != "2*v5p:4x4x8")
    assert container.get("resources", {}).get("limits", {}) == (
        {chips.resource: chips.chips_per_host} if chips else {}
    )


@pytest.mark.parametrize(
    ("target", "accelerators", "nodes"),
    [
        ("h100:32", {"H100": 8}, 4),
        ("v5p:4x4x8", {"tpu-v5p-256": 1}, 1),
        ("v5e:4x4", {"tpu-v5litepod-16": 1}, 1),
    ],
)
def test_skypilot_passes_every_value_on(
    target: str, accelerators: Any, nodes: int, tmp_path: Path
) -> None:
    chips = accelerators_of(parse_target(target))
    task = yaml.safe_load(
        skypilot_task(job(accelerators=chips, hosts=chips.hosts, fields=(("use_spot", "true"),)))
    )
    assert task["num_nodes"] == nodes and task["resources"]["accelerators"] == accelerators
    assert (
        task["resources"]["use_spot"] is True
        and 75 in task["resources"]["job_recovery"]["recover_on_exit_codes"]
    )
    hostile = {f"V{i}": value for i, value in enumerate(HOSTILE)}
    assert task["envs"] == {**hostile, "MESHWRIGHT_RESTARTS": "2"}
    done = run_script(tmp_path, task["run"], {"meshwright": RECORD})
    assert json.loads(done.stdout)[0] == ["train", *HOSTILE]


URL = "https://example.org/meshwright"


@pytest.mark.parametrize(
    ("origin", "package", "source"),
    [
        ({}, "meshwright[tpu]==1.2", None),
        (
            {"url": "file:///my%20code", "dir_info": {"editable": True}},
            f"{REMOTE_SOURCE}[tpu]",
            "/my code",
        ),
        (
            {"url": URL, "vcs_info": {"vcs": "git", "commit_id": "4f2a"}},
            f"meshwright[tpu] @ git+{URL}@4f2a",
            None,
        ),
        ({"url": f"{URL}.whl", "archive_info": {}}, f"meshwright[tpu] @ {URL}.whl", None),
        ({"url": "file:///dist/meshwright.whl", "archive_info": {}}, "", None),
    ],
)
def test_nodes_install_what_is_installed_here(
    origin: dict[str, Any], package: str, source: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "meshwright-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: meshwright\nVersion: 1.2\n")
    if origin:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    installed = Distribution.at(folder)
    if not package:
        with pytest.raises(ConfigError, match="--image"):
            requirement(installed, "tpu")
        return
    assert requirement(installed, "tpu") == (package, source)
    Requirement(package.replace(REMOTE_SOURCE, "meshwright"))  # what pip would read


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--on", "slurm", "tiny"], "--out /shared/runs/tiny"),
        (["--on", "slrum", "tiny"], "slurm"),
        (["--on", "slurm", "trian", "--out", "x"], "there is no recipe"),
        (["--on", "slurm", "tiny", "--out", "x", "--stesp", "3"], "--steps"),
        (["--on", "slurm"], "there is no RUN"),
        (["--on", "slurm", "train", "--steps", "3"], "launch train --out DIR --resume"),
        (["--on", "jobset", "tiny", "--out", "x"], "--image"),
        (
            ["--on", "jobset", "--image", "i", "--processes", "8", "tiny", "--out", "x"],
            "--processes 1",
        ),
        (["--on", "skypilot", "--target", "2*v5p:4x4x8", "tiny", "--out", "x"], "--on jobset"),
        (
            ["--on", "slurm", "--target", "h100:64", "--hosts", "3", "tiny", "--out", "x"],
            "--hosts 8",
        ),
        (
            ["--on", "slurm", "--hosts", "4", "--processes", "6", "tiny", "--out", "x"],
            "--processes 4",
        ),
        (["--on", "slurm", "--env", "A B=c", "tiny", "--out", "x"], "--env NAME=VALUE"),
        (["--on", "slurm", "--name", "My Run", "tiny", "--out", "x"], "--name my-run"),
        (["--on", "slurm", "--hosts", "0", "tiny", "--out", "x"], "--hosts 1"),
        (["--on", "slurm", "--processes", "0", "tiny", "--out", "x"], "--processes 1"),
    ],
)
def test_refusals_teach(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        run(["launch", *words])
    assert says in str(error.value)


def test_a_job_file_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.sh"
    words = [
        "launch",
        "--on",
        "slurm",
        "--target",
        "h100:16",
        "--write",
        str(file),
        "tiny",
        "--out",
        "/s/x",
    ]
    assert run(words) == 0
    assert "2 hosts. Start it with: sbatch" in capsys.readouterr().out
    first = file.read_text()
    assert "meshwright train tiny --out /s/x --resume-if-exists" in first
    with pytest.raises(ConfigError, match="--overwrite"):
        run(words)
    assert (
        run([*words[:5], "--overwrite", *words[5:], "--steps", "3"]) == 0
        and file.read_text() != first
    )
    write_run(find_recipe("tiny"), tmp_path / "run.json")
    assert run(["launch", "--on", "slurm", "train", "--out", str(tmp_path), "--resume"]) == 0
    assert f"meshwright train --out {tmp_path} --resume\n" in capsys.readouterr().out
    assert run(["launch", "--on", "slurm", "evaluate", "/s/x", "--data", "a b"]) == 0
    assert "meshwright evaluate /s/x --data 'a b'\n" in capsys.readouterr().out


def test_images_install_what_the_extras_name() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    stages = {
        m[1]: m[2] for m in re.finditer(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)
    }
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for stage, extra in {"cpu": "", "tpu": "tpu", "cuda": "cuda13"}.items():
        assert not extra or extra in extras
        wanted = f"'.[{','.join(filter(None, [extra, 'all']))}]'"
        installs = re.findall(r"pip install .*?(\S+)$", stages[stage], re.M)
        assert installs == [wanted], stage
    assert "constraints.txt" in stages["cpu"] and "http" not in text


def test_names() -> None:
    assert [legal_name(text) for text in ("My Run.v2", "3b", "Ü", "x" * 60)] == [
        "my-run-v2",
        "run-3b",
        "run",
        "x" * 40,
    ]


def several_options() -> list[tuple[str, str]]:
    """Returns verb and spelling of every option that takes several values."""
    found = []
    for verb in sorted(VERBS.keys() - {"recipes"}):
        kinds = kind_of(verb)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            hints = typing.get_type_hints(kind)
            for option in options_of(kind):
                hint = hints.get(option.path[0])
                takes_several = re.fullmatch(r"tuple\[.*, \.\.\.\]", str(hint))
                if len(option.path) == 1 and not option.positional and takes_several:
                    found.append((verb, option.names[0]))
                    assert option.several, (verb, option.names)
    return found


def test_every_option_of_several_values_keeps_each_mention() -> None:
    assert ("launch", "--set") in several_options() and ("launch", "--env") in several_options()


def written(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["launch", *words]) == 0
    return capsys.readouterr().out


def test_directives_that_are_given_twice_are_all_in_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = ["--set", "partition=gpu", "--set", "time=24:00:00", "--env", "A=1", "--env=B=2"]
    text = written(*sets, "--on", "slurm", "tiny", "--out", "/shared/x", capsys=capsys)
    assert "#SBATCH --partition=gpu\n" in text and "#SBATCH --time=24:00:00\n" in text
    assert "export A=1\nexport B=2\n" in text


def test_options_of_launch_may_follow_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_words = ["tiny", "--out", "/shared/x"]
    options = ["--on", "slurm", "--set", "partition=gpu", "--image=a:b"]
    before = written(*options, *run_words, capsys=capsys)
    assert written(*run_words, *options, capsys=capsys) == before
    assert written(*run_words[:1], *options, *run_words[1:], capsys=capsys) == before


PAGES = ("verbs/launch.md", "howto/several-hosts.md", "verbs/doctor.md")
"""Pages with commands of launch."""


def documented() -> list[list[str]]:
    """Returns the words of every command of launch on the pages."""
    found = []
    for page in PAGES:
        text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
        for line in re.findall(r"meshwright launch [^`\n]+?(?=`|$|  +#| -->| \|)", text, re.M):
            words = shlex.split(line)[1:]
            if words not in found:
                found.append(words)
    return found


def test_every_command_of_the_launch_pages_writes_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "llama32-1b", "--on", "v6e:2x2", "--out", "plan.json"]) == 0
    assert len(documented()) >= 8
    for words in documented():
        capsys.readouterr()
        assert run([words[0], "--overwrite", *words[1:]]) == 0, words
        printed = capsys.readouterr().out
        if "--write" in words:
            printed = Path(words[words.index("--write") + 1]).read_text(encoding="utf-8")
        assert words[-1] in printed, words


def directives(*words: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    text = written("--on", "slurm", *words, "tiny", "--out", "/s/x", capsys=capsys)
    assert '--cpus-per-task="$cpus" meshwright' in text
    return set(re.findall(r"^#SBATCH --(.*)$", text, re.M))


@pytest.mark.parametrize(
    ("words", "there", "absent"),
    [
        (["--target", "h100:16"], {"exclusive", "mem=0"}, "cpus-per-task"),
        (["--hosts", "2"], {"exclusive", "mem=0"}, "cpus-per-task"),
        (["--target", "h100:2"], {"cpus-per-task=16", "mem=128G"}, "exclusive"),
        (["--target", "h100:16", "--set", "mem=200G"], {"exclusive", "mem=200G"}, "mem=0"),
        (["--target", "h100:16", "--set", "mem-per-cpu=4G"], {"mem-per-cpu=4G"}, "mem=0"),
        (["--target", "h100:16", "--set", "exclusive=no"], {"mem=0"}, "exclusive"),
        (["--target", "h100:16", "--set", "exclusive=user"], {"exclusive=user"}, "exclusive\n"),
        (["--target", "h100:2", "--set", "cpus-per-gpu=4"], {"cpus-per-gpu=4"}, "cpus-per-task"),
    ],
)
def test_slurm_jobs_ask_for_cpus_and_memory(
    words: list[str], there: set[str], absent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = directives(*words, capsys=capsys)
    assert there <= found
    assert not any(name.startswith(absent) for name in found)


def test_tasks_divide_the_cpus_of_their_node(tmp_path: Path) -> None:
    program = {"srun": 'echo "$@"'}
    script = slurm_script(job(processes_per_host=8))
    done = run_script(tmp_path, script, program, SLURM_CPUS_ON_NODE="96")
    assert "--cpus-per-task=12 " in done.stdout
    done = run_script(tmp_path, script, program, SLURM_CPUS_ON_NODE="96", SLURM_CPUS_PER_TASK="7")
    assert "--cpus-per-task=7 " in done.stdout


@pytest.mark.parametrize("scheduler", ["slurm", "jobset", "skypilot"])
def test_a_job_with_variables_is_read_by_its_owner_alone(scheduler: str, tmp_path: Path) -> None:
    words = ["launch", "--on", scheduler, "--image", "i", "--overwrite"]
    for number, env in enumerate(([], ["--env", "TOKEN=secret"])):
        for before in (None, 0o644):  # a new file, and one that everybody reads
            file = tmp_path / f"job-{number}-{before}"
            if before is not None:
                file.touch(before)
            assert run([*words, *env, "--write", str(file), "tiny", "--out", "/s/x"]) == 0
            others = file.stat().st_mode & 0o077
            assert bool(others) == (not env), (scheduler, env, before)


@pytest.mark.parametrize(
    ("scheduler", "words", "refused"),
    [
        ("slurm", ["llama3-8b"], True),
        ("jobset", ["llama3-8b"], True),
        ("slurm", ["llama3-8b", "--data", "/shared/tokens"], False),
        ("slurm", ["llama3-8b", "--data=/shared/tokens"], False),
        ("slurm", ["gpt2-xl"], True),
        ("slurm", ["tiny"], False),
        ("skypilot", ["tiny"], False),
    ],
)
def test_a_job_names_text_that_is_there(
    scheduler: str,
    words: list[str],
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["launch", "--on", scheduler, "--image", "i", *words, "--out", "/s/x"]
    if not refused:
        assert run(command) == 0
        return
    with pytest.raises(ConfigError, match="--data PATH of your text"):
        run(command)


def test_a_recipe_whose_text_is_here_is_launched_where_hosts_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part.parquet").touch()
    assert run(["launch", "--on", "slurm", "llama3-8b", "--out", "/s/x"]) == 0
    with pytest.raises(ConfigError, match="no such file in a container"):
        run(["launch", "--on", "jobset", "--image", "i", "llama3-8b", "--out", "/s/x"])


def test_one_host_is_not_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--on", "slurm", "--write", str(tmp_path / "job"), "tiny", "--out", "/x"]
    assert run(["launch", *words]) == 0
    assert f"{tmp_path}/job: 1 host. Start it with" in capsys.readouterr().out
