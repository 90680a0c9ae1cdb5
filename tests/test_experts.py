"""Mixture of experts: routing and dispatch against plain loops, router losses, the ragged all-to-all."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_exchange import Shape, largest_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiny_runs import (
    MODELS,
    assert_same_steps,
    device_run_of,
    random_batch,
    tiny_run,
    train,
    train_on_one_device,
)

from meshwright.comm.hierarchical import Level
from meshwright.comm.ragged import plan_exchange, ragged_all_to_all
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.interconnect import machine_of_target, map_axes
from meshwright.hardware.targets import parse_target
from meshwright.models.blocks.experts import (
    Experts,
    Routes,
    Routing,
    Rows,
    capacity_moe,
    dropless_moe,
    expert_capacity,
    round_rows,
    route,
    router_losses,
)
from meshwright.models.flops import formulas, forward_flops, layer_flops
from meshwright.models.kernels.choose import ragged_dot
from meshwright.models.model import ExpertSpec
from meshwright.planner.estimate import StepModel, estimate
from meshwright.planner.explain import notes
from meshwright.planner.physics import PHYSICS
from meshwright.planner.search import price_run, search
from meshwright.planner.traffic import movements
from meshwright.planner.work import work_of
from meshwright.runs.placed_run import place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.settle import Settled, settle
from meshwright.sharding.params import count_params
from meshwright.sharding.sequence import split_sequence
from meshwright.step.train_step import CompiledTrainStep

MULTIPLY = ragged_dot().multiply

B, T, D, F, E = 2, 8, 6, 5, 4
AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
PLAIN = Routing(E, 2, "softmax", True, 1.0, 1, 1)


def experts_of(r: Routing, **fields: Any) -> Experts:
    return Experts(D, r, F, 0.02, **fields)


def on_one_device(f: Any, *args: Any) -> Any:
    """Runs `f` inside a shard_map over one device with all mesh axes."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * 6), AXES)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(*args)


