"""Rehearses a request, or computes it for real, with torch's composed attention and norm.

    python same_kernels.py REQUEST RESULT

CPU and CUDA have attention kernels of their own that keep other things, and CUDA a norm, a SwiGLU and a loss head: here
both compose them of the same operators.
"""

from __future__ import annotations

import functools
import sys

from megatron_ext.run.rehearsal.request import Request

if __name__ == "__main__":
    request = Request.read(sys.argv[1])
    if request.fake:
        from megatron_ext.run.rehearsal import stand_in

        stand_in.load()
        from megatron_ext.run.rehearsal import pretence

        pretence.KERNELS = tuple(name for name in pretence.KERNELS if "norm" not in name)
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron_ext import loss
    from megatron_ext.engine import fusions, model
    from megatron_ext.run.rehearsal.process import run

    fusions.find_spec = lambda package: None  # type: ignore[assignment, misc]
    loss.operand = torch.Tensor.float  # type: ignore[assignment]
    model.cross_entropy = functools.partial(model.cross_entropy, fused=False)
    with sdpa_kernel(SDPBackend.MATH):
        run(request, sys.argv[2])
