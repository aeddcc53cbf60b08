"""Random combinations of the training options, each drawn from one number, and the data that they train on.

seed -> processes, Config          draw_case: drawn again until checks.mistakes has nothing to say
     -> the same by one process    alone: no parallelism, no recomputation, micro-batches of one row
     -> another layout             for a case that stops after half of its steps and goes on elsewhere
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from megatron_ext.config import CheckpointConfig, Config, DataConfig, LoggingConfig, ModelConfig, OptimizerConfig
from megatron_ext.config.checks import mistakes
from megatron_ext.config.mixture import MixturePart
from megatron_ext.config.options import ParallelConfig, RecomputeModule, TrainingConfig, WeightingConfig, WindowConfig
from megatron_ext.config.pipeline import write_layout
from megatron_ext.data.indexed import MASK
from megatron_ext.data.packing.plan import plan_folder, save_plan
from megatron_ext.data.packing.policies import build_plan
from megatron_ext.run.identity import row_identity
from megatron_ext.run.inputs import splits
from megatron_ext.schedule import ScheduleKind
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from tests.theirs import write_theirs

STEPS = 4
SAVED_AT = 2
TOKEN_IDS = 57  # that the data holds; the vocabulary may have more
LENGTHS = (64, 72, 96, 120, 128, 132)
DOCUMENTS = {  # the data sets and the lengths of their documents
    "mixed": lambda chance: int(2 * max(LENGTHS) ** chance.random()),
    "long": lambda chance: int(chance.integers(150, 500)),
    "tiny": lambda chance: int(chance.integers(1, 4)),
    "chats": lambda chance: int(chance.integers(5, 200)),  # with untrained stretches, also of many rows
}
WHOLE_ROWS = ("decomposition", "split_drop", "whole_document")  # packings that make none of tiny documents
DATA_TOKENS = 9000  # of each: more than any case's rows
CUDA_ATTENTION = ("flash_attn_4", "torch_varlen", "flash_attn", "te_thd")  # this is a CPU
_ATTEMPTS = 2000


@dataclass(frozen=True)
class Run:
    """A configuration and how many processes it runs on, in a folder that has the data sets."""

    config: Config
    processes: int


@dataclass(frozen=True)
class RandomCase:
    """What one seed draws.

    Attributes:
        run: what is compared with `alone`.
        elsewhere: another layout, which goes on from the first one's checkpoint; None: nothing is saved.
        rejected: draws before it that validation refused.
    """

    seed: int
    run: Run
    elsewhere: Run | None
    rejected: int

    @property
    def alone(self) -> Run:
        data = replace(self.run.config.data, micro_batch_size=1, balance_batches=False)
        training = replace(self.run.config.training, loss_block_tokens=TrainingConfig.loss_block_tokens)
        alone = {"parallel": ParallelConfig(device="cpu"), "checkpoint": CheckpointConfig(save="run")}
        return Run(replace(self.run.config, data=data, training=training, **alone), processes=1)


def draw_case(seed: int) -> RandomCase:
    chance = random.Random(seed)
    rejected = 0

    def valid(draw: Callable[[], Run]) -> Run:
        nonlocal rejected
        for _ in range(_ATTEMPTS):
            run = draw()
            if not list(mistakes(run.config, run.processes)):
                return run
            rejected += 1
        raise AssertionError(f"seed {seed}: nothing valid in {_ATTEMPTS} draws")

    run = _deepseek(valid(lambda: _run(chance)), random.Random(f"{seed} deepseek"))
    run = _uneven(run, random.Random(f"{seed} uneven"))
    if run.config.training.eval_interval and chance.random() < 0.3:
        path = ("mixed",) if chance.random() < 0.5 else ("1", "long", "3", "mixed")
        run = replace(run, config=replace(run.config, data=replace(run.config.data, valid_data_path=path)))
    if chance.random() < 0.7:
        return RandomCase(seed, run, None, rejected)
    saving = replace(run.config.checkpoint, save_interval=SAVED_AT, async_save=chance.random() < 0.4)
    run = Run(replace(run.config, checkpoint=saving), run.processes)
    elsewhere = valid(lambda: _elsewhere(chance, run.config))
    return RandomCase(seed, run, _uneven(elsewhere, random.Random(f"{seed} uneven elsewhere")), rejected)


def _run(chance: random.Random) -> Run:
    processes = chance.choice((1, 2, 2, 4, 4))
    data = _data(chance)
    window = _window(chance, data.seq_length)
    model = _model(chance, data.seq_length, window.window_schedule)
    if model.local_window is not None and chance.random() < 0.4:
        window = replace(window, local_window_fixed=True)
    config = Config(
        model=model,
        parallel=_parallel(chance, processes, model.num_layers),
        data=data,
        window=window,
        weighting=_weighting(chance, data.seq_length),
        optimizer=_optimizer(chance),
        training=_training(chance, data.seq_length),
        checkpoint=CheckpointConfig(save="run", verify_load=chance.random() < 0.7),
        logging=_logging(chance),
    )
    return Run(config, processes)


NEITHER = ("local_window", "window_attn_skip_freq", "rotary_base_local", "no_rope_freq", "query_pre_attn_scalar")
PLAIN: dict[str, Any] = {"block": "llama", "rotary_percent": 1.0, "add_qkv_bias": False} | dict.fromkeys(NEITHER)
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_router_topk": 2, "moe_router_score_function": "sigmoid"}
EXPERTS |= {"moe_router_enable_expert_bias": True}
LATENT: dict[str, Any] = {"q_lora_rank": (None, 12), "kv_lora_rank": (8, 24), "qk_head_dim": (4, 6)}
LATENT |= {"qk_pos_emb_head_dim": (4, 8), "v_head_dim": (4, 6, 8)}


def _deepseek(run: Run, chance: random.Random) -> Run:
    """Give some runs latent attention, DeepSeek's experts, or inputs on the host, if these fit the other options."""
    changed = run
    latent = chance.random() < 0.2
    if latent or chance.random() < 0.1:
        plain = replace(run.config.model, **PLAIN, qk_layernorm=not latent)
        if latent:
            sizes = {name: chance.choice(values) for name, values in LATENT.items()}
            groups = plain.num_attention_heads
            plain = replace(plain, multi_latent_attention=True, num_query_groups=groups, kv_channels=None, **sizes)
            changed = _if_valid(changed, model=plain)
        if not (run.config.training.bf16 or (latent and chance.random() >= 0.5)):  # in bf16 tokens change their experts
            width = chance.choice((20, 24))
            sizes = {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": width * chance.choice((1, 2))}
            sizes |= {"moe_layer_freq": chance.choice(((), (0, *[1] * (plain.num_layers - 1))))}
            experts = replace(plain, **EXPERTS, **sizes)
            parallel = run.config.parallel
            size = chance.choice((1, 2))
            sequence = parallel.tensor_model_parallel_size > 1
            parallel = replace(parallel, expert_model_parallel_size=size, sequence_parallel=sequence)
            changed = _if_valid(changed, model=experts, parallel=parallel)
    return _if_valid(changed, parallel=replace(changed.config.parallel, offload_layer_inputs=chance.random() < 0.5))


def _uneven(run: Run, chance: random.Random) -> Run:
    """Unequal pipeline stages in half of the cases with stages, if these fit the other options."""
    parallel = run.config.parallel
    layers = run.config.model.num_layers
    if parallel.pipeline_model_parallel_size == 1 or chance.random() < 0.5:
        return run
    count = parallel.pipeline_model_parallel_size * chance.choice((1, 2))
    least = [0, *[1] * (count - 2), 0]
    for _ in range(layers - sum(least)):
        least[chance.randrange(count)] += 1
    division = {"num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_layout": write_layout(least)}
    return _if_valid(run, parallel=replace(parallel, **division))


def _if_valid(run: Run, **sections: Any) -> Run:
    changed = replace(run, config=replace(run.config, **sections))
    return run if list(mistakes(changed.config, changed.processes)) else changed


def _elsewhere(chance: random.Random, config: Config) -> Run:
    """The configuration under another layout: what `checkpoint.changes` calls free."""
    processes = chance.choice((1, 2, 4))
    drawn = _data(chance)
    data = replace(config.data, micro_batch_size=drawn.micro_batch_size, balance_batches=drawn.balance_batches)
    training = replace(config.training, loss_block_tokens=chance.choice((7, 4096)))
    parallel = _parallel(chance, processes, config.model.num_layers)
    return Run(replace(config, parallel=parallel, data=data, training=training), processes)


def _any(chance: random.Random, kind: type, name: str, *without: str) -> Any:
    """One of the values that the field's Literal lists: a new one is drawn without a change here."""
    hint = get_type_hints(kind)[name]
    values = [value for part in get_args(hint) for value in get_args(part) or (part,)]
    return chance.choice([None if value is type(None) else value for value in values if value not in without])


def _parallel(chance: random.Random, processes: int, layers: int) -> ParallelConfig:
    sizes = itertools.product((1, 2, 4), repeat=3)
    tp, pp, cp = chance.choice([size for size in sizes if processes % math.prod(size) == 0])  # the rest: data-parallel
    stage = max(layers // pp, 1)
    interleaved = pp > 1 and stage > 1 and chance.random() < 0.7
    distributed = chance.choice((True, True, False, None))
    overlap = chance.choice((True, False, None))
    recompute = _any(chance, ParallelConfig, "recompute_granularity")
    modules = [module for module in get_args(RecomputeModule) if chance.random() < 0.6]
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        num_layers_per_virtual_pipeline_stage=1 if interleaved else None,
        context_parallel_size=cp,
        cp_policy=_any(chance, ParallelConfig, "cp_policy"),
        cp_scheme=_any(chance, ParallelConfig, "cp_scheme"),
        cp_row_cost=chance.choice((0.0, 1.0, 64.0, 570.0)),
        cp_overlap_parts=chance.choice((None, 1, 2, 3)),
        sequence_parallel=tp > 1 and chance.random() < 0.6,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=overlap,
        overlap_param_gather=chance.choice((True, True, False, None)) if distributed and overlap else None,
        recompute_granularity=recompute,
        recompute_modules=tuple(modules) if recompute == "selective" else (),
        recompute_method=_any(chance, ParallelConfig, "recompute_method"),
        recompute_num_layers=chance.choice((1, 1, 2)),
        device=_any(chance, ParallelConfig, "device", "cuda"),
        attention_backend=_any(chance, ParallelConfig, "attention_backend", *CUDA_ATTENTION),
        distributed_timeout_minutes=5,  # processes of a busy machine join late
    )


def _model(chance: random.Random, length: int, schedule: str) -> ModelConfig:
    layers, heads = chance.choice((2, 4)), chance.choice((4, 8))
    local = chance.random() < 0.35
    rope: dict[str, Any] = {}
    no_rope = chance.choice((None, None, None, 1, 2))
    # not olmo3 and gpt_oss, which test_layouts.py has: other seeds would then need looks at their rounding
    block = chance.choice(("llama", "phi", "gemma3")) if no_rope is None else "llama"
    queries_and_keys = "plain" if block != "llama" else chance.choice(("plain", "plain", "biases", "norms"))
    kind = _any(chance, ModelConfig, "rope_scaling") if chance.random() < 0.5 and no_rope != 1 else "none"
    if kind != "none":
        rope |= {"rope_scaling": kind, "rope_scaling_factor": chance.choice((2.0, 4.0))}
    if kind not in ("none", "linear"):
        rope |= {"rope_original_length": chance.choice((16, 32, 128))}
    if kind == "yarn":
        rope |= {"rope_attention_factor": chance.choice((None, 1.2)), "rope_beta_fast": chance.choice((32.0, 8.0))}
        rope |= {"rope_beta_slow": chance.choice((1.0, 2.0))}
    if kind == "llama3":
        rope |= {"rope_low_freq_factor": chance.choice((1.0, 2.0)), "rope_high_freq_factor": chance.choice((4.0, 8.0))}
    if kind == "none" and schedule != "constant" and no_rope != 1 and chance.random() < 0.4:
        rope |= {"rope_window_bases": (f"{length // 6}:100", f"{length // 2}:3000")}
    return ModelConfig(
        block=block,
        rotary_percent=chance.choice((1.0, 0.5)) if block == "phi" else 1.0,
        num_layers=layers,
        hidden_size=chance.choice((32, 40, 48)),
        ffn_hidden_size=chance.choice((36, 64)),
        num_attention_heads=heads,
        num_query_groups=chance.choice([groups for groups in (1, 2, 4, 8) if groups <= heads]),
        kv_channels=chance.choice((None, 4, 6, 10)),
        vocab_size=TOKEN_IDS + chance.choice((0, 3, 7)),
        make_vocab_size_divisible_by=chance.choice((4, 8, 64)),
        norm_epsilon=chance.choice((1e-5, 1e-6)),
        rotary_base=chance.choice((100.0, 10_000.0, 500_000.0)),
        no_rope_freq=no_rope,
        untie_embeddings_and_output_weights=chance.random() < 0.5,
        add_qkv_bias=queries_and_keys == "biases",
        qk_layernorm=queries_and_keys == "norms",
        local_window=chance.choice((1, 5, 20, 60)) if local else None,
        rotary_base_local=chance.choice((None, 50.0)) if local and block == "gemma3" else None,
        query_pre_attn_scalar=chance.choice((None, 3)) if block == "gemma3" else None,
        window_attn_skip_freq=chance.choice((None, 2, layers)) if local else None,
        init_method_std=chance.choice((0.08, 0.12)),
        init_scheme=_any(chance, ModelConfig, "init_scheme"),
        **rope,
    )


def _data(chance: random.Random) -> DataConfig:
    packing = _any(chance, DataConfig, "packing") if chance.random() < 0.3 else "random"
    length = 64 if packing == "decomposition" else chance.choice(LENGTHS)
    names = [name for name in DOCUMENTS if name != "tiny" or packing not in WHOLE_ROWS]
    source: dict[str, Any] = {"packing": packing, "packing_options": _packing_options(packing)}
    way = chance.random()
    if way < 0.6:
        source |= {"data_path": (chance.choice(names),)}
    elif way < 0.8:
        (name,) = chance.sample(names, 1)
        source |= {"data_path": ("mixed",) if name == "mixed" else ("0.3", name, "0.7", "mixed")}
    else:
        length_of_second = chance.choice((None, length // 2))
        first_part = MixturePart(chance.choice(names), 0.4, "one", packing, _packing_options(packing))
        second_part = MixturePart(chance.choice(names), 0.6, "two", length=length_of_second)
        alike = replace(first_part, weight=0.6, name="two") == second_part  # one data set, packed alike
        source = {"mixture": (first_part,) if alike else (first_part, second_part)}
    return DataConfig(
        **source,
        split=chance.choice(("60,40,0", "70,30,0")),
        seq_length=length,
        micro_batch_size=chance.choice((1, 1, 2, 4)),
        global_batch_size=chance.choice((4, 8, 8, 12)),
        first_sample=chance.choice((0, 0, 5)),
        balance_batches=chance.random() < 0.3,
        eod_mask_loss=chance.random() < 0.3,
    )


def _packing_options(packing: str) -> tuple[str, ...]:
    """Return options that suit documents as short as these."""
    options = {"upsample_long": ("threshold=100", "factor=2"), "decomposition": ("shortest=4", "cycles=2")}
    return options.get(packing, ("first_tokens=20",) if packing == "bm25" else ())


def _logging(chance: random.Random) -> LoggingConfig:
    interval, queries = chance.choice((0, 1, 3)), chance.choice((5, 64, 1000))
    return LoggingConfig(tensorboard=False, attention_health_interval=interval, attention_health_queries=queries)


def _window(chance: random.Random, length: int) -> WindowConfig:
    kind = chance.choice([*ScheduleKind, ScheduleKind.CONSTANT, ScheduleKind.LINEAR])
    aligned = chance.random() < 0.5
    end = chance.choice((None, None, length // 2, length // 4 * 3, 5))
    start = (end or length) // 4 if aligned else chance.choice((1, 5, 7, 20, length // 2))
    way = chance.random()
    return WindowConfig(
        window_schedule=kind,
        window_start=start,
        window_end=end,
        window_rate=chance.choice((5.0, 20.0)) if way < 0.6 else None,
        window_expansion_fraction=chance.choice((0.5, 1.0)) if 0.6 <= way < 0.95 else None,
        window_round_to=chance.choice((8, 16)),
        window_aligned=aligned,
        window_switch_step=chance.choice((1, 2)) if kind == "continual" else None,
        window_cycles=chance.choice((None, 1.5 if kind == "cyclic_gradual" else 2)),
        window_mask=_any(chance, WindowConfig, "window_mask"),
        document_mask=chance.random() < 0.6,
    )


def _weighting(chance: random.Random, length: int) -> WeightingConfig:
    kind = _any(chance, WeightingConfig, "token_weighting")
    denominator = _any(chance, WeightingConfig, "loss_denominator")
    if kind in ("none", "dataset"):
        return WeightingConfig(token_weighting=kind, loss_denominator=denominator)
    score = _any(chance, WeightingConfig, "weight_score")
    post = {"longce": "none", "exposure": "none", "rho1": "sparse"}.get(score)
    post = post or _any(chance, WeightingConfig, "weight_post")
    short = kind == "unfrozen" and score not in ("focal", "mile", "exposure")
    return WeightingConfig(
        token_weighting=kind,
        weight_score=score,
        weight_post=post,
        weight_strength=None if score == "exposure" else chance.choice((None, 0.3, 0.5)),
        weight_clip=None if score == "exposure" else chance.choice((None, 3.0)),
        exposure_tau=chance.choice((None, 5, 32)) if score == "exposure" else None,
        weight_shift=chance.choice((None, 1.2)) if score in ("ppmi", "npmi") else None,
        short_context=chance.choice((6, 16, length // 2)) if short else None,
        short_stride=chance.choice((None, 1, 5)) if short else None,
        score_store="scores" if kind == "frozen" else None,
        loss_denominator=denominator,
    )


def _optimizer(chance: random.Random) -> OptimizerConfig:
    return OptimizerConfig(
        lr=chance.choice((3e-4, 1e-3)),
        min_lr=chance.choice((0.0, 1e-4)),
        lr_decay_style=_any(chance, OptimizerConfig, "lr_decay_style"),
        lr_warmup_iters=chance.choice((0, 1, 2)),
        lr_warmup_from_zero=chance.random() < 0.3,
        lr_decay_iters=chance.choice((None, None, 8)),
        lr_wsd_decay_iters=chance.choice((1, 2)),
        lr_first_step=chance.choice((0, 0, 1)),
        weight_decay=chance.choice((0.0, 0.1)),
        weight_decay_all=chance.random() < 0.4,
        adam_beta1=chance.choice((0.9, 0.8)),
        adam_beta2=chance.choice((0.95, 0.99)),
        adam_eps=chance.choice((1e-5, 1e-4)),  # or gradients that cancel become steps of their rounding
        clip_grad=chance.choice((0.0, 0.3, 1.0)),
    )


def _training(chance: random.Random, length: int) -> TrainingConfig:
    return TrainingConfig(
        train_iters=STEPS,
        seed=chance.choice((1, 1234, 2**63 + 1)),
        bf16=chance.random() < 0.12,
        loss_block_tokens=chance.choice((7, 50, 4096)),
        z_loss=chance.choice((0.0, 0.0, 1e-2)),
        eval_interval=chance.choice((0, 2, 2, 4)),
        eval_iters=chance.choice((1, 1, 2)),
        eval_lengths=chance.choice(((), (7, length))),
        eval_packing=_any(chance, TrainingConfig, "eval_packing"),
        eval_document_mask=chance.random() < 0.5,
        eval_stride=chance.choice((None, None, 3, 7)),
    )


def write_data(folder: Path) -> None:
    """The data sets of DOCUMENTS: random tokens, a weight for each, and the mask of the chats."""
    for number, (name, length_of) in enumerate(DOCUMENTS.items()):
        chance = np.random.default_rng(number)
        documents: list[np.ndarray] = []
        while sum(map(len, documents)) < DATA_TOKENS:
            documents.append(chance.integers(0, TOKEN_IDS, length_of(chance)))
        write_theirs(folder / name, documents, TOKEN_IDS)
        tokens = sum(map(len, documents))
        weights = chance.gamma(2.0, 0.5, tokens).astype(np.float32)
        weights[chance.random(tokens) < 0.1] = 0
        np.save(folder / f"{name}.weights.npy", weights)
        if name == "chats":
            turns = np.repeat(chance.random(tokens) < 0.4, chance.choice((1, 9, 70, 700), tokens))[:tokens]
            np.save(folder / f"{name}{MASK}", turns.astype(np.uint8))


def prepare(config: Config) -> None:
    """Make the packing plans and the score store that a run in this folder reads; its losses are near a new model's."""
    plain = replace(config, weighting=WeightingConfig())
    for number in (0, 1) if config.training.eval_interval else (0,):
        for split in splits(plain, config.model.vocab_size, number):
            key = split.plan_key()
            prefix = split.part.prefix
            if key.policy != "random" and not plan_folder(prefix, key).exists():
                rows = split.source, split.documents, split.length, split.seed
                save_plan(build_plan(key.policy, *rows, split.part.options), prefix)
    if config.weighting.score_store is None:
        return
    rows: Any = row_identity(config, config.model.vocab_size)
    context = config.data.seq_length if config.weighting.weight_score == "rho1" else 8
    identity = StoreIdentity(rows=config.samples, short_context=context, short_stride=6, model="drawn", **rows)
    store = ScoreStore.create_or_resume(config.weighting.score_store, identity)
    for row in range(config.samples):
        losses = np.random.default_rng([9, row]).gamma(4.0, 1.0, config.data.seq_length)
        store.write(row, losses.astype(np.float32))
