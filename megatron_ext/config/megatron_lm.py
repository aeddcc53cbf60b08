"""What stands here for flags of Megatron-LM's scripts that have another name, or none, here."""

from fnmatch import fnmatchcase
from pathlib import Path

import yaml

EQUIVALENTS: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_BY_FLAG = {f"--{flag}": text for text, flags in EQUIVALENTS.items() for flag in flags.split()}


def equivalent(flag: str, value: str) -> str | None:
    """Return what stands here for a flag of Megatron-LM with this value; None for other flags."""
    exact = _BY_FLAG.get(f"{flag}={value}", _BY_FLAG.get(flag))
    return exact or next((text for pattern, text in _BY_FLAG.items() if fnmatchcase(flag, pattern)), None)
