"""Meshwright's train step and MaxText's, compiled for the same chips with the same effort, and read twice.

    python bench/peers.py compile maxtext --case 7b --stage shipped --maxtext VENV/bin/python --cache FOLDER
    python bench/peers.py compile ours    --case 7b --stage shipped --cache FOLDER
    python bench/peers.py read --cache FOLDER

`compile` fills the cache, one program at a time, and skips what is there; `read` prices every program in the cache by
meshwright's census and by `second_reading.py`, and writes results/peers.json and the tables of docs/peers.md. Stages:

- `shipped`: what a user gets who says nothing but model, chips, mesh and batch;
- `options`: every set of compiler options with remat `full`;
- `remat`: every other remat policy with the best of those options (by the census; `compile` reads as it goes);
- `microbatches`: MaxText's policies that save more, with its gradients accumulated over two and four microbatches;
- `attention`: MaxText on v6e with the fused attention of its own recipes for that chip;
- `all`: every policy with every set of options. `--only` picks from it, and from the others.

MaxText runs in an environment of its own (README.md). Nothing runs on a TPU.
"""

import argparse
import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peer_cases
import peer_tables
from page_table import put_rows
from peer_cases import CASES, SHIPPED, Case, Setting
from second_reading import read_program

from meshwright.config import MeshShape
from meshwright.hardware.aot import compiler_environment
from meshwright.hardware.targets import parse_target
from meshwright.models.flops import forward_flops
from meshwright.runs.recipe import find_recipe
from xlacensus.hlo.parser import parse_module
from xlacensus.interconnect import all_coordinates
from xlacensus.schedule import TargetDevices, simulate_schedule

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "peers.json"


@dataclasses.dataclass(frozen=True)
class Cache:
    """Folder of compiled programs; ours have the version of the source in their path."""

    path: Path
    sources: tuple[str, ...]
    """Versions of Meshwright's source whose programs are meant (`source_version`), the first that has one first."""

    def folder(self, side: str, name: str, setting: Setting) -> Path:
        """Returns the folder of one compiled program."""
        if side == "maxtext":
            return self.path / side / name / setting.slug()
        folders = [self.path / side / source / name / setting.slug() for source in self.sources]
        return next((folder for folder in folders if (folder / "facts.json").is_file()), folders[0])


def source_version() -> str:
    """Returns the Git hash of `src`, with a mark if it has changes that are not committed."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE, capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD:src") + (
        "-changed" if git("status", "--short", "--", "../src") else ""
    )


def compile_side(
    side: str, name: str, setting: Setting, cache: Cache, maxtext: str | None
) -> dict[str, Any]:
    """Compiles one setting unless the cache has it; returns its facts, of which `error` says that it did not compile.

    The folder receives program.hlo.gz and facts.json.
    """
    folder, case = cache.folder(side, name, setting), CASES[name]
    if (folder / "facts.json").is_file():
        return dict(json.loads((folder / "facts.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    words = peer_cases.arguments(side, case, setting)
    began = time.perf_counter()
    facts = (
        compile_maxtext(maxtext, case.target, words, folder)
        if side == "maxtext"
        else _compile_ours(words, folder)
    )
    facts.update(arguments=words, wall_seconds=time.perf_counter() - began, chips=case.target)
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def compile_maxtext(
    python: str | None, target: str, words: list[str], folder: Path
) -> dict[str, Any]:
    """Compiles MaxText's step for a target with its arguments `words`; returns its facts."""
    if python is None:
        raise SystemExit("MaxText has to be compiled: --maxtext VENV/bin/python")
    environment = {
        **os.environ,
        **compiler_environment(parse_target(target)),
        "DECOUPLE_GCLOUD": "TRUE",
    }
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [python, str(HERE / "maxtext_compile.py"), str(folder), *words],
            env=environment, cwd=scratch, capture_output=True, text=True, check=False,
        )  # fmt: skip
    (folder / "log").write_text(done.stdout + done.stderr)
    _refuse_killed(done)
    if done.returncode or not (folder / "facts.json").is_file():
        return {"error": _reason(done.stderr)}
    return dict(json.loads((folder / "facts.json").read_text()))


