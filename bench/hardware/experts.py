"""The exchange of rows between experts, checked and timed in several numbers of updates.

meshwright bench hardware --only bench/hardware/experts.py:measure_experts --out hardware
"""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.bench.hardware.section import Section
from meshwright.bench.microbenchmarks import median_seconds
from meshwright.comm.hierarchical import Level
from meshwright.comm.ragged import pieces_of, plan_exchange, ragged_all_to_all
from meshwright.config import MeshShape
from meshwright.hardware.interconnect import map_axes
from meshwright.hardware.mesh import build_mesh
from xlacensus.interconnect import Route

sys.path.append(str(Path(__file__).parents[1]))
from hardware.steps import target_here

_SHAPES = {"cpu": (16, 64, 16), "": (128, 32768, 2048)}
"""Experts, rows of a device, and width of a row, by platform: Qwen3-30B-A3B with 4,096 tokens on accelerators."""


def measure_experts(section: Section) -> None:
    """Exchanges rows between all devices, in one update per device, one per expert, and in those of a step.

    Over several nodes between these in one update per node, as a step does, and inside each.
    """
    devices = jax.device_count()
    if devices == 1:
        section.notes.append("one device exchanges nothing")
        return
    target, shapes = target_here(section.folder), {"": MeshShape(expert=devices)}
    nodes = 1 if target is None else map_axes(shapes[""], target).spans["expert"].domains
    if 1 < nodes < devices:
        inside = devices // nodes
        shapes = {"between nodes, ": MeshShape(expert=nodes, tensor=inside)}
        shapes["inside nodes, "] = MeshShape(data=nodes, expert=inside)
    experts, rows, width = _SHAPES.get(jax.default_backend(), _SHAPES[""])
    items = dict[str, Callable[[], Mapping[str, Any]]]()
    for where, shape in shapes.items():
        mesh, groups = build_mesh(shape, jax.devices()), max(1, experts // devices)
        path = None if target is None else map_axes(shape, target).route(("expert",))
        pieces = pieces_of(shape.expert * groups, Level(("expert",), shape.expert, None), rows)
        forms = dict.fromkeys(
            [(1, 1), (groups, 1), (groups, pieces)][: 1 if shape.tensor > 1 else 3]
        )
        items |= {
            f"{where}{g} x {n} updates per device": functools.partial(
                _exchange, mesh, g, n, rows, width, path
            )
            for g, n in forms
        }
    section.measure(items)


def _exchange(
    mesh: Mesh, groups: int, pieces: int, rows: int, width: int, path: Route | None
) -> Mapping[str, Any]:
    """Sends rows and takes the derivative, which brings them back: the same bits, with the sums that were sent."""
    n = mesh.shape["expert"]
    sent = (
        np.random.default_rng(0)
        .multinomial(rows, np.ones(n * groups) / (n * groups), n)
        .astype(np.int32)
    )
    sent[:, ::4] = 0  # empty updates
    # Between nodes an exchange is cut into no further pieces.
    room, level = (
        int(sent.reshape(n, n, groups).sum((0, 2)).max()),
        Level(("expert",), n, None, crosses_dcn=True),
    )

    def body(x: jax.Array, sent: jax.Array) -> tuple[jax.Array, jax.Array]:
        counts = sent.reshape(n, groups)
        exchange = plan_exchange(counts, level, room).split(pieces)
        there, send_back = jax.vjp(lambda x: ragged_all_to_all(x, exchange, level, room, room), x)
        return there, send_back(there)[0]

    spec = P("expert")
    step: Any = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    )
    # Small integers, whose sums are exact in any order; zeros are not sent.
    values = np.arange(n * rows, dtype=np.int64) * 2654435761 % 251
    values *= (np.arange(rows) < sent.sum(1)[:, None]).reshape(-1)
    x = jnp.asarray(np.broadcast_to(values[:, None], (n * rows, width)), jnp.bfloat16)
    arguments = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, sent.reshape(-1))]
    there, back = step(*arguments)
    arrived, returned = (
        int(np.asarray(a[:, 0].astype(jnp.float32), np.int64).sum()) for a in (there, back)
    )
    wrong = (
        [f"rows sum to {arrived} where they arrived, {values.sum()} were sent"]
        if arrived != values.sum()
        else []
    )
    if not jnp.array_equal(back, arguments[0]):
        wrong.append(
            f"the derivative brought back other rows: they sum to {returned}, {values.sum()} were sent"
        )
    seconds, num_bytes = (
        median_seconds(step, *arguments)[0] / 2,
        2.0 * int(sent.sum(1).max()) * width,
    )
    return {
        "updates": groups * pieces,
        "seconds": seconds,
        "expected_seconds": path and path.seconds("ragged-all-to-all", num_bytes),
        "bytes_per_second": num_bytes / seconds,
        "problems": [
            f"exchange of experts, {groups} x {pieces} updates per device: {text}" for text in wrong
        ],
    }
