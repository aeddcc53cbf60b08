"""Launch scripts of Megatron-LM, in the forms that its own examples and others' have, as YAML of this package."""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import check
from megatron_ext.config.launch_script import Script, missing_variables, readable
from tests.conftest import refused
from tools.translate_megatron_lm import document, words_of

LLAMA = """#!/bin/bash
# trains "a model (of ours
set -euo pipefail
CHECKPOINTS=${1:-"runs/new"}   # the first argument
DATA=$2
GPUS=${GPUS_PER_NODE:-8}
HERE=$(dirname $(realpath $0))
BATCH=$(( 2 * $GPUS ))
LAUNCH=(
    --nproc_per_node $GPUS
)
MODEL=(
    --use-mcore-models
    --num-layers 4   # a comment
    --hidden-size 512
    --num-attention-heads 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
    --norm-epsilon 1e-6
    "--rotary-base 500000"
)
if [ -n "${WANDB:-}" ]; then
    MODEL+=(--wandb-project ${WANDB_PROJECT:-"mine"})
fi
TRAIN="
    --micro-batch-size 1 \\
    --global-batch-size $BATCH \\
    --seq-length 2048 --max-position-embeddings 2048
    --train-samples 16000 --lr-decay-samples 12000 --lr-warmup-fraction .01
    --lr 3e-4 --min-lr=3e-5 --bf16 --attention-dropout 0 --hidden-dropout 0.0
    --tensor-model-parallel-size 1 --sequence-parallel
"
torchrun ${LAUNCH[@]} $HERE/pretrain_gpt.py \\
    ${MODEL[@]} \\
    $TRAIN \\
    --data-path "$DATA" --save $CHECKPOINTS --load $CHECKPOINTS 2>&1 | tee log.txt
"""


def translated(folder: Path, words: list[str], decide: Sequence[str] = ()) -> tuple[Config, str]:
    """The configuration and the text of a translation, which parses."""
    text = document(words, decide)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return parse(["--config", str(folder / "run.yaml")]), text


def written(folder: Path, text: str) -> str:
    (folder / "train.sh").write_text(text, encoding="utf-8")
    return str(folder / "train.sh")


def test_a_script_becomes_a_run_with_megatron_lms_defaults(tmp_path: Path) -> None:
    config, text = translated(tmp_path, *words_of([written(tmp_path, LLAMA), "runs/a", "data/mine"]))
    model, data, optimizer = config.model, config.data, config.optimizer
    assert (model.num_layers, model.ffn_hidden_size, model.num_query_groups) == (4, 1344, 8)
    assert (model.norm_epsilon, model.rotary_base, model.untie_embeddings_and_output_weights) == (1e-6, 5e5, True)
    assert (data.data_path, data.split, data.global_batch_size, data.seq_length) == (
        ("data/mine",),
        "969,30,1",
        16,
        2048,
    )
    assert (config.training.train_iters, optimizer.lr_decay_iters, optimizer.lr_warmup_iters) == (1000, 750, 8)
    assert (optimizer.weight_decay, optimizer.adam_beta2, optimizer.lr_decay_style) == (0.01, 0.999, "linear")
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_warmup_from_zero) == (3e-4, 3e-5, True)
    assert (config.parallel.sequence_parallel, config.logging.wandb_project) == (False, "mine")
    assert (config.checkpoint.save, config.checkpoint.load, config.checkpoint.load_if_present) == (
        "runs/a",
        "runs/a",
        True,
    )
    assert "another model" not in text
    assert "deprecated_use_mcore_models: always so here" in text
    check(replace(config, model=replace(model, vocab_size=512)), 8)


