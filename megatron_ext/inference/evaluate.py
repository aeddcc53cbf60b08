"""Evaluate one or several trained models on the same items: what `tools/evaluate.py` runs.

Perplexity is computed under any parallel layout, in windows of L tokens that start S tokens apart along a stream. The
first window scores all of its labels, a later one its last S, each with at least L - S tokens before it
(short_context.py draws them).

With the document mask each document is a stream. Without it the documents of a source form one stream, an end token
after each, and a token sees all tokens before it in its window.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from megatron_ext.arrays import Float64, Int64
from megatron_ext.batch import PackedBatch, Tokens
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.text.documents import read_documents
from megatron_ext.errors import UserError, missing_package
from megatron_ext.evaluation.by_position import BINS, bin_of, losses_by_position, mean_loss
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.report import Key, compare
from megatron_ext.inference.model import ChunkScorer, InferenceModel, open_model
from megatron_ext.inference.options import LmEvalOptions, PerplexityOptions
from megatron_ext.rope import dynamic_base
from megatron_ext.short_context import Chunks, ShortContext, short_chunks
from megatron_ext.token_weighting.short_pass import chunk_batches

ALL = "all"  # the name of results over all sources
CHUNK_TOKENS = 1 << 22  # tokens laid out in memory at a time
Models = Mapping[str, ModelText]
Options = PerplexityOptions | LmEvalOptions
Result = dict[str, Any]
Item = TypeVar("Item")


def evaluate_models(options: Options, processes: ParallelConfig) -> Iterator[tuple[Result, Mapping[str, list[Result]]]]:
    """Run the command of `tools/evaluate.py`. Collective.

    Yields:
        After each model, of all models so far: the record (see `evaluation/report.py`) and every answer of each model;
        without results except on process 0.

    Raises:
        UserError: a model or data that cannot be read, models that cannot be compared, or an option that does not fit.
    """
    models = _find_models(options)
    parts: Iterator[tuple[Result, Mapping[str, list[Result]]]]
    if isinstance(options, PerplexityOptions):
        parts = ((part, {}) for part in _perplexity(options, processes, models, _lengths(options.lengths, models)))
    else:
        if find_spec("lm_eval") is None:
            raise missing_package("lm-eval", "lm-eval[hf]")
        from megatron_ext.inference.lm_eval_model import evaluate

        parts = evaluate(options, processes, models)
    folders: dict[str, Result] = {}
    for (name, text), (part, items) in zip(models.items(), parts, strict=True):
        folders[name] = {"folder": str(text.pretrained.folder), "trained_length": text.pretrained.length}
        yield {"kind": options.command, "models": folders, **part}, items
    dist.destroy_process_group()


def _find_models(options: Options) -> Models:
    """Find the models and their tokenizers, by name, before any is loaded."""
    models: dict[str, ModelText] = {}
    folders = [path.resolve() for path in options.models]
    for path in options.models:
        if folders.count(path.resolve()) > 1:
            raise UserError(f"models: got {path} twice; name each once")
        model = Pretrained.find(path)
        names = (path.resolve().name, str(path), str(path.resolve()))
        name = next(name for name in names if name not in models)
        chat = isinstance(options, LmEvalOptions) and options.chat
        models[name] = ModelText.of(model, options.tokenizer, options.eod_token, bos=options.bos, chat=chat)
    if isinstance(options, PerplexityOptions) and len({text.tokenizer.fingerprint for text in models.values()}) > 1:
        raise UserError(
            "models: their tokenizers differ, so they would not get the same items; evaluate them one by one, or "
            "give one --tokenizer for all"
        )
    return models


def _lengths(requested: Sequence[int] | None, models: Models) -> list[int]:
    if requested is not None:
        return sorted(set(requested))
    trained = [text.pretrained.length for text in models.values() if text.pretrained.length is not None]
    if not trained:
        raise UserError("lengths: the model does not say its trained length; give --lengths")
    return [min(trained)]


@dataclass(frozen=True, eq=False)
class Document:
    """A text to score: its file or domain, and its tokens, int64 [n], n >= 2, end token included."""

    source: str
    tokens: Int64


@dataclass(frozen=True, eq=False)
class Stream:
    """Tokens along which windows slide, int64 [n+1], and the number of each label's document, int64 [n]."""

    tokens: Int64
    document: Int64


