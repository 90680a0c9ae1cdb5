"""No printed difference or ratio is clamped: a loss that is shown as no gain hides what it was printed for.

A clamp is `max` of zero and a difference, or `min` of one and a ratio, in anything that plans, measures or prints. Of
0.0 or 1.0 anything else counts too: a difference or ratio may have a name.
Each that stands is judged here, with the reason why what it cuts off is not a figure that anyone reads.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = (
    "planner",
    "views",
    "report",
    "api",
    "cli",
    "analysis",
    "bench",
    "trainer",
    "generation",
)
FOLDERS = [
    *(ROOT / "src" / "meshwright" / room for room in ROOMS),
    ROOT / "src" / "xlacensus",
    ROOT / "docs",
    ROOT / "bench",
]
CLAMPS = {
    ("max", 0): ast.Sub,
    ("maximum", 0): ast.Sub,
    ("min", 1): ast.Div,
    ("minimum", 1): ast.Div,
}
"""Function and constant -> operation whose result they cut."""


def clamps_of(tree: ast.AST, room: str = "") -> Iterator[str]:
    """Yields the source of every clamp of a module. room: in `views` any `max` of zero and something is one."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == "clip":
            yield ast.unparse(node)
        drawn = room == "views" and name in ("max", "maximum")
        if drawn and any(isinstance(a, ast.Constant) and a.value == 0 for a in node.args):
            yield ast.unparse(node)
            continue
        for argument in node.args:
            if not isinstance(argument, ast.Constant) or not isinstance(
                argument.value, int | float
            ):
                continue
            operation = CLAMPS.get((name, argument.value))
            if operation is None:
                continue
            inner = (part for other in node.args for part in ast.walk(other))
            if isinstance(argument.value, float) or any(
                isinstance(part, ast.BinOp) and isinstance(part.op, operation) for part in inner
            ):
                yield ast.unparse(node)


