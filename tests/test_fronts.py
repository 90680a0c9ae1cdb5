"""Every front with every kind of run on every platform, at the smallest size; what has no answer is a hole with a reason.

`python tests/test_fronts.py` prints the table.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.api.layout import show
from meshwright.cli.verbs import run_verb
from meshwright.config import MeshShape
from meshwright.errors import MeshwrightError
from meshwright.hardware.targets import parse_target
from meshwright.models.families import family_name
from meshwright.models.families.mixtral import Mixtral
from meshwright.planner.search import price_run
from meshwright.plugins import load_file
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.views.run_folder import open_folders
from meshwright.views.run_page import run_page
from meshwright.wrapped.model import Wrapped

WRAPPED = {"NNX": "vit_nnx", "Linen": "mlp_linen", "Equinox": "mixer_equinox", "pytree": "pytree"}
KINDS = ("family", "mixture", "LoRA", "preferences", *WRAPPED)
TARGETS = {
    "h100": "h100:8",
    "b200": "b200:8",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}
ARITHMETIC = ("plan", "price", "launch")
"""Fronts that answer by arithmetic for hardware that is not here."""
LOSS_UNITS = {
    **dict.fromkeys(KINDS, "mean over examples"),
    **dict.fromkeys(("family", "mixture", "LoRA"), "nats per token"),
    "preferences": "nats per pair",
}
HOLES: dict[tuple[str, str], str] = {
    ("show", kind): "only the module knows them" for kind in WRAPPED
}
"""Front and kind -> why there is no answer."""
EXAMPLES = Path(__file__).parents[1] / "docs" / "wrap"


@functools.cache
def run_of(kind: str) -> Run:
    """The smallest run of a kind."""
    if kind in WRAPPED:
        run: Run = getattr(load_file(EXAMPLES / f"{WRAPPED[kind]}.py"), WRAPPED[kind])()
        return run
    sizes: dict[str, Any] = {"vocab": 257, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    model: mw.Model = mw.Llama(**sizes, mlp=64)
    if kind == "mixture":
        model = Mixtral(**sizes, experts=4, experts_per_token=2, expert_mlp=32)
    tuning = {
        "LoRA": mw.FineTune(method="lora", rank=2),
        "preferences": mw.FineTune(objective="preferences"),
    }
    training = mw.Training(steps=2, batch=8, seq=64, eval_samples=8)
    data = mw.Data(sample=0)
    named = dict(model=model, training=training, data=data, name="small")
    return Run(**named, finetune=tuning.get(kind, mw.FineTune()))  # type: ignore[arg-type]


def answer(front: str, kind: str, platform: str, folder: Path) -> str:
    """Asks a front about a kind of run on a platform; returns its answer in a few words."""
    run = run_of(kind)
    if front == "plan":
        best = mw.plan(run, TARGETS[platform], at_most=1)[0]
        assert best.estimate.seconds > 0 and best.estimate.bytes > 0
        return best.name
    if front == "price":  # the mesh that the user gives, as `prove` and a forecast price it
        target = parse_target(TARGETS[platform])
        tensor = run.mesh.tensor if kind in WRAPPED and run.mesh else 1
        mesh = MeshShape(fsdp=target.devices // tensor, tensor=tensor)
        priced = price_run(dataclasses.replace(run, mesh=mesh), target)
        assert priced.estimate.seconds > 0
        return priced.name
    if front == "show":
        return str(show(run).report.parameters)
    if front == "page":
        write_run(run, folder / "run.json")
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n', encoding="utf-8")
        return json.dumps(run_page(open_folders([folder])).to_json())
    assert front == "launch"
    file = folder / "run.json"
    write_run(dataclasses.replace(run, mesh=None, init_from=None), file)
    words = ["--on", "slurm", "--target", TARGETS[platform], "--write", str(folder / "job.sh")]
    run_verb("launch", [*words, "train", "--run", str(file), "--out", "/shared/a"])
    return (folder / "job.sh").read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("front", ("plan", "price"))
def test_every_kind_is_planned_for_every_platform(front: str, platform: str, kind: str) -> None:
    assert answer(front, kind, platform, Path())


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_counts_the_loss_of_a_run_in_its_own_unit(kind: str, tmp_path: Path) -> None:
    assert family_name(Wrapped()) == "meshwright.wrapped.model:Wrapped"
    page = answer("page", kind, "cpu", tmp_path)
    for unit in set(LOSS_UNITS.values()):
        assert (unit in page) == (unit == LOSS_UNITS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_shown_or_has_a_reason(kind: str, tmp_path: Path) -> None:
    reason = HOLES.get(("show", kind))
    if reason is None:
        assert int(answer("show", kind, "cpu", tmp_path)) > 0
        return
    with pytest.raises(MeshwrightError, match=reason):
        answer("show", kind, "cpu", tmp_path)
