"""The comparisons with other projects: their baselines compute what they say, and their counts follow the rules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron_ext.layout import build_layout

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("plans", "best_fit", "training_step", "plain_llama", "checkouts", "skyladder")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    import importlib

    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    return {name: importlib.import_module(f"benchmarks.peers.{name}") for name in MODULES}


def test_a_padded_ring_pads_each_segment_and_sends_all(peers: dict[str, ModuleType]) -> None:
    layout = build_layout(12, [5], 12)  # segments of 5 and 7 tokens, padded to 8 each for 2 ranks
    found = peers["plans"].padded_ring(layout, 2)
    assert found.tokens == 16
    assert found.received.tolist() == [8, 8]
    assert found.pairs.tolist() == [36, 36]  # half of 2 x (8 x 9 / 2)
    moved, most, balance, tokens = found.figures(12)
    assert (moved, most, balance, tokens) == (pytest.approx(16 / 12), 8, 1, pytest.approx(16 / 12))


def test_packing_keeps_every_token(peers: dict[str, ModuleType]) -> None:
    drawn = np.maximum(np.random.default_rng(0).lognormal(np.log(849), 0.974, size=500).astype(np.int64), 1)
    sizes = peers["best_fit"].sizes_of(500, 1024)
    assert sizes.sum() == drawn.sum()
    assert 1 <= sizes.min() <= sizes.max() == 1024
    assert peers["best_fit"].ours(np.array([6, 5, 4, 3, 2]), 10) == 2


def test_a_block_mask_is_causal_and_ends_at_the_grid(peers: dict[str, ModuleType]) -> None:
    seen = peers["training_step"].block_mask(5, 2)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_the_plain_llama_computes_what_transformers_does(peers: dict[str, ModuleType]) -> None:
    config = peers["training_step"].configured("tiny-1M", 32, 1, 64)
    torch.manual_seed(0)
    plain = peers["plain_llama"].PlainLlama(config.model, 64, 32)
    theirs = peers["training_step"].transformers_model(config, 32)
    names = {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    state = theirs.state_dict()
    with torch.no_grad():
        for name, target in (*names.items(), ("norm.weight", "model.norm.weight")):
            plain.get_parameter(name).copy_(state[target])
        for number, block in enumerate(plain.blocks):
            layer = f"model.layers.{number}."
            attention, mlp = layer + "self_attn.", layer + "mlp."
            block.qkv.weight.copy_(torch.cat([state[f"{attention}{kind}_proj.weight"] for kind in "qkv"]))
            block.out.weight.copy_(state[f"{attention}o_proj.weight"])
            block.gate_up.weight.copy_(torch.cat([state[f"{mlp}{kind}_proj.weight"] for kind in ("gate", "up")]))
            block.down.weight.copy_(state[f"{mlp}down_proj.weight"])
    tokens, labels = torch.randint(64, (2, 2, 32))
    expected = theirs(tokens, labels=labels, shift_labels=labels).loss
    assert plain(tokens, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_heading_leaves_paths_of_the_machine_out(
    peers: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["plans", "--magi-attention", str(tmp_path), "--rows", "2"])
    text = peers["checkouts"].heading("plans", MagiAttention=tmp_path)
    assert text.endswith("# python -m benchmarks.peers.plans --magi-attention DIR --rows 2")
    assert str(tmp_path) not in text
    assert "MagiAttention no git" in text


def test_what_is_missing_is_one_line(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such folder, needs a checkout that has the package magi_attention there"):
        peers["checkouts"].package("magi_attention", tmp_path / "magi_attention")
