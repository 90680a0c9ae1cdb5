"""Fine-tuning: chat data, adapters on every mesh, quantised bases, PEFT's format, resumed runs."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tiny_runs import (
    DEEPSEEK,
    MODELS,
    assert_same_steps,
    device_run_of,
    random_batch,
    tiny_run,
    train_on_one_device,
)
from tiny_runs import train as take_steps

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step
from meshwright.api.finetuning import FinetuneOptions
from meshwright.checkpoint.initial_weights import load_initial_weights, merge_adapters
from meshwright.config import Data
from meshwright.data.batch import PADDING, Batch
from meshwright.data.chat import ChatTemplate
from meshwright.data.chat_records import RecordRenderer
from meshwright.data.conversations import load_conversations
from meshwright.data.packing import Packed, document_range, fit, pack
from meshwright.data.tokenizers import Bytes
from meshwright.data.tokens import TokenArray, TokenFile
from meshwright.fine_tuning import FineTune
from meshwright.hardware.machine import Machine
from meshwright.hugging_face.peft_files import CONFIG, WEIGHTS
from meshwright.models.adapters import ADAPTERS, BLOCK, NF4, dequantise, quantise
from meshwright.models.preferences import _by_pair
from meshwright.planner.memory_model import memory_by_category
from meshwright.planner.work import work_of
from meshwright.runs.placed_run import place_run
from meshwright.runs.recipe import run_of_hugging_face
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.runs.settle import settle
from meshwright.sharding.params import Tree, named_leaves
from meshwright.sharding.placement import axes_of
from meshwright.step.device_run import DeviceRun
from meshwright.step.eval_step import build_eval_step
from meshwright.trainer.evaluation import BatchEvaluation
from meshwright.trainer.prepare import prepare_run, sum_metrics

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
LATER = "{% for m in messages %}{{ loop.revindex }}{{ m.content | length }}|{% endfor %}"
TALK = [
    {"role": "user", "content": "hé?"}, {"role": "assistant", "content": "yes ü"},
    {"role": "user", "content": "two"}, {"role": "assistant", "content": "no"},
]  # fmt: skip

ANSWERS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "by prefix": ({"messages": TALK}, PLAIN, ["yes ü<|end|>no<|end|>"]),
    "marked": ({"messages": TALK}, MARKED, ["yes ü<|end|>no<|end|>"]),
    "the last answer alone": ({"prompt": TALK[:3], "completion": TALK[3:]}, PLAIN, ["no<|end|>"]),
    "the last marked one": ({"prompt": TALK[:3], "completion": TALK[3:]}, MARKED, ["no<|end|>"]),
    "texts": ({"prompt": "One and one? ", "completion": "Two."}, "", ["Two."]),
    "a preference": ({"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": TALK[3:]}, PLAIN,
                     ["yes ü<|end|>", "no<|end|>"]),
    "a preference of conversations": ({"chosen": TALK[:2], "rejected": [*TALK[:1], *TALK[3:]]}, PLAIN,
                                      ["yes ü<|end|>", "no<|end|>"]),
}  # fmt: skip


def template(source: str) -> ChatTemplate | None:
    return ChatTemplate(source) if source else None


@pytest.mark.parametrize("row", ANSWERS)
def test_answers_are_what_the_loss_is_of(row: str) -> None:
    record, source, answers = ANSWERS[row]
    objective = "preferences" if "chosen" in record else "answers"
    documents = RecordRenderer("f:1", Bytes(), template(source)).render(record, objective)
    assert [Bytes().decode(d.tokens[d.answers]) for d in documents] == answers
    closed = [d.tokens[d.answers][-1] == Bytes().end for d in documents]
    assert all(closed) if not source else not any(closed)


BROKEN: dict[str, tuple[Any, str, str]] = {
    "another field": ({"text": "x"}, PLAIN, "it has 'text'"),
    "no messages": ({"messages": []}, PLAIN, "its messages is list"),
    "no role": ({"messages": [{"content": "x"}]}, PLAIN, "message 0 of its messages"),
    "no answer": ({"messages": TALK[:1]}, PLAIN, "no message is the assistant's"),
    "an empty completion": ({"prompt": "a", "completion": ""}, "", "its answer is empty"),
    "no template": ({"messages": TALK}, "", "no chat template"),
    "a template that looks ahead": (
        {"messages": TALK},
        LATER,
        "where that answer begins cannot be found",
    ),
    "a template that refuses": (
        {"messages": TALK},
        "{{ raise_exception('alone') }}",
        "refuses it: alone",
    ),
    "no content": (
        {"messages": [TALK[0], {"role": "assistant", "content": None}]},
        PLAIN,
        "the template writes 'None'",
    ),
    "parts of a content": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, TALK[1]]},
        PLAIN,
        "part 0 of the content of message 0 of its messages is {'type': 'image'",
    ),
    "tools": (
        {"messages": TALK, "tools": [{"name": "add"}]},
        PLAIN,
        "the template writes nothing of `tools`",
    ),
    "half a character": (
        {"messages": [TALK[0], {"role": "assistant", "content": "x\ud800"}]},
        PLAIN,
        "character 1 is '\\ud800', half of a surrogate pair",
    ),
    "no object": ([1], PLAIN, "it is a list, and no object"),
}


@pytest.mark.parametrize("row", BROKEN)
def test_broken_records_are_refused_with_file_and_line(row: str, tmp_path: Path) -> None:
    record, source, reason = BROKEN[row]
    file, jinja = tmp_path / "chat.jsonl", tmp_path / "template.jinja"
    good = {"prompt": "a", "completion": "b"}
    file.write_text(f"{json.dumps(good)}\n\n{json.dumps(record)}\n")
    jinja.write_text(source)
    chosen = str(jinja) if source else None
    run = mw.recipe(
        "tiny", tokenizer="bytes", objective="answers", paths=(str(file),), template=chosen
    )
    with pytest.raises(mw.DataError, match=re.escape(reason)) as refused:
        mw.train(run, tmp_path / "out", progress="none", cache=tmp_path)
    assert refused.value.asked.removeprefix("reading ") == f"{file}, line 3"


@pytest.mark.parametrize("seq", [12, 64])
def test_sequences_hold_whole_documents(seq: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 13, 50)
    tokens = rng.integers(0, 200, lengths.sum()).astype(np.uint32)
    answers = (rng.random(lengths.sum()) < 0.5).astype(np.uint8)
    file = TokenFile(
        TokenArray.of(tokens, np.cumsum(lengths)), 257, Bytes(), tmp_path, len(lengths)
    )
    packed: Packed = pack(file, answers, seq, range(50), 1)
    assert sorted(d for row in packed.sequences for d in row) == list(range(50))
    room = len(packed) * seq - int((lengths - 1).sum())
    assert room / (len(packed) * seq) < (0.35 if seq == 12 else 0.1)
    for row, documents in enumerate(packed.sequences):
        fields = packed[row]
        for segment, document in enumerate(documents):
            start, stop = document_range(file.tokens.ends, document)
            here = np.flatnonzero(fields["segments"] == segment)
            np.testing.assert_array_equal(fields["inputs"][here], tokens[start : stop - 1])
            np.testing.assert_array_equal(fields["targets"][here], tokens[start + 1 : stop])
            np.testing.assert_array_equal(fields["weights"][here], answers[start + 1 : stop])
            np.testing.assert_array_equal(fields["positions"][here], np.arange(stop - start - 1))
        assert not fields["weights"][fields["segments"] == len(documents)].any()


def lora(model: str, mesh: str = "data=1", tuning: FineTune | None = None, **changes: Any) -> Run:
    return tiny_run(
        MODELS[model],
        mesh,
        finetune=tuning or FineTune(method="lora", rank=4, alpha=8.0),
        **changes,
    )


MESHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "data, fsdp, tensor": ("llama", "data=2,fsdp=2,tensor=2", {}),
    "stages": ("qwen-like", "stage=2,data=2,tensor=2", {"microbatches": 2}),
    "context, more devices than heads": ("gpt2", "context=2,fsdp=4", {}),
    "experts, ZeRO-1, accumulation": (
        "mixtral",
        "data=2,expert=2,tensor=2",
        {"layout": "zero1", "microbatches": 2},
    ),
}


@pytest.mark.parametrize("row", MESHES)
def test_adapters_train_as_on_one_device(row: str) -> None:
    model, mesh, changes = MESHES[row]
    run = lora(model, mesh, **changes)
    one = train_on_one_device(dataclasses.replace(run, layout="fsdp"), 3)
    many = take_steps(run, 3)
    for a, b in zip(jax.tree.leaves(many.initial), jax.tree.leaves(one.initial), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same_steps(many, one)


def test_nothing_but_adapters_changes_or_has_a_state() -> None:
    run = lora("llama")
    trained = train_on_one_device(run, 3)
    before, after = named_leaves(trained.initial), named_leaves(trained.params)
    assert {path for path in before if not np.array_equal(before[path], after[path])} == {
        path for path in before if f".{ADAPTERS}." in path
    }
    placed = device_run_of(run)
    adapters = [p for path, p in named_leaves(placed.layout.params).items() if ADAPTERS in path]
    state = [x for x in jax.tree.leaves(placed.abstract.optimizer) if x.ndim > 1]
    assert sum(x.size for x in state) == 2 * sum(p.size for p in adapters)


def test_merging_keeps_what_is_float32_at_rest() -> None:
    device_run = device_run_of(lora("deepseek-like", compute_dtype="bfloat16"))
    merged = jax.eval_shape(
        lambda params: merge_adapters(device_run, params)[1], device_run.abstract.params
    )
    kinds = {path: x.dtype for path, x in named_leaves(merged).items()}
    assert kinds.pop("blocks.router_bias") == jnp.float32 and set(kinds.values()) == {
        jnp.dtype("bfloat16")
    }


def test_merged_weights_compute_what_adapters_do() -> None:
    run = lora("mixtral", "data=2,fsdp=2,tensor=2")
    device_run = device_run_of(run)
    params = device_run.initial_state().params
    params["blocks"][ADAPTERS] = jax.tree.map(lambda x: x + 0.02, params["blocks"][ADAPTERS])
    base, merged = merge_adapters(device_run, params)
    assert ADAPTERS not in merged["blocks"]
    losses = [
        float(build_eval_step(d)(p, random_batch(d))["loss"][0])
        for d, p in ((device_run, params), (base, merged))
    ]
    assert abs(losses[0] / losses[1] - 1) < 1e-6


def test_nf4_takes_the_nearest_of_its_values() -> None:
    p = device_run_of(lora("llama")).run.model.params()["blocks"]["query"]
    w = np.random.default_rng(0).normal(size=p.shape).astype(np.float32)
    kept = quantise("blocks.query", p, jnp.asarray(w), "nf4")
    assert (
        kept["codes"].shape[1] == p.shape[1] // 2 and kept["scales"].shape[1] == p.shape[1] // BLOCK
    )
    blocks = w.reshape(p.shape[0], -1, BLOCK, *p.shape[2:])
    scale = np.abs(blocks).max(2, keepdims=True)
    distance = np.abs((blocks / scale)[..., None] - np.array(NF4, np.float32))
    nearest = (np.array(NF4, np.float32)[distance.argmin(-1)] * scale).reshape(w.shape)
    np.testing.assert_allclose(dequantise(kept, jnp.float32), nearest, rtol=1e-6)
    exact = quantise("blocks.query", p, jnp.asarray(w), "int8")
    apart = np.abs(np.asarray(dequantise(exact, jnp.float32)) - w)
    assert (apart <= np.abs(w).max(1, keepdims=True) / 254 * 1.001).all()


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown target": (
        {"targets": ("q_proj",)},
        "data=1",
        "no matrix of a layer has such a name",
    ),
    "routed experts": ({"targets": ("expert_up",)}, "data=1", "routed experts"),
    "a quantised model that trains": (
        {"method": "full", "base": "nf4"},
        "data=1",
        "trained weights need gradients",
    ),
    "preferences in stages": ({"objective": "preferences"}, "stage=2", "second forward pass"),
    "preferences with z_loss": ({"objective": "preferences"}, "data=1", "--training.z-loss 0"),
    "preferences of further tokens": (
        {"objective": "preferences"},
        "data=1",
        "--model.mtp-depth 0",
    ),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(row: str) -> None:
    fields, mesh, reason = REFUSED[row]
    run = lora("mixtral", mesh, FineTune(**{"method": "lora", **fields}), microbatches=2)
    if "further" in row:
        run = tiny_run(
            dataclasses.replace(DEEPSEEK, mtp_depth=1), mesh, finetune=run.finetune, z_loss=0.0
        )
    with pytest.raises(mw.ConfigError, match=reason):
        place_run(run)


def write_base(folder: Path, row: str = "llama") -> None:
    """A drawn model of a golden file with a tokenizer of 50 characters and a chat template."""
    hf_models.write_folder(row, folder)
    letters = [
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        *"abcdefghijklmnopqrstuvwxyz0123456789 ?.,!+-=*/()",
    ][:50]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.add_special_tokens(letters[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "chat_template": PLAIN,
        "eos_token": "<|end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_sums(file: Path, count: int = 120) -> None:
    """Questions with one digit answers."""
    rng = np.random.default_rng(0)
    with file.open("w") as lines:
        for a, b in rng.integers(0, 5, (count, 2)):
            talk = [
                {"role": "user", "content": f"{a}+{b}?"},
                {"role": "assistant", "content": f"{a + b}!"},
            ]
            lines.write(json.dumps({"messages": talk}) + "\n")


SETTINGS: dict[str, Any] = {
    "steps": 8, "batch": 8, "seq": 32, "compute_dtype": "float32", "learning_rate": 5e-3, "rank": 4, "eval_every": 2,
    "save_every": 4, "fsdp_min_size": 64, "warmup_steps": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder with `base` (Hugging Face), `chat.jsonl` and `eight`, a LoRA fine-tune on eight devices."""
    folder = tmp_path_factory.mktemp("tuned")
    write_base(folder / "base")
    write_sums(folder / "chat.jsonl")
    mesh = "data=2,fsdp=2,tensor=2"
    mw.finetune(
        f"hf:{folder}/base",
        str(folder / "chat.jsonl"),
        folder / "eight",
        mesh=mesh,
        cache=cache,
        **SETTINGS,
    )
    return folder


