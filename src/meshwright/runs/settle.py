"""Every decision that a run leaves to its machine, made once.

`settle` takes a run that is placed on a mesh (runs/placed_run.py) and the machine of that mesh. The
step is built from the result (`execution_of`), the planner prices it, and `show` draws it: nothing
else asks for a platform, a chip or a torus. What only prices can decide, the remat policy and the
pipeline schedule, is chosen before (planner/search.py).
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax.numpy as jnp
import jaxlib.version

from meshwright.comm.hierarchical import Axes, DcnAxis
from meshwright.comm.ragged import MOST_RANKS, most_ranks
from meshwright.errors import ConfigError, divisors
from meshwright.hardware.chips import Nodes
from meshwright.hardware.machine import AUTO, Machine, compiler_options_of
from meshwright.models.blocks.layers import SumRows, scatter_rows
from meshwright.models.blocks.row_sums import sorted_rows
from meshwright.models.execution import Execution
from meshwright.models.kernels.attention import Kernels
from meshwright.models.kernels.choose import GroupedMatmul, choose_grouped_matmul, kernels_of
from meshwright.models.remat import (
    FFN_HIDDEN,
    REMAT_POLICIES,
    SaveHidden,
    save_as_it_is,
    save_tokens_last,
)
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import (
    Param,
    Tree,
    is_low_precision,
    is_low_precision_expert,
    tree_map,
)
from meshwright.sharding.placed_params import plan_gathers
from meshwright.sharding.placement import Placements, axes_of

_RING = 4
"""Least chips along a dimension of a TPU slice that has wraparound links."""
_ATTENTION_PIECES = 4
_EXCHANGE_PIECES = (2, 3)
"""Pieces of a microbatch on a device, whichever divides its sequences."""
_SCHEDULER_OPTIONS = (
    "xla_gpu_enable_latency_hiding_scheduler=",
    "xla_gpu_pgle_profile_file_or_directory_path=",
)
"""Options that a profile of predicted times would overrule."""
_SENT_BETWEEN_NODES = {
    "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer": "False",
    "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": "True",
}
"""Options with which XLA:GPU sends rows of experts between nodes as they are written,
by NCCL's sends.

