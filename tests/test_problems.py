"""The problems of the ladder: references are right, typical mistakes are named, and the command says so."""

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PROBLEMS = Path(__file__).parents[1] / "docs" / "ladder" / "problems"
NUMBERS = [int(file.name[:2]) for file in sorted(PROBLEMS.glob("[0-9]*.py"))]
KINDS = {"result", "gradient", "bytes", "memory", "time"}


@pytest.fixture(scope="module")
def check() -> Any:
    """The module of the command; its folder is on the path as when it is run."""
    sys.path.insert(0, str(PROBLEMS))
    import check  # type: ignore[import-not-found]

    yield check
    sys.path.remove(str(PROBLEMS))
    for name in ("check", "grading"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def grading(check: Any) -> ModuleType:
    return check.grading


def test_a_problem_says_everything_but_its_answer(grading: Any, check: Any) -> None:
    """Statement, stub, prediction, arithmetic, three hints, picture; in another file a reference and four mistakes."""
    assert list(range(1, 21)) == NUMBERS
    for number in NUMBERS:
        found = grading.task(number)
        source = found.file.read_text(encoding="utf-8")
        assert "solutions" not in source and len(found.statement) > 100, found.title
        assert found.module.PREDICTION is None and inspect.getdoc(found.module.answer)
        with pytest.raises(NotImplementedError):
            found.module.answer(*inspect.signature(found.module.answer).parameters)
        assert (PROBLEMS.parent / f"{found.problem.lesson}.md").is_file()
        assert (
            len(set(found.problem.hints)) == 3
            and found.problem.because
            and check.arithmetic(found) > 0
        )
        kinds = [mistake.kind for mistake in found.mistakes.values()]
        assert len(kinds) >= 4 and set(kinds) <= KINDS and len(set(kinds)) >= 2, found.title
        assert len({mistake.explanation for mistake in found.mistakes.values()}) == len(kinds)
    lessons = [int(grading.task(number).problem.lesson.partition("_")[0]) for number in NUMBERS]
    assert lessons == sorted(lessons)


def test_the_page_shows_the_problems_as_they_are(check: Any) -> None:
    """`python docs/ladder/problems/check.py --pages` writes table and pictures anew."""
    assert check.table_of_problems() in (PROBLEMS / "index.md").read_text(encoding="utf-8")
    drawn = check.drawings()
    assert drawn == {
        file.name: file.read_text(encoding="utf-8") for file in (PROBLEMS / "img").glob("*.svg")
    }
    assert {name[:2] for name in drawn} == {f"{number:02}" for number in NUMBERS}


def test_the_command_checks_an_answer(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[int, str]:
        code = check.main(list(words))
        return code, " ".join(capsys.readouterr().out.split())

    mine = tmp_path / "mine.py"
    head = "from meshwright.comm.collectives import all_reduce\n"
    mine.write_text(
        f"{head}PREDICTION = None\ndef answer(x):\n    return all_reduce(x.mean(0), ('data',))\n"
    )
    code, text = run("2", str(mine))
    assert (
        code == 1 and "WRONG RESULT" in text and "8 times too large" in text and "--hint 1" in text
    )
    mine.write_text(mine.read_text().replace("('data',))", "('data',)) / 8"))
    code, text = run("2", str(mine))
    assert (
        code == 0
        and "RIGHT" in text
        and "once PREDICTION has a number" in text
        and "predicted v5p" not in text
    )
    mine.write_text(mine.read_text().replace("None", "1.8"))
    code, text = run("2", str(mine))
    assert (
        code == 0
        and "sent over data 1.8 MB 1.8 MB 1.8 MB" in text
        and "and it is 1.835: close" in text
    )
    assert "predicted v5p:2x2x2" in text and "predicted h100:8" in text and "compiled for" in text
    mine.write_text("def answer(x):\n    return x + nobody\n")
    code, text = run("2", str(mine))
    assert code == 1 and "NameError at mine.py:2, with B=16 D=6: return x + nobody" in text
    mine.write_text("PREDICTION = '1.8 MB'\ndef answer(x):\n    return x\n")
    code, text = run("2", str(mine))
    assert code == 1 and "PREDICTION is '1.8 MB': write a number" in text
    assert run("2")[1].endswith("Read it with: check.py 2 --read")
    assert "all_reduce" in run("2", "--hint", "3")[1] and "┌" in run("2", "--read")[1]
    assert check.main(["21"]) == 2 and "they are 1 to 20" in capsys.readouterr().err
    assert check.main(["2", str(tmp_path / "none.py")]) == 2


AIM = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3)
SPLIT = np.split(AIM, 4)


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        ([AIM * 4] * 4, [AIM] * 4, "4 times too large: a sum over `data`"),
        ([AIM / 4] * 4, [AIM] * 4, "4 times too small"),
        ([-AIM] * 4, [AIM] * 4, "-1 times what it should be"),
        (
            [AIM * (i == 2) for i in range(4)],
            [AIM] * 4,
            "own addend of `y`; only their sum over `data`",
        ),
        ([AIM + i - 1.5 for i in range(4)], [AIM] * 4, "only their mean over `data`"),
        (SPLIT[-1:] + SPLIT[:-1], SPLIT, "shifted by 1 in the ring"),
        (
            [AIM[[1, 0, 3, 2]]] * 4,
            [AIM] * 4,
            "right blocks in the wrong order: device 3 has them as [1, 0, 3, 2]",
        ),
        ([SPLIT[0], *SPLIT[:0:-1]], SPLIT, "right on devices 0, 2 and wrong on 1, 3"),
        ([AIM * np.nan] * 4, [AIM] * 4, "NaN or infinite on devices 0 to 3"),
        ([AIM * 0] * 4, [AIM] * 4, "zero everywhere"),
    ],
)
def test_a_wrong_result_is_described_by_its_pattern(
    grading: Any, got: Any, want: Any, words: str
) -> None:
    blocks = grading.Blocks("y", got, want, 1e-4)
    assert blocks.wrong_devices
    assert words in " ".join(grading.patterns(blocks, {"data": 4}))


