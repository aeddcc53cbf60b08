"""Start a command in several processes, as torchrun does, and end as it ends: with its exit status, and one line.

python tools/launch.py --nproc-per-node 8 pretrain_skyladder.py --config run.yaml --flag value ...

All flags before the script are torchrun's; --help lists them. What differs from torchrun:

    the exit status is that of the process that ended first, 128 + N where signal N ended it; torchrun's is always 1
    the last line says which one that was, and what it said; torchrun writes 40 lines
    SIGUSR1 is passed on as well, and after a signal the processes have ten minutes to save (--shutdown-timeout)
    a console command is started without --no-python

A stop by a signal to this process ends with 128 + its number, whatever was saved: RUN/stopped.json says that.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from megatron_ext.command_line import command
from megatron_ext.errors import UserError, first_line, printable
from megatron_ext.parser import DEBUG, refusal
from megatron_ext.programs import PREFIX

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SHUTDOWN_S = 600  # a step and a save; torchrun's own 30 s would kill a large model's save


def main(argv: list[str]) -> int:
    return command(lambda _: start(argv))(argv)  # with --debug: it may be the script's


def start(argv: list[str]) -> int:
    """Start the processes and wait for their end; return the exit status.

    Raises:
        UserError: wrong flags, or nodes that cannot meet.
    """
    from torch.distributed import run  # importing torch takes seconds
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    def refuse(message: str) -> NoReturn:
        raise UserError(refusal(message))

    parser = run.get_args_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument(DEBUG, action="store_true", help="show the traceback of an error of the launcher's own")
    parser.set_defaults(signals_to_handle=SIGNALS, shutdown_timeout=SHUTDOWN_S)
    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_args(argv)
    options.no_python = options.no_python or options.training_script.startswith(PREFIX)
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
    except RendezvousError as error:
        raise UserError(f"the nodes could not meet at {options.rdzv_endpoint}: {first_line(error)}") from error
    except ValueError as error:  # of what torchrun reads by itself, such as --nnodes
        raise UserError(f"{first_line(error)}; --help says what each flag takes") from error
    return 0


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
