"""Does token weighting teach a small model to use a context four times as long? See token_weighting.md.

python docs/experiments/token_weighting.py NOVELS HF OUT
python docs/experiments/token_weighting.py --check     # recompute the tables of the page from its .json file

HF is the Llama of 260K parameters as a Hugging Face folder. A run that has a line in the file of runs is not trained
again, so a stopped experiment continues by the same command, on another machine with that file alone (--runs).
"""

import json
import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from harness import HELD_OUT_NOVELS, Mean, Planned, arguments, check, command, is_done, train, write_results
from matplotlib.figure import Figure

from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.evaluation.report import table
from megatron_ext.run.inputs import open_rows
from megatron_ext.token_weighting.store import ScoreStore

SHORT, ROW = 256, 1024
STEPS, BASE_STEPS, BASE_SEED = 160, 500, 1
ROTARY_BASE = 63_496  # dynamic NTK, 10000 * 4^(8/6): the base of the scorer too, as in the run
SHAPE: list[object] = [
    *("--num-layers", 5, "--hidden-size", 64, "--ffn-hidden-size", 172, "--num-attention-heads", 8),
    *("--num-query-groups", 4, "--no-untie-embeddings-and-output-weights", "--vocab-size", 512),
]
OPTIMIZER: list[object] = [*("--lr", 1e-3, "--min-lr", 1e-4, "--lr-decay-style", "cosine", "--weight-decay", 0.01)]
KINDS = {
    "uniform": "uniform",
    "dense_unfrozen": "dense, unfrozen",
    "placebo": "dense, unfrozen, permuted",
    "dense_frozen": "dense, frozen",
    "sparse_unfrozen": "sparse, unfrozen",
    "sparse_frozen": "sparse, frozen",
}
COMPARED = ("uniform", "dense_unfrozen", "placebo")  # the arms of the planned test, trained first
ARMS = (*COMPARED, "dense_frozen", "sparse_unfrozen")  # of the experiment with a placebo
GAIN_ROWS = 256  # of the held-out rows, those on which the gain is measured
GROUPS = {"first": "first in the row", "near": f"last seen <= {SHORT} back", "far": f"last seen > {SHORT} back"}
CONTROLLED, PLANNED = "gain_far_less_first", "loss_far_less_first"
MEASURES = ("loss", "gain", *(f"{kind}_{group}" for kind in ("loss", "gain") for group in GROUPS))

WORD = re.compile(r"(?<![A-Za-z\x80-\xff])[A-Z][a-z]{2,}(?=[^A-Za-z\x80-\xff])")
TITLES = {"mrs", "miss", "sir", "lordship", "ladyship", "madam", "madame", "monsieur", "god"}
INSIDE_SENTENCE = re.compile(r"(?:[a-z,;]|\b(?:Mr|Mrs|Dr|St)\.) *\n? *$")


@dataclass(frozen=True)
class Name:
    """An occurrence of a name: `tokens` are indices into the row's tokens; `group` a key of GROUPS."""

    group: str
    tokens: range


def planned(seeds: Sequence[int], out: Path, arms: Sequence[str] = ARMS) -> list[Planned]:
    """List the runs that start from the base model."""

    def flags(kind: str, seed: int) -> list[object]:
        post, _, scorer = kind.replace("placebo", "dense_unfrozen").partition("_")
        weighting: dict[str, list[object]] = {
            "": [],
            "unfrozen": ["--short-context", SHORT],
            "frozen": ["--score-store", store(out, seed)],
        }
        return ["--token-weighting", scorer, "--weight-post", post, *weighting[scorer]] if scorer else []

    script = {"placebo": "docs/experiments/placebo.py"}
    return [
        Planned(seed, kind, flags(kind, seed), script.get(kind, "pretrain_skyladder.py"))
        for seed in seeds
        for kind in arms
    ]


