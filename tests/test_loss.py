"""Blocked vocabulary-parallel cross-entropy against torch's own, its memory, and the sums of a batch.

Legend: t tokens, D hidden, V real vocabulary, v rows of the output matrix on one rank, b tokens of a block.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext import loss
from megatron_ext.loss import TokenLosses, VocabularyShard, cross_entropy, loss_terms
from tests.conftest import slow_but
from tests.launcher import call

NAMES = ("losses", "hidden.grad", "weight.grad", "log partition", "entropy")
Z_LOSS = 1e-2


def problem(t: int, width: int, rows: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [t, D], weight [rows, D], labels [t] that visit every token id, and the gradient of the losses [t].

    Rows of padding would win every softmax.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(t, width, generator=generator), torch.randn(rows, width, generator=generator)
    weight[vocabulary:] = 1e4
    labels = torch.arange(t)[torch.randperm(t, generator=generator)] % vocabulary
    return hidden, weight, labels, torch.rand(t, generator=generator) - 0.3


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, grad: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """Losses and the gradients of hidden and weight in float64, padding left out of the matrix."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight[:vocabulary].T
    losses = F.cross_entropy(logits, labels, reduction="none")
    partition = logits.logsumexp(dim=1)
    (losses + Z_LOSS * partition.square()).backward(grad.double())
    entropy = -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)
    return losses.detach(), hidden.grad, weight.grad, partition.detach(), entropy.detach()


def blocked(
    hidden: Tensor, weight: Tensor, labels: Tensor, grad: Tensor, shard: VocabularyShard, block: int
) -> tuple[Tensor, ...]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses = cross_entropy(hidden, weight, labels, shard, block, entropy=True)
    (losses.cross_entropy_t + Z_LOSS * losses.log_partition_t.square()).backward(grad)
    assert not losses.entropy_t.requires_grad
    return losses.cross_entropy_t.detach(), hidden.grad, weight.grad, losses.log_partition_t.detach(), losses.entropy_t


