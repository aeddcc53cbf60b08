"""MLflow gets the same metrics as TensorBoard."""

import posixpath
import re
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.config import LoggingConfig
from megatron_ext.monitoring.metrics import MetricsWriter

from .records import evaluation_record, step_record


class FakeMlflow(SimpleNamespace):
    """MLflow's own functions, as far as they are called, by their documented names."""

    def __init__(self) -> None:
        super().__init__(runs=[], metrics=[], artifacts=[], ended=0)

    def set_experiment(self, experiment_name: str) -> None:
        self.experiment = experiment_name

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> SimpleNamespace:
        self.runs.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "new"))

    def log_dict(self, dictionary: dict[str, object], artifact_file: str) -> None:
        self.artifacts.append(artifact_file)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name in metrics:  # mlflow.utils.validation
            assert re.fullmatch(r"[\w\- :][/\w.\- :]{,249}", name), name
            assert posixpath.normpath(name) == name, name
        self.metrics.append((step, metrics))

    def end_run(self) -> None:
        self.ended += 1


SOURCES = {"corpus (1)": 1, "../a//b": 2, "/": 3, "books": 4, "x" * 300: 5, "π": 6}


def test_a_resumed_run_goes_on_in_the_same_mlflow_run_with_names_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    logging = LoggingConfig(tensorboard=False, mlflow_experiment="windows")
    for first in (0, 2):
        with closing(MetricsWriter(tmp_path, resume_step=first, logging=logging, config={"a": {"b": 1}})) as writer:
            writer.write("train", step_record(first, source_rows=SOURCES))
            writer.write("validation", evaluation_record(first + 1, 3.0, by_length={64: 3.5}))
    assert (mlflow.experiment, mlflow.runs, mlflow.ended) == ("windows", [None, "new"], 2)
    assert mlflow.artifacts == ["config.yaml"]
    steps = [step for step, _ in mlflow.metrics]
    assert steps == [0, 1, 2, 3]
    assert mlflow.metrics[0][1]["train/lm_loss"] == step_record(0)["lm_loss"]
    assert mlflow.metrics[1][1]["validation/by_length/64"] == 3.5
    shown = {name: value for name, value in mlflow.metrics[0][1].items() if name.startswith("train/source_rows/")}
    assert sorted(shown.values()) == sorted(SOURCES.values())
    assert shown["train/source_rows/books"] == 4
    assert shown["train/source_rows/corpus _1_"] == 1
