#!/usr/bin/env bash
# A small Llama from 512 to 8192 tokens in three stages. All commands of prolong_twin.md.
#
#   docs/experiments/prolong_twin.sh NOVELS HF OUT     about 40 minutes on one core
#
# NOVELS: folder of novels as .txt; HF: the Llama of 260K parameters as a Hugging Face folder; OUT: a folder for the
# runs, new or that of an interrupted call, which goes on where it was.
set -euo pipefail
[[ $# == 3 ]] || { echo "$0: got $# words, needs NOVELS HF OUT" >&2; exit 2; }
novels=$(realpath -- "$1") hf=$(realpath -- "$2") out=$(realpath -m -- "$3")
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
config=docs/experiments/prolong_twin.yaml
held_out="a-sicilian-romance emmeline evelina the-monk"
eval_rows=${EVAL_ROWS:-16} long=8192

mkdir -p "$out/train" "$out/valid" "$out/eval"
for file in "$novels"/*.txt; do
    part=train
    for name in $held_out; do [ "$(basename "$file")" != "$name.txt" ] || part=valid; done
    cp "$file" "$out/$part/"
done
# The short documents: paragraphs of the training novels, together about as long as a page.
"$python" - "$out" <<'PYTHON'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
with (out / "short.jsonl").open("w") as lines:
    for novel in sorted((out / "train").glob("*.txt")):
        page = ""
        for paragraph in novel.read_text().split("\n\n"):
            page += paragraph + "\n\n"
            if len(page) > 600:
                print(json.dumps({"text": page}), file=lines)
                page = ""
PYTHON
prepare() { # prepare NAME INPUT
    [ -f "$out/$1-data.idx" ] || "$python" tools/preprocess_data.py --input "$2" --output-prefix "$out/$1-data" \
        --tokenizer-model "$hf"
}
prepare train "$out/train"
prepare valid "$out/valid"
prepare short "$out/short.jsonl"

cat >"$out/mixture.yaml" <<YAML
- {name: long, prefix: $out/train-data, weight: 60, packing: split_drop}
- {name: short, prefix: $out/short-data, weight: 40, packing: carry_over}
YAML
flags=(--config "$config" --mixture "$out/mixture.yaml" --tokenizer-model "$hf")
for stage in s512 s2048 s8192; do
    "$python" tools/pack_data.py "${flags[@]}" --stage $stage
done

# Twice the same command, the first time only for the first stage: the run is continued across the border.
train=("$python" pretrain_skyladder.py "${flags[@]}" --init-from "$hf" --save "$out/run" --load "$out/run"
    --load-if-present --no-tensorboard)
"${train[@]}" --stage s512
"${train[@]}"

evaluate() { # evaluate NAME CHECKPOINT: losses of held-out rows of 8192 tokens
    "$python" tools/score_tokens.py --checkpoint "$2" --context $long --stride $long --rows "$eval_rows" \
        --output "$out/eval/$1.zarr" --tokenizer-model "$hf" --data-path "$out/valid-data" --split 1,0,0 \
        --seq-length $long --global-batch-size 1 --seed 0
}
evaluate published "$hf"
for stage in s512 s2048 s8192; do evaluate $stage "$out/run/$stage"; done

"$python" docs/experiments/prolong_twin.py --eval "$out/eval" --json docs/experiments/prolong_twin.json \
    --figure docs/experiments/prolong_twin.png