def store(out: Path, seed: int) -> Path:
    """Return the path of the frozen scores of a seed's rows."""
    return out / "frozen" / f"seed_{seed}.zarr"


def prepare_novels(novels: Path, hf: Path, out: Path) -> None:
    """Make the data sets unless they exist."""
    for part in ("train", "valid"):
        if (out / f"{part}.idx").exists():
            continue
        folder = out / "texts" / part
        folder.mkdir(parents=True, exist_ok=True)
        for path in novels.glob("*.txt"):
            if (path.stem in HELD_OUT_NOVELS) == (part == "valid"):
                shutil.copyfile(path, folder / path.name)
        command("tools/preprocess_data.py", "--input", folder, "--output-prefix", out / part, "--tokenizer-model", hf)


def of_data(part: str, hf: Path, out: Path) -> list[object]:
    """Return the flags of a data set."""
    return ["--data-path", out / part, "--split", "1,0,0", "--tokenizer-model", hf]


def score(scorer: Path, context: int, stride: int, output: Path, flags: Sequence[object]) -> None:
    """Compute the losses of rows with a context length, resuming an interrupted call."""
    output.parent.mkdir(parents=True, exist_ok=True)
    limits = ["--checkpoint", scorer, "--context", context, "--stride", stride, "--output", output]
    command("tools/score_tokens.py", *limits, *flags)


