"""Plans made by the tool are what the trainer reads; without one it says how to make it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SmallData
from tests.launcher import Commands, Done
from tests.runs import CONFIG, read_jsonl

SCRIPT, TOOL = "pretrain_skyladder.py", "tools/pack_data.py"


@pytest.fixture
def pack(alone: Commands) -> Callable[..., Done]:
    return lambda *flags: alone.attempt(TOOL, *flags)[0]


def copied(data: SmallData, folder: Path) -> list[object]:
    """Flags for a data set of its own, so that plans of other tests do not lie beside it."""
    for suffix in (".bin", ".idx"):
        (folder / f"corpus{suffix}").write_bytes(Path(f"{data.prefix}{suffix}").read_bytes())
    flags = ["--data-path", folder / "corpus", "--tokenizer-model", data.tokenizer, "--seq-length", 128]
    return [*flags, "--train-iters", 2, "--lr-warmup-iters", 1, "--document-mask", "--eval-interval", 0]


def test_a_run_reads_the_plan_that_its_flags_made(
    alone: Commands, pack: Callable[..., Done], small_data: SmallData, tmp_path: Path
) -> None:
    flags = [*copied(small_data, tmp_path), "--packing", "best_fit"]
    (missing,) = alone.attempt(SCRIPT, *CONFIG, *flags)
    assert missing.status == 2
    assert "has no best_fit plan for seq_length 128" in missing.stderr.splitlines()[-1]
    made = pack(*flags)
    assert made.status == 0, made.stderr
    (line,) = [line for line in made.stdout.splitlines() if line.startswith("best_fit")]
    assert line.split()[1] == "100.0%"
    alone.run(SCRIPT, *CONFIG, *flags, "--save", tmp_path / "run")
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2
    (other,) = alone.attempt(SCRIPT, *CONFIG, *flags, "--seed", 77)
    assert other.status == 2


def test_a_plan_is_made_once_and_again_where_it_is_damaged(
    pack: Callable[..., Done], small_data: SmallData, tmp_path: Path
) -> None:
    flags = [*copied(small_data, tmp_path), "--packing", "carry_over"]
    first = pack(*flags)
    assert first.status == 0, first.stderr
    (pieces,) = (tmp_path / "corpus.packing").glob("*/pieces.npy")
    whole, made = pieces.read_bytes(), pieces.stat().st_ino
    assert pack(*flags).stdout.splitlines()[1:] == first.stdout.splitlines()[1:]
    assert pieces.stat().st_ino == made
    pieces.write_bytes(whole[:200])
    assert pack(*flags).status == 0
    assert pieces.read_bytes() == whole


def test_all_stages_are_packed_at_once(pack: Callable[..., Done], small_data: SmallData, tmp_path: Path) -> None:
    flags = copied(small_data, tmp_path)
    stages = [{"name": name, "data": {"packing": name}} for name in ("best_fit", "random", "carry_over")]
    (tmp_path / "run.yaml").write_text(json.dumps({"stages": stages}))
    made = pack("--config", tmp_path / "run.yaml", *flags)
    assert made.status == 0, made.stderr
    found = [folder.name.split("-")[0] for folder in (tmp_path / "corpus.packing").iterdir()]
    assert sorted(found) == ["best_fit", "carry_over"]
