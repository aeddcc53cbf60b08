"""The wrong inputs: the command, its arguments, and a fragment of the error.

A row is WORDS | FRAGMENT. Words are quoted as in a shell; in them

    {w}/...   valid files (world.py): data.bin, corpus.jsonl, tokenizer, run, hf, good.yaml, text.txt
    {in}      a copy of one of them, or an empty folder, with this row's changes
    {out}     an output folder, which must stay empty

Each ends with exit status 2 and an `error:` of at most three lines that has the fragment, and writes nothing.
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
    """A change to a copy of valid files: `what` names one of those in world.py, `value` is the new content."""

    what: Literal["write", "patch", "seal", "cut", "remove", "put"]
    file: str
    value: Any = None


@dataclass(frozen=True)
class Wrong:
    """A wrong input.

    Attributes:
        script, words: the command.
        fragment: part of the error.
        environment: additional environment variables.
        good: the files that {in} is a copy of; "" for an empty folder.
        changes: changes to {in}.
    """

    script: str
    words: tuple[str, ...]
    fragment: str
    environment: Mapping[str, str] = field(default_factory=dict)
    good: str = ""
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        given = [*(f"{name}={value}" for name, value in self.environment.items()), " ".join(self.words)]
        given += [f"{change.what} {change.file} {change.value!r}" for change in self.changes]
        return f"{self.script.removeprefix('tools/').removesuffix('.py')} {' '.join(given)}".replace(SMALL, "...")


def rows(script: str, before: str, text: str, after: str = "") -> Iterator[Wrong]:
    for line in text.strip("\n").splitlines():
        words, _, fragment = line.rpartition(" | ")
        yield Wrong(script, tuple(shlex.split(f"{before} {words} {after}")), fragment.strip())


def changed(script: str, words: str, good: str, cases: Iterable[tuple[Change, str]]) -> Iterator[Wrong]:
    for change, fragment in cases:
        yield Wrong(script, tuple(shlex.split(words)), fragment, good=good, changes=(change,))


# flags of the trainer
FLAGS = """
-n 5 | no such flag
--token-weighting dataset | weights.npy
--load {w}/nowhere | load: got
--init-from {w}/data.bin | neither a Hugging Face model folder
--world-size 2 | world_size: got 2, needs --dry-run
--dry-run --world-size 3 --tensor-model-parallel-size 2 | world size: got 3
--token-weighting frozen --score-store {w}/scores --seed 7 | its seed is 1234, but this run needs 7
--tokenizer-model {w}/nowhere | tokenizer
--data-path {w}/nowhere | nowhere.idx does not exist
--save {w}/text.txt/run | cannot be written
--save {w}/other | save: got
--init-from {w}/hf --num-layers 3 --hidden-size 32 | needs others; use --num-layers 2 --hidden-size 16
"""


def write(file: str, value: str | bytes) -> Change:
    return Change("write", file, value)


def configuration(text: str | bytes, fragment: str) -> tuple[Change, str]:
    return write("run.yaml", text), fragment


DEEP = "[" * 3000 + "]" * 3000
CONFIGURATIONS = [
    configuration("model: {num_layers: 2023-01-05}", "num_layers: got datetime.date"),
    configuration("model: {num_layers: !!python/object/apply:os.system [true]}", "needs valid YAML"),
    configuration(f"model: {{num_layers: {'9' * 5000}}}", "needs valid YAML"),
    configuration(f"model: {{num_layers: {'9' * 4000}}}", "num_layers: got a number of about"),
    configuration(f"model: {{num_layers: {DEEP}}}", "recursion"),
    configuration('model: {block: "\x1b[2J"}', "needs valid YAML"),
]
# (environment of a launcher, fragment)
LAUNCHES = [
    ({"WORLD_SIZE": "2"}, "RANK: got none"),
    ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}, "global_batch_size"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
]


def patch(value: Mapping[str, Any], file: str = "config.json") -> Change:
    return Change("patch", file, value)


INDEX = "model.safetensors.index.json"
MODELS: list[tuple[Change, str]] = [
    (Change("remove", "config.json"), "cannot read"),
    (write("config.json", "[]"), "holds no JSON object"),
    (write("config.json", "[" * 100_000), "too many levels"),
    (write("config.json", '{"hidden_size": ' + "9" * 5000 + "}"), "cannot read"),
    (patch({"model_type": None}), "model_type None, needs one of"),
    (patch({"num_hidden_layers": 0}), "num_hidden_layers 0: Input should be greater than 0"),
    (patch({"num_hidden_layers": 10**400}), "num_hidden_layers a number of about"),
    (patch({"num_hidden_layers": "2"}), "num_hidden_layers '2': Input should be a valid integer"),
    (patch({"num_hidden_layers": 3}), "has no tensor model.layers.2"),
    (patch({"hidden_size": 32}), "its config needs"),
    (patch({"rms_norm_eps": float("nan")}), "rms_norm_eps nan: Input should be a finite number"),
    (patch({"mystery": 5}), "mystery 5, which this package does not know"),
    (patch({"tie_word_embeddings": True}), "lm_head.weight other than model.embed_tokens.weight"),
    (patch({"rope_scaling": "linear"}), "rope_scaling 'linear': Input should be a valid dictionary"),
    (patch({"rope_scaling": {"rope_type": "linear", "factor": "two"}}), "factor 'two' in its angles, needs a number"),
    (patch({"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5, this model has 1.0 only"),
    (patch({"model_type": "ministral", "layer_types": ["full"], "sliding_window": 8}), "layer_types ['full']"),
    (Change("remove", "model.safetensors"), "holds no model.safetensors"),
    (write("model.safetensors", b""), "is damaged"),
    (write(INDEX, "{}"), "is damaged"),
    (write(INDEX, '{"weight_map": {"a": "../private.safetensors"}}'), "outside its folder"),
    (write(INDEX, '{"weight_map": {"a": "' + "x" * 5000 + '"}}'), "File name too long"),
]
MANIFEST = "checkpoints/iter_0000002/manifest.json"
POINTER = "checkpoints/latest_checkpointed_iteration.txt"


def seal(value: Mapping[str, Any]) -> Change:
    """Replace values of a checkpoint's manifest and update its checksum."""
    return Change("seal", MANIFEST, value)


