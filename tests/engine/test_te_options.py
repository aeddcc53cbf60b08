"""Options of Transformer Engine: refused in a line where it is missing, and handed over where it is there."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.arguments import parse
from megatron_ext.engine import te_options
from megatron_ext.engine.model import transformer_config
from megatron_ext.engine.platform import Platform
from megatron_ext.errors import UserError

CPU = Platform(torch.device("cpu"), "gloo", transformer_engine=False)
WITH_TE = Platform(torch.device("cuda", 0), "nccl", transformer_engine=True)
FLAGS = {
    "tp_comm_overlap": "--tp-comm-overlap",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
}


def empty(name: str) -> ModuleType:
    """A module as if it had been found."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of Transformer Engine, and the packages above it."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, empty(package))
    module = empty(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", FLAGS)
def test_without_it_they_are_refused(name: str) -> None:
    config = parse(FLAGS[name].split())
    message = f"^{name}: got true, needs CUDA with Transformer Engine; install it or leave the option out$"
    with pytest.raises(UserError, match=message):
        te_options.check(config, CPU)
    te_options.check(config, WITH_TE)


def test_a_model_is_not_built_without_it() -> None:
    with pytest.raises(UserError, match=r"^fp8_format: got hybrid, needs CUDA with Transformer Engine; install it"):
        transformer_config(parse(["--fp8-format", "hybrid", "--bf16"]), CPU)


def test_its_layers_are_not_compiled() -> None:
    te_options.check(parse(["--compile"]), CPU)
    with pytest.raises(UserError, match=r"^compile: got true with Transformer Engine's layers, "):
        te_options.check(parse(["--compile"]), WITH_TE)


@pytest.mark.parametrize(("fp8", "mode"), [("", "NONE"), ("--fp8-format hybrid", "FP8")])
def test_the_overlaps_buffers_hold_a_micro_batch(monkeypatch: pytest.MonkeyPatch, fp8: str, mode: str) -> None:
    calls: list[Any] = []
    package = {"destroy_ub": lambda: calls.append("destroyed"), "initialize_ub": lambda **given: calls.append(given)}
    fake(
        monkeypatch,
        "transformer_engine.pytorch.module",
        UserBufferQuantizationMode=SimpleNamespace(NONE="NONE", FP8="FP8"),
    )
    fake(monkeypatch, "transformer_engine.pytorch", **package)
    flags = "--hidden-size 64 --seq-length 512 --micro-batch-size 2 --context-parallel-size 4"
    te_options.start_tensor_overlap(parse(flags.split()), 8)
    assert calls == []  # not asked for
    te_options.start_tensor_overlap(parse(f"{flags} --tp-comm-overlap {fp8}".split()), 8)
    assert calls[0] == "destroyed"  # a stage's before this one
    assert calls[1] == {
        "shape": [2 * 512 // 4, 64],
        "tp_size": 8,
        "quantization_modes": [mode],
        "bootstrap_backend": "nccl",
    }
