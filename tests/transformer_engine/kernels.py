"""The functions of `transformer_engine_torch` in plain torch.

Arguments have the names of the C++ declarations, which differ a little between versions; `**others` are those that
change nothing here. The assertions are what the kernels take for granted. A quantized tensor keeps its exact values
beside its empty data, and all products use them: what Transformer Engine's Python does with fp8 runs, its rounding does
not.
"""

from types import SimpleNamespace
from typing import Any

import torch
import transformer_engine_torch as tex  # the enums of this version
from torch import Tensor

from tests.transformer_engine.attention import Segments, attend, gradients
from tests.transformer_engine.cuda import MACHINE
from tests.transformer_engine.extension import calls

DTYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
}


def dtype_of(value: Any, default: torch.dtype) -> torch.dtype:
    """Return torch's dtype of a member of Transformer Engine's enum, or the default of None."""
    if value is None or isinstance(value, torch.dtype):
        return value or default
    return DTYPES[tex.DType(int(value)).name]


# Quantization


DATA = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")  # of the classes of quantized tensors


def exact(tensor: Any) -> Tensor:
    """Return the values of a tensor; a quantized one keeps them with itself and with its data, one of which lasts."""
    if not hasattr(tensor, "_quantizer"):
        return tensor  # type: ignore[no-any-return]
    holders = [tensor, *(getattr(tensor, name, None) for name in DATA)]
    return next(holder.exact for holder in holders if hasattr(holder, "exact"))  # type: ignore[no-any-return]


def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    values = exact(tensor)
    if output is None:
        output = quantizer.make_empty(values.shape, dtype=values.dtype, device=values.device)
    kept = values.detach().clone()
    for holder in (output, *(getattr(output, name, None) for name in DATA)):
        if holder is not None:
            holder.exact = kept
    if getattr(quantizer, "amax", None) is not None:
        quantizer.amax.copy_(values.abs().max())
    return output


def dequantize(input: Any, otype: Any) -> Tensor:
    return exact(input).to(dtype_of(otype, input.dtype))


def split_quantize(tensor: Tensor, split_sections: list[int], quantizer_list: list[Any], **unused: Any) -> list[Any]:
    return [quantize(*pair) for pair in zip(tensor.split(split_sections), quantizer_list, strict=True)]


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    return [input.reshape(-1, input.shape[-1]).sum(dim=0), quantize(input, quantizer)]


def compute_amax(input: Tensor, amax: Tensor) -> None:
    amax.copy_(input.abs().max())


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    metadata = quantizer.create_metadata(shape, dtype=dtype)
    strides = torch.empty(shape, device="meta").stride()
    return metadata["cls"].__tensor_unflatten__(quantizer.alloc_tensors(shape), metadata, shape, strides)


# Norms


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    zero_centered_gamma: bool,
    **unused: Any,
) -> list[Any]:
    assert input.dim() == 2
    assert input.is_contiguous()
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1) + eps)
    out = x * scale[:, None] * (weight.float() + zero_centered_gamma)
    return [_normed(out.to(dtype_of(otype, input.dtype)), ln_out, quantizer), None, scale]


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    zero_centered_gamma: bool,
    **unused: Any,
) -> list[Any]:
    assert input.dim() == 2
    assert input.is_contiguous()
    x = input.float()
    mean = x.mean(dim=-1)
    scale = torch.rsqrt(x.var(dim=-1, unbiased=False) + eps)
    out = (x - mean[:, None]) * scale[:, None] * (weight.float() + zero_centered_gamma)
    if bias is not None:
        out = out + bias.float()
    return [_normed(out.to(dtype_of(otype, input.dtype)), ln_out, quantizer), mean, scale]


def _normed(out: Tensor, target: Any, quantizer: Any) -> Any:
    if quantizer is not None:
        return quantize(out, quantizer, target)
    return out if target is None else target.copy_(out)


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    zero_centered_gamma: bool,
    add: Tensor | float = 0,
    **unused: Any,
) -> list[Tensor]:
    normed = x.float() * rsigma[:, None]
    scaled = dz.float() * (gamma.float() + zero_centered_gamma)
    dx = (scaled - normed * (scaled * normed).mean(dim=-1, keepdim=True)) * rsigma[:, None]
    return [dx.to(x.dtype) + add, (dz.float() * normed).sum(dim=0).to(gamma.dtype)]


