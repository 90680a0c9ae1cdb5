"""Every architecture against `transformers` and `torch`: eight AdamW steps, decoding from the cache, greedy text."""

from collections.abc import Callable
from pathlib import Path

import hf_models
import numpy as np
import pytest
from hf_models import ROWS, largest_gap

NEW = ("gemma-2", "glm-4.5", "gpt-oss", "llama-4", "olmo-3", "qwen3-next", "smollm3")
"""Rows of which decoding is compared in every run of the tests; that of older families has tests of its own."""

STEPPED = (*NEW, "gemma-3", "gpt2", "llama", "mixtral")
"""Rows whose steps are compared in every run of the tests."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")

    def folder(row: str) -> Path:
        if not (base / row).exists():
            hf_models.save(row, base / row)
        return base / row

    return folder


@pytest.mark.parametrize("row", [pytest.param(r, marks=() if r in STEPPED else pytest.mark.exhaustive) for r in ROWS])
def test_eight_steps_are_those_of_torch(row: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(row)
    losses, params = hf_models.steps_of(folder, "fsdp=2,tensor=2")
    expected, values = hf_models.reference_steps(row, folder)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, value in values.items():
        assert largest_gap(params[name], value) < 1e-5, name


@pytest.mark.parametrize("row", [pytest.param(r, marks=() if r in NEW else pytest.mark.exhaustive) for r in ROWS])
def test_decoding_is_the_forward_pass_of_transformers(row: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(row)
    model = hf_models.make(row)
    logits, _ = hf_models.reference(model)
    assert np.abs(hf_models.decoded_logits_of(folder, "data=1") - logits).max() < 1e-5
    found = hf_models.greedy_of(folder, hf_models.DECODE_MESHES.get(row, "fsdp=2,context=2,tensor=2"), 12)
    np.testing.assert_array_equal(found, hf_models.reference_greedy(model, 12))
