"""Which tensor of a bad step was first: rules on the figures of a step, and the step that is taken again."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

import meshwright as mw
from meshwright.config import Training
from meshwright.data.batch import Epochs, ramp_of
from meshwright.reporters.health import HealthRecord, Series
from meshwright.sharding.params import named_leaves
from meshwright.step.health import GRADIENT, PARAMETER, RESIDUAL
from meshwright.trainer.explain_step import _tensor_line
from meshwright.trainer.first_tensor import Alarm, Watch, name_first
from meshwright.trainer.prepare import PreparedRun, prepare_run

SERIES = (
    Series(GRADIENT, "blocks.query", (0, 1, 2)),
    Series(GRADIENT, "embed", ()),
    Series(PARAMETER, "blocks.query", (0, 1, 2)),
    Series(PARAMETER, "embed", ()),
    Series(RESIDUAL, "blocks", (0, 1, 2)),
)
PARAMETERS = slice(4, 8)
STEPS = 60


class Story:
    """Steps of a run whose figures are drawn, and what a watch says of them."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.rng = np.random.default_rng(0)
        self.step = 0
        self.bits = np.array([1, 2], np.uint32)
        for _ in range(STEPS):
            assert self.next() is None

    def next(
        self,
        change: dict[int, float] | None = None,
        batch: float | None = None,
        norm: float = 1.0,
    ) -> Alarm | None:
        self.step += 1
        values = np.exp(self.rng.normal(0, 0.1, 11))
        values[PARAMETERS] = 5 + self.step / 1000
        for position, factor in (change or {}).items():
            values[position] *= factor
        tokens = float(self.step) if batch is None else batch
        parts = np.array([[tokens, 2.0 * self.step], [tokens, 3.0 * self.step]])
        if batch is not None:
            parts[:, 0] = batch
        bits = np.stack([self.bits, self.bits + 3])
        self.bits = bits[1].copy()
        record = HealthRecord(SERIES, values, bits, ("layer 1, query", "mu.embed"), parts)
        return self.watch.look(self.step, 2.0, norm, record, bool(np.isfinite(values).all()))


@pytest.mark.parametrize(
    ("samples", "earlier", "step", "repeats"),
    [
        (1000.0, 1, 2, True),
        (1000.0, 1, 125, True),
        (1000.0, 1, 126, False),  # 125 steps of 8 samples: the next epoch
        (1001.0, 125, 126, False),  # sample 1001 of step 126 is the first of the next epoch
        (4.0, 1, 2, False),  # a step reads the text twice
        (8.0, 1, 2, False),
    ],
)
def test_a_batch_may_come_again_in_another_epoch(
    samples: float, earlier: int, step: int, repeats: bool
) -> None:
    watch = Watch(Epochs(ramp_of(Training(batch=8)), samples))
    values = np.ones(11)
    alarms = {}
    for number in (earlier, step):
        record = HealthRecord(SERIES, values, None, (), np.ones((2, 2)))
        alarms[number] = watch.look(number, 2.0, 1.0, record, True)
    assert alarms[earlier] is None
    assert (alarms[step] is not None) == repeats


def test_a_short_source_of_a_mixture_ends_an_epoch(tmp_path: Path) -> None:
    """Two sources of equal weight: the shorter begins again after twice its own samples."""
    for name, words in (("long", 4000), ("short", 400)):
        (tmp_path / f"{name}.txt").write_text("abc " * words)
    paths = [str(tmp_path / "long.txt"), str(tmp_path / "short.txt")]
    run = mw.recipe("tiny", mesh="data=8", paths=paths, tokenizer="bytes", batch=8, steps=4)
    prepared = prepare_run(run, cache=tmp_path / "cache")
    assert isinstance(prepared, PreparedRun)
    epochs = prepared.epochs()
    assert epochs.samples == pytest.approx(2 * min(len(part) for part in prepared.train))
    assert len(prepared.train) == 2


