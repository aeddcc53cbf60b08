"""What a model's folder says of its text: which tokens end it, and how a damaged file is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.data.text.tokenizer import train_bpe
from megatron_ext.errors import UserError
from megatron_ext.evaluation.model_text import ModelText
from tests.chats import put_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = LlamaConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=7,
        eos_token_id=8,
    )
    train_bpe(["some text, another text"], 260, tmp_path)
    model.save_pretrained(tmp_path)
    return tmp_path


def stop(folder: Path, generation: dict[str, Any] | None) -> frozenset[int]:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    model_text = ModelText.of(Pretrained.find(folder))
    assert model_text.begin is None
    return model_text.stop - {model_text.end}


def test_generation_config_wins_where_it_says_something(folder: Path) -> None:
    assert stop(folder, None) == {8}
    assert stop(folder, {"temperature": 0.7}) == {8}
    assert stop(folder, {"eos_token_id": None}) == {8}
    assert stop(folder, {"eos_token_id": 9}) == {9}
    assert stop(folder, {"eos_token_id": [9, 10]}) == {9, 10}


def test_texts_begin_with_the_models_own_token_with_bos(folder: Path) -> None:
    pretrained = Pretrained.find(folder)
    plain, begun = ModelText.of(pretrained), ModelText.of(pretrained, bos=True)
    assert begun.encode("some text") == [7, *plain.encode("some text")]


@pytest.mark.parametrize("content", ["{", "[1, 2]"])
def test_a_damaged_generation_config_is_refused(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config.json is no JSON object; correct or remove it$"):
        ModelText.of(Pretrained.find(folder))


def test_a_chat_template_that_cannot_be_rendered_is_refused(folder: Path) -> None:
    tokenizer = put_tokenizer(folder / "tokenizer", "{{ raise_exception('no assistant') }}")
    with pytest.raises(UserError, match=r"chat: .*no assistant.*; correct the template"):
        ModelText.of(Pretrained.find(folder), str(tokenizer), chat=True)
