"""List the checkpoints of a run, and other files beside them.

python tools/checkpoints.py RUN                every checkpoint: step, tokens, size, layout, losses of its step
python tools/checkpoints.py RUN --verify       also compare the checksum of every file; exit status 1 if one differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ext.checkpoint.folders import LEFT, POINTER, UNFINISHED, Checkpoint, folder_name, locate, saved_steps
from megatron_ext.checkpoint.manifest import Manifest
from megatron_ext.cli import Parser, command
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import EVALUATION_FILE, METRICS_FILE, read_by_step
from megatron_ext.monitoring.runs import stage_folders


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="what training got as --save")
    parser.add_argument("--verify", action="store_true", help="compare the checksum of every file")
    options = parser.parse_args(argv)
    damaged = [
        show(folder, verify=options.verify) for folder in stage_folders(options.run) or [options.run]
    ]  # check all of them, then return the status
    return 1 if any(damaged) else 0


def show(run: Path, *, verify: bool) -> bool:
    """Print the checkpoints of one run, or stage; return whether any is damaged.

    Raises:
        UserError: the folder has none.
    """
    folder = run / "checkpoints"
    steps = saved_steps(run)
    if not steps:
        raise UserError(f"{run}: holds no checkpoint, needs the folder that training got as --save; name that one")
    training, validation = (
        {record["step"]: record for record in read_by_step(run / name)} if (run / name).is_file() else {}
        for name in (METRICS_FILE, EVALUATION_FILE)
    )
    print(f"{run}")
    print(f"{'step':>10}  {'rows':>12}  {'size':>10}  {'loss':>8}  {'valid':>8}  layout")
    damaged = False
    for step in steps:
        try:
            manifest = look(folder / folder_name(step), content=verify)
        except UserError as error:
            damaged = True
            print(f"{step:>10,}  damaged: {error}")
            continue
        losses = (training.get(step - 1, {}).get("lm_loss"), validation.get(step, {}).get("valid_loss"))
        told = "  ".join(f"{'-' if loss is None else f'{loss:.4f}':>8}" for loss in losses)
        layout = ", ".join(f"{name} {size}" for name, size in manifest.layout.items())
        print(f"{step:>10,}  {manifest.consumed_samples:>12,}  {manifest.bytes / 2**20:>6,.1f} MiB  {told}  {layout}")
    newest = newest_of(run)
    if newest is not None:
        print(f"--load {run} takes step {newest.manifest.step:,}")
    for end, what in (
        (UNFINISHED, "being written, or left by a kill"),
        (LEFT, "of a future that the run did not take"),
    ):
        for other in sorted(folder.glob(f"*{end}")):
            print(f"{other.name}: {what}")
    return damaged


def look(folder: Path, *, content: bool) -> Manifest:
    """Read a checkpoint's manifest and compare its files with it: names and sizes, or also contents.

    Raises:
        UserError: the checkpoint is damaged; names the part.
    """
    manifest = Manifest.read(folder)
    manifest.check_names(folder)
    manifest.check_sizes(folder, manifest.files)
    if content:
        manifest.check_content(folder, manifest.files)
    return manifest


def newest_of(run: Path) -> Checkpoint | None:
    """Return the checkpoint that --load would use; None, with the reason printed, if it would use none."""
    try:
        return locate(run)
    except UserError as error:
        print(f"--load {run} is refused ({run / 'checkpoints' / POINTER}): {error}")
        return None


if __name__ == "__main__":
    sys.exit(main())
