"""The arguments of Megatron-LM by the real parser of three versions.

megatron_lm_arguments.json has the repr of each name's default, or of those in 0.16.1, 0.19.0 and d98e8a64, null where a
version does not have the name.
"""

import ast
import json
from pathlib import Path
from typing import Any

VERSIONS = ("0.16.1", "0.19.0", "d98e8a64")
_DEFAULTS = json.loads(Path(__file__).with_name("megatron_lm_arguments.json").read_text(encoding="utf-8"))


class Unknown:
    """An object that only its own package could restore."""


def defaults(version: str) -> dict[str, Any]:
    """The namespace of a version without any flag; objects such as enums are `Unknown`."""
    values = {}
    for name, listed in _DEFAULTS.items():
        text = listed[VERSIONS.index(version)] if isinstance(listed, list) else listed
        if text is not None:
            values[name] = Unknown() if text.startswith("<") else ast.literal_eval(text)
    return values
