"""Programs of other people through the census, on every compiler that is here, beside a second count.

`python bench/foreign_programs.py [--on cpu,v5e:2x4,...] [--only NAME,...]`. The programs of tests/analysis/foreign are
after the documentation of JAX, Flax, Equinox, Optax, the scaling book, MaxText and torchax; each names its source. The
census must not fail, its ledger and FLOPs must equal a second count that shares no code with it (second_count.py), and
the parts of that count explain the compiler's cost analysis. Results go to bench/results/foreign.json and
foreign_programs.md, the sums to docs/census.md. Needs libtpu for TPUs and the wheels that `meshwright prove` names for
GPUs; torchax's program is left out where torchax is not installed.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from page_table import put_rows, put_table

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "analysis" / "foreign"
RESULTS = ROOT / "bench" / "results" / "foreign.json"
PAGE = ROOT / "docs" / "census.md"
TARGETS = ("cpu", "v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1", "h100:1x8")
_HELPERS = ("placed", "second_count")
SMALL = 0.01
"""Fraction of the cost analysis below which a remainder is rounding of its elementwise operations."""


def names() -> list[str]:
    """Lists the programs by name."""
    return sorted(p.stem for p in PROGRAMS.glob("*.py") if p.stem not in _HELPERS)


def devices_for(on: str) -> tuple[list[Any], Any]:
    """Returns eight devices of a target and the target; the environment is set before JAX is imported."""
    if on == "cpu":
        os.environ |= {"JAX_PLATFORMS": "cpu"}
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
        )
        import jax

        return jax.devices(), None
    from meshwright.hardware.aot import compiler_environment, require_compiler, topology_devices
    from meshwright.hardware.targets import parse_target

    target = parse_target(on)
    require_compiler(target)
    os.environ |= compiler_environment(target)
    return topology_devices(target)[:8], target


def row_of(name: str, on: str, devices: list[Any], target: Any) -> dict[str, Any]:
    """Takes the census of a program and counts it again."""
    import second_count

    import meshwright as mw
    from meshwright.analysis.run_census import located_devices

    module = importlib.import_module(name)
    head = {"program": name, "source": source_of(module.__doc__ or ""), "on": on}
    started = time.perf_counter()
    try:
        function, arguments = module.build(devices)
        located = None if target is None else located_devices(devices, target)
        census = mw.census(function, *arguments, target=located)
    except ModuleNotFoundError as error:
        return {**head, "missing": str(error.name)}
    except Exception as error:
        return {**head, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    second, ours = second_count.count(census.text), second_count.kinds(list(census.ledger))
    return {
        **head,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": census.versions,
        "ledger": ours,
        "second_ledger": second.collectives,
        "unread": len(census.unread),
        "flops": census.flops.compiled,
        "second_flops": second.matmul,
        "unpriced": dict(census.flops.unpriced),
        "cost_analysis": census.flops.cost_analysis,
        "products_once": second.matmul_once,
        "elementwise_once": second.elementwise_once,
    }


def source_of(docstring: str) -> str:
    """Returns the address that a program's docstring names."""
    return next((word for word in docstring.split() if word.startswith("https://")), "")


def equal(row: dict[str, Any]) -> bool:
    """Whether ledger and FLOPs of the census are those of the second count."""
    same = {k: tuple(v) for k, v in row["ledger"].items()} == {
        k: tuple(v) for k, v in row["second_ledger"].items()
    }
    return (
        same
        and not row["unread"]
        and abs(row["flops"] - row["second_flops"]) <= 1e-9 * max(1.0, row["flops"])
    )


def explanation(row: dict[str, Any]) -> str:
    """Returns why the compiler's cost analysis differs from the census's FLOPs."""
    cost = row["cost_analysis"]
    if not cost:
        return "the compiler has no cost analysis"
    parts = []
    if row["products_once"] != row["second_flops"]:
        parts.append(
            f"loop bodies and branches once {row['products_once'] - row['second_flops']:+.3g}"
        )
    parts.append(f"elementwise and reductions +{row['elementwise_once']:.3g}")
    rest = cost - row["products_once"] - row["elementwise_once"]
    if abs(rest) > SMALL * cost:
        parts.append(f"not explained {rest / cost:+.1%}")
    return ", ".join(parts)


