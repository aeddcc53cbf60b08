"""Text generation and scoring with a key-value cache, under any parallel layout.

Tensor- and pipeline-parallel ranks hold one model together and compute the same texts. Data- and context-parallel ranks
hold copies of it that process different texts; context-parallel ranks that share experts compute the same texts,
because tokens are sent to experts on all of them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.attention.cache import KeyValueCache
from megatron_ext.batch import PackedBatch
from megatron_ext.config import ParallelConfig
from megatron_ext.errors import UserError
from megatron_ext.evaluation.sampling import Sampling, choose
from megatron_ext.layout import PackedLayout
from megatron_ext.masks import AttentionMask, LayerMasks
from megatron_ext.run.inference import InferenceModel

Request = TypeVar("Request")
Result = TypeVar("Result")

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
        """Number of tokens of the context and its longest continuation."""
        return len(self.tokens) + max(map(len, self.options))


@dataclass(frozen=True)
class Likelihood:
    """The log-probability of a continuation in nats, and whether each of its tokens is the likeliest one."""

    log_probability: float
    greedy: bool


@dataclass
class _Text:
    """A text that is being generated in a cache slot; its last token is not yet in the cache."""

    number: int
    prompt: Prompt
    draws: np.random.Generator
    answer: list[int]

    @property
    def last(self) -> int:
        return self.answer[-1] if self.answer else self.prompt.tokens[-1]


def inference_layout(processes: ParallelConfig) -> ParallelConfig:
    """Return the layout for generation: without sequence parallelism, because tokens are generated one by one."""
    return replace(processes, sequence_parallel=False)


class Generator:
    """Continues prompts and scores continuations.

    Args:
        model: opened under `inference_layout`.
        slots: number of concurrent texts on each copy of the model.
        stop: token ids that end a text; the end token is the last token of the answer.
        decode: turns tokens into text; required for `Prompt.stop_texts`.
    """

    def __init__(
        self,
        model: InferenceModel,
        slots: int,
        stop: Iterable[int],
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.model, self.slots, self.stop, self.decode = model, slots, frozenset(stop), decode
        self.mask_options = model.config.mask_options()
        self.stages: dist.ProcessGroup = model.chunks[0].pg_collection.pp
        ranks = model.ranks
        lockstep = ranks.expert_size > 1
        self.share = ranks.data if lockstep else ranks.data * ranks.context_size + ranks.context
        self.shares = ranks.data_size if lockstep else ranks.data_size * ranks.context_size
        # groups that compute the same texts, and the rank in each that chooses the tokens
        self.alike = [(ranks.tensor_group, 0), (self.stages, self.stages.size() - 1)]
        if lockstep:
            self.alike.append((ranks.context_group, 0))

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continue every prompt. Collective; all processes get all answers.

        Args:
            prompts: the same on every process.
            sampling: how tokens are chosen; None for the likeliest.
            on_token: called with the number of a prompt of this copy of the model and its next token.

        Raises:
            UserError: an empty prompt, or a text too long for dynamic RoPE.
        """
        for number, prompt in enumerate(prompts):
            self._check(number, prompt)
        return self._gathered(self._generate(self._own(prompts), sampling or Sampling(), on_token))

    def likelihoods(self, choices: Sequence[Choice]) -> list[list[Likelihood]]:
        """Score every continuation of every choice; each context is computed once. Collective.

        The choices are the same on every process. Raises what `answer` raises.
        """
        for number, choice in enumerate(choices):
            self._check(number, choice)
        own = sorted(self._own(choices), key=lambda numbered: -numbered[1].length)  # batches of similar lengths
        return self._gathered(self._score(own))

    def _own(self, requests: Sequence[Request]) -> list[tuple[int, Request]]:
        return [(number, requests[number]) for number in range(self.share, len(requests), self.shares)]

    def _gathered(self, own: dict[int, Result]) -> list[Result]:
        gathered: list[dict[int, Result]] = [{} for _ in range(self.model.ranks.world_size)]
        dist.all_gather_object(gathered, own)
        joined = {number: result for results in gathered for number, result in results.items()}
        return [joined[number] for number in range(len(joined))]

    def _check(self, number: int, request: Prompt | Choice) -> None:
        if not request.tokens:
            raise UserError(f"prompt {number + 1}: has no token to continue; give a text, or --bos")
        original = self.model.pretrained.model.rope_original_length
        if self.model.follows_text and original is not None and request.length > original:
            raise UserError(
                f"prompt {number + 1}: got up to {request.length} tokens, but {self.model.pretrained.folder} has "
                f"dynamic RoPE, which would rotate all cached keys anew beyond {original} tokens; ask for fewer"
            )

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling, on_token: Callable[[int, int], None] | None
    ) -> dict[int, list[int]]:
        waiting = deque(prompts)
        slots = min(self.slots, len(prompts))
        cache = KeyValueCache(slots, max((prompt.length for _, prompt in prompts), default=0))
        active: dict[int, _Text] = {}
        answers: dict[int, list[int]] = {}
        while waiting or active:
            new: dict[int, Sequence[int]] = {}
            for slot in range(slots):
                if slot not in active and waiting:
                    number, prompt = waiting.popleft()
                    cache.free(slot)
                    new[slot] = prompt.tokens[:-1]
                    active[slot] = _Text(number, prompt, sampling.draws(number), [])
            self._prefill(cache, new)
            texts = list(active.values())
            logits_nV = self._forward(cache, {slot: [text.last] for slot, text in active.items()})
            chosen = None if logits_nV is None else choose(logits_nV, sampling, [text.draws for text in texts])
            for slot, token in zip(list(active), self._broadcast(chosen, len(texts)), strict=True):
                text = active[slot]
                text.answer.append(token)
                if on_token is not None:
                    on_token(text.number, token)
                if token in self.stop or len(text.answer) == text.prompt.new_tokens or self._stops(text):
                    answers[text.number] = active.pop(slot).answer
        return answers

    def _stops(self, text: _Text) -> bool:
        if not text.prompt.stop_texts:
            return False
        assert self.decode is not None
        longest = max(len(stop.encode()) for stop in text.prompt.stop_texts)
        end = self.decode(text.answer[-longest - 1 :])  # a token is at least one byte, and may begin before the string
        return any(stop in end for stop in text.prompt.stop_texts)

    @torch.inference_mode()
    def _score(self, choices: Sequence[tuple[int, Choice]]) -> dict[int, list[Likelihood]]:
        found: dict[int, list[Likelihood]] = {}
        limit = max(PASS_LOGITS // self.model.vocab_size, 1)
        for first in range(0, len(choices), self.slots):
            some = [choice for _, choice in choices[first : first + self.slots]]
            cache = KeyValueCache(len(some), max(choice.length for choice in some))
            self._prefill(cache, {slot: choice.tokens[:-1] for slot, choice in enumerate(some)})
            scores: list[list[Likelihood]] = [[] for _ in some]
            for place in range(max(len(choice.options) for choice in some)):
                options = {
                    slot: choice.options[place] for slot, choice in enumerate(some) if place < len(choice.options)
                }
                inputs = {slot: [some[slot].tokens[-1], *option[:-1]] for slot, option in options.items()}
                total = dict.fromkeys(options, Likelihood(0.0, True))
                for part in _passes(options, limit):
                    logits_nV = self._forward(cache, {slot: inputs[slot][at] for slot, at in part.items()}, every=True)
                    if logits_nV is not None:
                        labels = {slot: options[slot][at] for slot, at in part.items()}
                        for slot, likelihood in zip(labels, _likelihoods(logits_nV, labels.values()), strict=True):
                            total[slot] = Likelihood(
                                total[slot].log_probability + likelihood.log_probability,
                                total[slot].greedy and likelihood.greedy,
                            )
                for slot, likelihood in total.items():
                    scores[slot].append(likelihood)
                    cache.keep(slot, len(some[slot].tokens) - 1)
            if self.stages.rank() == self.stages.size() - 1:
                numbers = (number for number, _ in choices[first : first + self.slots])
                found |= dict(zip(numbers, scores, strict=True))
        return found

    def _prefill(self, cache: KeyValueCache, texts: Mapping[int, Sequence[int]]) -> None:
        """Append texts to the cache, at most `PASS_TOKENS` tokens at a time."""
        for part in _passes(texts, PASS_TOKENS):
            self._forward(cache, {slot: texts[slot][at] for slot, at in part.items()})

    def _forward(
        self, cache: KeyValueCache, texts: Mapping[int, Sequence[int]], *, every: bool = False
    ) -> Tensor | None:
        """Append tokens to cached texts, through all pipeline stages.

        Args:
            cache: of this stage's layers.
            texts: the next tokens of some slots.
            every: return the logits after each of these tokens, not only after the last one of each text.

        Returns:
            float32 [texts or tokens, V] on the last stage; None on the others.
        """
        appended = cache.append(list(texts), [len(tokens) for tokens in texts.values()])
        tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in texts.values()])
        total, borders, local = len(tokens), appended.cu_seqlens_q, self.mask_options.local_window
        device, stages, stage = self.model.platform.device, self.stages.size(), self.stages.rank()
        batch = PackedBatch(
            tokens_t=torch.from_numpy(tokens),
            labels_t=torch.zeros(total, dtype=torch.int64),
            positions_t=torch.from_numpy(appended.positions.astype(np.int32)),
            weights_t=torch.zeros(total),
            trained_t=torch.zeros(total, dtype=torch.bool),
            masks=LayerMasks(
                AttentionMask(PackedLayout(total, borders.astype(np.int32))),
                None,
                (False,) * self.mask_options.num_layers,
            ),
            attention=appended.call(None),
            total_trained=0,
            total_weight=0.0,
            local_attention=None if local is None else appended.call(local - 1),
            wanted=torch.arange(total) if every else torch.from_numpy(borders[1:] - 1),
        ).to(device)
        appended = appended.to(device)
        output: Tensor | None = None
        for chunk in self.model.chunks:  # several if the pipeline is interleaved
            if not chunk.pre_process:
                shape = (total, 1, chunk.config.hidden_size)
                hidden = torch.empty(shape, dtype=chunk.config.pipeline_dtype, device=device)
                dist.recv(hidden, group=self.stages, group_src=(stage - 1) % stages)
                chunk.set_input_tensor(hidden)
            output = chunk.next_logits(batch, appended)
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
    left = limit
    for slot, tokens in texts.items():
        start = 0
        while start < len(tokens):
            end = min(start + left, len(tokens))
            part[slot] = slice(start, end)
            left -= end - start
            start = end
            if not left:
                yield part
                part, left = {}, limit
    if part:
        yield part


def _likelihoods(logits_nV: Tensor, labels: Iterable[Sequence[int]]) -> list[Likelihood]:
    """Score the labels of several texts with concatenated logits."""
    labels = list(labels)
    label_n = torch.tensor(list(itertools.chain(*labels)), device=logits_nV.device)
    log_probability_n = logits_nV.log_softmax(dim=-1).gather(1, label_n[:, None])[:, 0].double()
    greedy_n = logits_nV.argmax(dim=-1) == label_n
    sizes = [len(label) for label in labels]
    return [
        Likelihood(float(log_probability.sum()), bool(greedy.all()))
        for log_probability, greedy in zip(log_probability_n.split(sizes), greedy_n.split(sizes), strict=True)
    ]