def draw(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    h, router = rng.normal(size=(B, T, D)), rng.normal(size=(D, E))
    w = {
        n: rng.normal(size=s)
        for n, s in (("gate", (E, D, F)), ("up", (E, D, F)), ("down", (E, F, D)))
    }
    return jax.tree.map(lambda x: x.astype(np.float32), (h, router, w))


def expert(h: np.ndarray, w: dict[str, np.ndarray], e: int) -> np.ndarray:
    gate = h @ w["gate"][e]
    return (gate / (1 + np.exp(-gate)) * (h @ w["up"][e])) @ w["down"][e]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_dropless_matches_a_loop_over_tokens(k: int) -> None:
    h, router, w = draw()
    r = dataclasses.replace(PLAIN, experts_per_token=k)

    def run(h: Any, router: Any, w: Any) -> Any:
        routes = route(r, h, router, None)
        return dropless_moe(experts_of(r), h, routes, w, MULTIPLY)[0], routes.experts_BTX

    got, chosen = on_one_device(run, h, router, w)
    scores = h @ router
    want = np.zeros_like(h)
    for b in range(B):
        for t in range(T):
            best = np.argsort(-scores[b, t], kind="stable")[:k]
            assert list(best) == list(chosen[b, t])
            weights = np.exp(scores[b, t, best]) / np.exp(scores[b, t, best]).sum()
            want[b, t] = sum(p * expert(h[b, t], w, e) for p, e in zip(weights, best, strict=True))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_biases_of_experts_are_saved_by_expert_and_not_by_row() -> None:
    """The backward pass keeps the rows, gate and up, and the hidden layer: of each row's biases nothing."""
    e, rows, rng = experts_of(PLAIN, bias=True, clamp=(1.702, 7.0)), 64, np.random.default_rng(0)
    shapes = {
        "gate": (E, D, F),
        "up": (E, D, F),
        "down": (E, F, D),
        "gate_bias": (E, F),
        "up_bias": (E, F),
    }
    w = {
        n: jnp.asarray(rng.normal(size=s), "bfloat16")
        for n, s in (shapes | {"down_bias": (E, D)}).items()
    }
    x, weights = jnp.ones((rows, D), "bfloat16"), jnp.ones((rows, 1))
    rows_E = jnp.array([20, 0, 30, 6])

    def applied(x: Any, weights: Any, w: Any) -> Any:
        return e.apply(Rows(x), weights, rows_E, w=w, multiply=MULTIPLY, partial=())

    out, backward = jax.vjp(applied, x, weights, w)
    saved = [leaf for leaf in jax.tree.leaves(backward) if leaf.size >= rows * min(D, F)]
    assert sum(leaf.nbytes for leaf in saved) <= 2 * rows * (D + 3 * F)
    # A kernel may leave anything in the rows of no expert.
    gradient = backward(jnp.ones_like(out).at[rows_E.sum() :].set(jnp.nan))[2]["down_bias"]
    assert gradient.tolist() == [[float(n)] * D for n in rows_E]  # the weights are 1


def test_capacity_serves_first_choices_first() -> None:
    h, router, w = draw(1)
    split = split_sequence("ring", T, 1, 1)

    def run(h: Any, router: Any, w: Any, factor: float) -> Any:
        routes = route(PLAIN, h, router, None)
        served = capacity_moe(experts_of(PLAIN, capacity_factor=factor), h, routes, w, split)
        return *served, routes.experts_BTX, routes.weights_BTX

    got, dropped, chosen, weights = on_one_device(lambda *a: run(*a, 0.5), h, router, w)
    capacity = expert_capacity(PLAIN, T, 0.5)
    assert capacity == 2
    want, expected_drops = np.zeros_like(h), 0
    for b in range(B):
        served = [0] * E
        for x in range(2):
            for t in range(T):
                e = int(chosen[b, t, x])
                if served[e] < capacity:
                    served[e] += 1
                    want[b, t] += weights[b, t, x] * expert(h[b, t], w, e)
                else:
                    expected_drops += 1
    assert dropped == expected_drops > 0
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    # With capacity for all tokens, both dispatches compute the same.
    whole, no_drops = on_one_device(lambda *a: run(*a, 4.0)[:2], h, router, w)
    assert no_drops == 0
    e = experts_of(PLAIN)
    served = on_one_device(
        lambda h, m, w: dropless_moe(e, h, route(PLAIN, h, m, None), w, MULTIPLY)[0], h, router, w
    )
    np.testing.assert_allclose(whole, served, rtol=2e-5, atol=1e-5)


def test_sigmoid_scores_bias_and_groups() -> None:
    h = np.ones((1, 1, 1), np.float32)
    router = np.log(np.array([[3.0, 1.0, 1 / 3, 1.0]], np.float32))  # scores 0.75, 0.5, 0.25, 0.5
    r = Routing(E, 2, "sigmoid", False, 2.0, 2, 2)
    routes = on_one_device(lambda h, m: _flat(route(r, h, m, None)), h, router)
    assert list(routes[0].ravel()) == [0, 1]
    np.testing.assert_allclose(routes[1].ravel(), [1.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(routes[2].ravel(), np.array([3, 2, 1, 2]) / 8, rtol=1e-6)
    # A bias changes the choice of experts, not their weights.
    bias = np.array([0, 0, 1, 0], np.float32)
    routes = on_one_device(lambda h, m, b: _flat(route(r, h, m, b)), h, router, bias)
    assert list(routes[0].ravel()) == [2, 0]
    np.testing.assert_allclose(routes[1].ravel(), [0.5, 1.5], rtol=1e-6)
    # The group with the best two experts has 0 and 1; restricted to it, 3 cannot be chosen.
    one = dataclasses.replace(r, topk_groups=1)
    tilted = np.array([0, -0.3, 0, 0.1], np.float32)
    assert list(
        on_one_device(lambda h, m, b: _flat(route(one, h, m, b)), h, router, tilted)[0].ravel()
    ) == [0, 1]
    assert list(
        on_one_device(lambda h, m, b: _flat(route(r, h, m, b)), h, router, tilted)[0].ravel()
    ) == [0, 3]


def _flat(routes: Routes) -> tuple[Any, ...]:
    return routes.experts_BTX, routes.weights_BTX, routes.router_probs_BTR, routes.lse_BT


def test_router_losses() -> None:
    # Two tokens of one sequence, both with expert 0 as first choice; the second choices differ.
    probs = np.array([[[0.7, 0.2, 0.1, 0.0], [0.6, 0.1, 0.3, 0.0]]], np.float32)
    routes = Routes(
        np.array([[[0, 1], [0, 2]]]), probs[..., :2], probs, np.array([[1.0, 3.0]], np.float32)
    )
    losses = on_one_device(lambda: router_losses(PLAIN, routes))
    # E times the sum over experts of fraction of choices (2, 1, 1, 0)/4 times mean probability (0.65, 0.15, 0.2, 0).
    assert losses["balance"] == pytest.approx(4 * (0.5 * 0.65 + 0.25 * 0.15 + 0.25 * 0.2))
    assert losses["router z"] == pytest.approx((1 + 9) / 2)
    assert list(losses["load"]) == [2, 1, 1, 0]
    # Padding, here two positions without experts, moves none of them.
    padding = np.array([[False, False, True, True]])
    padded = Routes(
        np.concatenate([routes.experts_BTX, [[[E, E], [E, E]]]], 1),
        np.concatenate([routes.weights_BTX, routes.weights_BTX], 1),
        np.concatenate([probs, probs[..., ::-1]], 1),
        np.array([[1.0, 3.0, 9.0, 9.0]], np.float32),
        padding,
    )
    for name, value in on_one_device(lambda: router_losses(PLAIN, padded)).items():
        np.testing.assert_allclose(value, losses[name], rtol=1e-6)


LEVEL = Level(("expert",), 4, None)


@functools.cache
def exchange_step(room: int, pieces: int) -> Any:
    def body(x: Any, sent: Any) -> Any:
        exchange = plan_exchange(sent[0], LEVEL, room).split(pieces)
        arrived = ragged_all_to_all(x[0], exchange, LEVEL, room, 6)
        back = ragged_all_to_all(arrived, exchange.reversed(), LEVEL, x.shape[1], 6)
        return arrived[None], back[None], exchange.arriving_sizes.sum()[None]

    spec, mesh = P("expert"), Mesh(np.array(jax.devices()[:4]), ("expert",))
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(spec,) * 2, out_specs=(spec,) * 3, check_vma=False)
    )


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=4, max_size=4),
    st.sampled_from([(24, 1), (10, 3)]),
)
def test_ragged_all_to_all_and_back(sizes: list[list[int]], form: tuple[int, int]) -> None:
    """Sends sizes[s][2 d + g] rows from device s to group g of device d, as many as have room, and returns them.

    Updates in pieces, which mostly do not divide them, send the same.
    """
    (room, pieces), sent = form, np.array(sizes, np.int32).reshape(4, 4, 2)
    rows, width = 24, 2
    x = np.zeros((4, rows, width), np.float32)
    for s in range(4):
        for i in range(sent[s].sum()):
            x[s, i] = (s + 1) * 100 + i + np.arange(width) / 10
    arrived, back, count = exchange_step(room, pieces)(x, sent)
    returned = np.zeros_like(x)
    for d in range(4):
        # By group, in the order of the devices; which rows have room is decided from this device on, around the axis.
        want: list[list[np.ndarray]] = [[] for _ in range(8)]
        left = room
        for s in ((d + i) % 4 for i in range(4)):
            start = sent[s, :d].sum()
            for g in range(2):
                size = min(sent[s, d, g], left)
                want[4 * g + s] = list(x[s, start : start + size])
                returned[s, start : start + size] = x[s, start : start + size]
                start, left = start + sent[s, d, g], left - size
        flat = [row for run in want for row in run]
        assert count[d] == len(flat)
        np.testing.assert_array_equal(arrived[d, : len(flat)], np.reshape(flat, (-1, width)))
        assert not np.asarray(arrived[d, len(flat) :]).any()
    np.testing.assert_array_equal(back, returned)


