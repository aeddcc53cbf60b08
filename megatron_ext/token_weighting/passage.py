"""`passage.json`: some tokens of a training row with their weights, for inspection."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.files.atomic import atomic_write

PASSAGE_FILE = "passage.json"

_Natural = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of one row with their latest weights.

    Attributes:
        step: the 0-based optimizer step.
        start: position of the first token in its row.
        tokens: ids [n], n >= 1.
        texts: text of each token [n]; None if the run has no tokenizer.
        weights: weight of the loss of predicting each token [n]; 0 excludes it.
        scores: before postprocessing [n]; None if a score was not finite.
    """

    step: _Natural
    start: _Natural
    tokens: Annotated[tuple[_Natural, ...], Field(min_length=1)]
    texts: tuple[str, ...] | None
    weights: tuple[FiniteFloat, ...]
    scores: tuple[FiniteFloat | None, ...]

    def write(self, run: Path) -> None:
        """Write RUN/passage.json atomically."""
        with atomic_write(run / PASSAGE_FILE) as aside:
            aside.write_text(json.dumps(asdict(self)) + "\n")


def spelled(tokens: tuple[int, ...], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the text that each token adds; "" for one that leaves a character incomplete."""
    texts, shown = [], ""
    for end in range(1, len(tokens) + 1):
        whole = tokenizer.decode(list(tokens[:end]))
        finished = not whole.endswith("\ufffd")
        texts.append(whole[len(shown) :] if finished else "")
        shown = whole if finished else shown
    return tuple(texts)
