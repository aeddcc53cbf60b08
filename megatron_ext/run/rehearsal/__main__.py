"""The process of one rank: python -m megatron_ext.run.rehearsal REQUEST RESULT, two files of JSON."""

from __future__ import annotations

import sys

from megatron_ext.errors import UserError
from megatron_ext.run.rehearsal import stand_in
from megatron_ext.run.rehearsal.request import Request


def main(request_file: str, result_file: str) -> int:
    request = Request.read(request_file)
    try:
        if request.fake:
            stand_in.load()
        from megatron_ext.run.rehearsal.process import run  # not above: torch looks for CUDA as it is imported

        run(request, result_file)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
