"""Generation of text from Python."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.config import MeshShape
from meshwright.generation.generator import Decoding, Generated, Generator, OnText
from meshwright.generation.sampling import Sampling
from meshwright.generation.source import open_weights
from meshwright.hardware.mesh import enable_compilation_cache
from meshwright.storage.paths import default_cache_folder, path_of, place_of


def open_generator(
    source: str | Path,
    *,
    mesh: str | MeshShape | None = None,
    at: int | None = None,
    devices: int | None = None,
    decoding: Decoding | None = None,
    cache: Path | None = None,
) -> Generator:
    """Loads a run's weights onto a mesh and returns a generator, which keeps its compiled programs between calls.

    source: output folder of a run.  mesh: None takes the run's own.  at: step of the checkpoint; None takes the last.
    devices: use the first so many; None uses all.  cache: folder of compiled programs; None takes the user's cache.
    Raises CheckpointError where there is no run, ConfigError for a mesh with pipeline stages.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=1, sample=0, eval_samples=16)
        >>> out = mw.train(run, out=tmp / "opened", progress="none", cache=tmp, devices=1).out
        >>> generator = mw.open_generator(out, mesh="fsdp=2,tensor=2", cache=tmp)
        >>> [len(generator.generate([prompt], max_tokens=4).tokens[0]) for prompt in ("import ", "def f")]
        [4, 4]
        >>> generator.compilations
        1
    """
    enable_compilation_cache((path_of(cache or default_cache_folder())) / "compiled")
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    return Generator(open_weights(place_of(str(source)), mesh=shape, at=at, devices=devices), decoding)


def generate(
    source: str | Path,
    prompts: Sequence[str],
    *,
    max_tokens: int = 128,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    mesh: str | MeshShape | None = None,
    decoding: Decoding | None = None,
    on_text: OnText | None = None,
) -> Generated:
    """Continues each prompt by up to `max_tokens` tokens; for several calls use `open_generator`.

    source: output folder of a run, whose last checkpoint is loaded.  sampling: None takes the most probable tokens.
    stop: texts that end a text, the end of a document apart.  mesh: None takes the run's own.
    on_text: called with the index of a prompt and the text that was added to it, while it is decoded.
    Raises CheckpointError where there is no run, ConfigError where a text would be longer than the model's positions.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=1, sample=0, eval_samples=16)
        >>> out = mw.train(run, out=tmp / "spoken", progress="none", cache=tmp, devices=1).out
        >>> result = mw.generate(out, ["import ", "def "], max_tokens=5, sampling=mw.Sampling(temperature=0.8, seed=1))
        >>> len(result.texts), result.report.planned_cache_bytes == result.report.cache_bytes
        (2, True)
    """
    generator = open_generator(source, mesh=mesh, decoding=decoding)
    return generator.generate(prompts, max_tokens=max_tokens, sampling=sampling, stop=stop, on_text=on_text)
