"""Pictures say which device holds which block, for any rank, layout and size of mesh."""

import itertools
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import ConfigError
from meshwright.hardware.targets import parse_target
from meshwright.views.draw import (
    draw,
    draw_machine,
    format_devices,
    local_view,
    machine_of_target,
    picture_of,
)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))


LAYOUTS = [
    ((16,), P("a")),
    ((16,), P()),
    ((8, 8), P("a", "b")),
    ((8, 8), P(("c", "a"), None)),
    ((8, 8), P(None, ("a", "b", "c"))),
    ((4, 8, 8), P("a", "b", "c")),
    ((2, 4, 8, 2), P("a", None, ("c", "b"))),
    ((), P()),
]


@pytest.mark.parametrize(("shape", "spec"), LAYOUTS)
def test_blocks_are_where_jax_puts_them(shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    where = NamedSharding(mesh, spec)
    picture = draw(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where), "x")
    flat = list(mesh.devices.flat)
    for device, index in where.devices_indices_map(shape).items():
        key = tuple(
            picture.cuts[d].index(s.start or 0) for d, s in enumerate(index)
        )  # fmt: skip
        assert flat.index(device) in picture.holders[key]
    assert sorted(itertools.chain(*picture.holders.values())) == list(range(8))
    panels = picture.panels
    assert sorted(d for panel in panels for cell in panel.cells for d in cell.devices) == list(
        range(8)
    )
    ET.fromstring(picture.svg())  # well-formed
    assert picture.title in str(picture)
    assert ("each block on" in str(picture)) == (picture.copies > 1)


def test_a_real_array_and_one_on_a_single_device(mesh: Mesh) -> None:
    x = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, P("a", None)))
    assert draw(x, "x", "BD").title == "x[B/a, D]  8 x 8"
    assert "0-3" in str(draw(x)) and "4-7" in str(draw(x))
    assert draw(jnp.zeros((3, 3))).holders == {(0, 0): (0,)}
    with pytest.raises(ConfigError, match="no sharding"):
        draw(jax.ShapeDtypeStruct((8,), jnp.float32))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_every_device_holds_one_block_of_any_layout(
    degrees: list[int], data: st.DataObject
) -> None:
    mesh = {f"axis{i}": n for i, n in enumerate(degrees)}
    rank = data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(sorted(mesh)))
    spent = data.draw(st.lists(st.integers(0, rank), min_size=len(order), max_size=len(order)))
    placement = tuple(
        tuple(a for a, d in zip(order, spent, strict=True) if d == dim) for dim in range(rank)
    )
    shape = tuple(data.draw(st.integers(1, 40)) for _ in range(rank))
    picture = picture_of("w", shape, "", placement, mesh)
    size = int(np.prod(degrees))
    assert sorted(itertools.chain(*picture.holders.values())) == list(range(size))
    assert all(cuts[0] == 0 and cuts[-1] == n for cuts, n in zip(picture.cuts, shape, strict=True))
    ET.fromstring(picture.svg())
    assert str(picture)


def test_hundreds_of_devices() -> None:
    mesh = {"fsdp": 64, "tensor": 8}
    picture = picture_of("w", (8192, 28672), "DF", (("fsdp",), ("tensor",)), mesh)
    assert picture.svg().count("<rect") == 512
    assert "and 48 more rows" in str(picture)
    machine = draw_machine(mesh, machine_of_target(parse_target("v5p:8x8x8")))
    assert machine.svg().count("<rect") == 512
    assert len(machine.panels) == 8


def test_a_value_inside_shard_map(mesh: Mesh) -> None:
    seen = []

    def body(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x, ("a", "b"))
        seen.extend([local_view(x, "x"), local_view(total, "y")])
        return total

    spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jax.eval_shape(
        jax.shard_map(body, mesh=mesh, in_specs=P("a", ("b", "c")), out_specs=P(None, "c")), spec
    )
    x, y = seen
    assert x.title == "x 4 x 2 on each device; differs over a, b, c"
    assert y.title == "y 4 x 2 on each device; differs over c" and y.svg().count("<rect") == 8
    assert {"y0", "y1"} <= {word.split(":")[-1] for word in str(y).split()}
    unchecked = jax.shard_map(
        body, mesh=mesh, in_specs=P("a", ("b", "c")), out_specs=P(None, "c"), check_vma=False
    )
    jax.eval_shape(unchecked, spec)
    assert "may differ" in str(seen[-1])
    with pytest.raises(ConfigError, match="not inside a shard_map"):
        local_view(jnp.zeros(3))


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ("", ["fsdp=4: within the host", "tensor=8: within the host"]),
        ("h100:4x8", ["fsdp=4: between nodes", "tensor=8: within a node"]),
        (
            "h100:8x4",
            [
                "fsdp=4: between nodes",
                "tensor=8: within a node for 24 of 28 neighbours, else between nodes",
            ],
        ),
        (
            "v6e:4x8",
            [
                "fsdp=4: along x of the torus, 1 ICI hop to a neighbour",
                "tensor=8: along y of the torus",
            ],
        ),
    ],
)
def test_the_mesh_over_the_machine(machine: str, says: list[str]) -> None:
    picture = draw_machine(
        {"fsdp": 4, "tensor": 8}, machine_of_target(parse_target(machine)) if machine else None
    )
    for line, want in zip(picture.lines, says, strict=True):
        assert line.startswith(want)
    ET.fromstring(picture.svg())
    assert sum(len(panel.cells) for panel in picture.panels) == 32


def test_the_mesh_of_real_devices(mesh: Mesh) -> None:
    assert "simulated devices of this CPU (8 devices)" in draw_machine(mesh).title


@pytest.mark.parametrize(
    ("devices", "room", "text"),
    [((0,), 9, "0"), ((0, 4), 9, "0,4"), ((0, 1, 2), 9, "0-2"), ((0, 2, 4), 9, "0-4 by 2"), ((0, 1, 5), 9, "0,1,5"),
     (tuple(range(0, 64, 3)), 8, "0.. x22"), (tuple(range(0, 64, 3)), 4, "x22")],
)  # fmt: skip
def test_devices_are_spelled_in_the_room_there_is(
    devices: tuple[int, ...], room: int, text: str
) -> None:
    assert format_devices(devices, room) == text