rmsnorm_bwd_add = rmsnorm_bwd


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered_gamma: bool, **unused: Any
) -> list[Tensor]:
    scaled = dz.float() * (gamma.float() + zero_centered_gamma)
    mean = scaled.mean(dim=-1, keepdim=True) * rsigma[:, None]
    dx, dgamma = rmsnorm_bwd(dz, x - mu[:, None], rsigma, gamma, zero_centered_gamma)
    return [(dx - mean).to(x.dtype), dgamma, dz.float().sum(dim=0).to(gamma.dtype)]


# Matrix products


def _product(A: Tensor, transA: bool, B: Tensor, transB: bool) -> Tensor:
    """Return op(B) @ op(A), as cuBLAS computes it; the leading dimensions of B stay, unless it is transposed."""
    assert A.is_contiguous()
    assert B.is_contiguous()
    assert A.dtype == B.dtype
    a, b = (x.reshape(-1, x.shape[-1]) for x in (A, B))
    out = (b.T if transB else b) @ (a.T if transA else a)
    leading = out.shape[:1] if transB else B.shape[:-1]
    return out.reshape(*leading, -1)


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Tensor | None,
    quantizer: None,
    output_dtype: Any,
    bias: Tensor | None,
    gelu: bool,
    grad: bool,
    accumulate: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    **unused: Any,
) -> list[Tensor | None]:
    """Return the product, or D with it, and the gradient of the bias.

    With `comm_overlap` its buffer is gathered before, or the product is reduced over the ranks after it, unless
    `bulk_overlap` says that the buffer has other values. `extra_output` gets the result.
    """
    assert quantizer is None
    assert not gelu
    A, B = exact(A), exact(B)
    gathers = comm_type == tex.CommOverlapType.AG
    if comm_overlap is not None and gathers:
        comm_overlap.gather()
    out = _product(A, transA, B, transB)
    target = out.new_empty(out.shape, dtype=dtype_of(output_dtype, A.dtype)) if D is None else D
    assert target.dtype == dtype_of(output_dtype, target.dtype)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = B.reshape(-1, B.shape[-1]).float().sum(dim=0).to(target.dtype)
    elif bias is not None:
        out = out + bias
    written = _write(out, target, accumulate)
    if comm_overlap is not None and not gathers:
        comm_overlap.reduce_scatter(None if bulk_overlap else written)
    if comm_overlap is not None and extra_output is not None:
        extra_output.copy_(comm_overlap.get_buffer(not gathers, extra_output.shape))
    return [written, bias_grad, None, extra_output]


def _write(out: Tensor, target: Tensor, accumulate: bool) -> Tensor:
    assert target.shape == out.shape
    return target.add_(out) if accumulate else target.copy_(out)


# Communication that overlaps with products


class CommOverlapHelper:
    """The processes that share buffers."""

    def __init__(self, world: Any, domain: Any = None) -> None:
        self.domain = world if domain is None else domain  # without one, they are all on one machine


class CommOverlap:
    """A buffer that ranks gather into and reduce from, [tokens of all ranks, hidden size]; here nothing overlaps."""

    def __init__(
        self, shape: list[int], dtype: torch.dtype, helper: CommOverlapHelper, size: int, *unused: Any, **more: Any
    ) -> None:
        self.group = helper.domain
        self.buffer = torch.zeros(shape, dtype=dtype)
        self.part = self.buffer.chunk(size)[self.group.rank()]  # this rank's

    def copy_into_buffer(self, input: Tensor, local_chunk: bool = False) -> None:
        target = self.part if local_chunk else self.buffer
        assert input.numel() == target.numel()
        target.copy_(input.view_as(target))

    def get_buffer(self, local_chunk: bool = False, shape: list[int] | None = None) -> Tensor:
        values = self.part if local_chunk else self.buffer
        return values if shape is None else values.view(shape)

    def gather(self) -> None:
        calls["gather"] += 1
        torch.distributed.all_gather_into_tensor(self.buffer, self.part.clone(), group=self.group)

    def reduce_scatter(self, values: Tensor | None) -> None:
        """Add up the ranks' values, or the buffer as it is, into each rank's part."""
        calls["reduce_scatter"] += 1
        if values is not None:
            self.copy_into_buffer(values)
        summed = torch.empty_like(self.part)
        torch.distributed.reduce_scatter_tensor(summed, self.buffer.clone(), group=self.group)
        self.part.copy_(summed)

    def is_fp8_ubuf(self) -> bool:
        return False

    is_atomic_gemm = is_p2p_overlap = with_cublasmp = is_fp8_ubuf


