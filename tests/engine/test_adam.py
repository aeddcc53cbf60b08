"""FusedAdam takes the steps of torch's AdamW."""

import pytest
import torch

from megatron_ext.engine.adam import FusedAdam


def parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((7, 5), (5,), (3,))]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fused_adam_equals_torch_adamw(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Both implementations are tested: torch has the kernel that is used on CUDA for a CPU too."""
    if kind == "cuda":
        monkeypatch.setattr(FusedAdam, "_update", FusedAdam._update_on_cuda)
    fused_parameters, torch_parameters = parameters(0), parameters(0)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}
    fused_adam = FusedAdam(groups(fused_parameters), **settings)
    torch_adamw = torch.optim.AdamW(groups(torch_parameters), **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        for a, b in zip(fused_parameters, torch_parameters, strict=True):
            a.grad = torch.randn(a.shape, generator=generator) * 10.0 ** (-step)
            b.grad = a.grad.clone()
        for optimizer in (fused_adam, torch_adamw):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (step + 1)
            optimizer.step()
    before = [param.detach().clone() for param in fused_parameters]
    fused_parameters[0].grad = fused_parameters[1].grad = None
    fused_adam.step()
    assert torch.equal(fused_parameters[0], before[0])  # no gradient, no step: the count is kept for each group
    assert [group["step"] for group in fused_adam.param_groups] == [10, 11]
    fused_parameters[2].data.copy_(before[2])
    for a, b, start in zip(fused_parameters, torch_parameters, parameters(0), strict=True):
        assert ((a - b).abs().max() / b.abs().max()).item() <= 1e-6
        assert (a - start).abs().min() > 1e-3
        assert set(fused_adam.state[a]) == {"exp_avg", "exp_avg_sq"}
