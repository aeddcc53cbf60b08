"""Every recipe's twin: it says what the recipe says, and a CPU runs it to its end."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse_stages
from megatron_ext.config.checks import check_stages
from megatron_ext.config.matrix import MARK
from megatron_ext.config.stages import Stage
from megatron_ext.planning.twin import LONGEST, STEPS, scale_of, twin
from tests.checkpoint.models import write_model
from tests.conftest import VOCABULARY, SmallData
from tests.launcher import Commands
from tests.planning.recipe_files import Recipe, known
from tests.runs import TRAINER, read_jsonl
from tools import twin_recipe

FAST = "token_weighting_table4_shifted_ppmi"
SHORT = ["--context", 128, "--stride", 96]


@pytest.fixture(scope="session")
def twin_data(alone: Commands, small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents and long ones, two sources, and weights that leave out every third token."""
    folder = tmp_path_factory.mktemp("twin_data")
    with (folder / "corpus.jsonl").open("w") as file:
        for name in ("long", "corpus"):
            for line in (small_data.prefix.parent / f"{name}.jsonl").read_text().splitlines():
                file.write(json.dumps(json.loads(line) | {"source": name}) + "\n")
    flags = ["--input", folder / "corpus.jsonl", "--output-prefix", folder / "corpus", "--source-field", "source"]
    alone.run("tools/preprocess_data.py", *flags, "--tokenizer-model", small_data.tokenizer)
    tokens = (folder / "corpus.bin").stat().st_size // 2
    np.save(folder / "corpus.weights.npy", (np.arange(tokens) % 3 > 0).astype(np.float32))
    return folder / "corpus"


def write_twin(recipe: Recipe, small_data: SmallData, data: Path, folder: Path) -> tuple[list[object], list[Stage]]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "twin.yaml"
    words = [recipe.path, "--output", path, "--data-path", data, "--tokenizer-model", small_data.tokenizer]
    assert twin_recipe.main([*map(str, words), "--score-store", str(folder / "scores")]) == 0
    flags: list[object] = ["--config", path, "--device", "cpu", "--no-tensorboard"]
    return flags, parse_stages([*map(str, flags), "--save", str(folder / "run")])


def shape_of(config: Config) -> dict[str, object]:
    model, window, weighting = config.model, config.window, config.weighting
    return {
        "rotary": (model.rotary_base, model.rope_scaling, model.no_rope_freq, len(model.rope_window_bases)),
        "bias": (model.add_qkv_bias, model.untie_embeddings_and_output_weights, model.window_attn_skip_freq),
        "window": (window.window_schedule, window.window_mask, window.document_mask, window.window_cycles),
        "weighting": (weighting.token_weighting, weighting.weight_score, weighting.weight_post, weighting.strength),
        "packing": [(part.packing, part.weight) for part in config.data.parts],
        "style": (config.optimizer.lr_decay_style, config.optimizer.weight_decay, config.data.balance_batches),
    }


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_twin_has_the_recipes_shape(*, quick: bool) -> None:
    for recipe in known().values():
        if not quick or recipe.name == FAST or MARK not in recipe.path.name:
            check_shape(recipe.stages())


def check_shape(stages: list[Stage]) -> None:
    scale = scale_of([stage.config for stage in stages])
    twins = [twin(stage.config, scale, "data/x", "bytes", "scores") for stage in stages]
    check_stages(
        [Stage(None, config) for config in twins], max(config.parallel.context_parallel_size for config in twins)
    )
    assert max(config.data.seq_length for config in twins) == LONGEST
    assert STEPS <= sum(config.training.train_iters for config in twins) <= STEPS + len(twins)
    for stage, small in zip(stages, twins, strict=True):
        assert shape_of(small) == shape_of(stage.config)
        ratio = stage.config.data.seq_length / small.data.seq_length
        if small.weighting.short_context is not None:
            assert stage.config.weighting.short_context == small.weighting.short_context * ratio
        # the windows are the same share of the row at the same share of the run; where a ramp takes but two or three of
        # the twin's steps, at its ends alone
        ramps = stage.config.window.window_cycles or 1
        for share in (0.0, 0.3, 0.6, 0.99) if ramps <= 1.5 else (0.0, 0.99):
            windows = [
                config.window_schedule().window_at(int(share * config.training.train_iters)) / config.data.seq_length
                for config in (stage.config, small)
            ]
            assert windows[1] == pytest.approx(windows[0], abs=0.12)


