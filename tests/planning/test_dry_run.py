"""--dry-run: exit status, data that is there or not, and what it must not touch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SmallData
from launcher import Commands, Done

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., Done]
SMALL = ["--config", "examples/configs/cpu_smoke.yaml", "--dry-run"]


@pytest.fixture
def run(alone: Commands) -> Run:
    return lambda *flags: alone.attempt("pretrain_skyladder.py", *flags)[0]


def test_a_recipe_for_many_gpus_on_this_machine() -> None:
    """All three stages, without their data; and nothing of CUDA, of process groups, or of Megatron is touched."""
    code = (
        "import sys, torch; torch.cuda.init = torch.distributed.init_process_group = None\n"
        "from pretrain_skyladder import main\n"
        "status = main(sys.argv[1:])\n"
        "assert 'megatron' not in sys.modules and not torch.distributed.is_initialized()\n"
        "sys.exit(status)"
    )
    flags = ["--config", "examples/configs/prolong/prolong_8b.yaml", "--dry-run", "--world-size", "512"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, done.stderr)  # 64 rows do not go around 128 replicas
    assert done.stderr.startswith("error: stage 64k: global_batch_size: got 64")
    done = subprocess.run([*command[:-1], "64"], cwd=ROOT, capture_output=True, text=True, check=False)
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


NOWHERE = ["--data-path", "/no/such", "--tokenizer-model", "none", "--vocab-size", "1024"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "data: /no/such.idx does not exist; make it with python tools/preprocess_data.py"),
        (["--tokenizer-model", "/no/such"], "tokenizer_model: /no/such does not exist"),
        (["--init-from", "/no/such"], "init_from: /no/such does not exist"),
        (["--token-weighting", "frozen", "--score-store", "/no/such"], "score_store: /no/such does not exist"),
    ],
)
def test_what_is_not_there(run: Run, flags: list[str], said: str) -> None:
    lenient, strict = run(*SMALL, *NOWHERE, *flags), run(*SMALL, "strict", *NOWHERE, *flags)
    assert (lenient.status, lenient.stderr) == (0, "")
    assert strict.status == 2
    assert strict.stdout == lenient.stdout
    lines = [line.split(maxsplit=1)[1] for line in lenient.stdout.splitlines() if line.startswith("missing")]
    assert strict.stderr.removeprefix("error: ").splitlines() == lines
    assert any(line.startswith(said) for line in lines)
    assert len(lines) == 1 + bool(flags)


def test_a_packing_plan_that_has_not_been_made(run: Run, small_data: SmallData) -> None:
    done = run(*SMALL, "strict", *small_data.flags, "--packing", "best_fit")
    assert done.status == 2
    assert "has no best_fit plan for seq_length 512" in done.stderr
    assert done.stderr.count("\n") == 1


def test_refusals(run: Run, small_data: SmallData) -> None:
    for flags, said in [
        ([*SMALL, "--world-size", 3], "global_batch_size: got 8"),
        ([*SMALL, "--world-size", 0], "world_size: got 0"),
        ([*SMALL[:2], "--world-size", 2], "world_size: got 2, needs --dry-run"),
        ([*SMALL, "lax"], "--dry-run: invalid choice: 'lax'"),
        ([*SMALL, *small_data.flags, "--vocab-size", 7], "vocab_size: got 7, needs at least the "),
    ]:
        done = run(*flags)
        assert done.status == 2
        assert done.stderr.startswith(f"error: {said}")
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_processes_are_those_of_the_environment() -> None:
    command = [sys.executable, "pretrain_skyladder.py", *SMALL, *NOWHERE]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"WORLD_SIZE": "4"}
    for flags, said in [([], "4: TP 1 x PP 1 x CP 1 x DP 4"), (["--world-size", "2"], "2: TP 1 x PP 1 x CP 1 x DP 2")]:
        done = subprocess.run([*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert said in done.stdout


def test_what_training_would_refuse(run: Run, small_data: SmallData, tmp_path: Path) -> None:
    """Where both sides are here, without `strict` too."""
    hugging_face = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64}
    hugging_face |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(hugging_face))
    (tmp_path / "run/checkpoints/iter_0000003").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (tmp_path / "store/zarr.json").write_text("{}")
    frozen = ["--token-weighting", "frozen", "--score-store", tmp_path / "store"]
    for flags, said in [
        (["--tokenizer-model", "bytes", "--vocab-size", 1024], f"{small_data.prefix} was made with another tokenizer"),
        (["--init-from", tmp_path / "model"], "num_layers: got "),
        (["--save", tmp_path / "run"], f"save: got {tmp_path}/run, which holds the checkpoints of another run"),
        (["--load", tmp_path / "none"], f"load: got {tmp_path}/none, which holds no checkpoint"),
        (frozen, f"score store {tmp_path}/store"),
    ]:
        done = run(*SMALL, *small_data.flags, *flags)
        assert (done.status, done.stderr.count("\n")) == (2, 1), done.stderr
        assert said in done.stderr
