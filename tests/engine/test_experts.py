"""The balancing loss of experts against transformers' own, and what it adds to the gradients of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from one_process import one_process
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron_ext.batch import StepBatches, assemble, lay_end_to_end
from megatron_ext.config import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.experts import balance_losses
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import build_optimizer, unwrap, wrap
from megatron_ext.engine.step import Stepper, StepResult
from megatron_ext.engine.weights import initialise

LENGTH, EXPERTS, CHOICES, VOCABULARY = 16, 5, 2, 50

if torch.cuda.is_available():
    pytest.skip("one CPU process", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[parallel.Ranks]:
    """This process, joined with no other."""
    with one_process():
        compat.install_optimizer()
        yield parallel.start(CONFIG.parallel, CONFIG.model.num_layers, platform.choose("cpu"), seed=1)


CONFIG = Config(
    model=ModelConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=24, vocab_size=VOCABULARY, num_experts=EXPERTS, moe_router_topk=2
    ),
    data=DataConfig(seq_length=LENGTH, micro_batch_size=2, global_batch_size=4),
)


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A router's logits, uneven ones, and which experts are chosen."""
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(1)) + torch.arange(EXPERTS) / 2
    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, logits.topk(CHOICES).indices, True)
    return logits.requires_grad_(), chosen


def test_the_loss_of_one_group_is_transformers() -> None:
    """transformers counts a token once for each of its choices."""
    logits, chosen = routed(LENGTH)
    ours = balance_losses(logits, chosen, CHOICES, LENGTH, dist.group.WORLD)
    theirs = load_balancing_loss_func((logits,), EXPERTS, CHOICES) / CHOICES
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (mine,), (other,) = (torch.autograd.grad(loss, logits, retain_graph=True) for loss in (ours, theirs))
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-8)


def test_each_row_is_a_group_in_any_order_of_tokens() -> None:
    logits, chosen = routed(3 * LENGTH)
    rows = torch.arange(3).repeat_interleave(LENGTH)
    order = torch.randperm(3 * LENGTH, generator=torch.Generator().manual_seed(2))
    found = balance_losses(logits[order], chosen[order], CHOICES, LENGTH, dist.group.WORLD, rows[order])
    each = [load_balancing_loss_func((row,), EXPERTS, CHOICES) / CHOICES for row in logits.split(LENGTH)]
    torch.testing.assert_close(found, sum(each), rtol=1e-6, atol=0)
    together = load_balancing_loss_func((logits,), EXPERTS, CHOICES) / CHOICES
    assert abs(found / 3 - together) > 1e-4  # it is not linear in the tokens


def gradients(ranks: parallel.Ranks, config: Config, trained: float = 1.0) -> tuple[StepResult, torch.Tensor]:
    """One step's result and the routers' gradients before the update."""
    cpu = platform.choose("cpu")
    model = wrap(build_chunks(config, VOCABULARY, cpu), config)
    initialise(list(unwrap(model)), config.model, VOCABULARY, 1, ranks)
    group = parallel.context_group(config.parallel, ranks, cpu)
    optimizer = build_optimizer(model, config)
    stepper = Stepper(model=model, optimizer=optimizer, platform=cpu, ranks=ranks, config=config, context=group)
    chance = np.random.default_rng(3)
    rows = [
        TokenRow(
            tokens=chance.integers(0, VOCABULARY, LENGTH + 1),
            document_ends=np.array([LENGTH]),
            trained=chance.random(LENGTH) < trained,
        )
        for _ in range(4)
    ]
    size = config.data.micro_batch_size
    batches = []
    for first in range(0, 4, size):
        some = rows[first : first + size]
        masks = config.mask_options().at(LENGTH, [row.document_ends for row in some], LENGTH)
        batches.append(assemble(lay_end_to_end(some), masks, None, number_rows=True))
    result = stepper.train(StepBatches(batches))
    routers = [p.main_grad.clone() for c in model for n, p in c.named_parameters() if "router" in n]
    return result, torch.cat(routers)


def balanced(coefficient: float, micro_batch_size: int = 2, kind: str = "seq_aux_loss") -> Config:
    return replace(
        CONFIG,
        data=replace(CONFIG.data, micro_batch_size=micro_batch_size),
        training=TrainingConfig(moe_aux_loss_coeff=coefficient, moe_router_load_balancing_type=kind),  # type: ignore[arg-type]
        optimizer=replace(CONFIG.optimizer, clip_grad=0.0),
    )


def test_balancing_does_not_depend_on_the_number_of_trained_tokens(alone: parallel.Ranks) -> None:
    """The weighted loss is over trained tokens, the balancing loss over all tokens."""
    added = []
    for share in (1.0, 0.4):
        (with_it, ours), (without, theirs) = (gradients(alone, balanced(c), share) for c in (0.1, 0.0))
        assert with_it.loss == without.loss
        added.append(ours - theirs)
    assert added[0].abs().max() > 1e-4
    torch.testing.assert_close(added[0], added[1], rtol=1e-3, atol=1e-6)


def test_balancing_of_rows_does_not_depend_on_micro_batches(alone: parallel.Ranks) -> None:
    by_row = [gradients(alone, balanced(0.1, size)) for size in (1, 2, 4)]
    by_batch = [gradients(alone, balanced(0.1, size, "aux_loss")) for size in (1, 4)]
    for result, routers in by_row[1:]:
        assert result.moe_aux_loss == pytest.approx(by_row[0][0].moe_aux_loss, rel=1e-6)
        torch.testing.assert_close(routers, by_row[0][1], rtol=1e-4, atol=1e-7)
    assert by_batch[0][0].moe_aux_loss == pytest.approx(by_row[0][0].moe_aux_loss, rel=1e-6)
    assert abs(by_batch[1][0].moe_aux_loss - by_row[0][0].moe_aux_loss) > 1e-3
