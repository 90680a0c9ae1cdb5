"""Generation: greedy text against `transformers`, sampling against numpy, ragged prompts, memory, compilations."""

import dataclasses
import functools
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hf_models import GREEDY as TOKENS
from hf_models import PROMPTS, draw_tensors, read, write_tensors
from tiny_runs import VOCAB, by_layers, device_run_of, keep, place_params, tiny_run

import meshwright as mw
from meshwright.checkpoint.initial_weights import describe_initial_weights
from meshwright.config import MeshShape
from meshwright.data.chat import ChatTemplate, read_chat_template
from meshwright.data.sources import Place
from meshwright.data.subwords import Subwords
from meshwright.data.tokenizers import Bytes, Tokenizer
from meshwright.data.tokenizing import TextBatch, encode_texts
from meshwright.errors import ConfigError, DataError
from meshwright.generation.cache import CachePlan, KeyValues, Slots, attend, write
from meshwright.generation.decoder import Decoder, bucket_for
from meshwright.generation.generator import Decoding, Generator
from meshwright.generation.sampling import Sampling, choose_tokens, keep_tokens
from meshwright.generation.source import OpenedModel, open_weights
from meshwright.generation.weights import WeightsLayout, lay_out, weight_bytes
from meshwright.hugging_face.folder import load_params, open_folder
from meshwright.models.families.gpt2 import Gpt2
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.model import Model
from meshwright.step.device_run import DeviceRun
from meshwright.trainer.sample import sample_tokens
from meshwright.trust import own

MODELS: dict[str, Model] = {
    "gpt2": Gpt2(VOCAB, 64, 2, 8, vocab_multiple=16, positions=64),
    "llama": Llama(VOCAB, 64, 2, 8, vocab_multiple=16, kv_heads=4, mlp=96),
    "qwen-like": Llama(
        VOCAB, 64, 2, 8, vocab_multiple=16, kv_heads=4, mlp=96, qkv_bias="learned", embedding="tied", sliding_window=5
    ),
    "mixtral": Mixtral(VOCAB, 64, 2, 8, vocab_multiple=16, kv_heads=4, experts=8, experts_per_token=2, expert_mlp=32),
}  # fmt: skip
"""The models of golden/peers/texts.py."""


def prompts() -> list[np.ndarray]:
    return PROMPTS


def initial(name: str) -> Any:
    """The weights of a golden file with one row per layer: random, large enough that texts differ."""

    def compute() -> Any:
        device_run = device_run_of(tiny_run(MODELS[name], "data=1"))
        about, _ = read(f"text-{name}")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(about["config"]))
            write_tensors(Path(folder), draw_tensors(about["tensors"]))
            where = device_run.abstract.shardings.params
            params = load_params(
                open_folder(f"hf:{folder}"), device_run.layout.params, where, "float32"
            )
        return by_layers(device_run, params)

    return keep(("initial for generation", name), compute)


def opened(name: str, mesh: str = "data=1", tokenizer: Tokenizer | None = None) -> OpenedModel:
    device_run = device_run_of(tiny_run(MODELS[name], mesh, batch=8, seq=16))
    params = initial(name)
    # Rows of the vocabulary's padding are zero, as in training.
    for table in ("embed", "unembed"):
        if table in params:
            params[table] = np.where(
                np.arange(len(params[table]))[:, None] < VOCAB, params[table], 0
            )
    return OpenedModel(
        device_run, place_params(device_run, params), tokenizer or Bytes(), (), "test"
    )


def generated(
    name: str, mesh: str, sampling: Sampling, tokens: int = TOKENS, **decoding: Any
) -> list[list[int]]:
    generator = Generator(opened(name, mesh), Decoding(**decoding))
    found = generator.generate(
        [list(map(int, p)) for p in prompts()], max_tokens=tokens, sampling=sampling
    )
    return [list(row) for row in found.tokens]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "fsdp=2,context=2,tensor=2"),
        ("gpt2", "data=1"),
        ("qwen-like", "data=2,tensor=4"),
        ("mixtral", "expert=4,tensor=2"),
    ],
)
def test_greedy_text_is_that_of_transformers(name: str, mesh: str) -> None:
    expected = read(f"text-{name}")[1]["greedy"].tolist()
    assert (
        len({token for row in expected for token in row}) > 8
    )  # a text that repeats one token shows little
    assert generated(name, mesh, Sampling()) == expected


