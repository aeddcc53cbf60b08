"""docker/constraints.py: installed packages stay, missing ones get their pin."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "docker" / "constraints.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_installed_versions_win_over_pins(tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("# pins\nTyping.Extensions==0.0.1\nno_such-Package==1.2  # why\n\n")
    done = run(pins)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split("==") for line in done.stdout.splitlines())
    assert lines["typing-extensions"] == importlib.metadata.version("typing_extensions")
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["no-such-package"] == "1.2"
    assert len(lines) == len(done.stdout.splitlines())


def test_pip_takes_the_result_and_changes_nothing(tmp_path: Path) -> None:
    """As in the image: what is installed cannot be replaced, not even by a pin of ours."""
    kept = tmp_path / "kept.txt"
    kept.write_text(run(ROOT / "constraints.txt").stdout)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", "--constraint", str(kept)]
    done = subprocess.run([*pip, "torch", "numpy"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout
    refused = subprocess.run([*pip, "numpy==1.0"], capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode != 0


def test_a_replaced_package_is_found(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text(run(ROOT / "constraints.txt").stdout)
    assert run("--verify", kept).returncode == 0
    here = importlib.metadata.version("numpy")
    kept.write_text(kept.read_text().replace(f"numpy=={here}\n", "numpy==1.26.4\n"))
    done = run("--verify", kept)
    assert done.returncode == 1
    assert f"numpy {here}, not 1.26.4" in done.stderr


def test_a_line_that_is_no_pin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("numpy>=2\n")
    done = run(tmp_path / "pins.txt")
    assert done.returncode == 1
    assert "got 'numpy>=2', needs lines name==version" in done.stderr
