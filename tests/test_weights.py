"""Weights in and out: every architecture against `transformers`, folders that are damaged, memory, interruption."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import jax
import ml_dtypes
import numpy as np
import pytest
from hf_models import ROWS, read
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import meshwright as mw
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.hardware.mesh import build_mesh
from meshwright.hugging_face.architectures import architecture_of
from meshwright.hugging_face.folder import check_tied, load_params, open_folder, read_model
from meshwright.hugging_face.names import StoredTensor, read_block, unpadded_shape, write_block
from meshwright.hugging_face.safetensors_files import NewSafetensorsFile, SafetensorsFile
from meshwright.runs.recipe import find_recipe
from meshwright.sharding.params import Param, named_leaves
from meshwright.step.device_run import place_on_devices


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a row, as `transformers` writes it; half of them in several files."""
    base = tmp_path_factory.mktemp("models")

    def folder(row: str) -> Path:
        if not (base / row).exists():
            hf_models.write_folder(row, base / row, 5 if ROWS.index(row) % 2 else 1)
        return base / row

    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, by the name in its files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = SafetensorsFile(path)
        found |= {name: np.array(file.tensor(name)) for name in file.entries}
    return found


def assert_same_tensors(a: Path, b: Path) -> None:
    first, second = tensors_of(a), tensors_of(b)
    assert sorted(first) == sorted(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and tensor.tobytes() == second[name].tobytes(), (
            name
        )


@pytest.mark.parametrize("row", ROWS)
def test_out_and_in_again_is_bit_exact(row: str, folders: Any, tmp_path: Path) -> None:
    folder, (about, _) = folders(row), read(row)
    done = mw.convert(folder, tmp_path / "run")
    assert done.parameters == about["parameters"]
    mw.convert(tmp_path / "run", tmp_path / "back", largest_file=100_000)
    assert_same_tensors(folder, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == about["config"]
    # Without the configuration that it came with, one is written from the model: `transformers` computes the same bits
    # from it, which golden/peers/architectures.py asserts.
    shutil.rmtree(tmp_path / "run" / "huggingface")
    written = mw.convert(tmp_path / "run", tmp_path / "written", dtype="float32").out
    if row in hf_models.WRITTEN_SPLIT:
        split = hf_models.split_fused(tensors_of(folder), about["config"])
        (tmp_path / "split").mkdir()
        write_folder_file(tmp_path / "split" / "model.safetensors", split)
        folder = tmp_path / "split"
    if row in hf_models.WRITTEN_UNDER:
        renamed = {
            re.sub(*hf_models.WRITTEN_UNDER[row], name): values
            for name, values in tensors_of(folder).items()
        }
        folder = tmp_path / "renamed"
        folder.mkdir()
        write_folder_file(folder / "model.safetensors", renamed)
    assert_same_tensors(folder, written)
    own = json.loads((hf_models.PEERS / "written" / f"{row}.json").read_text())
    assert json.loads((written / "config.json").read_text()) == own


@pytest.mark.parametrize(
    ("row", "kept"), [("deepseek-v3", "e_score_correction_bias"), ("qwen3-next", "A_log")]
)
def test_what_is_float32_in_a_bfloat16_model_stays_so(
    row: str, kept: str, folders: Any, tmp_path: Path
) -> None:
    """As `transformers` has it (`_keep_in_fp32_modules_strict`): a bias of 2.003 is 2.0 in bfloat16."""

    mw.convert(folders(row), tmp_path / "run")
    half = mw.convert(tmp_path / "run", tmp_path / "half", dtype="bfloat16").out
    dtypes = {name: x.dtype.name for name, x in tensors_of(half).items() if "dt_bias" not in name}
    assert {(kept in name, dtype) for name, dtype in dtypes.items()} == {
        (True, "float32"),
        (False, "bfloat16"),
    }
    # And in again: the bias is not what tells the type of the others.
    assert mw.convert(half, tmp_path / "again").dtype == "bfloat16"
    mw.convert(tmp_path / "again", tmp_path / "back")
    assert_same_tensors(half, tmp_path / "back")


@pytest.mark.parametrize("row", ["llama", "qwen3-moe"])
def test_weights_lie_on_any_mesh(row: str, folders: Any) -> None:
    """Pipeline stages with padding rows, `context`, `expert`: the logits of one device."""
    mesh = "stage=2,fsdp=2,context=2" if row == "llama" else "expert=2,tensor=2,data=2"
    assert np.abs(hf_models.logits_of(folders(row), mesh) - read(row)[1]["logits"]).max() < 1e-4


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        config = {**json.loads(file.read_text()), **changes}
        file.write_text(
            json.dumps({name: value for name, value in config.items() if value != "remove"})
        )

    return edit


def _rewrite(
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = change(tensors_of(folder))
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        write_folder_file(folder / "model.safetensors", tensors)

    return edit


def write_folder_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    codes = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    file = NewSafetensorsFile(path, {n: (codes[t.dtype.name], t.shape) for n, t in tensors.items()})
    for name, tensor in tensors.items():
        file.tensor(name)[...] = tensor
    file.release()


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        text = json.dumps(change(header) or header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return edit


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _huge_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])


def _index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        names = {
            name: "model.safetensors"
            for name in SafetensorsFile(folder / "model.safetensors").entries
        }
        change(names)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return edit


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _wrong_sum(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "architecture": (_edit_config(architectures=["MambaForCausalLM"]), r"MambaForCausalLM, which Meshwright does not"),
    "no architecture": (_edit_config(architectures=None), r"architecture is not named"),
    "rope scaling": (_edit_config(rope_parameters={"rope_type": "yarn"}), r"type 'yarn' has no 'factor'"),
    "rope factor": (_edit_config(rope_scaling={"type": "linear", "factor": "2"}), r"'linear' has the factor '2'"),
    "bias": (_edit_config(attention_bias=True), r"no file has the tensor 'model.layers.0.self_attn.o_proj.bias'"),
    "no flag": (_edit_config(mlp_bias="no"), r'mlp_bias is "no", and Meshwright computes it only with false or true'),
    "activation": (_edit_config(hidden_act="relu"), r'hidden_act is "relu"'),
    "no width": (_edit_config(hidden_size="remove"), r"it has no 'hidden_size'"),
    "long context": (_edit_config(rope_scaling={"type": "dynamic", "factor": 2.0}), r"how many tokens follow it"),
    "partial rotation": (_edit_config(partial_rotary_factor=0.5), r"rotation of 0.5 of each head"),
    "no heads": (_edit_config(num_attention_heads=0), r"num_attention_heads is 0"),
    "base": (_edit_config(rope_parameters={"rope_theta": "10000"}), r"its fields describe no LlamaForCausalLM: TypeE"),
    "no rope fields": (_edit_config(rope_parameters=[1]), r"rope_parameters is \[1\], and not a JSON object"),
    "quantised": (_edit_config(quantization_config={"quant_method": "gptq"}), r"quantised \(gptq\)"),
    "layers": (_edit_config(num_hidden_layers=4), r"no file has the tensor 'model.layers.3.*blocks.attention_norm"),
    "fewer layers": (_edit_config(num_hidden_layers=2), r"a tensor 'model.layers.2.* LlamaForCausalLM .* has none"),
    "wrong shape": (_edit_config(intermediate_size=88), r"\[64, 96\], and blocks.down .* needs \[64, 88\]"),
    "tied": (_edit_config(tie_word_embeddings=True), r"ties 'lm_head.weight' to .* values differ"),
    "missing": (_rewrite(lambda t: {n: x for n, x in t.items() if n != NORM}), rf"no file has the tensor '{NORM}'"),
    "unknown": (_rewrite(lambda t: {**t, "model.extra": t[NORM]}), r"has a tensor 'model.extra'"),
    "integers": (_header(lambda h: h[NORM].update(dtype="I32")), rf"'{NORM}' is I32, a quantised or integer type"),
    "cut": (_cut, r"places tensors up to byte [\d,]+, and it has"),
    "header length": (_huge_header, r"its header would have 4,611,686,018,427,387,904: it is damaged"),
    "overlap": (_header(lambda h: h[NORM].update(data_offsets=[0, 256])), r"overlaps the tensor before it"),
    "offsets": (_header(lambda h: h[NORM].update(shape=[32])), r"F32\[32\], 128 bytes, and its place has 256"),
    "negative": (_header(lambda h: h[NORM].update(shape=[-64])), r"its place has"),
    "no header": (_header(lambda h: [1]), r"its header is not a JSON object"),
    "parent folder": (_index(lambda n: n.update({NORM: "../model.safetensors"})), r"not the name of a file"),
    "absolute path": (_index(lambda n: n.update({NORM: "/etc/passwd"})), r"not the name of a file"),
    "missing file": (_index(lambda n: n.update({NORM: "model-2.safetensors"})), r"names model-2.safetensors, and"),
    "index": (_index(lambda n: n.update({"more": "model.safetensors"})), r"places 'more' in model.safetensors, which"),
    "pickle": (_pickled, r"pytorch_model.bin is a pickle, which runs code"),
    "checksum": (_wrong_sum, r"SHA-256 is .* and SHA256SUMS has 0000"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused(damage: str, folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(mw.WeightsError, match=message):
        mw.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _check_missing_fields(row: str, architectures: list[str], fields: Any, folder: Path) -> None:
    """Asserts that a configuration without one of its fields is refused, or the model of `transformers`' default."""

    def shapes_of(model: Any) -> dict[str, Any]:
        return {path: p.shape for path, p in named_leaves(model.params()).items()}

    def model_of(config: dict[str, Any]) -> Any:
        (folder / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
        try:
            return read_model(f"hf:{folder}").model
        except mw.MeshwrightError:
            return None

    config, without = fields["config"], fields["without"]
    given = model_of(config)
    assert given is not None and len(without) >= len(config)
    for name, filled in without.items():
        top, _, inner = name.partition(".")
        if name == "rope_scaling":
            fewer = {**config, name: {"rope_type": "linear", "factor": 2.0}}
        elif inner:
            fewer = {**config, top: {n: v for n, v in config[top].items() if n != inner}}
        else:
            fewer = {n: v for n, v in config.items() if n != name}
        found = model_of(fewer)
        if found is None:
            continue
        assert isinstance(filled, dict), f"{name}: transformers refuses it, {filled}"
        complete = config | fields.get("added", {}) | filled["changed"]
        other = model_of({n: v for n, v in complete.items() if n not in filled["gone"]})
        if other is None and filled["changed"].get("num_key_value_heads", 0) > given.heads:
            continue  # transformers fills in 32, more than this model's heads: its own weights refuse that
        # Where shapes differ the weights' shapes say so.
        assert other is not None, f"{name}: what transformers fills in is refused"
        assert found == other or shapes_of(found) != shapes_of(other), name
        assert name != "rope_scaling" or found != given or row in ("gpt2", "kimi-linear")


FIELDS_OF_40_LAYERS = (
    read("fields-of-40-layers")[0]["fields"] | read("newer-fields-of-40-layers")[0]["fields"]
)


@pytest.mark.parametrize("row", ROWS)
def test_a_missing_field_is_that_of_transformers(row: str, tmp_path: Path) -> None:
    about, _ = read(row)
    _check_missing_fields(row, about["config"]["architectures"], about["fields"], tmp_path)


@pytest.mark.parametrize("row", ROWS)
def test_a_missing_field_of_a_deep_model_is_that_of_transformers(row: str, tmp_path: Path) -> None:
    """With 40 layers, where defaults such as Qwen's `max_window_layers` 28 have an effect."""
    fields = FIELDS_OF_40_LAYERS[row]
    _check_missing_fields(row, [fields["architecture"]], fields, tmp_path)


WINDOWS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "28 layers without": ("qwen3", {"layers": 28}, None),
    "the window's own size": ("qwen3-moe", {"sliding_window": "absent"}, 4096),
    "no window": ("qwen2", {"sliding_window": None}, None),
    "all layers of a mixture": ("qwen3-moe", {}, 5),
    "from the first layer on": ("qwen2", {"max_window_layers": 0}, 5),
}


@pytest.mark.parametrize("row", WINDOWS)
def test_windows_of_qwen_are_those_of_transformers(row: str, tmp_path: Path) -> None:
    name, changes, window = WINDOWS[row]
    fields = FIELDS_OF_40_LAYERS[name]
    drop = ("layer_types", "max_window_layers")
    config = {n: v for n, v in fields["config"].items() if n not in drop}
    config |= {"use_sliding_window": True, "sliding_window": 5}
    config |= {"architectures": [fields["architecture"]]}
    for field, value in changes.items():
        config["num_hidden_layers" if field == "layers" else field] = value
        if value == "absent":
            del config[field]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(f"hf:{tmp_path}").model.sliding_window == window
    if name == "qwen2" and window is None:
        return
    config |= {"sliding_window": 5, "num_hidden_layers": 40}
    config |= {"max_window_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mw.WeightsError, match="sliding window of 5"):
        read_model(f"hf:{tmp_path}")


QUANTISATION: dict[str, tuple[Any, str]] = {
    "no method": ({"bits": 4}, "has no quant_method"),
    "a text": ("fp8", 'quantization_config is "fp8", and not a JSON object'),
    "a list": ([], r"quantization_config is \[\], and not a JSON object"),
    "false": (False, "quantization_config is false, and not a JSON object"),
    "a method that is not read": ({"quant_method": "gptq"}, r"are quantised \(gptq\)"),
}


@pytest.mark.parametrize("row", QUANTISATION)
def test_quantised_weights_are_refused_by_what_they_are(
    row: str, folders: Any, tmp_path: Path
) -> None:
    value, reason = QUANTISATION[row]
    for name in ("llama", "deepseek-v3", "gpt-oss"):
        config = json.loads((folders(name) / "config.json").read_text())
        config["quantization_config"] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(mw.WeightsError, match=reason):
            read_model(f"hf:{tmp_path}")


SINGLE, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"  # fmt: skip
SETS = ("single", "index", "leftover", "pickle", "named")


@pytest.mark.parametrize("same", [True, False], ids=["equal", "differing"])
@pytest.mark.parametrize("present", range(1, 2 ** len(SETS)))
def test_of_several_sets_of_weights_the_one_of_transformers_is_read(
    present: int, same: bool, folders: Any, tmp_path: Path
) -> None:
    """Every combination of one file, an index with its file, a file of neither, a pickle and a name in config.json."""
    parts = {name for bit, name in enumerate(SETS) if present >> bit & 1}
    source = folders("llama")
    for file in source.glob("*.json"):
        if file.name != INDEX:
            shutil.copy(file, tmp_path)
    tensors = {n: t for f in source.glob("*.safetensors") for n, t in load_file(f).items()}
    files = {
        "single": SINGLE,
        "index": SHARD,
        "leftover": "model-00002-of-00002.safetensors",
        "named": "mine.safetensors",
    }
    for number, (part, file) in enumerate(files.items()):
        own = tensors if same else {n: t + number for n, t in tensors.items()}
        if part in parts:
            save_file(own, tmp_path / file)
    if "index" in parts:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SHARD)}))
    if "pickle" in parts:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    if "named" in parts:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "transformers_weights": files["named"]})
        )
    order = [part for part in ("named", "single", "index") if part in parts]
    if not order:
        with pytest.raises(mw.WeightsError, match=INDEX if "leftover" in parts else "is a pickle"):
            open_folder(f"hf:{tmp_path}")
        return
    chosen = files[order[0]]
    others = [files[part] for part in ("single", "index", "leftover") if part in parts and files[part] != chosen]  # fmt: skip
    if others and not same:
        with pytest.raises(mw.WeightsError, match="two sets of weights") as refused:
            open_folder(f"hf:{tmp_path}")
        assert chosen in refused.value.truth
        assert any(other in refused.value.truth for other in others)
        return
    weights = open_folder(f"hf:{tmp_path}")
    assert {entry.file.name for entry in weights.entries.values()} == {chosen}
    note = " ".join(weights.notes)
    assert all(other in note for other in others) and ("pickle" not in parts or "pytorch_model.bin" in note)  # fmt: skip


