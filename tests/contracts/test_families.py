"""Every architecture against `transformers` and `torch`: logits, gradients, AdamW steps, decoding, greedy text."""

from collections.abc import Callable
from pathlib import Path

import hf_models
import numpy as np
import pytest
from hf_models import EIGHT_DEVICES, MESHES, ROWS, assert_near, read

FAST = ("llama", "mixtral")
"""A dense family, and one with experts; the others are exhaustive."""


def marks_of(row: str) -> tuple[pytest.MarkDecorator, ...]:
    if row in FAST:
        return ()
    return (pytest.mark.exhaustive,)


rows = pytest.mark.parametrize("row", [pytest.param(row, marks=marks_of(row)) for row in ROWS])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")

    def folder(row: str) -> Path:
        if not (base / row).exists():
            hf_models.write_folder(row, base / row)
        return base / row

    return folder


@rows
def test_a_family_has_the_numbers_of_transformers(
    row: str, folder_of: Callable[[str], Path]
) -> None:
    """Logits on one device; every gradient and eight AdamW steps on a mesh, all in float32."""
    folder, (_, golden) = folder_of(row), read(row)
    assert np.abs(hf_models.logits_of(folder, "data=1") - golden["logits"]).max() < 1e-5
    losses, gradients, params = hf_models.steps_of(folder, MESHES.get(row, EIGHT_DEVICES))
    assert_near("gradient", gradients, golden, 1e-5)
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-5)
    assert_near("after steps", params, golden, 1e-5)


@rows
def test_decoding_is_the_forward_pass_of_transformers(
    row: str, folder_of: Callable[[str], Path]
) -> None:
    folder, (_, golden) = folder_of(row), read(row)
    assert np.abs(hf_models.decoded_logits_of(folder, "data=1") - golden["logits"]).max() < 1e-5
    found = hf_models.greedy_of(folder, hf_models.decode_mesh_of(folder))
    np.testing.assert_array_equal(found, golden["greedy"])