def test_a_twin_runs_no_lm_eval() -> None:
    config = known()[FAST].stages()[0].config
    longest = config.data.seq_length
    options = {"lm_eval_interval": 1000, "lm_eval_tasks": ("ruler",), "lm_eval_lengths": (longest,)}
    check_shape([Stage(None, replace(config, training=replace(config.training, **options)))])


def run_twin(recipe: Recipe, small_data: SmallData, data: Path, folder: Path, alone: Commands) -> None:
    flags, stages = write_twin(recipe, small_data, data, folder)
    for stage in stages:
        wanted = [*flags, *(["--stage", stage.name] if stage.name else []), "--save", folder / "run"]
        if any(part.packing != "random" for part in stage.config.data.parts):
            alone.run("tools/pack_data.py", *wanted)
        if stage.config.weighting.score_store is not None:
            model = write_model(folder / "scorer", "llama", vocab_size=VOCABULARY)
            scorer = ["--checkpoint", model, "--output", folder / "scores", *SHORT]
            alone.run("tools/score_tokens.py", *scorer, *flags)
    processes = yaml.safe_load((folder / "twin.yaml").read_text())["recipe"]["world_size"]
    Commands(processes).run(TRAINER, *flags, "--save", folder / "run")
    for stage in stages:
        records = read_jsonl(folder / "run" / (stage.name or "") / "metrics.jsonl")
        schedule = stage.config.window_schedule()
        assert [record["window"] for record in records] == [schedule.window_at(step) for step in range(len(records))]
        assert len(records) == stage.config.training.train_iters
        assert all(np.isfinite(record["train_loss"]) for record in records)
    first = read_jsonl(folder / "run" / (stages[0].name or "") / "metrics.jsonl")[0]
    assert records[-1]["lm_loss"] < first["lm_loss"] - 0.5  # it learns


@pytest.mark.slow
def test_a_twin_runs(small_data: SmallData, twin_data: Path, tmp_path: Path, alone: Commands) -> None:
    run_twin(known()[FAST], small_data, twin_data, tmp_path, alone)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_twin_of_each_shape_runs(small_data: SmallData, twin_data: Path, tmp_path: Path, alone: Commands) -> None:
    shapes = {str([shape_of(stage.config) for stage in recipe.stages()]): recipe for recipe in known().values()}
    for recipe in shapes.values():
        run_twin(recipe, small_data, twin_data, tmp_path / recipe.name, alone)


def test_a_twin_keeps_what_its_recipe_keeps(small_data: SmallData, tmp_path: Path) -> None:
    stages = [{"name": "a"}, {"name": "b", "keep": ["optimizer", "learning_rate", "samples"]}, {"name": "c"}]
    facts = {"title": "x", "paper": "arXiv 2503.15450", "source": "x", "differs": "all", "world_size": 1}
    head = {"recipe": facts | {"gpu": "H100 (80 GB)"}}
    run = {"data": {"data_path": ["x"], "seq_length": 2048}, "training": {"train_iters": 1000}, "stages": stages}
    path = tmp_path / "recipe.yaml"
    more = {"model": {"vocab_size": 64}, "checkpoint": {"save": "runs/x"}, "optimizer": {"lr_decay_iters": 2000}}
    path.write_text(yaml.safe_dump(head | run | more))
    _, twins = write_twin(Recipe(path, head["recipe"]), small_data, Path("x"), tmp_path)
    assert [stage.config.checkpoint.init_optimizer for stage in twins] == [False, True, False]
    assert [stage.config.optimizer.lr_first_step for stage in twins] == [0, 8, 0]
    assert [stage.config.data.first_sample for stage in twins] == [0, 32, 0]
