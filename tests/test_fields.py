"""Every field of a run on every path: it changes what the path computes, is refused, or has no meaning there."""

import dataclasses
import fnmatch
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

import meshwright as mw
from meshwright.config import Data, Faults, MeshShape, Optimizer
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.fine_tuning import FineTune
from meshwright.hardware.machine import Machine
from meshwright.hardware.targets import parse_target
from meshwright.models.kernels.choose import GroupedMatmul
from meshwright.planner.search import price_run
from meshwright.runs import checks
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.runs.settle import settle
from meshwright.step.device_run import DeviceRun, State
from meshwright.step.train_step import build_eval_step, build_train_step
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.trainer import loop, parity, prepare

MESH, CROSSING = "data=2,fsdp=2,tensor=2", "data=2*1,fsdp=2,tensor=2"
LORA = FineTune(method="lora", rank=4, targets=("query",))
GROUPED = GroupedMatmul(
    "doubled",
    lambda rows, weights, counts: tuple(2 * jax.lax.ragged_dot(rows, w, counts) for w in weights),
)
STAGES: dict[str, Any] = {"mesh": "stage=2,data=2,tensor=2", "microbatches": 4, "layers": 4}
WIDE: dict[str, Any] = {"vocab": 4096, "batch": 64, "seq": 64}
LOCAL = LocalCheckpoints(path="local", every=5)

# Field -> another value, and what the run needs besides for the field to mean something.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mesh.stage": (2, {"mesh": "data=2", "microbatches": 2}),
    "mesh.data": (2, {"mesh": "fsdp=2"}),
    "mesh.fsdp": (2, {"mesh": "data=2"}),
    "mesh.expert": (2, {"mesh": "data=2"}),
    "mesh.context": (2, {"mesh": "data=2"}),
    "mesh.tensor": (2, {"mesh": "data=2"}),
    "mesh.slices": (2, {}),
    "mesh.dcn_axis": ("fsdp", {"mesh": CROSSING}),
    "layout": ("zero1", {}),
    "fsdp_min_size": (10**6, {}),
    "reporters": (("nowhere",), {}),
    "init_from": ("runs/other", {}),
    "name": ("other", {}),
    "training.steps": (40, {}),
    "training.batch": (32, {}),
    "training.batch_ramp": (("2=8",), {}),
    "training.seq": (32, {}),
    "training.microbatches": (2, {}),
    "training.pipeline_schedule": ("gpipe", STAGES),
    "training.virtual_stages": (1, {**STAGES, "pipeline_schedule": "circular"}),
    "training.seed": (1, {}),
    "training.param_dtype": ("bfloat16", {}),
    "training.param_rounding": ("stochastic", {"param_dtype": "bfloat16"}),
    "training.compute_dtype": ("bfloat16", {}),
    "training.reduce_dtype": ("bfloat16", {}),
    "training.matmul_precision": ("int8", {}),
    "training.remat": ("none", {}),
    "training.stage_saves": ("layers", STAGES),
    "training.saved_layers": (1, {}),
    "training.context_strategy": ("all_gather", {"mesh": "context=2,fsdp=2,tensor=2"}),
    "training.gather_ahead": ("layer", {}),
    "training.tensor_strategy": ("gather", {"tensor_strategy": "ring"}),
    "training.attention_kernel": ("reference", {"attention_kernel": "blocked", "seq": 1024}),
    "training.grouped_matmul": (GROUPED, {"family": "mixtral"}),
    "training.attention_block": (128, {"head_size": 128, "seq": 512}),
    "training.compiler_options": (("xla_some_option=1",), {}),
    "training.deterministic": (True, {}),
    "training.unroll": (2, {}),
    "training.dropout": (0.2, {}),
    "training.z_loss": (2e-3, {}),
    "training.logits_mib": (1, WIDE),
    "training.log_every": (5, {}),
    "training.eval_every": (5, {}),
    "training.eval_samples": (8, {}),
    "training.save_every": (5, {}),
    "training.max_to_keep": (1, {"save_every": 5}),
    "optimizer.name": ("lion", {}),
    "optimizer.learning_rate": (1e-3, {}),
    "optimizer.lr_schedule": ("linear", {}),
    "optimizer.warmup_steps": (5, {}),
    "optimizer.final_lr_fraction": (0.2, {}),
    "optimizer.beta1": (0.8, {}),
    "optimizer.beta2": (0.9, {}),
    "optimizer.epsilon": (1e-6, {}),
    "optimizer.weight_decay": (0.2, {}),
    "optimizer.grad_clip_norm": (0.5, {}),
    "optimizer.moment_dtype": ("bfloat16", {}),
    "optimizer.lr_groups": (("embed=0.5",), {}),
    "optimizer.muon_heads": ("together", {"optimizer": Optimizer("muon")}),
    "data.paths": (("other.txt",), {}),
    "data.tokenizer": ("chars", {}),
    "data.other_tokenizer": (True, {}),
    "data.text_field": ("body", {}),
    "data.held_out": (0.5, {}),
    "data.prompt": ("A", {}),
    "data.sample": (4, {}),
    "data.sample_every": (5, {"data": Data(sample=3)}),
    "faults.bad_records": (0.1, {}),
    "faults.bad_step": ("skip", {"bad": 2}),
    "faults.spike": (5.0, {}),
    "faults.most_skipped": (2, {"bad": 3, "faults": Faults(bad_step="skip")}),
    "faults.check_every": (2, {}),
    "local_checkpoints.path": ("elsewhere", {"local_checkpoints": LOCAL}),
    "local_checkpoints.every": (4, {"local_checkpoints": LOCAL}),
    "local_checkpoints.max_to_keep": (3, {"local_checkpoints": LOCAL}),
    "finetune.method": ("lora", {}),
    "finetune.objective": ("preferences", {"z_loss": 0.0}),
    "finetune.rank": (8, {"finetune": LORA}),
    "finetune.alpha": (16.0, {"finetune": LORA}),
    "finetune.targets": (("key",), {"finetune": LORA}),
    "finetune.base": ("int8", {"finetune": LORA}),
    "finetune.beta": (0.2, {"finetune": FineTune(objective="preferences"), "z_loss": 0.0}),
    "finetune.template": ("chat.jinja", {}),
    "finetune.too_long": ("drop", {}),
}


