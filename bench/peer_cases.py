"""Cases of the comparison with MaxText, and the search that both sides get."""

import dataclasses
from collections.abc import Iterator

SPARSE_CORE = "SparseCore"
VMEM = "SparseCore + VMEM"
ALL = "all of SparseCore + VMEM"
QUEUED = "all of SparseCore + VMEM, queued"
NO_OPTIONS = "none"

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_{}=true"
_V5P_KINDS = ("all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
_V6E_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_KINDS = (
    "all_gather",
    "2d_all_gather",
    "3d_all_gather",
    "reduce_scatter",
    "nd_reduce_scatter",
    "all_reduce",
)
_QUEUE = "xla_tpu_enable_sparse_core_offload_queuing_in_lhs=true"

OPTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "v5p": {
        NO_OPTIONS: (),
        SPARSE_CORE: tuple(_OFFLOAD.format(kind) for kind in _V5P_KINDS),
        VMEM: (
            *(_OFFLOAD.format(kind) for kind in _V5P_KINDS),
            "xla_tpu_scoped_vmem_limit_kib=49152",
        ),
        ALL: (*(_OFFLOAD.format(kind) for kind in _KINDS), "xla_tpu_scoped_vmem_limit_kib=49152"),
        # What Meshwright takes on this chip when nothing is said.
        QUEUED: (
            *(_OFFLOAD.format(kind) for kind in _KINDS),
            "xla_tpu_scoped_vmem_limit_kib=49152",
            _QUEUE,
        ),
    },
    "v6e": {
        NO_OPTIONS: (),
        SPARSE_CORE: tuple(_OFFLOAD.format(kind) for kind in _V6E_KINDS),
        VMEM: (
            *(_OFFLOAD.format(kind) for kind in _V6E_KINDS),
            "xla_tpu_scoped_vmem_limit_kib=98304",
        ),
        # What Meshwright takes on this chip when nothing is said.
        ALL: (*(_OFFLOAD.format(kind) for kind in _KINDS), "xla_tpu_scoped_vmem_limit_kib=98304"),
        QUEUED: (
            *(_OFFLOAD.format(kind) for kind in _KINDS),
            "xla_tpu_scoped_vmem_limit_kib=98304",
            _QUEUE,
        ),
    },
}
"""Sets of compiler options that both sides are compiled with, by chip: the search on our side starts from none of its
own, so that a set means the same on both."""

NOT_WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
"""Switches XLA's windowed einsum off. It acts on programs that XLA partitions, as MaxText's; ours has none."""

FUSED = "fused attention in blocks of 2048"
_SPLASH_BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
ATTENTION: dict[str, tuple[str, ...]] = {
    "": (),
    FUSED: (
        "sa_use_fused_bwd_kernel=true",
        *(f"sa_block_{name}=2048" for name in _SPLASH_BLOCKS),
    ),
}
"""MaxText's attention: what it takes when nothing is said, and that of all its tuned configurations for v6e
(`benchmarks/maxtext_trillium_model_configs.py`)."""

_HOST = ("decoder_layer_input", "out_proj", "query_proj", "key_proj", "value_proj")
REMAT: dict[str, dict[str, tuple[str, ...]]] = {
    "maxtext": {
        **{name: (f"remat_policy={name}",) for name in (
            "full", "minimal_with_context", "minimal", "save_dot_except_mlpwi", "save_dot_with_context_except_mlp",
            "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "minimal_offloaded", "qkv_proj_offloaded",
        )},
        "custom, five offloaded": ("remat_policy=custom", *(f"{name}=offload" for name in _HOST)),
    },
    "ours": {
        name: ("--training.remat", name)
        for name in (
            "full", "none", "attention", "projections", "feed_forward", "attention_out", "offload_attention", "offload",
        )
    },
}  # fmt: skip
"""Every remat policy of a side -> its arguments. The first is `full` on both."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one target at one global batch, fully sharded over all chips on both sides."""

    target: str
    """As `--on` takes it."""
    chips: int
    model: str
    """As `meshwright prove` takes it."""
    maxtext_model: str
    maxtext_target: str
    batch: int
    seq: int
    maxtext_more: tuple[str, ...] = ()
    """MaxText's arguments without which the two models differ."""

    @property
    def chip(self) -> str:
        """Name of the chip."""
        return self.target.partition(":")[0]

    def summary(self) -> str:
        """Returns model, machine and tokens in one line."""
        return f"{self.maxtext_model}, {self.chips} {self.chip} ({self.target}), {self.batch} x {self.seq}"


