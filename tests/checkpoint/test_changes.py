"""What a continued run may change: free, with a word, never."""

import random
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.changes import check, differences, same_schedules
from megatron_ext.config import Config
from megatron_ext.config.arguments import from_dict, parse, to_dict
from megatron_ext.config.checks import mistakes
from megatron_ext.errors import UserError
from tests.conftest import refused

BASE = "--data-path x --vocab-size 64 --window-schedule linear --window-rate 1 --train-iters 100"
BALANCED = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type aux_loss"  # in a micro-batch
BYTES = "--vocab-size none --tokenizer-model bytes"


def changed(flags: str, step: int = 10, base: str = BASE, now: str | None = None) -> list[str]:
    words = [*(now or base).split(), *flags.split()]
    return [change.name for change in check(to_dict(parse(base.split())), parse(words), step, "X")]


@pytest.mark.parametrize(
    ("flags", "name", "more"),
    [
        ("--lr 1e-3", "lr 0.0004 -> 0.001", ""),
        ("--train-iters 200", "train_iters 100 -> 200", ""),  # stretches the cosine
        ("--micro-batch-size 2", "micro_batch_size 1 -> 2", BALANCED),
    ],
)
def test_with_a_word(flags: str, name: str, more: str) -> None:
    field = name.split()[0]
    base = f"{BASE} {more}"
    for more_flags in ("", " --override adam_eps"):
        message = refused(changed, flags + more_flags, base=base)
        assert f"load: X was made with other options: {name}; restore them, or add --override {field} " in message
    assert field in changed(f"{flags} --override {field}", base=base)


@pytest.mark.parametrize(
    ("before", "after"), [("1 a 1 b", "2 a 2 b"), ("1 a 3 b", "25 a 75 b"), ("50 a 50 b", "0.5 a 0.5 b"), ("a", "7 a")]
)
def test_weights_of_one_ratio_are_one_mixture(before: str, after: str) -> None:
    base, same_mixture, other_mixture = (
        BASE.replace("--data-path x", f"--data-path {path}") for path in (before, after, "2 a 1 b")
    )
    assert changed("", base=base, now=same_mixture) == []
    assert "data_path ['" in refused(changed, "", base=base, now=other_mixture)


@pytest.mark.parametrize(
    ("flags", "field", "more"),
    [
        ("--hidden-size 64", "hidden_size", ""),
        ("--bf16", "bf16", ""),
        ("--kv-channels 64", "kv_channels", ""),  # 32 where it is left out
        ("--vocab-size 300", "vocab_size", BYTES),  # 257
    ],
)
def test_impossible_with_any_word(flags: str, field: str, more: str) -> None:
    assert refused(changed, f"{flags} --override {field}", base=f"{BASE} {more}").startswith(f"{field}: got ")


def test_options_of_other_versions() -> None:
    """One that the old version did not know had its default, one that this version does not know is left out."""
    saved = to_dict(parse(BASE.split()))
    del saved["training"]["z_loss"], saved["model"]["add_qkv_bias"], saved["weighting"]
    saved["data"]["of_yesterday"] = 3
    assert check(saved, parse(BASE.split()), 10, "X") == []
    assert from_dict(saved) == parse(BASE.split())
    assert "z_loss 0.0 -> 0.1; restore" in refused(check, saved, parse([*BASE.split(), "--z-loss", "0.1"]), 10, "X")
    biased = parse([*BASE.split(), "--add-qkv-bias"])
    assert "add_qkv_bias: got True, X needs False" in refused(check, saved, biased, 10, "X")


LINEAR = "--window-schedule linear"
UNFROZEN = "--token-weighting unfrozen --short-context 128"
LONGCE = "--weight-score longce --weight-post none"
EXPOSURE = "--token-weighting unfrozen --weight-score exposure --weight-post none"
LONG = "--packing upsample_long --document-mask --long-share"
FROZEN = "--token-weighting frozen --score-store s"


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("", "--kv-channels 32", []),
        ("--tokenizer-model bytes --vocab-size 257", "--tokenizer-model bytes --vocab-size none", []),
        (LINEAR, f"{LINEAR} --window-end 512", []),
        (LINEAR, f"{LINEAR} --window-rate 0.125", []),
        (LINEAR, f"{LINEAR} --window-rate 0.25", ["window_rate 0.125 -> 0.25"]),
        ("--window-schedule cyclic_jump", "--window-schedule cyclic_jump --window-cycles 1", []),
        (f"{UNFROZEN} {LONGCE}", f"{UNFROZEN} {LONGCE} --weight-clip 5", []),
        (f"{UNFROZEN} --weight-score ppmi", f"{UNFROZEN} --weight-score ppmi --weight-shift 1", []),
        (EXPOSURE, f"{EXPOSURE} --exposure-tau 128", []),
        ("", "--window-end 511", ["window_end 512 -> 511"]),
        ("--lr-first-step 20", "--lr-first-step 20 --lr-decay-iters 120", []),
        (UNFROZEN, f"{UNFROZEN} --short-stride 96", []),
        (UNFROZEN, f"{UNFROZEN} --short-stride 95", ["short_stride 96 -> 95"]),
        (f"{FROZEN} --weight-post sparse", f"{FROZEN} --weight-post sparse --weight-strength 0.4", []),
        ("--split 98,2,0", "--split 49,1", []),
        ("--packing upsample_long", "--packing upsample_long --packing-options factor=5 threshold=8192", []),
        (f"{LONG} 0.7", f"{LONG} 0.5", ["long_share 0.7 -> 0.5"]),
        ("", "--make-vocab-size-divisible-by 64", []),  # 128 token ids need no padding either way
        ("", "--make-vocab-size-divisible-by 256", ["make_vocab_size_divisible_by 128 -> 256"]),
    ],
)
def test_what_is_left_out_is_compared_as_it_comes_out(before: str, after: str, changes: list[str]) -> None:
    """The comparison works both ways round, and what was written is really another text."""
    base = ["--data-path", "x", "--vocab-size", "128", "--train-iters", "100"]
    first, second = (parse([*base, *flags.split()]) for flags in (before, after))
    for config in (first, second):
        assert list(mistakes(config, 1)) == []
    assert first != second
    assert [str(change) for change in differences(to_dict(first), second)] == changes
    assert len(differences(to_dict(second), first)) == len(changes)


