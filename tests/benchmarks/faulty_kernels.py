"""benchmarks/attention.py with kernels that end their process, hang, lack a package, raise an error or are wrong."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import attention

errors, cases = attention.errors, attention.cases
CASES = ["one key head", "empty segments", "window 1", "window 8", "window 32"]


def faulty(name: str, case: attention.Case) -> dict[str, Any]:
    if case.name == CASES[0]:
        os.kill(os.getpid(), signal.SIGSEGV)
    if case.name == CASES[1]:
        raise ModuleNotFoundError("No module named 'kernels'")
    if case.name == CASES[2]:
        raise ValueError("no such kernel")
    if case.name == CASES[3]:
        return errors(name, case) | {"ok": False, "wrong": ["dk"]}
    if name == "auto":
        time.sleep(600)
    return errors(name, case)


if __name__ == "__main__":
    attention.errors = faulty
    attention.cases = lambda: (case for case in cases() if case.name in CASES)
    sys.exit(attention.main())
