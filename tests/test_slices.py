"""Several slices: hierarchical collectives give the plain results and send less over DCN; the mesh groups devices."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.analysis.run_census import census_of_train_step
from meshwright.comm.hierarchical import (
    DcnAxis,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.interconnect import machine_of_target
from meshwright.hardware.machine import machine_of_mesh, torus_degrees
from meshwright.hardware.mesh import _in_slices, build_mesh, order_rings
from meshwright.hardware.targets import parse_target
from meshwright.runs.placed_run import place_run
from meshwright.runs.settle import gather_levels, settle

AXES = ("a", "b")


def on_mesh(body: Any, x: np.ndarray, out: P) -> np.ndarray:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES)
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(AXES), out_specs=out, check_vma=False))
    return np.asarray(step(x))


@pytest.mark.parametrize(
    "dcn",
    [
        DcnAxis(2, "b"), DcnAxis(4, "b"), DcnAxis(2, "a"), DcnAxis(1, "a"),
        DcnAxis(1, "a", (("b", (2, 2)),)), DcnAxis(2, "a", (("b", (2, 2)),)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("axes", [("a", "b"), ("b",), ("a",)])
@pytest.mark.parametrize("dim", [0, 1])
def test_hierarchical_collectives_match_plain_ones(
    axes: tuple[str, ...], dcn: DcnAxis, dim: int
) -> None:
    x = np.arange(8 * 8 * 16, dtype=np.float32).reshape(64, 16)
    for hierarchical, plain in (
        (
            lambda x: hierarchical_all_gather(x, axes, dim, dcn),
            lambda x: lax.all_gather(x, axes, axis=dim, tiled=True),
        ),
        (
            lambda x: hierarchical_reduce_scatter(x, axes, dim, dcn),
            lambda x: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True),
        ),
        (
            lambda x: hierarchical_all_reduce([x, x[:3, 5]], axes, dcn)[0],
            lambda x: lax.psum(x, axes),
        ),
        (
            lambda x: hierarchical_all_reduce([x, x[:3, 5]], axes, dcn)[1],
            lambda x: lax.psum(x[:3, 5], axes),
        ),
    ):
        np.testing.assert_array_equal(on_mesh(hierarchical, x, P(AXES)), on_mesh(plain, x, P(AXES)))


def test_a_quarter_of_a_gradient_crosses_dcn() -> None:
    """A gradient summed over 2 slices of 4 devices: each device sends a quarter of it between slices."""
    crossing = census_of_train_step(
        device_run_of(tiny_run(MODELS["llama"], "data=2*4", dropout=0.0))
    )
    flat = census_of_train_step(device_run_of(tiny_run(MODELS["llama"], "data=8", dropout=0.0)))

    def total(census: Any, over: str, *kinds: str) -> float:
        rows = (e for e in census.ledger if e.axes_label == over and (not kinds or e.kind in kinds))
        return float(sum(e.total for e in rows))

    whole = total(flat, "data")
    assert total(crossing, "data") < whole / 100  # metrics alone
    assert total(crossing, "data between 2") == pytest.approx(whole / 4, rel=0.02)
    # On XLA:CPU a reduce-scatter is an all-reduce of which most is dropped.
    assert total(crossing, "data within 4", "all-gather") == pytest.approx(whole, rel=0.02)


def fake_devices(slices: list[int], platform: str = "tpu") -> Any:
    """Returns devices with a slice index, out of order."""
    devices = [
        SimpleNamespace(
            id=i, process_index=i // 2, slice_index=s, platform=platform, device_kind="fake"
        )
        for i, s in enumerate(slices)
    ]
    return list(reversed(devices))


def torus_devices(*degrees: int, slices: int = 1) -> Any:
    """Returns the devices of slices of a torus in row-major order."""
    coordinates = np.ndindex(slices, *degrees)
    return [
        SimpleNamespace(
            id=i, slice_index=c[0], coords=c[1:], core_on_chip=0, platform="tpu", device_kind="fake"
        )
        for i, c in enumerate(coordinates)
    ]


@pytest.mark.parametrize(
    ("devices", "shape", "expected"),
    [
        (torus_devices(4, 4, 4), (64,), {"a": (4, 4, 4)}),
        (torus_devices(4, 4, 4), (4, 16), {"b": (4, 4)}),
        (torus_devices(4, 4, 4), (8, 8), {"a": (4, 2), "b": (2, 4)}),
        (torus_devices(2, 1, 4, slices=2), (16,), {"a": (2, 4)}),
        (torus_devices(8), (8,), {}),
        (torus_devices(2, 2)[::3] + torus_devices(2, 2)[1:3], (4,), {}),  # in no order of the torus
        (fake_devices([0, 0, 0, 0]), (4,), {}),  # without coordinates
    ],
)
def test_dimensions_of_the_torus_under_an_axis(
    devices: Any, shape: tuple[int, ...], expected: Any
) -> None:
    mesh = SimpleNamespace(
        axis_names=AXES[: len(shape)], devices=np.array(devices, object).reshape(shape)
    )
    assert dict(torus_degrees(mesh)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "order"),
    [("TPU v5 lite", [0, 2, 4, 6, 7, 5, 3, 1]), ("TPU v5p", list(range(8)))],
    ids=["v5e", "v5p"],
)
@pytest.mark.parametrize("axis", ["stage", "context", "tensor", "fsdp"])
def test_rings_go_along_a_line_and_back_where_permutes_cannot_go_around(
    axis: str, kind: str, order: list[int]
) -> None:
    """A ring's neighbours are two chips apart at most; axes that send around no ring keep the order of the torus."""
    devices: Any = torus_devices(4, 8)
    for device in devices:
        device.device_kind = kind
    # data=4 over the first dimension, the axis over the second.
    axes = list(MeshShape().degrees())
    places = axes.index("data"), axes.index(axis)
    mesh = np.moveaxis(np.array(devices, object).reshape(4, 8, 1, 1, 1, 1), (0, 1), places)
    folded = np.moveaxis(order_rings(mesh), places, (0, 1)).reshape(4, 8)
    expected = order if axis != "fsdp" else range(8)
    assert [[d.coords for d in row] for row in folded] == [
        [(x, y) for y in expected] for x in range(4)
    ]
    # Two rows of four are a cycle.
    square = np.array(devices[:4] + devices[8:12], object).reshape(
        [8 if a == axis else 1 for a in axes]
    )
    cycle = [0, 1, 2, 3, 11, 10, 9, 8] if axis != "fsdp" else [0, 1, 2, 3, 8, 9, 10, 11]
    assert [d.id for d in order_rings(square).flat] == cycle


