"""A run's first step compared with that of another program, or on other devices, tensor by tensor.

    a folder with src/meshwright       another commit, by this Python
    a folder with bin/python           another environment, with its Meshwright if it has one
    devices                            the same program, each part computed by the next device
    transformers                       another program for the model of a Hugging Face folder

The run is that of `parity`: float32, and gradients before they are clipped. The other commit or
environment reads the run from a file, takes the step in a process of its own (`recorded_child.py`),
and writes its tensors to a file.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.data.tokenizers import build_tokenizer
from meshwright.errors import ConfigError
from meshwright.hugging_face.folder import open_folder
from meshwright.models.recording import TensorName
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.step.recorded_step import Recording
from meshwright.trainer import recorded_child
from meshwright.trainer.divergence import Divergence, compare
from meshwright.trainer.layer_by_layer import LayerByLayer
from meshwright.trainer.parity import Parity, Side, in_float32, perturbed_params
from meshwright.trainer.prepare import Trainable
from meshwright.trainer.transformers_source import TransformersSource

TRANSFORMERS = "transformers"
DEVICES = "devices"
DOCUMENTS = 2
"""Documents in the sequence that is compared with `transformers`: neither may see the other."""
_TEXT = (
    "In the beginning of a step every device has its part of the parameters. The layers are "
    "computed in order, and each reads what the layer before it wrote: attention mixes the "
    "positions of a document, the feed-forward half mixes the features of a position, and both add "
    "what they find to the residual stream. In 1687, F = m a; in 2017, softmax(Q K^T / sqrt(d)) V. "
    "The derivative goes back the same way, from the loss to the embedding, and what was read "
    "twice is summed. 3.14159, 2.71828, 1.41421: numbers round, and the order of a sum changes its "
    "last digits. "
)


def is_program(against: str) -> bool:
    """Whether `--against` names a folder or a Python rather than a mesh."""
    return os.sep in against or against.startswith(".") or Path(against).exists()


def compare_program(prepared: Trainable, program: Path, cache: Path) -> Parity:
    """Compares the first step with that of another commit or environment.
    Raises ConfigError where there is none."""
    mesh = prepared.device_run.run.mesh
    assert mesh is not None
    run = in_float32(prepared.device_run.run, mesh, 1)
    side = Side(prepared, run, prepared.device_run.mesh)
    theirs = _step_of(program, side.run, cache)
    batch = next(side.feed)
    params = side.params()
    unequal = _unequal_inputs(params, np.asarray(batch.inputs), theirs)
    names = ("this program", str(program))
    reference = side.record(params, batch, 1)
    perturbed = side.record(perturbed_params(params, 1), batch, 1)
    divergence = compare(names, tensors_of(theirs), reference, perturbed)
    return Parity(names, unequal, (), divergence)


def _step_of(program: Path, run: Run, cache: Path) -> dict[str, np.ndarray]:
    """Takes the first step of a run by another program;
    returns the arrays that it writes, by `by_key`.

    cache: its compilation cache. Raises ConfigError where the program ends without a step.
    """
    command, environment = _command_of(program)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = folder / "run.json"
        out = folder / "tensors.npz"
        write_run(_unclipped(run), run_file)
        arguments = [run_file, out, cache, jax.device_count()]
        done = subprocess.run(
            [*command, *map(str, arguments)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not zipfile.is_zipfile(out):
            words = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ConfigError(
                f"parity --against {program}",
                f"{command[0]} took no step there and ended with code {done.returncode}: "
                f"{words[-1]}",
                "a checkout or an environment in which `meshwright train` runs this recipe",
            )
        with np.load(out, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}


def _unequal_inputs(
    params: Mapping[str, Any], tokens: np.ndarray, theirs: dict[str, np.ndarray]
) -> tuple[str, ...]:
    """Returns the initial parameters, and the tokens,
    with which another program began differently."""
    unequal: list[str] = []
    for name, x in params.items():
        other = theirs.get(f"initial|{name}")
        if other is None or not np.array_equal(x, other):
            unequal.append(name)
    if not np.array_equal(tokens, theirs["tokens"]):
        unequal.append("the tokens of the first batch")
    return tuple(unequal)


def _unclipped(run: Run) -> Run:
    optimizer = dataclasses.replace(run.optimizer, grad_clip_norm=0.0)
    return dataclasses.replace(run, optimizer=optimizer)


def tensors_of(arrays: dict[str, np.ndarray]) -> list[tuple[TensorName, np.ndarray]]:
    """Inverts `recorded_step.by_key`: returns the tensors of a file in the order of computation."""
    found: list[tuple[TensorName, np.ndarray]] = []
    for key, array in arrays.items():
        of, _, rest = key.partition("|")
        if of not in ("forward", "backward", "parameters"):
            continue
        layer, _, name = rest.partition("|")
        index = int(layer) if layer else None
        found.append((TensorName(of, name, index), array))  # type: ignore[arg-type]
    return sorted(found, key=lambda pair: (pair[0].order, pair[0]))


def _command_of(program: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the command that records a step by another program, and its environment."""
    program = program.absolute()
    script = str(Path(recorded_child.__file__).absolute())
    ours = str(Path(__file__).absolute().parents[2])
    environment = dict(os.environ)
    if (program / "src" / "meshwright").is_dir():
        environment["PYTHONPATH"] = str(program / "src")
        return [sys.executable, script], environment
    python = program / "bin" / "python" if program.is_dir() else program
    if not python.is_file():
        raise ConfigError(
            f"parity --against {program}",
            "it has no src/meshwright, which a checkout has, and no bin/python, which an "
            "environment has",
            "the folder of a checkout, or of an environment",
        )
    environment.pop("PYTHONPATH", None)
    found = subprocess.run(
        [str(python), "-c", "import meshwright"], env=environment, capture_output=True, check=False
    )
    if found.returncode:  # an environment with another JAX alone
        environment["PYTHONPATH"] = ours
    return [str(python), script], environment


