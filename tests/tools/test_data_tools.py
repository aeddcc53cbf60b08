"""tools/preprocess_data.py as a command: its flags and its report."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_flag_reaches_the_work(tmp_path: Path) -> None:
    rows = [{"name": "r1" if i % 2 else "r2", "body": f"Text {i}. " * (i + 1)} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "nonsense\n")
    command = [sys.executable, "tools/preprocess_data.py", "--input", "-", "--output-prefix", tmp_path / "out"]
    flags = "--tokenizer-model bytes --json-key body --concat-by name --skip-bad-lines --no-append-eod --workers 2"
    more = "--min-tokens 40 --max-tokens 61 --max-document-bytes 80 --shard-bytes 100 --overwrite"
    with (tmp_path / "in.jsonl").open() as lines:
        done = subprocess.run(
            [*map(str, command), *flags.split(), *more.split()],
            cwd=ROOT, stdin=lines, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped standard input:5: invalid JSON" in done.stdout
    assert "left out: 1 documents with too few tokens, 0 with too many" in done.stdout
    assert done.stdout.endswith("out: 1 documents, 49 tokens, 1 skipped\n")
    metadata = json.loads((tmp_path / "out.json").read_text())
    wanted = {"eod_id": None, "text_field": "body", "concat_by": "name", "min_tokens": 40, "max_tokens": 61}
    assert wanted.items() <= metadata.items()
    content = (tmp_path / "in.jsonl").read_bytes()
    about = {"path": "standard input", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert metadata["sources"] == [about]