@pytest.mark.parametrize(
    ("crosses_dcn", "platform", "updates"),
    [(False, "cuda", 128), (True, "cuda", 8), (False, "tpu", 8)],
)
def test_a_gpu_sends_many_updates_inside_a_node(
    crosses_dcn: bool, platform: str, updates: int
) -> None:
    """4 devices with 2 groups each and 2,048 rows: 16 pieces of each update have 16 rows at an even load."""
    level = dataclasses.replace(LEVEL, crosses_dcn=crosses_dcn)

    def body(x: Any, sent: Any) -> Any:
        return ragged_all_to_all(x, plan_exchange(sent, level, 2048), level, 2048, 2048)

    mesh = Mesh(np.array(jax.devices()[:4]), ("expert",))
    step = jax.shard_map(
        body, mesh=mesh, in_specs=(P("expert"), P("expert")), out_specs=P("expert"), check_vma=False
    )
    x, sent = jax.ShapeDtypeStruct((8192, 8), jnp.float32), jax.ShapeDtypeStruct((16, 2), jnp.int32)
    text = jax.jit(step).trace(x, sent).lower(lowering_platforms=(platform,)).as_text()
    (call,) = re.findall(r"@ragged_all_to_all\(.*: \((.*)\) ->", text)
    assert call.count(f"tensor<{updates}xi32>") == 4