@pytest.mark.parametrize(
    ("file", "options", "fix"),
    [
        ("run.json", {"weights": "adapter", "dtype": "bfloat16"}, "leave --dtype out"),
        ("run.json", {"weights": "adapter", "largest_file": 10**9}, "leave --max-file-mib out"),
        ("config.json", {"largest_file": 10**9}, "leave --max-file-mib out"),
        ("config.json", {"weights": "adapter"}, "output folder of a run"),
        (".metadata", {"weights": "adapter"}, "output folder of a run"),
        ("_METADATA", {"weights": "adapter"}, "output folder of a run"),
    ],
)
def test_options_without_effect_on_a_conversion_are_refused(
    file: str, options: dict[str, Any], fix: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / file).write_text("{}")
    with pytest.raises(mw.ConfigError) as refused:
        mw.convert(source, tmp_path / "out", **options)
    assert fix in refused.value.fix


def test_what_is_no_model_is_refused(tmp_path: Path, folders: Any) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(mw.ConfigError, match=r"neither config.json .* nor run.json"):
        mw.convert(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(mw.WeightsError, match="there is no such folder"):
        mw.recipe(f"hf:{tmp_path}/no/such/folder")
    with pytest.raises(mw.ConfigError, match="it exists already"):
        mw.convert(folders("llama"), tmp_path / "empty")
    model = mw.Mixtral(vocab=50, router_score="sigmoid", shared_experts=1)
    with pytest.raises(
        mw.WeightsError, match=r"no architecture of `transformers` .* has this combination"
    ):
        architecture_of(model)


def test_an_interrupted_conversion_goes_on(folders: Any, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop_at(number: int) -> Callable[[str], None]:
        def say(line: str) -> None:
            if line.startswith(f"{number}/"):
                raise Stop

        return say

    for source, out in ((folders("mistral"), "run"), (tmp_path / "run", "back")):
        with pytest.raises(Stop):
            mw.convert(source, tmp_path / out, say=stop_at(6))
        assert not (tmp_path / out).exists() and (tmp_path / f"{out}.partial").is_dir()
        assert mw.convert(source, tmp_path / out).resumed == 5
        assert not (tmp_path / f"{out}.partial").exists()
    assert_same_tensors(folders("mistral"), tmp_path / "back")
    # Another source starts anew.
    with pytest.raises(Stop):
        mw.convert(folders("mistral"), tmp_path / "other", say=stop_at(6))
    assert mw.convert(folders("llama"), tmp_path / "other").resumed == 0


def test_a_damaged_checkpoint_is_not_exported(folders: Any, tmp_path: Path) -> None:
    mw.convert(folders("llama"), tmp_path / "run")
    block = tmp_path / "run/checkpoints/0/state/params.blocks.up/0.0.0"
    data = bytearray(block.read_bytes())
    data[100] ^= 1
    block.write_bytes(data)
    with pytest.raises(mw.CheckpointError, match=r"'params.blocks.up' is not what was saved"):
        mw.convert(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _run(tmp_path: Path) -> mw.Run:
    (tmp_path / "text.txt").write_text("one two three four five six seven " * 400)
    return mw.recipe(
        "tiny", mesh="fsdp=2", layers=2, width=32, mlp=64, steps=3, batch=4, seq=32, sample=0, eval_every=0,
        save_every=0, eval_samples=8, tokenizer="bytes", paths=(str(tmp_path / "text.txt"),),
    )  # fmt: skip


def test_a_trained_model_goes_out_and_starts_another_run(tmp_path: Path) -> None:
    """Trained, exported with its tokenizer, evaluated, trained on from both folders."""
    run = _run(tmp_path)
    mw.train(run, tmp_path / "first", progress="none", cache=tmp_path)
    model = mw.convert(tmp_path / "first", tmp_path / "model").out
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "one two \n\t\u00e9 three"
    assert (
        tokenizer.encode(text).ids == list(text.encode())
        and tokenizer.decode(list(text.encode())) == text
    )
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 256
    same = mw.evaluate(tmp_path / "first", data=run.data.paths, mesh="data=1", cache=tmp_path).loss
    source = f"hf:{model}"
    assert mw.evaluate(
        source, data=run.data.paths, mesh="data=1", cache=tmp_path
    ).loss == pytest.approx(same, rel=1e-3)
    starts = []
    for init in (source, str(tmp_path / "first")):
        again = dataclasses.replace(
            run, init_from=init, training=dataclasses.replace(run.training, steps=1)
        )
        out = tmp_path / f"again{len(starts)}"
        mw.train(again, out, progress="none", cache=tmp_path)
        starts.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert starts[0] == starts[1] < 5.3
    assert (tmp_path / "again0" / "huggingface" / "tokenizer_config.json").is_file()
    with pytest.raises(mw.WeightsError, match="the weights there are of a Llama"):
        mw.train(
            dataclasses.replace(run, model=mw.Gpt2(vocab=257), init_from=source),
            tmp_path / "x",
            cache=tmp_path,
        )
    with pytest.raises(
        mw.WeightsError, match=r"'blocks.down' is \[2, 64, 32\] in the weights and \[2, 96, 32\]"
    ):
        other = dataclasses.replace(run.model, mlp=96)
        mw.train(
            dataclasses.replace(run, model=other, init_from=source), tmp_path / "y", cache=tmp_path
        )


def test_converted_weights_restore_on_a_mesh_and_cannot_be_resumed(
    folders: Any, tmp_path: Path
) -> None:
    mw.convert(folders("llama"), tmp_path / "run")
    run = dataclasses.replace(
        find_recipe(f"hf:{folders('llama')}"), mesh=mw.MeshShape(fsdp=2, stage=2), fsdp_min_size=1
    )
    device_run = place_on_devices(run, build_mesh(run.mesh))
    where = device_run.abstract.shardings.params
    direct = load_params(
        open_folder(f"hf:{folders('llama')}"), device_run.layout.params, where, "float32"
    )
    with Checkpoints(tmp_path / "run" / "checkpoints", max_to_keep=1) as checkpoints:
        restored, manifest = checkpoints.restore_params(device_run)
        with pytest.raises(
            mw.CheckpointError, match="it has weights alone, and no optimizer state"
        ):
            checkpoints.restore(device_run)
    assert manifest.step == 0
    for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)


def _synthetic(folder: Path, mib: int) -> None:
    """A Llama of some size in bfloat16, whose tensors are random bits of small numbers."""
    width, layers, mlp, vocab = 1024, mib // 25, 2816, 8192
    folder.mkdir()
    model = mw.Llama(vocab, width, layers, 8, kv_heads=8, mlp=mlp)
    architecture, config = architecture_of(model)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    rng, shapes = np.random.default_rng(0), {}
    for path, p in named_leaves(model.params()).items():
        stored = architecture.tensors(model)[path]
        shapes |= dict.fromkeys(stored.names(p), ("BF16", stored.stored_shape(p)))
    noise = (0.02 * rng.standard_normal(vocab * width, np.float32)).astype(ml_dtypes.bfloat16)
    file = NewSafetensorsFile(folder / "model.safetensors", shapes)
    for name in shapes:
        tensor = file.tensor(name)
        tensor[...] = np.resize(noise[rng.integers(1000) :], tensor.shape)
        file.release()


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """300 MB both ways in 75 MB above a small model's conversion: what 8 GB in 2 GB is."""
    peaks = {}
    _synthetic(tmp_path / "small", 25)
    _synthetic(tmp_path / "large", 300)
    for source, out in (("small", "other"), ("large", "run"), ("run", "back")):
        command = [sys.executable, "-m", "meshwright", "convert", source, out, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        peaks[out] = json.loads(done.stdout)["peak_bytes"]
    written, original = (tmp_path / name / "model.safetensors" for name in ("back", "large"))
    assert written.read_bytes() == original.read_bytes()
    assert max(peaks["run"], peaks["back"]) - peaks["other"] < 75e6


def test_blocks_of_fused_and_interleaved_tensors() -> None:
    """Every block of a parameter is that of the whole, read and written."""
    p = Param((2, 4, 6, 5), "LDNH", rows=None)
    rng = np.random.default_rng(0)
    cases = (
        (StoredTensor("w{layer}", ("NH", "D"), (3, 7)), (30, 4)),
        (StoredTensor("w{layer}", ("D", "NH"), (3, 7), (1, slice(30, 60)), (4, 90)), (4, 90)),
        (StoredTensor("w{layer}", ("D", "NH"), (3, 7), (1, slice(1, None, 2)), (4, 60)), (4, 60)),
    )
    for stored, shape in cases:
        files = {name: rng.normal(size=shape).astype(np.float32) for name in stored.names(p)}
        assert list(files) == ["w3", "w7"] and stored.stored_shape(p) == shape
        everything = tuple(slice(0, size) for size in p.shape)
        whole = read_block(p, stored, everything, files.__getitem__, np.float32)
        again = {name: np.zeros(shape, np.float32) for name in files}
        for _ in range(10):
            low = [int(rng.integers(0, size)) for size in p.shape]
            index = tuple(
                slice(a, int(rng.integers(a + 1, size + 1)))
                for a, size in zip(low, p.shape, strict=True)
            )
            np.testing.assert_array_equal(
                read_block(p, stored, index, files.__getitem__, np.float32), whole[index]
            )  # fmt: skip
            write_block(p, stored, index, whole[index], again.__getitem__)
        write_block(p, stored, everything, whole, again.__getitem__)
        for name in files:
            np.testing.assert_array_equal(stored.view(p, again[name]), stored.view(p, files[name]))


UNKNOWN: dict[str, tuple[dict[str, Any], str, str]] = {
    "a relation of GLM-5 with compressed keys": (
        {"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next", "index_topk": 2048, "compress_ratios": [4]},
        "by its fields it has what no family here computes: compressed keys and values",
        "of the same maker these are computed: Glm4MoeForCausalLM",
    ),
    "Falcon-H1": (
        {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_state": 128},
        "its architecture is FalconH1ForCausalLM, which Meshwright does not compute",
        "a model that one of these computes: ArceeForCausalLM, Cohere2ForCausalLM",
    ),
    "a model with a near name": (
        {"architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9"},
        "its architecture is Qwen9ForCausalLM, which Meshwright does not compute",
        "of the same maker these are computed: Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM",
    ),
    "a name of transformers that differs by a letter": (
        {"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"},
        "its architecture is Gemma3nForCausalLM, which Meshwright does not compute",
        "of the same maker these are computed: Gemma2ForCausalLM",
    ),
    "a misspelling": (
        {"architectures": ["LlamaForCasualLM"]},
        "there is no architecture LlamaForCasualLM",
        "did you mean 'LlamaForCausalLM'?",
    ),
    "another model under a known name": (
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm_moe_dsa"},
        "whose model_type is glm4_moe, and its model_type is glm_moe_dsa: they are two different models",
        "the config.json that was published with these weights",
    ),
    "fields of another model": (
        {"index_topk": 2048, "kv_lora_rank": 512},
        "it has index_topk 2048 (a sparse indexer, which chooses the tokens to attend to), "
        "kv_lora_rank 512 (multi-head latent attention), which Meshwright does not compute for LlamaForCausalLM",
        "delete index_topk, kv_lora_rank from the file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", UNKNOWN)
def test_nothing_is_read_by_guess(row: str, folders: Any, tmp_path: Path) -> None:
    changes, truth, fix = UNKNOWN[row]
    config = {**json.loads((folders("llama") / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mw.WeightsError) as refused:
        read_model(f"hf:{tmp_path}")
    assert truth in refused.value.truth
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("changes", "truth"),
    [
        ({"gate_lower_bound": -5.0}, "has gate_lower_bound, which Meshwright does not compute"),
        ({"kda_layers": [1, 2, 3]}, "kda_layers has [1, 2, 3]"),
        ({"kda_layers": None}, "kda_layers has []"),
    ],
)
def test_linear_attention_of_kimi_is_not_read_by_guess(
    changes: dict[str, Any], truth: str, folders: Any, tmp_path: Path
) -> None:
    config = json.loads((folders("kimi-linear") / "config.json").read_text())
    file, linear = tmp_path / "config.json", {"full_attn_layers": [3], "kda_layers": [1, 2]}
    file.write_text(json.dumps({**config, "linear_attn_config": linear}))
    read_model(f"hf:{tmp_path}")
    file.write_text(json.dumps({**config, "linear_attn_config": {**linear, **changes}}))
    with pytest.raises(mw.WeightsError) as refused:
        read_model(f"hf:{tmp_path}")
    assert truth in refused.value.truth


def test_a_zero_under_a_second_name_is_read(folders: Any, tmp_path: Path) -> None:
    config = json.loads((folders("kimi-linear") / "config.json").read_text())
    del config["num_shared_experts"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_shared_experts": 0}))
    model: Any = read_model(f"hf:{tmp_path}").model
    assert model.shared_experts == 0


EFFECTS = read("changed-fields")[0]["rows"] | read("newer-changed-fields")[0]["rows"]


@pytest.mark.parametrize("row", ROWS)
def test_a_field_is_computed_or_refused_or_changes_no_number(row: str, tmp_path: Path) -> None:
    """Every field of the configuration class of `transformers`, changed by itself."""
    config = EFFECTS[row]["config"]

    def model_of(fields: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        try:
            return read_model(f"hf:{tmp_path}").model
        except mw.MeshwrightError:
            return None

    given = model_of(config)
    assert given is not None
    for name, change in EFFECTS[row]["changed"].items():
        found = model_of({**config, name: change["value"]})
        if found == given:
            assert change["effect"] is not True, f"{name}: the logits of transformers change"


SIZES = read("published-sizes")[0]["sizes"]


@pytest.mark.parametrize("name", SIZES)
def test_a_published_size_has_its_number_of_parameters(name: str, tmp_path: Path) -> None:
    """To the digit, as `transformers` counts them."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES[name]["config"]))
    params = named_leaves(read_model(f"hf:{tmp_path}").model.params())
    assert sum(math.prod(unpadded_shape(p)) for p in params.values()) == SIZES[name]["parameters"]


def test_notes_of_a_folder(folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    assert read_model(f"hf:{folder}").notes == ()
    _rewrite(lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": t[NORM]})(folder)
    assert open_folder(f"hf:{folder}").notes == ("computed and not kept: 1 tensors of the files",)
    # A tied unembedding that equals the embedding is taken for it.
    _edit_config(tie_word_embeddings=True)(folder)
    _rewrite(lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"]})(folder)
    check_tied(open_folder(f"hf:{folder}"))
