"""Files from strangers: none runs code, reads outside its folder, or takes memory that it has no bytes for."""

import ast
import importlib
import json
import os
import resource
import site
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright import plugins, trust
from meshwright.bench.calibration_file import read_calibration
from meshwright.checkpoint.blocks import StoredTensors, write_tensor
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.conversion import check_sums
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.cli.main import _choose_working_directory
from meshwright.cli.verbs import parse_verb
from meshwright.config import Training
from meshwright.data import chat
from meshwright.data.chat import ChatTemplate, read_chat_template
from meshwright.data.conversations import template_of
from meshwright.data.feed import Windows
from meshwright.data.subwords import train_bpe
from meshwright.data.token_writer import TokenWriter, write_description
from meshwright.data.tokenizers import tokenizer_from_json
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import open_tokens
from meshwright.documents import seal
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.hardware.hosts import ALONE
from meshwright.hardware.targets import parse_target
from meshwright.hugging_face.folder import keep_files
from meshwright.hugging_face.safetensors_files import find_files, read_header
from meshwright.launching.restarts import Restarts
from meshwright.launching.supervise import Supervisor
from meshwright.models.families.gpt2 import Gpt2
from meshwright.planner.plan_file import read_plan
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run, run_in_folder, run_to_dict, write_run
from meshwright.trainer.watchdog import Watchdog
from meshwright.trust import take_options

ROOT = Path(__file__).parents[1]
RUN = Run(model=Gpt2(257, 32, 1, 4, positions=32), training=Training(seq=32, batch=4))


