"""Records as training writes them, for the tests of this folder."""

import json
import math
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_ext.config import LoggingConfig
from megatron_ext.monitoring.metrics import MetricsWriter

QUIET = LoggingConfig(tensorboard=False)


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    loss = 2.5 + 3.0 * math.exp(-step / 20) + 0.01 * (step % 3)
    consumed = {"step": step, "consumed_samples": 4 * (step + 1), "consumed_tokens": 4096 * (step + 1)}
    context = {"window": min(1024, 32 + 16 * step), "segments": 7, "effective_context": min(700.0, 30.0 + 15 * step)}
    training = {"learning_rate": 4e-4, "grad_norm": 0.5 + 4 * math.exp(-step / 5), "denominator": 4096.0, "skipped": 0}
    times = {"step_time_s": 0.5, "tokens_per_s": 8192.0, "data_wait_s": 0.01}
    memory = {"cp_bytes": 0, "peak_memory_bytes": 3 * 2**30}
    return {**consumed, "lm_loss": loss, "train_loss": loss, **context, **training, **times, **memory, **changes}


def weighting(step: int) -> dict[str, Any]:
    """The fields of a step with token weighting, beside the fields of every step."""
    weights = {"weight_std": 0.4 + 0.2 * math.exp(-step / 30), "weight_max": 8.0 + 20 * math.exp(-step / 20)}
    return weights | {"zero_share": 0.25, "score_mean": 0.05 + 0.3 * math.exp(-step / 40), "score_time_s": 0.125}


def write_passage_file(folder: Path, **changes: Any) -> Path:
    """The folder, with a `passage.json` as training writes it."""
    folder.mkdir(exist_ok=True)
    record = {"step": 7, "start": 4096, "tokens": [11, 12, 13, 14], "texts": ["the", " <b>", "\n", " & so"]}
    record |= {"weights": [0.75, 0.0, 1.5, 3.0], "scores": [0.0, 0.1, 0.2, 0.4]} | changes
    (folder / "passage.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def evaluation_record(step: int, loss: float, **changes: Any) -> dict[str, Any]:
    settings = {"step": step, "tokens": 8192, "document_mask": False, "stride": None}
    losses = {"valid_loss": loss, "valid_perplexity": math.exp(loss), "by_length": {"1024": loss}}
    return settings | losses | changes


def write_run(folder: Path, steps: int, *, first: int = 0, evaluate_every: int = 0, weighted: bool = False) -> Path:
    with closing(MetricsWriter(folder, resume_step=first, logging=QUIET, config={})) as writer:
        for step in range(first, steps):
            if evaluate_every and step % evaluate_every == 0:
                writer.write("validation", evaluation_record(step, 6.0 / (1 + step)))
            writer.write("train", step_record(step, **(weighting(step) if weighted else {})))
    return folder


def write_records(folder: Path, records: Iterable[dict[str, Any]], name: str = "metrics.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
