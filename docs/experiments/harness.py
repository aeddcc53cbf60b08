"""Shared code of the experiments: data sets, resumable runs, confidence intervals and tables.

NOVELS/*.txt, the standard library -> train, valid-novels, valid-library (.bin/.idx) and a tokenizer   `prepare`
OUT/seed_1/linear, ...             -> a folder for each run; finished runs are skipped                 `train`
OUT/evaluations/seed_1             -> the models of a seed on the same documents, paired               `evaluate`
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from megatron_ext.checkpoint.history import read_history
from megatron_ext.monitoring.report import Run, load_run, parts

REPOSITORY = Path(__file__).resolve().parents[2]
HELD_OUT_NOVELS = ("a-sicilian-romance", "emmeline", "evelina", "the-monk")
HELD_OUT_PACKAGES = 8  # every eighth package of the standard library
VALID_CHARACTERS = 8_000  # of a validation document: intervals are over documents, and need many
SOURCES = ("novels", "library")


@dataclass(frozen=True)
class Planned:
    """A run to train.

    Attributes:
        seed: of weights and data order.
        name: unique among the runs of its seed.
        flags: in addition to the flags of all runs.
        script: trains it, with the flags of `pretrain_skyladder.py`.
    """

    seed: int
    name: str
    flags: Sequence[object]
    script: str = "pretrain_skyladder.py"

    def folder(self, out: Path) -> Path:
        """Return the run's folder."""
        return out / f"seed_{self.seed}" / self.name


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and half the width of its 95 % confidence interval (Student's t)."""

    value: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Compute the mean; a single seed has no interval."""
        numbers = np.array(values, dtype=np.float64)
        if numbers.size < 2:
            return cls(float(numbers.mean()), float("nan"))
        spread = float(numbers.std(ddof=1) / np.sqrt(numbers.size))
        return cls(float(numbers.mean()), float(stats.t.ppf(0.975, numbers.size - 1)) * spread)

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.value) > self.half_width

    def __str__(self) -> str:
        text = f"{self.value:+.4f}" if np.isnan(self.half_width) else f"{self.value:+.4f} ± {self.half_width:.4f}"
        return f"**{text}**" if self.significant else text


def arguments(
    description: str | None,
    *,
    steps: int,
    seeds: Sequence[int],
    held_out: tuple[int, str] = (60, "held-out documents of each source that models are evaluated on"),
    more_flags: Mapping[str, Mapping[str, Any]] | None = None,
    **positional: str,
) -> argparse.Namespace:
    """Parse the command line of an experiment; --check needs none of the folders.

    Args:
        description: of the experiment.
        steps, seeds: defaults.
        held_out: default number of held-out items, and the help text of --held-out.
        own: additional flags, with the keyword arguments of `add_argument`.
        positional: folders, with their help texts.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, help_text in positional.items():
        parser.add_argument(name, type=Path, nargs="?", help=help_text)
    parser.add_argument("--steps", type=int, default=steps, help=f"of each run [{steps}]")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help=f"[{' '.join(map(str, seeds))}]")
    parser.add_argument("--held-out", type=int, default=held_out[0], metavar="N", help=f"{held_out[1]} [{held_out[0]}]")
    for flag, taken in (more_flags or {}).items():
        parser.add_argument(flag, **taken)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each [2]")
    parser.add_argument("--results", type=Path, help="folder for .json, .md and .png [OUT/results]")
    parser.add_argument("--only-results", action="store_true", help="of the runs that are done: nothing is trained")
    parser.add_argument("--check", action="store_true", help="compare the tables of the page with its .json files")
    options = parser.parse_args()
    if not options.check and None in (getattr(options, name) for name in positional):
        parser.error(f"{', '.join(positional)} are required without --check")
    return options