By its defaults since jaxlib 0.12 it gathers the rows of all nodes first, and sums of experts return
with all of their buffers' empty rows: n nodes send n times as much (xla/backends/gpu/transforms/
ragged_all_to_all_multi_host_decomposer.cc). Without that pass it refuses to run without the
second."""


def settle(placed: PlacedRun, machine: Machine) -> "Settled":
    """Returns a placed run on a machine."""
    return Settled(placed.run, placed.layout, machine)


@dataclasses.dataclass(frozen=True)
class Settled(PlacedRun):
    """A placed run that knows its machine.

    It has every decision that depends on chips, links and compiler.
    """

    machine: Machine

    @functools.cached_property
    def kernels(self) -> Kernels:
        """Attention kernel.

        Raises ConfigError where the one that the run names does not support it.
        """
        return kernels_of(self.run.training, self.layout.spec, self.sequence, self.machine)

    @functools.cached_property
    def grouped_matmul(self) -> GroupedMatmul | None:
        """Grouped matmul of experts; None for a model without.

        Raises ConfigError where the named one cannot run.
        """
        if not any(layer.experts for layer in self.layout.spec.layers):
            return None
        training = self.run.training
        return choose_grouped_matmul(
            training.grouped_matmul, self.machine.platform, training.compute_dtype
        )

    @property
    def quantisation(self) -> Any:
        """The module of matmuls in low precision."""
        from meshwright.models import quantisation  # loaded only by runs in low precision

        return quantisation

    @functools.cached_property
    def low_precision_experts(self) -> bool:
        """Whether the grouped matmuls of experts are in the run's matmul precision.

        Otherwise they are in its compute dtype.
        """
        run = self.run
        name, capacity = (
            run.training.matmul_precision,
            getattr(run.model, "dispatch", None) == "capacity",
        )
        if name == "compute":
            return False
        return self.quantisation.quantises_experts(
            name, self.grouped_matmul, self.machine, capacity
        )

    def in_low_precision(self, p: Param) -> bool:
        """Whether the matmuls of a weight are in the run's matmul precision, a low one."""
        return is_low_precision(p) or (self.low_precision_experts and is_low_precision_expert(p))

    @property
    def fixes_bits(self) -> bool:
        """Whether the run asks its machine for options without which two runs may differ."""
        return self.run.training.deterministic and bool(self.machine.determinism.compiler_options)

    @property
    def sum_rows(self) -> SumRows:
        """How the gradients of rows that are taken several times are summed."""
        return sorted_rows if self.fixes_bits else scatter_rows

    @property
    def save_hidden(self) -> SaveHidden:
        """How outputs of gate and up are kept where the remat policy saves them."""
        chip = self.machine.listed
        saved = REMAT_POLICIES[self.run.training.remat].saved or ()
        if chip and chip.tokens_last and FFN_HIDDEN in saved:
            return save_tokens_last
        return save_as_it_is

    @functools.cached_property
    def links(self) -> DcnAxis:
        """Levels of links under the mesh axes.

        They are slices, and dimensions of the torus where a gather takes levels.
        """
        dcn, chip = self.dcn, self.machine.listed
        if not (self.machine.torus and chip and chip.gathers_in_levels):
            return dcn
        levels = ((axis, gather_levels(degrees)) for axis, degrees in self.machine.torus)
        return dataclasses.replace(
            dcn, torus=tuple((axis, sizes) for axis, sizes in levels if len(sizes) > 1)
        )

    @functools.cached_property
    def expert_nodes(self) -> int:
        """Groups of the devices that split experts, with one row per token and group.

        See models/blocks/experts.py.
        1 where they are in one node or slice. Over several these are the groups: a token's experts
        share a row on the network, and their own are copied inside. With few experts per token that
        saves less than the copies cost, and each device is a group.
        """
        chip = self.machine.chip
        spec = next((layer.experts for layer in self.layout.spec.layers if layer.experts), None)
        devices = self.layout.shape.over(self.layout.expert_axes)
        nodes = self._nodes_of_experts
        if spec is None or nodes == 1 or getattr(self.run.model, "dispatch", None) == "capacity":
            return 1
        saved = (spec.mean_nodes(devices) - spec.mean_nodes(nodes)) * (1 - 1 / nodes)
        copied = spec.experts_per_token * (1 - nodes / devices)
        slower = chip.interconnect.link_bandwidth / chip.network_bandwidth if chip else math.inf
        return nodes if saved > copied / slower else devices

    @property
    def _sends_between_gpu_nodes(self) -> bool:
        """Whether rows of tokens travel to experts between nodes of GPUs."""
        return self.expert_nodes > 1 and self._on_known_gpu

    @property
    def _on_known_gpu(self) -> bool:
        machine = self.machine
        return machine.chip is not None and not (machine.on_tpu or machine.simulated)

    @property
    def _exchange_ranks(self) -> int:
        """Devices of one NVLink domain that send each other rows of experts; 1 where none do."""
        spec = next((layer.experts for layer in self.layout.spec.layers if layer.experts), None)
        if spec is None or getattr(self.run.model, "dispatch", None) == "capacity":
            return 1
        devices = self.layout.shape.over(self.layout.expert_axes)
        chip = self.machine.chip
        # Where each device is a group, all of them exchange at once. Of devices, 64 of 128 GPUs may
        # be in one domain, of 72, which `_nodes_of_experts` cannot know.
        if self.expert_nodes == devices and chip and isinstance(chip.interconnect, Nodes):
            return devices if devices <= self._node_devices else 1
        return devices // self.expert_nodes

    def check_exchange(self) -> None:
        """Raises ConfigError where more devices of an NVLink domain exchange rows
        than XLA's kernel takes."""
        if not self._on_known_gpu:
            return
        ranks = self._exchange_ranks
        version = jaxlib.version.__version__
        most = most_ranks(version)
        if ranks <= most:
            return
        fix = self._smaller_exchange(ranks, most)
        if ranks <= MOST_RANKS:
            fix += f', or pip install "jax[cuda13]>=0.12", whose kernel takes {MOST_RANKS}'
        raise ConfigError(
            f"mesh {self.layout.shape}: rows of tokens go to experts on {ranks} devices of one "
            "NVLink domain",
            f"the exchange kernel of XLA in jaxlib {version} takes {most} "
            "(openxla/xla, issue 47283)",
            fix,
        )

    def _smaller_exchange(self, ranks: int, most: int) -> str:
        """Returns the option with which at most `most` of `ranks` devices exchange rows."""
        shape = self.layout.shape
        for expert in reversed(divisors(shape.expert)):
            if ranks * expert <= most * shape.expert:
                fsdp = shape.fsdp * shape.expert // expert
                return f"--mesh {dataclasses.replace(shape, expert=expert, fsdp=fsdp)}"
        return "--layout auto"

    @property
    def _nodes_of_experts(self) -> int:
        """Nodes or slices over which the devices that split experts are spread."""
        shape = self.layout.shape
        axes = self.layout.expert_axes
        chip = self.machine.chip
        if chip is None or not isinstance(chip.interconnect, Nodes):
            return shape.slices if shape.dcn_axis in axes[:1] else 1
        node = self._node_devices
        if shape.size <= node:
            return shape.slices if shape.dcn_axis in axes[:1] else 1
        # The innermost axes of a mesh fill a node.
        degrees = shape.degrees()
        others = math.prod(degrees[axis] for axis in ("context", "tensor") if axis not in axes)
        room = max(1, node // others)
        devices = shape.over(axes)
        return devices // math.gcd(devices, room)

    @property
    def _node_devices(self) -> int:
        """GPUs that NVLink joins: those of a node of the target, such as 64 of 72 in `gb200:128`.

        Of devices, whose nodes are not known, the most that a node of the chip has.
        """
        if self.machine.mapping is not None:
            return self.machine.mapping.target.topology[-1]
        assert self.machine.chip is not None and isinstance(self.machine.chip.interconnect, Nodes)
        return self.machine.chip.interconnect.devices_per_node

    @functools.cached_property
    def gathered_ahead(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Parameters that are gathered one layer ahead, by stack (models/gather_ahead.py).

        The first are for passes that begin at a layer's start, the second for those that begin with
        its feed-forward half (`RematPolicy.begins_inside`). Experts are too large to have those of
        two layers.
        """
        if self._gathered_within_reason is not None:
            return {}
        training = self.run.training
        found: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        # With offloading it is the setting that was compiled: Llama 3 8B on v6e (docs/log.md).
        offloads = bool(REMAT_POLICIES[training.remat].offloaded) and self.machine.on_tpu
        wanted = {"layer": True, "none": False, "auto": bool(self.links.torus) or offloads}[
            training.gather_ahead
        ]
        for stack, count in self.layout.spec.stacks.items():
            params = self.layout.params[stack]
            placements = self.layout.placements[stack]
            feed_forward = tuple(
                n for n, p in params.items() if getattr(p, "role", None) in ("ffn_in", "ffn_out")
            )
            first = tuple(n for n in params if n not in feed_forward)
            is_gathered = any(placements[n].at_rest != placements[n].in_use for n in first)
            # The gathers of the half that is not first overlap with the other.
            if wanted and count > 1 and is_gathered:
                has_experts = any("E" in params[n].dims for n in feed_forward)
                found[stack] = (first, first if has_experts else feed_forward)
        return found

    @property
    def _gathered_within_reason(self) -> str | None:
        """Why weights are gathered within their own layer; None if they can be gathered ahead."""
        training = self.run.training
        stages = self.layout.shape.stage
        period = self.layout.spec.period
        if self.run.finetune.method == "lora":
            return (
                "its backward pass computes the gradients of all weights, and under adapters "
                "they are frozen"
            )
        if self.layout.spec.runs:
            return (
                "it gathers for the next layer of one kind, and the model's kinds are in any order"
            )
        if period > 1:
            return (
                f"it gathers for the next layer of one kind, and the model's layers repeat "
                f"with a period of {period}"
            )
        if REMAT_POLICIES[training.remat].saved is None:
            return (
                f"it gathers weights again in the backward pass, and remat {training.remat} "
                f"recomputes no layer"
            )
        if stages > 1:
            return (
                f"each of {stages} pipeline stages runs its layers tick by tick, with gathers "
                f"of their own"
            )
        if training.unroll > 1:
            return f"its loop has one layer per iteration, and unroll is {training.unroll}"
        return None

    @property
    def tensor_strategy(self) -> Literal["gather", "ring"]:
        """Whether chunks of the sequence go around a ring over `tensor`.

        A single device gathers nothing.
        """
        if self.layout.shape.tensor == 1:
            return "gather"
        strategy = self.run.training.tensor_strategy
        if strategy == "auto":
            return "ring" if self.machine.on_tpu else "gather"
        return strategy

    @property
    def attention_pieces(self) -> int:
        """Most pieces of the batch whose attention overlaps another's sums over `tensor`.

        1 without a ring.
        """
        low, chip = self.run.training.matmul_precision != "compute", self.machine.listed
        whole = self.tensor_strategy == "gather" or self.layout.shape.context > 1 or low
        return (
            1
            if whole or (self.machine.on_tpu and not (chip and chip.sparse_cores))
            else _ATTENTION_PIECES
        )

    @property
    def scheduled_by_price(self) -> bool:
        """Whether XLA's scheduler for GPUs gets the predicted times.

        Times of experts' kernels are not known to it.
        Not where the run names its own profile or scheduler.
        """
        words = self.run.training.compiler_options
        asked = AUTO in words and not any(word.startswith(_SCHEDULER_OPTIONS) for word in words)
        return (
            asked and self._on_known_gpu and any(layer.experts for layer in self.layout.spec.layers)
        )

    @property
    def exchange_pieces(self) -> int:
        """Pieces of the batch: one travels to experts while another computes.

        1 sends all at once.
        """
        return self._pieces if self.exchanged_at_once_reason is None else 1

    @property
    def _pieces(self) -> int:
        return next((n for n in _EXCHANGE_PIECES if self._sequences % n == 0), 1)

    @property
    def _sequences(self) -> int:
        """Sequences of a microbatch on a device."""
        training = self.run.training
        return training.batch // training.microbatches // self.layout.shape.over(BATCH_AXES)

    @functools.cached_property
    def exchanged_at_once_reason(self) -> str | None:
        """Why the whole batch travels to experts at once.

        None: it travels in pieces.
        """
        layout = self.layout
        training = self.run.training
        nodes = self.expert_nodes
        chip = self.machine.chip
        if nodes == 1 or self.machine.on_tpu or chip is None:
            return "no rows travel to experts between GPU nodes"
        if not self.scheduled_by_price:
            return "nothing overlaps with them with these --training.compiler-options"
        if self._pieces == 1:
            return (
                f"{self._sequences} sequences of a microbatch on a device are no multiple of 2 or 3"
            )
        specs = [layer.experts for layer in layout.spec.layers if layer.experts]
        tokens = self._sequences * training.seq // (layout.shape.context * layout.routed_parts)
        sent = (
            2.0
            * tokens
            * specs[0].row_width(layout.spec.width)
            * specs[0].mean_nodes(nodes)
            * (1 - 1 / nodes)
            / chip.network_bandwidth
        )
        # Each piece has gradients of the experts' weights: of a sum two arrays are read and one is
        # written.
        own = [
            p.size / layout.shape.over(axes_of(where.in_use))
            for _, p, where in layout.leaves
            if "E" in p.dims
        ]
        summed = 3 * 2.0 * (self._pieces - 1) * sum(own) / len(specs) / chip.hbm_bandwidth
        if sent < summed:
            sums = f"sums of the gradients of {self._pieces} pieces {1e3 * summed:.2g} ms"
            return (
                f"the rows of {tokens} tokens take {1e3 * sent:.2g} ms on the network, and {sums}"
            )
        return None

    @functools.cached_property
    def compiler_options(self) -> dict[str, str]:
        """XLA options of run and chip; none on simulated devices.

        Raises ConfigError for a word that is no option.
        """
        options = dict(self.machine.determinism.compiler_options) if self.fixes_bits else {}
        if self._sends_between_gpu_nodes and AUTO in self.run.training.compiler_options:
            options |= _SENT_BETWEEN_NODES
        options |= compiler_options_of(self.machine.listed, self.run.training.compiler_options)
        return {} if self.machine.simulated else options

    @property
    def sends_note(self) -> str | None:
        """Sentence for rows of experts that travel between GPU nodes by NCCL's sends,
        which XLA calls unsupported."""
        decomposer, _ = _SENT_BETWEEN_NODES
        if self.compiler_options.get(decomposer) != "False":
            return None
        return (
            "rows of experts travel between nodes by NCCL's sends, which have not run on two nodes "
            "here and hung for others (docs: Parallelism); XLA's own way sends more: "
            f"--training.compiler-options auto {decomposer}=True"
        )

    @functools.cached_property
    def summed_in_backward(self) -> Tree:
        """Tree of the batch axes over which the backward pass sums a gradient, layer by layer.

        For the matmuls of layers that replicas share (`data`), whose sums then overlap with the
        rest of the backward pass. With several microbatches, or stages, or in low precision, they
        are summed once, at the end.
        """
        return tree_map(self._summed_axes, self.layout.params, self.layout.placements)

    def _summed_axes(self, p: Param, placements: Placements) -> Axes:
        """Returns the batch axes over which the backward pass sums the gradient of a parameter."""
        if self.sums_gradients_last or p.role is None or "L" not in p.dims or p.frozen:
            return ()
        degrees = self.layout.shape.degrees()
        sharded = axes_of(placements.optimizer)
        return tuple(a for a in BATCH_AXES if degrees[a] > 1 and a not in sharded)

    def _check_bits(self) -> None:
        """Raises ConfigError for a run that counts on equal bits,
        which this machine does not give."""
        faults = self.run.faults
        keeps = self.machine.determinism
        if keeps.keeps == "bitwise" or self.fixes_bits:
            return
        truth = "a step that is computed twice would differ without a fault"
        if self.run.training.deterministic:
            asked = "--training.deterministic"
            off = "no --training.deterministic"
        elif faults.check_every:
            asked = f"--faults.check-every {faults.check_every}"
            off = "--faults.check-every 0"
        elif faults.check_replicas:
            asked = f"--faults.check-replicas {faults.check_replicas}"
            off = "--faults.check-replicas 0"
            truth = "replicas may differ without a fault"
        else:
            return
        fix = f"{off}, or another platform"
        if keeps.compiler_options:
            fix = "--training.deterministic"
        raise ConfigError(
            f"{asked} on {self.machine.kind or self.machine.platform}",
            f"{truth}. {keeps.sentence}",
            fix,
        )

    def check(self) -> None:
        """Raises ConfigError for what the run asks for and this machine cannot do."""
        training, machine = self.run.training, self.machine
        self._check_bits()
        if training.matmul_precision != "compute":
            self.quantisation.check_precision(training.matmul_precision, machine)
        if not self.run.model.states_layers:  # then nothing else is chosen
            return
        if REMAT_POLICIES[training.remat].offloaded and not (machine.on_tpu or machine.simulated):
            raise ConfigError(
                f"--training.remat {training.remat} on {machine.kind}",
                "it offloads activations to host memory, which XLA does on TPUs; on GPUs it keeps "
                "them on the device "
                "without an error",
                f"--training.remat {'full' if training.remat == 'offload' else 'projections'}",
            )
        reason = self._gathered_within_reason
        if training.gather_ahead == "layer" and reason is not None:
            raise ConfigError(
                "--training.gather-ahead layer", reason, "--training.gather-ahead auto"
            )
        self.check_exchange()
        _ = self.kernels, self.grouped_matmul


def execution_of(settled: Settled) -> Execution:
    """Returns the decisions that every forward and backward pass of a run follows."""
    finetune = settled.run.finetune
    learned = None
    if finetune.objective == "preferences":
        from meshwright.models.preferences import Preferences

        learned = Preferences(finetune.beta)
    return Execution(
        gather_params=_gather_params(settled),
        links=settled.links,
        summed_in_backward=settled.summed_in_backward,
        sequence=settled.sequence,
        kernels=settled.kernels,
        grouped_matmul=_multiply_groups(settled),
        sum_rows=settled.sum_rows,
        save_hidden=settled.save_hidden,
        expert_axes=settled.layout.expert_axes,
        expert_nodes=settled.expert_nodes,
        gathered_ahead=settled.gathered_ahead,
        tensor_strategy=settled.tensor_strategy,
        attention_pieces=settled.attention_pieces,
        exchange_pieces=settled.exchange_pieces,
        saves_weights=finetune.method != "lora",
        preferences=learned,
    )


def _gather_params(settled: Settled) -> Any:
    """Gathers of weights in the compute dtype, in low precision, or with their adapters."""
    training = settled.run.training
    layout = settled.layout
    gather: Any = plan_gathers(
        layout.params,
        layout.placements,
        compute_dtype=jnp.dtype(training.compute_dtype),
        reduce_dtype=jnp.dtype(training.reduce_dtype),
        dcn=settled.links,
        summed=settled.summed_in_backward,
    )
    if training.matmul_precision != "compute":
        gather = settled.quantisation.low_precision_gather(
            gather,
            layout.params,
            layout.placements,
            training.matmul_precision,
            settled.in_low_precision,
        )
    if settled.run.finetune.method == "lora":
        from meshwright.models.adapters import adapter_gather

        gather = adapter_gather(gather, settled.run.finetune.scale)
    return gather


def _multiply_groups(settled: Settled) -> Any:
    """Function of the grouped matmul of experts; None for a model without."""
    if settled.grouped_matmul is None:
        return None
    if settled.low_precision_experts:
        return settled.quantisation.with_low_precision(settled.grouped_matmul)
    return settled.grouped_matmul.multiply


def gather_levels(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the levels of gathers over an axis.

    degrees: along each torus dimension, outermost first.
    XLA compiles a gather over a closed torus of three dimensions to an all-reduce of the whole
    array; where a dimension is open it does not. The outer level moves nearly all bytes, so it gets
    two dimensions.
    """
    closed = sum(degree >= _RING for degree in degrees) == 3
    return (math.prod(degrees[:2]), math.prod(degrees[2:])) if closed else (math.prod(degrees),)
