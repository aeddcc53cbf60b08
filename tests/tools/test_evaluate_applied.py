"""tools/evaluate.py applied: answers and the weights of options are transformers', and programs are run."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.models import write_model
from evaluation.applied.published import humaneval, write_files
from launcher import ROOT, Commands
from transformers import AutoModelForCausalLM

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError
from megatron_ext.evaluation.applied.results import cut
from megatron_ext.evaluation.applied.sandbox import Ending, Job, Limits, RefusedError, Verdict, check_sandbox
from megatron_ext.evaluation.applied.tasks import TASKS, Family, Sample, make_samples, read_given
from megatron_ext.files.fingerprint import fingerprint
from megatron_ext.run import applied

pytest.importorskip("rouge_score", reason="needs rouge-score: pip install -e '.[eval]'")

TOOL = "tools/evaluate.py"
SAMPLES = 2
# every family; the stories' tokenizer has 512 tokens, so that prompts take many
FAMILIES = [
    "kilt_nq",
    "msmarco",
    "icl_trec_fine",
    "narrativeqa",
    "multi_lexsum",
    "squad",
    "triviaqa_closed",
    "race",
    "quality",
]


@pytest.fixture(scope="module")
def pair() -> Commands:
    return Commands(2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("published"))


def given_flags(files: dict[str, Path], tasks: list[str]) -> list[object]:
    labelled = [f"{task}={files[task]}" for task in tasks if TASKS[task].family is Family.LABELS]
    return ["--data", *(f"{task}={files[task]}" for task in tasks), *(["--examples", *labelled] if labelled else [])]


def asked(commands: Commands, output: Path, *flags: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    commands.run(TOOL, "applied", *flags, "--samples", SAMPLES, "--output", output, "--overwrite")
    items = [json.loads(line) for line in (output / "applied.items.jsonl").read_text().splitlines()]
    assert (output / "applied.png").stat().st_size > 10_000
    return json.loads((output / "applied.json").read_text()), items


def samples_of(
    files: dict[str, Path], tasks: list[str], lengths: list[int], tokenizer: Tokenizer
) -> list[tuple[int, Sample]]:
    labelled = {task: files[task] for task in tasks if TASKS[task].family is Family.LABELS}
    given = read_given({task: files[task] for task in tasks}, labelled)
    made = make_samples(given, lengths, lambda text: len(tokenizer.encode(text)), SAMPLES, None, seed=42)
    return [(length, sample) for length, samples in made.items() for sample in samples]


@torch.no_grad()
def check(item: dict[str, Any], sample: Sample, model: Any, tokenizer: Tokenizer) -> None:
    """Compare an item with what transformers writes, or weighs."""
    prompt = tokenizer.encode(sample.prompt)
    stops = TASKS[sample.task].stops
    if sample.options:
        for option, found in zip(sample.options, item["likelihoods"], strict=True):
            whole = tokenizer.encode(sample.prompt + option)
            assert whole[: len(prompt)] == prompt
            logits = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            wanted = sum(float(logits[place - 1, whole[place]]) for place in range(len(prompt), len(whole)))
            assert found == pytest.approx(wanted, abs=1e-3)
        assert item["text"] == sample.options[max(range(4), key=lambda n: item["likelihoods"][n])].strip()
        return
    said = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=sample.new_tokens,
        do_sample=False,
        eos_token_id=[2, tokenizer.eod_id],
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    assert item["tokens"] == said[: len(item["tokens"])]
    ends = said[-1:] if said[-1] in (2, tokenizer.eod_id) else []
    text = tokenizer.decode(said[: len(said) - len(ends)])
    assert item["text"] == cut(text, stops)
    if len(item["tokens"]) < len(said):  # no sooner than a stop
        written = tokenizer.decode(item["tokens"])
        assert any(stop in written for stop in stops)
        assert not any(stop in tokenizer.decode(item["tokens"][:-1]) for stop in stops)


@pytest.mark.slow
def test_answers_and_weights_are_those_of_transformers(
    alone: Commands, pair: Commands, stories_model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Every family, alone, under tensor parallelism, and shared out over two processes."""
    lengths = [1500, 1650]
    flags = [stories_model, *given_flags(files, FAMILIES), "--lengths", *lengths]
    record, items = asked(alone, tmp_path / "one", *flags, "--batch-size", 3)
    tokenizer = Tokenizer(stories_model)
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32).eval()
    wanted = samples_of(files, FAMILIES, lengths, tokenizer)
    assert [(item["length"], item["task"]) for item in items] == [(length, sample.task) for length, sample in wanted]
    for item, (length, sample) in zip(items, wanted, strict=True):
        assert item["prompt_tokens"] + sample.new_tokens <= length
        check(item, sample, model, tokenizer)
    told = record["models"][stories_model.name]["lengths"]
    for length in lengths:
        for task, at in told[str(length)]["tasks"].items():
            own = [item["scores"] for item in items if (item["length"], item["task"]) == (length, task)]
            assert at["metrics"] == {name: pytest.approx(sum(s[name] for s in own) / SAMPLES) for name in own[0]}
            assert at["score"] == at["metrics"][TASKS[task].metric]
    at_every = [task for task in FAMILIES if TASKS[task].fills]
    assert set(told["1500"]["tasks"]) == set(at_every)
    assert told["1650"]["mean"] == pytest.approx(
        sum(told["1650"]["tasks"][task]["score"] for task in at_every) / len(at_every)
    )
    for layout in (["--tensor-model-parallel-size", 2], []):
        _, others = asked(pair, tmp_path / "two", *flags, *layout)
        for item, other in zip(items, others, strict=True):
            assert other.pop("likelihoods") == pytest.approx(item["likelihoods"], abs=1e-4)
            assert other == {name: value for name, value in item.items() if name != "likelihoods"}