def metrics(folder: Path, name: str) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_a_fine_tune_lowers_held_out_loss_alike_on_one_device(tuned: Path, cache: Path) -> None:
    held_out = metrics(tuned / "eight", "held-out loss")
    assert held_out[-1] < 0.8 * held_out[0]
    mw.finetune(
        f"hf:{tuned}/base",
        str(tuned / "chat.jsonl"),
        tuned / "one",
        mesh="data=1",
        cache=cache,
        **SETTINGS,
    )
    np.testing.assert_allclose(
        metrics(tuned / "one", "loss"), metrics(tuned / "eight", "loss"), rtol=1e-5
    )


def test_a_resumed_fine_tune_may_name_its_model(tuned: Path) -> None:
    """As a supervisor does that starts it again, and `--resume-if-exists`."""
    out = ["--out", str(tuned / "eight"), "--steps", "9"]
    for resumed in ("--resume", "--resume-if-exists"):
        base = FinetuneOptions.base([f"hf:{tuned}/base", *out, resumed])
        assert base.run == run_in_folder(tuned / "eight") and list(base.args) == [*out, resumed]
    with pytest.raises(
        mw.ConfigError, match=rf"(?s)started from hf:{tuned}/base.*or another --out"
    ):
        FinetuneOptions.base([f"hf:{tuned}/other", *out, "--resume"])


