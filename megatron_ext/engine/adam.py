"""AdamW where neither Transformer Engine nor Apex is installed, or without CUDA."""

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the state layout of Apex and Transformer Engine: the step count is kept per parameter group.

    torch's AdamW, Megatron's fallback, keeps one step per parameter, which Megatron's `init_state_fn` does not create
    when a state is loaded (KeyError 'step'). Remove when it does.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **options: Any) -> None:
        super().__init__(params, options)  # lr, betas, eps and weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one step of decoupled AdamW to every parameter that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            if params:
                group["step"] = group.get("step", 0) + 1
                if params[0].is_cuda:
                    self._update_on_cuda(params, group)
                else:
                    self._update(params, group)

    def _update(self, params: list[Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for param in params:
            first = self.state[param]["exp_avg"]
            second = self.state[param]["exp_avg_sq"]
            first.lerp_(param.grad, 1 - beta1)
            second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
            corrected = (second / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.addcdiv_(first, corrected, value=-group["lr"] / (1 - beta1 ** group["step"]))

    def _update_on_cuda(self, params: list[Any], group: dict[str, Any]) -> None:
        """Apply the same update with torch's fused AdamW kernel, in one pass over memory."""
        beta1, beta2 = group["betas"]
        step = torch.full((), float(group["step"]), device=params[0].device)
        torch._fused_adamw_(
            params,
            [param.grad for param in params],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
