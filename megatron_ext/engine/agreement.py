"""Agree on errors: if an action fails on one process, all raise, so that none waits for the others."""

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_ext import heartbeat
from megatron_ext.errors import PERMANENT, OtherProcessError, UserError

Answer = TypeVar("Answer")


def together(action: Callable[[], Answer], group: dist.ProcessGroup | None = None) -> Answer:
    """Run an action on each process; if it fails on one, all raise an error, so that none waits. Collective.

    Without an error each process sends one number. `group` is a gloo group of all processes, for a thread.

    Raises:
        UserError: a process raised one; all raise the error of the first such process.
        OtherProcessError: another process had another error, which it raises itself.
    """
    failure: BaseException | None = None
    try:
        answer = action()
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt: the other ranks must not continue
        failure = error
    device = torch.device("cpu")  # a given group is one of gloo
    if group is None:
        device = current_device()
    has_failed = torch.tensor(float(failure is not None), device=device)
    dist.all_reduce(has_failed, dist.ReduceOp.MAX, group)
    if not has_failed:
        return answer
    message = None
    if failure is not None:
        message = isinstance(failure, UserError), str(failure)
    messages = [message] * dist.get_world_size()
    dist.all_gather_object(messages, message, group)
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    failures = [message for message in messages if message is not None]
    is_user_error, text = max(failures, key=lambda message: message[0])  # the first of its kind
    if not is_user_error:
        raise OtherProcessError(f"another process has failed: {text}")
    agreed = UserError(text)
    agreed.is_agreed = True
    raise agreed


def same_everywhere(value: object) -> bool:
    """Return whether all processes have an equal value, by the hash of its `repr`. Collective."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    extremes = torch.tensor([number, -number], device=current_device())
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, negative_smallest = extremes.tolist()
    return bool(largest == -negative_smallest)


def run_on_rank0(action: Callable[[], Answer], path: Path, *, reads: bool = False) -> Answer:
    """Run `action` on rank 0 and return its result on all ranks; if it fails, every rank raises. Collective.

    The result is pickled. Errors that do not name a file name `path`; `reads`: the action does not write.

    Raises:
        UserError: raised by the action, or replacing an OSError that the user can fix (`errors.PERMANENT`); the latter
            names the file, the reason and the remedy.
        OtherProcessError: any other exception on rank 0, which raises that exception itself.
    """

    def on_rank0() -> Answer | None:
        if dist.get_rank() != 0:
            return None
        try:
            return action()
        except OSError as error:
            if error.errno not in PERMANENT:
                raise
            refusal = f"{cannot_write(error, path)}; choose another folder or make this one writable"
            if reads:
                refusal = (
                    f"load: {error.filename or path} cannot be read ({error.strerror or error}); make it readable, or "
                    "restore it from a copy"
                )
            raise UserError(refusal) from None

    box: list[Any] = [together(on_rank0)]
    dist.broadcast_object_list(box, src=0)
    everyones: Answer = box[0]
    return everyones


def gather(value: Answer, group: dist.ProcessGroup | None = None) -> list[Answer]:
    """Return the values of all processes on process 0, and an empty list on the others; pickled. Collective."""
    if dist.get_rank() != 0:
        dist.gather_object(value, group=group)
        return []
    values: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(value, values, group=group)
    return values


def in_thread(name: str, work: Callable[[], Answer]) -> Future[Answer]:
    """Run `work` in a daemon thread with this process's device, while the main thread waits or continues training."""
    done: Future[Answer] = Future()
    device = current_device()

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread starts with device 0
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def together_in_threads(name: str, action: Callable[[], None]) -> None:
    """Run an action in a thread of each process, however long it takes; raise what `together` raises. Collective."""
    working = in_thread(name, action)
    wait_for_threads(working)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    together(working.result)


def wait_for_threads(working: Future[Any]) -> None:
    """Wait until the threads of all processes have ended. Collective.

    A thread may take longer than the timeout of a collective or of the watchdog, as long as any process sends
    heartbeats; these count for all processes.
    """
    before = -1
    pause_s = 0.001
    while True:
        numbers = [float(not working.done()), float(heartbeat.beats)]
        state = torch.tensor(numbers, dtype=torch.float64, device=current_device())
        dist.all_reduce(state)
        alive, beats = state.tolist()
        if not alive:
            return
        if beats != before:
            heartbeat.beat()
            before = beats + dist.get_world_size()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


def current_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def cannot_write(error: OSError, path: Path) -> str:
    """Return the first part of the message for an OSError on writing; `path` is named if the error names no file."""
    return f"save: {error.filename or path} cannot be written ({error.strerror or error})"