def test_what_is_not_given_is_gelu_with_layernorm_and_biases(tmp_path: Path) -> None:
    """A Llama needs options that say otherwise."""
    line = "torchrun --nnodes 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    config, text = translated(tmp_path, *words_of(shlex.split(line)))
    assert (config.model.ffn_hidden_size, config.model.num_query_groups, config.model.hidden_dropout) == (256, 4, 0.1)
    other_model = text[text.index("another model") :]
    for name in ("swiglu", "normalization", "add_bias_linear", "position_embedding_type"):
        assert f"#   {name}: got" in other_model
    decide = text[text.index("# Decide") :]
    assert all(f"{name}: not given" in decide for name in ("seq_length", "micro_batch_size", "lr", "train_iters"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--no-such-flag 3", "--no-such-flag 3: no argument of Megatron-LM"),
        ("--train-samples 100", "train_samples: got 100, needs --global-batch-size"),
        ("--num-layers many", "--num-layers many: needs a number"),
        ("--load theirs --finetune", "load: got 'theirs', a checkpoint of Megatron-LM"),
        ("--fp8-format hybrid", "fp8_recipe: got 'delayed'"),
        (
            "--tokenizer-type GPT2BPETokenizer --vocab-file v.json",
            "tokenizer_type: got 'GPT2BPETokenizer' with 'v.json'",
        ),
        ("--mock-data", "mock_data: got True"),
        ("--exit-interval 100", "exit_interval: got 100, here --train-iters"),
        ("--optimizer lion", "optimizer: got 'lion'"),
        ("--micro-batch-size 2", "global_batch_size: not given"),
        ("--lr-decay-style WSD", "lr_wsd_decay_style: got 'exponential'"),
    ],
)
def test_what_the_user_decides_is_listed(tmp_path: Path, words: str, text: str) -> None:
    _, translation = translated(tmp_path, words.split())
    assert f"#   {text}" in translation[translation.index("# Decide") :]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--attention-backend fused", "attention_backend: got 'fused', here 'auto'"),
        ("--sequence-parallel", "sequence_parallel: got True, here False"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", None),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model old.model", None),  # said where the user decides
    ],
)
def test_a_given_value_that_is_another_one_here_is_listed(tmp_path: Path, words: str, text: str | None) -> None:
    _, translation = translated(tmp_path, words.split())
    _, _, other_values = translation.partition("# Has another value here:\n")
    assert bool(other_values) == (text is not None)
    assert other_values.startswith(f"#   {text}") or text is None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=3\nB=${A}\nrun.py --a $B --b ${C:-4} --c ${D-$A} --d ${A:+5}${E:+6}", "--a 3 --b 4 --c 3 --d 5"),
        ("run.py --a $((1 + 2*3)) --b $((8/2-1)) --c $((2*(3+4)))", "--a 7 --b 3 --c 14"),
        ("run.py --a $((A*2)) --b $((1 << 2))", "--a $A --b $((1<<2))"),
        ("X=(--a 1)\nX+=(--b 2)\npython run.py \"${X[@]}\"", "--a 1 --b 2"),
        ("A='x y'\nrun.py --a $A", "--a x y"),
        ("CMD=\"python run.py --a 1\"\neval $CMD", "--a 1"),
        ("OPTS=\"--a 1\"\nCMD=\"python run.py $OPTS\"\nsrun -l bash -c \"$CMD\" > log", "--a 1"),
        ("export A=1 B=2; C=3 torchrun run.py --a $A --b $B || exit", "--a 1 --b 2"),
        ("run.py $@ --x $1", "one two --x one"),
        ("echo \"run.py --more --and --more\"\nrun.py --a '$A'", "--a $A"),
        ("touch it's\nrun.py --a 1", "--a 1"),
        ("A='--a 1'\nA+=' --b 2'\nrun.py $A", "--a 1 --b 2"),
        ("run.py --a ${A##*/} --b x#1 --c 3 # a 'comment", "--a ${A##*/} --b x#1 --c 3"),
        ("# a comment \\\nrun.py --a 1 \\\n  # --b 2 \\\n  --c 3", "--a 1"),  # bash ends it, too
        ("A=(--a 1); B=(--b 2); run.py ${A[@]} ${B[@]}", "--a 1 --b 2"),
        ("if true; then A+=(--a 1); fi\nrun.py ${A[@]}", "--a 1"),
        ("declare -a A=(--a 1  # (one)\n --b)\nlocal -a B=(--c)\nrun.py ${A[@]} ${B[@]}", "--a 1 --b --c"),
        ("case $1 in one) A=1;; esac\nrun.py --a $A", "--a 1"),
        ("f() { (cd x; run.py --a 1); }", "--a 1"),
        ("run.py --a ';' --b \")\" \\; --c", "--a ; --b ) ; --c"),
        ("cat <<- 'END' > x\nif you type --b\ncase\n  END\nrun.py --a 1", "--a 1"),
        ("A=\"run.py --a 1\"\nsbatch <<END\nsrun -l bash -c \"$A\"\nEND", "--a 1"),
        ("A=\"  --a 1\"\nmpirun entry.sh run.py \"$A --b\"", "--a 1 --b"),
        ("sbatch << END\n#SBATCH\nsrun run.py --a 1\nEND", "--a 1"),
        ("run.py --a \"$(dirname \"$(realpath \"$0\")\")/x\"", "--a $COMMAND/x"),
    ],
)  # fmt: skip
def test_shells_are_read_without_being_executed(script: str, words: str) -> None:
    program = Script(script, ["one", "two"]).program_words()
    assert [readable(word) for word in program] == words.split()