def test_a_resumed_fine_tune_is_bitwise_the_one_that_went_through(tuned: Path, cache: Path) -> None:
    before = mw.convert(tuned / "eight", tuned / "before", weights="adapter").out / WEIGHTS
    losses = metrics(tuned / "eight", "loss")
    run = run_in_folder(tuned / "eight")
    assert run.finetune.method == "lora"
    mw.train(run, tuned / "eight", start=4, progress="none", cache=cache)
    assert metrics(tuned / "eight", "loss") == losses
    after = mw.convert(tuned / "eight", tuned / "after", weights="adapter").out / WEIGHTS
    assert before.read_bytes() == after.read_bytes()


MODULES = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
"""Names of `transformers`."""


def adapted_run(folder: Path, config: dict[str, Any]) -> Run:
    """Run of the model in `base` with adapters as a configuration of `peft` has them."""
    alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config["use_rslora"] else 1.0)
    names = {module.split(".")[-1] for module in config["target_modules"]}
    targets = tuple(name for name, module in MODULES.items() if module.split(".")[-1] in names)
    tuning = FineTune(method="lora", rank=config["r"], alpha=alpha, targets=targets)
    return dataclasses.replace(run_of_hugging_face(f"hf:{folder}/base"), finetune=tuning)


def adapted_params(device_run: DeviceRun, shapes: dict[str, Any]) -> Tree:
    """Weights of the base, with drawn adapters from `peft`'s A [r, in] and B [out, r] of each module."""
    params, tensors = load_initial_weights(device_run), hf_models.draw_tensors(shapes)
    for name, pair in params["blocks"][ADAPTERS].items():
        for side, like in pair.items():
            key = f"base_model.model.model.layers.{{}}.{MODULES[name]}.lora_{side.upper()}.weight"
            rows = [tensors.pop(key.format(layer)).T for layer in range(like.shape[0])]
            pair[side] = jax.device_put(np.stack(rows).reshape(like.shape), like.sharding)
    assert not tensors
    return params


