"""Conversations: answers in the chat templates of model families, what templates leave out, and files of records."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

import meshwright as mw
from meshwright.data.chat import TEMPLATES, ChatTemplate, read_chat_template
from meshwright.data.chat_files import find_chat_files, read_records, unit_of
from meshwright.data.chat_records import RecordRenderer, Rendered
from meshwright.data.conversations import stops_of, template_of
from meshwright.data.sources import Place
from meshwright.data.subwords import END, Subwords
from meshwright.data.tokenizers import Bytes
from meshwright.errors import DataError
from meshwright.hugging_face.tokenizer_files import write_tokenizer
from meshwright.runs.run_file import with_absolute_paths

FOLDER = Path(__file__).parent / "golden" / "chat_templates"
_CHATML = ("<|im_end|>", "<|endoftext|>")
STOPS = {
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),  # noqa: RUF001
    "gemma": ("<eos>", "<end_of_turn>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "lfm2": _CHATML,
    "llama3": ("<|end_of_text|>", "<|eot_id|>"),
    "llama3_1": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "nemotron_3_nano": _CHATML,
    "phi3": ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "qwen3_instruct_2507": _CHATML,
}
"""Tokens at which the models of a template stop, as their generation_config.json has them."""
REASONS = ("glm4moe", "gptoss", "nemotron_3_nano", "qwen3")
"""Templates that write reasoning."""
CALLS = ("glm4moe", "gptoss", "llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3")
"""Templates that write tools and calls of them."""
_CONTROL = re.compile(r"<[|｜]?[\w▁/]+[|｜]?>")  # noqa: RUF001

TALK = [
    {"role": "user", "content": "one?"}, {"role": "assistant", "content": " uno ü "},
    {"role": "user", "content": "two?"}, {"role": "assistant", "content": "dos"},
]  # fmt: skip
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 2}}}
TALK_WITH_CALL = [
    {"role": "user", "content": "2 and 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"},
    {"role": "assistant", "content": "Four."},
]
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def family(name: str, *, training: bool = False) -> tuple[Subwords, ChatTemplate, tuple[int, ...]]:
    """Byte-level tokenizer with the control tokens of a family, its template, and its stops."""
    source = (FOLDER / f"{name}{'_training' * training}.jinja").read_text(encoding="utf-8")
    own = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    special = {"<|endoftext|>", "<s>", *STOPS[name], *_CONTROL.findall(own)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=sorted(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    tokens = (("bos_token", "<s>"), ("eos_token", STOPS[name][0]))
    stops = tuple(tokenizer.token_to_id(stop) for stop in STOPS[name])
    return Subwords(tokenizer.to_str()), ChatTemplate(source, tokens), stops


def rendered(
    name: str, record: dict[str, Any], *, training: bool = False
) -> tuple[Subwords, Rendered]:
    tokenizer, template, stops = family(name, training=training)
    renderer = RecordRenderer("f:1", tokenizer, template, stops)
    return tokenizer, renderer.render(record, "answers")[0]


def decoded(tokenizer: Subwords, tokens: list[int]) -> str:
    return str(tokenizer._tokenizer.decode(tokens, skip_special_tokens=False))


def answers_of(name: str, record: dict[str, Any], *, training: bool = False) -> list[str]:
    """Texts of the answers that have a loss."""
    tokenizer, document = rendered(name, record, training=training)
    answers: list[list[int]] = []
    before = False
    for token, is_answer in zip(document.tokens.tolist(), document.answers.tolist(), strict=True):
        if is_answer and not before:
            answers.append([])
        if is_answer:
            answers[-1].append(token)
        before = is_answer
    return [decoded(tokenizer, answer) for answer in answers]


@pytest.mark.parametrize("name", STOPS)
def test_every_answer_of_a_family_is_found_with_the_token_that_ends_it(name: str) -> None:
    answers = answers_of(name, {"messages": TALK})
    assert len(answers) == 2
    for answer, message in zip(answers, (TALK[1], TALK[3]), strict=True):
        assert message["content"].strip() in answer
        assert not {"one?", "two?"} & set(_CONTROL.split(answer))
        inner = (*STOPS[name], "<|end|>") if name == "gptoss" else STOPS[name]
        assert answer.endswith(inner), answer
    assert answers[-1].endswith(STOPS[name])


@pytest.mark.parametrize("name", [name for name in STOPS if name != "llama3_1"])
def test_answers_are_those_that_the_training_template_marks(name: str) -> None:
    """Their texts differ in control tokens only: some mark the header, or reasoning that is not there."""
    found = answers_of(name, {"messages": TALK})
    marked = answers_of(name, {"messages": TALK}, training=True)
    assert len(found) == len(marked)
    for ours, theirs in zip(found, marked, strict=True):
        words = [re.sub(r"<[^<>]*>|\s", "", text) for text in (ours, theirs)]
        assert words[0] == words[1].removeprefix("assistant")
        last = [_CONTROL.findall(text) for text in (ours, theirs)]
        assert last[0][-1] in last[1]


@pytest.mark.parametrize("name", STOPS)
def test_the_three_names_of_reasoning_are_one(name: str) -> None:
    texts = []
    for key in ("reasoning_content", "thinking", "reasoning"):
        record = {"messages": [TALK[0], {**TALK[1], key: "because"}]}
        if name in REASONS:
            texts.append(answers_of(name, record)[0])
        else:
            with pytest.raises(mw.DataError, match=f"writes nothing of '{key}' of message 1"):
                rendered(name, record)
    if name in REASONS:
        assert len(set(texts)) == 1
        assert "because" in texts[0] and texts[0].endswith(STOPS[name])


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe"])
def test_reasoning_of_an_earlier_answer_that_a_template_leaves_out_is_refused(name: str) -> None:
    talk = [*TALK[:3], {**TALK[3], "reasoning": "because"}]
    assert "because" in answers_of(name, {"messages": talk})[1]
    talk[1] = {**TALK[1], "reasoning": "therefore"}
    with pytest.raises(mw.DataError, match="of message 1 where more messages follow") as refused:
        rendered(name, {"messages": talk})
    assert "a record that ends with message 1" in refused.value.fix


THOUGHT = "<think>\nbecause\n</think>\n\ndos"


@pytest.mark.parametrize("name", STOPS)
def test_reasoning_in_a_content_is_in_the_text_or_refused(name: str) -> None:
    """DeepSeek's template cuts it from all answers, those of Qwen3, GLM-4.5 and Nemotron from all but the last."""
    last = {"messages": [*TALK[:3], {**TALK[3], "content": THOUGHT}]}
    earlier = {"messages": [TALK[0], {**TALK[1], "content": THOUGHT}, *TALK[2:]]}
    for record, number in ((last, -1), (earlier, 0)):
        try:
            assert "because" in answers_of(name, record)[number]
        except mw.DataError as refused:
            assert "with the word 'think'" in refused.truth or "'because'" in refused.truth
            assert name in ("deepseekv3", "qwen3", "glm4moe", "nemotron_3_nano")
            assert number == 0 or name == "deepseekv3"
            assert ("a record that ends with" in refused.fix) == (name != "deepseekv3")


