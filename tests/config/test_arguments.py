"""Flags and YAML to the configuration and back."""

from __future__ import annotations

import dataclasses
import errno
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config import Config
from megatron_ext.config.arguments import as_flag, dump_yaml, flag, parse, to_dict
from megatron_ext.config.schema import json_schema
from megatron_ext.errors import UserError
from megatron_ext.schedule import ScheduleKind

ROOT = Path(__file__).resolve().parents[2]
# Renaming or removing a flag breaks people's scripts: change this list in the same commit.
FROZEN_FLAGS = """
    --config --stage --dry-run --world-size
    --model-preset --block --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups
    --kv-channels --vocab-size --make-vocab-size-divisible-by --norm-epsilon --rotary-base --rotary-percent
    --rotary-base-local
    --rope-scaling --rope-scaling-factor --rope-original-length --rope-low-freq-factor --rope-high-freq-factor
    --rope-beta-fast --rope-beta-slow --rope-attention-factor --rope-window-bases --no-rope-freq
    --untie-embeddings-and-output-weights --num-experts --moe-router-topk --moe-ffn-hidden-size
    --add-qkv-bias --qk-layernorm --query-pre-attn-scalar
    --local-window --window-attn-skip-freq --init-method-std --init-scheme --hidden-dropout --attention-dropout
    --tensor-model-parallel-size --pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage
    --context-parallel-size --cp-policy --cp-scheme --cp-row-cost --cp-overlap-parts
    --expert-model-parallel-size --moe-grouped-gemm
    --sequence-parallel --tp-comm-overlap --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --recompute-granularity --recompute-modules --recompute-method --recompute-num-layers
    --cpu-offloading --cpu-offloading-num-layers --compile --device
    --attention-backend --distributed-timeout-minutes --watchdog-timeout
    --data-path --tokenizer-model --split --seq-length
    --micro-batch-size --global-batch-size --mixture --packing --packing-options --long-share --first-sample
    --balance-batches --valid-data-path --eod-mask-loss
    --window-schedule --window-start --window-end --window-rate --window-expansion-fraction --window-round-to
    --window-aligned --window-switch-step --window-cycles --window-mask --document-mask
    --local-window-fixed
    --token-weighting --weight-score --weight-post --weight-strength --weight-clip --weight-shift --short-context
    --short-stride --score-interval --score-row-share --score-store --loss-denominator
    --lr --min-lr --lr-decay-style --lr-warmup-iters --lr-warmup-from-zero --lr-decay-iters --lr-wsd-decay-iters
    --lr-first-step
    --weight-decay --weight-decay-all --adam-beta1 --adam-beta2 --adam-eps --clip-grad
    --qk-clip-threshold
    --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
    --optimizer-cpu-offload --optimizer-offload-fraction
    --train-iters --seed --bf16 --fp8-format --fp8-recipe
    --spike-window --spike-deviations --on-spike --on-non-finite --skip-limit
    --loss-block-tokens --z-loss --moe-aux-loss-coeff --moe-router-load-balancing-type
    --eval-interval --eval-iters --eval-lengths --eval-packing
    --eval-document-mask --eval-stride --early-stopping-patience --early-stopping-delta
    --save --load --init-from --init-optimizer --load-if-present --load-latest-complete --verify-load --override
    --save-interval --save-seconds --async-save --keep-last --keep-every --dump-trajectory
    --tensorboard --wandb-project --wandb-exp-name --mlflow-experiment --log-interval
    --attention-health-interval --attention-health-queries --attention-s-max-warning
"""
FROZEN_SWITCHES = """
    --untie-embeddings-and-output-weights --add-qkv-bias --moe-grouped-gemm --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap --cpu-offloading
    --compile --balance-batches
    --use-precision-aware-optimizer --optimizer-cpu-offload
    --eod-mask-loss --window-aligned --document-mask --local-window-fixed --lr-warmup-from-zero --weight-decay-all
    --bf16 --eval-document-mask
    --init-optimizer --load-if-present --load-latest-complete --verify-load --async-save --tensorboard
"""
FLAGS, SWITCHES = FROZEN_FLAGS.split(), FROZEN_SWITCHES.split()


