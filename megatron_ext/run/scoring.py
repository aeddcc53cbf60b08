"""Compute the short-context losses of a run's rows with a frozen scorer, into a store."""

import logging
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from megatron_ext.batch import lay_end_to_end
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.engine import agreement
from megatron_ext.inference.model import ChunkScorer, InferenceModel, open_model
from megatron_ext.run.identity import bos_of, row_identity
from megatron_ext.run.inputs import RowAt, open_rows
from megatron_ext.short_context import ShortContext
from megatron_ext.token_weighting.short_pass import short_pass
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity

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
        part: the samples to score; other processes may score other parts into the same store at the same time.

    Raises:
        UserError: data with a token id that the scorer does not have, or a store that does not fit.
    """
    row_at = open_rows(config, min(vocab_size, scorer.vocab_size)).row
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
    ranks = model.ranks
    length = run.data.seq_length
    options = replace(model.config.mask_options(), document_mask=run.window.document_mask)
    scorer = ChunkScorer(model, run.data.micro_batch_size * length)
    bos_id = bos_of(run)
    missing = agreement.run_on_rank0(lambda: store.missing(wanted), store.path, reads=True)
    share = missing[ranks.data :: ranks.data_size]
    at_once = run.data.micro_batch_size * ranks.pipeline_size  # keeps the pipeline stages busy
    logger.info("%d of %d rows to score, into %s", len(missing), len(wanted), store.path)
    with tqdm(total=len(share), unit="row", disable=ranks.world != 0) as bar:
        for first in range(0, len(share), at_once):
            samples = share[first : first + at_once]
            rows = [row_at(sample) for sample in samples]
            masks = options.at(length, [row.document_ends for row in rows], length)
            work = short_pass(lay_end_to_end(rows), masks, short, scorer.division, scorer.context, bos_id=bos_id)
            losses = scorer.losses(work.batches, length * len(rows))
            if losses is not None and ranks.reports_loss and ranks.context == 0:
                for sample, row in zip(samples, losses.view(len(rows), length).cpu().numpy(), strict=True):
                    store.write(sample, row)
            bar.update(len(samples))
