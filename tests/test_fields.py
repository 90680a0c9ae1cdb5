"""Every field of a run: it changes what its declaration says, and nothing else, and is refused where it says so."""

import contextlib
import dataclasses
import functools
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.megatron_inputs import write_dataset
from tiny_runs import DEEPSEEK, DEEPSEEK_SPARSE, MODELS, device_run_of, tiny_run

import meshwright as mw
from meshwright.config import Data, Faults, MeshShape, Optimizer
from meshwright.data.feed import held_out_order
from meshwright.declarations import RESULTS, Changes, Result, declarations_of
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.fine_tuning import FineTune
from meshwright.hardware.machine import Machine
from meshwright.hardware.targets import parse_target
from meshwright.models.kernels.choose import GroupedMatmul
from meshwright.planner.search import price_run
from meshwright.ranges import ranges_of
from meshwright.runs import fields
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.runs.settle import settle
from meshwright.sharding.params import named_leaves, trained_only
from meshwright.step.device_run import DeviceRun
from meshwright.step.eval_step import build_eval_step
from meshwright.step.health import BITS, GRADIENT
from meshwright.step.state import State
from meshwright.step.train_step import build_train_step
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.trainer import loop, parity, prepare

MESH, CROSSING = "data=2,fsdp=2,tensor=2", "data=2*1,fsdp=2,tensor=2"
LORA = FineTune(method="lora", rank=4, targets=("query",))
PREFERENCES: dict[str, Any] = {"finetune": FineTune(objective="preferences"), "z_loss": 0.0}
ANSWERS: dict[str, Any] = {"finetune": FineTune(objective="answers"), "seq": 32}
GROUPED = GroupedMatmul(
    "doubled",
    lambda rows, weights, counts: tuple(2 * jax.lax.ragged_dot(rows, w, counts) for w in weights),
)
STAGES: dict[str, Any] = {"mesh": "stage=2,data=2,tensor=2", "microbatches": 4, "layers": 4}
WIDE: dict[str, Any] = {"vocab": 4096, "batch": 64, "seq": 64}
LOCAL: dict[str, Any] = {"local_checkpoints": LocalCheckpoints(path="local", every=5)}
MEGATRON: dict[str, Any] = {"data": Data(order="megatron")}
EXPERTS: dict[str, Any] = {"family": "deepseek-like", "mesh": "fsdp=2,expert=2,tensor=2"}

