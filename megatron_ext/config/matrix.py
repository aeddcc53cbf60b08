"""Files of many runs that differ along axes; each run is a separate configuration, named FILE#NAME.

    families:
      - name: rate_{rate}                        one run for each combination of choices
        extends: base.yaml                       as in a configuration
        recipe: {title: "The rate 1/{rate}"}     {axis} is replaced by the choice in all texts and names
        axes:
          rate:
            1: {window: {window_rate: 1.0}}      sections, and changes of `recipe:`
            9: {window: {window_rate: 0.1111}, recipe: {differs: a rounded rate}}
        figures:
          rate_1: {remark: loss 2.5}             `published` in one run's recipe

Later axes override earlier ones, and both override the family; the default of `checkpoint.save` is runs/NAME.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.cli import program
from megatron_ext.errors import UserError, echo

MARK = "#"
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_OWN = ("name", "axes", "figures")


def expand(content: Mapping[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of each run by name, in the order of families and axes.

    Args:
        content: content of the matrix file.
        path: path of the file, for messages.

    Raises:
        UserError: a family is not a mapping with a name and axes, a name refers to an unknown axis, two runs have the
            same name, or figures are given for an unknown run.
    """
    runs: dict[str, dict[str, Any]] = {}
    families = content["families"]
    if not isinstance(families, list) or len(content) > 1:
        raise UserError(
            f"{path}: families: got {type(families).__name__}, needs a list of families, and nothing beside it"
        )
    for number, family in enumerate(families):
        where = f"{path}: family {number}"
        if not isinstance(family, dict) or not isinstance(family.get("name"), str):
            raise UserError(f"{where}: name: got nothing, needs a name for its runs, such as rate_{{rate}}")
        if not isinstance(family.get("figures", {}), dict):
            raise UserError(f"{where}: figures: got {echo(family['figures'])}, needs a mapping from names of runs")
        own = []
        for name, run in _family(family, where):
            if name in runs:
                raise UserError(
                    f"{where}: name: got {name} twice, needs another name for each run; put the axes into it"
                )
            runs[name] = run
            own.append(name)
        for name in set(family.get("figures", {})) - set(own):
            raise UserError(f"{where}: figures: got {name}, which is none of its runs {', '.join(own[:3])}, ...")
    return runs


def pick(content: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the run named by FILE#NAME.

    Raises:
        UserError: the name is missing or unknown.
    """
    file, _, name = path.partition(MARK)
    runs = expand(content, file)
    if name not in runs:
        got = f"got {name}, which is none" if name else "got no name"
        raise UserError(
            f"{file}: {got} of its {len(runs)} runs; give one as {file}{MARK}NAME ({program('recipes')} --list)"
        )
    return runs[name]


def _family(family: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    axes = family.get("axes", {})
    if not isinstance(axes, dict) or not all(isinstance(choices, dict) for choices in axes.values()):
        raise UserError(f"{where}: axes: got {echo(axes)}, needs for each axis a mapping from its choices to sections")
    common = {section: entries for section, entries in family.items() if section not in _OWN}
    for chosen in itertools.product(*(choices.items() for choices in axes.values())):
        words = dict(zip(axes, (choice for choice, _ in chosen), strict=True))
        try:
            name = _filled(family["name"], words)
            run = _worded(common, words)
            for choice, sections in chosen:
                if not isinstance(sections, dict):
                    raise UserError(f"{where}: {choice}: got {echo(sections)}, needs a mapping of sections, or {{}}")
                run = _over(run, _worded(sections, words))
        except KeyError as error:
            known = ", ".join(map(str, axes)) or "(it has none)"
            raise UserError(f"{where}: got {{{error.args[0]}}}, needs one of its axes {known}") from None
        figures = family.get("figures", {}).get(name)
        if figures is not None:
            run = _over(run, {"recipe": {"published": figures}})
        yield name, _over({"checkpoint": {"save": f"runs/{name}"}}, run)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge one run's sections over another's, value by value."""
    merged = dict(below)
    for section, entries in above.items():
        both = isinstance(entries, dict) and isinstance(merged.get(section), dict)
        merged[section] = merged[section] | entries if both else entries
    return merged


def _worded(content: Any, words: Mapping[str, Any]) -> Any:
    """Replace {AXIS} in every text."""
    if isinstance(content, dict):
        return {name: _worded(value, words) for name, value in content.items()}
    if isinstance(content, list):
        return [_worded(value, words) for value in content]
    return _filled(content, words) if isinstance(content, str) else content


def _filled(text: str, words: Mapping[str, Any]) -> str:
    """Replace {AXIS} by the choice; {{ and }} are literal braces.

    Raises:
        KeyError: the text in braces is not an axis.
    """
    return _BRACES.sub(lambda found: found[0][0] if found[1] is None else str(words[found[1]]), text)
