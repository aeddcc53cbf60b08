"""tools/evaluate.py lm-eval: the trained model gives the answers that lm-eval's `hf` gives on its export."""

import gzip
import json
import runpy
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.text.chat import ChatTemplate
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.run.watchdog import Watchdog
from tests.checkpoint.models import write_model
from tests.conftest import refused
from tests.launcher import Commands, call
from tests.runs import read_jsonl, refusal

pytestmark = pytest.mark.slow  # `make test-eval` runs them
lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
TOOL = "tools/evaluate.py"
LOCAL = "dataset_path: json\ndataset_kwargs: {data_files: {test: %s}}\ntest_split: test\n"
TASKS = {
    "choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "text": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{story}}"
metric_list: [{metric: word_perplexity}]
""",
    "write": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
QUESTION = "Once upon a time, there was a child named {}. "
NAMES = ["Lily", "Tom", "Sam", "Anna", "Ben", "Mia"]
MDQA = Path(__file__).resolve().parents[2] / "examples/lm_eval"
MAX_LENGTH = 96  # shorter than the stories: contexts are cut, and rolling takes several windows


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    lines = [
        {
            "question": QUESTION.format(name) * (1 + number),
            "choices": [f" {name} was happy", " zq xk", " The dog ran to the park and saw a big tree"],
            "answer": number % 3,
            "story": f"{name} went to the park and saw a big dog. They played with a ball all day. " * (1 + number),
        }
        for number, name in enumerate(NAMES)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n" + LOCAL % (folder / "data.jsonl") + text)
    return folder


def answers(samples: list[dict[str, Any]]) -> list[Any]:
    """Return what the model answered to each question, in order."""
    return [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: int(sample["doc_id"]))]


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, (list, tuple)):
        for our_item, their_item in zip(ours, theirs, strict=True):
            assert_same(our_item, their_item)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=1e-3)
    else:
        assert str(ours) == str(theirs)


def with_tokenizer(model: Path, source: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, model)
    return model


def evaluated(
    commands: Commands, output: Path, tasks: Path, *flags: object
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    common = ["--include-path", tasks, "--output", output, "--max-length", MAX_LENGTH, "--batch-size", 4]
    commands.run(TOOL, "lm-eval", *flags, "--tasks", *TASKS, *common)
    return json.loads((output / "lm-eval.json").read_text()), read_jsonl(output / "lm-eval.items.jsonl")


def test_answers_are_those_of_lm_evals_own_model(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    """A run under tensor, pipeline and context parallelism, and lm-eval on its export."""
    from lm_eval.tasks import TaskManager

    tasks = write_tasks(tmp_path / "tasks")
    run = tmp_path / "run"
    export = tmp_path / "export"
    model = with_tokenizer(write_model(tmp_path / "model", "llama", vocab_size=512, std=0.1), stories_model)
    alone.run("tools/convert_checkpoint.py", "hf-to-megatron", "--input", model, "--output", run)
    alone.run("tools/convert_checkpoint.py", "megatron-to-hf", "--input", run, "--output", export)
    evaluation = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(export), "dtype": "float32", "max_length": MAX_LENGTH, "add_bos_token": False},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
    )
    for name, processes, layout in (
        ("tp2-pp2", 4, ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2]),
        ("cp2", 2, ["--context-parallel-size", 2]),
    ):
        record, items = evaluated(Commands(processes), tmp_path / name, tasks, run, *layout)
        results = {(result["task"], result["metric"]): result["value"] for result in record["results"]}
        assert len(results) == 4
        for (task, metric), value in results.items():
            assert value == pytest.approx(evaluation["results"][task][f"{metric},none"], rel=1e-3)
        for task in TASKS:
            task_items = [item for item in items if item["task"] == task]
            assert_same(answers(task_items), answers(evaluation["samples"][task]))


def test_two_models_are_compared_question_by_question(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    other_model = with_tokenizer(write_model(tmp_path / "other", "llama", vocab_size=512), stories_model)
    question_tokens = len(Tokenizer(stories_model).encode(QUESTION.format("Lily")))
    split_length = question_tokens * 3 // 2  # other prompts repeat the question
    flags = [stories_model, other_model, "--split-length", split_length, "--cut-middle"]
    record, _ = evaluated(alone, tmp_path / "out", write_tasks(tmp_path / "tasks"), *flags)
    values = [result["value"] for result in record["results"] if result["metric"] == "acc_norm"]
    split = [result for result in record["results"] if result["metric"].startswith("acc_norm, prompts")]
    counts = [(result["metric"], result["count"]) for result in split[:2]]
    assert counts == [(f"acc_norm, prompts <= {split_length}", 1), (f"acc_norm, prompts > {split_length}", 5)]
    assert np.average([result["value"] for result in split[:2]], weights=[1, 5]) == pytest.approx(values[0])
    (pair,) = [pair for pair in record["differences"] if pair["task"] == "choice"]
    assert pair["value"] == pytest.approx(values[1] - values[0])


def test_a_limit_is_of_each_length(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    """RULER's questions are in the order of their lengths, of which lm-eval's own limit takes the first alone.

    Its texts are of a tokenizer, so that models with different ones are not compared.
    """
    models = [with_tokenizer(write_model(tmp_path / name, "llama", vocab_size=512), stories_model) for name in "ab"]
    tokenizer = json.loads((stories_model / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (models[1] / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ["--tasks", "niah_single_1", "--lengths", 512, 768, "--max-length", 768, "--limit", 2, "--output", tmp_path]
    alone.run(TOOL, "lm-eval", stories_model, *models, *flags)
    record = json.loads((tmp_path / "lm-eval.json").read_text())
    lengths = [result["length"] for result in record["results"] if result["model"] == stories_model.name]
    items = [item for item in read_jsonl(tmp_path / "lm-eval.items.jsonl") if item["model"] == stories_model.name]
    assert (lengths, len(items)) == ([512, 768], 4)
    assert [(pair["second"], pair["length"]) for pair in record["differences"]] == [("a", 512), ("a", 768)]


def test_long_prompts_lose_their_middle() -> None:
    from megatron_ext.inference.lm_eval_model import TrainedModel

    sent: list[list[int]] = []

    def compute(_: str, prompts: list[Any], __: object) -> list[list[int]]:
        sent.extend(prompt.tokens for prompt in prompts)
        return [[] for _ in prompts]

    text = SimpleNamespace(
        template=None, encode=lambda string, begin: list(range(int(string))), answer=lambda *_, special: ""
    )
    requests = [SimpleNamespace(args=(length, {"max_gen_toks": 3, "until": []})) for length in ("4", "7", "20")]
    for cut_middle in (False, True):
        sender = SimpleNamespace(compute=compute, generator=SimpleNamespace(text=text))
        TrainedModel(sender, 10, cut_middle=cut_middle).generate_until(requests)
    short = [[0, 1, 2, 3], list(range(7))]
    assert sent == [*short, [13, 14, 15, 16, 17, 18, 19], *short, [0, 1, 2, 16, 17, 18, 19]]


def test_messages_that_a_chat_template_refuses_are_one_line() -> None:
    from megatron_ext.inference.lm_eval_model import TrainedModel

    model: Any = TrainedModel.__new__(TrainedModel)
    model.text = SimpleNamespace(template=ChatTemplate("{{ raise_exception('begin with a user') }}", (), ()))
    for asks in (False, True):
        message = refused(model.apply_chat_template, [{"role": "user", "content": "Hi"}], asks)
        assert message.startswith("chat: "), message
        assert "begin with a user" in message or not asks  # which has no message to continue
    takes_no_system = "{{ raise_exception('no') if messages[0]['role'] == 'system' else messages[0]['content'] }}"
    model.text = SimpleNamespace(template=ChatTemplate(takes_no_system, (), ()))
    chat = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(chat) == "Hi"


def test_an_unknown_task_is_refused(stories_model: Path) -> None:
    first, second = Commands(2).attempt(TOOL, "lm-eval", stories_model, "--tasks", "no_such_task")
    assert (first.status, second.status) == (2, 2)
    (line,) = [line for line in first.stderr.splitlines() if line.startswith("error: ")]
    assert "lm-eval: no_such_task cannot be run" in line


def test_a_task_without_its_package_is_refused(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("import no_such_package\n")
    (tmp_path / "task.yaml").write_text("task: needy\noutput_type: generate_until\ndoc_to_text: !function score.text\n")
    (done,) = alone.attempt(TOOL, "lm-eval", stories_model, "--tasks", "needy", "--include-path", tmp_path)
    assert "lm-eval: needy cannot be run (No module named 'no_such_package')" in refusal(done)


def test_a_task_that_runs_a_models_programs_is_refused(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    name = next(iter(TASKS))
    with (tasks / f"{name}.yaml").open("a") as file:
        file.write("unsafe_code: true\n")
    (done,) = alone.attempt(TOOL, "lm-eval", stories_model, "--tasks", name, "--include-path", tasks)
    assert "marked as unsafe" in refusal(done)


def test_texts_that_a_task_draws_are_those_of_lm_evals_own_run(stories_model: Path, tmp_path: Path) -> None:
    """RULER draws them as it loads, other tasks also as they are asked."""
    from lm_eval.tasks import TaskManager

    from megatron_ext.inference.lm_eval_model import Tasks

    (tmp_path / "draw.py").write_text(
        "import random\nimport datasets\n\n"
        "def texts(**unused):\n"
        "    return {'test': datasets.Dataset.from_list([{'text': str(random.random())} for _ in range(3)])}\n\n"
        "def text(doc):\n    return doc['text'] + str(random.random())\n"
    )
    (tmp_path / "task.yaml").write_text(
        "task: drawn\noutput_type: generate_until\ncustom_dataset: !function draw.texts\ntest_split: test\n"
        "doc_to_text: !function draw.text\ndoc_to_target: '{{text}}'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 1}\n"
    )

    def asked(tasks: TaskManager) -> list[object]:
        evaluation = lm_eval.simple_evaluate(model="dummy", tasks=["drawn"], task_manager=tasks, bootstrap_iters=0)
        return [sample["arguments"] for sample in evaluation["samples"]["drawn"]]

    arguments = asked(TaskManager(include_path=str(tmp_path)))
    for _ in range(2):
        tasks = Tasks(["drawn"], Tokenizer(stories_model), None, tmp_path)
        for _ in range(2):
            assert asked(tasks) == arguments


def wait_for_slow_tasks(rank: int) -> str:
    from megatron_ext.inference.lm_eval_model import Tasks, ask

    def load() -> Tasks:
        time.sleep(3)
        raise UserError("loaded slowly")

    generator: Any = SimpleNamespace(model=SimpleNamespace(ranks=SimpleNamespace(world=rank)))
    try:
        with Watchdog(rank, None, 1.0):
            ask(generator, load, 10)
    except UserError as error:
        return str(error)
    return ""


def test_the_watchdog_waits_for_what_lm_eval_prepares() -> None:
    assert call(wait_for_slow_tasks, 2) == ["loaded slowly"] * 2


def test_mdqa_looks_for_an_answer_in_the_first_line() -> None:
    score = runpy.run_path(str(MDQA / "mdqa/utils.py"))["score"]
    for text, answers, right in (
        (" The U.S. Senate.", ["us  senate"], 1.0),
        ("an anthem", ["a theme", "Anthem!"], 1.0),
        ("I do not know\nLily", ["Lily"], 0.0),
        ("Lil", ["Lily"], 0.0),
    ):
        assert score({"answers": answers, "gold": 4}, [text]) == {"acc": right, "gold_at_4": right}


def write_mdqa(path: Path, documents: int, gold: int) -> None:
    """Write a file of the fields of the public ones. An article is in every text, the other answer in none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ctxs = [
        {"id": str(place), "title": f"Park {place}", "text": f"{NAMES[place % 6]} saw it.", "isgold": place == gold}
        for place in range(documents)
    ]
    lines = [{"question": f"who saw {answer}", "answers": [answer], "ctxs": ctxs} for answer in ("the", "zqxk")]
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_mdqa_of_the_users_files(stories_model: Path, tmp_path: Path) -> None:
    """Scores are means, over all and for each gold position; a file that is missing or of another kind is refused."""
    name = "20_total_documents/nq-open-20_total_documents_gold_at_{}.jsonl.gz"
    files = {gold: tmp_path / name.format(gold) for gold in (0, 4, 9, 14, 19)}
    for gold, file in files.items():
        write_mdqa(file, 20, gold)
    commands = Commands(environment={"MDQA_DATA": str(tmp_path)})
    out = tmp_path / "out"
    flags = [stories_model, "--include-path", MDQA, "--max-length", 512, "--output", out, "--overwrite", "--tasks"]
    commands.run(TOOL, "lm-eval", *flags, "mdqa_20")
    scores = {result["metric"]: result["value"] for result in json.loads((out / "lm-eval.json").read_text())["results"]}
    assert scores == dict.fromkeys(["acc", *(f"gold_at_{gold}" for gold in files)], 0.5)
    items = read_jsonl(out / "lm-eval.items.jsonl")
    assert [item["doc"]["gold"] for item in items] == [*files, *files]
    prompt = items[0]["arguments"][0][0]
    assert prompt.index("Text 1, Park 0: Lily saw it.") < prompt.index("Text 20, Park 19: Tom saw it.")
    assert prompt.endswith("\n\nQuestion: who saw the\nAnswer:")
    files[19].write_bytes(files[0].read_bytes())
    for task, message in (("mdqa_30", "gold_at_0.jsonl.gz is missing"), ("mdqa_20", "isgold at 19")):
        (process,) = commands.attempt(TOOL, "lm-eval", *flags, task)
        assert process.status == 2
        assert message in process.stderr
