"""Other people's recipes, compiled here and read, beside the steps that their hardware measured.

    python bench/measured_recipes.py compile --maxtext VENV/bin/python --cache FOLDER [--only NAME]
    python bench/measured_recipes.py read --cache FOLDER

A recipe is what its authors ran: model, batch, remat policy, attention kernel and compiler options, with the versions
of bench/README.md in place of theirs. No constant was fitted to what is read of these programs. `read` prices each by
the census's simulated schedule and by `second_reading.py`, and writes results/measured_recipes.json and the tables of
docs/foresight.md; programs that the cache lacks keep their row.

`compile --schedule` ends before code is generated, which takes nine tenths of the time (`maxtext_compile.py`). Such a program
has no cycles of the compiler: the census takes matmuls at the chip's fraction of the peak, the second reading at the
peak. The table says `scheduled`.
"""

import argparse
import csv
import dataclasses
import gzip
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import peers
from page_table import put_table
from second_reading import read_program

HERE = Path(__file__).parent
sys.path.append(str(HERE / "foresight"))
RESULTS = HERE / "results" / "measured_recipes.json"
H100 = HERE / "results" / "h100.json"
PUBLISHED = HERE / "foresight" / "published.csv"
V6E_STEPS = HERE / "foresight" / "v6e-steps.csv"
PAGE = HERE.parent / "docs" / "foresight.md"
SCRIPT = "measured_recipes.py"

_HOST = (
    "xla_tpu_enable_all_experimental_scheduler_features=true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking=true",
    "xla_tpu_host_transfer_overlap_limit=24",
    "xla_tpu_aggressive_opt_barrier_removal=ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall=ENABLED",
    "xla_tpu_enable_ag_backward_pipelining=true",
    "xla_should_allow_loop_variant_parameter_in_chain=ENABLED",
    "xla_should_add_loop_invariant_op_in_chain=ENABLED",
    "xla_max_concurrent_host_send_recv=100",
    "xla_tpu_scheduler_percent_shared_memory_limit=100",
    "xla_latency_hiding_scheduler_rerun=2",
)
_DATA_PARALLEL = (
    "xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "xla_tpu_data_parallel_opt_different_sized_ops=true",
)
_LAYOUT = (
    "xla_tpu_use_minor_sharding_for_major_trivial_input=true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
    "xla_tpu_assign_all_reduce_scatter_layout=true",
)
_VMEM = ("xla_tpu_scoped_vmem_limit_kib=98304",)
_FUSED_ALL_GATHER = (
    "xla_tpu_enable_async_collective_fusion=true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "xla_tpu_overlap_compute_collective_tc=true",
    "xla_enable_async_all_gather=true",
)
_SPARSE_ALL_REDUCE = (
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
    "xla_tpu_enable_all_reduce_offload_tracing=true",
    "xla_tpu_use_tc_device_shape_on_sc=true",
    "xla_sc_enable_instruction_fusion=false",
    "xla_sc_disjoint_spmem=false",
    "xla_sc_disable_megacore_partitioning=true",
)
_NOT_WINDOWED = ("xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",)
"""Sets of options of MaxText's benchmarks/xla_flags_library.py, as published."""

REFUSED = {
    "xla_sc_disjoint_spmem": "unknown to it",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "for v5e only, with the option of async all-gathers",
}
"""Options that libtpu 0.0.52 refuses, and why. Each is left out of the recipes that have it, and the table says so."""

