"""The wrong inputs: what is given to which command, and what the answer must name.

A row is WORDS | FRAGMENT. Words are a shell's; in them

    {w}/...   the good ones (world.py): data.bin, corpus.jsonl, tokenizer, run, hf, good.yaml, text.txt
    {in}      a copy of one of them, or an empty folder, with this row's changes
    {out}     a folder for what is written, which must stay empty

Each is answered with exit status 2, an `error:` of at most three lines that has the fragment, and nothing written.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TRAINER = "pretrain_skyladder.py"
SMALL = (
    "--config {w}/good.yaml --data-path {w}/data --tokenizer-model bytes --seq-length 64 --train-iters 2 "
    "--global-batch-size 2"
)


@dataclass(frozen=True)
class Change:
    """Is one change to a copy of something good: `what` says which of those in world.py, `value` what it puts there."""

    what: Literal["write", "patch", "seal", "cut", "remove", "link", "put"]
    file: str
    value: Any = None


@dataclass(frozen=True)
class Wrong:
    """Is one wrong input.

    Attributes:
        script, words: the command.
        fragment: that the answer has.
        environment: beside the ordinary one.
        good: what {in} is a copy of; "" for an empty folder.
        changes: to {in}.
    """

    script: str
    words: tuple[str, ...]
    fragment: str
    environment: Mapping[str, str] = field(default_factory=dict)
    good: str = ""
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        """Identify it in a list of tests."""
        given = [*(f"{name}={value}" for name, value in self.environment.items()), " ".join(self.words)]
        given += [f"{change.what} {change.file} {_short(str(change.value))}" for change in self.changes]
        return f"{self.script.removeprefix('tools/').removesuffix('.py')} {' '.join(given)}".replace(SMALL, "...")


def _short(text: str) -> str:
    return repr(text) if len(text) <= 90 else f"{text[:40]!r}...{text[-40:]!r} ({len(text):,})"


def rows(script: str, before: str, text: str, after: str = "") -> Iterator[Wrong]:
    """Read rows; `before` and `after` are words that stand around those of each."""
    for line in text.strip("\n").splitlines():
        words, _, fragment = line.rpartition(" | ")
        yield Wrong(script, tuple(shlex.split(f"{before} {words} {after}")), fragment.strip())


def changed(script: str, words: str, good: str, cases: Iterable[tuple[Change, str]]) -> Iterator[Wrong]:
    """Make a row of each change and what the answer to it has."""
    for change, fragment in cases:
        yield Wrong(script, tuple(shlex.split(words)), fragment, good=good, changes=(change,))


# flags of the trainer, refused before anything is opened
FLAGS = """
--num-layer 5 | --num-layer: no such flag; did you mean --num-layers?
--Num-Layers 5 | no such flag
--untie-embeddings-and-output-weights False | belongs to no flag
--no-rope-frequency 2 | no such flag; did you mean
-n 5 | no such flag
--lr= | lr: got ''
5 | got a word that belongs to no flag
-- | no such flag
--num-layers | --num-layers: expected one argument
--num-layers 0 | num_layers: got 0, needs more than 0
--num-layers -3 | num_layers: got -3, needs more than 0
--num-layers 2.5 | num_layers: got 2.5
--num-layers four | num_layers: got 'four'
--num-layers '' | num_layers: got ''
--num-layers 1e3 | num_layers: got 1e3
--num-layers 1000000000000 | num_layers: got 1000000000000, needs at most 10000
--num-layers nan | num_layers: got nan
--num-layers none | num_layers: got 'none'
--hidden-size 0 | hidden_size: got 0
--hidden-size 131 | hidden_size: got 131, needs a multiple of num_attention_heads
--hidden-size 10000000000000000000000 | hidden_size: got 10000000000000000000000
--num-attention-heads 3 | num_attention_heads
--num-attention-heads 0 | num_attention_heads: got 0
--num-query-groups 3 | needs a multiple of num_query_groups 3
--kv-channels 7 | kv_channels
--kv-channels 0 | kv_channels: got 0
--vocab-size 0 | vocab_size: got 0
--vocab-size -1 | vocab_size: got -1
--make-vocab-size-divisible-by 0 | make_vocab_size_divisible_by: got 0
--norm-epsilon 0 | norm_epsilon: got 0
--norm-epsilon nan | norm_epsilon: got nan
--norm-epsilon inf | norm_epsilon: got inf
--rotary-base -1 | rotary_base: got -1
--rotary-base x | rotary_base: got 'x'
--rotary-base inf | rotary_base: got inf
--rotary-percent 0.5 | rotary_percent
--rope-scaling cubic | rope_scaling: got 'cubic'
--rope-scaling yarn | rope_original_length
--rope-scaling linear --rope-scaling-factor 0 | rope_scaling_factor: got 0
--rope-scaling linear --rope-scaling-factor inf | rope_scaling_factor: got inf
--rope-window-bases 64 | rope_window_bases: got '64', needs WINDOW:BASE
--rope-window-bases 64:x | rope_window_bases: got '64:x'
--rope-window-bases 64:inf | rope_window_bases
--no-rope-freq 0 | no_rope_freq: got 0
--model-preset 7B | model_preset: got '7B', needs one of
--model-preset '' | model_preset: got ''
--block mamba | block: got 'mamba'
--num-experts 1 | num_experts
--num-experts 4 --moe-router-topk 8 | moe_router_topk
--moe-grouped-gemm | moe_grouped_gemm
--qk-layernorm --add-qkv-bias | qk_layernorm: got true
--query-pre-attn-scalar 64 | query_pre_attn_scalar: got 64
--local-window 0 | local_window: got 0
--window-attn-skip-freq 2 | window_attn_skip_freq: got 2 without local_window
--local-window 8 --window-attn-skip-freq 1 | window_attn_skip_freq: got 1
--init-method-std -1 | init_method_std: got -1
--init-method-std inf | init_method_std: got inf
--hidden-dropout 1 | hidden_dropout: got 1
--hidden-dropout -0.1 | hidden_dropout: got -0.1
--attention-dropout 0.1 | attention_dropout: got 0.1
--tensor-model-parallel-size 0 | tensor_model_parallel_size: got 0
--tensor-model-parallel-size 2 | world size: got 1 processes, needs a multiple of 2
--pipeline-model-parallel-size 3 | num_layers
--context-parallel-size 2 | world size: got 1
--context-parallel-size -1 | context_parallel_size: got -1
--expert-model-parallel-size 2 | expert_model_parallel_size
--sequence-parallel | sequence_parallel: got true
--cp-policy best | cp_policy: got 'best'
--cp-scheme ring | cp_scheme: got 'ring'
--cp-row-cost -1 | cp_row_cost: got -1
--cp-row-cost nan | cp_row_cost: got nan
--cp-overlap-parts 0 | cp_overlap_parts: got 0
--recompute-granularity some | recompute_granularity: got 'some'
--recompute-granularity full --recompute-num-layers 99 | recompute_num_layers: got 99
--recompute-modules all | recompute_modules
--device tpu | device: got 'tpu'
--attention-backend flash | attention_backend: got 'flash'
--distributed-timeout-minutes 0 | distributed_timeout_minutes: got 0
--distributed-timeout-minutes 100000000000000000 | distributed_timeout_minutes
--watchdog-timeout -1 | watchdog_timeout: got -1
--watchdog-timeout inf | watchdog_timeout: got inf
--seq-length 0 | seq_length: got 0
--seq-length 1000000000000000 | seq_length
--micro-batch-size 0 | micro_batch_size: got 0
--global-batch-size 0 | global_batch_size: got 0
--global-batch-size 3 --micro-batch-size 2 | global_batch_size: got 3, needs a multiple
--split 98,2,0,1 | split
--split a,b,c | split
--split -1,2,3 | split
--split 0,0,0 | split
--split 1e999999999,1,1 | split
--split nan,1,1 | split
--packing best | packing: got 'best'
--packing-options threshold=3 | packing: random has no option 'threshold'
--packing best_fit --packing-options x=y | packing_options: got 'x=y'
--packing upsample_long --packing-options threshold=nan | packing
--packing upsample_long --packing-options factor=1e400 | packing
--packing upsample_long --packing-options threshold | packing_options: got 'threshold'
--long-share 0.5 | long_share: got 0.5
--first-sample -1 | first_sample: got -1
--first-sample 100000000000000000000 | first_sample: got a run up to sample
--data-path {w}/data {w}/data | data_path: got
--data-path 0 {w}/data 1 {w}/data | data_path: got '0'
--data-path nan {w}/data 1 {w}/data | data_path: got 'nan'
--data-path inf {w}/data 1 {w}/data | data_path: got 'inf'
--data-path | --data-path: expected at least one argument
--mixture {w}/nowhere.yaml | mixture
--mixture {w}/good.yaml | mixture
--mixture a b | mixture: got 2 words
--valid-data-path {w}/data | valid_data_path
--window-schedule lineal | window_schedule: got 'lineal'
--window-start 0 | window_start
--window-start -5 | window_start
--window-end 128 | window_end: got 128, needs at most seq_length 64
--window-end 0 | window_end
--window-schedule linear --window-rate 0 | window_rate
--window-schedule linear --window-rate nan | window_rate
--window-schedule linear --window-rate inf | window_rate
--window-schedule linear --window-rate -2 | window_rate
--window-schedule linear --window-rate 1 --window-expansion-fraction 0.5 | window_expansion_fraction
--window-schedule linear --window-expansion-fraction 0 | window_expansion_fraction
--window-schedule linear --window-expansion-fraction 2 | window_expansion_fraction
--window-schedule stepwise --window-round-to 0 | window_round_to
--window-schedule cyclic_jump --window-cycles 0 | window_cycles
--window-schedule continual | window_switch_step
--window-mask round | window_mask: got 'round'
--local-window-fixed | local_window_fixed: got true
--token-weighting unfrozen | short_context: got nothing
--token-weighting unfrozen --short-context 64 | short_context: got 64
--token-weighting unfrozen --short-context 16 --short-stride 20 | short_stride: got 20
--token-weighting unfrozen --short-context 16 --weight-strength 2 | weight_strength: got 2
--token-weighting unfrozen --short-context 16 --weight-strength nan | weight_strength: got nan
--token-weighting unfrozen --short-context 16 --weight-clip 0 | weight_clip: got 0
--token-weighting unfrozen --short-context 16 --weight-shift 2 | weight_shift: got 2
--token-weighting unfrozen --short-context 16 --score-interval 0 | score_interval: got 0
--token-weighting unfrozen --short-context 16 --score-row-share 1.5 | score_row_share: got 1.5
--token-weighting frozen | score_store: got nothing
--token-weighting frozen --score-store {w}/nowhere | there is no store
--token-weighting frozen --score-store {w}/data.bin | there is no store
--token-weighting dataset | weights.npy
--token-weighting some | token_weighting: got 'some'
--short-context 16 | short_context: got 16 with token_weighting none
--weight-score pmi | weight_score: got 'pmi'
--lr 0 | lr: got 0
--lr -1 | lr: got -1
--lr nan | lr: got nan
--lr inf | lr: got inf
--lr 1e400 | lr: got 1e400
--lr abc | lr: got 'abc'
--lr 1e39 | lr: got 1e+39
--min-lr 1 | min_lr: got 1
--min-lr nan | min_lr: got nan
--lr-decay-style exp | lr_decay_style: got 'exp'
--lr-warmup-iters 2 | lr_warmup_iters: got 2
--lr-warmup-iters -1 | lr_warmup_iters: got -1
--lr-decay-style WSD --lr-warmup-iters 0 | lr_wsd_decay_iters: got 0
--lr-decay-iters 0 | lr_decay_iters: got 0
--weight-decay -1 | weight_decay: got -1
--weight-decay inf | weight_decay: got inf
--adam-beta1 1 | adam_beta1: got 1
--adam-beta2 nan | adam_beta2: got nan
--adam-eps 0 | adam_eps: got 0
--adam-eps inf | adam_eps: got inf
--clip-grad -1 | clip_grad: got -1
--clip-grad nan | clip_grad: got nan
--qk-clip-threshold 100 | qk_clip_threshold: got 100
--use-precision-aware-optimizer | use_precision_aware_optimizer
--optimizer-cpu-offload --optimizer-offload-fraction 2 | optimizer
--main-grads-dtype fp8 | main_grads_dtype: got 'fp8'
--train-iters 0 | train_iters: got 0
--train-iters -1 | train_iters: got -1
--train-iters 1000000000000000000000000000000 | needs at most 1,000,000,000,000,000
--seed -1 | seed: got -1
--seed 18446744073709551616 | seed: got 18446744073709551616
--seed abc | seed: got 'abc'
--fp8-format hybrid | fp8_format
--spike-window 1 | spike_window: got 1
--spike-deviations 0 | spike_deviations: got 0
--on-spike pray | on_spike: got 'pray'
--skip-limit 0 | skip_limit: got 0
--loss-block-tokens 0 | loss_block_tokens: got 0
--z-loss -1 | z_loss: got -1
--z-loss inf | z_loss: got inf
--eval-interval -1 | eval_interval: got -1
--eval-iters 0 | eval_iters: got 0
--eval-lengths 0 | eval_lengths: got 0
--eval-lengths 65 | eval_lengths: got 65
--eval-lengths a | eval_lengths
--eval-stride 0 | eval_stride: got 0
--save '' | save: got an empty name
--load '' | load: got an empty name
--load {w}/nowhere | load: got
--init-from '' | init_from: got an empty name
--init-from {w}/nowhere | neither a Hugging Face model folder nor holds a checkpoint
--init-from {w}/data.bin | neither a Hugging Face model folder
--init-optimizer | init_optimizer: got true without init_from
--load-if-present | load_if_present: got true without load
--override size | override: got size
--save-interval 5 | save_interval: got 5 without save
--save-interval -5 | save_interval: got -5
--save-seconds inf --save {out}/run | save_seconds
--async-save | async_save: got true without save
--keep-every 5 | keep_every: got 5 without keep_last
--log-interval 0 | log_interval: got 0
--attention-health-queries 0 | attention_health_queries: got 0
--stage first | stage: got first
--world-size 2 | world_size: got 2, needs --dry-run
--dry-run --world-size 0 | world_size: got 0
--dry-run --world-size two | --world-size: invalid int value: 'two'
--dry-run maybe | --dry-run: invalid choice: 'maybe'
--dry-run --world-size 3 --tensor-model-parallel-size 2 | world size: got 3
--dry-run strict --data-path {w}/nowhere | nowhere.idx does not exist
--dry-run --train-iters 1000000000000000000000000000000 | needs at most 1,000,000,000,000,000
--dry-run --num-layers 0 | num_layers: got 0
--tokenizer-model {w}/nowhere | tokenizer
--tokenizer-model '' | tokenizer
--tokenizer-model {w}/data.bin | tokenizer
--tokenizer-model tiktoken:none | tokenizer
--data-path {w}/nowhere | nowhere.idx does not exist
--data-path '' | .idx does not exist
--save {w}/text.txt | cannot be written
--save {w}/text.txt/run | cannot be written
--save /proc/nowhere/run | cannot be written
--save {w}/other | save: got
--load {w}/run --seed 7 | seed
--load {w}/run --lr 1 | lr
--load {w}/run --data-path {w}/ints | data
--init-from {w}/hf --num-layers 3 --hidden-size 32 | needs others; use --num-layers 2 --hidden-size 16
"""


def write(file: str, value: str | bytes) -> Change:
    return Change("write", file, value)


def configuration(text: str | bytes, fragment: str) -> tuple[Change, str]:
    return write("run.yaml", text), fragment


DEEP = "[" * 3000 + "]" * 3000
CONFIGURATIONS = [
    configuration("", "needs a mapping of the sections"),
    configuration("[1, 2]", "needs a mapping of the sections"),
    configuration("model", "needs a mapping of the sections"),
    configuration(b"\xff\xfe\x00", "needs a YAML file in UTF-8"),
    configuration("model: {num_layers: 2", "needs valid YAML"),
    configuration("model: {num_layers: 2}\nmodel: {num_layers: 3}", "model stands twice"),
    configuration("model: {num_layers: 2, num_layers: 3}", "num_layers stands twice"),
    configuration("models: {num_layers: 2}", "no such section; did you mean model?"),
    configuration("num_layers: 2", "belongs under `model:`"),
    configuration("model: {layers: 2}", "model.layers: no such option"),
    configuration("model: {seq_length: 2}", "model.seq_length: belongs under `data:`"),
    configuration("model: 5", "model: got 5, needs a mapping of options"),
    configuration("model: [1]", "needs a mapping of options"),
    configuration("1: {}", "1: no such section"),
    configuration("null: {}", "no such section"),
    configuration("model: {1: 2}", "model.1: no such option"),
    configuration("? [a, b]\n: c", "a key is no plain word"),
    configuration("model: {num_layers: true}", "num_layers: got True"),
    configuration("model: {num_layers: [2]}", "num_layers: got [2]"),
    configuration("model: {num_layers: {a: b}}", "num_layers: got {'a': 'b'}"),
    configuration("model: {num_layers: }", "num_layers: got None"),
    configuration("model: {num_layers: .inf}", "num_layers: got inf"),
    configuration("model: {num_layers: 2023-13-45}", "needs valid YAML"),
    configuration("model: {num_layers: 2023-01-05}", "num_layers: got datetime.date"),
    configuration("model: {num_layers: !!bool maybe}", "needs valid YAML"),
    configuration("model: {num_layers: !!int x}", "needs valid YAML"),
    configuration("model: {num_layers: !!float {}}", "needs valid YAML"),
    configuration("model: {num_layers: !!timestamp x}", "needs valid YAML"),
    configuration("model: {num_layers: !!binary x}", "needs valid YAML"),
    configuration("model: {num_layers: !!python/object/apply:os.system [true]}", "needs valid YAML"),
    configuration("model: {num_layers: !unknown 3}", "needs valid YAML"),
    configuration(f"model: {{num_layers: {'9' * 5000}}}", "needs valid YAML"),
    configuration(f"model: {{num_layers: {'9' * 4000}}}", "num_layers: got a number of about"),
    configuration(f"model: {{num_layers: {'x' * 100_000}}}", "num_layers: got 'xxx"),
    configuration(f"? {'x' * 100_000}\n: 5", "no such section"),
    configuration(f"model: {{num_layers: {DEEP}}}", "too many levels"),
    configuration("model: {block: *nowhere}", "needs valid YAML"),
    configuration("a: 1\n---\nb: 2", "needs valid YAML"),
    configuration("a:\tb: c", "needs valid YAML"),
    configuration('model: {block: "\x1b[2J"}', "needs valid YAML"),
    configuration('model: {block: "\\e[2J"}', "block: got '\\x1b[2J'"),
    configuration("model: {num_layers: 2}\nextends: run.yaml", "extends: got 'run.yaml'"),
    configuration("extends: 5", "extends: got 5"),
    configuration("extends: nowhere.yaml", "needs a readable YAML file"),
    configuration("extends: [a]", "extends: got ['a']"),
    configuration("stages: 5", "stages: got 5"),
    configuration("stages: []", "stages: got []"),
    configuration("stages: [1]", "stages: got [1]"),
    configuration("stages: [{name: a}, {name: a}]", "stage 1 has the name 'a', needs one of its own"),
    configuration("stages: [{name: ../a}]", "stage 0 has the name '../a'"),
    configuration("stages: [{name: a, model: 5}]", "model: got 5"),
    configuration("stages: [{name: a, keep: all}]", "keep: got 'all'"),
    configuration("stages: [{name: a, keep: [[1]]}]", "keep: got"),
    configuration("stages: [{name: a}, {name: b, keep: [samples, x]}]", "keep: got"),
    configuration("families: 5", "families: got int"),
    configuration("families: [{name: x}]", "got no name"),
    configuration("families: [{name: '{x}'}]", "needs one of its axes"),
    configuration("families: [{name: '{:>9999999999}'}]", "got {:>9999999999}, needs one of its axes"),
    configuration("families: [{name: '{0}'}]", "got {0}, needs one of its axes"),
    configuration("families: [{name: a, axes: [1]}]", "axes: got [1]"),
    configuration("families: [{name: a, figures: [1]}]", "figures: got [1], needs a mapping"),
    configuration("families: [{name: a, model: {block: '{x.y}'}}]", "got {x.y}, needs one of its axes"),
    configuration("data: {mixture: []}", "data_path: got nothing"),
    configuration("data: {mixture: {}}", "mixture"),
    configuration("data: {mixture: [5]}", "mixture"),
    configuration("data: {mixture: [{prefix: a, weight: x}]}", "weight 'x', needs a positive number"),
    configuration(f"data: {{mixture: [{{prefix: a, weight: 1{'0' * 400}}}]}}", "needs a positive number"),
    configuration("data: {mixture: [{prefix: a, weight: .nan}]}", "needs a positive number"),
    configuration("data: {mixture: [{prefix: a, weight: 0}]}", "needs a positive number"),
    configuration("data: {mixture: [{weight: 1}]}", "prefix"),
    configuration("data: {mixture: [{prefix: a, color: red}]}", "color"),
    configuration("data: {mixture: [{prefix: a, length: 7}]}", "length"),
    configuration("data: {mixture: [{prefix: a}, {prefix: a}]}", "give each a name of its own"),
    configuration("data: {mixture: [{mixture: nowhere.yaml}]}", "cannot be read"),
    configuration("data: {mixture: [{mixture: a.yaml, color: red}]}", "color beside `mixture`"),
    configuration("data: {mixture: run.yaml}", "mixture"),
    configuration("recipe: 5", "data_path: got nothing"),
    configuration("checkpoint: {override: lr}", "override: got 'lr'"),
    configuration("data: {data_path: {a: b}}", "data_path"),
]
# beside what a launcher says: (environment, fragment)
LAUNCHES = [
    ({"WORLD_SIZE": "2"}, "RANK: got none"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: got '2', needs a number 0..1"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR: got none"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT: got '0'"),
    ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}, "global_batch_size"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x" * 64, "MASTER_PORT": "29511"}, "MASTER_ADDR"),
]


def patch(value: Mapping[str, Any], file: str = "config.json") -> Change:
    """Put other values into a JSON file; of None: take them out."""
    return Change("patch", file, value)


INDEX = "model.safetensors.index.json"
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: list[tuple[Change, str]] = [
    (Change("remove", "config.json"), "cannot read"),
    (write("config.json", ""), "cannot read"),
    (write("config.json", "[]"), "holds no JSON object"),
    (write("config.json", "5"), "holds no JSON object"),
    (write("config.json", '"llama"'), "holds no JSON object"),
    (write("config.json", "null"), "holds no JSON object"),
    (write("config.json", b"\xff\xfe"), "cannot read"),
    (write("config.json", "[" * 100_000), "too many levels"),
    (write("config.json", '{"a": ' * 100_000), "too many levels"),
    (write("config.json", '{"hidden_size": ' + "9" * 5000 + "}"), "cannot read"),
    (write("config.json", '{"model_type": "llama"'), "cannot read"),
    (patch({"model_type": None}), "model_type None, needs one of"),
    (patch({"model_type": 5}), "model_type 5, needs one of"),
    (patch({"model_type": ["llama"]}), "model_type ['llama'], needs one of"),
    (patch({"model_type": "gpt_oss"}), "attention sinks"),
    (patch({"model_type": "x" * 10_000}), "model_type 'xxx"),
    (patch({"num_hidden_layers": 0}), "num_hidden_layers 0, needs a whole number above 0"),
    (patch({"num_hidden_layers": -1}), "num_hidden_layers -1, needs"),
    (
        patch({"num_hidden_layers": 10**12}),
        "num_hidden_layers 1000000000000, needs a whole number above 0 up to 10,000",
    ),
    (patch({"num_hidden_layers": 10**400}), "num_hidden_layers a number of about"),
    (patch({"num_hidden_layers": "2"}), "num_hidden_layers '2', needs a whole number"),
    (patch({"num_hidden_layers": 2.0}), "num_hidden_layers 2.0, needs a whole number"),
    (patch({"num_hidden_layers": True}), "num_hidden_layers True, needs a whole number"),
    (patch({"num_hidden_layers": None}), "num_hidden_layers None, needs a whole number"),
    (patch({"num_hidden_layers": [2]}), "num_hidden_layers [2], needs a whole number"),
    (patch({"num_hidden_layers": 3}), "has no tensor model.layers.2"),
    (patch({"hidden_size": 0}), "hidden_size 0, needs"),
    (patch({"hidden_size": 10**15}), "hidden_size 1000000000000000, needs"),
    (patch({"hidden_size": 32}), "its config needs"),
    (patch({"num_attention_heads": 0}), "num_attention_heads 0, needs"),
    (patch({"num_attention_heads": 3}), "checkpoint"),
    (patch({"num_key_value_heads": 0}), "num_key_value_heads 0, needs"),
    (patch({"num_key_value_heads": "all"}), "num_key_value_heads 'all', needs"),
    (patch({"num_key_value_heads": 3}), "checkpoint"),
    (patch({"head_dim": 0}), "head_dim 0, needs"),
    (patch({"head_dim": 7}), "checkpoint"),
    (patch({"head_dim": {}}), "head_dim {}, needs"),
    (patch({"vocab_size": 0}), "vocab_size 0, needs"),
    (patch({"vocab_size": 10}), "its config needs [10"),
    (patch({"rms_norm_eps": 0.0}), "rms_norm_eps 0.0, needs a number above 0"),
    (patch({"rms_norm_eps": "1e-5"}), "rms_norm_eps '1e-5', needs a number"),
    (patch({"rms_norm_eps": float("nan")}), "rms_norm_eps nan, needs a number"),
    (patch({"hidden_act": "relu"}), "hidden_act 'relu', this model has 'silu' only"),
    (patch({"hidden_act": ["silu"]}), "hidden_act ['silu']"),
    (patch({"attention_bias": True}), "attention_bias True"),
    (patch({"mystery": 5}), "mystery 5, which this package does not know"),
    (patch({"mystery": ["x" * 100_000]}), "mystery ['xxx"),
    (patch({"tie_word_embeddings": "yes"}), "tie_word_embeddings 'yes', needs true or false"),
    (patch({"tie_word_embeddings": True}), "lm_head.weight other than model.embed_tokens.weight"),
    (patch({"rope_theta": 0}), "rope_theta 0"),
    (patch({"rope_theta": "big"}), "rope_theta 'big', needs a number"),
    (patch({"rope_theta": 10**400}), "rope_theta a number of about"),
    (patch({"rope_scaling": "linear"}), "rope_scaling 'linear', needs an object"),
    (patch({"rope_scaling": ["linear"]}), "rope_scaling ['linear'], needs an object"),
    (patch({"rope_scaling": {"rope_type": "cubic"}}), "rope_type 'cubic', needs one of"),
    (patch({"rope_scaling": {"rope_type": ["linear"]}}), "rope_type ['linear'], needs one of"),
    (patch({"rope_scaling": {"rope_type": "linear", "factor": "two"}}), "factor 'two' in its angles, needs a number"),
    (patch({"rope_scaling": {"rope_type": "linear", "factor": 0}}), "rope_scaling_factor: got 0"),
    (patch({"rope_scaling": {"rope_type": "linear", "factor": -1}}), "factor -1 in its angles"),
    (patch({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}), "factor a number of about"),
    (patch({"rope_scaling": {"rope_type": "linear", "colour": 5}}), "colour 5 in its rope_parameters"),
    (patch({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": None}), "rope_original"),
    (
        patch({"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": [8]}}),
        "original_max_position_embeddings [8]",
    ),
    (patch({"rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0}}), "rope"),
    (patch({"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5, this model has 1.0 only"),
    (patch({"partial_rotary_factor": {}}), "partial_rotary_factor {}, needs a number"),
    (patch({"model_type": "qwen2", "sliding_window": "all", "use_sliding_window": True}), "sliding_window 'all'"),
    (patch({"model_type": "ministral", "layer_types": ["full"], "sliding_window": 8}), "layer_types 'full'"),
    (patch({"model_type": "ministral", "layer_types": [[]], "sliding_window": 8}), "layer_types []"),
    (patch({"model_type": "ministral", "layer_types": ["full_attention"], "sliding_window": 8}), "has 1 layer_types"),
    (patch({"model_type": "ministral", "layer_types": 5, "sliding_window": 8}), "layer_types 5, needs a list"),
    (patch({"model_type": "smollm3", "no_rope_layers": 5}), "no_rope_layers 5, needs a list"),
    (patch({"model_type": "smollm3", "no_rope_layers": [1]}), "no_rope_layers"),
    (patch({"model_type": "smollm3", "no_rope_layer_interval": 0}), "no_rope_layer_interval 0, needs"),
    (patch({"model_type": "gemma3_text", "rope_parameters": {"full_attention": 5}}), "checkpoint"),
    (patch({"model_type": "qwen3_moe", "num_experts": 0}), "num_experts 0, needs"),
    (Change("remove", "model.safetensors"), "holds no model.safetensors"),
    (write("model.safetensors", b""), "is damaged"),
    (write("model.safetensors", b"\xff" * 8), "is damaged"),
    (write("model.safetensors", (10**6).to_bytes(8, "little") + b"{}"), "is damaged"),
    (write("model.safetensors", (2).to_bytes(8, "little") + b"{}"), "has no tensor model.embed_tokens.weight"),
    (Change("cut", "model.safetensors", 100), "is damaged"),
    (write(INDEX, "{}"), "is damaged"),
    (write(INDEX, "[]"), "is damaged"),
    (write(INDEX, '{"weight_map": 5}'), "is damaged"),
    (write(INDEX, '{"weight_map": {"a": 5}}'), "outside its folder"),
    (write(INDEX, '{"weight_map": {"a": ["b"]}}'), "is damaged"),
    (write(INDEX, '{"weight_map": {"a": "../private.safetensors"}}'), "outside its folder"),
    (write(INDEX, '{"weight_map": {"a": "/etc/passwd"}}'), "outside its folder"),
    (write(INDEX, '{"weight_map": {"a": ""}}'), "outside its folder"),
    (write(INDEX, '{"weight_map": {"a": "b\\u0000c"}}'), "outside its folder"),
    (write(INDEX, '{"weight_map": {"a": "nowhere.safetensors"}}'), "lacks nowhere.safetensors"),
    (write(INDEX, '{"weight_map": {"a": "' + "x" * 5000 + '"}}'), "File name too long"),
    (write(INDEX, '{"weight_map": ' + "[" * 100_000), "is damaged"),
]
EXPORT = "megatron-to-hf --input {in} --output {out}/x --tokenizer none"
MANIFEST = "checkpoints/iter_0000002/manifest.json"
POINTER = "checkpoints/latest_checkpointed_iteration.txt"


def seal(value: Mapping[str, Any]) -> Change:
    """Put other values into a checkpoint's manifest, with the checksum that they need."""
    return Change("seal", MANIFEST, value)


