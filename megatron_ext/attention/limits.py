"""State what each backend cannot compute, beyond the limits that all of them share.

Each function returns the reason of a refusal, which follows the backend's name in a message, or None. Without a call
it checks what holds for every call of a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.torch_version import TorchVersion

from megatron_ext.attention import adapters
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.errors import installed_version

# FlashAttention 2 puts segments along the second or third axis of a CUDA grid, at most 65,535 blocks. Its backward has
# an fp32 buffer [rows, N, H rounded up]; rows are the queries and 128 more between segments. In torch it is indexed in
# int32, and before flash-attn 2.8.3.post2 the beginning of a segment is.
FA2_SEGMENTS = 65_535
FA2_NUMBERS = 2**31
FA2_GAP = 128
# FlashAttention 4's deterministic backward has int32 [segments, N, longest / 64], and up to three times that for keys.
FA4_SEMAPHORES = 2**27
# Before cuDNN 9.26 the backward of other sizes of value heads reads sinks' statistics of packed rows at wrong offsets.
CUDNN_SINKS = (64, 128, 256)


@dataclass(frozen=True)
class Heads:
    """The heads of attention calls."""

    size: int  # of a query and a key
    value_size: int
    sinks: bool = False
    queries: int = 8  # the number of query heads on a rank; a run knows it, and `groups`, from its first call on
    groups: int = 8  # the number of key heads

    def __str__(self) -> str:
        text = str(self.size)
        if self.size != self.value_size:
            text = f"({self.size}, {self.value_size})"
        if self.sinks:
            text += " with sinks"
        return text


Limits = Callable[[Heads, AttentionCall | None], str | None]


def capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU; without a GPU, as in a rehearsal, an H100's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability()
    return 9, 0


def sm(version: tuple[int, int] | None = None) -> str:
    """Return NVIDIA's name of a compute capability, by default the current GPU's: sm_90."""
    major, minor = version or capability()
    return f"sm_{major}{minor}"


def flash_attn_4(heads: Heads, call: AttentionCall | None) -> str | None:
    """Check FlashAttention 4, which has kernels for all calls on Hopper."""
    major, _ = capability()
    deterministic = torch.are_deterministic_algorithms_enabled()
    sizes = heads.size, heads.value_size
    if major == 12 and (heads.sinks or deterministic):
        return f"has no kernels for sinks or a deterministic backward on {sm()}; use auto"
    if max(sizes) > 128 and sizes not in _flash_attn_4_large(major, heads):
        return f"has no kernels for heads of {heads} on {sm()}; use auto"
    if call is None:
        return None
    if major in (10, 11) and sizes == (256, 256) and call.left_window is not None:
        return f"has no kernels for sliding windows with heads of 256 on {sm()}"
    semaphores = call.segments * heads.queries * -(-call.max_seqlens[0] // 64)
    if deterministic and semaphores > FA4_SEMAPHORES:
        return f"would keep more than {FA4_SEMAPHORES:,} numbers for its deterministic backward"
    return None


def _flash_attn_4_large(major: int, heads: Heads) -> list[tuple[int, int]]:
    """Return the sizes of key and value heads above 128 that FlashAttention 4 has kernels for."""
    if major == 9:
        return [(heads.size, heads.value_size)]
    if major == 12:
        return []
    if heads.sinks:
        return [(192, 128)]
    return [(192, 128), (256, 256)]


def flash_attn_4_reads(size: int, value_size: int) -> bool:
    """Return whether FlashAttention 4 reads values narrower than keys as they are; otherwise they are padded.

    Its backward for Blackwell stores the gradients of values in blocks of as many columns as the gradients of keys. If
    half a head of values is no multiple of such a block, the gradients of values are wrong.
    """
    if capability()[0] not in (10, 11) or size < 128:
        return True
    # half of a head, which is rounded up to a multiple of 16
    half_key = -(-size // 16) * 8
    half_value = -(-value_size // 16) * 8
    return half_value % math.gcd(32, half_key) == 0


def torch_varlen(heads: Heads, call: AttentionCall | None) -> str | None:
    if heads.sinks and not adapters.torch_varlen_differentiates_sinks():
        return f"cannot differentiate attention sinks in torch {torch.__version__}: its operator differs; use auto"
    return _flash_attn_2(heads, call, int32=True)


def flash_attn(heads: Heads, call: AttentionCall | None) -> str | None:
    return _flash_attn_2(heads, call, int32=TorchVersion(installed_version("flash-attn") or "0") < "2.8.3.post2")


def _flash_attn_2(heads: Heads, call: AttentionCall | None, int32: bool) -> str | None:
    if call is None:
        return None
    if call.segments > FA2_SEGMENTS:
        return f"takes at most {FA2_SEGMENTS:,} segments"
    size = max(heads.size, heads.value_size)
    unit = 32 if size <= 128 else 64
    width = -(-size // unit) * unit
    gaps = FA2_GAP * (call.segments - 1)
    rows = int(call.cu_seqlens_q[-1]) + gaps
    if int32 and rows * heads.queries * width > FA2_NUMBERS:
        return "has a buffer of more than 2^31 numbers, which it indexes in int32"
    return None


def te_thd(heads: Heads, call: AttentionCall | None) -> str | None:
    """Check Transformer Engine's choice for a call: cuDNN or FlashAttention, by the GPU, versions and variables."""
    if not torch.cuda.is_available():
        return None
    size = max(heads.size, heads.value_size)
    kernel, cudnn = adapters.te_thd_kernel(heads.queries, heads.groups, size, heads.sinks, call)
    platform = f"on {sm()} with cuDNN {'.'.join(map(str, cudnn))}"
    if kernel is None:
        return f"has no kernel for heads of {heads} {platform}; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why"
    if kernel.startswith("2."):
        return flash_attn(heads, call)
    if kernel == "cudnn" and capability()[0] == 9 and cudnn < (9, 18, 0):
        return f"may give NaN gradients {platform}; needs cuDNN 9.18"
    if heads.sinks and size not in CUDNN_SINKS and cudnn < (9, 26, 0):
        return f"gives wrong gradients for heads of {heads} {platform}; needs cuDNN 9.26"
    return None
