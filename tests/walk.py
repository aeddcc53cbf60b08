"""Walk a model through every command that asks or judges a model, alone and in two processes, and compare.

python tests/walk.py OUT                           the table is OUT/walk.md; data and runs of an earlier walk are kept
python tests/walk.py OUT --only recall,generate    some commands alone
python tests/walk.py OUT --stories FOLDER          a second model: a small Llama as a Hugging Face folder
python tests/walk.py OUT --torchrun                by torchrun, as a user does; else forked as tests/launcher.py does,
                                                   which imports once

The models: demo, the run of examples/demo.sh with fewer steps, and stories, the Llama of --stories. The layouts: one
process; two by tensor parallelism; two by context parallelism. What one process finds is compared with transformers on
the exported model where that can say it, what two processes find with what one did: texts and scores equal, losses to
the row's tolerance. Exit status 1 where anything differs, 2 where nothing would be compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import zarr
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from evaluation.applied.published import write_files  # noqa: E402
from evaluation.plain import greedy_texts, write_choice  # noqa: E402
from launcher import ROOT, Commands, Done, Torchrun  # noqa: E402

from megatron_ext.data.text.tokenizer import Tokenizer  # noqa: E402
from megatron_ext.evaluation.recall.tasks import make_samples, read_material  # noqa: E402

LAYOUTS: dict[str, tuple[int, list[object]]] = {
    "one": (1, []),
    "TP2": (2, ["--tensor-model-parallel-size", 2]),
    "CP2": (2, ["--context-parallel-size", 2]),
}
WINDOWS, STRIDE = (96, 256), 60
PROMPTS = {
    "stories": ["Once upon a time", "The", "Lily and Tom went to the park to see", "One day, the sun"],
    "demo": ["import os", "class A:\n    def", "def main(argv):\n    ", "for line in"],
}
NEW = 40  # tokens of a text
RECALL, LENGTH, SEED = ["niah_single_1", "niah_multikey_1", "vt", "fwe", "json_kv"], 1250, 42
APPLIED = ["kilt_nq", "msmarco", "icl_banking77", "squad", "race", "quality", "nq_closed", "humaneval"]
TEMPLATE = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"


@dataclass(frozen=True)
class Model:
    """Names a model and what it is asked about.

    Attributes:
        name: stories or demo.
        given: what commands get: a Hugging Face folder or a run.
        run: the same weights as a run, such as training begins from.
        export: the same as a Hugging Face folder.
        data: prefix of a dataset of its tokenizer.
        text: .jsonl of documents.
        out: folder for what is made.
    """

    name: str
    given: Path
    run: Path
    export: Path
    data: Path
    text: Path
    out: Path

    @property
    def trained(self) -> Path:
        """The run that one process trains from the model."""
        return self.out / "train" / "one"


@dataclass(frozen=True)
class Row:
    """Says how a command is asked, and what is made of its answer.

    Attributes:
        name: of the row.
        script: of the repository.
        flags: of the command; OUT is replaced by a folder of the row and the layout.
        read: the answer, of JSON's types, from what was printed and that folder.
        tolerance: by which numbers may differ between layouts, and from transformers; texts may not.
        reference: the same answer by transformers.
        refused: by layouts that cannot, the beginning of the one line that says so.
        layouts: that are asked.
        needs: a package.
    """

    name: str
    script: str
    flags: Sequence[object]
    read: Callable[[Done, Path], Any]
    tolerance: float = 0.0
    reference: Callable[[], Any] | None = None
    refused: dict[str, str] = field(default_factory=dict)
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    needs: str = ""


GENERATES = {"CP2": "context_parallel_size: got 2, text is generated with 1"}


def model_of(name: str, out: Path, stories: Path) -> Model:
    """Say where a model and what is made of it lie, before any of it is there."""
    given, run, export = {
        "stories": (stories, out / "run", stories),
        "demo": (out / "demo", out / "demo", out / "export"),
    }[name]
    return Model(name, given, run, export, out / "corpus", out / "text.jsonl", out)


def write_inputs(model: Model) -> dict[str, Path]:
    """Write what commands are given beside the model; where the published file of each applied task is."""
    question = {"question": PROMPTS[model.name][0], "choices": [", there was", " zq xk"], "answer": 0}
    choices = [json.dumps({**question, "answer": n % 2}) + "\n" for n in range(8)]
    (model.out / "choice.jsonl").write_text("".join(choices))
    write_choice(fresh(model.out / "tasks"), model.out / "choice.jsonl")
    template = fresh(model.out / "chat")  # a copy of the tokenizer that knows a chat template
    shutil.copy(model.export / "tokenizer.json", template)
    config = json.loads((model.export / "tokenizer_config.json").read_text())
    (template / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return write_files(fresh(model.out / "published"))


def rows_of(model: Model, published: Mapping[str, Path]) -> Iterator[Row]:
    """Yield the rows of a model, those that others build on first.

    Args:
        published: the file of each applied task.
    """
    convert, evaluate, generate = "tools/convert_checkpoint.py", "tools/evaluate.py", "tools/generate.py"
    ours, theirs = model.run, model.export
    pair = {"stories": ["hf-to-megatron", theirs, ours], "demo": ["megatron-to-hf", ours, theirs]}[model.name]
    yield Row(
        f"convert_checkpoint {pair[0]}",
        convert,
        [pair[0], "--input", pair[1], "--output", pair[2], "--overwrite"],
        exit_status,
        layouts=("one",),
    )
    verify = ["verify", "--input", theirs, "--output", ours]
    yield Row("convert_checkpoint verify", convert, verify, exit_status, layouts=("one",))
    windows = ["--lengths", *WINDOWS, "--max-tokens", 700, "--documents", 6, "--output", "OUT", "--overwrite"]
    for name, stride in (("perplexity", None), ("perplexity --stride", STRIDE)):
        strided = [] if stride is None else ["--stride", stride]
        yield Row(
            name,
            evaluate,
            ["perplexity", model.given, "--input", model.text, *windows, *strided],
            read_perplexity,
            1e-4,
            lambda stride=stride: plain_perplexity(model, stride),
            layouts=("one",) if stride is None else tuple(LAYOUTS),
        )
    hidden = ["--haystack", model.text, "--lengths", LENGTH, "--samples", 1, "--seed", SEED]
    yield Row(
        "recall",
        evaluate,
        ["recall", model.given, "--tasks", *RECALL, *hidden, "--output", "OUT", "--overwrite"],
        lambda _, out: [item["tokens"] for item in lines(out / "recall.items.jsonl")],
        reference=lambda: plain_recall(model),
        refused=GENERATES,
        needs="wonderwords",
    )
    data = [f"{task}={published[task]}" for task in APPLIED]
    asked = ["--data", *data, "--examples", f"icl_banking77={published['icl_banking77']}", "--samples", 2]
    yield Row(
        "applied",
        evaluate,
        ["applied", model.given, *asked, "--lengths", LENGTH, "--programs", 1, "--output", "OUT", "--overwrite"],
        lambda _, out: [without_model(item) for item in lines(out / "applied.items.jsonl")],
        1e-4,
        refused=GENERATES,
    )
    own = ["--tasks", "choice", "--include-path", model.out / "tasks", "--output", "OUT", "--overwrite"]
    yield Row(
        "downstream, both forms",
        evaluate,
        ["downstream", ours, theirs, "--tokenizer", theirs, *own],
        read_downstream,
        refused=dict.fromkeys(("TP2", "CP2"), "downstream: got several processes, lm-eval runs in one"),
        needs="lm_eval",
    )
    prompts = PROMPTS[model.name]
    texts = [model.given, "--prompt", *prompts, "--max-new-tokens", NEW]
    written = ["--output", "OUT/answers.jsonl", "--overwrite"]
    yield Row(
        "generate, greedy",
        generate,
        [*texts, *written],
        read_tokens,
        reference=lambda: plain_texts(model, [tokenizer_of(model).encode(prompt) for prompt in prompts], NEW),
        refused=GENERATES,
    )
    drawn = ["--temperature", 1.2, "--top-k", 50, "--top-p", 0.95, "--seed", 3, "--batch-size", 3]
    yield Row("generate, sampled", generate, [*texts, *drawn, *written], read_tokens, refused=GENERATES)
    yield Row(
        "generate, streaming",
        generate,
        [model.given, "--prompt", prompts[0], "--max-new-tokens", NEW],
        lambda done, _: done.stdout,
        reference=lambda: plain_stream(model, prompts[0]),
        refused=GENERATES,
    )
    talk = ["--chat", "--tokenizer", model.out / "chat", "--prompt", *prompts[:2], "--max-new-tokens", NEW]
    yield Row("generate --chat", generate, [model.given, *talk], lambda done, _: done.stdout, refused=GENERATES)
    trainer = training(model)
    yield Row(
        "score_tokens",
        "tools/score_tokens.py",
        ["--checkpoint", model.given, "--context", 64, "--rows", 6, "--output", "OUT/store", *trainer],
        lambda _, out: zarr.open_array(out / "store", mode="r")[:].tolist(),
        1e-4,
    )
    yield Row(
        "pretrain_skyladder --init-from",
        "pretrain_skyladder.py",
        [*trainer, "--init-from", ours, "--save", "OUT", "--save-interval", 2],
        lambda _, out: [record["lm_loss"] for record in lines(out / "metrics.jsonl")],
        1e-4,
    )
    yield Row(
        "replay_step",
        "tools/replay_step.py",
        [model.trained, 3, "--tolerance", 1e-4, "--output", "OUT/replay"],
        lambda _, out: json.loads((out / "replay" / "replay.json").read_text())["replayed"],
        1e-4,
    )
    runs = [model.out / "train" / layout for layout in LAYOUTS]
    for name, run in zip(LAYOUTS, runs, strict=True):
        yield Row(f"checkpoints, of {name}", "tools/checkpoints.py", [run, "--verify"], exit_status, layouts=("one",))
    evaluated = [model.out / command / "one" for command in ("perplexity", "recall", "applied")]
    trained = model.given if model.name == "demo" else model.trained
    page = [trained, "--evaluations", *evaluated]
    yield Row("report", "tools/report.py", page, exit_status, layouts=("one",))
    compared = [*runs, "--output", model.out / "compare.html"]
    yield Row("report, three runs", "tools/report.py", compared, exit_status, layouts=("one",))
    row = ["--data-path", model.data, "--tokenizer-model", theirs, "--seq-length", 96, "--text"]
    shared = [*row, "--context-parallel-size", 2, "--output", model.out / "row.png"]
    yield Row("inspect_pack", "tools/inspect_pack.py", shared, exit_status, layouts=("one",))


def training(model: Model) -> list[object]:
    """The trainer's flags for four steps from the model."""
    data = ["--data-path", model.data, "--tokenizer-model", model.export, "--split", "100,0,0", "--document-mask"]
    steps = "--train-iters 4 --global-batch-size 4 --micro-batch-size 2 --seq-length 256 --lr 1e-3 "
    rest = "--lr-warmup-iters 0 --window-schedule linear --window-start 64 --no-tensorboard"
    rest += " --eval-interval 0 --eval-lengths none"  # which the demo has, on documents that are for training here
    return ["--config", model.run / "config.yaml", *data, *f"{steps}{rest}".split()]


