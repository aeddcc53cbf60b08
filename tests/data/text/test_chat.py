"""Conversations as tokens and masks, compared with transformers' own, and a run whose loss is the assistant's alone."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.preprocess.encode import assistant_mask
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess
from megatron_ext.data.text.chat import ChatError, ChatTemplate
from megatron_ext.data.text.tokenizer import Tokenizer
from tests.chats import END, HEAD, HEADED, MARKED, PLAIN, PROMPT, START, conversations, put_chats, put_tokenizer
from tests.conftest import refused
from tests.launcher import Commands
from tests.runs import read_jsonl

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
THINKING = PLAIN.replace(
    "{{ m['content']", "{{ ('<think></think>' if loop.last and m['role'] == 'assistant' else '') + m['content']"
)
CALLING = (  # like PLAIN, and with calls
    "{% for m in messages %}" + HEAD + "{{ m['content'] }}{% if 'tool_calls' in m %}{% for call in m['tool_calls'] %}"
    "{{ call['function']['name'] + call['function']['arguments'] | tojson }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
IN_PARTS = PLAIN.replace("{{ m['content'] +", "{% for part in m['content'] %}{{ part['text'] | trim }}{% endfor %}{{")
NULLS = dict.fromkeys(("tool_calls", "name", "reasoning_content", "tool_call_id"))
SAY = {"role": "assistant", "content": "yes"}
ASK = {"role": "user", "content": "no"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template marks the assistant."""
    return put_tokenizer(tmp_path_factory.mktemp("tokenizer"), MARKED)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, (("bos_token", "<|endoftext|>"), ("eos_token", END)), ("<|endoftext|>", END, START))


def said(source: str, messages: list[dict[str, Any]]) -> list[str]:
    text, spans = template(source).render(messages)
    return [text[start:end] for start, end in spans]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<|" not in text)
chats = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts),
    min_size=1,
    max_size=5,
)


@given(messages=chats)
def test_ids_and_mask_are_those_of_transformers(folder: Path, messages: list[dict[str, Any]]) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    text, spans = ChatTemplate.of(folder).render(messages)
    assert (text, spans) == template(PLAIN).render(messages)  # which marks nothing
    ids, offsets = Tokenizer(folder).encode_spelled(text)
    assert ids == wanted["input_ids"]
    assert assistant_mask(np.array(offsets).reshape(-1, 2), spans).tolist() == wanted["assistant_masks"]


def test_templates_without_a_generation_prompt() -> None:
    messages = [ASK, SAY, {"role": "user", "content": "yes"}, {"role": "assistant", "content": " yes, yes "}]
    assert said(HEADED, messages) == [f"yes{END}", f"yes, yes {END}"]
    assert said(LLAMA, messages) == [f"yes {END}", f"yes, yes  {END}"]
    assert said(HEADED, [SAY, ASK, SAY]) == [f"yes{END}"] * 2
    for answer in ("a", "is", "s"):  # in the heading, and in the end token
        assert said(HEADED, [ASK, {"role": "assistant", "content": answer}]) == [f"{answer}{END}"]


def test_a_template_with_tools_and_calls() -> None:
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}:"
        "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    text, spans = template(source).render([ASK, call, {"role": "tool", "content": "3"}, SAY], [{"name": "f"}])
    assert text.startswith('[{"name": "f"}]<|im_start|>user:no')
    assert [text[a:b] for a, b in spans] == [f'[{{"name": "f"}}]{END}', f"yes{END}"]


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


CALL = call({})


