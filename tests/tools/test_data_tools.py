"""tools/preprocess_data.py as a command, with its flags and its report; the standard library as a corpus."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from tests.launcher import ROOT
from tests.runs import read_jsonl
from tools.gather_corpus import gather_corpus
from tools.preprocess_data import parse_options as preprocess_options


def test_every_flag_reaches_the_work(tmp_path: Path) -> None:
    rows = [{"name": "r1" if i % 2 else "r2", "body": f"Text {i}. " * (i + 1)} for i in range(4)]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "nonsense\n")
    command = [sys.executable, "tools/preprocess_data.py", "--input", file, "--output-prefix", tmp_path / "out"]
    flags = "--tokenizer-model bytes --json-key body --concat-by name --skip-bad-lines --no-append-eod --workers 2"
    more = "--min-tokens 40 --max-tokens 61 --max-document-bytes 80 --shard-bytes 100 --overwrite"
    words = [*map(str, command), *flags.split(), *more.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "in.jsonl:5: invalid JSON" in done.stdout
    assert "left out: 1 documents with too few tokens, 0 with too many" in done.stdout
    assert done.stdout.endswith("out: 1 documents, 49 tokens, 1 skipped\n")
    metadata = json.loads((tmp_path / "out.json").read_text())
    wanted = {"eod_id": None, "text_field": "body", "concat_by": "name", "min_tokens": 40, "max_tokens": 61}
    assert wanted.items() <= metadata.items()


LIBRARY = {
    "alpha.py": "a = 1\n",
    "beta/__init__.py": "",
    "beta/one.py": "b1 = 'é'\n",
    "beta/deep/two.py": "b2 = 2",
    "beta/latin.py": b"# caf\xe9 left out\n",
    "gamma.py": "c = 3\n",
}
LEFT_OUT = ["beta/tests/test_one.py", "beta/__pycache__/x.py", "site-packages/numpy.py", "config-3.11/python-config.py"]
LIBRARY |= dict.fromkeys([*LEFT_OUT, "_sysconfigdata__linux.py", "LICENSE.txt"], "left out")


def test_one_package_is_one_document(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    output = tmp_path / "out" / "corpus.jsonl"
    for name, content in LIBRARY.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert gather_corpus(output, stdlib=library) == (3, 0)
    texts = {document["name"]: document["text"] for document in read_jsonl(output)}
    assert texts == {
        "alpha": "# file: alpha.py\na = 1\n",
        "beta": "# file: beta/deep/two.py\nb2 = 2\n# file: beta/one.py\nb1 = 'é'\n",
        "gamma": "# file: gamma.py\nc = 3\n",
    }
    assert list(texts) == ["alpha", "gamma", "beta"]  # by sha256 of the names
    # a limit keeps the first ones
    sizes = [len(line) for line in output.read_bytes().splitlines(keepends=True)]
    assert gather_corpus(output, sizes[0] + sizes[1], stdlib=library, overwrite=True) == (2, 1)
    gather_corpus(output, sizes[0] + sizes[1] - 1, stdlib=library, overwrite=True)
    assert output.stat().st_size == sizes[0]
    with pytest.raises(UserError, match=f"the first document alone has {sizes[0]} bytes"):
        gather_corpus(output, sizes[0] - 1, stdlib=library, overwrite=True)
    assert output.stat().st_size == sizes[0]


def test_a_flag_of_several_inputs_may_be_repeated() -> None:
    """No input is dropped: a corpus would lack a file."""
    words = ["--input", "a.jsonl", "b.jsonl", "--output-prefix", "x", "--tokenizer-model", "bytes"]
    assert preprocess_options([*words, "--input", "c.jsonl"]).inputs == ["a.jsonl", "b.jsonl", "c.jsonl"]
