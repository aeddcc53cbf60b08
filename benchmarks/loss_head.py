"""Compare the loss head with its products alone, torch's linear_cross_entropy, transformers' loss and Liger's.

    python benchmarks/loss_head.py parity    errors of the losses' sum and of both gradients, against float64
    python benchmarks/loss_head.py speed     forward and backward, by vocabulary and block of tokens
    python benchmarks/loss_head.py ... --tokens N --width N --vocabularies N ... --blocks N ... --dtype bf16|fp32

Without CUDA the default sizes are small, and times are processor time. "products" are the four matrix products that the
head requires (logits, the recomputed logits, the gradients of the hidden states and of the matrix), with the same
operands, results and blocks: `over_products` divides by their time. `extra_bytes` is the peak allocation beyond the
arguments and their gradients.

The goal for a vocabulary of 128,256: at most 1.15 of the products' time, and 1 GiB.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from clock import CUDA, DEVICE, timed
from record import Records, parser_of
from torch import Tensor

from megatron_ext.loss import VocabularyShard, add_product, cross_entropy, operand, product_into

GOAL_TIME = 1.15
GOAL_BYTES = 2**30
GOAL_VOCABULARY = 128256
OURS = ("plain", "kernels")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Problem:
    """The arguments of a head; hidden and weight are leaves."""

    hidden: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    labels: Tensor  # int64 [T]
    block: int  # tokens
    weight_grad: Tensor  # float32 [V, D], to which our head adds the weight's gradient, as in training

    def grads(self) -> list[Tensor]:
        """Return the gradients of hidden and weight, from our head or from autograd."""
        assert self.hidden.grad is not None
        return [self.hidden.grad, self.weight_grad if self.weight.grad is None else self.weight.grad]

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None
        self.weight_grad.zero_()


def drawn(tokens: int, width: int, vocabulary: int, block: int, dtype: torch.dtype) -> Problem:
    """Return a random problem on the device; its logits have a standard deviation of about 2."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=DEVICE, dtype=dtype)
    weight = torch.randn(vocabulary, width, generator=generator, device=DEVICE, dtype=dtype).mul_(2 * width**-0.5)
    labels = torch.randint(vocabulary, (tokens,), generator=generator, device=DEVICE)
    weight_grad = torch.zeros(weight.shape, device=DEVICE)
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), labels, block, weight_grad)


def products(problem: Problem) -> Tensor:
    """Run only the matrix products of the head; a block of ones replaces its logits' gradient."""
    hidden = problem.hidden.detach()
    weight = operand(problem.weight.detach())
    problem.hidden.grad = torch.empty_like(problem.hidden)
    rows = min(problem.block, len(hidden))
    logits = torch.empty(rows, len(weight), device=DEVICE)
    grad = torch.ones(rows, len(weight), device=DEVICE, dtype=weight.dtype)
    for backward in (False, True):
        for start in range(0, len(hidden), problem.block):
            part = operand(hidden[start : start + problem.block])
            product_into(logits[: len(part)], part, weight.T)
            if backward:
                product_into(problem.hidden.grad[start : start + problem.block], grad[: len(part)], weight)
                add_product(problem.weight_grad, grad[: len(part)].T, part)
    return logits[0, 0]


def ours(problem: Problem, fused: bool) -> Tensor:
    """Return the trainer's loss, with or without its kernels."""
    shard = VocabularyShard(0, len(problem.weight))
    arguments = (problem.hidden, problem.weight, problem.labels, shard, problem.block)
    return cross_entropy(*arguments, weight_grad_vD=problem.weight_grad, fused=fused).cross_entropy_t.sum()


def torch_blocked(problem: Problem, dtype: torch.dtype) -> Tensor:
    """Return torch's linear_cross_entropy, which never materializes all logits; it sums in `dtype`."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=problem.block, acc_policy="accurate", acc_dtype=dtype)
    return F.linear_cross_entropy(problem.hidden, problem.weight, problem.labels, reduction="sum", options=options)


def whole(problem: Problem) -> Tensor:
    """Return plain torch's loss, with all logits."""
    return F.cross_entropy(problem.hidden @ problem.weight.T, problem.labels, reduction="sum")


def transformers(problem: Problem) -> Tensor:
    """Return the loss of transformers' LlamaForCausalLM: all logits, in float32."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = (problem.hidden @ problem.weight.T)[None]
    labels = problem.labels
    divisor = torch.tensor(1.0, device=DEVICE)
    return ForCausalLMLoss(logits, labels[None], len(problem.weight), divisor, shift_labels=labels)


def liger(problem: Problem) -> Tensor:
    """Return Liger's fused linear cross entropy, which chooses its blocks itself."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    arguments = (problem.hidden, problem.weight, problem.labels)
    loss = liger_fused_linear_cross_entropy(*arguments, reduction="sum", accum_dtype=torch.float32)
    return loss[0] if isinstance(loss, tuple) else loss


Head = Callable[[Problem], Tensor]


def backward(head: Head, problem: Problem) -> Tensor:
    """Return a head's loss after its backward pass."""
    loss = head(problem)
    loss.backward()
    return loss


