"""What benchmarks share: the command line, the results with their context, and processes of their own.

python benchmarks/record.py --output FILE PART STATUS -- COMMAND ...    record a command that benchmarks/gpu.sh saw fail
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["torch", "triton", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4", "liger-kernel"]
# names of what each line has besides its facts
CONTEXT = {"part", "began", *["device", "python", "versions", "cuda", "cudnn", "memory_gib", "date", "load", "command"]}


def machine() -> dict[str, Any]:
    """Return the device, the versions of the packages that affect the figures, the date and the command."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    device = f"{os.cpu_count()} cores {platform.machine()}"
    facts: dict[str, Any] = {"device": device, "python": platform.python_version(), "versions": versions}
    torch = sys.modules.get("torch")  # not imported here: a process started from a large one never seems smaller
    if torch and torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        facts["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return facts | {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "load": os.getloadavg()[0], "command": command}


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring, with the option --output."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="file of JSON lines to append the results to")
    return parser


class Records:
    """Prints results, one JSON object per line, and appends them to a file immediately.

    Each line of the file also has the machine and `context`, so that the results before a failure are complete. Before
    a measurement the file gets a line with `began`: if it is the last one, the measurement has ended its process.
    """

    def __init__(self, part: str, output: Path | None, **context: Any) -> None:
        self.part = part
        self.output = output
        self.context = machine() | context
        self.failed = 0
        self.last: dict[str, Any] = {}

    def add(self, **facts: Any) -> None:
        """Record a result, floats with six digits; a result with `ok` False counts as failed."""
        self.failed += facts.get("ok") is False
        rounded = {name: float(f"{fact:.6g}") if isinstance(fact, float) else fact for name, fact in facts.items()}
        self.last = shown = {"part": self.part, **rounded}
        if not facts.get("began"):
            print(json.dumps(shown), flush=True)
        if self.output:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            with self.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(shown | self.context) + "\n")

    def unfinished(self) -> dict[str, Any]:
        """Return the facts of the measurement that began last, if it has no result."""
        if self.output is None or not self.output.exists():
            return {}
        lines = self.output.read_text().splitlines()
        last = json.loads(lines[-1]) if lines else {}
        if not last.get("began"):
            return {}
        return {name: fact for name, fact in last.items() if name not in CONTEXT}

    def measure(self, work: Callable[[], Mapping[str, Any]], required: bool = True, **facts: Any) -> bool:
        """Record the facts that `work` returns, or its error, which fails if `required`; return whether it had none."""
        self.add(**facts, began=True)
        try:
            measured = work()
        except ModuleNotFoundError as error:
            self.add(**facts, skipped=str(error))
            return True
        except Exception as error:  # libraries without kernels for this machine raise errors of any type
            traceback.print_exc()
            first_line = (str(error).splitlines() or [""])[0]
            failed = {"ok": False} if required else {}
            self.add(**facts, **failed, error=f"{type(error).__name__}: {first_line}"[:300])
            return False
        self.add(**facts, **measured)
        return True


def processor_seconds(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least processor time of each case over alternating rounds, which other work affects alike."""
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, work in cases.items():
            began = time.process_time()
            work()
            least[name] = min(least[name], time.process_time() - began)
    return least


def run_apart(
    records: Records, *arguments: str, timeout_s: float | None = None, statuses: tuple[int, ...] = (0, 1), **facts: Any
) -> int | None:
    """Run this script in a process of its own, which an error of the GPU does not outlive.

    Returns:
        Its exit status. If it is none of `statuses`, or None after `timeout_s`, that is recorded with the facts of the
        measurement that it had begun.
    """
    to_file = ["--output", str(records.output)] if records.output else []
    try:
        command = [sys.executable, sys.argv[0], *arguments, *to_file]
        status = subprocess.run(command, check=False, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        facts |= records.unfinished() | {"error": f"takes more than {timeout_s:.0f} s"}
        records.add(**facts, ok=False, died=True)
        return None
    if status not in statuses:
        records.add(**facts | records.unfinished(), ok=False, died=True, **ended(status))
    return status


def ended(status: int) -> dict[str, Any]:
    """Describe an exit status, of a process or of a shell's command."""
    text = f"ended with status {status}"
    number = -status if status < 0 else status - 128
    if status == 124:
        text = "took too long"
    elif number in signal.valid_signals():
        text = f"was ended by {signal.Signals(number).name}"
    return {"return_code": status, "error": text}


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("part")
    parser.add_argument("status", help="of the command; or skipped, with the reason in place of the command")
    parser.add_argument("ended", nargs="+", metavar="COMMAND")
    options = parser.parse_args()
    records = Records(options.part, options.output)
    text = " ".join(options.ended)
    if options.status == "skipped":
        records.add(skipped=text)
    else:
        status = int(options.status)
        records.add(**{"ran": text} | records.unfinished() | ended(status), ok=False, died=status > 1)
