"""Analysis of token_weighting.sh: held-out losses by position and on names, with bootstrap intervals over rows.

Every number is a sum over tokens (or names) of all rows, divided by their count; an interval is the 2.5th to 97.5th
percentile of that ratio, or of its difference from the uniform run, over rows drawn again with replacement. The same
draws serve all runs, so differences are paired.

Legend: R rows, L tokens of a row, M measures.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tokenizers
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ext.config.arguments import parse
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.run.inputs import open_rows
from megatron_ext.token_weighting.store import ScoreStore

RUNS = {
    "uniform": "uniform",
    "uniform_2": "uniform, other seed",
    "dense_unfrozen": "dense, unfrozen",
    "sparse_unfrozen": "sparse, unfrozen",
    "dense_unfrozen_2": "dense, unfrozen, other seed",
    "dense_frozen": "dense, frozen",
    "sparse_frozen": "sparse, frozen",
}
BASELINES = {"dense_unfrozen_2": "uniform_2"}  # of its own seed; the others are compared with `uniform`
SHORT, BINS, DRAWS, SETTLED = 256, 8, 2000, 10
GROUPS = {"first": "first in the row", "near": f"last seen <= {SHORT} back", "far": f"last seen > {SHORT} back"}
COLOURS = dict(zip(RUNS, ("#111827", "#9ca3af", "#2166ac", "#d95f02", "#1b8a6b", "#7fb3dd", "#f4a768"), strict=True))

Table = dict[str, dict[str, dict[str, Any]]]

WORD = re.compile(r"(?<![A-Za-z\x80-\xff])[A-Z][a-z]{2,}(?=[^A-Za-z\x80-\xff])")
TITLES = {"mrs", "miss", "sir", "lordship", "ladyship", "madam", "madame", "monsieur", "god"}
INSIDE_SENTENCE = re.compile(r"(?:[a-z,;]|\b(?:Mr|Mrs|Dr|St)\.) *\n? *$")


@dataclass(frozen=True)
class Name:
    """An occurrence of a name: `tokens` are indices into the row's tokens; `group` a key of GROUPS."""

    group: str
    tokens: range


@dataclass(frozen=True)
class Sums:
    """Numerators and denominators of a run's measures, float64 [R, M], with the measures' names."""

    names: list[str]
    sums_RM: np.ndarray
    counts_RM: np.ndarray

    def ratios(self, draws_DR: np.ndarray | None = None) -> np.ndarray:
        """Compute the measures, [M], or [D, M] over rows drawn D times."""
        if draws_DR is None:
            return self.sums_RM.sum(0) / self.counts_RM.sum(0)
        return np.stack([self.sums_RM[draw].sum(0) / self.counts_RM[draw].sum(0) for draw in draws_DR])


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


def measure(losses_RL: np.ndarray, short_RL: np.ndarray, names: list[list[Name]]) -> Sums:
    """Compute all measures of a run: losses, and gains, which are short-context losses minus losses.

    losses_RL[r, i] is the loss of token i + 1 with the whole row as context; short_RL the same with SHORT tokens.
    """
    columns = {}
    for kind, values_RL in (("loss", losses_RL), ("gain", short_RL - losses_RL)):
        columns[kind] = values_RL.sum(1), np.full(len(values_RL), values_RL.shape[1])
        for number, part_RB in enumerate(np.split(values_RL, BINS, axis=1)):
            columns[f"{kind}_{number}"] = part_RB.sum(1), np.full(len(part_RB), part_RB.shape[1])
        for group in GROUPS:
            found = [
                [values[name.tokens[0] - 1 : name.tokens[-1]] for name in row if name.group == group]
                for values, row in zip(values_RL, names, strict=True)
            ]
            columns[f"{kind}_{group}"] = _per_row(found, np.sum), _per_row(found, len)
    sums, counts = zip(*columns.values(), strict=True)
    return Sums(list(columns), np.stack(sums, 1).astype(float), np.stack(counts, 1).astype(float))


def _per_row(found: list[list[np.ndarray]], value: Callable[[np.ndarray], float]) -> np.ndarray:
    return np.array([sum(value(each) for each in row) for row in found])


def compare(measured: dict[str, Sums]) -> Table:
    """Per run and measure: the value, the difference from its baseline, and both intervals."""
    rows = len(next(iter(measured.values())).sums_RM)
    draws_DR = np.random.default_rng(0).integers(rows, size=(DRAWS, rows))
    drawn = {run: sums.ratios(draws_DR) for run, sums in measured.items()}
    table: Table = {}
    for run, sums in measured.items():
        baseline = BASELINES.get(run, "uniform")
        change = sums.ratios() - measured[baseline].ratios()
        own, paired = _interval(drawn[run]), _interval(drawn[run] - drawn[baseline])
        table[run] = {
            name: {
                "value": round(float(value), 4),
                "interval": own[number],
                "difference": round(float(change[number]), 4),
                "difference_interval": paired[number],
            }
            for number, (name, value) in enumerate(zip(sums.names, sums.ratios(), strict=True))
        }
    return table


