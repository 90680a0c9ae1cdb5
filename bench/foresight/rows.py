"""Published training measurements as placed runs: model, hardware, mesh, batch and remat policy of each row.

`published.csv` holds the figures that reports, benchmark pages and logs print of their training runs. A row is priced
where it gives everything that a plan needs; every other row has its reason. `vtrain.csv` is every second row of the two
tables of VIA-Research/vTrain, data/ (arXiv:2312.12391; the repository has no licence file): `V-multi` was measured,
`V-single` are that program's own predictions (`read_vtrain`).
"""

import csv
import dataclasses
import hashlib
import math
import re
from pathlib import Path

import jax
from other_programs import FLASH2, SOFTWARE, FusedKernel, Software

from meshwright.config import MeshShape, Training
from meshwright.errors import MeshwrightError
from meshwright.hardware.targets import Target, parse_target
from meshwright.models.families.deepseek import Deepseek
from meshwright.models.families.gpt2 import Gpt2
from meshwright.models.families.gpt_oss import GptOss
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.model import Model
from meshwright.models.quantisation import MatmulPrecision
from meshwright.planner.estimate import Estimate
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.sharding.layouts import MEGATRON
from meshwright.sharding.params import Param, count_params, is_param
from meshwright.sharding.placement import Layout
from meshwright.trust import own

FILE = Path(__file__).with_name("published.csv")
VTRAIN = Path(__file__).with_name("vtrain.csv")
NVFP4 = MatmulPrecision(
    "nvfp4", "e2m1 in blocks of 16", "nvfp4", "mx", gradient="float8_e4m3fn", block=16
)
"""Precision of some published runs, which no run of this package can have."""
ZERO1 = Layout(
    MEGATRON,
    (),
    ("expert", "data", "context"),
    summary="whole parameters, optimizer state sharded (ZeRO-1)",
)
"""Layout of Megatron-Core: also parameters outside of experts are whole on all devices of `expert`."""

# Sizes that rows leave out, from the published configurations of the models.
_SIZES = {
    # arXiv:2402.16819, table 1; arXiv:2406.11704, table 1: squared ReLU, eight KV heads.
    "Nemotron4 15B": dict(n_heads=48, n_kv_heads=8, d_ff=24576),
    "Nemotron4 340B": dict(d_model=18432, n_heads=96, n_kv_heads=8, d_ff=73728),
    # Hugging Face, Qwen/Qwen3-30B-A3B, config.json.
    "Qwen3_30B_a3B": dict(layers=48, d_model=2048, n_heads=32, n_kv_heads=4, d_ff="768 moe", vocab=151936,
                          notes="MoE E128 top8; head_dim 128"),
    # Hugging Face, Qwen/Qwen3-235B-A22B, config.json: 64 heads of 128, not of 4096 / 64.
    **{name: dict(notes="head_dim 128") for name in ("qwen3-235b-a22b", "Qwen3_235B_a22B")},
    # NVIDIA/NeMo, examples/nlp/language_modeling/conf and recipes, gpt3_20b and gpt3_5b; PAX's GPT 5B has its sizes.
    "GPT3-20B": dict(layers=44, d_model=6144, n_heads=48, d_ff=24576, vocab=51200),
    "GPT 5B": dict(layers=24, d_model=4096, n_heads=32, d_ff=16384, vocab=51200),
    "GPT 175B": dict(vocab=51200),
    "GPT3-175B": dict(vocab=51200),
    # Hugging Face, codellama/CodeLlama-34b-hf, config.json.
    "Llama2-34B": dict(layers=48, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=22016, vocab=32000),
    # apple/axlearn, axlearn/experiments/text/gpt/fuji.py@01ebc3f: shared_lm_head, 4M tokens per step.
    "fuji-7B v2": dict(vocab=32768, notes="tied", seq_len=4096, batch="GBS=1024 seqs", mesh="data=-1, fsdp=256"),
}  # fmt: skip
# NVIDIA/NeMo, nemo/collections/llm/recipes/nemotron4_340b.py: twelve virtual stages.
_VIRTUAL_STAGES = {"Nemotron4 340B": 12, "Llama 3 405B": 8}
"""Virtual stages where a row does not say. Each of Meta's 126 layers is a part (arXiv:2407.21783, section 3.3.2)."""
_OFFLOADED = {("LLAMA3_70B", "GB200", "FSDP64"): 40 / 80}
"""Megatron-Bridge, scripts/performance/configs/llama, `cpu_offloading_num_layers` of the layers."""
# Bytes/s per GPU between nodes, where a row's machine has another network than its chip's in hardware/chips.py.
_NETWORKS = (
    # A3 High (h100-80gb-8): four interfaces of 200 Gbit/s for eight GPUs; NCCL reached 83 GB/s, and 318 on A3 Mega.
    ("(A3)", 100e9 / 8),
    ("400Gbps", 50e9 / 8),  # pytorch.org/blog/maximizing-training: of a node of eight
    ("800Gbps", 100e9 / 8),
)