@pytest.mark.parametrize(("factor", "nodes"), [(0.0, 1), (1.0, 1), (1.0, 2), (1.0, 4)])
def test_rows_without_room_give_zeros_and_are_counted(factor: float, nodes: int) -> None:
    """Four devices with one expert each; all tokens of device 0 and 1 choose expert 2."""
    r = dataclasses.replace(PLAIN, experts_per_token=1, normalize_top_k=False)
    tokens = 128
    rng = np.random.default_rng(0)
    h = rng.normal(size=(4, 1, tokens, D)).astype(np.float32)
    w = draw()[2]
    chosen = np.array([2, 2, 1, 0])
    # One token of device 2 also goes to expert 2.
    experts = (
        np.broadcast_to(chosen[:, None, None, None], (4, 1, tokens, 1)).astype(np.int32).copy()
    )
    experts[2, 0, 5] = 2
    ones = np.ones(experts.shape, np.float32)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 1, 1, 4, 1, 1), AXES)

    def body(h: Any, experts: Any, ones: Any, w: Any) -> Any:
        def total(h: Any, w: Any) -> Any:
            routes = Routes(experts[0], ones[0], ones[0], ones[0, ..., 0])
            out, dropped = dropless_moe(
                experts_of(r, expert_buffer_factor=factor), h[0], routes, w, MULTIPLY, nodes=nodes
            )
            return (out * out).sum(), (out, jnp.zeros(()) if dropped is None else dropped)

        (_, (out, dropped)), gradient = jax.value_and_grad(total, has_aux=True)(h, w)
        return out[None], dropped[None], gradient

    spec = P("expert")
    step = jax.shard_map(
        body, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 3, check_vma=False
    )
    out, dropped, gradient = jax.jit(step)(h, experts, ones, w)
    want = np.zeros_like(h)
    for d in range(4):
        for t in range(tokens):
            want[d, 0, t] = expert(h[d, 0, t], w, int(experts[d, 0, t, 0]))
    if factor:
        # Expert 2 lives on device 2, which has room for 128 rows: its own one, and then those of device 3 (none), 0, 1.
        want[0, 0, 127:] = 0
        want[1] = 0
        # Devices count their own choices, or between nodes those that they sent on to experts: the sum is the same.
        assert dropped.sum() == tokens + 1 and (nodes > 1 or list(dropped) == [1, tokens, 0, 0])
        assert not np.asarray(gradient[1]).any() and np.asarray(gradient[0][0, :127]).all()
    else:
        assert not dropped.any()
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "shape",
    [
        Shape(8, 16, 5),
        Shape(8, 16, 5, nodes=2),
        Shape(8, 16, 5, nodes=4, groups=(8, 3)),
        Shape(8, 16, 5, nodes=8),
        Shape(4, 4, 1),
        Shape(4, 4, 1, nodes=2),
        Shape(4, 4, 1, nodes=4),
        Shape(8, 16, 5, split=(1, 2, 4)),
        Shape(8, 16, 5, nodes=2, groups=(8, 3), split=(2, 2, 2)),
        Shape(8, 8, 1, nodes=8, split=(1, 1, 8)),
        Shape(6, 18, 5, nodes=3, split=(1, 3, 2)),
    ],
    ids=str,
)
def test_an_exchange_has_the_numbers_of_one_device_at_every_load(shape: Shape) -> None:
    for load in ("even", "empty", "groups", "one"):
        assert largest_difference(shape, load) < 2e-6, load


