"""The only package that imports Megatron-Core."""

import logging
import re
import warnings

from megatron_ext.errors import UserError

SUPPORTED = ">=0.16.1,<0.20"  # as in pyproject.toml

# Ignore what Megatron-Core and torch say in every process; the run's log reports what is used.
for _text in (
    r"`torch\.distributed\.\w+` is deprecated",  # torch 2.13, about calls in Megatron-Core
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "MimoModelConfig is experimental",
):
    warnings.filterwarnings("ignore", message=_text)

# torch, about how Megatron's optimizers look for gradients
warnings.filterwarnings("ignore", message=r"The \.grad attribute", module=r"megatron\.core\.optimizer")

# Log messages about Megatron's own calls, and about a class that later versions replace.
_LOGGED = ("full_param_layout not provided", "GPTModel IS DEPRECATED")


def _is_wanted(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _LOGGED)


for _name in ("distributed.distributed_data_parallel", "models.gpt.gpt_model"):
    logging.getLogger(f"megatron.core.{_name}").addFilter(_is_wanted)


def check_version() -> None:
    """Raise UserError for another version of Megatron-Core, before a module misses one of its names."""
    from megatron.core import __version__ as version  # after the filters of its messages

    first, end, ours = (tuple(map(int, re.findall(r"\d+", text))) for text in (*SUPPORTED.split(","), version))
    if not first <= ours < end:
        raise UserError(f"megatron-core: got {version}, needs {SUPPORTED}; pip install 'megatron-core{SUPPORTED}'")


check_version()
