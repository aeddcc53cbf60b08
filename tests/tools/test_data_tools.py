"""tools/preprocess_data.py as a command: its flags and its report."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
