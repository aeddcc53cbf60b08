"""Inputs of layers in host memory: the same loss and gradients bit for bit, and buffers that are used again."""

import numpy as np
import pytest
import torch

from megatron_ext.batch import PackedBatch, pack
from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.engine.activations import HostBuffer, HostCopies
from tests.one_process import build_models, one_process

GEMMA = "--block gemma3 --local-window 4 --window-attn-skip-freq 2 --rotary-base-local 300"


@pytest.mark.parametrize(("layers", "group", "on_host"), [(4, 1, 3), (6, 2, 2), (1, 1, 0)])
@pytest.mark.parametrize("block", ["", GEMMA])
def test_training_is_the_same_bit_for_bit(layers, group, on_host, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches in flight, as in a pipeline, and two steps."""
    copied: list[HostBuffer] = []
    to_host = HostCopies.to_host

    def counted(self: HostCopies, x: torch.Tensor) -> tuple[HostBuffer, None]:
        copied.append(to_host(self, x)[0])
        return copied[-1], None

    monkeypatch.setattr(HostCopies, "to_host", counted)
    flags = f"--num-layers {layers} --vocab-size 64 --init-method-std 0.2 --seq-length 24 {block}"
    flags += f" --recompute-granularity full --recompute-num-layers {group}"
    plain = parse(flags.split())
    chance = np.random.default_rng(0)
    rows = [TokenRow(chance.integers(1, 64, 25), np.array([5, 23]), np.ones(24, dtype=np.bool_)) for _ in range(4)]
    batches = [pack([row], 24, plain.mask_options()) for row in rows]
    with one_process():
        models = build_models(plain, parse([*flags.split(), "--offload-layer-inputs"]))
        (_, expected), (losses, gradients) = results = [two_steps(model, batches) for model in models]
    assert results[0][0] == losses
    assert expected.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    assert len(copied) == 4 * on_host
    assert len({part.data_ptr() for buffer in copied for part in buffer.parts}) == 2 * 2 * on_host  # 24 x 128: 2 parts


def two_steps(model: torch.nn.Module, batches: list[PackedBatch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the sums of gradients of two steps of two micro-batches."""
    values = []
    for step in (batches[:2], batches[2:]):
        losses = [model(batch).cross_entropy_t.double().sum() for batch in step]
        for loss in losses:
            loss.backward()
        values += [loss.item() for loss in losses]
    return values, {name: weight.grad for name, weight in model.named_parameters()}