# Fields whose other value is not the next choice of their type, or that mean something only with others: the value, and
# what the run has besides.
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mesh.stage": (2, {"mesh": "data=2", "microbatches": 2}),
    "mesh.data": (2, {"mesh": "fsdp=2"}),
    "mesh.fsdp": (2, {"mesh": "data=2"}),
    "mesh.expert": (2, {"mesh": "data=2"}),
    "mesh.context": (2, {"mesh": "data=2"}),
    "mesh.tensor": (2, {"mesh": "data=2"}),
    "mesh.dcn_axis": ("fsdp", {"mesh": CROSSING}),
    "layout": ("zero1", {}),
    "reporters": (("nowhere",), {}),
    "init_from": ("runs/other", {}),
    "name": ("other", {}),
    "training.batch_ramp": (("2=8",), {}),
    "training.microbatches": (2, {}),
    "training.pipeline_schedule": ("gpipe", STAGES),
    "training.virtual_stages": (1, {**STAGES, "pipeline_schedule": "circular"}),
    "training.param_rounding": ("stochastic", {"param_dtype": "bfloat16"}),
    "training.matmul_precision": ("int8", {}),
    "training.stage_saves": ("layers", STAGES),
    "training.saved_layers": (1, {}),
    "training.context_strategy": ("all_gather", {"mesh": "context=2,fsdp=2,tensor=2"}),
    "training.tensor_strategy": ("gather", {"tensor_strategy": "ring"}),
    "training.attention_kernel": ("reference", {"attention_kernel": "blocked", "seq": 1024}),
    "training.grouped_matmul": (GROUPED, {"family": "mixtral"}),
    "training.attention_block": (128, {"head_size": 128, "seq": 512}),
    "training.compiler_options": (("xla_some_option=1",), {}),
    "training.logits_mib": (1, WIDE),
    "training.max_to_keep": (1, {"save_every": 5}),
    "optimizer.name": ("lion", {}),
    "optimizer.lr_schedule": ("linear", {}),
    "optimizer.lr_groups": (("embed=0.5",), {}),
    "optimizer.muon_heads": ("together", {"optimizer": Optimizer("muon")}),
    "data.paths": (("other.txt",), {}),
    "data.tokenizer": ("chars", {}),
    "data.other_tokenizer": (True, {"init_from": "runs/other"}),
    "data.text_field": ("body", {}),
    "data.held_out": (0.5, {}),
    "data.order": ("megatron", {}),
    "data.split": ("60,40,0", MEGATRON),
    "data.order_samples": (4000, MEGATRON),
    "data.first_sample": (2, {}),
    "data.prompt": ("A", {"data": Data(sample=3)}),
    "data.sample_every": (5, {"data": Data(sample=3)}),
    "faults.bad_records": (0.1, {}),
    "faults.bad_step": ("skip", {"bad": 2}),
    "faults.spike": (5.0, {}),
    "faults.most_skipped": (2, {"bad": 3, "faults": Faults(bad_step="skip")}),
    "faults.check_bits": (True, {}),
    "local_checkpoints.path": ("elsewhere", LOCAL),
    "local_checkpoints.every": (4, LOCAL),
    "local_checkpoints.max_to_keep": (3, LOCAL),
    "finetune.method": ("lora", {}),
    "finetune.objective": ("preferences", {"z_loss": 0.0}),
    "finetune.rank": (8, {"finetune": LORA}),
    "finetune.alpha": (16.0, {"finetune": LORA}),
    "finetune.targets": (("key",), {"finetune": LORA}),
    "finetune.base": ("int8", {"finetune": LORA}),
    "finetune.beta": (0.2, PREFERENCES),
    "finetune.template": ("chatml", {**ANSWERS, "seq": 64}),
    "finetune.too_long": ("drop", ANSWERS),
    "model.expert_buffer_factor": (1.5, EXPERTS),
    "model.aux_loss_weight": (0.002, EXPERTS),
    "model.router_z_loss_weight": (0.002, EXPERTS),
    "model.bias_update_rate": (0.02, EXPERTS),
    "model.expert_exchange": ("fp8", EXPERTS),
    "model.mtp_weight": (0.5, {"family": "mtp"}),
    "model.index_training": ("warmup", {"family": "sparse"}),
    "fsdp_min_size": (10**6, {}),
    "mesh.slices": (2, {}),
    "training.gather_ahead": ("layer", {}),
}
WITH_MTP = dataclasses.replace(DEEPSEEK, mtp_depth=1)


def base_run(changes: dict[str, Any]) -> Run:
    rest = {name: value for name, value in changes.items() if name != "bad"}
    family = rest.pop("family", "llama")
    model: Any = {**MODELS, "mtp": WITH_MTP, "sparse": DEEPSEEK_SPARSE}[family]
    sizes = {name: rest.pop(name) for name in ("layers", "vocab", "head_size") if name in rest}
    mesh = rest.pop("mesh", MESH)
    return tiny_run(dataclasses.replace(model, **sizes), mesh, **{"health": True, **rest})


def changed(run: Run, field: str, value: Any) -> Run:
    part, _, name = field.rpartition(".")
    if not part:
        return dataclasses.replace(run, **{name: value})
    return dataclasses.replace(
        run, **{part: dataclasses.replace(getattr(run, part), **{name: value})}
    )


def value_in(run: Run, field: str) -> Any:
    for name in field.split("."):
        run = getattr(run, name)
    return run


def declared(run: Run, field: str) -> Changes:
    part, _, name = field.rpartition(".")
    owner = type(getattr(run, part) if part else run)
    found = declarations_of(owner)[name].changes
    assert found is not None, f"{field} does not say what it changes: {', '.join(RESULTS)}"
    return found


