"""The papers' recipes: each can run on the GPUs that it names, and repeats the paper's arithmetic."""

import re
from functools import cache
from pathlib import Path

import pytest

from megatron_ext.config import Config
from megatron_ext.config.matrix import MARK
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.files.reading import read_yaml
from megatron_ext.planning.flops import RunFlops, run_flops
from megatron_ext.planning.memory import estimate
from tests.launcher import ROOT
from tests.planning.recipe_files import known
from tools import recipes

PAPERS = {"skyladder": "arXiv 2503.15450", "prolong": "arXiv 2410.02660", "token_weighting": "arXiv 2503.09202"}
PAPERS |= {"olmo3": "arXiv 2512.13961"}
OF_ANOTHER = {"token_weighting_longce": "arXiv 2410.23771", "token_weighting_exact": "arXiv 2605.10544"}
SOME = ("skyladder_table22_gradual_4_5", "prolong_ablation_length_512k", "token_weighting_table4_shifted_ppmi")
SOME += ("prolong_8b", "skyladder_120m_8k")
some_or_all = pytest.mark.parametrize("names", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
FACTS = {"title", "paper", "source", "differs", "world_size", "gpu"}
PUBLISHED = {"flops", "time_saved", "relative_time", "validation_loss", "gpu_hours", "remark"}
GPUS = {"A100 (40 GB)": 40e9, "A100 (80 GB)": 80e9, "H100 (80 GB)": 80e9}


@cache
def configs() -> dict[str, Config]:
    stages = ((recipe.name, stage) for recipe in known().values() for stage in recipe.stages())
    return {name if stage.name is None else f"{name}: {stage.name}": stage.config for name, stage in stages}


def vocabulary_of(config: Config) -> int:
    return vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)


def flops_of(name: str) -> RunFlops:
    return run_flops(configs()[name], vocabulary_of(configs()[name]))


@some_or_all
def test_recipes_fit_their_gpus(names: tuple[str, ...]) -> None:
    """Read, checked for that many processes, and within 85 % of a GPU's memory."""
    for recipe in (known()[name] for name in names or known()):
        stages = recipe.stages()
        published = recipe.facts.get("published", {})
        assert FACTS <= set(recipe.facts) <= FACTS | {"published"}
        assert set(published) <= PUBLISHED
        for config in (stage.config for stage in stages):
            memory = estimate(config, recipe.facts["world_size"], vocabulary_of(config))
            assert memory.total < 0.85 * GPUS[recipe.facts["gpu"]]
            assert config.checkpoint.save is not None
        assert recipe.facts["paper"] == OF_ANOTHER.get(recipe.name, PAPERS[recipe.path.parent.name])
        assert recipe.name.startswith(recipe.path.parent.name)
        assert set(published.get("gpu_hours", {})) <= {stage.name for stage in stages}


def test_every_configuration_of_a_paper_is_a_recipe() -> None:
    files = [path for paper in PAPERS for path in (ROOT / "examples" / "configs" / paper).glob("*.yaml")]
    single = {path.stem for path in files if "families" not in read_yaml(path)}
    assert {name for name, recipe in known().items() if MARK not in recipe.path.name} == single
    assert len(known()) == len(list(recipes.recipes()))  # no two of one name


@pytest.mark.slow
def test_no_two_recipes_share_a_folder() -> None:
    folders = [config.checkpoint.save for config in configs().values()]
    assert len(set(folders)) == len(folders)


def shape(layers: int, heads: int, groups: int, hidden: int, ffn: int) -> dict[str, object]:
    names = "num_layers", "num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"
    return dict(zip(names, (layers, heads, groups, hidden, ffn), strict=True)) | {"norm_epsilon": 1e-5}