HEADS: dict[str, Head] = {
    "plain": partial(ours, fused=False),
    **({"kernels": partial(ours, fused=True)} if CUDA else {}),  # elsewhere tests/test_loss_kernels.py runs them
    "torch linear_cross_entropy": partial(torch_blocked, dtype=torch.float32),
    "the same, sums in bf16": partial(torch_blocked, dtype=torch.bfloat16),
    "transformers": transformers,
    "liger": liger,
}


def parity(sizes: argparse.Namespace, records: Records) -> None:
    """Record each head's errors over the largest exact value; ours may have twice the error of whole logits."""
    tokens = sizes.tokens or (512 if CUDA else 96)
    width = sizes.width or (4096 if CUDA else 64)
    vocabulary = (sizes.vocabularies or [GOAL_VOCABULARY if CUDA else 500])[0]
    problem = drawn(tokens, width, vocabulary, tokens // 3, DTYPES[sizes.dtype])
    hidden, weight = (x.detach().double().requires_grad_() for x in (problem.hidden, problem.weight))
    total = F.cross_entropy(hidden @ weight.T, problem.labels, reduction="sum")
    total.backward()
    exact = [x.detach() for x in (total, hidden.grad, weight.grad) if x is not None]
    allowed: list[float] = []

    def errors(name: str, head: Head) -> dict[str, object]:
        problem.clear()
        actual = [backward(head, problem).detach(), *problem.grads()]
        largest_errors = [
            ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(actual, exact, strict=True)
        ]
        if not allowed:
            allowed.extend(2 * error + 1e-6 for error in largest_errors)
        facts: dict[str, object] = dict(
            zip(("loss_error", "hidden_error", "weight_error"), largest_errors, strict=True)
        )
        if name in OURS:
            facts["ok"] = all(error <= most for error, most in zip(largest_errors, allowed, strict=True))
        return facts

    for name, head in {"whole logits": whole, **HEADS}.items():
        facts = {"step": "parity", "head": name, "tokens": tokens, "vocabulary": vocabulary}
        records.measure(partial(errors, name, head), required=name in OURS, **facts)


def speed(sizes: argparse.Namespace, records: Records) -> None:
    """Record the time and memory of each vocabulary, block and head."""
    tokens = sizes.tokens or (131072 if CUDA else 512)
    width = sizes.width or (4096 if CUDA else 64)
    blocks = sizes.blocks or ([1024, 2048, 4096, 8192] if CUDA else [64, 128])
    for vocabulary in sizes.vocabularies or ([32000, GOAL_VOCABULARY] if CUDA else [500, 2000]):
        for block in blocks:
            problem = drawn(tokens, width, vocabulary, block, DTYPES[sizes.dtype])
            facts = {"step": "speed", "tokens": tokens, "width": width, "vocabulary": vocabulary, "dtype": sizes.dtype}
            products_s = seconds(partial(products, problem), problem)
            records.add(**facts, head="products", block=block, milliseconds=products_s * 1e3)
            for name, head in HEADS.items():
                if name in ("liger", "transformers") and block != blocks[0]:  # they have no such block
                    continue
                work = partial(figures, name, head, problem, products_s)
                records.measure(work, required=False, **facts, head=name, block=block)


def figures(name: str, head: Head, problem: Problem, products_s: float) -> dict[str, object]:
    """Return a head's time, also over the products', its memory, and whether it is within the goal."""
    work = partial(backward, head, problem)
    seconds_taken = seconds(work, problem)
    extra = extra_bytes(work, problem)
    vocabulary, width = problem.weight.shape
    over = seconds_taken / products_s
    flops = 8 * len(problem.hidden) * width * vocabulary
    facts = {
        "milliseconds": seconds_taken * 1e3,
        "over_products": over,
        "extra_bytes": extra,
        "tflops": flops / seconds_taken / 1e12,
    }
    if name == "kernels" and vocabulary == GOAL_VOCABULARY:
        facts["within_goal"] = over <= GOAL_TIME and extra <= GOAL_BYTES
    return facts


def seconds(work: Callable[[], object], problem: Problem, repeats: int = 3) -> float:
    """Return the median time of a forward and backward pass."""
    times: list[float] = []
    for _ in range(repeats + 1):
        problem.clear()
        with timed(times):
            work()
    return statistics.median(times[1:])  # the first call compiles


def extra_bytes(work: Callable[[], object], problem: Problem) -> int:
    """Return the peak allocation of one pass in bytes, minus the gradients that it leaves."""
    problem.clear()
    if CUDA:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        most = torch.cuda.max_memory_allocated() - before
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            work()
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        most = max(itertools.accumulate(event.nbytes() for event in events))
    gradients = [grad for grad in (problem.hidden.grad, problem.weight.grad) if grad is not None]
    return most - sum(grad.nbytes for grad in gradients)


def main() -> int:
    """Run the benchmark; return 1 if our head is wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("step", choices=("parity", "speed"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--vocabularies", type=int, nargs="+")
    parser.add_argument("--blocks", type=int, nargs="+")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    options = parser.parse_args()
    records = Records("correct" if options.step == "parity" else "loss_head", options.output)
    (parity if options.step == "parity" else speed)(options, records)
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
