"""The mixture as it was drawn: tokens of each data set, held against the shares that were asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.monitoring.runs import Column, Run


@dataclass(frozen=True)
class DrawnMixture:
    """Holds what a run has drawn from each of its D data sets.

    Attributes:
        names: [D].
        asked: [D], shares of the tokens that the newest start asked for; NaN where it knows no such data set.
        rows: [D], rows drawn in all recorded steps.
        tokens: [D], of these rows, without padding.
        steps: [n], of the records that tell.
        shares: [n, D], of all tokens drawn up to and with each of these steps.
    """

    names: tuple[str, ...]
    asked: Column
    rows: npt.NDArray[np.int64]
    tokens: Column
    steps: Column
    shares: npt.NDArray[np.float64]


def drawn_mixture(run: Run) -> DrawnMixture | None:
    """Add up what each step of a run has drawn from each data set; None where no record tells.

    A row counts as many tokens as the data set's rows have on average: packed rows may be padded.
    """
    known = [record for record in run.records if record.get("source_rows")]
    if not known:
        return None
    names = tuple(dict.fromkeys(name for record in known for name in record["source_rows"]))
    rows = np.array([[record["source_rows"].get(name, 0) for name in names] for record in known], dtype=np.int64)
    told: dict[str, dict[str, float]] = {}
    for start in run.history.starts:
        told |= start.get("sources", {})
    newest = run.history.starts[-1].get("sources", {}) if run.history.starts else {}
    row_tokens = np.array([told.get(name, {}).get("row_tokens", np.nan) for name in names])
    if np.isnan(row_tokens).any():  # without a history rows are taken as equally full
        row_tokens = np.ones(len(names))
    tokens = np.cumsum(rows * row_tokens, axis=0)
    return DrawnMixture(
        names=names,
        asked=np.array([newest.get(name, {}).get("share", np.nan) for name in names]),
        rows=rows.sum(axis=0),
        tokens=tokens[-1],
        steps=np.array([record["step"] for record in known], dtype=np.float64),
        shares=tokens / tokens.sum(axis=1, keepdims=True),
    )
