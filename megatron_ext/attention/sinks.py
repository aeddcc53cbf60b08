"""Attention sinks as in gpt-oss: each softmax has one more entry, whose logit is learned, one for each query head.

With L the log-sum-exp of the scores of a query and s the sink of its head,

    L' = log(exp(L) + exp(s))        out' = out exp(L - L')

The sink acts as one more key with value 0, so the probabilities of the other keys are p' = p exp(L - L'). A flash
backward gets the gradient g of its output and computes, from the output and the log-sum-exp that it is given,

    delta = g . out        p = exp(score - L)        gradient of a score = p (g . value - delta)

Given out' and L', it therefore returns the exact gradients of queries, keys and values with a sink, including the part
through L, which kernels do not differentiate. The gradient of s is -sum over queries of exp(s - L') delta'.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# (query [t, N, H], key [u, G, H], value [u, G, H]) -> out [t, N, H], the log-sum-exp of the scores float32 [N, t]
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# (gradient of out, query, key, value, out, log-sum-exp) -> gradients of query, key and value
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

_ELEMENTS = 2**24  # converted to float32 at a time: 64 MiB


def attend_with_sink(
    query_tNH: Tensor, key_uGH: Tensor, value_uGH: Tensor, sink_N: Tensor, forward: Forward, backward: Backward
) -> Tensor:
    """Return the attention output with a sink, [t, N, H], from a kernel's forward and backward without one."""
    out: Tensor = _WithSink.apply(query_tNH, key_uGH, value_uGH, sink_N, forward, backward)
    return out


class _WithSink(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink_N: Tensor, forward: Forward, backward: Backward
    ) -> Tensor:
        out, lse_Nt = forward(query, key, value)
        assert lse_Nt.shape == (query.shape[1], query.shape[0]), lse_Nt.shape
        whole_Nt = torch.logaddexp(lse_Nt, sink_N.float()[:, None])
        factor_tN = (lse_Nt - whole_Nt).exp().T
        out.mul_(factor_tN[..., None])
        ctx.save_for_backward(query, key, value, sink_N, out, whole_Nt)
        ctx.backward_of_kernel = backward
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out_grad,) = grads
        query, key, value, sink_N, out, whole_Nt = ctx.saved_tensors
        rows = max(1, _ELEMENTS // out[0].numel())
        parts = zip(out_grad.split(rows), out.split(rows), strict=True)
        delta_tN = torch.cat([torch.linalg.vecdot(grad.float(), part.float()) for grad, part in parts])
        sink_probability_Nt = (sink_N.float()[:, None] - whole_Nt).exp()
        sink_grad_N = -(sink_probability_Nt * delta_tN.T).sum(dim=1)
        gradients = ctx.backward_of_kernel(out_grad, query, key, value, out, whole_Nt)
        return (*gradients, sink_grad_N.to(sink_N.dtype), None, None)
