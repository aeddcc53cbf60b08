"""The one exception for bad input: its text is one line a user can act on."""

from __future__ import annotations


class UserError(ValueError):
    """Reports bad input: the message names the field, what it got, what it needs and the remedy, in one line."""


def missing_package(what: str, package: str) -> UserError:
    """Return the error for an optional package that `what` needs and that is not installed."""
    return UserError(f"{what} needs the package {package}; pip install {package}")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its type where it says nothing, as some of damaged files do."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
