"""Read YAML with the safe loader; duplicate keys are refused because one of the two values would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_ext.errors import UserError, first_line

_T = TypeVar("_T")


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a scalar", problem_mark=key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=True)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not UTF-8.
        yaml.YAMLError: it is not YAML, a mapping has a duplicate key, or a value does not match its tag or is nested
            too deeply.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return yaml.load(text, _Loader)
    except (RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:  # by PyYAML's constructors
        raise yaml.YAMLError(f"a value cannot be read ({first_line(error)})") from None


def read_typed(path: Path, kind: type[_T]) -> _T:
    """Return the content of a YAML file as a type: a dataclass or a list of dataclasses.

    Raises:
        UserError: a field is missing, unknown or out of range; names the first such field.
    """
    try:
        return TypeAdapter(kind).validate_python(read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: needs valid YAML: {' '.join(str(error).split())}") from None
