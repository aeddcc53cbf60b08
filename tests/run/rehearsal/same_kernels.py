"""Rehearses a request, or computes it for real, with torch's composed attention and norm.

    python same_kernels.py REQUEST RESULT

CPU and CUDA have attention kernels of their own that keep other things, and CUDA a norm: here both compose them of the
same operators.
"""

from __future__ import annotations

import sys

from megatron_ext.run.rehearsal.request import Request

if __name__ == "__main__":
    request = Request.read(sys.argv[1])
    if request.fake:
        from megatron_ext.run.rehearsal import stand_in

        stand_in.load()
        from megatron_ext.run.rehearsal import pretence

        pretence.KERNELS = tuple(name for name in pretence.KERNELS if "norm" not in name)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron_ext.run.rehearsal.process import run

    with sdpa_kernel(SDPBackend.MATH):
        run(request, sys.argv[2])
