"""Start a command in several processes, as torchrun does, and end as it ends: with its exit status, and one line.

python tools/launch.py --nproc-per-node 8 pretrain_skyladder.py --config run.yaml --flag value ...

All flags before the script are torchrun's; --help lists them. What differs from torchrun:

    the exit status is that of the process that ended first, 128 + N where signal N ended it; torchrun's is always 1
    the last line says which one that was, and what it said; torchrun writes 40 lines
    SIGUSR1 is passed on as well, and after a signal the processes have ten minutes to save (--shutdown-timeout)
    a second signal, a second or more after the first, ends those that still run within five more
    a console command is started without --no-python, from this one's folder where it lies there

A stop by a signal to this process ends with 128 + its number, whatever was saved: RUN/stopped.json says that.
torch 2.12 is needed.
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_ext.command_line import command
from megatron_ext.errors import UserError, first_line, printable
from megatron_ext.parser import DEBUG, refusal
from megatron_ext.programs import PREFIX

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SHUTDOWN_S = 600  # a step and a save; torchrun's own 30 s would kill a large model's save
LAST_S = 5  # that remain to the processes after a second signal
SAME_S = 1.0  # in which it counts as the first: timeout(1) sends its signal twice


def main(argv: list[str]) -> int:
    return command(lambda _: start(argv))(argv)  # with --debug: it may be the script's


def start(argv: list[str]) -> int:
    """Start the processes and wait for their end; return the exit status.

    Raises:
        UserError: wrong flags, nodes that cannot meet, or a torch that is too old.
    """
    import torch  # takes seconds
    from torch.distributed import DistNetworkError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    def refuse(message: str) -> NoReturn:
        raise UserError(refusal(message))

    parser = run.get_args_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument(DEBUG, action="store_true", help="show the traceback of an error of the launcher's own")
    missing = {"--signals-to-handle", "--shutdown-timeout"} - set(parser._option_string_actions)
    if missing:  # defaults that it ignores would kill a save after 30 s
        raise UserError(
            f"torch: got {torch.__version__}, whose torchrun has no {' and no '.join(sorted(missing))}, needs 2.12; "
            "start with torchrun, which ends with 1 whatever happened"
        )
    parser.set_defaults(signals_to_handle=SIGNALS, shutdown_timeout=SHUTDOWN_S)
    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_args(argv)
    check(options)
    if options.training_script.startswith(PREFIX) and "/" not in options.training_script:
        options.no_python = True
        beside = Path(sys.argv[0]).absolute().with_name(options.training_script)
        if beside.exists():  # PATH has not the folder of an environment that is not activated
            options.training_script = str(beside)
    end_at_second_signal()
    # it says in two more lines that a process has ended, and that it ends the others
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures.items())
        print(f"rank {rank} {how(failure)}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        print(f"stopped by {signal.Signals(stopped.sigval).name}", file=sys.stderr)
        return 128 + stopped.sigval
    except (RendezvousError, DistNetworkError) as error:
        place = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
        raise UserError(
            f"the nodes could not meet at {place}: {first_line(error)}; see to --master-addr and --master-port, or to "
            "--rdzv-endpoint"
        ) from error
    except ValueError as error:  # of what torchrun reads by itself, such as --nnodes
        raise UserError(f"{first_line(error)}; --help says what each flag takes") from error
    return 0


def check(options: argparse.Namespace) -> None:
    """Refuse values of flags that torchrun takes for a fault of its own, or passes over.

    Raises:
        UserError: naming the flag.
    """
    nodes = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", options.nnodes)
    unknown = [name for name in options.signals_to_handle.split(",") if name.strip() not in signal.Signals.__members__]
    for flag, got, wrong, needs in (
        ("nnodes", options.nnodes, not nodes or not 0 < int(nodes[1]) <= int(nodes[2] or nodes[1]), "1, or 1:2"),
        ("nproc-per-node", options.nproc_per_node, re.fullmatch(r"-\d+|0+", options.nproc_per_node), "at least 1"),
        ("max-restarts", options.max_restarts, options.max_restarts < 0, "at least 0"),
        ("monitor-interval", options.monitor_interval, not options.monitor_interval > 0, "seconds, more than 0"),
        ("signals-to-handle", ",".join(unknown), unknown, "names such as SIGTERM,SIGUSR1"),
    ):
        if wrong:
            raise UserError(f"--{flag}: got {got}, needs {needs}")


def end_at_second_signal() -> None:
    """Let torchrun's wait for the processes to end last LAST_S more after another signal, instead of beginning anew."""
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    wait = PContext.close

    def close(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        began, again = time.monotonic(), None
        while True:
            try:
                wait(context, death_sig, timeout)
                break
            except SignalException as signalled:  # a third one must not leave processes behind either
                again, death_sig = signalled, signalled.sigval
                if time.monotonic() - began > SAME_S:
                    timeout = min(timeout, LAST_S)
        if again is not None:
            raise again

    PContext.close = close  # type: ignore[method-assign]


def first_failure(failures: Iterable[tuple[int, ProcessFailure]]) -> tuple[int, ProcessFailure]:
    """Return the failure that the others followed, by its rank; torchrun ends those that still run by SIGTERM."""
    return min(failures, key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp))


def how(failure: ProcessFailure) -> str:
    """Say how a process ended, with the line that it left (megatron_ext/command_line.py)."""
    if failure.exitcode < 0:
        return f"was ended by {failure.signal_name()}"
    left = failure.error_file_data["message"]  # a text where torchrun found none
    said = f": {printable(str(left['message']))}" if isinstance(left, dict) else ""
    return f"ended with exit status {failure.exitcode}{said}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