@pytest.mark.slow
def test_programs_are_written_drawn_and_run(
    alone: Commands, pair: Commands, stories_model: Path, tmp_path: Path
) -> None:
    """What follows the first problem's prompt is a text in quotes, whatever it is; the second's is no Python."""
    try:
        check_sandbox(Limits())
    except RefusedError as error:
        pytest.skip(str(error))
    right = humaneval(0) | {
        "prompt": 'def add_0(a, b):\n    return a + b\n\nstory = r"""Once upon a time',
        "test": '"""\n\ndef check(candidate):\n    assert candidate(1, 2) == 3 and len(story) > 20\n',
    }
    file = tmp_path / "HumanEval.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (right, humaneval(1))))
    flags = [stories_model, "--data", f"humaneval={file}", "--lengths", 620, "--programs", 3, "--pass-at", 1, 3]
    flags += ["--code-seconds", 30]
    record, items = asked(alone, tmp_path / "one", *flags)
    assert [item["scores"] for item in items] == [
        {"pass@1": 1.0, "pass@1 of 3": 1.0, "pass@3 of 3": 1.0},
        {"pass@1": 0.0, "pass@1 of 3": 0.0, "pass@3 of 3": 0.0},
    ]
    assert [len(set(item["programs"])) for item in items] == [4, 4]  # each is drawn anew
    assert items[0]["verdicts"] == ["passed"] * 4
    assert all(verdict.startswith("failed") for verdict in items[1]["verdicts"])
    told = record["models"][stories_model.name]["lengths"]["620"]["tasks"]["humaneval"]
    assert told["score"] == told["metrics"]["pass@3 of 3"] == 0.5
    tokenizer = Tokenizer(stories_model)
    model = AutoModelForCausalLM.from_pretrained(stories_model, dtype=torch.float32).eval()
    for item, (_, sample) in zip(items, samples_of({"humaneval": file}, ["humaneval"], [620], tokenizer), strict=True):
        check(item, sample, model, tokenizer)
    assert asked(pair, tmp_path / "two", *flags)[1] == items


