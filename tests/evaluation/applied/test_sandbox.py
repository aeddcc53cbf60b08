"""Programs in the sandbox: what is right passes, and what does harm is stopped and does not pass."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from evaluation.applied.published import bigcodebench, humaneval

from megatron_ext.evaluation.applied import sandbox
from megatron_ext.evaluation.applied.code import job_of, judged
from megatron_ext.evaluation.applied.questions import Program
from megatron_ext.evaluation.applied.sandbox import Ending, Job, Limits, RefusedError, check_sandbox, judge

LIMITS = Limits(seconds=20, memory_mib=1024)  # more than a busy machine needs
SHORT = Limits(seconds=1, memory_mib=512)


@pytest.fixture(autouse=True, scope="module")
def sandboxed() -> None:
    try:
        check_sandbox(LIMITS)
    except RefusedError as error:
        pytest.skip(f"this kernel confines no program: {error}")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test's programs have their folders: what tells their processes from all others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def ending(code: str, limits: Limits = LIMITS) -> Ending:
    return judge(Job(code), limits).ending


def left(folder: Path) -> list[psutil.Process]:
    """Find the processes of programs below a folder, after what is being killed had a time to die."""
    until = time.monotonic() + 5
    while True:
        found = [process for process in psutil.process_iter() if _home(process).startswith(f"{folder}/")]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def _home(process: psutil.Process) -> str:
    try:
        return process.environ().get("HOME", "")
    except (psutil.Error, OSError):  # another user's, or gone
        return ""


def test_solutions_pass_and_others_do_not() -> None:
    for make, prompt in ((humaneval, "prompt"), (bigcodebench, "complete_prompt")):
        item = make(1)
        program = Program(item["entry_point"], item["test"], unittest=make is bigcodebench)
        right, wrong = item["canonical_solution"], "    return 17\n"
        jobs = [job_of(item[prompt].rstrip(), f"\n{text}", program) for text in (right, wrong, "    return (")]
        verdicts = judged(jobs, LIMITS, workers=2)
        assert [verdict.ending for verdict in verdicts] == [Ending.PASSED, Ending.FAILED, Ending.FAILED]
        assert verdicts[1].reason == ("2 of 2 tests" if make is bigcodebench else "AssertionError")
        assert verdicts[2].reason == "SyntaxError"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os._exit(117)",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 11)",
        "print('passed'); 1 / 0",
        "import atexit, os; atexit.register(os._exit, 0); 1 / 0",
    ],
)
def test_leaving_early_is_no_pass(code: str) -> None:
    assert ending(code) in (Ending.FAILED, Ending.KILLED)


def test_tests_that_are_not_there_are_no_pass() -> None:
    assert judge(Job("import unittest\nclass TestCases(unittest.TestCase): pass", True), LIMITS).reason == "no test"
    assert judge(Job("x = 1", True), LIMITS).ending is Ending.FAILED


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(600)", "import os\nos.fork()\nwhile True: pass"]
)
def test_endless_programs_are_stopped(code: str) -> None:
    begun = time.monotonic()
    assert ending(code, SHORT) is Ending.TIMED_OUT
    assert time.monotonic() - begun < 120


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytes(1 << 20))",
        "with open('a', 'wb') as file:\n    for _ in range(300): file.write(bytes(1 << 20))",
        "for n in range(9):\n    with open(f'a{n}', 'wb') as file: file.write(bytes(20 << 20))",
    ],
)
def test_memory_and_files_are_bounded(code: str) -> None:
    assert ending(code, Limits(seconds=20, memory_mib=512)) in (Ending.FAILED, Ending.KILLED)


def test_a_fork_bomb_is_bounded_and_leaves_nothing(own_folder: Path) -> None:
    """Its processes are few while it runs, and none when it has ended."""
    assert ending("import os\nwhile True: os.fork()", SHORT) is not Ending.PASSED
    code = (
        "import os, time\nborn = 0\ntry:\n    while born < 1000:\n        if os.fork() == 0: time.sleep(60)\n"
        "        born += 1\n"
        f"except BlockingIOError: pass\nassert born < {sandbox.PROCESSES}, born"
    )
    verdict = judge(Job(code), LIMITS)
    assert verdict.ending is Ending.PASSED, verdict
    assert left(own_folder) == []


def test_what_goes_into_the_background_ends_with_its_program(own_folder: Path) -> None:
    """Without namespaces it goes on, and is found."""
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(3, 256)\n"
        "    if os.fork() == 0: time.sleep(61)\n    os._exit(0)\n"
        "os.wait()\n"  # else the program may end before its child has left the process group
    )
    assert ending(code) is Ending.PASSED
    assert left(own_folder) == []
    assert ending(code, Limits(20, 1024, network=True)) is Ending.PASSED
    (process,) = left(own_folder)
    process.kill()


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert ending(code) is Ending.FAILED
        assert ending(code, Limits(20, 1024, network=True)) is Ending.PASSED
    names = "import socket\nassert [name for _, name in socket.if_nameindex() if name != 'lo'] == []"
    assert ending(names) is Ending.PASSED


def test_files_of_others_are_out_of_reach() -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:  # not below /tmp, which programs do not see
        folder = Path(name)
        file = folder / "precious"
        file.write_text("kept")
        folder.chmod(0o777)
        file.chmod(0o666)
        assert ending(f"assert open({str(file)!r}).read() == 'kept'") is Ending.PASSED
        _check_kept(file)


def _check_kept(file: Path) -> None:
    for code in (
        f"open({str(file)!r}, 'w').write('lost')",
        f"import os; os.remove({str(file)!r})",
        f"open({str(file.parent / 'new')!r}, 'w')",
        f"import os; os.chmod({str(file)!r}, 0)",
        "open('/tmp/new-file-of-a-program', 'w')",
        f"open({sandbox.__file__!r}, 'a')",
    ):
        assert ending(code) is Ending.FAILED, code
    assert file.read_text() == "kept"
    assert list(file.parent.iterdir()) == [file]
    assert not Path("/tmp/new-file-of-a-program").exists()


@pytest.mark.skipif("/tmp" not in sandbox._hidden(), reason="Python or the package is below /tmp")
def test_sockets_of_sessions_are_out_of_reach() -> None:
    """As those of tmux and of ssh-agent, which lie in /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{name}/default")
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect('{name}/default')"
        assert ending(code, Limits(20, 1024, network=True)) is Ending.PASSED
        assert judge(Job(code), LIMITS).reason == "FileNotFoundError"