def test_buffers_have_room_for_the_most_that_can_arrive() -> None:
    """DeepSeek-V3's 8 of 256 experts, in 4 of 8 groups, over 64 devices in 8 nodes; 1,000 tokens of a device."""
    spec = ExpertSpec(256, 8, groups=8, topk_groups=4)
    # A row from each of 8 devices for every token, a copy for each expert, and at most 4 experts on a device.
    assert spec.buffers(1000, 64, 8) == (8 * 1000, 8 * 8 * 1000, 64 * 4 * 1000)
    # 1.5 times 4 rows, of 8 experts each, in tiles of 128.
    assert dataclasses.replace(spec, buffer_factor=1.5).buffers(1000, 64, 8) == (6016, 12032, 12032)
    assert [spec.most_nodes(n) for n in (1, 8, 16, 64)] == [1, 4, 8, 8]
    # Eight experts of a node reach into two groups of six.
    odd = ExpertSpec(48, 2, groups=8, topk_groups=1)
    assert odd.most_nodes(6) == 2 and 1 <= odd.mean_nodes(6) <= 2
    drawn = np.random.default_rng(0)
    chosen = [
        (drawn.permutation(8)[:4, None] * 32 + np.arange(32)).reshape(-1)[
            drawn.permutation(128)[:8]
        ]
        for _ in range(4000)
    ]
    for nodes in (2, 8, 16):
        found = np.mean([len(set(experts // (256 // nodes))) for experts in chosen])
        assert spec.mean_nodes(nodes) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "target", "mesh", "nodes"),
    [
        ("qwen3-30b-a3b", "h100:16", "expert=16", 2),
        ("qwen3-30b-a3b", "h100:8", "expert=8", 1),
        # Nodes of the target, not the largest of the chip: 4 GPUs of 8, 64 of 72.
        ("qwen3-30b-a3b", "h100:2x4", "expert=8", 2),
        ("qwen3-30b-a3b", "gb200:128", "expert=128", 2),
        ("qwen3-30b-a3b", "h100:16", "fsdp=2,expert=8", 1),
        ("mixtral-8x7b", "h100:16", "expert=8,tensor=2", 2),
        # One expert is on one node, so that a second exchange saves nothing.
        ("llama4-scout", "h100:16", "expert=16", 16),
        ("deepseek-v3", "h100:256", "fsdp=4,expert=64", 8),
    ],
)
def test_a_token_crosses_to_a_node_once_where_that_is_faster(
    recipe: str, target: str, mesh: str, nodes: int
) -> None:
    shape, where = MeshShape.parse(mesh), parse_target(target)
    run = find_recipe(recipe)
    run = dataclasses.replace(
        run, mesh=shape, training=dataclasses.replace(run.training, batch=512, microbatches=1)
    )
    placed = place_run(run, shape)
    settled = settle(placed, machine_of_target(where, shape))
    assert settled.expert_nodes == nodes
    work, mapping = work_of(placed), map_axes(shape, where)
    sent = {
        m.axes[0]: (m.payload / work.tokens / work.width / 2, path.medium, path.devices)
        for m in movements(settled, work, frozenset())
        if m.purpose == "tokens to experts" and (path := mapping.route(m.axes))
    }
    spec, n = (
        next(layer.experts for layer in placed.layout.spec.layers if layer.experts),
        shape.expert,
    )
    if 1 < nodes < n:
        assert sent == {
            f"expert between {nodes}": (pytest.approx(spec.mean_nodes(nodes)), "network", nodes),
            f"expert within {n // nodes}": (
                pytest.approx(spec.experts_per_token),
                "NVLink",
                n // nodes,
            ),
        }
    else:
        rows, medium = (
            (spec.experts_per_token, "NVLink") if nodes == 1 else (spec.mean_nodes(n), "network")
        )
        assert sent == {"expert": (pytest.approx(rows), medium, n)}


@pytest.mark.parametrize(
    ("mesh", "target", "nodes", "exchanges"),
    [
        ("expert=2,context=2,tensor=2", "h100:8", 1, {"expert+context+tensor": 7 / 8}),
        ("tensor=8,fsdp=2", "h100:16", 1, {"tensor": 7 / 8}),
        ("expert=4,tensor=4", "h100:16", 2, {"expert between 2": 1 / 2, "expert within 2+tensor": 7 / 8}),
        ("context=8,tensor=2", "h100:16", 2, {"context between 2": 1 / 2, "context within 4+tensor": 7 / 8}),
        ("expert=2,context=4,tensor=4", "h100:32", 4, {"expert+context between 2": 3 / 4,
                                                      "context within 2+tensor": 7 / 8}),
        ("expert=4,context=2,tensor=8", "h100:64", 8, {"expert+context": 7 / 8, "tensor": 7 / 8}),
    ],
)  # fmt: skip
def test_folded_experts_send_a_device_s_own_part_of_the_sequence(
    mesh: str, target: str, nodes: int, exchanges: dict[str, float]
) -> None:
    """Over all axes that split a sequence or experts, to nodes first; the bytes against counted devices and rows."""
    shape, where = MeshShape.parse(mesh), parse_target(target)
    run = find_recipe("qwen3-30b-a3b")
    training = dataclasses.replace(run.training, batch=64, seq=4096, microbatches=1)
    placed = place_run(
        dataclasses.replace(run, mesh=shape, training=training, layout="folded"), shape
    )
    settled = settle(placed, machine_of_target(where, shape))
    assert settled.expert_nodes == nodes
    own, mapping = 64 * 4096 / where.devices, map_axes(shape, where)
    traffic = movements(settled, work_of(placed), frozenset())
    sent = {"+".join(m.axes): m for m in traffic if m.purpose == "tokens to experts"}
    spec = ExpertSpec(128, 8)
    rows = dict(zip(exchanges, ([spec.mean_nodes(nodes), 8] if nodes > 1 else [8]), strict=True))
    assert sent.keys() == exchanges.keys()
    for axes, away in exchanges.items():
        path = mapping.route(sent[axes].axes)
        assert path is not None and 1 - 1 / path.devices == away
        assert path.medium == (
            "network" if nodes > 1 and axes == next(iter(exchanges)) else "NVLink"
        )
        assert sent[axes].payload == pytest.approx(own * rows[axes] * 2048 * 2)
    (weights,) = {m.n for m in work_of(placed).matmuls if m.role == "ffn_in"}
    assert weights == 768  # an expert keeps its width


@pytest.mark.parametrize(
    ("target", "changes", "pieces", "reason"),
    [
        ("h100:16", {"batch": 64}, 2, None),
        ("h100:16", {"batch": 48}, 3, None),
        (
            "h100:16",
            {"batch": 80},
            1,
            "5 sequences of a microbatch on a device are no multiple of 2 or 3",
        ),
        # 64 tokens: 256 KiB at 50 GB/s are 5 us, three passes over 75 MB of weights at 3.35 TB/s are 68 us.
        (
            "h100:16",
            {"batch": 64, "microbatches": 2, "seq": 32},
            1,
            "the rows of 64 tokens take 0.0052 ms",
        ),
        ("h100:8", {"batch": 64}, 1, "no rows travel to experts between GPU nodes"),
        ("gb200:16", {"batch": 64}, 1, "no rows travel to experts between GPU nodes"),
        ("v5p:2x2x4", {"batch": 64}, 1, "no rows travel to experts between GPU nodes"),
    ],
    ids=str,
)
def test_rows_travel_in_pieces_of_the_batch_where_that_is_faster(
    target: str, changes: dict[str, int], pieces: int, reason: str | None
) -> None:
    """XLA for GPUs schedules steps with experts by predicted times, unless the run names its own."""
    shape, run = (
        MeshShape.parse(f"expert={parse_target(target).devices}"),
        find_recipe("qwen3-30b-a3b"),
    )
    training = dataclasses.replace(run.training, **{"seq": 4096, "microbatches": 1, **changes})
    machine = machine_of_target(parse_target(target), shape)
    settled = settle(
        place_run(dataclasses.replace(run, mesh=shape, training=training), shape), machine
    )
    assert settled.exchange_pieces == pieces
    assert (settled.exchanged_at_once_reason or "").startswith(reason or "")
    assert settled.scheduled_by_price == (not machine.on_tpu)
    stages, own_scheduler = (
        MeshShape(stage=2, expert=shape.size // 2),
        "xla_gpu_enable_latency_hiding_scheduler=False",
    )
    rows = [(mesh, ("auto",), not machine.on_tpu) for mesh in (MeshShape(fsdp=shape.size), stages)]
    for mesh, words, by_price in [
        *rows,
        (shape, (), False),
        (shape, ("auto", own_scheduler), False),
    ]:
        own = dataclasses.replace(training, compiler_options=words)
        placed = place_run(dataclasses.replace(run, mesh=mesh, training=own), mesh)
        other = settle(placed, machine_of_target(parse_target(target), mesh))
        assert other.scheduled_by_price == by_price and other.exchange_pieces == 1


_EXCHANGE_OPTIONS = {
    "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer": "False",
    "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": "True",
}


@pytest.mark.parametrize(
    ("target", "mesh", "words", "options"),
    [
        ("h100:16", "expert=16", ("auto",), _EXCHANGE_OPTIONS),
        ("h100:16", "fsdp=2,expert=8", ("auto",), {}),
        ("gb200:16", "expert=16", ("auto",), {}),
        ("v5p:2x2x4", "expert=16", ("auto",), {}),
        ("h100:16", "expert=16", (), {}),
        (
            "h100:16",
            "expert=16",
            ("auto", f"{next(iter(_EXCHANGE_OPTIONS))}=True"),
            _EXCHANGE_OPTIONS | {next(iter(_EXCHANGE_OPTIONS)): "True"},
        ),
    ],
    ids=str,
)
def test_rows_between_gpu_nodes_are_sent_as_they_are_written(
    target: str, mesh: str, words: tuple[str, ...], options: dict[str, str]
) -> None:
    """XLA's defaults gather the rows of all nodes; an option of the run's own wins."""
    settled = _settled_moe(target, mesh, words)
    found = {name: settled.compiler_options.get(name) for name in _EXCHANGE_OPTIONS}
    assert {name: value for name, value in found.items() if value is not None} == options
    assert (settled.sends_note is not None) == (options == _EXCHANGE_OPTIONS)


def _settled_moe(
    target: str, mesh: str, words: tuple[str, ...] = ("auto",), recipe: str = "qwen3-30b-a3b"
) -> Settled:
    shape = MeshShape.parse(mesh)
    run = find_recipe(recipe)
    training = dataclasses.replace(
        run.training, batch=256, seq=4096, microbatches=1, compiler_options=words
    )
    placed = place_run(dataclasses.replace(run, mesh=shape, training=training), shape)
    return settle(placed, machine_of_target(parse_target(target), shape))


@pytest.mark.parametrize(
    ("jaxlib_version", "target", "mesh", "fix"),
    [
        ("0.11.2", "gb200:64", "expert=64", "--mesh fsdp=2,expert=32, or pip install"),
        ("0.11.2", "gb200:64", "fsdp=2,expert=32", None),
        ("0.11.2", "h100:64", "expert=64", None),
        ("0.12.0", "gb200:64", "expert=64", None),
        ("1.0.0", "gb200:64", "expert=64", None),
    ],
)
def test_exchanges_above_the_ranks_of_xla_s_kernel_are_refused(
    monkeypatch: pytest.MonkeyPatch, jaxlib_version: str, target: str, mesh: str, fix: str | None
) -> None:
    """In one NVLink domain of 72 GPUs 64 crashed before jaxlib 0.12 (openxla/xla, issue 47283)."""
    monkeypatch.setattr("jaxlib.version.__version__", jaxlib_version)
    settled = _settled_moe(target, mesh)
    where = parse_target(target)
    if fix is None:
        settled.check()
        assert price_run(settled.run, where).estimate.seconds > 0
        return
    for refused in (settled.check, lambda: price_run(settled.run, where)):
        with pytest.raises(ConfigError, match="64 devices of one NVLink domain") as error:
            refused()
        assert fix in str(error.value)


def test_devices_that_exchange_at_once_may_be_in_one_domain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one expert for a token each device is a group of its own; 64 of 128 GPUs may be in a domain of 72."""
    monkeypatch.setattr("jaxlib.version.__version__", "0.11.2")
    settled = _settled_moe("gb200:128", "fsdp=2,expert=64", recipe="llama4-maverick")
    assert settled.expert_nodes == 1
    of_devices = dataclasses.replace(settled.machine, mapping=None)
    unknown = settle(place_run(settled.run), of_devices)
    assert unknown.expert_nodes == 64
    for found in (settled, unknown):
        with pytest.raises(ConfigError, match="64 devices of one NVLink domain"):
            found.check_exchange()
    between = _settled_moe("h100:128", "fsdp=2,expert=64", recipe="llama4-maverick")
    assert between.expert_nodes == 64
    between.check_exchange()


def test_a_search_goes_on_where_exchanges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the plan says why some meshes are missing."""
    monkeypatch.setattr("meshwright.runs.settle.most_ranks", lambda version: 2)
    run = find_recipe("tiny-moe")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=512))
    result = search(run, parse_target("h100:8"))
    assert any(plan.mesh.expert == 2 for plan in result.plans)
    assert not any(plan.mesh.expert > 2 for plan in result.plans)
    assert "expert=8" in result.refused
    assert any("NVLink domain, because the exchange kernel" in note for note in notes(run, result))


def test_a_domain_above_every_kernel_is_refused(tmp_path: Path) -> None:
    """Of 256 GPUs in one domain (a chip of one's own) 128 exchange rows at most, with any jaxlib."""
    file = tmp_path / "large.toml"
    text = (
        "flops_bf16 = 1e15\nhbm_bytes = 96e9\nhbm_bandwidth = 4e12\nnetwork_bandwidth = 50e9\n"
        "host_bandwidth = 32e9\n[nodes]\nlink_bandwidth = 400e9\ndevices_per_node = 256\n"
    )
    file.write_text(text, encoding="utf-8")
    _settled_moe(f"{file}:256", "fsdp=2,expert=128", recipe="deepseek-v3").check()
    settled = _settled_moe(f"{file}:256", "expert=256", recipe="deepseek-v3")
    with pytest.raises(ConfigError, match="takes 128") as error:
        settled.check()
    assert "--mesh fsdp=2,expert=128" in str(error.value)
    assert "pip" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "words", "part"),
    [
        ("h100:16", ("auto",), 20 / 132),
        ("gb200:16", ("auto",), 20 / 152),
        ("h100:16", (), 0.0),
        ("v5p:2x2x4", ("auto",), 0.0),
    ],
)
def test_collectives_slow_the_computation_that_overlaps_them(
    target: str, words: tuple[str, ...], part: float
) -> None:
    """DeepSeek-V3 gives its exchange 20 of 132 multiprocessors; overlap fitted to measured steps has it in itself."""
    settled = _settled_moe(target, "expert=16", words)
    where = parse_target(target)
    free = dataclasses.replace(PHYSICS, communication_multiprocessors=0)
    unslowed = estimate(settled, where, StepModel(physics=free))
    slowed = estimate(settled, where)
    overlapped = sum(unslowed.busy.values()) - sum(unslowed.exposed.values())
    assert overlapped > 0
    added = sum(slowed.exposed.values()) - sum(unslowed.exposed.values())
    assert added == pytest.approx(part * overlapped, rel=1e-6, abs=1e-12)
    assert slowed.seconds - unslowed.seconds == pytest.approx(added, rel=1e-6, abs=1e-9)


