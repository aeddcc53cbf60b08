"""Run lm-eval on a loaded model under any parallel layout, without exporting it.

Process 0 runs lm-eval and sends its requests to the others; all processes compute them.
"""

import itertools
import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch.distributed as dist
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_ext import heartbeat
from megatron_ext.arrays import Float64
from megatron_ext.config import ParallelConfig
from megatron_ext.data.text.chat import ChatError
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError, first_line
from megatron_ext.evaluation.model_text import ModelText, warn_of_unapplied
from megatron_ext.evaluation.report import Key, compare
from megatron_ext.inference.generate import Choice, Generator, Prompt, open_generator
from megatron_ext.inference.options import LmEvalOptions
from megatron_ext.inference.sampling import Sampling

logger = logging.getLogger(__name__)
MAIN = ("acc_norm", "acc", "exact_match", "em", "f1")  # main metrics for comparing models: the first that a task has


class Requests:
    """Sends process 0's requests to all processes, which compute them together."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        # lm-eval may prepare data for a long time between two requests
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        self.failed = False

    def compute(self, method: str, *args: Any) -> Any:
        """Call a collective method of the generator on all processes."""
        self.failed = True  # until it returns
        self._broadcast((method, args))
        with heartbeat.limit(True):
            answers = getattr(self.generator, method)(*args)
        self.failed = False
        return answers

    def serve(self) -> None:
        """Compute requests of process 0 until it finishes; raise its error, if any, as a UserError."""
        request = self._broadcast(None)
        while isinstance(request, tuple):
            with heartbeat.limit(True):
                getattr(self.generator, request[0])(*request[1])
            request = self._broadcast(None)
        dist.destroy_process_group(self.group)
        if request is not None:
            raise UserError(request)

    def finish(self, error: str | None = None) -> None:
        """Release the other processes, or make them raise a UserError; after a failed request they have left."""
        if not self.failed:
            self._broadcast(error)
            dist.destroy_process_group(self.group)

    def _broadcast(self, request: Any) -> Any:
        box = [request]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


class TrainedModel(TemplateLM):
    """The model interface of lm-eval for a loaded model, on process 0.

    Contexts of texts of more than `max_length` tokens are truncated on the left, as in lm-eval's `hf` model; with
    `cut_middle`, prompts of generated answers are truncated in the middle, as in LongBench's own code.
    """

    def __init__(self, requests: Requests, max_length: int, *, cut_middle: bool = False) -> None:
        super().__init__()
        self.requests = requests
        self.max_length = max_length
        self.cut_middle = cut_middle
        self.cut = 0  # number of prompts that were truncated
        self.text = requests.generator.text

    @property
    def eot_token_id(self) -> int:
        end = self.text.end
        if end is None:
            end = min(self.text.stop)
        return self.text.checked([end])[0]

    @cached_property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the tokenizer's BOS, or else its end token."""
        try:
            return self.text.checked([self.text.tokenizer.bos_id])[0]
        except UserError:
            return self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Encode a text, after a BOS if the command has --bos; a chat template spells its own special tokens."""
        return self.text.encode(string, begin=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a prompt as lm-eval's `hf` model does: without a generation prompt the last message is continued."""
        template = self.text.template
        assert template is not None
        render = partial(template.prompt, continued=not add_generation_prompt, may_spell=True)
        without_system = [message for message in chat_history if message["role"] != "system"]
        try:
            return render(chat_history)
        except ChatError as error:
            if len(without_system) == len(chat_history):
                raise UserError(f"chat: a task's messages: {error}; leave --chat out") from None
        logger.warning("chat: the template takes no system message, so it is left out")
        return self.apply_chat_template(without_system, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if self.text.template is None:
            return None
        return self.text.template.source

    @property
    def tokenizer_name(self) -> str:
        return self.text.tokenizer.fingerprint

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; those with the same context are scored together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        contexts = []
        continuations = [continuation for _, _, continuation in requests]
        longest = max(map(len, continuations), default=0)
        if longest > self.max_length:
            raise UserError(f"max_length: got {self.max_length}, needs at least the {longest} of an answer to choose")
        for number, (_, context, _) in enumerate(requests):
            kept = tuple(context[-(self.max_length + 1 - len(continuations[number])) :])
            contexts.append(kept)
            self.cut += len(kept) < len(context)
            # documents begin with the same single token, which saves nothing, but would be one copy's work for all
            group = kept
            if len(kept) == 1:
                group = (number,)
            groups.setdefault(group, []).append(number)
        choices = [Choice(contexts[numbers[0]], [continuations[n] for n in numbers]) for numbers in groups.values()]
        scores = itertools.chain.from_iterable(self.requests.compute("likelihoods", choices))
        by_number = dict(zip(itertools.chain.from_iterable(groups.values()), scores, strict=True))
        return [by_number[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[Any, list[int], list[int]]] = []
        ends = [0]
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *make_disjoint_window(pair)) for pair in rolling]
            ends.append(len(windows))
        scores = self._loglikelihood_tokens(windows)
        return [sum(score for score, _ in scores[start:end]) for start, end in itertools.pairwise(ends)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts; those with the same options are generated together."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers = [""] * len(requests)
        for options, numbers in groups.items():
            wanted = normalize_gen_kwargs(json.loads(options))
            warn_of_unapplied("lm-eval: generation_kwargs", wanted)
            until = [stop for stop in wanted["until"] if stop]
            new_tokens = wanted["max_gen_toks"]
            limit = self.max_length - new_tokens
            if limit <= 0:
                raise UserError(f"max_length: got {self.max_length}, needs more than the {new_tokens} of an answer")
            sampling = Sampling()
            if wanted["do_sample"]:
                sampling = Sampling(wanted["temperature"], wanted.get("top_k") or None, wanted.get("top_p"))
            prompts = []
            for number in numbers:
                tokens = self.tok_encode(requests[number].args[0])
                start = 0
                self.cut += len(tokens) > limit
                if self.cut_middle and len(tokens) > limit:
                    start = limit // 2
                tokens = tokens[:start] + tokens[-(limit - start) :]
                prompts.append(Prompt(tokens or [self.prefix_token_id], new_tokens, tuple(until)))
            for number, tokens in zip(numbers, self.requests.compute("answer", prompts, sampling), strict=True):
                text = self.text.answer([], tokens, special=False)
                answers[number] = postprocess_generated_text(text, until, None)
        return answers


class Tasks(TaskManager):
    """Tasks of lm-eval with their data, loaded once. RULER makes texts of `lengths` tokens of the tokenizer.

    Raises:
        UserError: a task is unknown, or its data cannot be loaded.
    """

    def __init__(
        self, names: Sequence[str], tokenizer: Tokenizer, lengths: Sequence[int] | None, include_path: Path | None
    ) -> None:
        self.names = list(names)
        with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder, self.refusing():
            # RULER opens the tokenizer with trust_remote_code: give it only the vocabulary
            file = tokenizer.file
            metadata: dict[str, Any] = {}
            if lengths:
                metadata["max_seq_lengths"] = list(lengths)
            if file.name == "tokenizer.json":
                (Path(folder) / file.name).write_bytes(file.read_bytes())
                (Path(folder) / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
                metadata["tokenizer"] = folder
            folders = None
            if include_path is not None:
                folders = str(include_path)
            super().__init__(include_path=folders, metadata=metadata)
            # RULER and others draw their texts: seeded as in `lm_eval.simple_evaluate`, they are the same each time
            random.seed(DEFAULT_RANDOM_SEED)
            np.random.seed(DEFAULT_OTHER_SEED)
            self.loaded = super().load(self.names)
            self.random_states = random.getstate(), np.random.get_state()

    def load(self, task_list: Any) -> Any:
        """Return the loaded tasks, with the random states after they were loaded."""
        python, numpy = self.random_states
        random.setstate(python)
        np.random.set_state(numpy)
        return self.loaded

    def first(self, count: int) -> dict[str, list[int]]:
        """Return the first `count` questions of each task, and of each length of RULER, whose lengths are in order."""
        numbers: dict[str, list[int]] = {}
        for name, task in self.loaded["tasks"].items():
            lengths = [doc.get("max_length") if isinstance(doc, dict) else None for doc in task.eval_docs]
            numbers[name] = [n for n, length in enumerate(lengths) if n - lengths.index(length) < count]
        return numbers

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise UserError for errors of the tasks' own code and data."""
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, KeyError, ImportError, AssertionError, TemplateError) as error:
            raise UserError(
                f"lm-eval: {', '.join(self.names)} cannot be run ({first_line(error)[:200]}); `lm-eval ls tasks` "
                "lists the tasks; offline, their data must be in Hugging Face's cache or in files of the include path"
            ) from None


@heartbeat.limit(False)  # lm-eval prepares and scores texts of all requests at once, while other processes wait
def ask(
    generator: Generator,
    load: Callable[[], Tasks],
    max_length: int,
    *,
    shots: int | None = None,
    limit: int | None = None,
    cut_middle: bool = False,
    chat: bool = False,
) -> Mapping[str, Any] | None:
    """Run the tasks that process 0 loads; return lm-eval's results there, and None on other processes. Collective.

    `TrainedModel` describes `max_length` and `cut_middle`; `limit` is the number of questions, all if it is None.

    Raises:
        UserError: the tasks cannot be loaded or run; raised on all processes.
    """
    requests = Requests(generator)
    if generator.model.ranks.world:
        requests.serve()
        return None
    try:
        tasks = load()
        model = TrainedModel(requests, max_length, cut_middle=cut_middle)
        with tasks.refusing():
            output: Mapping[str, Any] = lm_eval.simple_evaluate(
                model=model,
                tasks=tasks.names,
                num_fewshot=shots,
                samples=None if limit is None else tasks.first(limit),
                task_manager=tasks,
                bootstrap_iters=0,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
    except UserError as error:
        requests.finish(str(error))
        raise
    requests.finish()
    if model.cut:
        logger.warning("max_length: %d prompts are longer than %d tokens, and were cut", model.cut, max_length)
    return output


def evaluate(
    options: LmEvalOptions, processes: ParallelConfig, models: Mapping[str, ModelText]
) -> Iterator[tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]]:
    """Run lm-eval on trained models. Collective.

    Yields:
        After each model, of all models so far: a part of the record, and every answer of each model.
    """
    results: list[dict[str, Any]] = []
    items: dict[str, dict[Key, Float64]] = {}
    samples = {}
    lengths = {}
    for name, text in models.items():
        length = options.max_length or text.pretrained.length
        if length is None:
            raise UserError(f"max_length: {text.pretrained.folder} does not say its trained length; give --max-length")
        lengths[name] = length
    recorded = "tasks shots limit lengths chat cut_middle split_length bos dtype tokenizer"
    settings = {name: getattr(options, name) for name in recorded.split()} | {"max_length": lengths}
    tokenizers = [text.tokenizer.fingerprint for text in models.values()]
    for name, text in models.items():
        output = _ask_model(options, processes, text, lengths[name])
        differences = []
        if output is not None:
            model_results = list(results_of(output))
            if options.split_length is not None:
                model_results += results_by_prompt_length(output, text.encode, options.split_length)
            results += [{"model": name, **result} for result in model_results]
            items[name] = items_of(output)
            if text.tokenizer.fingerprint != tokenizers[0]:  # RULER made other texts
                items[name] = {key: scores for key, scores in items[name].items() if key[2] is None}
            samples[name] = _samples(output)
            differences = list(compare(items))
        yield {"settings": settings, "results": results, "differences": differences}, samples


def _samples(output: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"task": task, **answer} for task, answers in output["samples"].items() for answer in answers]