CHECKPOINTS: list[tuple[Change, str]] = [
    (write(POINTER, "x"), "holds 'x', needs the number of a step"),
    (write(POINTER, ""), "holds '', needs the number of a step"),
    (write(POINTER, "-2"), "holds '-2'"),
    (write(POINTER, "9" * 5000), "holds '999"),
    (write(POINTER, b"\xff\x00"), "needs the number of a step"),
    (write(POINTER, "7"), "names step 7, but"),
    (write(MANIFEST, ""), "is no JSON"),
    (write(MANIFEST, "[]"), "its own checksum differs"),
    (write(MANIFEST, "[" * 100_000), "is no JSON"),
    (write(MANIFEST, '{"step": ' + "9" * 5000 + "}"), "is no JSON"),
    (write(MANIFEST, b"\xff"), "is no JSON"),
    (patch({"step": 3}, MANIFEST), "its own checksum differs"),
    (seal({"format": None}), "has format None"),
    (seal({"format": 99}), "has format 99"),
    (seal({"format": ["x" * 10_000]}), "has format ['xxx"),
    (seal({"files": None}), "files: "),
    (seal({"files": 5}), "files: "),
    (seal({"files": {"a": 5}}), "files.a: "),
    (seal({"files": {"a": {"size": -1, "sha256": "x"}}}), "files.a.size: "),
    (seal({"files": {"a": {"size": "many", "sha256": "x"}}}), "files.a.size: "),
    (seal({"files": {"../a": {"size": 1, "sha256": "x"}}}), "outside its folder"),
    (seal({"files": {"/etc/passwd": {"size": 1, "sha256": "x"}}}), "outside its folder"),
    (seal({"files": {"nowhere": {"size": 1, "sha256": "x"}}}), "nowhere is missing"),
    (seal({"step": "two"}), "step: "),
    (seal({"step": -2}), "step: "),
    (seal({"step": 7}), "holds the checkpoint of step 7"),
    (seal({"step": None}), "step: "),
    (seal({"consumed_samples": "x"}), "consumed_samples: "),
    (seal({"layout": 5}), "layout: "),
    (seal({"config": 5}), "config: "),
    (seal({"config": {"model": 5}}), "config.model: "),
    (seal({"config": {"model": {"num_layers": "x"}}}), "num_layers"),
    (seal({"optimizer": 5}), "optimizer: "),
    (seal({"data": 5}), "data: "),
    (seal({"code": [1]}), "code: "),
    (seal({"seconds": "x"}), "seconds: "),
    (Change("remove", MANIFEST), "cannot be read"),
    (Change("cut", "checkpoints/iter_0000002/.metadata", 10), "; take another checkpoint"),
    (Change("cut", "checkpoints/iter_0000002/__0_0.distcp", 10), "is damaged"),
    (Change("remove", "checkpoints/iter_0000002/__0_0.distcp"), "is missing"),
]
METRICS: list[tuple[Change, str]] = [
    (Change("remove", "metrics.jsonl"), "metrics.jsonl: not found"),
    (write("metrics.jsonl", ""), "holds no complete step"),
    (write("metrics.jsonl", "x\n"), "line 1: got 'x', needs one JSON object"),
    (write("metrics.jsonl", "[1]\n"), "line 1: got '[1]'"),
    (write("metrics.jsonl", b"\xff\n"), "line 1"),
    (write("metrics.jsonl", "[" * 100_000 + "\n"), "line 1"),
    (write("metrics.jsonl", '{"step": ' + "9" * 5000 + "}\n"), "line 1"),
    (write("metrics.jsonl", "{}\n"), "`step` is None"),
    (write("metrics.jsonl", '{"step": "x"}\n'), "`step` is 'x'"),
    (write("metrics.jsonl", '{"step": 1.5}\n'), "`step` is 1.5"),
    (write("metrics.jsonl", '{"step": 1' + "0" * 400 + "}\n"), "`step` is a number of about"),
    (write("metrics.jsonl", '{"step": NaN}\n'), "line 1"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": "low"}\n'), "step 0 has lm_loss 'low', needs a number"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": 1' + "0" * 400 + "}\n"), "lm_loss a number of about"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": [1]}\n'), "lm_loss [1], needs a number"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": 1, "window": {}}\n'), "window {}, needs a number"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": 1, "grad_norm": "x"}\n'), "grad_norm 'x'"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": 1, "attention_entropy": 5}\n'), "attention_entropy 5"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": 1, "attention_entropy": ["x"]}\n'), "attention_entropy 'x'"),
    (write("evaluation.jsonl", '{"step": 0, "valid_loss": "x"}\n'), "valid_loss 'x', needs a number"),
    (write("evaluation.jsonl", '{"step": 0, "valid_loss": 1, "by_length": [1]}\n'), "by_length [1], needs a mapping"),
    (write("evaluation.jsonl", '{"step": 0, "valid_loss": 1, "by_length": {"x": 1}}\n'), "by_length {'x': 1}"),
    (write("evaluation.jsonl", '{"step": 0, "valid_loss": 1, "by_length": {"8": "x"}}\n'), "by_length 'x'"),
    (write("evaluation.jsonl", '{"step": 0, "valid_loss": 1, "by_position": {"8": []}}\n'), "by_position []"),
    (write("history.jsonl", "x\n"), "line 1"),
]
DATA: list[tuple[Change, str]] = [
    (Change("remove", "data.idx"), "data.idx does not exist"),
    (Change("remove", "data.bin"), "data.bin does not exist"),
    (write("data.idx", b""), "is not a Megatron index"),
    (write("data.idx", b"MMIDIDX\x00\x00"), "is truncated"),
    (write("data.idx", b"x" * 100), "is not a Megatron index"),
    (Change("put", "data.idx", (9, b"\x02")), "has format version 2"),
    (Change("put", "data.idx", (17, b"\x63")), "dtype code 99"),
    (Change("put", "data.idx", (18, b"\xff" * 8)), "data.idx"),
    (Change("put", "data.idx", (26, b"\xff" * 8)), "data.idx"),
    (Change("put", "data.idx", (18, b"\x00" * 8)), "data"),
    (Change("put", "data.idx", (34, b"\xff" * 4)), "do not lie side by side"),
    (Change("put", "data.idx", (34, b"\xff\xff\xff\x7f")), "data"),
    (Change("cut", "data.idx", 60), "is truncated"),
    (Change("cut", "data.bin", 10), "is truncated"),
    (write("data.bin", b""), "is an empty data set"),
    (write("data.bin", b"\x00" * 10**6), "is the index of another dataset"),
    (write("data.json", "x"), "is not the card of a dataset"),
    (write("data.json", "[" * 100_000), "is not the card of a dataset"),
    (write("data.json", "[1]"), "is not the card of a dataset"),
    (write("data.json", '{"tokens": 1}'), "is the card of another dataset"),
    (write("data.json", '{"documents": "x"}'), "documents 'x', needs a whole number"),
    (write("data.json", '{"bos_id": [1]}'), "data"),
    (write("data.json", '{"source_field": "x"}'), "does not exist"),
    (write("data.json", '{"chat_template": "x"}'), "does not exist"),
    (write("data.mask.npy", b"x"), "cannot be read"),
    (write("data.mask.npy", b""), "cannot be read"),
    (write("data.sources.npy", b"\x93NUMPY\x01\x00"), "cannot be read"),
]
LINES: list[tuple[Change, str]] = [
    (write("a.jsonl", ""), "is empty"),
    (write("a.jsonl", "x\n"), "a.jsonl:1"),
    (write("a.jsonl", "5\n"), "needs an object with a field 'text'"),
    (write("a.jsonl", "{}\n"), "has no field 'text'"),
    (write("a.jsonl", '{"text": 5}\n'), "is a int, needs a string"),
    (write("a.jsonl", '{"text": ""}\n'), "the text is empty"),
    (write("a.jsonl", '{"text": "a"}\n{"text": }\n'), "a.jsonl:2"),
    (write("a.jsonl", b'{"text": "\xff"}\n'), "a.jsonl:1"),
    (write("a.jsonl", '{"text": "\\ud800"}\n'), "a.jsonl:1"),
    (write("a.jsonl", '{"text": ' + "[" * 100_000 + "\n"), "a.jsonl:1"),
    (write("a.jsonl", '{"text": ' + "9" * 5000 + "}\n"), "a.jsonl:1"),
    (write("a.jsonl", b"\x00" * 1000), "a.jsonl"),
    (write("a.jsonl.gz", b"x"), "a.jsonl.gz"),
    (write("a.jsonl.gz", b"\x1f\x8b\x08\x00"), "a.jsonl.gz"),
    (write("a.jsonl.zst", b"x"), "a.jsonl.zst"),
    (write("a.parquet", b"PAR1"), "a.parquet"),
    (write("a.parquet", b""), "a.parquet"),
    (write("a.txt", ""), "a.txt"),
    (write("a.txt", b"\xff\xfe"), "a.txt"),
    (write("a.doc", "x"), "in"),
]
TOKENIZERS: list[tuple[Change, str]] = [
    (write("tokenizer.json", ""), "tokenizer"),
    (write("tokenizer.json", "{}"), "tokenizer"),
    (write("tokenizer.json", "[" * 100_000), "tokenizer"),
    (write("tokenizer.json", b"\xff"), "tokenizer"),
    (write("tokenizer.json", '{"model": {"type": "BPE"}}'), "tokenizer"),
    (write("tokenizer_config.json", "[1]"), "tokenizer_config.json"),
    (write("tokenizer_config.json", "["), "tokenizer_config.json"),
    (write("tokenizer_config.json", '{"eos_token": 5}'), "tokenizer"),
    (write("tokenizer_config.json", '{"eos_token": {"a": 1}}'), "tokenizer"),
    (write("tokenizer_config.json", '{"eos_token": "nowhere"}'), "tokenizer"),
    (Change("remove", "tokenizer.json"), "tokenizer"),
]
STORES: list[tuple[Change, str]] = [
    (Change("remove", "zarr.json"), "there is no store"),
    (write("zarr.json", ""), "zarr.json cannot be read"),
    (write("zarr.json", "[]"), "zarr.json cannot be read"),
    (write("zarr.json", "{}"), "zarr.json cannot be read"),
    (write("zarr.json", "[" * 100_000), "zarr.json cannot be read"),
    (write("zarr.json", b"\xff"), "zarr.json cannot be read"),
    (patch({"shape": [10**15, 64]}, "zarr.json"), "score store"),
    (patch({"shape": ["x"]}, "zarr.json"), "score store"),
    (patch({"data_type": "object"}, "zarr.json"), "score store"),
    (patch({"attributes": 5}, "zarr.json"), "score store"),
    (patch({"attributes": {}}, "zarr.json"), "holds something else"),
    (patch({"codecs": []}, "zarr.json"), "score store"),
    (patch({"codecs": [{"name": "pickle"}]}, "zarr.json"), "score store"),
    (patch({"chunk_grid": {"name": "x"}}, "zarr.json"), "score store"),
]
PLANS: list[tuple[Change, str]] = [
    (Change("remove", "data.packing/*/plan.json"), "there is no plan"),
    (write("data.packing/*/plan.json", "x"), "is no JSON object"),
    (write("data.packing/*/plan.json", "[1]"), "is no JSON object"),
    (write("data.packing/*/plan.json", "[" * 100_000), "is no JSON object"),
    (write("data.packing/*/plan.json", "{}"), "has policy None"),
    (patch({"rows": "many"}, "data.packing/*/plan.json"), "is damaged"),
    (patch({"pieces": 10**30}, "data.packing/*/plan.json"), "is damaged"),
    (patch({"facts": 5}, "data.packing/*/plan.json"), "is damaged"),
    (write("data.packing/*/row_offsets.npy", b""), "is damaged"),
    (write("data.packing/*/row_offsets.npy", b"x" * 200), "is damaged"),
    (Change("cut", "data.packing/*/pieces.npy", 140), "is damaged"),
    (Change("remove", "data.packing/*/pieces.npy"), "is damaged"),
    (Change("put", "data.packing/*/pieces.npy", (128, b"\xff" * 8)), "is damaged"),
    (Change("put", "data.packing/*/row_offsets.npy", (136, b"\xff" * 7 + b"\x7f")), "is damaged"),
]
PREPROCESS = """
 | required: --input, --output-prefix, --tokenizer-model
--input {w}/nowhere.jsonl --output-prefix {out}/x --tokenizer-model bytes | nowhere.jsonl
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model {w}/nowhere | nowhere
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model {w}/hf | hf
--input {w}/corpus.jsonl --output-prefix {w}/text.txt/x --tokenizer-model bytes | text.txt
--input {w}/corpus.jsonl --output-prefix {w}/data --tokenizer-model bytes | data
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --workers 0 | workers
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --workers many | --workers: invalid int value
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --shard-bytes 0 | shard_bytes
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --min-tokens 0 | min_tokens
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --min-tokens 5 --max-tokens 3 | max_tokens
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --json-key body | has no field 'body'
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --source-field from | has no field 'from'
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --concat-by repo | has no field 'repo'
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --messages-field | has no
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --max-document-bytes 0 | max_document_bytes
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --eod-token nowhere | nowhere
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --append-bos --bos-token nowhere | nowhere
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --split-sentences --lang klingon | klingon
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --append-eos | no such flag; did you mean
--input {w}/corpus.jsonl {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes | corpus.jsonl
--input {w}/empty --output-prefix {out}/x --tokenizer-model bytes | empty
"""
CONVERT = """
 | required: command
to-hf | invalid choice: 'to-hf'
hf-to-megatron | required: --input, --output
hf-to-megatron --input {w}/nowhere --output {out}/x | nowhere
hf-to-megatron --input {w}/run --output {out}/x | config.json
hf-to-megatron --input {w}/hf --output {w}/hf/x | lie inside each other
hf-to-megatron --input {w}/hf --output {w}/hf | lie inside each other
hf-to-megatron --input {w}/hf --output {w}/run | run
hf-to-megatron --input {w}/hf --output {w}/text.txt/x | text.txt
hf-to-megatron --input {w}/hf --output {out}/x --make-vocab-size-divisible-by 0 | make_vocab_size_divisible_by: got 0
hf-to-megatron --input {w}/hf --output {out}/x --make-vocab-size-divisible-by 10000000000000000 | make_vocab_size
hf-to-megatron --input {w}/hf --output {out}/x --checksums | no such flag
megatron-to-hf --input {w}/nowhere --output {out}/x | nowhere
megatron-to-hf --input {w}/hf --output {out}/x | is a Hugging Face model folder
megatron-to-hf --input {w}/run --output {w}/hf --tokenizer none | hf
megatron-to-hf --input {w}/run --output {out}/x --max-shard-size big | max_shard_size: got 'big'
megatron-to-hf --input {w}/run --output {out}/x --max-shard-size 0 | max_shard_size: got '0'
megatron-to-hf --input {w}/run --output {out}/x --max-shard-size 1e999GB | max_shard_size
megatron-to-hf --input {w}/run --output {out}/x --tokenizer {w}/nowhere | nowhere
verify --input {w}/hf --output {w}/hf | verify: needs one Hugging Face folder and one run
verify --input {w}/run --output {w}/run | verify: needs one Hugging Face folder and one run
verify --input {w}/hf --output {w}/run --tokens -3 | tokens: got -3, needs at least 1
verify --input {w}/hf --output {w}/run --tokens 0 | tokens: got 0, needs at least 1
verify --input {w}/hf --output {w}/run --greedy-tokens -1 | greedy_tokens: got -1
verify --input {w}/hf --output {w}/run --dtype int8 | --dtype: invalid choice: 'int8'
verify --input {w}/hf --output {w}/run --text {w}/nowhere --tokenizer bytes | nowhere
verify --input {w}/hf --output {w}/run --text {w}/latin.txt --tokenizer bytes | latin.txt is no UTF-8
verify --input {w}/hf --output {w}/run --text {w}/empty.txt --tokenizer bytes | text: got 0 token ids
"""
OTHERS = {
    "tools/checkpoints.py": """
 | required: RUN
{w}/nowhere | holds no checkpoint
{w}/text.txt | holds no checkpoint
{w}/run {w}/run | belongs to no flag
{w}/run --verity | no such flag; did you mean --verify?
""",
    "tools/report.py": """
 | required: RUN_FOLDER
{w}/nowhere | metrics.jsonl: not found
{w}/text.txt | metrics.jsonl: not found
{w}/run {w}/other | --output: not given
{w}/run --output {out}/x.html | --output: goes with several run folders
{w}/run {w}/run --output {out}/x.html | given twice
{w}/run {w}/other --output {out}/x.pdf | x.pdf
{w}/run {w}/other --output {w}/text.txt/x.html | text.txt
{w}/run --stability-steps 0 | --stability-steps: expected
{w}/run --stability-steps 0 x | invalid int value
{w}/run --stability-steps 5 2 | stability_steps: got 5 2
""",
    "tools/pack_data.py": f"""
{SMALL} | packing: got random, which needs no plan
{SMALL} --packing best | packing: got 'best'
{SMALL} --packing best_fit --data-path {{w}}/nowhere | nowhere.idx does not exist
{SMALL} --packing best_fit --packing-options a=1 | has no option 'a'
{SMALL} --packing bm25 --packing-options first_tokens=0 | first_tokens
{SMALL} --packing upsample_long --packing-options factor=-1 | factor
{SMALL} --packing upsample_long --packing-options factor=1e300 | factor
{SMALL} --packing decomposition --packing-options growth=0 | growth
{SMALL} --packing decomposition --packing-options shortest=1000000 | shortest
{SMALL} --packing whole_document --packing-options below=-1 | below
--config {{w}}/nowhere.yaml | nowhere.yaml
--num-layer 5 | no such flag
""",
    "tools/inspect_pack.py": """
 | required: --seq-length
--seq-length 12 | is required
--document-ends 3 10 | required: --seq-length
--document-ends 10 3 --seq-length 12 | document_ends
--document-ends 3 3 --seq-length 12 | document_ends: got [3, 3], needs ends above 0 that rise
--document-ends 0 --seq-length 12 | document_ends
--document-ends -3 5 --seq-length 12 | document_ends
--document-ends 3 13 --seq-length 12 | document_ends
--document-ends a --seq-length 12 | --document-ends: invalid int value: 'a'
--document-ends 3 --seq-length 0 | seq_length
--document-ends 3 --seq-length -4 | seq_length
--document-ends 3 --seq-length 1000000000000000 | seq_length
--document-ends 3 --seq-length 12 --window 0 | window
--document-ends 3 --seq-length 12 --window 13 | window
--document-ends 3 --seq-length 12 --left-window -1 | left_window
--document-ends 3 --seq-length 12 --context-parallel-size 0 | context_parallel_size
--document-ends 3 --seq-length 12 --context-parallel-size 5 | context_parallel_size
--document-ends 3 --seq-length 12 --cp-policy best | --cp-policy: invalid choice: 'best'
--document-ends 3 --seq-length 12 --width 0 | width
--document-ends 3 --seq-length 12 --sample 3 | sample: got a row by hand
--document-ends 3 --seq-length 12 --output {w}/text.txt/x.png | text.txt
--document-ends 3 --seq-length 12 --output {out}/x.docx | x.docx
--data-path {w}/nowhere --seq-length 12 | nowhere.idx does not exist
--data-path {w}/data --seq-length 64 --sample -1 | sample: got -1
--data-path {w}/data --seq-length 64 --sample 100000000000000000000 | sample
--data-path {w}/data --seq-length 64 --text | text: got no tokenizer
--data-path {w}/data --seq-length 64 --policies best | best
--data-path {w}/data --seq-length 64 --split 1,x | split
--data-path {w}/data --seq-length 64 --seed -1 | seed
""",
    "tools/plan_run.py": f"""
{SMALL} | required: --gpus
{SMALL} --gpus 0 | gpus, top: got 0
{SMALL} --gpus x | --gpus: invalid int value: 'x'
{SMALL} --gpus 1000000000000000000000 | gpus
{SMALL} --gpus 1 --top 0 | gpus, top: got 1 and 0
{SMALL} --gpus 1 --gpu H900 | gpu: got 'H900', needs one of
{SMALL} --gpus 1 --gpus-file {{w}}/nowhere | nowhere
{SMALL} --gpus 1 --gpus-file {{w}}/good.yaml | good.yaml
{SMALL} --gpus 1 --gpus-file {{w}}/data.bin | data.bin
{SMALL} --gpus 1 --documents some | --documents
{SMALL} --gpus 1 --stage x | stage: got
{SMALL} --gpus 1 --rehearse | rehearse: got it without --output
{SMALL} --gpus 1 --output {{w}}/text.txt/x.yaml | text.txt
{SMALL} --gpus 1 --calibrate {{w}}/run | calibrate: got
--gpus 1 --calibrate {{w}}/run | calibrate: got no --output
--gpus 1 --calibrate {{w}}/nowhere --output {{out}}/x.yaml | nowhere
--gpus 1 --calibrate {{w}}/text.txt --output {{out}}/x.yaml | text.txt
--gpus 1 --calibrate {{w}}/run --output {{out}}/x.yaml | calibrate
--gpus 1 | --config is required, for example
{SMALL} --gpus 1 --num-layers 0 | num_layers: got 0
{SMALL} --gpus 1 --colour red | --colour: no such flag
""",
    "tools/rehearse.py": f"""
{SMALL} | required: --world-size
{SMALL} --world-size 0 | world
{SMALL} --world-size x | --world-size: invalid int value: 'x'
{SMALL} --world-size 1 --ranks 5 | ranks
{SMALL} --world-size 1 --ranks x | ranks
{SMALL} --world-size 1 --ranks -1 | ranks
{SMALL} --world-size 1 --windows 0 | windows
{SMALL} --world-size 1 --windows x | windows
{SMALL} --world-size 1 --windows 1000 | windows
{SMALL} --world-size 1 --documents some | --documents
{SMALL} --world-size 1 --num-layers 0 | num_layers: got 0
{SMALL} --world-size 3 | global_batch_size
""",
    "tools/recipes.py": """
nowhere | name: got nowhere, which is none of the
--dry-run | name: got none
--twin x | name: got none
--lost | no such flag; did you mean --list?
""",
    "tools/twin_recipe.py": """
 | required: recipe, --output
{w}/nowhere.yaml --output {out}/x.yaml | nowhere.yaml
{w}/text.txt --output {out}/x.yaml | text.txt
{w}/good.yaml#x --output {out}/x.yaml | this file is a single run
{w}/good.yaml --output {w}/text.txt/x.yaml | text.txt
{w}/good.yaml --output /proc/nowhere/x.yaml | /proc/nowhere
""",
    "tools/gather_corpus.py": """
 | required: --output
--output {w}/corpus.jsonl | corpus.jsonl
--output {out}/x.jsonl --max-bytes x | --max-bytes: invalid int value: 'x'
--output {out}/x.jsonl --max-bytes 0 | max_bytes
--output {w}/text.txt/x.jsonl --max-bytes 100000 | text.txt
""",
    "tools/train_tokenizer.py": """
 | required: --input, --vocab-size, --output
--input {w}/corpus.jsonl --vocab-size 0 --output {out}/t | vocab_size
--input {w}/corpus.jsonl --vocab-size 10 --output {out}/t | vocab_size
--input {w}/corpus.jsonl --vocab-size x --output {out}/t | --vocab-size: invalid int value
--input {w}/nowhere --vocab-size 300 --output {out}/t | nowhere
--input {w}/corpus.jsonl --vocab-size 300 --output {w}/tokenizer | tokenizer
--input {w}/corpus.jsonl --vocab-size 300 --output {w}/text.txt/t | text.txt
--input {w}/corpus.jsonl --vocab-size 300 --output {out}/t --json-key body | has no field 'body'
""",
    "tools/score_tokens.py": f"""
 | required: --checkpoint, --output, --context
--checkpoint {{w}}/nowhere --output {{out}}/s --context 16 {SMALL} | nowhere
--checkpoint {{w}}/hf --output {{out}}/s --context 0 {SMALL} | context, stride: got 0
--checkpoint {{w}}/hf --output {{out}}/s --context 65 {SMALL} | context, stride: got 65
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --stride 17 {SMALL} | context, stride: got 16, 17
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --part 1/1 {SMALL} | part: got '1/1'
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --part x {SMALL} | part: got 'x'
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --part 0/0 {SMALL} | part: got '0/0'
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --part 2/1 {SMALL} | part: got '2/1'
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --rows 0 {SMALL} | rows: got 0
--checkpoint {{w}}/hf --output {{w}}/text.txt/s --context 16 {SMALL} | text.txt
--checkpoint {{w}}/hf --output {{w}}/run --context 16 {SMALL} | run
--checkpoint {{w}}/hf --output {{out}}/s --context 16 {SMALL} --colour red | --colour: no such flag
""",
    "tools/inspect_step.py": """
 | required: RUN, STEP
{w}/nowhere 1 | config.yaml: not found
{w}/run x | STEP: invalid int value: 'x'
{w}/run -1 | step: got -1
{w}/run 99 | step: got 99
{w}/run 1 --colour red | --colour: no such flag
""",
    "tools/generate.py": """
 | required: MODEL
{w}/nowhere --prompt a | nowhere
{w}/hf | prompt, input: needs one of the two
{w}/hf --prompt a --input {w}/corpus.jsonl | prompt, input: needs one of the two
{w}/hf --prompt a --max-new-tokens 0 | max_new_tokens: got 0
{w}/hf --prompt a --max-new-tokens x | invalid int value
{w}/hf --prompt a --temperature -1 | temperature
{w}/hf --prompt a --temperature nan | temperature
{w}/hf --prompt a --temperature 1 --top-p 2 | top_p
{w}/hf --prompt a --temperature 1 --top-k 0 | top_k
{w}/hf --prompt a --top-k 5 | top_k
{w}/hf --prompt a --batch-size 0 | batch_size: got 0
{w}/hf --prompt a --output {w}/text.txt | text.txt exists
{w}/hf --prompt a --system b | system: needs --chat
{w}/hf --prompt a --tokenizer {w}/nowhere | nowhere
{w}/hf --prompt a --tokenizer bytes --eod-token nowhere | nowhere
{w}/hf --input {w}/nowhere.jsonl | nowhere.jsonl
{w}/hf --prompt a --lr 1 | which only training reads
{w}/hf --prompt a --dtype int8 | --dtype: invalid choice
""",
    "tools/evaluate.py": """
 | required: command
perplexityy {w}/hf | invalid choice: 'perplexityy'
perplexity | MODEL
perplexity {w}/hf | input, data_path: needs one of the two
perplexity {w}/nowhere --input {w}/corpus.jsonl | nowhere
perplexity {w}/hf --input {w}/nowhere.jsonl --lengths 8 --tokenizer bytes | nowhere.jsonl
perplexity {w}/hf --input {w}/corpus.jsonl --lengths 0 --tokenizer bytes | lengths: got 0
perplexity {w}/hf --input {w}/corpus.jsonl --lengths x --tokenizer bytes | invalid int value
perplexity {w}/hf --input {w}/corpus.jsonl --lengths 8 --stride 9 --tokenizer bytes | stride: got 9
perplexity {w}/hf --input {w}/corpus.jsonl --lengths 8 --stride 0 --tokenizer bytes | stride: got 0
perplexity {w}/hf --input {w}/corpus.jsonl --documents 0 | documents: got 0
perplexity {w}/hf --input {w}/corpus.jsonl --max-tokens 1 | max_tokens: got 1, needs at least 2
perplexity {w}/hf --input {w}/corpus.jsonl --batch-tokens 0 | batch_tokens: got 0
recall {w}/hf --samples 0 --tokenizer bytes | samples: got 0
recall {w}/hf --tasks x --lengths 64 --tokenizer bytes | tasks: got x
recall {w}/hf --haystack {w}/nowhere --lengths 64 --tokenizer bytes | nowhere
lm-eval {w}/hf | --tasks
lm-eval {w}/hf --tasks x --limit 0 | limit: got 0
perplexity {w}/hf --data-path {w}/nowhere --lengths 8 --tokenizer bytes | nowhere.idx
perplexity {w}/hf --input {w}/corpus.jsonl --json-key body --lengths 8 --tokenizer bytes | has no field 'body'
""",
    "tools/environment.py": """
--num-layer 5 | no such flag
--config {w}/nowhere.yaml | nowhere.yaml
--device tpu | device: got 'tpu'
""",
}