def adapted_logits(folder: Path, about: dict[str, Any], mesh: str) -> np.ndarray:
    """Logits of the model in `base` with the drawn adapters of a golden file, on a mesh."""
    training = mw.Training(
        batch=hf_models.BATCH, seq=hf_models.SEQ, compute_dtype="float32", remat="none"
    )
    run = adapted_run(folder, about["config"])
    device_run = device_run_of(
        dataclasses.replace(run, mesh=mw.MeshShape.parse(mesh), fsdp_min_size=64, training=training)
    )
    batch = hf_models.batch_of(device_run)
    return np.asarray(
        hf_models.build_logits(device_run)(adapted_params(device_run, about["tensors"]), batch)
    )


def adapter_written(folder: Path) -> dict[str, Any]:
    """Configuration, and shapes of the tensors, of an adapter that Meshwright wrote."""
    config = {**json.loads((folder / CONFIG).read_text()), "base_model_name_or_path": "base"}
    return {
        "config": config,
        "tensors": {n: list(t.shape) for n, t in sorted(load_file(folder / WEIGHTS).items())},
    }


def test_merged_weights_and_adapter_are_what_peft_reads(tuned: Path, tmp_path: Path) -> None:
    """`peft` reads an adapter of this configuration and these tensors; merged weights are the sum that it computes."""
    mw.convert(tuned / "eight", tuned / "merged")
    mw.convert(tuned / "eight", tuned / "adapter", weights="adapter")
    assert adapter_written(tuned / "adapter") == json.loads(
        (hf_models.PEERS / "written/adapter.json").read_text()
    )
    base, merged = (load_file(tuned / name / "model.safetensors") for name in ("base", "merged"))
    adapter, changed = load_file(tuned / "adapter" / WEIGHTS), 0
    config = adapter_written(tuned / "adapter")["config"]
    scale = config["lora_alpha"] / config["r"]
    for name, value in merged.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            product = adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
            np.testing.assert_allclose(value, base[name] + scale * product, atol=1e-6)
            changed += 1
        else:
            np.testing.assert_array_equal(value, base[name])
    assert 2 * changed == len(adapter)
    write_base(tmp_path / "base")
    about, golden = hf_models.read("adapter-written")
    found = adapted_logits(tmp_path, about, "data=1")
    np.testing.assert_allclose(found, golden["logits"], atol=1e-5 * np.abs(golden["logits"]).max())