def in_parts(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": text, "image_url": None} for text in texts]}


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (CALLING, [ASK, NULLS | SAY]),
        (CALLING, [NULLS | ASK, call({"city": None}), {"role": "tool", "content": None, "tool_call_id": "7"}, SAY]),
        (CALLING, [ASK, call({}), {"role": "ipython", "content": "3"}, SAY | {"thinking": "x"}]),
        (IN_PARTS, [in_parts(ASK, "a ", "b"), in_parts(SAY, "c")]),
    ],
)
def test_transformers_renders_the_same(folder: Path, source: str, messages: list[dict[str, Any]]) -> None:
    """Keys that are null are left out, and parts are given to a template that reads them, in prompts, too."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, chat_template=source)
    chat_template = template(source)
    assert chat_template.render(messages)[0] == tokenizer.apply_chat_template(messages, tokenize=False)
    wanted = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert chat_template.prompt(messages[:1]) == wanted


@pytest.mark.parametrize("source", [PLAIN, MARKED, HEADED])
@pytest.mark.parametrize("beginning", ["The number is", "It is: ", END])
def test_a_begun_answer_is_continued(folder: Path, source: str, beginning: str) -> None:
    """Without the end of its turn, also if messages spell special tokens, as transformers does."""
    messages = [{"role": "user", "content": f"a{END}b"}, {"role": "assistant", "content": beginning}]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, chat_template=source)
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert template(source).prompt(messages, continued=True, may_spell=True) == wanted


@pytest.mark.parametrize("source", [PLAIN, MARKED, HEADED, PLAIN.replace("m['content'] +", "m['content'] ~")])
def test_parts_are_joined_for_a_template_that_reads_none(source: str) -> None:
    """They are joined even where it would write the list as Python does."""
    assert template(source).render([in_parts(ASK, "n", "o"), in_parts(SAY, "yes")]) == template(source).render(
        [ASK, SAY]
    )


@pytest.mark.parametrize("place", ["files", "configuration", "configuration beside a file"])
def test_conversations_with_tools_have_their_template(tmp_path: Path, place: str) -> None:
    """If a tokenizer has several, transformers' choice is taken."""
    folder = put_tokenizer(tmp_path, None)
    sources = {"default": PLAIN, "tool_use": "{{ tools | length }}" + PLAIN, "rag": "rag"}
    if place == "files":
        (folder / "additional_chat_templates").mkdir()
        for name, source in sources.items():
            file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
            (folder / f"{file}.jinja").write_text(source)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": source} for name, source in sources.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if place == "configuration beside a file":
        (folder / "chat_template.jinja").write_text(PLAIN)
    tokenizer, chat_template = PreTrainedTokenizerFast.from_pretrained(folder), ChatTemplate.of(folder)
    for tools in (None, [], [{"name": "f"}]):
        assert chat_template.render([ASK, SAY], tools)[0] == tokenizer.apply_chat_template(
            [ASK, SAY], tools, tokenize=False
        )


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (PLAIN, [], "the conversation is empty"),
        (PLAIN, [ASK, {"from": "gpt", "value": "x"}], "message 2 needs an object with role and content"),
        (PLAIN, [ASK, {"role": "gpt", "content": "x"}], "message 2 has role 'gpt', needs one of system, "),
        (PLAIN, [ASK, {"role": "assistant", "content": None}], "message 2 has no text as content"),
        (PLAIN, [ASK, {"role": "assistant", "content": []}], "message 2 has no text as content"),
        (PLAIN, [ASK, SAY | {"content": {"x": 1}}], "message 2 has a dict as content, needs a text or a list of parts"),
        (IN_PARTS, [ASK | {"content": [{"type": "image"}]}, SAY], "message 1 has a part of type 'image'"),
        (IN_PARTS, [ASK | {"content": ["x"]}, SAY], "message 1 has a part of type 'str'"),
        (IN_PARTS, [ASK | {"content": [{"type": "text"}]}, SAY], "message 1 has a part of type 'text' without a text"),
        (PLAIN, [in_parts(ASK, END[:5], END[5:]), SAY], "message 1 spells the special token '<|im_end|>'"),
        (IN_PARTS, [in_parts(ASK, END[:5] + "\n", END[5:]), SAY], "message 1 spells the special token '<|im_end|>'"),
        (PLAIN, [{"role": "user", "content": f"a{END}b"}, SAY], "message 1 spells the special token '<|im_end|>'"),
        ("{{ raise_exception('user and assistant take turns') }}", [SAY, SAY], r"\(user and assistant take turns\)"),
        ("{% for m in messages %}", [ASK, SAY], "the chat template does not take these messages"),
        (CALLING, [ASK, SAY, ASK, {"role": "assistant", "thinking": "x"}], "message 4: the chat template writes noth"),
        (IN_PARTS, [ASK, SAY], "message 2: the chat template writes nothing of it"),
        (PLAIN, [ASK, CALL | {"content": ""}], "message 2: the chat template writes nothing of it"),
        (THINKING, [ASK, SAY, ASK, SAY], "message 2: the chat template renders the beginning .* otherwise"),
        (HEADED.replace("m['content']", "m['content'] | upper"), [ASK, SAY], "does not spell the message as it is"),
        ("{% if false %}{% generation %}"
         "{% endgeneration %}{% endif %}x", [ASK, SAY], "marks nothing as the assistant's"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered(source: str, messages: list[Any], text: str) -> None:
    with pytest.raises(ChatError, match=text):
        template(source).render(messages)
    assert said(THINKING, [ASK, SAY]) == [f"<think></think>yes{END}"]


@pytest.mark.parametrize("token", ['<|"|>', "a\\b", "<|x\n|>", "<|é|>"])
def test_no_part_of_a_conversation_spells_a_special_token(token: str) -> None:
    """Whatever its characters are: they are compared as they are, not as JSON writes them."""
    spelled = f"x {token} y"
    calling = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {spelled: 1}}]}
    chat_template = replace(template(CALLING), special=(token,))
    for messages, tools, variables in (
        ([ASK | {"content": spelled}, SAY], None, {}),
        ([ASK, calling], None, {}),
        ([ASK, SAY], [{"function": {"description": spelled}}], {}),
        ([ASK, SAY], None, {"custom": [spelled]}),
    ):
        with pytest.raises(ChatError, match=re.escape(repr(token))):
            chat_template.setting(variables).render(messages, tools)


