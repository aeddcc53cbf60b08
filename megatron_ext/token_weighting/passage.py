"""`passage.json`: some tokens of a training row with their weights; written by a run, shown in its report."""

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import numpy as np

from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.reading import read_object, typed

PASSAGE_FILE = "passage.json"
TOP_QUANTILE = 0.98  # of the nonzero weights: the upper end of the color scale


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of one row with their latest weights."""

    step: int  # the 0-based optimizer step
    start: int  # position of the first token in its row
    tokens: tuple[int, ...]  # ids [n], n >= 1
    texts: tuple[str, ...] | None  # text of each token [n]; None if the run has no tokenizer
    weights: tuple[float, ...]  # weight of the loss of predicting each token [n]; 0 excludes it
    scores: tuple[float | None, ...]  # before postprocessing [n]; None if a score was not finite

    def write(self, run: Path) -> None:
        with atomic_write(run / PASSAGE_FILE) as aside:
            aside.write_text(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(run: Path) -> "Passage":
        path = run / PASSAGE_FILE
        return typed(read_object(path, "holds no JSON object; remove it"), Passage, path)

    def html(self) -> str:
        """Return an HTML fragment: a caption, then a span for each token with its numbers as a tooltip.

        A heavier token has a stronger background. The scale ends at the 98th percentile, so that one outlier does not
        make all others pale. A token of weight 0 is gray.
        """
        weights = np.array(self.weights)
        nonzero = weights[weights != 0]
        if not nonzero.size:
            nonzero = np.zeros(1)
        low = nonzero.min()
        high = np.quantile(nonzero, TOP_QUANTILE)
        caption = (
            f"Step {self.step:,}, tokens {self.start:,} to {self.start + len(weights) - 1:,} of a row. Background: "
            f"weight {low:.3g} to {high:.3g}, at most {weights.max():.3g}; {np.count_nonzero(weights == 0)} of "
            f"{len(weights)} have weight 0, in gray."
        )
        heights = (weights - low) / max(high - low, 1e-9)
        opacities = 0.08 + 0.72 * np.clip(heights, 0, 1)
        texts = self.texts or [f"{token} " for token in self.tokens]
        rows = zip(self.tokens, texts, self.weights, self.scores, opacities, strict=True)
        spans = []
        for place, (token, text, weight, score, opacity) in enumerate(rows, start=self.start):
            shown_score = "not finite" if score is None else f"{score:.3g}"
            hint = f"token {place:,}, id {token}: weight {weight:.3g}, score {shown_score}"
            style = f"background:rgba(240,130,60,{opacity:.2f})" if weight else "color:#808080"
            spans.append(f'<span style="{style}" title="{hint}">{escape(text or f"#{token}")}</span>')
        style = "white-space:break-spaces;overflow-wrap:anywhere;font:13px/1.8 ui-monospace,monospace"
        return f'<p>{caption}</p><div class="passage" style="{style}">{"".join(spans)}</div>'