@pytest.mark.parametrize("place", ["/dev/shm", "/run", "/tmp", "/var/tmp"])
def test_its_folder_may_be_where_others_are_hidden(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.access(place, os.W_OK):
        pytest.skip(f"{place} cannot be written")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        code = "import os\nassert os.getcwd().startswith(%r)\nopen('a', 'w').write('b')\nassert os.listdir() == ['a']"
        assert judge(Job(code % folder), LIMITS) == sandbox.Verdict(Ending.PASSED)


def test_devices_services_and_the_kernels_settings_are_out_of_reach() -> None:
    code = (
        "import os\n"
        "assert set(os.listdir('/dev')) == {'fd', 'full', 'null', 'random', 'shm', 'urandom', 'zero'}\n"
        "assert os.listdir('/run') == os.listdir('/dev/shm') == []\n"
        "open('/dev/null', 'w').write('x')\nassert len(open('/dev/urandom', 'rb').read(4)) == 4\n"
        "for path in ('/proc/sys/vm/drop_caches', '/proc/sysrq-trigger', '/proc/self/oom_score_adj', '/dev/new'):\n"
        "    try: open(path, 'w')\n    except OSError: pass\n    else: raise ValueError(path)\n"
        "import multiprocessing\nwith multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1]) == [1]"
    )
    assert judge(Job(code), LIMITS) == sandbox.Verdict(Ending.PASSED)


def test_its_own_folder_is_empty_writable_and_gone_afterwards(tmp_path: Path) -> None:
    code = (
        "import os, tempfile\nassert os.listdir() == []\nopen('a', 'w').write('b')\nassert open('a').read() == 'b'\n"
        "assert tempfile.gettempdir() == os.getcwd() == os.path.expanduser('~')\nassert os.path.exists(os.getcwd())"
    )
    assert judge(Job(code), LIMITS).reason == ""
    assert judge(Job(code), LIMITS).ending is Ending.PASSED


def test_it_sees_neither_the_environment_nor_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    code = (
        "import os\nassert 'SECRET_TOKEN' not in os.environ\nassert os.getpid() < 10\n"
        f"try: os.kill({os.getpid()}, 0)\nexcept ProcessLookupError: pass\nelse: raise SystemExit"
    )
    assert judge(Job(code), LIMITS) == sandbox.Verdict(Ending.PASSED)


def test_it_may_start_processes_and_threads_of_its_own() -> None:
    code = (
        "import subprocess, threading\n"
        "assert subprocess.run(['sh', '-c', 'echo hi'], capture_output=True).stdout == b'hi\\n'\n"
        "thread = threading.Thread(target=print)\nthread.start()\nthread.join()\n"
        "import numpy\nassert numpy.ones(3).sum() == 3"
    )
    assert judge(Job(code), LIMITS) == sandbox.Verdict(Ending.PASSED)


def test_it_has_no_power_in_its_namespaces() -> None:
    """It cannot undo what confines it."""
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.mount(b'tmpfs', b'/mnt', b'tmpfs', 0, None) == -1\n"
        "assert libc.mount(None, b'/', None, 32, None) == -1\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "assert int(status['CapEff'], 16) == int(status['CapPrm'], 16) == 0, status\n"
        "assert int(status['NoNewPrivs']) == 1"
    )
    assert judge(Job(code), LIMITS) == sandbox.Verdict(Ending.PASSED)