_BLOCKS = tuple(
    f"sa_block_{name}=2048"
    for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
)
_FIVE_OFFLOADED = (
    "remat_policy=custom",
    *(
        f"{name}=offload"
        for name in ("decoder_layer_input", "out_proj", "query_proj", "key_proj", "value_proj")
    ),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published setting of MaxText, and the row that has its measured step."""

    name: str
    row: str
    """Id in foresight/published.csv or foresight/v6e-steps.csv."""
    settings_of: str
    """Where the settings are published."""
    target: str
    topology: str
    """As MaxText names it."""
    chips: int
    words: tuple[str, ...]
    options: tuple[str, ...]

    def left_out(self) -> list[str]:
        """Returns the recipe's options that the compiler refuses."""
        return [option for option in self.options if option.partition("=")[0] in REFUSED]

    def arguments(self) -> list[str]:
        """Returns MaxText's arguments, without the options that the compiler refuses."""
        accepted = [option for option in self.options if option not in self.left_out()]
        flags = " ".join(f"--{option}" for option in accepted)
        return [
            f"compile_topology={self.topology}",
            f"ici_fsdp_parallelism={self.chips}",
            "attention=flash",
            *self.words,
            f"compile_xla_flags={flags}",
        ]


RECIPES = (
    Recipe(
        "Qwen3 8B",
        "cc-mt-0602-maxtext-qwen3-8b-v6e8-ref-seq8192",
        "the row's page: llama3_1_8b_8192_no_collective_matmul of MaxText's tpu-recipes-v0.1.4, with this model",
        "v6e:2x4",
        "v6e-8",
        8,
        (
            "model_name=qwen3-8b", "per_device_batch_size=3", "max_target_length=8192", "use_iota_embed=true",
            *_FIVE_OFFLOADED, *_BLOCKS, "sa_use_fused_bwd_kernel=true",
        ),
        (
            *_VMEM, *_LAYOUT, *_DATA_PARALLEL, *_FUSED_ALL_GATHER, *_SPARSE_ALL_REDUCE, *_HOST, *_NOT_WINDOWED,
        ),
    ),
    Recipe(
        "Llama 3.1 405B",
        "P042",
        "AI-Hypercomputer/tpu-recipes, training/v5p/Llama3.1-405B-MaxText",
        "v5p:8x8x8",
        "v5p-1024",
        512,
        (
            "model_name=llama3.1-405b", "per_device_batch_size=2", "max_target_length=8192", "use_iota_embed=true",
            "remat_policy=custom", "context=offload", "mlpwo=offload", "num_vocab_tiling=4", *_BLOCKS,
        ),
        (*_VMEM, *_FUSED_ALL_GATHER, *_HOST),
    ),
    Recipe(
        "Llama 3.1 8B",
        "P032",
        "AI-Hypercomputer/tpu-recipes, training/trillium/Llama3.1-8B-MaxText/v6e-256",
        "v6e:16x16",
        "v6e-256",
        256,
        (
            "model_name=llama3.1-8b", "per_device_batch_size=4", "max_target_length=8192", "use_iota_embed=true",
            *_FIVE_OFFLOADED, *_BLOCKS, "sa_use_fused_bwd_kernel=true",
        ),
        (*_VMEM, *_LAYOUT, *_DATA_PARALLEL, *_FUSED_ALL_GATHER, *_SPARSE_ALL_REDUCE, *_HOST),
    ),
    Recipe(
        "Llama 2 70B",
        "P254",
        "AI-Hypercomputer/maxtext, MaxText/configs/v5p/llama2_70b.sh; the row states none",
        "v5p:8x8x8",
        "v5p-1024",
        512,
        (
            "model_name=llama2-70b", "per_device_batch_size=2", "max_target_length=4096", "use_iota_embed=true",
            "remat_policy=save_dot_except_mlpwi",
        ),
        (
            "xla_tpu_megacore_fusion_allow_ags=false", "xla_enable_async_collective_permute=true",
            "xla_tpu_enable_ag_backward_pipelining=true", *_FUSED_ALL_GATHER, *_DATA_PARALLEL,
        ),
    ),
)  # fmt: skip
"""Recipes of MaxText whose steps are published."""


def measured(row_id: str) -> dict[str, float]:
    """Returns the measured seconds of a row's step, and of its profile by kind where it has one."""
    with PUBLISHED.open(encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            if row["id"] == row_id:
                return {"step": float(row["measured_step_time_s"])}
    with V6E_STEPS.open(encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            if row["id"] == row_id:
                return _profile(row)
    raise KeyError(row_id)


_KINDS = {
    "matmul": ("ms_matmul_fusion",),
    "attention": ("ms_attention_kernel",),
    "elementwise": ("ms_loop_fusion", "ms_data_formatting"),
    "exposed": ("ms_collective_exposed",),
}
"""Kinds of operation: the columns of a profile that add up to each."""

_READ_AS = {
    "census": {"elementwise": "memory"},
    "second": {"elementwise": "memory", "exposed": "wait: collective"},
}
"""Names of those kinds in a reading, where it has another."""


def _profile(row: dict[str, str]) -> dict[str, float]:
    found = {"step": float(row["step_ms"]) / 1e3}
    for kind, columns in _KINDS.items():
        if all(row[column] for column in columns):
            found[kind] = sum(float(row[column]) for column in columns) / 1e3
    return found


def compile_recipes(given: argparse.Namespace) -> None:
    """Compiles the recipes that the cache lacks."""
    for recipe in RECIPES:
        if given.only and not any(word in recipe.name for word in given.only):
            continue
        folder = given.cache / recipe.row
        if (folder / "facts.json").is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        words = [*(["--schedule"] if given.schedule else []), *recipe.arguments()]
        facts = peers.compile_maxtext(given.maxtext, recipe.target, words, folder)
        (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(
            recipe.name, facts.get("error", f"{facts.get('compile_seconds', 0):.0f} s"), flush=True
        )


def describe(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe beside its measured step."""
    return {
        "name": recipe.name,
        "row": recipe.row,
        "settings_of": recipe.settings_of,
        "target": recipe.target,
        "chips": recipe.chips,
        "arguments": recipe.arguments(),
        "left_out": recipe.left_out(),
        "measured": measured(recipe.row),
    }


def read_recipe(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Returns the two readings of a compiled recipe beside its measured step."""
    row = describe(recipe)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    if "error" in facts:
        return {**row, "error": facts["error"]}
    with gzip.open(folder / "program.hlo.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    census = peers.census_of(text, recipe.target, recipe.chips, {})
    second = read_program(text, recipe.target)
    return {
        **row,
        "census": {key: census[key] for key in ("seconds", "by_kind", "unpriced")},
        "second": {key: second[key] for key in ("seconds", "by_kind", "doubts")},
        "scheduled_only": facts.get("scheduled_only", False),
        "versions": facts["versions"],
    }


def read_recipes(given: argparse.Namespace) -> None:
    """Reads every recipe of the cache, and writes results and tables."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    rows = {row["row"]: row for row in kept}
    for recipe in RECIPES:
        folder = given.cache / recipe.row
        if (folder / "facts.json").is_file():
            rows[recipe.row] = read_recipe(recipe, folder)
    ordered = [rows.get(recipe.row) or describe(recipe) for recipe in RECIPES]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    put_table(PAGE, SCRIPT, table(ordered, json.loads(H100.read_text(encoding="utf-8"))["steps"]))


def table(recipes: Iterable[dict[str, Any]], h100: Sequence[dict[str, Any]]) -> str:
    """Returns measured and read steps, then kinds of operation where a profile has them, as Markdown."""
    recipes = list(recipes)
    lines = [
        "| program | machine | options refused | measured, s | census, s | second reading, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in recipes:
        refused = ", ".join(f"`{option}`" for option in row["left_out"])
        seconds = row["measured"]["step"]
        scheduled = ", scheduled" if row.get("scheduled_only") else ""
        head = f"| MaxText, {row['name']}{scheduled} | {row['target']} | {refused} | {seconds:.4g} "
        if "census" not in row:
            state = "does not compile" if "error" in row else "not compiled yet"
            lines.append(f"{head}| {state} | |")
            continue
        cells = [_beside(row[reading]["seconds"], seconds) for reading in _READ_AS]
        lines.append(f"{head}| {cells[0]} | {cells[1]} |")
    for step in h100:
        seconds = step["bare_seconds"]
        note = f", {step['note']}" if step["note"] else ""
        lines.append(
            f"| ours, {step['run']}{note} | h100:1 | | {seconds:.4g} | "
            f"{_beside(step['simulated_seconds'], seconds)} | |"
        )
    profiled = [row for row in recipes if len(row["measured"]) > 1 and "census" in row]
    if profiled:
        lines += [
            "",
            "| program | kind | measured, s | census, s | second reading, s |",
            "|---|---|---|---|---|",
        ]
    for row in profiled:
        readings = {reading: _kinds_read(row, reading) for reading in _READ_AS}
        for kind, seconds in _with_rest(row["measured"]).items():
            cells = [_beside(found[kind], seconds) for found in readings.values()]
            lines.append(
                f"| MaxText, {row['name']} | {kind} | {seconds:.2f} | {cells[0]} | {cells[1]} |"
            )
    return "\n".join(lines) + "\n"


def _kinds_read(row: dict[str, Any], reading: str) -> dict[str, float]:
    """Returns the seconds of a reading by the kinds that the row's profile has."""
    names, read = _READ_AS[reading], row[reading]
    found = {
        kind: read["by_kind"].get(names.get(kind, kind), 0.0)
        for kind in row["measured"]
        if kind != "step"
    }
    return _with_rest({"step": read["seconds"], **found})


def _with_rest(seconds: dict[str, float]) -> dict[str, float]:
    """Returns kinds of operation, and what remains of the step beside them."""
    kinds = {kind: value for kind, value in seconds.items() if kind != "step"}
    return {**kinds, "all else": seconds["step"] - sum(kinds.values())}


def _beside(read: float, seconds: float) -> str:
    return f"{read:.4g} ({read / seconds - 1:+.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    compiling, reading = verbs.add_parser("compile"), verbs.add_parser("read")
    for verb, action in ((compiling, compile_recipes), (reading, read_recipes)):
        verb.add_argument("--cache", type=Path, required=True, help="folder of compiled programs")
        verb.set_defaults(do=action)
    compiling.add_argument("--maxtext", required=True, help="Python of an environment with MaxText")
    compiling.add_argument(
        "--schedule", action="store_true", help="end before code is generated (maxtext_compile.py)"
    )
    compiling.add_argument("--only", action="append", help="recipes whose name has this in it")
    given = parser.parse_args()
    given.do(given)


if __name__ == "__main__":
    main()
