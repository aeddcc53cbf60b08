"""Records as training writes them, for the tests of this folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megatron_ext.config import LoggingConfig
from megatron_ext.monitoring import MetricsWriter

QUIET = LoggingConfig(tensorboard=False)


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    loss = 2.5 + 3.0 * math.exp(-step / 20) + 0.01 * (step % 3)
    return {
        "step": step,
        "consumed_samples": 4 * (step + 1),
        "consumed_tokens": 4096 * (step + 1),
        "lm_loss": loss,
        "train_loss": loss,
        "window": min(1024, 32 + 16 * step),
        "segments": 7,
        "effective_context": min(700.0, 30.0 + 15 * step),
        "learning_rate": 4e-4,
        "grad_norm": 0.5 + 4 * math.exp(-step / 5),
        "denominator": 4096.0,
        "step_time_s": 0.5,
        "tokens_per_s": 8192.0,
        "cp_bytes": 0,
        "peak_memory_bytes": 3 * 2**30,
        "skipped": 0,
        "data_wait_s": 0.01,
    } | changes


def weighting(step: int) -> dict[str, Any]:
    """The fields of a step with token weighting, beside those of every step."""
    return {
        "weight_std": 0.4 + 0.2 * math.exp(-step / 30),
        "weight_max": 8.0 + 20 * math.exp(-step / 20),
        "zero_share": 0.25,
        "score_mean": 0.05 + 0.3 * math.exp(-step / 40),
        "score_time_s": 0.125,
    }


def passage_record(**changes: Any) -> dict[str, Any]:
    return {
        "step": 7,
        "start": 4096,
        "tokens": [11, 12, 13, 14],
        "texts": ["the", " <b>", "\n", " & so"],
        "weights": [0.75, 0.0, 1.5, 3.0],
        "scores": [0.0, 0.1, 0.2, 0.4],
    } | changes


def write_passage_file(folder: Path, **changes: Any) -> Path:
    """The folder, with a `passage.json` as training writes it."""
    folder.mkdir(exist_ok=True)
    (folder / "passage.json").write_text(json.dumps(passage_record(**changes)), encoding="utf-8")
    return folder


def evaluation_record(step: int, loss: float, **changes: Any) -> dict[str, Any]:
    return {"step": step, "valid_loss": loss, "valid_perplexity": math.exp(loss), "tokens": 8192} | changes


def write_run(folder: Path, steps: int, *, first: int = 0, evaluate_every: int = 0, weighted: bool = False) -> Path:
    """A run folder as training leaves it, TensorBoard aside."""
    with MetricsWriter(folder, resume_step=first, logging=QUIET) as writer:
        for step in range(first, steps):
            if evaluate_every and step % evaluate_every == 0:
                writer.evaluation(evaluation_record(step, 6.0 / (1 + step)))
            writer.step(step_record(step, **(weighting(step) if weighted else {})))
    return folder


def perplexity_record(models: dict[str, float], tokens: int = 900) -> dict[str, Any]:
    """What `tools/evaluate.py perplexity` writes for models with these losses."""

    def lengths(loss: float) -> dict[str, Any]:
        return {
            str(length): {
                "stride": length // 2,
                "loss": loss + 8 / length,
                "perplexity": math.exp(loss + 8 / length),
                "tokens": tokens,
                "documents": 3,
                "by_source": {"books": {"loss": loss, "tokens": tokens}},
                "by_position": {"1": loss + 1, "2": loss},
                "beyond_trained_length": length > 512,
            }
            for length in (256, 1024)
        }

    first, *others = models
    interval = {"value": -0.1, "low": -0.15, "high": -0.05}
    return {
        "document_mask": True,
        "models": {
            name: {"folder": f"runs/{name}", "trained_length": 512, "lengths": lengths(loss)}
            for name, loss in models.items()
        },
        "comparisons": [{"first": first, "second": other, "window": 1024, "loss": interval} for other in others],
    }


def recall_record(models: dict[str, float]) -> dict[str, Any]:
    """What `tools/evaluate.py recall` writes for models with these scores."""
    first, *others = models
    return {
        "samples": 10,
        "seed": 42,
        "models": {
            name: {
                "folder": name,
                "trained_length": 512,
                "lengths": {"512": {"mean": score, "tasks": {"niah_single_1": {"score": score, "samples": 10}}}},
            }
            for name, score in models.items()
        },
        "comparisons": [
            {
                "first": first,
                "second": other,
                "length": 512,
                "task": "all",
                "score": {"value": 0.5, "low": 0.25, "high": 0.75},
                "mcnemar": {"only_first": 1, "only_second": 6, "p_value": 0.125},
            }
            for other in others
        ],
    }


def write_evaluation(folder: Path, kind: str, record: dict[str, Any]) -> Path:
    """The folder, with the JSON that a command of `tools/evaluate.py` leaves in --output."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{kind}.json").write_text(json.dumps(record))
    return folder