def assert_all_close(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """max|a - b| <= 1e-6 max|b|, or of 1 where b is nearly nothing."""
    for name, part, wanted_part in zip(NAMES, actual, wanted, strict=True):
        assert part.shape == wanted_part.shape, name
        if wanted_part.numel():
            error = (part.double() - wanted_part).abs().max() / wanted_part.abs().max().clamp(min=1.0)
            assert error <= 1e-6, (name, float(error))


@pytest.mark.parametrize("block", [3, 8, 16, 50])
@pytest.mark.parametrize("weight_grad", [False, True])
def test_the_block_that_forward_leaves_changes_nothing(block: int, weight_grad: bool) -> None:
    """Backward scales its exponentials; where the entropy is asked for, and in a second pass, it makes them again."""
    hidden, weight, labels, grad = problem(16, 5, 14, 11)
    results = []
    for entropy in (True, False):
        leaves = [leaf.clone().requires_grad_() for leaf in (hidden, weight)]
        total = torch.zeros_like(weight) if weight_grad else None
        losses = cross_entropy(*leaves, labels, VocabularyShard(0, 11), block, entropy=entropy, weight_grad_vD=total)
        for again in (True, False):
            for exact_leaf in (*leaves, total):
                if exact_leaf is not None:
                    exact_leaf.grad = None
            if total is not None:
                total.fill_(1.0)  # to which the weight's gradient is added
            losses.cross_entropy_t.backward(grad, retain_graph=again)
            assert (leaves[1].grad is None) == weight_grad  # autograd would copy even expanded zeros
            results.append((losses.cross_entropy_t, leaves[0].grad, leaves[1].grad if total is None else total - 1))
    exact = [leaf.double().requires_grad_() for leaf in (hidden, weight)]
    F.cross_entropy(exact[0] @ exact[1][:11].T, labels, reduction="none").backward(grad.double())
    for part, exact_leaf in zip(results[0][1:], exact, strict=True):
        torch.testing.assert_close(part.double(), exact_leaf.grad, rtol=1e-5, atol=1e-5)
    for other_result in results[1:]:
        for part, other_part in zip(results[0], other_result, strict=True):
            assert part.any()
            assert torch.equal(part, other_part)


@given(
    t=st.integers(0, 30),
    width=st.integers(1, 8),
    vocabulary=st.integers(1, 40),
    padding=st.integers(0, 20),
    block=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_equals_torch(t: int, width: int, vocabulary: int, padding: int, block: int, seed: int) -> None:
    inputs = problem(t, width, vocabulary + padding, vocabulary, seed)
    actual = blocked(*inputs, VocabularyShard(0, vocabulary), block)
    assert actual[0].dtype == torch.float32
    assert_all_close(actual, whole(*inputs, vocabulary))
    assert [part.shape for part in actual[:3]] == [(t,), (t, width), (vocabulary + padding, width)]
    assert not actual[2][vocabulary:].any()


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels, grad = problem(6, 4, 9, 9)
    actual = blocked(hidden * 300, weight * 300, labels, grad, VocabularyShard(0, 9), 4)
    assert all(torch.isfinite(x).all() for x in actual)
    wanted = whole(hidden * 300, weight * 300, labels, grad, 9)
    torch.testing.assert_close(actual[0].double(), wanted[0], rtol=1e-5, atol=0.1)  # of logits around 1e5


def test_bf16_error_is_at_most_twice_that_of_torch_in_bf16() -> None:
    hidden, weight, labels, grad = problem(64, 32, 128, 100)
    hidden = hidden.bfloat16()
    weight = (weight / 4).bfloat16()
    exact = whole(hidden, weight, labels, grad, 100)
    actual = blocked(hidden, weight, labels, grad, VocabularyShard(0, 100), 16)
    assert [x.dtype for x in actual] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    plain_hidden, plain_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = plain_hidden @ plain_weight[:100].T
    plain = F.cross_entropy(logits, labels, reduction="none")
    (plain + Z_LOSS * logits.logsumexp(dim=1).square()).backward(grad.bfloat16())
    for part, torchs, wanted in zip(actual, (plain, plain_hidden.grad, plain_weight.grad), exact, strict=False):
        assert (part - wanted).abs().max() <= 2 * (torchs - wanted).abs().max()
    # the logits are not rounded, and so not the losses that token weights compare
    assert (actual[0] - exact[0]).abs().max() < 1e-5 < 1e-3 < (plain - exact[0]).abs().max()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


T_TOKENS = 64
WIDTH = 8
VOCABULARY = 96
BLOCK = 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_one_block_of_logits(dtype: torch.dtype) -> None:
    hidden, weight, labels, grad = problem(T_TOKENS, WIDTH, VOCABULARY, VOCABULARY)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    kept: list[int] = []
    keeping = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x)
    with LargestTensor() as forward, keeping:
        losses = cross_entropy(hidden, weight, labels, VocabularyShard(0, VOCABULARY), BLOCK, entropy=True)
    with LargestTensor() as backward:
        losses.cross_entropy_t.backward(grad)
    allowed = max(BLOCK * VOCABULARY, VOCABULARY * WIDTH, T_TOKENS * WIDTH)
    assert BLOCK * VOCABULARY <= forward.largest <= allowed  # the probe sees the block of logits
    assert BLOCK * VOCABULARY <= backward.largest <= allowed
    assert allowed < T_TOKENS * VOCABULARY
    assert 0 < max(kept) <= max(hidden.numel(), weight.numel())


# vocabularies of a matrix of 40 rows: the second leaves the last of 4 ranks nothing but padding
VOCABULARIES = (37, 29, 40)
ROWS = 40


def _tensor_parallel_rank(rank: int, block: int) -> list[list[Tensor]]:
    results = []
    for vocabulary in VOCABULARIES:
        hidden, weight, labels, grad = problem(50, 8, ROWS, vocabulary)
        rows = ROWS // dist.get_world_size()
        shard = VocabularyShard(rank * rows, vocabulary, dist.group.WORLD)
        weight_shard = weight[rank * rows : (rank + 1) * rows]
        losses, hidden_grad, weight_grad, *statistics = blocked(hidden, weight_shard, labels, grad, shard, block)
        dist.all_reduce(hidden_grad)
        results.append([losses, hidden_grad, weight_grad, *statistics])
    return results


@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))
def test_tensor_parallel_equals_one_process(ranks: int) -> None:
    by_rank = call(_tensor_parallel_rank, ranks, 16)
    for case, vocabulary in enumerate(VOCABULARIES):
        losses, hidden_grads, weight_grads, *statistics = zip(*(result[case] for result in by_rank), strict=True)
        for copies in (losses, *statistics):
            assert all(torch.equal(copy, copies[0]) for copy in copies)
        actual = (losses[0], hidden_grads[0], torch.cat(weight_grads), *(copies[0] for copies in statistics))
        assert_all_close(actual, whole(*problem(50, 8, ROWS, vocabulary), vocabulary))
        assert not actual[2][vocabulary:].any()


