"""Models of one's own: the same numbers on every mesh, resumed, moved, evaluated; and errors that teach."""

import dataclasses
import functools
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshwright as mw
from meshwright.analysis.run_census import census_of_train_step
from meshwright.cli.main import run as cli
from meshwright.config import Faults
from meshwright.errors import ConfigError, DataError, TrainingError
from meshwright.hardware.mesh import build_mesh
from meshwright.models.flops import training_flops_per_token
from meshwright.planner.traffic import movements
from meshwright.planner.work import recomputed_roles, work_of
from meshwright.plugins import load_file
from meshwright.reporters.health import History
from meshwright.runs.run_file import read_run, run_from_dict, run_to_dict
from meshwright.sharding.params import named_leaves
from meshwright.step.device_run import place_on_devices
from meshwright.step.gradients import build_gradients
from meshwright.step.health import GRADIENT, PARAMETER, UPDATE
from meshwright.trainer.prepare import prepare_run
from meshwright.wrapped import prepared as prepared_module
from meshwright.wrapped.model import Wrapped
from meshwright.wrapped.step import evaluation_parts

EXAMPLES = Path(__file__).parents[1] / "docs" / "wrap"
MESHES = {
    "mlp_linen": "data=2,fsdp=4",
    "vit_nnx": "data=2,fsdp=2,tensor=2",
    "mixer_equinox": "fsdp=8",
    "pytree": "data=2,fsdp=2,tensor=2",
}
every_example = pytest.mark.parametrize("name", MESHES)
STEPS = 4


@functools.cache
def example(name: str) -> Wrapped:
    """Model of an example; of the vision transformer one layer, whose program compiles in half the time."""
    file: Any = load_file(EXAMPLES / f"{name}.py")
    if name != "vit_nnx":
        model: Wrapped = file.model
        return model
    return mw.wrap(
        lambda key: file.VisionTransformer(nnx.Rngs(key), width=32, layers=1), file.loss, file.batches,
        axes={"mlp": "tensor"},
    )  # fmt: skip


def run_of(name: str, mesh: str, **changes: Any) -> mw.Run:
    return example(name).run(
        mesh=mesh, steps=STEPS, learning_rate=3e-4, save_every=2, max_to_keep=9, **changes
    )


def train(run: mw.Run, out: Path, cache: Path, **how: Any) -> mw.Summary:
    return mw.train(run, out, cache=cache, progress="none", **how)


