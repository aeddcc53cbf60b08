"""Which room may import which, who may import Megatron, and who may ask for a GPU."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "megatron_ext").rglob("*.py"))
COMMANDS = [*sorted((ROOT / "tools").rglob("*.py")), ROOT / "pretrain_skyladder.py"]


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every imported module or name, inside functions too, and the names in import_module("...")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def imports_megatron(tree: ast.AST) -> bool:
    return any(module.split(".")[0] == "megatron" for module in imports(tree))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_only_the_engine_imports_megatron() -> None:
    engine = ROOT / "megatron_ext" / "engine"
    assert any(imports_megatron(parsed(path)) for path in engine.glob("*.py"))  # the check sees what it looks for
    importers = [path for path in PACKAGE + COMMANDS if imports_megatron(parsed(path))]
    assert not [path for path in importers if not path.is_relative_to(engine)]


# A room may import the rooms of earlier lines alone, so there are no circles.
ROOMS = """
    arrays data/row device errors heartbeat learning_rate loss_kernels
    files layout loss schedule
    launch masks short_context
    cli
    data/indexed data/kept data/text
    data/packing data/preprocess
    data/rows
    config
    context_parallel rope
    attention checkpoint inspect
    batch evaluation planning
    token_weighting
    engine monitoring
    inference
    run
    rehearsal
"""
LINE_OF = {room: number for number, line in enumerate(ROOMS.strip().splitlines()) for room in line.split()}


def room_of(path: str) -> str | None:
    """Return the room of a path inside the package: a module at its top or a folder, those in data/ apart."""
    parts = path.removesuffix(".py").split("/")
    return next((room for room in ("/".join(parts[:2]), parts[0]) if room in LINE_OF), None)


def rooms_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imports(parsed(path)))
    rooms = {room_of("/".join(name[1:])) for name in names if name[0] == "megatron_ext"}
    return {room for room in rooms if room is not None}


def test_every_module_has_a_room() -> None:
    homeless = [str(path) for path in PACKAGE if room_of(str(path.relative_to(ROOT / "megatron_ext"))) is None]
    assert homeless == [str(ROOT / "megatron_ext" / name) for name in ("__init__.py", "data/__init__.py")]
    assert {room for path in PACKAGE for room in rooms_imported(path)} >= LINE_OF.keys() - {"inspect", "rehearsal"}


def test_imports_go_one_way() -> None:
    """No room imports commands: tools/ is installed as megatron_ext.tools."""
    commands = ("megatron_ext.tools.", "megatron_ext.examples.", "tools.", "pretrain_skyladder.")
    for path in PACKAGE:
        room = room_of(str(path.relative_to(ROOT / "megatron_ext")))
        if room is not None:
            later = {
                imported_room
                for imported_room in rooms_imported(path) - {room}
                if LINE_OF[imported_room] >= LINE_OF[room]
            }
            assert not later, path
        assert not [name for name in imports(parsed(path)) if f"{name}.".startswith(commands)], path


def compares_block(tree: ast.AST) -> bool:
    """Return whether a value of --block is compared with text, alone or in a tuple."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        sides = [node.left, *node.comparators]
        asks = any(isinstance(side, ast.Attribute) and side.attr == "block" for side in sides)
        if asks and any(isinstance(part, ast.Constant) for side in sides for part in ast.walk(side)):
            return True
    return False


def test_blocks_are_asked_for_their_traits() -> None:
    """A new block is a row in config/blocks.py: no module asks for the name of one."""
    assert compares_block(ast.parse('model.block != "phi"'))
    assert compares_block(ast.parse('o.block in ("gemma3", "olmo3") and True'))
    assert not [path for path in PACKAGE if compares_block(parsed(path))]


def test_only_conftest_asks_for_a_gpu() -> None:
    """Tests run alike with and without one: they ask ON_GPU."""

    def asks(path: Path) -> bool:
        calls = (node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
        return any(isinstance(call, ast.Attribute) and call.attr in ("is_available", "device_count") for call in calls)

    assert [path.name for path in (ROOT / "tests").rglob("*.py") if asks(path)] == ["conftest.py"]
