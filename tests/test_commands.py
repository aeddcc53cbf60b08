"""The console commands: pyproject.toml, tools/commands.py and the tools themselves agree. test_wheel.py runs them."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import megatron_ext
from megatron_ext.programs import program

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NO_COMMANDS = {"__init__", "commands", "memory_table", "reference"}  # these two write pages of docs/, in a checkout


@pytest.fixture(scope="module")
def commands() -> ModuleType:
    spec = importlib.util.spec_from_file_location("commands", ROOT / "tools" / "commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_is_installed_and_known(commands: ModuleType) -> None:
    assert set(PROJECT["scripts"]) == {commands.PREFIX + name for name in commands.COMMANDS}
    assert set(PROJECT["scripts"].values()) == {"megatron_ext.tools.commands:main"}


def test_every_tool_is_a_command(commands: ModuleType) -> None:
    tools = {f"tools.{path.stem}" for path in (ROOT / "tools").glob("*.py") if path.stem not in NO_COMMANDS}
    assert set(commands.COMMANDS.values()) == tools | {"pretrain_skyladder"}


def test_what_a_command_calls_takes_its_arguments(commands: ModuleType) -> None:
    for module in commands.COMMANDS.values():
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
        (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        assert [argument.arg for argument in main.args.args] == ["argv"], module


def test_a_name_that_is_no_command_is_refused(
    commands: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/megatron-ext-fly"])
    assert commands.main() == 2
    assert "megatron-ext-fly: no command of megatron_ext; there are pretrain, " in capsys.readouterr().err


def test_notes_name_programs_as_this_one_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/megatron-ext-pretrain", "--config", "a"])
    assert program("report") == "megatron-ext-report"
    monkeypatch.setattr(sys, "argv", ["pretrain_skyladder.py"])
    assert [program("report"), program("pretrain")] == ["python tools/report.py", "python pretrain_skyladder.py"]


def test_one_version() -> None:
    assert PROJECT["version"] == megatron_ext.__version__
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert newest.startswith(megatron_ext.__version__)
