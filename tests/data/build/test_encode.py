"""Which tokens of a conversation are the assistant's, and the tokenizer of a worker."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.data.build.encode import assistant_mask, load_tokenizer
from megatron_ext.errors import UserError


@pytest.mark.parametrize(
    ("spans", "mask"),
    [
        ([], [0, 0, 0, 0, 0]),
        ([(2, 5)], [0, 1, 1, 0, 0]),  # exactly two tokens
        ([(3, 4)], [0, 1, 0, 0, 0]),  # inside a token
        ([(4, 5)], [0, 0, 1, 0, 0]),  # the end of a token is exclusive
        ([(0, 1), (5, 9)], [1, 0, 0, 1, 1]),
        ([(1, 6)], [1, 1, 1, 1, 0]),
        ([(9, 12)], [0, 0, 0, 0, 0]),
    ],
)
def test_tokens_that_overlap_a_span_are_trained(spans: list[tuple[int, int]], mask: list[int]) -> None:
    offsets = np.array([[0, 2], [2, 4], [4, 5], [5, 8], [8, 9]])
    assert assistant_mask(offsets, spans).tolist() == mask


def test_a_tokenizer_that_has_changed_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer: bytes has changed since the work began; start again"):
        load_tokenizer("bytes", "other fingerprint")
