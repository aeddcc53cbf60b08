"""Run lm-eval on a trained model under any parallel layout, without exporting it.

Process 0 runs lm-eval and sends its requests to the others; all processes compute them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_ext.arrays import Float64
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import ParallelConfig
from megatron_ext.errors import UserError, first_line
from megatron_ext.evaluation.model_text import ModelText
from megatron_ext.evaluation.sampling import Sampling
from megatron_ext.evaluation.statistics import Key
from megatron_ext.run.generate import Choice, Generator, Prompt, inference_layout
from megatron_ext.run.inference import Dtype, open_model

MAIN = ("acc_norm", "acc", "exact_match", "em", "f1")  # main metrics for comparing models: the first that a task has


class Requests:
    """Sends process 0's requests to all processes, which compute them together."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        # lm-eval may prepare data for a long time between two requests
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        self.failed = False

    def ask(self, method: str, *args: Any) -> Any:
        """Call a collective method of the generator on all processes."""
        self.failed = True  # until it returns
        self._sent((method, args))
        answers = getattr(self.generator, method)(*args)
        self.failed = False
        return answers

    def serve(self) -> None:
        """Compute requests of process 0 until it finishes.

        Raises:
            UserError: an error of process 0.
        """
        while (request := self._sent(None)) is not None:
            if isinstance(request, str):
                raise UserError(request)
            getattr(self.generator, request[0])(*request[1])

    def finish(self, refusal: str | None = None) -> None:
        """Release the other processes or make them raise a UserError; after a failed request they have left."""
        if not self.failed:
            self._sent(refusal)

    def _sent(self, request: Any) -> Any:
        box = [request]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


class TrainedModel(TemplateLM):
    """The model interface of lm-eval for a trained model, on process 0.

    Args:
        requests: sends requests to all processes.
        text: the model's tokenizer.
        max_length: maximum number of tokens of a text; longer contexts are truncated on the left, as in lm-eval's `hf`
            model.
        chat: prompts are rendered by the chat template.
        cut_middle: prompts of generated answers are truncated in the middle instead, as in LongBench's own code.
    """

    def __init__(
        self, requests: Requests, text: ModelText, max_length: int, *, chat: bool = False, cut_middle: bool = False
    ) -> None:
        super().__init__()
        self.requests, self.text, self.max_length, self.chat = requests, text, max_length, chat
        self.cut_middle = cut_middle

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self.text.stop) if self.text.end is None else self.text.end

    @cached_property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the tokenizer's BOS, or else its end token."""
        try:
            return self.text.tokenizer.bos_id
        except UserError:
            return self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Encode a text, after a BOS if the command has --bos; a chat template spells its own special tokens."""
        if self.chat:
            return self.text.encode_chat(string)
        return self.text.tokenizer.encode(string) if add_special_tokens is False else self.text.encode(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation."""
        template = self.text.chat()[0]
        return template.prompt(chat_history) if add_generation_prompt else template.render(chat_history).text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template."""
        return self.text.chat()[0].source if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's fingerprint."""
        return self.text.tokenizer.fingerprint

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; those with the same context are scored together."""
        options: dict[tuple[int, ...], list[int]] = {}
        continuations = [continuation[-self.max_length :] for _, _, continuation in requests]
        for number, (_, context, _) in enumerate(requests):
            kept = context[-(self.max_length + 1 - len(continuations[number])) :]
            options.setdefault(tuple(kept), []).append(number)
        choices = [Choice(context, [continuations[n] for n in numbers]) for context, numbers in options.items()]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for numbers, scores in zip(options.values(), self.requests.ask("likelihoods", choices), strict=True):
            for number, score in zip(numbers, scores, strict=True):
                found[number] = (score.log_probability, score.greedy)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts in windows of `max_length`."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        ends = [0]
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *make_disjoint_window(pair)) for pair in rolling]
            ends.append(len(windows))
        found = self._loglikelihood_tokens(windows)
        return [sum(score for score, _ in found[start:end]) for start, end in pairwise(ends)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts; those with the same options are generated together."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers = [""] * len(requests)
        for options, numbers in groups.items():
            wanted = normalize_gen_kwargs(json.loads(options))
            until, new_tokens = [stop for stop in wanted["until"] if stop], wanted["max_gen_toks"]
            if new_tokens >= self.max_length:
                raise UserError(f"max_length: got {self.max_length}, needs more than the {new_tokens} of an answer")
            sampling = Sampling()
            if wanted["do_sample"]:
                sampling = Sampling(wanted["temperature"], wanted.get("top_k"), wanted.get("top_p"))
            prompts = []
            for number in numbers:
                tokens, room = self.tok_encode(requests[number].args[0]), self.max_length - new_tokens
                start = room // 2 if self.cut_middle and len(tokens) > room else 0
                tokens = tokens[:start] + tokens[-(room - start) :]
                prompts.append(Prompt(tokens or [self.prefix_token_id], new_tokens, tuple(until)))
            for number, tokens in zip(numbers, self.requests.ask("answer", prompts, sampling), strict=True):
                answers[number] = postprocess_generated_text(self.text.answer(tokens), until, None)
        return answers


@dataclass(frozen=True)
class HarnessOptions:
    """Options of lm-eval.

    Attributes:
        tasks: names of its tasks or of tasks in `include_path`.
        shots: number of few-shot examples; None for the task's own.
        limit: number of questions per task; None for all.
        include_path: a folder with task files.
        lengths: in tokens, for tasks that generate texts of a given length (RULER).
        chat: use the chat template.
        cut_middle: as in `TrainedModel`.
    """

    tasks: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    include_path: Path | None = None
    lengths: tuple[int, ...] = ()
    chat: bool = False
    cut_middle: bool = False


def run_lm_eval(model: TrainedModel, options: HarnessOptions) -> Mapping[str, Any]:
    """Run lm-eval on process 0; return its results.

    Raises:
        UserError: an unknown task, or data that cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        # RULER opens the tokenizer with trust_remote_code: give it only the vocabulary
        file = model.text.tokenizer.file
        metadata: dict[str, Any] = {"max_seq_lengths": list(options.lengths)} if options.lengths else {}
        if file.name == "tokenizer.json":
            (Path(folder) / file.name).write_bytes(file.read_bytes())
            (Path(folder) / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
            metadata |= {"tokenizer": folder}
        include = None if options.include_path is None else str(options.include_path)
        try:
            manager = TaskManager(include_path=include, metadata=metadata)
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=list(options.tasks),
                num_fewshot=options.shots,
                limit=options.limit,
                task_manager=manager,
                apply_chat_template=options.chat,
                fewshot_as_multiturn=options.chat,
            )
        except UserError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"lm-eval: {', '.join(options.tasks)} cannot be run ({first_line(error)[:200]}); `lm-eval ls tasks` "
                "lists the tasks; offline, their data must be in Hugging Face's cache or in files of --include-path"
            ) from None
    assert found is not None
    return found


