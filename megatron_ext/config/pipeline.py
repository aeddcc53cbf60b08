"""Divide the layers of a model over pipeline stages, as text in the notation of Megatron and as numbers.

    Et*3|(t*4|)*14t*2L    E embedding, t a layer, L output layer and loss; | between model chunks; x*3 is xxx

Chunk i belongs to pipeline stage i modulo the number of stages; with as many chunks as stages, a chunk is a stage.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from pydantic_core import PydanticCustomError

_NEEDS = (
    "E, t for each layer, L, with | between chunks, of which only the first and last may lack layers: Et*7|(t*8|)*2t*7L"
)


@lru_cache(maxsize=4096)
def read_layout(text: str) -> tuple[int, ...]:
    """Return the number of layers of each model chunk, in the order of the layers.

    Raises:
        PydanticCustomError: the text is no layout; the message is what it needs.
    """
    spelled = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d{1,3})", r"([Et|L])\*(\d{1,3})"):
        spelled = re.sub(repeated, lambda found: found[1] * int(found[2]), spelled)
    if not re.fullmatch(r"Et*\|(t+\|)*t*L", spelled):
        raise PydanticCustomError("layout", _NEEDS)
    return tuple(chunk.count("t") for chunk in spelled.split("|"))


def checked_layout(text: str) -> str:
    """Return the text of a layout; raise what `read_layout` raises."""
    read_layout(text)
    return text


def write_layout(chunks: Sequence[int]) -> str:
    """Return the text of a layout whose model chunks have these numbers of layers."""
    first, *between, last = chunks
    runs = [(size, len(list(run))) for size, run in groupby(between)]
    middle = "".join(_times(f"{_times('t', size)}|", count) for size, count in runs)
    return f"E{_times('t', first)}|{middle}{_times('t', last)}L"


def _times(text: str, count: int) -> str:
    if count < 2:
        return text * count
    if len(text) > 1:
        text = f"({text})"
    return f"{text}*{count}"


def balance(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Divide layers over `chunks` model chunks, at most two more than layers, as evenly as possible.

    The embedding and the output layer count as a layer each. The first and last chunks get fewer layers than those
    before the last: stage 0 keeps activations of most micro-batches, and the last chunk has the loss.
    """
    each, larger = divmod(num_layers + 2, chunks)
    sizes = [each] * (chunks - 1 - larger) + [each + 1] * larger + [each]
    sizes[0] -= 1
    sizes[-1] -= 1
    return tuple(sizes)
