"""The start-up report: what it says is what is there, and ranks that differ are named."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
import torch
from launcher import Commands, call

from megatron_ext.attention.backends import BACKENDS
from megatron_ext.attention.choice import select
from megatron_ext.config import Config, TrainingConfig
from megatron_ext.engine import compat, environment, platform
from megatron_ext.errors import UserError


def look(config: Config | None = None) -> environment.Environment:
    compat.install_optimizer()
    return environment.look(config or Config(), platform.choose("auto"))


def test_versions_are_those_of_the_packages() -> None:
    found = look()
    assert found.torch == torch.__version__
    assert found.megatron_core == importlib.metadata.version("megatron-core")
    text = "\n".join(found.summary())
    assert f"torch {torch.__version__}" in text
    assert dict(found.packages)["pyarrow"] == importlib.metadata.version("pyarrow")
    listed = "\n".join(found.optional())
    for name, version in found.packages:
        assert f"{name} {version or 'is not installed'}: " in listed


def test_transformer_engine_of_another_time_is_named() -> None:
    assert environment._engine("2.11.0+4df84889") == "Transformer Engine"
    assert environment._engine("2.12.0") == "Transformer Engine 2.12.0 (megatron-core asks for <2.12.0,>=2.9.0a0)"


@pytest.mark.parametrize("bf16", [False, True])
def test_a_backend_can_serve_exactly_where_the_run_would_take_it(bf16: bool) -> None:
    config = Config(training=TrainingConfig(bf16=bf16))
    found, where = look(config), platform.choose("auto")
    assert [name for name, _ in found.backends] == [backend.name for backend in BACKENDS]
    text = "\n".join(found.summary())
    for name, reason in found.backends:
        arguments = (name, where.device, torch.bfloat16 if bf16 else torch.float32, config.model.head_size)
        if reason is None:
            select(*arguments)
        else:
            assert f"  {name} cannot: it {reason}" in text
            with pytest.raises(UserError, match="cannot serve") as caught:
                select(*arguments)
            assert reason in str(caught.value)


def test_ranks_that_differ_are_named_once_per_host() -> None:
    first = replace(look(), host="n1", torch="2.11.0")
    packages = tuple((name, None if name == "pyarrow" else found) for name, found in first.packages)
    other = replace(first, host="n2", torch="2.10.0", packages=packages)
    assert environment.differences([first, replace(first, host="n2")]) == []
    assert environment.differences([first, other, other]) == [
        "warning: torch on n2: 2.10.0; on n1: 2.11.0",
        f"warning: pyarrow on n2: is not installed; on n1: {dict(first.packages)['pyarrow']}",
    ]


def report(rank: int) -> list[str]:
    compat.install_optimizer()
    return environment.report(Config(), platform.choose("auto"), 2)


def test_every_rank_reports_what_rank_0_found() -> None:
    summary = look().summary()
    assert call(report, 2) == [summary, summary]


def test_the_command_says_it(alone: Commands) -> None:
    alone.run("tools/environment.py", "--config", "examples/configs/cpu_smoke.yaml")
    (refused,) = alone.attempt("tools/environment.py", "--bff")
    assert (refused.status, refused.stderr) == (
        2,
        "error: --bff: no such flag; did you mean --bf16?; --help lists all\n",
    )
