"""The fields of `Config` by name, their types for pydantic, and the JSON schema for editors.

python -m megatron_ext.config.schema > examples/config.schema.json
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megatron_ext.cli import nearest
from megatron_ext.config.options import Config
from megatron_ext.errors import UserError, echo
from megatron_ext.files.reading import got_and_needs

ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)
SECTIONS: dict[str, Any] = get_type_hints(Config)


@dataclass(frozen=True)
class Option:
    """A field of a section: its type, default and help; `shown` is the placeholder of its value in --help."""

    section: str
    hint: Any
    default: Any
    description: str
    shown: str | None

    @property
    def is_switch(self) -> bool:
        """Whether it is a yes-or-no option; a default of None leaves the choice to the platform."""
        return self.hint in (bool, bool | None)


FIELDS: dict[str, Option] = {
    field.name: Option(section, get_type_hints(options)[field.name], field.default, **field.metadata)
    for section, options in SECTIONS.items()
    for field in fields(options)
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def mistake(error: Mapping[str, Any]) -> str:
    """Return the error line for one of pydantic's errors."""
    path = [str(part)[:80] for part in error["loc"]]
    name = path[-1]
    if error["type"] in ("unexpected_keyword_argument", "invalid_key"):
        if name in FIELDS:
            return f"{'.'.join(path)}: belongs under `{FIELDS[name].section}:`; move it there"
        if len(path) > 1:
            return f"{'.'.join(path)}: no such option{nearest(name, list(FIELDS))}"
        return f"{'.'.join(path)}: no such section{nearest(name, list(SECTIONS))}"
    if error["type"] == "dataclass_type":
        return f"{'.'.join(path)}: got {echo(error['input'])}, needs a mapping of options"
    return f"{'.'.join(path[1:] or path)}: {got_and_needs(error)}"


def validate(sections: Any, prefix: str = "") -> Config:
    """Build the configuration; raise UserError with a line, begun by `prefix`, for each invalid name or value."""
    lines = [
        f"{name}: got {value}, needs a value that is not yes or no"  # pydantic takes them for 1 and 0
        for entries in sections.values()
        if isinstance(entries, dict)
        for name, value in entries.items()
        if isinstance(value, bool) and name in FIELDS and not FIELDS[name].is_switch
    ]
    try:
        config = ADAPTER.validate_python(sections)
    except ValidationError as error:
        lines += map(mistake, error.errors())
    if lines:
        raise UserError("\n".join(prefix + line for line in lines))
    return config


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, with the help of each option as its description."""
    schema = ADAPTER.json_schema()
    sections = dict(schema["properties"])
    data = schema["$defs"]["DataConfig"]["properties"]
    data["mixture"] = {"description": data["mixture"]["description"], "anyOf": [data["mixture"], {"type": "string"}]}
    stage = {
        "type": "object",
        "properties": {
            "name": {"type": ["string", "integer"], "description": "also the name of its folder"},
            "keep": {"type": "array", "items": {"enum": ["optimizer", "learning_rate", "samples"]}},
            **sections,
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    schema["properties"] |= {
        "extends": {"type": "string", "description": "another file, which this one changes value by value"},
        "stages": {"type": "array", "items": stage},
        "recipe": {"type": "object", "description": "what a paper published of this run"},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "megatron_ext run"}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1))
