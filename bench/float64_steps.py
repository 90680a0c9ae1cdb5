"""Compares eight AdamW steps of Qwen3-Next with `transformers` in float32 and in float64 (docs/log.md).

    python bench/float64_steps.py

With and without YaRN; prints for each mesh the largest difference of a parameter over its tensor's largest element.
`transformers` fixes float32 in norms, softmax and the linear attention: these are patched here, in this process only.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ROW = "qwen3-next"
MESHES = ("data=1", "fsdp=2,tensor=2")
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}


@contextmanager
def in_float64() -> Iterator[None]:
    """Makes torch compute in float64 what a model asks to be computed in float32."""
    import hf_models
    import torch

    to, to_float, softmax, make = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax, hf_models.make
    model = make(ROW)  # Its random values are those of float32.
    wider = {torch.float32: torch.float64}

    def dtype(value: Any) -> Any:
        return wider.get(value, value) if isinstance(value, torch.dtype) else value

    def widened(function: Any) -> Any:
        def call(x: Any, *args: Any, **options: Any) -> Any:
            return function(x, *map(dtype, args), **{name: dtype(value) for name, value in options.items()})

        return call

    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # The grouped product has no float64.
    hf_models.make = lambda _: model.double()
    torch.Tensor.to, torch.nn.functional.softmax = widened(to), widened(softmax)
    torch.Tensor.float = lambda x, *args, **options: x.double()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax = to, to_float, softmax
        hf_models.make = make


def main() -> None:
    """Prints the differences."""
    from meshwright.hardware.mesh import prepare_host

    prepare_host(8)
    import hf_models as hf

    def gap(found: Any, expected: Any) -> str:
        gaps = {name: hf.largest_gap(found[1][name], value) for name, value in expected[1].items()}
        worst = max(gaps, key=lambda name: gaps[name])
        return f"{gaps[worst]:.1e} ({worst})"

    name, config = hf.ROWS[ROW]
    for label, rope in (("YaRN", YARN), ("no scaling", config["rope_parameters"])):
        hf.ROWS[ROW] = (name, {**config, "rope_parameters": rope})
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            hf.save(ROW, folder)
            torch32 = hf.reference_steps(ROW, folder)
            with in_float64():
                torch64 = hf.reference_steps(ROW, folder)
            assert {value.dtype.name for value in torch64[1].values()} == {"float64"}
            print(f"{label}: transformers in float32 against float64: {gap(torch32, torch64)}")
            for mesh in MESHES:
                ours = hf.steps_of(folder, mesh)
                print(f"{label}: {mesh} against float64: {gap(ours, torch64)}, against float32: {gap(ours, torch32)}")


if __name__ == "__main__":
    main()