def found_clamps() -> set[tuple[str, str]]:
    """Returns file and source of every clamp."""
    found = set[tuple[str, str]]()
    for folder in FOLDERS:
        for file in sorted(folder.rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            for clamp in clamps_of(ast.parse(text), file.parent.name):
                found.add((file.relative_to(ROOT).as_posix(), clamp))
    return found


COUNT = "a number of items, which is not negative"
INDEX = "an index into an array, whose ends it keeps"
WAIT = "a time that is waited, which is not negative"
AGE = "an age by the clock of another host, which may be ahead of this one"
JUDGED: dict[tuple[str, str], str] = {
    (
        "bench/compiled_plans.py",
        "min(axes.get_xlim()[0], axes.get_ylim()[0], 1.0)",
    ): "the ends of a plot's axes",
    ("bench/hlo_lines.py", "max(0, -(-(last - first + more) // step))"): COUNT,
    ("bench/hlo_lines.py", "max(0, min(out - 1, high) - low + 1)"): COUNT,
    ("bench/overheads.py", "max(0.0, STEP - took)"): WAIT,
    ("bench/reading.py", "max(0, deepest - 6)"): COUNT,
    ("bench/second_reading.py", "max(0.0, ends - out.seconds)"): WAIT,
    ("docs/ladder/11_experts.py", "np.maximum(loads - 16 * factor, 0)"): COUNT,
    ("docs/ladder/11_experts.py", "np.maximum(loads - 16, 0)"): COUNT,
    ("docs/ladder/9_pipeline.py", "jnp.clip(t - (STAGES - 1), 0, count - 1)"): INDEX,
    (
        "docs/ladder/problems/solutions/11_embedding_in_rows.py",
        "jnp.clip(own, 0, w.shape[0] - 1)",
    ): INDEX,
    (
        "docs/ladder/problems/solutions/12_cross_entropy_in_pieces.py",
        "jnp.clip(labels - axis_index(TENSOR) * w.shape[0], 0, w.shape[0] - 1)",
    ): INDEX,
    (
        "docs/ladder/problems/solutions/12_cross_entropy_in_pieces.py",
        "jnp.clip(own, 0, logits.shape[1] - 1)",
    ): INDEX,
    ("src/xlacensus/source_lints.py", "max(0.0, self.dense - self.needed)"): (
        "products of other groups' rows; a product that skips padding has none"
    ),
    (
        "src/xlacensus/layout_lints.py",
        "max(sizes[path] // shards - declared_bytes, 0)",
    ): "bytes that a layout wastes; of one that wastes none both layouts are printed",
    ("src/xlacensus/peak_memory.py", "min(1.0, compiled.temporary / peak.live_bytes)"): (
        "estimates are scaled down only; what they lack is printed as packing, with its sign"
    ),
    ("src/xlacensus/schedule.py", "max(0.0, lockstep - taken)"): WAIT,
    ("src/xlacensus/schedule.py", "max(0.0, span.start + span.seconds - self.now)"): WAIT,
    ("src/meshwright/api/proofs.py", "max(0, current - 2)"): INDEX,
    ("src/meshwright/bench/hardware/run.py", "max(0.0, ends - time.monotonic())"): WAIT,
    (
        "src/meshwright/generation/cache.py",
        "jnp.maximum(self.slot + jnp.arange(self.tokens) - self.first_B[:, None], 0)",
    ): INDEX,
    ("src/meshwright/generation/decoder.py", "max(0, longest - 1)"): COUNT,
    ("src/xlacensus/hlo/buffers.py", "max(0, min(high, b) - max(low, a))"): COUNT,
    ("src/meshwright/planner/attention.py", "max(0, first_query - window + 1)"): COUNT,
    ("src/xlacensus/kernel_bundles.py", "max(0, first_query - window + 1)"): COUNT,
    (
        "src/meshwright/planner/estimate.py",
        "max(0.0, sent / self.target.chip.host_bandwidth - overlapped)",
    ): WAIT,
    ("bench/foresight/other_programs.py", "max(0.0, seconds - fewer)"): WAIT,
    (
        "src/meshwright/planner/overlap.py",
        "min(1.0, self.computation[movement.during] / pieces[movement.during])",
    ): "no more of a transfer is overlapped than all of it",
    (
        "src/meshwright/planner/search.py",
        "min(1.0, free / more)",
    ): "no more layers save than there are",
    ("src/meshwright/planner/pipeline.py", "max(0.0, ticks - busy)"): WAIT,
    (
        "src/meshwright/planner/pipeline.py",
        "max(0.0, recomputed)",
    ): "tasks that recompute nothing differ from the microbatches by rounding only",
    (
        "src/meshwright/analysis/run_census.py",
        "min(1.0, fraction)",
    ): "rows of a buffer that hold tokens, no more than it has",
    (
        "bench/foresight/report.py",
        "min(1.0, ALONE[family] * statistics.mean(ratios))",
    ): "a constant of a prediction that is judged: no chip multiplies above its peak",
    (
        "bench/foresight/left_out.py",
        "min(1.0, ALONE[owner] * ratio)",
    ): "a constant of a prediction that is judged: no chip multiplies above its peak",
    (
        "src/meshwright/planner/step_kinds.py",
        "min(1.0, max(0.0, overlap))",
    ): "an end whose planned seconds are not those measured is refused with both",
    (
        "src/meshwright/planner/step_kinds.py",
        "max(0.0, overlap)",
    ): "an end whose planned seconds are not those measured is refused with both",
    ("src/meshwright/trainer/heartbeat.py", "max(0.0, now - status.st_mtime)"): AGE,
    ("src/meshwright/views/run_hosts.py", "max(0.0, now - at)"): AGE,
    (
        "src/meshwright/trainer/opening.py",
        "max(0, len(sources) - _MOST_SOURCES)",
    ): "how many sources are not named, which is none where all are",
    ("src/meshwright/views/run_status.py", "max(0.0, now - at)"): AGE,
    ("src/meshwright/views/run_status.py", "max(0.0, now - written)"): AGE,
    (
        "src/meshwright/views/run_status.py",
        "max(0, reached - to)",
    ): "steps lost: a restart that goes on from a later step lost none",
    ("src/meshwright/trainer/alarms.py", "max(0.0, now - self._began - self._others)"): AGE,
    ("src/meshwright/trainer/alarms.py", "max(0.0, until - time.monotonic())"): WAIT,
    (
        "src/meshwright/trainer/hosts.py",
        "min(1.0, limits.silence / 8)",
    ): "seconds between two looks",
}
"""File and source of a clamp -> why it stands."""


def test_every_clamp_is_judged() -> None:
    found = found_clamps()
    assert not found - JUDGED.keys(), "print the difference as it is, with its sign"
    assert not JUDGED.keys() - found, "no longer there"


def test_a_clamped_saving_would_be_found() -> None:
    source = "saved = None if same is None else max(0.0, 1 - best / same)\nfraction = min(1.0, done / all_of_it)"
    assert sorted(clamps_of(ast.parse(source))) == [
        "max(0.0, 1 - best / same)",
        "min(1.0, done / all_of_it)",
    ]
    named = "saved = max(0.0, difference)\nfraction = min(1.0, measured.ratio)"
    assert sorted(clamps_of(ast.parse(named))) == [
        "max(0.0, difference)",
        "min(1.0, measured.ratio)",
    ]
    assert not list(clamps_of(ast.parse("n = max(1, end - start); fraction = min(2, a / b)")))
    assert not list(clamps_of(ast.parse("n = max(0, count); fraction = min(1, count)")))
