"""Find where in the code an operator was called (file, line, module) and the purpose of its results."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from megatron_ext.run.rehearsal.memory import Part

_PACKAGE = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).resolve().parent
# files whose storages have a single purpose, by path suffix
_PARTS = {
    "megatron_ext/loss.py": Part.LOGITS,
    "megatron_ext/attention/exchange.py": Part.EXCHANGE,
    "megatron/core/tensor_parallel/mappings.py": Part.EXCHANGE,
    "megatron/core/utils.py": Part.EXCHANGE,  # GlobalMemoryBuffer: gathered tensors of sequence parallelism
    "megatron/core/pipeline_parallel/p2p_communication.py": Part.EXCHANGE,
}


class Sites:
    """Tracks the modules being called, in each thread, and inspects the stack; `name` records a model's modules."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._thread = threading.local()
        self._seen: dict[CodeType, str | None] = {}

    def name(self, model: torch.nn.Module) -> None:
        """Record the names of a model's modules."""
        for name, module in model.named_modules():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            self._names[id(module)] = name

    def __enter__(self) -> Sites:
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(lambda module, args: self.stack.append(module)),
            hooks.register_module_forward_hook(lambda module, args, out: self._leave(module), always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def stack(self) -> list[torch.nn.Module]:
        """The modules being called in this thread, the innermost last."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[torch.nn.Module] = self._thread.stack
        return stack

    def _leave(self, module: torch.nn.Module) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()

    def module(self) -> str:
        """Return the name of the innermost named module being called; "" if there is none."""
        return next((name for one in reversed(self.stack) if (name := self._names.get(id(one)))), "")

    def line(self) -> tuple[str, str]:
        """Return the innermost file of this package or of Megatron on the stack, and file:line; "" for none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = self._file(frame.f_code)
            if file is not None:
                return file, f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return "", ""

    def describe(self) -> tuple[Part, str]:
        """Return the purpose and the allocation site of a storage created now."""
        file, line = self.line()
        module, node = self.module(), torch._C._current_autograd_node()
        site = " ".join(text for text in (module, line) if text)
        if node is not None and not module:
            site = " ".join(text for text in (f"backward, {node.name()}", line) if text)
        part = _PARTS.get(file)
        if part is None:
            part = Part.ACTIVATIONS if self.stack else Part.OTHER
        return part, site or "the run's own code"

    def _file(self, code: CodeType) -> str | None:
        if code not in self._seen:
            self._seen[code] = shown(code.co_filename)
        return self._seen[code]


def shown(filename: str) -> str | None:
    """Return a path relative to its package, for files of this package or of Megatron; None for others."""
    path = Path(filename)
    if path.is_relative_to(_HERE):
        return None
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE.parent))
    parts: Any = path.parts
    if "megatron" in parts and "core" in parts:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("megatron") :])
    return None
