"""Measured training steps of Llama 3 8B and Qwen3 8B on eight v6e, as placed runs with their profiles by kind.

`v6e-steps.csv` and `v6e-kernels.csv` are of github.com/vlasenkoalexey/tpu_performance_autoresearch_wiki at 6dbda52d60e0
(2026-08-05): steps and profiles of JAX trainers, torchax and MaxText on real chips, measured by others. Rates of the chip
were read from the lanes l3 and cc; nothing was fitted to cc5 and ag, on which they are checked.
"""

import csv
import dataclasses
import re
from pathlib import Path

from other_programs import SOFTWARE, Software
from rows import NotPriced, Row, place

from meshwright.config import MeshShape, Training
from meshwright.hardware.targets import parse_target
from meshwright.planner.attention import AttentionKernel
from meshwright.runs.recipe import find_recipe

STEPS = Path(__file__).with_name("v6e-steps.csv")
KERNELS = Path(__file__).with_name("v6e-kernels.csv")
CHECKS = ("cc5", "ag")
"""Lanes (beginnings of `lane`) to which nothing is fitted."""
KINDS = (
    "matmul_fusion",
    "attention_kernel",
    "loop_fusion",
    "data_formatting",
    "collective_exposed",
    "other",
)
"""Columns of a profile, `ms_KIND`."""  # fmt: skip

_MODELS = {"Llama3-8B": "llama3-8b", "Qwen3-8B": "qwen3-8b"}
_REMAT = {
    "nothing_saveable": "full",
    "per layer": "full",
    "save_attn": "attention_out",
    "save_qkv_ctx": "feed_forward",
    "save_qkv_ctx_hbm": "feed_forward",
    "query/key/value projections offloaded to host": "offload_attention",
    "offload_attn": "offload_attention",
    "custom: layer input + 4 projections offloaded to host": "offload_attention",
}
"""Nearest remat policy of this package, by the text of a row."""


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """One measured step on v6e."""

    row: Row
    lane: str
    profile: dict[str, float]
    """Seconds of a step by kind of operation; a kind that was not listed is absent."""

    @property
    def is_check(self) -> bool:
        """Whether nothing is fitted to its lane."""
        return self.lane.startswith(CHECKS)


def read_v6e() -> tuple[list[MeasuredStep], dict[str, str]]:
    """Returns the steps that can be priced, and the reason for each of the others by its id."""
    steps = []
    left_out = {}
    with STEPS.open(encoding="utf-8") as opened:
        for fields in csv.DictReader(opened):
            try:
                steps.append(_read(fields))
            except NotPriced as reason:
                left_out[fields["id"]] = str(reason)
    return steps, left_out


TOKAMAX = {"forward": 6.031e-3, "recomputation": 6.031e-3, "backward": 13.438e-3}
"""Seconds of tokamax's splash attention (base-2 exponent, fused reciprocal, a bound on logits, no comparison of
documents) on 3 sequences of 8,192 tokens with 32 heads of 128: k032 of v6e-kernels.csv, of the lane l3."""


def _software(fields: dict[str, str]) -> Software:
    """Returns the program: XLA's, with the attention kernel of the row."""
    software = SOFTWARE["MaxText"]
    if fields["remat"].startswith("custom: layer input + 4 projections"):
        software = dataclasses.replace(software, attention_again=True)
    if not fields["attention_kernel"].startswith("tokamax"):
        return software
    # Two products of 4 H per visible pair, and five in the fused backward kernel.
    forward = 3 * 32 * 4 * 128 * 8192 * 8193 / 2
    flops = {"forward": forward, "recomputation": forward, "backward": 2.5 * forward}
    rates = {name: flops[name] / TOKAMAX[name] for name in flops}
    kernel = AttentionKernel(2.5, flops_per_second=rates)
    return dataclasses.replace(software, kernel=kernel, own_kernel_on_tpu=True)


def _read(fields: dict[str, str]) -> MeasuredStep:
    """Reads one row. Raises NotPriced."""
    if fields["remat"] not in _REMAT:
        raise NotPriced(f"remat {fields['remat'] or 'is not stated'}")
    if fields["attention_kernel"] == "XLA dot-product":
        raise NotPriced("attention without a fused kernel")
    if "NaN" in fields["verdict"]:
        raise NotPriced("its loss is NaN")
    degrees = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", fields["mesh"])}
    if not degrees:
        raise NotPriced("no mesh")
    chips = int(fields["chips"])
    mesh = MeshShape(fsdp=degrees["fsdp"], tensor=degrees.get("tp", 1))
    kernel = "auto"
    if fields["fused_bwd"]:
        kernel = "splash_fused" if fields["fused_bwd"] == "yes" else "splash"
    training = Training(
        batch=round(chips * float(fields["batch_per_chip"])),
        seq=int(fields["seq"]),
        remat=_REMAT[fields["remat"]],
        microbatches=1,
        logits_mib=2**20,
        reduce_dtype="bfloat16",
        param_dtype="bfloat16" if fields["dtypes"] == "weights bf16" else "float32",
        attention_kernel=kernel,
    )
    model = find_recipe(_MODELS[fields["model"]]).model
    placed = place({"id": fields["id"]}, model, mesh, training)
    profile = {}
    for kind in KINDS:
        if fields[f"ms_{kind}"]:
            profile[kind] = float(fields[f"ms_{kind}"]) / 1e3
    row = Row(
        id=fields["id"],
        system=fields["program"],
        model=fields["model"],
        placed=placed,
        software=_software(fields),
        target=parse_target("v6e:2x4" if chips == 8 else "v6e:2x2"),
        measured=float(fields["step_ms"]) / 1e3,
        memory=None,
        states_remat=True,
    )
    return MeasuredStep(row, fields["lane"], profile)