def test_quotes_keep_blanks_inside_a_word() -> None:
    script = 'A=\'x y\'\nB=("$A" z)\nrun.py --a "$A" --b "${B[@]}" --c ${B[@]}'
    assert Script(script).program_words() == ["--a", "x y", "--b", "x y", "z", "--c", "x", "y", "z"]


@pytest.mark.parametrize(
    "script",
    [
        "if [ $1 = one ]; then A=1; else A=2; fi",
        "if [ $1 != one ]; then A=2; elif [[ $2 == t* ]]; then A=1; else A=3; fi",
        'A=1; [ -n "$3" ] && [ 1 -gt 2 ] && A=2',
        "A=1; [ $2 = two ] || A=2",
        "[[ $1 = one && 3 -le 3 ]] &&\n  A=1 || A=2",
        "B=; if [[ -z $B ]]; then A=1; else A=2; fi",
        "if ! [ -z $1 ] && [ ! $2 = one ]; then A=1; else A=2; fi",
        "B=true; if $B; then if false; then A=2; else A=1; fi; fi",
        "case $2 in\none)\n  A=2;;\n(t*) A=1\n;;\n*) A=3\nesac",
        "case $1 in two | one) A=1 ;; *) A=2 ;; esac",
        "case $1 in one) ;; *) B=2 ;; esac; A=1$B",
        "if false; then B=2; fi; A=1$B",
        "shift; if [ $1 = two ]; then A=1; fi",
        "B=1_000; B=${B//_}; A=$((B / 1000))",
        ": ${A:=1} ${A:=2}",
        "A=1; if [ $1 = two ]; then [ -d x ] && A=2; fi",
    ],
)
def test_branches_that_the_arguments_decide_are_followed(script: str) -> None:
    """bash, which runs each of these, agrees."""
    text = f"{script}\nrun.py --a $A"
    read = Script(text, ["one", "two"])
    ran = subprocess.run(["bash", "-c", f"run.py() {{ echo $@; }}\n{text}", "-", "one", "two"], capture_output=True)
    assert (" ".join(read.program_words()), read.decide()) == (ran.stdout.decode().strip(), [])
    assert read.program_words() == ["--a", "1"]


