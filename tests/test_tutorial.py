"""docs/tutorial.md: its commands, in their order, in a folder that has the checkout's programs and nothing else."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import ROOT

COMMANDS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(encoding="utf-8"), re.M | re.S)
PROGRAMS = ("pretrain_skyladder.py", "tools")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_tutorial_runs(tmp_path: Path) -> None:
    for name in PROGRAMS:
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    outputs = {}
    for command in COMMANDS:
        bash = ["bash", "-ec", command]
        done = subprocess.run(bash, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        outputs[command] = done.stdout
    (generated,) = [text for command, text in outputs.items() if "generate.py" in command]
    (loaded,) = [text for command, text in outputs.items() if "transformers" in command]
    kind, text = loaded.strip().split(" ", 1)
    written = ast.literal_eval(text)
    assert kind == "llama"
    assert written.startswith("def __init__(self")
    assert written != "def __init__(self"
    assert written in generated
    assert "the same model" in "".join(outputs.values())
    assert (tmp_path / "runs" / "tutorial" / "report.html").exists()
