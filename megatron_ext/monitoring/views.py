"""Send the metrics of a run to TensorBoard, W&B and MLflow.

All views get the same numbers under the same names: `train/<key>` and `validation/<key>`. A name can contain a
dataset's name, which is arbitrary text (`train/source_rows/<source>`); it is changed if MLflow would not accept it.
"""

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.config import LoggingConfig
from megatron_ext.errors import missing_package

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE, MLFLOW_ID_FILE = "wandb_id.txt", "mlflow_id.txt"


class View(Protocol):
    """Logs the numbers of each record under their full names, NaN and infinity included."""

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_views(folder: Path, logging: LoggingConfig, config: dict[str, Any] | None, resume_step: int) -> list[View]:
    """Open the requested views; a resumed run continues in the same TensorBoard, W&B or MLflow run.

    TensorBoard hides older events from `resume_step`, the number of completed steps, on.

    Raises:
        UserError: the package of one is missing.
    """
    views: list[View] = []
    if logging.wandb_project is not None:
        views.append(Wandb(folder, logging.wandb_project, logging.wandb_exp_name, config, resume_step))
    if logging.mlflow_experiment is not None:
        views.append(Mlflow(folder, logging.mlflow_experiment, logging.wandb_exp_name, config, resume_step))
    if logging.tensorboard:
        views.append(TensorBoard(folder, config, resume_step))
    return views


def _package(field: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing_package(field, name) from None


def _known_run(id_file: Path, resume_step: int) -> str | None:
    return id_file.read_text().strip() if resume_step > 0 and id_file.exists() else None


class TensorBoard:
    """Writes event files to RUN/tensorboard."""

    def __init__(self, folder: Path, config: dict[str, Any] | None, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

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
    """Logs to a Weights & Biases run; its id is kept in RUN/wandb_id.txt."""

    def __init__(
        self, folder: Path, project: str, name: str | None, config: dict[str, Any] | None, resume_step: int
    ) -> None:
        wandb, id_file = _package("wandb_project", "wandb"), folder / WANDB_ID_FILE
        known = _known_run(id_file, resume_step)
        resume = "allow" if known else None
        self._run = wandb.init(project=project, name=name, config=config, dir=str(folder), id=known, resume=resume)
        id_file.write_text(self._run.id + "\n")
        for group in ("train", "validation"):  # our step as the axis: W&B's own refuses to go back after a resume
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars) | {f"{group}/step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Logs to an MLflow run; its id is kept in RUN/mlflow_id.txt. MLflow reads MLFLOW_TRACKING_URI itself."""

    def __init__(
        self, folder: Path, experiment: str, name: str | None, config: dict[str, Any] | None, resume_step: int
    ) -> None:
        self._mlflow, id_file = _package("mlflow_experiment", "mlflow"), folder / MLFLOW_ID_FILE
        known = _known_run(id_file, resume_step)
        self._mlflow.set_experiment(experiment)
        run = self._mlflow.start_run(run_id=known, run_name=name)
        id_file.write_text(run.info.run_id + "\n")
        if config is not None and known is None:
            self._mlflow.log_dict(config, "config.yaml")

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({mlflow_name(name): value for name, value in scalars.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits, `_-. :` and slashes; no part empty, `.` or `..`."""
    parts = [re.sub(r"[^a-zA-Z0-9_\-. :]", "_", part) for part in name.split("/")]
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:250]
