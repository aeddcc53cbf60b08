"""Which backend serves a call: a window of 32 and one of 32K want different kernels.

The choice is a function of the call's shape and of what can serve. `auto` takes, on CUDA,

    triton_packed    where no query sees more than 128 keys: it has no tiles of single segments, so short ones fill them
    flash_attn_4     else, where it is installed
    torch_varlen     else; flash_attn and te_thd after it, triton_packed at last
    two calls        where a kernel gives every segment the blocks of the longest (torch_varlen, flash_attn, te_thd),
                     and most of them would be empty: long segments apart from short ones; flash_attn_4 too under
                     deterministic algorithms, where it gives every segment the locks of the longest

and never the reference. On a CPU it takes the reference. Nothing falls back silently: each kind of choice is said once,
and `select` refuses with a remedy what cannot be done. A name given takes that backend for every call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_ext.attention.backends import BACKENDS, Backend, objections
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.attention.pieces import attend_by_length
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)

BY_NAME = {backend.name: backend for backend in BACKENDS}
SHORT = 128  # keys that a query sees, up to which triton_packed serves
# For longer ones. te_thd is behind until it has been measured: cuDNN's blocks may follow padded sizes.
LONG = ("flash_attn_4", "torch_varlen", "flash_attn", "te_thd", "triton_packed")
TILE = 128  # queries of a block
# Moving all rows and moving them back takes as long as so many empty blocks for each full one [estimated].
MOVING = 8


@dataclass(frozen=True)
class Choice:
    """Names the backends of a call.

    Attributes:
        backend: for all segments, or for those of more than `cut` keys.
        cut: keys of the longest short segment; None where one backend serves all.
        short_backend: for segments of at most `cut` keys.
    """

    backend: str
    cut: int | None = None
    short_backend: str | None = None

    def __str__(self) -> str:
        if self.cut is None:
            return self.backend
        return f"{self.backend} for segments of more than {self.cut} keys, {self.short_backend} for shorter ones"


def choose(call: AttentionCall, able: Sequence[str]) -> Choice:
    """Choose for the call among the backends that can serve, by their names.

    The choice depends on the lengths of the segments and the reach alone; `able` says what the device, the head size
    and the dtype allow.
    """
    whole = by_keys(call.max_seqlens[1], call.reach, able)
    backend = BY_NAME[whole]
    locks = backend.locks_of_longest and torch.are_deterministic_algorithms_enabled()
    if not (backend.tiles_of_longest or locks):
        return Choice(whole)
    cut = _cut(np.diff(call.cu_seqlens_q), np.diff(call.cu_seqlens_kv))
    return Choice(whole) if cut is None else Choice(whole, cut, by_keys(cut, call.reach, able))


def by_keys(keys: int, reach: int | None, able: Sequence[str]) -> str:
    """Choose for segments of at most `keys` keys, of whose keys a query sees `reach` before itself at most."""
    seen = keys if reach is None else min(keys, reach + 1)
    if seen <= SHORT and "triton_packed" in able:
        return "triton_packed"
    return next((name for name in LONG if name in able), "reference")


def _cut(queries_S: np.ndarray, keys_S: np.ndarray) -> int | None:
    """Find the length whose cut leaves the fewest blocks; None where one call is as good.

    With a block for every TILE queries of the longest segment, S segments cost S * ceil(longest / TILE) blocks.
    """
    order = np.argsort(keys_S, kind="stable")
    keys = keys_S[order]
    blocks = np.maximum.accumulate(-(-queries_S[order] // TILE)).astype(np.int64)  # of the longest so far
    count = np.arange(1, len(keys) + 1)
    apart = count * blocks + (len(keys) - count) * blocks[-1]
    apart[:-1][keys[:-1] == keys[1:]] = apart[-1]  # segments of one length stay together
    best = int(apart.argmin())
    saved = apart[-1] - apart[best]
    return int(keys[best]) if saved > MOVING * -(-int(queries_S.sum()) // TILE) else None


@dataclass(frozen=True)
class PerCall:
    """Attends with the backend of each call's shape, and says each kind of choice once.

    Attributes:
        able: names of the backends to choose among; a call with a segment longer than one takes leaves that one out.
        said: the choices said so far.
    """

    able: tuple[str, ...]
    said: set[Choice] = field(default_factory=set)

    def __call__(
        self, query_tNH: Tensor, key_uGH: Tensor, value_uGH: Tensor, call: AttentionCall, scale: float
    ) -> Tensor:
        """Attend as the call says; [t, N, H]."""
        heads, head_size = query_tNH.shape[1:]
        longest = call.max_seqlens[0]
        able = tuple(name for name in self.able if longest <= BY_NAME[name].most_rows(heads, head_size))
        if not able:
            raise UserError(
                f"attention_backend: {' and '.join(self.able)} cannot count a segment of {longest} queries "
                f"with {heads} heads of {head_size}; use --attention-backend auto, "
                "or share heads or tokens over more ranks"
            )
        choice = call.once(choose, able)
        if choice not in self.said:
            self.said.add(choice)
            kind = f"{call.segments} segments of at most {call.max_seqlens[1]} keys"
            if able != self.able:
                others = " and ".join(name for name in self.able if name not in able)
                kind += f" and {longest} queries, too many for {others},"
            logger.info("attention: %s (from %s on)", choice, kind)
        backend = BY_NAME[choice.backend]
        if choice.cut is None:
            return backend.attend(query_tNH, key_uGH, value_uGH, call, scale)
        short = BY_NAME[choice.short_backend or choice.backend]
        both = (backend.attend, short.attend)
        return attend_by_length(both, query_tNH, key_uGH, value_uGH, call, scale, choice.cut)


def select(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Attend:
    """Return what attends in a run: the named backend or, for `auto`, the best of those that can serve, call by call.

    Raises:
        UserError: no such backend, or none that can serve; with what each lacks.
    """
    candidates = _candidates(name, device)
    reasons = objections(device, dtype, head_size)
    able = tuple(backend.name for backend in candidates if reasons[backend.name] is None)
    if not able:
        lacking = "; ".join(f"{backend.name} {reasons[backend.name]}" for backend in candidates)
        raise UserError(f"attention_backend: got {name!r}, which cannot serve: {lacking}")
    logger.info("attention backend: %s on %s", " or ".join(able), device.type)
    return PerCall(able)


def suited(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[str, ...]:
    """Return the names that `select` would choose among where everything is installed: for plans of other machines.

    Raises:
        UserError: no such backend.
    """
    fitting = (backend for backend in _candidates(name, device) if backend.misfit(device, dtype, head_size) is None)
    return tuple(backend.name for backend in fitting)


def _candidates(name: str, device: torch.device) -> list[Backend]:
    """Return the named backend, or for `auto` those that may serve on the device."""
    if name == "auto":
        return [backend for backend in BACKENDS if (backend.name == "reference") == (device.type == "cpu")]
    if name not in BY_NAME:
        raise UserError(f"attention_backend: got {name!r}, needs one of {', '.join(['auto', *BY_NAME])}")
    return [BY_NAME[name]]