@pytest.mark.parametrize(
    "script",
    [
        "if [ $A = 1 ]",
        'if [ -n "${A:-}" ]',
        "if [ -d $1 ]",
        "if [[ $1 =~ n ]]",
        "if (( 1 > 2 ))",
        "if [[ $1 = two || $1 = one && $2 = one ]]",
        "if cat; [ $1 = two ]",
        "while [ $1 ]; do if [ $1 = two ]",
    ],
)
def test_all_branches_are_read_where_nothing_decides(script: str) -> None:
    branches = Script(f"{script}; then B=1; else B=2; fi", ["one", "two"]).branches
    assert [set(values) for values in branches.values()] == [{"1", "2"}]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("case $3 in\n7B) A=32;;\n13B) A=40;;\nesac", "$A: branches of the script make '32', '40'; the last is read"),
        ("A=1\nif make; then A=2; fi", "$A: branches of the script make '1', '2'; the last is read"),
        ("A=1\n[ -n \"$B\" ] && A=2", "$A: branches of the script make '1', '2'; the last is read"),
        ("if make; then A+=(--b); else A+=(--c); fi", "$A: branches of the script add '--b', '--c'; all are read"),
        ("if make; then A=1; else A=1; fi", None),
        ("A=1\nA=2\nfor B in 1 2; do A=3; done", None),
        ("if make; then A=1; else A=2; fi\nA=3", None),
        ("f() {\n  A=2\n}", "f(): is read where it is defined, with the script's arguments; compare its calls"),
        ("function f {\n  :\n}", "f(): is read where it is defined, with the script's arguments; compare its calls"),
        ("A=1\nunset A", "unset: is not followed; check the variables that it changes"),
        ("set -- --lr 5", "set --: is not followed; check the variables that it changes"),
        ("A=1; ((A++))", "((: is not followed; check the variables that it changes"),
        ("set -euo pipefail; B=$((1 + 2))", None),
        ("run.py --a 1", "the script starts 2 Python programs with flags; the one with the most is read"),
    ],
)  # fmt: skip
def test_what_branches_decide_is_listed(tmp_path: Path, script: str, line: str | None) -> None:
    words, decide = words_of([written(tmp_path, f"{script}\nrun.py --num-layers $A --lr 1")])
    assert decide == ([] if line is None else [line])
    assert line is None or f"#   {line}" in document(words, decide)


@pytest.mark.parametrize(
    "words", ["run.py ${A[@]} --num-layers 4", "run.py --no-rope-fusion ${A[@]}", "run.py --no-such-flag $A"]
)
def test_a_variable_without_a_value_is_named_wherever_it_is(words: str) -> None:
    """An argument without an effect here may be before a whole group of others."""
    assert "$A has no value" in document(Script(words).program_words())


def test_a_variable_without_a_value_is_no_value_of_the_flag_before_it() -> None:
    line = "run.py --swiglu ${A[@]} --num-layers 4 ${A[@]} --lr $B ${A[@]} --data-path 1 $DATA"
    text = document(Script(line).program_words())
    assert "data_path: [1, $DATA]" in text
    assert "num_layers" not in text[text.index("# Decide") :]
    assert "swiglu" not in text[: text.index("# Decide")]
    assert "lr: not given" in text


def test_a_variable_without_a_value_is_named(tmp_path: Path) -> None:
    words = Script("run.py --save $HOME/a --num-layers ${N} --lr $(cat lr)").program_words()
    assert missing_variables(words) == ["COMMAND", "HOME", "N"]
    config, text = translated(tmp_path, words)
    assert (config.checkpoint.save, config.model.num_layers) == ("$HOME/a", Config().model.num_layers)
    assert "$N has no value that can be read from the script: --num-layers" in text
    text = document(Script("run.py --load $1 --save $1").program_words())
    assert "$1 has no value after the script: --load, --save" in text


def test_scripts_without_a_program_are_refused(tmp_path: Path) -> None:
    assert "starts no Python program" in refused(words_of, [written(tmp_path, "ls --all")])
    assert "does not exist" in refused(words_of, ["gone.slurm"])


@pytest.mark.parametrize("line", ["torchrun pretrain_gpt.py", "torchrun --nproc-per-node 8 pretrain_gpt.py"])
def test_flags_of_the_launcher_are_not_those_of_the_program(line: str) -> None:
    assert "starts no Python program with flags" in refused(words_of, line.split())
