"""Documents chosen by their gain: against a list of every token's losses, ties, short documents, missing scores."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.packing.policies import build_plan
from megatron_ext.data.rows.packed import PackedRows
from megatron_ext.token_weighting.gain import document_gains, keep_by_gain
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from tests.conftest import refused
from tests.data.packing.sources import ListedSource

LENGTH = 16
SHORT = 5
SEED = 3
LENGTHS = [40, 5, 9, 17, 0, 23, 6, 1, 30, 12]


def stores(folder: Path, rows: int, losses: Any) -> list[ScoreStore]:
    """Stores of short-context losses and of whole rows, float32 [2, rows, L]."""
    score_stores = []
    for context, of_rows in zip((SHORT, LENGTH), losses, strict=True):
        facts = {"seed": SEED, "vocab_size": 9, "data": "d", "packing": "p", "tokenizer": "t", "model": "m"}
        identity = StoreIdentity(rows=rows, row_length=LENGTH, short_context=context, short_stride=1, **facts)
        store = ScoreStore.create_or_resume(folder / str(context), identity)
        for row in range(rows):
            store.write(row, of_rows[row])
        score_stores.append(store)
    return score_stores


def packed(policy: str, **options: float) -> PackedRows:
    source: Any = ListedSource(LENGTHS)
    return PackedRows(source, build_plan(policy, source, range(len(LENGTHS)), LENGTH, SEED, options), SEED)


@pytest.mark.parametrize(
    ("policy", "options"), [("best_fit", {}), ("carry_over", {}), ("upsample_long", {"threshold": 20, "factor": 2})]
)
@pytest.mark.parametrize("scored", [1.0, 0.6])
def test_gains_are_those_of_every_token(tmp_path: Path, policy: str, options: dict[str, float], scored: float) -> None:
    """Each token of a document but the first of a piece, wherever it is a label, in epochs scored in whole or part."""
    rows = packed(policy, **options)
    count = math.ceil(scored * rows.plan.rows)
    short, long = losses = np.random.default_rng(1).gamma(2.0, 1.0, (2, count, LENGTH)).astype(np.float32)
    gains = document_gains(rows, *stores(tmp_path, count, losses), 0)
    token_gains: dict[int, list[float]] = {}
    for sample in range(count):
        pieces = rows.plan.row_pieces(rows.row_index(sample)).tolist()
        owners = [(document, number) for number, (document, _, tokens) in enumerate(pieces) for _ in range(tokens)]
        for place in range(LENGTH - 1):
            if place + 1 < len(owners) and owners[place] == owners[place + 1]:
                p = math.exp(-long[sample, place])
                difference = short[sample, place] - long[sample, place]
                token_gains.setdefault(owners[place][0], []).append(p * float(difference))
    for document, length in enumerate(LENGTHS):
        if document not in token_gains:
            assert np.isnan(gains[document])
        else:
            wanted = 0.0 if length <= SHORT else math.fsum(token_gains[document]) / len(token_gains[document])
            assert gains[document] == pytest.approx(wanted, rel=1e-6, abs=1e-9), document
    assert scored == 1.0 or np.isnan(gains[[number for number, length in enumerate(LENGTHS) if length > 1]]).any()


@pytest.mark.parametrize(("share", "kept"), [(1.0, [1, 2, 3, 5, 6]), (0.6, [2, 3, 5]), (0.41, [2, 3, 5]), (1e-9, [3])])
def test_the_share_is_rounded_up_and_the_first_of_equals_is_kept(share: float, kept: list[int]) -> None:
    gains = np.array([9.0, -1.0, 0.5, 0.7, np.nan, 0.5, 0.5])
    assert keep_by_gain(share, gains, range(1, 7)).tolist() == kept
    assert "filter_by_gain" in refused(packed, "best_fit", filter_by_gain=1.1)
