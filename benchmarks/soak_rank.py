"""The trainer as started by benchmarks/soak.py: SIGUSR2 makes a rank hang, and a file makes its disk slow.

SLOW_DISK=FILE    while the file exists, each fsync takes `SECONDS` longer
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pretrain_skyladder import main as pretrain

SECONDS = 0.5
_fsync = os.fsync


def hang(number: int, frame: FrameType | None) -> None:
    """Block the main thread forever."""
    while True:
        time.sleep(3600)


def slow_fsync(descriptor: int) -> None:
    """Sync a file to disk, with a delay if the disk is slow."""
    if Path(os.environ.get("SLOW_DISK", os.devnull + "/none")).exists():
        time.sleep(SECONDS)
    _fsync(descriptor)


def main(argv: list[str]) -> int:
    """Train, with faults on request."""
    signal.signal(signal.SIGUSR2, hang)
    os.fsync = slow_fsync
    return int(pretrain(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