@pytest.mark.exhaustive
def test_router_bias_moves_towards_idle_experts() -> None:
    device_run = device_run_of(tiny_run(MODELS["deepseek-like"], "expert=2,tensor=2"))
    state = device_run.initial_state()
    step = CompiledTrainStep(device_run, random_batch(device_run))
    after, metrics = step(state, random_batch(device_run))
    bias = np.asarray(after.params["blocks"]["router_bias"])
    assert (
        set(np.unique(np.round(bias / 0.01))) <= {-1, 0, 1}
        and (bias > 0).any()
        and (bias < 0).any()
    )
    assert float(metrics["largest expert load"][0] / metrics["largest expert load"][1]) > 1
    assert float(metrics["smallest expert load"][0] / metrics["smallest expert load"][1]) < 1
    assert set(metrics) >= {"expert balance", "router z"}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral-8x7b", 46.7e9, 12.9e9), ("mixtral-8x22b", 141e9, 39e9), ("qwen3-30b-a3b", 30.5e9, 3.3e9),
     ("qwen3-235b-a22b", 235e9, 22e9)],
)  # fmt: skip
def test_recipes_have_their_published_sizes(name: str, total: float, active: float) -> None:
    model: Any = find_recipe(name).model
    parameters = count_params(model.params())
    assert parameters == pytest.approx(total, rel=0.005)
    idle = (
        (model.experts - model.experts_per_token)
        * 3
        * model.width
        * model.expert_mlp
        * model.layers
    )
    assert parameters - idle == pytest.approx(active, rel=0.02)
    items = forward_flops(model, 4096)
    assert list(items) == [item for item in formulas(model.spec()) if item in items]
    assert sum(layer_flops(model, 4096)) == pytest.approx(
        sum(n for i, n in items.items() if i != "unembedding")
    )


