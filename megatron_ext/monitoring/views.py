"""Send the numbers of a run to TensorBoard and W&B, the views.

All views get the same numbers under the same names: `train/<key>` and `validation/<key>`. A view never ends training:
one that fails gets nothing more, after one warning.
"""

import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.config import LoggingConfig
from megatron_ext.errors import UserError, first_line, optional_module
from megatron_ext.files.reading import JsonObject

logger = logging.getLogger(__name__)

# how long training waits for W&B's server, unless its environment variables say otherwise
_PATIENCE_S = {"init_timeout": 30.0, "finish_timeout": 30.0}


def check_views(options: LoggingConfig) -> None:
    """Raise UserError if a view is not installed, or W&B has no login."""
    if options.tensorboard:
        optional_module("tensorboard", "torch.utils.tensorboard", "tensorboard")
    if options.wandb_project is None:
        return
    wandb = optional_module("wandb_project", "wandb")
    if "prompt" not in inspect.signature(wandb.login).parameters:
        raise UserError(f"wandb_project: got wandb {wandb.__version__}, needs 0.30 or later; pip install -U wandb")
    reason = "there is none"
    is_ready = False
    try:
        is_ready = wandb.setup().settings.mode not in ("online", "shared") or wandb.login(prompt=False, verify=False)
    except Exception as error:  # any kind, such as for a malformed key
        reason = first_line(error)
    if not is_ready:
        raise UserError(
            f"wandb_project: got {options.wandb_project}, needs a login to W&B ({reason}); `wandb login` asks for it, "
            "WANDB_API_KEY gives it, WANDB_MODE=offline does without"
        )


class Views:
    """The views that `options` select. Some show the `config`; a resumed run replaces steps from `resume_step` on."""

    def __init__(self, folder: Path, options: LoggingConfig, config: JsonObject, resume_step: int) -> None:
        self._open: dict[str, Wandb | TensorBoard] = {}
        if options.wandb_project is not None:
            with self._unless_it_fails("W&B"):
                self._open["W&B"] = Wandb(folder, options, config, resume_step)
        if options.tensorboard:
            with self._unless_it_fails("TensorBoard"):
                self._open["TensorBoard"] = TensorBoard(folder, config, resume_step)

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        """Show the numbers of a step ("train"), or of an evaluation ("validation")."""
        for name, view in list(self._open.items()):
            with self._unless_it_fails(name):
                view.show(group, step, scalars)

    def close(self) -> None:
        for name, view in list(self._open.items()):
            with self._unless_it_fails(name):
                view.close()

    @contextmanager
    def _unless_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {first_line(error)}"
            logger.warning("warning: %s has failed (%s); training goes on without it", name, reason)


class TensorBoard:
    """Writes event files to RUN/tensorboard."""

    def __init__(self, folder: Path, config: JsonObject, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step, flush_secs=10)
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
    """Logs to a Weights & Biases run, whose id is kept in RUN/wandb_id.txt; without a connection, to RUN/wandb."""

    def __init__(self, folder: Path, options: LoggingConfig, config: JsonObject, resume_step: int) -> None:
        import wandb

        id_file = folder / "wandb_id.txt"
        resumption: JsonObject = {}
        if resume_step > 0 and id_file.exists():
            resumption = {"id": id_file.read_text().strip(), "resume": "allow"}
        patience: JsonObject = {
            name: value for name, value in _PATIENCE_S.items() if f"WANDB_{name.upper()}" not in os.environ
        }
        arguments: JsonObject = {
            "project": options.wandb_project,
            "name": options.wandb_exp_name,
            "config": config,
            "dir": str(folder),
            "settings": wandb.Settings(**patience),
            **resumption,
        }
        try:
            self._run = wandb.init(**arguments)
        except wandb.Error as error:
            logger.warning(
                "warning: W&B cannot be reached (%s); the run is recorded in %s/wandb, and `wandb sync` uploads it",
                first_line(error),
                folder,
            )
            self._run = wandb.init(**arguments, mode="offline")
        id_file.write_text(self._run.id + "\n")
        for group in ("train", "validation"):  # our step as the axis: W&B's own refuses to go back after a resume
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def show(self, group: str, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars) | {f"{group}/step": step})

    def close(self) -> None:
        self._run.finish()
