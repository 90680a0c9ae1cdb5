"""Tables of the comparison with MaxText, made from results/peers.json. A ratio never stands without both settings."""

import re
from typing import Any

from peer_cases import CASES

from meshwright.hardware.targets import parse_target
from meshwright.planner.records import SAME_SIZE, read_records

BEGIN, END = "<!-- tables: bench/peers.py -->\n", "<!-- end of the tables -->\n"

RECORDS = "Our step as shipped beside what was measured, by one count of FLOPs (`planner/data/records.json`):"

Row = dict[str, Any]

_GIB = 2**30


def line_of(row: Row) -> str:
    """Returns one compiled program in one line."""
    head = f"{row['case']} {row['side']}: {row['setting']}: "
    if "error" in row:
        return f"{head}does not compile: {row['error'][:160]}"
    census, second = row["census"], row["second"]
    missing = [*second["doubts"], *census.get("unpriced", ())]
    return (
        f"{head}{census['seconds']:.3f} s (census), {second['seconds']:.3f} s (second reading); "
        f"exposed {census['exposed']:.3f} / {second['exposed']:.3f} s; sent {second['sent'] / 1e9:.0f} GB; "
        f"peak {row['peak'] / _GIB:.1f} GiB, heap {row['heap'] / _GIB:.1f} GiB; "
        f"FLOPs {row['flops'] / 1e12:.0f} T = {row['flops_ratio']:.2f} x the model's; compiled in "
        f"{row['compile_seconds']:.0f} s{'' if row['above_floor'] else '; FASTER THAN ITS FLOPS AT THE PEAK'}"
        f"{'; not priced: ' + ', '.join(missing) if missing else ''}"
    )


def best_of(rows: list[Row]) -> Row | None:
    """Returns the fastest program by the census, of those that compile."""
    timed = [row for row in rows if "error" not in row]
    return min(timed, key=lambda row: float(row["census"]["seconds"]), default=None)


def pairs_of(rows: list[Row], case: str) -> list[tuple[str, Row, Row]]:
    """Pairs the two sides of a case: as shipped, the best that the search found, ours as shipped against their best."""
    sides = {
        side: [row for row in rows if row["case"] == case and row["side"] == side]
        for side in ("maxtext", "ours")
    }
    shipped = {
        side: best_of([row for row in of if row["remat"] is None]) for side, of in sides.items()
    }
    searched = {side: [row for row in of if row["remat"] is not None] for side, of in sides.items()}
    pairs = [("as shipped", shipped["maxtext"], shipped["ours"])]
    if any("error" not in row for row in searched["maxtext"]):
        best = best_of(sides["maxtext"])
        tried = len(searched["maxtext"])
        settings = f"{tried} setting{'' if tried == 1 else 's'}"
        pairs.append((f"ours as shipped, MaxText searched, {settings}", best, shipped["ours"]))
        if any("error" not in row for row in searched["ours"]):
            pairs.append(("both searched", best, best_of(sides["ours"])))
    return [
        (name, theirs, ours)
        for name, theirs, ours in pairs
        if theirs is not None and ours is not None
    ]


def comparison(rows: list[Row]) -> str:
    """Returns both sides of each pair as Markdown, each time with its setting."""
    lines = [
        "| model, machine, tokens | effort | MaxText's setting | seconds | Meshwright's setting | seconds | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        for number, (effort, theirs, ours) in enumerate(pairs_of(rows, name)):
            ratios = [ours[by]["seconds"] / theirs[by]["seconds"] for by in ("census", "second")]
            lines.append(
                f"| {case.summary() if not number else ''} | {effort} | {theirs['setting']} | {_times(theirs)} | "
                f"{ours['setting']} | {_times(ours)} | {ratios[0]:.2f}, {ratios[1]:.2f} |"
            )
    if len(lines) == 2:
        return (
            "No case has both sides compiled yet; the table of every program has what there is.\n"
        )
    return "\n".join(lines) + "\n"


def above_records(rows: list[Row]) -> str:
    """Returns the predicted MFU of our step as shipped beside the highest that were measured, as Markdown."""
    lines = [
        "| case | predicted MFU, two readings | highest measured on the chip | of models of this size |",
        "|---|---|---|---|",
    ]
    for name, case in CASES.items():
        ours = best_of(
            [r for r in rows if (r["case"], r["side"], r["remat"]) == (name, "ours", None)]
        )
        if ours is None:
            continue
        chip = parse_target(case.target).chip
        per_token = ours["theory"]["model"] * case.chips / (case.batch * case.seq)
        measured = [r for r in read_records() if r.family == chip.family and not r.below_bfloat16]
        of_size = [r for r in measured if 1 / SAME_SIZE < r.flops_per_token / per_token < SAME_SIZE]
        found = []
        for reading in ("census", "second"):
            mfu = ours["theory"]["model"] / ours[reading]["seconds"] / chip.flops_bf16
            mark = "above" if mfu > measured[0].mfu else "below"
            found.append(f"{mfu:.1%} ({mark})")
        nearest = str(of_size[0]) if of_size else "no run published"
        lines.append(f"| {case.summary()} | {', '.join(found)} | {measured[0]} | {nearest} |")
    return "\n".join(lines) + "\n"


def evidence(rows: list[Row]) -> str:
    """Returns every program that was compiled, with what a reader needs to doubt its time."""
    lines = [
        "| case | side | setting | step, s | exposed, s | sent, GB | peak, heap, GiB | TFLOP | of model | at peak, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (list(CASES).index(row["case"]), row["side"])):
        head = f"| {row['case']} | {'MaxText' if row['side'] == 'maxtext' else 'Meshwright'} | {row['setting']} "
        if "error" in row:
            lines.append(f"{head}| {failure_of(row['error'])} | | | | | | |")
            continue
        second = row["second"]
        lines.append(
            f"{head}| {_times(row)} | {row['census']['exposed']:.2g}, {second['exposed']:.2g} | "
            f"{second['sent'] / 1e9:.0f} | {row['peak'] / _GIB:.1f}, {row['heap'] / _GIB:.1f} | "
            f"{row['flops'] / 1e12:.0f} | {row['flops_ratio']:.2f} | {second['floor']:#.3g} |"
        )
    return "\n".join(lines) + "\n"


def fill(page: str, rows: list[Row]) -> str:
    """Returns the page with its table made again."""
    before, rest = page.split(BEGIN)
    tables = f"\n{comparison(rows)}\n{RECORDS}\n\n{above_records(rows)}\n"
    return before + BEGIN + tables + END + rest.split(END)[1]


def _times(row: Row) -> str:
    return f"{row['census']['seconds']:#.3g}, {row['second']['seconds']:#.3g}"


def failure_of(error: str) -> str:
    """Says why a program was not compiled, from the compiler's error."""
    return (
        "does not fit" if re.search("RESOURCE_EXHAUSTED|memory|HBM", error) else "does not compile"
    )