def base_run(changes: dict[str, Any]) -> Run:
    rest = {name: value for name, value in changes.items() if name != "bad"}
    model: Any = MODELS[rest.pop("family", "llama")]
    model = dataclasses.replace(
        model, **{n: rest.pop(n) for n in ("layers", "vocab", "head_size") if n in rest}
    )
    return tiny_run(model, rest.pop("mesh", MESH), **rest)


def changed(run: Run, field: str, value: Any) -> Run:
    part, _, name = field.rpartition(".")
    if not part:
        return dataclasses.replace(run, **{name: value})
    return dataclasses.replace(
        run, **{part: dataclasses.replace(getattr(run, part), **{name: value})}
    )


def text_of(program: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(program))


def outcome(result: Callable[[Run], Any], run: Run) -> Any:
    """What a path makes of a run, or its refusal."""
    try:
        return result(run)
    except MeshwrightError as error:
        return str(error)


def on_tpu(run: Run) -> tuple[Any, str]:
    """Options of a TPU's compiler, and the TPU's attention kernel where heads are of a size that it takes."""
    settled = settle(place_run(run), Machine("tpu", "v5p", installed=True, kind="TPU v5p"))
    if getattr(run.model, "head_size", None) != 128 or run.mesh != MeshShape.parse(MESH):
        gpu = settle(place_run(run), Machine("gpu", "h100", installed=True, kind="NVIDIA H100"))
        return (settled.compiler_options, gpu.compiler_options), ""
    x, segments = (
        jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 512), jnp.int32),
    )
    attend = functools.partial(settled.kernels.self_attention, window=None)
    return settled.compiler_options, text_of(jax.make_jaxpr(attend)(x, x, x, segments))


def train_program(run: Run) -> Any:
    """Train step, its state, and what a TPU gets."""
    device_run = device_run_of(run)
    step = jax.make_jaxpr(build_train_step(device_run))(
        device_run.abstract, device_run.abstract_batch
    )
    return text_of(step), str(device_run.abstract), on_tpu(run)


def eval_program(run: Run) -> Any:
    device_run = device_run_of(run)
    lowered = build_eval_step(device_run).lower(
        device_run.abstract.params, device_run.abstract_batch
    )
    return text_of(lowered.as_text()), on_tpu(run)


def parity_program(run: Run) -> Any:
    return train_program(parity._in_float32(run, MeshShape(), 5))


def plans(run: Run) -> list[str]:
    return [
        str(price_run(run, parse_target(target)).estimate) for target in ("h100:8", "v5p:2x2x2")
    ]


def preferring(base: dict[str, Any]) -> Run:
    run = base_run(base)
    tuning = dataclasses.replace(run.finetune, objective="preferences")
    return changed(dataclasses.replace(run, finetune=tuning), "training.z_loss", 0.0)