_PROGRAMS = (
    ("MaxText", "MaxText"), ("AXLearn", "MaxText"), ("PAX", "PAX"), ("NeMo", "Megatron-Core"),
    ("Megatron-Bridge (NeMo 26.06)", "Megatron-Core 2026.06"),
    ("Megatron-Bridge (NeMo 26.08)", "Megatron-Core 2026.06"),
    ("Megatron-Bridge", "Megatron-Core"), ("Megatron-Core", "Megatron-Core"), ("Megatron-LM", "Megatron-LM"),
    ("torchtitan", "torchtitan"), ("PyTorch FSDP", "torchtitan"), ("LLM-Foundry", "PyTorch"), ("nanotron", "PyTorch"),
    ("Meta", "Meta"),
)  # fmt: skip
"""Start of the system of a row, and the name of its program in other_programs.py."""


_WHOLE_LOGITS = 2**20
"""MiB of logits at once: other programs compute those of a microbatch together."""


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
    software: Software
    """The program's constants."""
    target: Target
    measured: float
    """Published seconds per step."""
    memory: float | None
    """Published peak bytes of a device."""
    states_remat: bool
    """Whether the row, or the published configuration of its program, says what the backward pass recomputes."""
    offloaded: float = 0.0
    """Fraction of its layers whose activations the program keeps in host memory."""

    def bytes(self, predicted: Estimate) -> float:
        """Returns the predicted peak bytes of a device."""
        # Other programs pad sizes that `fsdp` of 24, 48 or 96 does not divide, and shard (`place`).
        odd = self.placed.layout.shape.data if self.system == "PyTorch FSDP" else 1
        state = sum(
            predicted.memory[name] for name in ("parameters", "optimizer state", "gradients")
        )
        return (
            predicted.bytes
            - state * (1 - 1 / odd)
            - self.offloaded * predicted.memory["activations"]
        )

    @property
    def is_fitted(self) -> bool:
        """Whether constants may be fitted on the row: the hash of its id is even."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 0


def read_rows() -> tuple[list[Row], dict[str, str]]:
    """Returns the measured rows that can be priced, and the reason for each of the others by its id."""
    rows, left_out = [], {}
    with FILE.open(encoding="utf-8") as opened:
        for row in csv.DictReader(opened):
            try:
                rows.append(read_row(row))
            except NotPriced as reason:
                left_out[row["id"]] = str(reason)
    return rows + read_vtrain("V-multi"), left_out


def read_vtrain(table: str) -> list[Row]:
    """Reads one table of vTrain: `V-multi`, Megatron on 64 to 512 A100, or `V-single`, 2 to 8 A100.

    V-single is no measurement: over microbatches, layers and replicas its times are sums to 13 us at the median, as
    vTrain composes them from the operators of one traced layer (src/predictor.py). It has that program's meaning: no
    recomputation on the last stage, so none without a pipeline, and a vocabulary of 50257. Megatron recomputed whole
    layers (config/validation, `use_checkpoint`) and pads the vocabulary.
    """
    with VTRAIN.open(encoding="utf-8") as opened:
        return [_vtrain_row(row) for row in csv.DictReader(opened) if row["id"].startswith(table)]


def _vtrain_row(row: dict[str, str]) -> Row:
    measured = row["id"].startswith("V-multi")
    size = {key: int(row[key]) for key in row if key not in ("id", "seconds")}
    mesh = MeshShape(stage=size["stage"], data=size["data"], tensor=size["tensor"])
    multiple = 128 * mesh.tensor
    model = Gpt2(
        vocab=-(-50257 // multiple) * multiple if measured else 50257 // mesh.tensor * mesh.tensor,
        vocab_multiple=multiple if measured else 1, width=size["hidden"], layers=size["layers"],
        heads=size["heads"], positions=size["seq"],
    )  # fmt: skip
    training = Training(
        batch=size["global_batch"], seq=size["seq"], logits_mib=_WHOLE_LOGITS, param_dtype="bfloat16",
        microbatches=size["global_batch"] // (size["data"] * size["micro_batch"]), reduce_dtype="bfloat16",
        remat="full" if measured else "none", stage_saves="layers", pipeline_schedule="1f1b",
    )  # fmt: skip
    target = parse_target(f"a100:{size['gpus']}")
    # 800 Gbit/s per node (config/validation, `inter_node_bandwidth`).
    target = dataclasses.replace(
        target, chip=dataclasses.replace(target.chip, network_bandwidth=100e9 / 8)
    )
    run = Run(model=model, mesh=mesh, training=training, name=row["id"], fsdp_min_size=2**20)
    placed = without_padding(place_run(run, mesh))
    system = "Megatron-LM" if measured else "vTrain"
    software = dataclasses.replace(SOFTWARE[system], splits_sequence=False)
    return Row(
        row["id"], system, f"GPT {size['layers']} x {size['hidden']}", placed, software, target,
        float(row["seconds"]), None, True,
    )  # fmt: skip


def read_row(row: dict[str, str]) -> Row:
    """Reads one row. Raises NotPriced."""
    row = fill_in(row)
    if "V100" in row["hardware"] or "v3" in row["hardware"]:
        raise NotPriced("a chip that is not in hardware/chips.py")
    if "Mamba" in row["model"]:
        raise NotPriced("layers of Mamba, which this reader does not build")
    model, target, software = read_model(row), read_target(row), software_of(row)
    batch = re.search(r"GBS=(\d+) seqs", row["per_device_batch or global_batch (tokens)"])
    if not batch:
        raise NotPriced("no global batch")
    # Two slices of which the row counts the chips of one, and the sequences too.
    twice = 2 if "2 slices" in row["notes"] else 1
    target = dataclasses.replace(target, slices=twice * target.slices)
    sequences, seq = twice * int(batch[1]), int(row["seq_len"])
    mesh, microbatches, options = read_mesh(row, target, sequences)
    training = Training(
        batch=sequences, seq=seq, microbatches=microbatches, remat=read_remat(row, mesh), logits_mib=_WHOLE_LOGITS,
        matmul_precision=read_precision(row, target),
        reduce_dtype="bfloat16" if reduces_in_16_bits(row) else "float32",
        # Megatron keeps parameters in 16 bits; its optimizer has the float32 ones.
        param_dtype="bfloat16" if software.name.startswith("Megatron") else "float32",
        **options
    )  # fmt: skip
    placed = place(row, model, mesh, training)
    if isinstance(software.kernel, FusedKernel):
        kernel = software.kernel.at(seq / mesh.context, target.chip.family)
        software = dataclasses.replace(software, kernel=kernel)
    seconds = read_seconds(row, placed, target)
    gib = row["memory_per_chip_GiB"]
    return Row(
        row["id"], row["system"], row["model"], placed, software, target, seconds,
        float(gib) * 2**30 if gib else None, bool(row["remat"]) or row["system"].startswith("Megatron-Bridge"),
        _OFFLOADED.get((row["model"], row["hardware"], row["mesh_or_parallelism"][:6]), 0.0),
    )  # fmt: skip


def fill_in(row: dict[str, str]) -> dict[str, str]:
    """Returns a row with the sizes that its model's published configuration has, and batch and mesh of its program."""
    filled = dict(row)
    for key, value in _SIZES.get(row["model"], {}).items():
        filled[key] = f"{row['notes']}; {value}" if key == "notes" else row.get(key) or str(value)
    if row["model"].startswith("GPT") and not row["d_ff"] and row["d_model"]:
        filled["d_ff"] = str(4 * int(row["d_model"]))
    batch = "per_device_batch or global_batch (tokens)"
    filled[batch] = row[batch] or filled.pop("batch", "")
    filled["mesh_or_parallelism"] = filled.pop("mesh", row["mesh_or_parallelism"])
    if row["system"] == "nanotron":
        filled[batch] += f"; GBS={re.findall(r'MBS=([0-9]+)', row[batch])[0]} seqs"
    return filled


