import contextlib
import json
import sys
import tempfile
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ext.config import LoggingConfig
from megatron_ext.errors import UserError
from megatron_ext.files.jsonl import cut_back, read_jsonl
from megatron_ext.monitoring.metrics import MetricsWriter, read_by_step
from megatron_ext.monitoring.views import check_views
from tests.monitoring.records import QUIET, evaluation_record, step_record, write_run

STEPS = st.integers(min_value=-3, max_value=30)


def _lines(records: list[dict]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _steps(path: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(path)]


def _scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def _warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("megatron_ext")]


def test_the_last_record_of_each_step_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(_lines([{"step": 2, "x": 1}, {"step": 0}, {"step": 2, "x": 2}]) + b'{"step": 3')
    assert list(read_by_step(path).items()) == [(0, {"step": 0}), (2, {"step": 2, "x": 2})]


class TestCutBack:
    @given(steps=st.lists(STEPS).map(sorted), resume=STEPS, end=st.integers(min_value=0))
    @settings(deadline=None)
    def test_a_file_truncated_at_any_byte_keeps_the_whole_records_before_the_resume_step(self, steps, resume, end):
        records = [{"step": step, "text": "{}\u00e4 \n" * (index % 3)} for index, step in enumerate(steps)]
        content = _lines(records)
        end = end % (len(content) + 1)
        lengths = np.cumsum([len(_lines([record])) for record in records])
        # A record is whole with or without its newline, which is one byte.
        whole = [record for record, length in zip(records, lengths, strict=True) if end >= length - 1]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "metrics.jsonl"
            path.write_bytes(content[:end])
            assert read_jsonl(path) == whole
            cut_back(path, resume)
            assert path.read_bytes() == _lines([record for record in whole if record["step"] < resume])
            assert [file.name for file in Path(folder).iterdir()] == ["metrics.jsonl"]

    @pytest.mark.parametrize("bad", [b'{"step": 1', b'{"step": true}', b"[1]", b"\xff\xfe", b"\0\0\0"])
    def test_a_corrupt_line_in_the_middle_is_named_and_the_file_left_alone(self, tmp_path, bad):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(content := b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
        message = r"metrics\.jsonl, line 2: got .*, needs one JSON object with an integer step; restore"
        with pytest.raises(UserError, match=message):
            cut_back(path, 1)
        assert path.read_bytes() == content

    def test_only_the_end_of_a_long_file_is_read(self, tmp_path):
        """A line before the kept one may even be damaged: reports name it."""
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b"damaged\n" + _lines([{"step": step, "text": "x" * 1000} for step in range(4000)]))
        tracemalloc.start()
        cut_back(path, 3999)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < path.stat().st_size / 100
        assert path.read_bytes().endswith(_lines([{"step": 3998, "text": "x" * 1000}]))


class TestMetricsWriter:
    def test_each_line_is_in_the_file_before_the_call_returns(self, tmp_path):
        with closing(MetricsWriter(tmp_path, resume_step=0, logging=QUIET, config={})) as writer:
            writer.write("train", step_record(0, bad=np.float32("nan"), some=np.int64(7)))
            assert read_jsonl(tmp_path / "metrics.jsonl") == [step_record(0, bad=None, some=7)]
            writer.write("validation", evaluation_record(1, 3.0, by_length={128: 3.25, 512: 3.0}))
            (evaluation,) = read_jsonl(tmp_path / "evaluation.jsonl")
        assert evaluation == evaluation_record(1, 3.0, by_length={"128": 3.25, "512": 3.0})

    def test_after_a_resume_each_step_stands_once_and_its_evaluation_is_kept(self, tmp_path):
        write_run(tmp_path, 10, evaluate_every=2)
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 10, "lm_l')  # killed while writing
        write_run(tmp_path, 12, first=6)
        assert _steps(tmp_path / "metrics.jsonl") == list(range(12))
        assert _steps(tmp_path / "evaluation.jsonl") == [0, 2, 4, 6]

    def test_a_corrupt_evaluation_file_leaves_the_metrics_uncut(self, tmp_path):
        write_run(tmp_path, 10, evaluate_every=2)
        (tmp_path / "evaluation.jsonl").write_bytes(b"nonsense\n")
        with pytest.raises(UserError, match=r"evaluation\.jsonl, line 1"):
            MetricsWriter(tmp_path, resume_step=5, logging=QUIET, config={})
        assert _steps(tmp_path / "metrics.jsonl") == list(range(10))
        MetricsWriter(tmp_path, resume_step=0, logging=QUIET, config={}).close()  # a fresh run empties both
        assert [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "evaluation.jsonl")] == [b"", b""]