def losses(out: Path, name: str = "loss") -> list[float]:
    lines = [
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [line[name] for line in lines if name in line]


def saved(out: Path, step: int) -> dict[str, Any]:
    """Shape, type and fingerprint of every tensor of a checkpoint."""
    manifest = json.loads(
        (out / "checkpoints" / str(step) / "manifest" / "metadata").read_text(encoding="utf-8")
    )
    tensors: dict[str, Any] = manifest["tensors"]
    return tensors


@pytest.fixture(autouse=True, scope="module")
def programs_are_compiled_once() -> Iterator[None]:
    """Runs of this file that have the same program share its executable."""
    compiled: dict[Any, tuple[Any, Any]] = {}
    build = prepared_module.CompiledTrainStep

    def build_once(device_run: Any, *like: Any) -> Any:
        run, parts = device_run.run, device_run.run.model.parts
        training = dataclasses.replace(
            run.training, save_every=0, max_to_keep=1, eval_every=0, log_every=1
        )
        key = id(parts), dataclasses.replace(run, training=training, name="")
        if key not in compiled:
            compiled[key] = build(device_run, *like), parts  # which keeps the id
        return compiled[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_module, "CompiledTrainStep", build_once)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Any:
    """Output folder of an example trained without interruption, by name and mesh."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(name: str, mesh: str) -> Path:
        if (name, mesh) not in folders:
            folders[name, mesh] = tmp_path_factory.mktemp(name) / "out"
            train(run_of(name, mesh), folders[name, mesh], cache)
        return folders[name, mesh]

    return folder


@every_example
def test_eight_devices_have_the_losses_of_one(trained: Any, name: str) -> None:
    eight, one = trained(name, MESHES[name]), trained(name, "data=1")
    np.testing.assert_allclose(losses(eight), losses(one), rtol=1e-6)
    np.testing.assert_allclose(
        losses(eight, "gradient norm"), losses(one, "gradient norm"), rtol=1e-5
    )
    if example(name).parts.held_out is not None:
        np.testing.assert_allclose(
            losses(eight, "held-out loss"), losses(one, "held-out loss"), rtol=1e-5
        )


@every_example
def test_the_health_of_every_parameter_is_kept(trained: Any, name: str, cache: Path) -> None:
    """Norms of the first step: of the parameters before it, and of gradients whose squares add up to the global norm."""
    out = trained(name, MESHES[name])
    history = History()
    history.read(json.loads(line) for line in (out / "health.jsonl").read_text().splitlines())
    assert history.steps[0] == 1
    state = prepare_run(run_of(name, "data=1"), cache=cache).device_run.initial_state()
    expected = {path: np.asarray(x, np.float64) for path, x in named_leaves(state.params).items()}
    figures = {
        (series.figure, series.tensor): value
        for series, value in zip(history.series, history.values[0], strict=True)
    }
    for figure in (GRADIENT, PARAMETER, UPDATE):
        assert {tensor for f, tensor in figures if f == figure} == expected.keys()
    for path, x in expected.items():
        # The file keeps 0.3 % of a number; no parameter of float32 is at rest.
        assert figures[PARAMETER, path] == pytest.approx(np.linalg.norm(x), rel=5e-3)
        assert figures[UPDATE, path] > 0
    squares = sum(float(value) ** 2 for (f, _), value in figures.items() if f == GRADIENT)
    assert squares**0.5 == pytest.approx(losses(out, "gradient norm")[0], rel=5e-3)


def test_a_bad_row_of_a_wrapped_model_is_named(tmp_path: Path, cache: Path) -> None:
    """A target of the second batch is not a number: the array, its row, and its index in the stream are said."""
    file: Any = load_file(EXAMPLES / "pytree.py")

    def batches(step: int) -> Any:
        x, y = file.batches(step)
        if step == 1:
            y[37] = np.nan
        return x, y

    run = mw.wrap(file.params, file.loss, batches).run(
        mesh="data=2,fsdp=2", steps=3, faults=Faults(bad_step="skip")
    )
    train(run, tmp_path / "out", cache)
    records = map(json.loads, (tmp_path / "out" / "events.jsonl").read_text().splitlines())
    (lines,) = [record["lines"] for record in records if "lines" in record]
    assert lines[0] == "step 2: not finite"
    assert lines[1] == "first tensor: 1 of the batch: not finite"
    assert lines[2] == f"samples: {64 + 37} in row 37"


@every_example
def test_initial_values_are_the_same_bits_on_every_mesh(name: str, cache: Path) -> None:
    meshes = ("data=1", MESHES[name])
    states = [
        prepare_run(run_of(name, mesh), cache=cache).device_run.initial_state() for mesh in meshes
    ]
    for path, x in states[0].params.items():
        np.testing.assert_array_equal(
            np.asarray(x), np.asarray(states[1].params[path]), err_msg=path
        )


@every_example
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    trained: Any, name: str, tmp_path: Path, cache: Path
) -> None:
    whole = trained(name, MESHES[name])
    shutil.copytree(whole, tmp_path / "out")
    train(run_of(name, MESHES[name]), tmp_path / "out", cache, start=2)
    assert saved(tmp_path / "out", STEPS) == saved(whole, STEPS)
    assert losses(tmp_path / "out") == losses(whole)


@every_example
def test_a_run_continues_on_another_mesh(
    trained: Any, name: str, tmp_path: Path, cache: Path
) -> None:
    whole = trained(name, MESHES[name])
    shutil.copytree(whole, tmp_path / "out")
    train(run_of(name, "data=1"), tmp_path / "out", cache, start=2)
    np.testing.assert_allclose(losses(tmp_path / "out"), losses(whole), rtol=1e-6)


def test_a_checkpoint_is_evaluated_by_the_name_of_its_model(trained: Any, cache: Path) -> None:
    out = trained("mlp_linen", MESHES["mlp_linen"])
    assert read_run(out / "run.json").model.name.endswith("mlp_linen.py:model")  # type: ignore[attr-defined]
    evaluation: Any = mw.evaluate(out, mesh="fsdp=8", cache=cache)
    assert evaluation.step == STEPS and evaluation.loss == pytest.approx(
        losses(out, "held-out loss")[-1], rel=1e-6
    )
    assert 0 <= evaluation.metrics["accuracy"] <= 1
    with pytest.raises(ConfigError, match="--data"):
        mw.evaluate(out, data=["text.txt"], cache=cache)


def test_parity_compares_gradients_too(cache: Path) -> None:
    result = mw.parity(run_of("pytree", "fsdp=8"), "data=2", steps=1, cache=cache)
    assert result.first_divergence is None and result.unequal_initial == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "lion"},
        {"microbatches": 2, "layout": "zero1"},
        {"remat": "full"},
        {"remat": "none"},
    ],
)
def test_options_do_not_change_the_numbers(
    changes: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    optimizer = mw.Optimizer(name=changes.pop("name", "adamw"), learning_rate=3e-4)
    results = []
    for mesh, own in (("data=1", {}), ("data=2,fsdp=4", changes)):
        run = example("pytree").run(mesh=mesh, steps=2, optimizer=optimizer, **own)
        train(run, tmp_path / mesh, cache)
        results.append(losses(tmp_path / mesh))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


def squares(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def rows(step: int, count: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "x": rng.normal(size=(count, 64)).astype(np.float32),
        "y": rng.normal(size=(count, 128)).astype(np.float32),
    }


W = {"w": np.zeros((64, 128), np.float32)}


def generated() -> Iterator[Any]:
    yield rows(0)


@dataclasses.dataclass
class Pair:
    x: np.ndarray
    y: np.ndarray


def noisy_by_its_own_key(params: Any, batch: Any) -> jax.Array:
    return squares(params, {**batch, "x": jax.random.normal(jax.random.key(0), batch["x"].shape)})


def test_numpy_arrays_of_an_equinox_module_are_constants() -> None:
    """As for `equinox.filter_grad`; a checkpoint has none of them."""
    import equinox

    class Scaled(equinox.Module):
        w: jax.Array
        scale: np.ndarray

    model = mw.wrap(
        lambda key: Scaled(jax.random.normal(key, (64, 128)), np.arange(64, dtype=np.float32)),
        lambda m, b: squares({"w": m.w * m.scale[:, None]}, b), rows,
    )  # fmt: skip
    assert list(model.params()) == ["w"] and not model.parts.variables
    params, _, _ = model.parts.adapter.build(jax.random.key(0))
    np.testing.assert_array_equal(model.parts.adapter.made_of(params, {}).scale, np.arange(64))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            lambda: mw.wrap(W, lambda p, b: (b["x"] @ p["w"]).mean(0), rows),
            ConfigError,
            "shape [128]",
        ),
        (lambda: mw.wrap(W, lambda p, b: jnp.int32(1), rows), ConfigError, "int32"),
        (lambda: mw.wrap(W, lambda p: 0.0, rows), ConfigError, "takes 1 arguments"),
        (
            lambda: mw.wrap(W, lambda p, b: (squares(p, b), 3), rows),
            ConfigError,
            "dictionary of scalars",
        ),
        (lambda: mw.wrap(W, lambda p, b: b["z"].mean(), rows), ConfigError, "KeyError: 'z'"),
        (lambda: mw.wrap({"w": "text"}, squares, rows), ConfigError, "it has a str"),
        (lambda: mw.wrap(lambda key: object(), squares, rows), ConfigError, "it has a object"),
        (lambda: mw.wrap(W, squares, rows, rules={"v": ("fsdp",)}), ConfigError, "known: w"),
        (
            lambda: mw.wrap(W, squares, rows, rules={"w": ("model",)}),
            ConfigError,
            "one of fsdp, tensor",
        ),
        (
            lambda: mw.wrap(W, squares, rows, rules={"w": (None, None, "fsdp")}),
            ConfigError,
            "names 3 dimensions",
        ),
        (
            lambda: mw.wrap(W, squares, rows, rules={"(": ()}),
            ConfigError,
            "not a regular expression",
        ),
        (
            lambda: mw.wrap(W, squares, lambda step: {"x": np.ones(3), "y": np.float32(0)}),
            DataError,
            "first dimension",
        ),
        (lambda: mw.wrap(W, squares, []), DataError, "no batch"),
        (
            lambda: mw.wrap(W, squares, lambda step: {**rows(0), "t": np.array(["a"] * 16)}),
            DataError,
            "only numbers",
        ),
        (
            lambda: mw.wrap({"a.b": W["w"], "a": {"b": W["w"]}}, lambda p, b: p["a.b"].sum(), rows),
            ConfigError,
            "a dot",
        ),
        (
            lambda: mw.wrap({**W, "c": np.zeros(2, complex)}, squares, rows),
            ConfigError,
            "it is complex64",
        ),
        (
            lambda: mw.wrap({**W, "z": np.zeros((0, 2), "f")}, squares, rows),
            ConfigError,
            "which has no elements",
        ),
        (
            lambda: mw.wrap(W, lambda p, b: (squares(p, b), {"a": {"b": 1.0}}), rows),
            ConfigError,
            "it is a dict",
        ),
        (lambda: mw.wrap(W, squares, 3), DataError, "it is a int"),
        (lambda: mw.wrap(W, squares, rows(0)), DataError, "it is one dict"),
        (lambda: mw.wrap(W, squares, np.ones((16, 64))), DataError, "it is one array"),
        (
            lambda: mw.wrap(W, squares, generated),
            DataError,
            "the iterator that it returns: generated()",
        ),
        (lambda: mw.wrap(W, squares, lambda step: generated()), DataError, "returned a generator"),
        (
            lambda: mw.wrap(W, squares, lambda step: Pair(**rows(0))),
            DataError,
            "register_dataclass(Pair)",
        ),
        (lambda: mw.wrap(W, squares, lambda step: {"x": [[1.0]] * 16}), DataError, "and 8 more"),
        (
            lambda: mw.wrap(W, squares, lambda step: jax.random.split(jax.random.key(0), 16)),
            DataError,
            "array of keys",
        ),
        (lambda: mw.wrap(W, squares, rows, held_out=rows), DataError, "it has no end"),
        (lambda: mw.wrap(W, squares, rows, held_out=generated()), DataError, "only be read once"),
        (
            lambda: mw.wrap(W, lambda p, b: b["x"].mean(), rows),
            ConfigError,
            "no gradient of any parameter (w)",
        ),
        (
            lambda: mw.wrap(W, lambda p, b: squares(jax.lax.stop_gradient(p), b), rows),
            ConfigError,
            "no gradient",
        ),
        (
            lambda: mw.wrap(W, jax.value_and_grad(lambda p, b: squares(p, b)), rows),
            ConfigError,
            "[64, 128]",
        ),
        (
            lambda: mw.wrap(W, noisy_by_its_own_key, rows),
            ConfigError,
            "each device would draw the same",
        ),
        *(
            (
                lambda name=name: mw.wrap(W, lambda p, b: (squares(p, b), {name: 1.0}), rows),
                ConfigError,
                f"a metric called {name!r}",
            )
            for name in ("loss", "time", "step", "examples")
        ),
        (
            lambda: mw.wrap(W, squares, rows, rules={".": (), "w": ("fsdp",)}),
            ConfigError,
            "it places nothing",
        ),
        (
            lambda: mw.wrap(W, squares, rows, axes={"mlp": "tensor"}),
            ConfigError,
            "no annotation of the module",
        ),
    ],
)
def test_wrapping_refuses_what_cannot_train(wrong: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        wrong()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "rules", "changes", "words"),
    [
        ("data=3", {}, {}, "16 = 5 * 3 + 1"),
        ("data=4", {}, {"microbatches": 8}, "16 = 0 * 32 + 16"),
        ("fsdp=8", {"w": ("fsdp",)}, {"batch": 8}, "training.batch=16"),
        ("tensor=3,data=2", {"w": (None, "tensor")}, {}, "128 = 42 * 3 + 2"),
        ("fsdp=4,tensor=2", {"w": (("fsdp", "tensor"),)}, {}, "split different dimensions"),
        ("stage=2,data=2", {}, {}, "axes among data, fsdp, tensor"),
        ("data=4,tensor=2", {}, {}, "its 2 devices would compute the same"),
        ("data=2", {}, {"seq": 64}, "--seq 64"),
        ("data=2", {}, {"remat": "projections"}, "its layers are not known"),
        ("data=2", {}, {"init_from": "hf:x"}, "--init-from hf:x"),
        ("data=2", {}, {"optimizer": mw.Optimizer(name="muon")}, "heads and layers"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_before_tracing(
    mesh: str,
    rules: dict[str, Any],
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    cache: Path,
) -> None:
    run = mw.wrap(W, squares, rows, rules=rules).run(mesh=mesh, steps=1, **changes)
    with pytest.raises(ConfigError) as caught:
        train(run, tmp_path / "out", cache)
    assert words in str(caught.value)


def test_a_loss_for_batches_of_one_size_is_refused_on_parts_of_them(
    tmp_path: Path, cache: Path
) -> None:
    model = mw.wrap(W, lambda p, b: squares(p, {**b, "x": b["x"].reshape(16, 64)}), rows)
    with pytest.raises(ConfigError, match="8 of the 16 examples"):
        train(model.run(mesh="data=2", steps=1), tmp_path / "out", cache)
    with pytest.raises(ConfigError, match="4 of the 16 examples"):
        mw.plan(model.run(), on="v5p:2x2x1")


def test_a_loss_that_is_a_sum_is_refused_on_parts_of_a_batch(tmp_path: Path, cache: Path) -> None:
    def summed(p: Any, b: Any) -> Any:
        return 16 * squares(p, b) * (b["x"].shape[0] / 16), {"squares": squares(p, b)}

    for changes, own in (({"mesh": "data=2"}, 8), ({"mesh": "data=1", "microbatches": 4}, 4)):
        with pytest.raises(ConfigError, match=f"a sum over the {own} of 16 examples"):
            train(mw.wrap(W, summed, rows).run(steps=1, **changes), tmp_path / "out", cache)
    train(mw.wrap(W, summed, rows).run(mesh="data=1", steps=1), tmp_path / "alone", cache)


def test_integers_that_a_device_has_not_are_refused(tmp_path: Path, cache: Path) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return squares(params, batch) + 0 * batch["index"].sum()

    model = mw.wrap(W, loss, lambda step: {**rows(step), "index": np.full(16, 2**40)})
    with pytest.raises(DataError, match="there is 1099511627776"):
        train(model.run(mesh="data=2", steps=1), tmp_path / "out", cache)


def test_plain_arrays_of_an_nnx_module_are_its_variables() -> None:
    """Also where the module is made in a trace, as by a function of a key."""

    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(64, 8, rngs=rngs)
            self.scale = jnp.linspace(0.5, 1.5, 8)

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean((model.linear(batch["x"]) * model.scale) ** 2)

    for module in (Scaled(nnx.Rngs(0)), lambda key: Scaled(nnx.Rngs(key))):
        parts = mw.wrap(module, loss, rows).parts
        assert list(parts.variables) == ["scale"] and sorted(parts.params) == [
            "linear.bias",
            "linear.kernel",
        ]


def test_stacked_norms_are_not_decayed() -> None:
    """What a loop uses row by row has the rank of a row: scales [L, D] stay, matrices [L, D, D] and tables decay."""
    params = {
        "table": np.ones((8, 4), np.float32),
        "scale": np.ones((3, 4), np.float32),
        "w": np.ones((3, 4, 4), np.float32),
        "listed": np.ones((3, 4), np.float32),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, own: Any) -> Any:
            return jax.checkpoint(lambda x, w, scale: jnp.tanh(x @ w) * scale)(x, *own), None

        x = jax.lax.scan(layer, batch["x"] @ params["table"], (params["w"], params["scale"]))[0]
        for i in range(3):
            x = x * params["listed"][i]
        return (x**2).mean()

    described = mw.wrap(params, loss, lambda step: {"x": np.ones((8, 8), np.float32)}).params()
    assert {name: p.init for name, p in described.items()} == {
        "table": "normal", "w": "normal", "scale": "zeros", "listed": "zeros",
    }  # fmt: skip


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_many_microbatches_have_the_gradient_of_the_whole_batch(reduce_dtype: str) -> None:
    """512 of them in bfloat16 would give half of it: 256 + 1 is 256 there."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return (batch["x"] * params["w"]).mean()

    model = mw.wrap(
        {"w": np.zeros((4,), np.float32)}, loss, lambda step: {"x": np.ones((512, 4), np.float32)}
    )
    run = model.run(mesh="data=1", microbatches=512, reduce_dtype=reduce_dtype, grad_clip_norm=0.0)
    device_run = place_on_devices(run, build_mesh(run.mesh))
    state, batch = device_run.initial_state(), {"x": jnp.ones((512, 4))}
    grads = jax.jit(build_gradients(device_run))(state.params, state.step, batch)[0]
    np.testing.assert_array_equal(grads["w"], np.full(4, 0.25, np.float32))


def test_a_parameter_without_a_gradient_stays_as_it_is(tmp_path: Path, cache: Path) -> None:
    """Also under weight decay, in a scan; and a key with a default is given, batches of another library are read."""

    class Foreign:
        def __init__(self, array: np.ndarray):
            self.array, self.shape, self.ndim, self.dtype = (
                array,
                array.shape,
                array.ndim,
                f"foreign.{array.dtype}",
            )

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return np.asarray(self.array, dtype)

    def loss(params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
        assert key is not None

        def layer(x: jax.Array, frozen: jax.Array) -> Any:
            return x @ jax.lax.stop_gradient(frozen), None

        x, _ = jax.lax.scan(layer, batch["x"], params["frozen"])
        return squares(params, {**batch, "x": x})

    frozen = np.stack([np.eye(64, dtype=np.float32)] * 2)
    model = mw.wrap(
        {**W, "frozen": frozen}, loss, lambda step: {n: Foreign(x) for n, x in rows(step).items()}
    )
    train(model.run(mesh="data=2,fsdp=4", steps=2), tmp_path / "out", cache)
    after: Any = model.restore(tmp_path / "out")
    np.testing.assert_array_equal(after["frozen"], frozen)
    assert np.abs(after["w"]).max() > 0


def test_a_linen_module_has_several_methods_and_sows(tmp_path: Path, cache: Path) -> None:
    """Each call makes the variables that it needs, leaves those of the calls before, and what is sown is no state."""
    import flax.linen as nn

    class Coder(nn.Module):
        def setup(self) -> None:
            self.encoder, self.decoder, self.norm = (
                nn.Dense(32),
                nn.Dense(128),
                nn.BatchNorm(use_running_average=False),
            )

        def encode(self, x: jax.Array) -> jax.Array:
            h = self.norm(self.encoder(x))
            self.sow("losses", "size", (h**2).mean())
            return h

        def decode(self, h: jax.Array) -> jax.Array:
            return self.decoder(self.norm(h))

    def loss(model: Any, batch: Any) -> Any:
        y = model(model(batch["x"], method="encode"), method="decode")
        (size,) = model.variables["losses"]["size"]
        return jnp.mean((y - batch["y"]) ** 2) + size, {"size": size}

    model = mw.wrap(Coder(), loss, rows, local_batch=True)
    assert {name.split(".")[0] for name in model.params()} == {"encoder", "decoder", "norm"}
    _, variables, _ = model.parts.adapter.build(jax.random.key(0))
    assert set(variables) == {"batch_stats.norm.mean", "batch_stats.norm.var"}
    np.testing.assert_array_equal(variables["batch_stats.norm.var"], 1)
    train(model.run(mesh="data=2", steps=1), tmp_path / "out", cache)
    assert losses(tmp_path / "out", "size")[0] == pytest.approx(1, abs=1e-3)


def test_a_loss_that_is_not_finite_stops_with_its_batch(tmp_path: Path, cache: Path) -> None:
    def batches(step: int) -> dict[str, np.ndarray]:
        return {**rows(step), "y": np.full((16, 128), np.nan if step == 1 else 0.0, np.float32)}

    with pytest.raises(
        TrainingError, match=r"step 2(.|\n)*--faults.bad-step skip, which leaves its update out"
    ):
        train(mw.wrap(W, squares, batches).run(mesh="data=2", steps=4), tmp_path / "out", cache)
    saved_batch = np.load(tmp_path / "out" / "evidence-step-2" / "batch-process-0.npz")
    assert np.isnan(saved_batch["y"]).all() and saved_batch["x"].shape == (16, 64)


def test_a_batch_of_no_weight_stops_instead_of_training_on_a_loss_of_0(
    tmp_path: Path, cache: Path
) -> None:
    def masked(params: Any, batch: Any) -> Any:
        each = ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(1)
        weight = batch["mask"].sum()
        return (each * batch["mask"]).sum() / jnp.maximum(weight, 1), {"weight": weight}

    def batches(step: int) -> dict[str, np.ndarray]:
        mask = np.zeros(16, np.float32)
        mask[:8] = step != 1  # The second device has none in any step, which is fine.
        return {**rows(step), "mask": mask}

    out = tmp_path / "out"
    with pytest.raises(
        TrainingError,
        match=r"step 2(.|\n)*total weight of its batch is 0(.|\n)*the state before it",
    ):
        train(mw.wrap(W, masked, batches).run(mesh="data=2", steps=4), out, cache)
    train(mw.wrap(W, masked, batches).run(mesh="data=2", steps=1), tmp_path / "first", cache)
    assert losses(out)[0] == losses(tmp_path / "first")[0] > 0


def test_batches_of_another_shape_are_refused(tmp_path: Path, cache: Path) -> None:
    run = mw.wrap(W, squares, lambda step: rows(step, 16 if step < 1 else 8)).run(
        mesh="data=2", steps=3
    )
    with pytest.raises(DataError, match=r"float32\[8, 64\]"):
        train(run, tmp_path / "out", cache)


class Counted:
    """Iterator with a state, as Grain's."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> "Counted":
        return Counted()

    def __next__(self) -> Any:
        self.step += 1
        return rows(self.step)

    def get_state(self) -> dict[str, int]:
        return {"step": self.step}

    def set_state(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize(
    "data", [rows, [rows(i) for i in range(3)], Counted()], ids=["steps", "list", "state"]
)
def test_resuming_continues_the_data(data: Any, tmp_path: Path, cache: Path) -> None:
    model = mw.wrap(W, squares, data)
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for number, last in enumerate(steps):
            run = model.run(mesh="data=2", steps=last, lr_schedule="constant")
            train(run, tmp_path / name, cache, start="resume" if number else "fresh")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_generator_is_trained_on_and_not_resumed(tmp_path: Path, cache: Path) -> None:
    run = mw.wrap(W, squares, (rows(i) for i in range(3))).run(mesh="data=2", steps=2)
    train(run, tmp_path / "out", cache)
    with pytest.raises(DataError, match="read once"):
        train(dataclasses.replace(run, training=dataclasses.replace(run.training, steps=3)), tmp_path / "out", cache,
              start="resume")  # fmt: skip


def test_a_weight_makes_means_of_unequal_parts_those_of_the_whole(
    tmp_path: Path, cache: Path
) -> None:
    def masked(params: Any, batch: Any) -> Any:
        each = ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(1)
        mask = (batch["x"][:, 0] > 0).astype(jnp.float32)
        return (each * mask).sum() / mask.sum(), {"weight": mask.sum(), "chosen": mask.sum()}

    # A held-out batch is evaluated in parts no larger than a microbatch of training.
    model, results = mw.wrap(W, masked, lambda step: rows(step + 7, 32), held_out=[rows(3, 64)]), []
    for mesh, microbatches in (("data=1", 1), ("data=2", 2)):
        out, run = tmp_path / mesh, model.run(mesh=mesh, steps=3, microbatches=microbatches)
        assert evaluation_parts(place_on_devices(run, build_mesh(run.mesh))) == (
            4 if microbatches == 2 else 1
        )
        train(run, out, cache)
        results.append(losses(out) + losses(out, "gradient norm") + losses(out, "held-out loss"))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


def test_the_state_of_an_equinox_module_is_averaged_and_restored(
    tmp_path: Path, cache: Path
) -> None:
    import equinox as eqx

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        out: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="ema")
            self.out = eqx.nn.Linear(64, 128, key=key)

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x, state = self.norm(x, state)
            return self.out(x), state

    def loss(model: Any, state: Any, batch: Any) -> Any:
        y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            batch["x"], state
        )
        return jnp.mean((y - batch["y"]) ** 2), state

    model = mw.wrap(eqx.nn.make_with_state(Net), loss, rows, held_out=[rows(99)], local_batch=True)
    run = model.run(mesh="data=2", steps=2, save_every=1, max_to_keep=9)
    train(run, tmp_path / "out", cache)
    before = losses(tmp_path / "out", "held-out loss")
    trained: Any = model.restore(tmp_path / "out")
    assert trained[0].out.weight.shape == (128, 64) and trained[0].norm.inference
    names = [name for name in saved(tmp_path / "out", 1) if name.startswith("variables")]
    assert names and any(
        saved(tmp_path / "out", 1)[n] != saved(tmp_path / "out", 2)[n] for n in names
    )
    train(run, tmp_path / "out", cache, start=1)
    assert losses(tmp_path / "out", "held-out loss") == before


def test_random_numbers_that_could_be_either_are_refused(tmp_path: Path, cache: Path) -> None:
    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        first, second = jax.random.split(key)  # two keys, and two examples on each of eight devices
        keys = jax.random.split(first, batch["x"].shape[0])
        noise = jax.vmap(lambda k: jax.random.normal(k, (64,)))(keys)
        return squares(
            params, {**batch, "x": batch["x"] + noise + jax.random.normal(second, (64,))}
        )

    model = mw.wrap(W, loss, rows)
    with pytest.raises(ConfigError, match="may belong"):
        train(model.run(mesh="data=8", steps=1), tmp_path / "out", cache)
    outs = []
    for mesh in ("data=1", "data=2"):
        train(model.run(mesh=mesh, steps=2), tmp_path / mesh, cache)
        outs.append(losses(tmp_path / mesh))
    np.testing.assert_allclose(outs[1], outs[0], rtol=1e-6)


def transposed_noise(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Draws [64, examples], and by chance also the shape that this would have were 64 the batch."""
    examples = batch["x"].shape[0]
    noise = jax.random.normal(key, (64, examples)).T
    shared = jax.random.normal(key, (128, examples // 2)).sum()
    return squares(params, {**batch, "x": batch["x"] + noise + shared})


def noise_of_a_loop(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Draws a number for each example in a Python loop."""
    noise = []
    for _ in range(batch["x"].shape[0]):
        key, now = jax.random.split(key)
        noise.append(jax.random.normal(now))
    return squares(params, {**batch, "x": batch["x"] + jnp.stack(noise)[:, None]})


def noise_of_an_index(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Draws a number for each example with a key that its index makes."""
    indices = jnp.arange(batch["x"].shape[0])
    noise = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(indices)
    return squares(params, {**batch, "x": batch["x"] + noise[:, None]})


@pytest.mark.parametrize(
    ("loss", "truth"),
    [
        (transposed_noise, "not the first dimension"),
        (noise_of_a_loop, "for one of twice the size"),
        (noise_of_an_index, "counts its examples from zero"),
    ],
)
def test_random_numbers_that_would_depend_on_the_mesh_are_refused(
    tmp_path: Path, cache: Path, loss: Any, truth: str
) -> None:
    model = mw.wrap(W, loss, rows)
    with pytest.raises(ConfigError, match=truth):
        train(model.run(mesh="data=2", steps=1), tmp_path / "out", cache)
    train(model.run(mesh="data=1", steps=1), tmp_path / "one", cache)


def test_a_run_file_of_a_model_without_a_name_asks_for_the_model(
    tmp_path: Path, cache: Path
) -> None:
    model = mw.wrap(W, squares, rows, held_out=[rows(1)])
    train(model.run(mesh="data=2", steps=1), tmp_path / "out", cache)
    with pytest.raises(ConfigError, match="not a top-level object"):
        mw.evaluate(tmp_path / "out", cache=cache)
    evaluation: Any = mw.evaluate(tmp_path / "out", model=model, cache=cache)
    assert evaluation.loss == losses(tmp_path / "out", "held-out loss")[0]
    with pytest.raises(ConfigError, match="cannot import it"):
        mw.prove(model.run(mesh="fsdp=8"), on="v5p:2x2x2")


def test_the_census_has_the_collectives_that_the_docs_state() -> None:
    run = mw.wrap(W, squares, rows).run(mesh="data=2,fsdp=4", remat="none")
    device_run = place_on_devices(run, build_mesh(run.mesh, jax.devices()))  # type: ignore[arg-type]
    census = census_of_train_step(device_run)
    size = 64 * 128 * 4
    entries = [e for e in census.ledger if e.total >= size / 8]
    sent = {(e.kind, e.axes_label, e.total) for e in entries}
    assert {("all-gather", "fsdp", size), ("reduce-scatter", "fsdp", size)} <= sent
    assert ("all-reduce", "data", size / 4) in sent and not census.findings


@pytest.mark.parametrize(
    ("layout", "remat"), [("fsdp", "auto"), ("zero1", "full"), ("fsdp", "none")]
)
def test_planned_traffic_is_the_compiled_programs(layout: str, remat: Any) -> None:
    """Only `full` gathers again for the backward pass, which reads the weight of the second layer."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return squares({"w": params["up"]}, {**batch, "x": jnp.tanh(batch["x"] @ params["in"])})

    params = {"in": jnp.zeros((64, 64)), "up": jnp.zeros((64, 128))}
    run = mw.wrap(params, loss, rows).run(
        mesh="data=2,fsdp=4", remat=remat, layout=layout, fsdp_min_size=8000
    )
    device_run = place_on_devices(run, build_mesh(run.mesh, jax.devices()))  # type: ignore[arg-type]
    planned, compiled = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for m in movements(device_run, work_of(device_run), recomputed_roles(remat)):
        planned[m.axes] += int(m.payload * m.times)
    for entry in census_of_train_step(device_run).ledger:
        compiled[tuple(entry.axes or ())] += entry.total
    assert planned["fsdp",] == (3 if remat == "full" else 2) * 64 * 128 * 4
    assert all(compiled[axes] == pytest.approx(n, abs=256) for axes, n in planned.items()), compiled


def test_the_compiler_sums_activations_over_tensor_and_gathers_no_parameter() -> None:
    params = {"up": np.zeros((64, 256), np.float32), "down": np.zeros((256, 128), np.float32)}
    rules = {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")}

    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((jax.nn.relu(b["x"] @ p["up"]) @ p["down"] - b["y"]) ** 2)

    run = mw.wrap(params, loss, rows, rules=rules).run(mesh="data=2,fsdp=2,tensor=2")
    census = census_of_train_step(place_on_devices(run, build_mesh(run.mesh, jax.devices())))  # type: ignore[arg-type]
    over_tensor = [e for e in census.ledger if "tensor" in e.axes_label and e.total > 256]
    # The output of the pair, 4 examples of a device in float32; the input of the first needs no gradient.
    assert {(e.kind, e.total) for e in over_tensor} == {("all-reduce", 4 * 128 * 4)}
    gathers = {e.total for e in census.ledger if (e.kind, e.axes_label) == ("all-gather", "fsdp")}
    assert gathers == {64 * 256 * 4 / 2, 256 * 128 * 4 / 2}


def test_plan_counts_matmuls_parameters_and_what_is_kept() -> None:
    model = mw.wrap(W, squares, rows)
    assert 16 * training_flops_per_token(model, 1) == 3 * 2 * 16 * 64 * 128
    plans = mw.plan(model.run(), on="v5p:2x2x1")
    assert {str(plan.mesh) for plan in plans} == {"data=4", "data=2,fsdp=2", "fsdp=4"}
    fsdp = next(plan for plan in plans if str(plan.mesh) == "fsdp=4")
    assert fsdp.estimate.memory["parameters"] == 64 * 128 * 4 / 4
    assert fsdp.estimate.memory["optimizer state"] == pytest.approx(2 * 64 * 128 * 4 / 4, abs=8)
    with pytest.raises(ConfigError, match="every mesh of 4 devices is refused"):
        mw.plan(mw.wrap(W, squares, lambda step: rows(step, 6)).run(), on="v5p:2x2x1")


def test_a_plan_has_more_microbatches_where_one_does_not_fit() -> None:
    """2^20 x 2^18 hidden values of 4 bytes, kept twice: 256 GiB on each of eight devices of 95 GiB."""

    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(b["x"] @ p["up"]) @ p["down"] - b["y"]) ** 2)

    def params(key: jax.Array) -> Any:
        return {
            "up": jax.random.normal(key, (8, 2**18)),
            "down": jax.random.normal(key, (2**18, 8)),
        }

    batch = {name: np.ones((2**20, 8), np.float32) for name in "xy"}
    best = mw.plan(mw.wrap(params, loss, lambda step: batch).run(), on="v5p:2x2x2")[0]
    assert best.run.training.microbatches == 4
    assert best.estimate.memory["activations"] == pytest.approx(
        2 ** (20 + 18 + 2 - 3 - 2) * 2, rel=1e-3
    )


def test_a_plan_has_reasons_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, words = (
        tmp_path / "page.html",
        ["plan", f"{EXAMPLES / 'pytree.py'}:pytree", "--on", "v5p:2x2x2"],
    )
    assert cli([*words, "--why", "data=2,fsdp=2,tensor=2", "--html", str(page)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "examples/s" in shown and "tokens/s" not in shown and "mesh axes: data on ICI" in shown
    assert "gathered weights" in page.read_text() and "tokens/s" not in page.read_text()
    with pytest.raises(ConfigError, match=r"8 devices = 2 \* 3 \+ 2"):
        mw.plan(example("pytree").run(mesh="tensor=3"), on="v5p:2x2x2")


def test_a_proof_writes_what_is_asked_for(tmp_path: Path) -> None:
    page, census = tmp_path / "page.html", tmp_path / "census.json"
    words = ["prove", f"{EXAMPLES / 'pytree.py'}:pytree", "--mesh", "data=2,fsdp=2,tensor=2"]
    assert cli([*words, "--html", str(page), "--save", str(census)]) == 0
    assert "Communication ledger" in page.read_text()
    mesh = {
        axis: degree
        for axis, degree in json.loads(census.read_text())["mesh"].items()
        if degree > 1
    }
    assert mesh == {"data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(ConfigError, match="a wrapped model"):
        cli([*words, "--step", "evaluate"])


def test_a_plan_is_proved_by_the_compiler_of_the_machine() -> None:
    pytest.importorskip("libtpu")
    run = example("pytree").run(mesh="data=2,fsdp=2,tensor=2")
    proof = mw.prove(run, on="v5p:2x2x2")
    assert proof.fits, proof.refused
    kinds = {(entry["kind"], entry["axes"]) for entry in proof.census["traffic"]}
    assert ("all-gather", "fsdp") in kinds and any(
        kind == "all-reduce" and "tensor" in axes for kind, axes in kinds
    )
    assert (
        proof.census["memory"]["categories"]["parameters"]
        == proof.plan.estimate.memory["parameters"]
    )


def test_the_page_counts_the_lines_of_the_edited_script() -> None:
    edit = (EXAMPLES / "train_rnn.ed").read_text(encoding="utf-8")
    ranges = re.findall(r"^(\d+)(?:,(\d+))?c$", edit, re.MULTILINE)
    removed = sum(int(last or first) - int(first) + 1 for first, last in ranges)
    added = len(edit.splitlines()) - 2 * len(
        ranges
    )  # each change has a line of its own before and after
    page = " ".join((EXAMPLES.parent / "wrap.md").read_text(encoding="utf-8").split())
    assert f"{removed} are removed" in page and f"{added} are added" in page


def test_a_wrapped_run_is_written_by_name() -> None:
    run = run_of("pytree", "fsdp=8")
    run = dataclasses.replace(run, model=run.model.named())  # type: ignore[attr-defined]
    document = json.loads(json.dumps(run_to_dict(run)))
    assert document["model"]["name"].endswith("pytree.py:model")
    assert run_from_dict(document, "run.json").model.parts is run.model.parts  # type: ignore[attr-defined]