def squares(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] @ params["v"]) ** 2)


def wrapped(base: dict[str, Any]) -> Run:
    """A run of a model of one's own, with what the row's base has that means something to it."""
    params = {"w": np.ones((64, 128), np.float32), "v": np.ones((128, 64), np.float32)}
    model = mw.wrap(
        params,
        squares,
        lambda step: {"x": np.ones((16, 64), np.float32)},
        rules={"w": (None, "tensor")},
    )
    names = ("param_dtype", "save_every", "optimizer", "faults", "local_checkpoints")
    mesh = {"fsdp=2": "fsdp=2", "data=2": "data=2", CROSSING: "data=2*1,fsdp=4"}.get(
        base.get("mesh", ""), "data=2,fsdp=2"
    )
    run = model.run(mesh=mesh, remat="full", **{name: base[name] for name in names if name in base})
    return dataclasses.replace(run, fsdp_min_size=64)


PROGRAMS: dict[str, tuple[Callable[[Run], Any], Callable[[dict[str, Any]], Run]]] = {
    "train": (train_program, base_run),
    "prove": (train_program, base_run),
    "evaluate": (eval_program, base_run),
    "preferences": (train_program, preferring),
    "parity": (parity_program, base_run),
    "wrap": (train_program, wrapped),
    "plan": (plans, base_run),
}


def in_program(path: str) -> list[str]:
    """Fields that are honoured by the program of a path (or its plan), not by what goes around it."""
    around = "{loop} {text}" if path != "plan" else ""
    return [
        f
        for f in CHANGES
        if checks.status_of(path, f) == "honoured" and not checks.named(around, f)
    ]


def test_every_field_has_a_row_and_every_pattern_a_field() -> None:
    fields = checks.fields_of_runs()
    assert sorted(CHANGES) == sorted(fields)
    groups, rows = checks.TABLE["groups"], checks.TABLE["refused"]
    named = [
        *groups.values(),
        *checks.TABLE["no_effect"].values(),
        *(row["fields"] for row in rows),
    ]
    assert (
        {path for row in rows for path in row["paths"]}
        <= checks.TABLE["paths"].keys()
        >= checks.TABLE["no_effect"].keys()
    )
    for pattern in " ".join(named).format(**groups).split():
        assert fnmatch.filter(fields, pattern), pattern


@pytest.mark.parametrize("path", ["full", "lora", "text", "answers", "preferences", "wrap"])
def test_refused_fields_are_refused_with_the_reason(path: str) -> None:
    """And no other is, by the same table."""
    chosen = "finetune.method" if path in ("full", "lora") else "finetune.objective"
    for field, (value, base) in CHANGES.items():
        if path == "wrap":
            run = wrapped(base)
        elif field == chosen:
            continue
        else:
            plain = {"z_loss": 0.0, "mesh": base.get("mesh", "data=2"), "finetune": FineTune()}
            run = changed(base_run({**base, **plain}), chosen, path)
        run = changed(run, field, value)
        assert run.mesh is not None
        if checks.status_of(path, field) == "refused":
            with pytest.raises(ConfigError, match=r"(?s)with .*because.*fix"):
                place_run(run)
        elif run.mesh.stage == 1:
            checks.check_fields(path, run, run.mesh)


@pytest.mark.parametrize("path", PROGRAMS)
def test_what_a_path_computes_changes_with_its_fields_and_with_no_other(path: str) -> None:
    result, base_of = PROGRAMS[path]
    honoured = in_program(path)
    known: dict[str, Any] = {}
    for field in honoured:
        value, base = CHANGES[field]
        if path == "preferences" and field == "finetune.objective":  # which it is already
            continue
        run = base_of(base)
        before = known.setdefault(str(base), outcome(result, run))
        assert before != outcome(result, changed(run, field, value)), (
            f"{field} changes nothing for {path}"
        )
    run = base_of({})
    for field, (value, base) in CHANGES.items():
        refused = any(
            checks.status_of(where, field) == "refused" for where in (path, "text", "full")
        )
        if not refused and field not in honoured and not base:
            run = changed(run, field, value)
    assert result(run) == result(base_of({}))


STEPS = 24


