"""The loss head's Triton kernels against float64 and the plain path: in Triton's interpreter, or on a GPU (ON_GPU=1).

Legend: b tokens of a block, v vocabulary entries of one tensor-parallel rank, k kinds of statistics.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext import loss_kernels
from megatron_ext.loss import VocabularyShard, cross_entropy
from tests.conftest import ON_GPU
from tests.launcher import ROOT, call
from tests.test_loss import Z_LOSS, assert_all_close, problem, whole

DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.gpu
NEVER = -torch.inf


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 logits: the loops go round, and the last chunk is a part of one."""
    monkeypatch.setattr(loss_kernels, "CHUNK", 16)


def statistics(logits: Tensor, labels: Tensor, first: int, entries: int) -> Tensor:
    """m, s, l[label] and u [4, b] of float64 logits, by their definitions."""
    real = logits.double()[:, :entries]
    highest = real.max(dim=1).values
    exponentials = (real - highest[:, None]).exp()
    moments = torch.where(exponentials > 0, exponentials * (real - highest[:, None]), 0.0)
    local = labels - first
    here = (local >= 0) & (local < entries)
    label = torch.where(here, real.gather(1, local.clamp(0, entries - 1)[:, None])[:, 0], 0.0)
    return torch.stack([highest, exponentials.sum(1), label, moments.sum(1)])


def drawn(tokens: int, columns: int, scale: float = 3.0) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(columns)) * scale


# columns, entries that count, first token id, factor of the logits
SHARDS = {
    "one chunk": (16, 16, 0, 3.0),
    "less than a chunk": (5, 5, 0, 3.0),
    "a part of a chunk left over": (53, 53, 0, 3.0),
    "padding": (64, 41, 0, 3.0),
    "padding from a chunk's border": (64, 48, 0, 3.0),
    "one entry": (40, 1, 0, 3.0),
    "a later shard": (40, 40, 80, 3.0),
    "a later shard with padding": (40, 17, 80, 3.0),
    "large logits": (50, 50, 0, 1e5),
    "huge logits": (50, 50, 0, 1e30),
    "equal logits": (50, 50, 0, 0.0),
}


