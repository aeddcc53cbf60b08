"""Files of many runs: what each run's own file would hold."""

from pathlib import Path

import pytest
import yaml

from megatron_ext.config.arguments import parse
from megatron_ext.config.matrix import expand
from tests.conftest import refused

MATRIX = """
families:
  - name: size_{size}_rate_{inverse}
    extends: base.yaml
    recipe: {title: "{size}, 1/{inverse}", differs: nothing}
    window: {window_schedule: linear}
    axes:
      size:
        small: {}
        large: {model: {num_layers: 8}, recipe: {differs: eight layers}}
      inverse:
        4: {window: {window_rate: 0.25}}
        8: {window: {window_rate: 0.125}, model: {num_layers: 9}}
    figures:
      size_small_rate_8: {remark: "1.5"}
  - name: again
    extends: runs.yaml#size_large_rate_4
    checkpoint: {save: elsewhere}
"""


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text("data: {data_path: [x]}\nmodel: {num_layers: 2}\nwindow: {window_start: 8}\n")
    (tmp_path / "runs.yaml").write_text(MATRIX)
    return tmp_path / "runs.yaml"


def run(matrix: Path, name: str, *flags: str):  # type: ignore[no-untyped-def]
    return parse(["--config", f"{matrix}#{name}", *flags])


def test_each_run_is_a_configuration_with_its_facts(matrix: Path) -> None:
    """Later axes win over earlier ones, both over the family, and that over what it extends."""
    facts = {name: entry.get("recipe") for name, entry in expand(yaml.safe_load(MATRIX), "runs.yaml").items()}
    assert facts == {
        "size_small_rate_4": {"title": "small, 1/4", "differs": "nothing"},
        "size_small_rate_8": {"title": "small, 1/8", "differs": "nothing", "published": {"remark": "1.5"}},
        "size_large_rate_4": {"title": "large, 1/4", "differs": "eight layers"},
        "size_large_rate_8": {"title": "large, 1/8", "differs": "eight layers"},
        "again": None,
    }
    options = {
        name: (config.model.num_layers, config.window.window_rate, config.window.window_start, config.checkpoint.save)
        for name in facts.keys() - {"size_small_rate_8"}
        for config in [run(matrix, name)]
    }
    assert options == {
        "size_small_rate_4": (2, 0.25, 8, "runs/size_small_rate_4"),
        "size_large_rate_4": (8, 0.25, 8, "runs/size_large_rate_4"),
        "size_large_rate_8": (9, 0.125, 8, "runs/size_large_rate_8"),
        "again": (8, 0.25, 8, "elsewhere"),
    }
    assert run(matrix, "again", "--num-layers", "3").model.num_layers == 3

    names = {"runs.yaml": "got no name of its 5 runs", "runs.yaml#size_small": "got size_small, which is none of its 5"}
    for name, text in {**names, "base.yaml#x": "this file is a single run; leave out what follows #"}.items():
        assert text in refused(parse, ["--config", f"{matrix.parent / name}"])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("size_{size}_rate_{inverse}", "rate_{inverse}", "got this name for several runs"),
        ("size_{size}_rate_{inverse}", "rate_{rate}", "got {'rate'} in a text, needs the name of an axis"),
        ("size_small_rate_8: {remark", "size_small: {remark", "figures: got size_small, needs names of its runs"),
        ("  - name: again\n", "  - nam: again\n", "families.1.name: got "),
        ("        small: {}\n", "        small: 3\n", "families.0.axes.size.small: got 3"),
    ],
)
def test_invalid_matrices(matrix: Path, old: str, new: str, text: str) -> None:
    assert old in MATRIX
    matrix.write_text(MATRIX.replace(old, new))
    assert text in refused(run, matrix, "size_small_rate_8")
