"""The recipes of examples/configs: their headers, and what a dry run says of each, as a table.

# SkyLadder, 1B, rows of 8K.                  the title
# Paper: where its numbers stand
# Differs: what is not the paper's
# Figures: what the paper reports (optional)
# GPUs: 8 A100 (40 GB)                        how many it is meant for, and which
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.arguments import parse_stages
from megatron_ext.config.stages import Stage
from megatron_ext.config.validation import check_stages
from megatron_ext.config.vocabulary import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.planning.run_plan import RunPlan, plan_run

_KEYS = ("Paper", "Differs", "Figures", "GPUs")
PEAKS = {"A100": 312e12, "H100": 989e12}  # bf16 FLOPs per second without sparsity
UTILISATION = 0.4  # of the peak, what such runs commonly reach
_COLUMNS = (
    "recipe",
    "GPUs",
    "parameters",
    "tokens",
    "steps",
    "full window from",
    "FLOPs",
    "saved",
    "GiB per GPU",
    "GPU hours",
)


@dataclass(frozen=True)
class Recipe:
    """A configuration file that repeats a paper's run.

    Attributes:
        path: the file.
        title: its first line.
        paper: where the numbers stand.
        differs: what is not the paper's.
        figures: what the paper reports; "" for nothing.
        gpus: what it is meant for, as written.
        world_size: how many that are.
    """

    path: Path
    title: str
    paper: str
    differs: str
    figures: str
    gpus: str

    @property
    def world_size(self) -> int:
        """Processes."""
        return int(self.gpus.split()[0])

    def hours(self, plan: RunPlan) -> float:
        """GPU hours of a stage, were its FLOPs done at `UTILISATION` of the card's peak."""
        peak = PEAKS[self.gpus.split()[1]]
        return (plan.flops.scheduled + plan.flops.scoring) / (UTILISATION * peak) / 3600

    def stages(self) -> list[Stage]:
        """The file, read and checked.

        Raises:
            UserError: what cannot run on these GPUs.
        """
        stages = parse_stages(["--config", str(self.path)])
        check_stages(stages, self.world_size)
        return stages

    def plans(self) -> list[RunPlan]:
        """A plan for each stage."""
        configs = [stage.config for stage in self.stages()]
        sizes = [vocabulary_size(config.model.vocab_size, config.data.tokenizer_model) for config in configs]
        return [plan_run(config, self.world_size, size) for config, size in zip(configs, sizes, strict=True)]


def read_recipe(path: Path) -> Recipe:
    """The header of a file.

    Raises:
        UserError: a line that is missing.
    """
    lines = [line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines() if line[:2] == "# "]
    found = {key: line.removeprefix(f"{key}: ") for line in lines for key in _KEYS if line.startswith(f"{key}: ")}
    for key in ("Paper", "Differs", "GPUs"):
        if key not in found:
            raise UserError(f"{path}: got no line `# {key}: ...`, needs one in its header")
    return Recipe(path, lines[0], found["Paper"], found["Differs"], found.get("Figures", ""), found["GPUs"])


def recipes(folder: Path) -> list[Recipe]:
    """Every file of a folder that says which paper it repeats."""
    paths = sorted(folder.glob("*.yaml"))
    return [read_recipe(path) for path in paths if "\n# Paper: " in path.read_text(encoding="utf-8")]


def table(found: list[Recipe]) -> Iterator[str]:
    """The dry runs as lines of Markdown, the papers' figures beside them."""
    columns = (*_COLUMNS, "the paper's figures")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for recipe in found:
        for stage, plan in zip(recipe.stages(), recipe.plans(), strict=True):
            name = recipe.path.stem if stage.name is None else f"{recipe.path.stem}: {stage.name}"
            yield f"| {' | '.join([name, recipe.gpus, *_cells(plan), f'{recipe.hours(plan):,.0f}', recipe.figures])} |"


def _cells(plan: RunPlan) -> Iterator[str]:
    steps = plan.config.training.train_iters
    yield f"{plan.parameters / 1e6:,.0f}M"
    yield f"{plan.tokens / 1e9:,.1f}e9"
    yield f"{steps:,}"
    yield f"step {plan.full_step:,}" if plan.full_step < steps else "never"
    yield _scientific(plan.flops.scheduled) + (f" + {_scientific(plan.flops.scoring)}" if plan.flops.scoring else "")
    yield f"{plan.flops.saved:.1%}"
    yield f"{plan.memory.total / 2**30:.1f}"


def _scientific(flops: float) -> str:
    return f"{flops / 1e20:.2f}e20"
