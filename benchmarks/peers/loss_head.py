"""Compare the loss head with transformers' and torch's: memory, time, error. python -m benchmarks.peers.loss_head

Hidden states of one row and an output matrix, forward and backward, fp32 or bf16. "extra" is the peak allocation beyond
the arguments and their gradients, by torch's profiler, which other work on the machine does not affect; "cpu s" is
processor time, the minimum over alternating rounds; errors are relative to float64.

    ours                    `cross_entropy` in blocks of tokens, logits recomputed in the backward pass
    torch in blocks         torch's linear_cross_entropy with the same block, summing in float32 (torch 2.13 and later)
    torch, sums in bf16     the same, with logits, softmax and sums of the gradients in the operands' dtype
    transformers            `ForCausalLMLoss` over whole logits, as LlamaForCausalLM computes its loss
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import loss_head as heads
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.peers.checkouts import heading, processor_seconds


def transformers_loss(problem: heads.Problem) -> Tensor:
    """Compute the loss as LlamaForCausalLM does: whole logits, in fp32."""
    logits = problem.hidden @ problem.weight.T
    loss: Tensor = ForCausalLMLoss(logits[None], problem.labels[None], len(problem.weight), shift_labels=problem.labels)
    loss.backward()
    return loss


def errors(head: Callable[[heads.Problem], Tensor], problem: heads.Problem) -> tuple[float, float]:
    """Return the errors of the loss and of the matrix's gradient, on the first block's tokens in two blocks."""
    labels = problem.labels[: problem.block]
    hidden = problem.hidden.detach()[: problem.block].requires_grad_()
    part = replace(problem, hidden=hidden, labels=labels, block=max(problem.block // 2, 1))
    part.clear()
    got = head(part).detach(), part.grads()[1]
    exact_hidden, exact_weight = (each.detach().double().requires_grad_() for each in (hidden, problem.weight))
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, labels, reduction="sum")
    exact.backward()
    assert exact_weight.grad is not None
    if head is transformers_loss:  # a mean
        got = got[0] * len(labels), got[1] * len(labels)
    pairs = zip(got, (exact.detach(), exact_weight.grad), strict=True)
    loss, weight = (((one.double() - other).abs().max() / other.abs().max()).item() for one, other in pairs)
    return loss, weight


def main() -> None:
    """Print a line for each vocabulary and head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--block", type=int, default=256, help="tokens whose logits exist at one time [256]")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen.dtype]
    print(heading("loss_head"))
    print(f"{chosen.tokens} tokens of width {chosen.width}, {chosen.dtype}, blocks of {chosen.block}")
    print(
        f"{'V':>8}  {'head':20}{'extra MiB':>10}{'cpu s':>8}   extra, s: over ours; error of loss, gradient", flush=True
    )
    for vocabulary in chosen.vocabularies:
        drawn = heads.drawn(chosen.tokens, chosen.width, vocabulary, chosen.block)
        hidden, weight = (each.detach().to(dtype).requires_grad_() for each in (drawn.hidden, drawn.weight))
        problem = heads.Problem(hidden, weight, drawn.labels, chosen.block, drawn.weight_grad)
        found: dict[str, Callable[[heads.Problem], Tensor]] = {"ours": lambda problem: heads.ours(problem, fused=False)}
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            found["torch in blocks"] = heads.torch_blocked
            if dtype == torch.bfloat16:
                found["torch, sums in bf16"] = lambda problem: heads.torch_summing(problem, torch.bfloat16)
        found["transformers"] = transformers_loss
        extra = {name: heads.extra_bytes(head, problem) / 2**20 for name, head in found.items()}

        def work(head: Callable[[heads.Problem], Tensor], problem: heads.Problem = problem) -> None:
            problem.clear()
            head(problem)

        timed = {name: lambda head=head: work(head) for name, head in found.items()}
        seconds = processor_seconds(timed, chosen.rounds)
        for name, head in found.items():
            loss_error, gradient_error = errors(head, problem)
            print(
                f"{vocabulary:8}  {name:20}{extra[name]:10.1f}{seconds[name]:8.2f}   "
                f"{extra[name] / extra['ours']:.2f}, {seconds[name] / seconds['ours']:.2f}; "
                f"{loss_error:.0e}, {gradient_error:.0e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
