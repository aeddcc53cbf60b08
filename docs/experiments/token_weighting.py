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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from harness import HELD_OUT_NOVELS, Mean, Planned, arguments, check, command, is_done, train, write_results
from matplotlib.figure import Figure

from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.evaluation.report import table
from megatron_ext.monitoring.report import Run, load_run
from megatron_ext.run.inputs import open_rows
from megatron_ext.token_weighting.store import ScoreStore

SHORT = 256
ROW = 1024
STEPS = 160
BASE_STEPS = 500
BASE_SEED = 1
ROTARY_BASE = 63_496  # dynamic NTK, 10000 * 4^(8/6): the base of the scorer too, as in the run
SHAPE: list[object] = [
    *("--num-layers", 5, "--hidden-size", 64, "--ffn-hidden-size", 172, "--num-attention-heads", 8),
    *("--num-query-groups", 4, "--no-untie-embeddings-and-output-weights", "--vocab-size", 512),
]
OPTIMIZER: list[object] = [*("--lr", 1e-3, "--min-lr", 1e-4, "--lr-decay-style", "cosine", "--weight-decay", 0.01)]
ARMS = {
    "uniform": "uniform",
    "dense_unfrozen": "dense, unfrozen",
    "placebo": "placebo: dense, unfrozen, permuted",
    "sparse_unfrozen": "sparse, unfrozen",
    "dense_frozen": "dense, frozen",
}
COMPARED = ("uniform", "dense_unfrozen", "placebo")  # the arms of the planned test, trained first
GAIN_ROWS = 256  # of the held-out rows, those on which the gain is measured
GROUPS = {"first": "first in the row", "near": f"last seen <= {SHORT} back", "far": f"last seen > {SHORT} back"}
KINDS = {"loss": "Loss", "gain": f"Gain of {ROW:,} over {SHORT} tokens of context"}
TIMES = ("step_time_s", "score_time_s")
OF_TOKEN = "_per_token"  # ends the measures of the tokens of names; the others are of whole names
FAR_LESS_FIRST = "far minus first"
BETWEEN = {
    "gain, far - near": ("gain", "far", "near"),
    "gain, far - first": ("gain", "far", "first"),
    "loss, far - near": ("loss", "far", "near"),
    "loss, near - first": ("loss", "near", "first"),
    "loss, far - first": ("loss", "far", "first"),
}
CONTROLS = (
    ("dense_unfrozen", "placebo"),
    ("dense_unfrozen", "uniform"),
    ("sparse_unfrozen", "uniform"),
    ("dense_frozen", "uniform"),
)

Values = dict[str, dict[str, list[float]]]  # by arm and measure, one for each seed

WORD = re.compile(r"(?<![A-Za-z\x80-\xff])[A-Z][a-z]{2,}(?=[^A-Za-z\x80-\xff])")
TITLES = {"mrs", "miss", "sir", "lordship", "ladyship", "madam", "madame", "monsieur", "god"}
INSIDE_SENTENCE = re.compile(r"(?:[a-z,;]|\b(?:Mr|Mrs|Dr|St)\.) *\n? *$")


@dataclass(frozen=True)
class Name:
    """An occurrence of a name: `tokens` are indices into the row's tokens; `group` a key of GROUPS."""

    group: str
    tokens: range


def planned(seeds: Sequence[int], out: Path, arms: Iterable[str] = ARMS) -> list[Planned]:
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


