"""Report the environment of a process: versions, devices, attention backends, optional packages."""

from __future__ import annotations

import os
import platform as system
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer

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
    "pyarrow": "preprocessing .parquet and .jsonl.zst",
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
        backends: for each attention backend, why it cannot be used in this run, or None.
        packages: the version of each optional package, or None.
    """

    host: str
    python: str
    torch: str
    megatron_core: str
    devices: str
    cuda: str
    layers: str
    adam: str
    backends: Mapping[str, str | None]
    packages: Mapping[str, str | None]

    def summary(self) -> list[str]:
        """Return the lines for the log of every run."""
        return [
            f"Python {self.python}, torch {self.torch}, megatron-core {self.megatron_core} on {self.host}",
            f"{self.devices}{f'; {self.cuda}' if self.cuda else ''}",
            f"{self.layers} layers, Adam of {self.adam}",
            "attention backends that can serve: " + ", ".join(name for name, why in self.backends.items() if not why),
            *(f"  {name} cannot: it {reason}" for name, reason in self.backends.items() if reason),
        ]


def look(config: Config, platform: Platform) -> Environment:
    """Return this process's environment as a run with `config` would use it."""
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    on_cuda = platform.device.type == "cuda"
    return Environment(
        host=socket.gethostname(),
        python=system.python_version(),
        torch=torch.__version__,
        megatron_core=megatron.core.__version__,
        devices=_gpus() if on_cuda else f"{os.cpu_count()} CPU cores, no CUDA device that torch can see",
        cuda=_cuda_versions() if on_cuda else "",
        layers="Transformer Engine" if platform.transformer_engine else "local",
        adam=megatron_optimizer.Adam.__module__.partition(".")[0],
        backends=objections(platform.device, dtype, config.model.head_size, sinks=config.model.has_sinks),
        packages={name: installed_version(name) for name in PACKAGES},
    )


def differences(ranks: Sequence[Environment]) -> list[str]:
    """Return a warning for each difference from rank 0, once per host.

    A node with other versions still trains, but with different results.
    """

    def facts(environment: Environment) -> dict[str, str | None]:
        values = asdict(environment)
        nested = values.pop("backends") | values.pop("packages")
        return values | nested

    first = facts(ranks[0])
    found: dict[str, None] = {}
    for other in ranks[1:]:
        for name, theirs in facts(other).items():
            if name != "host" and theirs != first[name]:
                found[f"warning: {name} on {other.host}: {theirs}; on {ranks[0].host}: {first[name]}"] = None
    return list(found)


def _gpus() -> str:
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = Counter(f"{one.name} (sm_{one.major}{one.minor}, {one.total_memory / 2**30:.0f} GiB)" for one in devices)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _cuda_versions() -> str:
    driver = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.is_file() else None
    cudnn = torch.backends.cudnn.version()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "missing"
    return f"driver {driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}"
