"""What a continued run may change: free, with a word, never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.checkpoint.changes import check, differences
from megatron_ext.config import Config
from megatron_ext.config.arguments import from_dict, parse, to_dict
from megatron_ext.errors import UserError

BASE = "--data-path x --vocab-size 64 --window-schedule linear --window-rate 1 --train-iters 100"
BYTES = "--vocab-size none --tokenizer-model bytes"


def changed(flags: str, step: int = 10, base: str = BASE) -> list[str]:
    return [
        change.name for change in check(to_dict(parse(base.split())), parse([*base.split(), *flags.split()]), step, "X")
    ]


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2",
        "--use-distributed-optimizer",
        "--micro-batch-size 2",
        "--eval-interval 5",
        "--loss-block-tokens 64",
        "--train-iters 200 --lr-decay-iters 100",
        "--train-iters 50 --lr-decay-iters 100",
    ],
)
def test_free(flags: str) -> None:
    assert flags.split()[0].removeprefix("--").replace("-", "_") in changed(flags)


@pytest.mark.parametrize("flags", ["--save a", "--no-tensorboard", "--save-interval 3", "--wandb-exp-name x"])
def test_free_and_not_worth_a_word(flags: str) -> None:
    assert changed(flags) == []


def test_a_mixture_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text("[{prefix: a, packing: whole_document, packing_options: [below=99]}]")
    config = parse(["--mixture", str(tmp_path / "mixture.yaml"), "--vocab-size", "64"])
    assert differences(json.loads(json.dumps(to_dict(config))), config) == []


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--lr 1e-3", "lr 0.0004 -> 0.001"),
        ("--data-path y", "data_path ['x'] -> ['y']"),
        ("--seed 5", "seed 1234 -> 5"),
        ("--global-batch-size 16", "global_batch_size 8 -> 16"),
        ("--seq-length 256", "seq_length 512 -> 256"),
        ("--window-rate 2", "window_rate 1.0 -> 2.0"),
        ("--rotary-base 1e6", "rotary_base 10000.0 -> 1000000.0"),
        ("--hidden-dropout 0.1", "hidden_dropout 0.0 -> 0.1"),
        ("--train-iters 200", "train_iters 100 -> 200"),  # stretches the cosine
        ("--z-loss 1e-4", "z_loss 0.0 -> 0.0001"),
    ],
)
def test_with_a_word(flags: str, name: str) -> None:
    field = name.split()[0]
    with pytest.raises(UserError) as caught:
        changed(flags)
    assert str(caught.value) == (
        f"load: X was made with other options: {name}; "
        f"restore them, or add --override {field} to go on with the new ones"
    )
    with pytest.raises(UserError):
        changed(f"{flags} --override adam_eps")
    assert field in changed(f"{flags} --override {field}")


def test_a_longer_cosine_changes_even_a_finished_run() -> None:
    with pytest.raises(UserError, match="train_iters 100 -> 200"):
        changed("--train-iters 200", step=100)


def test_a_longer_run_at_a_constant_rate_changes_nothing() -> None:
    assert changed("--train-iters 200", base=f"{BASE} --lr-decay-style constant") == ["train_iters"]


def test_a_schedule_made_of_the_length_does_change() -> None:
    stretched = BASE.replace("--window-rate 1", "--window-expansion-fraction 0.5") + " --lr-decay-style constant"
    with pytest.raises(UserError, match="train_iters 100 -> 200"):
        changed("--train-iters 200", base=stretched)


@pytest.mark.parametrize(
    "flags", ["--hidden-size 64", "--num-layers 2", "--vocab-size 128", "--bf16", "--add-qkv-bias"]
)
def test_impossible_with_any_word(flags: str) -> None:
    field = flags.split()[0].removeprefix("--").replace("-", "_")
    with pytest.raises(UserError, match=f"^{field}: got .*, X needs "):
        changed(f"{flags} --override {field}")


def test_options_of_other_versions() -> None:
    """One that the old version did not know had its default, one that this version does not know is left out."""
    saved = to_dict(parse(BASE.split()))
    del saved["training"]["z_loss"], saved["model"]["add_qkv_bias"], saved["weighting"]
    saved["data"]["of_yesterday"] = 3
    assert check(saved, parse(BASE.split()), 10, "X") == []
    assert from_dict(saved) == parse(BASE.split())
    with pytest.raises(UserError, match=r"z_loss 0\.0 -> 0\.1; restore"):
        check(saved, parse([*BASE.split(), "--z-loss", "0.1"]), 10, "X")
    with pytest.raises(UserError, match="add_qkv_bias: got True, X needs False"):
        check(saved, parse([*BASE.split(), "--add-qkv-bias"]), 10, "X")


@pytest.mark.parametrize(
    ("before", "after", "refusal"),
    [
        ("", "--kv-channels 32", None),
        ("--kv-channels 32", "--kv-channels none", None),
        ("", "--kv-channels 64", "kv_channels: got 64, X needs 32; use its config.yaml"),
        (BYTES, "--vocab-size 257", None),
        (f"{BYTES} --vocab-size 257", "--vocab-size none", None),
        (BYTES, "--vocab-size 300", "vocab_size: got 300, X needs 257; use its config.yaml"),
        (f"{BYTES} --vocab-size 300", "--vocab-size none", "vocab_size: got 257, X needs 300; use its config.yaml"),
    ],
)
def test_sizes_that_are_left_out_are_compared_as_they_come_out(before: str, after: str, refusal: str | None) -> None:
    base = f"{BASE} {before}"
    if refusal is None:
        assert changed(after, base=base) == []
    else:
        with pytest.raises(UserError, match=f"^{refusal}$"):
            changed(after, base=base)


def test_a_vocabulary_whose_tokenizer_is_gone_is_left_to_the_tensors() -> None:
    saved = to_dict(parse(f"{BASE} {BYTES}".split()))
    saved["data"]["tokenizer_model"] = "nowhere"
    now = parse([*f"{BASE} {BYTES}".split(), "--vocab-size", "300", "--override", "tokenizer_model"])
    assert [change.name for change in check(saved, now, 10, "X")] == ["tokenizer_model"]


def test_from_dict_is_the_inverse() -> None:
    assert from_dict(to_dict(Config())) == Config()