def help_of(flag_name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse([flag_name])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_lists_types_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("--help-all", capsys)
    for line in (
        "--num-layers N            transformer layers [4]",
        "--norm-epsilon X          epsilon of the norms [1e-05]",
        "--rope-scaling {none,linear,dynamic,yarn,llama3}",
        "--window-schedule {constant,linear,",
        "--model-preset {120M,",
        "--recompute-modules {core_attn,layernorm,mlp} [{core_attn,layernorm,mlp} ...]",
        "--save RUN",
    ):
        assert line in text, line
    assert not any(odd in text for odd in ("None]", "[()]", "e+", "[False]", "[True]"))
    short = help_of("--help", capsys)
    assert len(short.splitlines()) < 100
    assert "--seq-length N" in short
    assert "--norm-epsilon" not in short


@pytest.mark.parametrize(
    ("given", "undone"),
    [("model: {local_window: 8}", "--local-window"), ("training: {eval_lengths: [8]}", "--eval-lengths")],
)
def test_a_flag_takes_back_what_the_file_says(tmp_path: Path, given: str, undone: str) -> None:
    (tmp_path / "run.yaml").write_text(given)
    assert parse(["--config", str(tmp_path / "run.yaml"), undone, "none"]) == Config()


def value_of(config: Config, flag_name: str) -> Any:
    name = flag_name.removeprefix("--").replace("-", "_")
    (section,) = [one for one in vars(config).values() if name in vars(one)]
    return getattr(section, name)


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    """Writes YAML text or bytes and returns the `--config` flags."""

    def write(content: str | bytes) -> list[str]:
        path = tmp_path / "config.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["--config", str(path)]

    return write


def refusal(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        parse(argv)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_no_flag_was_renamed(capsys: pytest.CaptureFixture[str]) -> None:
    fields = [flag(field.name) for section in vars(Config()).values() for field in dataclasses.fields(section)]
    assert ["--config", "--stage", "--dry-run", "--world-size", *fields] == FLAGS
    help_words = set(help_of("--help-all", capsys).replace(",", " ").replace("[", " ").split())
    assert set(FLAGS) <= help_words
    assert {switch.replace("--", "--no-", 1) for switch in SWITCHES} <= help_words


def test_nothing_given_is_the_defaults() -> None:
    assert parse([]) == Config()


def test_switches() -> None:
    for switch in SWITCHES:
        assert value_of(parse([switch]), switch) is True
        assert value_of(parse([switch.replace("--", "--no-", 1)]), switch) is False


@pytest.mark.parametrize("name", ["use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"])
def test_none_leaves_a_switch_to_the_platform(config_file: Any, name: str) -> None:
    file = config_file(f"parallel: {{{name}: true}}")
    assert getattr(parse([*file, flag(name), "none"]).parallel, name) is None


@pytest.mark.parametrize("name", ["use_distributed_optimizer"])
def test_what_the_platform_decides_is_yes_no_or_none(config_file: Any, name: str) -> None:
    for word, value in (("true", True), ("false", False), ("null", None)):
        file = config_file(f"parallel: {{{name}: {word}}}")
        assert getattr(parse(file).parallel, name) is value
        assert round_trip(parse(file)) == parse(file)
    with pytest.raises(UserError, match=rf"{name}: got 'sometimes', needs a valid boolean"):
        parse(config_file(f"parallel: {{{name}: sometimes}}"))


def test_preset_then_yaml_then_flags(config_file: Any) -> None:
    file = config_file("model: {model_preset: 120M, num_layers: 3, hidden_size: 96}\ntraining: {seed: 7}")
    config = parse([*file, "--num-layers", "5"])
    model = config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (5, 96, 2048)  # flag, YAML, preset
    assert (model.norm_epsilon, model.vocab_size, config.training.seed) == (1e-5, 32000, 7)


def test_the_order_of_flags_and_file_does_not_matter(config_file: Any) -> None:
    file = config_file("training: {seed: 7, train_iters: 9}")
    assert parse(["--seed", "8", *file]) == parse([*file, "--seed", "8"])
    assert parse(["--seed", "8", *file]).training.train_iters == 9


def test_a_flags_preset_replaces_the_files(config_file: Any) -> None:
    file = config_file("model: {model_preset: 120M, num_layers: 3}")
    model = parse([*file, "--model-preset", "1B"]).model
    assert (model.num_layers, model.hidden_size, model.model_preset) == (3, 2048, "1B")
    assert parse([*file, "--model-preset", "none"]).model == replace(Config().model, num_layers=3)


def test_a_flag_equal_to_the_default_still_wins(config_file: Any) -> None:
    file = config_file("model: {num_layers: 3}\ntraining: {bf16: true}\ncheckpoint: {save: there}")
    config = parse([*file, "--num-layers", "4", "--no-bf16", "--save", "none"])
    assert (config.model.num_layers, config.training.bf16, config.checkpoint.save) == (4, False, None)


def test_values_are_converted() -> None:
    argv = "--lr 1e-3 --data-path 0.3 a 0.7 b --eval-lengths 128 512 --window-rate 0.125 --save 12 --weight-decay 1"
    config = parse([*argv.split(), "--seed=9"])
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-3, 1.0)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.training.eval_lengths == (128, 512)
    assert (config.window.window_rate, config.checkpoint.save, config.training.seed) == (0.125, "12", 9)


def test_scientific_notation_in_yaml_is_a_number(config_file: Any) -> None:
    assert parse(config_file("optimizer: {lr: 4e-4, adam_eps: 1.0e-6}")).optimizer.lr == 4e-4  # YAML 1.1 says "4e-4"


@pytest.mark.parametrize(
    "name",
    ["--kv-channels", "--save", "--window-end", "--window-rate", "--model-preset", "--weight-clip", "--score-store"],
)
def test_none_unsets_what_is_unset_by_default(name: str) -> None:
    assert value_of(parse([name, "none"]), name) is None


def test_none_is_no_value_for_a_number() -> None:
    assert refusal(["--num-layers", "none"]).startswith("num_layers: got 'none', needs a valid integer")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num-layer", "5"], "--num-layer: no such flag; did you mean --num-layers?; --help lists all"),
        (["--num_layers", "5"], "--num_layers: no such flag; did you mean --num-layers?"),
        (["--num-layer=5"], "--num-layer: no such flag; did you mean --num-layers?"),
        (["--no-bf61"], "--no-bf61: no such flag; did you mean --no-bf16?"),
        (["--num-layers", "5", "--zzzzzz"], "--zzzzzz: no such flag; --help lists all"),
        (["--seq", "5"], "--seq: no such flag"),  # no abbreviations
        (["5"], "5: got a word that belongs to no flag"),
        (["--num-layers", "3", "5"], "5: got a word that belongs to no flag"),
        (["--num-layers"], "--num-layers: expected one argument"),
        (["--data-path"], "--data-path: expected at least one argument"),
        (["--bf16=true"], "--bf16/--no-bf16: ignored explicit argument 'true'"),
        (["--num-layers", "x"], "num_layers: got 'x', needs a valid integer"),
        (["--num-layers", "2.5"], "num_layers: got 2.5, needs a valid integer"),
        (["--lr", "fast"], "lr: got 'fast', needs a valid number"),
        (["--device", "gpu"], "device: got 'gpu', needs 'auto', 'cpu' or 'cuda'"),
        (["--window-schedule", "line"], "window_schedule: got 'line', needs 'constant'"),
        (["--eval-lengths", "1", "x"], "eval_lengths.1: got 'x', needs a valid integer"),
        (["--model-preset", "120m"], "model_preset: got '120m', needs one of 120M, 360M, 1B, 3B,"),
        (["--config", "/no/such/file"], "--config: got /no/such/file, needs a readable YAML file (No such file"),
        (["--config", "/"], "--config: got /, needs a readable YAML file (Is a directory)"),
    ],
)
def test_bad_flags(argv: list[str], text: str) -> None:
    assert refusal(argv).startswith(text)


