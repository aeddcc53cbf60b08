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
from megatron_ext.planning.report import describe
from megatron_ext.planning.sampled_rows import SampledRows
from megatron_ext.planning.search import search
from megatron_ext.planning.step_time import FACTS, read_speeds


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="cards")
    add("--gpu", default="H100", help="kind of card, a name of --gpus-file")
    add("--gpus-file", type=Path, default=FACTS / "gpus.yaml", help="cards, links and the shares that programs reach")
    add("--stage", help="of a run with stages (default: the first)")
    add("--documents", choices=("drawn", "whole"), help="rows of drawn documents, or of one each (default: the run's)")
    add("--top", type=int, default=5, help="layouts to show")
    add("--output", type=Path, help="write the first layout here, as a configuration")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    options, rest = parse_options(argv)
    try:
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
        rows, what = None, "one document each, the most that attention can cost"
        if options.documents != "whole":
            from megatron_ext.run.rehearsal.rows import rows_of  # it brings Megatron's data sets, seconds to import

            row_at, what = rows_of(config, vocab_size, options.documents)
            rows = SampledRows(config, row_at)
        print(f"rows: {what}")
        found = search(config, options.gpus, gpu, vocab_size, speeds, rows=rows, top=options.top)
        for line in describe(found, config, options.gpus, gpu, vocab_size, speeds, rows):
            print(line)
        if not found.best:
            return 1
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