def _reductions_of_a_rank(rank: int) -> list[list[int]]:
    hidden, weight, labels, grad = problem(50, 8, ROWS, 37)
    shard = VocabularyShard(rank * ROWS // 2, 37, dist.group.WORLD)
    weight_shard = weight[rank * ROWS // 2 : (rank + 1) * ROWS // 2]
    sizes: list[list[int]] = []
    whole_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes[-1].append(tensor.numel())
        return whole_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted  # in this process of its own
    for tokens, entropy in ((50, False), (50, True), (0, True)):
        sizes.append([])
        inputs = hidden[:tokens].clone().requires_grad_(), weight_shard.clone().requires_grad_(), labels[:tokens]
        cross_entropy(*inputs, shard, 7, entropy=entropy).cross_entropy_t.backward(grad[:tokens])
    return sizes


def test_tensor_parallel_ranks_reduce_twice_whatever_the_number_of_blocks() -> None:
    """The highest logits, then sums and label logits, with the entropy's sums beside them; backward nothing."""
    assert call(_reductions_of_a_rank, 2) == [[[50, 100], [50, 150], [0, 0]]] * 2


def test_torch_that_cannot_add_in_place_adds_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 product in float32; the memory formula counts the largest of the temporary products."""
    product_bytes: list[int] = []

    def product(left_factor: Tensor, right_factor: Tensor, out_dtype: torch.dtype) -> Tensor:
        product_bytes.append(len(left_factor) * right_factor.shape[1] * out_dtype.itemsize)
        return left_factor.to(out_dtype) @ right_factor.to(out_dtype)

    generator = torch.Generator().manual_seed(0)
    left_factor, right_factor = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((101, 7), (7, 16)))
    wanted = torch.ones(101, 16) + left_factor.float() @ right_factor.float()
    monkeypatch.setattr(loss, "_ADDS_IN_PLACE", False)
    monkeypatch.setattr(torch, "mm", product)
    for parts, rows in ((1, 101), (2, 51), (32, 4), (200, 1)):
        monkeypatch.setattr(loss, "_PARTS", parts)
        total = torch.ones(101, 16)
        loss.add_product(total, left_factor.T.contiguous().T, right_factor)
        torch.testing.assert_close(total, wanted)
        assert max(product_bytes) == loss.adding_bytes(101, 16) == rows * 16 * 4
        product_bytes.clear()
    monkeypatch.setattr(loss, "_ADDS_IN_PLACE", True)
    assert loss.adding_bytes(101, 16) == 0


def of(losses: Tensor) -> TokenLosses:
    """These cross-entropies, and a log partition of 3 for each."""
    return TokenLosses(losses, torch.full_like(losses, 3.0))


def test_z_loss_literal() -> None:
    partition = torch.tensor([2.0, torch.nan, -4.0], requires_grad=True)
    losses = TokenLosses(torch.tensor([1.0, torch.nan, 2.0]), partition)
    trained = torch.tensor([True, False, True])
    total, terms = loss_terms(losses, torch.tensor([0.0, 5.0, 0.5]), trained, z_loss=0.1)
    assert total.item() == pytest.approx(0.5 * 2 + 0.1 * (4 + 16))
    assert torch.stack(terms).tolist() == [pytest.approx(3.0), 3.0, 2.0, 0.5, 0.25, 1.0, 0.0]
    total.backward()
    assert partition.grad.tolist() == [pytest.approx(0.4), 0.0, pytest.approx(-0.8)]


def test_loss_terms_literal() -> None:
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    weights = torch.tensor([1.0, 0.5, 3.0, 0.25])
    trained = torch.tensor([True, True, False, True])
    total, terms = loss_terms(of(losses), weights, trained)
    assert (total.item(), total.dtype) == (1.0 + 1.0 + 2.0, torch.float32)
    assert torch.stack(terms).tolist() == [4.0, 11.0, 3.0, 1.75, 1.0 + 0.25 + 0.0625, 0.0, 0.0]
    assert torch.stack(terms).dtype == torch.float64
    assert not torch.stack(terms).requires_grad
    total.backward()
    assert losses.grad.tolist() == [1.0, 0.5, 0.0, 0.25]
    many_losses = torch.cat([torch.full((1,), 2.0**25), torch.ones(64)])  # float32 would lose the ones
    _, terms = loss_terms(of(many_losses), torch.ones(65), torch.ones(65, dtype=torch.bool))
    assert terms.weighted_sum.item() == terms.loss_sum.item() == 2**25 + 64


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_untrained_losses_leak_nowhere(poison: float) -> None:
    losses = torch.tensor([poison, 2.0, poison, 1.0], requires_grad=True)
    trained = torch.tensor([False, True, False, True])
    total, terms = loss_terms(of(losses), torch.ones(4), trained, scores_t=torch.tensor([poison, 2.0, 9.0, 4.0]))
    assert torch.stack(terms).tolist() == [3.0, 3.0, 2.0, 2.0, 2.0, 0.0, 6.0]
    total.backward()
    assert losses.grad.tolist() == [0.0, 1.0, 0.0, 1.0]
    total, terms = loss_terms(of(losses), torch.ones(4), torch.zeros(4, dtype=torch.bool))
    assert (total.item(), torch.stack(terms).tolist()) == (0.0, [0.0] * 7)
    total.backward()
    assert losses.grad.tolist() == [0.0, 1.0, 0.0, 1.0]
    total, terms = loss_terms(of(losses), torch.ones(4), torch.ones(4, dtype=torch.bool))  # a trained one is not hidden
    assert not torch.isfinite(total)
    assert not torch.isfinite(terms.loss_sum)
