"""`UserError`, the exception for bad input, and helpers that format user values in messages."""

import errno
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# System errors that persist until the user changes something; others (EIO, ESTALE, ...) may be transient.
PERMANENT = DISK_FULL | {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.EEXIST, errno.ELOOP),
}


class UserError(ValueError):
    """Reports bad input in one line: the field, its value, the requirement, and the remedy."""

    of_this_process = False  # whether every process prints it; otherwise only the first process does
    is_agreed = False  # whether all processes raise it together
    lists_all = False  # whether all of its lines are printed, however many


class OtherProcessError(RuntimeError):
    """Reports that another process has failed, which prints why."""


class DivergedError(FloatingPointError):
    """Raised when a loss or a gradient norm does not allow a run to continue.

    `what` is "loss", "weighted loss", "gradient norm", "validation loss" or "loss spike"; `needs` is for the message.
    """

    def __init__(self, what: str, value: float, needs: str = "a finite number") -> None:
        super().__init__(f"the {what} is {value}, needs {needs}")
        self.what = what
        self.value = value
        self.needs = needs


def missing_package(what: str, package: str) -> UserError:
    """Return the error for a missing optional package that `what` needs."""
    return UserError(f"{what} needs the package {package}; pip install {package}")


def optional_module(what: str, module: str, package: str | None = None) -> Any:
    """Import a module that `what` needs from an optional package; raise UserError if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise missing_package(what, package or module.partition(".")[0]) from None


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def library_errors(explain: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `explain(reason)` instead of any error of a library in Rust or C++ that the block calls.

    Such a library may raise any type: RuntimeError, a bare Exception, PyO3's PanicException, which is no Exception.
    UserError and errors of the system (disks, memory, signals) pass.
    """
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise explain(first_line(error)) from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxdict = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def echo(value: object) -> str:
    """Return the repr of a user's value, shortened to about a line."""
    return printable(_SHORT.repr(value))


def printable(text: str) -> str:
    """Escape control characters, so that a file's content cannot control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
