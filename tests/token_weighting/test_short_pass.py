"""The short-context pass, token by token against chunks unfolded by hand.

Where losses land, on several processes too, is compared in tests/parity/test_oracle.py and test_layouts.py.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.batch import Tokens
from megatron_ext.layout import PackedLayout
from megatron_ext.masks import LayerMasks, MaskOptions
from megatron_ext.short_context import ShortContext
from megatron_ext.token_weighting.short_pass import Division, ShortPass, short_pass

LABEL = 1000  # the label of the token with number i is LABEL + i


@dataclass(frozen=True)
class Case:
    """Micro-batches of rows whose token i, counted over all of them, is the number i.

    Attributes:
        masks: of each micro-batch.
        together: the same of all rows.
        length: L.
        short: the chunks.
    """

    masks: list[LayerMasks]
    together: LayerMasks
    length: int
    short: ShortContext

    @property
    def tokens(self) -> Tokens:
        numbers = np.arange(self.total)
        return Tokens(numbers, LABEL + numbers, np.ones(len(numbers), dtype=np.bool_))

    @property
    def total(self) -> int:
        return sum(mask.widest.tokens for mask in self.masks)

    def run(self, division: Division) -> ShortPass:
        return short_pass(self.tokens, self.together, self.short, division, None)

    def first_seen(self, token: int, kind: int) -> int:
        """The first token of the segment of `token` in the long context of a kind of layers."""
        batch, place = divmod(token, self.total // len(self.masks))
        mask = self.masks[batch].by_kind[kind]
        return token - place + segment_start(mask.layout, place)

    def chunk_start(self, token: int) -> int:
        """The first token of the chunk that scores `token`: chunk k scores the places n + (k-1)s .. n + ks - 1."""
        row, place = divmod(token, self.length)
        chunk = 0 if place < self.short.length else (place - self.short.length) // self.short.stride + 1
        start = row * self.length + chunk * self.short.stride
        if not self.short.every_token:
            return start
        scores = start if chunk == 0 else start + self.short.length - self.short.stride
        return max(start, self.first_dependency(scores))  # nothing before it is needed

    def is_scored(self, token: int) -> bool:
        """Return whether the token's contexts differ, or every token is scored."""
        return self.short.every_token or self.first_dependency(token) < self.chunk_start(token)

    def first_dependency(self, token: int) -> int:
        """The first token on which the model's output at `token` depends."""
        batch, place = divmod(token, self.total // len(self.masks))
        return token - place + int(self.masks[batch].first_dependencies()[place])


def segment_start(layout: PackedLayout, token: int) -> int:
    return max(int(border) for border in layout.cu_seqlens if border <= token)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length, rows, batches = draw(st.integers(1, 24)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    options = MaskOptions(
        document_mask=draw(st.booleans()),
        window_mask=draw(st.sampled_from(["grid", "sliding", "sliding_w"])),
        local_window=draw(st.none() | st.integers(1, 30)),
        global_every=2,
        num_layers=4,
    )
    window = draw(st.integers(1, length))
    ends = st.lists(st.integers(0, length), max_size=4).map(
        lambda drawn_ends: np.array(sorted(drawn_ends), dtype=np.int64)
    )
    documents = [[draw(ends) for _ in range(rows)] for _ in range(batches)]
    masks = [options.at(length, batch, window) for batch in documents]
    together = options.at(length, [row_ends for batch in documents for row_ends in batch], window)
    n = draw(st.integers(1, 14))
    short = ShortContext(n, draw(st.integers(1, n)), draw(st.booleans()))
    return Case(masks, together, length, short)


divisions = st.builds(
    Division, capacity=st.integers(1, 60), unit=st.sampled_from([1, 2, 3]), multiple=st.integers(1, 3)
)


@given(cases(), divisions)
def test_every_scored_token_sees_its_short_context_and_no_more(case: Case, division: Division) -> None:
    short_pass = case.run(division)
    for batch in short_pass.batches:
        tokens = batch.tokens_t.numpy()
        for place in batch.wanted.numpy():
            token = int(tokens[place])
            for kind, original in enumerate(case.masks[0].by_kind):
                mask = batch.masks.by_kind[kind]
                assert mask.left_window == original.left_window
                near = max(case.first_seen(token, kind), case.chunk_start(token))
                seen = tokens[segment_start(mask.layout, int(place)) : place + 1]
                np.testing.assert_array_equal(seen, np.arange(near, token + 1))
                positions = batch.positions_t.numpy()[place + 1 - len(seen) : place + 1]
                np.testing.assert_array_equal(np.diff(positions), 1)  # RoPE is relative


@given(cases(), divisions)
def test_batches_are_equally_long_and_request_only_scored_tokens(case: Case, division: Division) -> None:
    short_pass = case.run(division)
    np.testing.assert_array_equal(short_pass.scored, [case.is_scored(token) for token in range(case.total)])
    assert bool(short_pass.batches) == bool(short_pass.scored.any())
    assert len(short_pass.batches) % division.multiple == 0
    assert len({len(batch.tokens_t) for batch in short_pass.batches}) <= 1
    for batch in short_pass.batches:
        length = len(batch.tokens_t)
        assert batch.layout.tokens == length
        assert length % division.unit == 0
        assert length < division.capacity + case.short.length + division.unit
        assert not batch.trained_t.any()
        places = batch.wanted.numpy()
        np.testing.assert_array_equal(batch.labels_t.numpy()[places], LABEL + batch.tokens_t.numpy()[places])
    filled = max((int(np.count_nonzero(batch.labels_t.numpy())) for batch in short_pass.batches), default=0)
    assert all(len(batch.tokens_t) - filled < division.unit for batch in short_pass.batches)  # labels of padding are 0


BOS = 999


def test_chunks_that_cut_a_context_off_begin_with_bos() -> None:
    """Worked by hand: two rows of 10, the first of which begins with BOS; n = 6, s = 4: chunks at 0 and 4 of a row.

    Chunk 0 is the row's own beginning and never differs. The chunk at 4 sees 4..9 and scores 6..9: token 4 becomes BOS
    in the row that begins with one. Under a document mask with a document that begins at 4, it cuts nothing off.
    """

    def seen(ends: list[int], *, every_token: bool) -> list[list[int]]:
        tokens = Tokens(np.array([BOS, *range(1, 20)]), np.arange(20) + 1, np.ones(20, dtype=np.bool_))
        masks = MaskOptions(document_mask=bool(ends)).at(10, [np.array(ends, dtype=np.int64)] * 2, 10)
        short = ShortContext(6, 4, every_token)
        (batch,) = short_pass(tokens, masks, short, Division(64), None, bos_id=BOS).batches
        borders = batch.layout.cu_seqlens.tolist()
        return [batch.tokens_t[a:b].tolist() for a, b in pairwise(borders)]

    assert seen([], every_token=False) == [[BOS, 5, 6, 7, 8, 9], [14, 15, 16, 17, 18, 19]]
    assert seen([], every_token=True) == [
        [BOS, 1, 2, 3, 4, 5],
        [BOS, 5, 6, 7, 8, 9],
        [10, 11, 12, 13, 14, 15],
        [14, 15, 16, 17, 18, 19],
    ]
    assert [4, 5, 6, 7, 8, 9] in seen([4], every_token=True)
    assert [BOS, 4, 5] not in seen([3, 6], every_token=True)
