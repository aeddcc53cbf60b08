"""Text generation, chat and scoring with a key-value cache, under any parallel layout.

Tensor- and pipeline-parallel ranks hold one model together and compute the same texts. Data- and context-parallel ranks
hold copies of it that process different texts; those that share experts compute the same texts, because tokens are sent
to experts on all of them.
"""

import itertools
import json
import logging
import math
import sys
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import heartbeat
from megatron_ext.batch import PackedBatch
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.data.text.chat import ChatError
from megatron_ext.data.text.documents import read_documents
from megatron_ext.data.text.tokenizer import TextStream
from megatron_ext.device import moved
from megatron_ext.engine.agreement import run_on_rank0
from megatron_ext.errors import UserError
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.files.atomic import atomic_write
from megatron_ext.inference.cache import KeyValueCache
from megatron_ext.inference.model import InferenceModel, open_model
from megatron_ext.inference.options import Dtype, GenerateOptions
from megatron_ext.inference.sampling import Sampling, choose
from megatron_ext.layout import PackedLayout
from megatron_ext.masks import AttentionMask, LayerMasks

logger = logging.getLogger(__name__)
Request = TypeVar("Request", "Prompt", "Choice")
Result = TypeVar("Result")
Likelihood = tuple[float, bool]  # a continuation's log-probability in nats; whether each of its tokens is the likeliest

PASS_TOKENS = 8192  # maximum tokens of a forward pass without logits
PASS_LOGITS = 1 << 27  # maximum logits of a forward pass: tokens times vocabulary


