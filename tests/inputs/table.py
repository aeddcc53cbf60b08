"""The wrong inputs: the command, its arguments, and a fragment of the error.

A row is WORDS | FRAGMENT. Words are quoted as in a shell; in them

    {w}/...   valid files (test_inputs.py): data.bin, corpus.jsonl, run, hf, scores, good.yaml, text.txt
    {out}     an output folder, which must stay empty

Each ends with exit status 2 and an `error:` of at most three lines that has the fragment, and writes nothing. For
damaged files see test_fuzz.py.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.runs import TRAINER

SMALL = "--config {w}/good.yaml --data-path {w}/data --tokenizer-model bytes --seq-length 64"
SMALL += " --train-iters 2 --global-batch-size 2"


@dataclass(frozen=True)
class Wrong:
    """A wrong input: the command, and part of the error."""

    script: str
    words: tuple[str, ...]
    fragment: str

    @property
    def name(self) -> str:
        return f"{self.script.removeprefix('tools/').removesuffix('.py')} {' '.join(self.words)}".replace(SMALL, "...")


TABLES = {
    TRAINER: f"""
{SMALL} --init-from {{w}}/data.bin | holds no checkpoint
{SMALL} --world-size 2 | world_size: got 2, needs --dry-run
{SMALL} --dry-run --world-size 3 --tensor-model-parallel-size 2 | world size: got 3
{SMALL} --token-weighting frozen --score-store {{w}}/scores --seed 7 | its seed is 1234, but this run needs 7
{SMALL} --token-weighting frozen --score-store {{w}}/scores --weight-score rho1 --weight-post sparse | needs whole rows
{SMALL} --save {{w}}/text.txt/run | cannot be written
{SMALL} --init-from {{w}}/hf --num-layers 3 --hidden-size 32 | needs others; use --num-layers 2 --hidden-size 16
""",
    "tools/preprocess_data.py": """
--input {w}/corpus.jsonl --output-prefix {w}/text.txt/x --tokenizer-model bytes | text.txt
--input {w}/corpus.jsonl --output-prefix {out}/x --tokenizer-model bytes --split-sentences --lang klingon | klingon
""",
    "tools/convert_checkpoint.py": """
hf-to-megatron --input {w}/run --output {out}/x | config.json
hf-to-megatron --input {w}/hf --output {out}/x --make-vocab-size-divisible-by 10000000000000000 | --make-vocab-size
megatron-to-hf --input {w}/hf --output {out}/x | holds no checkpoint
megatron-to-hf --input {w}/run --output {out}/x --max-shard-size big | invalid size value: 'big'
megatron-to-hf --input {w}/run --output {w}/run/checkpoints/hf --tokenizer none | is inside the input
hf-to-megatron --input {w}/hf --output {w}/hf/run | is inside the input
verify --input {w}/hf --output {w}/hf | verify: needs one Hugging Face folder and one run
verify --input {w}/hf --output {w}/run --tokens 0 | tokens: got 0, needs at least 1
verify --input {w}/hf --output {w}/run | has none; give --tokenizer
verify --input {w}/hf --output {w}/run --text {w}/empty.txt --tokenizer bytes | text: got 0 token ids
""",
    "tools/checkpoints.py": """
{w}/nowhere | holds no checkpoint
""",
    "tools/report.py": """
{w}/nowhere | metrics.jsonl: not found
{w}/run {w}/other | --output: not given
{w}/run --output {out}/x.html | --output: goes with several run folders
{w}/run {w}/run --output {out}/a.txt | a.txt, needs a file name that ends in .html
{w}/run --stability-steps 5 2 | stability_steps: got 5 2
""",
    "tools/pack_data.py": f"""
{SMALL} --packing upsample_long --packing-options factor=1e300 | factor
""",
    "tools/inspect_pack.py": """