@pytest.mark.parametrize("name", CALLS)
def test_tools_are_written_and_calls_are_answers(name: str) -> None:
    record = {"messages": TALK_WITH_CALL, "tools": [ADD]}
    tokenizer, document = rendered(name, record)
    assert "Adds two numbers." in decoded(tokenizer, document.tokens.tolist())
    call, last = answers_of(name, record)
    assert "add" in call and "2" in call and call.endswith(STOPS[name])
    assert "Four." in last and last.endswith(STOPS[name])
    as_text = {**record, "tools": json.dumps([ADD])}
    assert (rendered(name, as_text)[1].tokens == document.tokens).all()


UNWRITTEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a weight": ("qwen3", {"messages": [TALK[0], {**TALK[1], "weight": 0}]}, "'weight' of message 1"),
    "a name": ("llama3", {"messages": [{**TALK[0], "name": "Ada"}, TALK[1]]}, "'name' of message 0"),
    "a role": ("phi3", {"messages": [TALK[0], {"role": "tool", "content": "4"}, TALK[1]]},
               "the content of message 1 (tool)"),
    "calls": ("llama3", {"messages": TALK_WITH_CALL}, "'tool_calls' of message 1"),
    "tools": ("deepseekv3", {"messages": TALK, "tools": [ADD]}, "`tools`"),
    "a variable": ("gemma", {"messages": TALK, "chat_template_kwargs": {"enable_thinking": True}},
                   "'enable_thinking'"),
    "a system field": ("qwen3", {"messages": TALK, "system": "Be brief."}, "it has `system`, which is not read"),
}  # fmt: skip