def test_sampled_text_does_not_depend_on_mesh_pieces_or_company() -> None:
    sampling = Sampling(
        temperature=1.0, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=7
    )
    alone = generated("llama", "data=1", sampling)
    assert generated("llama", "fsdp=4,tensor=2", sampling, stream_every=5, prefill_chunk=4) == alone
    assert generated("llama", "data=1", dataclasses.replace(sampling, seed=8)) != alone
    generator = Generator(opened("llama"))
    first = generator.generate([list(map(int, prompts()[0]))], max_tokens=TOKENS, sampling=sampling)
    assert list(first.tokens[0]) == alone[0]


def reference_filter(logits: np.ndarray, k: int, p: float, min_p: float) -> np.ndarray:
    """Probabilities after top-k, top-p and min-p, token by token, from their definitions."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[:k] if k else order
    weight = {i: math.exp(logits[i] - logits[order[0]]) for i in kept}
    total = sum(weight.values())
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= p:
            break
        nucleus.append(i)
        mass += weight[i] / total
    final = [i for i in nucleus if weight[i] >= min_p * weight[order[0]]]
    out = np.zeros(len(logits))
    for i in final:
        out[i] = weight[i] / sum(weight[j] for j in final)
    return out


@pytest.mark.parametrize(
    ("k", "p", "min_p"),
    [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (12, 0.8, 0.1), (1, 0.1, 0.0)],
)
def test_filters_and_draws_against_numpy(k: int, p: float, min_p: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((3, 40)).astype(np.float32) * 2
    kept = jax.nn.softmax(
        keep_tokens(jnp.array(logits), jnp.int32(k), jnp.float32(p), jnp.float32(min_p))
    )
    expected = np.stack([reference_filter(row, k, p, min_p) for row in logits])
    np.testing.assert_allclose(kept, expected, atol=1e-6)
    draws = 4000
    settings = Sampling(temperature=1.0, top_k=k, top_p=p, min_p=min_p, seed=11).settings()
    rows = jnp.broadcast_to(jnp.array(logits[0]), (draws, 40))
    none = jnp.full((draws, 1), -1)
    tokens = jax.jit(choose_tokens)(
        rows, settings, none, jnp.arange(draws), jnp.zeros(draws, jnp.int32)
    )
    share = np.bincount(np.asarray(tokens), minlength=40) / draws
    # Four standard deviations of a binomial share.
    assert (
        np.abs(share - expected[0]) <= 4 * np.sqrt(expected[0] * (1 - expected[0]) / draws) + 1e-9
    ).all()


def test_repetition_penalty_is_that_of_ctrl() -> None:
    logits = jnp.array([[2.0, -1.0, 0.5, 1.9]])
    settings = Sampling(repetition_penalty=1.25).settings()
    text = jnp.array([[-1, 0, 0, 1]])
    assert (
        int(choose_tokens(logits, settings, text, jnp.arange(1), jnp.zeros(1, jnp.int32))[0]) == 3
    )  # 2.0 -> 1.6


def test_other_prompts_of_a_bucket_compile_nothing() -> None:
    generator = Generator(opened("llama", "fsdp=2,tensor=2"))
    ids = [list(map(int, prompt)) for prompt in prompts()]
    generator.generate(ids, max_tokens=TOKENS)
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        generator.generate(
            [row[::-1] for row in ids],
            max_tokens=TOKENS,
            sampling=Sampling(temperature=0.7, top_k=3),
        )
        generator.generate(
            [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4], [5]],
            max_tokens=5,
            sampling=Sampling(seed=2, min_p=0.1),
        )
        assert not compiled
        generator.generate([[1] * 100], max_tokens=100)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert generator.compilations == 2


def test_stops() -> None:
    text = generated("llama", "data=1", Sampling())[0]
    generator = Generator(dataclasses.replace(opened("llama"), stops=(text[3],)))
    found = generator.generate([list(map(int, prompts()[0]))], max_tokens=TOKENS)
    assert list(found.tokens[0]) == text[: text.index(text[3])]
    # A text that ends it: shown pieces never contain its beginning.
    whole = bytes(text).decode("latin-1")
    pieces: list[str] = []
    generator = Generator(opened("llama"), Decoding(stream_every=1))
    found = generator.generate(
        [list(map(int, prompts()[0]))],
        max_tokens=TOKENS,
        stop=(whole[5:8],),
        on_text=lambda _, t: pieces.append(t),
    )
    assert found.texts[0] == whole[: whole.index(whole[5:8])] == "".join(pieces)

    # The tokens end with the stop, not with the piece of the loop that had it.
    found = Generator(opened("llama")).generate(
        [list(map(int, prompts()[0]))], max_tokens=TOKENS, stop=(whole[5:8],)
    )  # fmt: skip
    assert (
        list(found.tokens[0]) == text[: len(found.tokens[0])]
        and len(found.tokens[0]) == len(found.texts[0]) + 3
    )
    for wrong in ("END", ("",)):
        with pytest.raises(ConfigError, match="it lists texts, of a character or more"):
            generator.generate([[1]], stop=wrong)


def test_texts_begin_and_end_as_their_vocabulary_does() -> None:
    """As Gemma's and Llama 2's: a first token, </s> as a word, a decoder that drops a text's first space."""
    words = {
        "<bos>": 0,
        "<eos>": 1,
        "</s>": 2,
        "\u2581": 3,
        "a": 4,
        "b": 5,
        "\u2581a": 6,
        "\u2581b": 7,
    }
    library = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("\u2581", "a"), ("\u2581", "b")]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    library.add_special_tokens(["<bos>", "<eos>"])
    library.add_tokens([tokenizers.AddedToken("</s>", special=False)])
    first = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    library.post_processor = first
    # As a file that was saved after it had been used: texts are not cut or filled up for it.
    library.enable_truncation(4)
    library.enable_padding(length=4)
    own = Subwords(library.to_str())
    assert (own.begin, own.end) == ((0,), 1)
    tokens, _ = encode_texts(own, TextBatch(["a b a b a b", "b"], [Place("a")] * 2, {}))
    assert list(tokens) == [0, 6, 7, 6, 7, 6, 7, 1, 0, 7, 1]
    generator = Generator(opened("llama", tokenizer=own))
    assert list(generator.encode("a")) == list(generator.encode("<bos> a")) == [0, 6]
    assert list(generator.encode([6])) == [6]
    found = generator.generate(["a"], max_tokens=TOKENS)
    whole = own.decode([0, 6, *found.tokens[0]])
    assert "a" + found.texts[0] == whole