CASES = {
    "7b": Case("v5p:2x2x4", 16, "llama2-7b", "llama2-7b", "v5p-32", 64, 4096),
    "70b": Case("v5p:4x4x8", 128, "llama2-70b", "llama2-70b", "v5p-256", 512, 4096),
    "405b": Case("v5p:8x8x8", 512, "llama3-405b", "llama3.1-405b", "v5p-1024", 512, 8192),
    "8b": Case("v6e:16x16", 256, "llama3-8b", "llama3-8b", "v6e-256", 1024, 8192),
    "mixtral": Case("v5p:4x4x8", 128, "mixtral-8x7b", "mixtral-8x7b", "v5p-256", 512, 4096),
    "qwen3-32b": Case("v5p:4x4x4", 64, "qwen3-32b", "qwen3-32b", "v5p-128", 256, 4096),
    "qwen3-30b-a3b": Case("v5p:4x4x4", 64, "qwen3-30b-a3b", "qwen3-30b-a3b", "v5p-128", 256, 4096),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Choices of one compilation besides model, chips and batch."""

    remat: str | None
    """A policy of the side; None is what the side does when nothing is said."""
    options: str = NO_OPTIONS
    """A name in OPTION_SETS; on our side with `remat` None it is what the chip gets by default."""
    windowed: bool = True
    """Whether XLA may write windowed einsums (MaxText)."""
    reduce_dtype: str = ""
    """Type of our sums of gradients over chips; empty is the default. MaxText's programs sum in bfloat16."""
    microbatches: int = 1
    """MaxText's `gradient_accumulation_steps`; ours chooses its own when nothing is said."""
    attention: str = ""
    """A name in ATTENTION, of MaxText's kernels; ours chooses its own."""

    def slug(self) -> str:
        """Returns a file name."""
        if self.remat is None:
            return "as-shipped"
        words = (
            self.remat,
            self.options,
            *(() if self.windowed else ("not windowed",)),
            *self._more(),
        )
        return "__".join(words).replace(", ", "-").replace(" + ", "-").replace(" ", "-")

    def summary(self) -> str:
        """Returns the choices in words for a table."""
        if self.remat is None:
            return "as shipped"
        options = "no options" if self.options == NO_OPTIONS else self.options
        return ", ".join(
            (
                self.remat,
                options,
                *(() if self.windowed else ("windowed einsum off",)),
                *self._more(),
            )
        )

    def _more(self) -> tuple[str, ...]:
        words = []
        if self.reduce_dtype:
            words.append(f"{self.reduce_dtype} sums")
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if self.attention:
            words.append(self.attention)
        return tuple(words)


SHIPPED = Setting(None)
"""What a side does when nothing is said. MaxText's base.yml has `full` and no options."""


def option_settings(side: str, case: Case) -> Iterator[Setting]:
    """Lists the first half of the search: every set of options with `full`, which fits wherever anything does."""
    for options in OPTION_SETS[case.chip]:
        yield SHIPPED if side == "maxtext" and options == NO_OPTIONS else Setting("full", options)
        if side == "maxtext":
            yield Setting("full", options, windowed=False)
        else:
            yield Setting("full", options, reduce_dtype="bfloat16")


def remat_settings(side: str, best: Setting) -> Iterator[Setting]:
    """Lists the second half: every other remat policy with the options that were best with `full`."""
    for remat in REMAT[side]:
        if remat != "full":
            yield dataclasses.replace(best, remat=remat)


def microbatch_settings(case: Case) -> Iterator[Setting]:
    """Lists MaxText's policies that save more, in two and four microbatches, with the options that were best."""
    for count in (2, 4):
        if case.batch // case.chips % count == 0:
            for remat in (
                "minimal_with_context",
                "save_dot_with_context_except_mlp",
                "save_qkv_proj",
            ):
                for options in (ALL, QUEUED):
                    yield Setting(remat, options, windowed=False, microbatches=count)


def attention_settings(case: Case) -> Iterator[Setting]:
    """Lists MaxText's settings with its fused attention: the policies that save most, and its recipes' offloading."""
    if case.chip != "v6e":
        return
    for setting in microbatch_settings(case):
        if setting.options == ALL:
            yield dataclasses.replace(setting, attention=FUSED)
    for remat in ("save_qkv_proj", "save_out_proj", "full", "custom, five offloaded"):
        yield Setting(remat, ALL, windowed=False, attention=FUSED)


def all_settings(side: str, case: Case) -> Iterator[Setting]:
    """Lists every remat policy with every set of options, after what the side does when nothing is said."""
    yield SHIPPED
    if side == "maxtext":
        yield from microbatch_settings(case)
        yield from attention_settings(case)
    for remat in REMAT[side]:
        for options in OPTION_SETS[case.chip]:
            if side == "ours" or (remat, options) != ("full", NO_OPTIONS):
                yield Setting(remat, options)
            if side == "maxtext":
                yield Setting(remat, options, windowed=False)
            else:
                yield Setting(remat, options, reduce_dtype="bfloat16")


def arguments(side: str, case: Case, setting: Setting) -> list[str]:
    """Returns what follows the program's name on the command line."""
    options = [
        *OPTION_SETS[case.chip][setting.options],
        *(() if setting.windowed else (NOT_WINDOWED,)),
    ]
    remat = () if setting.remat is None else REMAT[side][setting.remat]
    if side == "maxtext":
        each = case.batch // case.chips // setting.microbatches
        words = [
            f"compile_topology={case.maxtext_target}", f"model_name={case.maxtext_model}",
            f"per_device_batch_size={each}", f"max_target_length={case.seq}",
            f"ici_fsdp_parallelism={case.chips}", *case.maxtext_more, *remat, *ATTENTION[setting.attention],
        ]  # fmt: skip
        words += (
            [f"gradient_accumulation_steps={setting.microbatches}"]
            if setting.microbatches > 1
            else []
        )
        return (
            [*words, "compile_xla_flags=" + " ".join(f"--{option}" for option in options)]
            if options
            else words
        )
    words = [
        case.model, "--on", case.target, "--mesh", f"fsdp={case.chips}", "--batch", str(case.batch),
        "--seq", str(case.seq), *remat,
    ]  # fmt: skip
    if setting.reduce_dtype:
        words += ["--training.reduce-dtype", setting.reduce_dtype]
    return words if setting.remat is None else [*words, "--training.compiler-options", *options]