def other_value(run: Run, field: str) -> Any:
    """Another value of a field: the next choice of its type, or a number near it."""
    part, _, name = field.rpartition(".")
    owner = type(getattr(run, part) if part else run)
    value = value_in(run, field)
    hint = typing.get_type_hints(owner)[name]
    choices = [word for word in typing.get_args(hint) if word not in ("auto", value)]
    if typing.get_origin(hint) is typing.Literal:
        return choices[0]
    if isinstance(value, bool):
        return not value
    assert name in ranges_of(owner), f"{field}: give another value in ROWS"
    if isinstance(value, float):
        return value / 2 or 0.25
    return 2 * value if value else 3


def row_of(field: str) -> tuple[Any, dict[str, Any]]:
    """Another value of a field, and what a run has besides."""
    if field in ROWS:
        return ROWS[field]
    return other_value(base_run({}), field), {}


def with_default(run: Run, field: str) -> Run:
    """The run with a field at its default: 0 may leave out what 1 and 2 have in common."""
    default = fields.fields_of_runs().get(field)
    if default is None:
        return run
    with contextlib.suppress(ConfigError):  # another field asks for another value
        return changed(run, field, default)
    return run


def text_of(program: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(program))


def outcome(result: Callable[..., Any], run: Run, *given: Any) -> Any:
    """What a path makes of a run, or its refusal."""
    try:
        return result(run, *given)
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


def step_arguments(run: Run) -> str:
    """Arguments of the train step: shapes, types and shardings of its state and its batch."""
    device_run = device_run_of(run)
    return f"{device_run.abstract} {device_run.abstract_batch}"


def update_rule(run: Run) -> str:
    """The part of the train step that follows the gradients."""
    device_run = device_run_of(run)
    state = device_run.abstract
    params = trained_only(device_run.layout.params, state.params)
    gradients = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), params)
    update = jax.make_jaxpr(device_run.optimizer.update)
    return text_of(update(gradients, state.optimizer, params, state.step))


def train_step(run: Run) -> str:
    device_run = device_run_of(run)
    step = jax.make_jaxpr(build_train_step(device_run))
    return text_of(step(device_run.abstract, device_run.abstract_batch))


def eval_step(run: Run) -> str:
    device_run = device_run_of(run)
    step = build_eval_step(device_run)
    lowered = step.lower(device_run.abstract.params, device_run.abstract_batch)
    return text_of(lowered.as_text())


def plans(run: Run) -> list[str]:
    return [
        str(price_run(run, parse_target(target)).estimate) for target in ("h100:8", "v5p:2x2x2")
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files by name: text, one with a damaged line, answers, one with an answer that is too long, messages, a dataset."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [
        {"text": f"{i} a line of text. " * 9, "body": f"{i} the other body. " * 9}
        for i in range(120)
    ]
    asked = [{"prompt": f"{i}?", "completion": "12345"[: 1 + i % 5]} for i in range(40)]
    too_long = {"prompt": "?" * 60, "completion": "yes"}
    said = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": str(i)}]}
        for i in range(40)
    ]
    records = {
        "text": lines,
        "other": lines[::-1],
        "chat": asked,
        "long": [*asked, too_long],
        "messages": said,
    }
    files = {name: folder / f"{name}.jsonl" for name in (*records, "broken")}
    for name, rows in records.items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    files["broken"].write_text(files["text"].read_text() + "{\n")
    documents = [[np.frombuffer(row["text"].encode(), np.uint8)] for row in lines]
    files["megatron"] = write_dataset(folder / "megatron", documents, "uint8")
    return {name: str(file) for name, file in files.items()}


def on_text(field: str, run: Run, texts: dict[str, str]) -> Run:
    """The run on the file that a row reads."""
    name = "text"
    if field == "faults.bad_records":
        name = "broken"
    if run.finetune.objective == "answers":
        name = {"finetune.too_long": "long", "finetune.template": "messages"}.get(field, "chat")
    held_out: float | None = 0.3
    if field == "data.order" or run.data.order == "megatron":
        name, held_out = "megatron", None
    data = dataclasses.replace(run.data, paths=(texts[name],), tokenizer="bytes", held_out=held_out)
    run = changed(dataclasses.replace(run, data=data), "training.eval_samples", 4)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=None))