def test_an_exchange_in_float8_needs_the_dropless_dispatch() -> None:
    model = dataclasses.replace(MODELS["mixtral"], expert_exchange="fp8", dispatch="capacity")
    with pytest.raises(ConfigError, match=r"--model\.dispatch dropless"):
        place_run(tiny_run(model))


def test_rows_in_float8_are_their_own_rounding() -> None:
    """A power of two for each row: rounding again, in float32 or bfloat16, changes nothing; gradients pass."""
    x = (
        np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
        * np.logspace(-6, 6, 64)[:, None]
    )
    x[3] = 0
    once = np.asarray(round_rows(jnp.asarray(x, jnp.float32)).values)
    np.testing.assert_array_equal(np.asarray(round_rows(jnp.asarray(once)).values), once)
    np.testing.assert_array_equal(
        np.asarray(jnp.asarray(once).astype(jnp.bfloat16).astype(jnp.float32)), once
    )
    # Four significant bits: at most half of the last one is lost, but for elements near the bottom of the range.
    large = np.abs(x) > np.abs(x).max(1, keepdims=True) / 1000
    assert (np.abs(once - x)[large] <= np.abs(x)[large] / 16).all() and not once[3].any()
    np.testing.assert_array_equal(
        jax.grad(lambda x: (round_rows(x).values * 3).sum())(jnp.asarray(x, jnp.float32)), 3
    )


