"""Simulate a run on any number of cards: its steps over real rows, stragglers, failures, checkpoints.

python tools/simulate_run.py --config FILE --gpus 1024 --gpu H100 [--stage NAME] [--html FILE] [flags]

The layout is the configuration's own; tools/plan_run.py finds one. Any flag of pretrain_skyladder.py may follow.
docs/simulation.md says what is modelled, and how far it was off.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from megatron_ext.command_line import command
from megatron_ext.config.arguments import parse_stages
from megatron_ext.config.validation import check_stages
from megatron_ext.config.vocabulary import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.parser import Parser
from megatron_ext.planning.memory_trace import stage_traces
from megatron_ext.planning.pictures import (
    gantt_chart,
    goodput_chart,
    memory_chart,
    moments_chart,
    rehearsed_chart,
    write_pictures,
)
from megatron_ext.planning.simulation.cluster import read_cluster
from megatron_ext.planning.simulation.report import describe_moments, describe_run
from megatron_ext.planning.simulation.whole_run import Machine, simulate_moments, simulate_run
from megatron_ext.planning.step_time import FACTS, read_speeds
from megatron_ext.run.rehearsal.rows import DOCUMENTS, rows_of


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="cards")
    add("--gpu", default="H100", help="kind of card, a name of --gpus-file")
    add("--gpus-file", type=Path, default=FACTS / "gpus.yaml", help="cards, links and the shares that programs reach")
    add("--cluster-file", type=Path, default=FACTS / "cluster.yaml", help="how cards differ and fail; saves, restarts")
    add("--moments", type=int, default=8, help="of the run, evenly spaced, whose steps are simulated")
    add("--steps", type=int, default=3, help="steps in a row at each moment")
    add("--most-rows", type=int, default=256, help="a larger global batch is drawn from so many of its rows")
    add("--documents", choices=DOCUMENTS, help="rows of drawn documents, or of one each (default: the run's)")
    add("--html", type=Path, metavar="FILE", help="write pictures to this page")
    add(
        "--rehearsal",
        type=Path,
        metavar="FILE",
        help="of tools/rehearse.py --json: its memory instead of the estimate's",
    )
    return parser.parse_known_args(argv)


@command
def main(argv: list[str]) -> int:
    options, rest = parse_options(argv)
    began = time.perf_counter()
    if options.rehearsal and not options.html:
        raise UserError("rehearsal: got a file, but no page that shows it; add --html FILE")
    for name in ("gpus", "moments", "steps", "most_rows"):
        if getattr(options, name) < 1:
            raise UserError(f"{name}: got {getattr(options, name)}, needs 1 or more")
    stages = parse_stages(rest)
    if len(stages) > 1:
        raise UserError(f"stage: got none of {', '.join(str(one.name) for one in stages)}; add --stage NAME")
    config = stages[0].config
    check_stages(stages, options.gpus)
    vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
    speeds = read_speeds(options.gpus_file)
    gpu = next((name for name in speeds.gpus if name.lower() == options.gpu.lower()), options.gpu)
    speeds.gpu(gpu)
    machine = Machine(gpus=options.gpus, gpu=gpu, speeds=speeds, cluster=read_cluster(options.cluster_file))
    row_at, what = rows_of(config, vocab_size, options.documents)
    moments = simulate_moments(
        config,
        machine,
        vocab_size,
        lambda sample: row_at(sample).document_ends,
        moments=options.moments,
        repeats=options.steps,
        most_rows=options.most_rows,
    )
    lines = list(describe_moments(config, moments, what))
    run = simulate_run(config, machine, vocab_size, moments)
    lines += ["", *describe_run(config, machine, run)]
    print("\n".join(lines))
    if options.html:
        last = moments[-1].first
        slowest = int(last.ends.max(axis=0).argmax())
        card = speeds.gpu(gpu).memory
        if options.rehearsal:
            memory = rehearsed_chart(options.rehearsal, card)
        else:
            memory = memory_chart(stage_traces(config, options.gpus, vocab_size, last, slowest), card)
        charts = [
            moments_chart(moments),
            gantt_chart(last, slowest, f"The slowest replica at step {moments[-1].step:,}"),
            memory,
            goodput_chart(run),
        ]
        write_pictures(options.html, f"{options.gpus:,} {gpu}, simulated", lines, charts)
        print(f"\nwritten to {options.html}")
    print(f"\nsimulated in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
