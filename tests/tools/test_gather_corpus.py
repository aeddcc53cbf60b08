"""The standard library as a corpus: from a small library, and from the real one."""

import json
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from tools.gather_corpus import gather_corpus

LIBRARY = {
    "alpha.py": "a = 1\n",
    "beta/__init__.py": "",
    "beta/one.py": "b1 = 'é'\n",
    "beta/deep/two.py": "b2 = 2",
    "beta/tests/test_one.py": "left out",
    "beta/__pycache__/x.py": "left out",
    "beta/latin.py": b"# caf\xe9 left out\n",
    "gamma.py": "c = 3\n",
    "test/test_a.py": "left out",
    "site-packages/numpy.py": "left out",
    "idlelib/run.py": "left out",
    "config-3.11/python-config.py": "left out",
    "_sysconfigdata__linux.py": "left out",
    "LICENSE.txt": "left out",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, content in LIBRARY.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / "lib"


def read(file: Path) -> dict[str, str]:
    documents = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {document["name"]: document["text"] for document in documents}


def test_one_package_is_one_document(library: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "corpus.jsonl"
    assert gather_corpus(output, stdlib=library) == (3, 0)
    assert read(output) == {
        "alpha": "# file: alpha.py\na = 1\n",
        "beta": "# file: beta/deep/two.py\nb2 = 2\n# file: beta/one.py\nb1 = 'é'\n",
        "gamma": "# file: gamma.py\nc = 3\n",
    }
    assert list(read(output)) == ["alpha", "gamma", "beta"]  # by sha256 of the names
    assert [file.name for file in output.parent.iterdir()] == ["corpus.jsonl"]


def test_a_limit_keeps_the_first_documents(library: Path, tmp_path: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    gather_corpus(output, stdlib=library)
    sizes = [len(line) for line in output.read_bytes().splitlines(keepends=True)]
    assert gather_corpus(output, sizes[0] + sizes[1], stdlib=library, overwrite=True) == (2, 1)
    gather_corpus(output, sizes[0] + sizes[1] - 1, stdlib=library, overwrite=True)
    assert output.stat().st_size == sizes[0]
    with pytest.raises(UserError, match=f"the first document alone has {sizes[0]} bytes"):
        gather_corpus(output, sizes[0] - 1, stdlib=library, overwrite=True)
    assert output.stat().st_size == sizes[0]