def read_runs(file: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Read the measures of the runs that are done, by seed and arm."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(run["seed"], run["arm"]): run["measures"] for run in map(json.loads, lines)}


def run_all(options: Any, out: Path, file: Path) -> None:
    """Train, score and measure whatever has no line in the file, the arms of the planned test first."""
    hf = options.hf.resolve()
    prepare_novels(options.novels, hf, out)
    data, base, stride = of_data("train", hf, out), out / "base", SHORT * 3 // 4
    optimizer = [*OPTIMIZER, "--lr-warmup-iters", options.steps // 8]
    if not is_done(base):
        first = ["--seq-length", SHORT, "--global-batch-size", 16, "--micro-batch-size", 16, "--seed", BASE_SEED]
        first += ["--train-iters", BASE_STEPS * options.steps // STEPS, "--init-from", hf, "--save", base]
        saving = ["--load", base, "--load-if-present", "--save-interval", 50, "--no-tensorboard"]
        rotary = ["--rotary-base", ROTARY_BASE]
        command("pretrain_skyladder.py", *SHAPE, *optimizer, *data, *first, *saving, *rotary)
    rows = ["--seq-length", ROW, "--global-batch-size", 4, "--micro-batch-size", 4, "--train-iters", options.steps]
    common = [*SHAPE, *optimizer, *data, *rows, "--init-from", base, "--rotary-base", ROTARY_BASE]
    held_out = [*of_data("valid", hf, out), "--seq-length", ROW, "--micro-batch-size", 4, "--seed", 0]
    names, lock = held_out_names(hf, out, options.held_out), threading.Lock()

    def evaluate(plan: Planned) -> None:
        for context, step, count in ((ROW, ROW, options.held_out), (SHORT, stride, min(options.held_out, GAIN_ROWS))):
            target = evaluated(out, plan, context)
            score(plan.folder(out), context, step, target, [*held_out, "--rows", count])
        line = {"seed": plan.seed, "arm": plan.name, "measures": measured(out, plan, names)}
        with lock, file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def missing(arms: Sequence[str]) -> list[Planned]:
        done = read_runs(file)
        return [plan for plan in planned(options.seeds, out, arms) if (plan.seed, plan.name) not in done]

    def store_scores(seed: int) -> None:
        score(base, SHORT, stride, store(out, seed), [*data, *rows, "--seed", seed])

    train(missing(COMPARED), out, common, options.workers, evaluate)
    rest = missing(ARMS)
    with ThreadPoolExecutor(options.workers) as pool:
        for _ in pool.map(store_scores, [plan.seed for plan in rest if plan.name == "dense_frozen"]):
            pass
    train(rest, out, common, options.workers, evaluate)


def evaluated(out: Path, plan: Planned, context: int) -> Path:
    """Return the path of a model's held-out losses with a context length."""
    return out / "evaluations" / f"seed_{plan.seed}" / f"{plan.name}_{context}.zarr"


def token_texts(tokenizer_folder: Path) -> list[str]:
    """Return the text of each token id, one character per byte."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    pieces = [tokenizer.id_to_token(number) or "" for number in range(tokenizer.get_vocab_size())]
    return [_as_bytes(piece).decode("latin-1") for piece in pieces]


def _as_bytes(piece: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def find_names(row: TokenRow, texts: list[str], common: set[str]) -> list[Name]:
    """Find the names of a row that begin after its first SHORT tokens.

    A name is a capitalised ASCII word of three letters or more inside a sentence: after a lower-case letter, a comma,
    a semicolon or a title with a full stop. Its lower-case form must not be in `common`. All places of the word in
    the row, also at the start of a sentence, count as having been seen.
    """
    pieces = [texts[token] for token in row.tokens]
    text, starts = "".join(pieces), np.cumsum([0, *map(len, pieces)])
    seen: dict[str, int] = {}
    names = []
    for match in WORD.finditer(text):
        first, last = np.searchsorted(starts, [match.start(), match.end() - 1], side="right") - 1
        word, before = match[0], seen.get(match[0])
        seen[word] = int(first)
        is_name = word.lower() not in common and INSIDE_SENTENCE.search(text, 0, match.start())
        if is_name and first > SHORT:
            group = "first" if before is None else "far" if first - before > SHORT else "near"
            names.append(Name(group, range(int(first), int(last) + 1)))
    return names


def held_out_names(hf: Path, out: Path, count: int) -> list[list[Name]]:
    """Find the names in the rows that all models are evaluated on."""
    flags = [*of_data("valid", hf, out), "--seq-length", ROW, "--seed", 0]
    row_at = open_rows(parse([str(flag) for flag in flags]), 512).row
    rows = [row_at(number) for number in range(count)]
    texts = token_texts(hf)
    common = TITLES | {
        word for row in rows for word in re.findall(r"[a-z]+", "".join(texts[token] for token in row.tokens))
    }
    return [find_names(row, texts, common) for row in rows]


def measured(out: Path, plan: Planned, names: list[list[Name]]) -> dict[str, float]:
    """Return a model's mean loss, and its gain, the loss with SHORT tokens of context minus that with the whole row.

    The loss of a name is that of its tokens together. The gain is that of the first GAIN_ROWS rows.
    """
    gained = min(len(names), GAIN_ROWS)
    whole_RL, short_RL = (
        np.stack([opened.read(row) for row in range(count)]).astype(float)
        for opened, count in (
            (ScoreStore.open(evaluated(out, plan, context)), count)
            for context, count in ((ROW, len(names)), (SHORT, gained))
        )
    )
    found = {}
    for kind, values_RL in (("loss", whole_RL), ("gain", short_RL - whole_RL[:gained])):
        found[kind] = float(values_RL.mean())
        for group in GROUPS:
            sums = [
                values[name.tokens[0] - 1 : name.tokens[-1]].sum()  # the loss of token i + 1 is at i
                for values, row in zip(values_RL, names[: len(values_RL)], strict=True)
                for name in row
                if name.group == group
            ]
            found[f"{kind}_{group}"] = float(np.mean(sums))
    return found


def results(
    names: list[list[Name]], runs: dict[tuple[int, str], dict[str, float]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Compute the numbers behind the tables, of the arms that are done for all seeds."""
    done = [arm for arm in ARMS if all((seed, arm) in runs for seed in seeds)]
    if not set(COMPARED) <= set(done):
        raise SystemExit(f"the runs of {', '.join(COMPARED)} are not finished for all seeds")
    values = {arm: {one: [runs[seed, arm][one] for seed in seeds] for one in MEASURES} for arm in done}
    for own in values.values():  # separates the use of context from a higher probability of all names
        own[CONTROLLED] = np.subtract(own["gain_far"], own["gain_first"]).tolist()
        own[PLANNED] = np.subtract(own["loss_far"], own["loss_first"]).tolist()
    counts = {group: sum(name.group == group for row in names for name in row) for group in GROUPS}
    return {"seeds": list(seeds), "names": counts, "values": values}


def tables(numbers: dict[str, Any]) -> str:
    """Make the tables from the numbers of a .json file."""
    values, parts = numbers["values"], []
    for kind, unit in (("loss", "Loss"), ("gain", f"Gain of {ROW} over {SHORT} tokens of context")):
        columns = [kind, *(f"{kind}_{group}" for group in GROUPS), f"{kind}_far_less_first"]
        columns = [one for one in columns if one in values["uniform"]]
        head = ["run", "all tokens", *GROUPS.values(), "far minus first"][: 1 + len(columns)]
        rows: list[list[object]] = [["uniform", *(f"{np.mean(values['uniform'][one]):.4f}" for one in columns)]]
        rows += [
            [KINDS[run], *(_less(values, run, one) for one in columns)]
            for run in KINDS
            if run in values and run != "uniform"
        ]
        parts += [
            f"{unit} (nats / token or name), {len(numbers['seeds'])} seeds; below uniform the difference from it, "
            "paired by seed, ± half the 95 % interval over seeds; bold: it excludes 0.",
            table(head, rows),
        ]
    if "placebo" in values:
        planned_test = _less(values, "dense_unfrozen", PLANNED, "placebo")
        parts.append(f"The planned test, far minus first names, dense minus placebo: {planned_test} nats.")
    return "\n\n".join(parts) + "\n"


def _less(values: dict[str, dict[str, list[float]]], run: str, one: str, other: str = "uniform") -> Mean:
    return Mean.of(np.subtract(values[run][one], values[other][one]).tolist())


def draw(values: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the gain of long context on names minus that of uniform weights: a point per seed, and the mean."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.add_subplot()
    axis.axhline(0, color="#111827", linewidth=1)
    for number, kind in enumerate(kind for kind in KINDS if kind in values and kind != "uniform"):
        for place, group in enumerate(GROUPS):
            less = np.subtract(values[kind][f"gain_{group}"], values["uniform"][f"gain_{group}"])
            at = place + (number - 1.5) * 0.2
            axis.plot(np.full(less.size, at), less, ".", color=f"C{number}", alpha=0.6)
            axis.plot(at, less.mean(), "_", color=f"C{number}", markersize=16, label=None if place else KINDS[kind])
    axis.set_xticks(range(len(GROUPS)), list(GROUPS.values()))
    axis.set_ylabel("gain minus uniform's (nats / name)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = arguments(
        __doc__,
        steps=STEPS,
        seeds=range(1, 16),
        held_out=(1024, "held-out rows that models are evaluated on"),
        novels="folder of .txt novels",
        own={"--runs": {"type": Path, "help": "file with a line for each run [OUT/results/token_weighting.jsonl]"}},
        hf="the Llama of 260K parameters as a Hugging Face folder",
        out="folder for data, runs and results",
    )
    if options.check:
        check(Path(__file__).with_suffix(".md"), tables)
        return
    out = options.out.resolve()
    folder = options.results or out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    file = (options.runs or folder / "token_weighting.jsonl").resolve()
    if not options.only_results:
        run_all(options, out, file)
    names = held_out_names(options.hf.resolve(), out, options.held_out)
    numbers = results(names, read_runs(file), options.seeds)
    write_results(folder, "token_weighting", numbers, tables)
    draw(numbers["values"], folder / "token_weighting.png")


if __name__ == "__main__":
    main()