@pytest.mark.parametrize("row", UNWRITTEN)
def test_what_a_template_writes_nothing_of_is_refused(row: str) -> None:
    name, record, reason = UNWRITTEN[row]
    with pytest.raises(mw.DataError, match=re.escape(reason)):
        rendered(name, record)


def test_variables_of_a_record_reach_the_template() -> None:
    record = {"messages": TALK, "chat_template_kwargs": {"reasoning_effort": "high"}}
    tokenizer, document = rendered("gptoss", record)
    assert "Reasoning: high" in decoded(tokenizer, document.tokens.tolist())


def test_nulls_and_parts_say_what_absent_keys_and_texts_do() -> None:
    plain = rendered("qwen3", {"messages": TALK, "tools": None})[1]
    parts = [{"type": "text", "text": "on"}, {"type": "text", "text": "e?"}]
    nulls = {"tool_calls": None, "reasoning_content": None, "name": None}
    other = [{**TALK[0], "content": parts, **nulls}, *({**m, **nulls} for m in TALK[1:])]
    assert (rendered("qwen3", {"messages": other})[1].tokens == plain.tokens).all()


CLOSED: dict[str, tuple[str, str]] = {
    "by ChatML": (TEMPLATES["chatml"], "yes<|im_end|>\n"),
    "by nothing": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "yes\n"),
    "behind marks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}|{% endif %}{% endfor %}",
        "yes",
    ),
}


@pytest.mark.parametrize("row", CLOSED)
def test_a_last_answer_that_is_left_open_ends_with_a_token_at_which_the_model_stops(
    row: str,
) -> None:
    source, text = CLOSED[row]
    talk = [TALK[0], {"role": "assistant", "content": "yes"}]
    renderer = RecordRenderer("f:1", Bytes(), ChatTemplate(source), stops_of(Bytes(), "bytes"))
    document = renderer.render({"messages": talk}, "answers")[0]
    answer = document.tokens[document.answers]
    assert Bytes().decode(answer[:-1]).endswith(text)
    assert answer[-1] == Bytes().end


def test_a_stop_behind_marks_is_in_the_loss() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    tokenizer, _, stops = family("qwen3")
    renderer = RecordRenderer("f:1", tokenizer, ChatTemplate(source), stops)
    document = renderer.render({"messages": TALK}, "answers")[0]
    text = decoded(tokenizer, document.tokens[document.answers].tolist())
    assert text == " uno ü <|im_end|>dos<|im_end|>"


