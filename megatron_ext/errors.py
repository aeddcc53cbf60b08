"""The one exception for bad input: its text is one line a user can act on."""

from __future__ import annotations

import errno
import reprlib

# what the system refuses until somebody sees to it; all else (EIO, ESTALE, ETIMEDOUT, ...) may be gone at the next try
REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EISDIR: "name a file, this is a folder",
    errno.EACCES: "give this user the right to it, or choose another place",
    errno.EPERM: "give this user the right to it, or choose another place",
    errno.EROFS: "choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EEXIST: "choose another name, or remove what has this one",
    errno.ELOOP: "check the path: its links go in a circle",
    errno.ENOSPC: "make room, or choose another place",
    errno.EDQUOT: "make room, or choose another place",
    errno.EFBIG: "raise the limit on a file's size, or choose another place",
}


class UserError(ValueError):
    """Reports bad input: the message names the field, what it got, what it needs and the remedy, in one line.

    Attributes:
        of_this_process: others may not know of it, so that each says its own; else the first one of each node does.
    """

    of_this_process = False


def missing_package(what: str, package: str) -> UserError:
    """Return the error for an optional package that `what` needs and that is not installed."""
    return UserError(f"{what} needs the package {package}; pip install {package}")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its type where it says nothing, as some of damaged files do."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _Repr(reprlib.Repr):
    """Shows as much of a value as fits into a message."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 3, 4
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() <= 256:
            return repr(x)
        digits = int((x.bit_length() - 1) * 0.30103) + 1
        digits += abs(x) >= 10**digits
        return f"{'-' if x < 0 else ''}a number of {digits:,} digits"  # repr refuses 4,301 of them


def echo(value: object) -> str:
    """Return how a message shows a value that a user gave: as Python writes it, but never more than about a line."""
    return printable(_Repr().repr(value))


def printable(text: str) -> str:
    """Write a text's control characters as escapes: what a file holds may not steer the terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
