"""What is released: built, installed into an environment of its own, and run there, far from the checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ext.cli import COMMANDS
from tests.conftest import SmallData

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN_HELP = {"environment": "Print what a run has here", "pack": "Make the packing plans"}
NAME = f"megatron_ext-{PROJECT['version']}"


def without_pythonpath() -> dict[str, str]:
    """The environment without another Megatron-Core, which pip would take for an installed one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@dataclass(frozen=True)
class Installed:
    wheel: Path
    venv: Path

    def run(self, folder: Path, *words: object, status: int = 0) -> str:
        """Run a command in `folder`, as a user without a checkout does; its output."""
        environment = without_pythonpath() | {"PATH": f"{self.venv}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        command = [self.venv / "bin" / str(words[0]), *map(str, words[1:])]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("release")
    listing = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    source = folder / "checkout"
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder / "dist", source], check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # what this environment has installed, but not the package itself, which an editable install finds by a .pth file:
    # .pth files in a folder that a .pth file names are not read
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(here))
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], env=without_pythonpath(), check=True)
    return Installed(wheel, venv)


def test_the_wheel_has_all_that_runs_and_nothing_else_and_is_what_runs(installed: Installed, tmp_path: Path) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"megatron_ext", "pretrain_skyladder.py", f"{NAME}.dist-info"}
    files = [path for path in (ROOT / "megatron_ext").rglob("*") if path.is_file()]
    needed = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    tools = {f"megatron_ext/tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    examples = [*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "examples" / "lm_eval").rglob("*.py")]
    assert len(examples) > 10
    assert needed | tools | {f"megatron_ext/{path.relative_to(ROOT)}" for path in examples} <= set(names)
    code = "import megatron_ext, megatron_ext.tools; print(megatron_ext.__file__, megatron_ext.tools.__file__)"
    for place in installed.run(tmp_path, "python", "-c", code).split():
        assert Path(place).is_relative_to(installed.venv)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_takes(installed: Installed, command: str, tmp_path: Path) -> None:
    help_text = installed.run(tmp_path, "megatron-ext", command, "--help")
    assert f"usage: megatron-ext {command} " in help_text or help_text.startswith(OWN_HELP[command])
    assert not list(tmp_path.iterdir())


def test_the_papers_runs_come_with_it(installed: Installed, tmp_path: Path) -> None:
    config = "examples/configs/prolong/prolong_8b.yaml"  # names mixtures by their paths
    assert f"{config} " in installed.run(tmp_path, "megatron-ext", "recipes", "--list", "prolong")
    installed.run(tmp_path, "megatron-ext", "recipes", "--copy", ".")
    installed.run(tmp_path, "megatron-ext", "twin", config, "--output", "twin.yaml")
    assert "seq_length" in (tmp_path / "twin.yaml").read_text()
    installed.run(tmp_path, "megatron-ext", "pretrain", "--config", config, "--dry-run", "--world-size", "64")
    again = installed.run(tmp_path, "megatron-ext", "recipes", "--copy", ".", status=2)
    assert "--copy: got a folder with examples/ in it" in again


def test_it_trains(installed: Installed, small_data: SmallData, tmp_path: Path) -> None:
    sizes = ["--num-layers", 1, "--hidden-size", 32, "--ffn-hidden-size", 64, "--num-attention-heads", 2]
    flags = [*sizes, "--seq-length", 64, "--train-iters", 2, "--global-batch-size", 2, "--save", tmp_path / "run"]
    installed.run(tmp_path, "megatron-ext", "pretrain", *small_data.flags, *flags)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    installed.run(tmp_path, "megatron-ext", "report", tmp_path / "run")
    assert (tmp_path / "run" / "report.html").exists()
