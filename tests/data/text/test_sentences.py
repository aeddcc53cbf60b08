"""Sentences by nltk, with Punkt data that the tests make themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.data.build.encode import split_sentences
from megatron_ext.data.build.preprocess import PreprocessOptions, preprocess

SAVE = """
import sys
from pathlib import Path
from nltk.tokenize.punkt import PunktParameters, save_punkt_params
parameters = PunktParameters()
parameters.abbrev_types.add("dr")
save_punkt_params(parameters, sys.argv[1])
"""


@pytest.fixture(scope="module", autouse=True)
def punkt(tmp_path_factory: pytest.TempPathFactory):
    """nltk's folder with a language of one abbreviation, "Dr.", called english."""
    root = tmp_path_factory.mktemp("nltk_data")
    language = root / "tokenizers" / "punkt_tab" / "english"
    language.parent.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(root))
        subprocess.run([sys.executable, "-c", SAVE, str(language)], check=True)
        import nltk.data

        patch.setattr(nltk.data, "path", [str(root)])
        yield root


def test_sentences_are_found() -> None:
    text = "Hello there.  I am Dr. Who.\nReally? "
    assert split_sentences(text, "english") == ["Hello there.", "  I am Dr. Who.", "\nReally? "]


@given(text=st.lists(st.sampled_from(["Dr.", "Hi.", " ", "\n", "a", "!", "é", "?\n\n"]), max_size=30).map("".join))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost(text: str) -> None:
    assert "".join(split_sentences(text, "english")) == text


def test_sentences_are_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One. Two two. Three!")
    (tmp_path / "b.txt").write_text("Four.")
    preprocess(PreprocessOptions([str(tmp_path)], str(tmp_path / "data"), "bytes", split_sentences=True))
    found = IndexedDataset(str(tmp_path / "data"))
    texts = [bytes(ids[ids < 256].tolist()).decode() for ids in found[0:4]]
    assert texts == ["One.", " Two two.", " Three!", "Four."]
    assert [ids[-1] == 256 for ids in found[0:4]] == [False, False, True, True]
    np.testing.assert_array_equal(found.document_indices, [0, 3, 4])
