"""Text that continues prompts: a batch of slots, refilled as texts end, over a cache of keys and values."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.attention.cache import Appended, KeyValueCache
from megatron_ext.batch import PackedBatch
from megatron_ext.config import ParallelConfig
from megatron_ext.errors import UserError
from megatron_ext.evaluation.sampling import Draws, Sampling, choose
from megatron_ext.layout import PackedLayout
from megatron_ext.masks import AttentionMask, LayerMasks
from megatron_ext.run.opened import Opened

Asked = TypeVar("Asked")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Prompt:
    """Asks for the continuation of a text.

    Attributes:
        tokens: of the text so far, at least one.
        new_tokens: at most so many follow.
        ended: says of the tokens that follow so far whether they are enough; None goes on.
    """

    tokens: Sequence[int]
    new_tokens: int
    ended: Callable[[Sequence[int]], bool] | None = None

    @property
    def length(self) -> int:
        """Tokens of the text when it is whole."""
        return len(self.tokens) + self.new_tokens


@dataclass(frozen=True)
class Choice:
    """Asks how likely each of several texts is to follow another.

    Attributes:
        tokens: of the text so far, at least one.
        options: tokens of what may follow, at least one each.
    """

    tokens: Sequence[int]
    options: Sequence[Sequence[int]]

    @property
    def length(self) -> int:
        """Tokens of the longest text when it is whole."""
        return len(self.tokens) + max(map(len, self.options))


@dataclass
class _Text:
    """Holds a text that is being continued in a slot."""

    number: int
    prompt: Prompt
    draws: Draws
    fresh: Sequence[int]  # not in the cache yet
    answer: list[int]


def check_processes(processes: ParallelConfig) -> None:
    """Refuse layouts in which text is not generated.

    Raises:
        UserError: pipeline stages, or rows shared out over processes.
    """
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if (size := getattr(processes, name)) != 1:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{name}: got {size}, text is generated with 1; leave {flag} out (processes beyond "
                "--tensor-model-parallel-size then share the prompts; a checkpoint of any layout loads)"
            )
    if processes.sequence_parallel:
        raise UserError(
            "sequence_parallel: got true, text is generated token by token, which leaves nothing to share; leave it out"
        )


class Generator:
    """Continues prompts.

    Args:
        model: on processes that `check_processes` has let pass.
        slots: texts at a time on each data-parallel rank.
        stop: token ids that end a text; one of them is the last of its answer.
    """

    def __init__(self, model: Opened, slots: int, stop: Iterable[int]) -> None:
        if slots < 1:
            raise UserError(f"batch_size: got {slots}, needs at least 1 text at a time")
        check_processes(model.config.parallel)
        self.model, self.slots, self.stop = model, slots, frozenset(stop)
        (self.chunk,) = model.chunks
        self.options = model.config.mask_options()

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continue every prompt; all processes get all answers.

        Args:
            prompts: the same on every process.
            sampling: how tokens are chosen; None takes the likeliest.
            on_token: is told the number of a prompt of this data-parallel rank and its next token, as it is found.

        Raises:
            UserError: a prompt without a token, or with one that the model does not know; a text that its angles do
                not reach.
        """
        for number, prompt in enumerate(prompts):
            self._check(number, prompt, prompt.tokens)
            if prompt.new_tokens < 1:
                raise UserError(f"max_new_tokens: got {prompt.new_tokens}, needs at least 1")
        return self._shared(self._run(self._mine(prompts), sampling or Sampling(), on_token))

    def likelihoods(self, choices: Sequence[Choice]) -> list[list[float]]:
        """Return the log-probability of every option of every choice, in nats; all processes get all.

        A text is computed once, and each option after it on its keys and values.

        Args:
            choices: the same on every process.

        Raises:
            UserError: as `answer`.
        """
        for number, choice in enumerate(choices):
            self._check(number, choice, [*choice.tokens, *itertools.chain(*choice.options)])
        return self._shared(self._weigh(self._mine(choices)))

    def _mine(self, asked: Sequence[Asked]) -> list[tuple[int, Asked]]:
        """Return this data-parallel rank's share, numbered."""
        ranks = self.model.ranks
        return [(number, asked[number]) for number in range(ranks.data, len(asked), ranks.data_size)]

    def _shared(self, found: dict[int, Found]) -> list[Found]:
        """Return what all ranks found, in the order of the numbers."""
        shares: list[dict[int, Found]] = [{} for _ in range(self.model.ranks.world_size)]
        dist.all_gather_object(shares, found)
        everyones = {number: answer for share in shares for number, answer in share.items()}
        return [everyones[number] for number in range(len(everyones))]

    def _check(self, number: int, prompt: Prompt | Choice, tokens: Sequence[int]) -> None:
        size = self.model.vocab_size
        if not prompt.tokens:
            raise UserError(f"prompt {number + 1}: has no token to continue; give a text, or --bos")
        if unknown := [token for token in tokens if not 0 <= token < size]:
            raise UserError(
                f"prompt {number + 1}: has token {unknown[0]}, the model knows 0..{size - 1}; "
                "give --tokenizer with the model's own"
            )
        original = self.model.pretrained.model.rope_original_length
        if self.model.follows_text and original is not None and prompt.length > original:
            raise UserError(
                f"prompt {number + 1}: asks for up to {prompt.length} tokens, but the dynamic angles of "
                f"{self.model.pretrained.folder} change with every token beyond {original}, and cached keys do not "
                "change with them; ask for fewer, or settle the angles by training at longer rows"
            )

    @torch.inference_mode()
    def _run(
        self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling, on_token: Callable[[int, int], None] | None
    ) -> dict[int, list[int]]:
        """Continue this data-parallel rank's prompts."""
        waiting = deque(prompts)
        capacity = max((prompt.length for _, prompt in prompts), default=0)
        slots = min(self.slots, len(prompts))
        cache = KeyValueCache(slots, capacity)
        active: dict[int, _Text] = {}
        answers: dict[int, list[int]] = {}
        while waiting or active:
            for slot in range(slots):
                if slot not in active and waiting:
                    number, prompt = waiting.popleft()
                    cache.free(slot)
                    active[slot] = _Text(number, prompt, Draws(sampling.seed, number), prompt.tokens, [])
            texts = list(active.values())
            appended = cache.append(list(active), [len(text.fresh) for text in texts])
            logits_nV = self._logits(appended, np.concatenate([text.fresh for text in texts]))
            chosen = self._agreed(choose(logits_nV, sampling, [text.draws for text in texts]))
            for slot, token in zip(list(active), chosen, strict=True):
                text = active[slot]
                text.answer.append(token)
                text.fresh = [token]
                if on_token is not None:
                    on_token(text.number, token)
                enough = text.prompt.ended is not None and text.prompt.ended(text.answer)
                if enough or token in self.stop or len(text.answer) == text.prompt.new_tokens:
                    answers[text.number] = active.pop(slot).answer
        return answers

    @torch.inference_mode()
    def _weigh(self, choices: Sequence[tuple[int, Choice]]) -> dict[int, list[float]]:
        """Weigh the options of this data-parallel rank's choices, some choices at a time."""
        found: dict[int, list[float]] = {}
        for first in range(0, len(choices), self.slots):
            some = choices[first : first + self.slots]
            cache = KeyValueCache(len(some), max(choice.length for _, choice in some))
            appended = cache.append(range(len(some)), [len(choice.tokens) for _, choice in some])
            after_nV = self._logits(appended, np.concatenate([choice.tokens for _, choice in some])).log_softmax(-1)
            for slot, (number, choice) in enumerate(some):
                found[number] = [float(after_nV[slot, option[0]]) for option in choice.options]
            for place in range(max(len(choice.options) for _, choice in some)):
                longer = {
                    slot: choice.options[place]
                    for slot, (_, choice) in enumerate(some)
                    if place < len(choice.options) and len(choice.options[place]) > 1
                }
                if not longer:
                    continue
                appended = cache.append(list(longer), [len(option) - 1 for option in longer.values()])
                fed = np.concatenate([option[:-1] for option in longer.values()])
                labels = torch.from_numpy(np.concatenate([option[1:] for option in longer.values()]).astype(np.int64))
                logits_nV = self._logits(appended, fed, every=True)
                loss_n = F.cross_entropy(logits_nV, labels.to(logits_nV.device), reduction="none").double()
                for slot, own in zip(
                    longer, loss_n.split([len(option) - 1 for option in longer.values()]), strict=True
                ):
                    number, choice = some[slot]
                    found[number][place] -= float(own.sum())
                    cache.keep(slot, len(choice.tokens))
        return found

    def _logits(self, appended: Appended, tokens: np.ndarray, *, every: bool = False) -> Tensor:
        """Compute float32 [texts, V], of the token after the last of each text; or after every new one, [t, V]."""
        total = len(tokens)
        borders = appended.cu_seqlens_q.astype(np.int32)
        mask = AttentionMask(PackedLayout(total, borders))
        local = self.options.local_window
        batch = PackedBatch(
            tokens_t=torch.from_numpy(tokens.astype(np.int64)),
            labels_t=torch.zeros(total, dtype=torch.int64),
            positions_t=torch.from_numpy(appended.positions.astype(np.int32)),
            weights_t=torch.zeros(total),
            trained_t=torch.zeros(total, dtype=torch.bool),
            masks=LayerMasks(mask, None, (False,) * self.options.num_layers),
            attention=appended.call(None),
            total_trained=0,
            total_weight=0.0,
            local_attention=None if local is None else appended.call(local - 1),
            wanted=torch.arange(total) if every else torch.from_numpy(borders[1:].astype(np.int64) - 1),
        ).to(self.model.where.device)
        return self.chunk.next_logits(batch, appended.to(self.model.where.device))

    def _agreed(self, chosen_n: Tensor) -> list[int]:
        """Return the choice of the first tensor-parallel rank: rounding must not let two write different texts."""
        group = self.model.ranks.tensor_group
        if self.model.ranks.tensor_size > 1:
            chosen_n = chosen_n.contiguous()
            dist.broadcast(chosen_n, src=dist.get_global_rank(group, 0), group=group)
        agreed: list[int] = chosen_n.tolist()
        return agreed