@pytest.fixture(autouse=True)
def nothing_is_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trust, "_user", trust._User())
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef attack(*args): return []\n"
    )


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of JSON values with one of them replaced."""
    copy = json.loads(json.dumps(document))
    inner = copy
    *parents, last = path.split(".")
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return dict(copy)


def run_with(folder: Path, path: str, value: Any) -> Path:
    file = folder / "run.json"
    file.write_text(json.dumps(changed(run_to_dict(RUN), path, value)))
    return file


def token_folder(folder: Path) -> Path:
    (folder / "text.txt").write_text("some text " * 50)
    return tokenize(str(folder / "text.txt"), "bytes", folder / "tokens").folder


def described(folder: Path, **changes: Any) -> Path:
    """A token folder with other values in its description, all checksums in agreement."""
    record = json.loads((folder / "tokens.json").read_text())
    kept = {
        name: value
        for name, value in record.items()
        if name not in ("checksum", "sha256", "format", "block")
    }
    write_description(folder, {**kept, **changes})
    return folder


def checkpoint(folder: Path, shape: tuple[int, ...] = (4, 8)) -> Path:
    """A converted checkpoint with one tensor."""
    step = folder / "checkpoints" / "0"
    (step / "state").mkdir(parents=True)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    total = write_tensor(
        step / "state", "params.w", shape, values.dtype, lambda index: values[index]
    )
    Manifest(0, 0, RUN, {"params.w": TensorRecord(shape, "float32", total)}).write(step)
    return step


def safetensors(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def manifest_of(step: Path) -> Manifest:
    with Checkpoints(step.parent, max_to_keep=9) as checkpoints:
        return checkpoints.manifest(0)


def read_blocks(step: Path) -> None:
    tensors = StoredTensors(step, manifest_of(step))
    list(tensors.blocks("params.w", (4, 8)))


# Each writes a hostile file into an empty folder, and returns what reads it and a part of the refusal.
Hostile = Callable[[Path], tuple[Callable[[], Any], str]]


def optimizer_of_a_file(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "optimizer.name", f"{folder}/evil.py:attack"))
    return lambda: plugins.resolve(
        "optimizer", run.optimizer.name
    ), "it would run .*evil.py(.|\n)*--trust"


def family_of_a_file(folder: Path) -> tuple[Callable[[], Any], str]:
    file = run_with(folder, "model.family", f"{folder}/evil.py:attack")
    return lambda: read_run(file), "model family .* of .*run.json(.|\n)*it would run .*evil.py"


def function_of_the_standard_library_by_path(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "data.paths", [f"{site.__file__}:execusercustomize"]))
    return lambda: plugins.load("data source", run.data.paths[0]), "it would run .*site.py"


def installed_package_by_path(folder: Path) -> tuple[Callable[[], Any], str]:
    name = f"{Path(np.__file__).parent / 'conftest.py'}:attack"
    run = read_run(run_with(folder, "optimizer.name", name))
    return lambda: plugins.resolve("optimizer", run.optimizer.name), "it would run .*conftest.py"


def file_by_a_link(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "mine.py").write_text("def attack(*args): return []")
    (folder / "link.py").symlink_to(folder / "evil.py")
    trust.own(f"{folder}/mine.py:attack")
    run = read_run(run_with(folder, "layout", f"{folder}/link.py:attack"))
    return lambda: plugins.load("layout", run.layout), "it would run .*evil.py"


def file_by_way_of_another_folder(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "mine.py").mkdir()
    trust.own(f"{folder}/mine.py:attack")
    run = read_run(run_with(folder, "layout", f"{folder}/mine.py/../evil.py:attack"))
    return lambda: plugins.load("layout", run.layout), "it would run .*evil.py"


def file_in_capitals(folder: Path) -> tuple[Callable[[], Any], str]:
    sys.path.append(str(folder))
    run = read_run(run_with(folder, "layout", f"{folder}/evil.PY:attack"))
    return lambda: plugins.load("layout", run.layout), "it is not module:attribute"


def attribute_of_the_recipe(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "mine.py").write_text(
        "import meshwright as mw\ndef mine(): return mw.recipe('tiny')\ndef attack(): open('ran')"
    )
    find_recipe(trust.own(f"{folder}/mine.py"))
    run = read_run(run_with(folder, "data.paths", [f"{folder}/mine.py:attack"]))
    return lambda: plugins.load("data source", run.data.paths[0]), "it would run .*mine.py"


def module_that_is_loaded(folder: Path) -> tuple[Callable[[], Any], str]:
    sys.path.append(str(folder))
    (folder / "harmless_here.py").write_text("def attack(*args): return []")
    importlib.import_module("harmless_here")
    run = read_run(run_with(folder, "layout", "harmless_here:attack"))
    return lambda: plugins.load("layout", run.layout), "it would run .*harmless_here.py"


def module_that_shadows_a_dependency(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "pip.py").write_bytes((folder / "evil.py").read_bytes())
    sys.path.insert(0, str(folder))
    run = read_run(run_with(folder, "layout", "pip:attack"))
    return lambda: plugins.load("layout", run.layout), "it would run .*pip.py"


def beside_a_namespace_package(package: str) -> Hostile:
    def hostile(folder: Path) -> tuple[Callable[[], Any], str]:
        (folder / package).mkdir()
        (folder / package / "evil.py").write_bytes((folder / "evil.py").read_bytes())
        sys.path.append(str(folder))
        importlib.invalidate_caches()
        run = read_run(run_with(folder, "layout", f"{package}.evil:attack"))
        return lambda: plugins.load("layout", run.layout), f"it would run .*{package}/evil.py"

    hostile.__name__ = f"module_in_a_folder_called_{package}"
    return hostile


def module_of_trust(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "data.paths", ["meshwright.trust:take_options"]))
    return lambda: plugins.load(
        "data source", run.data.paths[0]
    ), "an object of the module 'meshwright.trust'"


def tokenizer_that_names_code(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "data.tokenizer", f"{folder}/evil.py:attack"))
    return lambda: tokenize(
        str(folder / "evil.py"), run.data.tokenizer, folder / "out"
    ), "evil.py:attack"


def template_that_names_code(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "finetune.template", f"{folder}/evil.py:attack"))
    return lambda: template_of(
        "bytes", run.finetune.template
    ), "--finetune.template .*evil.py:attack"


def data_of_the_standard_library(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "data.paths", ["os:abort=2"]))
    return lambda: tokenize(
        run.data.paths[0].partition("=")[0], "bytes", folder / "out"
    ), "Python's own module 'os'"


def data_through_a_package(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "optimizer.name", "meshwright.documents:os.abort"))
    return lambda: plugins.resolve(
        "optimizer", run.optimizer.name
    ), "'os' of meshwright.documents is the module 'os'"


def module_beside_the_user(folder: Path) -> tuple[Callable[[], Any], str]:
    run = read_run(run_with(folder, "layout", "evil:attack"))
    sys.path.append(str(folder))
    return lambda: plugins.load("layout", run.layout), "it would run .*evil.py"


def name_that_is_a_path(folder: Path) -> tuple[Callable[[], Any], str]:
    file = run_with(folder, "name", "../../home/user/.ssh")
    return lambda: read_run(file), "cannot name a folder"


def option_that_writes(folder: Path) -> tuple[Callable[[], Any], str]:
    file = run_with(folder, "training.compiler_options", [f"xla_dump_to={folder}/dump"])
    return lambda: read_run(file), "makes XLA write files"


def nested_run(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "run.json").write_text("[" * 100_000)
    return lambda: read_run(folder / "run.json"), "nested too deeply"


def run_that_is_a_pipe(folder: Path) -> tuple[Callable[[], Any], str]:
    os.mkfifo(folder / "run.json")
    return lambda: read_run(folder / "run.json"), "no regular file"


def run_that_is_a_link(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "out").mkdir()
    (folder / "out" / "run.json").symlink_to("/etc/hostname")
    return lambda: run_in_folder(folder / "out"), "a link that leaves the folder"


def plan_of_another_form(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "plan.json").write_text(
        json.dumps({"plan": 2, "run": [], "target": {}, "predicted": 1})
    )
    return lambda: read_plan(folder / "plan.json"), "its 'run' is no dict"


def plan_for_a_chip_of_a_file(folder: Path) -> tuple[Callable[[], Any], str]:
    plan = {
        "plan": 2,
        "run": run_to_dict(RUN),
        "target": f"{folder}/evil.py:attack:8",
        "predicted": {},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return lambda: parse_target(read_plan(folder / "plan.json").target), "it would run .*evil.py"


def plan_for_a_chip_of_a_file_spelt_otherwise(folder: Path) -> tuple[Callable[[], Any], str]:
    plan = {
        "plan": 2,
        "run": run_to_dict(RUN),
        "target": f" {folder}/evil.py:attack:8 ",
        "predicted": {},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return lambda: parse_target(read_plan(folder / "plan.json").target), "it would run .*evil.py"


def plan_for_a_chip_of_a_file_with_a_star(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "2*evil.py").write_bytes((folder / "evil.py").read_bytes())
    plan = {
        "plan": 2,
        "run": run_to_dict(RUN),
        "target": f"2*{folder}/2*evil.py:attack:8",
        "predicted": {},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return lambda: parse_target(
        read_plan(folder / "plan.json").target
    ), r"it would run .*2\*evil.py"


def manifest_that_names_code(folder: Path) -> tuple[Callable[[], Any], str]:
    step = checkpoint(folder)
    file = step / "manifest" / "metadata"
    document = changed(json.loads(file.read_text()), "run.model.family", f"{folder}/evil.py:attack")
    file.write_text(json.dumps(seal(document)))
    return lambda: manifest_of(step), "it would run .*evil.py"


def checkpoint_with_a_link(folder: Path) -> tuple[Callable[[], Any], str]:
    step = checkpoint(folder)
    (step / "state" / "params.w" / "0.0").unlink()
    (step / "state" / "params.w" / "0.0").symlink_to("/etc/passwd")
    return lambda: read_blocks(step), "a link that leaves the folder"


def checkpoint_with_a_pipe(folder: Path) -> tuple[Callable[[], Any], str]:
    step = checkpoint(folder)
    os.mkfifo(step / "state" / "pipe")
    return lambda: read_blocks(step), "neither a file nor a folder"


def array_of_a_terabyte(folder: Path) -> tuple[Callable[[], Any], str]:
    step = checkpoint(folder)
    file = step / "state" / "params.w" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shape": [2**30, 2**10]}))
    return lambda: read_blocks(step), r"its array is float32\[1073741824, 1024\]"


def chunk_of_a_terabyte(folder: Path) -> tuple[Callable[[], Any], str]:
    step = checkpoint(folder)
    file = step / "state" / "params.w" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chunks": [2**30, 2**10]}))
    return lambda: read_blocks(step), "larger than 'params.w' itself"


def shards_outside(folder: Path) -> tuple[Callable[[], Any], str]:
    index = {"weight_map": {"a": "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return lambda: find_files(folder), "not the name of a file in the folder"


def shards_of_an_absolute_path(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "/etc/passwd"}})
    )
    return lambda: find_files(folder), "not the name of a file in the folder"


def weights_that_are_a_link(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").symlink_to("/etc/passwd")
    return lambda: read_header(
        folder / "model" / "model.safetensors"
    ), "a link that leaves the folder"


def configuration_that_is_a_link(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").symlink_to("/etc/passwd")
    return lambda: keep_files(folder / "model", folder / "out"), "a link that leaves the folder"


def header_of_an_exabyte(folder: Path) -> tuple[Callable[[], Any], str]:
    file = safetensors(folder / "a.safetensors", {}, length=2**60)
    return lambda: read_header(file), "its header would have"


def tensor_of_an_exabyte(folder: Path) -> tuple[Callable[[], Any], str]:
    entry = {"dtype": "F32", "shape": [2**30, 2**28], "data_offsets": [0, 2**60]}
    file = safetensors(folder / "a.safetensors", {"w": entry}, bytes(64))
    return lambda: read_header(file), "its header places tensors up to byte"


def nested_header(folder: Path) -> tuple[Callable[[], Any], str]:
    file = safetensors(folder / "a.safetensors", b"[" * 200_000)
    return lambda: read_header(file), "nested too deeply"


def pickled_weights(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    )
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    return lambda: find_files(folder), "is a pickle, which runs code"


def sums_outside(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "SHA256SUMS").write_text("00  ../../etc/passwd\n")
    return lambda: check_sums(folder, print), "there is no such file"


def tokens_that_are_a_link(folder: Path) -> tuple[Callable[[], Any], str]:
    tokens = token_folder(folder)
    (tokens / "tokens-00000.bin").rename(folder / "elsewhere")
    (tokens / "tokens-00000.bin").symlink_to(folder / "elsewhere")
    return lambda: open_tokens(tokens), "a link that leaves the folder"


def more_tokens_than_bytes(folder: Path) -> tuple[Callable[[], Any], str]:
    tokens = described(token_folder(folder), tokens=10**12)
    return lambda: open_tokens(tokens), "1000000000000 tokens are not 1 shards"


def token_beyond_the_vocabulary(folder: Path) -> tuple[Callable[[], Any], str]:
    tokens = token_folder(folder)
    writer = TokenWriter(tokens, "<u2")
    writer.add(np.array([1, 2, 3, 60_000, *range(46)]), np.array([50]))
    writer.finish()
    return lambda: Windows(open_tokens(described(tokens, tokens=50)), 16, 0, 50)[
        0
    ], "token 3 is 60000"


def vocabulary_of_the_description(folder: Path) -> tuple[Callable[[], Any], str]:
    tokens = described(token_folder(folder), vocab=2**31)
    return lambda: open_tokens(tokens), "its vocabulary is 2147483648"


def tokenizer_with_a_giant_number(folder: Path) -> tuple[Callable[[], Any], str]:
    document = json.loads(train_bpe(["some text"] * 3, 270).to_json())
    document["added_tokens"] = []
    document["model"]["vocab"]["a giant"] = 2**31
    return lambda: tokenizer_from_json(json.dumps(document)), "have numbers up to 2,147,483,648"


def tokenizer_without_letters(folder: Path) -> tuple[Callable[[], Any], str]:
    return lambda: tokenizer_from_json('{"kind": "chars", "letters": 7}'), "no characters in order"


def nested_tokenizer(folder: Path) -> tuple[Callable[[], Any], str]:
    return lambda: tokenizer_from_json("[" * 200_000), "nested too deeply"


def template_that_reaches_for_python(folder: Path) -> tuple[Callable[[], Any], str]:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    return lambda: ChatTemplate(source).render([]), "unsafe|access to attribute"


def template_that_never_ends(folder: Path) -> tuple[Callable[[], Any], str]:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    return lambda: ChatTemplate(loops).render([]), "it took more than|of its memory or its time"


def template_that_fills_memory(folder: Path) -> tuple[Callable[[], Any], str]:
    return lambda: ChatTemplate("{{ 'a' * 10**11 }}").render([]), "it takes more than 1024 MiB"


def template_that_is_a_link(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "model").mkdir()
    (folder / "model" / "chat_template.jinja").symlink_to("/etc/passwd")
    return lambda: read_chat_template(folder / "model"), "a link that leaves the folder"


def calibration_without_numbers(folder: Path) -> tuple[Callable[[], Any], str]:
    row = {"m": 8, "k": 8, "n": 8, "dtype": "bfloat16", "flops_per_second": "fast"}
    document = {"device": "TPU v5p", "date": "today", "matmuls": [row]}
    (folder / "calibration.json").write_text(json.dumps(document))
    return lambda: read_calibration(folder / "calibration.json"), "not a positive number"


def calibration_of_infinite_speed(folder: Path) -> tuple[Callable[[], Any], str]:
    (folder / "calibration.json").write_text(
        '{"device": "a", "date": "b", "memory_bandwidth": 1e999}'
    )
    return lambda: read_calibration(folder / "calibration.json"), "not a positive number"


HOSTILE: tuple[Hostile, ...] = (
    optimizer_of_a_file, family_of_a_file, data_of_the_standard_library, data_through_a_package, module_beside_the_user,
    name_that_is_a_path, option_that_writes, nested_run, run_that_is_a_pipe, run_that_is_a_link, plan_of_another_form,
    plan_for_a_chip_of_a_file, manifest_that_names_code, checkpoint_with_a_link, checkpoint_with_a_pipe,
    array_of_a_terabyte, chunk_of_a_terabyte, shards_outside, shards_of_an_absolute_path, weights_that_are_a_link,
    configuration_that_is_a_link, header_of_an_exabyte, tensor_of_an_exabyte, nested_header, pickled_weights,
    sums_outside, tokens_that_are_a_link, more_tokens_than_bytes,
    token_beyond_the_vocabulary, vocabulary_of_the_description, tokenizer_with_a_giant_number,
    tokenizer_without_letters, nested_tokenizer, template_that_reaches_for_python, template_that_never_ends,
    template_that_fills_memory, template_that_is_a_link, calibration_without_numbers, calibration_of_infinite_speed,
    function_of_the_standard_library_by_path, installed_package_by_path, file_by_a_link, file_by_way_of_another_folder,
    file_in_capitals, attribute_of_the_recipe, module_that_is_loaded, module_that_shadows_a_dependency,
    *map(beside_a_namespace_package, ("google", "orbax", "jax_plugins")), module_of_trust, tokenizer_that_names_code,
    template_that_names_code, plan_for_a_chip_of_a_file_spelt_otherwise, plan_for_a_chip_of_a_file_with_a_star,
)  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.__name__)
def test_a_hostile_file_is_refused(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    if hostile is template_that_never_ends:
        monkeypatch.setattr(chat, "SECONDS", 1.0)
    read, reason = hostile(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MeshwrightError, match=reason):
        read()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert not (tmp_path / "ran").exists(), "its code ran"


def test_a_changed_manifest_is_noticed(tmp_path: Path) -> None:
    step = checkpoint(tmp_path)
    file = step / "manifest" / "metadata"
    text = file.read_text()
    for old, new in (
        ('"cursor": 0', '"cursor": 1'),
        ('"format": 2', '"format": 1'),
        ('"format": 2', '"format": 3'),
    ):
        file.write_text(text.replace(old, new))
        with pytest.raises(MeshwrightError, match=r"its checksum differs|it is of format [13]"):
            manifest_of(step)


def resolve_optimizer(folder: Path, name: str) -> Any:
    run = read_run(run_with(folder, "optimizer.name", name))
    return plugins.resolve("optimizer", run.optimizer.name)


def test_names_of_ones_own_and_of_installed_packages_are_imported(tmp_path: Path) -> None:
    mine = f"{tmp_path}/evil.py:attack"
    assert resolve_optimizer(tmp_path, "optax:adamw").__name__ == "adamw"
    with pytest.raises(ConfigError):
        resolve_optimizer(tmp_path, mine)
    typed = ["--optimizer.name", f"{tmp_path}/nowhere/../evil.py:attack"]
    assert parse_verb("show", typed).run.optimizer.name == typed[1] and not trust.trust_options()
    assert resolve_optimizer(tmp_path, mine).__name__ == "attack"
    trust._user.names.clear()
    with pytest.raises(
        ConfigError, match=f"--trust-code={mine} where you would run"
    ):  # that it is loaded is no word
        resolve_optimizer(tmp_path, mine)
    assert take_options([f"--trust-code={mine}", "--steps", "3"]) == ["--steps", "3"]
    assert resolve_optimizer(tmp_path, mine).__name__ == "attack"
    with pytest.raises(ConfigError, match="Python's own module 'shutil'"):
        resolve_optimizer(tmp_path, "shutil:rmtree")
    take_options(["--trust-code"])
    assert resolve_optimizer(tmp_path, "shutil:rmtree").__name__ == "rmtree"


def test_a_child_is_handed_the_names_that_the_user_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor, a rehearsal and a proof pass on what was typed, what a recipe names, and no name of a file."""
    (tmp_path / "mine.py").write_text(
        "import dataclasses, meshwright as mw\n"
        "def mine(): return dataclasses.replace(mw.recipe('tiny'), layout='evil:attack', reporters=('theirs:lines',))\n"
    )
    run = find_recipe(trust.own(f"{tmp_path}/mine.py"))
    assert trust.options_of_child(run) == [
        "--trust-code=evil:attack",
        "--trust-code=theirs:lines",
    ]
    read = read_run(run_with(tmp_path, "optimizer.name", "chosen.by_a_file:attack"))
    assert trust.options_of_child(read) == []
    child, printed = tmp_path / "python", tmp_path / "words"
    child.write_text(f'#!/bin/sh\necho "$@" >> {printed}\n')
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))
    limits = (Restarts(most=0), Watchdog())
    for typed in ([], ["--trust-code=evil:attack"]):
        words = take_options(["tiny", *typed, "--layout", "evil:attack"])
        assert (
            Supervisor("train", words, run, tmp_path / "out", ALONE, None, *limits).supervise() == 0
        )
    asked = "-P -m meshwright train tiny --layout evil:attack"
    assert printed.read_text().splitlines() == [asked, f"{asked} --trust-code=evil:attack"]


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        (["train", "hf:gpt2", "--out", "."], ["HERE", "/lib"], ["/lib"]),
        (["train", "tiny", "--out", "."], ["/bin", "/lib"], ["/bin", "/lib"]),
        (["train", "--layout=mine:rows"], ["HERE", "/lib"], ["/lib", "HERE"]),
        (["show", "mine.py"], ["/bin", "/lib"], ["/bin", "/lib", "HERE"]),
        (["evaluate", "out", "--trust-code"], ["/bin"], ["/bin", "HERE"]),
    ],
)
def test_the_working_directory_is_searched_last_and_only_for_the_users_names(
    words: list[str], before: list[str], after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getcwd()
    monkeypatch.setattr(sys, "path", [here if place == "HERE" else place for place in before])
    _choose_working_directory(words)
    assert sys.path == [here if place == "HERE" else place for place in after]


def test_the_command_line_says_what_it_would_import(tmp_path: Path) -> None:
    run = run_with(tmp_path, "layout", f"{tmp_path}/evil.py:attack")
    command = [sys.executable, "-m", "meshwright", "show", "--run", str(run), "--mesh", "data=1"]
    refused = subprocess.run(command, text=True, capture_output=True, timeout=200)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"it would run {tmp_path}/evil.py" in refused.stderr and "--trust-code" in refused.stderr
    assert not (tmp_path / "ran").exists()
    subprocess.run([*command, "--trust-code"], text=True, capture_output=True, timeout=200)
    assert (tmp_path / "ran").exists()


SCRIPT = "<div onclick=x><script>alert(1)</script>"


def test_a_page_escapes_every_name(tmp_path: Path) -> None:
    from meshwright.cli.verbs import run_verb

    write_run(RUN, tmp_path / "run.json")
    document = changed(run_to_dict(RUN), "name", SCRIPT.replace("/", "|"))
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert (
        run_verb(
            "show",
            [
                "--run",
                str(tmp_path / "run.json"),
                "--mesh",
                "data=2",
                "--html",
                str(tmp_path / "page.html"),
            ],
        )
        == 0
    )
    text = (tmp_path / "page.html").read_text()
    # The page's own two elements; the name is text in its title, and escaped in its data (tests/test_page_kit.py).
    assert text.count("<script") == 2 and "&lt;script" in text and "\\u003cscript" in text


_RUNS_CODE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def test_no_source_file_reads_pickles() -> None:
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            loads = isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "np.load",
                "numpy.load",
                "torch.load",
            )
            safe = loads and any(
                k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in node.keywords
            )
            # YAML is written (`dump`, and its types); own templates are read, by the loader that runs no code.
            yaml = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml"
            allowed = ("SafeDumper", "Node", "safe_dump", "dump", "safe_load")
            reads = yaml and node.attr not in allowed  # type: ignore[attr-defined]
            if (
                {name.partition(".")[0] for name in names} & _RUNS_CODE
                or (loads and not safe)
                or reads
            ):
                found.append(f"{file}:{node.lineno}")  # type: ignore[attr-defined]
    assert found == []