@pytest.fixture
def around(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Callable[..., Any]:
    """Runs the loop with a step that computes nothing; returns what it read, wrote, evaluated and sampled."""
    data = tmp_path_factory.mktemp("data")
    lines = [
        {"text": f"{i} a line of text. " * 9, "body": f"{i} the other body. " * 9}
        for i in range(120)
    ]
    for name, given in {"text": lines, "other": lines[::-1]}.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    (data / "broken.jsonl").write_text((data / "text.jsonl").read_text() + "{\n")
    asked = [{"prompt": f"{i}?", "completion": "12345"[: 1 + i % 5]} for i in range(40)]
    asked.append({"prompt": "?" * 60, "completion": "yes"})
    (data / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))

    def zeros(self: DeviceRun) -> State:
        state: State = jax.tree.map(
            lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), self.abstract
        )
        return dataclasses.replace(state, healthy=jnp.ones((), bool))

    monkeypatch.setattr(DeviceRun, "initial_state", zeros)
    monkeypatch.setattr(
        prepare,
        "compile_eval_step",
        lambda *_: lambda params, batch: {"loss": (batch.inputs.sum(), batch.inputs.size)},
    )
    monkeypatch.setattr(
        prepare, "write_sample", lambda run, _, __, count, *___: f"{run.run.data.prompt}{count}"
    )

    def run_loop(run: Run, bad: int = 0) -> Any:
        out, taken, seen = tmp_path_factory.mktemp("loop"), list[int](), set[str]()
        monkeypatch.chdir(out)

        def step(state: State, batch: Any) -> Any:
            number = int(state.step) + 1
            taken.append(number)
            seen.update(str(file.relative_to(out)) for file in out.rglob("[0-9]*/manifest"))
            loss = np.nan if 3 <= number < 3 + bad else float(batch.inputs.sum())
            after = dataclasses.replace(
                state, step=state.step + 1, healthy=jnp.asarray(np.isfinite(loss))
            )
            return after, {
                "loss": (loss, 1.0),
                "gradient norm": (9.0 if number == STEPS - 1 else 1.0, 1.0),
            }

        monkeypatch.setattr(prepare.PreparedRun, "compile", lambda self, batch: step)
        samples = list[str]()

        class Sampled:
            write = close = staticmethod(lambda *_: None)
            sample = staticmethod(lambda step, text: samples.append(f"{step} {text}"))

        try:
            loop.train(
                loop.prepare_run(run, cache=cache), out / "out", reporters=lambda _: [Sampled()]
            )
            ended = ""
        except MeshwrightError as error:
            ended = re.sub(r"\d{8}-\d{6}|loop\d+", "", str(error))
        file = out / "out" / "metrics.jsonl"
        metrics = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )
        kept = [
            {n: x for n, x in line.items() if "seconds" not in n and "/s" not in n and n != "time"}
            for line in metrics
        ]
        seen.update(str(file.relative_to(out)) for file in out.rglob("[0-9]*/manifest"))
        return ended, kept, {re.sub(r"loop\d+", "", file) for file in seen}, samples, taken

    def run_of(field: str, base: dict[str, Any]) -> Run:
        name = (
            "broken" if field == "faults.bad_records" else "chat" if "finetune" in base else "text"
        )
        texts = base.get("data", Data(sample=0))
        texts = dataclasses.replace(
            texts, paths=(str(data / f"{name}.jsonl"),), tokenizer="bytes", held_out=0.3
        )
        run = base_run(
            {"mesh": "data=1", "steps": STEPS, "batch": 2, "eval_samples": 4, **base, "data": texts}
        )
        return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=None))

    run_loop.run_of, run_loop.other = run_of, str(data / "other.jsonl")  # type: ignore[attr-defined]
    return run_loop


def test_what_goes_around_the_step_changes_with_its_fields(around: Any) -> None:
    """Data, evaluation, samples, checkpoints, faults, metrics."""
    known: dict[str, Any] = {}
    chat = {"finetune": FineTune(objective="answers"), "seq": 32}
    asked = {"data.held_out": 0.5, "data.paths": (around.other,)}
    bases = {f"finetune.{name}": chat for name in ("template", "too_long")} | {
        "data.prompt": {"data": Data(sample=3)}
    }
    for field, (given, needs) in CHANGES.items():
        if not checks.named("{loop} {text}", field) or field == "name":  # of the folder's default
            continue
        base = bases.get(field, {n: x for n, x in needs.items() if n != "finetune"})
        run = around.run_of(field, base)
        before = known.setdefault(
            f"{base}{'bad_records' in field}", around(run, base.get("bad", 0))
        )
        after = around(changed(run, field, asked.get(field, given)), base.get("bad", 0))
        assert before != after, f"{field} changes nothing in training"
