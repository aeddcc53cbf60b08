"""Reads YAML as people write it, but refuses a key that stands twice: one of its two values would be lost.

Refused as well: values that no type has (`2023-13-01`, `!!bool maybe`), and files of more bytes, more values (aliases
counted as often as they stand) or more levels than any configuration has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_ext.errors import UserError, first_line

MOST_BYTES, MOST_VALUES = 2**20, 100_000
_T = TypeVar("_T")


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a key that stands twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key is no plain word", problem_mark=key.start_mark)
        if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
            raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Count the values below a node, those of an alias each time that it stands there."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise yaml.MarkedYAMLError(
                problem="an alias stands inside of what it stands for", problem_mark=node.start_mark
            )
        return size
    known[id(node)] = None  # until its size is known
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for entry in node.value for child in entry]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_size(child, known) for child in children)
    known[id(node)] = size
    return size


def read_yaml(path: Path) -> Any:
    """Read what a file holds.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
        yaml.YAMLError: it is no YAML, a key stands twice in a mapping, a value is none of its type, or it is too large.
    """
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise yaml.YAMLError(f"it has more than {MOST_BYTES:,} bytes")
    text = raw.decode("utf-8")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"it has more than {MOST_VALUES:,} values")
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it has too many levels") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # of PyYAML's constructors
        raise yaml.YAMLError(f"a value is none of its type ({first_line(error)})") from None


def read_typed(path: Path, kind: type[_T]) -> _T:
    """Read a file that holds one value of a type, a dataclass or a list of them.

    Raises:
        UserError: it cannot be read, or a field is missing, unknown or out of range; the first of them.
    """
    try:
        return TypeAdapter(kind).validate_python(read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: needs valid YAML: {' '.join(str(error).split())}") from None
