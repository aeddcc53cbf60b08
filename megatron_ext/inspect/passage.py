"""Render a passage of a training row with the weight of each token, as stored in `passage.json`, as HTML.

A heavier token has a stronger background. The scale ends at the 98th percentile, so that one outlier does not make all
others pale. A token of weight 0 is gray. Newlines and characters without a glyph are marked.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from megatron_ext.errors import UserError
from megatron_ext.token_weighting.passage import PASSAGE_FILE, Passage

TOP_QUANTILE = 0.98  # upper end of the scale, as a quantile of the nonzero weights
_STRONGEST = 0.8  # opacity of the heaviest tokens' background
_MARKS = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n", "\t": "\N{RIGHTWARDS ARROW}\t", " ": " "}


def read_passage(run_folder: Path | str) -> Passage:
    """Read `passage.json` of a run folder.

    Raises:
        UserError: it is missing, damaged or incomplete, or its lists differ in length.
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


def passage_html(passage: Passage) -> str:
    """Return the passage as an HTML fragment: a caption, then a span for each token with its numbers as a tooltip."""
    weights = np.array(passage.weights)
    low, high = scale_of(weights)
    last, zeros = passage.start + len(weights) - 1, int(np.count_nonzero(weights == 0))
    caption = f"Step {passage.step:,}, tokens {passage.start:,} to {last:,} of a row. "
    caption += f"Background: weight {low:.3g} to {high:.3g}" + (
        f", at most {weights.max():.3g}" if len(weights) else ""
    )
    caption += f"; {zeros} of {len(weights)} have weight 0, in grey." if zeros else "."
    spans = []
    for index, (token, weight, score) in enumerate(zip(passage.tokens, passage.weights, passage.scores, strict=True)):
        text = passage.texts[index] if passage.texts is not None else f"{token} "
        shown = "".join(_MARKS.get(char) or (char if char.isprintable() else ascii(char)[1:-1]) for char in text)
        hint = f"token {passage.start + index:,}, id {token}: weight {weight:.3g}, "
        hint += "score not finite" if score is None else f"score {score:.3g}"
        style = f"background:rgba(240,130,60,{opacity(weight, low, high):.2f})" if weight else "color:#808080"
        spans.append(f'<span style="{style}" title="{escape(hint)}">{escape(shown or f"#{token}")}</span>')
    style = "white-space:break-spaces;overflow-wrap:anywhere;font:13px/1.8 ui-monospace,monospace"
    return f'<p>{caption}</p><div class="passage" style="{style}">{"".join(spans)}</div>'


def scale_of(weights: np.ndarray) -> tuple[float, float]:
    """Return the lowest weight other than 0 and the end of the scale; (0, 0) if all are 0."""
    drawn = weights[weights != 0]
    return (float(drawn.min()), float(np.quantile(drawn, TOP_QUANTILE))) if drawn.size else (0.0, 0.0)


def opacity(weight: float, low: float, high: float) -> float:
    """Return the opacity of a token's background; it increases with the weight, and is constant for equal weights."""
    if high <= low:
        return _STRONGEST / 2 if weight <= high else _STRONGEST
    return _STRONGEST * (0.1 + 0.9 * min(1.0, (weight - low) / (high - low)))


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: {reason}; delete the file, the run writes it again")