@dataclass(frozen=True)
class Prompt:
    """A text to continue by at most `new_tokens` tokens; generation also ends after any of the `stop_texts`."""

    tokens: Sequence[int]
    new_tokens: int
    stop_texts: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Maximum number of tokens of the finished text."""
        return len(self.tokens) + self.new_tokens


@dataclass(frozen=True)
class Choice:
    """A context and several continuations to score, at least one token each."""

    tokens: Sequence[int]
    options: Sequence[Sequence[int]]

    @property
    def length(self) -> int:
        """Number of tokens of the context and its longest continuation that the model reads: all but the last."""
        return len(self.tokens) + max(map(len, self.options)) - 1


@dataclass
class _Text:
    """A text that is being generated in a cache slot; its last token is not yet in the cache."""

    number: int
    prompt: Prompt
    draws: np.random.Generator
    answer: list[int]
    stream: TextStream
    tail: str = ""  # the end of the answer's text, as long as a stop text


@contextmanager
def open_generator(
    text: ModelText, processes: ParallelConfig, length: int, *, dtype: Dtype, slots: int
) -> Iterator["Generator"]:
    """Load a model for texts of up to `length` tokens, `slots` of them at a time. See `open_model`."""
    processes = replace(processes, sequence_parallel=False)  # tokens are generated one by one
    with open_model(text.pretrained, processes, length, dtype) as model:
        yield Generator(model, text, slots)


class Generator:
    """Continues prompts and scores continuations, `slots` texts at a time on each copy of the model.

    The last token of an answer may be one of the tokens of `text` that end a text. `rotary_base` is the base of RoPE,
    None for the model's own. See `open_generator`.
    """

    def __init__(self, model: InferenceModel, text: ModelText, slots: int, rotary_base: float | None = None) -> None:
        self.model = model
        self.text = text
        self.slots = slots
        self.rotary_base = rotary_base
        self.mask_options = model.config.mask_options()
        self.stages: dist.ProcessGroup = model.chunks[0].pg_collection.pp
        ranks = model.ranks
        self.share = ranks.data * ranks.context_size + ranks.context
        if ranks.expert_size > 1:
            self.share = ranks.expert_copy
        self.shares = ranks.data_size * ranks.context_size // ranks.expert_size
        # groups that compute the same texts, and the rank in each that chooses the tokens
        self.alike = [(ranks.tensor_group, 0), (self.stages, self.stages.size() - 1), (ranks.expert_group, 0)]
        # sequence parallelism divides the tokens of a pass evenly; tokens of one more slot, which nobody reads, fill up
        self.unit = 1
        if model.config.parallel.sequence_parallel:
            self.unit = ranks.tensor_size

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continue every prompt. Collective; all processes pass the same prompts and get all answers.

        The likeliest tokens are chosen without `sampling`. `on_token` is called with the number of a prompt of this
        copy of the model and its next token.

        Raises:
            UserError: an empty prompt, or a text too long for dynamic RoPE.
        """
        return self._shared(prompts, lambda share: self._generate(share, sampling or Sampling(), on_token))

    def likelihoods(self, choices: Sequence[Choice]) -> list[list[Likelihood]]:
        """Score every continuation of every choice; each context is computed once. Otherwise as `answer`."""
        return self._shared(choices, self._score)

    def _shared(
        self, requests: Sequence[Request], compute: Callable[[list[tuple[int, Request]]], dict[int, Result]]
    ) -> list[Result]:
        """Compute a share of the numbered requests on each copy of the model; return all results in order."""
        original = self.model.pretrained.model.rope_original_length
        for number, request in enumerate(requests, start=1):
            if not request.tokens:
                raise UserError(f"prompt {number}: has no token to continue; give a text, or --bos")
            if self.model.follows_text and original is not None and request.length > original:
                raise UserError(
                    f"prompt {number}: got up to {request.length} tokens, but {self.model.pretrained.folder} has "
                    f"dynamic RoPE, which would rotate all cached keys anew beyond {original} tokens; ask for fewer"
                )
        results = compute(list(enumerate(requests))[self.share :: self.shares])
        gathered = [results] * self.model.ranks.world_size
        dist.all_gather_object(gathered, results)
        joined = ChainMap(*gathered)
        return [joined[number] for number in range(len(joined))]

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling, on_token: Callable[[int, int], None] | None
    ) -> dict[int, list[int]]:
        waiting = deque(prompts)
        slots = min(self.slots, len(prompts))
        cache = self._cache(slots, max((prompt.length for _, prompt in prompts), default=0))
        active: dict[int, _Text] = {}
        answers: dict[int, list[int]] = {}
        while waiting or active:
            new: dict[int, Sequence[int]] = {}
            for slot in range(slots):
                if slot not in active and waiting:
                    number, prompt = waiting.popleft()
                    cache.keep(slot, 0)
                    new[slot] = prompt.tokens[:-1]
                    stream = TextStream(self.text.tokenizer, prompt.tokens)
                    active[slot] = _Text(number, prompt, sampling.draws(number), [], stream)
            self._prefill(cache, new)
            texts = list(active.values())
            last = {slot: [(text.answer or text.prompt.tokens)[-1]] for slot, text in active.items()}
            logits_nV = self._forward(cache, last)
            chosen = None
            if logits_nV is not None:
                chosen = choose(logits_nV, sampling, [text.draws for text in texts])
            for slot, token in zip(list(active), self._broadcast(chosen, len(texts)), strict=True):
                text = active[slot]
                text.answer.append(token)
                if on_token is not None:
                    on_token(text.number, token)
                if token in self.text.stop or len(text.answer) == text.prompt.new_tokens or self._stops(text):
                    answers[text.number] = active.pop(slot).answer
        return answers

    def _stops(self, text: _Text) -> bool:
        if not text.prompt.stop_texts:
            return False
        text.tail += text.stream.put(text.answer[-1])
        seen = text.tail + text.stream.end()
        text.tail = text.tail[-max(map(len, text.prompt.stop_texts)) :]
        return any(stop in seen for stop in text.prompt.stop_texts)

    @torch.no_grad()
    def _score(self, choices: Sequence[tuple[int, Choice]]) -> dict[int, list[Likelihood]]:
        likelihoods: dict[int, list[Likelihood]] = {}
        choices = sorted(choices, key=lambda numbered: -numbered[1].length)  # batches of similar lengths
        for first in range(0, len(choices), self.slots):
            numbers, some = zip(*choices[first : first + self.slots], strict=True)
            cache = self._cache(len(some), max(choice.length for choice in some))
            self._prefill(cache, {slot: choice.tokens[:-1] for slot, choice in enumerate(some)})
            scores: list[list[Likelihood]] = [[] for _ in some]
            for place in range(max(len(choice.options) for choice in some)):
                options = {
                    slot: choice.options[place] for slot, choice in enumerate(some) if place < len(choice.options)
                }
                inputs = {slot: [some[slot].tokens[-1], *option[:-1]] for slot, option in options.items()}
                for slot, likelihood in self._score_options(cache, inputs, options).items():
                    scores[slot].append(likelihood)
                    cache.keep(slot, len(some[slot].tokens) - 1)
            if self.stages.rank() == self.stages.size() - 1:
                likelihoods |= zip(numbers, scores, strict=True)
        return likelihoods

    def _score_options(
        self, cache: KeyValueCache, inputs: Mapping[int, Sequence[int]], labels: Mapping[int, Sequence[int]]
    ) -> dict[int, Likelihood]:
        """Append the inputs of some slots to the cache and score the label of each; last stage only."""
        by_token: dict[int, list[Likelihood]] = {slot: [] for slot in labels}
        for part in _passes(labels, max(PASS_LOGITS // self.model.pretrained.vocab_size, 1)):
            logits_nV = self._forward(cache, {slot: inputs[slot][at] for slot, at in part.items()}, every=True)
            if logits_nV is None:
                continue
            wanted = itertools.chain.from_iterable(labels[slot][at] for slot, at in part.items())
            label_n = torch.tensor(list(wanted), device=logits_nV.device)
            log_probability_n = logits_nV.log_softmax(dim=-1).gather(1, label_n[:, None])[:, 0]
            greedy_n = logits_nV.argmax(dim=-1) == label_n
            scored = zip(log_probability_n.tolist(), greedy_n.tolist(), strict=True)
            for slot, at in part.items():
                by_token[slot] += itertools.islice(scored, at.stop - at.start)
        return {
            slot: (math.fsum(log_probability for log_probability, _ in tokens), all(greedy for _, greedy in tokens))
            for slot, tokens in by_token.items()
        }

    def _cache(self, slots: int, capacity: int) -> KeyValueCache:
        return KeyValueCache(slots + (self.unit > 1), max(capacity, self.unit))

    def _prefill(self, cache: KeyValueCache, texts: Mapping[int, Sequence[int]]) -> None:
        """Append texts to the cache, at most `PASS_TOKENS` tokens at a time."""
        for part in _passes(texts, PASS_TOKENS):
            self._forward(cache, {slot: texts[slot][at] for slot, at in part.items()})

    def _forward(
        self, cache: KeyValueCache, texts: Mapping[int, Sequence[int]], *, every: bool = False
    ) -> Tensor | None:
        """Append tokens to the cached texts of some slots, through all pipeline stages.

        Returns:
            The logits after the last token of each text, or after `every` token, float32 [texts or tokens, V], on the
            last stage; None on the others.
        """
        heartbeat.beat()
        lengths = list(map(len, texts.values()))
        wanted_n = np.cumsum(lengths) - 1
        if every:
            wanted_n = np.arange(sum(lengths))
        fill = -sum(lengths) % self.unit
        if fill:
            spare = len(cache.lengths) - 1
            cache.keep(spare, 0)
            texts = {**texts, spare: [0] * fill}
            lengths.append(fill)
        appended = cache.append(list(texts), lengths)
        tokens = np.fromiter(itertools.chain.from_iterable(texts.values()), dtype=np.int64)
        total = len(tokens)
        left_windows: list[int | None] = [None]
        if self.mask_options.local_window is not None:
            left_windows.append(self.mask_options.local_window - 1)
        device = self.model.platform.device
        batch = PackedBatch(
            tokens_t=torch.from_numpy(tokens),
            labels_t=torch.zeros(total, dtype=torch.int64),
            positions_t=torch.from_numpy(appended.positions.astype(np.int32)),
            weights_t=torch.zeros(total),
            trained_t=torch.zeros(total, dtype=torch.bool),
            masks=LayerMasks((AttentionMask(PackedLayout(total, appended.cu_seqlens_q.astype(np.int32))),)),
            attention=tuple(map(appended.call, left_windows)),
            total_trained=0,
            total_weight=0.0,
            wanted=torch.from_numpy(wanted_n),
            rotary_base=self.rotary_base,
        ).to(device)
        appended = moved(appended, device)
        stages = self.stages.size()
        stage = self.stages.rank()
        output: Tensor | None = None
        for chunk in self.model.chunks:  # several if the pipeline is interleaved
            if not chunk.pre_process:
                shape = (total // self.unit, 1, chunk.config.hidden_size)
                hidden = torch.empty(shape, dtype=chunk.config.pipeline_dtype, device=device)
                dist.recv(hidden, group=self.stages, group_src=(stage - 1) % stages)
                chunk.set_input_tensor(hidden)
            output = chunk.logits(batch, appended.extend)
            if not chunk.post_process:
                dist.send(output, group=self.stages, group_dst=(stage + 1) % stages)
                output = None
        return output

    def _broadcast(self, chosen_n: Tensor | None, texts: int) -> list[int]:
        """Return the same choice on all ranks that compute the same texts, independent of rounding."""
        if chosen_n is None:
            chosen_n = torch.empty(texts, dtype=torch.int64, device=self.model.platform.device)
        for group, source in self.alike:
            if group.size() > 1:
                dist.broadcast(chosen_n, group=group, group_src=source)
        tokens: list[int] = chosen_n.tolist()
        return tokens


def _passes(texts: Mapping[int, Sequence[int]], limit: int) -> Iterator[dict[int, slice]]:
    """Cut texts into forward passes of at most `limit` tokens: long texts span several, short ones share one."""
    part: dict[int, slice] = {}
    free = limit
    for slot, tokens in texts.items():
        start = 0
        while start < len(tokens):
            end = min(start + free, len(tokens))
            part[slot] = slice(start, end)
            free -= end - start
            start = end
            if not free:
                yield part
                part = {}
                free = limit
    if part:
        yield part


def generate_text(options: GenerateOptions, processes: ParallelConfig, sampling: Sampling) -> None:
    """Continue the prompts or chat by the flags of `tools/generate.py`; print or write the texts. Collective."""
    texts: list[str] = []
    if options.input is not None:
        texts += [document.text for document in read_documents(options.input, options.json_key)]
    elif not options.chat:
        texts += options.prompt or ()
    model = Pretrained.find(options.model)
    text = ModelText.of(model, options.tokenizer, options.eod_token, bos=options.bos, chat=options.chat)
    prompts = [Prompt(text.encode(words), options.max_new_tokens) for words in texts]
    longest = max((prompt.length for prompt in prompts), default=options.max_new_tokens)
    with open_generator(text, processes, longest, dtype=options.dtype, slots=options.batch_size) as generator:
        first = generator.model.ranks.world == 0
        answers: list[list[int]] = []
        if options.chat:
            _chat(options, generator, sampling)
        elif options.output is None and len(prompts) == 1:
            if first:
                print(texts[0], end="", flush=True)
            _answer_and_print(generator, prompts[0], sampling)
        else:
            answers = generator.answer(prompts, sampling)
    dist.destroy_process_group()
    if not first:
        return
    if options.output is None:
        for number, answer in enumerate(answers):
            if number:
                print()
            print(f"[{number + 1}] {texts[number]}{text.answer(prompts[number].tokens, answer)}")
        return
    with atomic_write(options.output) as aside, aside.open("w", encoding="utf-8") as file:
        for words, prompt, answer in zip(texts, prompts, answers, strict=True):
            record = {
                "prompt": words,
                "answer": text.answer(prompt.tokens, answer),
                "tokens": answer,
                "prompt_tokens": len(prompt.tokens),
                "ended": "stop token" if answer[-1] in text.stop else "--max-new-tokens",
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _answer_and_print(generator: Generator, prompt: Prompt, sampling: Sampling) -> list[int]:
    """Answer a prompt; process 0 prints each part of the text as soon as it is complete."""
    first = generator.model.ranks.world == 0
    text = generator.text
    stream = TextStream(text.tokenizer, prompt.tokens)

    def show(number: int, token: int) -> None:
        if first and token not in text.stop:
            print(stream.put(token), end="", flush=True)

    (answer,) = generator.answer([prompt], sampling, show)
    if first:
        print(stream.end())
    return answer


def _chat(options: GenerateOptions, generator: Generator, sampling: Sampling) -> None:
    """Run a conversation; process 0 reads the user's turns."""
    text = generator.text
    assert text.template is not None
    if generator.shares > 1:
        raise UserError(
            f"chat: got {generator.model.ranks.world_size} processes, needs one copy of the model; start as many as "
            "--tensor-model-parallel-size times --pipeline-model-parallel-size"
        )
    messages = []
    if options.system:
        messages.append({"role": "system", "content": options.system})

    def ask() -> str:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        return sys.stdin.readline().strip()

    # an empty line, or the end of standard input, ends the conversation
    turns = iter(ask, "") if options.prompt is None else iter(options.prompt)
    while (turn := run_on_rank0(lambda: next(turns, None), options.model)) is not None:
        messages.append({"role": "user", "content": turn})
        try:
            tokens = text.encode(text.template.prompt(messages))
        except ChatError as error:
            if options.prompt is not None:
                raise UserError(f"chat: {error}; rephrase the message") from None
            logger.warning("chat: %s; rephrase the message", error)
            messages.pop()
            continue
        answer = _answer_and_print(generator, Prompt(tokens, options.max_new_tokens), sampling)
        messages.append({"role": "assistant", "content": text.answer(tokens, answer, special=False)})
