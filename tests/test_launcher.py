"""Processes for tests: results in order, errors and hangs become failures."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from launcher import call


def _sum_of_ranks(rank: int, factor: int) -> torch.Tensor:
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return torch.cat([total, torch.tensor([rank])])


def _fail(rank: int) -> None:
    if rank == 1:
        raise KeyError("the second rank fails")
    dist.barrier()  # the others wait for it


def _hang(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def test_results_come_back_in_rank_order() -> None:
    assert [result.tolist() for result in call(_sum_of_ranks, 2, 10)] == [[10, 0], [10, 1]]


def test_the_exception_of_any_rank_is_raised() -> None:
    with pytest.raises(Exception, match="KeyError: 'the second rank fails'"):
        call(_fail, 2)


def test_a_hang_fails() -> None:
    with pytest.raises(TimeoutError, match=r"_hang: ranks \[0, 1\] still run after 4 s"):
        call(_hang, 2, timeout_s=4)
