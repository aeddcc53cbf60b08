"""The papers' recipes: each can run on the GPUs that it names, and repeats the paper's arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

import pretrain_skyladder
from megatron_ext.config.arguments import parse, parse_stages
from megatron_ext.config.matrix import MARK
from megatron_ext.errors import UserError
from megatron_ext.files.yaml_file import read_yaml
from megatron_ext.planning.recipes import Gpu, Recipe, page, read_recipe, recipes, whole_file

ROOT = Path(__file__).resolve().parents[2]
PAPERS = {"skyladder": "arXiv 2503.15450", "prolong": "arXiv 2410.02660", "token_weighting": "arXiv 2503.09202"}
OF_ANOTHER = {"token_weighting_longce": "arXiv 2410.23771"}
QUICK = ("skyladder_table22_gradual_4_5", "prolong_ablation_length_512k", "token_weighting_table4_shifted_ppmi")
SOME = (*QUICK, "prolong_8b", "skyladder_120m_8k")
some_or_all = pytest.mark.parametrize("names", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
FACTS = {
    "title": "A run",
    "paper": "arXiv 2503.15450",
    "source": "Table 8",
    "differs": "nothing known",
    "world_size": 8,
    "gpu": "A100 (40 GB)",
}


@cache
def known() -> dict[str, Recipe]:
    """Every recipe by its name; reading them takes seconds, so not while tests are collected."""
    return {recipe.name: recipe for recipe in recipes(ROOT / "examples" / "configs")}


def plan_of(name: str):
    (plan,) = known()[name].plans().values()
    return plan


def check_recipe(recipe: Recipe) -> None:
    """Read, checked for that many processes, and within 85 % of a GPU's memory."""
    plans = recipe.plans()
    for plan in plans.values():
        assert plan.memory.total < 0.85 * recipe.facts.gpu.memory
        assert plan.config.checkpoint.save is not None
    assert recipe.facts.paper == OF_ANOTHER.get(recipe.name, PAPERS[recipe.path.parent.name])
    assert recipe.name.startswith(recipe.path.parent.name)
    assert set(recipe.facts.published.gpu_hours) <= set(plans)


@some_or_all
def test_recipes_fit_their_gpus(names: tuple[str, ...]) -> None:
    for name in names or known():
        check_recipe(known()[name])


def test_every_configuration_of_a_paper_is_a_recipe() -> None:
    files = [path for paper in PAPERS for path in (ROOT / "examples" / "configs" / paper).glob("*.yaml")]
    single = {path.stem for path in files if "families" not in read_yaml(path)}
    assert {name for name, recipe in known().items() if MARK not in recipe.path.name} == single
    assert len(known()) == len(recipes(ROOT / "examples" / "configs"))  # no two of one name
    assert len(known()) > 250


def test_no_two_recipes_share_a_folder() -> None:
    """Nor does any write into where another begins, but for the ablations that go on from one."""
    folders = [stage.config.checkpoint.save for recipe in known().values() for stage in recipe.stages()]
    assert len(set(folders)) == len(folders)


def check_batch_and_budget(name: str) -> None:
    (stage,) = known()[name].stages()
    config = stage.config
    steps = {"12b5": 12_500, "25b": 25_000, "50b": 50_000}.get([*name.split("_"), ""][2], 100_000)
    assert config.data.global_batch_size * config.data.seq_length == 2**20
    assert config.training.train_iters == steps
    assert (config.model.init_scheme, config.optimizer.weight_decay_all) == ("tinyllama", True)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_iters) == (4e-4, 4e-5, 2000)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay, optimizer.clip_grad) == (
        0.9, 0.95, 0.1, 1.0,
    )  # fmt: skip
    assert config.learning_rate_schedule().at(steps - 1) < 4.01e-5


def test_skyladders_batch_and_budget() -> None:
    for name in known():
        if name.startswith("skyladder"):
            check_batch_and_budget(name)


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
    assert known()[name].facts.published.flops == flops
    assert plan_of(name).flops.scheduled == pytest.approx(flops, rel=0.005)
    assert plan_of(name).config.model.rotary_base == (1e6 if "32k" in name else 1e4)


def test_the_ablations_shares_of_the_expansion() -> None:
    assert plan_of("skyladder_expansion_64").full_step == 64_000
    assert plan_of("skyladder_start_8").config.window.window_start == 8
    assert plan_of("skyladder_1b_32k_continual").full_step == 97_000
    for name in ("skyladder_cyclic_jump", "skyladder_cyclic_gradual"):
        assert plan_of(name).full_step == 81_600  # 5 ramps of 8160 / (1/2) steps: Table 22's 80B tokens


def schedule_of(name: str):
    (stage,) = known()[name].stages()
    return stage.config.window_schedule()


def test_budgets_are_table_24s_shares() -> None:
    """64, 32, 16 and 8 % of 12.5B, 25B and 50B tokens, by the printed rates: 8160 / rate steps of 2^20 tokens."""
    for budget, steps in (("12b5", 12_500), ("25b", 25_000), ("50b", 50_000)):
        for share in (64, 32, 16, 8):
            expansion = schedule_of(f"skyladder_budget_{budget}_{share}").expansion_steps
            assert expansion / steps == pytest.approx(share / 100, rel=0.03)
        assert schedule_of(f"skyladder_budget_{budget}_constant").expansion_steps == 0


