"""Interrupted preprocessing: kills, full disks, bad documents, changed inputs; and what --resume reuses."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import _ExecutorManagerThread
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.preprocess.encode import Report, finish_part, usable
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess, work_folder
from tests.conftest import refused, slow_but
from tests.faults.test_run_folder import holding
from tests.launcher import ROOT, wait_until

SUFFIXES = (".bin", ".idx", ".json")


def make(folder: Path) -> PreprocessOptions:
    corpus = folder / "corpus"
    corpus.mkdir()
    for name in "ab":
        rows = [{"text": f"{name}{i} " * 100 if i % 20 else "", "repo": i % 7} for i in range(60)]  # 3 are empty
        (corpus / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreprocessOptions([str(corpus)], str(folder / "data"), "bytes", shard_bytes=4000)


@pytest.fixture
def options(tmp_path: Path) -> PreprocessOptions:
    return make(tmp_path)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The dataset of an undisturbed run."""
    calm = make(tmp_path_factory.mktemp("calm"))
    preprocess(calm)
    return dataset(calm)


def dataset(options: PreprocessOptions, suffixes: Sequence[str] = (".bin", ".idx")) -> dict[str, bytes]:
    """Return what there is of PREFIX.bin and .idx; the metadata, .json, names the folder."""
    paths = {suffix: Path(options.output_prefix + suffix) for suffix in suffixes}
    return {suffix: path.read_bytes() for suffix, path in paths.items() if path.exists()}


def parts(options: PreprocessOptions) -> Path:
    return Path(f"{options.output_prefix}.parts")


def finished(options: PreprocessOptions) -> int:
    return len(list(parts(options).glob("*.npz")))


def spoil(options: PreprocessOptions, line: str = "nonsense\n") -> Path:
    """A bad line at the end of the second file; the file."""
    file = Path(options.inputs[0]) / "b.jsonl"
    file.write_text(file.read_text() + line)
    return file


def test_a_bad_line_stops_and_keeps_what_is_finished(options: PreprocessOptions, wanted) -> None:
    file = spoil(options)
    assert " finished parts are kept" in refused(preprocess, replace(options, workers=2))
    assert dataset(options, SUFFIXES) == {}
    assert finished(options) >= 5
    assert "data.parts holds an unfinished run; pass --resume" in refused(preprocess, replace(options, workers=2))
    skipped = preprocess(replace(options, resume=True, skip_bad_lines=True))
    assert (skipped.reused >= 5, skipped.skipped, skipped.documents, skipped.empty) == (True, 1, 114, 6)
    assert skipped.problems == [f"{file}:61: invalid JSON (Expecting value at column 1)"]
    assert dataset(options) == wanted
    assert not parts(options).exists()


def test_a_mended_file_is_read_again_and_only_it(options: PreprocessOptions, wanted) -> None:
    file = Path(options.inputs[0]) / "b.jsonl"
    good, times = file.read_text(), file.stat()
    spoil(options)
    assert "finished parts are kept" in refused(preprocess, replace(options, workers=2))
    file.write_text(good)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    report = preprocess(replace(options, resume=True))
    assert 4 <= report.reused < 12
    assert dataset(options) == wanted


def test_a_complete_dataset_is_left_alone(options: PreprocessOptions, wanted) -> None:
    report = preprocess(options)
    times = [Path(options.output_prefix + suffix).stat().st_mtime_ns for suffix in SUFFIXES]
    assert preprocess(replace(options, resume=True)) == report
    only = f"{options.inputs[0]}/a.jsonl"
    for changed, name in ((replace(options, min_tokens=2), "min_tokens"), (replace(options, inputs=[only]), "sources")):
        problem = f"data.bin is complete, and was made with other {name}; pass --overwrite"
        assert problem in refused(preprocess, replace(changed, resume=True))
    text = Path(only).read_text()
    Path(only).write_text(text.replace("a1", "b1"))  # as long as before
    assert problem in refused(preprocess, replace(options, resume=True))
    assert [Path(options.output_prefix + suffix).stat().st_mtime_ns for suffix in SUFFIXES] == times
    preprocess(replace(options, resume=True, overwrite=True))
    assert dataset(options)[".bin"] != wanted[".bin"]