def compare_devices(prepared: Trainable) -> Parity:
    """Compares the first step with itself on the same mesh,
    where each device does the part of its neighbor.

    The program is the same, so every bit has to be. Raises ConfigError where there is one device.
    """
    mesh = prepared.device_run.mesh
    first_devices = list(mesh.devices.flat)
    others = [device for device in jax.local_devices() if device not in first_devices]
    ring = [*first_devices, *others]
    if len(ring) == 1:
        raise ConfigError(
            "parity --against devices",
            "one device is found, and the step is taken again with the devices changed around",
            "--against data=1, or a host with several devices",
        )
    rolled = np.array([*ring[1:], ring[0]][: len(first_devices)], dtype=object)
    second_mesh = Mesh(rolled.reshape(mesh.devices.shape), mesh.axis_names)
    shape = prepared.device_run.run.mesh
    assert shape is not None
    run = in_float32(prepared.device_run.run, shape, 1)
    first = Side(prepared, run, mesh)
    second = Side(prepared, run, second_mesh)
    params = first.params()
    names = (f"{shape} on {first_devices[0]} and on", f"{shape}, each part by the next device")
    first_step = first.recording(params, next(first.feed), 1)
    second_step = second.recording(params, next(second.feed), 1)
    tensors = _recorded(second_step)
    divergence = compare(names, _recorded(first_step), tensors, tensors)
    suspects = _suspects(divergence, first_step, second_step)
    return Parity(names, (), (), divergence, devices=suspects)


def _recorded(recording: Recording) -> list[tuple[TensorName, np.ndarray]]:
    return [(name, recording.tensor(name)) for name in recording.names]


def _suspects(divergence: Divergence, first: Recording, second: Recording) -> tuple[str, ...]:
    """Returns the devices that computed what differs first,
    in both orders where there is such a device."""
    found = divergence.first
    if found is None or found.name.of == "parameters":
        return ()
    differs = first.tensor(found.name) != second.tensor(found.name)
    tokens = np.argwhere(differs.reshape(*differs.shape[:2], -1).any(-1))
    by_order: list[set[Any]] = []
    for recording in (first, second):
        devices = set[Any]()
        for sequence, position in tokens:
            devices.update(recording.devices(found.name, sequence, position))
        by_order.append(devices)
    both = by_order[0] & by_order[1] or by_order[0] | by_order[1]
    return tuple(sorted(map(str, both)))


def compare_transformers(run: Run, tokens: int, text: str | None = None) -> Parity:
    """Compares one step of a Hugging Face folder's model with that
    of `transformers`, layer by layer.

    run: of `hf:PATH`.
    tokens: length of the sequence that is compared, in two documents.
    text: what they have; None takes a text of this module. Raises ConfigError for a run without
    such a folder, or a text that is too short.
    """
    if run.init_from is None or not run.init_from.startswith("hf:"):
        raise ConfigError(
            f"parity of {run.name} against transformers",
            "it starts from no folder of Hugging Face, so transformers has no model to compare "
            "with",
            "meshwright parity hf:PATH --against transformers",
        )
    weights = open_folder(run.init_from)
    length = tokens // DOCUMENTS
    if text is None and not weights.folder.tokenizer.is_file():
        ids = np.random.default_rng(0).integers(0, run.model.vocab or 1, 2 * tokens + DOCUMENTS)
        origin = "tokens drawn at random, as the folder has no tokenizer"
    else:
        tokenizer = build_tokenizer(str(run.data.tokenizer))
        ids = tokenizer.encode(text or _TEXT * (1 + tokens // 16))
        origin = "tokens of a text"
    needed = DOCUMENTS * (length + 1)
    if length < 1 or len(ids) < needed:
        raise ConfigError(
            f"parity against transformers over {tokens} tokens",
            f"{DOCUMENTS} documents of {length} tokens and the token after each are {needed}, and "
            f"the text has {len(ids)}",
            f"--tokens {max(DOCUMENTS, (len(ids) // DOCUMENTS - 1) * DOCUMENTS)}",
        )
    documents = ids[:needed].reshape(DOCUMENTS, length + 1)
    training = dataclasses.replace(
        run.training, batch=1, seq=DOCUMENTS * length, dropout=0.0, z_loss=0.0, remat="none"
    )
    mesh = run.mesh or run.model.default_mesh(1)
    step = in_float32(dataclasses.replace(run, training=training), mesh, 1)
    step = dataclasses.replace(step, mesh=None)
    names = ("transformers", "Meshwright")
    divergence = compare(
        names,
        TransformersSource(weights, documents),
        LayerByLayer(step, weights, documents),
        LayerByLayer(step, weights, documents, perturbed=True),
    )
    note = f"one sequence of {DOCUMENTS} documents of {length} {origin}, in float32"
    return Parity(names, (), (), divergence, note=note)
