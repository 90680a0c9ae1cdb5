"""The settings of a stage of MaxText's search, and ours as shipped, ranked by their schedules before code is generated.

    python bench/peer_schedules.py compile --maxtext VENV/bin/python --cache FOLDER
    python bench/peer_schedules.py read --cache FOLDER

A whole compilation of 8B with fused attention takes a quarter of an hour and more, nine tenths of it to generate code;
the scheduled program is there after a minute (`maxtext_compile.py --schedule`). It lacks the compiler's cycles of each
matmul: the census takes its FLOPs at the chip's fraction of the peak, the second reading at the peak. `read` writes
results/peer_schedules.json and the table of docs/peers.md. The best setting is worth a whole compilation by `peers.py`.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peer_cases
import peers
from hlo_lines import with_elements
from page_table import put_table
from peer_tables import failure_of
from second_reading import read_program

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "peer_schedules.json"
PAGE = HERE.parent / "docs" / "peers.md"
SCRIPT = "peer_schedules.py"
NAME = "8b"
OURS = "ours-as-shipped"
_PROGRAM = "*.jit_train_step.*.after_optimizations_after_buffer_assignment.txt"
_REPORT = "*.jit_train_step.*.after_optimizations-memory-usage-report.txt"
"""Files of XLA's dump; the second comes after the first."""


def compile_schedules(given: argparse.Namespace) -> None:
    """Schedules ours and the settings of MaxText that the cache lacks."""
    compile_ours(given)
    case = peer_cases.CASES[NAME]
    for setting in peer_cases.attention_settings(case):
        folder = given.cache / setting.slug()
        if (folder / "facts.json").is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--schedule", *peer_cases.arguments("maxtext", case, setting)]
        facts = peers.compile_maxtext(given.maxtext, case.target, words, folder)
        (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(setting.summary(), facts.get("error", "scheduled"), flush=True)


def compile_ours(given: argparse.Namespace) -> None:
    """Schedules our step as shipped, unless the cache has it: `prove`, ended when XLA has dumped the scheduled program."""
    folder = given.cache / OURS
    if (folder / "facts.json").is_file():
        return
    dumps = folder / "dump"
    dumps.mkdir(parents=True, exist_ok=True)
    words = peer_cases.arguments("ours", peer_cases.CASES[NAME], peer_cases.SHIPPED)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "prove", *words],
        env={**os.environ, "XLA_FLAGS": f"--xla_dump_to={dumps} --xla_dump_hlo_as_text"},
    )
    while not list(dumps.glob(_REPORT)):
        if process.poll() is not None:
            raise SystemExit(f"prove ended with {process.returncode} before it had a schedule")
        time.sleep(0.5)
    time.sleep(5)  # the files are being written
    process.terminate()
    process.wait()
    keep_dump(folder)


def keep_dump(folder: Path) -> None:
    """Writes the scheduled program of a folder's dump, and removes the dump."""
    dumps = folder / "dump"
    text = with_elements(next(dumps.glob(_PROGRAM)).read_text(encoding="utf-8"))
    with gzip.open(folder / "program.hlo.gz", "wt", encoding="utf-8") as out:
        out.write(text)
    facts = {"source": peers.source_version(), "versions": {}}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(dumps)


def read_schedules(given: argparse.Namespace) -> None:
    """Reads the schedules of the cache, and writes results and table."""
    case = peer_cases.CASES[NAME]
    rows = []
    settings = {
        setting.slug(): setting.summary() for setting in peer_cases.attention_settings(case)
    }
    for slug, summary in {OURS: "ours, as shipped", **settings}.items():
        row: dict[str, Any] = {"case": NAME, "setting": summary}
        found = (given.cache / slug / "facts.json").is_file()
        rows.append({**row, **(_read(given.cache / slug, case) if found else {})})
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    put_table(PAGE, SCRIPT, table(rows))


def _read(folder: Path, case: peer_cases.Case) -> dict[str, Any]:
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    if "error" in facts:
        return {"error": facts["error"]}
    with gzip.open(folder / "program.hlo.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    census = peers.census_of(text, case.target, case.chips, {})
    second = read_program(text, case.target)
    return {
        "census": {key: census[key] for key in ("seconds", "by_kind", "unpriced")},
        "second": {key: second[key] for key in ("seconds", "by_kind", "doubts", "floor")},
        "versions": facts["versions"],
        "source": facts.get("source"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the settings, fastest first, then those that do not fit, as Markdown."""
    kinds = ("matmul", "attention", "memory", "exposed")
    lines = [
        f"| setting, {NAME} | census, s | {', '.join(kinds)} | second reading, s |",
        "|---|---|---|---|",
    ]
    fitting = [row for row in rows if "census" in row]
    for row in sorted(fitting, key=lambda row: float(row["census"]["seconds"])):
        found = row["census"]["by_kind"]
        parts = ", ".join(f"{found.get(kind, 0.0):.2f}" for kind in kinds)
        lines.append(
            f"| {row['setting']} | {row['census']['seconds']:.3g} | {parts} | {row['second']['seconds']:.3g} |"
        )
    for row in rows:
        if "census" not in row:
            state = failure_of(row["error"]) if "error" in row else "not scheduled yet"
            lines.append(f"| {row['setting']} | {state} | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    compiling, reading = verbs.add_parser("compile"), verbs.add_parser("read")
    for verb, action in ((compiling, compile_schedules), (reading, read_schedules)):
        verb.add_argument("--cache", type=Path, required=True, help="folder of scheduled programs")
        verb.set_defaults(do=action)
    compiling.add_argument("--maxtext", required=True, help="Python of an environment with MaxText")
    given = parser.parse_args()
    given.do(given)


if __name__ == "__main__":
    main()