class TestTensorBoard:
    def test_a_resume_hides_the_replaced_steps_and_keeps_the_evaluation_at_its_step(self, tmp_path):
        options = LoggingConfig()
        config = {"model": {"layers": 2}}
        with closing(MetricsWriter(tmp_path, resume_step=0, logging=options, config=config)) as writer:
            for step in range(4):
                writer.write("train", {"step": step, "lm_loss": 9.0 - step})
            writer.write("validation", {"step": 2, "valid_loss": 5.0, "by_length": {"128": 5.5}})
            writer.write("validation", {"step": 4, "valid_loss": 4.0})
        with closing(MetricsWriter(tmp_path, resume_step=2, logging=LoggingConfig(), config={})) as writer:
            writer.write("train", {"step": 2, "lm_loss": 1.0, "attention_entropy": [1.5, float("nan")]})
        assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["attention_entropy"] == [1.5, None]
        assert _scalars(tmp_path, "train/attention_entropy/layer_1") == [(2, 1.5)]
        assert _scalars(tmp_path, "train/lm_loss") == [(0, 9.0), (1, 8.0), (2, 1.0)]
        assert _scalars(tmp_path, "validation/valid_loss") == [(2, 5.0)]
        assert _scalars(tmp_path, "validation/by_length/128") == [(2, 5.5)]

    def test_a_folder_that_cannot_be_written_is_one_warning(self, tmp_path, caplog):
        (tmp_path / "tensorboard").write_text("in its place")
        with closing(MetricsWriter(tmp_path, resume_step=0, logging=LoggingConfig(), config={})) as writer:
            for step in range(3):
                writer.write("train", step_record(step))
        (warning,) = _warnings(caplog)
        assert "TensorBoard has failed" in warning
        assert _steps(tmp_path / "metrics.jsonl") == [0, 1, 2]


class TestWandb:
    def test_a_missing_package_is_one_line(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)  # how Python itself marks a module that cannot be imported
        with pytest.raises(UserError, match=r"wandb_project needs the package wandb; pip install wandb"):
            check_views(LoggingConfig(wandb_project="p"))
        check_views(LoggingConfig())  # not asked for: not needed

    def test_an_older_version_is_one_line(self, wandb, monkeypatch):
        monkeypatch.setattr(wandb, "login", lambda key=None, verify=False: True)  # before 0.30 it had no `prompt`
        with pytest.raises(UserError, match=r"wandb_project: got wandb .*, needs 0\.30 or later"):
            check_views(LoggingConfig(wandb_project="p"))

    @pytest.mark.parametrize("key", ["", "no key"])
    def test_a_missing_login_is_one_line(self, wandb, tmp_path, monkeypatch, key):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.delenv("WANDB_MODE")
        wandb.teardown()  # it reads its environment once
        with pytest.raises(UserError, match=r"wandb_project: got p, needs a login to W&B .*WANDB_MODE=offline"):
            check_views(LoggingConfig(wandb_project="p"))
        monkeypatch.setenv("WANDB_MODE", "offline")
        wandb.teardown()
        check_views(LoggingConfig(wandb_project="p"))

    def test_a_resumed_run_goes_on_in_the_same_wandb_run(self, wandb, tmp_path):
        names = []
        for resume_step in (0, 2):
            logging = LoggingConfig(tensorboard=False, wandb_project="p")
            with closing(MetricsWriter(tmp_path, resume_step=resume_step, logging=logging, config={})) as writer:
                for step in range(resume_step, resume_step + 3):
                    writer.write("train", step_record(step))
                writer.write("validation", evaluation_record(resume_step + 3, 3.0))
            names.append((tmp_path / "wandb_id.txt").read_text())
        assert names[0] == names[1] != ""
        assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{names[0].strip()}"))) >= 1

    def test_a_server_out_of_reach_leaves_a_run_to_sync(self, wandb, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
        wandb.teardown()
        logging = LoggingConfig(tensorboard=False, wandb_project="p")
        with closing(MetricsWriter(tmp_path, resume_step=0, logging=logging, config={})) as writer:
            writer.write("train", step_record(0))
        (warning,) = _warnings(caplog)
        assert warning.startswith("warning: W&B cannot be reached")
        (synced,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
        assert synced.stat().st_size > 0

    def test_a_killed_service_is_one_warning(self, wandb, tmp_path, caplog):
        logging = LoggingConfig(tensorboard=False, wandb_project="p")
        with closing(MetricsWriter(tmp_path, resume_step=0, logging=logging, config={})) as writer:
            for child in psutil.Process().children(recursive=True):
                if child.name().startswith("wandb"):
                    child.kill()
                    child.wait()
            for step in range(3):
                writer.write("train", step_record(step))
        (warning,) = _warnings(caplog)
        assert "W&B has failed" in warning
        assert "training goes on without it" in warning
        assert _steps(tmp_path / "metrics.jsonl") == [0, 1, 2]


@pytest.fixture
def wandb(monkeypatch):
    """The package, without a server; its service ends with the test."""
    package = pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    package.teardown()
    yield package
    with contextlib.suppress(Exception):  # it may have been killed
        package.teardown()