@pytest.mark.parametrize(
    ("cycle", "billions"),
    [("gradual_4_5", 72), ("jump_9", 72), ("gradual_2_5", 80), ("jump_5", 80), ("gradual_1_5", 96), ("jump_3", 96)],
)
def test_cycles_are_table_22s(cycle: str, billions: int) -> None:
    """Cycles times tokens per cycle: 4.5 x 16B = 72B and so on, of about 1000 steps a billion."""
    steps = schedule_of(f"skyladder_table22_{cycle}").expansion_steps
    assert steps == billions * 1020
    assert steps <= 100_000


@pytest.mark.parametrize("inverse", [8, 9, 10, 11, 12])
def test_rates_are_table_21s(inverse: int) -> None:
    """8B tokens per unit of 1/alpha: 8160 inverse steps."""
    assert schedule_of(f"skyladder_rate_1_{inverse}").expansion_steps == pytest.approx(8160 * inverse, abs=1)


def test_prolong() -> None:
    """20B tokens a stage, batches of 4M and 8M, 10 % warm-up, the learning rate begins anew."""
    first, second, sft = known()["prolong_8b"].plans().values()
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
    recipe = known()["prolong_8b"]
    assert recipe.facts.published.gpu_hours[stage] == hours
    assert recipe.plans()[stage].flops.scheduled / (0.4 * 989e12) / 3600 == pytest.approx(hours, rel=0.1)


def test_the_table_has_no_empty_cell() -> None:
    lines = list(page([known()[name] for name in QUICK]))
    rows = [line.strip("| \n").split(" | ") for line in lines if line.startswith("| ") and "M |" in line]
    assert {row[0].split(":")[0] for row in rows} == set(QUICK)
    assert all(len(row) == 11 and all(cell.strip() for cell in row) for row in rows)


PLANNED = re.compile(r"tokens +([\d,]+) in ([\d,]+) steps\nwindow +(\w+), .*\n((?:  step .*\n)+)")
AT_STEP = re.compile(r"step +([\d,]+) +window +([\d,]+) +learning rate ([\d.e+-]+)(?:   rotary base +[\d,]+)?\n")


def number(text: str) -> int:
    return int(text.replace(",", ""))


@some_or_all
def test_a_dry_run_says_what_the_recipe_says(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """By the trainer's own command: each stage's steps, tokens, windows and rates."""
    for name in names or known():
        check_dry_run(known()[name], capsys)


def check_dry_run(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(recipe.path), "--dry-run", "--world-size", str(recipe.facts.world_size)]
    assert pretrain_skyladder.main(command) == 0
    said = capsys.readouterr()
    assert said.err == ""
    stages, planned = recipe.stages(), PLANNED.findall(said.out)
    assert len(planned) == len(stages)
    for stage, (tokens, steps, schedule, lines) in zip(stages, planned, strict=True):
        config = stage.config
        assert number(steps) == config.training.train_iters
        assert number(tokens) == number(steps) * config.data.global_batch_size * config.data.seq_length
        assert schedule == config.window.window_schedule
        windows, rates = config.window_schedule(), config.learning_rate_schedule()
        found = AT_STEP.findall(lines)
        assert len(found) == lines.count("\n") >= 3
        for step, window, rate in found:
            assert number(window) == windows.window_at(number(step))
            assert float(rate) == pytest.approx(rates.at(number(step)), rel=1e-3)


@some_or_all
def test_a_recipe_written_whole_is_the_same(names: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for recipe in map(known().__getitem__, names or known()):
        stages = recipe.stages()
        path.write_text(whole_file(stages, recipe.written_facts()))
        again = parse_stages(["--config", str(path)])
        assert [(stage.name, stage.config) for stage in again] == [(stage.name, stage.config) for stage in stages]
        assert read_recipe(path).facts == recipe.facts


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
    assert read_recipe(write_recipe(tmp_path, FACTS)).facts.published.in_words(None) == "none published"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"differs": None}, "recipe.differs: got None: input should be a valid string"),
        ({"differs": ""}, "recipe.differs: got ''"),
        ({"paper": "arXiv 1, 2"}, "recipe.paper: got 'arXiv 1, 2'"),
        ({"world_size": 0}, "recipe.world_size: got 0: input should be greater than 0"),
        (
            {"gpu": "A100"},
            r"recipe.gpu: got 'A100': input should be 'A100 \(40 GB\)', 'A100 \(80 GB\)' or 'H100 \(80 GB\)'",
        ),
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


def recipes_command(*words: str, folder: Path = ROOT) -> str:
    command, environment = (
        [sys.executable, ROOT / "tools" / "recipes.py", *words],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_command_lists_shows_and_shrinks(tmp_path: Path) -> None:
    listed = recipes_command("--list", "table22")
    assert [line.split()[0] for line in listed.splitlines()] == [name for name in known() if "table22" in name]
    assert recipes_command(QUICK[0]) == whole_file(known()[QUICK[0]].stages(), known()[QUICK[0]].written_facts())
    assert "cyclic_gradual, grid; full from step 73,440 on" in recipes_command(QUICK[0], "--dry-run")
    recipes_command(QUICK[0], "--twin", "twin.yaml", folder=tmp_path)
    assert "512k" in recipes_command("prolong_8b", folder=tmp_path)  # its mixtures are named by paths
    with pytest.raises(subprocess.CalledProcessError) as refused:
        recipes_command(QUICK[0], "--twin", "twin.yaml", folder=tmp_path)
    assert "twin.yaml, which exists" in refused.value.stderr
    small = parse(["--config", str(tmp_path / "twin.yaml")])
    assert (small.window.window_cycles, small.data.seq_length) == (4.5, 512)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        recipes_command("skyladder")
    assert (
        refused.value.stderr
        == f"error: name: got skyladder, which is none of the {len(known())} runs; --list gives their names\n"
    )
