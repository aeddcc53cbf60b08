"""The papers' recipes: each can run on the GPUs that it names, and repeats the paper's arithmetic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_ext.config.arguments import parse
from megatron_ext.errors import UserError
from megatron_ext.planning.recipes import Gpu, Recipe, read_recipe, recipes, table

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {recipe.name: recipe for recipe in recipes(ROOT / "examples" / "configs")}
PAPERS = {"skyladder": "arXiv 2503.15450", "prolong": "arXiv 2410.02660", "token_weighting": "arXiv 2503.09202"}
FACTS = {
    "title": "A run",
    "paper": "arXiv 2503.15450",
    "source": "Table 8",
    "differs": "nothing known",
    "world_size": 8,
    "gpu": "A100 (40 GB)",
}


def plan_of(name: str):
    (plan,) = RECIPES[name].plans().values()
    return plan


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_a_recipe_fits_its_gpus(recipe: Recipe) -> None:
    """Read, checked for that many processes, and within 85 % of what a card holds."""
    plans = recipe.plans()
    for plan in plans.values():
        assert plan.memory.total < 0.85 * recipe.facts.gpu.memory
        assert plan.config.checkpoint.save is not None
    assert recipe.facts.paper == PAPERS[recipe.path.parent.name]
    assert recipe.name.startswith(recipe.path.parent.name)
    assert set(recipe.facts.published.gpu_hours) <= set(plans)


def test_every_configuration_of_a_paper_is_a_recipe() -> None:
    files = {path.stem for paper in PAPERS for path in (ROOT / "examples" / "configs" / paper).glob("*.yaml")}
    assert set(RECIPES) == files


def test_no_two_recipes_share_a_folder() -> None:
    folders = [stage.config.checkpoint.save for recipe in RECIPES.values() for stage in recipe.stages()]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("skyladder")])
def test_skyladders_batch_and_budget(name: str) -> None:
    plans = list(RECIPES[name].plans().values())
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
    assert RECIPES[name].facts.published.flops == flops
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
    first, second, sft = RECIPES["prolong_8b"].plans().values()
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


@pytest.mark.parametrize(("stage", "hours"), [("64k", 2200), ("512k", 12_200)])
def test_prolongs_hours(stage: str, hours: float) -> None:
    """The paper's H100 hours are those of its FLOPs at about two fifths of the peak."""
    recipe = RECIPES["prolong_8b"]
    assert recipe.facts.published.gpu_hours[stage] == hours
    assert recipe.hours(recipe.plans()[stage]) == pytest.approx(hours, rel=0.1)


def test_the_page_is_what_the_command_gives() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    lines = list(table(list(RECIPES.values())))
    assert "\n".join(lines) in page
    for name in RECIPES:
        assert f"| {name}" in page


def write_recipe(folder: Path, facts: object) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"recipe": facts, "data": {"data_path": ["x"]}}))
    return path


def test_the_facts_of_a_recipe(tmp_path: Path) -> None:
    figures = {"flops": "9.9e20", "time_saved": 0.131, "gpu_hours": {"a": 10}, "validation_loss": {8192: 2.5}}
    facts = read_recipe(write_recipe(tmp_path, FACTS | {"published": figures | {"remark": "no gain"}})).facts
    assert (facts.title, facts.paper, facts.world_size, facts.gpu) == ("A run", "arXiv 2503.15450", 8, Gpu.A100_40GB)
    start = "validation loss 2.500 at 8,192; 9.9e20 FLOPs; 13.1% of the time saved; "
    assert facts.published.in_words("a") == start + "10 GPU hours; no gain"
    assert facts.published.in_words(None) == start + "no gain"
    assert read_recipe(write_recipe(tmp_path, FACTS)).facts.published.in_words(None) == ""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"differs": None}, "recipe.differs: got None: input should be a valid string"),
        ({"differs": ""}, "recipe.differs: got ''"),
        ({"paper": "arXiv 1, 2"}, "recipe.paper: got 'arXiv 1, 2'"),
        ({"world_size": 0}, "recipe.world_size: got 0: input should be greater than 0"),
        ({"gpu": "A100"}, r"recipe.gpu: got 'A100': input should be 'A100 \(40 GB\)' or 'H100 \(80 GB\)'"),
        ({"tabel": "8"}, "recipe.tabel: got '8'"),
        ({"published": {"flops": 0}}, "recipe.published.flops: got 0: input should be greater than 0"),
        ({"published": {"time_saved": 1.0}}, "recipe.published.time_saved: got 1.0: input should be less than 1"),
        ({"published": {"hours": 3}}, "recipe.published.hours: got 3"),
    ],
)
def test_facts_that_are_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        read_recipe(write_recipe(tmp_path, FACTS | changed))
    assert "\n" not in str(refused.value)


def test_a_fact_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.gpu: got nothing: field required"):
        read_recipe(write_recipe(tmp_path, {name: value for name, value in FACTS.items() if name != "gpu"}))
    with pytest.raises(UserError, match=r"cpu_smoke\.yaml: recipe: got nothing, needs a mapping"):
        read_recipe(ROOT / "examples/configs/cpu_smoke.yaml")


@pytest.mark.parametrize("content", ["", "# nothing yet\n", "[1, 2]", "recipe\n", "a: b: c"])
def test_a_file_that_holds_no_configuration(tmp_path: Path, content: str) -> None:
    """Neither a recipe nor a configuration without one: the table is not made past it."""
    (tmp_path / "empty.yaml").write_text(content)
    with pytest.raises(UserError, match=r"empty\.yaml, needs (a mapping of the sections|valid YAML)") as refused:
        recipes(tmp_path)
    assert "\n" not in str(refused.value)
    (tmp_path / "empty.yaml").write_text("training: {train_iters: 1}")
    assert recipes(tmp_path) == []


def test_the_trainer_passes_over_the_facts(tmp_path: Path) -> None:
    """Its options are those of the same file without them, in a file that extends it too."""
    with_facts = parse(["--config", str(write_recipe(tmp_path, FACTS))])
    child = tmp_path / "child.yaml"
    child.write_text("extends: run.yaml\nrecipe: {title: another}\n")
    assert parse(["--config", str(child)]) == with_facts
    plain = tmp_path / "plain.yaml"
    plain.write_text("data: {data_path: [x]}\n")
    assert parse(["--config", str(plain)]) == with_facts


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "tools/recipes.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(table(list(RECIPES.values())))
