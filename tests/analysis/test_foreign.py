"""Programs of other people: the census agrees with a second count, and finds nothing in those without mistakes."""

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import meshwright as mw
from meshwright.analysis.programs import Census

FOLDER = Path(__file__).parent / "foreign"
BENCH = Path(__file__).parents[2] / "bench" / "foreign_programs.py"
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("placed", "second_count"))
sys.path.insert(0, str(FOLDER))

# Compiled in half a second each; the others are exhaustive.
FAST = (
    "equinox_parallelism", "flax_nnx_gspmd", "jax_batch_parallel", "jax_checkpoint_scan", "jax_control_flow",
    "jax_explicit_sharding", "jax_model_parallel", "jax_shard_map_fsdp", "jax_shard_map_matmul",
    "jax_shard_map_ring_matmul", "jax_shard_map_tensor_parallel", "optax_gradient_accumulation",
    "scaling_book_megatron", "scaling_book_moe",
)  # fmt: skip
MOST_UNEXPLAINED = 0.01
"""Fraction of the compiler's cost analysis that products and elementwise operations need not explain."""


def rows(names: Any, fast: tuple[str, ...] = FAST) -> list[Any]:
    return [
        name if name in fast else pytest.param(name, marks=pytest.mark.exhaustive) for name in names
    ]


@functools.cache
def census_of(name: str) -> Census:
    module = importlib.import_module(name)
    function, arguments = module.build(jax.devices())
    return mw.census(function, *arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", rows(NAMES))
def test_a_second_count_agrees(name: str) -> None:
    if name == "torchax_step" and importlib.util.find_spec("torchax") is None:
        pytest.skip("torchax is not installed")
    from second_count import count, kinds

    census = census_of(name)
    second = count(census.text)
    assert kinds(list(census.ledger)) == second.collectives and census.unread == ()
    assert census.flops.compiled == pytest.approx(second.matmul, rel=1e-9)
    # XLA's cost analysis counts the body of a loop once, and one operation for each element.
    explained = second.matmul_once + second.elementwise_once
    assert census.flops.cost_analysis == pytest.approx(explained, rel=MOST_UNEXPLAINED)
    assert dict(census.flops.unpriced) == {} and census.doubts == ()


# Written collectives first; then what the compiler shards: data parallel, FSDP and tensor parallel by shardings of
# arguments, constraints and explicit types.
CLEAN = (
    "jax_shard_map_matmul", "jax_shard_map_ring_matmul", "jax_shard_map_fsdp", "jax_shard_map_tensor_parallel",
    "jax_shard_map_pipeline", "scaling_book_megatron", "scaling_book_moe", "jax_ring_attention",
    "jax_model_parallel", "jax_explicit_sharding", "jax_checkpoint_scan", "jax_host_offload", "jax_training_cookbook",
    "maxtext_step", "flax_nnx_scan", "optax_getting_started",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", rows(CLEAN))
def test_a_clean_program_has_no_findings(name: str) -> None:
    assert census_of(name).findings == ()


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_second_count_agrees_on_tpus() -> None:
    """Two programs with collectives that tpu7x runs on other cores; bench/foreign_programs.py has all."""
    words = [
        sys.executable,
        str(BENCH),
        "--child",
        "tpu7x:2x2x1",
        "--only",
        "jax_shard_map_fsdp,jax_model_parallel",
    ]
    printed = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=300, env=dict(os.environ)
    ).stdout
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"program"')]
    assert len(found) == 2
    for row in found:
        assert row["ledger"] == row["second_ledger"] and row["ledger"] and row["unread"] == 0, row
        assert row["flops"] == pytest.approx(row["second_flops"], rel=1e-9)
        assert row["cost_analysis"] == pytest.approx(
            row["products_once"] + row["elementwise_once"], rel=MOST_UNEXPLAINED
        )
