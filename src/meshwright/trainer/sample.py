"""Text sampled from the model in training, on the devices and with the parameters of the run."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.activity import activity
from meshwright.checkpoint.layer_order import permuted_in_layer_order
from meshwright.config import Data
from meshwright.data.tokenizers import Chars, Tokenizer, with_begin
from meshwright.errors import ConfigError, DataError
from meshwright.generation.decoder import Decoder, bucket_for
from meshwright.generation.sampling import Sampling
from meshwright.generation.weights import lay_out
from meshwright.sharding.params import Tree, named_leaves
from meshwright.signs import waiting
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.storage.writing import write_text

_TEMPERATURE = 0.8
_CHUNK = 512


def write_sample(
    device_run: DeviceRun, tokenizer: Tokenizer, params: Any, count: int, out: Path, step: int
) -> str:
    """Samples `count` tokens from the model, writes their text to `out`, and returns it.

    step: steps after which it is sampled.
    """
    data = device_run.run.data
    if (
        device_run.run.finetune.method == "lora"
        or device_run.run.finetune.objective == "preferences"
    ):
        from meshwright.checkpoint.initial_weights import merge_adapters

        device_run, params = merge_adapters(device_run, params)
    begin = _prompt_of(data, tokenizer)
    prompt = with_begin(tokenizer, tokenizer.encode(begin))
    prompt = prompt if len(prompt) else np.array([tokenizer.end], np.int32)
    with activity("sample", "sampling from the model", "sampled from the model", step) as work:
        tokens = sample_tokens(
            device_run, params, prompt, tokens=count, seed=device_run.run.training.seed
        )
        work.record["text"] = text = begin + tokenizer.decode(tokens)
    if jax.process_index() == 0:
        write_text(out / "sample.txt", text)
    return text


def check_prompt(data: Data, tokenizer: Tokenizer) -> None:
    """Raises ConfigError for a prompt that the characters of the text cannot write,
    before the run trains."""
    if not isinstance(tokenizer, Chars):
        return
    try:
        tokenizer.encode(_prompt_of(data, tokenizer))
    except DataError as error:
        letter = next(filter(str.isalnum, tokenizer.letters), tokenizer.letters[0])
        raise ConfigError(
            f"--data.prompt {data.prompt!r}",
            error.truth,
            f"--data.prompt {letter}, or --data.tokenizer bytes",
        ) from error


def _prompt_of(data: Data, tokenizer: Tokenizer) -> str:
    """Returns the prompt of a run's sample.

    The line break of runs that name no prompt is left out
    where the text has none: the sample then begins a text.
    """
    names_none = data.prompt == Data().prompt
    if isinstance(tokenizer, Chars) and names_none and data.prompt not in tokenizer.letters:
        return ""
    return data.prompt


def sample_tokens(
    device_run: DeviceRun, params: Tree, prompt: np.ndarray, *, tokens: int, seed: int
) -> list[int]:
    """Returns tokens that continue `prompt`: `tokens` of them, or up to the run's length.

    Weights stay in the layout of training, except on a mesh with pipeline stages: they are copied
    to the same devices without stages, since a token would pass the stages one after another.
    Experts of limited capacity drop nothing here.
    """
    if (
        device_run.layout.shape.stage > 1
        or getattr(device_run.run.model, "dispatch", None) == "capacity"
    ):
        device_run, params = _without_stages(device_run, params)
    seq = device_run.run.training.seq
    prompt = prompt[-max(1, seq // 2) :]
    count = min(tokens, max(1, seq - len(prompt)))
    bucket = bucket_for(device_run, [len(prompt)], count, _CHUNK)
    decoder = Decoder(device_run, lay_out(device_run, params, "sharded"), bucket)
    sampling = Sampling(temperature=_TEMPERATURE, seed=seed)
    with waiting("the devices"):
        state = decoder.prefill(decoder.start([prompt]), sampling, ())
        state = decoder.decode(state, sampling, (), count - 1)
        tokens_read = decoder.read(state)
    return [int(token) for token in tokens_read[0][0]]


def _without_stages(device_run: DeviceRun, params: Tree) -> tuple[DeviceRun, Tree]:
    """Returns the run and its parameters on the same devices, with `data` instead of `stage`."""
    run, shape = device_run.run, device_run.layout.shape
    model = run.model
    if getattr(model, "dispatch", None) == "capacity":
        model = dataclasses.replace(model, dispatch="dropless")  # type: ignore[call-arg]
    devices = device_run.mesh.devices.reshape(
        1, shape.stage * shape.data, *device_run.mesh.devices.shape[2:]
    )
    folded = dataclasses.replace(shape, stage=1, data=shape.stage * shape.data, slices=1)
    training = dataclasses.replace(
        run.training,
        batch=run.training.batch * shape.stage,
        microbatches=1,
        pipeline_schedule="1f1b",
        virtual_stages=1,
        stage_saves="input",
    )
    mesh = Mesh(devices, device_run.mesh.axis_names, axis_types=device_run.mesh.axis_types)
    other = place_on_devices(
        dataclasses.replace(run, model=model, mesh=folded, training=training), mesh
    )
    by_layer = named_leaves({"params": params})
    by_layer |= dict(permuted_in_layer_order(by_layer, device_run.layout.params))
    treedef = jax.tree.structure(other.abstract.params)
    where = jax.tree.leaves(other.abstract.shardings.params)
    moved = jax.jit(lambda *leaves: leaves, out_shardings=tuple(where))(*by_layer.values())
    return other, jax.tree.unflatten(treedef, moved)
