"""Plan a run before paying for it: which layout, how long, how much memory, what the window schedule saves.

python tools/plan_run.py --config FILE --gpus 64 --gpu H100 [--stage NAME] [--top 5] [--output FILE.yaml] [flags]

The time is a model's (megatron_ext/planning/step_time.py; its errors: python benchmarks/published.py), the memory that
of --dry-run. --output writes the first layout as a configuration.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.config.arguments import dump_yaml, parse_stages
from megatron_ext.config.vocabulary import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.files.aside import file_aside
from megatron_ext.planning.memory_trace import stage_traces
from megatron_ext.planning.pictures import (
    gantt_chart,
    lengths_charts,
    memory_chart,
    rehearsed_chart,
    sizes_chart,
    write_page,
)
from megatron_ext.planning.report import describe
from megatron_ext.planning.search import search, windows
from megatron_ext.planning.simulation.cluster import read_cluster
from megatron_ext.planning.simulation.whole_run import Machine, even_step
from megatron_ext.planning.step_time import FACTS, read_speeds
from megatron_ext.planning.sweeps import by_gpus, by_length, describe_lengths, describe_sizes


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="cards")
    add("--gpu", default="H100", help="kind of card, a name of --gpus-file")
    add("--gpus-file", type=Path, default=FACTS / "gpus.yaml", help="cards, links and the shares that programs reach")
    add("--stage", help="of a run with stages (default: the first)")
    add("--top", type=int, default=5, help="layouts to show")
    add("--output", type=Path, help="write the first layout here, as a configuration")
    add("--sweep", action="store_true", help="also the best layouts for other row lengths and numbers of cards")
    add("--html", type=Path, metavar="FILE", help="write --sweep, a step and its memory as pictures to this page")
    add(
        "--rehearsal",
        type=Path,
        metavar="FILE",
        help="of tools/rehearse.py --json: its memory instead of the estimate's",
    )
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    options, rest = parse_options(argv)
    try:
        if options.rehearsal and not options.html:
            raise UserError("rehearsal: got a file, but no page that shows it; add --html FILE")
        if options.gpus < 1 or options.top < 1:
            raise UserError(f"gpus, top: got {options.gpus} and {options.top}, need 1 or more")
        stages = {stage.name: stage for stage in parse_stages(rest)}
        if options.stage is not None and options.stage not in stages:
            raise UserError(f"stage: got {options.stage!r}, needs one of {', '.join(map(str, stages))}")
        stage = stages[options.stage] if options.stage is not None else next(iter(stages.values()))
        config = stage.config
        vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
        speeds = read_speeds(options.gpus_file)
        gpu = next((name for name in speeds.gpus if name.lower() == options.gpu.lower()), options.gpu)
        found = search(config, options.gpus, gpu, vocab_size, speeds, top=options.top)
        lines = list(describe(found, config, options.gpus, gpu, vocab_size, speeds))
        print("\n".join(lines), flush=True)
        if not found.best:
            return 1
        if options.sweep or options.html:
            lengths = by_length(config, options.gpus, gpu, vocab_size, speeds)
            sizes = by_gpus(config, options.gpus, gpu, vocab_size, speeds)
            price = speeds.gpu(gpu).hour
            tables = ["", *describe_lengths(lengths), "", *describe_sizes(sizes, price)]
            print("\n".join(tables), flush=True)
        if options.html:
            machine = Machine(gpus=options.gpus, gpu=gpu, speeds=speeds, cluster=read_cluster())
            best = found.best[0].config
            step = even_step(best, machine, vocab_size, windows(best)[-1])
            card = speeds.gpu(gpu).memory
            if options.rehearsal:
                memory = rehearsed_chart(options.rehearsal, card)
            else:
                memory = memory_chart(stage_traces(best, options.gpus, vocab_size, step, 0), card)
            charts = [
                *lengths_charts(lengths),
                sizes_chart(sizes, price),
                gantt_chart(step, 0, f"{found.best[0].name}, at the last window"),
                memory,
            ]
            write_page(options.html, f"A run on {options.gpus:,} {gpu}", [*lines, *tables], charts)
            print(f"\nwritten to {options.html}")
        if options.output:
            with file_aside(options.output) as aside:
                aside.write_text(dump_yaml(found.best[0].config), encoding="utf-8")
            print(f"\nwritten to {options.output}; check it with")
            print(f"  python pretrain_skyladder.py --config {options.output} --dry-run --world-size {options.gpus}")
            print(f"  python tools/rehearse.py --config {options.output} --world-size {options.gpus}")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
