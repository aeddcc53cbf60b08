"""Rotary options that mean nothing together: one line each, and the nearest that pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.validation import mistakes

BASE = "--data-path x --vocab-size 64 --seq-length 512 --window-schedule linear"
YARN = "--rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 128"
LLAMA = "--rope-scaling llama3 --rope-scaling-factor 4 --rope-original-length 128"
DYNAMIC = "--rope-scaling dynamic --rope-original-length 128"
TABLE = "--rope-window-bases"

CASES = [
    ("--rope-scaling-factor 4", "rope_scaling_factor: got 4.0, rope_scaling none does not read it", ""),
    ("--rope-original-length 128", "rope_original_length: got 128, rope_scaling none does not", DYNAMIC),
    ("--rope-scaling linear", "rope_scaling_factor: got 1.0, rope_scaling linear needs more than 1", YARN),
    (
        "--rope-scaling linear --rope-scaling-factor 2 --rope-original-length 128",
        "rope_original_length: got 128, rope_scaling linear does not read it; leave it out or use dynamic or yarn or",
        "--rope-scaling linear --rope-scaling-factor 2",
    ),
    (f"{DYNAMIC} --rope-scaling-factor 0.5", "rope_scaling_factor: got 0.5, rope_scaling dynamic needs", DYNAMIC),
    (f"{DYNAMIC} --rope-beta-fast 8", "rope_beta_fast: got 8.0, rope_scaling dynamic does not", DYNAMIC),
    ("--rope-scaling dynamic", "rope_original_length: got nothing, rope_scaling dynamic needs", DYNAMIC),
    ("--rope-scaling yarn --rope-scaling-factor 4", "rope_original_length: got nothing", YARN),
    (f"{YARN} --rope-scaling-factor 1", "rope_scaling_factor: got 1.0, rope_scaling yarn needs", YARN),
    (f"{YARN} --rope-beta-fast 1", "rope_beta_fast: got 1.0, needs more than rope_beta_slow 1.0", YARN),
    (f"{YARN} --rope-low-freq-factor 2", "rope_low_freq_factor: got 2.0, rope_scaling yarn does not", LLAMA),
    (f"{YARN} --rotary-base 1", "rotary_base: got 1.0, rope_scaling yarn needs more", f"{YARN} --rotary-base 2"),
    (f"{YARN} --kv-channels 2", "kv_channels: got 2, rope_scaling yarn needs", f"{YARN} --kv-channels 4"),
    (f"{LLAMA} --rope-low-freq-factor 4", "rope_high_freq_factor: got 4.0, needs more than rope_low", LLAMA),
    (f"{LLAMA} --rope-attention-factor 2", "rope_attention_factor: got 2.0, rope_scaling llama3 does not", LLAMA),
    ("--no-rope-freq 5", "no_rope_freq: got 5, needs at most num_layers 4", "--no-rope-freq 4"),
    (f"--no-rope-freq 1 {YARN}", "no_rope_freq: got 1, which turns all angles off", f"--no-rope-freq 2 {YARN}"),
    (f"--no-rope-freq 1 {TABLE} 64:9", "no_rope_freq: got 1, which turns all", f"--no-rope-freq 2 {TABLE} 64:9"),
    (f"{TABLE} 64=9", "rope_window_bases: got '64=9', needs WINDOW:BASE", f"{TABLE} 64:9"),
    (f"{TABLE} 64:9 64:8", "rope_window_bases: got window 64 more than once", f"{TABLE} 64:9 65:8"),
    (f"{TABLE} 64:0", "rope_window_bases: got 64:0, needs a window and a base above 0", f"{TABLE} 64:1e-3"),
    (f"{TABLE} 64:nan", "rope_window_bases: got 64:nan, needs a window and a base", f"{TABLE} 64:1"),
    (f"{TABLE} 0:9", "rope_window_bases: got 0:9, needs a window and a base above 0", f"{TABLE} 1:9"),
    (f"{TABLE} 512:9", "rope_window_bases: got 512:9, needs windows below the last one, 512", f"{TABLE} 512:10000"),
    (f"{TABLE} 64:9 {YARN}", "rope_window_bases: got a table with rope_scaling yarn", f"{TABLE} 64:9"),
    (f"{TABLE} 64:9 --window-schedule constant", "rope_window_bases: got a table with window_schedule", YARN),
]


def found(flags: str) -> list[str]:
    return list(mistakes(parse(f"{BASE} {flags}".split()), 1))


@pytest.mark.parametrize(("bad", "start", "good"), CASES)
def test_mistakes(bad: str, start: str, good: str) -> None:
    (line,) = found(bad)
    assert line.startswith(start)
    assert "\n" not in line
    assert found(good) == []


def test_the_checks_need_no_torch() -> None:
    code = "import sys, megatron_ext.config.validation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
