"""The lines between rooms: who imports Megatron, the engine and the runs, and what an __init__.py holds."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "megatron_ext").rglob("*.py"))
COMMANDS = [*sorted((ROOT / "tools").rglob("*.py")), ROOT / "pretrain_skyladder.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that the code names in an import, inside functions too, and in import_module("...")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def imports_megatron(tree: ast.AST) -> bool:
    return any(module.split(".")[0] == "megatron" for module in imports(tree))


def filters_warnings(node: ast.stmt) -> bool:
    if isinstance(node, ast.For):
        return all(map(filters_warnings, node.body))
    return isinstance(node, ast.Expr) and ast.unparse(node.value).startswith("warnings.filterwarnings(")


def more_than_exports(tree: ast.Module) -> list[str]:
    """Statements that are no docstring, import, assignment to a dunder name, or warnings filter."""
    rest = []
    for place, node in enumerate(tree.body):
        docstring = place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        dunder = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__")
        if not (docstring or dunder or filters_warnings(node) or isinstance(node, (ast.Import, ast.ImportFrom))):
            rest.append(ast.unparse(node))
    return rest


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PACKAGE + COMMANDS, ids=name_of)
def test_only_the_engine_imports_megatron(path: Path) -> None:
    inside = path.is_relative_to(ROOT / "megatron_ext" / "engine")
    assert inside or not imports_megatron(parsed(path))


def room_of(path: Path) -> str:
    """The first folder of the package that a file lies in; its own name where there is none."""
    return path.relative_to(ROOT / "megatron_ext").parts[0].removesuffix(".py")


# Imports go one way: the engine imports any room but the runs, the runs import any room, scripts alone import the runs.
MAY_IMPORT = {"engine": ("engine", "run"), "run": ("run",)}


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(path: Path, room: str) -> None:
    inside = room_of(path) in MAY_IMPORT[room]
    imported = [module for module in imports(parsed(path)) if f"{module}.".startswith(f"megatron_ext.{room}.")]
    assert inside or not imported


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_the_package_imports_no_command(path: Path) -> None:
    """tools/ is installed as megatron_ext.tools, beside the rooms and above all of them."""
    commands = ("megatron_ext.tools", "megatron_ext.examples", "tools", "pretrain_skyladder")
    assert not [module for module in imports(parsed(path)) if f"{module}.".startswith(tuple(f"{c}." for c in commands))]


def test_the_rule_sees_imports_of_both_rooms() -> None:
    train = list(imports(parsed(ROOT / "megatron_ext" / "run" / "train.py")))
    for room in MAY_IMPORT:
        assert any(module.startswith(f"megatron_ext.{room}") for module in train), room


def test_the_engine_does_import_megatron() -> None:
    assert any(imports_megatron(parsed(path)) for path in (ROOT / "megatron_ext" / "engine").glob("*.py"))


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("import megatron", True),
        ("import os, megatron.core as core", True),
        ("def f():\n    from megatron.core import x", True),
        ("importlib.import_module('megatron.core')", True),
        ("import megatron_ext.loss", False),
        ("from megatron_ext import loss", False),
        ("from . import megatron", False),
        ("x = 'import megatron'", False),
    ],
)
def test_the_walk_finds_imports(code: str, wanted: bool) -> None:
    assert imports_megatron(ast.parse(code)) == wanted


def test_importing_every_other_room_loads_no_megatron() -> None:
    paths = [path for path in PACKAGE if room_of(path) not in ("engine", "run")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    code = (
        f"import importlib, json, sys; [importlib.import_module(m) for m in {modules}];"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] == 'megatron']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("path", [path for path in PACKAGE if path.name == "__init__.py"], ids=name_of)
def test_init_files_hold_exports_only(path: Path) -> None:
    assert more_than_exports(parsed(path)) == []


def test_the_check_of_init_files_sees_code() -> None:
    code = '"""What."""\nimport os\n__all__ = ["os"]\nx = 1\ndef f(): ...\n"""late"""\nfor i in x:\n    f()'
    assert more_than_exports(ast.parse(code)) == ["x = 1", "def f():\n    ...", "'late'", "for i in x:\n    f()"]
