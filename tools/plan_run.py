"""Plan a run before starting it: parallel layout, duration, memory, and the savings of the window schedule.

python tools/plan_run.py --config FILE --gpus 64 --gpu H100 [--stage NAME] [--top 5] [--documents drawn|whole]
    [--output FILE.yaml [--overwrite]] [flags]

The time is estimated by a model (see docs/planning.md for its accuracy), the memory as in --dry-run. --output writes
the first layout as a configuration. Without --stage, the first stage of a run with stages is planned.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

from megatron_ext.cli import Parser, check_new, command, integer, output_file, positive, program
from megatron_ext.config import Config
from megatron_ext.config.arguments import dump_yaml, parse_stages
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

SAVE_MINUTES = 3  # of a checkpoint at the end of a job
USUAL_WARNING_S = 300  # of examples/slurm/pretrain.sbatch
MOST_WARNING_S = 65_535  # of sbatch --signal


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--gpus", type=integer(1, 10**7), required=True, help="number of GPUs")
    add("--gpu", default="H100", help="kind of GPU, a name of --gpus-file")
    add("--gpus-file", type=Path, metavar="FILE", help="GPUs, links and the shares that programs reach")
    add("--documents", choices=("drawn", "whole"), help="rows of drawn documents, or of one each (default: the run's)")
    add("--top", type=positive, default=5, help="layouts to show")
    add("--output", type=output_file(".yaml", ".yml"), help="write the first layout here, as a configuration")
    add("--overwrite", action="store_true", help="replace an existing file")
    options, flags = parser.parse_known_args(argv)
    if options.output is not None:
        check_new(options.output, options.overwrite)
    from megatron_ext.planning.sampled_rows import SampledRows  # importing torch takes seconds
    from megatron_ext.planning.search import describe, longest_step, search
    from megatron_ext.planning.step_time import FACTS, Machine, read_speeds

    speeds = read_speeds(options.gpus_file or FACTS / "gpus.yaml")
    gpu = next((name for name in speeds.gpus if name.lower() == options.gpu.lower()), options.gpu)
    if not flags:
        raise UserError("--config is required, for example: --config examples/configs/skyladder/skyladder_1b_8k.yaml")
    config = parse_stages(flags)[0].config
    data = config.data
    if not (data.mixture or data.data_path):  # a placeholder, in place of which typical documents are drawn
        config = replace(config, data=replace(data, data_path=("PREFIX",)))
    vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
    rows = None
    rows_text = "one document each, the most that attention can cost"
    if options.documents != "whole":
        from megatron_ext.rehearsal.rows import rows_of  # imports Megatron's datasets, which takes seconds

        row_at, rows_text = rows_of(config, vocab_size, options.documents)
        rows = SampledRows(config, row_at)
    machine = Machine(options.gpus, gpu, vocab_size, speeds, rows)
    layouts = search(config, machine, options.top)
    print(f"rows: {rows_text}")
    print("\n".join(describe(layouts, config, machine)), flush=True)
    if not layouts.best:
        return 1
    if options.output is not None:
        best = layouts.best[0].config
        seconds = longest_step(best, machine)
        write(replace(best, data=replace(best.data, data_path=data.data_path)), seconds, options.output, options.gpus)
    return 0


def write(config: Config, longest_step_s: float, output: Path, gpus: int) -> None:
    """Write a configuration whose ranks wait for each other as long as two steps, and print how to check and submit it.

    Up to four steps follow a signal; they must end, and a checkpoint be written, before Slurm kills the job.
    """
    minutes = max(config.parallel.distributed_timeout_minutes, math.ceil(2 * longest_step_s / 60))
    config = replace(config, parallel=replace(config.parallel, distributed_timeout_minutes=minutes))
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as aside:
        aside.write_text(dump_yaml(config), encoding="utf-8")
    flags = f"--config {output}"
    if not (config.data.mixture or config.data.data_path):
        flags += " --data-path PREFIX"
    print(f"\nwritten to {output}; check it with")
    print(f"  python pretrain_skyladder.py {flags} --dry-run --world-size {gpus}")
    print(f"  {program('rehearse')} {flags} --world-size {gpus}")
    warning_s = 60 * math.ceil(4 * longest_step_s / 60 + SAVE_MINUTES)
    if warning_s > MOST_WARNING_S:
        print(f"a step takes up to {longest_step_s:.0f} s, longer than Slurm can warn before it ends a job: save often")
    elif warning_s > USUAL_WARNING_S:
        print(f"a step takes up to {longest_step_s:.0f} s; on Slurm submit it with `sbatch --signal=USR1@{warning_s}`")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
