"""Report the environment of a process: versions, devices, attention backends, optional packages."""

import os
import platform as system
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import megatron.core
import torch
import torch.distributed as dist

from megatron_ext.attention.backends import objections
from megatron_ext.config import Config
from megatron_ext.engine import agreement
from megatron_ext.engine.agreement import same_everywhere
from megatron_ext.engine.platform import Platform, compiler
from megatron_ext.engine.transformer import weight_dtype
from megatron_ext.errors import installed_version

PACKAGES = (
    "transformer-engine", "flash-attn", "flash-attn-4", "triton", "apex", "transformers",
    "wandb", "bm25s", "pyarrow", "nltk", "sentencepiece", "tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """The environment of one process; equal on all ranks except for the host name."""

    host: str
    devices: str  # for example "8 x NVIDIA H200 (sm_90, 140 GiB)"
    layers: str  # the package that provides them
    backends: Mapping[str, str | None]  # why an attention backend cannot be used in this run, or None
    versions: Mapping[str, str | None]  # of a package; None if missing

    def compared(self) -> dict[str, str | None]:
        """Return what must be equal on all ranks."""
        return {"devices": self.devices, **self.versions}

    def summary(self) -> list[str]:
        return [
            f"on {self.host}: {', '.join(f'{name} {version}' for name, version in self.versions.items() if version)}",
            f"{self.devices}; layers of {self.layers}",
            "attention backends that can serve: " + ", ".join(name for name, why in self.backends.items() if not why),
            *(f"  {name} cannot: it {reason}" for name, reason in self.backends.items() if reason),
        ]


def look(config: Config, platform: Platform) -> Environment:
    """Return this process's environment as a run with `config` would use it."""
    model = config.model
    versions = {
        "python": system.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
    }
    devices = f"{os.cpu_count()} CPU cores, no CUDA device that torch can see"
    if platform.device.type == "cuda":
        gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        names = Counter(f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
        devices = ", ".join(f"{count} x {name}" for name, count in names.items())
        nccl = None
        if dist.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version()), "nccl": nccl}
        versions["C compiler"] = compiler()
    return Environment(
        host=socket.gethostname(),
        devices=devices,
        layers="Transformer Engine" if platform.transformer_engine else "Megatron-Core",
        backends=objections(
            platform.device,
            weight_dtype(config),
            model.head_size,
            model.value_size,
            sinks=model.has_sinks,
        ),
        versions=versions | {name: installed_version(name) for name in PACKAGES},
    )


def differences(local: Environment) -> list[str]:
    """Return on rank 0 a warning for each version or device that differs from its own, once per host. Collective."""
    if same_everywhere(local.compared()):
        return []
    warnings = {
        f"warning: {name} on {other.host}: {version}; on {local.host}: {local.compared()[name]}"
        for other in agreement.gather(local)
        for name, version in other.compared().items()
        if version != local.compared()[name]
    }
    return sorted(warnings)