def command(script: str, *words: object, log: Path | None = None) -> None:
    """Run one of the project's commands on one core.

    Args:
        script: in the repository.
        words: its arguments.
        log: the command's output is appended to this file; None to discard it.

    Raises:
        SystemExit: it failed; the message has the end of its output.
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *map(str, words)],
        cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(map(str, words))}\nended with {done.returncode}:\n{done.stdout[-3000:]}")


def prepare(
    novels: Path, out: Path, vocab_size: int, characters: int | None = None, sources: Sequence[str] = SOURCES
) -> list[object]:
    """Make the data sets and the tokenizer unless they exist; return the flags that name them.

    Args:
        novels: folder of .txt files.
        out: the experiment's folder.
        vocab_size: of the byte-level BPE, trained on the training texts.
        characters: approximate length of a training document, cut at line ends; None for whole novels and packages.
        sources: of the texts, some of SOURCES.
    """
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    library = data / "library.jsonl"
    if "library" not in sources:
        library.touch()
    elif not library.exists():
        command("tools/gather_corpus.py", "--output", library)
    texts = data / "train.jsonl"
    if not texts.exists():
        _write_texts(novels, library, data, characters)
    if not (data / "tokenizer").exists():
        flags = ["--vocab-size", vocab_size, "--output", data / "tokenizer"]
        command("tools/train_tokenizer.py", "--input", texts, *flags)
    for name in ("train", *(f"valid-{source}" for source in sources)):
        if not (data / f"{name}.idx").exists():
            paths = ["--input", data / f"{name}.jsonl", "--output-prefix", data / name]
            command("tools/preprocess_data.py", *paths, "--tokenizer-model", data / "tokenizer")
    validation = [word for source in sources for word in (0.5, data / f"valid-{source}")]
    return [
        *("--data-path", data / "train", "--split", "1,0,0", "--valid-data-path", *validation),
        *("--tokenizer-model", data / "tokenizer"),
    ]


def _write_texts(novels: Path, library: Path, data: Path, characters: int | None) -> None:
    train: list[str] = []
    valid: dict[str, list[str]] = {source: [] for source in SOURCES}
    for path in sorted(novels.glob("*.txt")):
        (valid["novels"] if path.stem in HELD_OUT_NOVELS else train).append(path.read_text(encoding="utf-8"))
    for number, line in enumerate(library.read_text(encoding="utf-8").splitlines()):
        (train if number % HELD_OUT_PACKAGES else valid["library"]).append(json.loads(line)["text"])
    if characters is not None:
        train = [part for text in train for part in split_text(text, characters)]
    for source, texts in valid.items():
        cut = [part for text in texts for part in split_text(text, VALID_CHARACTERS)]
        _write_jsonl(data / f"valid-{source}.jsonl", cut)
    _write_jsonl(data / "train.jsonl", train)  # last: if it exists, all do


def _write_jsonl(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def split_text(text: str, characters: int) -> Iterator[str]:
    """Split a text at line ends into parts of about `characters` characters; the last part may be shorter."""
    part = ""
    for line in text.splitlines(keepends=True):
        part += line
        if len(part) >= characters:
            yield part
            part = ""
    if part:
        yield part


def train(
    plans: Sequence[Planned],
    out: Path,
    common: Sequence[object],
    workers: int,
    then: Callable[[Planned], None] | None = None,
) -> None:
    """Train the runs that are not finished, several at a time; an interrupted run resumes from its checkpoint.

    `then` is called with each finished run, by the thread that trained it.

    Raises:
        SystemExit: `out` has runs with other flags.
    """
    _check_same(out / "asked.json", [str(word) for word in common])

    def one(plan: Planned) -> None:
        folder = plan.folder(out)
        if not is_done(folder):
            saving = ["--save", folder, "--load", folder, "--load-if-present", "--save-interval", 50, "--keep-last", 1]
            flags = [*common, "--no-tensorboard", "--seed", plan.seed, *plan.flags, *saving]
            command(plan.script, *flags, log=out / "logs" / f"seed_{plan.seed}-{plan.name}.txt")
            print(f"seed {plan.seed}, {plan.name}: done", flush=True)
        if then is not None:
            then(plan)

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, plans):
            pass


def _check_same(file: Path, options: object) -> None:
    """Record the options of a folder, or fail if it was made with other options."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(options), encoding="utf-8")
    elif json.loads(file.read_text(encoding="utf-8")) != options:
        raise SystemExit(f"{file}: this folder was made with other flags; use the same flags or another folder")


def is_done(folder: Path) -> bool:
    """Return whether a run has completed all steps."""
    return read_history(folder).status == "done"


def finished(plans: Sequence[Planned], out: Path) -> list[int]:
    """Return the seeds whose runs are all finished.

    Raises:
        SystemExit: no seed has only finished runs.
    """
    seeds = dict.fromkeys(plan.seed for plan in plans)
    done = [seed for seed in seeds if all(is_done(plan.folder(out)) for plan in plans if plan.seed == seed)]
    if not done:
        raise SystemExit(f"{out} has no seed whose runs are all finished; leave --only-results out")
    return done