def _ask_model(
    options: LmEvalOptions, processes: ParallelConfig, text: ModelText, length: int
) -> Mapping[str, Any] | None:
    """Run lm-eval on a model, which is not kept; returns as `ask` does. Collective."""
    load = partial(Tasks, options.tasks, text.tokenizer, options.lengths, options.include_path)
    asked = {name: getattr(options, name) for name in ("shots", "limit", "cut_middle", "chat")}
    with open_generator(text, processes, length, dtype=options.dtype, slots=options.batch_size) as generator:
        return ask(generator, load, length, **asked)


def results_of(output: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the metrics of tasks and groups. RULER names its metrics by length; -1 means no samples."""
    for task, metrics in (output["results"] | output.get("groups", {})).items():
        for key, value in metrics.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            if metric.isdigit():
                if value != -1:
                    yield {"task": task, "metric": "score", "value": float(value), "length": int(metric)}
                continue
            if kind != "none":
                metric = key
            yield {"task": task, "metric": metric, "value": float(value)}


def items_of(output: Mapping[str, Any]) -> dict[Key, Float64]:
    """Return the main score of each question of each task, by the task's first filter; for RULER, by length."""
    items: dict[Key, Float64] = {}
    for task, answers in _answers(output):
        metrics = dict.fromkeys((*MAIN, *(name for answer in answers for name in answer.get("metrics", ()))))
        lengths = sorted(int(name) for name in metrics if name.isdigit())
        for length in lengths:
            # a question of RULER has the score of its own length, perhaps -1 for others
            scores = [float(answer.get(str(length), -1)) for answer in answers]
            items[task, "score", length] = np.array([score for score in scores if score != -1])
        names = [name for name in metrics if isinstance(answers[0].get(name), (int, float))]
        if names and not lengths:
            items[task, names[0], None] = np.array([float(answer[names[0]]) for answer in answers])
    return {key: scores for key, scores in items.items() if len(scores)}


def results_by_prompt_length(
    output: Mapping[str, Any], encode: Callable[[str], Sequence[int]], length: int
) -> Iterator[dict[str, Any]]:
    """Return the mean main score of prompts of at most `length` tokens and of longer ones, by task and over tasks."""
    prompts = {
        task: np.array([len(encode(answer["arguments"][0][0])) for answer in answers])
        for task, answers in _answers(output)
    }
    for sign, compared in ("<=", np.less_equal), (">", np.greater):
        means = []
        for (task, metric, ruler_length), scores in items_of(output).items():
            if ruler_length is not None:
                continue
            scores = scores[compared(prompts[task], length)]
            if len(scores):
                means.append(float(scores.mean()))
                name = f"{metric}, prompts {sign} {length}"
                yield {"task": task, "metric": name, "value": means[-1], "count": len(scores)}
        if means:
            name = f"mean of tasks, prompts {sign} {length}"
            yield {"task": "all", "metric": name, "value": float(np.mean(means)), "count": len(means)}


def _answers(output: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each task's answers, if any, in the order of its questions, as its first filter reads them."""
    for task, answers in output["samples"].items():
        chosen = [answer for answer in answers if answer.get("filter") == answers[0].get("filter")]
        if chosen:
            yield task, sorted(chosen, key=lambda answer: int(answer["doc_id"]))
