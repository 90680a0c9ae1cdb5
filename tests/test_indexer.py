"""The sparse indexer of DeepSeek-V3.2 and GLM-5: its choice of keys, meshes, kernels, FLOPs, frozen parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (
    DEEPSEEK,
    DEEPSEEK_SPARSE,
    assert_same_steps,
    device_run_of,
    largest_difference,
    tiny_run,
    train,
    train_on_one_device,
)

from meshwright.analysis.run_census import census_of_train_step
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.fine_tuning import FineTune
from meshwright.generation.cache import CachePlan
from meshwright.hardware.interconnect import machine_of_target
from meshwright.hardware.machine import Machine
from meshwright.hardware.targets import parse_target
from meshwright.models.flops import forward_flops, training_flops_per_token
from meshwright.models.kernels.attention import (
    Index,
    Scores,
    reference_attention,
    sequence_positions,
)
from meshwright.planner.compute import Computation
from meshwright.planner.search import price_run
from meshwright.planner.work import recomputed_roles, work_of
from meshwright.runs.placed_run import place_run
from meshwright.runs.settle import settle
from meshwright.sharding.params import named_leaves
from meshwright.step.train_step import build_train_step
from meshwright.trainer.opening import random_choice_note

exhaustive = pytest.mark.exhaustive
STEPS = 3


def _index(rng: np.random.Generator, tokens: int, top_k: int) -> Index:
    q, k = rng.normal(size=(2, tokens, 3, 4)), rng.normal(size=(2, tokens, 4))
    weights = rng.normal(size=(2, tokens, 3))
    return Index(*(jnp.asarray(x, jnp.float32) for x in (q, k, weights)), top_k)


def test_a_query_sees_the_best_keys_of_its_document() -> None:
    """Against a loop over queries in NumPy: scores, a sorted list of the keys that may be seen, attention to its best."""
    rng, tokens, top_k = np.random.default_rng(0), 12, 3
    index = _index(rng, tokens, top_k)
    segments = np.array([[0] * 5 + [1] * 7, [0] * 12])
    q, k, v = (jnp.asarray(rng.normal(size=(2, tokens, 2, 4)), jnp.float32) for _ in range(3))
    positions = sequence_positions(jnp.asarray(segments))
    scores = Scores(index=index)
    found = reference_attention(q, k, v, positions, positions, window=None, scores=scores)
    for b in range(2):
        for t in range(tokens):
            seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
            products = np.asarray(index.k_BSH[b, seen] @ index.q_BTIH[b, t].T) / np.sqrt(4)
            value = np.maximum(products, 0) @ np.asarray(index.weights_BTI[b, t]) / np.sqrt(3)
            best = np.array(seen)[np.argsort(-value, kind="stable")[:top_k]]
            for n in range(2):
                logits = np.asarray(k[b, best, n] @ q[b, t, n]) / np.sqrt(4)
                weights = np.exp(logits - logits.max())
                expected = weights / weights.sum() @ np.asarray(v[b, best, n])
                np.testing.assert_allclose(found[b, t, n], expected, rtol=1e-5, atol=1e-6)


def test_of_equal_scores_the_first_keys_are_chosen() -> None:
    index = dataclasses.replace(_index(np.random.default_rng(0), 4, 2))
    visible = jnp.tril(jnp.ones((1, 4, 4), bool))
    chosen = index.chosen(jnp.zeros((1, 4, 4)), visible)
    np.testing.assert_array_equal(chosen[0].sum(-1), [1, 2, 2, 2])
    assert chosen[0, :, :2].sum() == chosen.sum()


@exhaustive
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("expert=2,fsdp=2,tensor=2", {"remat": "full"}),
        ("stage=2,fsdp=2,expert=2", {"microbatches": 4}),
        ("data=2,tensor=4", {"tensor_strategy": "ring"}),
    ],
    ids=str,
)
def test_the_numbers_of_one_device(mesh: str, changes: dict[str, Any]) -> None:
    run = tiny_run(DEEPSEEK_SPARSE, mesh, **changes)
    one = train_on_one_device(run, STEPS)
    many = train(run, STEPS, initial=one.initial)
    assert_same_steps(many, one)
    assert largest_difference(many.params, one.params) < 1e-4
    # No step changes the indexer, by no weight decay either; every other matrix moves.
    after, before = (named_leaves(tree["blocks"]) for tree in (one.params, one.initial))
    for name in before:
        moved = bool(np.any(np.asarray(after[name]) != np.asarray(before[name])))
        assert moved != name.startswith("index_"), name


@exhaustive
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_an_indexer_learns_the_same_on_stages(stage: str) -> None:
    model = dataclasses.replace(DEEPSEEK_SPARSE, index_training=stage)
    run = tiny_run(model, "stage=2,expert=2,tensor=2", microbatches=2)
    one = train_on_one_device(run, STEPS)
    many = train(run, STEPS, initial=one.initial)
    assert_same_steps(many, one)
    assert largest_difference(many.params, one.params) < 1e-4
    after, before = (named_leaves(tree["blocks"]) for tree in (one.params, one.initial))
    for name in before:
        moved = bool(np.any(np.asarray(after[name]) != np.asarray(before[name])))
        assert moved == (stage == "sparse" or name.startswith("index_")), name


@exhaustive
def test_enough_keys_are_all_keys() -> None:
    """With as many keys as a sequence has, the steps are those of the same weights without an indexer, to the bit."""
    training: dict[str, Any] = {"seq": 16}
    enough = dataclasses.replace(DEEPSEEK_SPARSE, index_topk=16)
    sparse = train_on_one_device(tiny_run(enough, "data=1", **training), STEPS)

    def without(tree: Any) -> Any:
        return {
            stack: {n: x for n, x in part.items() if not n.startswith("index_")}
            if isinstance(part, dict)
            else part
            for stack, part in tree.items()
        }

    run = tiny_run(DEEPSEEK, "data=1", **training)
    dense = train(run, STEPS, initial=without(sparse.initial))
    jax.tree.map(np.testing.assert_array_equal, without(sparse.params), dense.params)
    fewer = dataclasses.replace(DEEPSEEK_SPARSE, index_topk=2)
    other = train(tiny_run(fewer, "data=1", **training), STEPS, initial=sparse.initial)
    assert largest_difference(other.params, sparse.params) > 1e-5


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="indexer with context"):
        device_run_of(tiny_run(DEEPSEEK_SPARSE, "context=2,fsdp=4"))
    with pytest.raises(ConfigError, match="blocked attention has no choice of keys by an indexer"):
        device_run_of(tiny_run(DEEPSEEK_SPARSE, "data=1", attention_kernel="blocked"))
    with pytest.raises(ConfigError, match="its queries are projections of that latent"):
        dataclasses.replace(DEEPSEEK_SPARSE, q_lora_rank=None).params()
    with pytest.raises(ConfigError, match=r"--model\.index-head-dim 4"):
        dataclasses.replace(DEEPSEEK_SPARSE, index_head_dim=2).params()


def test_parallel_halves_refuse_what_they_do_not_compute() -> None:
    """A loss of attention would be passed over without a word, and so would an output scale."""
    sparse = dataclasses.replace(DEEPSEEK_SPARSE, index_training="sparse").decoder.layers[-1]
    with pytest.raises(ConfigError, match="the loss of attention"):
        dataclasses.replace(sparse, norm_place="shared")
    frozen = DEEPSEEK_SPARSE.decoder.layers[-1]
    assert dataclasses.replace(frozen, norm_place="shared").spec().has_parallel_halves
    with pytest.raises(ConfigError, match="an output scale"):
        dataclasses.replace(frozen, norm_place="shared", output_scale=True)


@pytest.mark.parametrize(
    ("stage", "tuning", "fix"),
    [
        ("warmup", FineTune(method="lora"), "--model.index-training frozen"),
        ("sparse", FineTune(method="lora"), "--finetune.method full"),
        ("warmup", FineTune(objective="preferences"), "--finetune.objective answers"),
    ],
    ids=str,
)
def test_a_fine_tuning_that_would_not_train_what_is_asked_is_refused(
    stage: Any, tuning: FineTune, fix: str
) -> None:
    """Adapters freeze the indexer; of attention to all keys, an indexer changes no answer's probability."""
    model = dataclasses.replace(DEEPSEEK_SPARSE, index_training=stage)
    run = tiny_run(model, "data=1", finetune=tuning, z_loss=0.0)
    with pytest.raises(ConfigError, match=f"index-training {stage} with --finetune") as refusal:
        place_run(run)
    assert fix in str(refusal.value)
    frozen = dataclasses.replace(model, index_training="frozen")
    place_run(dataclasses.replace(run, model=frozen))


