"""A recipe's twin for a CPU: the same shape of run, lengths and steps scaled down, as a configuration of its own.

python tools/twin_recipe.py examples/configs/skyladder_1b_32k.yaml --output runs/twin.yaml
python tools/pack_data.py --config runs/twin.yaml                       where the recipe packs by a plan
python pretrain_skyladder.py --config runs/twin.yaml --save runs/twin   (a context-parallel recipe: on 2 processes)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.config.arguments import parse_stages, to_dict
from megatron_ext.config.stages import Stage
from megatron_ext.errors import UserError
from megatron_ext.planning.twin import scale_of, twin


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a file of examples/configs")
    parser.add_argument("--output", required=True, type=Path, help="where the twin's configuration goes")
    parser.add_argument("--data-path", default="data/smoke/corpus", help="stands for each of the recipe's data sets")
    parser.add_argument("--tokenizer-model", default="data/smoke/tokenizer", help="that it was made with")
    parser.add_argument("--score-store", default="data/smoke/scores", help="of a frozen scorer's recipe")
    options = parser.parse_args(argv)
    try:
        stages = parse_stages(["--config", options.recipe])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(written(stages, options), encoding="utf-8")
    return 0


def written(stages: Sequence[Stage], options: argparse.Namespace) -> str:
    """The twins of all stages as one file; folders are left to the flags."""
    scale = scale_of([stage.config for stage in stages])
    found = []
    for stage in stages:
        config = twin(stage.config, scale, options.data_path, options.tokenizer_model, options.score_store)
        sections = to_dict(config)
        sections["checkpoint"] = {"save_interval": 0}
        head: dict[str, Any] = {} if stage.name is None else {"name": stage.name, "keep": kept(stage)}
        found.append(head | sections)
    content = found[0] if stages[0].name is None else {"stages": found}
    return f"# The twin of {options.recipe}\n" + yaml.safe_dump(content, sort_keys=False)


def kept(stage: Stage) -> list[str]:
    """What a stage goes on with."""
    config = stage.config
    keeps = {
        "optimizer": config.checkpoint.init_optimizer,
        "learning_rate": stage.before is not None and config.optimizer.lr_first_step > 0,
        "samples": stage.before is not None and config.data.first_sample > 0,
    }
    return [name for name, kept in keeps.items() if kept]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
