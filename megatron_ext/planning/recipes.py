"""Recipes: configurations in examples/configs that reproduce a paper's run.

A recipe is a configuration with one more mapping, which the trainer ignores and this module reads and checks:

    recipe:
      title: SkyLadder, 1B, rows of 8K
      paper: arXiv 2503.15450
      source: Tables 8, 11 and 12                    in the paper, or in its authors' code
      differs: micro-batches of 1 row                deviations from the paper
      world_size: 8
      gpu: A100 (40 GB)                              one of `Gpu`
      published: {flops: 9.9e20, time_saved: 0.131}  fields of `Published`; omitted if the paper gives no figure

A file of several runs (config/matrix.py) contains several recipes; the path of each is FILE#NAME.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from annotated_types import Gt, Interval, MinLen
from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError

from megatron_ext.config.arguments import parse_stages, read_file, read_mapping, to_dict
from megatron_ext.config.checks import check_stages
from megatron_ext.config.matrix import MARK, expand
from megatron_ext.config.stages import Stage
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.planning.run_plan import RunPlan, plan_run

Text = Annotated[str, MinLen(1)]
Positive = Annotated[float, Gt(0)]


class Gpu(StrEnum):
    """GPUs used in the papers."""

    A100_40GB = "A100 (40 GB)"
    A100_80GB = "A100 (80 GB)"
    H100_80GB = "H100 (80 GB)"

    @property
    def memory(self) -> float:
        """Memory of the GPU in bytes."""
        return 40e9 if self is Gpu.A100_40GB else 80e9


@dataclass(frozen=True)
class Published:
    """Figures that a paper reports for one run; None or empty if not reported.

    Attributes:
        flops: FLOPs of the whole training.
        time_saved: fraction of the time saved relative to the same run with a constant window.
        relative_time: time as a multiple of the run with uniform token weights.
        validation_loss: nats per token, by evaluation length in tokens.
        gpu_hours: hours on `gpu`, by the stage's name.
        remark: facts that no number expresses.
    """

    flops: Positive | None = None
    time_saved: Annotated[float, Interval(gt=0, lt=1)] | None = None
    relative_time: Positive | None = None
    validation_loss: dict[Annotated[int, Gt(0)], Positive] = field(default_factory=dict)
    gpu_hours: dict[str, Positive] = field(default_factory=dict)
    remark: str = ""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Facts:
    """The mapping `recipe:` of a configuration file.

    Attributes:
        title: description of the run.
        paper: its number on arXiv.
        source: where the numbers come from in the paper, or in its authors' code.
        differs: deviations from the paper.
        world_size: number of processes, one for each GPU.
        gpu: the intended GPU.
        published: figures that the paper reports.
    """

    title: Text
    paper: Annotated[str, StringConstraints(pattern=r"^arXiv \d{4}\.\d{5}$")]
    source: Text
    differs: Text
    world_size: Annotated[int, Gt(0)]
    gpu: Gpu
    published: Published = field(default_factory=Published)

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


_FACTS = TypeAdapter(Facts)


@dataclass(frozen=True)
class Recipe:
    """A configuration file that reproduces a paper's run, and its facts."""

    path: Path
    facts: Facts

    @property
    def name(self) -> str:
        """The file's name without its extension, or the name of the run in it; unique among recipes."""
        return self.path.name.partition(MARK)[2] or self.path.stem

    def written_facts(self) -> dict[str, Any]:
        """Return the mapping `recipe:` as written in the file."""
        facts: dict[str, Any] = read_mapping(str(self.path))["recipe"]
        return facts

    def stages(self) -> list[Stage]:
        """Read the file and check it for its world size.

        Raises:
            UserError: it cannot run on that many processes.
        """
        stages = parse_stages(["--config", str(self.path)])
        check_stages(stages, self.facts.world_size)
        return stages

    def plans(self) -> dict[str | None, RunPlan]:
        """Plan each stage; the key is its name, None for a recipe without stages."""
        plans = {}
        for stage in self.stages():
            size = vocabulary_size(stage.config.model.vocab_size, stage.config.data.tokenizer_model)
            plans[stage.name] = plan_run(stage.config, self.facts.world_size, size)
        return plans


def read_recipe(path: Path, content: Mapping[str, Any]) -> Recipe:
    """Check the facts in the content of a recipe's file.

    Raises:
        UserError: there is no `recipe:`, or a field of it is missing, unknown or out of range.
    """
    if "recipe" not in content:
        raise UserError(f"{path}: recipe: got nothing, needs a mapping with title, paper, source and so on")
    try:
        return Recipe(path, _FACTS.validate_python(content["recipe"]))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(["recipe", *map(str, first["loc"])])
        got = "nothing" if first["type"] == "missing" else repr(first["input"])
        raise UserError(f"{path}: {name}: got {got}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def recipes(folder: Path) -> list[Recipe]:
    """Read all recipes below a folder: files with a single run first, then files with several runs.

    Raises:
        UserError: as `read_recipe`, or a file that is not a configuration.
    """
    single: list[Recipe] = []
    many: list[Recipe] = []
    for path in sorted(folder.rglob("*.yaml")):
        content = read_file(str(path))
        if "families" in content:
            runs = expand(content, str(path)).items()
            many += [read_recipe(path.with_name(f"{path.name}{MARK}{name}"), run) for name, run in runs]
        elif "recipe" in content:
            single.append(read_recipe(path, content))
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
