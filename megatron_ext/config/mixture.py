"""Data mixtures: data sets, their shares, how each is packed, and how its documents are split.

    - {name: books, prefix: data/books, weight: 0.3, packing: whole_document}
    - {name: code, prefix: data/code, weight: 0.3, packing: whole_document, length: 65536}
    - {name: short, weight: 0.4, mixture: shortmix.yaml}        parts of another file, together 0.4
    - {name: short, weight: 0.4, mixture: shortmix.yaml, length: 65536}     the same, each in sequences of 64K

Weights are shares of the tokens. A part packs sequences of `length` tokens, as many as fill a row; tokens do not attend
across sequences.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.packing.policies import Packing, check_options
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_yaml, typed


@dataclass(frozen=True)
class MixturePart:
    """A data set of a mixture.

    Attributes:
        prefix: of .bin and .idx.
        weight: its share of the tokens; only ratios matter.
        name: for reports (default: the last part of the prefix).
        packing: how its documents become sequences.
        packing_options: options of that policy, each NAME=VALUE.
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
        return self.name or Path(self.prefix).name

    @property
    def options(self) -> dict[str, float]:
        """The policy's options; raises UserError unless each is NAME=NUMBER."""
        numbers: dict[str, float] = {}
        for text in self.packing_options:
            name, _, value = text.partition("=")
            try:
                number = float(value)
            except ValueError:
                raise UserError(f"packing_options: got {text!r}, needs NAME=NUMBER, such as threshold=8192") from None
            if number.is_integer():
                number = int(number)
            numbers[name.strip()] = number
        return numbers

    def unfiltered(self) -> "MixturePart":
        """Return the part with all documents."""
        return replace(self, packing_options=tuple(o for o in self.packing_options if "filter_by_gain" not in o))

    def mistakes(self, row_length: int) -> Iterator[str]:
        """Yield a line for each value that is invalid for rows of this length."""
        where = f"mixture: {self.label}"
        if not (math.isfinite(self.weight) and self.weight > 0):
            yield f"{where}: got weight {self.weight}, needs a positive number; leave the part out if it has no share"
        if self.length is not None and (self.length < 1 or row_length % self.length):
            yield f"{where}: got length {self.length}, needs a divisor of seq_length {row_length}"
        try:
            check_options(self.packing, self.options, self.length or row_length)
        except UserError as error:
            yield f"{where}: {error}"


def parts_of_data_path(
    data_path: Sequence[str],
    packing: Packing = "random",
    packing_options: tuple[str, ...] = (),
    *,
    name: Literal["data_path", "valid_data_path"] = "data_path",
) -> tuple[MixturePart, ...]:
    """Parse Megatron-LM's `--data-path PREFIX` or `--data-path 0.3 A 0.7 B`; all parts have the same packing."""
    pairs = list(data_path)
    if len(pairs) == 1:
        pairs = ["1", *pairs]
    try:
        parts = tuple(
            MixturePart(prefix, weight, packing=packing, packing_options=packing_options)
            for weight, prefix in zip(map(float, pairs[::2]), pairs[1::2], strict=True)
        )
    except ValueError:
        parts = ()
    if not parts:
        flag = f"--{name.replace('_', '-')}"
        raise UserError(
            f"{name}: got {' '.join(data_path) or 'nothing'}; use {flag} PREFIX, several that exist, or a weight "
            f"before each: {flag} 0.3 A 0.7 B"
        )
    return parts


def with_weights(data_path: Sequence[str]) -> list[str]:
    """Add a weight to each of several prefixes that have none: the number of its tokens, as in Megatron-LM.

    If one of the data sets does not exist, or a word is a weight, the words stay as they are.
    """
    exist = all(Path(f"{prefix}.idx").is_file() for prefix in data_path)
    if len(data_path) < 2 or not exist:
        return list(data_path)
    return [word for prefix in data_path for word in (str(IndexedSource(prefix).token_count), prefix)]


class _Entry(BaseModel, extra="allow"):
    """An entry of a mixture as written; `mixture` names a nested file."""

    weight: Annotated[float, Field(strict=True, gt=0, le=1e300)] = 1.0
    mixture: str | None = None


def expand_mixture(mixture: Any, share: float | None = None, outer: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """Return the parts of a list or of a YAML file (a Path), and of the files nested in it, as plain values.

    A nested file is relative to the folder of its outer one. `share` is the sum to which weights are scaled (None:
    unscaled), `outer` are the files that this one is nested in.
    """
    where = "the configuration"
    folder = Path()
    if isinstance(mixture, Path):
        where = str(mixture)
        folder = mixture.parent
        if mixture.resolve() in outer:
            raise UserError(f"mixture: {mixture} includes itself; leave one of these parts out")
        outer = (*outer, mixture.resolve())
        mixture = read_yaml(mixture, "mixture")
    listed = typed(mixture, list[_Entry], where, "mixture")
    if not listed:
        raise UserError(f"mixture: {where} holds no parts; list at least one")
    total = math.fsum(entry.weight for entry in listed)
    expanded: list[dict[str, Any]] = []
    for entry in listed:
        options = dict(entry.model_extra or {})
        weight = entry.weight
        if share is not None:
            weight = share * weight / total
        if entry.mixture is None:
            expanded.append({**options, "weight": weight})
            continue
        options.pop("name", None)
        inner_options = options.keys() - {"length"}
        if inner_options:
            raise UserError(
                f"mixture: {where}: {min(inner_options)} beside `mixture`, which brings its own; leave it out"
            )
        expanded += [part | options for part in expand_mixture(folder / entry.mixture, weight, outer)]
    return expanded


def split_documents(documents: int, split: str) -> tuple[range, range, range]:
    """Divide documents into contiguous ranges for train, validation and test, as Megatron-LM's --split "98,2,0".

    Shares may have any sum; missing ones are 0. Every positive share gets at least one document.

        split_documents(100, "98,2,0") == (range(0, 98), range(98, 100), range(100, 100))
    """
    shares = parse_shares(split)
    wanted = sum(share > 0 for share in shares)
    if documents < wanted:
        raise UserError(
            f"split: {split!r} asks for {wanted} parts, but the data set has {documents} documents; "
            'set unwanted shares to 0, such as --split "1,0,0"'
        )
    borders = [0]
    for number, share in enumerate(shares, start=1):
        nearest = round(documents * sum(shares[:number]) / sum(shares))  # halves to the even number, as there
        following = sum(later > 0 for later in shares[number:])  # they, like this one, get at least one document
        border = borders[-1]
        if share > 0:
            border = min(max(nearest, border + 1), documents - following)
        borders.append(border)
    train, valid, test = map(range, borders, borders[1:])
    return train, valid, test


def parse_shares(split: str) -> list[Fraction]:
    """Parse the shares of training, validation and test; missing ones are 0."""
    try:
        shares = [Fraction(repr(float(part))) for part in split.split(",")]  # via float: 1e999999999 would not end
    except ValueError:
        shares = []
    if len(shares) > 3 or min(shares, default=-1) < 0 or not any(shares):
        raise UserError(
            f"split: got {split!r}; needs one to three shares >= 0 (train, validation, test), such as 98,2,0"
        )
    return shares + [Fraction(0)] * (3 - len(shares))
