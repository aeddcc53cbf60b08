"""Rehearses a request, or computes it for real, with torch's composed attention and norm.

    python same_kernels.py REQUEST FILE     JSON, and the file for the result

CPU and CUDA have attention kernels of their own that keep other things, and CUDA a norm, a SwiGLU and a loss head: here
both compose them of the same operators. What a rehearsal states of the routing of experts is forced on a real router,
and its ranks, which then have as many tokens as each other, gather them as NCCL does.
"""

import functools
import json
import sys
from typing import Any

from megatron_ext.rehearsal.process import Request


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def main(request_json: str, result_file: str) -> None:
    request = Request(**json.loads(request_json))
    if request.fake:
        from megatron_ext.rehearsal.process import load_mock

        load_mock()
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron_ext import loss
    from megatron_ext.config.arguments import parse
    from megatron_ext.engine import compat, model, transformer
    from megatron_ext.rehearsal.process import run

    transformer.find_spec = lambda package: None  # type: ignore[assignment, misc]
    loss.operand = torch.Tensor.float  # type: ignore[assignment]
    torch.nn.functional.rms_norm = rms_norm
    model.cross_entropy = functools.partial(model.cross_entropy, fused=False)
    options = parse(request.argv).model
    if not request.fake and options.num_experts is not None:
        from megatron_ext.rehearsal.rank import in_turn

        compat.uneven_gather, compat.uneven_reduce_scatter = compat._gather, compat._reduce_scatter
        compat.observe_routing(lambda chosen_tE: chosen_tE.copy_(in_turn(chosen_tE, options.moe_router_topk)))
    with sdpa_kernel(SDPBackend.MATH):
        run(request, result_file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
