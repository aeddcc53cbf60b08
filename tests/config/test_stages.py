"""Stages: the file's order of precedence, the folders, and what goes on from the stage before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.config.arguments import dump_yaml, parse, parse_stages
from megatron_ext.config.checks import check_stages
from megatron_ext.config.stages import Stage
from megatron_ext.errors import UserError
from tests.conftest import refused

SHORT = {"name": "short", "data": {"seq_length": 64}, "training": {"train_iters": 10}}
LONG = {"name": "long", "data": {"seq_length": 256}, "training": {"train_iters": 5}, "optimizer": {"lr": 2e-5}}
SAME = {"name": "same", "data": {"seq_length": 64}, "keep": ["samples"]}
BASE = {"model": {"vocab_size": 64}, "data": {"data_path": ["x"], "global_batch_size": 4}, "optimizer": {"lr": 1e-3}}


def config_file(folder: Path, content: dict[str, Any], name: str = "over.yaml") -> list[str]:
    (folder / name).write_text(yaml.safe_dump(content))
    return ["--config", str(folder / name)]


def written(folder: Path, *stages: Any, **base: Any) -> list[str]:
    return config_file(folder, BASE | base | {"stages": list(stages)}, "run.yaml")


def stages_of(folder: Path, *flags: object, long: dict[str, Any] = LONG) -> list[Stage]:
    return parse_stages([*written(folder, SHORT, long), *map(str, flags)])


def test_a_stage_is_the_common_part_then_its_own_then_the_flags(tmp_path: Path) -> None:
    short, long = stages_of(tmp_path, "--seed", 7)
    assert [short.name, long.name] == ["short", "long"]
    assert [stage.config.data.seq_length for stage in (short, long)] == [64, 256]
    assert [stage.config.optimizer.lr for stage in (short, long)] == [1e-3, 2e-5]
    assert {stage.config.training.seed for stage in (short, long)} == {7}
    assert [stage.config.optimizer.lr for stage in stages_of(tmp_path, "--lr", 3e-4)] == [3e-4, 3e-4]


def test_a_later_file_wins_over_an_earlier_one_and_its_stages(tmp_path: Path) -> None:
    kept = LONG | {"data": {"seq_length": 64}, "keep": ["samples"]}
    over = {"optimizer": {"lr": 3e-4}, "stages": [{"name": "long", "training": {"train_iters": 7}}]}
    both_files = [*written(tmp_path, SHORT, kept), *config_file(tmp_path, over)]
    short, long = parse_stages(both_files)
    assert [stage.config.training.train_iters for stage in (short, long)] == [10, 7]
    assert [stage.config.optimizer.lr for stage in (short, long)] == [3e-4, 3e-4]
    assert [stage.config.data.global_batch_size for stage in (short, long)] == [4, 4]
    assert long.keep == ("samples",)
    assert parse_stages([*both_files, *written(tmp_path, SHORT, kept)])[1].config.optimizer.lr == 2e-5
    assert parse_stages([*both_files, "--lr", "1e-5"])[1].config.optimizer.lr == 1e-5
    anew = config_file(tmp_path, {"stages": [{"name": "long", "keep": []}]})
    assert parse_stages([*written(tmp_path, SHORT, kept), *anew])[1].keep == ()
    misspelt_file = config_file(tmp_path, {"stages": [{"name": "lang"}]})
    text = refused(parse_stages, [*written(tmp_path, SHORT, kept), *misspelt_file])
    assert "stages: got lang, needs a stage of the files before it, short, long; did you mean long?" in text
    alone = config_file(tmp_path, {"training": {"seed": 7}})
    assert parse([*alone, *config_file(tmp_path, {"training": {"bf16": True}}, "b.yaml")]).training.seed == 7


def test_a_stage_has_its_folder_and_begins_with_the_weights_of_the_one_before(tmp_path: Path) -> None:
    short, long = stages_of(tmp_path, "--save", "runs/a", "--load", "runs/a", "--dump-trajectory", "dump")
    assert short.config.checkpoint.save == short.config.checkpoint.load == "runs/a/short"
    assert long.config.checkpoint.save == "runs/a/long"
    assert short.run == long.run == Path("runs/a")
    assert long.config.checkpoint.dump_trajectory == "dump/long"
    assert (short.config.checkpoint.init_from, short.before) == (None, None)
    assert (long.config.checkpoint.init_from, long.before) == ("runs/a/short", short)
    assert not long.config.checkpoint.init_optimizer
    assert (short.config.checkpoint.load_if_present, long.config.checkpoint.load_if_present) == (False, True)


def test_what_a_stage_keeps(tmp_path: Path) -> None:
    _, anew = stages_of(tmp_path, "--save", "a")
    assert (anew.config.optimizer.lr_first_step, anew.config.data.first_sample) == (0, 0)
    kept = LONG | {"keep": ["optimizer", "learning_rate", "samples"], "data": {"seq_length": 64}}
    short, long = stages_of(tmp_path, "--save", "a", "--lr-decay-iters", 15, long=kept)
    assert long.config.checkpoint.init_optimizer
    assert long.config.optimizer.lr_first_step == 10
    assert long.config.data.first_sample == 10 * 4
    assert [long.config.learning_rate_schedule().at(t) for t in range(5)] == pytest.approx(
        [replace(short.config.learning_rate_schedule(), peak=2e-5).at(t) for t in range(10, 15)]
    )
    assert short.config.samples == long.config.data.first_sample


KEEPS = LONG | {"keep": ["learning_rate"]}


def test_a_learning_rate_that_is_kept_goes_on_where_it_was(tmp_path: Path) -> None:
    check_stages(stages_of(tmp_path, "--save", "a", "--lr-decay-iters", 15, long=KEEPS), 1)
    short = SHORT | {"optimizer": {"lr_decay_iters": 40}}  # the second has its own steps alone to decay in
    for flags in ((), ("--stage", "long")):
        stages = parse_stages([*written(tmp_path, short, KEEPS), "--save", "a", *flags])
        assert "but the schedule of short would continue at 1.707e-05, and" in refused(check_stages, stages, 1)
    over = ("--save", "a", "--lr-decay-iters", 10)  # the decay: trains only above 0
    decayed = stages_of(tmp_path, *over, long=KEEPS)
    assert "stage long: lr_decay_iters: got 10, but the run begins at step 10" in refused(check_stages, decayed, 1)
    check_stages(stages_of(tmp_path, *over, "--min-lr", 1e-6, long=KEEPS), 1)
    check_stages(stages_of(tmp_path, *over, "--lr-decay-style", "constant", long=KEEPS), 1)


def test_first_weights_are_the_first_stages(tmp_path: Path) -> None:
    short, long = stages_of(tmp_path, "--save", "a", "--init-from", "llama")
    assert short.config.checkpoint.init_from == "llama"
    assert long.config.checkpoint.init_from == "a/short"
    (alone,) = stages_of(tmp_path, "--save", "a", "--init-from", "llama", "--stage", "long")
    assert (alone.config.checkpoint.init_from, alone.before) == ("llama", None)
    for flags in ((), ("--stage", "long")):  # of the file, they are the first one's however the second is run
        file_flags = written(tmp_path, SHORT, LONG, checkpoint={"save": "a", "init_from": "llama"})
        long = parse_stages([*file_flags, *flags])[-1]
        assert (long.config.checkpoint.init_from, long.before.name if long.before else None) == ("a/short", "short")
    long_stage = LONG | {"checkpoint": {"init_from": "other"}, "keep": ["optimizer"]}
    checkpoint = stages_of(tmp_path, "--save", "a", long=long_stage)[1].config.checkpoint
    assert (checkpoint.init_from, checkpoint.init_optimizer) == ("other", True)
    first = ["--save", "a", "--init-from", "run", "--init-optimizer"]  # the optimizer's state is the first one's too
    assert [stage.config.checkpoint.init_optimizer for stage in stages_of(tmp_path, *first)] == [True, False]
    long_stage = LONG | {"checkpoint": {"init_optimizer": True}}
    assert stages_of(tmp_path, "--save", "a", long=long_stage)[1].config.checkpoint.init_optimizer


def test_one_stage_alone_and_its_written_configuration(tmp_path: Path) -> None:
    (long,) = stages_of(tmp_path, "--save", "a", "--stage", "long")
    assert long == stages_of(tmp_path, "--save", "a")[1]
    assert parse([*written(tmp_path, SHORT, LONG), "--save", "a", "--stage", "long"]) == long.config
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_yaml(long.config))
    assert parse(["--config", str(copy)]) == long.config
    (stage,) = parse_stages(["--train-iters", "3", "--save", "a"])  # without stages there is one without a name
    assert (stage.name, stage.config.checkpoint.save, stage.run, stage.before) == (None, "a", Path("a"), None)


@pytest.mark.parametrize(
    ("stages", "flags", "message"),
    [
        ([SHORT, LONG], ["--stage", "lon"], "stage: got lon, run.yaml has short, long; did you mean long?"),
        ([], [], "stages: got none, needs at least one"),
        ([SHORT, SHORT], [], "stages: got short, short, needs at least one, each with its own name"),
        ([SHORT | {"name": "a/b"}], [], "stages.0.name: got 'a/b', needs "),
        ([SHORT | {"keep": ["optimizer"]}], [], "stages: short: keep: got optimizer, needs a previous stage"),
        ([SHORT, LONG | {"keep": ["window"]}], [], "stages.1.keep.0: got 'window', needs 'optimizer'"),
        (
            [SHORT, SAME],
            ["--eval-interval", "5", "--early-stopping-patience", "3"],
            "same: keep: got samples, which continue after the last step of short, but that may stop early",
        ),
        ([SHORT, LONG | {"keep": ["samples"]}], [], "long: keep: got samples, but its seq_length differs from that of"),
        ([SHORT, SAME | {"training": {"seed": 5}}], [], "same: keep: got samples, but its seed differs from that of"),
        ([SHORT | {"dat": {}}], [], "dat: no such section; did you mean data?"),
        ([SHORT], ["--save", "a", "--load", "b"], "load: got b, a run in stages needs the same folder as save a"),
    ],
)
def test_mistakes_in_stages(tmp_path: Path, stages: list[Any], flags: list[str], message: str) -> None:
    assert message in refused(parse_stages, [*written(tmp_path, *stages), *flags]).replace(f"{tmp_path}/", "")


def test_tools_need_to_know_which_stage(tmp_path: Path) -> None:
    assert "stage: got none of short, long; add --stage NAME" in refused(parse, written(tmp_path, SHORT, LONG))
    assert "stage: got short, but the run has no stages" in refused(parse, ["--stage", "short"])


def test_every_stage_is_checked_before_the_first_begins(tmp_path: Path) -> None:
    stages = stages_of(tmp_path, long=LONG | {"optimizer": {"min_lr": 2}})
    with pytest.raises(UserError, match=r"stage long: min_lr: .*\nstage long: save: got nothing"):
        check_stages(stages, 1)


def test_the_processes_join_once_for_all_stages(tmp_path: Path) -> None:
    stages = stages_of(tmp_path, "--save", "a", long=LONG | {"parallel": {"distributed_timeout_minutes": 90}})
    assert "distributed_timeout_minutes: got 10 in short, 90 in long; give one" in refused(check_stages, stages, 1)
    long_stage = LONG | {"parallel": {"distributed_timeout_minutes": 90}, "checkpoint": {"init_from": "other"}}
    assert "distributed_timeout_minutes" in refused(
        check_stages, stages_of(tmp_path, "--save", "a", long=long_stage), 1
    )
    check_stages(stages_of(tmp_path, "--save", "a", "--stage", "long", long=long_stage), 1)
    check_stages(stages_of(tmp_path, "--save", "a", "--distributed-timeout-minutes", 90), 1)
