"""An optimizer with its state in host memory trains and is saved like any other.

Megatron's HybridDeviceOptimizer offloads what is on CUDA alone. Here the weights' memory only says that it is there;
the copies to the host, the updates there, the copies back and all numbers are real, the streams are not.
"""

from collections.abc import Callable, Iterator
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megatron_ext.config.arguments import parse
from megatron_ext.engine import parallel, platform, transformer
from megatron_ext.engine.optimizer import unwrap
from megatron_ext.engine.optimizer_state import OptimizerState
from megatron_ext.engine.weights import saved_weights
from tests.engine.test_optimizer_state import VOCABULARY, built, one_step, states
from tests.one_process import one_process


class Pretended:
    """Says of all memory but what was copied to the host that it is on CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host: list[Tensor] = []  # kept, so that no address comes again
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: not self.on_host(x)), raising=False)
        monkeypatch.setattr(Tensor, "pin_memory", lambda x: self.copied(x))
        for name in ("clone", "float"):
            monkeypatch.setattr(Tensor, name, self._staying(getattr(Tensor, name)))
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())  # nothing to wait for: all is done as it is called
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def on_host(self, x: Tensor) -> bool:
        return any(x.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for tensor in self.host)

    def _staying(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Have a copy of what is on the host be there too."""
        return lambda x, **options: self.copied(make(x, **options)) if self.on_host(x) else make(x, **options)

    def copied(self, x: Tensor) -> Tensor:
        self.host.append(x)
        return x


FLAGS = f"--num-layers 2 --vocab-size {VOCABULARY} --seq-length 16 --bf16 --use-distributed-optimizer"
OFFLOAD = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction"


@pytest.fixture
def ranks() -> Iterator[parallel.Ranks]:
    with one_process():
        yield parallel.start(parse(FLAGS.split()).parallel, 2, platform.choose("cpu"), seed=1)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_offloading_trains_the_same(share: float, ranks: parallel.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps equal the distributed optimizer's without offloading: Adam differs by rounding in fp32 alone."""
    cpu = platform.choose("cpu")
    plain = built(parse(FLAGS.split()), ranks, cpu)
    for number in (1, 2, 3):
        one_step(*plain, number)
    wanted = states(plain[1], plain[0])
    Pretended(monkeypatch)
    monkeypatch.setattr(transformer, "broken", lambda *unused, **facts: ())
    config = parse(f"{FLAGS} {OFFLOAD} {share}".split())
    offloaded = built(config, ranks, cpu)
    (distributed,) = offloaded[1].chained_optimizers
    inner = distributed.optimizer
    assert isinstance(inner, HybridDeviceOptimizer)
    assert (inner.gpu_optimizer is None) == (share == 1)
    assert inner.cpu_optimizers
    for number in (1, 2, 3):
        one_step(*offloaded, number)
    for offloaded_value, plain_value in zip(states(offloaded[1], offloaded[0]), wanted, strict=True):
        torch.testing.assert_close(offloaded_value, plain_value, rtol=1e-5, atol=1e-7)
    for offloaded_value, plain_value in zip(offloaded[0][0].parameters(), plain[0][0].parameters(), strict=True):
        torch.testing.assert_close(offloaded_value, plain_value, rtol=2**-7, atol=1e-6)  # rounded to bf16
    counters = OptimizerState(offloaded[1], bf16=True).counters()
    assert counters == {"step": 3}
    (chunk,) = unwrap(offloaded[0])
    weights = list(saved_weights([chunk], config.model, ranks))
    names = {run.name.split(".")[2] for run in OptimizerState(offloaded[1], bf16=True).shards(weights)}
    assert names == {"exp_avg", "exp_avg_sq", "fp32_param"}
