"""What the sandbox does where there are no namespaces, on any machine."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import pytest

from megatron_ext.evaluation.applied import sandbox
from megatron_ext.evaluation.applied.sandbox import (
    Ending,
    Job,
    Limits,
    RefusedError,
    SandboxError,
    check_sandbox,
    judge,
)

FREE = Limits(seconds=20, memory_mib=1024, network=True)


def test_where_the_kernel_refuses_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without namespaces a program runs only where the user says so."""
    refusing = (Path(sandbox.__file__).parent / "confine.py").read_text().replace("unshare(", "unshare(0x2000 | ")
    (tmp_path / "confine.py").write_text(refusing)  # the kernel has no such flag
    (tmp_path / "judge.py").write_text((Path(sandbox.__file__).parent / "judge.py").read_text())
    monkeypatch.setattr(sandbox, "_HERE", tmp_path)
    mark = tmp_path / "ran"
    with pytest.raises(RefusedError, match=r"cannot be confined here \(namespaces: .*pass --allow-network"):
        judge(Job(f"open({str(mark)!r}, 'w')"), Limits(20, 1024))
    assert not mark.exists()
    assert judge(Job(f"open({str(mark)!r}, 'w')"), Limits(20, 1024, network=True)).ending is Ending.PASSED
    assert mark.exists()


def test_limits_hold_without_namespaces() -> None:
    free = Limits(seconds=1, memory_mib=512, network=True)
    assert judge(Job("while True: pass"), free).ending is Ending.TIMED_OUT
    assert judge(Job("x = bytearray(1 << 30)"), free).ending is Ending.FAILED


def test_too_little_memory_for_python_is_said() -> None:
    with pytest.raises(SandboxError, match="code_memory, code_seconds: with 8 MiB and 20 s an empty program failed"):
        check_sandbox(Limits(20, 8, network=True))


def test_what_keeps_python_from_starting_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither memory nor time."""
    (tmp_path / "confine.py").write_text((Path(sandbox.__file__).parent / "confine.py").read_text())
    monkeypatch.setattr(sandbox, "_HERE", tmp_path)
    with pytest.raises(SandboxError, match=r"status 2 before its end: .*can't open file '.*judge\.py'") as raised:
        check_sandbox(FREE)
    assert not isinstance(raised.value, RefusedError)
    assert raised.value.of_this_process  # the others may have a judge


def test_libraries_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/libraries")
    code = "import os\nassert os.environ['LD_LIBRARY_PATH'] == '/opt/libraries'"
    assert judge(Job(code), FREE) == sandbox.Verdict(Ending.PASSED)


def test_a_flooded_verdict_takes_no_memory() -> None:
    """A program may write to every descriptor, and its verdict still counts."""
    code = (
        "import os\nfor descriptor in range(3, 20):\n"
        "    try:\n        for _ in range(64): os.write(descriptor, b'x' * (1 << 20))\n"
        "    except OSError: pass"
    )
    tracemalloc.start()
    try:
        verdict = judge(Job(code), FREE)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert verdict == sandbox.Verdict(Ending.PASSED)
    assert most < 4 << 20


def test_a_long_program_is_handed_over_whole() -> None:
    """It is longer than a pipe holds."""
    code = f"x = {'a' * (1 << 20)!r}\nassert len(x) == 1 << 20"
    assert judge(Job(code), FREE) == sandbox.Verdict(Ending.PASSED)


def test_what_python_needs_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix, hidden in (("/usr", ["/run", "/tmp", "/var/tmp"]), ("/var/tmp/venv", ["/run", "/tmp"])):
        for name in ("prefix", "base_prefix", "executable"):
            monkeypatch.setattr(sys, name, prefix)
        monkeypatch.setattr(sandbox, "_HERE", Path("/opt"))
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        assert sandbox._hidden() == hidden
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt:/tmp/lib")
    assert sandbox._hidden() == ["/run"]