@pytest.mark.parametrize(
    ("degrees", "levels"),
    [
        ((4, 4, 4), (16, 4)),
        ((4, 4, 4, 2), (16, 8)),
        ((8, 16), (128,)),
        ((2, 2, 4), (16,)),
        ((2, 8, 8), (128,)),
    ],
)
def test_gathers_over_a_closed_torus_go_in_two_levels(
    degrees: tuple[int, ...], levels: tuple[int, ...]
) -> None:
    assert gather_levels(degrees) == levels


def test_devices_are_grouped_by_slice() -> None:
    shape = MeshShape.parse("data=2*1,tensor=2")
    assert [[d.id for d in part] for part in _in_slices(shape, fake_devices([0, 1, 0, 1]))] == [
        [0, 2],
        [1, 3],
    ]
    with pytest.raises(ConfigError, match=r"data=2\*2, and all devices of each slice"):
        _in_slices(MeshShape(data=4), fake_devices([0, 1, 0, 1]))
    # A mesh of one slice takes GPUs node by node.
    assert [
        [d.id for d in part]
        for part in _in_slices(MeshShape(data=4), fake_devices([0, 1, 0, 1], "gpu"))
    ] == [[0, 2, 1, 3]]
    with pytest.raises(ConfigError, match="there are 3, 1 devices in them"):
        _in_slices(shape, fake_devices([0, 0, 0, 1]))


def test_dcn_axis_has_slices_outermost() -> None:
    mesh = build_mesh(MeshShape.parse("fsdp=2*2,data=2"))
    ids = np.vectorize(lambda d: d.id)(mesh.devices).reshape(2, 4)
    # Devices 0 to 3 stand for one slice, 4 to 7 for the other: halves of fsdp, in every row of data.
    assert ids.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("text", "formatted", "size"),
    [("data=4*2,tensor=2", "data=4*2,tensor=2", 16), ("tensor=2*1", "tensor=2*1", 2)],
)
def test_mesh_text_has_slices(text: str, formatted: str, size: int) -> None:
    shape = MeshShape.parse(text)
    assert str(shape) == formatted and shape.size == size
    assert MeshShape.parse(str(shape)) == shape


def test_slices_must_divide_the_dcn_axis() -> None:
    with pytest.raises(ConfigError, match="6 = 1 \\* 4 \\+ 2"):
        MeshShape(data=6, slices=4)


@pytest.mark.parametrize(
    ("target", "degrees", "mesh"),
    [
        ("v5p:4x4x4", (4, 4, 4), "fsdp=64"),
        ("v5p:4x4x4", (4, 4, 4), "fsdp=16,tensor=4"),
        ("v5p:2x2x4", (2, 2, 4), "fsdp=16"),
        ("v6e:4x4", (4, 4), "data=2,fsdp=8"),
    ],
)
def test_devices_and_their_target_settle_a_run_alike(
    target: str, degrees: tuple[int, ...], mesh: str
) -> None:
    """The step and the plan of a run make the same decisions."""
    shape = MeshShape.parse(mesh)
    planned = machine_of_target(parse_target(target), shape)
    described = SimpleNamespace(axis_names=("data", "fsdp", "tensor"), devices=None)
    inner = (shape.data, shape.fsdp, shape.tensor)
    devices = np.array(torus_devices(*degrees), object).reshape(inner)
    assert planned.mapping is not None
    for device in devices.flat:
        device.device_kind = planned.kind
    described.devices = devices
    found = machine_of_mesh(described)  # type: ignore[arg-type]
    placed = place_run(tiny_run(MODELS["llama"], mesh, batch=128), shape)
    step, plan = settle(placed, found), settle(placed, planned)
    assert step.links == plan.links and step.gathered_ahead == plan.gathered_ahead
    assert (
        step.tensor_strategy == plan.tensor_strategy
        and step.compiler_options == plan.compiler_options
    )
    assert step.attention_pieces == plan.attention_pieces and step.kernels.name == plan.kernels.name


def test_step_and_plan_take_cudnn_for_the_heads_of_gemma_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.models.kernels.cudnn.has_cudnn", lambda: True)
    model = dataclasses.replace(MODELS["qwen-like"], head_size=256)  # type: ignore[call-arg]
    placed = place_run(tiny_run(model, compute_dtype="bfloat16"), MeshShape())
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", id=0)
    mesh = SimpleNamespace(axis_names=("data",), devices=np.array([device], object))
    machines = machine_of_mesh(mesh), machine_of_target(parse_target("h100:1"), MeshShape())  # type: ignore[arg-type]
    assert [settle(placed, machine).kernels.name for machine in machines] == ["cudnn", "cudnn"]