--document-ends 3 --seq-length 1000000000000000 | seq_length
--document-ends 3 --seq-length 12 --context-parallel-size 5 | context_parallel_size
--document-ends 3 --seq-length 12 --context-parallel-size 0 | --context-parallel-size: got 0, needs at least 1
--document-ends 3 --seq-length 0 | --seq-length: got 0, needs at least 1
--document-ends 3 --seq-length 12 --output {out}/row.jpg | row.jpg, needs a file name that ends in .png
--document-ends 3 --seq-length 12 --sample 3 | --sample: --document-ends does not read it
--data-path {w}/data --seq-length 64 --policies - --no-document-mask | --no-document-mask: --policies does not read it
--data-path {w}/data --seq-length 64 --sample -1 | sample
--data-path {w}/data --seq-length 64 --text | text: got no tokenizer
""",
    "tools/plan_run.py": f"""
{SMALL} --gpus 0 | --gpus: got 0, needs 1..10000000
{SMALL} --gpus 1 --gpu H900 | gpu: got 'H900', needs one of
{SMALL} --gpus 1 --stage x | stage: got
{SMALL} --gpus 1 --output {{w}}/good.yaml | good.yaml exists
{SMALL} --gpus 1 --output {{out}}/plan.json | plan.json, needs a file name that ends in .yaml or .yml
--gpus 1 | --config is required, for example
""",
    "tools/rehearse.py": f"""
{SMALL} --world-size 1 --documents some | --documents
{SMALL} --world-size 1 --json {{out}}/x.txt | x.txt, needs a file name that ends in .json
""",
    "tools/recipes.py": """
--copy {w}/nowhere/x --list | not allowed with argument
""",
    "tools/twin_recipe.py": """
{w}/good.yaml --output {w}/good.yaml | good.yaml exists
{w}/good.yaml --output {out}/twin.json | twin.json, needs a file name that ends in .yaml or .yml
""",
    "tools/gather_corpus.py": """
--output {w}/corpus.jsonl | corpus.jsonl exists
--output {out}/corpus.txt | corpus.txt, needs a file name that ends in .jsonl
""",
    "tools/train_tokenizer.py": """
--input {w}/corpus.jsonl --vocab-size 300 --output {w}/text.txt/t | text.txt
""",
    "tools/score_tokens.py": f"""
--checkpoint {{w}}/hf --output {{out}}/s --context 0 {SMALL} | --context: got 0, needs at least 1
--checkpoint {{w}}/hf --output {{out}}/s --context 65 {SMALL} | context, stride: got 65
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --part 1/1 {SMALL} | part: got '1/1'
--checkpoint {{w}}/hf --output {{out}}/s --context 16 --rows 0 {SMALL} | rows: got 0
--checkpoint {{w}}/hf --output {{w}}/run --context 16 {SMALL} | run
""",
    "tools/inspect_step.py": """
{w}/nowhere 1 | config.yaml: not found
{w}/run 99 | step: got 99
""",
    "tools/generate.py": """
{w}/hf --prompt a --input {w}/corpus.jsonl | prompt, input: needs one of the two
{w}/hf --prompt a --temperature 1 --top-p 0 | top_p: got
{w}/hf --prompt a --temperature nan | temperature: got
{w}/hf --prompt a --output {w}/corpus.jsonl | corpus.jsonl exists
{w}/hf --prompt a --output {out}/a.txt | a.txt, needs a file name that ends in .jsonl
{w}/hf --prompt a --system b | system: needs --chat
{w}/hf --prompt a --lr 1 | which only training reads
{w}/hf --prompt "" --tokenizer bytes | prompt 1: has no token to continue
""",
    "tools/evaluate.py": """
perplexity {w}/hf | input, data_path: needs one of the two
perplexity {w}/hf --input {w}/corpus.jsonl --lengths 0 --tokenizer bytes | lengths: got 0
perplexity {w}/hf --input {w}/corpus.jsonl --max-tokens 1 | --max-tokens: got 1, needs at least 2
perplexity {w}/hf --input {w}/corpus.jsonl --tokenizer bytes --min-tokens 1000000 | no document is left to score
lm-eval {w}/hf | --tasks
lm-eval {w}/hf --tasks x --limit 0 | limit: got 0
""",
    "tools/environment.py": """
--device tpu | device: got 'tpu'
""",
}


def all_inputs() -> Iterator[Wrong]:
    for script, text in TABLES.items():
        for line in text.strip("\n").splitlines():
            words, _, fragment = line.rpartition(" | ")
            yield Wrong(script, tuple(shlex.split(words)), fragment.strip())