def data_read(run: Run, cache: Path) -> Any:
    """The first samples of training in their order."""
    prepared = prepare.prepare_run(run, cache=cache)
    assert isinstance(prepared, prepare.PreparedRun)
    stream = prepared.stream()
    return [(name, array.tolist()) for i in range(4) for name, array in stream[i].items()]


def data_evaluated(run: Run, cache: Path) -> Any:
    """The held-out samples. A run that is evaluated has the tokenizer of its folder, whatever the field says."""
    run = changed(run, "data.tokenizer", "bytes")
    prepared = prepare.prepare_run(run, cache=cache)
    assert isinstance(prepared, prepare.PreparedRun)
    order = held_out_order(list(prepared.held_out), run.training.eval_samples)
    return [(name, x.tolist()) for part, i in order for name, x in part[i].items()]


PROGRAM = (step_arguments, on_tpu, update_rule, train_step)
"""The train step. Its parts come first: where one of them differs, the step need not be traced."""
MEASURES: dict[Result, tuple[Callable[[Run], Any], ...]] = {
    "program": PROGRAM,
    "evaluation": (on_tpu, eval_step),
    "plan": (plans,),
}
TEXTS: dict[Result, Callable[..., Any]] = {"data": data_read, "evaluation": data_evaluated}
NAMED = {"data.paths": "other"}
"""Fields whose other value is one of the files."""
known: dict[tuple[str, str], Any] = {}
"""Results by the name of their measure and the run."""


def result_of(measure: Callable[..., Any], run: Run, *given: Any) -> Any:
    """The result of a run, kept for other rows; or its refusal."""
    key = (measure.__name__, repr(run))
    if key not in known:
        known[key] = outcome(measure, run, *given)
    return known[key]


def differs(measure: Callable[..., Any], run: Run, others: list[Run], *given: Any) -> bool:
    """Whether any of the runs has another result than the first."""
    before = result_of(measure, run, *given)
    return any(result_of(measure, other, *given) != before for other in others)


FIELDS = [*fields.fields_of_runs(), *(field for field in ROWS if field.startswith("model."))]


@functools.cache
def conditions(field: str) -> dict[str, Any]:
    """Fields whose values a row needs, besides those of its model."""
    run, plain = base_run(row_of(field)[1]), base_run({})
    return {
        other: value_in(run, other)
        for other in fields.fields_of_runs()
        if value_in(run, other) != value_in(plain, other)
    }


def runs_of(together: list[str], texts: dict[str, str] | None = None) -> tuple[Run, Run, Run]:
    """A run that has what rows need, and the same with another value of their fields, and with their defaults.

    texts: the runs read one of these files. Raises ConfigError for fields that do not go together.
    """
    run = base_run(row_of(together[0])[1])
    for field in together[1:]:
        for needed, value in conditions(field).items():
            run = changed(run, needed, value)
    if texts is not None:
        run = on_text(together[0], run, texts)
    other = at_default = run
    for field in together:
        value = row_of(field)[0]
        if texts is not None and field in NAMED:
            value = texts[NAMED[field]]
        other = changed(other, field, value)
        at_default = with_default(at_default, field)
    return run, other, at_default


def do_change(result: Result, together: list[str], texts: dict[str, str], cache: Path) -> bool:
    """Whether a result is another when all the fields have another value."""
    for measure in MEASURES.get(result, ()):
        run, other, at_default = runs_of(together)
        if differs(measure, run, [other, at_default]):
            return True
    if result not in TEXTS:
        return False
    run, other, _ = runs_of(together, texts)
    return differs(TEXTS[result], run, [other], cache)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_changes_what_it_declares(field: str, texts: dict[str, str], cache: Path) -> None:
    """`loop` has a test of its own."""
    for result in declared(base_run(row_of(field)[1]), field).results - {"loop"}:
        assert do_change(result, [field], texts, cache), f"{field} does not change {result!r}"