def software_of(row: dict[str, str]) -> Software:
    """Returns the program of a row. Raises NotPriced where its constants are not known."""
    name = next((name for start, name in _PROGRAMS if row["system"].startswith(start)), None)
    if name is None:
        raise NotPriced("a program that other_programs.py does not have")
    software = SOFTWARE[name]
    if row["system"] == "nanotron" or (
        "NVIDIA/NeMo" in row["source_repo_or_paper"] and "H100" in row["hardware"]
    ):
        # nanotron and NeMo 24.07, before FlashAttention-3
        software = dataclasses.replace(software, kernel=FLASH2, logit_bytes=4)
    if name == "Megatron-LM" and "sequence parallel" not in row["remat"]:
        software = dataclasses.replace(software, splits_sequence=False)
    if row["system"].startswith("Megatron-Bridge") and (row["hardware"], row["model"]) != (
        "B300",
        "Qwen3_235B_a22B",
    ):
        # HybridEP, DeepEP (scripts/performance/configs: `moe_flex_dispatcher_backend`); B300's 235B has "alltoall".
        software = dataclasses.replace(software, rows_by="device")
    if row["system"].startswith("Megatron-Bridge"):
        # TransformerEngine's loss writes the gradient over the logits, in bfloat16 (`cross_entropy_fusion_impl`).
        software = dataclasses.replace(software, logit_bytes=1)
    if row["system"] == "torchtitan" and "TP" in row["mesh_or_parallelism"]:
        # loss_parallel holds four arrays in float32: logits less their maximum, exponentials, gradient, their product.
        software = dataclasses.replace(software, logit_bytes=8)
    if row["system"].startswith("MaxText") and "query/key/value_proj" in row["remat"].replace(
        "q,k,v", "query/key/value_proj"
    ):
        # Its recipes for v6e offload what surrounds attention, not its output: 36 layers of 2 x 9.41 + 13.87 ms of splash
        # are the 1.175 s of a profile (v6e-kernels.csv, k034).
        software = dataclasses.replace(software, attention_again=True)
    # Without AsyncTP, PyTorch's collectives of tensor parallelism are whole.
    whole = row["system"] == "torchtitan" and "AsyncTP" not in row["mesh_or_parallelism"]
    return dataclasses.replace(software, tensor_overlap=0.0) if whole else software


