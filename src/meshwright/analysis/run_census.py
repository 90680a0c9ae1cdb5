"""Census of a run's own train and evaluation steps,
and the cache of those for hardware that is not here."""

import collections
import dataclasses
import hashlib
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import PartitionSpec

import meshwright
import xlacensus
from meshwright.analysis.programs import (
    Census,
    census,
    compile_function,
    parse_module,
    simulate_schedule,
)
from meshwright.analysis.run_lints import lint_attention_kernel, lint_precision
from meshwright.comm import collectives, hierarchical, ragged
from meshwright.hardware.chips import Torus
from meshwright.hardware.targets import Target
from meshwright.models.flops import forward_flops, passes_of_step
from meshwright.models.kernels.cudnn import ONE_DOCUMENT, SEVERAL_DOCUMENTS
from meshwright.models.model import IndexerSpec, Model, ModelSpec, padded_vocab, vocab_size
from meshwright.models.padding_rows import row_scope
from meshwright.models.quantisation import SCOPE
from meshwright.planner.traffic import sent_rows
from meshwright.runs.settle import Settled
from meshwright.sharding import params
from meshwright.sharding.layouts import TOKEN_AXES, VOCAB_AXES
from meshwright.sharding.params import named_leaves
from meshwright.sharding.schedule_table import FORWARD, ScheduleTable
from meshwright.sharding.stages import NO_LAYER
from meshwright.step.device_run import DeviceRun
from meshwright.step.eval_step import build_eval_step
from meshwright.step.muon import plan_muon
from meshwright.step.pipeline import branch_ticks, repeats_forward, tick_scopes
from meshwright.step.train_step import build_train_step
from meshwright.storage.writing import write_atomically
from meshwright.trust import plain_text
from meshwright.update_rules import UPDATE_RULES
from xlacensus.determinism import sums_in_order
from xlacensus.findings import Finding
from xlacensus.hlo.flops import Skipped
from xlacensus.hlo.parser import Module
from xlacensus.hlo.scopes import BranchScope
from xlacensus.program_census import FlopsBand, ProgramFacts
from xlacensus.schedule import SimulatedSchedule, TargetDevices

_CATEGORIES = {
    "state.params": "parameters",
    "state.optimizer": "optimizer state",
    "state.variables": "variables",
    "state": "counters",
}
# Lines of these files tell how bytes move, not what for;
# the line that called them is reported instead.
LIBRARY_FILES = tuple(
    str(module.__file__) for module in (collectives, hierarchical, ragged, params)
)
_LEFT_OUT, _RENAMES = "xla_disable_hlo_passes", "gpu-convert-async-collectives-to-sync"
"""Option that leaves passes out, and the one after which collectives beside nothing have
names without a time."""
_DOCUMENTS = {ONE_DOCUMENT: BranchScope(1, 1), SEVERAL_DOCUMENTS: BranchScope(0, 1)}
"""Forms of attention that a step takes: what is published of steps has one document
in each sequence."""
_MAX_VOCAB_PADDING = 0.05
"""Fraction of padding rows from which the vocabulary is reported."""


def model_flops(device_run: DeviceRun, passes: float) -> Mapping[str, float]:
    """Returns the model FLOPs of one step on one device by item;
    a train step is 3 `passes`, an evaluation 1."""
    training = device_run.run.training
    tokens = training.batch * device_run.units
    items = forward_flops(device_run.run.model, training.seq)
    result = dict[str, float]()
    for item, flops in items.items():
        counted = min(passes, _passes_of_step(device_run, item))
        result[item] = counted * tokens * flops / device_run.mesh.size
    return result


def _passes_of_step(device_run: DeviceRun, item: str) -> float:
    """Returns the forward passes that an item of the model FLOPs has in a train step."""
    return passes_of_step(device_run.run.model, item, device_run.run.finetune.method)


_COUNTED = 0.95
"""Fraction of the model FLOPs below which a compiled step misses part of the model."""
_SLACK = 1.1
"""Factor on the FLOPs that recomputation, padding and masks explain."""