def _interval(drawn_DM: np.ndarray) -> list[list[float]]:
    return np.percentile(drawn_DM, [2.5, 97.5], axis=0).T.round(4).tolist()


def times(run: Path) -> dict[str, float]:
    """Median and 10th percentile of a step, and the median of its scoring, in seconds."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][SETTLED:]
    step_times = [step["step_time_s"] for step in steps]
    scoring = [step.get("score_time_s", 0.0) for step in steps]
    median, fast = np.median(step_times), np.percentile(step_times, 10)
    return {
        "steps": len(steps) + SETTLED,
        "step_s_median": round(float(median), 3),
        "step_s_p10": round(float(fast), 3),
        "score_s_median": round(float(np.median(scoring)), 3),
    }


def draw(table: Table, length: int) -> Figure:
    """Draw differences from the uniform run: loss by position, loss on names, and gain of long context on names."""
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    position, name_loss, name_gain = figure.subplots(1, 3, width_ratios=[1.6, 1, 1])
    width = length // BINS
    bins = [f"{number * width}-\n{(number + 1) * width - 1}" for number in range(BINS)]
    groups = [text.replace(" ", "\n", 2) for text in GROUPS.values()]
    _points(position, table, [f"loss_{number}" for number in range(BINS)], bins)
    _points(name_loss, table, [f"loss_{group}" for group in GROUPS], groups)
    _points(name_gain, table, [f"gain_{group}" for group in GROUPS], groups)
    position.set(title="Loss of all tokens, by position", ylabel="minus that of uniform, nats / token")
    name_loss.set(title=f"Loss on names after token {SHORT}")
    name_gain.set(title=f"Gain of {length} over {SHORT} tokens")
    position.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    position.set_ylim(top=position.get_ylim()[1] * 1.3)
    return figure


def _points(axis: Axes, table: Table, names: list[str], labels: list[str]) -> None:
    runs = [run for run in RUNS if run != "uniform"]
    axis.axhline(0, color=COLOURS["uniform"], linewidth=1)
    for place, run in enumerate(runs):
        cells = [table[run][name] for name in names]
        values = np.array([cell["difference"] for cell in cells])
        spans = np.array([cell["difference_interval"] for cell in cells])
        axis.errorbar(
            np.arange(len(names)) + (place - (len(runs) - 1) / 2) * 0.13,
            values,
            yerr=np.abs(spans.T - values),
            fmt="o",
            markersize=4,
            linewidth=1.4,
            color=COLOURS[run],
            label=RUNS[run],
        )
    axis.set_xticks(range(len(names)), labels, fontsize=8)
    axis.grid(axis="y", color="#e5e7eb")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="the folder that token_weighting.sh wrote")
    parser.add_argument("--data-path", required=True, metavar="PREFIX", help="the held-out data set")
    parser.add_argument("--tokenizer-model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path, required=True)
    options = parser.parse_args()

    stores = {path.stem: ScoreStore.open(path) for path in (options.runs / "eval").glob("*.zarr")}
    identity = stores["uniform"].identity
    flags = ["--data-path", options.data_path, "--split", "1,0,0", "--seq-length", str(identity.row_length)]
    row_at = open_rows(parse([*flags, "--seed", str(identity.seed)]), identity.vocab_size).train
    rows = [row_at(number) for number in range(identity.rows)]

    texts = token_texts(options.tokenizer_model)
    common = TITLES | {
        word for row in rows for word in re.findall(r"[a-z]+", "".join(texts[token] for token in row.tokens))
    }
    names = [find_names(row, texts, common) for row in rows]
    losses = {
        run: np.stack([store.read(number) for number in range(identity.rows)]).astype(float)
        for run, store in stores.items()
    }
    losses["base"] = losses["base_short"]  # the base has no longer context, so its gain is 0
    table = compare({run: measure(losses[run], losses[f"{run}_short"], names) for run in [*RUNS, "base"]})
    count = {group: sum(name.group == group for row in names for name in row) for group in GROUPS}
    step_times = {run: times(options.runs / run) for run in RUNS}
    result = {
        "rows": identity.rows,
        "row_length": identity.row_length,
        "names": count,
        "time": step_times,
        "runs": table,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    matplotlib.use("Agg")
    draw(table, identity.row_length).savefig(options.figure, dpi=130)
    show(result)


def show(result: dict[str, Any]) -> None:
    """Print the numbers of token_weighting.md."""
    print(f"{result['rows']} rows, names: {result['names']}")
    for name in result["runs"]["uniform"]:
        print(name)
        for run, cells in result["runs"].items():
            cell = cells[name]
            print(f"  {run:16}{cell['value']:.4f} {cell['interval']}", end="")
            print(f"  {cell['difference']:+.4f} {cell['difference_interval']}")
    for run, found in result["time"].items():
        print(f"{run:16}{found}")


if __name__ == "__main__":
    main()