def test_a_clean_story_has_no_alarm() -> None:
    story = Story()
    assert [story.next() for _ in range(500)] == [None] * 500


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({1: 50.0}, "gradient norm of layer 1, query"),
        ({3: np.nan}, "gradient norm of embed"),
        ({9: 50.0, 10: 50.0, 0: 50.0}, "residual rms of layer 1"),
        # Gradients come down the layers.
        ({0: 40.0, 2: 40.0}, "gradient norm of layer 2, query"),
        ({5: 9.0, 0: 99.0}, "parameter norm of layer 1, query"),
        ({0: 0.0}, "gradient norm of layer 0, query"),
    ],
)
def test_the_first_figure_is_named(change: dict[int, float], expected: str) -> None:
    story = Story()
    alarm = story.next(change)
    assert alarm is not None and str(alarm.suspects[0]) == expected
    assert alarm.step == STEPS + 1


def test_of_a_norm_that_no_tensor_explains_the_closest_tensor_is_said() -> None:
    story = Story()
    alarm = story.next({2: 3.0}, norm=25.0)
    assert alarm is not None and alarm.suspects == ()
    line = _tensor_line(alarm, None)
    assert line.startswith("none: every tensor is within its own history; closest to its limit: ")
    assert "gradient norm of layer 2, query is " in line


def test_a_part_of_the_batch_that_was_read_before_is_named() -> None:
    story = Story()
    assert story.next(batch=-7.0) is None
    alarm = story.next(batch=-7.0)
    assert alarm is not None
    assert (
        alarm.reason == f"part 0 of 2 of its batch is that of step {STEPS + 1}: its data are stuck"
    )


@pytest.mark.parametrize(("index", "name"), [(0, "layer 1, query"), (1, "mu.embed")])
def test_a_bit_that_no_step_has_changed_is_named(index: int, name: str) -> None:
    story = Story()
    story.bits[index] ^= 1
    alarm = story.next()
    assert alarm is not None and [str(s) for s in alarm.suspects] == [f"values of {name}"]
    assert story.next() is None


def test_a_run_that_returns_to_a_checkpoint_reads_its_batches_again() -> None:
    story = Story()
    assert story.next(batch=-7.0) is None
    story.watch.rewind()
    assert story.next(batch=-7.0) is None


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("fsdp=2,tensor=2", {}),
        pytest.param("stage=2,data=2", {"microbatches": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_weight_that_is_not_a_number_is_found_in_the_step_again(
    mesh: str, changes: dict[str, int]
) -> None:
    """Layer 1's output projection is the first that makes numbers that are none; the gradients of all are."""
    run = tiny_run(MODELS["llama"], mesh, dropout=0.0, health=True, **changes)
    device_run = device_run_of(run)
    state = device_run.initial_state()
    target = named_leaves(state.params)["blocks.attention_out"]
    spoilt = np.array(target)
    spoilt[1, 0, 0, 0] = np.nan
    new = jax.device_put(spoilt, target.sharding)
    params = jax.tree.map(lambda x: new if x is target else x, state.params)
    state = dataclasses.replace(state, params=params)
    alarm = Alarm(1, "not finite", False, ())
    first = name_first(device_run, state, random_batch(device_run), alarm, None)
    assert first is not None and first.tensor == "layer 1, attention output"
    assert "not finite" in first.what and len(first.sequences) == 8


def test_a_bad_sequence_is_named() -> None:
    device_run = device_run_of(tiny_run(MODELS["llama"], "data=4", dropout=0.0, health=True))
    batch = random_batch(device_run)
    weights = np.array(batch.weights)
    weights[9] = np.nan
    spoilt = jax.device_put(weights, device_run.batch_sharding)
    batch = dataclasses.replace(batch, weights=spoilt)
    alarm = Alarm(1, "not finite", False, ())
    first = name_first(device_run, device_run.initial_state(), batch, alarm, None)
    assert first is not None and first.tensor == "weights of the batch"
    assert first.sequences == [9]
