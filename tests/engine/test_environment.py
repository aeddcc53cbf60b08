"""The environment that a run reports, and the warnings about ranks that differ."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.config import Config
from megatron_ext.engine import environment, platform


def test_differences_between_ranks_are_reported_once_per_host() -> None:
    here = environment.look(Config(), platform.choose("auto"))
    first = replace(here, host="n1", versions=here.versions | {"torch": "2.11.0"})
    other = replace(first, host="n2", versions={**first.versions, "pyarrow": None, "torch": "2.10.0"})
    assert environment.differences([first, replace(first, host="n2")]) == []
    assert environment.differences([first, other, other]) == [
        f"warning: pyarrow on n2: None; on n1: {first.versions['pyarrow']}",
        "warning: torch on n2: 2.10.0; on n1: 2.11.0",
    ]