def test_the_nearest_preset_is_named() -> None:
    assert refusal(["--model-preset", "120m"]).endswith("did you mean 120M?")
    assert parse(["--model-preset", "120M"]).model.hidden_size == 768


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("modle: {}", "modle: no such section; did you mean model?"),
        ("num_layers: 4", "num_layers: belongs under `model:`"),
        ("model: {num_layer: 4}", "model.num_layer: no such option; did you mean num_layers?"),
        ("model: {num-layers: 4}", "model.num-layers: no such option; did you mean num_layers?"),
        ("model: {1: 4}", "model.1: no such option"),
        ("model: {seq_length: 4}", "model.seq_length: belongs under `data:`; move it there"),
        ("model: 4", "model: got 4, needs a mapping of options"),
        ("model:", "model: got None, needs a mapping of options"),
    ],
)
def test_bad_names_in_yaml(content: str, text: str, config_file: Any) -> None:
    file = config_file(content)
    assert refusal(file).startswith(f"{file[1]}: {text}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "needs a mapping of the sections model, parallel, data,"),
        ("- model", "needs a mapping of the sections model, parallel, data,"),
        ("a: b: c", "needs valid YAML: mapping values are not allowed here"),
        ("model: [", "needs valid YAML: while parsing"),
        ("!!python/object/apply:os.getcwd []", "needs valid YAML: could not determine a constructor"),
    ],
)
def test_bad_files(content: str, text: str, config_file: Any) -> None:
    file = config_file(content)
    assert refusal(file).startswith(f"--config: got {file[1]}, {text}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("model: {num_layers: 2.5}", "num_layers: got 2.5, needs a valid integer"),
        ("model: {num_layers: [1]}", "num_layers: got [1], needs a valid integer"),
        ("model: {num_layers: null}", "num_layers: got None, needs a valid integer"),
        ("training: {bf16: 3}", "bf16: got 3, needs a valid boolean"),
        ("data: {data_path: a/b}", "data_path: got 'a/b', needs a valid tuple"),
        ("optimizer: {lr_decay_style: wsd}", "lr_decay_style: got 'wsd', needs 'const"),
    ],
)
def test_bad_values_in_yaml(content: str, text: str, config_file: Any) -> None:
    file = config_file(content)
    assert refusal(file).startswith(f"{file[1]}: {text}")


