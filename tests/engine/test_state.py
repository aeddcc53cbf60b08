"""The host memory of checkpoints that are written in the background."""

import gc
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.checkpoint.tensors import Shard
from megatron_ext.engine.state import Checkpointer


def test_copies_of_an_async_save_are_pinned_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one allocation that is used again: torch rounds its own pinned ones up to powers of two."""
    pinned: dict[int, int] = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.update({address: size}) or 0,
        cudaHostUnregister=lambda address: pinned.pop(address) and 0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: error == 0 or pytest.fail(str(error)))
    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._copies = []
    checkpointer._unpin = lambda: None
    tensors = [torch.arange(33.0).view(3, 11), torch.arange(5, dtype=torch.bfloat16)]
    tensors += [torch.tensor(7, dtype=torch.uint8), torch.empty(0, 4)]
    shards = [Shard.of(f"x{i}", x, tuple(x.shape), (0,) * x.ndim) for i, x in enumerate(tensors)]
    for step in range(2):
        copies = [shard.data() for shard in checkpointer._copied(shards)]
        for copy, tensor in zip(copies[:3], tensors[:3], strict=True):
            assert torch.equal(copy, tensor)
            assert copy.data_ptr() != tensor.data_ptr()
        assert [(copy.shape, copy.dtype) for copy in copies] == [(x.shape, x.dtype) for x in tensors]
        assert list(pinned.items()) == [(copies[0].data_ptr(), 192 + 64 + 64)], step
        tensors[0].add_(1)
    checkpointer._copied(shards[:1])  # others than before
    assert list(pinned.values()) == [192]
    del checkpointer
    gc.collect()
    assert not pinned