def test_outputs_of_a_fine_tune_are_sources_everywhere(tuned: Path, cache: Path) -> None:
    mw.convert(tuned / "eight", tuned / "merged of sources")
    evaluation = mw.evaluate(tuned / "eight", mesh="fsdp=2", cache=cache)
    assert abs(evaluation.loss - metrics(tuned / "eight", "held-out loss")[-1]) < 1e-4
    prompt = "<|user|>2+2?<|end|><|assistant|>"
    texts = [
        mw.generate(str(source), [prompt], max_tokens=6, mesh="data=1").tokens[0]
        for source in (tuned / "eight", f"hf:{tuned}/merged of sources")
    ]
    assert texts[0] == texts[1]


def test_logits_with_adapters_are_those_of_peft(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "qwen3")
    about, golden = hf_models.read("adapter")
    found = adapted_logits(tmp_path, about, "data=2,fsdp=2,tensor=2")
    np.testing.assert_allclose(found, golden["logits"], atol=1e-5 * np.abs(golden["logits"]).max())
    (tmp_path / "base/config.json").rename(tmp_path / "base/adapter_config.json")
    with pytest.raises(mw.WeightsError, match="merge_and_unload"):
        run_of_hugging_face(f"hf:{tmp_path}/base")


def write_preferences(file: Path, count: int = 60) -> None:
    """Right answers before wrong ones."""
    rng = np.random.default_rng(1)
    with file.open("w") as lines:
        for a, b in rng.integers(0, 4, (count, 2)):
            prompt = [{"role": "user", "content": f"{a}+{b}?"}]
            answers = [[{"role": "assistant", "content": f"{n}!"}] for n in (a + b, a + b + 3)]
            lines.write(
                json.dumps({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}) + "\n"
            )