def evaluate(
    pretrained: Pretrained,
    text: ModelText,
    processes: ParallelConfig,
    options: HarnessOptions,
    max_length: int,
    batch_size: int,
    dtype: Dtype = "auto",
) -> Mapping[str, Any] | None:
    """Run lm-eval on a trained model; return lm-eval's results on process 0. Collective."""
    with open_model(pretrained, inference_layout(processes), max_length, dtype) as model:
        stop = text.chat()[1] if options.chat else text.stop
        requests = Requests(Generator(model, batch_size, stop, text.decode))
        if model.ranks.world:
            requests.serve()
            return None
        try:
            harness_model = TrainedModel(requests, text, max_length, chat=options.chat, cut_middle=options.cut_middle)
            found = run_lm_eval(harness_model, options)
        except UserError as error:
            requests.finish(str(error))
            raise
        requests.finish()
        return found


def results_of(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the metrics of tasks and groups. RULER names its metrics by length; -1 means no samples."""
    for task, metrics in (found["results"] | found.get("groups", {})).items():
        for key, value in metrics.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            result = {"task": task, "metric": metric if kind == "none" else key, "value": float(value)}
            if metric.isdigit():
                result |= {"metric": "score", "length": int(metric)}
            if not (metric.isdigit() and value == -1):
                yield result


def items_of(found: Mapping[str, Any]) -> dict[Key, Float64]:
    """Return the main score of each question of each task, by the task's first filter; for RULER, by length."""
    items: dict[Key, Float64] = {}
    for task, own in _answers(found):
        scored = {
            name: np.array([float(answer[name]) for answer in own])
            for name in dict.fromkeys((*MAIN, *(own[0].get("metrics", ()) if own else ())))
            if own and isinstance(own[0].get(name), (int, float))
        }
        by_length = {int(name): scores[scores != -1] for name, scores in scored.items() if name.isdigit()}
        if by_length:
            items |= {(task, "score", length): scores for length, scores in by_length.items() if len(scores)}
        elif scored:
            metric, scores = next(iter(scored.items()))
            items[task, metric, None] = scores
    return items


def results_by_prompt_length(
    found: Mapping[str, Any], encode: Callable[[str], Sequence[int]], length: int
) -> Iterator[dict[str, Any]]:
    """Return the mean main score of prompts of at most `length` tokens and of longer ones, by task and over tasks."""
    prompts = {task: np.array([len(encode(one["arguments"][0][0])) for one in own]) for task, own in _answers(found)}
    for sign, chosen in ("<=", np.less_equal), (">", np.greater):
        means = []
        for (task, metric, asked), scores in items_of(found).items():
            own = scores[chosen(prompts[task], length)] if asked is None else scores[:0]  # RULER's have their lengths
            if len(own):
                means.append(float(own.mean()))
                name = f"{metric}, prompts {sign} {length}"
                yield {"task": task, "metric": name, "value": means[-1], "count": len(own)}
        if means:
            name = f"mean of tasks, prompts {sign} {length}"
            yield {"task": "all", "metric": name, "value": float(np.mean(means)), "count": len(means)}


def _answers(found: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each task's answers in the order of its questions, as its first filter reads them."""
    for task, answers in found["samples"].items():
        own = [answer for answer in answers if answer.get("filter") == answers[0].get("filter")]
        yield task, sorted(own, key=lambda answer: int(answer["doc_id"]))
