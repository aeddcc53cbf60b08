"""Losses of whole documents with sliding windows, under any parallel layout."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_ext.batch import PackedBatch, Tokens
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.engine import parallel
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.engine.optimizer import in_precision
from megatron_ext.engine.pipeline import Pipeline
from megatron_ext.evaluation.by_position import BINS, sums_by_position
from megatron_ext.evaluation.perplexity import (
    Document,
    Evaluated,
    Limits,
    Scores,
    Stream,
    sources_of,
    stream_chunks,
    streams,
)
from megatron_ext.rope import dynamic_base
from megatron_ext.run.batches import context_options, division
from megatron_ext.run.inference import Dtype, InferenceModel, open_model, warn_beyond_training
from megatron_ext.short_context import Chunks, ShortContext
from megatron_ext.token_weighting.short_pass import Division, chunk_batches
from megatron_ext.token_weighting.weigher import short_losses

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
        pretrained: the model.
        processes: the parallel layout.
        documents: the same on every process.
        windows: lengths and strides.
        document_mask: attention stays inside documents.
        batch_tokens: approximate number of tokens of a micro-batch.
        dtype: of the computation.

    Raises:
        UserError: the model does not fit the layout.
    """
    sources, source_of = sources_of(documents)
    laid = streams(documents, document_mask=document_mask)
    for window in windows:
        warn_beyond_training(pretrained, window.length)
    # dynamic RoPE of a Hugging Face folder depends on the length: reload the model for each length
    anew = pretrained.checkpoint is None and pretrained.model.rope_scaling == "dynamic"
    at: dict[int, Scores] = {}
    for together in [[window] for window in windows] if anew else [windows]:
        with open_model(pretrained, processes, max(window.length for window in together), dtype) as model:
            for window in together:
                scorer = _Scorer(model, window, batch_tokens, source_of, len(sources))
                at[window.length] = scorer.run(laid)
    return Evaluated(sources, source_of, at)


class _Scorer:
    """Scores streams with windows of one length."""

    def __init__(
        self, model: InferenceModel, window: ShortContext, batch_tokens: int, source_of: np.ndarray, sources: int
    ) -> None:
        self.model, self.window, self.source_of, self.sources = model, window, source_of, sources
        self.pipeline = Pipeline([in_precision(chunk, model.config) for chunk in model.chunks])
        self.group = parallel.context_group(model.config.parallel, model.ranks, model.platform)
        self.context = context_options(model.config, model.ranks, self.group)
        self.division = division(model.config, model.ranks, max(batch_tokens, window.length))

    def run(self, laid: Sequence[Stream]) -> Scores:
        """Score all streams; data-parallel ranks share the windows."""
        ranks = self.model.ranks
        total = self._nothing()
        label = f"windows of {self.window.length}"
        with tqdm(total=sum(map(len, laid)), unit="token", desc=label, disable=ranks.world != 0) as bar:
            for streams_here in stream_chunks(laid, CHUNK_TOKENS):
                total += self._scored(streams_here)
                bar.update(sum(map(len, streams_here)))
        mine = total if ranks.reports_loss and ranks.context == 0 else self._nothing()
        shares: list[Scores] = [mine] * ranks.world_size
        dist.all_gather_object(shares, mine)
        return functools.reduce(operator.add, shares)

    def _nothing(self) -> Scores:
        documents = len(self.source_of)
        return Scores(np.zeros(documents), np.zeros(documents), np.zeros((self.sources, 2, BINS)))

    def _scored(self, laid: Sequence[Stream]) -> Scores:
        """Score this data-parallel rank's windows of some streams."""
        borders = np.cumsum([0, *map(len, laid)])
        tokens = Tokens(
            tokens=np.concatenate([stream.tokens[:-1] for stream in laid]),
            labels=np.concatenate([stream.tokens[1:] for stream in laid]),
            trained=np.zeros(borders[-1], dtype=np.bool_),
        )
        parts = [stream.windows(self.window) for stream in laid]
        everyones = Chunks(
            *(
                np.concatenate([getattr(part, name) + first for part, first in zip(parts, borders, strict=False)])
                for name in ("start", "end", "scored")
            )
        )
        ranks = self.model.ranks
        mine = everyones.chosen(np.arange(ranks.data, len(everyones.start), ranks.data_size))
        scores = self._nothing()
        for chunks, batches in self._batches(tokens, borders, mine):
            on_device = [batch.to(self.model.platform.device) for batch in batches]
            losses = self.pipeline.token_losses(on_device)
            if not ranks.last_stage:
                continue
            loss_T = short_losses(self.group, on_device, losses, int(borders[-1]), self.model.platform.device).cpu()
            scored = chunks.scored_tokens()
            document = np.concatenate([stream.document for stream in laid])[scored]
            position = scored - np.repeat(chunks.start, chunks.end - chunks.scored)
            self._add(scores, loss_T[torch.from_numpy(scored)], document, position)
        return scores

    def _batches(
        self, tokens: Tokens, borders: np.ndarray, chunks: Chunks
    ) -> Iterator[tuple[Chunks, list[PackedBatch]]]:
        """Yield windows with their micro-batches: all together, or each alone if RoPE depends on its length."""
        if not len(chunks.start):
            return
        total = int(borders[-1])
        masks = self.model.config.mask_options().at(total, [borders[1:]], total)
        if not self.model.follows_text:
            yield chunks, chunk_batches(tokens, masks, chunks, self.division, self.context)
            return
        shape = self.model.pretrained.model
        for number in range(len(chunks.start)):
            alone = chunks.chosen(np.array([number]))
            length = int(alone.lengths[0])
            whole = Division(length, self.division.unit, self.division.multiple)
            batches = chunk_batches(tokens, masks, alone, whole, self.context)
            yield alone, [replace(batch, rotary_base=dynamic_base(shape, length)) for batch in batches]

    def _add(self, scores: Scores, loss: torch.Tensor, document: np.ndarray, position: np.ndarray) -> None:
        """Add the losses of scored tokens."""
        np.add.at(scores.loss, document, loss.double().numpy())
        np.add.at(scores.count, document, 1.0)
        source = self.source_of[document]
        for number in np.unique(source):
            own = source == number
            sums = sums_by_position(
                loss[torch.from_numpy(own)],
                torch.from_numpy(position[own]),
                torch.ones(int(own.sum()), dtype=torch.bool),
            )
            scores.by_position[number] += sums.numpy()


def dataset_documents(prefix: str, vocab_size: int, limits: Limits) -> Iterator[Document]:
    """Read the documents of a .bin/.idx dataset.

    Raises:
        UserError: the dataset cannot be read, or has token ids beyond the model's vocabulary.
    """
    source = IndexedSource(prefix, vocab_size)
    taken = 0
    for number, length in enumerate(source.document_lengths.tolist()):
        if taken == limits.per_source:
            return
        if limits.fits(length):
            taken += 1
            yield Document(prefix, limits.cut(source.read(number, 0, length)))