def exit_status(done: Done, _: Path) -> Any:
    return done.status


def read_tokens(_: Done, out: Path) -> Any:
    return [answer["tokens"] for answer in lines(out / "answers.jsonl")]


def read_perplexity(_: Done, out: Path) -> Any:
    (told,) = json.loads((out / "perplexity.json").read_text())["models"].values()
    return {length: at["loss"] for length, at in told["lengths"].items()}


def read_downstream(_: Done, out: Path) -> Any:
    record = json.loads((out / "downstream.json").read_text())
    (pair,) = record["comparisons"]
    assert (pair["mcnemar"]["only_first"], pair["mcnemar"]["only_second"]) == (0, 0), pair
    return [model["tasks"] for model in record["models"].values()]


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_model(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "model"}


def tokenizer_of(model: Model) -> Tokenizer:
    return Tokenizer(model.export)


def theirs(model: Model) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.export, dtype=torch.float32).eval()


def stops(model: Model, their: Any) -> list[int]:
    """The tokens that end a text: the configuration's, and the tokenizer's end token."""
    ends = their.generation_config.eos_token_id
    return sorted({tokenizer_of(model).eod_id, *(ends if isinstance(ends, list) else [] if ends is None else [ends])})


def plain_texts(model: Model, prompts: Sequence[Sequence[int]], new: int | Sequence[int]) -> list[list[int]]:
    """transformers' own greedy continuation of each prompt, alone."""
    their = theirs(model)
    return greedy_texts(their, prompts, new, stops(model, their))


