"""Bundles of the TPU's attention kernels, read from libtpu's dump: `python bench/kernel_bundles.py [FILTER...]`.

libtpu compiles a kernel for a chip that is not here and writes its final VLIW bundles. The script compiles splash
attention of JAX and of tokamax with each choice of blocks, counts the bundles of the parts of its grid loop, and
writes them to src/xlacensus/kernel_bundles.json, which the planner and the census price attention with. Rows are kept;
`FILTER` (fused_128_2048, for example) makes the rows anew whose name has one of them. `--check` compares the prices with
the measured kernels of bench/foresight/v6e-kernels.csv.

It needs libtpu and tokamax (docs/install.md). One kernel takes 4 to 30 seconds of a core.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHIPS = {"TPU v6e": ("v6e:2x2", 98304)}
"""Display name -> topology for libtpu, and KiB of VMEM that the chip's compiler options give (hardware/chips.toml)."""
HEAD_SIZES = (128, 64, 256)
SQUARE = (
    (512, 512, 512),
    (1024, 1024, 512),
    (1024, 1024, 1024),
    (2048, 2048, 512),
    (2048, 2048, 2048),
)
"""Queries, keys, and keys of one product."""
MEASURED = ((1024, 512, 512), (512, 1024, 1024), (2048, 1024, 1024))
"""Further blocks of v6e-kernels.csv, whose kernels compare no documents."""
CLOCK_HZ = 1.75e9
"""Of v6e."""
TOKENS = 8192
HEADS = 128
"""Heads of one sequence: operands of 268 MB, which stay in HBM."""
GROUP = 4
"""Query heads of a key head in tokamax's kernels, whose backward kernel adds their gradients in HBM; in JAX's the
bundles are the same for all."""
TOKAMAX = (
    (2048, 2048, 512),
    (2048, 1024, 1024),
    (1024, 1024, 512),
    (1024, 1024, 1024),
    (512, 512, 512),
)
"""Blocks of tokamax's kernels."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One compilation: a forward and a backward pass."""

    chip: str
    library: str
    head_size: int
    fused: bool
    segments: bool
    blocks: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Returns its name for filters."""
        kernel = "fused" if self.fused else "two"
        documents = "" if self.segments else "_plain"
        blocks = "_".join(map(str, self.blocks))
        return f"{self.chip}_{self.library}_{kernel}_{self.head_size}_{blocks}{documents}"


def variants() -> Iterator[Variant]:
    """Yields what is compiled; of two backward kernels only the blocks that their VMEM has room for."""
    for chip in CHIPS:
        for head_size in HEAD_SIZES:
            for blocks in SQUARE:
                yield Variant(chip, "jax", head_size, True, True, blocks)
                if blocks[2] == 512 and blocks[0] <= 1024:
                    yield Variant(chip, "jax", head_size, False, True, blocks)
        for blocks in (*SQUARE, *MEASURED):
            yield Variant(chip, "jax", 128, True, False, blocks)
        yield Variant(chip, "jax", 128, False, False, (512, 512, 512))
        for blocks in TOKAMAX:
            yield Variant(chip, "tokamax", 128, True, True, blocks)


def jax_kernel(variant: Variant) -> tuple[Any, Any]:
    """Returns JAX's kernel of a variant, and its class of documents."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    q, kv, compute = variant.blocks
    backward: dict[str, Any] = {"use_fused_bwd_kernel": True}
    if not variant.fused:
        backward = {"block_q_dq": q, "block_kv_dq": kv}
    kernel = splash.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(
            block_q=q,
            block_kv=kv,
            block_kv_compute=compute,
            block_q_dkv=q,
            block_kv_dkv=kv,
            block_kv_dkv_compute=compute,
            **backward,
        ),
    )
    return kernel, splash.SegmentIds


def tokamax_kernel(variant: Variant) -> tuple[Any, Any]:
    """Returns tokamax's kernel of a variant, and its class of documents."""
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    q, kv, compute = variant.blocks
    kernel = splash.make_splash_mha_single_device(
        masks.CausalMask((TOKENS, TOKENS)),
        config=splash.SplashConfig(
            block_q=q,
            block_kv=kv,
            block_kv_compute=compute,
            block_q_dkv=q,
            block_kv_dkv=kv,
            block_kv_dkv_compute=compute,
        ),
    )
    return kernel, splash.SegmentIds


LIBRARIES = {"jax": jax_kernel, "tokamax": tokamax_kernel}
RUNS = {"jax": 1, "tokamax": 2}
"""Bodies of the loop: tokamax's has one for blocks that the mask cuts, and one for the rest."""