@pytest.mark.parametrize("number", NUMBERS)
def test_references_are_right_and_mistakes_are_named(grading: Any, check: Any, number: int) -> None:
    """The reference and the best known pass; the arithmetic is the program's; each mistake gets its explanation."""
    found = grading.task(number)
    verdict = grading.grade(found, found.solution.reference)
    assert verdict.kind == "right" and not verdict.lines, verdict.lines
    quantity = found.problem.predict.partition(": ")[0]
    assert verdict.reference.quantity(quantity) == pytest.approx(check.arithmetic(found), rel=0.02)
    assert grading.grade(found, found.best).kind == "right"
    for name, mistake in found.mistakes.items():
        verdict = grading.grade(found, mistake)
        assert verdict.kind == mistake.kind, (name, verdict.lines)
        assert mistake.explanation in verdict.lines, (name, verdict.lines)


_FSDP = """
import jax, jax.numpy as jnp
from meshwright.comm.collectives import all_gather, all_reduce
F = ("fsdp",)
def answer(x, w):
    def loss(w):
        h = x
        for layer in all_gather(w, F, 1):
            h = jnp.tanh(h @ layer)
        return (h**2).mean()
    loss, dw = jax.value_and_grad(loss)(w)
    return all_reduce(loss, F) / 8, dw / 8
"""
_RING = """
import jax, jax.numpy as jnp
from meshwright.comm.collectives import ring_shift
def answer(q, k, v):
    i, n = jax.lax.axis_index("context"), q.shape[0]
    rows = i * n + jnp.arange(n)
    m, s, o = jnp.full(n, -1e30), jnp.zeros(n), jnp.zeros_like(q)
    for hop in range(8):
        cols = ((i - hop) % 8) * n + jnp.arange(n)
        scores = jnp.where(rows[:, None] >= cols, q @ k.T / q.shape[1] ** 0.5, -1e30)
        new = jnp.maximum(m, scores.max(-1))
        p, old = jnp.exp(scores - new[:, None]), jnp.exp(m - new)
        m, s, o = new, s * old + p.sum(-1), o * old[:, None] + p @ v
        k, v = ring_shift(k, "context", 1), ring_shift(v, "context", 1)
    return o / s[:, None]
"""


