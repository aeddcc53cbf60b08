"""How commands end, how flags are refused, and the console command."""

import ast
import errno
import subprocess
import sys
import tomllib

import pytest

import megatron_ext
from megatron_ext import cli
from megatron_ext.cli import COMMANDS, MAX_CHARACTERS, Parser, command, program
from megatron_ext.errors import OtherProcessError, UserError, echo, first_line, printable
from megatron_ext.launch import LaunchError
from tests.launcher import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def end(error: BaseException, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    @command
    def main(argv: list[str]) -> int:
        assert "--debug" not in argv
        raise error

    return main(list(words)), capsys.readouterr().err


def test_bad_input_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(UserError("x: got 1, needs 2"), capsys) == (2, "error: x: got 1, needs 2\n")
    assert end(UserError("a\nb\nc\nd"), capsys) == (2, "error: a\nb\nand 2 more mistakes; --debug shows all\n")
    assert end(UserError("got \x1b[2J\x07"), capsys) == (2, "error: got \\x1b[2J\\x07\n")
    status, text = end(UserError("x"), capsys, "--debug")
    assert status == 2
    assert "Traceback" in text
    _, text = end(UserError("field: got " + "x" * 10**6 + ", needs less"), capsys)
    assert text.startswith("error: field: got xxx")
    assert text.endswith("x, needs less\n")
    assert len(text) < MAX_CHARACTERS + 20


def test_a_file_that_the_user_must_see_to_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    missing = OSError(errno.ENOENT, "No such file or directory", "a/b")
    assert end(missing, capsys) == (2, "error: a/b: No such file or directory\n")
    full = OSError(errno.ENOSPC, "No space left on device")
    assert end(full, capsys) == (2, "error: No space left on device\n")
    assert end(KeyboardInterrupt(), capsys) == (130, "interrupted\n")


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.EIO, "Input/output error", "a"), OSError("x")])
def test_any_other_error_is_a_traceback_on_stderr(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = end(error, capsys)
    assert status == 1
    assert text.startswith("Traceback (most recent call last):\n")
    assert "in main" in text


def test_which_processes_print(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert end(UserError("x"), capsys) == (2, "")  # rank 0 prints the same
    missing = OSError(errno.ENOENT, "No such file", "a")
    assert end(missing, capsys) == (2, "error: rank 1: a: No such file\n")
    assert end(LaunchError("x"), capsys) == (2, "error: rank 1: x\n")
    assert end(KeyError("x"), capsys)[1].startswith("rank 1: Traceback ")
    error = OtherProcessError("another process has failed: x")
    assert end(error, capsys) == (1, "")
    monkeypatch.setenv("RANK", "0")
    assert end(error, capsys) == (1, "another process has failed: x\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "the following arguments are required: FILE, --steps; see --help"),
        (["f", "--steps", "x"], "--steps: invalid int value: 'x'; see --help"),
        (["f", "--steps", "1", "--step", "2"], "--step: no such flag; did you mean --steps?; --help lists all"),
        (["f", "g", "--steps", "1"], "g: got a word that belongs to no flag"),
    ],
)
def test_flags_are_refused_in_one_line(words: list[str], text: str) -> None:
    parser = Parser(prog="p")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--steps", type=int, required=True)
    with pytest.raises(UserError) as caught:
        parser.parse_args(words)
    assert str(caught.value).startswith(text)


def test_values_are_shown_within_a_line() -> None:
    assert echo("x") == "'x'"
    deep: list[object] = []
    deep.append(deep)
    for value in (["x" * 1000] * 1000, {str(n): "x" * 1000 for n in range(1000)}, deep, "x" * 10**6, b"x" * 10**6):
        assert len(echo(value)) < 1000
    assert printable("a\nb\x1b") == "a\\nb\\x1b"
    assert first_line(ValueError("\n  wrong \nand more")) == "wrong "
    assert first_line(EOFError()) == "EOFError"


def test_every_subcommand_has_a_main_and_every_tool_is_a_subcommand() -> None:
    assert PROJECT["scripts"] == {"megatron-ext": "megatron_ext.cli:main"}
    assert PROJECT["version"] == megatron_ext.__version__
    for module in COMMANDS.values():
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
        (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        assert [argument.arg for argument in main.args.args] == ["argv"], module
    tools = {f"tools.{path.stem}" for path in (ROOT / "tools").glob("*.py")} - {"tools.__init__"}
    assert set(COMMANDS.values()) <= tools | {"pretrain_skyladder"}


WITHOUT_TORCH = """
import importlib, sys
from megatron_ext.cli import COMMANDS
sys.modules["torch"] = None
for module in COMMANDS.values():
    try:
        assert importlib.import_module(module).main(["--help"]) == 0
    except SystemExit as end:
        assert end.code == 0
trainer = importlib.import_module(COMMANDS["pretrain"])
sys.exit(trainer.main(["--config", "examples/configs/cpu_smoke.yaml", "--dry-run"]))
"""


def test_help_needs_no_torch_and_all_else_says_so() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: this command needs the package torch; pip install torch\n")


def test_the_console_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/megatron-ext", "fly"])
    assert cli.main() == 2
    assert "subcommands: pretrain, " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["/usr/bin/megatron-ext", "recipes", "--list", "1", "--nonsense"])
    assert cli.main() == 2
    assert capsys.readouterr().err.startswith("error: --nonsense: no such flag")
    assert program("report") == "megatron-ext report"
    monkeypatch.setattr(sys, "argv", ["pretrain_skyladder.py"])
    assert [program("report"), program("pretrain")] == ["python tools/report.py", "python pretrain_skyladder.py"]
