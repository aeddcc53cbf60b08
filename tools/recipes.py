"""Show the papers' runs in examples/configs: which there are, one of them whole, and a table of what each would cost.

python tools/recipes.py --list [WORD ...]      names and titles, of those that have every word in one of the two
python tools/recipes.py NAME                   prints a run whole: every option with its value
python tools/recipes.py NAME --dry-run         says what it would be
python tools/recipes.py NAME --twin FILE       writes its twin for a CPU (tools/twin_recipe.py has more flags)
python tools/recipes.py                        prints the table of all, minutes for hundreds of runs
python tools/recipes.py --write                writes it into docs/recipes.md
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from megatron_ext.command_line import command
from megatron_ext.errors import UserError
from megatron_ext.parser import Parser
from megatron_ext.planning.recipes import Recipe, page, recipes, whole_file

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tools/recipes.py -->", "<!-- end -->"


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("name", nargs="?", help="a run, as --list gives it")
    parser.add_argument("--list", nargs="*", metavar="WORD", help="list the runs")
    parser.add_argument("--dry-run", action="store_true", help="say what the run would be")
    parser.add_argument("--twin", type=Path, metavar="FILE", help="write the run's twin")
    parser.add_argument("--write", action="store_true", help="write into docs/recipes.md, between its marks")
    options = parser.parse_args(argv)
    if options.name is None and (options.dry_run or options.twin):
        parser.error("name: got none, --dry-run and --twin need a run; --list gives their names")
    known = recipes(ROOT / "examples" / "configs")
    if options.list is not None:
        list_runs(known, options.list)
        return 0
    if options.name is not None:
        return show(find(known, options.name), options)
    lines = "\n".join(page(known))
    if not options.write:
        print(lines)
        return 0
    document = ROOT / "docs" / "recipes.md"
    before, rest = document.read_text(encoding="utf-8").split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


def list_runs(known: list[Recipe], words: list[str]) -> None:
    """Print name and title of the runs that have every word."""
    for recipe in known:
        line = f"{recipe.name:<44} {recipe.facts.title}"
        if all(word.lower() in line.lower() for word in words):
            print(line)


def find(known: list[Recipe], name: str) -> Recipe:
    """Find a run by its name.

    Raises:
        UserError: there is none.
    """
    for recipe in known:
        if recipe.name == name:
            return recipe
    raise UserError(f"name: got {name}, which is none of the {len(known)} runs; --list gives their names")


def show(recipe: Recipe, options: argparse.Namespace) -> int:
    """Print a run, dry-run it, or write its twin."""
    path = recipe.path.relative_to(Path.cwd()) if recipe.path.is_relative_to(Path.cwd()) else recipe.path
    command: list[object] = []
    if options.dry_run:
        command = [ROOT / "pretrain_skyladder.py", "--config", path, "--dry-run"]
        command += ["--world-size", recipe.facts.world_size]
    elif options.twin:
        command = [ROOT / "tools" / "twin_recipe.py", path, "--output", options.twin]
    if command:
        return subprocess.run([sys.executable, *map(str, command)], check=False).returncode
    print(whole_file(recipe.stages(), recipe.written_facts()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
