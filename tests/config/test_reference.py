"""docs/reference.md: every option, as the configuration has it."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ext.config import arguments
from megatron_ext.config.reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"
BESIDE = {"--help", "--config", "--stage", "--dry-run", "--world-size", "--debug"}


def rows() -> dict[str, list[str]]:
    """The cells of each option's row, by its flag."""
    cells = [re.split(r" \| ", line.strip("| ")) for line in reference() if line.startswith("| `--")]
    return {row[0].split("`")[1]: row for row in cells}


def test_the_page_is_what_the_configuration_says() -> None:
    made = PAGE.read_text(encoding="utf-8").split("<!-- tools/reference.py -->\n")[1].split("\n<!-- end -->")[0]
    assert made == "\n".join(reference()), "python tools/reference.py --write makes the page anew"


def test_every_flag_of_the_trainer_is_there() -> None:
    flags = {option for action in arguments._parser()._actions for option in action.option_strings}
    named = {flag for row in rows().values() for flag in re.findall(r"`(--[\w-]+)`", row[0])}
    assert flags - BESIDE - {"-h"} == named


def test_types_limits_and_defaults_are_in_words() -> None:
    known = rows()
    assert known["--num-layers"][1:3] == ["integer > 0 up to 10,000", "4"]
    assert known["--min-lr"][1:3] == ["number >= 0", "0.0"]
    assert known["--window-mask"][1:3] == ["`grid`, `sliding`, `sliding_w`", "grid"]
    assert known["--window-schedule"][1].startswith("`constant`, ")
    assert known["--eval-lengths"][1] == "list: integer"
    assert known["--recompute-modules"][1] == "list: `core_attn`, `layernorm`, `mlp`"
    assert known["--overlap-grad-reduce"][:2] == ["`--overlap-grad-reduce`, `--no-overlap-grad-reduce`", "yes or no"]
    assert known["--tensorboard"][2] == "yes"
