"""Count what a checkout answers to the wrong inputs.

python tests/inputs/count.py                        this one
python tests/inputs/count.py --root CHECKOUT        another one, such as an older commit's worktree
python tests/inputs/count.py --show                 and every answer that is not clear
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]

from inputs.judge import judge  # noqa: E402
from inputs.table import all_inputs  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE.parents[2], help="the checkout [this one]")
    parser.add_argument("--world", type=Path, help="folder of the good files, made where it is not there [temporary]")
    parser.add_argument("--show", action="store_true", help="show every answer that is not clear")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inputs-") as temporary:
        world = options.world or Path(temporary) / "world"
        chosen = [wrong for wrong in all_inputs() if options.only in wrong.name]
        names, answers = Path(temporary) / "names.json", Path(temporary) / "answers.jsonl"
        for root, rows in ((HERE.parents[2], []), (options.root.resolve(), [wrong.name for wrong in chosen])):
            names.write_text(json.dumps(rows))  # the good files are always made by this version
            files = [HERE.with_name("attempts.py"), root, world.resolve(), answers, names]
            subprocess.run([sys.executable, *map(str, files)], check=True)
        found = [json.loads(line) for line in answers.read_text().splitlines()]
    counts: Counter[str] = Counter()
    by_name = {wrong.name: wrong for wrong in chosen}
    for answer in found:
        wrong = by_name[answer["name"]]
        verdict = judge(wrong, answer)
        counts[verdict] += 1
        if options.show and verdict != "clear":
            lines = answer["stderr"].splitlines() or ["(nothing)"]
            told = [*lines[:2], *(["..."] if len(lines) > 4 else []), *lines[2:][-2:]]
            print(f"{verdict}, exit {answer['status']}, {answer['seconds']} s: {wrong.name[:300]}")
            print(f"    wanted {wrong.fragment!r}, wrote {answer['written'][:5]}")
            print("\n".join(f"    {line[:240]}" for line in told))
    seconds = sum(answer["seconds"] for answer in found)
    verdicts = ", ".join(f"{name} {counts[name]}" for name in ("clear", "unclear", "traceback", "hang", "accepted"))
    print(f"{len(found)} wrong inputs: {verdicts} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