@pytest.mark.parametrize(
    ("stage", "top_k", "said"),
    [
        ("frozen", 8, "--model.index-topk 16"),
        ("frozen", 16, ""),
        ("warmup", 16, "--init-from WEIGHTS"),
        ("sparse", 8, ""),
    ],
)
def test_a_random_choice_of_keys_is_said(stage: Any, top_k: int, said: str) -> None:
    model = dataclasses.replace(DEEPSEEK_SPARSE, index_training=stage, index_topk=top_k)
    run = tiny_run(model, "data=1", seq=16)
    note = random_choice_note(run)
    assert said in note
    assert bool(note) == bool(said)
    assert random_choice_note(dataclasses.replace(run, init_from="hf:folder")) == ""


def test_flops_and_plans_count_what_each_is_about() -> None:
    """Model FLOPs count chosen keys, plans all 64: a query may see (64 + 1) / 2 of them on average, and 5 are chosen."""
    seq, layers, sparse = 64, DEEPSEEK_SPARSE.layers, DEEPSEEK_SPARSE
    dense, found = forward_flops(DEEPSEEK, seq), forward_flops(sparse, seq)
    chosen = (1 + 2 + 3 + 4 + 5 * 60) / 64
    of_a_key = 2 * sparse.heads * (8 + 4 + 8)
    assert found["attention"] == pytest.approx(layers * chosen * of_a_key)
    weights = 24 * 8 * 8 + sparse.width * (8 + 8)
    projections, scores = layers * 2 * weights, layers * 2 * 32.5 * 8 * (8 + 1)
    assert found["indexer projections"] == pytest.approx(projections)
    assert found["indexer"] == pytest.approx(scores)
    indexer = projections + scores
    counted = ("attention", "indexer projections", "indexer")
    rest = {n: flops for n, flops in found.items() if n not in counted}
    assert rest == {n: flops for n, flops in dense.items() if n != "attention"}
    trained = 3 * (sum(rest.values()) + found["attention"]) + indexer
    assert training_flops_per_token(sparse, seq) == pytest.approx(trained)
    # The warm-up has a backward pass of the indexer only, whose weights' inputs are detached.
    attended: dict[Any, tuple[int, float]] = {
        "warmup": (1, dense["attention"]),
        "sparse": (3, found["attention"]),
    }
    for stage, (passes, attention_flops) in attended.items():
        staged = dataclasses.replace(sparse, index_training=stage)
        text = sum(rest.values()) + attention_flops
        of_step = passes * text + 2 * projections + 3 * scores
        assert training_flops_per_token(staged, seq) == pytest.approx(of_step)
    attention = sparse.spec().attention[0]
    assert attention.computed_flops(seq) == pytest.approx(seq * of_a_key)
    of_all_pairs = 2 * weights + 2 * seq * 8 * (8 + 1)
    assert attention.index_work(seq, 4).flops == pytest.approx(4 * of_all_pairs)

    runs = [tiny_run(model, "fsdp=8", seq=seq) for model in (DEEPSEEK, sparse)]
    plans = [price_run(run, parse_target("h100:8")) for run in runs]
    assert plans[1].estimate.seconds > plans[0].estimate.seconds


