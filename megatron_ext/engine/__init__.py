"""The only package that imports Megatron-Core."""

import warnings

# Ignore warnings that Megatron-Core and torch emit in every process; the run's log reports what is used.
for _text in (
    r"`torch\.distributed\.\w+` is deprecated",  # torch 2.13, about calls in Megatron-Core 0.16
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
):
    warnings.filterwarnings("ignore", message=_text)