def test_each_bad_value_has_a_line_of_its_own() -> None:
    with pytest.raises(UserError) as caught:
        parse(["--num-layers", "a", "--hidden-size", "b"])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["num_layers", "hidden_size"]


def test_an_empty_mapping_is_a_file(config_file: Any) -> None:
    assert parse(config_file("{}")) == Config()
    assert parse(config_file("model: {}")) == Config()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"model: {model_preset: \xff}", "needs a YAML file in UTF-8"),
        (b"model: {model_preset: [120M]}", "model_preset: got ['120M'], needs a valid string"),
    ],
)
def test_odd_bytes_and_a_preset_that_is_a_list(content: bytes, text: str, config_file: Any) -> None:
    assert text in refusal(config_file(content))


def test_a_disk_that_fails_for_a_moment_is_not_the_users_error(
    monkeypatch: pytest.MonkeyPatch, config_file: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    file = config_file("model: {}")
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="Stale file handle"):
        parse(file)


def test_the_schema_for_editors_is_current() -> None:
    """python -m megatron_ext.config.schema > examples/config.schema.json"""
    written = json.loads((ROOT / "examples" / "config.schema.json").read_text(encoding="utf-8"))
    assert written == json_schema()
    assert written["$defs"]["ModelConfig"]["properties"]["num_layers"]["description"] == "transformer layers"


def test_an_empty_config_path_is_refused() -> None:
    assert refusal(["--config", ""]).startswith("--config: got '', needs a readable YAML file")


def test_weights_of_data_paths_may_be_numbers_in_yaml(config_file: Any) -> None:
    config = parse(config_file("data: {data_path: [0.3, a, 0.7, b]}"))
    assert config.data.data_path == ("0.3", "a", "0.7", "b")


def test_a_boolean_is_no_number(config_file: Any) -> None:
    assert "num_layers: got True, needs another value" in refusal(config_file("model: {num_layers: yes}"))


def round_trip(config: Config) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_yaml(config), encoding="utf-8")
        return parse(["--config", str(path)])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["none", "null", "1e5", "yes", "0123", "~", "a: b", "#c", " x ", "'", "-", "\r\n", "\u2028"]
)
counts = st.integers(1, 10_000)
numbers = st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False) | st.sampled_from([1e-5, 1e22, 4e-4])