def command(options: PreprocessOptions, *flags: str) -> list[str]:
    where = ["--input", *options.inputs, "--output-prefix", options.output_prefix, "--tokenizer-model", "bytes"]
    tool = str(ROOT / "tools" / "preprocess_data.py")
    return [sys.executable, tool, *where, "--shard-bytes", "4000", "--workers", "2", *flags]


def test_nothing_is_lost_by_a_full_disk(options: PreprocessOptions, wanted) -> None:
    """No file may exceed 20,000 bytes: enough for a part, not for the dataset."""
    preprocess(replace(options, append_eod=False))
    old = dataset(options, SUFFIXES)
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))}
    full = subprocess.run(command(options, "--overwrite"), capture_output=True, text=True, check=False, **limited)
    assert (full.returncode, full.stdout, full.stderr.count("\n")) == (2, "", 1)
    assert f"error: {options.output_prefix}.parts: File too large" in full.stderr
    assert finished(options) == 11
    assert not list(parts(options).glob("dataset.*"))
    assert dataset(options, SUFFIXES) == old
    subprocess.run(command(options, "--overwrite", "--resume"), check=True, capture_output=True)
    assert dataset(options) == wanted


def run_and_kill(options: PreprocessOptions, rng: random.Random, *flags: str) -> int | None:
    """Kill the parent a moment after it has finished one more part; its exit status."""
    before = finished(options)
    running = subprocess.Popen(command(options, "--resume", *flags), stdout=subprocess.DEVNULL)
    assert wait_until(lambda: running.poll() is not None or finished(options) > before, 120)
    time.sleep(rng.random() * 0.01)  # the moment of the kill, not a wait for anything
    workers = psutil.Process(running.pid).children() if running.poll() is None else []
    running.kill()
    assert not psutil.wait_procs(workers, timeout=20)[1], "workers outlive their parent"
    return running.wait()


@pytest.mark.parametrize("concat_by", slow_but([None], [None, "repo"]))
def test_killed_again_and_again(options: PreprocessOptions, concat_by: str | None) -> None:
    file = Path(options.inputs[0]) / "b.jsonl"
    kills = 2
    file.write_text(file.read_text() * 12 * kills)  # far more parts than a run finishes before it is killed
    flags = ["--concat-by", concat_by] if concat_by else []
    calm = replace(options, output_prefix=f"{options.output_prefix}-calm")
    subprocess.run(command(calm, *flags), check=True, capture_output=True)
    rng = random.Random(kills)
    statuses = [run_and_kill(options, rng, *flags) for _ in range(kills)]
    assert statuses.count(-signal.SIGKILL) == kills
    assert not dataset(options)
    subprocess.run(command(options, "--resume", *flags), check=True, capture_output=True)
    assert dataset(options, SUFFIXES) == dataset(calm, SUFFIXES)
    assert json.loads(dataset(options, SUFFIXES)[".json"])["empty"] == 3 + 3 * 12 * kills
    assert not parts(options).exists()


KILLED_AT_RENAME = """
import os, pathlib, signal, sys
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess
if __name__ == "__main__":
    corpus, prefix = sys.argv[1:]
    rename, moves = pathlib.Path.replace, 0
    def replace(path, target):
        global moves
        if moves == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        moves += 1
        return rename(path, target)
    pathlib.Path.replace = replace  # in this process, which renames the dataset alone; workers rename parts
    preprocess(PreprocessOptions([corpus], prefix, "bytes", shard_bytes=4000, overwrite=True))
"""


