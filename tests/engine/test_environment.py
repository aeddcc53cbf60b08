"""The environment that a run reports, and the warnings about ranks that differ."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
import torch

from megatron_ext.attention.choice import select
from megatron_ext.config import Config, TrainingConfig
from megatron_ext.engine import compat, environment, platform
from megatron_ext.errors import UserError


@pytest.mark.parametrize("bf16", [False, True])
def test_a_backend_can_serve_where_the_run_would_select_it(bf16: bool) -> None:
    compat.install_optimizer()
    config, here = Config(training=TrainingConfig(bf16=bf16)), platform.choose("auto")
    found = environment.look(config, here)
    assert found.packages["pyarrow"] == importlib.metadata.version("pyarrow")
    text = "\n".join(found.summary())
    assert f"torch {torch.__version__}" in text
    for name, reason in found.backends.items():
        arguments = (name, here.device, torch.bfloat16 if bf16 else torch.float32, config.model.head_size)
        if reason is None:
            select(*arguments)
        else:
            assert f"  {name} cannot: it {reason}" in text
            with pytest.raises(UserError, match="cannot serve") as caught:
                select(*arguments)
            assert reason in str(caught.value)


def test_differences_between_ranks_are_reported_once_per_host() -> None:
    first = replace(environment.look(Config(), platform.choose("auto")), host="n1", torch="2.11.0")
    other = replace(first, host="n2", torch="2.10.0", packages={**first.packages, "pyarrow": None})
    assert environment.differences([first, replace(first, host="n2")]) == []
    assert environment.differences([first, other, other]) == [
        "warning: torch on n2: 2.10.0; on n1: 2.11.0",
        f"warning: pyarrow on n2: None; on n1: {first.packages['pyarrow']}",
    ]
