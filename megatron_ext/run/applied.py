"""A model's answers to applied samples: written, weighed, or run as programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.errors import UserError, first_line
from megatron_ext.evaluation.applied.code import job_of, judged
from megatron_ext.evaluation.applied.results import Item, cut, program_scores, written_scores
from megatron_ext.evaluation.applied.sandbox import Ending, Job, Limits, Verdict
from megatron_ext.evaluation.applied.scoring import choice_scores
from megatron_ext.evaluation.applied.tasks import TASKS, Family, Sample
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.sampling import Sampling
from megatron_ext.run.generate import Choice, Generator, Prompt
from megatron_ext.run.opened import Dtype, Opened, opened, warn_beyond_training

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Programs:
    """Says how many programs are drawn for a problem, and how they are run.

    Attributes:
        number: beside the greedy one; 0 for that alone.
        sampling: how their tokens are chosen.
        ks: of pass@k.
        limits: of each.
        workers: at a time on each process.
    """

    number: int
    sampling: Sampling
    ks: tuple[int, ...]
    limits: Limits
    workers: int


def answer_samples(
    pretrained: Pretrained,
    model_text: ModelText,
    processes: ParallelConfig,
    samples: Mapping[int, Sequence[Sample]],
    batch_size: int,
    programs: Programs,
    dtype: Dtype = "auto",
) -> list[Item]:
    """Ask a model all samples, and score its answers; all processes get them.

    Args:
        pretrained, model_text: the model.
        processes: how they share it.
        samples: by length, the same on every process.
        batch_size: texts at a time in each group of processes.
        programs: how code is drawn and run.
        dtype: in which the model computes.

    Raises:
        UserError: processes that generate no text, a model that they cannot share, a kernel that confines no program.
    """
    items = []
    with opened(pretrained, processes, max(samples), dtype) as model:
        generator = Generator(model, batch_size, model_text.stop)
        for length, asked in samples.items():
            warn_beyond_training(pretrained, length)
            logger.info("%s: %d samples of up to %d tokens", pretrained.folder, len(asked), length)
            asker = _Asker(model, model_text, generator, length, programs)
            found = dict(asker.weighed(asked)) | dict(asker.written(asked)) | dict(asker.programmed(asked))
            items += [found[number] for number in range(len(asked))]
    return items


@dataclass(frozen=True)
class _Asker:
    """Asks samples of a length, each kind in its way; items come with their sample's number."""

    model: Opened
    text: ModelText
    generator: Generator
    length: int
    programs: Programs

    def weighed(self, asked: Sequence[Sample]) -> Iterator[tuple[int, Item]]:
        """Weigh the options of choices."""
        numbered = self._of(asked, lambda family: family is Family.CHOICE)
        choices = [self._choice(sample) for _, sample in numbered]
        for (number, sample), choice, found in zip(numbered, choices, self.generator.likelihoods(choices), strict=True):
            scores = choice_scores(found, [len(option) for option in choice.options], sample.gold)
            likeliest = sample.options[found.index(max(found))].strip()
            yield number, Item(self.length, sample, len(choice.tokens), (), likeliest, scores, tuple(found))

    def _choice(self, sample: Sample) -> Choice:
        """Encode a prompt with each option, because a tokenizer may join what meets; what all share is the prompt."""
        prompt = self.text.encode(sample.prompt)
        wholes = [self.text.encode(sample.prompt + option) for option in sample.options]
        shared = min(_shared(prompt, whole) for whole in wholes)
        return Choice(prompt[:shared], [whole[shared:] for whole in wholes])

    def written(self, asked: Sequence[Sample]) -> Iterator[tuple[int, Item]]:
        """Let the model write answers, the likeliest token each time."""
        numbered = self._of(asked, lambda family: family not in (Family.CHOICE, Family.CODE))
        prompts = [self._prompt(sample) for _, sample in numbered]
        for (number, sample), prompt, tokens in zip(numbered, prompts, self.generator.answer(prompts), strict=True):
            text = cut(self.text.answer(tokens), TASKS[sample.task].stops)
            scores = written_scores(sample, text)
            yield number, Item(self.length, sample, len(prompt.tokens), tuple(tokens), text, scores)

    def programmed(self, asked: Sequence[Sample]) -> Iterator[tuple[int, Item]]:
        """Let the model write programs, the likeliest and some that are drawn, and run them."""
        numbered = self._of(asked, lambda family: family is Family.CODE)
        prompts = [self._prompt(sample) for _, sample in numbered]
        drawn = [prompt for prompt in prompts for _ in range(self.programs.number)]
        greedy = self.generator.answer(prompts)
        others = iter(self.generator.answer(drawn, self.programs.sampling))
        answers = [[tokens, *(next(others) for _ in range(self.programs.number))] for tokens in greedy]
        jobs: list[Job] = []
        for (_, sample), own in zip(numbered, answers, strict=True):
            assert sample.program is not None
            jobs += [job_of(sample.prompt, self._code(sample, tokens), sample.program) for tokens in own]
        verdicts = iter(self._judged(jobs))
        for (number, sample), prompt, own in zip(numbered, prompts, answers, strict=True):
            ended = [next(verdicts) for _ in own]
            passed = [verdict.ending is Ending.PASSED for verdict in ended]
            scores = program_scores(passed[0], passed[1:], self.programs.ks)
            texts = tuple(self._code(sample, tokens) for tokens in own)
            yield (
                number,
                Item(
                    self.length,
                    sample,
                    len(prompt.tokens),
                    tuple(own[0]),
                    texts[0],
                    scores,
                    programs=texts,
                    verdicts=tuple(ended),
                ),
            )

    def _judged(self, jobs: Sequence[Job]) -> list[Verdict]:
        """Run programs, shared out over all processes; all get all verdicts."""
        ranks = self.model.ranks
        found: list[Verdict] | str
        try:
            found = judged(jobs[ranks.world :: ranks.world_size], self.programs.limits, self.programs.workers)
        except (UserError, OSError) as error:  # the others would wait for this process in vain
            found = first_line(error)
        shares: list[list[Verdict] | str] = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(shares, found)
        verdicts: list[Verdict] = []
        for number in range(len(jobs)):
            share = shares[number % ranks.world_size]
            if isinstance(share, str):
                raise UserError(share)
            verdicts.append(share[number // ranks.world_size])
        return verdicts

    def _code(self, sample: Sample, tokens: Sequence[int]) -> str:
        return cut(self.text.answer(tokens), TASKS[sample.task].stops)

    def _prompt(self, sample: Sample) -> Prompt:
        """Encode a prompt; its answer ends with the first of the task's stops."""
        stops = TASKS[sample.task].stops
        last = max(map(len, stops), default=0) + 1  # so many tokens hold the end of any stop, and what is joined to it

        def ended(tokens: Sequence[int]) -> bool:
            end = self.text.decode(tokens[-last:])
            return any(stop in end for stop in stops)

        return Prompt(self.text.encode(sample.prompt), sample.new_tokens, ended if stops else None)

    @staticmethod
    def _of(asked: Sequence[Sample], wanted: Callable[[Family], bool]) -> list[tuple[int, Sample]]:
        """Return the samples of some families, numbered."""
        return [(number, sample) for number, sample in enumerate(asked) if wanted(TASKS[sample.task].family)]


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two texts begin with alike."""
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))
