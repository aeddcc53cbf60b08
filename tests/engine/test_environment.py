"""The environment that a run reports, and the warnings about ranks that differ."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.config import Config
from megatron_ext.engine import environment, platform


def test_differences_between_ranks_are_reported_once_per_host() -> None:
    first = replace(environment.look(Config(), platform.choose("auto")), host="n1", torch="2.11.0")
    other = replace(first, host="n2", torch="2.10.0", packages={**first.packages, "pyarrow": None})
    assert environment.differences([first, replace(first, host="n2")]) == []
    assert environment.differences([first, other, other]) == [
        "warning: torch on n2: 2.10.0; on n1: 2.11.0",
        f"warning: pyarrow on n2: None; on n1: {first.packages['pyarrow']}",
    ]
