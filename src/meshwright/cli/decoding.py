"""Prefill and decode in the verbs `plan` and `prove`."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from meshwright.cli.output import write_json
from meshwright.errors import CensusError
from meshwright.fine_tuning import FineTune
from meshwright.hardware import mesh
from meshwright.hardware.targets import Target
from meshwright.planner.decoding import DecodePrice, best_decode, price_decode
from meshwright.runs.run import Run
from meshwright.views.decode_tables import print_decode_prices, print_decode_proof


def plan_decode(
    run: Run, target: Target, contexts: Sequence[int], batches: Sequence[int], *, console: Console, as_json: bool
) -> int:
    """Prints the best mesh for each context and batch; returns the exit code."""
    prices = best_decode(run, target, batches=batches, contexts=contexts)
    if as_json:
        write_json({"target": str(target), "decode": [price_to_json(price) for price in prices]})
    else:
        print_decode_prices(console, prices, target, run.name)
    return 0


def prove_decode(
    run: Run,
    devices: Sequence[Any],
    target: Target | None,
    *,
    step: str,
    sizes: tuple[int, int],
    console: Console,
    as_json: bool,
) -> int:
    """Compiles prefill or decode for devices, here or not, and prints memory and predicted speed.

    step: `prefill` or `decode`.  sizes: sequences, and slots of each. Returns the exit code.
    """
    from meshwright.analysis.compile import compiler_error
    from meshwright.generation.decoder import Bucket, Decoder
    from meshwright.generation.weight_sizes import run_for_decoding
    from meshwright.generation.weights import abstract_layout
    from meshwright.sharding.layouts import BATCH_AXES
    from meshwright.step.device_run import place_on_devices

    assert run.mesh is not None
    merged = dataclasses.replace(run, finetune=FineTune())  # adapters are merged before weights are laid out
    device_run = place_on_devices(run_for_decoding(merged, run.mesh), mesh.build_mesh(run.mesh, list(devices)))
    share = run.mesh.over(BATCH_AXES)
    batch, slots = math.ceil(sizes[0] / share) * share, sizes[1]
    chunk = math.gcd(slots, 512)
    decoder = Decoder(device_run, abstract_layout(device_run, "gathered"), Bucket(batch, slots, chunk), "compute")
    began = time.perf_counter()
    try:
        stats = decoder.memory if step == "decode" else decoder.prefill_memory
    except jax.errors.JaxRuntimeError as error:
        raise compiler_error(error) from error
    cache = decoder.cache_bytes_of(stats)
    compiled = {
        "weights": float(stats.argument_size_in_bytes - stats.alias_size_in_bytes),
        "cache": float(cache),
        "temporaries": float(stats.temp_size_in_bytes),
        "bytes": float(stats.argument_size_in_bytes + stats.temp_size_in_bytes),
        "compile_seconds": time.perf_counter() - began,
    }
    priced = target or _any_target()
    price = price_decode(device_run.placed, priced, batch=batch, context=slots)
    if as_json:
        write_json({"step": step, "compiled": compiled, "planned": price_to_json(price)})
    else:
        console.print(f"[bold]{step}[/] of {run.name} on {run.mesh}: {batch} sequences of {slots:,} slots")
        print_decode_proof(console, price, compiled, target)
    return CensusError.exit_code if target is not None and compiled["bytes"] > target.chip.hbm_bytes else 0


def _any_target() -> Target:
    """Returns hardware whose price is not shown, where devices are simulated: the plan of memory needs none."""
    from meshwright.hardware.targets import parse_target

    return parse_target("v5p:2x2x1")


def price_to_json(price: DecodePrice) -> dict[str, Any]:
    """Returns every figure of a price."""
    figures = {name: getattr(price, name) for name in (
        "seconds", "tokens_per_second_per_chip", "prefill_per_second_per_chip", "bytes", "fits", "bound_by"
    )}  # fmt: skip
    return {**dataclasses.asdict(price), "mesh": str(price.mesh), **figures}
