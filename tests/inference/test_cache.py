"""The cache of keys and values against attention over whole texts."""

import numpy as np
import pytest
import torch

from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.reference import attend
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.inference.cache import KeyValueCache

N, G, H, W = 4, 2, 8, 6


@pytest.mark.parametrize("left_window", [None, 2])
def test_pieces_of_texts_see_what_whole_texts_see(left_window: int | None) -> None:
    """Texts that come in pieces, next to one another, in any order; a slot is used again."""
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 5, 4]
    sizes = ((N, H), (G, H), (G, W))
    texts = [[torch.randn(n, *size, generator=generator) for size in sizes] for n in lengths]
    cache = KeyValueCache(slots=2, capacity=7)
    out: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    calls = [{0: (0, 3)}, {1: (1, 2), 0: (0, 1)}, {0: (0, 1), 1: (1, 3)}, {1: (2, 3), 0: (0, 2)}, {1: (2, 1)}]
    for call in calls:
        if call.get(1, (0, 0))[0] == 2 and done[2] == 0:
            cache.keep(1, 0)
        appended = cache.append(list(call), [count for _, count in call.values()])
        pieces = [[x[done[text] : done[text] + count] for x in texts[text]] for text, count in call.values()]
        assert appended.positions.tolist() == [
            done[text] + place for text, count in call.values() for place in range(count)
        ]
        query, key, value = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        keys, values = appended.extend(1, key, value)
        answers = attend(QKV(query, keys, values), appended.call(left_window), 0.3)
        for (text, count), answer in zip(call.values(), answers.split([c for _, c in call.values()]), strict=True):
            out[text].append(answer)
            done[text] += count
    assert done == lengths
    for text, n in enumerate(lengths):
        borders = np.array([0, n], dtype=np.int32)
        whole = attend(QKV(*texts[text]), AttentionCall.of(borders, borders, left_window), 0.3)
        torch.testing.assert_close(torch.cat(out[text]), whole)


def test_a_text_is_continued_in_several_ways() -> None:
    """What follows the tokens that are kept stands where the forgotten ones stood, and sees those before alone."""
    cache = KeyValueCache(slots=2, capacity=5)
    key = torch.randn(6, G, H)
    cache.append([0, 1], [2, 3]).extend(1, key[:5], key[:5] + 1)
    for kept in (2, 1):
        cache.append([0], [2]).extend(1, torch.randn(2, G, H), torch.randn(2, G, H))
        cache.keep(0, kept)
        after = cache.append([0], [1])
        assert after.positions.tolist() == [kept]
        seen = after.extend(1, key[5:], key[5:] + 1)
        wanted = torch.cat([key[:kept], key[5:]])
        torch.testing.assert_close(seen[0], wanted)
        torch.testing.assert_close(seen[1], wanted + 1)
        cache.keep(0, kept)
    assert cache.lengths.tolist() == [1, 3]
