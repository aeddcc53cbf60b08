"""List the checkpoints of a run, and other files beside them.

python tools/checkpoints.py RUN                every checkpoint: step, tokens, size, layout, losses of its step
python tools/checkpoints.py RUN --verify       also compare the checksum of every file; exit status 1 if one differs
"""

import sys
from pathlib import Path

from megatron_ext.checkpoint.folders import LEFT, UNFINISHED, folder_name, locate, read_checkpoint, saved_steps
from megatron_ext.cli import Parser, command
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import EVALUATION_FILE, METRICS_FILE, read_by_step, stage_folders


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the --save of training")
    parser.add_argument("--verify", action="store_true", help="compare the checksum of every file")
    options = parser.parse_args(argv)
    damaged = [show(folder, verify=options.verify) for folder in stage_folders(options.run) or [options.run]]
    return int(any(damaged))


def show(run: Path, *, verify: bool) -> bool:
    """Print the checkpoints of one run, or stage; return whether any is damaged.

    Raises:
        UserError: the folder has none.
    """
    checkpoints = run / "checkpoints"
    steps = saved_steps(run)
    if not steps:
        raise UserError(f"run: got {run}, which holds no checkpoint, needs the --save of training")
    training = read_by_step(run / METRICS_FILE, {step - 1 for step in steps})
    validation = read_by_step(run / EVALUATION_FILE, set(steps))
    print(run)
    print(f"{'step':>10}  {'rows':>12}  {'size':>10}  {'loss':>8}  {'valid':>8}  layout")
    damaged = False
    for step in steps:
        folder = checkpoints / folder_name(step)
        try:
            manifest = read_checkpoint(folder).manifest
            manifest.check_files(folder, manifest.files, content=verify)
        except UserError as error:
            damaged = True
            print(f"{step:>10,}  damaged: {error}")
            continue
        losses = (training.get(step - 1, {}).get("lm_loss"), validation.get(step, {}).get("valid_loss"))
        columns = "  ".join(f"{'-' if loss is None else f'{loss:.4f}':>8}" for loss in losses)
        layout = ", ".join(f"{name} {size}" for name, size in manifest.layout.items())
        size = f"{sum(file.size for file in manifest.files.values()) / 2**20:>6,.1f} MiB"
        print(f"{step:>10,}  {manifest.consumed_samples:>12,}  {size}  {columns}  {layout}")
    try:
        newest = locate(run)
        if newest is not None:
            print(f"--load {run} takes step {newest.manifest.step:,}")
    except UserError as error:
        print(f"--load {run} is refused: {error}")
    for ending, what in ((UNFINISHED, "being written, or left by a kill"), (LEFT, "later than a step resumed from")):
        for path in sorted(checkpoints.glob(f"*{ending}")):
            print(f"{path.name}: {what}")
    return damaged


if __name__ == "__main__":
    sys.exit(main())