@exhaustive
@pytest.mark.parametrize("mesh", ["data=8", "tensor=8"])
def test_plans_have_the_flops_of_a_compiled_indexer(mesh: str) -> None:
    """Every device of `tensor` computes the complete indexer: what a larger one adds is compared with the program's."""
    compiled, planned = [], []
    for heads, size in ((8, 8), (32, 64)):
        model = dataclasses.replace(DEEPSEEK_SPARSE, index_n_heads=heads, index_head_dim=size)
        run = tiny_run(model, mesh, seq=64, batch=8, remat="none")
        compiled.append(census_of_train_step(device_run_of(run)).flops.compiled)
        planned.append(work_of(place_run(run)).indexers.flops)
    assert planned[1] - planned[0] == pytest.approx(compiled[1] - compiled[0], rel=0.1)


@exhaustive
@pytest.mark.parametrize(
    ("stage", "remat"), [("frozen", "full"), ("frozen", "none"), ("warmup", "full")]
)
def test_plans_have_the_memory_of_all_scores(stage: Any, remat: Any) -> None:
    """Scores are nearly all of the memory of 1,024 tokens: the plan is compared with the compiled step."""
    model = dataclasses.replace(DEEPSEEK_SPARSE, index_training=stage, heads=8)
    run = tiny_run(model, "data=8", seq=1024, batch=8, remat=remat, compute_dtype="bfloat16")
    device_run = device_run_of(run)
    step = build_train_step(device_run).lower(device_run.abstract, device_run.abstract_batch)
    compiled = step.compile(device_run.accepted_compiler_options()).memory_analysis()
    planned = price_run(run, parse_target("h100:8")).estimate.bytes
    assert planned == pytest.approx(compiled.temp_size_in_bytes, rel=0.15)


