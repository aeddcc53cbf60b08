"""The balancing loss of experts against transformers', and the routers' biases; parity/test_oracle.py has the rest."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron_ext.batch import StepBatches, assemble, lay_end_to_end
from megatron_ext.config import Config, TrainingConfig
from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.experts import balance_losses
from megatron_ext.engine.optimizer import unwrap
from megatron_ext.engine.step import Outcome, Stepper, StepResult
from tests.engine.test_optimizer_state import VOCABULARY, built
from tests.one_process import one_process

LENGTH = 16
EXPERTS = 5
CHOICES = 2


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[parallel.Ranks]:
    """This process, joined with no other."""
    with one_process():
        yield parallel.start(CONFIG.parallel, CONFIG.model.num_layers, platform.choose("cpu"), seed=1)


SIZES = f"--num-layers 2 --hidden-size 32 --vocab-size {VOCABULARY} --seq-length {LENGTH}"
BATCH = "--micro-batch-size 2 --global-batch-size 4"
CONFIG = parse(f"{SIZES} {BATCH} --ffn-hidden-size 24 --num-experts {EXPERTS}".split())


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A router's logits, uneven ones, and which experts are chosen."""
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(1)) + torch.arange(EXPERTS) / 2
    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, logits.topk(CHOICES).indices, True)
    return logits.requires_grad_(), chosen


def test_the_loss_of_each_row_is_transformers_in_any_order_of_tokens() -> None:
    """transformers counts a token once for each of its choices."""
    logits, chosen = routed(3 * LENGTH)
    rows = torch.arange(3).repeat_interleave(LENGTH)
    order = torch.randperm(3 * LENGTH, generator=torch.Generator().manual_seed(2))
    scores = logits[order].softmax(dim=-1)
    balance_loss = balance_losses(scores, chosen[order], CHOICES, LENGTH, dist.group.WORLD, rows[order])
    reference_loss = sum(load_balancing_loss_func((row,), EXPERTS, CHOICES) / CHOICES for row in logits.split(LENGTH))
    torch.testing.assert_close(balance_loss, reference_loss, rtol=1e-6, atol=0)
    (gradient,), (reference_gradient,) = (
        torch.autograd.grad(loss, logits, retain_graph=True) for loss in (balance_loss, reference_loss)
    )
    torch.testing.assert_close(gradient, reference_gradient, rtol=1e-5, atol=1e-8)
    together = load_balancing_loss_func((logits,), EXPERTS, CHOICES) / CHOICES
    assert abs(balance_loss / 3 - together) > 1e-4  # it is not linear in the tokens


def stepper_of(ranks: parallel.Ranks, config: Config) -> Stepper:
    """A model with initial weights and what trains it."""
    cpu = platform.choose("cpu")
    model, optimizer = built(config, ranks, cpu)
    return Stepper(model, optimizer, cpu, ranks, config, parallel.context_group(config.parallel, ranks, cpu))


def batches_of(config: Config, trained: float = 1.0, seed: int = 3) -> StepBatches:
    """A global batch of four random rows."""
    chance = np.random.default_rng(seed)
    ends = np.array([LENGTH])
    size = config.data.micro_batch_size
    batches = []
    for _ in range(0, 4, size):
        drawn = [(chance.integers(0, VOCABULARY, LENGTH + 1), chance.random(LENGTH) < trained) for _ in range(size)]
        token_rows = [TokenRow(tokens, ends, counts) for tokens, counts in drawn]
        masks = config.mask_options().at(LENGTH, [ends] * size, LENGTH)
        batches.append(assemble(lay_end_to_end(token_rows), masks, None, number_rows=True))
    return StepBatches(batches)


def gradients(ranks: parallel.Ranks, config: Config, trained: float = 1.0) -> tuple[StepResult, torch.Tensor]:
    """One step's result and the routers' gradients before the update."""
    stepper = stepper_of(ranks, config)
    result = stepper.launch(batches_of(config, trained)).result()
    routers = [p.main_grad.clone() for c in stepper.model for n, p in c.named_parameters() if "router" in n]
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
        (with_balance, balanced_gradient), (without_balance, plain_gradient) = (
            gradients(alone, balanced(c), share) for c in (0.1, 0.0)
        )
        assert with_balance.terms == without_balance.terms
        added.append(balanced_gradient - plain_gradient)
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


ROUTING = "--num-experts 8 --moe-router-topk 4 --moe-layer-freq 0 1 --moe-router-num-groups 4 --moe-router-group-topk 2"
BIASED = f"--moe-ffn-hidden-size 24 {ROUTING} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize(("recompute", "bf16"), [(None, False), ("full", False), (None, True)])
def test_the_bias_follows_accepted_steps(alone: parallel.Ranks, micro_batch_size: int, recompute, bf16: bool) -> None:
    """Evaluations, refused steps and steps without a trained token leave it unchanged, and are not counted later.

    In bf16 too it is float32, as are the counts: there may be more tokens than bf16 can count.
    """
    more = f"--micro-batch-size {micro_batch_size} --recompute-granularity {recompute or 'none'} --global-batch-size 4"
    more += f" --moe-router-bias-update-rate {2.0**-7}" + " --bf16" * bf16
    config = parse(f"{SIZES} {BIASED} {more}".split())
    stepper = stepper_of(alone, config)
    router: Any = next(unwrap(stepper.model)).decoder.layers[1].mlp.router
    counts = torch.zeros(8)

    def count(module: Any, inputs: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        if recompute is None or not torch.is_grad_enabled():  # the first of two passes
            counts.add_(routed[1].sum(dim=0))

    router.register_forward_hook(count)
    expected = torch.zeros(8)
    for seed in range(3):
        counts.zero_()
        assert stepper.launch(batches_of(config, seed=seed)).result().outcome is Outcome.UPDATED
        expected += 2.0**-7 * torch.sign(counts.mean() - counts)
        assert torch.equal(router.expert_bias, expected)
        assert counts.sum() == 4 * LENGTH * 4

        stepper.evaluate(batches_of(config).train)
        assert stepper.launch(batches_of(config), accepts=lambda result: False).outcome is Outcome.REFUSED
        assert stepper.launch(batches_of(config, trained=0.0)).result().outcome is Outcome.NO_TOKENS
        assert torch.equal(router.expert_bias, expected)
    assert len(expected.unique()) > 1
    assert router.weight.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert router.expert_bias.dtype == router.local_tokens_per_expert.dtype == torch.float32