@pytest.mark.parametrize("case", SHARDS)
@pytest.mark.parametrize("kinds", [3, 4])
def test_statistics_equal_float64(case: str, kinds: int) -> None:
    columns, entries, first, scale = SHARDS[case]
    logits = drawn(7, columns, scale)
    logits[:, entries:] = torch.nan  # padding is not read
    labels = torch.tensor([first, first + entries - 1, first + entries // 2, 0, first, first - 1, first + columns])
    actual = torch.full((kinds, 9), 7.0).to(DEVICE)
    loss_kernels.softmax_statistics(logits.to(DEVICE), labels.to(DEVICE), actual[:, 1:8], first, entries)
    torch.testing.assert_close(
        actual[:, 1:8].cpu().double(), statistics(logits, labels, first, entries)[:kinds], rtol=2e-6, atol=2e-6
    )
    assert (actual[:, [0, 8]] == 7).all()  # nothing beside the block's tokens


def test_statistics_of_infinities_of_nan_and_of_padding_alone() -> None:
    logits = drawn(3, 50)
    logits[0, :40], logits[1, 20:], logits[2, ::2] = NEVER, NEVER, NEVER
    actual = torch.empty(4, 3, device=DEVICE)
    labels = torch.tensor([45, 3, 4])
    loss_kernels.softmax_statistics(logits.to(DEVICE), labels.to(DEVICE), actual, 0, 50)
    wanted = statistics(logits, labels, 0, 50)
    assert wanted[2, 2] == NEVER
    torch.testing.assert_close(actual.cpu().double(), wanted, rtol=2e-6, atol=2e-6)
    logits[1, 3] = torch.nan
    loss_kernels.softmax_statistics(logits.to(DEVICE), labels.to(DEVICE), actual, 0, 50)
    assert actual[1].isnan().tolist() == [False, True, False]
    loss_kernels.softmax_statistics(logits.to(DEVICE), labels.to(DEVICE), actual, 80, 0)
    assert actual[1:].cpu().tolist() == [[0.0] * 3] * 3
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in SHARDS if case != "equal logits"])
def test_gradient_equals_float64(case: str, dtype: torch.dtype) -> None:
    columns, entries, first, scale = SHARDS[case]
    logits = drawn(6, columns, scale)
    logits[:, entries:] = torch.nan
    labels = torch.tensor([first, first + entries - 1, first + entries // 2, first, first - 1, first + columns])
    highest, sums, *_ = statistics(logits, labels, first, entries)
    loss_grad = torch.linspace(-1, 1, 6)
    scales = torch.linspace(2, 3, 6) / sums.float()
    wanted = torch.zeros(6, columns, dtype=torch.float64)
    wanted[:, :entries] = (logits.double()[:, :entries] - highest[:, None]).exp() * scales.double()[:, None]
    for row in range(4):
        wanted[row, labels[row] - first] -= loss_grad[row]
    block = logits.to(DEVICE)
    token_inputs = [x.to(DEVICE) for x in (labels, highest.float(), scales, loss_grad)]
    loss_kernels.softmax_gradient(block, *token_inputs, first, entries, dtype)
    actual = loss_kernels.in_place_of(block, dtype)
    assert (actual.shape, actual.dtype, actual.stride(1)) == (
        wanted.shape,
        dtype,
        1,
    )  # a factor of a product, not copied
    assert [row.data_ptr() for row in actual] == [row.data_ptr() for row in block]
    # half a unit in bf16's last of 8 places; the interpreter cuts off instead of rounding: a whole one
    narrow = 0 if dtype == torch.float32 else 2.0 ** (-8 if DEVICE == "cuda" else -7)
    torch.testing.assert_close(actual.cpu().double(), wanted, rtol=narrow + 2e-6, atol=1e-6)
    assert not actual[:, entries:].any()


def losses_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, grad: Tensor, shard: VocabularyShard, block: int, fused: bool
) -> tuple[Tensor, ...]:
    hidden, weight = (x.clone().to(DEVICE).requires_grad_() for x in (hidden, weight))
    labels, grad = (torch.stack([x, x], dim=1).to(DEVICE)[:, 0] for x in (labels, grad))  # not close together
    losses = cross_entropy(hidden, weight, labels, shard, block, entropy=True, fused=fused)
    (losses.cross_entropy_t + Z_LOSS * losses.log_partition_t.square()).backward(grad)
    parts = (losses.cross_entropy_t, hidden.grad, weight.grad, losses.log_partition_t, losses.entropy_t)
    return tuple(part.detach().cpu() for part in parts)


@pytest.mark.parametrize(("rows", "vocabulary", "block"), [(37, 37, 5), (48, 33, 8), (50, 7, 100), (16, 16, 1)])
def test_the_loss_equals_float64_and_the_plain_path(rows: int, vocabulary: int, block: int) -> None:
    inputs = problem(11, 8, rows, vocabulary)
    shard = VocabularyShard(0, vocabulary)
    fused, plain = (losses_and_gradients(*inputs, shard, block, way) for way in (True, False))
    assert_all_close(fused, whole(*inputs, vocabulary))
    for fused_part, plain_part in zip(fused, plain, strict=True):
        torch.testing.assert_close(fused_part, plain_part, rtol=1e-5, atol=2e-6)
    inputs = inputs[0].bfloat16(), inputs[1].bfloat16(), *inputs[2:]
    fused, plain = (losses_and_gradients(*inputs, shard, block, way) for way in (True, False))
    for fused_part, plain_part in zip(fused, plain, strict=True):
        assert fused_part.dtype == plain_part.dtype
        rounding = 2e-2 if fused_part.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(fused_part.float(), plain_part.float(), rtol=rounding, atol=1e-3)


ROWS = 40
VOCABULARY = 27  # of 2 ranks, the second has 7 rows that are no padding


def _tensor_parallel_rank(rank: int) -> list[Tensor]:
    hidden, weight, labels, grad = problem(13, 8, ROWS, VOCABULARY)
    rows = ROWS // 2
    shard = VocabularyShard(rank * rows, VOCABULARY, dist.group.WORLD)
    weight_shard = weight[rank * rows : (rank + 1) * rows]
    losses, hidden_grad, weight_grad, *statistics = losses_and_gradients(
        hidden, weight_shard, labels, grad, shard, 5, fused=True
    )
    dist.all_reduce(hidden_grad)
    return [losses, hidden_grad, weight_grad, *statistics]


@pytest.mark.skipif(DEVICE == "cuda", reason="the two processes' group is gloo's, for tensors of a CPU")
def test_tensor_parallel_equals_one_process() -> None:
    first, second = call(_tensor_parallel_rank, 2)
    actual = (first[0], first[1], torch.cat([first[2], second[2]]), *first[3:])
    assert_all_close(actual, whole(*problem(13, 8, ROWS, VOCABULARY), VOCABULARY))


class Launches(TorchDispatchMode):
    """Names the operators that launch something: views and the making of tensors are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket is not torch.ops.aten.empty:
            self.seen.append(str(function))
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_a_block_takes_six_launches_and_no_result_is_rounded(entropy: bool) -> None:
    """Tensors without data ("meta") take CUDA's path: a read of their values, which on a GPU would wait, fails."""
    tokens = 100
    width = 16
    rows = 256

    def run(block: int) -> tuple[Counter[str], int]:
        hidden, weight = (
            torch.empty(size, width, dtype=torch.bfloat16, device="meta", requires_grad=True) for size in (tokens, rows)
        )
        labels = torch.empty(tokens, dtype=torch.int64, device="meta")
        total = torch.empty(rows, width, dtype=torch.float32, device="meta")
        with Launches() as launches, FlopCounterMode(display=False) as flops:
            how = {"entropy": entropy, "weight_grad_vD": total, "fused": True}
            losses = cross_entropy(hidden, weight, labels, VocabularyShard(0, 200), block, **how)  # type: ignore[arg-type]
            (losses.cross_entropy_t + losses.log_partition_t.square()).sum().backward()
        return Counter(launches.seen), flops.get_total_flops()

    (of_one_block, flops), (of_four_blocks, same_flops) = run(100), run(25)
    assert flops == same_flops == 4 * 2 * tokens * rows * width
    assert of_four_blocks - of_one_block == {
        "aten.mm.dtype_out": 2 * 3,  # the logits, in float32, forward and backward
        "megatron_ext.softmax_statistics.default": 3,
        "megatron_ext.softmax_gradient.default": 3,
        "aten.mm.out": 3,
        "megatron_ext.add_wide_product.default": 3,
    }


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from megatron_ext import loss_kernels as kernels

V = 128256
block = {"logits": "*fp32", "labels": "*i64", "row_stride": "i32", "first": "i32"}
gradient = block | {"gradient": "*bf16", "gradient_stride": "i32"}
gradient |= dict.fromkeys(("highest_of", "scales", "loss_grads"), "*fp32")
statistics = block | {"statistics": "*fp32", "statistics_stride": "i32"}
for kernel, types, constants in (
    (kernels._gradient_of_token, gradient, {"ENTRIES": V, "COLUMNS": V}),
    (kernels._statistics_of_token, statistics, {"ENTRIES": V, "WITH_ENTROPY": True}),
):
    constants |= {"CHUNK": kernels.CHUNK}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
    print(compiled.asm["ptx"], "=== next kernel", sep="\\n")
"""


def test_they_compile_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A barrier parts reads from writes, which the interpreter, whose threads run as one, would not miss."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    gradient, statistics, _ = done.stdout.split("=== next kernel")
    memory = re.findall(r"^\s*(?:@\S+ )?(ld\.global|st\.global|bar\.sync|\$L__BB|bra)", gradient, re.MULTILINE)
    loop = memory[memory.index("$L__BB") + 1 : memory.index("bra")]
    barrier = loop.index("bar.sync")
    assert loop.count("bar.sync") == 1
    assert set(loop[:barrier]) == {"ld.global"}
    assert set(loop[barrier + 1 :]) == {"st.global"}
    assert "cvt.rn.bf16" in gradient  # rounded to the nearest
    assert "ld.global" in statistics
