"""Flags and YAML to the configuration and back."""

import errno
import json
import re
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.cli import print_error
from megatron_ext.config import Config, megatron_lm
from megatron_ext.config.arguments import as_flag, dump_yaml, flag, parse, parse_dry_run
from megatron_ext.config.checks import check
from megatron_ext.config.schema import FIELDS, json_schema
from megatron_ext.errors import UserError
from megatron_ext.schedule import ScheduleKind
from tests.config.megatron_lm import VERSIONS, defaults
from tests.conftest import ROOT, refused

SWITCHES = [flag(name) for name, field in FIELDS.items() if field.is_switch]


def help_of(flag_name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse([flag_name])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def config_file(folder: Path, content: str | bytes) -> list[str]:
    """Write YAML text or bytes; the `--config` flags."""
    path = folder / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ["--config", str(path)]


def test_none_on_the_command_line_resets_a_file_value(tmp_path: Path) -> None:
    assert parse([*config_file(tmp_path, "model: {local_window: 8}"), "--local-window", "none"]) == Config()
    assert parse([*config_file(tmp_path, "training: {eval_lengths: [8]}"), "--eval-lengths", "none"]) == Config()


def test_a_repeated_flag_of_a_list_adds_to_it(tmp_path: Path) -> None:
    """The flags together replace the file's list, and each parse begins with an empty one."""
    file = config_file(tmp_path, "training: {eval_lengths: [8]}")
    for _ in range(2):
        assert parse([*file, "--eval-lengths", "16", "32", "--eval-lengths", "64"]).training.eval_lengths == (
            16,
            32,
            64,
        )


def test_every_field_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    short = help_of("--help", capsys)
    assert len(short.splitlines()) < 100
    assert "--norm-epsilon" not in short
    words = set(help_of("--help-all", capsys).replace(",", " ").replace("[", " ").split())
    assert {flag(name) for name in FIELDS} <= words
    assert {switch.replace("--", "--no-", 1) for switch in SWITCHES} <= words
    for name in (name for name, field in FIELDS.items() if field.is_switch):
        for word, value in ((flag(name), True), (flag(name).replace("--", "--no-", 1), False)):
            assert [vars(section)[name] for section in vars(parse([word])).values() if name in vars(section)] == [value]


def test_preset_then_yaml_then_flags(tmp_path: Path) -> None:
    """A flag that is equal to the default wins too; a flag's preset replaces the file's."""
    text = "model: {model_preset: 120M, num_layers: 3, hidden_size: 96}\ntraining: {seed: 7, bf16: true}"
    file = config_file(tmp_path, f"{text}\noptimizer: {{lr: 4e-4}}")  # which is a text in YAML 1.1
    config = parse([*file, "--num-layers", "4", "--no-bf16"])
    model = config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (4, 96, 2048)  # flag, YAML, preset
    assert (model.norm_epsilon, model.vocab_size, config.training.seed) == (1e-5, 32000, 7)
    assert (config.training.bf16, config.optimizer.lr) == (False, 4e-4)
    larger = parse([*file, "--model-preset", "1B"]).model
    assert (larger.num_layers, larger.hidden_size, larger.ffn_hidden_size) == (3, 96, 5632)
    plain = replace(Config().model, num_layers=3, hidden_size=96, ffn_hidden_size=256)
    assert parse([*file, "--model-preset", "none"]).model == plain


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ("", (128, 384, 4, 2)),
        ("--hidden-size 512 --num-attention-heads 8", (512, 1344, 8, 8)),
        ("--hidden-size 512 --ffn-hidden-size 999 --num-attention-heads 8 --num-query-groups 4", (512, 999, 8, 4)),
        ("--hidden-size 512 --block phi", (512, 2048, 4, 2)),
        ("--model-preset 1B --num-attention-heads 16", (2048, 5632, 16, 4)),
    ],
)
def test_sizes_follow_from_a_given_width_and_number_of_heads(argv: str, sizes: tuple[int, ...]) -> None:
    """Otherwise a wide model would have the narrow MLP and the few key heads of the default one."""
    model = parse(argv.split()).model
    assert (model.hidden_size, model.ffn_hidden_size, model.num_attention_heads, model.num_query_groups) == sizes


