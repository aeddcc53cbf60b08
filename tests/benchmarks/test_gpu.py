"""benchmarks/gpu.sh without a GPU: every part runs with small sizes, finds nothing wrong and says what it skips."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import attention  # noqa: E402
from record import Records  # noqa: E402
from results import page, read  # noqa: E402


def gpu_sh(*parts: str, output: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"OUTPUT": str(output), "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable} | environment
    command = [ROOT / "benchmarks" / "gpu.sh", *parts]
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_dry_run_of_all_parts(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = gpu_sh("all", output=output, MINUTES="40", STEPS="6")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = read(output)
    parts = ["machine", "correct", "two", "experts", "fp8", "step", "attention", "length", "loss_head"]
    assert list(dict.fromkeys(record["part"] for record in records)) == parts
    assert not [record for record in records if record.get("ok") is False]
    skipped = {record["backend"] for record in records if "skipped" in record and "backend" in record}
    assert skipped == {"torch_varlen", "flash_attn_4", "te_thd", "flash_attn"}
    records_of_two = {record["case"]: record for record in records if record["part"] == "two"}
    assert records_of_two.keys() == {"exchange", "ulysses", "tensor", "hang"}
    assert records_of_two["hang"]["stacks"]
    written = output.with_suffix(".md").read_text()
    assert all(f"## {title}" in written for title in ("Machine", "Correctness", "Two GPUs", "Attention kernels"))
    assert "made no progress" not in output.with_suffix(".log").read_text()  # that is in the log of the stopped run


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_leaves_a_record(tmp_path: Path) -> None:
    """Each case has its record, with the return code, and the cases after it run."""
    output = tmp_path / "out.jsonl"
    command = [sys.executable, HERE / "faulty_kernels.py", "parity", "--output", output, "--seconds", "80"]
    command += ["--backends", "reference", "auto", "torch_varlen"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    records = read(output)
    reference = {record["case"]: record for record in records if record["backend"] == "reference"}
    assert list(reference) == ["one key head", "empty segments", "window 1", "window 8", "window 32"]
    killed, missing, raised, wrong, right = reference.values()
    assert (killed["ok"], killed["return_code"], killed["error"]) == (False, -11, "was ended by SIGSEGV")
    assert missing["skipped"] == "No module named 'kernels'"
    assert (raised["ok"], raised["error"]) == (False, "ValueError: no such kernel")
    assert (wrong["ok"], right["ok"]) == (False, True)
    hung = [record for record in records if record["backend"] == "auto"][-1]
    assert hung["error"].startswith("takes more than")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:2] == "| "]
    assert rows[0] == ["case", "reference", "auto", "torch_varlen"]
    cells = {row[0]: [cell.partition(" ")[0] for cell in row[1:]] for row in rows[2:]}
    assert cells == {
        "one key head": ["died", "died", "cannot"],
        "empty segments": ["cannot", "cannot", "cannot"],
        "window 1": ["cannot", "cannot", "cannot"],
        "window 8": ["wrong", "wrong", "cannot"],
        "window 32": ["right", "died", "cannot"],
    }
    assert "- torch_varlen, all: runs on cuda" in done.stdout
    assert "- reference, one key head: was ended by SIGSEGV" in page(records)


def test_a_part_without_time_leaves_a_record(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = gpu_sh("machine", "loss_head", output=output, MINUTES="0")
    assert done.returncode == 1
    assert "failed: machine: benchmarks/checks.py machine" in done.stderr
    failures = [(record["part"], record["return_code"], record["error"]) for record in read(output)]
    assert failures == [("machine", 124, "took too long"), ("loss_head", 124, "took too long")]
    assert "benchmarks/checks.py machine" in output.with_suffix(".md").read_text()


def test_a_gpu_that_torch_does_not_see_is_no_dry_run(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = gpu_sh("machine", output=tmp_path / "out.jsonl", PATH=path, CUDA_VISIBLE_DEVICES="99")
    assert done.returncode == 2
    assert "nvidia-smi lists a GPU that torch does not see" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_hopeless_kernel_is_not_measured_with_shorter_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a window has taken ten times as long as the whole row; its own times are kept."""
    times = iter([(1.0, 2.0), (5.0, 20.0), (5.0, 30.0)])
    monkeypatch.setattr(attention, "select", lambda *_: None)
    monkeypatch.setattr(attention, "milliseconds", lambda *_: next(times))
    records = Records("attention", None)
    lines = []
    monkeypatch.setattr(records, "add", lambda **facts: lines.append(facts))
    attention.speed("te_thd", 64, [64, 32, 16, 8, 4], records)
    results = {line["layout"]: line.get("forward_ms", line.get("skipped")) for line in lines if not line.get("began")}
    assert [results[f"window {window}"] for window in (64, 32, 16)] == [1.0, 5.0, 5.0]
    assert results["window 8"] == results["window 4"] == "took 10 times as long as the whole row before it"


def test_the_page_says_which_kernel_is_fastest() -> None:
    """Forward and backward together, for each row and layout."""
    common = {"part": "attention", "device": "x", "date": "x", "python": "x", "versions": {}, "row": 8192}
    times = {"flash_attn_4": (1.0, 4.0), "torch_varlen": (2.0, 2.5)}
    records = [
        common | {"layout": "window 32", "backend": name, "forward_ms": forward, "backward_ms": backward}
        for name, (forward, backward) in times.items()
    ]
    assert "| 8192 | window 32 | 5 | 4.5 | torch_varlen |" in page(records)


def test_a_line_before_each_measurement_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"part": "step", "began": true}\n{"part": "step", "mfu": 1}\n')
    assert read(path) == [{"part": "step", "mfu": 1}]
