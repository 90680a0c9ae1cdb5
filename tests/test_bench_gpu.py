"""The comparison with PyTorch: our side runs, all sides count the same model, the table says what was measured."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.models.families.llama import Llama
from meshwright.models.flops import training_flops_per_token
from meshwright.sharding.params import count_params


@pytest.fixture(scope="module")
def gpu() -> Any:
    file = Path(__file__).parents[1] / "bench" / "gpu.py"
    spec = importlib.util.spec_from_file_location("bench_gpu", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_gpu"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_parameters_and_flops_are_those_of_our_model(gpu: Any) -> None:
    for size, shape in gpu.SIZES.items():
        model, job = Llama(**shape), gpu.Job(size, 2, 64, "bfloat16", "none", 1)
        assert gpu.parameter_count(shape) == count_params(model.params())
        assert gpu.step_flops(job) == pytest.approx(training_flops_per_token(model, 64) * 128)


def test_our_side_runs_and_the_table_is_made_of_rounds(gpu: Any) -> None:
    job = gpu.Job("tiny", 1, 32, "float32", "none", 2)
    ours = gpu.OurStep(job)
    assert ours.measure() > 0 and ours.facts["parameters"] == gpu.parameter_count(job.shape)
    facts = {side: {**ours.facts, "attention": side} for side in gpu.SIDES}
    rounds = {
        "meshwright": [1.0, 2.0, 1.0],
        "torch.compile": [2.0, 2.0, 3.0],
        "Trainer": [3.0, 9.0, 3.0],
    }
    rows = gpu.summarise(job, facts, rounds, peak=gpu.step_flops(job))
    # The ratio is of rounds beside each other: 2, 1, 3 and 3, 4.5, 3.
    assert [row["ratio"] for row in rows] == [1.0, 2.0, 3.0] and rows[0]["mfu"] == 1.0
    table = gpu.format_table(rows).splitlines()
    assert (
        len(table) == 4
        and "torch.compile" in table[2]
        and "2.00" in table[2]
        and "50.0%" in table[2]
    )
    gpu.check_equal(job, facts)
    facts["Trainer"]["parameters"] += 1
    with pytest.raises(SystemExit, match="Trainer has"):
        gpu.check_equal(job, facts)