def groups_of(result: Result, quiet: list[str]) -> list[list[str]]:
    """Fields that are changed together: their rows need the same of all that may change the result."""
    groups: dict[str, list[list[str]]] = {}
    for field in quiet:
        run = base_run(row_of(field)[1])
        needs = conditions(field).items()
        audible = [need for need in needs if result in declared(run, need[0]).results]
        same = groups.setdefault(f"{run.model} {audible}", [])
        for group in same:
            with contextlib.suppress(ConfigError):
                runs_of([*group, field])
                group.append(field)
                break
        else:
            same.append([field])
    return [group for same in groups.values() for group in same]


def check_silence(result: Result, quiet: list[str], texts: dict[str, str], cache: Path) -> None:
    """Fails with the names of those fields that change a result."""
    for together in groups_of(result, quiet):
        if do_change(result, together, texts, cache):
            found = [field for field in together if do_change(result, [field], texts, cache)]
            # Fields that do not go together are refused together, and change nothing alone.
            assert not found, f"{result!r} is changed by {found}: declare it"


@pytest.mark.parametrize("result", [result for result in RESULTS if result != "loop"])
def test_no_field_changes_what_it_does_not_declare(
    result: Result, texts: dict[str, str], cache: Path
) -> None:
    quiet = [f for f in FIELDS if result not in declared(base_run(row_of(f)[1]), f).results]
    check_silence(result, quiet, texts, cache)


def test_a_wrong_declaration_is_found(texts: dict[str, str], cache: Path) -> None:
    """A weight of the loss is easily thought to change no evaluation: above 0 it adds a metric to it."""
    quiet = ["training.dropout", "training.z_loss", "optimizer.beta1"]
    with pytest.raises(AssertionError, match=r"'evaluation' .* \['training.z_loss'\]"):
        check_silence("evaluation", quiet, texts, cache)


def test_parity_keeps_what_it_does_not_set() -> None:
    """A field is either the run's own on both sides of a comparison, or another value of it changes neither."""
    for field in fields.fields_of_runs():
        value, base = row_of(field)
        run = base_run(base)
        stated = declared(run, field)
        if stated.results & {"program"}:
            both = [
                parity.in_float32(each, MeshShape(), 5)
                for each in (run, changed(run, field, value))
            ]
            assert (both[0] != both[1]) == stated.parity, field


def preferring(base: dict[str, Any]) -> Run:
    run = base_run(base)
    tuning = dataclasses.replace(run.finetune, objective="preferences")
    return changed(dataclasses.replace(run, finetune=tuning), "training.z_loss", 0.0)


def squares(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] @ params["v"]) ** 2)


@functools.cache
def wrapped_model() -> Any:
    params = {"w": np.ones((64, 128), np.float32), "v": np.ones((128, 64), np.float32)}
    return mw.wrap(
        params,
        squares,
        lambda step: {"x": np.ones((16, 64), np.float32)},
        rules={"w": (None, "tensor")},
    )


def wrapped(base: dict[str, Any]) -> Run:
    """A run of a model of one's own, with what the row's base has that means something to it."""
    model = wrapped_model()
    names = ("param_dtype", "save_every", "optimizer", "faults", "local_checkpoints")
    mesh = {"fsdp=2": "fsdp=2", "data=2": "data=2", CROSSING: "data=2*1,fsdp=4"}.get(
        base.get("mesh", ""), "data=2,fsdp=2"
    )
    run = model.run(mesh=mesh, remat="full", **{name: base[name] for name in names if name in base})
    return dataclasses.replace(run, fsdp_min_size=64)


KINDS_OF_RUNS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "wrap": wrapped,
    "preferences": preferring,
}