def test_values_are_converted() -> None:
    argv = "--lr 1e-3 --data-path 0.3 a 0.7 b --eval-lengths 128 512 --window-rate 0.125 --save 12 --weight-decay 1"
    config = parse([*argv.split(), "--seed=9"])
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-3, 1.0)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.training.eval_lengths == (128, 512)
    assert (config.window.window_rate, config.checkpoint.save, config.training.seed) == (0.125, "12", 9)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--no-bf61"], "--no-bf61: no such flag; did you mean --no-bf16?"),
        (["--seq", "5"], "--seq: no such flag"),  # no abbreviations
        (["--num-layers"], "--num-layers: expected one argument"),
        (["--num-layers", "2.5"], "num_layers: got 2.5, needs a valid integer"),
        (["--device", "gpu"], "device: got 'gpu', needs 'auto', 'cpu' or 'cuda'"),
        (["--eval-lengths", "1", "--eval-lengths", "none"], "eval_lengths: got 1 none, needs none alone"),
        (["--eval-lengths", "1", "x"], "eval_lengths.1: got 'x', needs a valid integer"),
        (["--model-preset", "120m"], "model_preset: got '120m', needs '120M', '360M', '1B', '3B',"),
        (["--config", "/no/such/file"], "--config: got /no/such/file, needs a readable YAML file (No such file"),
    ],
)
def test_bad_flags(argv: list[str], text: str) -> None:
    assert refused(parse, argv).startswith(text)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("parallel: {use_distributed_optimizer: x}", "use_distributed_optimizer: got 'x', needs a valid boolean"),
        ("modle: {}", "modle: no such section; did you mean model?"),
        ("num_layers: 4", "num_layers: belongs under `model:`"),
        ("model: {num-layers: 4}", "model.num-layers: no such option; did you mean num_layers?"),
        ("model: {seq_length: 4}", "model.seq_length: belongs under `data:`; move it there"),
        ("model: 4", "model: got 4, needs a mapping of options"),
        ("model: {num_layers: [1]}", "num_layers: got [1], needs a valid integer"),
        ("model: {model_preset: [120M]}", "model_preset: got ['120M'], needs '120M'"),
        ("data: {data_path: a/b}", "data_path: got 'a/b', needs a valid tuple"),
        ("model: {num_layers: 2023-01-05}", "num_layers: got datetime.date"),
        ("optimizer: {lr: yes}", "lr: got True, needs a value that is not yes or no"),
        (f"model: {{num_layers: {'9' * 4000}}}", "num_layers: got 9999"),
    ],
)
def test_bad_names_and_values_in_yaml(content: str, text: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, content)
    assert refused(parse, file).startswith(f"{file[1]}: {text}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "needs a mapping of the sections model, parallel, data,"),
        ("a: b: c", "needs valid YAML: mapping values are not allowed here"),
        ("!!python/object/apply:os.getcwd []", "needs valid YAML: could not determine a constructor"),
        (b"model: {model_preset: \xff}", "needs valid YAML: 'utf-8' codec can't decode"),
        ("data: {seq_length: 8, seq_length: 9}", "needs valid YAML: duplicate key seq_length"),
        ("? [a, b]\n: 1", "needs valid YAML: a key must be a scalar"),
        (f"model: {{num_layers: {'9' * 5000}}}", "needs valid YAML"),
        ('model: {block: "\x1b[2J"}', "needs valid YAML"),
    ],
)
def test_bad_files(content: str | bytes, text: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, content)
    assert refused(parse, file).startswith(f"--config: got {file[1]}, {text}")


def test_a_transient_system_error_is_not_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    file = config_file(tmp_path, "model: {}")
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="Stale file handle"):
        parse(file)


def test_the_schema_for_editors_is_current() -> None:
    """python -m megatron_ext.config.schema > examples/config.schema.json"""
    written = json.loads((ROOT / "examples" / "config.schema.json").read_text(encoding="utf-8"))
    assert written == json_schema()
    assert written["$defs"]["ModelConfig"]["properties"]["num_layers"]["description"] == "transformer layers"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["none", "null", "1e5", "yes", "0123", "~", "a: b", "#c", " x ", "'", "-", "\r\n", "\u2028"]
)
counts = st.integers(1, 10_000)
numbers = st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False) | st.sampled_from([1e-5, 1e22, 4e-4])


def section(name: str, **values: Any) -> st.SearchStrategy[Any]:
    return st.builds(replace, st.just(getattr(Config(), name)), **values)


@given(
    model=section(
        "model",
        model_preset=st.sampled_from([None, "120M", "Qwen2.5-0.5B"]),
        num_layers=counts,
        kv_channels=st.none() | counts,
        vocab_size=st.none() | counts,
        norm_epsilon=numbers,
        add_qkv_bias=st.booleans(),
    ),
    data=section("data", data_path=st.lists(texts, max_size=3).map(tuple), tokenizer_model=texts),
    parallel=section("parallel", use_distributed_optimizer=st.none() | st.booleans()),  # by the platform, if none
    window=section("window", window_schedule=st.sampled_from(ScheduleKind), window_rate=st.none() | numbers),
    weighting=section("weighting", weight_strength=st.none() | numbers, score_store=st.none() | texts),
    training=section("training", eval_lengths=st.lists(counts, max_size=3).map(tuple)),
    checkpoint=section("checkpoint", save=st.none() | texts.filter(bool)),
)
@settings(max_examples=50, deadline=None)
def test_round_trip(**sections: Any) -> None:
    config = replace(Config(), **sections)
    with tempfile.TemporaryDirectory() as folder:
        assert parse(config_file(Path(folder), dump_yaml(config))) == config


def written(folder: Path, name: str, **sections: Any) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(yaml.safe_dump(sections))
    return str(folder / name)