def run(on: str, only: list[str]) -> list[dict[str, Any]]:
    """Compiles programs for a target in a process of their own."""
    words = [sys.executable, __file__, "--child", on, "--only", ",".join(only)]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"program"')]
    for name in only[len(rows) :][:1]:
        # A compiler for absent hardware may end its process.
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        rows.append(
            {"program": name, "source": "", "on": on, "error": f"the process ended: {last[:300]}"}
        )
        rows += run(on, only[len(rows) :]) if len(rows) < len(only) else []
    return rows


def row_table(rows: list[dict[str, Any]]) -> str:
    """Returns one line of Markdown for each program."""
    targets = [on for on in TARGETS if any(row["on"] == on for row in rows)]
    lines = [
        "| program | "
        + " | ".join(on.partition(":")[0] for on in targets)
        + " | FLOPs and cost analysis on CPU |",
        "|---|" + "---|" * (len(targets) + 1),
    ]
    for name in sorted({row["program"] for row in rows}):
        own = {row["on"]: row for row in rows if row["program"] == name}
        cells = [_cell(own.get(on)) for on in targets]
        source = next((row["source"] for row in own.values() if row["source"]), "")
        cpu = own.get("cpu", {})
        why = (
            f"{cpu['flops']:.4g}; {cpu['cost_analysis']:.4g}: {explanation(cpu)}"
            if "flops" in cpu
            else ""
        )
        lines.append(f"| [{name}]({source}) | " + " | ".join(cells) + f" | {why} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "missing" in row:
        return ""
    if "error" in row:
        return "refused"
    entries = sum(n for n, _ in row["ledger"].values())
    return f"{entries} {'=' if equal(row) else 'DIFFERS'}"


def sums(rows: list[dict[str, Any]], targets: list[str]) -> list[str]:
    """Returns one line a target: programs, equal counts, and how far the cost analysis is explained."""
    lines = []
    for on in targets:
        read = [row for row in rows if row["on"] == on and "ledger" in row]
        refused = [row for row in rows if row["on"] == on and "error" in row]
        costed = [row for row in read if row["cost_analysis"]]
        rest = [
            abs(r["cost_analysis"] - r["products_once"] - r["elementwise_once"])
            / r["cost_analysis"]
            for r in costed
        ]
        entries = sum(n for row in read for n, _ in row["ledger"].values())
        versions = next((row["versions"] for row in read), "")
        lines.append(
            f"- **{on}** ({versions}): {sum(map(equal, read))} of {len(read)} programs with {entries} executions of "
            f"collectives equal the second count"
            + (
                f"; {len(refused)} refused by the compiler ({', '.join(r['program'] for r in refused)})"
                if refused
                else ""
            )
            + (
                f"; the cost analysis is explained within 1 % in {sum(r <= SMALL for r in rest)} of {len(rest)}"
                if rest
                else ""
            )
            + (f", at worst {max(rest):.1%}" if rest else "")
            + "."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default=",".join(TARGETS), help="targets, separated by commas")
    parser.add_argument("--only", default="", help="programs, separated by commas")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    only = given.only.split(",") if given.only else names()
    if given.child:
        sys.path.insert(0, str(PROGRAMS))
        devices, target = devices_for(given.child)
        for name in only:
            print(json.dumps(row_of(name, given.child, devices, target)), flush=True)
        return
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    for on in given.on.split(","):
        new = [row for row in run(on, only) if "missing" not in row]
        redone = {(row["program"], row["on"]) for row in new}
        rows = sorted(
            [row for row in rows if (row["program"], row["on"]) not in redone] + new,
            key=lambda row: (
                row["program"],
                TARGETS.index(row["on"]) if row["on"] in TARGETS else len(TARGETS),
            ),
        )
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    targets = [on for on in TARGETS if any(row["on"] == on for row in rows)]
    put_table(PAGE, "foreign_programs.py", "\n".join(sums(rows, targets)) + "\n")
    put_rows("foreign_programs.py", "Ledgers and FLOPs of other people's programs", row_table(rows))
    print(row_table(rows))


if __name__ == "__main__":
    main()