CHECKPOINTS: list[tuple[Change, str]] = [
    (write(POINTER, "x"), "holds 'x', needs the number of a step"),
    (write(POINTER, "7"), "names step 7, but"),
    (write(MANIFEST, ""), "is no JSON"),
    (patch({"step": 3}, MANIFEST), "its own checksum differs"),
    (seal({"format": 99}), "has format 99"),
    (seal({"files": {"../a": {"size": 1, "sha256": "x"}}}), "outside its folder"),
    (seal({"config": {"model": {"num_layers": "x"}}}), "num_layers"),
    (Change("cut", "checkpoints/iter_0000002/tensors.json", 10), "; take another checkpoint"),
    (Change("cut", "checkpoints/iter_0000002/__0_0.distcp", 10), "is damaged"),
    (Change("remove", "checkpoints/iter_0000002/__0_0.distcp"), "is missing"),
]
METRICS: list[tuple[Change, str]] = [
    (Change("remove", "metrics.jsonl"), "metrics.jsonl: not found"),
    (write("metrics.jsonl", ""), "holds no complete step"),
    (write("metrics.jsonl", '{"step": 0, "lm_loss": 1, "window": {}}\n'), "window {}, needs a number"),
    (write("evaluation.jsonl", '{"step": 0, "valid_loss": 1, "by_length": {"x": 1}}\n'), "by_length {'x': 1}"),
]
DATA: list[tuple[Change, str]] = [
    (Change("remove", "data.idx"), "data.idx does not exist"),
    (write("data.idx", b""), "is not a Megatron index"),
    (Change("put", "data.idx", (9, b"\x02")), "is not a Megatron index"),
    (Change("cut", "data.bin", 10), "one is truncated or belongs to another dataset"),
    (write("data.json", "x"), "is not the metadata of a dataset"),
    (write("data.mask.npy", b"x"), "cannot be read"),
]
LINES: list[tuple[Change, str]] = [
    (write("a.jsonl", ""), "is empty"),
    (write("a.jsonl.gz", b"\x1f\x8b\x08\x00"), "a.jsonl.gz"),
    (write("a.doc", "x"), "in"),
]
TOKENIZERS: list[tuple[Change, str]] = [
    (write("tokenizer.json", "[" * 100_000), "tokenizer"),
    (Change("remove", "tokenizer.json"), "tokenizer"),
]
STORES: list[tuple[Change, str]] = [
    (patch({"shape": [10**15, 64]}, "zarr.json"), "score store"),
    (patch({"codecs": [{"name": "pickle"}]}, "zarr.json"), "score store"),
]
PLANS: list[tuple[Change, str]] = [(Change("remove", "data.packing/*/plan.json"), "there is no plan")]
PREPROCESS = """
 | required: --input, --output-prefix, --tokenizer-model
--input {w}/nowhere.jsonl --output-prefix {out}/x --tokenizer-model bytes | nowhere.jsonl
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model {w}/nowhere | nowhere
--input {w}/corpus.jsonl --output-prefix {w}/text.txt/x --tokenizer-model bytes | text.txt
--input {w}/corpus.jsonl --output-prefix {w}/data --tokenizer-model bytes | data
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --min-tokens 5 --max-tokens 3 | max_tokens
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --json-key body | has no field 'body'
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --eod-token nowhere | nowhere
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --split-sentences --lang klingon | klingon
"""
CONVERT = """
 | required: command
hf-to-megatron --input {w}/run --output {out}/x | config.json
hf-to-megatron --input {w}/hf --output {w}/text.txt/x | text.txt
hf-to-megatron --input {w}/hf --output {out}/x --make-vocab-size-divisible-by 10000000000000000 | make_vocab_size
megatron-to-hf --input {w}/hf --output {out}/x | is a Hugging Face model folder
megatron-to-hf --input {w}/run --output {w}/hf --tokenizer none | hf
megatron-to-hf --input {w}/run --output {out}/x --max-shard-size big | max_shard_size: got 'big'
verify --input {w}/hf --output {w}/hf | verify: needs one Hugging Face folder and one run
verify --input {w}/hf --output {w}/run --tokens 0 | tokens: got 0, needs at least 1
verify --input {w}/hf --output {w}/run | tokenizer.json
megatron-to-hf --input {w}/run --output {out}/x | --tokenizer none
verify --input {w}/hf --output {w}/run --text {w}/empty.txt --tokenizer bytes | text: got 0 token ids
"""
OTHERS = {
    "tools/checkpoints.py": """
 | required: RUN
{w}/nowhere | holds no checkpoint
""",
    "tools/report.py": """
 | required: RUN_FOLDER
{w}/nowhere | metrics.jsonl: not found
{w}/run {w}/other | --output: not given
{w}/run --output {out}/x.html | --output: goes with several run folders
{w}/run {w}/run --output {out}/x.html | given twice
{w}/run {w}/other --output {out}/x.pdf | x.pdf
{w}/run --stability-steps 5 2 | stability_steps: got 5 2
""",
    "tools/pack_data.py": f"""
{SMALL} | packing: got random, which needs no plan
{SMALL} --packing best_fit --data-path {{w}}/nowhere | nowhere.idx does not exist
{SMALL} --packing best_fit --packing-options a=1 | has no option 'a'
{SMALL} --packing upsample_long --packing-options factor=1e300 | factor
{SMALL} --packing decomposition --packing-options shortest=1000000 | shortest
""",
    "tools/inspect_pack.py": """
 | required: --seq-length
--document-ends 3 13 --seq-length 12 | document_ends
--document-ends 3 --seq-length 1000000000000000 | seq_length
--document-ends 3 --seq-length 12 --context-parallel-size 5 | context_parallel_size
--document-ends 3 --seq-length 12 --output {w}/text.txt/x.png | text.txt
--document-ends 3 --seq-length 12 --output {out}/x.docx | x.docx
--data-path {w}/data --seq-length 64 --sample -1 | sample
--data-path {w}/data --seq-length 64 --text | text: got no tokenizer
--data-path {w}/data --seq-length 64 --policies best | best
""",
    "tools/plan_run.py": f"""
{SMALL} | required: --gpus
{SMALL} --gpus 0 | gpus, top: got 0
{SMALL} --gpus 1 --gpu H900 | gpu: got 'H900', needs one of
{SMALL} --gpus 1 --gpus-file {{w}}/nowhere | nowhere
{SMALL} --gpus 1 --gpus-file {{w}}/good.yaml | good.yaml
{SMALL} --gpus 1 --stage x | stage: got
{SMALL} --gpus 1 --rehearse | rehearse: got it without --output
{SMALL} --gpus 1 --output {{w}}/text.txt/x.yaml | text.txt
{SMALL} --gpus 1 --calibrate {{w}}/run | calibrate: got
--gpus 1 --calibrate {{w}}/nowhere --output {{out}}/x.yaml | nowhere
--gpus 1 --calibrate {{w}}/run --output {{out}}/x.yaml | calibrate
--gpus 1 | --config is required, for example
""",
    "tools/rehearse.py": f"""
{SMALL} | required: --world-size
{SMALL} --world-size 0 | world
{SMALL} --world-size 1 --ranks 5 | ranks
{SMALL} --world-size 1 --windows 1000 | windows
{SMALL} --world-size 1 --documents some | --documents
{SMALL} --world-size 3 | global_batch_size
""",
    "tools/recipes.py": """
nowhere | name: got nowhere, which is none of the
--dry-run | name: got none
""",
    "tools/twin_recipe.py": """
 | required: recipe, --output
{w}/nowhere.yaml --output {out}/x.yaml | nowhere.yaml
{w}/good.yaml#x --output {out}/x.yaml | this file is a single run
{w}/good.yaml --output {w}/text.txt | text.txt, which exists
{w}/good.yaml --output {w}/text.txt/x.yaml | text.txt
""",
    "tools/gather_corpus.py": """
 | required: --output
--output {w}/corpus.jsonl | corpus.jsonl
--output {w}/text.txt/x.jsonl --max-bytes 100000 | text.txt
""",
    "tools/train_tokenizer.py": """
 | required: --input, --vocab-size, --output
--input {w}/corpus.jsonl --vocab-size 10 --output {out}/t | vocab_size
--input {w}/corpus.jsonl --vocab-size 300 --output {w}/tokenizer | tokenizer
--input {w}/corpus.jsonl --vocab-size 300 --output {w}/text.txt/t | text.txt
--input {w}/corpus.jsonl --vocab-size 300 --output {out}/t --json-key body | has no field 'body'
""",
    "tools/score_tokens.py": f"""
 | required: --checkpoint, --output, --context
--checkpoint {{w}}/nowhere --output {{out}}/s --context 16 {SMALL} | nowhere
--checkpoint {{w}}/hf --output {{out}}/s --context 65 {SMALL} | context, stride: got 65
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --stride 17 {SMALL} | context, stride: got 16, 17
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --part 1/1 {SMALL} | part: got '1/1'
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --rows 0 {SMALL} | rows: got 0
--checkpoint {{w}}/hf --output {{w}}/text.txt/s --context 16 {SMALL} | text.txt
--checkpoint {{w}}/hf --output {{w}}/run --context 16 {SMALL} | run
--checkpoint {{w}}/hf --output {{w}}/scores --context 17 {SMALL} | its short_context is 16
--checkpoint {{w}}/hf --output {{out}}/s --context 16 {SMALL} --tokenizer-model none --vocab-size 300 | at least the 300
""",
    "tools/inspect_step.py": """
 | required: RUN, STEP
{w}/nowhere 1 | config.yaml: not found
{w}/run 99 | step: got 99
""",
    "tools/generate.py": """
 | required: MODEL
{w}/nowhere --prompt a | nowhere
{w}/hf | prompt, input: needs one of the two
{w}/hf --prompt a --input {w}/corpus.jsonl | prompt, input: needs one of the two
{w}/hf --prompt a --temperature 1 --top-p 2 | top_p
{w}/hf --prompt a --output {w}/text.txt | text.txt exists
{w}/hf --prompt a --system b | system: needs --chat
{w}/hf --prompt a --tokenizer bytes --eod-token nowhere | nowhere
{w}/hf --input {w}/nowhere.jsonl | nowhere.jsonl
{w}/hf --prompt a --lr 1 | which only training reads
{w}/hf --prompt "" --tokenizer bytes | prompt 1: has no token to continue
{w}/hf --prompt a --chat --tokenizer bytes | has no chat template
""",
    "tools/evaluate.py": """
 | required: command
perplexity {w}/hf | input, data_path: needs one of the two
perplexity {w}/nowhere --input {w}/corpus.jsonl | nowhere
perplexity {w}/hf --input {w}/nowhere.jsonl --lengths 8 --tokenizer bytes | nowhere.jsonl
perplexity {w}/hf --input {w}/corpus.jsonl --lengths 0 --tokenizer bytes | lengths: got 0
perplexity {w}/hf --input {w}/corpus.jsonl --max-tokens 1 | max_tokens: got 1, needs at least 2
perplexity {w}/hf --input {w}/corpus.jsonl --tokenizer bytes --min-tokens 1000000 | no document is left to score
recall {w}/hf --samples 0 --tokenizer bytes | samples: got 0
recall {w}/hf --tasks x --lengths 64 --tokenizer bytes | tasks: got x
recall {w}/hf --haystack {w}/nowhere --lengths 64 --tokenizer bytes | nowhere
lm-eval {w}/hf | --tasks
lm-eval {w}/hf --tasks x --limit 0 | limit: got 0
perplexity {w}/hf --input {w}/corpus.jsonl --json-key body --lengths 8 --tokenizer bytes | has no field 'body'
""",
    "tools/environment.py": """
--device tpu | device: got 'tpu'
""",
}


def all_inputs() -> list[Wrong]:
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
        *changed(TRAINER, f"{SMALL} --load {{in}} --save {{out}}/run", "run", CHECKPOINTS[:3]),
        *changed(TRAINER, f"{SMALL} --load {{in}}", "run", [(seal({"optimizer": {}}), "holds weights alone")]),
        *changed("tools/report.py", "{in}", "run", METRICS),
        *changed(TRAINER, f"{SMALL} --data-path {{in}}/data", "dataset", DATA),
        *changed("tools/preprocess_data.py", "--input {in} --output-prefix {out}/x --tokenizer-model bytes", "", LINES),
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