def flops_band(device_run: DeviceRun, passes: float) -> FlopsBand:
    """Returns the FLOPs of matrix products that a compiled step may have on one device.

    At least 0.95 of the model FLOPs. At most 1.1 of them with every layer computed again (a
    pipeline: twice), the vocabulary padded, all pairs of query and key where a program masks
    instead of skipping, and experts with twice the rows they need, or full buffers where they are
    sent between devices.
    """
    run = device_run.run
    items = model_flops(device_run, passes)
    counted = dict.fromkeys(items, 3.0)
    if passes > 1:
        counted = {item: _passes_of_step(device_run, item) for item in items}
    factors = _factors(device_run, counted)
    uneven = _computed_over_assigned(device_run)
    most = _SLACK * uneven * sum(factors[item] * flops for item, flops in items.items())
    adapters = sum(p.size for _, p, _ in device_run.layout.leaves if p.role == "adapter")
    adapter_passes = 1 + _recomputations(device_run) / counted["unembedding"]
    tokens = run.training.batch * run.training.seq
    adapter_flops = 2 * passes * tokens * adapters / device_run.layout.shape.size
    most += _SLACK * uneven * adapter_passes * adapter_flops
    rule = UPDATE_RULES.get(run.optimizer.name)
    if rule is not None and rule.matrices and passes > 1:
        layout = device_run.layout
        shares = plan_muon(layout.params, layout.placements, layout.shape, run.optimizer.muon_heads)
        most += _SLACK * shares.flops()[0]
    return FlopsBand(
        _COUNTED * sum(items.values()),
        math.inf if rule is None else most,
        f"{sum(items.values()):.3g} of the model, with recomputation, padding and masked pairs",
    )


def _computed_over_assigned(device_run: DeviceRun) -> float:
    """Returns the layers that a pipeline's stages compute over those of their tasks.

    1, except where a stage without a task computes beside the others, and padding rows too.
    """
    layout = device_run.layout
    stages = layout.shape.stage
    if stages == 1 or not device_run.local_model.execution.permutes:
        return 1.0
    layers = len(layout.spec.layers)
    rows = math.ceil(layers / (stages * layout.stages.virtual_stages)) * stages
    ticks = int((device_run.schedule_table.kind == FORWARD).any(axis=(1, 2)).sum())
    return rows * ticks / (layers * device_run.run.training.microbatches)


def _recomputations(device_run: DeviceRun) -> int:
    """Returns how often the backward pass computes a layer again, at most."""
    return 1 if device_run.layout.shape.stage == 1 else 2


def _factors(device_run: DeviceRun, counted: Mapping[str, float]) -> dict[str, float]:
    """Returns the most FLOPs that a program may have of each item over those of the model.

    counted: passes that the model FLOPs count of an item.
    """
    run, spec, shape = device_run.run, device_run.layout.spec, device_run.layout.shape
    seq = run.training.seq
    recomputations = _recomputations(device_run)
    skipped = skipped_by_kernels(device_run)
    factors = {item: 1 + recomputations / passes for item, passes in counted.items()}
    masked = 1 / max(skipped.causal_fraction, 1e-9)
    if "attention" in factors:
        # Attention's backward kernels compute the scores again: seven products
        # for four, beside two recomputed ones.
        factors["attention"] *= 11 / 8 * masked * _keys_computed(spec, seq)
    for item, computed in _recurrences_computed(spec, seq, shape.context).items():
        # Computed again from their inputs, whatever the remat policy keeps.
        factors[item] = (factors[item] + 1 / counted[item]) * computed
    if "indexer" in factors:
        forward = max(_index_scores(a.indexer, shape.tensor) for a in spec.attention if a.indexer)
        passes = counted["indexer"]
        factors["indexer"] = masked * (forward * (1 + recomputations) + passes - 1) / passes
        factors["indexer projections"] *= shape.tensor
    if "experts" in factors:
        factors["experts"] *= max(2.0, 1 / skipped.group_fraction)
    if "unembedding" in factors:
        factors["unembedding"] *= padded_vocab(run.model) / vocab_size(run.model)
    return factors


def _keys_computed(spec: ModelSpec, seq: int) -> float:
    """Returns the FLOPs of attention to all keys over those of the keys
    that the model FLOPs count."""
    counted = sum(a.flops(seq) for a in spec.attention)
    return sum(a.flops_of_all_keys(seq) for a in spec.attention) / counted


