"""Show the papers' runs in examples/configs: a list, or a complete run.

python tools/recipes.py --list [WORD ...]      names and titles that contain all the words
python tools/recipes.py NAME                   prints a complete run: every option with its value
python tools/recipes.py NAME --dry-run         describes the run
python tools/recipes.py NAME --twin FILE       writes its twin for a CPU (tools/twin_recipe.py has more flags)
python tools/recipes.py --copy FOLDER          copies all of them, and their mixtures, to FOLDER/examples
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_ext.cli import Parser, command
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_folder
from megatron_ext.planning.recipes import Recipe, recipes, whole_file

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or the installed package: both contain examples/


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("name", nargs="?", help="a run, as --list gives it")
    parser.add_argument("--list", nargs="*", metavar="WORD", help="list the runs")
    parser.add_argument("--dry-run", action="store_true", help="say what the run would be")
    parser.add_argument("--twin", type=_absolute, metavar="FILE", help="write the run's twin")
    parser.add_argument(
        "--copy", type=_absolute, metavar="FOLDER", help="copy all runs and mixtures to FOLDER/examples"
    )
    options = parser.parse_args(argv)
    if options.name is None and options.list is None and options.copy is None:
        parser.error("name: got none, needs a run; --list gives their names")
    if options.copy is not None:
        copy(options.copy / "examples")
        return 0
    os.chdir(ROOT)  # configurations name mixtures by paths relative to it
    known = {recipe.name: recipe for recipe in recipes(ROOT / "examples" / "configs")}
    if options.list is not None:
        for recipe in known.values():
            line = f"{recipe.name:<44} {recipe.facts['title']}"
            if all(word.lower() in line.lower() for word in options.list):
                print(line)
        return 0
    if options.name not in known:
        got = f"name: got {options.name}, which is none of the {len(known)} runs"
        raise UserError(f"{got}; --list gives their names")
    return show(known[options.name], options)


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def copy(target: Path) -> None:
    """Copy the configurations and their mixtures, which refer to each other by paths relative to `target`'s parent.

    Raises:
        UserError: `target` exists, or cannot be created.
    """
    if target.exists():
        raise UserError(f"--copy: got a folder with {target.name}/ in it, needs one without; {target} stays as it is")
    try:
        with atomic_folder(target) as aside:
            for part in ("configs", "mixtures"):
                shutil.copytree(ROOT / "examples" / part, aside / part)
    except OSError as error:
        raise UserError(f"--copy: {target}: {error.strerror}") from None
    print(f"copied to {target}")


def show(recipe: Recipe, options: argparse.Namespace) -> int:
    """Print a run, dry-run it, or write its twin."""
    path = recipe.path.relative_to(ROOT)
    command: list[object] = []
    if options.dry_run:
        trainer = ROOT / "pretrain_skyladder.py"  # in an installed package it is beside the package
        command = [trainer if trainer.exists() else ROOT.parent / trainer.name, "--config", path, "--dry-run"]
        command += ["--world-size", recipe.facts["world_size"]]
    elif options.twin:
        command = [Path(__file__).with_name("twin_recipe.py"), path, "--output", options.twin]
    if command:
        return subprocess.run([sys.executable, *map(str, command)], check=False).returncode
    print(whole_file(recipe.stages(), recipe.facts), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
