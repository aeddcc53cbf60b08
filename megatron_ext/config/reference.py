"""The page of all options, docs/reference.md: made from the configuration, so that it cannot tell anything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types

from megatron_ext.config import Config
from megatron_ext.config.arguments import flag
from megatron_ext.data.rows.mixture import MixturePart

_KINDS = {int: "integer", float: "number", str: "text", bool: "yes or no", MixturePart: "part of a mixture"}


def reference() -> Iterator[str]:
    """Write the tables of all options in Markdown, line by line, one for each section."""
    for section, options in get_type_hints(Config).items():
        hints = get_type_hints(options, include_extras=True)
        yield f"## {section}"
        yield ""
        yield str(options.__doc__)
        yield ""
        yield "| flag | value | default | |"
        yield "|---|---|---|---|"
        for field in fields(options):
            cells = (_flags(field, hints[field.name]), _values(hints[field.name]), _default(field))
            yield "| " + " | ".join((*cells, field.metadata["help"].replace("|", r"\|"))) + " |"
        yield ""


def _flags(field: Field[Any], hint: Any) -> str:
    if bool in (hint, *get_args(hint)):
        return f"`{flag(field.name)}`, `{flag('no_' + field.name)}`"
    return f"`{flag(field.name)}`"


def _values(hint: Any) -> str:
    """Say in words what an option takes."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [limit for extra in inner[1:] for limit in _limits(extra)]
        return " ".join([_values(inner[0]), *limits])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (Union, UnionType):
        return " or ".join(_values(one) for one in inner if one is not NoneType)
    if origin is tuple:
        return f"list: {_values(inner[0])}"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return ", ".join(f"`{choice}`" for choice in hint)
    return _KINDS[hint]


def _limits(extra: Any) -> list[str]:
    match extra:
        case annotated_types.Gt(gt=low):
            return [f"> {low}"]
        case annotated_types.Ge(ge=low):
            return [f">= {low}"]
        case annotated_types.Lt(lt=high):
            return [f"< {high:,}"]
        case annotated_types.Le(le=high):
            return [f"up to {high:,}"]
        case annotated_types.Interval():
            return [words for part in extra for words in _limits(part)]
    raise TypeError(f"{extra}: a limit that the reference has no words for")


def _default(field: Field[Any]) -> str:
    value = field.default
    assert value is not MISSING
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value}"
