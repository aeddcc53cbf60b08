"""share_rows: attention over shared rows for a model of one's own, against a dense mask, forward and gradients."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_ext.attention.shared_rows import share_rows
from megatron_ext.masks import MaskOptions
from tests.conftest import refused
from tests.launcher import call
from tests.test_masks import formula

HEADS = 4
HEAD_SIZE = 6
VALUE_SIZES = (6, 4)
MASKS = ("grid", "sliding", "sliding_w")


def drawn(seed: int) -> tuple[int, list[list[int]], int | None, str, str, str]:
    """Row length, document ends of each row, window, its mask, policy and scheme."""
    draw = np.random.default_rng(seed)
    length = int(draw.choice([12, 64, 100]))
    rows = int(draw.integers(1, 4))
    ends = [sorted(draw.integers(0, length + 1, draw.integers(0, 6)).tolist()) for _ in range(rows)]
    window = None if draw.random() < 0.2 else int(draw.integers(1, length + 10))
    policy = str(draw.choice(["auto", "contiguous", "zigzag", "balanced"]))
    return length, ends, window, str(draw.choice(MASKS)), policy, str(draw.choice(["exchange", "ulysses"]))


def key_heads(seed: int) -> int:
    """One or two, which two or more ranks may share under Ulysses."""
    return 1 + seed // 2 % 2


def inputs(total: int, seed: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output."""
    torch.manual_seed(seed)
    sizes = (HEAD_SIZE, HEAD_SIZE, *[VALUE_SIZES[seed % 2]] * 2)
    heads = (HEADS, key_heads(seed), key_heads(seed), HEADS)
    return [torch.randn(total, *shape) for shape in zip(heads, sizes, strict=True)]


def of_rank(rank: int, seeds: list[int]) -> list[tuple[Any, ...]]:
    """Return for each seed this rank's tokens, positions, outputs and gradients, and the bytes it sent."""
    results = []
    for seed in seeds:
        length, ends, window, mask, policy, scheme = drawn(seed)
        group = dist.group.WORLD if dist.is_initialized() else None
        rows = share_rows(length, ends, window, group=group, window_mask=mask, policy=policy, scheme=scheme)
        *qkv, gradient = [x[rows.tokens] for x in inputs(length * len(ends), seed)]
        leaves = [x.requires_grad_() for x in qkv]
        out = rows.attend(*leaves)
        out.backward(gradient)
        tensors = [rows.tokens, rows.positions, out.detach(), *[leaf.grad for leaf in leaves]]
        results.append((*[x.numpy() for x in tensors], rows.context.sent_bytes))
    return results


def expected(seed: int) -> list[np.ndarray]:
    """Output and gradients of all tokens by a plain softmax under the dense mask."""
    length, ends, window, mask, *_ = drawn(seed)
    *qkv, gradient = inputs(length * len(ends), seed)
    query, key, value = (x.double().requires_grad_() for x in qkv)
    keys, values = (x.repeat_interleave(HEADS // key_heads(seed), dim=1) for x in (key, value))
    scores = torch.einsum("inh,jnh->nij", query, keys) / HEAD_SIZE**0.5
    options = MaskOptions(document_mask=True, window_mask=mask)  # type: ignore[arg-type]
    masks = [formula(length, borders, options, window or length, local=False) for borders in ends]
    sees = torch.block_diag(*map(torch.from_numpy, masks)).bool()
    out = torch.einsum("nij,jnh->inh", scores.masked_fill(~sees, -torch.inf).softmax(-1), values)
    out.backward(gradient.double())
    return [x.numpy() for x in (out.detach(), query.grad, key.grad, value.grad) if x is not None]


@pytest.mark.parametrize(("processes", "drawings"), [(1, 12), (2, 40), pytest.param(4, 200, marks=pytest.mark.slow)])
def test_outputs_and_gradients(processes: int, drawings: int) -> None:
    """The number of rows is arbitrary; under Ulysses several ranks may get the same key head."""
    seeds = list(range(drawings))
    ranks = call(of_rank, processes, seeds, group=processes > 1)
    for number, seed in enumerate(seeds):
        columns = zip(*[results[number] for results in ranks], strict=True)
        tokens, _, *outputs, _ = [np.concatenate([np.atleast_1d(part) for part in column]) for column in columns]
        assert sorted(tokens.tolist()) == list(range(len(tokens)))
        for actual, wanted in zip(outputs, expected(seed), strict=True):
            np.testing.assert_allclose(actual, wanted[tokens], rtol=0, atol=2e-5, err_msg=f"{seed}: {drawn(seed)}")
    assert any(sent for *_, sent in ranks[0]) == (processes > 1)


def test_positions_restart_in_each_segment() -> None:
    rows = share_rows(12, [[3, 10]], window=4)
    assert rows.tokens.tolist() == list(range(12))
    assert rows.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"document_ends": []}, "document_ends: got no rows"),
        ({"document_ends": [[13]]}, "document_ends: got values from 13 to 13, needs 0..12"),
        ({"window": 0}, "window: got 0, needs >= 1 token"),
        ({"window": 3, "window_mask": "round"}, "window_mask: got 'round', needs one of grid, sliding, sliding_w"),
        ({"policy": "best"}, "cp_policy: got 'best', needs one of auto, contiguous, zigzag, balanced"),
        ({"scheme": "ring"}, "scheme: got 'ring', needs one of exchange, ulysses"),
    ],
)
def test_refusals(changed: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"document_ends": [[12]], **changed}
    assert text in refused(share_rows, 12, arguments.pop("document_ends"), **arguments)


def test_tensors_of_other_sizes_are_refused() -> None:
    rows = share_rows(12, [[]])
    query, key, value = torch.zeros(12, 4, 6), torch.zeros(12, 2, 6), torch.zeros(11, 2, 6)
    assert "attend: got 12, 12, 11 tokens of queries, keys and values" in refused(rows.attend, query, key, value)
    assert "attend: got values of 7" in refused(rows.attend, query, key, torch.zeros(12, 2, 7))