def _compile_ours(words: list[str], folder: Path) -> dict[str, Any]:
    hlo = folder / "program.hlo"
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "prove",
        *words,
        "--json",
        "--limit",
        "7200",
        "--hlo",
        str(hlo),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (folder / "log").write_text(done.stderr)
    _refuse_killed(done)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines or not hlo.is_file():
        return {"error": _reason(done.stderr)}
    census = json.loads(lines[-1])
    with gzip.open(folder / "program.hlo.gz", "wt", encoding="utf-8") as out:
        out.write(hlo.read_text(encoding="utf-8"))
    hlo.unlink()
    compiled = census["memory"]["compiled"]
    return {
        "compile_seconds": census["compile_seconds"], "peak": census["memory"]["live"],
        "heap": census["memory"]["peak"], "versions": census["versions"], "memory": compiled,
        "census_seconds": census["simulated_schedule"]["step_seconds"],
        "census_exposed": sum(census["simulated_schedule"]["exposed"].values()),
        "census_flops": census["flops"], "findings": [finding["kind"] for finding in census["findings"]],
    }  # fmt: skip


def _refuse_killed(done: subprocess.CompletedProcess[str]) -> None:
    """Raises where a compilation was ended from outside: that says nothing about the program."""
    if done.returncode < 0:
        raise SystemExit(f"the compilation was ended by signal {-done.returncode}")


def _reason(text: str) -> str:
    """Returns the line of a compiler's output that says why it failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [
        line
        for line in lines
        if re.search("RESOURCE_EXHAUSTED|Ran out of memory|of HBM at the peak", line)
    ]
    return (marked or lines or ["no output"])[-1][:400]


def read(side: str, name: str, setting: Setting, cache: Cache) -> dict[str, Any] | None:
    """Reads one program of the cache; None if it is not there."""
    folder, case = cache.folder(side, name, setting), CASES[name]
    if not (folder / "facts.json").is_file():
        return None
    facts = json.loads((folder / "facts.json").read_text())
    row = {
        "side": side, "case": name, "setting": setting.summary(), "arguments": facts["arguments"],
        "remat": setting.remat, "options": setting.options, "windowed": setting.windowed,
        "reduce_dtype": setting.reduce_dtype, "microbatches": setting.microbatches,
        "attention": setting.attention,
        "source": folder.parts[-3] if side == "ours" else None,
    }  # fmt: skip
    if "error" in facts:
        return {**row, "error": facts["error"]}
    with gzip.open(folder / "program.hlo.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    second, theory = read_program(text, case.target), theoretical_flops(case)
    return {
        **row, "census": census_of(text, case.target, case.chips, facts),
        "second": {key: second[key] for key in ("seconds", "exposed", "sent", "by_kind", "doubts", "floor")},
        "flops": second["flops"], "theory": theory, "flops_ratio": second["flops"] / theory["model"],
        "above_floor": second["above_floor"], "peak": facts["peak"],
        "heap": facts.get("heap", facts.get("arguments_bytes", 0) + facts.get("temporary", 0)),
        "host": facts.get("host", 0), "compile_seconds": facts["compile_seconds"], "versions": facts["versions"],
    }  # fmt: skip


def census_of(text: str, name: str, chips: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the census's seconds of a step: from the proof where it took one, else from the text."""
    target = parse_target(name)
    coordinates = tuple(all_coordinates(target.chip, target.topology, target.domains))
    devices = TargetDevices(target.chip, target.topology, coordinates, target.efficiency)
    schedule = simulate_schedule(parse_module(text), devices, MeshShape(fsdp=chips).degrees())
    seconds = facts.get("census_seconds", schedule.step_seconds)
    return {
        "seconds": seconds, "exposed": facts.get("census_exposed", sum(schedule.exposed.values())),
        "by_kind": dict(schedule.by_kind), "from_text": schedule.step_seconds, "doubt": schedule.doubt,
        "unpriced": dict(schedule.unpriced),
    }  # fmt: skip


def theoretical_flops(case: Case) -> dict[str, float]:
    """Returns FLOPs per chip and step by arithmetic: of the model, and with every layer computed a second time."""
    run = find_recipe(case.model)
    forward = forward_flops(run.model, case.seq)
    tokens = case.batch * case.seq / case.chips
    model, layers = 3 * sum(forward.values()), sum(forward.values()) - forward["unembedding"]
    return {"model": model * tokens, "with_recomputation": (model + layers) * tokens}


