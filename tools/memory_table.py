#!/usr/bin/env python
"""Make a table of the memory that a dry run estimates for each recipe, and what its rehearsal finds.

python tools/memory_table.py                        prints it: about half an hour on 2 cores
python tools/memory_table.py skyladder_1b_8k        of this recipe alone
python tools/memory_table.py --write                writes it into docs/planning.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ext.cli import Parser, command
from megatron_ext.errors import UserError
from megatron_ext.planning.recipes import recipes
from megatron_ext.run.rehearsal.estimates import cases, table

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tools/memory_table.py -->", "<!-- end -->"


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("recipes", nargs="*", help="names of recipes (default: all)")
    parser.add_argument("--write", action="store_true", help="write into docs/planning.md, between its marks")
    options = parser.parse_args(argv)
    found = recipes(ROOT / "examples" / "configs")
    unknown = set(options.recipes) - {recipe.name for recipe in found}
    if unknown:
        raise UserError(f"recipes: got {', '.join(sorted(unknown))}, needs names of files in examples/configs")
    chosen = [recipe for recipe in found if recipe.name in options.recipes or not options.recipes]
    lines = []
    for line in table(list(cases(chosen))):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        page = ROOT / "docs" / "planning.md"
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END, 1)[1]
        page.write_text("\n".join([before + BEGIN, *lines, END]) + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
