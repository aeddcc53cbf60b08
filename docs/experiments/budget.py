"""Table 24 of SkyLadder scaled by 16: does a longer expansion of the window give a better model? See budget.md.

python docs/experiments/budget.py NOVELS OUT

50 runs, two at a time. If it is stopped, the same command continues. OUT/results gets the page, its figure
and all losses.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from harness import Mean, Planned, arguments, command, evaluate, finished, losses, prepare, train, write_results
from matplotlib.figure import Figure
from scipy import stats

from megatron_ext.evaluation.report import table

ROW, BATCH, VOCABULARY, START = 512, 2, 2048, 4
MEDIAN, SIGMA, SHORTEST = 67, 1.11, 3  # tokens of a document: the paper's CommonCrawl over 16
LENGTHS = (32, 256, 512)
TESTED = (512, 256)  # the windows of the planned test
SHARES = (8, 16, 32, 64)  # percent of the steps in which the window grows
RATES = (1e-3, 2e-3, 4e-3)
SEEDS_A = 3  # the first of all seeds
PAPER = dict(zip(SHARES, (-0.047, -0.061, -0.081, -0.092), strict=True))  # Table 24, 12.5B tokens, at 8K
COMMON: list[object] = [
    *("--model-preset", "tiny-1M", "--init-method-std", 0.08, "--seq-length", ROW, "--global-batch-size", BATCH),
    *("--micro-batch-size", BATCH, "--eval-interval", 0, "--split", "1,0,0"),
]


def cut(texts: Sequence[str], tokenizer: tokenizers.Tokenizer, seed: int = 0) -> list[str]:
    """Cut texts into documents whose numbers of tokens are log-normal; the end of a text is a document too."""
    draw = np.random.default_rng(seed)
    documents = []
    for text in texts:
        starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]
        token = 0
        while token < len(starts):
            end = token + max(round(draw.lognormal(np.log(MEDIAN), SIGMA)), SHORTEST)
            documents.append(text[starts[token] : starts[end] if end < len(starts) else len(text)])
            token = end
    return [document for document in documents if document]


def prepare_documents(novels: Path, out: Path) -> list[object]:
    """Make the tokenizer, the training documents and the held-out ones, once; return the flags of the data."""
    data = out / "data"
    prepare(novels, out, VOCABULARY, sources=("novels",))
    documents = data / "documents"
    if not documents.with_suffix(".idx").exists():
        texts = [json.loads(line)["text"] for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
        lines = [json.dumps({"text": document}) + "\n" for document in cut(texts, tokenizer)]
        documents.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8")
        flags = ["--output-prefix", documents, "--tokenizer-model", data / "tokenizer"]
        command("tools/preprocess_data.py", "--input", documents.with_suffix(".jsonl"), *flags)
    return ["--data-path", documents, "--tokenizer-model", data / "tokenizer"]


def name_of(arm: object, rate: float) -> str:
    """Name a run: the share of the expansion in percent, `constant` or `intradoc` (64 % under the document mask)."""
    return f"{arm}_{rate:g}"


def plan_of(seed: int, arm: object, rate: float) -> Planned:
    """Describe a run."""
    flags: list[object] = ["--lr", rate, "--min-lr", rate / 10]
    if arm != "constant":
        share = 64 if arm == "intradoc" else arm
        flags += ["--window-schedule", "linear", "--window-start", START, "--window-expansion-fraction"]
        flags += [int(str(share)) / 100, *(["--document-mask"] if arm == "intradoc" else [])]
    return Planned(seed, name_of(arm, rate), flags)


def section_a(seeds: Sequence[int], rates: Sequence[float]) -> list[Planned]:
    """Constant and 64 % at each learning rate."""
    return [plan_of(seed, arm, rate) for seed in seeds[:SEEDS_A] for rate in rates for arm in ("constant", 64)]


def section_b(seeds: Sequence[int], rate: float) -> list[Planned]:
    """All shares at one learning rate, and IntraDoc for the seeds of section A."""
    plans = [plan_of(seed, arm, rate) for seed in seeds for arm in ("constant", *SHARES)]
    return plans + [plan_of(seed, "intradoc", rate) for seed in seeds[:SEEDS_A]]


def both(seeds: Sequence[int], rates: Sequence[float], rate: float) -> list[Planned]:
    """All runs, without those of B that are in A."""
    plans = {(plan.seed, plan.name): plan for plan in [*section_a(seeds, rates), *section_b(seeds, rate)]}
    return list(plans.values())


def best_rate(found: dict[str, list[float]], arm: object, rates: Sequence[float]) -> float:
    """Return the learning rate with the lowest mean loss."""
    return min(rates, key=lambda rate: float(np.mean(found[name_of(arm, rate)])))


def slopes(found: dict[str, list[float]], rate: float) -> list[float]:
    """Return each seed's least-squares slope of the loss on log2 of the share, in nats per doubling."""
    own = np.array([found[name_of(share, rate)] for share in SHARES])
    return np.polyfit(np.log2(SHARES), own, 1)[0].tolist()