def read_precision(row: dict[str, str], target: Target) -> str:
    """Returns the recipe of a row's matmuls, as `--training.matmul-precision` names it."""
    text = row["precision"].lower()
    if "fp4" in text:
        return own("rows:NVFP4")
    if "int8" in text:
        return "int8"
    if "fp8" not in text and "float8" not in text:
        return "compute"
    if target.chip.flops_fp8 is None:
        raise NotPriced("float8 on a chip without a unit for it")
    return "mxfp8" if "mx" in text else "fp8_rowwise" if "rowwise" in text else "fp8"


def reduces_in_16_bits(row: dict[str, str]) -> bool:
    """Returns whether gradients are summed in bfloat16: Composer's PURE, the blog's bfSixteen policy, NVIDIA's recipes.

    Those have `grad_reduce_in_fp32 = False`: scripts/performance of Megatron-Bridge and (helpers.py) of NeMo. MaxText's
    are summed as their matmul wrote them, before the cast (docs/peers.md; jax-ml/jax issue 27496).
    """
    nvidia = row["system"].startswith(("NeMo", "Megatron-Bridge"))
    maxtext = row["system"].startswith(("MaxText", "AXLearn"))
    return "mp=PURE" in row["precision"] or row["system"] == "PyTorch FSDP" or nvidia or maxtext