def compile_variant(variant: Variant, dump: Path) -> list[dict[str, Any]]:
    """Compiles the kernels of a variant, and returns their rows."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    topology, vmem = CHIPS[variant.chip]
    q, kv, compute = variant.blocks
    kernel, documents_of = LIBRARIES[variant.library](variant)

    def loss(q_NTH: jax.Array, k_KTH: jax.Array, v_KTH: jax.Array, documents_T: jax.Array) -> Any:
        segments = documents_of(documents_T, documents_T) if variant.segments else None
        return kernel(q_NTH, k_KTH, v_KTH, segment_ids=segments).astype(jnp.float32).sum()

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)
    key_heads = HEADS // GROUP if variant.library == "tokamax" else HEADS
    operands = []
    for heads in (HEADS, key_heads, key_heads):
        shape = (1, heads, TOKENS, variant.head_size)
        operands.append(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding))
    documents = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32, sharding=sharding)
    step = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))
    for old in dump.iterdir():
        old.unlink()
    options = {"xla_tpu_scoped_vmem_limit_kib": str(vmem)}
    step.lower(*operands, documents).compile(compiler_options=options)

    rows = []
    for file in sorted(dump.glob("*splash_mha_*final_bundles.txt")):
        kernel_name = re.search(r"splash_mha_(fwd|dq|dkv).*\d-final_bundles", file.name)
        if kernel_name is None:
            continue
        name = kernel_name[1]
        if name == "dkv" and variant.fused:
            name = "fused"
        rows.append(
            {
                "chip": variant.chip,
                "library": variant.library,
                "kernel": name,
                "head_size": variant.head_size,
                "segments": variant.segments,
                "q": q,
                "kv": kv,
                "kv_compute": compute,
                **count_parts(file.read_text(errors="replace"), RUNS[variant.library]),
            }
        )
    return rows


_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?\s*:")
_BRANCH = re.compile(r"sbr\.rel \((!?)%\w+\) target = \$region(\d+)")
_TARGET = re.compile(r"Start/End empty region (\d+)")


# A branch forward skips a part; the branch backward closes the loop over the grid:
#
#   LB        loop body
#             sbr.rel target = A        start, or a part around all
#   A         sbr.rel target = B        run, once or twice: whole blocks, then those that the mask cuts
#   B         sbr.rel target = C        finish, once or twice: the first query head of a key head, the others
#   C         sbr.rel target = LB
#
# A part outside the one around all is of the pipeline, and counted with the step.
def count_parts(text: str, runs: int = 1) -> dict[str, int]:
    """Returns the bundles of the parts of a kernel's grid loop (`KernelBundles`) from its final bundles."""
    address = 0
    first = 0
    last = 0
    targets: dict[int, int] = {}
    branches: list[tuple[int, int]] = []
    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle is not None:
            address = int(bundle[1], 16)
            if bundle[2] == "LB" and not first:
                first = address
        for region in _TARGET.findall(line):
            targets[int(region)] = address
        for _, region in _BRANCH.findall(line):
            branches.append((address, int(region)))
    parts = []
    for start, region in branches:
        end = targets.get(region, 0)
        if end > start:
            parts.append((start, end))
        elif region not in targets:
            last = start
    inner = [part for part in parts if not _has_part_inside(part, parts)]
    around = [part for part in parts if part[0] > first and part not in inner]
    if around:
        inner = [part for part in inner if _has_part_inside(around[0], [part])]
    sizes = [end - start for start, end in inner]
    finishes = sizes[1 + runs :]
    if not finishes or last <= first or max(sizes) not in sizes[1 : 1 + runs]:
        raise ValueError(f"the grid loop has {len(inner)} parts, not {2 + runs}: {inner}")
    step = last - first + 1 - sum(sizes)
    full = sizes[1]
    return {
        "start": sizes[0],
        "run": sizes[runs],
        "full": full,
        "finish": max(finishes),
        "step": step,
    }


def _has_part_inside(part: tuple[int, int], parts: list[tuple[int, int]]) -> bool:
    """Whether a part has another one inside."""
    return any(part[0] < start and end <= part[1] for start, end in parts)


def check() -> None:
    """Prints the measured forward kernels beside their price, without the factor for stalls."""
    import csv

    from xlacensus.kernel_bundles import KernelBlocks, causal_pairs, find_bundles

    file = Path(__file__).parent / "foresight" / "v6e-kernels.csv"
    ratios = []
    print("| kernel | blocks | measured, ms | bundles, ms | ratio |\n|---|---|---|---|---|")
    for row in csv.DictReader(file.open(encoding="utf-8")):
        if not row["implementation"].startswith("JAX splash") or not row["bq"]:
            continue
        tokens = int(row["seq"])
        heads = int(row["batch"]) * int(row["q_heads"])
        forward = KernelBlocks(int(row["bq"]), int(row["bkv"]), int(row["bkv_compute"]))
        kernel = find_bundles("TPU v6e", "jax", "fwd", 128, forward, segments=False)
        if not row["fwd_ms"] or kernel is None or "SEQ_MINOR" in row["layout"]:
            continue
        pairs = causal_pairs(tokens, kernel.q, kernel.kv)
        measured = float(row["fwd_ms"])
        priced = kernel.cycles(tokens, tokens, pairs) * heads / CLOCK_HZ * 1e3
        ratios.append(measured / priced)
        named = f"{row['id']}, {heads} heads x {tokens}"
        print(f"| {named} | {kernel.blocks} | {measured} | {priced:.3f} | {ratios[-1]:.2f} |")
    print(f"median {statistics.median(ratios):.3f} of {len(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filter", nargs="*")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        check()
        return
    from xlacensus.kernel_bundles import BUNDLES_FILE

    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    if BUNDLES_FILE.is_file():
        for row in json.loads(BUNDLES_FILE.read_text())["kernels"]:
            rows[tuple(row.values())[:8]] = row
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        )
        for variant in variants():
            if not any(word in variant.name for word in given.filter):
                continue
            try:
                made = compile_variant(variant, dump)
            except Exception as error:
                print(f"{variant.name}: {str(error)[:200]}", flush=True)
                continue
            for row in made:
                rows[tuple(row.values())[:8]] = row
            print(f"{variant.name}: {made}", flush=True)
            _write(BUNDLES_FILE, list(rows.values()))


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows, sorted, with the versions that made them."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu", "tokamax")}
    ordered = sorted(rows, key=lambda row: [str(value) for value in row.values()])
    lines = ",\n".join(f"  {json.dumps(row)}" for row in ordered)
    source = "bench/kernel_bundles.py"
    file.write_text(
        f'{{\n "source": "{source}",\n "versions": {json.dumps(versions)},\n "kernels": [\n{lines}\n ]\n}}\n'
    )


if __name__ == "__main__":
    main()