def _recurrences_computed(spec: ModelSpec, seq: int, context: int) -> dict[str, float]:
    """Returns the FLOPs of recurrences on `context` devices over those
    that the model FLOPs count, by item."""
    counted = collections.defaultdict[str, float](float)
    computed = collections.defaultdict[str, float](float)
    for recurrence in spec.recurrences:
        counted[recurrence.item] += recurrence.flops(seq)
        computed[recurrence.item] += recurrence.computed_flops(seq, context)
    return {item: max(1.0, computed[item] / flops) for item, flops in counted.items() if flops}


def _index_scores(indexer: IndexerSpec, tensor: int) -> float:
    """Returns how often a forward pass computes an indexer's scores of a device's share
    of the tokens, at most.

    Every device of `tensor` chooses keys for all tokens, in attention and for the loss;
    the loss compares its own tokens.
    """
    choices = {"frozen": 1, "warmup": 0, "sparse": 2}[indexer.training]
    return float(choices * tensor + indexer.trained)


def skipped_by_kernels(settled: Settled) -> Skipped:
    """Returns what the kernels of a run skip: hidden blocks of attention,
    and rows of experts' buffers without a token.

    If the load is even, a device receives as many rows as its own tokens have.
    """
    layout = settled.layout
    degrees = {axis: layout.shape.degrees()[axis] for axis in layout.expert_axes}
    fraction, sent = 1.0, dict[str, int]()
    spec = next(
        (layer.experts for layer in settled.layout.spec.layers if layer.experts is not None), None
    )
    if degrees and spec is not None:
        training, over = (
            settled.run.training,
            settled.layout.shape.over(TOKEN_AXES) * layout.routed_parts,
        )
        tokens = (
            training.batch
            * training.seq
            // (over * training.microbatches * settled.exchange_pieces)
        )
        fraction = (
            tokens
            * spec.experts_per_token
            / spec.buffers(tokens, math.prod(degrees.values())).experts
        )
        sent = {
            "+".join(a): round(n * tokens)
            for a, n in sent_rows(spec, degrees, settled.expert_nodes).items()
        }
    return Skipped(
        causal_fraction(settled.layout.spec, settled.run.training.seq), min(1.0, fraction), sent
    )


def train_step_facts(device_run: DeviceRun) -> ProgramFacts:
    """Returns what is known of the train step of a run."""
    facts: ProgramFacts = device_run.run.model.train_step_facts(device_run, _facts_of_layers)
    return facts


def _facts_of_layers(model: Model, device_run: DeviceRun) -> ProgramFacts:
    table = device_run.schedule_table if device_run.layout.shape.stage > 1 else None
    facts = _facts(device_run, "train step", 3.0, table)
    if table is None:
        return facts
    # Branches are priced with the mean of padding rows; without these all parts take the same time.
    costs = device_run.layout.stages.part_costs
    costs = [c * len(costs) / sum(costs) if _layer_rows(device_run) else 1.0 for c in costs]
    return dataclasses.replace(
        facts, ticks=tick_scopes(table, costs, device_run.local_model.execution.permutes)
    )


def _layer_rows(device_run: DeviceRun) -> dict[str, BranchScope]:
    """Returns how many rows of each stack hold a layer,
    where the program branches around its padding rows."""
    if device_run.local_model.execution.permutes:
        return {}
    rows = {
        stack: device_run.layout.stages.rows(device_run.layout.spec.layers_of(stack))
        for stack in device_run.layout.spec.stacks
    }
    counts = {
        stack: (int((layers != NO_LAYER).sum()), layers.size) for stack, layers in rows.items()
    }
    return {
        row_scope(stack): BranchScope(n, size) for stack, (n, size) in counts.items() if n < size
    }