def test_the_plan_of_a_warm_up_has_the_backward_pass_of_the_indexer_only() -> None:
    """All keys are seen as without an indexer; the loss computes scores of the main heads once more."""
    target, seq = parse_target("h100:8"), 4096
    model = dataclasses.replace(DEEPSEEK_SPARSE, index_training="warmup")
    computations = []
    for m in (model, dataclasses.replace(model, index_training="sparse")):
        run = tiny_run(m, "fsdp=8", seq=seq, remat="full")
        placed = place_run(run)
        settled = settle(placed, machine_of_target(target, placed.layout.shape))
        recomputed = recomputed_roles(run.training.remat)
        computations.append(Computation(settled, work_of(settled), recomputed, target))
    warmup, sparse = computations
    assert warmup.passes["forward"].matmul == sparse.passes["forward"].matmul
    assert warmup.passes["backward"].matmul == warmup.passes["recomputation"].matmul == 0
    assert warmup.passes["backward"].attention > 0
    assert 2 * warmup.unembedding_seconds < sparse.unembedding_seconds


@pytest.mark.parametrize("machine", [("tpu", "v5p", "TPU v5p"), ("gpu", "h100", "NVIDIA H100")])
def test_reference_attention_is_chosen_and_says_why(machine: tuple[str, str, str]) -> None:
    platform, chip, name = machine
    settled = settle(
        place_run(tiny_run(DEEPSEEK_SPARSE, "data=1")),
        Machine(platform, chip, installed=True, kind=name),
    )
    assert settled.kernels.name == "reference"
    assert "no choice of keys by an indexer, which the model's layers have" in settled.kernels.note


def test_the_cache_has_the_keys_of_the_indexer() -> None:
    bytes_of = [
        CachePlan(model.spec(), MeshShape(), 1, 128, "bfloat16").bytes_per_device
        for model in (DEEPSEEK, DEEPSEEK_SPARSE)
    ]
    assert bytes_of[1] - bytes_of[0] == DEEPSEEK.layers * 128 * 8 * 2


@pytest.mark.parametrize(
    ("stage", "mesh"),
    [
        ("warmup", "data=1"),
        pytest.param("sparse", "data=1", marks=exhaustive),
        pytest.param("warmup", hf_models.EIGHT_DEVICES, marks=exhaustive),
        pytest.param("sparse", hf_models.EIGHT_DEVICES, marks=exhaustive),
    ],
)
def test_the_gradient_of_the_indexer_is_that_of_torch(
    stage: str, mesh: str, tmp_path: Path
) -> None:
    """In the warm-up nothing else has a gradient; in sparse training the text has the gradients that it has without."""
    hf_models.write_folder("deepseek-v3.2", tmp_path)
    changes = {"index_training": stage}
    _, gradients, after = hf_models.steps_of(tmp_path, mesh, steps=1, model=changes)
    _, golden = hf_models.read("indexer-loss")
    hf_models.assert_near(f"{stage} gradient", gradients, golden, 1e-5)
    if stage == "warmup":
        assert all(".indexer." in name for name in gradients)
        before = hf_models.draw_tensors(hf_models.read("deepseek-v3.2")[0]["tensors"])
        for name, tensor in before.items():
            assert (".indexer." in name) == bool(np.any(after[name] != tensor)), name
    else:
        _, of_text = hf_models.read("deepseek-v3.2")
        text = {name: values for name, values in gradients.items() if ".indexer." not in name}
        hf_models.assert_near("gradient", text, of_text, 1e-5)
