"""Runs of Megatron-Core that go on here: the same losses, weights and moments as if they had gone on there."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.folders import read_checkpoint
from megatron_ext.checkpoint.megatron_lm import _from_blocks, megatron_lm_to_megatron
from megatron_ext.checkpoint.tensors import Stored
from tests.checkpoint.megatron_core import MOE, SMALL, model_of
from tests.config.megatron_lm import defaults
from tests.conftest import refused, slow_but
from tests.launcher import Commands, call
from tests.runs import TRAINER, read_jsonl
from tests.theirs import write_theirs

PERIOD = torch.randint(0, 120, (32,), generator=torch.Generator().manual_seed(1))
TOKENS = PERIOD.repeat(3)[:33]  # each row of a text of this period, wherever it begins in whole periods
TRAINING: dict[str, Any] = {
    "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 6, "lr": 2e-3, "min_lr": 1e-4,
    "lr_decay_style": "cosine", "lr_warmup_iters": 2, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 0.5,
    "consumed_train_samples": 6, "split": "1,0,0", "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def train(
    rank: int, folder: Path, version: str, args: dict[str, Any], layout: dict[str, int], kind: str | None
) -> list[float]:
    """Six steps of Megatron-Core, with a checkpoint in `folder` after the third and the last; the losses."""
    import megatron.core.optimizer
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model = model_of(args, layout).train()
    distributed = kind is not None
    model.config.bf16 = bf16 = args["params_dtype"] is torch.bfloat16
    options = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": distributed}
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model)
    chunk.broadcast_params()  # the ranks' seeds differ
    if distributed or bf16:  # platform.choose sets one whose state equals Apex's and Transformer Engine's
        megatron.core.optimizer.Adam = torch.optim.AdamW
        megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
    names = ("lr", "min_lr", "weight_decay", "adam_beta2", "clip_grad", "params_dtype")
    settings = {name: args[name] for name in names} | {"adam_beta1": 0.9, "adam_eps": 1e-8, "bf16": bf16}
    config = OptimizerConfig(optimizer="adam", use_distributed_optimizer=distributed, **settings)
    optimizer = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
    batch = args["global_batch_size"]
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args["lr"], min_lr=args["min_lr"],
        lr_warmup_steps=args["lr_warmup_iters"] * batch, lr_decay_steps=args["train_iters"] * batch,
        lr_decay_style="cosine", start_wd=args["weight_decay"], end_wd=args["weight_decay"], wd_incr_steps=0,
        wd_incr_style="constant",
    )  # fmt: skip
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": distributed, "dp_cp_group": group}
    metadata |= {"distrib_optim_sharding_type": kind} if distributed else {}

    tokens = TOKENS[None, :-1]
    positions = torch.arange(32)[None]
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    losses = []
    for step in range(1, 7):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = chunk(tokens, positions, mask, labels=TOKENS[None, 1:]).float().mean()
        loss.backward()
        finalize_model_grads([chunk])
        optimizer.step()
        scheduler.step(increment=batch)
        losses.append(loss.item())
        if step in (3, 6):
            weights = model.sharded_state_dict(metadata=metadata)
            state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata)}
            state |= {"args": Namespace(**defaults(version) | args), "iteration": step, "checkpoint_version": 3.0}
            (folder / f"iter_{step:07d}").mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(state, str(folder / f"iter_{step:07d}"))
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    return losses


TP2 = {"tensor_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, int], str | None]] = {
    "plain": ("0.16.1", {"untie_embeddings_and_output_weights": False}, TP2, None),
    "plain-bf16": ("0.19.0", BF16, TP2, None),
    "plain-moe": ("0.16.1", MOE | {"moe_aux_loss_coeff": 0.0}, EP2, None),
    "reshardable": ("d98e8a64", {}, {}, "fully_reshardable"),
    "reshardable-bf16": ("0.19.0", BF16, TP2, "fully_reshardable"),
    "reshardable-moe": ("0.19.0", MOE | {"moe_aux_loss_coeff": 0.0}, EP2, "fully_reshardable"),
}


@pytest.mark.parametrize("name", slow_but(["plain"], VARIANTS))
def test_three_more_steps_are_the_same_there_and_here(tmp_path: Path, name: str, alone: Commands) -> None:
    version, changes, layout, kind = VARIANTS[name]
    write_theirs(tmp_path / "data", [PERIOD.repeat(100).numpy()], 128)
    args = SMALL | TRAINING | changes | {"data_path": [str(tmp_path / "data")]}
    losses = call(train, 2, tmp_path / "theirs", version, args, layout, kind)[0]
    run = tmp_path / "run"
    megatron_lm_to_megatron(tmp_path / "theirs", run, iteration=3, with_optimizer=True)
    megatron_lm_to_megatron(tmp_path / "theirs", tmp_path / "end", with_optimizer=True)
    alone.run(TRAINER, "--config", run / "config.yaml")
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [3, 4, 5]
    close = 0.1 if "bf16" in args else 2e-6
    assert [record["train_loss"] for record in records] == pytest.approx(losses[3:], rel=close / 10)
    manifest = read_checkpoint(run / "checkpoints" / "iter_0000006").manifest
    assert (manifest.optimizer, manifest.consumed_samples) == ({"step": 6}, 12)
    stored = [Stored(folder / "checkpoints" / "iter_0000006") for folder in (run, tmp_path / "end")]
    assert {key for key in stored[0].tensors if "random_states" not in key} == stored[1].tensors.keys()
    for key in stored[1].tensors:
        tensor_here, tensor_there = (folder.read(key).float() for folder in stored)
        assert (tensor_here - tensor_there).abs().max() <= close * tensor_there.abs().max(), key


def test_a_grid_of_flattened_blocks_is_one_tensor() -> None:
    """Versions before 0.16 save so (fully_sharded_model_space); those tested here refuse to."""
    whole = torch.arange(24).view(4, 6)
    blocks = [torch.stack([block.flatten() for block in rows.chunk(3, dim=1)]) for rows in whole.chunk(2)]
    assert torch.equal(_from_blocks(lambda: torch.stack(blocks), (4, 6)), whole)


def test_a_format_of_other_shapes_is_named(tmp_path: Path) -> None:
    call(train, 1, tmp_path / "theirs", "0.19.0", SMALL | TRAINING, {}, "dp_reshardable")
    line = refused(megatron_lm_to_megatron, tmp_path / "theirs", tmp_path / "run", with_optimizer=True)
    assert "'dp_reshardable', needs fully_reshardable" in line
    megatron_lm_to_megatron(tmp_path / "theirs", tmp_path / "run")  # its weights
