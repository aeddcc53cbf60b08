"""Write the page of all options.

python tools/reference.py            prints it
python tools/reference.py --write    writes it into docs/reference.md, between its marks
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ext.cli import Parser, command
from megatron_ext.config.reference import reference
from megatron_ext.errors import UserError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
BEGIN, END = "<!-- tools/reference.py -->", "<!-- end -->"


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write into docs/reference.md, between its marks")
    options = parser.parse_args(argv)
    lines = "\n".join(reference())
    if not options.write:
        print(lines)
        return 0
    if not PAGE.exists():
        raise UserError("--write: got an installed package, needs a checkout, which has docs/reference.md")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