def _facts(
    device_run: DeviceRun, name: str, passes: float, table: ScheduleTable | None
) -> ProgramFacts:
    """Returns what is known of a step of `passes` forward passes.
    table: schedule of its pipeline."""
    taken = {} if table is None else branch_ticks(table, device_run.local_model.execution.permutes)
    # A backward branch computes its forward pass again;
    # those of forward pass and loss do it for the first time.
    branches = {
        scope: BranchScope(*counts, recomputes=repeats_forward(scope))
        for scope, counts in taken.items()
    }
    return ProgramFacts(
        name=name,
        model_flops=model_flops(device_run, passes),
        skipped=skipped_by_kernels(device_run),
        flops_band=flops_band(device_run, passes),
        branches=branches | _layer_rows(device_run) | _DOCUMENTS,
        library_files=LIBRARY_FILES,
    )


def census_of_train_step(device_run: DeviceRun, target: Target | None = None) -> Census:
    """Compiles the train step of a run for its mesh and takes its census;
    nothing runs, no array is created.

    target: hardware of the mesh's devices, on which a schedule is simulated; None simulates none.
    """
    step, options = build_train_step(device_run), device_run.accepted_compiler_options()
    if device_run.scheduled_by_price:
        profile_of = device_run.profile_of if target is None else profile_for(target)
        options |= profile_of(
            device_run, step.lower(device_run.abstract, device_run.abstract_batch)
        )
    result = census(
        step,
        device_run.abstract,
        device_run.abstract_batch,
        mesh=device_run.mesh.shape,
        categories=_CATEGORIES,
        declared=_declared(device_run),
        target=None if target is None else located_devices(device_run.mesh.devices.flat, target),
        facts=train_step_facts(device_run),
        compiler_options=options,
    )
    findings = [*result.findings, *_vocabulary_padding(device_run)]
    asked = device_run.run.training.matmul_precision
    if device_run.machine.simulated:
        # Simulated devices convert low precisions,
        # and have no kernel for grouped matmuls: that is no fault of the run.
        findings = [finding for finding in findings if finding.kind != "experts"]
    else:
        module = parse_module(result.text)
        findings += lint_precision(module, SCOPE, asked) if asked != "compute" else ()
        if device_run.run.model.states_layers and device_run.kernels.fused:
            findings += lint_attention_kernel(module, device_run.kernels.name)
    return dataclasses.replace(result, findings=tuple(findings))


def profile_for(target: Target) -> Callable[[DeviceRun, Any], dict[str, Any]]:
    """Returns the `DeviceRun.profile_of` of hardware: a step is compiled and simulated
    before it is scheduled so.

    The option is JAX's for profiles that were measured;
    of several processes all take that of the first.
    """

    def profile(device_run: DeviceRun, lowered: Any) -> dict[str, Any]:
        if not device_run.scheduled_by_price:
            return {}
        branches, options = (
            train_step_facts(device_run).branches,
            device_run.accepted_compiler_options(),
        )
        passes = ",".join(word for word in (options.get(_LEFT_OUT), _RENAMES) if word)
        program = compile_function(
            lowered, compiler_options=options | {_LEFT_OUT: passes}, branches=branches
        )
        return {"fdo_profile": simulate_run(program.module, device_run, target).profile}

    return profile


def census_of_eval_step(device_run: DeviceRun) -> Census:
    """Compiles the evaluation step of a run for its mesh and takes its census."""
    arguments = {path.removeprefix("state."): spec for path, spec in _declared(device_run).items()}
    table = (
        device_run.forward_table(device_run.run.training.microbatches)
        if device_run.layout.shape.stage > 1
        else None
    )
    return census(
        build_eval_step(device_run),
        device_run.abstract.params,
        device_run.abstract_batch,
        mesh=device_run.mesh.shape,
        categories=_CATEGORIES,
        declared={path: spec for path, spec in arguments.items() if path.startswith("params.")},
        facts=_facts(device_run, "evaluation step", 1.0, table),
        compiler_options=device_run.accepted_compiler_options(),
    )


def located_devices(devices: Iterable[Any], target: Target) -> TargetDevices:
    """Returns the hardware of a mesh's devices, in its order, with the coordinates of each."""
    coordinates: list[tuple[int, ...]]
    if isinstance(target.chip.interconnect, Torus):
        cores = ("core_on_chip",) if target.chip.devices_per_chip > 1 else ()
        coordinates = [
            (
                getattr(d, "slice_index", 0) or 0,
                *d.coords,
                *(int(getattr(d, core, 0)) for core in cores),
            )
            for d in devices
        ]
    else:
        coordinates = [divmod(d.id, target.topology[1]) for d in devices]
    return TargetDevices(target.chip, target.topology, tuple(coordinates), target.efficiency)


