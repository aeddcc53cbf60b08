"""Rehearse one rank in this process: python -m megatron_ext.run.rehearsal REQUEST RESULT, two JSON files."""

from __future__ import annotations

import sys

from megatron_ext.errors import UserError
from megatron_ext.run.rehearsal import cuda_library
from megatron_ext.run.rehearsal.process import Request, run


def main(request_file: str, result_file: str) -> int:
    request = Request.read(request_file)
    try:
        if request.fake:
            cuda_library.load()
        run(request, result_file)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
