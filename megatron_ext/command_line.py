"""What every command line has in common: how it reads flags, how it ends, and what it says then.

    0      done
    1      a fault of the program, or what a tool's --help says of 1
    2      bad input, or something of the system that its user must see to (a folder that cannot be written)
    130    stopped by Ctrl-C
    141    whoever read the output has gone, as in `| head`

Bad input and faults are at most `MOST_LINES` lines on standard error, the first with `error:`. The traceback of a fault
lies in a file that the line names; with --debug it is printed instead, that of bad input too.

Under torchrun a process leaves its line in the file that torchrun names as well, whether it prints it or not:
torchrun's account of a failed run and tools/launch.py end with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from megatron_ext.errors import REMEDIES, UserError, first_line, printable
from megatron_ext.launch import is_first, is_first_of_node, leave_to_torchrun
from megatron_ext.parser import DEBUG

FAULT, BAD_INPUT, INTERRUPTED, UNREAD = 1, 2, 128 + signal.SIGINT, 128 + signal.SIGPIPE
MOST_LINES, MOST_CHARACTERS = 3, 600
_PATIENCE_S = 10.0


class FaultError(Exception):
    """Says that the error it is raised from is no bad input, whatever its type.

    Attributes:
        folder: for its traceback; None: the system's folder for temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__("no fault of the input")
        self.folder = folder


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Make the `main` of a command line end as the module says, whatever happens inside.

    Args:
        main: takes the words after the command's name (sys.argv's where it is called without) and returns the exit
            status; raises UserError for bad input.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        debug = DEBUG in words
        try:
            try:
                return main([word for word in words if word != DEBUG])
            finally:
                sys.stdout.flush()  # of --help too, which leaves by SystemExit
        except BrokenPipeError as error:
            if _is_unread():
                _leave_unread()
                return UNREAD
            if debug:
                raise
            return tell_fault(error)  # a pipe of the program's own, to a process that has ended
        except KeyboardInterrupt:
            if debug:
                raise
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except OSError as error:
            if debug:
                raise
            tell(error, _who())  # the others may have what this one lacks
            return BAD_INPUT
        except UserError as error:
            if debug:
                raise
            if error.of_this_process or is_first(os.environ):
                tell(error)
            elif is_first_of_node(os.environ):
                tell(error, _who())  # the files of a node may be others
            else:
                leave_to_torchrun(_lines(error)[0])
                _let_the_first_speak()
            return BAD_INPUT
        except FaultError as fault:
            if debug or fault.__cause__ is None:
                raise
            return tell_fault(fault.__cause__, fault.folder)
        except Exception as error:
            if debug:
                raise
            return tell_fault(error)

    return run


def tell(error: UserError | OSError, who: str = "") -> None:
    """Print what is wrong with the input, or what the system refuses, after who says it."""
    lines = _lines(error)
    if len(lines) > MOST_LINES:
        hidden = len(lines) - MOST_LINES + 1
        lines[MOST_LINES - 1 :] = [f"and {hidden} more mistakes; {DEBUG} shows all"]
    print("\n".join([f"error: {who}{lines[0]}", *lines[1:]]), file=sys.stderr)
    leave_to_torchrun(lines[0])


def _lines(error: UserError | OSError) -> list[str]:
    text = _of_system(error) if isinstance(error, OSError) else str(error)
    return [_shortened(printable(line)) for line in text.splitlines() if line.strip()] or [type(error).__name__]


def tell_fault(error: BaseException, folder: Path | None = None) -> int:
    """Print a fault of the program in one line, and keep its traceback in a file; return its exit status.

    Args:
        error: what happened.
        folder: for the file (default: the system's folder for temporary files).
    """
    said = first_line(error)
    kind = "" if said == type(error).__name__ else f"{type(error).__name__}: "
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", prefix="fault-", suffix=".txt", dir=folder, delete=False, encoding="utf-8", errors="replace"
        ) as file:
            traceback.print_exception(error, file=file)
        where = f"its traceback is in {file.name}"
    except OSError:
        where = f"{DEBUG} shows its traceback"
    line = f"{_shortened(printable(kind + said))}; no fault of the input: {where}"
    print(f"error: {_who()}{line}", file=sys.stderr)
    leave_to_torchrun(line)
    return FAULT


def _let_the_first_speak() -> None:
    """Wait to be ended by torchrun: it ends all when the first one to end does, and who speaks may be a slower one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_PATIENCE_S)


def _who() -> str:
    """Name this process where it is one of several."""
    rank = os.environ.get("RANK")
    return f"rank {rank[:9]}: " if rank and os.environ.get("WORLD_SIZE") != "1" else ""


def _of_system(error: OSError) -> str:
    reason = error.strerror or first_line(error)
    remedy = REMEDIES.get(error.errno or 0, "see to it, and start again")
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{reason}; {remedy}"


def _shortened(line: str) -> str:
    """Leave out the middle of a line that is too long: its beginning names the field, its end the remedy."""
    if len(line) <= MOST_CHARACTERS:
        return line
    end = MOST_CHARACTERS // 3
    return f"{line[: MOST_CHARACTERS - end]} ... {line[-end:]}"


def _is_unread() -> bool:
    """Tell whether whoever read standard output has gone."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # a test's has no descriptor
        return False
    poll = select.poll()
    poll.register(output, 0)  # a broken pipe is told of without being asked for
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _leave_unread() -> None:
    """Let what is still to be written go nowhere: the interpreter flushes standard output as it ends."""
    with contextlib.suppress(OSError, ValueError):  # a test's output has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say nothing where Ctrl-C ends the imports before `main`; the interpreter then dies of the signal."""
    if not issubclass(kind, KeyboardInterrupt) or DEBUG in sys.argv:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _end_quietly