def plain_stream(model: Model, prompt: str) -> str:
    tokenizer = tokenizer_of(model)
    (said,) = plain_texts(model, [tokenizer.encode(prompt)], NEW)
    ends = said[-1:] if said[-1] in stops(model, theirs(model)) else []
    return prompt + tokenizer.decode([*tokenizer.encode(prompt), *said[: len(said) - len(ends)]])[len(prompt) :] + "\n"


def plain_recall(model: Model) -> list[list[int]]:
    tokenizer = tokenizer_of(model)
    material = read_material([str(model.text)], "text", None, None, None)
    samples = make_samples(RECALL, [LENGTH], tokenizer.encode, material, 1, seed=SEED)[LENGTH]
    prompts = [tokenizer.encode(sample.prompt) for sample in samples]
    return plain_texts(model, prompts, [sample.new_tokens for sample in samples])


@torch.no_grad()
def plain_perplexity(model: Model, stride: int | None) -> dict[str, float]:
    """One window at a time: each scores the labels that no window before has scored."""
    their, tokenizer = theirs(model), tokenizer_of(model)
    found = {}
    for length in WINDOWS:
        losses: list[torch.Tensor] = []
        for document in lines(model.text)[:6]:
            tokens = [*tokenizer.encode(document["text"]), tokenizer.eod_id][:700]
            begin = done = 0
            while done < len(tokens) - 1:
                end = min(begin + length, len(tokens) - 1)
                logits = their(torch.tensor([tokens[begin:end]])).logits[0].double()
                labels = torch.tensor(tokens[begin + 1 : end + 1])
                losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[done - begin :])
                begin, done = begin + (stride or length // 2), end
        found[str(length)] = float(torch.cat(losses).mean())
    return found


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def distance(a: Any, b: Any) -> float:
    """The largest difference of a number; inf where anything else differs, the shape does, or one is no number."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((distance(a[name], b[name]) for name in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((distance(*pair) for pair in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float) and a != b:
        gap = abs(a - b)
        return math.inf if math.isnan(gap) else gap
    return 0.0 if a == b else math.inf


def refuses(done: Done, beginning: str, status: int) -> bool:
    """Whether a command ended with this status, and said so in one line of `error:` with this beginning."""
    told = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    return done.status == status and len(told) == 1 and told[0].startswith(f"error: {beginning}")


@dataclass
class Walk:
    """Asks, compares and notes.

    Attributes:
        out: folder of all that is made.
        layouts: that are asked, "one" among them.
        torchrun: whether processes are started as a user does.
        table: lines of the table.
        wrong: what differed, a line each.
        skipped: what was not asked and why, a line each.
    """

    out: Path
    layouts: Sequence[str]
    torchrun: bool
    table: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def ask(self, model: Model, row: Row) -> None:
        cells = dict.fromkeys(("transformers", *LAYOUTS), "")
        answers: dict[str, Any] = {}
        if row.needs and find_spec(row.needs) is None:
            self.skipped.append(f"{model.name}, {row.name}: {row.needs} is not installed")
            self.note(model, row, {**cells, "one": f"{row.needs} is not installed"})
            return
        for layout in (layout for layout in LAYOUTS if layout in self.layouts and layout in row.layouts):
            cells[layout] = self.one(model, row, layout, answers)
        if row.reference is not None and "one" in answers:
            cells["transformers"] = self.judged(model, row, "transformers", answers["one"], row.reference())
        self.note(model, row, cells)

    def one(self, model: Model, row: Row, layout: str, answers: dict[str, Any]) -> str:
        """Ask in one layout; what the table says of it."""
        folder = model.out / slug(row) / layout
        fresh(folder)
        words = [str(folder) + str(word)[3:] if re.match(r"OUT(/|$)", str(word)) else word for word in row.flags]
        processes, flags = LAYOUTS[layout]
        began = time.monotonic()
        done = attempt(processes, row.script, *words, *flags, torchrun=self.torchrun)
        seconds = f"{time.monotonic() - began:.0f} s"
        (folder / "said.txt").write_text(f"{row.script} {words}\n\n{done.stdout}\n\n{done.stderr}")
        if layout in row.refused:
            status = 1 if self.torchrun else 2  # torchrun's own, whatever its processes'
            if refuses(done, row.refused[layout], status):
                return "refused"
            return self.fault(model, row, layout, f"is not refused, see {folder / 'said.txt'}")
        if done.status != 0:
            return self.fault(model, row, layout, f"exit status {done.status}, see {folder / 'said.txt'}")
        answers[layout] = row.read(done, folder)
        if layout == "one":
            return seconds
        if "one" not in answers:
            return self.fault(model, row, layout, "one process gave no answer to compare with")
        return f"{self.judged(model, row, layout, answers['one'], answers[layout])}, {seconds}"

    def judged(self, model: Model, row: Row, name: str, one: Any, other: Any) -> str:
        """Compare an answer with what one process said."""
        gap = distance(one, other)
        if gap > row.tolerance:
            (self.out / "differs").mkdir(exist_ok=True)
            file = self.out / "differs" / f"{model.name}-{slug(row)}-{name}.json"
            file.write_text(json.dumps([one, other], indent=1))
            return self.fault(model, row, name, f"differs by {gap:.1e}, see {file}")
        return "equal" if gap == 0 else f"{gap:.0e}"

    def fault(self, model: Model, row: Row, layout: str, what: str) -> str:
        self.wrong.append(f"{model.name}, {row.name}, {layout}: {what}")
        return f"WRONG: {what.split(',')[0]}"

    def note(self, model: Model, row: Row, cells: dict[str, str]) -> None:
        line = " | ".join(cells[layout] or "-" for layout in ("one", "transformers", "TP2", "CP2"))
        self.table.append(f"| {row.name} | {model.name} | {line} |")
        print(self.table[-1], flush=True)


def slug(row: Row) -> str:
    """The folder of a row; of training that of `Model.trained`."""
    return {"pretrain_skyladder --init-from": "train"}.get(row.name, re.sub(r"[^a-z_]+", "-", row.name.lower()))


def prepare_stories(model: Model) -> None:
    """Make a dataset of English paragraphs by the folder's tokenizer."""
    if not model.data.with_suffix(".idx").is_file():
        paragraphs = [piece for piece in (ROOT / "LICENSE").read_text().split("\n\n") if piece.strip()]
        model.text.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in paragraphs))
        read = ["--input", model.text, "--tokenizer-model", model.export]
        tool("preprocess_data", *read, "--output-prefix", model.data)