CommOverlapP2P = CommOverlap


def device_supports_multicast(**unused: Any) -> bool:
    return True


def get_stream_priority_range(**unused: Any) -> tuple[int, int]:
    return 0, 0


def ubuf_built_with_mpi() -> bool:
    return False


def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    D: list[Tensor],
    D_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    single_output: bool,
    grad: bool,
    accumulate: bool,
    **unused: Any,
) -> list[Tensor]:
    """Write the product of each pair into D, whose only tensor has the rows of all pairs if `single_output`."""
    assert all(isinstance(rows, int) for rows in m_splits)
    targets = D[0].split(m_splits) if single_output else D
    for a, b, target, expert_bias in zip(map(exact, A), map(exact, B), targets, bias, strict=True):
        out = _product(a, transa, b, transb)
        if expert_bias.numel() and grad:
            expert_bias.copy_(b.reshape(-1, b.shape[-1]).float().sum(dim=0))
        elif expert_bias.numel():
            out = out + expert_bias
        _write(out, target, accumulate)
    return bias


# Rotary angles


def fused_rope_forward(
    input: Tensor, freqs: Tensor, qkv_format: Any, interleaved: bool, cp_size: int, **unused: Any
) -> Tensor:
    """Rotate the first dimensions of each head in the half-split layout, x [t, 1, N, H] by angles [t, 1, 1, R]."""
    assert qkv_format == tex.NVTE_QKV_Format.NVTE_SBHD
    assert not interleaved
    assert cp_size == 1
    return _rotated(input, freqs, 1)


def fused_rope_backward(
    output_grads: Tensor, freqs: Tensor, qkv_format: Any, interleaved: bool, cp_size: int, **unused: Any
) -> Tensor:
    return _rotated(output_grads, freqs, -1)


def _rotated(x: Tensor, freqs: Tensor, sign: int) -> Tensor:
    assert freqs.dtype == torch.float32
    assert freqs.is_contiguous()
    assert x.shape[0] <= freqs.shape[0]
    half = freqs.shape[-1] // 2
    angles = freqs[: x.shape[0], ..., :half]
    cos = angles.cos()
    sin = sign * angles.sin()
    first, second, plain = x.float().tensor_split((half, 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, plain), dim=-1).to(x.dtype)


# Optimizer


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(**arguments: Any) -> None:
    multi_tensor_scale(**arguments)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor_python: bool = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor_python else torch.empty(0)


def multi_tensor_adam(
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    **unused: Any,
) -> None:
    """Update weights and moments, and the master weights of a fifth list; mode 1 is AdamW."""
    assert mode == 1
    assert bias_correction
    for gradient, weight, first, second, *masters in zip(*tensor_lists, strict=True):
        g = gradient.float()
        w = (*masters, weight)[0].float()
        first.copy_(beta1 * first.float() + (1 - beta1) * g)
        second.copy_(beta2 * second.float() + (1 - beta2) * g * g)
        size = (second.float() / (1 - beta2**step)).sqrt() + epsilon
        updated = w - lr * (first.float() / (1 - beta1**step) / size + weight_decay * w)
        for tensor in (weight, *masters):
            tensor.copy_(updated)


# Attention


