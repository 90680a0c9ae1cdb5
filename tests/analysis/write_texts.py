"""Writes tests/analysis/texts: the programs compiled for absent hardware.

    python tests/analysis/write_texts.py v5p|v5e|tpu7x|slices|sparsecore|kernels     (needs libtpu)
    python tests/analysis/write_texts.py h100|quantised|dequantised TARGET_CONFIG   (needs jax-cuda13-plugin with ptxas)

The texts are what the chips' own compilers print, without their per-instruction settings, of which the census reads
the cost that a kernel's author estimates.
"""

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from programs import AXES, OFFLOADED, PROGRAMS

from meshwright.comm.hierarchical import DcnAxis, hierarchical_all_reduce
from meshwright.config import MeshShape
from meshwright.hardware.mesh import build_mesh
from meshwright.models import quantisation as quantised
from meshwright.models.blocks.layers import linear
from meshwright.models.quantisation import RECIPES

TEXTS = Path(__file__).parent / "texts"
TPUS = {"v5p": "v5p:2x2x2", "v5e": "v5e:2x4", "tpu7x": "tpu7x:2x2x1"}


SPARSECORE = {
    f"xla_tpu_enable_sparse_core_collective_offload_{name}": "true"
    for name in ("all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
}
"""Compiler options that move collectives to the SparseCores of a v5p."""


def settings_removed(text: str) -> str:
    """Drops the compiler's settings, except for estimated costs of kernels, and the folders of source files."""

    def kept(match: re.Match[str]) -> str:
        cost = re.search(r'"cost_estimate":\{[^}]*\}', match[0])
        return f", backend_config={{{cost[0]}}}" if cost else ""

    text = re.sub(r', backend_config=\{"flag_configs".*?\}(?=$|\n)', kept, text)
    return re.sub(r'"(/[^"]*/)([^/"]+\.py)"', r'"\2"', text)


def write_slices() -> None:
    """Writes a sum over an axis of which two slices have two devices each."""
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", num_slices=2
    ).devices
    mesh = build_mesh(MeshShape.parse("data=2*2,fsdp=4"), list(devices))
    body = functools.partial(hierarchical_all_reduce, axes=("data",), dcn=DcnAxis(2, "data"))
    step = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
    )
    x = jax.ShapeDtypeStruct((64, 128), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    (TEXTS / "slices").mkdir(exist_ok=True)
    (TEXTS / "slices" / "v5e.hlo").write_text(settings_removed(step.lower([x]).compile().as_text()))


def write_sparsecore() -> None:
    """Writes a program whose collectives run on the SparseCores."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TPUS["v5p"]).devices
    mesh = Mesh(np.array(devices).reshape(tuple(AXES.values())), tuple(AXES))
    function, arguments = OFFLOADED.build(mesh)
    text = function.lower(*arguments).compile(compiler_options=SPARSECORE).as_text()
    (TEXTS / "sparsecore").mkdir(exist_ok=True)
    (TEXTS / "sparsecore" / "v5p.hlo").write_text(settings_removed(text))


def write_kernels() -> None:
    """Writes programs of TPU kernels: grouped matmuls with their gradients, attention, one with and one without a cost.

    JAX's cost analysis of them, FLOPs: ragged dot 6,448,742,400; attention's forward kernel 8,640,266,240.
    """
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]
    sharding = SingleDeviceSharding(device)

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def double(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = 2 * x_ref[...]

    def kernels(x: jax.Array) -> jax.Array:
        cost = pl.CostEstimate(flops=123456789, bytes_accessed=2**21, transcendentals=0)
        x = pl.pallas_call(
            double, jax.ShapeDtypeStruct(x.shape, x.dtype), name="with_cost", cost_estimate=cost
        )(x)
        return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), name="without_cost")(
            x
        )

    def experts(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.ragged_dot(x, w, rows).astype("float32")).sum()

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, causal=True).astype("float32").sum()

    programs = {
        "ragged-dot": (
            jax.grad(experts, (0, 1)),
            array(2048, 512),
            array(8, 512, 1024),
            array(8, dtype="int32"),
        ),
        "attention": (jax.grad(attention, (0, 1, 2)), *[array(2, 8, 1024, 128)] * 3),
        "pallas": (kernels, array(512, 512, dtype="float32")),
    }
    (TEXTS / "kernels").mkdir(exist_ok=True)
    for name, (function, *arguments) in programs.items():
        text = jax.jit(function).lower(*arguments).compile().as_text()
        text = re.sub(r"kernel_metadata=\{\n.*?\n\}", "kernel_metadata={}", text, flags=re.DOTALL)
        (TEXTS / "kernels" / f"{name}.hlo").write_text(settings_removed(text))


def write_precision(name: str) -> None:
    """Writes the three products of a linear layer in fp8, compiled for an NVIDIA GPU.

    dequantised: a planted mistake, operands converted back before the product.
    """
    recipe, spec = RECIPES["fp8"], Path(sys.argv[2]).read_text()
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=spec, topology="1x1x8"
    ).devices
    if name == "dequantised":
        product = quantised._product
        quantised._product = lambda a, b, dims, dtype, *scales: product(
            a.astype(dtype), b.astype(dtype), dims, dtype, *scales
        )

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        plan = quantised.WeightPlan(recipe, 1, (), (), (0,) if recipe.scaling == "row" else None)
        values, scale = quantised.quantise(
            jax.lax.stop_gradient(w), quantised.largest_along(w, None), recipe.operand
        )
        return linear(x, quantised.LowPrecisionWeight(values, scale, w, plan))

    def products(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(layer, x, w)
        return y, *pull(g)

    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("data",)), PartitionSpec())
    shapes = ((1024, 512), (512, 2048), (1024, 2048))
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding) for shape in shapes]
    (TEXTS / "precision").mkdir(exist_ok=True)
    text = jax.jit(products).lower(*arguments).compile().as_text()
    (TEXTS / "precision" / f"{name}.hlo").write_text(settings_removed(text))


def main(target: str) -> None:
    if target in ("quantised", "dequantised"):
        return write_precision(target)
    if target == "slices":
        return write_slices()
    if target == "sparsecore":
        return write_sparsecore()
    if target == "kernels":
        return write_kernels()
    if target in TPUS:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target]).devices
    else:
        spec = Path(sys.argv[2]).read_text()
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=spec, topology="1x1x8"
        ).devices
    mesh = Mesh(np.array(devices).reshape(tuple(AXES.values())), tuple(AXES))
    for name, program in PROGRAMS.items():
        function, arguments = program.build(mesh)
        text = function.lower(*arguments).compile().as_text()
        file = TEXTS / target / f"{name.replace(' ', '-')}.hlo"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(settings_removed(text))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(sys.argv[1])
