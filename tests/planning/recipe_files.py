"""The papers' recipes, read and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ext.config.arguments import parse_stages
from megatron_ext.config.checks import check_stages
from megatron_ext.config.matrix import MARK
from megatron_ext.config.stages import Stage
from tools.recipes import ROOT, recipes


@dataclass(frozen=True)
class Recipe:
    """A configuration that repeats a paper's run, and its mapping `recipe:`."""

    path: Path
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The file's name without its end, or the run's name in it."""
        return self.path.name.partition(MARK)[2] or self.path.stem

    def stages(self) -> list[Stage]:
        """Read the file, and check it for its world size."""
        stages = parse_stages(["--config", str(self.path)])
        check_stages(stages, self.facts["world_size"])
        return stages


@cache
def known() -> dict[str, Recipe]:
    """Every recipe by its name; reading them takes seconds, so not while tests are collected."""
    all_recipes = [Recipe(ROOT / path, facts) for path, facts in recipes()]
    return {recipe.name: recipe for recipe in all_recipes}
