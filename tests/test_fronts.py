"""Every front with every kind of run on every platform, at the smallest size; what has no answer is a hole with a reason.

`python tests/test_fronts.py [FRONT ...]` prints the table. `prove` has an answer where the compiler of the platform is
installed (docs: Install), which needs no accelerator; elsewhere its rows are skipped, and printed as holes.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step
from meshwright.api.layout import show
from meshwright.cli.verbs import run_verb
from meshwright.config import MeshShape
from meshwright.errors import CensusError, MeshwrightError
from meshwright.hardware.aot import require_compiler
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import parse_target
from meshwright.models.families import family_name
from meshwright.models.families.mixtral import Mixtral
from meshwright.planner.search import price_run
from meshwright.plugins import load_file
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.step.device_run import place_on_devices
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
ABSENT = (*ARITHMETIC, "prove")
"""Fronts that answer for hardware that is not here; `prove` needs its compiler."""
HERE = ("train", "resume", "evaluate", "census", "page", "show")
"""Fronts that answer on the devices of this host; `page` and `show` need none."""
LOSS_UNITS = {
    **dict.fromkeys(KINDS, "mean over examples"),
    **dict.fromkeys(("family", "mixture", "LoRA"), "nats per token"),
    "preferences": "nats per pair",
}
HOLES: dict[tuple[str, str], str] = {
    **{("show", kind): "only the module knows them" for kind in WRAPPED},
    **{("evaluate", kind): "it has no held-out batches" for kind in ("NNX", "pytree")},
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
    if front in ("price", "prove"):  # on the mesh that the user gives
        target = parse_target(TARGETS[platform])
        tensor = run.mesh.tensor if kind in WRAPPED and run.mesh else 1
        mesh = MeshShape(fsdp=target.devices // tensor, tensor=tensor)
        run = dataclasses.replace(run, mesh=mesh)
        if front == "price":
            priced = price_run(run, target)
            assert priced.estimate.seconds > 0
            return priced.name
        proof = mw.prove(run, on=TARGETS[platform])
        assert proof.fits, proof.refused
        return proof.brief()
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


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("platform", TARGETS)
def test_every_kind_is_proved_where_the_compiler_is(platform: str, kind: str) -> None:
    try:
        require_compiler(parse_target(TARGETS[platform]))
    except CensusError as missing:
        pytest.skip(f"{missing.asked}: {missing.truth}")
    assert ": fits, " in answer("prove", kind, platform, Path())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("platform", ["h100", "v5p"])
def test_every_kind_is_launched(platform: str, kind: str, tmp_path: Path) -> None:
    assert answer("launch", kind, platform, tmp_path).startswith("#!")


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


def trainable(kind: str, folder: Path) -> Run:
    """A run of a kind for one step, with data, which another step may follow."""
    run = run_of(kind)
    training = dataclasses.replace(run.training, steps=1, save_every=1, max_to_keep=9)
    run = dataclasses.replace(run, training=training)
    if kind in WRAPPED:
        return run
    file = folder / "data.jsonl"
    record = {"text": "What is two and two? It is four. " * 20}
    if kind == "preferences":
        record = {"prompt": "What is two and two?", "chosen": " Four.", "rejected": " Five."}
    file.write_text(f"{json.dumps(record)}\n" * 80, encoding="utf-8")
    data = dataclasses.replace(run.data, paths=(str(file),), tokenizer="bytes")
    return dataclasses.replace(run, mesh=MeshShape(data=2), data=data)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_resumes_and_is_evaluated_here(
    kind: str, tmp_path: Path, cache: Path
) -> None:
    run, out = trainable(kind, tmp_path), tmp_path / "out"
    assert mw.train(run, out, progress="none", cache=cache).steps == 1
    more = dataclasses.replace(run, training=dataclasses.replace(run.training, steps=2))
    assert mw.train(more, out, start="resume", progress="none", cache=cache).steps_taken == 1
    assert LOSS_UNITS[kind] in json.dumps(run_page(open_folders([out])).to_json())
    assert run.mesh is not None
    census = census_of_train_step(place_on_devices(run, build_mesh(run.mesh)))
    assert census.memory.compiled.live > 0
    reason = HOLES.get(("evaluate", kind))
    if reason is None:
        assert np.isfinite(
            mw.evaluate(out, model=run.model if kind in WRAPPED else None, cache=cache).loss
        )
        return
    with pytest.raises(MeshwrightError, match=reason):
        mw.evaluate(out, model=run.model if kind in WRAPPED else None, cache=cache)


def print_table(folder: Path, fronts: Sequence[str]) -> None:
    """Prints the answer of every front, kind and platform; `-` and the reason where there is none."""
    for front in fronts or (*ABSENT, "show", "page"):
        for kind in KINDS:
            for platform in TARGETS if front in ABSENT else ("cpu",):
                place = folder / front / kind.lower() / platform
                place.mkdir(parents=True)
                try:
                    answered = answer(front, kind, platform, place)[-60:]
                except MeshwrightError as refused:
                    answered = f"- {refused.truth}"
                except AssertionError as refused:
                    answered = f"- {refused}"
                print(f"{front:10}{kind:14}{platform:8}{answered}", flush=True)


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print_table(Path(folder), sys.argv[1:])
