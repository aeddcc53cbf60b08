"""Runs a program and says how it ended; executed by confine.py inside the limits, with nothing of this package.

Standard input has {"code", "unittest", "nonce"} in JSON. At the end the nonce is written to standard output, and behind
it why the program failed, if it did. The program's own output goes nowhere.
"""

from __future__ import annotations

import json
import os
import sys
import types
import unittest


def main() -> None:
    """Run the program of standard input."""
    job = json.loads(sys.stdin.buffer.read())
    verdict = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.argv = ["program.py"]
    module = types.ModuleType("__test__")  # as in BigCodeBench's harness; not __main__, whose guard a model may write
    module.__file__ = "program.py"
    sys.modules["__test__"] = module
    reason = ""
    try:
        exec(compile(job["code"], "program.py", "exec"), module.__dict__)
        if job["unittest"]:
            reason = _run_tests(module)
    except BaseException as error:  # SystemExit too: a program that leaves has not passed
        reason = type(error).__name__
    os.write(verdict, f"\n{job['nonce']} {reason}".encode())
    os._exit(0)  # threads that still run, and what is registered to run at the end, have no say


def _run_tests(module: types.ModuleType) -> str:
    """Run the module's TestCases; why they failed, empty where they passed."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(module.TestCases).run(result)
    if not result.testsRun:
        return "no test"
    failed = result.failures + result.errors
    return f"{len(failed)} of {result.testsRun} tests" if failed else ""


if __name__ == "__main__":
    main()
