"""Measures of attention against dense masks in float64, and the same however tokens are shared out."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.attention.health import SINK, AttentionHealth, Probe, by_head, find, of_layers, sample_queries
from megatron_ext.context_parallel import plan
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.masks import LayerMasks, MaskOptions

LENGTH = 24
HEADS = 4
GROUPS = 2
SIZE = 8
ENDS = [np.array([5, 6, 19]), np.array([], dtype=np.int64)]  # of the documents of two rows
SCALE = SIZE**-0.5 * 1.3
ALONE = CPGroup(rank=0, size=1, group=None)
MASKS = {
    "grid": MaskOptions(document_mask=True),
    "whole rows": MaskOptions(document_mask=False),
    "sliding": MaskOptions(document_mask=True, window_mask="sliding"),
    "local": MaskOptions(document_mask=True, local_window=4, num_layers=2, global_every=2),
}


def masks_of(name: str) -> LayerMasks:
    return MASKS[name].at(LENGTH, ENDS, LENGTH if name == "whole rows" else 7)


def draw(size: float = 2.0) -> tuple[Tensor, Tensor]:
    """Queries [T, N, H] and keys [T, G, H] with scores large enough that attention is far from even."""
    chance = torch.Generator().manual_seed(3)
    query, key = (size * torch.randn(2 * LENGTH, heads, SIZE, generator=chance) for heads in (HEADS, GROUPS))
    return query, key


def dense(query: Tensor, key: Tensor, masks: LayerMasks, *, local: bool, queries: list[int]) -> dict[str, float]:
    """The measures, token by token and head by head, from what a token sees by the definition of its mask."""
    mask = masks.by_kind[local]
    assert mask is not None
    entropies = []
    firsts = []
    distances = []
    largest = []
    segment = np.repeat(np.arange(mask.layout.segments), mask.layout.lengths)
    for head in range(HEADS):
        k = key[:, head // (HEADS // GROUPS)].double()
        for i in queries:
            seen = [
                j
                for j in range(i + 1)
                if segment[j] == segment[i] and (mask.left_window is None or i - j <= mask.left_window)
            ]
            scores = k[seen] @ query[i, head].double()
            p = torch.softmax(SCALE * scores, 0)
            start = int(np.flatnonzero(segment == segment[i])[0])
            entropies.append(torch.special.entr(p).sum().item())
            firsts.append(p[seen.index(start)].item() if start in seen else 0.0)
            distances.append(sum(p[n].item() * (i - j) for n, j in enumerate(seen)))
            largest.append(scores.max().item())
    first = np.reshape(firsts, (HEADS, -1))
    return {
        "entropy": float(np.mean(entropies)),
        "sink_share": float((first.mean(axis=1) > SINK).mean()),
        "sink_pairs": float((first > SINK).mean()),
        "s_max": max(largest),
        "s_max_scaled": SCALE * max(largest),
        "distance": float(np.mean(distances)),
    }


def measured(query: Tensor, key: Tensor, masks: LayerMasks, *, local: bool, queries: np.ndarray) -> AttentionHealth:
    tokens = np.arange(len(query))
    probe = Probe.of(queries, masks, [tokens], ALONE)
    probe.observe(1, local, query, key, SCALE)
    layers, heads = probe.measured()
    assert layers == [1]
    return AttentionHealth.of(of_layers(heads).flatten().tolist())


def assert_close(health: AttentionHealth, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert getattr(health, name) == [pytest.approx(value, rel=2e-5)], name


@pytest.mark.parametrize("share", ["all", "a few at a time", "sampled"])
@pytest.mark.parametrize("kind", MASKS)
def test_measures_are_those_of_a_dense_computation(kind: str, share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if share == "a few at a time":
        monkeypatch.setattr("megatron_ext.attention.health._SCORES", 5 * HEADS * 2 * LENGTH)
    masks = masks_of(kind)
    query, key = draw()
    queries = sample_queries(1, 2, 2 * LENGTH, 9) if share == "sampled" else np.arange(2 * LENGTH)
    for local in map(bool, range(len(masks.by_kind))):
        expected = dense(query, key, masks, local=local, queries=queries.tolist())
        assert_close(measured(query, key, masks, local=local, queries=queries), expected)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", MASKS)
def test_parts_of_the_keys_merge_to_all_of_them(kind: str, size: int) -> None:
    """Each rank's part under the plan of a real micro-batch; most queries see nothing on some rank."""
    masks = masks_of(kind)
    query, key = draw()
    by_rank = plan(masks.scheduled.layout, size, "auto", left_window=masks.scheduled.left_window).rows
    queries = sample_queries(5, 0, 2 * LENGTH, 30)
    parts = []
    for rank in range(size):
        sampled = Probe.of(queries, masks, by_rank, CPGroup(rank, size, None))
        assert sorted(sampled.tokens_Q.tolist()) == queries.tolist()
        assert sampled.tokens_t[sampled.rows_q].tolist() == sampled.tokens_Q.split(sampled.counts)[rank].tolist()
        tokens = sampled.tokens_Q, sampled.tokens_t
        parts.append(find(query[tokens[0]], key[tokens[1]], *tokens, sampled.visible[0], SCALE))
    heads = by_head(torch.stack(parts, dim=1).double(), SCALE)
    health = AttentionHealth.of(of_layers(heads[:, None]).flatten().tolist())
    assert_close(health, dense(query, key, masks, local=False, queries=queries.tolist()))


def test_scores_beyond_float32s_exponent_are_measured() -> None:
    masks = masks_of("grid")
    query, key = draw(size=300.0)
    queries = np.arange(2 * LENGTH)
    expected = dense(query, key, masks, local=False, queries=queries.tolist())
    assert expected["s_max_scaled"] > 1e5
    health = measured(query, key, masks, local=False, queries=queries)
    assert health.entropy == [pytest.approx(expected["entropy"], abs=0.01)]
    assert health.distance == [pytest.approx(expected["distance"], rel=0.01)]
    assert health.s_max_scaled == [pytest.approx(expected["s_max_scaled"], rel=1e-5)]


def test_the_sample_depends_on_seed_and_step_alone() -> None:
    assert sample_queries(1, 2, 100, 10).tolist() == sample_queries(1, 2, 100, 10).tolist()
    assert sample_queries(1, 2, 100, 10).tolist() != sample_queries(1, 3, 100, 10).tolist()
    assert sample_queries(1, 2, 100, 10).tolist() != sample_queries(2, 2, 100, 10).tolist()
    assert sample_queries(1, 2, 7, 10).tolist() == list(range(7))
    assert len(set(sample_queries(2**64 - 1, 0, 100, 50).tolist())) == 50