@pytest.mark.parametrize(
    ("mesh", "layout"), [("data=1", "sharded"), ("fsdp=2,context=2,tensor=2", "gathered")]
)
def test_weights_and_cache_take_the_memory_that_was_planned(
    mesh: str, layout: WeightsLayout
) -> None:
    model = dataclasses.replace(MODELS["llama"], layers=8, width=128, heads=4)
    device_run = device_run_of(tiny_run(model, mesh, batch=8, seq=16))
    weights = lay_out(device_run, device_run.initial_state().params, layout)
    decoder = Decoder(device_run, weights, bucket_for(device_run, [380] * 4, 100, 128))
    # By hand: layers, sequences, key/value heads, slots, head size; keys and values of 4 bytes.
    planned = 2 * 8 * 4 * 4 * 512 * 32 * 4 / device_run.layout.shape.size
    assert decoder.plan.bytes_per_device == planned
    memory = decoder.memory()
    assert decoder.cache_bytes(memory) == pytest.approx(planned, rel=0.02)
    given = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    assert given == pytest.approx(weight_bytes(device_run, layout), rel=0.02)
    # The loop writes the cache in place: what else it takes is less than a second one.
    assert memory.temp_size_in_bytes < 0.6 * planned


def test_attention_visits_blocks_as_it_does_all_at_once() -> None:
    """Slots in several blocks, with padding, a window, and several tokens, against a plain softmax."""
    B, T, N, K, H, S = 2, 3, 4, 2, 8, 3072
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1, S, K, B, H)).astype(np.float32) for _ in range(2))
    q, new_k, new_v = (rng.standard_normal((B, T, n, H)).astype(np.float32) for n in (N, K, K))
    first, slot = np.array([2, 1500]), 2500

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=jax.make_mesh((1,), ("context",)),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    def run(k: Any, v: Any, q: Any, new_k: Any, new_v: Any) -> Any:
        slots = Slots(jnp.int32(slot), jnp.array(first), T)
        cache = write(KeyValues(k, v), 0, slots, new_k, new_v)
        return [attend(cache, 0, slots, q, window) for window in (None, 700)]

    out = run(k, v, q, new_k, new_v)
    k[0, slot : slot + T], v[0, slot : slot + T] = (x.transpose(1, 2, 0, 3) for x in (new_k, new_v))
    for (found, lse), window in zip(out, (10**9, 700), strict=True):
        for b, t, n in itertools.product(range(B), range(T), range(N)):
            seen = [s for s in range(first[b], slot + t + 1) if slot + t - s < window]
            scores = k[0, seen, n // 2, b].astype(np.float64) @ q[b, t, n] / H**0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ v[0, seen, n // 2, b] / weights.sum()
            np.testing.assert_allclose(found[b, t, n], expected, atol=2e-6)
            assert lse[b, t, n] == pytest.approx(scores.max() + np.log(weights.sum()), rel=1e-5)


def test_what_cannot_be_is_refused() -> None:
    device_run = device_run_of(tiny_run(MODELS["llama"], "stage=2,tensor=2"))
    with pytest.raises(ConfigError, match=r"(?s)2 pipeline stages.*--mesh data=2,tensor=2"):
        Generator(OpenedModel(device_run, None, Bytes(), (), ""))
    capacity = dataclasses.replace(MODELS["mixtral"], dispatch="capacity")
    with pytest.raises(ConfigError, match="dispatch dropless"):
        Generator(OpenedModel(device_run_of(tiny_run(capacity, "data=1")), None, Bytes(), (), ""))
    with pytest.raises(ConfigError, match=r"(?s)64 positions, and 60 \+ 5 = 65.*--max-tokens 4"):
        bucket_for(opened("gpt2").device_run, [60], 5, 512)
    with pytest.raises(ConfigError, match="no weights before it is trained"):
        open_weights("tiny")
    for wrong in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
    ):
        with pytest.raises(ConfigError):
            Sampling(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokens 0 to 49"):
        Generator(opened("llama")).encode([3, 50])
    with pytest.raises(
        ConfigError,
        match=r"(?s)1 text\(s\) of 10000000\d+ tokens takes .* on a device, which has .*--max-tokens \d",
    ):
        Generator(opened("llama")).decoder([3], 10**10)
    assert Sampling(top_k=10**12).settings().top_k == 2**31 - 1


def test_training_samples_the_same_text_on_stages() -> None:
    model, texts = dataclasses.replace(MODELS["llama"], layers=4), []
    for mesh, schedule in (
        ("data=1", "1f1b"),
        ("stage=2,tensor=2", "1f1b"),
        ("stage=2", own("outside.extensions.zbv:zbv")),
    ):
        device_run: DeviceRun = device_run_of(tiny_run(model, mesh, pipeline_schedule=schedule))
        params = device_run.initial_state().params
        texts.append(
            sample_tokens(device_run, params, np.array([1, 2, 3], np.int32), tokens=6, seed=0)
        )
    assert len(texts[0]) == 6 and texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("mesh", ["data=1", "fsdp=2,context=2,tensor=2"])
def test_scores_are_the_log_probabilities_of_the_generated_tokens(mesh: str) -> None:
    generator = Generator(opened("qwen-like", mesh), Decoding(prefill_chunk=4))
    ids = [list(map(int, prompt)) for prompt in prompts()]
    found = generator.generate(ids, max_tokens=TOKENS)
    scores = generator.score(
        [[*prompt, *text] for prompt, text in zip(ids, found.tokens, strict=True)]
    )
    for (logprobs, likely), expected in zip(scores, found.logprobs, strict=True):
        np.testing.assert_allclose(logprobs[-TOKENS:], expected, atol=2e-5)
        assert likely[-TOKENS:].all() and not likely[:-TOKENS].all()


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('role ' + m.role) }}{% endif %}<{{ m.role }}>{% generation %}{{ m.content | trim }}"
    "{% endgeneration %}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_chat_templates_are_read_and_run_in_the_sandbox(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "chat_template": "none"}'
    )
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = read_chat_template(tmp_path)
    assert template is not None
    messages = [{"role": "user", "content": " hello "}, {"role": "assistant", "content": "hi"}]
    assert template.render(messages[:1]) == "<s><user>hello</s>\n<assistant>"
    assert template.render(messages, answer=False) == "<s><user>hello</s>\n<assistant>hi</s>\n"
    with pytest.raises(DataError, match="role system"):
        template.render([{"role": "system", "content": ""}])
    with pytest.raises(DataError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render(messages)


def test_the_plan_of_a_cache_needs_no_device() -> None:
    run = mw.recipe("llama3-8b")
    plan = CachePlan(run.model.spec(), mw.MeshShape(fsdp=2, tensor=4), 8, 8192, "bfloat16")
    assert plan.bytes_per_device == 2 * 32 * 8 * 8 * 8192 * 128 * 2 // 8


@pytest.fixture(scope="module")
def run_folder(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on text of one letter after another, with its checkpoint."""
    text = tmp_path_factory.mktemp("text") / "letters.txt"
    text.write_text("abcdefghij\u00e9 " * 400)
    run = tiny_run(
        dataclasses.replace(MODELS["llama"], vocab=None), "fsdp=2", steps=2, batch=8, seq=32,
        data=mw.Data(paths=(str(text),), tokenizer="bytes", sample=0),
    )  # fmt: skip
    out = tmp_path_factory.mktemp("runs") / "letters"
    return mw.train(run, out=out, progress="none", cache=cache).out


def test_the_verb_shows_text_and_report(
    run_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from meshwright.cli.verbs import run_verb

    assert (
        run_verb(
            "generate",
            [str(run_folder), "abc", "--max-tokens", "6", "--mesh", "tensor=2", "--devices", "8"],
        )
        == 0
    )
    shown = capsys.readouterr()
    assert (
        shown.out.startswith("abc") and "decode:  6 tokens" in shown.err and "(planned" in shown.err
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "ef"}\n')
    assert (
        run_verb(
            "generate",
            [
                str(run_folder),
                "--prompts",
                str(prompts),
                "--max-tokens",
                "6",
                "--mesh",
                "tensor=2",
                "--devices",
                "8",
                "--json",
            ],
        )
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    for line, message in (
        ('{"prompt": ["a"]}', r'(?s)prompt 2 .* its prompt is \["a"\], and no text'),
        ("{", "prompt 2 of"),
    ):
        prompts.write_text(f'{{"prompt": "a\u2028b"}}\n\n{line}\n', encoding="utf-8")
        with pytest.raises(DataError, match=message):
            run_verb("generate", [str(run_folder), "--prompts", str(prompts), "--devices", "8"])
    assert ["abc" + record["texts"][0]["text"] + "\n"] == [shown.out]
    assert record["report"]["cache_bytes"] == record["report"]["planned_cache_bytes"]
    with pytest.raises(ConfigError, match="has no chat template"):
        run_verb("generate", [str(run_folder), "abc", "--chat", "--devices", "8"])
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    options = [
        "--chat",
        "--chat-template",
        str(template),
        "--max-tokens",
        "3",
        "--prompt",
        "def",
        "--devices",
        "8",
        "--json",
    ]
    assert run_verb("generate", [str(run_folder), "abc", *options]) == 0
    assert [
        json.loads(line)["texts"][0]["prompt"] for line in capsys.readouterr().out.splitlines()
    ] == ["abc", "def"]


def test_bits_per_byte_by_hand(run_folder: Path, cache: Path) -> None:
    held_out = mw.evaluate(run_folder, cache=cache, mesh="data=2,tensor=2")
    # Bytes are tokens: all of the held-out tail but its first, in windows of 32.
    total = len(("abcdefghij\u00e9 " * 400).encode()) + 1
    windows = (total - round(total * 0.9) - 1) // 32
    assert held_out.samples == windows and held_out.tokens == held_out.text_bytes == windows * 32
    assert held_out.bits_per_byte == pytest.approx(held_out.loss / math.log(2))
    assert held_out.perplexity == pytest.approx(math.exp(held_out.loss))


@pytest.mark.parametrize("seed", [-1, 2**32, 2**32 + 7])
def test_a_seed_beyond_its_range_is_refused(seed: int) -> None:
    """No two seeds give the same numbers: one that would be cut to 32 bits is refused."""
    with pytest.raises(ConfigError, match="seed"):
        Sampling(seed=seed)
    assert Sampling(seed=2**32 - 1).settings().seed == 2**32 - 1


def test_texts_beyond_the_positions_of_the_weights_are_said(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rotary positions have no end: the note is once on standard error, and in the line of a run that trains."""
    model = mw.convert(run_folder, tmp_path / "model").out
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 12}))
    opened = open_weights(f"hf:{model}", mesh=MeshShape(), devices=1)
    generator = Generator(opened)
    generator.decoder([8], 4)
    assert capfd.readouterr().err == ""
    generator.decoder([8], 5)
    generator.decoder([8], 6)
    (line,) = capfd.readouterr().err.splitlines()
    assert "texts of 13 tokens are longer than the 12 positions of" in line
    run = dataclasses.replace(mw.recipe(f"hf:{model}"), init_from=f"hf:{model}")
    for seq, said in ((12, False), (13, True)):
        longer = dataclasses.replace(run, training=dataclasses.replace(run.training, seq=seq))
        assert ("max_position_embeddings" in describe_initial_weights(longer)) == said
