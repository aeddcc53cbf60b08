"""The README and the pages of docs/ name only files and flags that exist."""

import functools
import re
from pathlib import Path

import pytest

from megatron_ext.config import arguments, megatron_lm

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "examples/slurm/README.md", *ROOT.glob("docs/**/*.md")])
FOLDERS = "megatron_ext|tools|tests|examples|benchmarks|docs|docker"
PATH = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*[\w/]")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*+(?:-[a-z0-9]+)*+(?![/_]|\.py)")  # --batch.py--> is an arrow
TORCHRUN = """
    --nproc-per-node --shutdown-timeout --signals-to-handle --rdzv-backend --rdzv-endpoint --local-addr --no-python
    --nnodes
"""
SLURM = """
    --array --nodes --partition --account --signal --mem --exclusive --time --requeue --open-mode --container-image
    --ntasks-per-node --gpus-per-node --gpus-per-task --cpus-per-task
    --export --distribution --dependency --job-name
"""
# lm-eval's, OLMES's, pip's, torchfrtrace's, Megatron-LM's, docker's
OTHERS = """
    --model --task --tasks --output-dir --no-build-isolation --no-deps --prefix --dist-ckpt-strictness --rm --gpus --ipc
    --volume --user --env --workdir --dist-ckpt-optim-fully-reshardable --use-checkpoint-args --finetune
"""


@functools.cache
def known_flags() -> set[str]:
    patterns = ("tools/*.py", "benchmarks/**/*.py", "examples/*.py", "docs/experiments/*.py", "megatron_ext/cli.py")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    scripts = [path.read_text(encoding="utf-8") for path in files]
    named = {flag for text in scripts for flag in FLAG.findall(text)}
    switches = {name for text in scripts for name in re.findall(r'"--([\w-]+)", action=argparse.BooleanOptional', text)}
    trainer = {option for action in arguments._parser()._actions for option in action.option_strings}
    return trainer | named | {f"--no-{name}" for name in switches} | {*f"{TORCHRUN} {SLURM} {OTHERS}".split()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_flag_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = {ROOT / path for path in PATH.findall(text)} | {page.parent / link for link in LINK.findall(text)}
    assert [path for path in paths if not path.exists()] == []
    named = set(FLAG.findall(text)) - known_flags()
    if page.stem == "from-megatron-lm":
        named -= {"--append-eod"} | {name for name in named if megatron_lm.equivalent(name, "")}
    assert named == set()
