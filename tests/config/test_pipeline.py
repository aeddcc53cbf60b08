"""Layouts of pipeline stages: the notation by Megatron's own parser, and the division that the planner tries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import mistakes
from megatron_ext.config.pipeline import balance, read_layout, write_layout
from megatron_ext.errors import UserError


def theirs(text: str) -> tuple[int, ...]:
    return tuple(stage.count(LayerType.decoder) for stage in PipelineParallelLayerLayout.parse_str_to_list(text))


@given(ends=st.tuples(st.integers(0, 4), st.integers(0, 4)), middle=st.lists(st.integers(1, 3), max_size=12))
def test_what_is_written_is_read_by_megatron(ends: tuple[int, int], middle: list[int]) -> None:
    chunks = (ends[0], *middle, ends[1])
    text = write_layout(chunks)
    assert read_layout(text) == theirs(text) == chunks


@pytest.mark.parametrize("text", ["E,t*3|(t*4|)*14,tt,L", "Ettt|(tt|)*29t|L", "E(t|)*3L", "E|(t|t*2|)*2t*12L"])
def test_megatrons_notation_is_read(text: str) -> None:
    assert read_layout(text) == theirs(text)


@pytest.mark.parametrize(
    "text", ["", "tt|tt", "E|L|", "Ett|tmL", "Ett||ttL", "tE|tL", "Et|tLt", "EtL", "Et*3000|L", "E(t|)*2000L", "Ett|x"]
)
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^pipeline_model_parallel_layout: got '.*', needs E, t [^\n]*$"):
        parse(["--data-path", "x", f"--pipeline-model-parallel-layout={text}"])


@given(layers=st.integers(1, 130), data=st.data())
def test_a_balanced_division_is_as_even_as_possible(layers: int, data: st.DataObject) -> None:
    chunks = balance(layers, data.draw(st.integers(2, layers + 2)))
    counted = [chunks[0] + 1, *chunks[1:-1], chunks[-1] + 1]
    assert sum(chunks) == layers
    assert max(counted) - min(counted) <= 1
    assert min(counted[0], counted[-1]) == min(counted)


PP2 = "--data-path x --vocab-size 64 --pipeline-model-parallel-size 2"  # of 4 layers


@pytest.mark.parametrize(
    ("option", "wrong", "right"),
    [
        ("pipeline_model_parallel_layout", "Ett|t|tL", "Et|t|t|tL"),
        ("pipeline_model_parallel_layout", "Ett|tL", "Ett|ttL"),
        ("pipeline_model_parallel_layout", "Ettt|tL --pipeline-model-parallel-size 1", "E|t|tt|tL"),
        ("num_layers_per_virtual_pipeline_stage", "E|t|tt|tL --num-layers-per-virtual-pipeline-stage 1", "E|t|tt|tL"),
        ("global_batch_size", "E|t|tt|tL --global-batch-size 7", "Ettt|tL --global-batch-size 7"),
        ("recompute_num_layers", "Ettt|tL --recompute-granularity full --recompute-num-layers 2",
         "Ett|ttL --recompute-granularity full --recompute-num-layers 2"),
    ],
)  # fmt: skip
def test_rules(option: str, wrong: str, right: str) -> None:
    def lines(words: str) -> list[str]:
        return list(mistakes(parse(f"{PP2} --pipeline-model-parallel-layout {words}".split()), 2))

    (line,) = lines(wrong)
    assert line.startswith(f"{option}: got ")
    assert lines(right) == []


def test_the_suggested_layout_is_accepted() -> None:
    flags = "--data-path x --vocab-size 64 --num-layers 61 --pipeline-model-parallel-size 16 --global-batch-size 16"
    (line,) = mistakes(parse(flags.split()), 16)
    assert "--pipeline-model-parallel-layout 'Et*3|(t*4|)*14t*2L'" in line
    config = parse([*flags.split(), "--pipeline-model-parallel-layout", line.split("'")[1]])
    assert list(mistakes(config, 16)) == []
