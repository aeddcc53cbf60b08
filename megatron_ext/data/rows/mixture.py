"""Data mixtures: the data sets that rows are drawn from, how often, and how each is packed.

    - {name: books, prefix: data/books, weight: 0.3, packing: whole_document}
    - {name: code, prefix: data/code, weight: 0.3, packing: whole_document, length: 65536}
    - {name: short, weight: 0.4, mixture: shortmix.yaml}        parts of another file, together 0.4

Weights are shares of the tokens. A part packs sequences of `length` tokens, as many as fill a row: what stands in
one of them is foreign to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import yaml

from megatron_ext.data.packing.policies import check_options
from megatron_ext.data.rows.dataset import RowSource, TokenRow
from megatron_ext.errors import UserError
from megatron_ext.files.yaml_file import read_yaml

Packing = Literal[
    "random",
    "best_fit",
    "whole_document",
    "carry_over",
    "drop_tail",
    "split_drop",
    "upsample_long",
    "bm25",
    "decomposition",
]
_NESTED = {"name", "weight", "mixture"}


@dataclass(frozen=True)
class MixturePart:
    """One data set of a mixture.

    Attributes:
        prefix: of .bin and .idx.
        weight: its share of the tokens; only ratios matter.
        name: for reports (default: the last part of the prefix).
        packing: how its documents become sequences.
        packing_options: of that policy, each NAME=VALUE.
        length: tokens of a sequence, a divisor of the row length (default: the row length).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    prefix: str
    weight: float = 1.0
    name: str = ""
    packing: Packing = "random"
    packing_options: tuple[str, ...] = ()
    length: int | None = None

    @property
    def label(self) -> str:
        """Its name, or what the prefix ends with."""
        return self.name or Path(self.prefix).name

    @property
    def options(self) -> dict[str, float]:
        """The policy's options.

        Raises:
            UserError: one that is not NAME=NUMBER.
        """
        return dict(_option(text) for text in self.packing_options)

    def mistakes(self, row_length: int) -> Iterator[str]:
        """Yield a line for each value that no row of this length can have."""
        where = f"mixture: {self.label}"
        if not (math.isfinite(self.weight) and self.weight > 0):
            yield f"{where}: got weight {self.weight}, needs a positive number; leave the part out if it has no share"
        if self.length is not None and (self.length < 1 or row_length % self.length):
            yield f"{where}: got length {self.length}, needs a divisor of seq_length {row_length}"
        try:
            options = self.options
        except UserError as error:
            yield str(error)
            return
        if row_length > 0:
            try:
                check_options(self.packing, options, self.length or row_length)
            except UserError as error:
                yield f"{where}: {error}"


def _option(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        raise UserError(f"packing_options: got {text!r}, needs NAME=NUMBER, such as threshold=8192") from None
    return name.strip(), int(number) if number.is_integer() else number


def read_mixture(path: Path, share: float | None = None) -> list[dict[str, Any]]:
    """The parts of a YAML file, those of the files that it names among them, as plain values.

    Args:
        path: the file; the files that it names are relative to its folder.
        share: what the weights are scaled to sum to; None: as they stand.

    Raises:
        UserError: no file, no list of mappings, a weight that is no positive number, a file that names itself.
    """
    return list(_parts(path, share, ()))


def expand_mixture(entries: Any) -> list[dict[str, Any]]:
    """The same of a list that stands in a configuration; the files that it names are relative to the current folder.

    Raises:
        UserError: as `read_mixture`.
    """
    return list(_expand(_checked(entries, "the configuration"), Path(), None, ()))


def _parts(path: Path, share: float | None, outer: Sequence[Path]) -> Iterator[dict[str, Any]]:
    if path.resolve() in outer:
        raise UserError(f"mixture: {path} names itself; take it out of the files that it names")
    yield from _expand(_read_list(path), path, share, (*outer, path.resolve()))


def _expand(
    entries: list[dict[str, Any]], path: Path, share: float | None, outer: Sequence[Path]
) -> Iterator[dict[str, Any]]:
    total = math.fsum(entry["weight"] for entry in entries)
    for entry in entries:
        weight = entry["weight"] if share is None else share * entry["weight"] / total
        if "mixture" not in entry:
            yield entry | {"weight": weight}
            continue
        unknown = sorted(str(name) for name in set(entry) - _NESTED)
        if unknown:
            where = path if path.name else "the configuration"
            raise UserError(f"mixture: {where}: {unknown[0]} beside `mixture`, which brings its own; leave it out")
        yield from _parts(path.parent / str(entry["mixture"]), weight, outer)


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        entries = read_yaml(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"mixture: {path} cannot be read: {' '.join(str(error).split())}") from None
    return _checked(entries, path)


def _checked(entries: Any, path: Path | str) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"mixture: {path} holds no parts, needs a list of mappings with prefix and weight")
    weighted = [{"weight": 1.0} | entry for entry in entries]
    for number, entry in enumerate(weighted):
        weight = entry["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(f"mixture: {path}: part {number} has weight {weight!r}, needs a positive number")
    return weighted


class LaidSequences:
    """Rows of L tokens made of L/n sequences of n tokens, laid end to end.

        sequences    a a a a | b EOD c c        n = 4, L = 8
        ends                 4     6            every sequence begins a document
        trained      1 1 1 0   1 1  1 1         the label after a sequence is another's first token

    Row s has the sequences s * L/n .. (s+1) * L/n - 1.

    Args:
        sequences: rows of n tokens.
        row_length: L, a multiple of n.
    """

    def __init__(self, sequences: RowSource, row_length: int) -> None:
        assert row_length % sequences.row_length == 0, (row_length, sequences.row_length)
        self.sequences, self.row_length = sequences, row_length
        self.count = row_length // sequences.row_length
        self.row_tokens = sequences.row_tokens * self.count

    def row(self, sample: int) -> TokenRow:
        """The row of sample 0, 1, 2, ..."""
        rows = [self.sequences.row(sample * self.count + number) for number in range(self.count)]
        length = self.sequences.row_length
        tokens = np.concatenate([*(row.tokens[:-1] for row in rows), rows[-1].tokens[-1:]])
        trained = np.concatenate([row.trained for row in rows])
        trained[length - 1 : -1 : length] = False
        borders = np.arange(length, self.row_length, length)
        ends = np.concatenate([row.document_ends + number * length for number, row in enumerate(rows)])
        weights = [row.weights for row in rows if row.weights is not None]
        return TokenRow(tokens, np.union1d(ends, borders), trained, np.concatenate(weights) if weights else None)
