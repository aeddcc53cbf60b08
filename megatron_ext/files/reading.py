"""Read JSON and YAML, and check values by their types."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_ext.errors import PERMANENT, UserError, echo

_T = TypeVar("_T")
JsonObject = dict[str, Any]


def read_object(path: Path, remedy: str) -> JsonObject | None:
    """Return the JSON object in a file; None if there is no file.

    Raises:
        UserError: the file does not contain a JSON object; `remedy` follows its name.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} {remedy}")
    return content


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, because one of the two values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a scalar", problem_mark=key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=True)


def read_yaml(path: Path, option: str = "file") -> Any:
    """Return the content of a YAML file.

    Raises:
        UserError: the file is missing, is not YAML in UTF-8, or a mapping has a duplicate key; it names the option.
        OSError: another system error, such as EIO; a retry may succeed.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        if error.errno not in PERMANENT:
            raise
        raise UserError(f"{option}: got {path}, needs a readable YAML file ({error.strerror})") from None
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        # the others are raised by PyYAML's constructors
        raise UserError(f"{option}: got {path}, needs valid YAML: {' '.join(str(error).split())}") from None


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)  # building one takes milliseconds


def typed(content: Any, kind: type[_T], path: str | Path, *section: str) -> _T:
    """Return the content of a file, or of a section of it, as a type such as a list of dataclasses.

    Raises:
        UserError: a field is missing, unknown or out of range; names the first such field.
    """
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (*section, *first["loc"]))) or "the file"
        raise UserError(f"{path}: {name}: {got_and_needs(first)}") from None


def got_and_needs(error: Mapping[str, Any]) -> str:
    """Return the value that one of pydantic's errors is about, and what it needs."""
    if error["type"] == "missing":
        return "got nothing, needs a value"
    needs = error["msg"].removeprefix("Input should be ").partition(" or instance of")[0]
    needs = needs.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    needs = needs.replace("greater than", "more than")
    value = error["input"]
    got = echo(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d[\d.e+-]{,40}|nan|-?inf", value):  # from the command line
        got = value
    return f"got {got}, needs {needs}"
