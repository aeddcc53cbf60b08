from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_ext.config import Config, DataConfig, TrainingConfig
from megatron_ext.monitoring import MetricsWriter
from megatron_ext.monitoring.early_stopping import EarlyStopping, early_stopping

from .records import QUIET, evaluation_record

DRAWN = [4.0, 3.5, 3.45, 3.6, 3.3]  # in the docstring


def configured(patience: int, **training: Any) -> Config:
    """A run whose validations read the 8,192 tokens of `evaluation_record`."""
    options = {"eval_interval": 10, "eval_iters": 2, "early_stopping_patience": patience} | training
    return Config(training=TrainingConfig(**options), data=DataConfig(seq_length=512, global_batch_size=8))


def stops_at(losses: list[float | None], patience: int, delta: float) -> int | None:
    """The number of the loss after which a run stops."""
    counted = EarlyStopping(patience, delta)
    for number, loss in enumerate(losses):
        counted.note(number, loss)
        if counted.reason is not None:
            return number
    return None


def test_the_example_of_the_docstring() -> None:
    assert stops_at(DRAWN[:4], 2, 0.1) == 3
    assert stops_at(DRAWN, 3, 0.1) is None
    assert stops_at(DRAWN, 2, 0.0) is None
    assert stops_at(DRAWN, 1, 0.04) == 3
    assert stops_at([3.0] * 5, 2, 0.0) == 2  # an equal loss is not an improvement
    assert stops_at([3.0, None, None, 3.0, 2.0], 1, 0.0) == 3  # validations without trained tokens are not counted
    assert stops_at([3.0] * 50, 0, 0.0) is None


def test_a_resumed_run_counts_the_validations_up_to_its_step(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, resume_step=0, logging=QUIET)) as writer:
        for step, loss in enumerate([2.0, 3.0, 3.0, 1.0]):
            writer.evaluation(evaluation_record(10 * step, loss, by_length={"512": loss}))
    config = configured(2)
    assert early_stopping(config, tmp_path, 20).reason == (
        "stopped early: the validation loss was lowest after 0 steps, 2.0000, and the 2 validations since were not "
        "lower by more than 0"
    )
    assert early_stopping(config, tmp_path, 10).reason is None
    assert early_stopping(config, tmp_path, 30).reason is None
    assert early_stopping(config, None, 20).reason is None
    assert early_stopping(configured(0), tmp_path, 20).reason is None
    assert [early_stopping(config, tmp_path, step).step for step in (15, 20)] == [10, 20]
