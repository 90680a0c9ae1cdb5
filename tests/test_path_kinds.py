"""A path in place of a recipe, a run, weights or a plan: every verb says what it is, and how it is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from printed_fixes import known_options, wrong_commands

from meshwright.errors import MeshwrightError
from meshwright.generation.source import run_of_source
from meshwright.hugging_face.hub import find_folder
from meshwright.path_kinds import find_path_kind
from meshwright.planner.plan_file import read_plan
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run_file import run_in_folder

CONVERT = "hf:OUT, after meshwright convert {0}"
FILES = {
    "a run's folder": ("ft/run.json", "ft", "--run {0}/ft/run.json", "{0}/ft"),
    "a Run": ("ft/run.json", "ft/run.json", "--run {0}/ft/run.json", "{0}/ft"),
    "checkpoints": ("ft/run.json ft/checkpoints/4/m", "ft/checkpoints", "--run {0}/ft/run.json", "{0}/ft"),
    "a model": ("m/config.json m/model.safetensors", "m", "hf:{0}/m", "hf:{0}/m"),
    "an adapter": ("m/adapter_config.json", "m", "hf:{0}/m", "hf:{0}/m"),
    "its configuration": ("m/config.json", "m/config.json", "hf:{0}/m", "hf:{0}/m"),
    "its weights": ("m/config.json m/a.safetensors", "m/a.safetensors", "hf:{0}/m", "hf:{0}/m"),
    "llama.cpp": ("m.gguf", "m.gguf", "config.json and .safetensors", "config.json and .safetensors"),
    "torch": ("m.pt", "m.pt", "config.json and .safetensors", "config.json and .safetensors"),
    "torch, of Windows": ("m.PT", "m.PT", "config.json and .safetensors", "config.json and .safetensors"),
    "torch's weights": ("pytorch_model.bin", "pytorch_model.bin", "config.json and .safet", "config.json and .safet"),
    "a folder of torch": ("dcp/.metadata", "dcp", f"{CONVERT}/dcp OUT", f"{CONVERT}/dcp OUT"),
    "with config.json": ("dcp/.metadata dcp/config.json", "dcp", f"{CONVERT}/dcp OUT", f"{CONVERT}/dcp OUT"),
    "MaxText's step": ("7/items/_METADATA 7/config.json", "7", f"{CONVERT}/7 OUT", f"{CONVERT}/7 OUT"),
    "MaxText's items": ("7/items/_METADATA", "7/items", f"{CONVERT}/7/items OUT", f"{CONVERT}/7/items OUT"),
    "a model in a run": ("ft/run.json ft/m/config.json", "ft/m", "hf:{0}/ft/m", "hf:{0}/ft/m"),
    "weights in a run": ("ft/run.json ft/m/config.json ft/m/a.safetensors", "ft/m/a.safetensors", *["hf:{0}/ft/m"] * 2),
    "what a run keeps": ("ft/run.json ft/huggingface/config.json", "ft/huggingface", "--run {0}/ft/run.json", "{0}/ft"),
    "a file of it": ("ft/run.json ft/huggingface/config.json", "ft/huggingface/config.json", *["{0}/ft"] * 2),
    "a model of that name": ("huggingface/config.json", "huggingface", "hf:{0}/huggingface", "hf:{0}/huggingface"),
}  # fmt: skip
"""Files to make, the path that is given, and the fix where a Run and where weights are expected."""


def _fix(read: Callable[[Any], Any], given: Any) -> str:
    with pytest.raises(MeshwrightError) as found:
        read(given)
    return found.value.fix


@pytest.mark.parametrize("row", FILES)
def test_a_path_is_named_by_what_it_is(row: str, tmp_path: Path) -> None:
    files, given, run, weights = FILES[row]
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    path = tmp_path / given
    run, weights = run.format(tmp_path), weights.format(tmp_path)
    assert run in _fix(find_recipe, str(path))
    if path.suffix == ".json":
        assert run in _fix(read_plan, path)
    if path.is_file():
        assert weights in _fix(run_of_source, str(path))
        assert weights in _fix(lambda name: find_folder(name, weights=True), f"hf:{path}")
    elif not (path / "run.json").is_file():
        assert weights in _fix(run_in_folder, path)
        assert weights in _fix(run_of_source, str(path))
    assert "--run" in known_options() and "--out" in known_options()


def test_a_run_is_continued_by_the_verb_that_can(tmp_path: Path) -> None:
    """plan, rehearse and parity have no --resume: the fix names `train`."""
    (tmp_path / "ft").mkdir()
    (tmp_path / "ft" / "run.json").write_text("{}")
    fix = _fix(find_recipe, str(tmp_path / "ft"))
    run = tmp_path / "ft" / "run.json"
    assert fix == f"--run {run}; to continue it: meshwright train --out {tmp_path / 'ft'} --resume"
    assert not list(wrong_commands(fix))


def test_tokens_of_megatron_are_no_pickle(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").write_text("")
    assert find_path_kind(str(tmp_path / "corpus.bin")) is None


def test_text_and_names_of_the_hub_are_no_recipes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert _fix(find_recipe, str(tmp_path / "a.txt")) == f"tiny --data {tmp_path / 'a.txt'}"
    assert _fix(find_recipe, "Qwen/Qwen3-8B").startswith("hf:Qwen/Qwen3-8B")
    assert _fix(run_of_source, "Qwen/Qwen3-8B").startswith("hf:Qwen/Qwen3-8B")
