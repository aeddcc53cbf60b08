"""Run lm-eval on the model in training, without an export, under the run's own parallel layout."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext import heartbeat
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine.optimizer import sync_params, unwrap
from megatron_ext.engine.step import Stepper
from megatron_ext.errors import UserError, missing_package
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.inference.generate import Generator
from megatron_ext.inference.model import InferenceModel


def load_tasks(config: Config) -> Any:
    """Load the tasks of a run with their data, once, as `lm_eval_model.Tasks`.

    Raises:
        UserError: lm-eval is not installed, or a task cannot be loaded.
    """
    if find_spec("lm_eval") is None:
        raise missing_package("lm_eval_tasks", "lm-eval[hf]")
    training = config.training
    assert config.data.tokenizer_model is not None  # config/checks.py
    return _load(
        config.data.tokenizer_model, training.lm_eval_tasks, training.lm_eval_lengths, training.lm_eval_include_path
    )


@cache
def _load(tokenizer: str, names: tuple[str, ...], lengths: tuple[int, ...], include_path: str | None) -> Any:
    from megatron_ext.inference.lm_eval_model import Tasks  # takes seconds to import

    folder = None
    if include_path is not None:
        folder = Path(include_path)
    return Tasks(names, Tokenizer(tokenizer), lengths, folder)


class LmEval:
    """Runs the tasks of `--lm-eval-tasks` on the model of a `stepper`; documents begin with `bos_id`, if any."""

    def __init__(self, config: Config, stepper: Stepper, vocab_size: int, bos_id: int | None) -> None:
        self.config = config
        self.stepper = stepper
        self.chunks = list(unwrap(stepper.model))
        assert config.data.tokenizer_model is not None  # config/checks.py
        tokenizer = Tokenizer(config.data.tokenizer_model)
        end = None
        end_tokens = frozenset[int]()
        with suppress(UserError):  # without an end token, answers end by their length and stop texts
            end = tokenizer.eod_id
            end_tokens = frozenset([end])
        model = Pretrained(
            Path(config.checkpoint.save or "."), replace(config.model, vocab_size=vocab_size), config.data.seq_length
        )
        self.text = ModelText(model, tokenizer, bos_id, end, end_tokens, None)
        self.model = InferenceModel(model, config, stepper.ranks, stepper.platform, self.chunks)

    def scores(self, step: int) -> dict[str, float]:
        """Evaluate after `step` steps; return the values by "task/metric" and perhaps "/length". Collective.

        Only process 0 gets them, others get {}. Weights and random states are unchanged.

        Raises:
            UserError: a task cannot be run.
        """
        from megatron_ext.inference.lm_eval_model import ask, results_of

        heartbeat.beat(f"lm-eval after {step} steps")
        training = self.config.training
        model = self.config.model
        base = None
        if model.rope_window_bases:
            base = model.rotary_base_at(self.config.window_schedule().window_at(max(step - 1, 0)))
        generator = Generator(self.model, self.text, training.lm_eval_batch_size, base)
        sync_params(self.stepper.model)
        for chunk in self.chunks:
            chunk.eval()
        # texts have any length: compiled layers would be compiled anew, and training's as well
        with _random_states_kept(self.stepper.platform.device), torch.compiler.set_stance("force_eager"):
            answers = ask(
                generator, partial(load_tasks, self.config), self.config.data.seq_length, limit=training.lm_eval_limit
            )
        for chunk in self.chunks:
            chunk.train()
        if answers is None:
            return {}
        return {
            "/".join(str(result[key]) for key in ("task", "metric", "length") if key in result): result["value"]
            for result in results_of(answers)
        }


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch, which lm-eval seeds."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    gpus = []
    if device.type == "cuda":
        gpus.append(torch.cuda.current_device())
    with torch.random.fork_rng(gpus):
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