def results_a(out: Path, seeds: Sequence[int], rates: Sequence[float]) -> tuple[list[str], dict[str, Any]]:
    """Make the tables of section A, and its losses."""
    found = {length: losses(out, seeds, length) for length in LENGTHS}
    at = {arm: best_rate(found[ROW], arm, rates) for arm in ("constant", 64)}
    rows = [
        [f"{arm} %" if arm == 64 else arm, *(f"{np.mean(found[ROW][name_of(arm, rate)]):.4f}" for rate in rates)]
        for arm in at
    ]
    gain = {
        length: np.subtract(own[name_of(64, at[64])], own[name_of("constant", at["constant"])])
        for length, own in found.items()
    }
    parts = [
        f"### A: learning rates\n\nHeld-out loss at {ROW} tokens, mean of {len(seeds)} seeds.",
        table(["arm", *(f"{rate:g}" for rate in rates)], rows),
        f"64 % ({at[64]:g}) minus constant ({at['constant']:g}), paired by seed, ± half the 95 % interval over seeds; "
        "bold: it excludes 0.",
        table(
            [*map(str, LENGTHS), f"{LENGTHS[-1]} minus {LENGTHS[0]}"],
            [
                [
                    *(Mean.of(gain[length].tolist()) for length in LENGTHS),
                    Mean.of((gain[LENGTHS[-1]] - gain[LENGTHS[0]]).tolist()),
                ]
            ],
        ),
    ]
    return parts, {"seeds": list(seeds), "losses": found}


def results_b(out: Path, seeds: Sequence[int], rate: float) -> tuple[list[str], dict[str, Any]]:
    """Make the tables of section B with the planned test, and its losses."""
    found = {length: losses(out, seeds, length) for length in LENGTHS}
    base = name_of("constant", rate)
    rows: list[list[object]] = [["constant", *(f"{np.mean(found[length][base]):.4f}" for length in LENGTHS), ""]]
    for share in SHARES:
        less = [np.subtract(found[length][name_of(share, rate)], found[length][base]) for length in LENGTHS]
        rows.append([f"{share} %", *(Mean.of(values.tolist()) for values in less), f"{PAPER[share]:+.3f}"])
    parts = [
        f"### B: shares\n\nHeld-out loss at the learning rate {rate:g}, {len(seeds)} seeds; below constant the "
        "difference from it, paired by seed, ± half the 95 % interval over seeds; bold: it excludes 0. Last column: "
        "Table 24, 12.5B tokens, at 8K.",
        table(["share", *map(str, LENGTHS), "paper"], rows),
    ]
    tests = {}
    for length in TESTED:
        own = slopes(found[length], rate)
        tests[length] = {"slopes": own, "p_value": float(stats.ttest_1samp(own, 0).pvalue)}
    cells = [[length, Mean.of(test["slopes"]), f"{test['p_value']:.2g}"] for length, test in tests.items()]
    parts += [
        "The planned test: slope of the loss on log2 of the share (nats per doubling), t-test over seeds.",
        table(["window", "slope", "p"], cells),
    ]
    numbers: dict[str, Any] = {"seeds": list(seeds), "rate": rate, "losses": found, "tests": tests}
    masked = [seed for seed in seeds if name_of("intradoc", rate) in losses(out, [seed], ROW)]
    if masked:
        pairs = {length: losses(out, masked, length) for length in LENGTHS}
        less = [np.subtract(own[name_of("intradoc", rate)], own[name_of(64, rate)]).tolist() for own in pairs.values()]
        parts += [
            f"64 % with the document mask minus without, {len(masked)} seeds.",
            table(list(map(str, LENGTHS)), [list(map(Mean.of, less))]),
        ]
        numbers["intradoc"] = {length: own[name_of("intradoc", rate)] for length, own in pairs.items()}
    return parts, numbers


