"""Compute the short-context losses of a run's rows with a frozen scorer, once, and store them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from megatron_ext.batch import lay_end_to_end
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.data.rows.identity import row_identity
from megatron_ext.data.text.metadata import bos_of
from megatron_ext.engine import parallel
from megatron_ext.engine.optimizer import in_precision
from megatron_ext.engine.pipeline import Pipeline
from megatron_ext.errors import UserError
from megatron_ext.run.batches import context_options, division
from megatron_ext.run.inference import InferenceModel, open_model
from megatron_ext.run.rows import RowAt, open_rows
from megatron_ext.short_context import ShortContext
from megatron_ext.token_weighting.short_pass import short_pass
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from megatron_ext.token_weighting.weigher import short_losses

logger = logging.getLogger(__name__)


def score_rows(
    config: Config,
    vocab_size: int,
    scorer: Pretrained,
    short: ShortContext,
    end: int,
    output: Path,
    part: slice = slice(None),
) -> None:
    """Score the samples of a run up to `end` that are not in the store yet.

    Args:
        config, vocab_size: the training run's; its data determines the rows, its parallel section the scorer's layout.
        scorer: the model.
        short: the chunks; every token is scored.
        end: exclusive end of the samples.
        output: the store; created if missing.
        part: the part of the samples to score; other parts may be scored into the same store at the same time.

    Raises:
        UserError: a scorer with fewer token ids, or data or a store that do not fit.
    """
    size = scorer.model.vocab_size
    if size is None or size < vocab_size:
        raise UserError(
            f"checkpoint: {scorer.folder} knows {size} token ids, needs at least the {vocab_size} of the data; "
            "give a scorer of the same vocabulary"
        )
    row_at = open_rows(replace(config, training=replace(config.training, eval_interval=0)), vocab_size).train
    identity = StoreIdentity(
        rows=end,
        short_context=short.length,
        short_stride=short.stride,
        model=scorer.fingerprint(),
        **row_identity(config, vocab_size),  # type: ignore[arg-type]
    )
    processes = config.parallel
    if scorer.model.num_experts is None:
        processes = replace(processes, expert_model_parallel_size=1, moe_grouped_gemm=False)
    with open_model(scorer, processes, short.length, "bfloat16" if config.training.bf16 else "float32") as model:
        store = ScoreStore.create_or_resume(output, identity)
        _Work(model, config, short).run(row_at, store, range(config.data.first_sample, end)[part])
    dist.destroy_process_group()


class _Work:
    """One process's part of the scoring."""

    def __init__(self, model: InferenceModel, run: Config, short: ShortContext) -> None:
        self.model, self.ranks, self.short, self.data = model, model.ranks, short, run.data
        self.mask_options = replace(model.config.mask_options(), document_mask=run.window.document_mask)
        self.pipeline = Pipeline([in_precision(chunk, model.config) for chunk in model.chunks])
        self.group = parallel.context_group(model.config.parallel, model.ranks, model.platform)
        self.context = context_options(model.config, model.ranks, self.group)
        self.bos_id = bos_of(part.prefix for part in run.data.parts)
        self.division = division(model.config, model.ranks, run.data.micro_batch_size * run.data.seq_length)

    def run(self, row_at: RowAt, store: ScoreStore, wanted: range) -> None:
        """Score this data-parallel rank's share of the wanted rows that are missing."""
        missing = parallel.run_on_rank0(self.ranks, lambda: store.missing(wanted), store.path, reads=True)
        mine = missing[self.ranks.data :: self.ranks.data_size]
        at_once = self.data.micro_batch_size * self.ranks.pipeline_size  # keeps the pipeline stages busy
        logger.info("%d of %d rows to score, into %s", len(missing), len(wanted), store.path)
        with tqdm(total=len(mine), unit="row", disable=self.ranks.world != 0) as bar:
            for first in range(0, len(mine), at_once):
                samples = mine[first : first + at_once]
                losses = self._losses(row_at, samples)
                if losses is not None and self.ranks.reports_loss and self.ranks.context == 0:
                    for sample, row in zip(samples, losses, strict=True):
                        store.write(sample, row)
                bar.update(len(samples))

    def _losses(self, row_at: RowAt, samples: Sequence[int]) -> Sequence[np.ndarray] | None:
        """Compute float32 [L] of each sample; None except on the last stage."""
        rows, length, device = [row_at(sample) for sample in samples], self.data.seq_length, self.model.platform.device
        masks = self.mask_options.at(length, [row.document_ends for row in rows], length)
        tokens = [lay_end_to_end(rows)]
        work = short_pass(tokens, [masks], self.short, self.division, self.context, bos_id=self.bos_id)
        batches = [batch.to(device) for batch in work.batches]
        losses = self.pipeline.token_losses(batches)
        if not self.ranks.last_stage:
            return None
        whole = short_losses(self.group, batches, losses, length * len(rows), device)
        return list(whole.view(len(rows), length).cpu().numpy())
