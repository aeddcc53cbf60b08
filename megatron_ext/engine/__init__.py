"""The only package that imports Megatron-Core."""

import warnings

# imported before Megatron imports Transformer Engine, because it sets how that chooses its attention
from megatron_ext.attention import te_thd as _te_thd  # noqa: F401

# Ignore warnings that Megatron-Core and torch emit in every process; the run's log reports what is used.
for _text in (
    r"`torch\.distributed\.\w+` is deprecated",  # torch 2.13, about calls in Megatron-Core 0.16
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
):
    warnings.filterwarnings("ignore", message=_text)
