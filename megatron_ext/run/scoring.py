"""Compute the short-context losses of a run's rows with a frozen scorer, once, and store them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from megatron_ext.batch import PackedBatch, context_options, lay_end_to_end
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.data.rows.identity import bos_of, row_identity
from megatron_ext.engine import parallel
from megatron_ext.engine.optimizer import in_precision
from megatron_ext.engine.step import Pipeline
from megatron_ext.errors import UserError
from megatron_ext.run.batches import division
from megatron_ext.run.inference import InferenceModel, open_model
from megatron_ext.run.inputs import RowAt, open_rows
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
        scorer, short: the model, and its chunks, which score every token.
        end: exclusive end of the samples.
        output: the store; created if missing.
        part: of the samples; other parts may be scored into the same store at the same time.

    Raises:
        UserError: a scorer with fewer token ids, or data or a store that do not fit.
    """
    size = scorer.model.vocab_size
    if size is None or size < vocab_size:
        raise UserError(
            f"checkpoint: {scorer.folder} knows {size} token ids, needs at least the {vocab_size} of the data; "
            "give a scorer of the same vocabulary"
        )
    row_at = open_rows(config, vocab_size).row
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
        score_missing(model, config, short, row_at, store, range(config.data.first_sample, end)[part])
    dist.destroy_process_group()


def score_missing(
    model: InferenceModel, run: Config, short: ShortContext, row_at: RowAt, store: ScoreStore, wanted: range
) -> None:
    """Score this data-parallel rank's share of the wanted rows of a run that are missing in the store. Collective."""
    ranks, data, length = model.ranks, run.data, run.data.seq_length
    options = replace(model.config.mask_options(), document_mask=run.window.document_mask)
    scorer = ChunkScorer(model, data.micro_batch_size * length)
    bos_id = bos_of(run)
    missing = parallel.run_on_rank0(ranks, lambda: store.missing(wanted), store.path, reads=True)
    mine = missing[ranks.data :: ranks.data_size]
    at_once = data.micro_batch_size * ranks.pipeline_size  # keeps the pipeline stages busy
    logger.info("%d of %d rows to score, into %s", len(missing), len(wanted), store.path)
    with tqdm(total=len(mine), unit="row", disable=ranks.world != 0) as bar:
        for first in range(0, len(mine), at_once):
            samples = mine[first : first + at_once]
            rows = [row_at(sample) for sample in samples]
            masks = options.at(length, [row.document_ends for row in rows], length)
            work = short_pass([lay_end_to_end(rows)], [masks], short, scorer.division, scorer.context, bos_id=bos_id)
            losses = scorer.losses(work.batches, length * len(rows))
            if losses is not None and ranks.reports_loss and ranks.context == 0:
                for sample, row in zip(samples, losses.view(len(rows), length).cpu().numpy(), strict=True):
                    store.write(sample, row)
            bar.update(len(samples))


class ChunkScorer:
    """Computes the losses of chunks in micro-batches of about `tokens` tokens, on all ranks of a loaded model."""

    def __init__(self, model: InferenceModel, tokens: int) -> None:
        self.model = model
        self.pipeline = Pipeline([in_precision(chunk, model.config) for chunk in model.chunks])
        self.group = parallel.context_group(model.config.parallel, model.ranks, model.platform)
        self.context = context_options(model.config, self.group)
        self.division = division(model.config, model.ranks, tokens)

    def losses(self, batches: Sequence[PackedBatch], tokens: int) -> Tensor | None:
        """Return the losses of all `tokens` of the rows, float32, 0 if not scored; None except on the last stage."""
        device = self.model.platform.device
        on_device = [batch.to(device) for batch in batches]
        losses = self.pipeline.forward_only(on_device)
        if not self.model.ranks.last_stage:
            return None
        return short_losses(self.group, on_device, losses, tokens, device)