@pytest.mark.parametrize("mesh", ["data=1", "context=2,fsdp=2,tensor=2"])
def test_the_loss_of_preferences_is_that_of_torch(mesh: str, tmp_path: Path, cache: Path) -> None:
    write_base(tmp_path / "base", "qwen3")
    about, golden = hf_models.read("adapter")
    write_preferences(tmp_path / "pairs.jsonl")
    run = preference_run(adapted_run(tmp_path, about["config"]), tmp_path / "pairs.jsonl", mesh)
    prepared = prepare_run(run, cache=cache)
    samples = [prepared.train[0][i] for i in range(run.training.batch)]
    batch = Batch(**{name: np.stack([s[name] for s in samples]) for name in samples[0]})
    device_run = prepared.device_run
    params = adapted_params(device_run, about["tensors"])
    found = build_eval_step(device_run)(params, jax.device_put(batch, device_run.batch_sharding))
    values = [
        float(found[name][0] / found[name][1])
        for name in ("loss", "reward margin", "preference accuracy")
    ]
    with np.load(
        hf_models.PEERS / "written/preferences.npz"
    ) as given:  # the pairs that the golden file is of
        for name in given:
            np.testing.assert_array_equal(getattr(batch, name), given[name])
    np.testing.assert_allclose(values, golden["preferences"], rtol=1e-5, atol=1e-6)


def preference_run(run: Run, data: Path, mesh: str, method: str = "lora", **training: Any) -> Run:
    tuning = dataclasses.replace(run.finetune, method=method, objective="preferences", beta=0.3)  # type: ignore[arg-type]
    settings = {
        "batch": 4,
        "seq": 64,
        "compute_dtype": "float32",
        "steps": 6,
        "eval_samples": 0,
        **training,
    }
    return dataclasses.replace(
        run, finetune=tuning, mesh=mw.MeshShape.parse(mesh), fsdp_min_size=64,
        training=mw.Training(**settings),  # type: ignore[arg-type]
        data=dataclasses.replace(run.data, paths=(str(data),), sample=0),
        optimizer=mw.Optimizer(learning_rate=2e-3, weight_decay=0.0),
    )  # fmt: skip


def test_preferences_train_alike_on_two_meshes_and_keep_their_reference(
    tmp_path: Path, cache: Path
) -> None:
    write_base(tmp_path / "base")
    write_preferences(tmp_path / "pairs.jsonl")
    source = run_of_hugging_face(f"hf:{tmp_path}/base")
    for name, mesh in (("one", "data=1"), ("eight", "fsdp=2,tensor=2")):
        run = preference_run(source, tmp_path / "pairs.jsonl", mesh, "full")
        mw.train(run, tmp_path / name, progress="none", cache=cache)
    losses = metrics(tmp_path / "eight", "loss")
    np.testing.assert_allclose(losses, metrics(tmp_path / "one", "loss"), rtol=1e-5)
    assert abs(losses[0] - np.log(2)) < 1e-6  # the model is its own reference
    assert losses[-1] < losses[0] and metrics(tmp_path / "eight", "preference accuracy")[-1] > 0.5
    texts = mw.generate(
        tmp_path / "eight", ["<|user|>1+1?<|end|><|assistant|>"], max_tokens=3, mesh="data=1"
    )
    assert len(texts.tokens[0]) > 0
    # Evaluated by its own measures: a preference has no perplexity.
    found = mw.evaluate(tmp_path / "eight", mesh="data=1", cache=cache)
    assert isinstance(found, BatchEvaluation) and found.metrics["pairs"] == 6
    assert found.loss == pytest.approx(metrics(tmp_path / "eight", "held-out loss")[-1], rel=1e-5)
    assert {"loss", "reward margin", "preference accuracy", "pairs"} == set(found.metrics)


BYTES = {"compute": 2.0, "int8": 1.0, "nf4": 0.5 + 4 / BLOCK}
"""Bytes of an element of a matrix in each base, without int8's scales, one for thousands of elements."""


@pytest.mark.parametrize("base", BYTES)
def test_the_plan_counts_what_is_frozen_in_its_type_and_nothing_else_of_it(base: str) -> None:
    tuning = FineTune(method="lora", base=base)  # type: ignore[arg-type]
    run = mw.recipe("llama3-8b", vocab=128256, batch=8, seq=512, mesh="fsdp=8", remat="full")
    placed = place_run(dataclasses.replace(run, finetune=tuning))
    memory = memory_by_category(settle(placed, Machine("cpu")), work_of(placed), 1.0)
    matrices = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    expected = (matrices * BYTES[base] + 2 * 128256 * 4096 * 2 + 4 * adapters) / 8
    assert abs(memory["parameters"] / expected - 1) < 2e-3
    assert abs(memory["optimizer state"] / (8 * adapters / 8) - 1) < 1e-6
    assert abs(memory["gradients"] / (4 * adapters / 8) - 1) < 1e-6