def place(row: dict[str, str], model: Model, mesh: MeshShape, training: Training) -> PlacedRun:
    """Places the run. Raises NotPriced where its mesh is refused.

    Where `fsdp` or `data` divides no size (24, 48, 96), only the power of two in `fsdp` shards and the rest replicates:
    other programs pad, which sends as much.
    """
    odd = mesh.fsdp // (mesh.fsdp & -mesh.fsdp)
    replicated = dataclasses.replace(mesh, fsdp=mesh.fsdp // odd, data=mesh.data * odd)
    layout = own("rows:ZERO1") if mesh.fsdp == 1 else "zero1" if mesh.data > 1 else "fsdp"
    reason = ""
    for whole, name in ((mesh, layout), (replicated, "fsdp")):
        run = Run(
            model=model,
            mesh=whole,
            training=training,
            name=row["id"],
            fsdp_min_size=2**20,
            layout=name,
        )
        try:
            return without_padding(place_run(run, whole))
        except MeshwrightError as error:
            reason = str(error.args[0])
    raise NotPriced(f"its mesh is refused here: {reason}")


def without_padding(placed: PlacedRun) -> PlacedRun:
    """Returns the run with the rows of layers alone: only this package pads stacks so that all stages have as many."""

    def unpad(p: Param) -> Param:
        return dataclasses.replace(p, shape=p.logical_shape, order=None, rows=None)

    params = jax.tree.map(unpad, placed.layout.params, is_leaf=is_param)
    return dataclasses.replace(placed, layout=dataclasses.replace(placed.layout, params=params))


def read_model(row: dict[str, str]) -> Llama | GptOss:
    """Reads the model by its dimensions; a two-matrix feed-forward becomes SwiGLU of two thirds the width."""
    required = ("layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len")
    missing = [key for key in required if not row[key]]
    if missing:
        raise NotPriced(f"no {missing[0]}")
    notes = row["notes"]
    if "MLA" in notes:
        return read_latent_model(row)
    if "gemma" in row["model"]:
        raise NotPriced("windows of attention that it leaves out")
    heads = int(row["n_heads"])
    size = re.search(r"head_dim (\d+)", notes)
    head = int(size[1]) if size else int(row["d_model"]) // heads
    name = row["model"].upper().replace("GPT OSS", "")
    two = "2-matrix" in notes or any(word in name for word in ("MPT", "GPT", "NEMOTRON4"))
    shape = dict(
        vocab=int(row["vocab"]), width=int(row["d_model"]), layers=int(row["layers"]), heads=heads,
        kv_heads=int(row["n_kv_heads"] or heads), head_size=head,
        embedding="tied" if "tied" in notes or "MPT" in row["model"] else "untied",
    )  # fmt: skip
    experts = re.search(r"MoE E(\d+) top-?(\d+)", notes)
    wide = [int(n) for n in re.findall(r"\d+", row["d_ff"])]
    if experts and "oss" in row["model"].lower():
        del shape["embedding"]
        return GptOss(
            **shape, experts=int(experts[1]), experts_per_token=int(experts[2]), expert_mlp=wide[-1],
            expert_buffer_factor=1.0,
        )  # fmt: skip
    if experts:
        return Mixtral(
            **shape, mlp=wide[0], experts=int(experts[1]), experts_per_token=int(experts[2]), expert_mlp=wide[-1],
            shared_experts=1 if "shared" in notes else 0, expert_buffer_factor=1.0,
            # The weight of a single expert is its score: scaled to sum to one, it would be 1 whatever the router says.
            normalize_top_k=int(experts[2]) > 1,
        )  # fmt: skip
    width = round(wide[0] * 2 / 3 / 256) * 256 if two else wide[0]
    return Llama(**shape, mlp=width)


def read_latent_model(row: dict[str, str]) -> Deepseek:
    """Reads a model with latent attention: all of the rows are DeepSeek-V3, whose ranks they do not repeat.

    Without its layer of multi-token prediction: a pipeline here has none, and it is one layer and one unembedding more.
    """
    model = find_recipe("deepseek-v3").model
    assert isinstance(model, Deepseek)
    stated = (int(row["layers"]), int(row["d_model"]), int(row["n_heads"]))
    if stated != (model.layers, model.width, model.heads):
        raise NotPriced(
            f"latent attention of a model with {stated} layers, width and heads, whose ranks it leaves out"
        )
    # The rows balance the experts' load by force.
    return dataclasses.replace(model, vocab=int(row["vocab"]), expert_buffer_factor=1.0)


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
        target = parse_target(f"{number}*{name}:{given[1] if given else shape}")
    else:
        target = parse_target(f"{name}:{chips}")
    chip = target.chip
    memory = float(_MEMORY[name] * 2**20) if name in _MEMORY else chip.hbm_bytes
    network = next((n for words, n in _NETWORKS if words in hardware), chip.network_bandwidth)
    chip = dataclasses.replace(chip, network_bandwidth=network, hbm_bytes=memory)
    if "96GB HBM2e 2.4TB/s" in hardware:
        # At 500 of 700 W: power grows with the third power of the clock.
        clock = (500 / 700) ** (1 / 3)
        chip = dataclasses.replace(
            chip, hbm_bytes=96e9, hbm_bandwidth=2.4e12, flops_bf16=clock * chip.flops_bf16,
            flops_fp8=clock * (chip.flops_fp8 or 0.0),
        )  # fmt: skip
    return dataclasses.replace(target, chip=chip)


_MEMORY = {
    "a100-40gb": 40960, "a100": 81920, "h100": 81559, "h200": 143771, "b200": 183359, "gb200": 189471, "b300": 275040,
    "gb300": 284208,
}  # fmt: skip
"""MiB of a GPU as nvidia-smi prints them; chips.toml has what data sheets say."""


def read_mesh(
    row: dict[str, str], target: Target, sequences: int
) -> tuple[MeshShape, int, dict[str, str]]:
    """Reads the mesh, the microbatches, and further options of the training."""
    text = row["mesh_or_parallelism"]
    if not text:
        raise NotPriced("no mesh")
    total = target.devices
    if "transpose" in text:  # FSDP over two dimensions of a weight gathers as much as over one
        text = f"fsdp={total}"
    if re.search(r"\bTP\d|\bPP\d|\bEP\d", text) or re.fullmatch(r"FSDP\d* ?\d*( .*)?", text):
        return _megatron(row, text, total, sequences)
    given = re.findall(r"\b(dcn_|ici_|)(\w+)=(-?\d+)", text)
    unknown = {key for _, key, n in given if int(n) != 1} - {
        "fsdp",
        "tensor",
        "data",
        "expert",
        "context",
    }
    if unknown:
        raise NotPriced(f"an axis that is not read: {', '.join(sorted(unknown))}")
    degrees = {key: int(n) for level, key, n in given if level != "dcn_"}
    between = {key: int(n) for level, key, n in given if level == "dcn_"}
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
        context=degrees.get("context", 1),
        slices=target.slices if target.slices > 1 else 1, dcn_axis=dcn_axis,
    )  # fmt: skip
    if shape.size != total:
        raise NotPriced(f"its mesh has {shape.size} devices and its hardware {total}")
    return shape, 1, {}


