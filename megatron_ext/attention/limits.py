"""State what each backend cannot compute, beyond the limits that all of them share.

Each function returns the reason of a refusal, which follows the backend's name in a message, or None. Without a call
it checks what holds for every call of a run.
"""

import math
from dataclasses import dataclass

import torch
from torch.torch_version import TorchVersion

from megatron_ext.attention import adapters
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.errors import installed_version

# FlashAttention 2 puts segments along the second or third axis of a CUDA grid, at most 65,535 blocks. Its backward has
# an fp32 buffer [rows, N, H rounded up]; rows are the queries and 128 more between segments. Before flash-attn 2.8, and
# in torch, it is indexed in int32.
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
        sizes = self.size if self.size == self.value_size else (self.size, self.value_size)
        return f"{sizes} with sinks" if self.sinks else str(sizes)


def capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU; without a GPU, as in a rehearsal, that of an H100."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def flash_attn_4(heads: Heads, call: AttentionCall | None) -> str | None:
    """On Hopper it has kernels for all calls."""
    major, minor = capability()
    here = f"on sm_{major}{minor}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    sizes = heads.size, heads.value_size
    if major == 12 and (heads.sinks or deterministic):
        return f"has no kernels for sinks or a deterministic backward {here}; use auto"
    large = {9: [sizes], 12: []}.get(major, [(192, 128)] if heads.sinks else [(192, 128), (256, 256)])
    if max(sizes) > 128 and sizes not in large:
        return f"has no kernels for heads of {heads} {here}; use auto"
    if call is None:
        return None
    if major in (10, 11) and sizes == (256, 256) and call.left_window is not None:
        return f"has no kernels for sliding windows with heads of 256 {here}"
    if deterministic and call.segments * heads.queries * -(-call.max_seqlens[0] // 64) > FA4_SEMAPHORES:
        return f"would keep more than {FA4_SEMAPHORES:,} numbers for its deterministic backward"
    return None


def flash_attn_4_reads(size: int, value_size: int) -> bool:
    """Return whether it reads values narrower than keys as they are; otherwise they are padded.

    Its backward for Blackwell stores the gradients of values in blocks of as many columns as those of keys, although
    half a head of values may be no multiple of them: those gradients are wrong.
    """
    key, value = (-(-width // 16) * 8 for width in (size, value_size))  # half of a head, which is a multiple of 16
    return capability()[0] not in (10, 11) or size < 128 or value % math.gcd(32, key) == 0


def torch_varlen(heads: Heads, call: AttentionCall | None) -> str | None:
    if heads.sinks and not adapters.torch_varlen_differentiates_sinks():
        version = torch.__version__
        return f"cannot differentiate attention sinks in torch {version}, whose operator for it differs; use auto"
    return _flash_attn_2(heads, call, int32=True)


def flash_attn(heads: Heads, call: AttentionCall | None) -> str | None:
    return _flash_attn_2(heads, call, int32=TorchVersion(installed_version("flash-attn") or "0") < "2.8")


def _flash_attn_2(heads: Heads, call: AttentionCall | None, int32: bool) -> str | None:
    if call is None:
        return None
    if call.segments > FA2_SEGMENTS:
        return f"takes at most {FA2_SEGMENTS:,} segments"
    size = max(heads.size, heads.value_size)
    unit = 32 if size <= 128 else 64
    rows = int(call.cu_seqlens_q[-1]) + FA2_GAP * (call.segments - 1)
    if int32 and rows * heads.queries * -(-size // unit) * unit > FA2_NUMBERS:
        return "has a buffer of more than 2^31 numbers, which it indexes in int32"
    return None


def te_thd(heads: Heads, call: AttentionCall | None) -> str | None:
    """Transformer Engine chooses between cuDNN and FlashAttention for each call, by the GPU, versions and variables."""
    if not torch.cuda.is_available():
        return None
    size = max(heads.size, heads.value_size)
    kernel, cudnn = adapters.te_thd_kernel(heads.queries, heads.groups, size, heads.sinks, call)
    major, minor = capability()
    here = f"on sm_{major}{minor} with cuDNN {'.'.join(map(str, cudnn))}"
    if kernel is None:
        return f"has no kernel for heads of {heads} {here}; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why"
    if kernel.startswith("2."):
        return flash_attn(heads, call)
    if kernel == "cudnn" and major == 9 and cudnn < (9, 18, 0):
        return f"may give NaN gradients {here}; needs cuDNN 9.18"
    if heads.sinks and size not in CUDNN_SINKS and cudnn < (9, 26, 0):
        return f"gives wrong gradients for heads of {heads} {here}; needs cuDNN 9.26"
    return None
