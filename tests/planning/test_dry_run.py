"""--dry-run: exit status, data that is there or not, and what it must not touch."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.models import write_model
from tests.conftest import VOCABULARY, SmallData
from tests.launcher import ROOT, Commands, Done
from tests.runs import CONFIG, TRAINER

Run = Callable[..., Done]
SMALL = [*CONFIG, "--dry-run"]


@pytest.fixture
def run(alone: Commands) -> Run:
    return lambda *flags: alone.attempt(TRAINER, *flags)[0]


def test_a_recipe_for_many_gpus_on_this_machine() -> None:
    """All three stages, without their data; and nothing of CUDA, of process groups, or of Megatron is touched."""
    code = """import sys, torch; torch.cuda.init = torch.distributed.init_process_group = None
from pretrain_skyladder import main
status = main("--config examples/configs/prolong/prolong_8b.yaml --dry-run --world-size 64".split())
assert "megatron" not in sys.modules and not torch.distributed.is_initialized()
sys.exit(status)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "TP 4 x PP 1 x CP 1 x DP 16" in done.stdout
    assert "TP 8 x PP 1 x CP 4 x DP 2" in done.stdout
    missing = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("missing")]
    assert missing[:2] == ["tokenizer_model:", "init_from:"]
    assert missing.count("data:") == 10 + 12 + 1  # the parts of both mixtures, and the conversations
    assert missing.count("init_from:") == 1  # the later stages begin with the weights of the one before


def test_data_that_is_there(run: Run, small_data: SmallData) -> None:
    done = run(*SMALL, "strict", *small_data.flags, "--world-size", 4, "--split", "90,10,0", "--eval-interval", 10)
    assert (done.status, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("data")]
    assert f"{small_data.prefix}: " in line
    assert "163,840 needed: " in line
    held, epochs = (float(line.split(mark)[0].split()[-1].replace(",", "")) for mark in (" tokens", " epochs"))
    assert epochs == pytest.approx(163_840 / held, abs=0.01)
    assert held == pytest.approx(0.9 * os.path.getsize(f"{small_data.prefix}.bin") / 2, rel=0.1)


def test_a_run_of_a_thousand_million_steps(run: Run, small_data: SmallData) -> None:
    grows = ["--window-schedule", "sinusoidal", "--window-rate", "none", "--window-expansion-fraction", 0.5]
    done = run(*SMALL, *small_data.flags, *grows, "--train-iters", 10**9)
    assert (done.status, done.stderr) == (0, "")
    assert "step 999,999,999   window" in done.stdout
    refused = run(*SMALL, *small_data.flags, *grows, "--train-iters", 10**9 + 1)
    assert (refused.status, refused.stderr) == (2, "error: train_iters: got 1000000001, needs at most 1000000000\n")


def test_a_separate_validation_set_is_opened_part_by_part(run: Run, small_data: SmallData, tmp_path: Path) -> None:
    """It may have fewer parts than training."""
    for file in small_data.prefix.parent.glob(f"{small_data.prefix.name}.*"):
        (tmp_path / file.name).symlink_to(file)
    second_part = tmp_path / small_data.prefix.name
    mixture = ["--data-path", 1, small_data.prefix, 2, second_part, "--tokenizer-model", small_data.tokenizer]
    flags = [*SMALL, *mixture, "--eval-interval", 10, "--valid-data-path"]
    done = run(*flags, small_data.prefix)
    absent = run(*flags, "/no/such")
    assert (done.status, absent.status, done.stderr, absent.stderr) == (0, 0, "", "")
    assert "missing" not in done.stdout
    assert "data: /no/such.idx does not exist" in absent.stdout


NOWHERE = ["--data-path", "/no/such", "--tokenizer-model", "none", "--vocab-size", "1024"]


def test_what_is_not_there(run: Run) -> None:
    flags = [*NOWHERE, "--init-from", "/no/such", "--token-weighting", "frozen", "--score-store", "/no/such"]
    lenient = run(*SMALL, *flags)
    strict = run(*SMALL, "strict", *flags)
    assert (lenient.status, lenient.stderr) == (0, "")
    assert strict.status == 2
    assert strict.stdout == lenient.stdout
    lines = [line.split(maxsplit=1)[1] for line in lenient.stdout.splitlines() if line.startswith("missing")]
    assert {line.split(" does not exist")[0] for line in lines} == {
        "data: /no/such.idx", "init_from: /no/such", "score_store: /no/such"
    }  # fmt: skip
    assert lines[0].split(" does")[0] in strict.stderr


def test_what_training_would_refuse(run: Run, small_data: SmallData, tmp_path: Path) -> None:
    """Inputs that are on this machine are compared without `strict` too."""
    write_model(tmp_path / "model", "llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    (tmp_path / "run/checkpoints/iter_0000003").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (tmp_path / "store/zarr.json").write_text("{}")
    frozen = ["--token-weighting", "frozen", "--score-store", tmp_path / "store"]
    for flags, message in [
        (["--tokenizer-model", "bytes", "--vocab-size", 1024], f"{small_data.prefix} was made with another tokenizer"),
        (["--init-from", tmp_path / "model"], "num_layers: got "),
        (["--save", tmp_path / "run"], f"save: got {tmp_path}/run, which holds the checkpoints of another run"),
        (["--load", tmp_path / "none"], f"load: got {tmp_path}/none, which holds no checkpoint"),
        (frozen, f"score store {tmp_path}/store"),
    ]:
        done = run(*SMALL, *small_data.flags, *flags)
        assert (done.status, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr
