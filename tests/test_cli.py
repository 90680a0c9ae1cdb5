"""The command line as a person types it: what it prints, how it refuses, what it costs."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import resource
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshwright.activity import activity, watched_by
from meshwright.api.evaluation import EvaluateOptions
from meshwright.api.planning import PlanOptions
from meshwright.api.rehearsal import check_equal
from meshwright.api.training import TrainOptions
from meshwright.cli import output
from meshwright.cli.explain import MESH_OPTIONS, OPTIONS, SETTINGS
from meshwright.cli.main import run
from meshwright.cli.output import write_json
from meshwright.cli.parse import options_of
from meshwright.cli.verbs import parse_verb
from meshwright.errors import ConfigError, MeshwrightError, TrainingError
from meshwright.hardware.mesh import open_devices
from meshwright.models.blocks.yarn import Yarn
from meshwright.runs.catalogue import parameters_of
from meshwright.runs.recipe import change_fields, find_recipe
from meshwright.words import AXES


def meshwright(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], text=True, capture_output=True, timeout=240
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr + done.stdout


def in_process(*words: str, code: int = 0) -> str:
    """The same without a process of its own, which takes three seconds to load the libraries; for words that trust no
    code, as trust would stay."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            assert run(words) == code
        except MeshwrightError as error:
            assert error.exit_code == code
            return f"{error}{out.getvalue()}"
    return out.getvalue()


SMALL = [
    "--model.width", "32", "--model.layers", "2", "--model.mlp", "64", "--data.tokenizer", "bytes",
    "--training.seq", "32", "--training.eval-samples", "16",
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["trian"], 2, "did you mean 'train'?"),
        (["train", "llama3-7b"], 2, "did you mean 'llama3-70b'?"),
        (["train", "--mesh", "data=2,tensr=2"], 2, "did you mean 'tensor'?"),
        (["train", "--mesh", "data"], 2, "'data' is not axis=degree"),
        (["train", "--trainning.steps", "3"], 2, "--training.steps"),
        (["train", "--layout", "fdsp"], 2, "did you mean 'fsdp'?"),
        (["train", "--mesh", "tensor=3", "--devices", "3", "--seq", "96"], 2, "N=4 does not divide: 4 = 1 * 3 + 1"),
        (["train", "--mesh", "fsdp=3", "--devices", "3"], 2, "--batch 18 or 15"),
        (["train", "--mesh", "data=16", "--devices", "8"], 2, "it takes 16 = 16 devices, and there are 8"),
        (["train", "--seq", "33"], 2, "33 = 16 * 2 + 1"),
        (["train", "--mesh", "stage=8", "--devices", "8"], 2, "every stage has a layer at least, and 8 > 4"),
        (["train", "--mesh", "data=3*2,fsdp=2*1"], 2, "data and fsdp both cross slices"),
        (["train", "tiny-moe", "--model.experts_per_token", "9"], 2,
         "a token uses at least one expert, and each at most once"),
        (["train", "--data", "/no/such/text"], 3, "neither a file, a folder nor a glob"),
        (["train", "--model.vocab", "100", *SMALL], 3, "tokens 100 to 256 have no embedding"),
        (["train", "--seq", "4000000"], 3, "a window takes 4000001"),
        (["train", "--resume", "--out", "/no/such/run"], 4, "it has no run.json"),
        (["train", "--resume"], 2, "--out DIR --resume"),
        (["train", "--run", "/no/such/file"], 2, "it cannot be read"),
        (["train", "tiny", "--run", "x.json"], 2, "each gives a whole Run"),
        (["train", "--out", "/proc/none"], 4, "it cannot be written"),
        (["train", "--supervise", "--out", "/proc/none"], 4, "it cannot be written"),
        (["train", "--out", ""], 2, "its value is empty, as of a shell variable that is not set"),
        (["evaluate", "/no/such/run"], 4, "it has no run.json"),
        (["evaluate", ""], 2, "its value is empty, as of a shell variable that is not set"),
        (["checkpoint", "move", "runs/a", ""], 2, "its value is empty"),
        (["train", "--alarm.command="], 2, "its value is empty"),
        (["train", "--init-from", ""], 2, "its value is empty"),
        (["show", "llama3-8b", "--mesh", "tensor=64"], 2, "N=32 does not divide: 32 = 0 * 64 + 32"),
        (["show", "llama3-8b", "--mesh", "fsdp=3000"], 2, "no dimension divides by 3000"),
        (["tokenize", "stdlib", "--out", "/proc/none", "--tokenizer", "bytes"], 3, "writing tokens to /proc/none"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)  # fmt: skip
def test_refusals_teach(words: list[str], code: int, says: str, tmp_path: Path) -> None:
    out = (
        ["--out", str(tmp_path / "out")]
        if words[0] == "train" and "--out" not in words and "--resume" not in words
        else []
    )
    # A supervisor starts a process, which prints where its own output is a file.
    said = (meshwright if "--supervise" in words else in_process)(*words, *out, code=code)
    assert says in " ".join(said.split())


def test_heads_that_do_not_divide_name_the_tensor(tmp_path: Path) -> None:
    said = in_process("train", "--mesh", "tensor=8", "--out", str(tmp_path / "out"), code=2)
    assert (
        "blocks.query laid out as w[L, D, N/tensor, H] with tensor=8" in said
        or "blocks.attention_out laid out as" in said
    )
    assert "4 = 0 * 8 + 4" in said and "tensor of 1, 2, 4" in said


@pytest.mark.parametrize(
    "verb",
    ["", "train", "evaluate", "tokenize", "convert", "show", "plan", "prove", "rehearse", "parity", "view", "bench",
     "recipes"],
)  # fmt: skip
def test_every_verb_explains_itself(verb: str) -> None:
    said = in_process(*([verb] if verb else []), "--help")
    assert "usage: meshwright" in said
    if verb in ("train", "parity"):
        for option in (
            "--steps",
            "--mesh",
            "--data",
            "--seed",
            "--training.remat",
            "--model.kv-heads",
            "--json",
        ):
            assert option in said
    if verb == "train":
        for option in ("--devices", "--out", "--resume", "--run"):
            assert option in said
    assert "[options]" in said
    if verb == "train":
        at = [
            said.index(text)
            for text in ("common options:", "--steps", "run options:", "model (Llama) options:")
        ]
        assert at == sorted(at) and at[-1] < said.index("--training.microbatches")


def test_show_needs_neither_devices_nor_much() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # The shell's own limit: 8 seconds of processor time, 1.5 GiB of memory are checked below.
    done = subprocess.run(
        ["sh", "-c", 'ulimit -t 8; exec "$@"', "sh", sys.executable, "-m", "meshwright", "show", "llama3-70b",
         "--mesh", "fsdp=64,tensor=8", "--json"],
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["parameters"] == 70553706496
    assert told["mesh"] == "fsdp=64,tensor=8"
    row = next(r for r in told["rows"] if r["path"] == "blocks.gate")
    assert (
        row["sharded"] == "w[L, D/fsdp, F/tensor]"
        and row["bytes_sharded"] == 80 * 8192 * 28672 * 4 // 512
    )
    if not before:
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1.5 * 2**20


def test_recipes() -> None:
    """Families in order, each from small to large; words keep those that have all of them."""
    every = json.loads(in_process("recipes", "--json"))
    assert "llama3-405b" in every
    qwen = json.loads(in_process("recipes", "--json", "qwen"))
    assert qwen and list(qwen) == [name for name in every if "qwen" in name]
    sizes = [parameters_of(text) for text in qwen.values()]
    assert sizes == sorted(sizes)
    assert list(json.loads(in_process("recipes", "--json", "LLAMA3", "70b"))) == [
        "llama3-70b",
        "llama31-70b",
    ]
    assert re.search(r"^llama3-8b +8\.03 B +Llama 3 8B", in_process("recipes", "llama3-8b"), re.M)


REPORTER = """
class Lines:
    def __init__(self, out, run):
        self.file = (out / "lines.txt").open("a")

    def write(self, step, values):
        print(step, *sorted(values), file=self.file)

    def close(self):
        self.file.close()
"""


def test_train_reproduce_evaluate(tmp_path: Path) -> None:
    out, reporter = tmp_path / "out", tmp_path / "mine.py"
    reporter.write_text(REPORTER)
    words = [
        *SMALL,
        "--steps",
        "6",
        "--data.sample",
        "5",
        "--training.eval-every",
        "0",
        "--seed",
        "3",
    ]
    words += ["--report", "tensorboard", "--report", f"{reporter}:Lines"]
    said = meshwright("train", "--out", str(out), *words)
    assert "mesh data=2,fsdp=2,tensor=2 (8 devices, simulated on this CPU)" in said
    assert (
        "w[L, D, N/tensor, H]" in said and "step 6/6" in said and "sample from the model:" in said
    )
    assert list((out / "tensorboard").iterdir())
    assert json.loads((out / "run.json").read_text())["reporters"] == [
        "tensorboard",
        f"{reporter}:Lines",
    ]
    chosen = json.loads((out / "run.json").read_text())["chosen"]
    assert chosen["training.steps"] == 6 and chosen["training.seed"] == 3
    assert "training.remat" not in chosen and "vocab" not in str(chosen)
    lines = (out / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "5", "6", "6", "6"]
    assert "held-out loss" in lines[-2] and "goodput" in lines[-1]
    rerun = ("train", "--run", str(out / "run.json"), "--out", str(tmp_path / "again"), "--json")
    # A file chooses no code: the reporter that it names is the user's own only where the user says so.
    told = subprocess.run(
        [sys.executable, "-m", "meshwright", *rerun], text=True, capture_output=True
    )
    assert (
        told.returncode == 2
        and f"it would run {reporter}" in told.stderr
        and "--trust-code" in told.stderr
    )
    again = json.loads(meshwright(*rerun, "--trust-code"))
    assert json.loads((tmp_path / "again" / "run.json").read_text())["chosen"] == chosen
    first, second = (
        (d / "metrics.jsonl").read_text().splitlines() for d in (out, tmp_path / "again")
    )
    key = [("step", "loss"), ("step", "held-out loss")]
    for a, b in zip(first, second, strict=True):
        x, y = json.loads(a), json.loads(b)
        assert [[x.get(n) for n in names] for names in key] == [
            [y.get(n) for n in names] for names in key
        ]
    told = json.loads(in_process("evaluate", str(out), "--json", "--mesh", "fsdp=2"))
    assert told["step"] == 6 and told["loss"] == pytest.approx(again["held_out_loss"], rel=1e-5)
    (tmp_path / "other.txt").write_text("def f(x):\n    return x\n" * 50)
    other = json.loads(
        in_process("evaluate", str(out), "--json", "--data", str(tmp_path / "other.txt"))
    )
    assert other["loss"] != told["loss"]


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_parity_of_two_meshes() -> None:
    said = in_process(
        "parity", "--mesh", "data=2,fsdp=2,tensor=2", "--against", "data=1", "--steps", "3", *SMALL,
        "--training.dropout", "0.1",
    )  # fmt: skip
    assert re.search("initial values +bitwise equal", said) and "equal within 1e-05" in said


def test_tokenize_then_train(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five " * 400)
    told = json.loads(
        in_process(
            "tokenize", str(text), "--out", str(tmp_path / "t"), "--tokenizer", "bpe:300", "--json"
        )
    )
    assert told["vocab"] <= 300
    small = [w for w in SMALL if w not in ("--data.tokenizer", "bytes")]
    words = [
        "--data",
        str(tmp_path / "t"),
        "--steps",
        "2",
        "--data.sample",
        "0",
        "--json",
        "--devices",
        "2",
        *small,
    ]
    summary = json.loads(in_process("train", "--out", str(tmp_path / "out"), *words))
    assert summary["steps"] == 2
    other = text.with_name("other.txt")
    other.write_text("six seven " * 100)
    mixed = [
        "--data",
        f"{tmp_path}/t=2",
        str(other),
        "--data.tokenizer",
        str(tmp_path / "t" / "tokenizer.json"),
    ]
    json.loads(in_process("train", "--out", str(tmp_path / "mixed"), *words[2:], *mixed))


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from meshwright.runs.run import Run\nfrom meshwright.models.families.gpt2 import Gpt2\n\n"
        "def mine() -> Run:\n    return Run(model=Gpt2(vocab=100, width=64, layers=2, heads=2), name='mine')\n"
    )
    assert "mine on tensor=2: " in in_process("show", f"{recipe}:mine", "--mesh", "tensor=2")
    assert "did you mean 'mine'?" in in_process("show", f"{recipe}:mime", code=2)


DOCUMENTS = """
def sums():
    for a in range(400):
        yield f"{a} plus {a + 1} is {2 * a + 1}"
"""


def losses_in(metrics: Path) -> list[float]:
    """Losses of the lines of steps; evaluations and the goodput, written once a minute, have lines of their own."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_text_from_a_function_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DOCUMENTS)
    name, out = f"{tmp_path}/mine.py:sums", str(tmp_path / "out")
    small = [*SMALL, "--data.sample", "0", "--devices", "2", "--json", "--training.save-every", "2"]
    whole = json.loads(in_process("train", "--out", out, "--data", name, "--steps", "4", *small))
    assert json.loads((tmp_path / "out" / "run.json").read_text())["data"]["paths"] == [name]
    metrics = tmp_path / "out" / "metrics.jsonl"
    before = losses_in(metrics)
    resumed = json.loads(
        meshwright("train", "--out", out, "--at", "2", "--devices", "2", "--json", "--trust-code")
    )
    assert len(before) == 4 and losses_in(metrics) == before
    assert resumed["held_out_loss"] == whole["held_out_loss"]
    evaluated = json.loads(meshwright("evaluate", out, "--json", "--trust-code"))
    assert evaluated["loss"] == pytest.approx(whole["held_out_loss"], rel=1e-5)
    other = json.loads(in_process("evaluate", out, "--json", "--data", name))
    assert other["samples"] > 100 and other["step"] == 4


def refused(*words: str) -> ConfigError:
    """Returns the refusal of a command line, in this process."""
    with pytest.raises(ConfigError) as caught:
        run(words)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--batch_size", "32"], "--batch 32"),
        (["--global-batch-size=32"], "--batch 32"),
        (["--model.hidden_size", "512"], "--model.width 512"),
        (["--n_embd", "512"], "--model.width 512"),
        (["--num_hidden_layers", "3"], "--model.layers 3"),
        (["--num-attention-heads", "3"], "--model.heads 3"),
        (["--num_key_value_heads", "2"], "--model.kv-heads 2"),
        (["--intermediate_size", "64"], "--model.mlp 64"),
        (["--vocab_size", "64"], "--model.vocab 64"),
        (["--max_steps", "9"], "--steps 9"),
        (["--block_size", "64"], "--seq 64"),
        (["--learning_rate", "1e-3"], "--optimizer.learning-rate 1e-3"),
        (["--warmup", "10"], "--optimizer.warmup-steps 10"),
        (["--gradient_accumulation_steps", "2"], "--training.microbatches 2"),
        (["--max_grad_norm", "1"], "--optimizer.grad-clip-norm 1"),
        (["--remat", "full"], "--training.remat full"),
        (["--activation_checkpointing", "full"], "--training.remat full"),
        (["--dtype", "bfloat16"], "--training.compute-dtype bfloat16"),
        (["--bf16"], "--training.compute-dtype bfloat16"),
        (["--output_dir", "x"], "--out x"),
        (["--resume_from_checkpoint", "x"], "did you mean --resume?"),
        (["--tp", "4"], "--mesh tensor=4"),
        (["--tensor_model_parallel_size=4"], "--mesh tensor=4"),
        (["--dp", "2"], "--mesh data=2"),
        (["--pp"], "--mesh stage=N"),
        (["--fsdp", "8"], "--mesh fsdp=8"),
        (["--zero1"], "--layout zero1"),
        (["--zero3"], "--layout fsdp"),
        (["--tensorboard"], "--report tensorboard"),
        (["--model", "llama3-8b"], "meshwright train llama3-8b"),
        (["--mesh", "dp=2"], "data=2"),
        (["--mesh", "tp=2"], "tensor=2"),
        (["--learnig-rate", "1"], "--optimizer.learning-rate"),
        (["--steps", "3", "tiny"], "meshwright train tiny --steps 3"),
        (["tiny", "tiny"], "leave 'tiny' out"),
        (["--steps", "abc"], "--steps 250"),
        (["--steps", "1e3"], "--steps 1000"),
        (["--steps"], "--steps N"),
        (["--steps", "--batch", "2"], "--steps N"),
        (["--lr", "fast"], "--lr 0.004"),
        (["--training.remat", "ful"], "--training.remat full"),
        (["--training.compute-dtype", "float16"], "--training.compute-dtype bfloat16"),
        (["--quux"], "meshwright train --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_a_wrong_option_is_answered_with_the_right_one(words: list[str], fix: str) -> None:
    error = refused("train", *words)
    assert fix in error.fix and words[0].partition("=")[0].lstrip("-") in error.asked


def test_an_option_makes_the_optional_part_that_a_recipe_leaves_out() -> None:
    words = [
        "qwen3-0-6b",
        "--model.yarn.factor",
        "4",
        "--model.yarn.bounds=exact",
        "--mesh",
        "fsdp=2",
    ]
    run = parse_verb("show", words).run
    assert run.model == dataclasses.replace(
        find_recipe("qwen3-0-6b").model, yarn=Yarn(factor=4.0, bounds="exact")
    )
    assert refused("show", "qwen3-0-6b", "--model.yarn.factr", "4").fix.startswith(
        "did you mean --model.yarn.factor?"
    )
    assert (
        "--model.yarn.factor 32.0"
        in refused("show", "qwen3-0-6b", "--model.yarn.factor", "four").fix
    )
    assert "one of them" in refused("show", "llama31-8b", "--model.yarn.factor", "4").fix


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan"], "Missing from meshwright plan: --on CHIP:SIZE"),
        (["evaluate"], "Missing from meshwright evaluate: FOLDER"),
        (["tokenize", "stdlib"], "Missing from meshwright tokenize: --out PATH"),
        (
            ["bench", "colectives"],
            "invalid choice 'colectives' for argument 'what'. Expected one of ('collectives', 'hardware'",
        ),
        (
            ["bench", "collectives", "--sizes", "4", "x"],
            "it takes a whole number of at least 1",
        ),
        (
            ["plan", "llama3-8b", "--on", "v5p:2x2x2", "--compare", "fsdp=8"],
            "Error parsing --compare: ",
        ),
        (
            ["train", "--training.steps", "3.5"],
            "it takes a whole number of at least 1",
        ),
        (["train", "--processes", "2"], "--coordinator and --process are not given"),
        (["recipes", "--jsn"], "one option, --json"),
        (["recipes", "qwn"], "none of the 83 recipes has all of these words"),
        (["checkpoint"], "it takes one of list, inspect, verify, move, then OUT"),
        (
            ["plan", "llama3-8b", "--on", "h100:8", "--tokens-per-step", "1000"],
            "a sequence of this run has 8,192 tokens",
        ),
        (["bench"], "Missing from meshwright bench: WHAT `collectives` or `hardware`."),
        (["bench", "hardware", "again"], "the verb takes no further word"),
        (["plan", "--on", "v5litepod-16"], "a target is CHIP:SIZE"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_every_verb_refuses_with_a_reason(words: list[str], says: str) -> None:
    assert says in refused(*words).truth


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "llama32-1b", "--on", "v5p:2x2x1,h100:8", "--tune"],
        ["plan", "llama32-1b", "--on", "v5p:2x2x1", "--rank-by", "cost"],
    ],
    ids=" ".join,
)
def test_an_option_that_a_mode_does_not_use_is_refused(words: list[str]) -> None:
    error = refused(*words)
    assert "would not be used" in error.truth and error.asked.partition(" ")[0] in words


def test_every_suggestion_exists() -> None:
    recipes = [find_recipe(name) for name in ("gemma3-270m", "nanogpt-cpu", "tiny", "tiny-moe")]
    defaults: list[tuple[type, Any]] = [
        (TrainOptions, TrainOptions(run=recipe)) for recipe in recipes
    ]
    defaults += [(EvaluateOptions, None), (PlanOptions, PlanOptions(run=recipes[0], on=""))]
    known = {
        name
        for kind, default in defaults
        for option in options_of(kind, default)
        for name in option.names
    }
    assert {meant.split()[0] for meant in (*OPTIONS.values(), *SETTINGS.values())} <= known
    assert set(MESH_OPTIONS.values()) <= set(AXES)


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["recipes"], ["recipes", "--json"], ["--version"], ["wrods"]]
)
def test_small_questions_are_answered_without_jax(words: list[str]) -> None:
    script = (
        "import sys\nfrom meshwright.cli import main\nsys.argv[1:] = " + repr(words) + "\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'jax', 'numpy', 'tyro', 'rich', 'msgspec'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words", [["show", "tiny", "--mesh", "fsdp=2"], ["plan", "llama3-8b", "--on", "v5p:2x2x2"]]
)
def test_arithmetic_needs_no_optimizer_checkpoint_or_data_library(words: list[str]) -> None:
    script = (
        "import sys\nfrom meshwright.cli.main import run\nassert run(" + repr(words) + ") == 0\n"
        "print(sorted({'optax', 'tensorstore', 'grain', 'pyarrow'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_version_names_what_a_report_needs() -> None:
    said = meshwright("--version")
    assert said.startswith("meshwright 0.") and "jax 0." in said and "Python 3." in said


def test_files_are_written_also_where_nobody_reads_the_output(tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    words = [
        "plan",
        "llama3-8b",
        "--on",
        "v5p:2x2x2",
        "--tokens-per-step",
        "1M",
        "--out",
        str(plan),
        "--html",
        str(page),
    ]
    running = subprocess.Popen(
        [sys.executable, "-m", "meshwright", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    errors = running.stderr.read()
    running.stderr.close()
    assert running.wait(240) == 0
    assert not [
        line
        for line in errors.splitlines()
        if not re.fullmatch(r"meshwright plan: .* \.\.\.", line)
    ]
    assert json.loads(plan.read_text())["target"] == "v5p:2x2x2" and page.read_text().startswith(
        "<!doctype html>"
    )


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
        ("> /dev/full", 10, "error: meshwright recipes"),
    ],
)
def test_output_that_is_closed_or_full_is_no_traceback(
    redirection: str, code: int, says: str
) -> None:
    command = f"{shlex.quote(sys.executable)} -m meshwright recipes tiny {redirection}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith(says) and "Traceback" not in done.stderr


def test_characters_that_the_output_lacks_are_escaped(tmp_path: Path) -> None:
    code = (
        "from meshwright.cli.main import _own_standard_output as own; own(); print('runs/\u00fc')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "runs/\\xfc\n"


def test_a_variable_that_jax_refuses_is_named() -> None:
    environment = {**os.environ, "JAX_ENABLE_X64": "perhaps"}
    command = [sys.executable, "-m", "meshwright", "show", "tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "JAX_ENABLE_X64=perhaps" in done.stderr and "Traceback" not in done.stderr


def test_devices_that_jax_does_not_open_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: The TPU is in use")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(ConfigError, match="The TPU is in use") as refused_devices:
        open_devices()
    assert "meshwright doctor" in refused_devices.value.fix


def test_settings_of_jax_under_which_no_step_runs_are_refused() -> None:
    with jax.enable_x64(True), pytest.raises(ConfigError, match="64 bits"):
        open_devices()
    with jax.disable_jit(), pytest.raises(ConfigError, match="compile nothing"):
        open_devices()


def test_show_draws_the_batch_of_the_run() -> None:
    assert "batch[B/data+fsdp+expert, T]  48 x 128" in in_process(
        "show", "--mesh", "fsdp=4", "--batch", "48", "--draw", "embed"
    )
    # A batch that does not divide changes no parameter.
    assert "18 x 128" in in_process("show", "--mesh", "fsdp=4", "--batch", "18", "--draw", "embed")


def test_a_command_without_output_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", said)
    monkeypatch.setattr(output, "_QUIET", 0.02)
    monkeypatch.setattr(output, "_said", threading.Event())
    with (
        watched_by(output.Notices("meshwright plan")),
        activity("load", "loading libraries", "loaded libraries"),
    ):
        while "libraries" not in said.getvalue():
            time.sleep(0.01)
    output.Stream(io.BytesIO(), "utf-8").write("a table")
    assert output._said.is_set() and "meshwright plan: loading libraries ...\n" in said.getvalue()


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    write_json(
        {
            "a": math.nan,
            "b": [math.inf, 1.5],
            "c": Path("x"),
            "d": np.float32(2.5),
            3: None,
            "e": True,
        }
    )
    assert json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name)) == {
        "a": None, "b": [None, 1.5], "c": "x", "d": 2.5, "3": None, "e": True,
    }  # fmt: skip


def test_a_rehearsal_compares_every_step() -> None:
    losses = {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.5}
    check_equal(2, losses, dict(losses))
    with pytest.raises(
        TrainingError, match=r"the loss of step 4 is 2.5000000000000004, and 2.5 without a stop"
    ):
        check_equal(2, losses, {**losses, 4: math.nextafter(2.5, 3)})
    with pytest.raises(TrainingError, match=r"the loss of step 3 is None"):
        check_equal(2, losses, {1: 5.0, 2: 4.0})


def test_nothing_needs_the_network_or_the_shared_folder() -> None:
    root = Path(__file__).parents[1]
    for file in [*root.glob("src/**/*.py"), *root.glob("recipes/*.py")]:
        text = file.read_text()
        # What a pointer of Git LFS begins with is no address that anything is fetched from.
        text = text.replace("https://git-lfs.github.com/spec", "")
        # Nor are an example of a webhook, and the page of a model where a reader accepts conditions.
        for address in ("https://HOST/PATH", "https://huggingface.co/"):
            text = text.replace(address, "")
        assert "../shared" not in text and not re.search(r"https://\w", text), file
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_errors_shorten_only_paths_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is another path, or a bucket, stays: in a container the working directory is often `/`."""
    from meshwright.formatting import relative_paths

    monkeypatch.chdir(tmp_path)
    assert (
        relative_paths(f"'{tmp_path}/x', /mnt{tmp_path}/x, gs:/{tmp_path}/x")
        == f"'x', /mnt{tmp_path}/x, gs:/{tmp_path}/x"
    )
    monkeypatch.chdir("/")
    assert relative_paths("gs://bucket/x and /data/x") == "gs://bucket/x and /data/x"


def test_the_prompt_of_a_recipe_belongs_to_its_text() -> None:
    """Other data is sampled from its own beginning, on the command line and from Python; a prompt that is given stays."""
    assert parse_verb("train", ["tiny", "--out", "x"]).run.data.prompt == "def "
    assert (
        parse_verb("train", ["tiny", "--out", "x", "--data", "goethe.txt"]).run.data.prompt == "\n"
    )
    asked = ["tiny", "--out", "x", "--data", "goethe.txt", "--data.prompt", "Faust"]
    assert parse_verb("train", asked).run.data.prompt == "Faust"
    assert change_fields(find_recipe("tiny"), None, {"paths": ("a.txt",)}).data.prompt == "\n"
