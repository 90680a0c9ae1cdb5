"""Section `experts`: the exchange of rows between experts, checked and timed, in a few numbers of updates."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.bench.hardware.section import Measurement, Section
from meshwright.bench.hardware.steps import target_here
from meshwright.bench.microbenchmarks import median_seconds
from meshwright.comm.hierarchical import Level
from meshwright.comm.ragged import Exchange, all_to_all_counts, pieces_of, plan_exchange, ragged_all_to_all
from meshwright.config import MeshShape
from meshwright.hardware.interconnect import Route, map_axes
from meshwright.hardware.mesh import build_mesh
from meshwright.models.blocks.experts import Experts, Routing, dropless_moe, route
from meshwright.models.kernels.choose import choose_grouped_matmul

_SHAPES = {"cpu": (16, 64, 16, 32), "": (128, 32768, 2048, 768)}
"""Experts, rows of a device, and widths D and F of Qwen3-30B-A3B with 4,096 tokens, by platform."""
_LAYERS, _PER_TOKEN = 4, 8
_BLOCKING = {"gpu": {"xla_gpu_disable_async_collectives": "RAGGEDALLTOALL"}}
"""Compiler options of a program whose exchanges nothing overlaps; none on other platforms."""
_LARGEST_DIFFERENCE = 1e-2
"""Of gradients of the same layers by two programs, relative to the largest: both round to bfloat16."""


def measure_experts(section: Section) -> None:
    """Exchanges rows between all devices in several numbers of updates, and compares layers with blocking ones."""
    devices, platform = jax.device_count(), jax.default_backend()
    if devices == 1:
        section.notes.append("one device exchanges nothing")
        return
    mesh = build_mesh(MeshShape(expert=devices), jax.devices())
    experts, rows, width, hidden = _SHAPES.get(platform, _SHAPES[""])
    experts = max(1, experts // devices) * devices
    target = target_here(section.folder)
    path = None if target is None else map_axes(MeshShape(expert=devices), target).route(("expert",))
    level, own = Level("expert", devices, None), experts // devices
    plan = Exchange(*[np.zeros((devices, own), np.int32)] * 6)  # type: ignore[arg-type]
    chosen = pieces_of(plan, level, rows)
    forms = {(1, 1): "one update per device", (own, 1): "one per expert", (own, chosen): f"{chosen} per expert"}
    items: dict[str, Measurement] = {
        f"exchange, {name}": functools.partial(_exchange, mesh, groups, pieces, rows, width, path)
        for (groups, pieces), name in forms.items()
    }
    items["layers, gradients"] = functools.partial(_layers, mesh, experts, rows // _PER_TOKEN or 1, width, hidden)
    section.measure(items)
    section.facts["a step takes"] = forms[own, chosen]


def _exchange(mesh: Mesh, groups: int, pieces: int, rows: int, width: int, path: Route | None) -> Mapping[str, Any]:
    """Sends rows and brings them back: they are the same bits, and sums of what was sent and of what came are equal."""
    n = mesh.shape["expert"]
    sent = np.random.default_rng(0).multinomial(rows, np.ones(n * groups) / (n * groups), n).astype(np.int32)
    sent[:, ::4] = 0  # empty updates
    room, level = int(sent.reshape(n, n, groups).sum((0, 2)).max()), Level("expert", n, None)

    def body(x: jax.Array, sent: jax.Array) -> tuple[jax.Array, jax.Array]:
        counts = sent.reshape(n, groups)
        exchange = plan_exchange(counts, all_to_all_counts(counts, level), level, room).split(pieces)
        there, send_back = jax.vjp(lambda x: ragged_all_to_all(x, exchange, level, room, room), x)
        return there, send_back(there)[0]

    spec = P("expert")
    step: Any = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    # Small integers, whose sums are exact in any order.
    values = np.arange(n * rows, dtype=np.int64) * 2654435761 % 251
    x = np.broadcast_to(values[:, None], (n * rows, width)).astype(jnp.bfloat16)
    x[(np.arange(n * rows).reshape(n, rows) >= sent.sum(1)[:, None]).reshape(-1)] = 0
    arguments = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, sent.reshape(-1))]
    there, back = step(*arguments)
    total, arrived = (int(np.asarray(jnp.sum(a.astype(jnp.float32)[:, 0]))) for a in (arguments[0], there))
    seconds, num_bytes = median_seconds(step, *arguments)[0] / 2, 2.0 * int(sent.sum(1).max()) * width
    wrong = [] if total == arrived else [f"rows that were sent sum to {total}, those that came to {arrived}"]
    wrong += [] if bool(jnp.array_equal(back, arguments[0])) else ["rows that came back are not those that were sent"]
    name = f"exchange, {groups * pieces} updates per device"
    return {
        "exchange": name,
        "updates": groups * pieces,
        "seconds": seconds,
        "expected_seconds": path and path.seconds("ragged-all-to-all", num_bytes),
        "bytes_per_second": num_bytes / seconds,
        "problems": [f"{name}: {text}" for text in wrong],
    }


def _layers(mesh: Mesh, experts: int, tokens: int, width: int, hidden: int) -> Mapping[str, Any]:
    """Compares the first gradients of layers with experts with the second, and with those of blocking exchanges.

    XLA's overlap of exchanges has corrupted a first backward pass (github.com/marin-community/marin, issue 8077).
    """
    platform = jax.default_backend()
    e = Experts(width, Routing(experts, min(_PER_TOKEN, experts)), hidden, 0.02)
    multiply = choose_grouped_matmul("auto", jax.devices()[0].platform, "bfloat16").multiply

    def loss(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            out, _ = dropless_moe(e, h, route(e.routing, h, w["router"], None), w, multiply)
            return h + out, None

        return jnp.square(jax.lax.scan(layer, h, w)[0].astype(jnp.float32)).sum()

    split, spec, rng = P(None, "expert"), P("expert"), np.random.default_rng(0)
    specs = {"router": P(), "gate": split, "up": split, "down": split}

    def array(shape: tuple[int, ...], spec: P, dtype: str = "bfloat16") -> jax.Array:
        return jax.device_put(
            jnp.asarray(0.02 * rng.standard_normal(shape, np.float32), dtype), NamedSharding(mesh, spec)
        )

    L = _LAYERS
    h = array((mesh.shape["expert"], tokens, width), spec)
    w = {name: array((L, experts, width, hidden), split) for name in ("gate", "up")}
    w |= {"down": array((L, experts, hidden, width), split), "router": array((L, width, experts), P(), "float32")}
    gradients = {name: P("expert") if name == "h" else specs[name] for name in ("gate", "up", "down")}

    def step(h: jax.Array, w: dict[str, jax.Array]) -> dict[str, jax.Array]:
        g = jax.grad(loss, 1)(h, w)
        return {name: g[name] for name in gradients}

    jitted = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, specs), out_specs=gradients, check_vma=False))
    lowered, options = jitted.lower(h, w), _BLOCKING.get(platform)
    compiled = lowered.compile()
    runs, differences = {"first": compiled(h, w), "second": compiled(h, w)}, dict[str, float]()
    seconds, figures = median_seconds(compiled, h, w)[0], dict[str, Any]()
    if options is not None:
        blocking = lowered.compile(compiler_options=options)
        runs["blocking"], figures["blocking_seconds"] = blocking(h, w), median_seconds(blocking, h, w)[0]
    for name, found in list(runs.items())[1:]:
        pairs = [(found[k].astype(jnp.float32), g.astype(jnp.float32)) for k, g in runs["first"].items()]
        differences[name] = max(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in pairs)
    wrong = [
        f"layers with experts: the first gradients differ by {d:.2g} of the largest from the {name} ones"
        for name, d in differences.items()
        if not d <= _LARGEST_DIFFERENCE
    ]
    return {"layers": L, "seconds": seconds, **figures, "differences": differences, "problems": wrong}
