"""List the papers' runs in examples/configs, or copy them.

python tools/recipes.py --list [WORD ...]      files and titles that contain all the words
python tools/recipes.py --copy FOLDER          copies them, their mixtures and tasks of lm-eval to FOLDER/examples

A run's configuration has one more mapping, which the trainer ignores:

    recipe:
      title: SkyLadder, 1B, rows of 8K
      paper: arXiv 2503.15450
      source: Tables 8, 11 and 12                    in the paper, or in its authors' code
      differs: micro-batches of 1 row                deviations from the paper
      world_size: 8                                  processes, one for each GPU
      gpu: A100 (40 GB)
      published: {flops: 9.9e20, time_saved: 0.131}  figures that the paper reports for this run
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.cli import Parser, command
from megatron_ext.config.arguments import read_file
from megatron_ext.config.matrix import MARK, expand
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_folder

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or the installed package: both contain examples/


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", nargs="*", metavar="WORD", help="list the runs")
    action.add_argument("--copy", type=Path, metavar="FOLDER", help="copy runs, mixtures and tasks to FOLDER/examples")
    options = parser.parse_args(argv)
    if options.copy is not None:
        copy(options.copy / "examples")
        return 0
    for path, recipe in recipes():
        line = f"{path}  {recipe['title']}"
        if all(word.lower() in line.lower() for word in options.list):
            print(line)
    return 0


def recipes() -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield each run's file, FILE#NAME for one of many, relative to `ROOT`, and its mapping `recipe:`."""
    for file in sorted((ROOT / "examples" / "configs").rglob("*.yaml")):
        path = file.relative_to(ROOT)
        content = read_file(str(file))
        if "families" in content:
            for name, run in expand(content, str(path)).items():
                yield path.with_name(f"{path.name}{MARK}{name}"), run["recipe"]
        elif "recipe" in content:
            yield path, content["recipe"]


def copy(target: Path) -> None:
    """Copy the configurations, which name their mixtures by paths relative to `target`'s parent, and lm-eval's tasks.

    Raises:
        UserError: `target` exists, or cannot be created.
    """
    if target.exists():
        raise UserError(f"--copy: got a folder with {target.name}/ in it, needs one without; {target} stays as it is")
    try:
        with atomic_folder(target) as aside:
            for part in ("configs", "lm_eval", "mixtures"):
                shutil.copytree(ROOT / "examples" / part, aside / part, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise UserError(f"--copy: {target}: {error.strerror}") from None
    print(f"copied to {target}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
