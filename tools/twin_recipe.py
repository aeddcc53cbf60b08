"""Write a recipe's twin for a CPU: the same configuration with lengths and steps scaled down.

python tools/twin_recipe.py examples/configs/skyladder/skyladder_1b_32k.yaml --output runs/twin.yaml
python tools/pack_data.py --config runs/twin.yaml                       if the recipe packs by a plan
python pretrain_skyladder.py --config runs/twin.yaml --save runs/twin

The twin's `recipe:` names its original, the scale factors, and the number of processes: 2 if the recipe is
context-parallel, else 1.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml

from megatron_ext.cli import Parser, check_new, command, output_file
from megatron_ext.config.arguments import parse_stages, to_dict
from megatron_ext.config.stages import Stage
from megatron_ext.files.atomic import atomic_write


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("recipe", help="a configuration below examples/configs, or one of many in it: FILE#NAME")
    text = "file to write the twin's configuration to"
    parser.add_argument("--output", required=True, type=output_file(".yaml", ".yml"), metavar="FILE", help=text)
    parser.add_argument("--data-path", default="data/smoke/corpus", help="data set that replaces each of the recipe's")
    parser.add_argument("--tokenizer-model", default="data/smoke/tokenizer", help="that the data set was made with")
    parser.add_argument("--score-store", default="data/smoke/scores", help="replaces the path of a frozen scorer")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    options = parser.parse_args(argv)
    check_new(options.output, options.overwrite)
    stages = parse_stages(["--config", options.recipe])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(options.output) as aside:
        aside.write_text(twin_file(stages, options), encoding="utf-8")
    return 0


def twin_file(stages: Sequence[Stage], options: argparse.Namespace) -> str:
    """Return the twins of all stages as one file, without their checkpoints' options: flags set the folders."""
    from megatron_ext.planning.twin import scale_of, twin  # importing torch takes seconds

    scale = scale_of([stage.config for stage in stages])
    twins = [
        twin(stage.config, scale, options.data_path, options.tokenizer_model, options.score_store) for stage in stages
    ]
    world_size = max(config.parallel.context_parallel_size for config in twins)
    facts = {"twin_of": options.recipe, "world_size": world_size, **asdict(scale)}
    content: dict[str, Any] = {"recipe": facts}
    entries = [to_dict(config) for config in twins]
    for entry in entries:
        del entry["checkpoint"]
    if stages[0].name is None:
        content |= entries[0]
    else:
        heads = [{"name": stage.name, "keep": list(stage.keep)} for stage in stages]
        content["stages"] = [head | entry for head, entry in zip(heads, entries, strict=True)]
    return yaml.safe_dump(content, sort_keys=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