def in_program(path: str) -> list[str]:
    """Fields that change the train step of a kind of run."""
    return [
        field
        for field in fields.fields_of_runs()
        if fields.status_of(path, field) == "honoured"
        and "program" in declared(base_run({}), field).results
        and (path, field) != ("preferences", "finetune.objective")  # which it is already
    ]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        pytest.param(path, field, marks=[pytest.mark.long] if path == "preferences" else [])
        for path in KINDS_OF_RUNS
        for field in in_program(path)
    ],
)
def test_the_step_of_another_kind_of_run_changes_with_its_fields(path: str, field: str) -> None:
    value, base = row_of(field)
    run = KINDS_OF_RUNS[path](base)
    other = changed(run, field, value)
    assert any(differs(measure, run, [other]) for measure in PROGRAM)


def test_every_row_and_every_path_is_one_that_there_is() -> None:
    known_fields = fields.fields_of_runs()
    for field in known_fields:
        assert set(fields.declaration_of(field).changes.results) <= RESULTS.keys()
        for refusal in fields.declaration_of(field).refusals:
            assert set(refusal.paths) <= fields.PATHS.keys()
        assert fields.declaration_of(field).changes.needs in ("", *known_fields)
    assert {field for field in ROWS if not field.startswith("model.")} <= known_fields.keys()


@pytest.mark.parametrize("path", ["full", "lora", "text", "answers", "preferences", "wrap"])
def test_refused_fields_are_refused_with_the_reason(path: str) -> None:
    """And no other is, by the same declarations."""
    chosen = "finetune.method" if path in ("full", "lora") else "finetune.objective"
    for field in fields.fields_of_runs():
        value, base = row_of(field)
        if path == "wrap":
            run = wrapped(base)
        elif field == chosen:
            continue
        else:
            plain = {"z_loss": 0.0, "mesh": base.get("mesh", "data=2"), "finetune": FineTune()}
            run = changed(base_run({**base, **plain}), chosen, path)
        run = changed(run, field, value)
        assert run.mesh is not None
        if fields.status_of(path, field) == "refused":
            with pytest.raises(ConfigError, match=r"(?s)with .*because.*fix"):
                place_run(run)
        elif run.mesh.stage == 1:
            fields.check_fields(path, run, run.mesh)


STEPS = 24


def health_of(params: Any) -> dict[str, np.ndarray]:
    """The health of a step that computes nothing."""
    rows = sum(x.shape[0] if "." in name else 1 for name, x in named_leaves(params).items())
    return {GRADIENT: np.zeros(rows), BITS: np.zeros((2, 0))}


@pytest.fixture
def around(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Callable[[Run, int], Any]:
    """Runs the loop with a step that computes nothing; returns what it read, wrote, evaluated and sampled."""

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

    def run_loop(run: Run, bad: int) -> Any:
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
            metrics: dict[str, Any] = {
                "loss": (loss, 1.0),
                "gradient norm": (9.0 if number == STEPS - 1 else 1.0, 1.0),
            }
            if run.training.health:
                metrics["health"] = health_of(state.params)
            return after, metrics

        step.device_bytes = None  # type: ignore[attr-defined]
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
        health = out / "out" / "health.jsonl"
        records = health.read_text().splitlines() if health.is_file() else []
        return (
            ended,
            kept,
            {re.sub(r"loop\d+", "", file) for file in seen},
            samples,
            taken,
            [json.loads(line)["step"] for line in records],
        )

    return run_loop


LOOP = [f for f in fields.fields_of_runs() if "loop" in declared(base_run({}), f).results]
LOOP.remove("name")  # of the default folder, which the test does not use
LOOP.remove(
    "data.other_tokenizer"
)  # of weights that were trained (tests/test_tokens_of_weights.py)


@pytest.mark.parametrize("field", LOOP)
def test_what_goes_around_the_step_changes_with_its_fields(
    field: str, around: Callable[[Run, int], Any], texts: dict[str, str]
) -> None:
    """Initial weights, evaluations, samples, checkpoints, faults, metrics."""
    value, base = row_of(field)
    small = {"mesh": "data=1", "steps": STEPS, "batch": 2, "data": Data(sample=0)}
    run = on_text(field, base_run({**small, **base}), texts)
    bad = base.get("bad", 0)
    assert around(run, bad) != around(changed(run, field, value), bad)
