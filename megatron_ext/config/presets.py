"""Model sizes by name (presets.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_ALL: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PRESETS: dict[str, dict[str, Any]] = {  # lists become tuples, as in ModelConfig
    name: {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    for name, options in _ALL.items()
    if not name.startswith(".")
}
