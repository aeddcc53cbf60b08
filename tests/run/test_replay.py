"""What a replay changes of a run's configuration leaves one that a run accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.validation import mistakes
from megatron_ext.errors import UserError
from megatron_ext.run.replay import configuration

BASE = "--data-path x --vocab-size 64 --train-iters 9"


@pytest.mark.parametrize(
    "flags",
    [
        "--qk-clip-threshold 9 --attention-health-interval 2",
        "--valid-data-path y --eval-interval 3",
        "--wandb-project a --mlflow-experiment b",
    ],
)
def test_a_run_that_is_accepted_can_be_replayed(flags: str, tmp_path: Path) -> None:
    run = parse(f"{BASE} --save {tmp_path} {flags}".split())
    assert not list(mistakes(run, 1))
    replayed, checkpoint = configuration(tmp_path, 4, run)
    assert checkpoint is None
    assert not list(mistakes(replayed, 1))
    assert replayed.checkpoint.save is None
    # what decides the weights stays
    assert replayed.optimizer == run.optimizer
    assert replayed.logging.attention_health_interval == run.logging.attention_health_interval
    assert replayed.logging.wandb_project is None


def test_a_step_beyond_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step: got 9, needs one of the 9 steps"):
        configuration(tmp_path, 9, parse(BASE.split()))
