"""Losses of whole documents with sliding windows, under any parallel layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from megatron_ext.batch import PackedBatch, Tokens
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.evaluation.by_position import BINS, bin_of
from megatron_ext.evaluation.perplexity import (
    Document,
    Evaluated,
    Limits,
    Stream,
    stream_chunks,
    streams,
)
from megatron_ext.rope import dynamic_base
from megatron_ext.run.inference import Dtype, InferenceModel, open_model, warn_beyond_training
from megatron_ext.run.scoring import ChunkScorer
from megatron_ext.short_context import Chunks, ShortContext, short_chunks
from megatron_ext.token_weighting.short_pass import chunk_batches

CHUNK_TOKENS = 1 << 22  # tokens laid out in memory at a time


def evaluate_perplexity(
    pretrained: Pretrained,
    processes: ParallelConfig,
    documents: Sequence[Document],
    windows: Sequence[ShortContext],
    *,
    document_mask: bool,
    batch_tokens: int,
    dtype: Dtype = "auto",
) -> Evaluated:
    """Score documents with windows of several lengths. Collective; all processes get the result.

    Args:
        pretrained, processes: the model and its parallel layout.
        documents: the same on every process.
        windows: lengths and strides.
        document_mask: attention stays inside documents.
        batch_tokens: approximate number of tokens of a micro-batch.
        dtype: of the computation.

    Raises:
        UserError: the model does not fit the layout.
    """
    all_streams = streams(documents, document_mask=document_mask)
    for window in windows:
        warn_beyond_training(pretrained, window.length)
    with open_model(pretrained, processes, max(window.length for window in windows), dtype) as model:
        at = {
            window.length: _Scorer(model, window, batch_tokens, len(documents)).run(all_streams) for window in windows
        }
    return Evaluated([document.source for document in documents], at)


class _Scorer:
    """Scores streams with windows of one length."""

    def __init__(self, model: InferenceModel, window: ShortContext, batch_tokens: int, documents: int) -> None:
        self.model, self.window = model, window
        self.scorer = ChunkScorer(model, max(batch_tokens, window.length))
        self.sums = np.zeros((2, documents, BINS))

    def run(self, all_streams: Sequence[Stream]) -> Tensor:
        """Return float64 [2, documents, BINS], on the host of every process."""
        ranks, device = self.model.ranks, self.model.platform.device
        label = f"windows of {self.window.length}"
        with tqdm(total=sum(map(len, all_streams)), unit="token", desc=label, disable=ranks.world != 0) as bar:
            for chunk in stream_chunks(all_streams, CHUNK_TOKENS):
                self._score(chunk)
                bar.update(sum(map(len, chunk)))
        counted = ranks.reports_loss and ranks.context == 0
        sums = torch.from_numpy(self.sums * counted).to(device)
        dist.all_reduce(sums)
        return sums.cpu()

    def _score(self, chunk: Sequence[Stream]) -> None:
        """Add the losses of this data-parallel rank's windows of some streams."""
        borders = np.cumsum([0, *map(len, chunk)])
        tokens = Tokens(
            tokens=np.concatenate([stream.tokens[:-1] for stream in chunk]),
            labels=np.concatenate([stream.tokens[1:] for stream in chunk]),
            trained=np.zeros(borders[-1], dtype=np.bool_),
        )
        windows = [short_chunks(len(stream), np.zeros(len(stream), dtype=np.int64), self.window) for stream in chunk]
        shifted = (
            np.concatenate([getattr(part, name) + first for part, first in zip(windows, borders, strict=False)])
            for name in ("start", "end", "scored")
        )
        everyones = Chunks(*shifted)
        ranks = self.model.ranks
        mine = everyones.chosen(np.arange(ranks.data, len(everyones.start), ranks.data_size))
        for chunks, batches in self._batches(tokens, borders, mine):
            loss_T = self.scorer.losses(batches, int(borders[-1]))
            if loss_T is None:
                continue
            scored = chunks.scored_tokens()
            document = np.concatenate([stream.document for stream in chunk])[scored]
            place = bin_of(torch.from_numpy(scored - np.repeat(chunks.start, chunks.end - chunks.scored))).numpy()
            np.add.at(self.sums[0], (document, place), loss_T.cpu().double().numpy()[scored])
            np.add.at(self.sums[1], (document, place), 1.0)

    def _batches(
        self, tokens: Tokens, borders: np.ndarray, chunks: Chunks
    ) -> Iterator[tuple[Chunks, list[PackedBatch]]]:
        """Yield windows with their micro-batches: all together, or each alone if RoPE depends on its length."""
        if not len(chunks.start):
            return
        total = int(borders[-1])
        masks = self.model.config.mask_options().at(total, [borders[1:]], total)
        division, context = self.scorer.division, self.scorer.context
        if not self.model.follows_text:
            yield chunks, chunk_batches(tokens, masks, chunks, division, context)
            return
        shape = self.model.pretrained.model
        for number in range(len(chunks.start)):
            alone = chunks.chosen(np.array([number]))
            length = int(alone.lengths[0])
            whole = replace(division, capacity=length)
            batches = chunk_batches(tokens, masks, alone, whole, context)
            yield alone, [replace(batch, rotary_base=dynamic_base(shape, length)) for batch in batches]


def dataset_documents(prefixes: Iterable[str], vocab_size: int | None, limits: Limits) -> Iterator[Document]:
    """Read documents of .bin/.idx datasets.

    Raises:
        UserError: a dataset cannot be read, or has token ids beyond the model's vocabulary.
    """
    for prefix in prefixes:
        source = IndexedSource(prefix, vocab_size)
        lengths = source.document_lengths
        for number in np.flatnonzero(lengths >= limits.shortest)[: limits.per_source].tolist():
            yield Document(prefix, source.read(number, 0, int(lengths[number]))[: limits.longest])
