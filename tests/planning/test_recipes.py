"""The papers' recipes: each can run on the GPUs that it names, and repeats the paper's arithmetic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.planning.recipes import Recipe, read_recipe, recipes, table

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {recipe.path.stem: recipe for recipe in recipes(ROOT / "examples" / "configs")}


def plan_of(name: str, stage: int = 0):
    return RECIPES[name].plans()[stage]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.path.stem)
def test_a_recipe_fits_its_gpus(recipe: Recipe) -> None:
    """Read, checked for that many processes, and within 85 % of what a card holds."""
    card = int(recipe.gpus.split("(")[1].split()[0]) * 1e9
    for plan in recipe.plans():
        assert plan.memory.total < 0.85 * card
        assert plan.config.checkpoint.save is not None
    assert "arXiv" in recipe.paper


def test_no_two_recipes_share_a_folder() -> None:
    folders = [stage.config.checkpoint.save for recipe in RECIPES.values() for stage in recipe.stages()]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("skyladder")])
def test_skyladders_batch_and_budget(name: str) -> None:
    plans = RECIPES[name].plans()
    assert {plan.tokens_per_step for plan in plans} == {2**20}
    assert sum(plan.tokens for plan in plans) == 100_000 * 2**20
    optimizer = plans[0].config.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_iters) == (4e-4, 4e-5, 2000)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay, optimizer.clip_grad) == (
        0.9, 0.95, 0.1, 1.0,
    )  # fmt: skip
    assert plans[-1].config.learning_rate_schedule().at(99_999) < 4.01e-5


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("skyladder_1b_8k_constant", 11.6e20),
        ("skyladder_1b_8k", 9.9e20),
        ("skyladder_1b_32k_constant", 25.5e20),
        ("skyladder_1b_32k", 18.8e20),
    ],
)
def test_table_8(name: str, flops: float) -> None:
    assert plan_of(name).flops.scheduled == pytest.approx(flops, rel=0.005)
    assert plan_of(name).config.model.rotary_base == (1e6 if "32k" in name else 1e4)


def test_the_ablations_shares_of_the_expansion() -> None:
    assert plan_of("skyladder_expansion_64").full_step == 64_000
    assert plan_of("skyladder_start_8").config.window.window_start == 8
    assert plan_of("skyladder_1b_32k_continual").full_step == 97_000
    for name in ("skyladder_cyclic_jump", "skyladder_cyclic_gradual"):
        assert plan_of(name).full_step == plan_of("skyladder_120m_8k").full_step


def test_prolong() -> None:
    """20B tokens a stage, batches of 4M and 8M, 10 % warm-up, the learning rate begins anew."""
    first, second, sft = RECIPES["prolong_8b"].plans()
    assert (first.tokens_per_step, second.tokens_per_step) == (4 * 2**20, 8 * 2**20)
    assert first.tokens == second.tokens == 20 * 2**30
    assert [plan.config.model.rotary_base for plan in (first, second)] == [8e6, 1.28e8]
    for plan in (first, second):
        rates = plan.config.learning_rate_schedule()
        warmup = plan.config.training.train_iters // 10
        assert rates.at(warmup - 1) == 1e-5
        assert rates.at(plan.config.training.train_iters) == 1e-6
        assert plan.config.window.document_mask
        weights = [part.weight for part in plan.config.data.mixture]
        assert sum(weights) == pytest.approx(100)
    assert (sft.tokens, sft.tokens_per_step) == (2**30, 4 * 2**20)
    assert sft.config.data.packing == "drop_tail"
    assert all(plan.config.data.eod_mask_loss for plan in (first, second, sft))


def test_token_weighting() -> None:
    plan = plan_of("token_weighting_llama3_8b_32k")
    assert (plan.tokens_per_step, plan.config.training.train_iters) == (4 * 2**20, 240)
    assert plan.config.weighting.short().stride == 6144
    assert {plan.config.learning_rate_schedule().at(step) for step in (19, 100, 239)} == {2e-5}
    assert 1.1 < 1 + plan.flops.scoring / plan.flops.scheduled < 1.33  # the paper's time: 1.27
    assert plan_of("token_weighting_frozen").flops.scoring == 0


@pytest.mark.parametrize(("stage", "hours"), [(0, 2200), (1, 12_200)])
def test_prolongs_hours(stage: int, hours: float) -> None:
    """The paper's H100 hours are those of its FLOPs at about two fifths of the peak."""
    recipe = RECIPES["prolong_8b"]
    assert recipe.hours(recipe.plans()[stage]) == pytest.approx(hours, rel=0.1)


def test_the_page_is_what_the_command_gives() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    lines = list(table(list(RECIPES.values())))
    assert "\n".join(lines) in page
    for name in RECIPES:
        assert f"| {name}" in page


def test_a_header_without_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("# title\n# Paper: arXiv\n# GPUs: 8\n")
    with pytest.raises(UserError, match=r"got no line `# Differs: ...`"):
        read_recipe(path)
    path.write_text("# title\n# Paper: arXiv 1, 2\n# Differs: nothing\n# GPUs: 8 A (40 GB)\n")
    found = read_recipe(path)
    assert (found.title, found.paper, found.figures, found.world_size) == ("title", "arXiv 1, 2", "", 8)


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "tools/recipes.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(table(list(RECIPES.values())))