def simulate_run(module: Module, device_run: DeviceRun, target: Target) -> SimulatedSchedule:
    """Simulates the compiled train step of a run.
    module: with the branches of `train_step_facts`."""
    facts, devices = (
        train_step_facts(device_run),
        device_run.mesh.devices.flat,
    )
    at, mesh = located_devices(devices, target), dict(device_run.mesh.shape)
    return simulate_schedule(module, at, mesh, facts.skipped, facts.ticks)


def causal_fraction(spec: ModelSpec, seq: int) -> float:
    """Returns the fraction of key positions that attention reads, over all layers weighted
    by their FLOPs.

    Sliding windows may differ between layers. A model without attention has the fraction of causal
    attention, 1/2, which then applies to nothing.
    """
    flops = [
        (a.heads * (a.head_size + a.value_size), a.causal_positions(seq) / seq)
        for a in spec.attention
    ]
    total = sum(weight for weight, _ in flops)
    return sum(weight * fraction for weight, fraction in flops) / total if total else 0.5


def _declared(device_run: DeviceRun) -> dict[str, PartitionSpec]:
    """Returns the sharding of every array of the state by path, as an argument and as a result."""
    leaves = jax.tree_util.tree_flatten_with_path(device_run.abstract)[0]
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.sharding.spec
        for path, leaf in leaves
    }
    return {
        f"{tree}.{name}": spec for name, spec in specs.items() for tree in ("state", "result.0")
    }


def _vocabulary_padding(device_run: DeviceRun) -> list[Finding]:
    model = device_run.run.model
    vocab, padded = vocab_size(model), padded_vocab(model)
    if not vocab or padded / vocab - 1 <= _MAX_VOCAB_PADDING:
        return []
    tables = [p for p in named_leaves(device_run.layout.params).values() if p.rows]
    itemsize = jnp.dtype(device_run.run.training.param_dtype).itemsize
    wasted = (
        sum((padded - vocab) * math.prod(p.shape[1:]) * itemsize for p in tables)
        // device_run.mesh.size
    )
    return [
        Finding(
            "padding",
            "vocabulary",
            f"{vocab} tokens are padded to {padded}, a multiple of {model.vocab_multiple}: "
            f"{padded / vocab - 1:.0%} padding in every embedding table and in the logits",
            f"--model.vocab-multiple {device_run.layout.shape.over(VOCAB_AXES)}, or a vocabulary "
            f"of {padded}",
            wasted,
        )
    ]


def cached[T](file: Path, kind: Any, make: Callable[[], T], fresh: bool) -> T:
    """Returns what `make` returned before, from a JSON file;
    makes it again where it is `fresh`. kind: its type."""
    if file.is_file() and not fresh:
        try:
            found: T = msgspec.json.decode(file.read_bytes(), type=kind)
            return found
        except (OSError, msgspec.MsgspecError):
            pass  # truncated, or written by another version
    made = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, msgspec.json.encode(made, enc_hook=plain_text).decode())
    return made


def cache_key(device_run: DeviceRun, target: Target) -> str:
    """Returns a key of the program's text, the target, the compiler options,
    and the code that reads the program."""
    lowered = build_train_step(device_run).lower(device_run.abstract, device_run.abstract_batch)
    root = Path(str(meshwright.__file__)).parent
    # A change of these rooms changes the census.
    rooms = (Path(str(xlacensus.__file__)).parent, root / "analysis", root / "hardware")
    files = sorted(file for room in rooms for file in room.rglob("*.py"))
    packages = ("libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "meshwright")
    parts = [
        lowered.as_text(),
        str(target),
        repr(
            (sorted(device_run.accepted_compiler_options().items()), device_run.scheduled_by_price)
        ),
        repr(target.chip),
        repr(target.efficiency),
        str(sums_in_order()),
        jax.__version__,
        *(file.read_text(encoding="utf-8") for file in files),
        *(
            d.version
            for package in packages
            for d in importlib.metadata.distributions(name=package)
        ),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