def evaluate(
    plans: Sequence[Planned],
    out: Path,
    lengths: Sequence[int],
    tokens: int,
    *,
    documents: int,
    workers: int,
    sources: Sequence[str] = SOURCES,
) -> None:
    """Evaluate the models of each seed on the same held-out documents; differences are from the first model.

    Args:
        plans: all runs.
        out: the experiment's folder.
        lengths: window lengths; the stride is half of each.
        tokens: minimum length of a document; longer ones are cut to twice this length.
        documents: number of documents of each source.
        workers: number of seeds at a time.
        sources: as in `prepare`.

    Raises:
        SystemExit: `out` has evaluations of other lengths or documents.
    """
    _check_same(
        out / "evaluations" / "asked.json", {"lengths": list(lengths), "tokens": tokens, "documents": documents}
    )

    def one(seed: int) -> None:
        seed_plans = [plan for plan in plans if plan.seed == seed]
        target = out / "evaluations" / f"seed_{seed}"
        if (target / "perplexity.json").exists() and set(read_evaluation(target)) >= {plan.name for plan in seed_plans}:
            return
        flags = ["--data-path", *(out / "data" / f"valid-{source}" for source in sources), "--lengths", *lengths]
        flags += ["--documents-per-source", documents, "--min-tokens", tokens, "--max-tokens", 2 * tokens]
        models = [plan.folder(out) for plan in seed_plans]
        command("tools/evaluate.py", "perplexity", *models, *flags, "--output", target, "--overwrite")

    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(one, dict.fromkeys(plan.seed for plan in plans)):
            pass


def read_evaluation(target: Path, task: str = "all") -> dict[str, dict[int, float]]:
    """Read each model's loss on a source's documents, or on all, by window length."""
    loss_by_model: dict[str, dict[int, float]] = {}
    for result in json.loads((target / "perplexity.json").read_text(encoding="utf-8"))["results"]:
        if (result["task"], result["metric"]) == (task, "loss") and "position" not in result:
            loss_by_model.setdefault(result["model"], {})[result["length"]] = result["value"]
    return loss_by_model


def losses(out: Path, seeds: Sequence[int], length: int) -> dict[str, list[float]]:
    """Read the losses on all held-out documents at a window length, for each seed, of the models of every seed."""
    by_seed = [read_evaluation(out / "evaluations" / f"seed_{seed}") for seed in seeds]
    names = [name for name in by_seed[0] if all(name in models for models in by_seed)]
    return {name: [models[name][length] for models in by_seed] for name in names}


def bootstrap(out: Path, seed: int, length: int) -> dict[str, dict[str, float]]:
    """Read the differences from the first model of a seed, with intervals over documents."""
    path = out / "evaluations" / f"seed_{seed}" / "perplexity.json"
    pairs = json.loads(path.read_text(encoding="utf-8"))["differences"]
    return {pair["second"]: pair for pair in pairs if pair["length"] == length}


def differences(losses_by_name: dict[str, list[float]], base: str) -> dict[str, Mean]:
    """Return each model's mean difference from `base`, paired by seed: runs of a seed read the same rows in order."""
    return {
        name: Mean.of(np.subtract(model_losses, losses_by_name[base]).tolist())
        for name, model_losses in losses_by_name.items()
        if name != base
    }


def records(plans: Sequence[Planned], out: Path) -> dict[str, list[Run]]:
    """Load the runs by name, in the order of seeds."""
    runs_by_name: dict[str, list[Run]] = {}
    for plan in plans:
        runs_by_name.setdefault(plan.name, []).append(load_run(plan.folder(out)))
    return runs_by_name


def layers(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return an attention metric averaged over layers: steps [n] and values [n]."""
    curves = list(parts(run.train, key).values())
    return curves[0].steps, np.mean([curve.values for curve in curves], axis=0)


def write_results(folder: Path, name: str, numbers: dict[str, Any], tables: Callable[[Any], str]) -> None:
    """Write the numbers, and the tables that follow from them as read again; print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    markdown = tables(json.loads(file.read_text(encoding="utf-8")))
    file.with_suffix(".md").write_text(markdown, encoding="utf-8")
    print(markdown)
    print(f"{folder}/{name}.md, .json, .png")


def check(page: Path, tables: Callable[[Any], str]) -> None:
    """Recompute the tables of a page from the .json files whose names begin with its own.

    Args:
        page: the .md file.
        tables: makes Markdown from the numbers of a file.

    Raises:
        SystemExit: the page has a table that does not follow from them, or none of a file.
    """
    page_tables = _tables(page.read_text(encoding="utf-8"))
    file_tables: list[str] = []
    for file in sorted(page.parent.glob(f"{page.stem}*.json")):
        new_tables = _tables(tables(json.loads(file.read_text(encoding="utf-8"))))
        file_tables += new_tables
        if not set(new_tables) & set(page_tables):
            raise SystemExit(f"{page.name} has no table of {file.name}")
    for page_table in page_tables:
        if page_table not in file_tables:
            raise SystemExit(f"{page.name}: this table does not follow from its .json files\n{page_table}")


def _tables(markdown: str) -> list[str]:
    return re.findall(r"^\|.*(?:\n\|.*)*", markdown, re.MULTILINE)