def draw(found: dict[int, dict[str, list[float]]], rate: float, path: Path) -> None:
    """Draw the loss minus constant's by share: a point for each seed, lines of means, and the paper's figures."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axis = figure.add_subplot()
    axis.axhline(0, color="#9ca3af", linewidth=1)
    axis.plot(SHARES, list(PAPER.values()), "--", color="#6b7280", label="Table 24, 12.5B tokens, at 8K")
    for number, length in enumerate(LENGTHS):
        base = found[length][name_of("constant", rate)]
        less = np.array([np.subtract(found[length][name_of(share, rate)], base) for share in SHARES])
        axis.plot(SHARES, less.mean(axis=1), "-", color=f"C{number}", label=f"ours, at {length}")
        axis.plot(SHARES, less, ".", color=f"C{number}", alpha=0.4)
    axis.set_xscale("log", base=2)
    axis.set_xticks(SHARES, [f"{share} %" for share in SHARES])
    axis.set(xlabel="share of the steps in which the window grows", ylabel="loss minus constant's (nats / token)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def page(parts: Sequence[str]) -> str:
    """Return the page of the design with these results in the place of its own."""
    design, _, _ = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").partition("\n## Results\n")
    return "\n\n".join([f"{design}\n## Results", *parts]) + "\n"


def main() -> None:
    own = {"--rates": {"type": float, "nargs": "+", "default": RATES, "help": "peak learning rates of section A"}}
    options = arguments(
        __doc__,
        steps=2000,
        seeds=range(1, 8),
        held_out=(120, "held-out documents that models are evaluated on"),
        own=own,
        novels="folder of .txt novels",
        out="folder for data, runs and results",
    )
    out, seeds, rates = options.out.resolve(), options.seeds, options.rates
    limits = {"documents": options.held_out, "workers": options.workers, "sources": ("novels",)}
    common: list[object] = []
    if not options.only_results:
        data = prepare_documents(options.novels, out)
        common = [*data, *COMMON, "--train-iters", options.steps, "--lr-warmup-iters", options.steps // 20]
        train(section_a(seeds, rates), out, common, options.workers)
        evaluate(section_a(seeds, rates), out, LENGTHS, ROW, **limits)
    folder = options.results or out / "results"
    parts, numbers = results_a(out, finished(section_a(seeds, rates), out), rates)
    rate = best_rate(numbers["losses"][ROW], "constant", rates)
    if not options.only_results:
        train(section_b(seeds, rate), out, common, options.workers)
        evaluate(both(seeds, rates, rate), out, LENGTHS, ROW, **limits)
    more, of_b = results_b(out, finished(both(seeds, rates, rate), out), rate)
    write_results(
        folder, "budget", page([*parts, *more, "![The loss by share](budget.png)"]), {"a": numbers, "b": of_b}
    )
    draw(of_b["losses"], rate, folder / "budget.png")


if __name__ == "__main__":
    main()