_SOFTMAX = """
import jax, jax.numpy as jnp
def answer(logits):
    e = jnp.exp(logits)
    return e / jax.lax.psum(e.sum(-1, keepdims=True), "tensor")
"""
_PMAX = """
import jax, jax.numpy as jnp
def answer(logits):
    e = jnp.exp(logits - jax.lax.pmax(logits.max(-1, keepdims=True), "tensor"))
    return e / jax.lax.psum(e.sum(-1, keepdims=True), "tensor")
"""
_LOSS = """
import jax, jax.numpy as jnp
from meshwright.comm.collectives import all_reduce, axis_index
T = ("tensor",)
@jax.custom_vjp
def f(x):
    return x
f.defvjp(lambda x: (x, None), lambda _, g: (all_reduce(g, T),))
def answer(h, w, labels):
    logits = f(h) @ w.T
    lse = jnp.log(all_reduce(jnp.exp(logits).sum(-1), T))
    own = labels - axis_index(T) * w.shape[0]
    picked = jnp.take_along_axis(logits, jnp.clip(own, 0, w.shape[0] - 1)[:, None], 1)[:, 0]
    return (lse - all_reduce(jnp.where((own >= 0) & (own < w.shape[0]), picked, 0), T)).mean()
"""
_GATHER = """
from meshwright.comm.collectives import all_gather
def answer(x):
    return all_gather(x, ("ring",), 0)
"""
_TILE = """
import jax.numpy as jnp
from jax.experimental import pallas as pl
def kernel(x_ref, w_ref, y_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        y_ref[...] = jnp.zeros_like(y_ref)
    y_ref[...] += x_ref[...] @ w_ref[...]
def answer():
    return (2048, 1024, 128), kernel
"""
_MEAN_OF_A_SHAPE = """
import jax.numpy as jnp
from meshwright.comm.collectives import all_reduce
def answer(x):
    if x.shape{shape}:
        return all_reduce(x.mean(0), ("data",)) / 8
    return {otherwise}
"""
_SCHEDULE = """
def answer(stages, microbatches):
    M = microbatches if microbatches == 8 else 1
    order = [("F", m) for m in range(M)] + [("B", m) for m in range(M)]
    return [list(order) for _ in range(stages)]
"""
_MORE_KEPT = """
def answer(stages, microbatches):
    orders = []
    for s in range(stages):
        ahead = min(stages - s + 1, microbatches)
        order = [("F", m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(("B", m))
            if m + ahead < microbatches:
                order.append(("F", m + ahead))
        orders.append(order)
    return orders
"""


@pytest.mark.parametrize(
    ("number", "source", "kind", "words"),
    [
        (
            2,
            "import jax\ndef answer(x):\n    return jax.lax.pmean(x.mean(0), 'data')",
            "gradient",
            "The derivative of psum",
        ),
        (6, _FSDP, "memory", "f32[8,4096,4096] has the shape of the unsharded `w`"),
        (6, _FSDP.replace(" / 8, dw / 8", " / 8, dw"), "gradient", "`dw` is 8 times too large"),
        (19, _RING, "memory", "jax.checkpoint computes them again"),
        (19, _RING.replace("(i - hop)", "(i + hop)"), "result", "Keys come from the left"),
        (3, _SOFTMAX, "result", "`logits` multiplied by 200"),
        (3, _PMAX, "error", "jax.lax.stop_gradient(x)"),
        (12, _LOSS, "result", "`h` multiplied by 200"),
        (4, _GATHER, "limits", "asks for collective-permute alone, and `answer` has all-gather"),
        (9, _TILE, "memory", "19.9 MB, the reference 16.8 MB, and 16.8 MB are allowed"),
        (
            2,
            _MEAN_OF_A_SHAPE.format(shape=" == (2, 6)", otherwise="x[0]"),
            "result",
            "with B=16 D=6 the answer is right",
        ),
        (
            2,
            _MEAN_OF_A_SHAPE.format(shape="[0] < 9", otherwise="nobody"),
            "error",
            "with the full sizes",
        ),
        (
            2,
            _MEAN_OF_A_SHAPE.format(shape="[0] < 9", otherwise="x[0]"),
            "impossible",
            "sends 0.0 MB",
        ),
        (16, _SCHEDULE, "result", "with P=4 M=8 B=2 the answer is right"),
        (16, _MORE_KEPT, "memory", "are allowed"),
    ],
    ids=[
        "pmean",
        "all layers gathered",
        "summed gradient",
        "scores kept",
        "keys from the right",
        "softmax without a maximum",
        "pmax without stop_gradient",
        "loss without a maximum",
        "a gather where it is forbidden",
        "a tile beyond the memory",
        "right for one size",
        "fails at the full size",
        "computes nothing at the full size",
        "a schedule of one microbatch",
        "one input too many",
    ],
)
def test_answers_written_in_another_way_are_understood(
    grading: Any, tmp_path: Path, number: int, source: str, kind: str, words: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(source)
    verdict = grading.grade(grading.task(number), grading.load(mine).answer)
    assert verdict.kind == kind and words in " ".join(verdict.lines), verdict.lines