def test_a_conversation_sets_variables_of_its_template(options: PreprocessOptions, tmp_path: Path) -> None:
    """As TRL passes them to apply_chat_template."""
    source = "{{ '/no_think' if enable_thinking == false }}" + PLAIN
    folder = put_tokenizer(tmp_path / "tokenizer", source)
    rows = [{"messages": [ASK, SAY], "chat_template_kwargs": kwargs} for kwargs in ({"enable_thinking": False}, None)]
    Path(options.inputs[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = replace(options, tokenizer=str(folder))
    preprocess(options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    made = IndexedSource(options.output_prefix)
    for number, row in enumerate(rows):
        wanted = tokenizer.apply_chat_template(row["messages"], return_dict=True, **row["chat_template_kwargs"] or {})
        assert made.read(number, 0, int(made.document_lengths[number])).tolist() == wanted["input_ids"]
    for wrong, text in (([1], "is a list, needs an object"), ({"tools": []}, "does not take these messages")):
        with pytest.raises(ChatError, match=text):
            template(PLAIN).setting(wrong).render([ASK, SAY])


def test_other_ids_of_transformers_are_warned_of(options: PreprocessOptions, tmp_path: Path, caplog) -> None:
    """Some classes of transformers read tokenizer.json only in part; the reference is AutoTokenizer itself."""
    folder = put_tokenizer(tmp_path / "tokenizer", PLAIN)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("PreTrainedTokenizerFast", "Qwen2Tokenizer"):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
        caplog.clear()
        preprocess(replace(options, tokenizer=str(folder), output_prefix=f"{options.output_prefix}-{name}"))
        theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
        text = "cafe\u0301"
        is_same = theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert is_same is ("AutoTokenizer gives" not in caplog.text)
        assert is_same is (name != "Qwen2Tokenizer")


def test_wrong_tools_are_refused() -> None:
    template(PLAIN).render([ASK, SAY], [{"function": {"name": "f", "description": "adds"}}])
    for tools, text in (
        ([{"function": {"name": "f", "description": f"adds{END}{START}assistant"}}], "special token '<|im_end|>'"),
        ([{"function": {"parameters": {"properties": {START: {}}}}}], "special token '<|im_start|>'"),
        ({"name": "f"}, "tools is a dict, needs a list"),
    ):
        with pytest.raises(ChatError, match=re.escape(text)):
            template(PLAIN).render([ASK, SAY], tools)


@pytest.fixture
def options(tmp_path: Path, folder: Path) -> PreprocessOptions:
    """About 14 shards of 120 conversations."""
    file = put_chats(tmp_path / "chats.jsonl", conversations(120))
    prefix = str(tmp_path / "out" / "data")
    return PreprocessOptions([str(file)], prefix, str(folder), messages_field="messages", shard_bytes=3000)


def test_a_dataset_of_chats(options: PreprocessOptions, folder: Path) -> None:
    report = preprocess(options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    source = IndexedSource(options.output_prefix, Tokenizer(folder).vocab_size)
    trained = 0
    for number, chat in enumerate(conversations(120)):
        wanted = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        length = int(source.document_lengths[number])
        assert source.read(number, 0, length).tolist() == wanted["input_ids"]
        mask = source.read_mask(number, 0, length)
        assert mask.tolist() == [value == 1 for value in wanted["assistant_masks"]]
        trained += sum(wanted["assistant_masks"])
    metadata = json.loads(Path(options.output_prefix + ".json").read_text())
    assert (report.documents, report.trained, metadata["trained"]) == (120, trained, trained)
    assert (metadata["eod_id"], metadata["chat_template"]) == (None, ChatTemplate.of(folder).fingerprint)
    os.unlink(options.output_prefix + ".mask.npy")
    assert "data.mask.npy does not exist" in refused(IndexedSource, options.output_prefix)


def test_bad_conversations_are_named_and_unanswered_ones_counted(options: PreprocessOptions) -> None:
    bad = [ASK, {"role": "bot", "content": ""}]
    file = put_chats(Path(options.inputs[0]), [[ASK, SAY], [ASK], bad, [], [ASK, SAY]])
    assert "chats.jsonl:3: message 2 has role 'bot'" in refused(preprocess, options)
    report = preprocess(replace(options, skip_bad_lines=True, overwrite=True))
    assert (report.documents, report.unanswered, report.skipped, report.empty) == (2, 1, 1, 1)
    put_chats(file, [[ASK, SAY]], field="chat")
    assert "see --messages-field" in refused(preprocess, replace(options, overwrite=True))
    assert preprocess(replace(options, overwrite=True, messages_field="chat")).documents == 1


def test_the_end_of_a_document_after_a_chat_is_not_trained(options: PreprocessOptions, folder: Path) -> None:
    datasets = []
    for name, append in (("without", False), ("with", True)):
        made = replace(
            options, append_eod=append, eod_token="<|endoftext|>", output_prefix=options.output_prefix + name
        )
        preprocess(made)
        datasets.append(IndexedSource(made.output_prefix))
    plain, ended = datasets
    length = int(plain.document_lengths[0])
    eod = Tokenizer(folder, "<|endoftext|>").eod_id
    assert ended.read(0, 0, length + 1).tolist() == [*plain.read(0, 0, length).tolist(), eod]
    assert ended.read_mask(0, 0, length + 1).tolist() == [*plain.read_mask(0, 0, length).tolist(), False]


def test_a_message_cannot_end_its_document(options: PreprocessOptions) -> None:
    """A token that the flags make special is refused in messages like the tokenizer's own."""
    put_chats(Path(options.inputs[0]), [[ASK, SAY], [{"role": "user", "content": "a x b"}, SAY]])
    made = replace(options, eod_token="x", append_eod=True)
    assert "chats.jsonl:2: message 1 spells the special token 'x'" in refused(preprocess, made)


def test_a_map_of_a_table_is_an_object_of_a_line(options: PreprocessOptions, tmp_path: Path) -> None:
    rows = [{"messages": [ASK, call(arguments), SAY]} for arguments in ({}, {"city": "Rome"})]
    Path(options.inputs[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = replace(options, tokenizer=str(put_tokenizer(tmp_path / "tokenizer", CALLING)))
    preprocess(options)
    text = pyarrow.string()
    function = pyarrow.struct({"name": text, "arguments": pyarrow.map_(text, text)})
    calls = pyarrow.list_(pyarrow.struct({"function": function}))
    messages = pyarrow.list_(pyarrow.struct({"role": text, "content": text, "tool_calls": calls}))
    table = tmp_path / "chats.parquet"
    schema = pyarrow.schema({"messages": messages})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), table)
    tabular = replace(options, inputs=[str(table)], output_prefix=f"{options.output_prefix}-table")
    preprocess(tabular)
    assert Path(tabular.output_prefix + ".bin").read_bytes() == Path(options.output_prefix + ".bin").read_bytes()


def test_chats_in_a_table_are_those_of_lines(options: PreprocessOptions, tmp_path: Path) -> None:
    """A struct has the keys of all rows, and a null where a row has none."""
    folder = put_tokenizer(tmp_path / "tokenizer", "{{ tools | tojson }}" + CALLING)
    rows: list[dict[str, Any]] = [{"messages": chat, "tools": None} for chat in conversations(40)]
    for place, arguments in enumerate(({"city": "Rome"}, {"days": 3, "unit": "C"})):
        tools = [{"name": "f", "parameters": dict.fromkeys(arguments, "x")}]
        rows[place * 20] = {"messages": [ASK, call(arguments), SAY], "tools": tools}
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path(options.inputs[0]).write_text(lines)
    options = replace(options, tokenizer=str(folder))
    preprocess(options)
    table = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=7)
    tabular = replace(options, inputs=[str(table)], output_prefix=f"{options.output_prefix}-table")
    assert preprocess(tabular).documents == 40
    for suffix in (".bin", ".idx", ".mask.npy"):
        assert Path(tabular.output_prefix + suffix).read_bytes() == Path(options.output_prefix + suffix).read_bytes()
    text = tmp_path / "chats.txt"
    text.write_text(lines)
    assert "chats.txt holds no messages" in refused(preprocess, replace(tabular, inputs=[str(text)], overwrite=True))


@pytest.mark.parametrize(
    ("source", "arguments", "warned"),
    [
        (CALLING, '{"city": "Rome"}', True),
        (CALLING, {"city": '{"name": "Rome"}'}, False),
        (CALLING.replace(" | tojson", ""), '{"city": "Rome"}', False),
    ],
)
def test_arguments_that_become_json_twice(
    options, tmp_path: Path, caplog, source: str, arguments, warned: bool
) -> None:
    """They are warned about: a model would learn to write a string where its template's examples have an object."""
    folder = put_tokenizer(tmp_path / "tokenizer", source)
    put_chats(Path(options.inputs[0]), [[ASK, call(arguments)], [ASK, SAY]])
    preprocess(replace(options, tokenizer=str(folder)))
    messages = [record.getMessage() for record in caplog.records]
    assert ["in 1 conversations the arguments of a call" in message for message in messages] == [True] * warned


UNTRAINED_END = MARKED.replace(f"+ '{END}' }}}}{{% endgeneration %}}", f"}}}}{{% endgeneration %}}{END}")


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        (MARKED, True),
        (MARKED.replace(END, END + "\n"), True),
        (LLAMA, True),
        (PLAIN.replace(END, ""), False),
        (UNTRAINED_END, False),
    ],
)
def test_turns_without_a_trained_end(options: PreprocessOptions, tmp_path: Path, caplog, source: str, ended) -> None:
    """They are warned about."""
    folder = put_tokenizer(tmp_path / "tokenizer", source)
    put_chats(Path(options.inputs[0]), [[ASK, SAY]])
    preprocess(replace(options, tokenizer=str(folder)))
    metadata = json.loads(Path(options.output_prefix + ".json").read_text())
    assert metadata["turn_end"] == (Tokenizer(folder).encode_spelled(END)[0][0] if ended else None)
    assert ["trains no special token at the end" in record.getMessage() for record in caplog.records] == [True] * (
        not ended
    )


def test_unusable_templates_are_refused(tmp_path: Path) -> None:
    folder = put_tokenizer(tmp_path / "tokenizer", None)
    assert "tokenizer has no chat template; put chat_template.jinja there" in refused(ChatTemplate.of, folder)
    assert "bytes has no chat template; needs a folder with tokenizer.json" in refused(ChatTemplate.of, "bytes")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + PLAIN)
    assert "asks for today's date (strftime_now)" in refused(ChatTemplate.of, folder)
    assert "strftime_now" in ChatTemplate.of(folder, option="chat").source  # of no data set
    (folder / "chat_template.jinja").write_text(PLAIN)
    chat_template = ChatTemplate.of(folder)
    assert chat_template.source == PLAIN
    assert dict(chat_template.variables) == {"bos_token": "<|endoftext|>", "eos_token": END}
    assert set(chat_template.special) == {"<|endoftext|>", START, END}


