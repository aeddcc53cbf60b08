"""Write the page of all options.

python tools/reference.py            prints it
python tools/reference.py --write    writes it into docs/reference.md, between its marks
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.config.reference import reference

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
BEGIN, END = "<!-- tools/reference.py -->", "<!-- end -->"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write into docs/reference.md, between its marks")
    options = parser.parse_args(argv)
    lines = "\n".join(reference())
    if not options.write:
        print(lines)
        return 0
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
