"""Make a table of the recipes in examples/configs: what a dry run says of each, and what the papers say.

python tools/recipes.py                        prints it
python tools/recipes.py --write                writes it into docs/recipes.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.planning.recipes import recipes, table

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tools/recipes.py -->", "<!-- end -->"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write into docs/recipes.md, between its marks")
    options = parser.parse_args(argv)
    try:
        lines = "\n".join(table(recipes(ROOT / "examples" / "configs")))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.write:
        print(lines)
        return 0
    page = ROOT / "docs" / "recipes.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
