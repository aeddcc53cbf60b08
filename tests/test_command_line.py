"""How command lines end: their exit status, and what they say then."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.command_line import MOST_CHARACTERS, FaultError, command
from megatron_ext.errors import UserError, echo, printable
from megatron_ext.launch import LaunchError
from megatron_ext.parser import Parser


def ending(error: BaseException) -> Callable[..., int]:
    """A command line that ends so."""

    def main(argv: list[str]) -> int:
        raise error

    return command(main)


def said(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = ending(error)([])
    return status, capsys.readouterr().err


def test_the_words_are_those_of_the_command_line_without_debug() -> None:
    def main(argv: list[str]) -> int:
        return len(argv)

    assert command(main)(["a", "--debug", "b"]) == 2


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(UserError("x: got 1, needs 2"), capsys) == (2, "error: x: got 1, needs 2\n")
    assert said(UserError("a\nb\nc"), capsys) == (2, "error: a\nb\nc\n")
    assert said(UserError("a\nb\nc\nd"), capsys) == (2, "error: a\nb\nand 2 more mistakes; --debug shows all\n")
    assert said(UserError(""), capsys) == (2, "error: UserError\n")


def test_a_long_line_keeps_its_beginning_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = said(UserError("field: got " + "x" * 10**6 + ", needs less"), capsys)
    assert text.startswith("error: field: got xxx")
    assert text.endswith("x, needs less\n")
    assert len(text) < MOST_CHARACTERS + 20


def test_what_steers_a_terminal_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(UserError("got \x1b[2J\x07"), capsys) == (2, "error: got \\x1b[2J\\x07\n")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "a/b"), "a/b: No such file or directory; check the path"),
        (OSError(errno.EROFS, "Read-only file system", "a"), "a: Read-only file system; choose another place"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room, or choose another"),
        (OSError(errno.EIO, "Input/output error", "a"), "a: Input/output error; see to it, and start again"),
    ],
)
def test_what_the_system_refuses(error: OSError, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = said(error, capsys)
    assert status == 2
    assert told.startswith(f"error: {text}")
    assert told.count("\n") == 1


def test_a_fault_is_one_line_that_names_a_file_with_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FaultError(tmp_path / "run" / "faults")
    fault.__cause__ = KeyError("x")
    for error in (fault, KeyError("x")):
        status, told = said(error, capsys)
        assert status == 1
        found = re.fullmatch(r"error: KeyError: 'x'; no fault of the input: its traceback is in (.*)\n", told)
        assert found is not None, told
        file = Path(found[1])
        assert "KeyError: 'x'" in file.read_text()
        assert (file.parent == tmp_path / "run" / "faults") == (error is fault)
        file.unlink()


def test_a_fault_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    fault = FaultError(tmp_path / "file" / "faults")
    fault.__cause__ = KeyError("x")
    assert said(fault, capsys) == (1, "error: KeyError: 'x'; no fault of the input: --debug shows its traceback\n")


def test_debug_lets_everything_through() -> None:
    for error in (UserError("x"), OSError("x"), KeyError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            ending(error)(["--debug"])


def test_ctrl_c_and_a_closed_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(KeyboardInterrupt(), capsys) == (130, "interrupted\n")
    _, told = said(BrokenPipeError(errno.EPIPE, "Broken pipe"), capsys)  # of a worker that has ended: no `| head`
    assert told.startswith("error: BrokenPipeError: ")
    Path(told.strip().rsplit(" ", 1)[1]).unlink()


def test_an_output_that_no_one_reads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        status, told = said(BrokenPipeError(), capsys)
        assert status == 1  # someone reads it: another pipe is broken
        Path(told.strip().rsplit(" ", 1)[1]).unlink()
        os.close(read)
        output.write("lines")
        assert said(KeyError("x"), capsys) == (141, "")  # its last lines find no one
        assert output.fileno() == write


def test_who_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert said(UserError("x"), capsys) == (2, "")  # the first one says the same
    assert said(OSError(errno.ENOENT, "No such file", "a"), capsys) == (
        2,
        "error: rank 1: a: No such file; check the path\n",
    )
    assert said(LaunchError("x"), capsys) == (2, "error: x\n")
    own = UserError("x")
    own.of_this_process = True
    assert said(own, capsys) == (2, "error: x\n")
    _, told = said(KeyError("x"), capsys)
    assert told.startswith("error: rank 1: KeyError: 'x'; ")
    Path(told.strip().rsplit(" ", 1)[1]).unlink()
    monkeypatch.setenv("LOCAL_RANK", "0")  # of another node, whose files may be others
    assert said(UserError("x"), capsys) == (2, "error: rank 1: x\n")
    assert said(LaunchError("x"), capsys) == (2, "error: x\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "FILE, --steps: got nothing, needs a value"),
        (["f", "--steps", "x"], "--steps: got 'x', needs a whole number"),
        (["f", "--steps", "1", "--rate", "x"], "--rate: got 'x', needs a number"),
        (["f", "--steps", "1", "--kind", "read"], "--kind: got 'read', needs one of red, green; did you mean red?"),
        (["f", "--steps"], "--steps: got too few values, needs one value"),
        (["f", "--steps", "1", "--step", "2"], "--step: no such flag; did you mean --steps?; --help lists all"),
        (["f", "g", "--steps", "1"], "g: got a word that belongs to no flag"),
        (["f", "--steps", "1", "--loud=yes"], "--loud: got 'yes', needs no value; use --loud or --no-loud"),
    ],
)
def test_flags_are_refused_in_one_line(words: list[str], text: str) -> None:
    import argparse

    parser = Parser(prog="p")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--kind", choices=("red", "green"))
    parser.add_argument("--loud", action=argparse.BooleanOptionalAction)
    with pytest.raises(UserError) as caught:
        parser.parse_args(words)
    assert str(caught.value).startswith(text)


def test_values_are_echoed_within_a_line() -> None:
    assert echo(5) == "5"
    assert echo("x") == "'x'"
    assert echo(10**5000) == "a number of 5,001 digits"
    assert echo([-(10**5000)]) == "[-a number of 5,001 digits]"
    deep: list[object] = []
    deep.append(deep)
    for value in (["x" * 1000] * 1000, {str(n): "x" * 1000 for n in range(1000)}, deep, "x" * 10**6, b"x" * 10**6):
        assert len(echo(value)) < 1000
    assert printable("a\nb\x1b") == "a\\nb\\x1b"