def all_inputs() -> list[Wrong]:
    """List the whole table."""
    found = [
        *rows(TRAINER, SMALL, FLAGS),
        *changed(TRAINER, "--config {in}/run.yaml --dry-run", "", CONFIGURATIONS),
        *(Wrong(TRAINER, tuple(SMALL.split()), fragment, environment) for environment, fragment in LAUNCHES),
        *changed("tools/convert_checkpoint.py", "hf-to-megatron --input {in} --output {out}/run", "hf", MODELS),
        *changed(
            "tools/convert_checkpoint.py",
            "megatron-to-hf --input {in} --output {out}/x --tokenizer none",
            "run",
            CHECKPOINTS,
        ),
        *changed(TRAINER, f"{SMALL} --load {{in}} --save {{out}}/run", "run", CHECKPOINTS),
        *changed(TRAINER, f"{SMALL} --load {{in}}", "run", [(seal({"optimizer": {}}), "holds weights alone")]),
        *changed("tools/report.py", "{in}", "run", METRICS),
        *changed(TRAINER, f"{SMALL} --data-path {{in}}/data", "dataset", DATA),
        *changed(
            "tools/preprocess_data.py",
            "--input {in} --output-prefix {out}/x --tokenizer-model bytes",
            "",
            LINES,
        ),
        *changed(
            "tools/preprocess_data.py",
            "--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model {in}",
            "tokenizer",
            TOKENIZERS,
        ),
        *changed(TRAINER, f"{SMALL} --token-weighting frozen --score-store {{in}}", "scores", STORES),
        *changed(TRAINER, f"{SMALL} --data-path {{in}}/data --packing best_fit", "packed", PLANS),
        *rows("tools/preprocess_data.py", "", PREPROCESS),
        *rows("tools/convert_checkpoint.py", "", CONVERT),
    ]
    for script, text in OTHERS.items():
        found += rows(script, "", text)
    return found
