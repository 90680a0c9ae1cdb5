"""The chapters run from top to bottom and print what is printed in them; the notebooks' numbers are among it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LADDER = ROOT / "docs" / "ladder"
CHAPTERS = sorted(
    (path.stem for path in LADDER.glob("[0-9]*.py")), key=lambda name: int(name.split("_")[0])
)

# Printed by the notebooks that the ladder grew out of.
QUOTED = {
    "11_experts": ["nothing dropped: True", "equal to one device: True"],
    "12_context": ["in order equal to one device: True", "zigzag   equal to one device: True"],
    "13_plan_and_proof": ["findings: 0 unread instructions: 0"],
    "9_pipeline": ["equal gradients: True", "11 x 2,048 bytes"],
    "1_arrays": ["partitionable False: communicates True", "partitionable True: communicates False"],
    "2_collectives": [
        "[22 20 12 17]", "[3 0 1 2]", "at rest (16, 128) in use (64, 128)", "standard deviation 1.0000",
        "Device 0: i-axis=0, j-axis=0", "Device 7: i-axis=3, j-axis=1", "local shapes (48, 64) (64, 64) (64,)",
        "Device 0: key=[1797259609 2579123966]", "Device 2: key=[ 928981903 3453687069]",
        "Device 4: key=[4146024105 2718843009]", "Device 7: key=[2467461003 3840466878]",
    ],
    "3_data_parallel": [
        "input_dense.bias     w[F]            P(None,)", "input_dense.kernel   w[D/data, F]    P('data', None)",
        "output_dense.bias    w[V]            P(None,)", "output_dense.kernel  w[F/data, V]    P('data', None)",
        "equal losses: True",
    ],
    "4_memory": [
        "weights whole  : 224 MiB", "gradient of the inputs: 192 MiB", "1248 96 96 96 96 96 96 96",
        "448 64 64 64 64 64 64 64",
    ],
    "5_roofline": ["T    16, n   1: FLOPs 0.033, HBM 0.341", "146 FLOPs for each", "tokens 166 -> 332"],
    "10_precision": ["a thousand times in bfloat16: 256", "from 0.0078125 = 2^-7", "u16[128,256], 458,752 bytes sent"],
    "6_tensor_parallel": ["every tensor equal True", "below 0.0962: True", "1.44 GiB; kept twice 2.87 GiB"],
    "7_fsdp_x_tensor": [
        "weight gathers by hand: 2","shard_map equal to unsharded: True", "jit       equal to unsharded: True",
    ],
    "8_spmd_step": ["the padding is still zero: True", "is stored as (28, 50)", "findings: 0"],
}  # fmt: skip
TOY_LOSSES = [
    3.719463, 1.6977012, 0.8638048, 0.5450409, 0.39282578, 0.30563444, 0.24965373, 0.21083269, 0.18234465, 0.16059524,
]  # fmt: skip

_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def page_of(chapter: str) -> str:
    return (LADDER / f"{chapter}.md").read_text(encoding="utf-8")


def printed(chapter: str) -> str:
    done = subprocess.run(
        [sys.executable, LADDER / "build.py", "--print", chapter],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def settled(page: str) -> list[str]:
    """Lines of a page but for the blocks whose figures may differ."""
    return (
        re.sub(r"<!-- figures of the machine.*?-->\n\n```text.*?```", "", page, flags=re.S)
        .strip()
        .splitlines()
    )


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_prints_what_is_printed_in_it(chapter: str) -> None:
    """To the letter, numbers within one part in a thousand: `python docs/ladder/build.py` writes the pages anew."""
    now, then = settled(printed(chapter)), settled(page_of(chapter))
    assert len(now) == len(then)
    for new, old in zip(now, then, strict=True):
        assert _NUMBER.sub("#", new) == _NUMBER.sub("#", old)
        for a, b in zip(_NUMBER.findall(new), _NUMBER.findall(old), strict=True):
            assert float(a) == pytest.approx(float(b), rel=1e-3, abs=2e-4), f"{new}\n{old}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_numbers_of_the_notebooks(chapter: str) -> None:
    page = page_of(chapter)
    assert [text for text in QUOTED[chapter] if text not in page] == []
    assert "the census" in page.lower()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_a_lesson(chapter: str) -> None:
    """Question, arithmetic, pictures, failure, three exercises with folded answers that assert, and a summary."""
    page, source = page_of(chapter), (LADDER / f"{chapter}.py").read_text(encoding="utf-8")
    for part in (
        "**The question.**",
        "## The arithmetic",
        "What goes wrong",
        "## Exercises",
        "## Summary",
        "](img/",
    ):
        assert part in page or part.lower() in page, part
    assert [f"**{n}.**" in page for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert page.count("<details") == page.count("</details>") == 3
    answers = [cell for cell in source.split("# %%") if cell.startswith(" answer")]
    assert len(answers) == 3 and all(
        "\nassert " in cell or "\n    assert " in cell for cell in answers
    )


def test_the_toy_loss_falls_as_it_did() -> None:
    """Within 2e-4: the notebook's digits come from a TPU."""
    block = next(
        b
        for b in re.findall(r"```text\n(.*?)```", page_of("6_tensor_parallel"), re.S)
        if b.count("\n") == 10
    )
    assert [float(line) for line in block.split()] == pytest.approx(TOY_LOSSES, abs=2e-4)


def test_every_picture_of_the_pages_is_there() -> None:
    for page in LADDER.glob("[0-9]*.md"):
        for name in re.findall(r"\]\(img/([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (LADDER / "img" / name).is_file(), f"{page.name}: {name}"
