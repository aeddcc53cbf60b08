"""Phi's layer: recomputation uses the precision of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import megatron.core.extensions.transformer_engine as megatron_te
import numpy as np
import pytest
import torch
from one_process import one_process
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ext.batch import pack
from megatron_ext.config import Config, DataConfig, ModelConfig, ParallelConfig
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import PackedCall, PackedGPT, build_chunks
from megatron_ext.engine.weights import initialise

LENGTH, VOCABULARY = 16, 50

if torch.cuda.is_available():
    pytest.skip("one CPU process", allow_module_level=True)


@pytest.fixture
def chunk() -> Iterator[PackedGPT]:
    config = Config(
        model=ModelConfig(num_layers=1, vocab_size=VOCABULARY, block="phi"),
        data=DataConfig(seq_length=LENGTH),
        parallel=ParallelConfig(recompute_granularity="selective", recompute_modules=("mlp",)),
    )
    with one_process():
        where = platform.choose("cpu")
        ranks = parallel.start(config.parallel, 1, where, seed=1)
        (built,) = build_chunks(config, VOCABULARY, where)
        initialise([built], config.model, VOCABULARY, 1, ranks)
        yield built


class Precision:
    """Stands for Transformer Engine's fp8: a context that a layer runs in, and its checkpoint, which remembers it."""

    fp8 = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.fp8 = True
        yield
        self.fp8 = False

    def checkpoint(self, compute: Callable[..., Tensor], distribute: bool, tracker: Any, group: Any, x: Tensor) -> Any:
        """Take Megatron's arguments, in their order."""
        assert not distribute
        assert tracker().get_states() is not None
        assert group.size() == 1
        again = self.entered() if self.fp8 else nullcontext()
        return checkpoint(compute, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again))


@pytest.mark.parametrize("fp8", [None, "hybrid"])
def test_an_mlp_is_recomputed_in_the_precision_of_the_forward_pass(
    chunk: PackedGPT, monkeypatch: pytest.MonkeyPatch, fp8: str | None
) -> None:
    precision, seen = Precision(), []
    monkeypatch.setattr(megatron_te, "te_checkpoint", precision.checkpoint)
    (layer,) = chunk.decoder.layers
    layer.mlp.register_forward_pre_hook(lambda *unused: seen.append(precision.fp8))
    row = TokenRow(np.arange(LENGTH + 1), np.array([LENGTH]), np.ones(LENGTH, dtype=np.bool_))
    call = PackedCall(pack([row], LENGTH, Config().mask_options()))
    hidden = torch.randn(LENGTH, 1, 128, generator=torch.Generator().manual_seed(1), requires_grad=True)
    chunk.config.fp8 = fp8
    with precision.entered() if fp8 else nullcontext():
        angles = torch.zeros(LENGTH, 1, 1, 32)
        output, _ = layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=call)
    assert seen == [bool(fp8)]
    output.square().sum().backward()
    assert seen == [bool(fp8)] * 2
    assert hidden.grad is not None
