"""Attention sinks against a dense softmax with one more column (test_reference.py), output and all gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from megatron_ext.attention import adapters, reference
from megatron_ext.attention.backends import BACKENDS, suited
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.context_parallel.exchange import QKV
from tests.attention.kernels import assert_right, call_of, inputs_of
from tests.attention.test_reference import visible

SINKS = torch.tensor([-9.0, -0.5, 0.7, 6.0])
LENGTHS = [(3, 3), (2, 5), (1, 1), (18, 20)]


def flash(query: Tensor, key: Tensor, call: AttentionCall, scale: float) -> tuple[Tensor, Tensor]:
    """Scores [N, t, u] of the visible keys, and their log-sum-exp [N, t]."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (torch.einsum("tnh,unh->ntu", query, key) * scale).masked_fill(~visible(call), -torch.inf)
    return scores, scores.logsumexp(-1)


@pytest.mark.parametrize("left_window", [None, 2])
def test_torch_varlen(monkeypatch: pytest.MonkeyPatch, left_window: int | None) -> None:
    """Stand-ins for its kernels return the log-sum-exp, and compute from the output and the log-sum-exp given."""
    monkeypatch.setattr("megatron_ext.attention.sinks._ELEMENTS", 5 * 4 * 16)  # several blocks of queries
    call = call_of(LENGTHS, left_window)

    def attend(query, key, value, *borders, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]
        out = reference.attend(QKV(query, key, value), call, scale)
        return (out, flash(query, key, call, scale)[1]) if return_aux and return_aux.lse else out

    def backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng_state, scale, window):  # type: ignore[no-untyped-def]
        assert (is_causal, window) == (left_window is None, [-1 if left_window is None else left_window, 0])
        assert rng_state.dtype == torch.uint64
        groups = key.shape[1]
        p = (flash(query, key, call, scale)[0] - lse[..., None]).exp()
        values = value.repeat_interleave(query.shape[1] // groups, dim=1)
        delta = (grad * out).sum(-1).T[..., None]
        scores_grad = p * (torch.einsum("tnh,unh->ntu", grad, values) - delta) * scale
        keys = key.repeat_interleave(query.shape[1] // groups, dim=1)
        wide = torch.einsum("ntu,tnh->unh", scores_grad, query), torch.einsum("ntu,tnh->unh", p, grad)
        narrow = (x.unflatten(1, (groups, -1)).sum(2) for x in wide)
        return (torch.einsum("ntu,unh->tnh", scores_grad, keys), *narrow)

    adapters.varlen_parameters.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    assert BACKENDS["torch_varlen"].objection(torch.device("cuda"), torch.bfloat16, 64, sinks=True) is None
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    assert_right(adapters.torch_varlen, [*inputs_of(call), SINKS], call)
    adapters.varlen_parameters.cache_clear()


BORDERS = "Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k, bool is_causal, Tensor rng_state"
OF_2_13 = f"Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {BORDERS}, "
OF_2_13 += "float? scale=None, SymInt[]? window_size=None"


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        (OF_2_13, True),
        (f"{OF_2_13}, int backend=1", True),  # of 2.15
        (f"{OF_2_13}, *, int backend", False),
        (OF_2_13.removesuffix(", SymInt[]? window_size=None"), False),
        (OF_2_13.replace("Tensor key, Tensor value", "Tensor value, Tensor key"), False),
        (None, False),
    ],
)
def test_backends_without_the_gradient_are_refused(monkeypatch: pytest.MonkeyPatch, arguments, fits: bool) -> None:
    """Another backward of torch_varlen, which is private to torch, is refused; calls without sinks do not need it."""
    schema = torch._C.parse_schema(f"f({arguments}) -> Tensor") if arguments else None
    operator = SimpleNamespace(default=SimpleNamespace(_schema=schema)) if arguments else None
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", operator)
    cuda = torch.device("cuda")
    varlen_of_torch = BACKENDS["torch_varlen"]
    assert varlen_of_torch.objection(cuda, torch.bfloat16, 64) is None
    objection = varlen_of_torch.objection(cuda, torch.bfloat16, 64, sinks=True)
    assert objection is None if fits else "cannot differentiate attention sinks in torch" in objection
    assert suited("flash_attn", cuda, torch.bfloat16, 64) == ("flash_attn",)
    assert suited("flash_attn", cuda, torch.bfloat16, 64, sinks=True) == ()
    backends_with_the_gradient = ("flash_attn_4", "torch_varlen", "te_thd")
    assert suited("auto", cuda, torch.bfloat16, 64, sinks=True) == backends_with_the_gradient