def run_all(options: Any, out: Path, file: Path, groups: Sequence[Sequence[Planned]]) -> None:
    """Train, score and measure the runs that have no line in the file, one group after another."""
    hf = options.hf.resolve()
    prepare_novels(options.novels, hf, out)
    data = of_data("train", hf, out)
    base = out / "base"
    stride = SHORT * 3 // 4
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
    names = held_out_names(hf, out, options.held_out)
    lock = threading.Lock()

    def evaluate(plan: Planned) -> None:
        for context, step, count in ((ROW, ROW, options.held_out), (SHORT, stride, min(options.held_out, GAIN_ROWS))):
            target = evaluated(out, plan, context)
            score(plan.folder(out), context, step, target, [*held_out, "--rows", count])
        line = {"seed": plan.seed, "arm": plan.name, "measures": measured(out, plan, names)}
        line |= {"seconds": step_seconds(load_run(plan.folder(out)))}
        with lock, file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def store_scores(plan: Planned) -> None:
        if plan.name == "dense_frozen":
            score(base, SHORT, stride, store(out, plan.seed), [*data, *rows, "--seed", plan.seed])

    for plans in groups:
        done = read_runs(file)
        missing = [plan for plan in plans if (plan.seed, plan.name) not in done]
        with ThreadPoolExecutor(options.workers) as pool:
            for _ in pool.map(store_scores, missing):
                pass
        train(missing, out, common, options.workers, evaluate)


def step_seconds(run: Run) -> dict[str, float]:
    """Return the medians over a run's steps: of a step's seconds, and of the part that computes scores, if any."""
    return {name: float(np.median(run.train[name].values)) for name in TIMES if name in run.train}


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
    text = "".join(pieces)
    starts = np.cumsum([0, *map(len, pieces)])
    seen: dict[str, int] = {}
    names = []
    for match in WORD.finditer(text):
        first, last = np.searchsorted(starts, [match.start(), match.end() - 1], side="right") - 1
        word = match[0]
        before = seen.get(match[0])
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

    The loss of a name is that of its tokens together; a measure that ends in OF_TOKEN is the mean over all tokens of
    the names, so that the length of names does not matter. The gain is that of the first GAIN_ROWS rows.
    """
    gained = min(len(names), GAIN_ROWS)
    whole_RL, short_RL = (
        np.stack([opened.read(row) for row in range(count)]).astype(float)
        for opened, count in (
            (ScoreStore.open(evaluated(out, plan, context)), count)
            for context, count in ((ROW, len(names)), (SHORT, gained))
        )
    )
    means = {}
    for kind, values_RL in (("loss", whole_RL), ("gain", short_RL - whole_RL[:gained])):
        means[kind] = float(values_RL.mean())
        for group in GROUPS:
            tokens = [
                values[name.tokens[0] - 1 : name.tokens[-1]]  # the loss of token i + 1 is at i
                for values, row in zip(values_RL, names[: len(values_RL)], strict=True)
                for name in row
                if name.group == group
            ]
            means[f"{kind}_{group}"] = float(np.mean([row_losses.sum() for row_losses in tokens]))
            means[f"{kind}_{group}{OF_TOKEN}"] = float(np.concatenate(tokens).mean())
    return means


def results(
    names: list[list[Name]], runs: dict[tuple[int, str], dict[str, float]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Compute the numbers behind the tables, of the arms that are done for all seeds."""
    done = [arm for arm in ARMS if all((seed, arm) in runs for seed in seeds)]
    if not set(COMPARED) <= set(done):
        raise SystemExit(f"the runs of {', '.join(COMPARED)} are not finished for all seeds")
    values = {
        arm: {measure: [runs[seed, arm][measure] for seed in seeds] for measure in runs[seeds[0], arm]} for arm in done
    }
    counts = {group: sum(name.group == group for row in names for name in row) for group in GROUPS}
    return {"seeds": list(seeds), "names": counts, "values": values}


def contrast(values: Values, arm: str, measure: str, control: str | None = None) -> npt.NDArray[np.float64]:
    """Return a measure of an arm for each seed, minus its control, another measure, if any."""
    return np.subtract(values[arm][measure], 0.0 if control is None else values[arm][control])


def less(values: Values, arm: str, other: str, *measures: str | None) -> Mean:
    """Return a contrast of an arm minus that of another, paired by seed."""
    return Mean.of((contrast(values, arm, *measures) - contrast(values, other, *measures)).tolist())


