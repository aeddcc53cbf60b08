"""What a model's folder says of its text: which tokens end it, and how a damaged file is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.data.text.tokenizer import Tokenizer, train_bpe
from megatron_ext.errors import UserError
from megatron_ext.evaluation.model_text import ModelText
from tests.chats import END, PLAIN, START, put_tokenizer
from tests.checkpoint.models import SIZES
from tests.conftest import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_bpe(["some text, another text"], 260, tmp_path)
    LlamaConfig(**SIZES, bos_token_id=7, eos_token_id=8).save_pretrained(tmp_path)
    return tmp_path


def stop(folder: Path, generation: dict[str, Any] | None) -> frozenset[int]:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    model_text = ModelText.of(Pretrained.find(folder))
    assert model_text.begin is None
    return model_text.stop - {model_text.end}


def test_generation_config_wins_where_it_says_something(folder: Path) -> None:
    assert stop(folder, None) == stop(folder, {"temperature": 0.7}) == stop(folder, {"eos_token_id": None}) == {8}
    assert stop(folder, {"eos_token_id": 9}) == {9}
    assert stop(folder, {"eos_token_id": [9, 10]}) == {9, 10}


def test_what_changes_the_texts_of_transformers_alone_is_warned_of(folder: Path, caplog) -> None:
    """Its greedy search applies them, too. The reference are the processors that transformers makes of them."""
    prompt = torch.ones(1, 3, dtype=torch.int64)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for entries in (
        *({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 3}, {"suppress_tokens": [5]}),
        *({"repetition_penalty": 1.0}, {"temperature": 0.7, "top_k": 3}, {"num_beams": 1}, {"min_length": 0}),
    ):
        caplog.clear()
        stop(folder, entries)
        config = GenerationConfig(**entries, eos_token_id=8, max_length=20)
        model._prepare_special_tokens(config)
        processors = model._get_logits_processor(config, input_ids_seq_length=3, encoder_input_ids=prompt)
        assert ("is applied by transformers" in caplog.text) is (len(processors) > 0), entries


def test_texts_begin_with_the_models_own_token_with_bos(folder: Path) -> None:
    pretrained = Pretrained.find(folder)
    plain = ModelText.of(pretrained)
    begun = ModelText.of(pretrained, bos=True)
    assert begun.encode("some text") == [7, *plain.encode("some text")]
    chat = put_tokenizer(folder / "chat", PLAIN)
    assert "whose template spells BOS" in refused(ModelText.of, pretrained, str(chat), bos=True, chat=True)


def test_texts_of_a_run_begin_with_the_bos_of_its_tokenizer(tmp_path: Path) -> None:
    """As in documents that tools/preprocess_data.py --prepend-bos writes."""
    folder = put_tokenizer(tmp_path, None)
    run: Any = SimpleNamespace(folder=tmp_path, tokenizer=str(folder), checkpoint=object(), vocab_size=320)
    bos = Tokenizer(folder).bos_id
    assert ModelText.of(run, bos=True).encode("the") == [bos, *ModelText.of(run).encode("the")]


def test_special_tokens_are_left_out_of_answers(folder: Path) -> None:
    tokenizer = put_tokenizer(folder / "chat", None)
    text = ModelText.of(Pretrained.find(folder), str(tokenizer))
    tokens = text.tokenizer.encode_spelled(f"the{START} window{END}")[0]
    assert text.answer([], tokens) == f"the{START} window"
    assert text.answer([], tokens, special=False) == "the window"


def test_damaged_files_are_refused(folder: Path) -> None:
    for content in ("{", "[1, 2]"):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(UserError, match=r"generation_config.json is no JSON object; correct or remove it$"):
            ModelText.of(Pretrained.find(folder))
    (folder / "generation_config.json").unlink()
    tokenizer = put_tokenizer(folder / "tokenizer", "{{ raise_exception('no assistant') }}")
    with pytest.raises(UserError, match=r"chat: .*no assistant.*; correct the template"):
        ModelText.of(Pretrained.find(folder), str(tokenizer), chat=True)