@given(
    model=st.builds(
        replace,
        st.just(Config().model),
        model_preset=st.sampled_from([None, "120M", "Qwen2.5-0.5B"]),
        num_layers=counts,
        kv_channels=st.none() | counts,
        vocab_size=st.none() | counts,
        norm_epsilon=numbers,
        add_qkv_bias=st.booleans(),
    ),
    data=st.builds(
        replace, st.just(Config().data), data_path=st.lists(texts, max_size=3).map(tuple), tokenizer_model=texts
    ),
    window=st.builds(
        replace,
        st.just(Config().window),
        window_schedule=st.sampled_from(ScheduleKind),
        window_rate=st.none() | numbers,
    ),
    weighting=st.builds(
        replace,
        st.just(Config().weighting),
        weight_score=st.sampled_from(["abs", "mile"]),
        weight_strength=st.none() | numbers,
        score_store=st.none() | texts,
    ),
    training=st.builds(
        replace, st.just(Config().training), eval_lengths=st.lists(st.integers(), max_size=3).map(tuple)
    ),
    checkpoint=st.builds(replace, st.just(Config().checkpoint), save=st.none() | texts),
)
@settings(max_examples=50, deadline=None)
def test_round_trip(**sections: Any) -> None:
    config = replace(Config(), **sections)
    assert round_trip(config) == config


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--model-preset", "120M", "--num-layers", "2", "--vocab-size", "none"],
        ["--bf16", "--no-tensorboard", "--data-path", "1", "a", "--eval-lengths", "8", "--lr", "1e-3"],
    ],
)
def test_what_was_parsed_reads_back(argv: list[str]) -> None:
    config = parse(argv)
    assert round_trip(config) == config
    assert yaml.safe_load(dump_yaml(config)) == to_dict(config)
    assert list(to_dict(config)) == [field.name for field in dataclasses.fields(Config)]


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


@pytest.mark.parametrize("base", ["a.yaml", "b.yaml", 3])
def test_a_file_that_extends_itself(tmp_path: Path, base: object) -> None:
    written(tmp_path, "b.yaml", extends="a.yaml")
    with pytest.raises(UserError, match=r"extends: got .*, needs the name of another file"):
        parse(["--config", str(Path(written(tmp_path, "a.yaml", extends=base)))])


def test_a_mistake_in_an_extended_file_names_it(tmp_path: Path) -> None:
    written(tmp_path, "a.yaml", data={"seq_len": 64})
    with pytest.raises(UserError, match=r"a\.yaml: data\.seq_len: no such option; did you mean seq_length"):
        parse(["--config", str(Path(written(tmp_path, "b.yaml", extends="a.yaml")))])
    with pytest.raises(UserError, match=r"--config: got .*gone\.yaml, needs a readable YAML file"):
        parse(["--config", str(Path(written(tmp_path, "c.yaml", extends="gone.yaml")))])


@pytest.mark.parametrize("text", ["data: {seq_length: 8, seq_length: 9}", "data: {seed: 1}\ndata: {}", "a: 1\na: 2"])
def test_a_key_that_stands_twice_is_refused(config_file: Any, text: str) -> None:
    assert "duplicate key" in refusal(config_file(text))


def test_a_key_that_is_a_list_is_refused(config_file: Any) -> None:
    assert "a key must be a scalar" in refusal(config_file("? [a, b]\n: 1"))


def test_anchors_and_merges_are_no_repetition(config_file: Any) -> None:
    text = "data: &d {seq_length: 8}\nstages:\n- {name: a, data: {<<: *d, global_batch_size: 2}}\n"
    assert parse(config_file(text)).data.seq_length == 8


def test_a_flag_is_spelled_as_a_shell_takes_it() -> None:
    assert as_flag("load", "runs/a b") == "--load 'runs/a b'"
    assert as_flag("data_path", ("$a", "b")) == "--data-path '$a' b"
    assert [as_flag("load", None), as_flag("async_save", False)] == ["--load none", "--no-async-save"]