def get_fused_attn_backend(fused_attn_params: Any = None, **arguments: Any) -> Any:
    """Return which kernel has these parameters: the conditions of fused_attn.cpp for THD on a Hopper."""
    parameters = SimpleNamespace(**arguments) if fused_attn_params is None else fused_attn_params
    dtype = dtype_of(parameters.q_dtype if hasattr(parameters, "q_dtype") else parameters.qkv_dtype, torch.float32)
    sizes = parameters.head_dim_qk, parameters.head_dim_v
    sm, cudnn = MACHINE.capability, MACHINE.cudnn
    bottom_right = parameters.attn_mask_type == tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    conditions = {
        "half precision": dtype in (torch.float16, torch.bfloat16),
        "thd": parameters.qkv_layout == tex.NVTE_QKV_Layout.NVTE_THD_THD_THD and sm >= (9, 0) and cudnn >= 90600,
        "head sizes": not any(size % 8 for size in sizes) and max(sizes) <= (256 if sm == (9, 0) else 128),
        "bottom right": not bottom_right or parameters.max_seqlen_q <= parameters.max_seqlen_kv,
        "sinks": parameters.softmax_type == tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX or cudnn >= 91301,
    }
    lacking = ", ".join(name for name, holds in conditions.items() if not holds)
    backends = tex.NVTE_Fused_Attn_Backend
    chosen = backends.NVTE_No_Backend if lacking else backends.NVTE_F16_arbitrary_seqlen
    return chosen if fused_attn_params is None else (chosen, lacking)


def fused_attn_fwd(
    Q: Tensor, K: Tensor, V: Tensor, SoftmaxOffset: Tensor | None, is_training: bool, **arguments: Any
) -> list[Tensor]:
    """Return the output, and what the backward pass needs: log-sum-exp, the generator's state, sinks."""
    assert arguments["p_dropout"] == 0
    assert arguments["Bias"] is arguments["s_quantizer"] is arguments["o_quantizer"] is None
    learned = arguments["softmax_type"] == tex.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    assert learned == (SoftmaxOffset is not None)
    assert not learned or (SoftmaxOffset.dtype == torch.float32 and SoftmaxOffset.shape == (1, Q.shape[1], 1, 1))
    _check_layout(Q, K, V)
    out, totals = attend(Q, K, V, SoftmaxOffset, _segments(**arguments))
    kept = [totals.T[..., None].contiguous(), torch.zeros(2, dtype=torch.int64)]
    return [out, *(kept if is_training else []), *([SoftmaxOffset] if is_training and learned else [])]


def fused_attn_bwd(
    Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, Aux_CTX_Tensors: list[Tensor], **arguments: Any
) -> list[Tensor | None]:
    learned = arguments["softmax_type"] == tex.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    sink = Aux_CTX_Tensors[-1] if learned else None
    _check_layout(Q, K, V, dO)
    dq, dk, dv, dsink = gradients((Q, K, V, sink), _segments(**arguments), dO)
    return [dq, dk, dv, None, dsink]


def _check_layout(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)


def _segments(
    attn_scale: float,
    attn_mask_type: Any,
    window_size: tuple[int, int],
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    bottom_right_diagonal: bool | None = None,
    **unused: Any,
) -> Segments:
    masks = tex.NVTE_Mask_Type
    causal = masks.NVTE_PADDING_CAUSAL_MASK, masks.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    assert attn_mask_type in causal
    assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
    starts_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    starts_k = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
    assert max(lengths_q) <= max_seqlen_q
    assert max(lengths_k) <= max_seqlen_kv
    if bottom_right_diagonal is None:
        bottom_right_diagonal = attn_mask_type == masks.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    return Segments(
        scale=attn_scale,
        starts_q=starts_q.tolist()[:-1],
        starts_k=starts_k.tolist()[:-1],
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        left=window_size[0],
        bottom_right=bottom_right_diagonal,
    )


# Answers


def get_cudnn_version() -> int:
    return MACHINE.cudnn  # type: ignore[no-any-return]


def get_cublasLt_version() -> int:  # noqa: N802
    return 130000


def get_num_cublas_streams() -> int:
    return 4


def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    return torch.cat((first_dims.new_zeros(1), first_dims.cumsum(0))) * logical_last_dim
