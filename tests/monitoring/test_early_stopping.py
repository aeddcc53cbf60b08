from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.config import Config, DataConfig, TrainingConfig
from megatron_ext.errors import UserError
from megatron_ext.monitoring import MetricsWriter
from megatron_ext.monitoring.early_stopping import EarlyStopping, early_stopping

from .records import QUIET, evaluation_record

DRAWN = [4.0, 3.5, 3.45, 3.6, 3.3]  # in the docstring


def patient(patience: int, **training: Any) -> Config:
    """A run whose validations read the 8,192 tokens that `evaluation_record` tells of."""
    options = {"eval_interval": 10, "eval_iters": 2, "early_stopping_patience": patience} | training
    return Config(training=TrainingConfig(**options), data=DataConfig(seq_length=512, global_batch_size=8))


def stops_at(losses: list[float | None], patience: int, delta: float) -> int | None:
    """The number of the loss after which a run stops."""
    counting = EarlyStopping(patience, delta)
    for number, loss in enumerate(losses):
        counting.note(number, loss)
        if counting.reason is not None:
            return number
    return None


def test_the_drawn_example() -> None:
    assert stops_at(DRAWN[:4], 2, 0.1) == 3
    assert stops_at(DRAWN, 3, 0.1) is None
    assert stops_at(DRAWN, 2, 0.0) is None
    assert stops_at(DRAWN, 1, 0.04) == 3
    assert stops_at([3.0] * 5, 2, 0.0) == 2  # an equal loss is no lower one
    assert stops_at([3.0, None, None, 3.0, 2.0], 1, 0.0) == 3  # validations without a trained token say nothing
    assert stops_at([3.0] * 50, 0, 0.0) is None


@given(
    losses=st.lists(st.floats(0, 10), max_size=12),
    patience=st.integers(1, 4),
    delta=st.sampled_from([0.0, 0.1, 1.0]),
    cut=st.integers(0, 12),
)
def test_a_resumed_count_is_the_count(losses: list[float], patience: int, delta: float, cut: int) -> None:
    records = list(enumerate(losses))
    resumed = EarlyStopping(patience, delta, records[:cut])
    for record in records[cut:]:
        resumed.note(*record)
    assert resumed.reason == EarlyStopping(patience, delta, records).reason


def test_what_the_folder_has_of_later_steps_is_left_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, resume_step=0, logging=QUIET) as writer:
        for step, loss in enumerate([2.0, 3.0, 3.0, 1.0]):
            writer.evaluation(evaluation_record(10 * step, loss))
    config = patient(2)
    said = early_stopping(config, tmp_path, 20).reason
    assert said == (
        "stopped early: the validation loss was lowest after 0 steps, 2.0000, and the 2 validations since were not "
        "lower by more than 0"
    )
    assert early_stopping(config, tmp_path, 10).reason is None
    assert early_stopping(config, tmp_path, 30).reason is None
    assert early_stopping(config, None, 20).reason is None
    assert early_stopping(patient(0), tmp_path, 20).reason is None
    assert early_stopping(config, tmp_path / "none", 20).reason is None


@pytest.mark.parametrize(
    "changed",
    [{"eval_document_mask": True}, {"eval_stride": 128}, {"eval_lengths": (64, 256)}, {"eval_iters": 4}],
)
def test_validations_of_another_kind_do_not_count(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Losses inside documents are higher than across them: two that fall must not look like two in vain."""
    kind = {"document_mask": False, "stride": None, "by_length": {"64": 9.0, "512": 2.4}}
    with MetricsWriter(tmp_path, resume_step=0, logging=QUIET) as writer:
        for step, loss in enumerate([2.4, 2.7, 2.6]):
            writer.evaluation(evaluation_record(10 * step, loss, **kind))
    assert early_stopping(patient(2), tmp_path, 20).reason is not None
    counting = early_stopping(patient(2, **changed), tmp_path, 20)
    counting.note(30, 2.7)
    assert counting.reason is None


@pytest.mark.parametrize(("line", "got"), [('{"step": 10}', "nothing"), ('{"step": 10, "valid_loss": "low"}', "low")])
def test_a_damaged_loss_is_named(tmp_path: Path, line: str, got: str) -> None:
    file = tmp_path / "evaluation.jsonl"
    file.write_text('{"step": 0, "valid_loss": null}\n' + line + "\n")
    config = patient(2)
    with pytest.raises(UserError) as caught:
        early_stopping(config, tmp_path, 20)
    assert str(caught.value).startswith(f"{file}: step 10 has valid_loss {got!r}, needs a number; restore the file")
    assert early_stopping(config, tmp_path, 0).reason is None  # what is later is not looked at