@pytest.mark.parametrize(
    "mesh", ["data=2", pytest.param("expert=4", marks=pytest.mark.exhaustive), "fsdp=2,expert=4"]
)
def test_an_exchange_in_float8_has_the_numbers_of_one_device(mesh: str) -> None:
    model = dataclasses.replace(MODELS["mixtral"], expert_exchange="fp8")
    run = tiny_run(model, mesh)
    one = train_on_one_device(run, 3)
    assert_same_steps(train(run, 3, initial=one.initial), one)
    plain = train_on_one_device(tiny_run(MODELS["mixtral"], mesh), 3)
    assert not np.array_equal(one.losses, plain.losses)
    np.testing.assert_allclose(one.losses, plain.losses, rtol=5e-3)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e30, -1e2, -1e4, -1e30])
def test_routers_have_numbers_and_gradients_at_any_logits(
    score: Any, normalize: bool, size: float
) -> None:
    """Scores that all round to 0 have a sum of 0; weights, probabilities and their gradients are finite all the same."""
    r = Routing(E, 2, score, normalize)
    h_BTD = jnp.ones((1, 3, D), jnp.float32)
    # Logits are of one sign, so that with a negative one all scores of a sigmoid round to 0.
    w_DR = jnp.full((D, E), size / D, jnp.float32) * (1 + 0.1 * jnp.arange(E))
    bias_R = jnp.arange(E, dtype=jnp.float32)

    def total(h_BTD: Any, w_DR: Any) -> Any:
        routes = route(r, h_BTD, w_DR, bias_R)
        squares = jnp.square(routes.weights_BTX).sum() + jnp.square(routes.router_probs_BTR).sum()
        return squares, vars(routes)

    gradients, routes = jax.jit(jax.grad(total, (0, 1), has_aux=True))(h_BTD, w_DR)
    for name, values in routes.items():
        assert values is None or jnp.isfinite(values).all(), name  # padding_BT: there is none
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_allclose(routes["router_probs_BTR"].sum(-1), 1, rtol=1e-5)
    if normalize:
        np.testing.assert_allclose(routes["weights_BTX"].sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_normalised_weights_are_scores_over_their_sum(score: Any) -> None:
    rng = np.random.default_rng(0)
    h_BTD = jnp.asarray(rng.normal(size=(2, 5, D)), jnp.float32)
    w_DR = jnp.asarray(rng.normal(size=(D, E)), jnp.float32)
    plain, scaled = (route(Routing(E, 2, score, n), h_BTD, w_DR, None) for n in (False, True))
    assert (plain.experts_BTX == scaled.experts_BTX).all()
    expected = plain.weights_BTX / plain.weights_BTX.sum(-1, keepdims=True)
    np.testing.assert_allclose(scaled.weights_BTX, expected, rtol=2e-6)


def test_one_expert_per_token_needs_its_score() -> None:
    """Scaled to sum to one, the weight of one expert is 1 whatever its score: its router would have no gradient."""
    for name in ("mixtral-8x7b", "gpt-oss-20b", "deepseek-v3"):
        model = find_recipe(name).model
        changed = {"experts_per_token": 1}
        if hasattr(model, "normalize_top_k"):
            changed["normalize_top_k"] = True
        if hasattr(model, "expert_groups"):
            changed |= {"expert_groups": 1, "topk_groups": 1}
        one = dataclasses.replace(model, **changed)
        with pytest.raises(ConfigError, match="the router has no gradient") as refused:
            one.params()
        assert "--model.experts-per-token 2" in refused.value.fix
        assert ("normalize-top-k" in refused.value.fix) == hasattr(model, "normalize_top_k")
        if hasattr(model, "normalize_top_k"):
            assert dataclasses.replace(one, normalize_top_k=False).params()
    h_BTD = jnp.ones((1, 2, D), jnp.float32)
    w_DR = jnp.asarray(np.random.default_rng(0).normal(size=(D, 8)), jnp.float32)

    def total(w_DR: Any) -> Any:
        return route(Routing(8, 1, normalize_top_k=False), h_BTD, w_DR, None).weights_BTX.sum()

    assert float(jnp.abs(jax.grad(total)(w_DR)).max()) > 0
