"""Which series of Megatron-Core need a patch of compat.py or platform.py: since the first, until before the second."""

import re

import megatron.core
import pytest

NEEDED = {
    "a name of the router": ("0.16", "0.17"),
    "the version of a missing Transformer Engine": ("0.16", "0.17"),
    "the default of recomputation for fp8": ("0.16", "0.20"),
    "copy_storage": ("0.17", "0.20"),
    "an extension for a layer that is not run": ("0.16", "0.20"),
    "norms": ("0.16", "0.20"),
    "FusedAdam": ("0.16", "0.20"),
    "kernels on a CPU": ("0.16", "0.20"),
    "rotate": ("0.16", "0.20"),
    "counts_on_host": ("0.16", "0.20"),
    "process_groups": ("0.16", "0.20"),
    # platform.PATCHES
    "current_device": ("0.16", "0.20"),
    "current_stream": ("0.19", "0.20"),
    "factories": ("0.16", "0.20"),
    "move_to_cuda": ("0.16", "0.20"),
    "type_names": ("0.16", "0.20"),
    "random_state": ("0.16", "0.20"),
}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def needed(patch: str) -> pytest.MarkDecorator:
    """Mark a test that Megatron-Core needs a patch: it must fail under a version that does not."""
    since, until = NEEDED[patch]
    here = numbers(since) <= numbers(megatron.core.__version__) < numbers(until)
    return pytest.mark.xfail(not here, reason=f"needed since {since} and until before {until}", strict=True)