def best_options(side: str, name: str, cache: Cache) -> Setting:
    """Returns the fastest setting with `full` in the cache."""
    rows = [(read(side, name, s, cache), s) for s in peer_cases.option_settings(side, CASES[name])]
    timed = [
        (row["census"]["seconds"], number, s)
        for number, (row, s) in enumerate(rows)
        if row and "census" in row
    ]
    if not timed:
        raise SystemExit(
            f"no setting with `full` in the cache: peers.py compile {side} --case {name} --stage options"
        )
    return min(timed)[2]


def compile_stage(given: argparse.Namespace) -> None:
    """Compiles the settings of one stage and prints each as it is done."""
    for name in given.case or CASES:
        if given.stage == "shipped":
            settings = [SHIPPED]
        elif given.stage == "options":
            settings = list(peer_cases.option_settings(given.side, CASES[name]))
        elif given.stage == "microbatches":
            settings = (
                list(peer_cases.microbatch_settings(CASES[name]))
                if given.side == "maxtext"
                else [SHIPPED]
            )
        elif given.stage == "attention":
            settings = list(peer_cases.attention_settings(CASES[name]))
        elif given.stage == "all":
            settings = list(peer_cases.all_settings(given.side, CASES[name]))
        else:
            settings = list(
                peer_cases.remat_settings(given.side, best_options(given.side, name, given.cache))
            )
        for setting in settings:
            if given.only and not any(word in setting.slug() for word in given.only):
                continue
            compile_side(given.side, name, setting, given.cache, given.maxtext)
            row = read(given.side, name, setting, given.cache)
            assert row is not None
            print(peer_tables.line_of(row), flush=True)
            if given.report:
                with given.report.open("a", encoding="utf-8") as out:
                    out.write(peer_tables.line_of(row) + "\n")


def read_all(given: argparse.Namespace) -> None:
    """Reads every program in the cache; writes the results and the tables. Rows of other programs are kept."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    found = {(row["side"], row["case"], row["setting"]): row for row in kept}
    for name in given.case or CASES:
        for side in ("maxtext", "ours"):
            for setting in peer_cases.all_settings(side, CASES[name]):
                if (row := read(side, name, setting, given.cache)) is not None:
                    found[side, name, row["setting"]] = row
    rows = list(found.values())
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    page = HERE.parent / "docs" / "peers.md"
    page.write_text(peer_tables.fill(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    put_rows(
        "peers.py",
        "Every program compiled for the comparison with MaxText",
        peer_tables.evidence(rows),
    )
    below = [
        row["case"] + " " + row["setting"]
        for row in rows
        if "error" not in row and (row["census"]["doubt"] or not row["above_floor"])
    ]
    if below:
        raise SystemExit(
            f"steps faster than their FLOPs at the peak, so a reading is wrong: {', '.join(below)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    compiling, reading = verbs.add_parser("compile"), verbs.add_parser("read")
    for verb in (compiling, reading):
        verb.add_argument("--case", choices=CASES, action="append")
        verb.add_argument("--cache", type=Path, required=True, help="folder of compiled programs")
    compiling.set_defaults(do=compile_stage)
    compiling.add_argument("side", choices=("maxtext", "ours"))
    compiling.add_argument(
        "--stage",
        choices=("shipped", "options", "remat", "microbatches", "attention", "all"),
        required=True,
    )
    compiling.add_argument(
        "--only", action="append", help="settings whose file name has this in it"
    )
    compiling.add_argument("--maxtext", help="Python of an environment that has MaxText")
    compiling.add_argument("--report", type=Path, help="file that receives one line per program")
    reading.set_defaults(do=read_all)
    reading.add_argument(
        "--source",
        action="append",
        help="version of ours to read, a Git hash of `src`; default: of this checkout",
    )
    given = parser.parse_args()
    given.cache = Cache(given.cache, tuple(getattr(given, "source", None) or (source_version(),)))
    given.do(given)


if __name__ == "__main__":
    main()
