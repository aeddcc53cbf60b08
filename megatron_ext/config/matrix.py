"""Files of many runs that differ along axes; each run is a separate configuration, named FILE#NAME.

    families:
      - name: rate_{rate}                        one run for each combination of choices
        extends: base.yaml                       as in a configuration
        recipe: {title: "The rate 1/{rate}"}     {axis} is replaced by the choice in all texts; {{ and }} are braces
        axes:
          rate:
            1: {window: {window_rate: 1.0}}      sections, and changes of `recipe:`
            9: {window: {window_rate: 0.1111}, recipe: {differs: a rounded rate}}
        figures:
          rate_1: {remark: loss 2.5}             `published` in one run's recipe

Later axes override earlier ones, and both override the family; the default of `checkpoint.save` is runs/NAME.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from megatron_ext.cli import program
from megatron_ext.errors import UserError
from megatron_ext.files.reading import typed

MARK = "#"


class _Family(BaseModel, extra="allow"):
    name: str
    axes: dict[str, dict[Any, dict[str, Any]]] = {}
    figures: dict[str, dict[str, Any]] = {}

    def runs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for chosen in itertools.product(*(choices.items() for choices in self.axes.values())):
            words = dict(zip(self.axes, (choice for choice, _ in chosen), strict=True))
            run = _filled(self.model_extra, words)
            for _, sections in chosen:
                run = merge(run, _filled(sections, words))
            name = _filled(self.name, words)
            if name in self.figures:
                run = merge(run, {"recipe": {"published": self.figures[name]}})
            yield name, merge({"checkpoint": {"save": f"runs/{name}"}}, run)


def expand(content: Mapping[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of each run by name, in the order of families and axes; `path` is for messages."""
    runs: dict[str, dict[str, Any]] = {}
    for family in typed(content["families"], list[_Family], path, "families"):
        try:
            family_runs = list(family.runs())
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(f"{path}: {family.name}: got {{{error}}} in a text, needs the name of an axis") from None
        count = len(runs) + len(family_runs)
        runs.update(family_runs)
        if len(runs) < count:
            raise UserError(f"{path}: {family.name}: got this name for several runs; put all axes into it")
        unknown_names = family.figures.keys() - dict(family_runs)
        if unknown_names:
            raise UserError(f"{path}: {family.name}: figures: got {', '.join(unknown_names)}, needs names of its runs")
    return runs


def pick(content: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the run named by FILE#NAME; raise UserError if the name is missing or unknown."""
    file, _, name = path.partition(MARK)
    runs = expand(content, file)
    if name not in runs:
        got = f"got {name}, which is none" if name else "got no name"
        raise UserError(
            f"{file}: {got} of its {len(runs)} runs; give one as {file}{MARK}NAME ({program('recipes')} --list)"
        )
    return runs[name]


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge one run's sections over another's, value by value."""
    merged = dict(below)
    for section, entries in above.items():
        if isinstance(entries, dict) and isinstance(merged.get(section), dict):
            entries = merged[section] | entries
        merged[section] = entries
    return merged


def _filled(content: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(content, dict):
        return {name: _filled(value, words) for name, value in content.items()}
    if isinstance(content, list):
        return [_filled(value, words) for value in content]
    if isinstance(content, str):
        return content.format(**words)
    return content