def test_two_models_side_by_side(alone: Commands, stories_model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """Written answers and weighed options of each, compared sample by sample."""
    pytest.importorskip("scipy")
    other = write_model(tmp_path / "other", "llama", vocab_size=512)
    tasks = ["squad", "race"]
    flags = [stories_model, other, "--tokenizer", stories_model, *given_flags(files, tasks), "--lengths", 400]
    record, items = asked(alone, tmp_path / "out", *flags)
    tokenizer = Tokenizer(stories_model)
    samples = samples_of(files, tasks, [400], tokenizer)
    for name, folder in ((stories_model.name, stories_model), ("other", other)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        own = [item for item in items if item["model"] == name]
        for item, (_, sample) in zip(own, samples, strict=True):
            check(item, sample, model, tokenizer)
    race = fingerprint(*(files["race"] / f"{number}.txt" for number in range(3)))
    assert record["contents"] == {"data": {"squad": fingerprint(files["squad"]), "race": race}, "examples": {}}
    pairs = {pair["task"]: pair for pair in record["comparisons"]}
    assert set(pairs) == {"all", *tasks}
    scores = [model["lengths"]["400"]["tasks"]["race"]["score"] for model in record["models"].values()]
    assert pairs["race"]["score"]["value"] == pytest.approx(scores[1] - scores[0])
    text = (tmp_path / "out/applied.md").read_text()
    assert "## Differences" in text
    assert "| race, accuracy_per_token |" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "data: got none; give --data TASK=FILE"),
        (["--data", "squad"], "data: got squad, needs TASK=FILE"),
        (["--data", "squad=a", "squad=b"], "data: got squad twice"),
        (["--data", "squid=a"], "data: got squid, needs one of kilt_nq"),
        (["--data", "squad={files}/squad.json", "--samples", 0], "samples: got 0, needs at least 1"),
        (["--data", "squad={files}/squad.json", "--shots", -1], "shots: got -1, needs at least 0"),
        (["--data", "squad={files}/squad.json", "--shots", 8], "examples: squad shows 8, and there are 7"),
        (["--data", "squad={files}/squad.json", "--lengths", 50], "lengths: got 50, a question of squad takes"),
        (["--data", "squad={files}/squad.json", "--temperature", 0], "temperature: got 0, needs a number above 0"),
        (
            ["--data", "squad={files}/squad.json", "--pass-at", 10],
            "pass_at: got 10, needs 1 to the number of --programs, 0",
        ),
        (["--data", "squad={files}/none.json"], "which cannot be read (No such file or directory)"),
        (["--data", "squad={files}/squad.json", "--context-parallel-size", 2], "context_parallel_size: got 2"),
        (
            ["--data", "humaneval={files}/humaneval.jsonl", "--code-memory", 8, "--allow-network"],
            "code_memory, code_seconds: with 8 MiB",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    alone: Commands, stories_model: Path, files: dict[str, Path], flags: list[object], said: str
) -> None:
    filled = [str(flag).format(files=files["squad"].parent) for flag in flags]
    (done,) = alone.attempt(TOOL, "applied", stories_model, *filled)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.status == 2
    assert said in line


def test_a_models_answers_are_written_before_the_next_is_asked(tmp_path: Path) -> None:
    """Half a character in them too, which UTF-8 has no bytes for."""
    written = tmp_path / "applied.items.jsonl"
    answer = SimpleNamespace(record=lambda model, number: {"model": model, "text": "\ud800\xe9"})

    def ask(pretrained: str, _: object) -> list[Any]:
        if pretrained == "second":
            raise UserError("the second cannot be read")
        return [answer]

    options = argparse.Namespace(command="applied", output=tmp_path)
    opened = {"one": ("first", None), "two": ("second", None)}
    with pytest.raises(UserError, match="the second"):
        runpy.run_path(str(ROOT / TOOL))["_answers"](options, opened, lambda answers: {}, ask)
    assert json.loads(written.read_text(encoding="utf-8")) == {"model": "one", "text": "\ud800\xe9"}


def test_a_failure_of_one_process_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk of one machine, say: the others would wait for it."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def gather(shares: list[Any], found: Any) -> None:
        shares[:] = [[Verdict(Ending.PASSED)], found]

    monkeypatch.setattr(applied, "judged", fail)
    monkeypatch.setattr(applied.dist, "all_gather_object", gather)
    asker = applied._Asker.__new__(applied._Asker)
    object.__setattr__(asker, "model", SimpleNamespace(ranks=SimpleNamespace(world=1, world_size=2)))
    object.__setattr__(asker, "programs", SimpleNamespace(limits=Limits(), workers=1))
    with pytest.raises(UserError, match="No space left on device"):
        asker._judged([Job("pass"), Job("pass")])


def test_tasks_are_listed(alone: Commands) -> None:
    (done,) = alone.attempt(TOOL, "applied", "--list-tasks")
    assert done.status == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TASKS)