@pytest.mark.parametrize("base", ["nf4", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_a_compiled_step_holds_what_is_planned_of_frozen_weights_and_adapters(base: str) -> None:
    tuning = FineTune(method="lora", base=base, rank=2)  # type: ignore[arg-type]
    run = tiny_run(MODELS["llama"], "data=2,fsdp=2,tensor=2", finetune=tuning, dropout=0.0)
    device_run = device_run_of(run)
    census, placed = census_of_train_step(device_run), device_run
    compiled, planned = (
        census.memory.by_category(),
        memory_by_category(device_run, work_of(placed), 1.0),
    )
    for category in ("parameters", "optimizer state"):
        # The program has the optimizer's count of steps besides.
        assert compiled[category] == pytest.approx(planned[category], abs=64), category
    assert census.doubts == ()


def test_what_no_dimension_divides_is_whole_where_it_is_small() -> None:
    run = mw.recipe("llama3-8b", vocab=128256, batch=1024, seq=512, mesh="fsdp=1024")
    placed = place_run(dataclasses.replace(run, finetune=FineTune(method="lora", base="nf4")))
    placements = named_leaves(placed.layout.placements)
    whole = {path for path in placements if axes_of(placements[path].at_rest) == ()}
    assert "blocks.adapters.key.b" in whole and "blocks.key.scales" in whole
    assert not any(path.endswith(".codes") for path in whole)


def test_a_quantised_base_trains_alike_on_two_meshes_and_is_merged(
    tmp_path: Path, cache: Path
) -> None:
    write_base(tmp_path / "base")
    write_sums(tmp_path / "chat.jsonl")
    settings = {**SETTINGS, "steps": 3, "base": "nf4", "save_every": 0, "eval_every": 0}
    for name, mesh in (("one", "data=1"), ("eight", "data=2,fsdp=2,tensor=2")):
        data = str(tmp_path / "chat.jsonl")
        mw.finetune(
            f"hf:{tmp_path}/base", data, tmp_path / name, mesh=mesh, cache=cache, **settings
        )
    np.testing.assert_allclose(
        metrics(tmp_path / "eight", "loss"), metrics(tmp_path / "one", "loss"), rtol=1e-5
    )
    mw.convert(tmp_path / "eight", tmp_path / "merged")
    whole = mw.evaluate(tmp_path / "eight", mesh="data=1", cache=cache)
    run = dataclasses.replace(run_in_folder(tmp_path / "eight"), init_from=f"hf:{tmp_path}/merged")
    run = dataclasses.replace(
        run, finetune=FineTune(objective="answers"), mesh=mw.MeshShape.parse("data=1")
    )
    prepared = prepare_run(run, cache=cache)
    device_run = prepared.device_run
    params = load_initial_weights(device_run)
    total, count = sum_metrics(device_run, params, prepared.held_out, build_eval_step(device_run))[
        "loss"
    ]
    assert abs(total / count / whole.loss - 1) < 1e-5


def token_file(lengths: Sequence[int], folder: Path) -> TokenFile:
    tokens = np.arange(sum(lengths), dtype=np.uint32) % 200
    return TokenFile(TokenArray.of(tokens, np.cumsum(lengths)), 257, Bytes(), folder, len(lengths))


@settings(max_examples=60, derandomize=True)
@given(data=st.data(), seq=st.integers(4, 30), together=st.sampled_from([1, 2]))
def test_only_what_is_too_long_is_cut(data: st.DataObject, seq: int, together: int) -> None:
    """The room is shared, and a record is dropped only where a document has no token of an answer left."""
    records = data.draw(
        st.lists(
            st.lists(
                st.tuples(st.integers(1, 30), st.integers(1, 20)),
                min_size=together,
                max_size=together,
            ),
            min_size=1,
            max_size=8,
        )
    )
    documents = [document for record in records for document in record]
    file = token_file([prompt + answer for prompt, answer in documents], Path())
    answers = np.concatenate(
        [np.repeat([0, 1], [prompt, answer]) for prompt, answer in documents]
    ).astype(np.uint8)
    used, told = fit(file, answers, seq, together, "line {}".format, "truncate")
    cut = dropped = 0
    for unit, record in enumerate(records):
        wanted = [prompt + answer - 1 for prompt, answer in record]
        found = used.positions[unit * together : (unit + 1) * together].tolist()
        if sum(wanted) <= seq:
            assert found == wanted and unit in used.groups
            continue
        assert sum(found) == seq
        for want, room in zip(wanted, found, strict=True):
            assert room == want or room >= seq // together
        left = [room - (prompt - 1) for room, (prompt, _) in zip(found, record, strict=True)]
        assert (unit in used.groups) == (min(left) > 0)
        cut += unit in used.groups
        dropped += unit not in used.groups
    if cut + dropped:
        assert f"{cut} cut at their end, {dropped} dropped" in told
    else:
        assert not told


def test_truncating_leaves_what_fits_and_says_what_it_did(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = ["yes " * n for n in (3, 11, 20, 2)]
    records = [{"prompt": "a" * 10, "chosen": a, "rejected": "no"} for a in answers]
    records.append({"prompt": "b" * 200, "chosen": "yes", "rejected": "no"})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    data = Data(paths=(str(file),), tokenizer="bytes", held_out=0.3)
    tuning = FineTune(objective="preferences", too_long="truncate")
    _, [(train, held_out)] = load_conversations(data, 64, tuning, tmp_path / "cache")
    told = capfd.readouterr().err
    assert "3 of 5 records are longer than a sequence of 64: 2 cut at their end, 1 dropped" in told
    assert f"the first {file}, line 5" in told
    # Prompt, answer and end: of two that fit every token, of two that do not the end is cut.
    whole = train.whole()
    weights = {
        int(fields["weights"][fields["segments"] == segment].sum())
        for fields in (whole[row] for row in range(len(whole)))
        for segment in np.unique(fields["segments"])
        if segment != PADDING and segment % 2 == 0
    }
    assert weights == {13, 9, 64 - 12 - 9}
    assert sum(len(row) for row in (*train.sequences, *held_out.sequences)) == 8


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_a_prompt_that_fills_the_sequence_is_dropped(
    too_long: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": "a" * n, "completion": "yes"} for n in (5, 90, 7, 64)]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    data = Data(paths=(str(file),), tokenizer="bytes", held_out=0.5)
    tuning = FineTune(objective="answers", too_long=too_long)
    _, [(train, held_out)] = load_conversations(data, 64, tuning, tmp_path / "cache")
    rows = [part[row] for part in (train, held_out) for row in range(len(part))]
    assert all(fields["weights"].any() for fields in rows)
    told = capfd.readouterr().err
    assert "2 of 4 records are longer than a sequence of 64" in told and "dropped" in told


def test_the_first_held_out_sequences_are_a_sample(tmp_path: Path) -> None:
    """Packed, the longest come first; an evaluation of some of them takes what is drawn."""
    file = tmp_path / "chat.jsonl"
    records = [{"prompt": "a" * 4, "completion": "b" * (1 + n % 50)} for n in range(800)]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    data = Data(paths=(str(file),), tokenizer="bytes", held_out=0.5)
    _, [(train, held_out)] = load_conversations(
        data, 64, FineTune(objective="answers"), tmp_path / "cache"
    )
    for part in (held_out, train.whole()):
        lengths = [np.mean([part.used.positions[d] for d in row]) for row in part.sequences]
        assert len(lengths) > 100
        assert np.mean(lengths[:50]) == pytest.approx(np.mean(lengths), rel=0.15)
    # The same sequences every time, and none of them lost.
    again = load_conversations(data, 64, FineTune(objective="answers"), tmp_path / "cache")[1][0][1]
    assert again.sequences == held_out.sequences
    documents = [d for row in (*train.sequences, *held_out.sequences) for d in row]
    assert sorted(documents) == list(range(800))


def test_sums_of_pairs_are_linear_in_the_positions() -> None:
    rng, shape = np.random.default_rng(0), (3, 700)
    segments = np.sort(rng.integers(0, 9, shape), axis=1).astype(np.int32)
    segments[:, 600:] = PADDING
    zeros = np.zeros(shape, np.int32)
    batch = Batch(zeros, zeros, segments, zeros, zeros)
    values, g = (
        rng.normal(size=shape).astype(np.float32),
        rng.normal(size=(3, 5)).astype(np.float32),
    )

    def sums(values: Any) -> Any:
        return _by_pair(batch, values, 5)

    found, backward = jax.vjp(sums, values)
    expected = [
        [v[s // 2 == p].sum() for p in range(5)] for v, s in zip(values, segments, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    gradient = np.where(
        segments < PADDING, np.take_along_axis(g, np.minimum(segments // 2, 4), 1), 0
    )
    np.testing.assert_array_equal(backward(g)[0], gradient)
    # No value of the program has the size of pairs times positions.
    long = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 16384), jnp.int32), batch)
    program = jax.make_jaxpr(lambda batch, values: _by_pair(batch, values))(
        long, jax.ShapeDtypeStruct((1, 16384), jnp.float32)
    )
    sizes = [int(size) for size in re.findall(r"[if]32\[(\d+),\d+\]", str(program))]
    assert max(sizes) <= 16384 and "8193,16384" not in str(program)