LONG = {"code-repositories": 30, "books": 30}
SHORT_MIX = {"fineweb-edu": 27, "fineweb": 27, "wikipedia": 11, "stackexchange": 11, "tulu-v2": 8, "openwebmath": 8}
SHORT_MIX |= {"arxiv": 8}
FINAL_MIX = LONG | {"textbooks": 3} | {name: 0.37 * share for name, share in SHORT_MIX.items()}
ABLATION_MIX = LONG | {name: 0.4 * share for name, share in SHORT_MIX.items()}
SFT = {"lr": 2e-5, "min_lr": 2e-6, "warmup_share": pytest.approx(0.05, abs=1e-3), "tokens": 2**30, "seq_length": 2**16}
STAGE_64K = {"seq_length": 2**16, "tokens_per_step": 4 * 2**20, "warmup_share": 0.1, "lr": 1e-5, "min_lr": 1e-6}
STAGE_512K = STAGE_64K | {"seq_length": 2**19, "tokens_per_step": 8 * 2**20}
FROZEN = {"token_weighting": "frozen", "short_context": None}
FROZEN_SPARSE = FROZEN | {"weight_post": "sparse", "strength": 0.4}
FROZEN_DENSE = FROZEN | {"weight_post": "dense", "strength": 0.75}

# What the papers state, by a pattern of NAME or NAME: STAGE; several patterns may match one run.
SETTINGS: dict[str, dict[str, object]] = {
    # SkyLadder: Tables 11 and 12 for all; then models, corpora and schedules of each table
    r"skyladder_.*": {
        "tokens_per_step": 2**20, "lr": 4e-4, "min_lr": 4e-5, "lr_warmup_iters": 2000, "adam_beta1": 0.9,
        "adam_beta2": 0.95, "weight_decay": 0.1, "clip_grad": 1.0, "lr_decay_style": "cosine",
        "init_scheme": "tinyllama", "weight_decay_all": True,
    },
    r"skyladder_(?!budget).*": {"train_iters": 100_000},
    r"skyladder_(1b|table(1|3|4|6|7|10|16|17|25)_|window_1b).*": shape(22, 32, 4, 2048, 5632),
    r"skyladder_(120m|constant|rate|start|budget|table(5_120m|18_120m|22)|window_120m).*": shape(12, 12, 1, 768, 2048),
    r"skyladder_(360m|table(5|18)_360m|window_360m).*": shape(18, 16, 16, 1024, 4096),
    r"skyladder_(3b|table5_3b).*": shape(28, 24, 8, 3072, 8192),
    r"skyladder_(1b_8k|3b|table(1|3_8k|4|5|10|16|17|18|19|22|25)_|rate|start|budget).*": {"seq_length": 8192},
    r"skyladder_(1b_32k|table(6|7|3_32k)_).*": {"seq_length": 32768, "rotary_base": 1e6},
    r"skyladder_(3b_8k|table5_3b_.*|window_120m_rope100k_.*)": {"rotary_base": 1e5},
    r"skyladder_table(1|4|3_8k|5_\w+)_(random_sl|intradoc_sl)": {"window_start": 32, "expansion_steps": 65_280},
    r"skyladder_table(6|3_32k)_(random_sl|intradoc_sl)": {"window_start": 32, "expansion_steps": 65_472},
    r"skyladder_table\w+_intradoc(_sl)?": {"document_mask": True},
    r"skyladder_(table7_(stepwise|sinusoidal|exponential|linear))": {"window_start": 32, "expansion_steps": 65_472},
    r"skyladder_table7_continual": {"window_start": 4096, "window_switch_step": 97_000},
    r"skyladder_table17_long_to_short": {"window_schedule": "long_to_short", "expansion_steps": 65_280},
    r"skyladder_table25_sliding": {"window_mask": "sliding"},
    r"skyladder_table16_bm25.*": {"packing": "bm25"},
    **{
        rf"skyladder_start_{w}_rate_1_{n}": {"window_start": w, "window_rate": 1 / n}
        for w in (4, 8, 16, 32, 64, 128, 256) for n in (4, 8)
    },
    **{rf"skyladder_rate_1_{n}": {"expansion_steps": pytest.approx(8160 * n, abs=1)} for n in (1, 2, 4, *range(8, 13))},
    **{
        rf"skyladder_budget_{budget}_{share}": {"train_iters": 12_500 * n, "expansion_steps": 8160 * n * share // 64}
        for n, budget in ((1, "12b5"), (2, "25b"), (4, "50b")) for share in (8, 16, 32, 64)
    },
    **{
        rf"skyladder_table22_{cycle}": {"expansion_steps": 1020 * billions}
        for cycle, billions in {"gradual_4_5": 72, "jump_9": 72, "gradual_2_5": 80, "jump_5": 80,
                                "gradual_1_5": 96, "jump_3": 96}.items()
    },
    # ProLong: Table 9; A.4 for the ablations
    r"prolong_.*": {
        "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1, "lr_decay_style": "cosine",
        "window_schedule": "constant", "eod_mask_loss": True,
    },
    r"prolong_(?!ablation_mask_across).*": {"document_mask": True},
    r"prolong_(?!ablation_batching_as_drawn).*": {"balance_batches": True},
    r"prolong_.*: sft": SFT,
    r"prolong_8b: 64k": STAGE_64K | {"tokens": 20 * 2**30, "rotary_base": 8e6, "shares": FINAL_MIX},
    r"prolong_8b: 512k": STAGE_512K | {
        "tokens": 20 * 2**30, "rotary_base": 1.28e8, "shares": FINAL_MIX,
        "shares_of_64k": FINAL_MIX | {"code-repositories": 15, "books": 24.9, "textbooks": 0},
    },
    r"prolong_ablation.*: 64k": STAGE_64K | {"tokens": 5 * 2**30},
    r"prolong_ablation(_(start|mask|batching|rope_64k)_\w+)?: 64k": {"shares": ABLATION_MIX},
    r"prolong_ablation(?!_(rope_64k|sft|synthetic)).*: (64k|sft)": {"rotary_base": 8e6},
    r"prolong_ablation(?!_start_instruct).*: 64k": {"init_from": "models/Meta-Llama-3-8B"},
    r"prolong_ablation_start_instruct: 64k": {"init_from": "models/Meta-Llama-3-8B-Instruct"},
    r"prolong_ablation_short_dclm-baseline: 64k": {"shares": LONG | {"dclm-baseline": 40}},
    **{rf"prolong_ablation_rope_64k_{base}: 64k": {"rotary_base": float(base)} for base in ("500e3", "4e6", "8e6")},
    r"prolong_ablation_(sft|synthetic)_.*": {"init_from": "runs/prolong/512k", "rotary_base": 1.28e8},
    **{
        rf"prolong_ablation_synthetic_{share}_{generator}: sft": {"shares": {
            "ultrachat": 100 - share, f"synthetic-{generator}-qa": 0.4 * share,
            f"synthetic-{generator}-rag": 0.3 * share, f"synthetic-{generator}-summary": 0.3 * share,
        }}
        for share in (1, 3, 10, 50) for generator in ("8B", "70B")
    },
    r"prolong_ablation_(length|rope_512k)_.*": {"init_from": "runs/prolong/64k", "shares": FINAL_MIX, "lr": 1e-5},
    r"prolong_ablation_length_64k: longer": {  # the checkpoint at 4B of a stage of 20B
        "tokens": 4 * 2**30, "lr_decay_iters": 5120, "lr_warmup_iters": 512, "rotary_base": 8e6, "seq_length": 2**16,
    },
    r"prolong_ablation_length_512k: longer": {
        "tokens": 4 * 2**30, "lr_decay_iters": 2560, "lr_warmup_iters": 256, "rotary_base": 1.28e8, "seq_length": 2**19,
    },
    **{
        rf"prolong_ablation_rope_512k_{base}: longer": STAGE_512K | {"tokens": 5 * 2**30, "rotary_base": float(base)}
        for base in ("64e6", "128e6", "256e6")
    },
    # Olmo 3: OLMo-core's script for the long-context stage of the 7B model, and the report's Table 11
    r"olmo3_7b_long": {
        "model_preset": "Olmo-3-7B", "tokens_per_step": 4 * 2**20, "train_iters": 11_921, "seq_length": 2**16,
        "lr": 0.00020712352850360292, "min_lr": 0.0, "lr_warmup_iters": 200, "lr_decay_style": "linear",
        "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1, "clip_grad": 1.0, "z_loss": 1e-5,
        "rope_scaling": "yarn", "rope_scaling_factor": 8.0, "rope_original_length": 8192, "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0, "rotary_base": 5e5, "rotary_base_local": 5e5, "local_window": 4096,
        "window_attn_skip_freq": 4, "document_mask": True, "shares": {"longmino": 34, "dolmino": 66},
    },
    # Token weighting: Section 4
    r"token_weighting_.*": {
        "tokens_per_step": 4 * 2**20, "seq_length": 2**15, "train_iters": 240, "lr": 2e-5, "lr_warmup_iters": 20,
        "lr_decay_style": "constant", "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8,
        "eval_lengths": (8192, 16384, 24576, 32768),  # Table 9
    },
    r"token_weighting_(?!table7).*": {"model_preset": "Llama-3-8B", "rotary_base": 15.3e6},
    r"token_weighting_table7_.*": {"model_preset": "Phi-2", "rotary_base": 5e5},
    r"token_weighting_(?!lcde).*": {"packing": "split_drop"},
    r"token_weighting_(table\d+_)?uniform": {"token_weighting": "none"},
    r"token_weighting_(table\d+_unfrozen_sparse|sparse)": {"weight_post": "sparse", "strength": 0.2},
    r"token_weighting_(table\d+_unfrozen_dense|llama3_8b_32k)": {"weight_post": "dense", "strength": 0.75},
    r"token_weighting_table(\d+_frozen_sparse|4_.*|5_.*_sparse)": FROZEN_SPARSE,
    r"token_weighting_(table\d+_frozen_dense|table5_.*_dense|frozen)": FROZEN_DENSE,
    r"token_weighting_table4_(shifted_)?ppmi": {"weight_score": "ppmi"},
    r"token_weighting_table4_(shifted_)?npmi": {"weight_score": "npmi"},
    r"token_weighting_table4_shifted_.*": {"weight_shift": 2},
    r"token_weighting_(table(3|11)_unfrozen_.*|llama3_8b_32k|sparse)": {"short_context": 8192, "stride": 6144},
    r"token_weighting_table7_unfrozen_.*": {"short_context": 2048},
}  # fmt: skip


def value_of(config: Config, name: str) -> object:
    """An option, or what a paper states instead of one."""
    data, training, optimizer = config.data, config.training, config.optimizer
    if name in ("shares", "shares_of_64k"):
        shares: dict[str, float] = {}
        for part in data.parts:
            source = Path(part.prefix).name
            share = 100 * part.weight / sum(other_part.weight for other_part in data.parts)
            shares[source] = shares.get(source, 0) + share * (name == "shares" or part.length == 2**16)
        return {source: pytest.approx(share, abs=1e-4) for source, share in shares.items()}
    derived = {
        "tokens_per_step": lambda: data.global_batch_size * data.seq_length,
        "tokens": lambda: data.global_batch_size * data.seq_length * training.train_iters,
        "warmup_share": lambda: optimizer.lr_warmup_iters / training.train_iters,
        "expansion_steps": lambda: config.window_schedule().expansion_steps,
        "strength": lambda: config.weighting.strength,
        "stride": lambda: config.weighting.short().stride,
    }
    if name in derived:
        return derived[name]()
    (value,) = (vars(section)[name] for section in vars(config).values() if name in vars(section))
    return value


def test_recipes_have_the_papers_settings() -> None:
    matched = dict.fromkeys(SETTINGS, 0)
    wrong = []
    for name, config in configs().items():
        for pattern, stated in SETTINGS.items():
            if re.fullmatch(pattern, name):
                matched[pattern] += 1
                values = {option: value_of(config, option) for option in stated}
                wrong += [(name, option, value) for option, value in values.items() if value != stated[option]]
    assert not wrong, "\n".join(map(str, wrong))
    assert [pattern for pattern, count in matched.items() if not count] == []


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
    assert known()[name].facts["published"]["flops"] == flops
    assert flops_of(name).scheduled == pytest.approx(flops, rel=0.005)


def test_the_time_of_token_weighting() -> None:
    flops = flops_of("token_weighting_llama3_8b_32k")
    assert 1.1 < 1 + flops.scoring / flops.scheduled < 1.33  # the paper's time: 1.27
    assert flops_of("token_weighting_frozen").scoring == 0


def test_prolongs_hours() -> None:
    """The paper's H100 hours equal the time of its FLOPs at about two fifths of the peak."""
    recipe = known()["prolong_8b"]
    for stage, hours in {"64k": 2200, "512k": 12_200}.items():
        assert recipe.facts["published"]["gpu_hours"][stage] == hours
        assert flops_of(f"prolong_8b: {stage}").scheduled / (0.4 * 989e12) / 3600 == pytest.approx(hours, rel=0.1)
