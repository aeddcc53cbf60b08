"""What the server of mocked.py imports, once for all rehearsals: the mock of CUDA before torch, then Megatron."""

import gc
import os

from megatron_ext.rehearsal.process import load_mock

load_mock()
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from megatron_ext.rehearsal import cuda_mock  # noqa: E402

cuda_mock.install()
cuda_mock.install = lambda: None
import megatron_ext.rehearsal.rank  # noqa: E402, F401

gc.freeze()