DRAWN: dict[str, tuple[Any, ...]] = {
    "window_schedule": ("constant", "linear", "stepwise", "sinusoidal", "continual", "long_to_short", "cyclic_gradual"),
    "window_start": (8, 32, 64),
    "window_end": (None, 32, 64),
    "window_rate": (None, 0.125, 1.2, 2.4),
    "window_expansion_fraction": (None, 0.25, 0.5),
    "window_round_to": (8, 1024),
    "window_aligned": (False, True),
    "window_switch_step": (None, 0, 5),
    "window_cycles": (1, 2),
    "lr_decay_style": ("constant", "constant", "cosine"),
    "lr_decay_iters": (None, 40),
    "lr_warmup_iters": (0, 3),
    "lr_warmup_from_zero": (False, True),
    "train_iters": (20, 40, 480),
}


def test_what_may_go_on_without_a_word_has_the_same_windows_and_rates() -> None:
    """Up to three options at a time: one of them may bring another into effect that neither run changed."""

    def drawn(values: dict[str, Any], names: list[str]) -> dict[str, Any]:
        changed = values | {name: generator.choice(DRAWN[name]) for name in names}
        return changed if not list(mistakes(of(changed), 1)) else drawn(values, names)

    def of(values: dict[str, Any]) -> Config:
        sections: dict[str, Any] = {"data": {"data_path": ["x"], "seq_length": 64}, "model": {"vocab_size": 64}}
        for section in ("window", "optimizer", "training"):
            fields = to_dict(Config())[section]
            sections[section] = {name: value for name, value in values.items() if name in fields}
        return from_dict(sections)

    generator = random.Random(2)
    accepted = 0
    for _ in range(150):
        first = drawn({}, list(DRAWN))
        second = drawn(first, generator.sample(list(DRAWN), generator.choice((1, 2, 3))))
        before, after = of(first), of(second)
        try:
            check(to_dict(before), after, 0, "X")
        except UserError:
            continue
        accepted += first != second
        windows = before.window_schedule(), after.window_schedule()
        rates = before.learning_rate_schedule(), after.learning_rate_schedule()
        for step in range(after.training.train_iters):
            assert windows[0].window_at(step) == windows[1].window_at(step), (first, second)
            assert rates[0].at(step) == rates[1].at(step), (first, second)
    assert accepted > 5


@pytest.mark.parametrize(
    ("flags", "step", "longer", "same"),
    [
        ("--lr-decay-style constant", 0, "--train-iters 1000000000", True),
        ("--lr-decay-style cosine --lr-decay-iters 9", 9, "--train-iters 1000000000", True),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 10", 0, "--train-iters 1000000000", False),
        ("--lr-decay-iters 900000000 --train-iters 800000000", 0, "--lr-decay-iters 900000001", False),
        ("--min-lr 4e-4", 0, "--train-iters 1000000000", True),
        ("--lr-decay-style constant --window-schedule linear --window-expansion-fraction 0.5 --train-iters 1000000",
         0, "--train-iters 1000000000", False),
        ("--lr-decay-style constant --window-schedule linear --window-expansion-fraction 0.01",
         10**7, "--train-iters 1000000000", True),
    ],
)  # fmt: skip
def test_schedules_of_long_runs_are_compared_at_few_steps(flags: str, step: int, longer: str, same: bool) -> None:
    """All billion steps would take longer than a test may."""
    words = f"--data-path x --vocab-size 64 {flags}".split()
    before = parse(words)
    after = parse([*words, *longer.split()])
    assert same_schedules(before, after, step) == same


def test_a_mixture_of_one_is_that_data_path(tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text("[{prefix: a/x, weight: 0.3, packing: best_fit}]")
    mixture = parse(["--mixture", str(tmp_path / "mixture.yaml"), "--vocab-size", "64"])
    path = parse(["--data-path", "a/x", "--packing", "best_fit", "--vocab-size", "64"])
    assert differences(to_dict(mixture), path) == differences(to_dict(path), mixture) == []
    other_path = parse(["--data-path", "a/y", "--packing", "best_fit", "--vocab-size", "64"])
    assert [change.name for change in differences(to_dict(mixture), other_path)] == ["data_path", "mixture"]