def prepare_demo(model: Model, steps: int) -> None:
    """Train as examples/demo.sh does, fewer steps, on two processes, and export the run."""
    corpus, tokenizer = model.out / "corpus.jsonl", model.out / "tokenizer"
    if not model.data.with_suffix(".idx").is_file():
        tool("gather_corpus", "--output", corpus)
        tool("train_tokenizer", "--input", corpus, "--vocab-size", 4096, "--output", tokenizer)
        tool("preprocess_data", "--input", corpus, "--output-prefix", model.data, "--tokenizer-model", tokenizer)
    with corpus.open() as documents:
        begins = [json.loads(line)["text"][:3000] for line in itertools.islice(documents, 12)]
    model.text.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in begins))
    if not (model.run / "checkpoints" / "latest_checkpointed_iteration.txt").is_file():
        config = ["--config", ROOT / "examples/configs/demo.yaml", "--data-path", model.data]
        half = max(1, steps // 2)
        short = ["--train-iters", steps, "--save-interval", half, "--eval-interval", half]
        short += ["--lr-warmup-iters", steps // 10]
        given = [*config, "--tokenizer-model", tokenizer, "--save", model.run, *short]
        checked(Torchrun(2).attempt("pretrain_skyladder.py", *given, timeout_s=3600))
    if not model.export.is_dir():
        tool("convert_checkpoint", "megatron-to-hf", "--input", model.run, "--output", model.export)


def attempt(processes: int, script: str, *flags: object, torchrun: bool = False) -> Done:
    """Run a command to its end.

    Returns:
        The largest exit status, None where a process was killed; what the first one printed; what all said.
    """
    if torchrun:
        return Torchrun(processes).attempt(script, *flags, timeout_s=900)
    done = Commands(processes).attempt(script, *flags, timeout_s=900)
    statuses = [one.status for one in done if one.status is not None]
    worst = max(statuses) if len(statuses) == len(done) else None
    return Done(worst, done[0].stdout, "\n".join(one.stderr for one in done))


def tool(name: str, *flags: object) -> None:
    checked(attempt(1, f"tools/{name}.py", *flags))


def checked(done: Done) -> None:
    if done.status != 0:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for data, runs, answers and the table")
    parser.add_argument("--stories", type=Path, metavar="FOLDER", help="a small Llama as a Hugging Face folder")
    parser.add_argument("--models", nargs="+", choices=list(PROMPTS), help="[demo, and stories where it is given]")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--only", metavar="NAMES", help="rows that begin with one of these, by commas")
    parser.add_argument("--torchrun", action="store_true", help="start processes as a user does")
    parser.add_argument("--steps", type=int, default=20, help="of the demo's run; `make demo` takes 120 [20]")
    options = parser.parse_args()
    names = options.models or ["demo", *(["stories"] if options.stories else [])]
    stories = (options.stories or Path()).resolve()
    if "stories" in names and options.stories is None:
        parser.error("--models: got stories, needs --stories FOLDER: a small Llama as a Hugging Face folder")
    if "stories" in names and not (stories / "config.json").is_file():
        parser.error(f"--stories: got {options.stories}, needs a Hugging Face folder: it has no config.json")
    if "one" not in options.layouts:
        parser.error(f"--layouts: got {' '.join(options.layouts)}, needs one too: others are compared with it")
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}, needs a number from 1 on")
    out = options.out.resolve()
    models = [model_of(name, out / name, stories) for name in PROMPTS if name in names]
    known = tuple(row.name for model in models for row in rows_of(model, dict.fromkeys(APPLIED, model.out)))
    wanted = known if options.only is None else tuple(options.only.split(","))
    for beginning in wanted:
        if not beginning or not any(name.startswith(beginning) for name in known):
            parser.error(f"--only: got {beginning!r}, no row begins so; the rows: {'; '.join(dict.fromkeys(known))}")
    walk = Walk(out, options.layouts, options.torchrun)
    for model in models:
        model.out.mkdir(parents=True, exist_ok=True)
        if model.name == "stories":
            prepare_stories(model)
        else:
            prepare_demo(model, options.steps)
        for row in rows_of(model, write_inputs(model)):
            if row.name.startswith(wanted):
                walk.ask(model, row)
    head = ["| command | model | one process | beside transformers | TP2 | CP2 |", "|---|---|---|---|---|---|"]
    (out / "walk.md").write_text("\n".join([*head, *walk.table]) + "\n")
    for line in walk.skipped:
        print(f"not asked: {line}")
    if len(walk.skipped) == len(walk.table):
        walk.wrong.append("nothing was asked")
    print("\n".join(walk.wrong) or "nothing differs")
    return 1 if walk.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
