"""Adapters on their way in and out: a frozen base with fresh or read adapters, and adapters merged into the base."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.fine_tuning import FineTune
from meshwright.hugging_face.peft_files import read_adapter
from meshwright.models.adapters import ADAPTERS, merged, quantise
from meshwright.sharding.params import (
    Param,
    Tree,
    init_params,
    is_param,
    layers_to_rows,
    named_leaves,
    trained_only,
)
from meshwright.step.device_run import DeviceRun, place_on_devices

Then = Callable[[str, jax.Array], Any]
"""`(path, weight) -> what is kept of it`."""


def model_alone(device_run: DeviceRun) -> DeviceRun:
    """Returns the run without adapters or reference on the same devices.

    Its parameters are in the type of those of the run, which of a frozen base is the compute dtype, or float32.
    """
    run = device_run.run
    dtype = "float32" if run.finetune.base == "float32" else run.training.compute_dtype
    dtype = dtype if run.finetune.method == "lora" else run.training.param_dtype
    training = dataclasses.replace(run.training, param_dtype=dtype)
    return place_on_devices(dataclasses.replace(run, finetune=FineTune(), training=training), device_run.mesh)


def merge_adapters(device_run: DeviceRun, params: Tree) -> tuple[DeviceRun, Tree]:
    """Returns the run without adapters or reference, and its parameters W + (alpha / r) A B, summed in float32."""
    base = model_alone(device_run)
    dtype = jnp.dtype(base.run.training.param_dtype)
    together = functools.partial(merged, scale=device_run.run.finetune.scale, dtype=dtype)
    return base, jax.jit(together, out_shardings=base.state_shardings.params)(params)


def add_adapters(device_run: DeviceRun, load: Callable[[DeviceRun, Then], Tree]) -> Tree:
    """Returns the parameters of a run with adapters: its base, kept as the run asks, and adapters to begin with.

    load: `(run of the model alone, then) -> weights`, which gives each weight to `then` before it loads the next, so
    that one at a time is whole beside the quantised base. The adapters are drawn from the run's seed, or read from the
    folder that `FineTune.adapter` names. Raises WeightsError where that is not an adapter of this model.
    """
    tuning, where = device_run.run.finetune, device_run.state_shardings.params
    base = model_alone(device_run)
    before = named_leaves(base.params)

    def keep(path: str, w: jax.Array) -> Any:
        described: Any = device_run.params
        target: Any = where
        for name in path.split("."):
            described, target = described[name], target[name]
        if is_param(described) or tuning.base not in ("int8", "nf4"):
            return w.astype(described.stored)
        convert = functools.partial(quantise, path, before[path], base=tuning.base)
        quantised = jax.block_until_ready(jax.jit(convert, out_shardings=target)(w))
        w.delete()
        return quantised

    params = load(base, keep)
    described = trained_only(device_run.params, device_run.params)
    training = device_run.run.training
    fresh = init_params(
        described, trained_only(device_run.params, where), seed=training.seed, dtype=training.param_dtype
    )
    if tuning.adapter is not None:
        fresh = _read(Path(tuning.adapter), device_run, described, fresh)
    return {
        path: {**tree, ADAPTERS: fresh[path][ADAPTERS]} if isinstance(tree, dict) and ADAPTERS in fresh[path] else tree
        for path, tree in params.items()
    }


def _read(folder: Path, device_run: DeviceRun, described: Tree, fresh: Tree) -> Tree:
    """Adapters of a folder in PEFT's format, in the shardings of fresh ones."""
    found = read_adapter(folder, device_run.run.model, device_run.run.finetune)

    def place(keys: Any, p: Param, x: jax.Array) -> jax.Array:
        stack, _, name, side = (key.key for key in keys)
        whole = layers_to_rows(p, jnp.asarray(found[f"{stack}.{name}"][0 if side == "a" else 1]))
        return jax.device_put(whole.astype(x.dtype), x.sharding)

    return jax.tree_util.tree_map_with_path(place, described, fresh, is_leaf=is_param)