def _megatron(
    row: dict[str, str], text: str, total: int, sequences: int
) -> tuple[MeshShape, int, dict[str, str]]:
    """Reads degrees in Megatron's and torchtitan's notation: TP8 PP4 DP16."""
    degree = {key: int(n) for key, n in re.findall(r"\b(TP|PP|CP|EP|DP|VP|FSDP|GA)(\d+)", text)}
    degree.setdefault("VP", _VIRTUAL_STAGES.get(row["model"], 1))
    tensor, stage, context = (degree.get(key, 1) for key in ("TP", "PP", "CP"))
    # With pipeline stages torchtitan gathers weights and reduces gradients once per step (ZeRO-2), as Meta's 4D does.
    sharded = "FSDP" in text and stage == 1
    replicas = total // (tensor * stage * context)
    if replicas < 1 or replicas * tensor * stage * context != total:
        raise NotPriced("its degrees do not multiply to its chips")
    expert = degree.get("EP", 1)
    if replicas % expert:
        raise NotPriced("experts over more devices than its data parallel groups have")
    outside_experts = replicas // expert
    local = re.search(
        r"(?:MBS|local batch|per-GPU batch|BS/GPU)=(\d+)",
        row["per_device_batch or global_batch (tokens)"],
    )
    local_batch = sequences // replicas
    # A microbatch of a pipeline or of NeMo that is not given is assumed to have one sequence.
    size = (
        int(local[1])
        if local
        else 1
        if stage > 1 or row["system"].startswith("NeMo")
        else local_batch
    )
    accumulates = stage > 1 or not sharded or "GA" in text or "NeMo" in row["system"]
    microbatches = max(1, local_batch // max(1, size)) if accumulates else 1
    if "GA" in degree and sharded:
        microbatches = degree["GA"]
    if row["system"] == "torchtitan" and stage > 1:
        microbatches = stage  # its default
    while local_batch % microbatches:
        microbatches -= 1
    # Megatron's distributed optimizer is ZeRO-1 over data; SHARD_GRAD_OP keeps the weights gathered (ZeRO-2).
    shape = MeshShape(
        stage=stage, tensor=tensor, context=context, expert=expert,
        fsdp=outside_experts if sharded and "SHARD_GRAD_OP" not in text else 1,
        data=1 if sharded and "SHARD_GRAD_OP" not in text else outside_experts,
    )  # fmt: skip
    virtual_stages = degree.get("VP", 1)
    if "interleaved" in text.lower() and virtual_stages == 1:
        given, layers = re.search(r"interleaved (\d)", text), int(row["layers"])
        virtual_stages = (
            int(given[1]) if given else next((v for v in (2, 3) if layers % (v * stage) == 0), 2)
        )
    options = (
        {"pipeline_schedule": "interleaved", "virtual_stages": virtual_stages}
        if stage > 1 and virtual_stages > 1
        else {}
    )
    if stage > 1 and "offload" not in row["remat"].lower():
        options["stage_saves"] = "layers"
    if context > 1:
        # Megatron-Core sends keys and values around a ring; Meta gathers them (arXiv:2407.21783, section 3.3.2).
        options["context_strategy"] = "all_gather" if row["system"] == "Meta (4D)" else "ring"
    return shape, microbatches, options


_OFFLOADED_QKV = "custom: decoder_layer_input,{}=offload"
_REMAT = {
    "none": "attention",
    "none at 8k": "attention",
    "selective recompute + sequence parallel": "attention",  # arXiv:2205.05198, section 5: the scores
    "minimal": "projections",
    "minimal_flash": "projections",
    "dots_saveable": "projections",
    "selective": "feed_forward",  # PyTorch saves every other matmul
    "selective op": "feed_forward",
    "selective layer": "feed_forward",
    "per-op selective ac": "feed_forward",
    "save_dot_with_context_except_mlp": "feed_forward",
    "custom: decoder_layer_input,context,q,k,v,qkv=device": "feed_forward",
    "custom: context,mlpwo=offload": "attention_out",
    **{
        _OFFLOADED_QKV.format(names): "offload_attention"
        for names in ("out_proj,query/key/value_proj", "out_proj,q,k,v", "q,k,v,out_proj")
    },
    "custom: decoder_layer_input=offload": "offload",
    "custom: decoder_layer_input,mlpwo=offload": "offload",
    "custom: out_proj,mlpwo=device": "full",  # neither spares a matmul of the layer
    "full": "full",
    "full ac": "full",
    "full recompute": "full",
    "full (activation recompute)": "full",
    "activation checkpointing": "full",
    "yes": "full",
}
"""Nearest remat policy of this package, by the text of a row."""


def read_remat(row: dict[str, str], mesh: MeshShape) -> str:
    """Returns the nearest remat policy of this package. Raises NotPriced for a text that has none."""
    text, mesh_text = row["remat"].lower(), row["mesh_or_parallelism"]
    if text:
        if text not in _REMAT:
            raise NotPriced(f"remat {text!r}, to which no policy here is near")
        return _REMAT[text]
    if row["system"] == "PAX (Rosetta)" and row["model"] == "GPT 175B":
        return "full"  # nothing else fits
    if row["system"] == "torchtitan":
        return "feed_forward"  # its default: every other matmul is saved
    if "TP" in mesh_text or "PP" in mesh_text:
        return "attention"  # Megatron-Core's recipes save all but the scores of flash attention
    return "full" if row["hardware"].startswith("TPU") else "attention"


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
    rate = float(row["measured_tflops_per_chip"] or 0) * 1e12
    rate = (
        rate
        or float(row["measured_mfu"] or 0)
        / 100
        * target.chip.flops_bf16
        * target.chip.devices_per_chip
    )
    if not rate:
        raise NotPriced("no measured speed")
    return published_flops(row, placed) / (rate * target.chips)


def published_flops(row: dict[str, str], placed: PlacedRun) -> float:
    """Returns the FLOPs of a step as the publisher counts them."""
    training, layers, width = (
        placed.run.training,
        len(placed.layout.spec.layers),
        placed.layout.spec.width,
    )
    tokens = training.batch * training.seq
    if "INCLUDE recompute" in row["notes"]:  # arXiv:2104.04473, equation 3
        vocab = int(row["vocab"])
        return (
            96
            * tokens
            * layers
            * width**2
            * (1 + training.seq / (6 * width) + vocab / (16 * layers * width))
        )
    attention = (
        sum(12 * a.heads * a.head_size for a in placed.layout.spec.attention)
        * training.seq
        * tokens
    )
    causal = "causal attention FLOPs" in row["notes"] and "non-causal" not in row["notes"]
    params = count_params(placed.layout.params)
    if row["system"].startswith("NeMo"):  # a look-up of embeddings is no matmul
        params -= int(row["vocab"]) * width
    return 6 * params * tokens + attention * (0.5 if causal or "Meta" in row["system"] else 1.0)