def tables(numbers: dict[str, Any]) -> str:
    """Make the tables from the numbers of a .json file."""
    values = numbers["values"]
    seeds = len(numbers["seeds"])
    parts = []
    for kind, title in KINDS.items():
        first, near, far = (f"{kind}_{group}{OF_TOKEN}" for group in GROUPS)
        columns = [(kind, None), (first, None), (near, None), (far, None), (far, first)]
        uniform = [f"{contrast(values, 'uniform', *column).mean():.4f}" for column in columns]
        rows: list[list[object]] = [[ARMS["uniform"], *uniform]]
        rows += [
            [ARMS[arm], *(less(values, arm, "uniform", *column) for column in columns)]
            for arm in values
            if arm != "uniform"
        ]
        parts += [
            f"{title} (nats per token; of names, per token of the names), {seeds} seeds; below uniform the difference "
            "from it, paired by seed, ± half the 95 % interval over seeds; bold: it excludes 0.",
            table(["run", "all tokens", *GROUPS.values(), FAR_LESS_FIRST], rows),
        ]
    units = {"per name": "", "per token": OF_TOKEN}
    contrasts = {
        f"{kind}, {unit}": (f"{kind}_far{suffix}", f"{kind}_first{suffix}")
        for kind in KINDS
        for unit, suffix in units.items()
    }
    rows = [
        [ARMS[arm], *(less(values, arm, "placebo", *pair) for pair in contrasts.values())]
        for arm in values
        if arm.endswith("_unfrozen")  # the placebo permutes the weights of unfrozen scores
    ]
    parts += [
        f"{FAR_LESS_FIRST.capitalize()} names, minus the placebo's. Planned test: dense, unfrozen, loss per name.",
        table(["run", *contrasts], rows),
        "Between groups, nats per name; frozen weights have no placebo, so all are compared with uniform ones too.",
        table(["runs", *BETWEEN], [between(values, arm, control) for arm, control in CONTROLS if arm in values]),
    ]
    return "\n\n".join(parts) + "\n"


def between(values: Values, arm: str, control: str) -> list[object]:
    """Make the row of a table: differences between groups of names, of an arm minus its control."""
    return [
        f"{ARMS[arm]} - {control}",
        *(less(values, arm, control, f"{kind}_{group}", f"{kind}_{other}") for kind, group, other in BETWEEN.values()),
    ]


def draw(values: Values, path: Path) -> None:
    """Draw far minus first names of each arm minus that of uniform weights: a point per seed, mean and interval."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    arms = [arm for arm in values if arm != "uniform"]
    for axis, kind in zip(figure.subplots(1, 2), KINDS, strict=True):
        axis.axhline(0, color="#111827", linewidth=1)
        for number, arm in enumerate(arms):
            pair = f"{kind}_far", f"{kind}_first"
            by_seed = contrast(values, arm, *pair) - contrast(values, "uniform", *pair)
            mean = Mean.of(by_seed.tolist())
            axis.plot(np.full(by_seed.size, number - 0.15), by_seed, ".", color=f"C{number}", alpha=0.5)
            axis.errorbar(number + 0.1, mean.value, mean.half_width, fmt="o", color=f"C{number}", capsize=4)
        axis.set_xticks(range(len(arms)), [ARMS[arm].partition(":")[0].replace(", ", "\n") for arm in arms])
        axis.set(title=f"{kind}, far minus first names", ylabel="minus uniform's (nats / name)")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    options = arguments(
        __doc__,
        steps=STEPS,
        seeds=range(1, 16),
        held_out=(1024, "held-out rows that models are evaluated on"),
        novels="folder of .txt novels",
        more_flags={
            "--runs": {"type": Path, "help": "file with a line for each run [OUT/results/token_weighting.jsonl]"}
        },
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
        run_all(options, out, file, [planned(options.seeds, out, COMPARED), planned(options.seeds, out)])
    names = held_out_names(options.hf.resolve(), out, options.held_out)
    numbers = results(names, read_runs(file), options.seeds)
    write_results(folder, "token_weighting", numbers, tables)
    draw(numbers["values"], folder / "token_weighting.png")


if __name__ == "__main__":
    main()
