"""Adapters merged into their frozen base, on devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from meshwright.fine_tuning import FineTune
from meshwright.plugins import addition
from meshwright.sharding.params import Tree
from meshwright.step.device_run import DeviceRun, place_on_devices


def without_adapters(device_run: DeviceRun) -> DeviceRun:
    """Returns the run without adapters or reference on the same devices.

    Its parameters have the type of those of the run; with a frozen base that is the compute dtype, or float32.
    """
    run = device_run.run
    dtype = "float32" if run.finetune.base == "float32" else run.training.compute_dtype
    dtype = dtype if run.finetune.method == "lora" else run.training.param_dtype
    training = dataclasses.replace(run.training, param_dtype=dtype)
    return place_on_devices(dataclasses.replace(run, finetune=FineTune(), training=training), device_run.mesh)


def merge_adapters(device_run: DeviceRun, params: Tree) -> tuple[DeviceRun, Tree]:
    """Returns the run without adapters or reference, and its parameters W + (alpha / r) A B, summed in float32."""
    base = without_adapters(device_run)
    dtype = jnp.dtype(base.run.training.param_dtype)
    together = functools.partial(addition("merged_adapters"), scale=device_run.run.finetune.scale, dtype=dtype)
    return base, jax.jit(together, out_shardings=base.state_shardings.params)(params)