RUN = """--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --train-iters 3
    --lr-warmup-iters 1 --global-batch-size 4 --eval-interval 0 --seq-length 256 --document-mask --split 1,0,0
    --packing drop_tail"""


def spoken(tokens: list[int], tokenizer: Tokenizer) -> Iterator[bool]:
    """Return for each token whether it is the assistant's, by the tokens alone: after its heading, up to the end."""
    heading = tokenizer.encode_spelled(f"{START}assistant\n")[0]
    ((end,), _) = tokenizer.encode_spelled(END)
    inside = False
    for place, token in enumerate(tokens):
        inside = inside or tokens[max(place - len(heading), 0) : place] == heading
        yield inside
        inside = inside and token != end


def test_the_loss_counts_the_assistants_tokens_alone(alone: Commands, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    file = put_chats(tmp_path / "chats.jsonl", conversations(90))
    put_tokenizer(folder, MARKED)
    prefix = ["--output-prefix", tmp_path / "chats", "--messages-field", "--tokenizer-model", folder]
    alone.run("tools/preprocess_data.py", "--input", file, *prefix)
    options = ["--data-path", tmp_path / "chats", "--tokenizer-model", folder, *RUN.split()]
    alone.run("tools/pack_data.py", *options)
    where = ["--save", tmp_path / "run", "--dump-trajectory", tmp_path / "dump"]
    alone.run("pretrain_skyladder.py", *options, *where)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    tokenizer = Tokenizer(folder)
    assert len(metrics) == 3
    for step, record in enumerate(metrics):
        dumped = np.load(tmp_path / "dump" / f"step_{step:06}.npz")
        mask = dumped["loss_mask"].astype(bool)
        assert record["denominator"] == mask.sum() > 0
        assert not mask.all()
        for tokens, held in zip(dumped["tokens"].tolist(), mask.tolist(), strict=True):
            assert held == list(spoken(tokens, tokenizer))[1:]
