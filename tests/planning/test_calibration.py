"""Calibration recovers the shares that made the times, and refuses runs that do not determine them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.config.arguments import dump_yaml, parse
from megatron_ext.errors import UserError
from megatron_ext.planning.calibration import Timed, calibrate, read_timed
from megatron_ext.planning.step_time import Speeds, read_speeds, step_time, work_of
from tools.plan_run import main

SPEEDS = read_speeds()
ROOT = Path(__file__).resolve().parents[2]
SIZES = "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 2 --num-query-groups 2"
FLAGS = ["--config", str(ROOT / "examples/configs/cpu_smoke.yaml"), *SIZES.split(), "--seq-length", "16384"]
FLAGS += ["--vocab-size", "1024", "--micro-batch-size", "1", "--global-batch-size", "4"]


def known(matmul: float, flash4: float) -> Speeds:
    own = replace(SPEEDS.reached["hopper"], matmul=matmul, flash4=flash4)
    return replace(SPEEDS, reached=SPEEDS.reached | {"hopper": own})


def write_run(folder: Path, speeds: Speeds, windows: list[int], *, late: float = 0.0) -> None:
    """Write a run whose steps took what the model predicts at these speeds, plus waits; every fifth is `late`."""
    folder.mkdir()
    config = parse(FLAGS)
    (folder / "config.yaml").write_text(dump_yaml(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, window in enumerate(windows):
            work = work_of(config, 2, "H100", 1024, window)
            seconds = step_time(replace(work, exchanged=1.0), speeds).total
            record = {"step": step, "skipped": 0, "window": window, "cp_bytes": 0, "data_wait_s": 0.25}
            record |= {"effective_context": work.context, "save_stall_s": 0.5}
            record["step_time_s"] = seconds + 0.75 + (late if step % 5 == 4 else 0.0)
            file.write(json.dumps(record) + "\n")


WINDOWS = [window for window in (64, 512, 1024, 4096, 16384) for _ in range(20)]


def test_known_constants_come_back(tmp_path: Path) -> None:
    truth = known(0.43, 0.21)
    write_run(tmp_path / "run", truth, WINDOWS, late=3.0)
    timed = read_timed(tmp_path / "run", "H100", 2)
    fitted = calibrate(timed, SPEEDS)
    own = fitted.reached["H100"]
    assert own.matmul == pytest.approx(0.43, rel=0.01)
    assert own.flash4 == pytest.approx(0.21, rel=0.01)
    assert all(step_time(one.work, fitted).total == pytest.approx(one.seconds, rel=0.01) for one in timed)
    assert fitted.reached["hopper"] == SPEEDS.reached["hopper"]  # the other GPUs of the family keep theirs


def test_the_written_file_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", known(0.43, 0.21), WINDOWS)
    output = tmp_path / "gpus.yaml"
    asked = ["--calibrate", str(tmp_path / "run"), "--gpus", "2", "--gpu", "h100", "--output", str(output)]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "H100: matmul 0.43" in shown
    assert "groups of steps: median error 0.0%" in shown
    speeds = read_speeds(output)
    assert speeds.gpu("H100").family == "H100"
    assert speeds.reached["H100"].matmul == pytest.approx(0.43, rel=0.01)
    assert (speeds.gpu("A100"), speeds.storage) == (SPEEDS.gpu("A100"), SPEEDS.storage)


def test_one_window_does_not_tell_attention_from_products(tmp_path: Path) -> None:
    write_run(tmp_path / "run", SPEEDS, [4096] * 20)
    with pytest.raises(
        UserError, match=r"calibrate: got steps of which attention takes .*give a run whose window grow"
    ):
        calibrate(read_timed(tmp_path / "run", "H100", 2), SPEEDS)


def test_a_benchmark_file_is_read(tmp_path: Path) -> None:
    path, truth = tmp_path / "h100.jsonl", known(0.5, 0.3)
    with path.open("w") as file:
        for context in (512, 2048, 8192):
            sizes = {"preset": "1B", "seq_length": 8192, "rows": 4, "micro": 1, "vocab_size": 32000, "layers": 12}
            sizes |= {"recompute": "none"}
            line = {"part": "step", "shape": "1B-8K", "window": context, "effective_context": context, **sizes}
            file.write(json.dumps(line | {"seconds": 1.0}) + "\n")
    timed = read_timed(path, "H100", 1)
    assert [one.work.model.num_layers for one in timed] == [12, 12, 12]
    timed = [Timed(one.name, one.work, step_time(one.work, truth).total) for one in timed]
    assert calibrate(timed, SPEEDS).reached["H100"].flash4 == pytest.approx(0.3, rel=0.01)
