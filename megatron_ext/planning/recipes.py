"""Recipes: configurations in examples/configs that reproduce a paper's run.

A recipe is a configuration with one more mapping, which the trainer ignores:

    recipe:
      title: SkyLadder, 1B, rows of 8K
      paper: arXiv 2503.15450
      source: Tables 8, 11 and 12                    in the paper, or in its authors' code
      differs: micro-batches of 1 row                deviations from the paper
      world_size: 8                                  processes, one for each GPU
      gpu: A100 (40 GB)
      published: {flops: 9.9e20, time_saved: 0.131}  figures that the paper reports for this run

A file of several runs (config/matrix.py) contains several recipes; the path of each is FILE#NAME.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.config.arguments import parse_stages, read_file, to_dict
from megatron_ext.config.checks import check_stages
from megatron_ext.config.matrix import MARK, expand
from megatron_ext.config.stages import Stage
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.planning.run_plan import RunPlan, plan_run


@dataclass(frozen=True)
class Recipe:
    """A configuration file that reproduces a paper's run, and its mapping `recipe:`."""

    path: Path
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The file's name without its extension, or the name of the run in it; unique among recipes."""
        return self.path.name.partition(MARK)[2] or self.path.stem

    def stages(self) -> list[Stage]:
        """Read the file and check it for its world size.

        Raises:
            UserError: it cannot run on that many processes.
        """
        stages = parse_stages(["--config", str(self.path)])
        check_stages(stages, self.facts["world_size"])
        return stages

    def plans(self) -> dict[str | None, RunPlan]:
        """Plan each stage; the key is its name, None for a recipe without stages."""
        plans = {}
        for stage in self.stages():
            size = vocabulary_size(stage.config.model.vocab_size, stage.config.data.tokenizer_model)
            plans[stage.name] = plan_run(stage.config, self.facts["world_size"], size)
        return plans


def recipes(folder: Path) -> list[Recipe]:
    """Read all recipes below a folder: files with a single run first, then files with several runs.

    Raises:
        UserError: a file that is not a configuration.
    """
    single: list[Recipe] = []
    many: list[Recipe] = []
    for path in sorted(folder.rglob("*.yaml")):
        content = read_file(str(path))
        if "families" in content:
            runs = expand(content, str(path)).items()
            many += [Recipe(path.with_name(f"{path.name}{MARK}{name}"), run["recipe"]) for name, run in runs]
        elif "recipe" in content:
            single.append(Recipe(path, content["recipe"]))
    return single + many


def whole_file(stages: Sequence[Stage], facts: Mapping[str, Any]) -> str:
    """Format stages with all their values as one configuration file, with the facts as its `recipe:`."""
    content: dict[str, Any] = {"recipe": dict(facts)}
    entries = [to_dict(stage.config) for stage in stages]
    if stages[0].name is None:
        content |= entries[0]
    else:
        if (save := stages[0].config.checkpoint.save) is not None:
            content["checkpoint"] = {"save": str(Path(save).parent)}
        derived = ("save", "load", "load_if_present"), ("init_from", "init_optimizer")  # the second: after a stage
        for stage, entry in zip(stages, entries, strict=True):
            for name in derived[0] + (derived[1] if stage.before else ()):
                del entry["checkpoint"][name]
        heads = [{"name": stage.name, "keep": kept(stage)} for stage in stages]
        content["stages"] = [head | entry for head, entry in zip(heads, entries, strict=True)]
    return yaml.safe_dump(content, sort_keys=False)


def kept(stage: Stage) -> list[str]:
    """Return what a stage keeps of the previous one, as written in its entry in `stages:`."""
    if stage.before is None:
        return []
    config = stage.config
    keeps = {
        "optimizer": config.checkpoint.init_optimizer,
        "learning_rate": config.optimizer.lr_first_step > 0,
        "samples": config.data.first_sample > 0,
    }
    return [name for name, is_kept in keeps.items() if is_kept]