def test_a_file_extends_another(tmp_path: Path) -> None:
    """Value by value, through two files, relative to each; flags still win."""
    written(tmp_path, "a.yaml", data={"seq_length": 64, "global_batch_size": 2}, optimizer={"lr": 1e-3})
    written(tmp_path, "below/b.yaml", extends="../a.yaml", data={"seq_length": 128}, model={"model_preset": "1B"})
    last = written(tmp_path, "c.yaml", extends="below/b.yaml", optimizer={"min_lr": 1e-4}, model={"num_layers": 3})
    config = parse(["--config", last, "--global-batch-size", "7"])
    assert (config.data.seq_length, config.data.global_batch_size) == (128, 7)
    assert (config.optimizer.lr, config.optimizer.min_lr) == (1e-3, 1e-4)
    assert (config.model.num_layers, config.model.hidden_size) == (3, 2048)
    merged = "data: &d {seq_length: 8}\nstages:\n- {name: a, data: {<<: *d, global_batch_size: 2}}\n"
    assert parse(config_file(tmp_path, merged)).data.seq_length == 8


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        *(({"extends": base}, ", needs the name of another file") for base in ("a.yaml", "b.yaml", 3)),
        ({"extends": "gone.yaml"}, "gone.yaml, needs a readable YAML file"),
        ({"extends": "c.yaml"}, "c.yaml: data.seq_len: no such option; did you mean seq_length"),
    ],
)
def test_a_mistake_in_an_extended_file_names_it(tmp_path: Path, sections: Any, text: str) -> None:
    written(tmp_path, "b.yaml", extends="a.yaml")
    written(tmp_path, "c.yaml", data={"seq_len": 64})
    assert text in refused(parse, ["--config", written(tmp_path, "a.yaml", **sections)])


def test_flags_are_quoted_for_a_shell() -> None:
    assert as_flag("load", "runs/a b") == "--load 'runs/a b'"
    assert as_flag("data_path", ("$a", "b")) == "--data-path '$a' b"
    assert [as_flag("load", None), as_flag("async_save", False)] == ["--load none", "--no-async-save"]


def page_words(fence: str, start: str) -> list[str]:
    """The words of the block of the page on Megatron-LM's scripts that begins with `start`."""
    page = (ROOT / "docs/howto/from-megatron-lm.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(rf"```{fence}\n(.*?)```", page, re.DOTALL) if block.startswith(start)]
    return shlex.split(block.replace("\\\n", " "))


def test_the_translation_of_a_megatron_lm_script_can_run() -> None:
    argv = page_words("bash", "python pretrain_skyladder.py")[2:]
    dry, processes = parse_dry_run(argv)
    assert dry is not None
    assert processes is not None
    check(parse(argv), processes)


def test_a_megatron_lm_script_gets_all_its_equivalents_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = page_words("text", "--use-mcore-models")
    with pytest.raises(UserError) as caught:
        parse([*argv, "--global-batch-sise=4", "--no-such", "-1", "--swiglu", "--position-embedding-type", "none"])
    print_error(caught.value)
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    answers = dict(line.split(": ", 1) for line in lines if not line.startswith("--position-embedding-type"))
    flags_here = {flag(name) for name in FIELDS} | {"--position-embedding-type"}
    unanswered = {word for word in argv if word.startswith("--")} - flags_here
    assert answers.keys() == unanswered | {"--global-batch-sise", "--no-such"}
    assert answers["--global-batch-sise"].startswith("no such flag; did you mean --global-batch-size?")
    assert {answers[name][:12] for name in answers.keys() & set(argv)}.isdisjoint({"no such flag"})
    kinds = [line.split(": ")[1][:11] for line in lines if line.startswith("--position-embedding-type")]
    assert kinds == ["the default", "rotary only"]  # rope, none


def test_the_table_of_megatron_lm_names_existing_flags_and_no_typo_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    all_flags = set(re.findall(r"--[a-z][a-z0-9-]*", help_of("--help-all", capsys)))
    texts = " ".join(argument.text for argument in megatron_lm.ARGUMENTS.values() if not argument.has_same_name)
    assert set(re.findall(r"--[a-z][a-z0-9-]*", texts)) <= all_flags
    for name in map(flag, FIELDS):
        shorter = [name[:n] + name[n + 1 :] for n in range(3, len(name))]
        assert [word for word in (name, *shorter) if megatron_lm.equivalent(word, "")] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_of_megatron_lm_is_ours_or_has_an_answer(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer is about the flag itself; "did you mean" would lead to another one."""
    arguments = defaults(version)
    words = {flag(name) for name in arguments} | {flag(f"no_{name}") for name in arguments if arguments[name] is True}
    words |= {"--disable-bias-linear", "--override-opt_param-scheduler", "--no-save-optim", "--no-such-flag"}
    words -= set(re.findall(r"--[a-z][a-z0-9-]*", help_of("--help-all", capsys)))
    with pytest.raises(UserError) as caught:
        parse(sorted(words))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines if "no such flag" in line] == ["--no-such-flag"]
    assert len(lines) == len(words)
