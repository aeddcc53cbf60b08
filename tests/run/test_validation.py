"""When a run validates, and when its validations stop it."""

from pathlib import Path

import pytest

from megatron_ext.config import CheckpointConfig, Config, TrainingConfig
from megatron_ext.config.stages import Stage
from megatron_ext.run import stages
from megatron_ext.run.validation import Validation, read_losses, read_validated, stop_reason


def test_validation_is_due_at_multiples_and_at_the_end() -> None:
    def due(interval: int) -> list[int]:
        config = Config(training=TrainingConfig(train_iters=7, eval_interval=interval))
        parts = dict.fromkeys(("stepper", "batches", "rows", "records", "lm_eval"))
        validation = Validation(config, **parts, setting="")  # type: ignore[arg-type]
        return [step for step in range(8) if validation.is_due(step)]

    assert due(3) == [0, 3, 6, 7]
    assert due(0) == []


def stops_at(losses: list[float | None], patience: int, delta: float) -> int | None:
    """The number of the loss after which a run stops."""
    training = TrainingConfig(early_stopping_patience=patience, early_stopping_delta=delta)
    stops = (n for n in range(len(losses)) if stop_reason(dict(enumerate(losses[: n + 1])), training) is not None)
    return next(stops, None)


def test_early_stopping_by_the_example_of_the_docstring() -> None:
    drawn = [4.0, 3.5, 3.45, 3.6, 3.3]
    assert stops_at(drawn[:4], 2, 0.1) == 3
    assert stops_at(drawn, 3, 0.1) is None
    assert stops_at(drawn, 2, 0.0) is None
    assert stops_at(drawn, 1, 0.04) == 3
    assert stops_at([3.0] * 5, 2, 0.0) == 2  # an equal loss is not an improvement
    assert stops_at([3.0, None, None, 3.0, 2.0], 1, 0.0) == 3  # validations without trained tokens are not counted
    assert stops_at([3.0] * 50, 0, 0.0) is None


def test_a_stage_that_stopped_early_has_ended_when_lm_eval_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = TrainingConfig(train_iters=9, eval_interval=2, early_stopping_patience=1, lm_eval_interval=3)
    stage = Stage("first", Config(training=training, checkpoint=CheckpointConfig(save=str(tmp_path))))
    lines = [f'{{"step": {step}, "valid_loss": 2.0}}\n' for step in (0, 2)]
    monkeypatch.setattr(stages, "_steps", lambda _: 2)
    for more, ended in ([], False), (['{"step": 2, "lm_eval": {"task/acc": 1.0}}\n'], True):
        (tmp_path / "evaluation.jsonl").write_text("".join(lines + more))
        assert stages._has_ended(stage) == ended


def test_only_losses_of_one_setting_are_compared(tmp_path: Path) -> None:
    """The losses read are of the running validations, or of the last ones of a run that has ended."""
    settings = ["a", "a", "b", "b"]
    lines = [f'{{"step": {n}, "valid_loss": {n}.0, "setting": "{name}"}}\n' for n, name in enumerate(settings)]
    (tmp_path / "evaluation.jsonl").write_text("".join(lines))
    assert read_losses(tmp_path, 3, "a") == {0: 0.0, 1: 1.0}
    assert read_losses(tmp_path, 3) == {2: 2.0, 3: 3.0}
    assert read_losses(tmp_path, 3, "c") == {}
    assert read_validated(tmp_path, 2) == {0, 1, 2}


def test_a_resumed_run_reads_the_validations_up_to_its_step(tmp_path: Path) -> None:
    assert read_losses(tmp_path, 20) == {}
    lines = [f'{{"step": {10 * n}, "valid_loss": {loss}}}\n' for n, loss in enumerate((2.0, 3.0, "null", 1.0))]
    (tmp_path / "evaluation.jsonl").write_text("".join(lines))
    assert read_losses(tmp_path, 20) == read_losses(tmp_path, 25) == {0: 2.0, 10: 3.0, 20: None}
    reason = stop_reason(read_losses(tmp_path, 10), TrainingConfig(early_stopping_patience=1))
    assert reason.startswith(
        "stopped early: the validation loss was lowest after 0 steps, 2.0000, and the 1 validations "
    )