def write(file: Path, records: list[dict[str, Any]]) -> Path:
    """Writes records in the form that a file's name says."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(lines.encode()))
    elif file.name == "array.json":
        file.write_text("\ufeff\n" + json.dumps(records, indent=1), encoding="utf-8")
    else:
        file.write_text(lines, encoding="utf-8")
    return file


FILES = ("a.jsonl", "a.ndjson", "a.jsonl.gz", "array.json", "lines.json", "a.parquet")


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_have_the_same_records(name: str, tmp_path: Path) -> None:
    records = [{"messages": TALK}, {"messages": TALK_WITH_CALL}]
    file = write(tmp_path / name, records)
    found = list(read_records(find_chat_files(str(tmp_path)).files))
    assert find_chat_files(str(file)).files == [file]
    assert [record for _, _, record in found] == records
    places = [Place(file, unit_of(file), number) for number in (1, 2)]
    assert [(number, place) for number, place, _ in found] == [(0, place) for place in places]


def test_a_folder_is_read_by_the_kind_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(mw.DataError, match="a folder without a file that ends with"):
        find_chat_files(str(tmp_path))
    array = write(tmp_path / "array.json", [{"messages": TALK}])
    assert find_chat_files(str(tmp_path)).files == [array]
    lines = write(tmp_path / "a.jsonl", [{"messages": TALK}])
    assert find_chat_files(str(tmp_path)).files == [lines]
    with pytest.raises(mw.DataError, match="it is not there"):
        find_chat_files(str(tmp_path / "nowhere"))
    for name in ("play.txt", "play.md.gz"):
        (tmp_path / name).write_text("To be, or not to be")
        with pytest.raises(DataError, match="it is text") as refused:
            find_chat_files(str(tmp_path / name))
        assert "meshwright train" in refused.value.fix


@pytest.mark.parametrize("text", ["[1]", '[{"messages": 1, "messages": 2}]', "[", "[1] x"])
def test_a_broken_array_is_refused_with_its_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "array.json"
    file.write_text(text)
    with pytest.raises(mw.DataError) as refused:
        list(read_records([file]))
    assert str(file) in refused.value.asked


def test_a_template_that_is_not_jinja_is_told_from_a_conversation_that_it_refuses() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(DataError, match="the template is not Jinja: line 2: ") as broken:
        ChatTemplate("{{ messages }}\n{{ broken").render(messages)
    assert "roles" not in broken.value.fix
    with pytest.raises(DataError, match="the template refuses it: no users") as refused:
        ChatTemplate("{{ raise_exception('no users') }}").render(messages)
    assert "roles" in refused.value.fix


def test_chatml_is_there_by_name(tmp_path: Path) -> None:
    renderer = RecordRenderer("f:1", Bytes(), None, (Bytes().end,))
    with pytest.raises(mw.DataError, match="no chat template") as refused:
        renderer.render({"messages": TALK}, "answers")
    assert "--finetune.template chatml" in refused.value.fix
    template = template_of("bytes", "chatml")
    assert template == ChatTemplate(TEMPLATES["chatml"])
    text = template.render(TALK[:1])
    assert text == "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    run = mw.recipe("tiny", template="chatml")
    assert with_absolute_paths(run).finetune.template == "chatml"
    with pytest.raises(mw.DataError, match="template chatlm") as unknown:
        template_of("bytes", "chatlm")
    assert "or chatml" in unknown.value.fix


def test_a_model_may_have_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    both = [
        {"name": "default", "template": PLAIN},
        {"name": "tool_use", "template": "{{ tools }}" + PLAIN},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.render(TALK[:1]).startswith("<|user|>")
    assert template.render(TALK[:1], tools=[ADD]).startswith("[{")


def test_stops_are_those_of_the_generation_settings(tmp_path: Path) -> None:
    tokenizer = family("qwen3")[0]
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_json())
    assert stops_of(tokenizer, str(file)) == (tokenizer.end,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert stops_of(tokenizer, str(file)) == (3, 5)


def test_a_template_that_was_chosen_goes_out_with_the_tokenizer(tmp_path: Path) -> None:
    kept, out = tmp_path / "huggingface", tmp_path / "out"
    out.mkdir()
    kept.mkdir()
    (kept / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    file = tmp_path / "tokenizer.json"
    file.write_text(Bytes().to_json())
    write_tokenizer(file, kept, out)
    assert read_chat_template(out) == ChatTemplate(TEMPLATES["chatml"], (("eos_token", END),))
