"""Report the environment of a process: versions, devices, attention backends, optional packages."""

from __future__ import annotations

import os
import platform as system
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import requires
from pathlib import Path

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_ext.attention.backends import objections
from megatron_ext.config import Config
from megatron_ext.engine.platform import Platform
from megatron_ext.errors import installed_version

# optional package -> what it is used for
PACKAGES = {
    "transformer-engine": "Transformer Engine's layers, --attention-backend te_thd, a fused Adam, --fp8-format",
    "flash-attn": "--attention-backend flash_attn",
    "flash-attn-4": "--attention-backend flash_attn_4",
    "triton": "--attention-backend triton_packed",
    "apex": "a fused Adam and fused weight gradients where Transformer Engine is missing",
    "transformers": "chat templates, `convert_checkpoint.py verify`, tests against Hugging Face's own models",
    "wandb": "--wandb-project",
    "bm25s": "--packing bm25",
    "pyarrow": "preprocessing .parquet",
    "zstandard": "preprocessing .jsonl.zst",
    "nltk": "preprocessing with --split-sentences",
    "sentencepiece": "converting SentencePiece tokenizers",
    "tiktoken": "converting tiktoken tokenizers",
}
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Environment:
    """The environment of one process; equal on all ranks except for the host name.

    Attributes:
        host: host name.
        python, torch, megatron_core: versions.
        devices: for example "8 x NVIDIA H200 (sm_90, 140 GiB)".
        cuda: versions of driver, CUDA, cuDNN and NCCL; "" without a CUDA device.
        layers, adam: the packages that provide them.
        backends: (attention backend, why it cannot be used in this run or None).
        packages: (optional package, its version or None).
    """

    host: str
    python: str
    torch: str
    megatron_core: str
    devices: str
    cuda: str
    layers: str
    adam: str
    backends: tuple[tuple[str, str | None], ...]
    packages: tuple[tuple[str, str | None], ...]

    def summary(self) -> list[str]:
        """Return the lines for the log of every run."""
        return [
            f"Python {self.python}, torch {self.torch}, megatron-core {self.megatron_core} on {self.host}",
            f"{self.devices}{f'; {self.cuda}' if self.cuda else ''}",
            f"{self.layers} layers, Adam of {self.adam}",
            "attention backends that can serve: " + ", ".join(name for name, reason in self.backends if not reason),
            *(f"  {name} cannot: it {reason}" for name, reason in self.backends if reason),
        ]

    def facts(self) -> dict[str, str]:
        """Return everything except the host name, as text by name."""
        texts = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: text for name, text in texts.items() if isinstance(text, str) and name != "host"}
        backends = {name: reason or "can serve" for name, reason in self.backends}
        return plain | backends | {name: version or "is not installed" for name, version in self.packages}

    def optional(self) -> list[str]:
        """Return a line for each optional package: its version and its use."""
        return [f"{name} {version or 'is not installed'}: {PACKAGES[name]}" for name, version in self.packages]


def look(config: Config, where: Platform) -> Environment:
    """Return this process's environment as a run with `config` would use it."""
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    return Environment(
        host=socket.gethostname(),
        python=system.python_version(),
        torch=torch.__version__,
        megatron_core=megatron.core.__version__,
        devices=_devices(where),
        cuda=_cuda_versions() if where.device.type == "cuda" else "",
        layers=_engine(installed_version("transformer-engine")) if where.transformer_engine else "local",
        adam=megatron_optimizer.Adam.__module__.partition(".")[0],
        backends=tuple(objections(where.device, dtype, config.model.head_size).items()),
        packages=tuple((name, installed_version(name)) for name in PACKAGES),
    )


def differences(ranks: Sequence[Environment]) -> list[str]:
    """Return a warning for each difference from rank 0, once per host.

    A node with other versions still trains, but with different results.
    """
    first = ranks[0].facts()
    said: dict[str, None] = {}
    for other in ranks[1:]:
        for name, theirs in other.facts().items():
            if theirs != first[name]:
                said[f"warning: {name} on {other.host}: {theirs}; on {ranks[0].host}: {first[name]}"] = None
    return list(said)


def report(config: Config, where: Platform, ranks: int) -> list[str]:
    """Return the lines about the environment for a run's log. Collective: all `ranks` processes call it."""
    mine = look(config, where)
    everyone: list[Environment | None] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    return mine.summary() + differences([one for one in everyone if one is not None])


def _engine(version: str | None) -> str:
    """Return Transformer Engine's name, with the version that megatron-core requires if it differs."""
    asked = [Requirement(text) for text in requires("megatron-core") or []]
    wanted = next((one.specifier for one in asked if one.name == "transformer-engine"), SpecifierSet())
    if version is None or wanted.contains(version, prereleases=True):
        return "Transformer Engine"
    return f"Transformer Engine {version} (megatron-core asks for {wanted})"


def _devices(where: Platform) -> str:
    if where.device.type == "cpu":
        return f"{os.cpu_count()} CPU cores, no CUDA device that torch can see"
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = Counter(f"{one.name} (sm_{one.major}{one.minor}, {one.total_memory / 2**30:.0f} GiB)" for one in devices)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _cuda_versions() -> str:
    driver = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.is_file() else None
    cudnn = torch.backends.cudnn.version()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "missing"
    return f"driver {driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}"
