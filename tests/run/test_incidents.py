"""Which losses are spikes; and the state of a resumed run: the losses before, and the number of skipped steps."""

import json
import math
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_records import RESULT, TERMS, finished, records

from megatron_ext.config import Config, TrainingConfig
from megatron_ext.engine.step import StepResult
from megatron_ext.errors import DivergedError
from megatron_ext.run.callbacks import Incidents, spike_bound

OPTIONS = TrainingConfig(on_non_finite="skip", skip_limit=3, spike_window=2, train_iters=20)
BAD = replace(TERMS, loss_sum=math.nan, weighted_sum=math.nan)
NOTHING = replace(TERMS, loss_sum=0.0, weighted_sum=0.0, token_count=0.0)
STEPS: dict[str, StepResult] = {
    "well": RESULT,
    "refused": replace(RESULT, terms=BAD, skipped=True, refused=True),
    "without tokens": replace(RESULT, terms=NOTHING, denominator=0.0, skipped=True),
}
LOSSES = [3.0, 2.5, 2.75, 2.25]


def ended_at(folder: Path, kinds: list[str], interrupted: int | None) -> int | None:
    """The step that ends a run of such steps, which is restarted before step `interrupted`; None: no step."""
    incidents = None
    for step, kind in enumerate(kinds):
        if incidents is None or step == interrupted:
            written = records(folder, step, training=OPTIONS)
            state = json.loads(json.dumps(incidents.state_dict())) if incidents is not None else {}
            incidents = Incidents(Config(training=OPTIONS), written, state)
        try:
            incidents.after_step(replace(finished(step), result=STEPS[kind]))
        except DivergedError:
            return step
    return None


@pytest.mark.parametrize(
    ("kinds", "end"),
    [
        (["well", "refused", "refused", "refused", "well"], 3),
        (["refused", "refused", "well", "refused", "refused", "refused"], 5),
        (["refused", "refused", "without tokens", "refused", "refused", "well"], None),
        (["refused", "refused", "refused"], 2),
    ],
)
def test_a_resumed_run_counts_the_steps_that_were_skipped_before(
    tmp_path: Path, kinds: list[str], end: int | None
) -> None:
    """Wherever it is interrupted, it ends at the same step."""
    assert ended_at(tmp_path / "whole", kinds, None) == end
    for step in range(1, len(kinds)):
        assert ended_at(tmp_path / str(step), kinds, step) == end, step


def test_only_losses_of_trained_steps_are_kept(tmp_path: Path) -> None:
    incidents = Incidents(Config(training=OPTIONS), records(tmp_path, training=OPTIONS), {})
    for step, kind in enumerate(["well", "without tokens", "refused"]):
        incidents.after_step(replace(finished(step), result=STEPS[kind]))
    assert incidents.state_dict() == {"loss_history": [2.0], "skips": 1}


def test_the_bound_is_the_mean_plus_deviations_of_the_last_window() -> None:
    assert spike_bound(LOSSES[:2], 3, 2.0) is None
    assert spike_bound([], 0, 7.0) is None
    assert spike_bound(LOSSES[1:], 3, 2.0) == pytest.approx(np.mean(LOSSES[1:]) + 2 * np.std(LOSSES[1:]))
    assert 2.0 * (1 + 1e-7) < spike_bound([2.0] * 4, 4, 7.0) < 2.001  # room for rounding


def test_a_loss_that_stays_high_is_a_spike_once() -> None:
    losses, spikes = deque([1.0, 1.1] * 4, 8), 0
    for _ in range(20):
        spikes += spike_bound(losses, 8, 4.0) < 5.0
        losses.append(5.0)
    assert spikes == 1
