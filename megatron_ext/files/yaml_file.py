"""Reads YAML as people write it, but refuses a key that stands twice: one of its two values would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


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


def read_yaml(path: Path) -> Any:
    """Read what a file holds.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
        yaml.YAMLError: it is no YAML, or a key stands twice in a mapping.
    """
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
