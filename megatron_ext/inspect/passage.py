"""A passage of a training row with the weight of each token, as `passage.json` holds it, ready to be shown.

The heavier a token, the darker its ground. The scale ends at a high quantile, so that one outlier does not leave
all others pale; a token of weight 0 has no ground and grey letters. Blanks, newlines and what else has no glyph
are marked: the·dog↵
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_hex
from pydantic import TypeAdapter, ValidationError

from megatron_ext.errors import UserError
from megatron_ext.token_weighting.passage import PASSAGE_FILE, Passage

INK, ZERO_INK = "#111827", "#6b7280"  # letters, and those of weight 0
MARK_ALPHA = 0.55  # of marks, in their token's ink
GROUNDS = LinearSegmentedColormap.from_list("weights", ["#fff6e5", "#fdd49a", "#f08c4f"])
TOP_QUANTILE = 0.98  # of the weights other than 0: where the scale ends
_STEPS = 5  # of the legend
_MARKS = {" ": "\N{MIDDLE DOT}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW}"}


class Piece(NamedTuple):
    """Holds characters of a token's text, and the mark that stands for them; "" where they show themselves."""

    text: str
    mark: str


class Token(NamedTuple):
    """Says what is drawn of a token; `ground` is #rrggbb, or "" for weight 0."""

    pieces: tuple[Piece, ...]
    ground: str
    hint: str  # position, id, weight and score


class Swatch(NamedTuple):
    """Shows a weight of the legend and its `Token.ground`."""

    label: str
    ground: str


@dataclass(frozen=True)
class PassageView:
    """Holds a passage as the page and the picture show it; tokens stand `apart` where they are ids."""

    caption: str
    legend: tuple[Swatch, ...]
    tokens: tuple[Token, ...]
    apart: bool


@dataclass(frozen=True)
class Scale:
    """Spans the weights from the lowest that is not 0 to a high quantile of them, where darkness ends."""

    low: float
    high: float
    highest: float
    zeros: int  # how many tokens weigh 0

    def ground(self, weight: float) -> str:
        """Choose the ground of a weight: #rrggbb, or "" for weight 0."""
        if weight == 0:
            return ""
        if self.high > self.low:
            return to_hex(GROUNDS(min(1.0, (weight - self.low) / (self.high - self.low))))
        heaviest = self.zeros > 0 if self.highest == self.high else weight > self.high
        return to_hex(GROUNDS(1.0 if heaviest else 0.0))

    def legend(self) -> Iterator[Swatch]:
        """Yield swatches from 0, if any token weighs that, to the end of the scale."""
        if self.zeros:
            yield Swatch("0", "")
        if self.high > self.low:
            for weight in np.linspace(self.low, self.high, _STEPS)[:-1].tolist():
                yield Swatch(_number(weight), self.ground(weight))
        elif self.highest > self.high:
            yield Swatch(_number(self.low), self.ground(self.low))
        if self.highest > self.high:
            yield Swatch(f"{_number(self.high)} to {_number(self.highest)}", self.ground(self.highest))
        elif self.highest:
            yield Swatch(_number(self.high), self.ground(self.high))


def read_passage(run_folder: Path | str) -> Passage:
    """Read `passage.json` of a run folder.

    Raises:
        UserError: there is none, it is damaged or incomplete, or its lists differ in length.
    """
    path = Path(run_folder) / PASSAGE_FILE
    if not path.is_file():
        raise UserError(
            f"{path}: not found, needs a run with token weighting, after its first weighted step; name such a run"
        )
    try:
        passage = TypeAdapter(Passage).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f"`{part}`" for part in first["loc"])
        raise _damaged(path, f"{field or 'damaged'}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    for name in ("texts", "weights", "scores"):
        column = getattr(passage, name)
        if column is not None and len(column) != len(passage.tokens):
            raise _damaged(path, f"`{name}` has {len(column)} entries, needs {len(passage.tokens)} as `tokens`")
    return passage


def view_passage(passage: Passage) -> PassageView:
    """Cut the tokens' texts into pieces and give each token its ground."""
    scale = scale_of(passage.weights)
    tokens = []
    for index, (token, weight, score) in enumerate(zip(passage.tokens, passage.weights, passage.scores, strict=True)):
        if passage.texts is None:
            shown: tuple[Piece, ...] = (Piece(str(token), ""),)
        else:  # a token without a text is shown by its id
            shown = tuple(pieces(passage.texts[index])) or (Piece("", f"#{token}"),)
        hint = (
            f"token {passage.start + index:,}, id {token}: weight {_number(weight)}, "
            f"score {'not finite' if score is None else _number(score)}"
        )
        tokens.append(Token(shown, scale.ground(weight), hint))
    last = passage.start + len(tokens) - 1
    zeros = f"; {scale.zeros} of {len(tokens)} weigh 0" if scale.zeros else ""
    return PassageView(
        caption=f"step {passage.step:,}, tokens {passage.start:,} to {last:,} of a row{zeros}",
        legend=tuple(scale.legend()),
        tokens=tuple(tokens),
        apart=passage.texts is None,
    )


def scale_of(weights: tuple[float, ...]) -> Scale:
    """Make the scale for these weights; 0 to 0 where all of them are 0."""
    values = np.array(weights)
    drawn = values[values != 0] if values.any() else np.zeros(1)
    low, high, highest = drawn.min(), np.quantile(drawn, TOP_QUANTILE), drawn.max()
    return Scale(float(low), float(high), float(highest), int(np.count_nonzero(values == 0)))


def pieces(text: str) -> Iterator[Piece]:
    r"""Yield what shows itself, in runs, and what does not, one by one: blanks, and characters such as \x1b."""
    for hidden, run in groupby(text, lambda char: char == " " or not char.isprintable()):
        if not hidden:
            yield Piece("".join(run), "")
            continue
        for char in run:
            known = char in _MARKS
            yield Piece(char if known else "", _MARKS[char] if known else ascii(char)[1:-1])


def _number(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: {reason}; delete the file, a run that goes on writes it anew")
