"""Published training measurements as placed runs: model, hardware, mesh, batch and remat policy of each row.

`published.csv` holds the figures that reports, benchmark pages and logs print of their training runs. A row is priced
where it gives everything that a plan needs; every other row has its reason.
"""

import csv
import dataclasses
import math
import re
from pathlib import Path

from meshwright.config import MeshShape, Run, Training
from meshwright.errors import MeshwrightError
from meshwright.hardware.targets import Target, parse_target
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.sharding.params import count_params

FILE = Path(__file__).with_name("published.csv")


class NotPriced(Exception):
    """Reason why a row is left out."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published measurement."""

    id: str
    system: str
    """Training software."""
    model: str
    placed: PlacedRun
    """The same training as a run of this package."""
    target: Target
    measured: float
    """Published seconds per step."""


def read_rows() -> tuple[list[Row], dict[str, str]]:
    """Returns the rows that can be priced, and the reason for each of the others by its id."""
    rows, left_out = [], {}
    with FILE.open(encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            try:
                rows.append(read_row(row))
            except NotPriced as reason:
                left_out[row["id"]] = str(reason)
    return rows, left_out


def read_row(row: dict[str, str]) -> Row:
    """Reads one row. Raises NotPriced."""
    precision = row["precision"].lower()
    if any(word in precision for word in ("fp8", "float8", "int8", "fp4")):
        raise NotPriced("its precision is below bfloat16")
    if "V100" in row["hardware"] or "v3" in row["hardware"]:
        raise NotPriced("a chip that is not in hardware/chips.py")
    if "MLA" in row["notes"]:
        raise NotPriced("multi-head latent attention, which no family here has")
    model, target = read_model(row), read_target(row)
    batch = re.search(r"GBS=(\d+) seqs", row["per_device_batch or global_batch (tokens)"])
    if not batch:
        raise NotPriced("no global batch")
    sequences, seq = int(batch[1]), int(row["seq_len"])
    mesh, microbatches, options = read_mesh(row, target, sequences)
    training = Training(
        batch=sequences, seq=seq, microbatches=microbatches, remat=read_remat(row, mesh), logits_mib=1024, **options
    )
    run = Run(
        model=model,
        mesh=mesh,
        training=training,
        layout="zero1" if mesh.data > 1 else "fsdp",
        name=row["id"],
        fsdp_min_size=2**20,
    )
    try:
        placed = place_run(run, mesh)
    except MeshwrightError as error:
        raise NotPriced(f"its mesh is refused here: {error.args[0]}") from error
    return Row(row["id"], row["system"], row["model"], placed, target, read_seconds(row, placed, target))


def read_model(row: dict[str, str]) -> Llama:
    """Reads the model by its dimensions; a two-matrix feed-forward becomes SwiGLU of two thirds the width."""
    required = ("layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len")
    missing = [key for key in required if not row[key]]
    if missing:
        raise NotPriced(f"no {missing[0]}")
    notes = row["notes"]
    heads = int(row["n_heads"])
    size = re.search(r"head_dim (\d+)", notes)
    head = int(size[1]) if size else int(row["d_model"]) // heads
    two = "2-matrix" in notes or "MPT" in row["model"] or "GPT" in row["model"].upper().replace("GPT OSS", "")
    shape = dict(
        vocab=int(row["vocab"]), width=int(row["d_model"]), layers=int(row["layers"]), heads=heads,
        kv_heads=int(row["n_kv_heads"] or heads), head_size=head,
        embedding="tied" if "tied" in notes or "MPT" in row["model"] else "untied",
    )  # fmt: skip
    experts = re.search(r"MoE E(\d+) top-?(\d+)", notes)
    wide = [int(n) for n in re.findall(r"\d+", row["d_ff"])]
    if experts:
        return Mixtral(
            **shape, mlp=wide[0], experts=int(experts[1]), experts_per_token=int(experts[2]), expert_mlp=wide[-1],
            shared_experts=1 if "shared" in notes else 0,
        )  # fmt: skip
    width = round(wide[0] * 2 / 3 / 256) * 256 if two else wide[0]
    return Llama(**shape, mlp=width)


# Chips of a slice -> its shape.
_TORUS_3D = {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 192: "4x4x12", 256: "4x8x8",
             512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"}  # fmt: skip
_TORUS_2D = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}


_NAMES = (
    ("TPU7x", "tpu7x"), ("v6e", "v6e"), ("v5p", "v5p"), ("v5e", "v5e"), ("v4", "v4"), ("GB300", "gb300"),
    ("B300", "b300"), ("GB200", "gb200"), ("B200", "b200"), ("H200", "h200"), ("H100", "h100"),
    ("A100 40GB", "a100-40gb"), ("A100", "a100"),
)  # fmt: skip


def read_target(row: dict[str, str]) -> Target:
    """Reads the hardware."""
    hardware = row["hardware"]
    chips = int(row["n_chips"])
    slices = re.search(r" x(\d+)\b", hardware)
    number = int(slices[1]) if slices else 1
    name = next((name for words, name in _NAMES if words in hardware), None)
    if name is None:
        raise NotPriced("a chip that is not in hardware/chips.py")
    if name in ("v4", "v5p", "tpu7x", "v6e", "v5e"):
        shape = (_TORUS_2D if name in ("v6e", "v5e") else _TORUS_3D).get(chips // number)
        given = re.search(r"(\d+x\d+x\d+)", hardware)
        if not shape and not given:
            raise NotPriced(f"a slice of {chips // number} chips of unknown shape")
        return parse_target(f"{number}*{name}:{given[1] if given else shape}")
    return parse_target(f"{name}:{chips}")


def read_mesh(row: dict[str, str], target: Target, sequences: int) -> tuple[MeshShape, int, dict[str, str]]:
    """Reads the mesh, the microbatches, and further options of the training."""
    text = row["mesh_or_parallelism"]
    if not text:
        raise NotPriced("no mesh")
    if "transpose" in text:
        raise NotPriced("FSDP over two dimensions of a weight")
    total = target.devices
    if re.search(r"\bTP\d|\bPP\d|\bEP\d", text) or re.fullmatch(r"FSDP\d* ?\d*( .*)?", text):
        return _megatron(row, text, total, sequences)
    degrees = {key: int(n) for key, n in re.findall(r"\b(?:ici_)?(fsdp|tensor|data|expert)=(-?\d+)", text)}
    between = {key: int(n) for key, n in re.findall(r"dcn_(\w+)=(\d+)", text)}
    if not degrees:
        degrees = {"fsdp": -1}
    known = math.prod(n for n in (*degrees.values(), *between.values()) if n > 0)
    degrees = {key: (total // known if n < 0 else n) for key, n in degrees.items()}
    if "128 devices" in text:
        degrees = {"fsdp": total}
    data = degrees.get("data", 1) * between.get("data", 1)
    fsdp = degrees.get("fsdp", 1) * between.get("fsdp", 1)
    slices = {"data": between.get("data", 1), "fsdp": between.get("fsdp", 1)}
    dcn_axis = max(slices, key=lambda k: slices[k])
    shape = MeshShape(
        data=data, fsdp=fsdp, tensor=degrees.get("tensor", 1), expert=degrees.get("expert", 1),
        slices=target.slices if target.slices > 1 else 1, dcn_axis=dcn_axis,
    )  # fmt: skip
    if shape.size != total:
        raise NotPriced(f"its mesh has {shape.size} devices and its hardware {total}")
    return shape, 1, {}


def _megatron(row: dict[str, str], text: str, total: int, sequences: int) -> tuple[MeshShape, int, dict[str, str]]:
    """Reads degrees in Megatron's and torchtitan's notation: TP8 PP4 DP16."""
    degree = {key: int(n) for key, n in re.findall(r"\b(TP|PP|CP|EP|DP|VP|FSDP|GA)(\d+)", text)}
    tensor, stage, context = (degree.get(key, 1) for key in ("TP", "PP", "CP"))
    sharded = "FSDP" in text and "DP(FSDP)" not in text
    replicas = total // (tensor * stage * context)
    if replicas < 1 or replicas * tensor * stage * context != total:
        raise NotPriced("its degrees do not multiply to its chips")
    expert = degree.get("EP", 1)
    if replicas % expert:
        raise NotPriced("experts over more devices than its data parallel groups have")
    outside_experts = replicas // expert
    local = re.search(
        r"(?:MBS|local batch|per-GPU batch|BS/GPU)=(\d+)", row["per_device_batch or global_batch (tokens)"]
    )
    local_batch = sequences // replicas
    # A pipeline whose microbatch is not given is assumed to have one sequence in it.
    size = int(local[1]) if local else local_batch if stage == 1 else 1
    microbatches = max(1, local_batch // max(1, size)) if stage > 1 or not sharded or "GA" in text else 1
    if "GA" in degree and sharded:
        microbatches = degree["GA"]
    while local_batch % microbatches:
        microbatches -= 1
    # Megatron's distributed optimizer is ZeRO-1 over data; SHARD_GRAD_OP keeps the weights gathered (ZeRO-2).
    shape = MeshShape(
        stage=stage, tensor=tensor, context=context, expert=expert,
        fsdp=outside_experts if sharded and "SHARD_GRAD_OP" not in text else 1,
        data=1 if sharded and "SHARD_GRAD_OP" not in text else outside_experts,
    )  # fmt: skip
    virtual_stages = degree.get("VP", 1)
    options = (
        {"pipeline_schedule": "interleaved", "virtual_stages": virtual_stages}
        if stage > 1 and virtual_stages > 1
        else {}
    )
    if stage > 1 and "offload" not in row["remat"].lower():
        options["stage_saves"] = "layers"
    if context > 1:
        options["context_strategy"] = "all_gather" if stage > 1 else "ring"
    return shape, microbatches, options


def read_remat(row: dict[str, str], mesh: MeshShape) -> str:
    """Returns the nearest remat policy of this package."""
    text, mesh_text = row["remat"].lower(), row["mesh_or_parallelism"]
    if "offload" in text and ("q" in text.split("custom:")[-1] or "out_proj" in text):
        return "offload_attention"
    if "offload" in text:
        return "offload"
    if text in ("none", "none at 8k"):
        return "attention"
    if "per-op selective" in text or "save_dot_with_context" in text:
        return "feed_forward"
    if "selective" in text and row["system"] == "PyTorch FSDP":
        return "feed_forward"
    if "selective" in text or "minimal" in text:
        return "projections"
    if "full" in text or "activation checkpointing" in text or text == "yes":
        return "full"
    if "custom" in text:
        return "feed_forward"
    if text == "" and ("TP" in mesh_text or "PP" in mesh_text):
        return "attention"  # Megatron-Core's recipes save all but the scores of flash attention
    return "full" if text == "" and row["hardware"].startswith("TPU") else "attention"


def read_seconds(row: dict[str, str], placed: PlacedRun, target: Target) -> float:
    """Returns the measured seconds per step: given, or from tokens/s, or from FLOP/s by the publisher's convention."""
    if row["measured_step_time_s"]:
        return float(row["measured_step_time_s"])
    derived = re.search(r"derived_step_s=([\d.]+)", row["notes"])
    if derived:
        return float(derived[1])
    training = placed.run.training
    tokens = training.batch * training.seq
    if row["measured_tokens_per_s_per_chip"]:
        return tokens / (float(row["measured_tokens_per_s_per_chip"]) * target.chips)
    if not row["measured_tflops_per_chip"]:
        raise NotPriced("no measured speed")
    attention = sum(12 * a.heads * a.head_size for a in placed.spec.attention) * training.seq * tokens
    causal = "causal attention FLOPs" in row["notes"] and "non-causal" not in row["notes"]
    flops = 6 * count_params(placed.params) * tokens + attention * (0.5 if causal or "Meta" in row["system"] else 1.0)
    return flops / (float(row["measured_tflops_per_chip"]) * 1e12 * target.chips)
