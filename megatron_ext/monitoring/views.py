"""Where a run's records are shown beside its JSON lines: TensorBoard, W&B, MLflow, a text file for Prometheus.

All views get the same numbers under the same names: `train/<key>` and `validation/<key>`. A data set's own name, which
is any text, can be a part of them (`train/source_rows/<source>`): a view that takes less spells it in its own way.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.config import LoggingConfig
from megatron_ext.errors import UserError
from megatron_ext.files.aside import file_aside

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE, MLFLOW_ID_FILE = "wandb_id.txt", "mlflow_id.txt"
PROMETHEUS_FILE = "metrics.prom"
SOURCE_ROWS = "source_rows"  # the metric whose keys are names of data sets
_MLFLOW_LENGTH = 250


class View(Protocol):
    """Shows numbers as they come."""

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        """Show the numbers of one record, with their whole names; not finite ones too."""

    def close(self) -> None:
        """Write what is left."""


def check_views(logging: LoggingConfig) -> None:
    """Refuse a view whose package is missing.

    Raises:
        UserError: which one.
    """
    for field, package in (("wandb_project", "wandb"), ("mlflow_experiment", "mlflow")):
        if getattr(logging, field) is not None:
            try:
                importlib.import_module(package)
            except ImportError:
                raise UserError(
                    f"{field} is set but the package {package} is not installed: pip install {package}, or unset it"
                ) from None


def open_views(folder: Path, logging: LoggingConfig, config: dict[str, Any] | None, resume_step: int) -> list[View]:
    """Open the views that are asked for; a resumed run goes on in those it began.

    Args:
        folder: of the run.
        logging: asks for views.
        config: shown beside the curves.
        resume_step: completed steps; what a view shows from there on is replaced, where it can forget.
    """
    views: list[View] = []
    if logging.tensorboard:
        views.append(TensorBoard(folder, config, resume_step))
    if logging.wandb_project is not None:
        views.append(Wandb(folder, logging.wandb_project, logging.wandb_exp_name, config, resume_step))
    if logging.mlflow_experiment is not None:
        views.append(Mlflow(folder, logging.mlflow_experiment, logging.wandb_exp_name, config, resume_step))
    if logging.prometheus:
        views.append(Prometheus(folder))
    return views


class TensorBoard:
    """Writes events under RUN/tensorboard."""

    def __init__(self, folder: Path, config: dict[str, Any] | None, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, so only where it is used

        self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=resume_step, flush_secs=10)
        if config is not None:
            text = json.dumps(config, indent=2, default=str)
            self._writer.add_text("configuration", "\n".join("    " + line for line in text.splitlines()), resume_step)

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        if group == "validation":
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Logs to a Weights & Biases run, whose id RUN/wandb_id.txt keeps."""

    def __init__(
        self, folder: Path, project: str, name: str | None, config: dict[str, Any] | None, resume_step: int
    ) -> None:
        wandb = importlib.import_module("wandb")
        id_file = folder / WANDB_ID_FILE
        known = id_file.read_text().strip() if resume_step > 0 and id_file.exists() else None
        resume = "allow" if known else None
        self._run = wandb.init(project=project, name=name, config=config, dir=str(folder), id=known, resume=resume)
        id_file.write_text(self._run.id + "\n")
        for group in ("train", "validation"):  # our own step as the axis: W&B's refuses to go back after a resume
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars) | {f"{group}/step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Logs to an MLflow run, whose id RUN/mlflow_id.txt keeps; MLflow itself reads MLFLOW_TRACKING_URI."""

    def __init__(
        self, folder: Path, experiment: str, name: str | None, config: dict[str, Any] | None, resume_step: int
    ) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._names: dict[str, str] = {}  # as MLflow has it, by ours
        id_file = folder / MLFLOW_ID_FILE
        known = id_file.read_text().strip() if resume_step > 0 and id_file.exists() else None
        self._mlflow.set_experiment(experiment)
        run = self._mlflow.start_run(run_id=known, run_name=name)
        id_file.write_text(run.info.run_id + "\n")
        if config is not None and known is None:
            self._mlflow.log_dict(config, "config.yaml")

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({self._name(name): value for name, value in scalars.items()}, step=step)

    def _name(self, name: str) -> str:
        """Spell a name as MLflow takes it: a relative path of some characters, none of its parts empty or . or ..

        What is changed ends in a digest of the name, so that no two become one, in a resumed run neither.
        """
        if name not in self._names:
            parts = [re.sub(r"[^a-zA-Z0-9_\-. :]", "_", part) for part in name.split("/")]
            spelled = "/".join("_" if part in ("", ".", "..") else part for part in parts)[:_MLFLOW_LENGTH]
            if spelled != name:
                digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
                spelled = f"{spelled[: _MLFLOW_LENGTH - 9]}-{digest}"
            self._names[name] = spelled
        return self._names[name]

    def close(self) -> None:
        self._mlflow.end_run()


class Prometheus:
    """Keeps RUN/metrics.prom: the newest numbers in the text format of Prometheus.

    node_exporter's textfile collector reads it: point its folder here, or link the file there. The numbers of a mixture
    are one metric with the source as a label: `megatron_ext_train_source_rows{run="a",source="books (1)"}`.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._run = folder / PROMETHEUS_FILE, folder.resolve().name
        self._newest: dict[str, float] = {}

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        self._newest |= dict(scalars) | {f"{group}/step": float(step)}
        metrics: dict[str, list[str]] = {}  # a metric's lines stand together
        for name, value in self._newest.items():
            labels, (key, source) = f'run="{_label(self._run)}"', _without_source(name)
            if source is not None:
                labels += f',source="{_label(source)}"'
            metric = "megatron_ext_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            number = repr(value) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
            metrics.setdefault(metric, [f"# TYPE {metric} gauge"]).append(f"{metric}{{{labels}}} {number}")
        lines = [line for of_metric in metrics.values() for line in of_metric]
        with file_aside(self._file, durable=False) as aside:
            aside.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Keep the file: the last numbers of a run are still its last ones."""


def _without_source(name: str) -> tuple[str, str | None]:
    """Split the name of a data set from that of the metric it is a part of; None where there is none."""
    group, key, *rest = name.split("/", maxsplit=2)
    return (f"{group}/{key}", rest[0]) if key == SOURCE_ROWS and rest else (name, None)


def _label(text: str) -> str:
    """Escape a value of a label, as Prometheus does."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