def test_a_kill_between_the_last_renames(options: PreprocessOptions, tmp_path: Path, wanted) -> None:
    """What is readable is the old dataset, none, or the new one; --resume completes it."""
    preprocess(replace(options, append_eod=False))
    program = tmp_path / "killed.py"
    program.write_text(KILLED_AT_RENAME)
    flags = [options.inputs[0], options.output_prefix]
    assert subprocess.run([sys.executable, str(program), *flags], check=False).returncode == -signal.SIGKILL
    assert "data.idx does not exist" in refused(IndexedSource, options.output_prefix)
    preprocess(replace(options, resume=True))
    assert dataset(options) == wanted
    assert not parts(options).exists()


def signalled(options: PreprocessOptions, send: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str, str]:
    """Start a long run, send a signal once it has two parts; its exit status and what it printed."""
    file = Path(options.inputs[0]) / "b.jsonl"
    file.write_text(file.read_text() * 100)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a shell's background ignores it
    running = subprocess.Popen(command(options), **pipes, **default)
    assert wait_until(lambda: running.poll() is not None or finished(options) >= 2, 120)
    send(running)
    out, err = running.communicate()
    return running.returncode, out, err


def test_a_killed_worker_ends_the_run(options: PreprocessOptions) -> None:
    def kill_one(running: subprocess.Popen[str]) -> None:
        children = psutil.Process(running.pid).children()
        next(child for child in children if "spawn_main" in " ".join(child.cmdline())).kill()

    status, out, err = signalled(options, kill_one)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "error: workers: one of 2 was killed, perhaps for memory; pass fewer --workers" in err
    assert dataset(options, SUFFIXES) == {}


def test_a_worker_killed_while_another_starts_ends_the_run(
    options: PreprocessOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 breaks the pool while the other worker starts, 3.13 waits for the start; the run ends under both."""
    start = ProcessPoolExecutor._spawn_process
    waits = hasattr(_ExecutorManagerThread, "_terminate_broken")

    def start_late(pool: Any) -> None:
        for worker in pool._processes.values():
            worker.kill()
            assert connection.wait([worker.sentinel], 60)
            assert waits or wait_until(lambda: pool._broken, 60)
        start(pool)

    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", start_late)
    assert "workers: one of 2 was killed" in refused(preprocess, replace(options, workers=2))


def test_ctrl_c_stops_at_once_and_keeps_parts(options: PreprocessOptions) -> None:
    status, out, err = signalled(options, lambda running: os.killpg(running.pid, signal.SIGINT))
    assert (status, out) == (130, "")
    assert err == "interrupted; --resume continues from what is finished\n"
    assert 2 <= finished(options) < 500


def test_which_parts_would_be_the_same(tmp_path: Path) -> None:
    part = tmp_path / "part"
    assert not usable(part, 100, skip=False)
    finish_part(part, {}, Report(skipped=0), 100)
    assert usable(part, 100, skip=False)
    assert usable(part, 200, skip=False)  # nothing was too long
    assert not usable(part, 50, skip=False)  # something may be too long now
    finish_part(part, {}, Report(skipped=1), 100)
    assert usable(part, 100, skip=True)
    assert not usable(part, 100, skip=False)  # the bad one would stop the run
    assert not usable(part, 200, skip=True)  # the bad one may be good


def test_a_folder_in_use_or_of_other_files_is_refused(tmp_path: Path) -> None:
    used_folder, foreign_folder = tmp_path / "used.parts", tmp_path / "others.parts"
    used_folder.mkdir()
    with holding(used_folder):
        work = work_folder(str(tmp_path / "used"), resume=True, overwrite=False)
        assert "used.parts is in use by host" in refused(work.__enter__)
    foreign_folder.mkdir()
    (foreign_folder / "mine.txt").write_text("mine")
    work = work_folder(str(tmp_path / "others"), resume=False, overwrite=True)
    assert "the folder is for unfinished work and has other files" in refused(work.__enter__)
    assert (foreign_folder / "mine.txt").read_text() == "mine"