def _perplexity(
    options: PerplexityOptions, processes: ParallelConfig, models: Models, lengths: Sequence[int]
) -> Iterator[Result]:
    """Score documents with windows of several lengths; yield a part of the record after each model. Collective."""
    windows = []
    for length in lengths:
        stride = options.stride or max(length // 2, 1)
        if stride > length:
            raise UserError(f"stride: got {stride}, needs at most the window's {length}; lower it")
        windows.append(ShortContext(length, stride, every_token=True))
    # their tokenizers are the same, but not the rows of their embeddings
    text = min(models.values(), key=lambda text: text.pretrained.vocab_size)
    read = dataset_documents if options.input is None else file_documents
    documents = list(itertools.islice(read(options, text), options.documents))
    if not documents:
        raise UserError("input: no document is left to score; lower --min-tokens, or give another --input")
    numbers_by_source = _numbers_by_source(documents)
    if ALL in numbers_by_source:
        raise UserError(f"input: got a source named {ALL!r}, as results over all sources are; give it another name")
    numbers_by_task = {ALL: list(range(len(documents))), **numbers_by_source}
    streams = list(make_streams(documents, document_mask=options.document_mask))
    recorded = "bos dtype tokenizer min_tokens max_tokens documents_per_source"
    settings = {name: getattr(options, name) for name in recorded.split()} | {
        "document_mask": options.document_mask,
        "stride": {str(window.length): window.stride for window in windows},
        "documents": len(documents),
        "tokens": sum(len(document.tokens) for document in documents),
    }
    results: list[Result] = []
    losses: dict[str, dict[Key, Float64]] = {}
    for name, text in models.items():
        losses[name] = {}
        for window, sums in _score(options, processes, text, windows, streams, len(documents)):
            losses[name][ALL, "loss", window.length] = sums[0].sum(dim=1).numpy()
            for task, numbers in numbers_by_task.items():
                at = {"model": name, "task": task, "length": window.length}
                results += [at | result for result in results_of(sums[:, numbers])]
        counts = dict.fromkeys(losses[name], sums[1].sum(dim=1).numpy())  # the same for all models and lengths
        yield {"settings": settings, "results": results, "differences": list(compare(losses, counts))}


def _score(
    options: PerplexityOptions,
    processes: ParallelConfig,
    text: ModelText,
    windows: Sequence[ShortContext],
    streams: Sequence[Stream],
    documents: int,
) -> list[tuple[ShortContext, Tensor]]:
    """Return what `window_losses` returns, for all windows, of a model that is not kept. Collective."""
    length = max(window.length for window in windows)
    with open_model(text.pretrained, processes, length, options.dtype) as model:
        return [(window, window_losses(model, window, streams, documents, options.batch_tokens)) for window in windows]


def _numbers_by_source(documents: Sequence[Document]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        numbers.setdefault(document.source, []).append(number)
    return numbers


def file_documents(options: PerplexityOptions, text: ModelText) -> Iterator[Document]:
    """Tokenize the texts of `--input`, each with an end-of-document token if there is one.

    With `--documents-per-source` the documents of a source come together, and all texts are read first.
    """
    long_enough = _long_enough(options, text)
    if options.documents_per_source is None:
        yield from long_enough
        return
    by_source: dict[str, list[Document]] = {}
    for document in long_enough:
        by_source.setdefault(document.source, []).append(document)
    for documents in by_source.values():
        yield from evenly_spaced(documents, options.documents_per_source)


def _long_enough(options: PerplexityOptions, text: ModelText) -> Iterator[Document]:
    for document in read_documents(options.input or (), options.json_key, key_field=options.source_key):
        source = document.key
        if source is None:
            source = str(document.source)
        tokens = text.encode(document.text)
        if text.end is not None:
            tokens.append(text.end)
        if len(text.checked(tokens)) >= options.min_tokens:
            yield Document(source, np.array(tokens[: options.max_tokens], dtype=np.int64))


def dataset_documents(options: PerplexityOptions, text: ModelText) -> Iterator[Document]:
    """Read documents of the .bin/.idx datasets of `--data-path`."""
    for prefix in options.data_path or ():
        source = IndexedSource(prefix, text.pretrained.vocab_size)
        lengths = source.document_lengths
        numbers = np.flatnonzero(lengths >= options.min_tokens).tolist()
        for number in evenly_spaced(numbers, options.documents_per_source):
            yield Document(prefix, source.read(number, 0, int(lengths[number]))[: options.max_tokens])


def evenly_spaced(items: Sequence[Item], count: int | None) -> Sequence[Item]:
    """Cut items into `count` equal parts and return the middle one of each; all items if they are no more."""
    if count is None or count >= len(items):
        return items
    return [items[(2 * part + 1) * len(items) // (2 * count)] for part in range(count)]


def make_streams(documents: Sequence[Document], *, document_mask: bool) -> Iterator[Stream]:
    """Yield one stream per document, or one per source from all of its documents."""
    streams = list(_numbers_by_source(documents).values())
    if document_mask:
        streams = [[number] for number in range(len(documents))]
    for joined in streams:
        tokens = [documents[number].tokens for number in joined]
        yield Stream(np.concatenate(tokens), np.repeat(joined, list(map(len, tokens)))[1:])


def results_of(sums: Tensor) -> Iterator[Result]:
    """Yield the loss of documents, overall and by position in the window; float64 [2, documents, BINS]."""
    total = sums.sum(dim=1)
    loss = mean_loss(total)
    assert loss is not None  # a document has at least 2 tokens
    counts = {"count": int(total[1].sum()), "documents": sums.shape[1]}
    yield {**counts, "metric": "loss", "value": loss}
    yield {**counts, "metric": "perplexity", "value": math.exp(min(loss, 700.0))}  # avoid float overflow
    for position, mean in losses_by_position(total).items():
        yield {"metric": "loss", "position": position, "value": mean}


def window_losses(
    model: InferenceModel, window: ShortContext, streams: Sequence[Stream], documents: int, batch_tokens: int
) -> Tensor:
    """Score streams with windows of one length, in micro-batches of about `batch_tokens` tokens. Collective.

    Returns:
        float64 [2, documents, BINS], on the host of every process: for each document what `sums_by_position` returns;
        positions count from the window's start.
    """
    ranks = model.ranks
    scorer = ChunkScorer(model, max(batch_tokens, window.length))
    sums = np.zeros((2, documents, BINS))
    ends = np.cumsum([len(stream.document) for stream in streams])
    label = f"windows of {window.length}"
    with tqdm(total=int(ends[-1]), unit="token", unit_scale=True, desc=label, disable=ranks.world != 0) as bar:
        for _, numbers in itertools.groupby(range(len(streams)), lambda number: ends[number] // CHUNK_TOKENS):
            some = [streams[number] for number in numbers]
            document = np.concatenate([stream.document for stream in some])
            for chunks, batches in _batches(scorer, window, some):
                loss_T = scorer.losses(batches, len(document))
                if loss_T is None:
                    continue
                scored = chunks.scored_tokens()
                position = scored - np.repeat(chunks.start, chunks.end - chunks.scored)
                place = document[scored], bin_of(torch.from_numpy(position)).numpy()
                np.add.at(sums[0], place, loss_T.cpu().double().numpy()[scored])
                np.add.at(sums[1], place, 1.0)
            bar.update(len(document))
    if not (ranks.reports_loss and ranks.context == 0):
        sums[:] = 0
    total = torch.from_numpy(sums).to(model.platform.device)
    dist.all_reduce(total)
    return total.cpu()


def share_of(lengths: Int64, rank: int, ranks: int) -> Int64:
    """Return the numbers of a rank's windows, in order; all ranks get windows of about the same lengths."""
    longest_first = np.argsort(-lengths, kind="stable")
    return np.sort(longest_first[rank::ranks])


def _batches(
    scorer: ChunkScorer, window: ShortContext, streams: Sequence[Stream]
) -> Iterator[tuple[Chunks, list[PackedBatch]]]:
    """Yield this data-parallel rank's windows with their micro-batches.

    All windows come together, or each alone if RoPE depends on its length.
    """
    model = scorer.model
    borders = np.cumsum([0, *(len(stream.document) for stream in streams)])
    total = int(borders[-1])
    tokens = Tokens(
        tokens=np.concatenate([stream.tokens[:-1] for stream in streams]),
        labels=np.concatenate([stream.tokens[1:] for stream in streams]),
        trained=np.zeros(total, dtype=np.bool_),
    )
    windows = [short_chunks(length, np.zeros(length, dtype=np.int64), window) for length in np.diff(borders).tolist()]
    start, end, scored = (
        np.concatenate([getattr(part, name) + first for part, first in zip(windows, borders, strict=False)])
        for name in ("start", "end", "scored")
    )
    chunks = Chunks(start, end, scored).chosen(share_of(end - start, model.ranks.data, model.ranks.data_size))
    if not len(chunks.start):
        return
    masks = model.config.mask_options().at(total, [borders[1:]], total)
    if not model.follows_text:
        yield chunks, chunk_batches(tokens, masks, chunks, scorer.division, scorer.context)
        return
    for number, length in enumerate(chunks.lengths.tolist()):
        alone = chunks.chosen(np.array([number]))
        batches = chunk_batches(tokens, masks, alone, replace(scorer.division, capacity=length), scorer.context)
        base = dynamic_base(model.pretrained.model, length)
        yield alone, [replace(batch, rotary_base=base) for batch in batches]
