#!/usr/bin/env bash
# Does token weighting help a model that is extended from 256 to 1024 tokens? All commands of token_weighting.md.
#
#   docs/experiments/token_weighting.sh NOVELS HF OUT     about 40 minutes on one core
#
# NOVELS: folder of novels as .txt; HF: the Llama of 260K parameters as a Hugging Face folder; OUT: a folder for the
# runs, new or that of an interrupted call: finished runs are kept.
set -euo pipefail
[[ $# == 3 ]] || { echo "$0: got $# words, needs NOVELS HF OUT" >&2; exit 2; }
novels=$(realpath -- "$1") hf=$(realpath -- "$2") out=$(realpath -m -- "$3")
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python}
held_out="a-sicilian-romance emmeline evelina the-monk"
n=256 long=1024 seed=1 other_seed=2
base_steps=${BASE_STEPS:-500} steps=${STEPS:-160} eval_rows=${EVAL_ROWS:-256}
rotary_base=63496 # dynamic NTK: 10000 * 4^(8/6)

mkdir -p "$out/train" "$out/valid"
for file in "$novels"/*.txt; do
    part=train
    for name in $held_out; do [ "$(basename "$file")" != "$name.txt" ] || part=valid; done
    cp "$file" "$out/$part/"
done
for part in train valid; do
    [ -f "$out/$part-data.idx" ] || "$python" tools/preprocess_data.py --input "$out/$part" \
        --output-prefix "$out/$part-data" --tokenizer-model "$hf"
done

shape=(--num-layers 5 --hidden-size 64 --ffn-hidden-size 172 --num-attention-heads 8 --num-query-groups 4
    --no-untie-embeddings-and-output-weights --vocab-size 512)
rows=(--tokenizer-model "$hf" --split "1,0,0")
optimizer=(--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.01)
extended=("${rows[@]}" --data-path "$out/train-data" --seq-length "$long" --global-batch-size 4 --micro-batch-size 4
    --train-iters "$steps")

train() { # train NAME [FLAGS]
    grep -qs '"how": "done"' "$out/$1/history.jsonl" || "$python" pretrain_skyladder.py "${shape[@]}" \
        "${optimizer[@]}" --no-tensorboard --save "$out/$1" --load "$out/$1" --load-if-present "${@:2}"
}

# The base: the published model, adapted to the novels at context n.
train base "${rows[@]}" --data-path "$out/train-data" --seq-length $n --global-batch-size 16 --micro-batch-size 16 \
    --train-iters "$base_steps" --seed $seed --init-from "$hf"

# Its losses at context n, for the very rows that the runs below train on.
"$python" tools/score_tokens.py --checkpoint "$out/base" --context $n --output "$out/frozen.zarr" \
    "${extended[@]}" --seed $seed

extend() { # extend NAME SEED [FLAGS]: from the base to 4n
    train "$1" "${extended[@]}" --init-from "$out/base" --rotary-base $rotary_base --seed "$2" "${@:3}"
}
unfrozen=(--token-weighting unfrozen --short-context "$n")
frozen=(--token-weighting frozen --score-store "$out/frozen.zarr")
extend uniform $seed
extend dense_unfrozen $seed "${unfrozen[@]}" --weight-post dense
extend sparse_unfrozen $seed "${unfrozen[@]}" --weight-post sparse
extend dense_frozen $seed "${frozen[@]}" --weight-post dense
extend sparse_frozen $seed "${frozen[@]}" --weight-post sparse
extend uniform_2 $other_seed
extend dense_unfrozen_2 $other_seed "${unfrozen[@]}" --weight-post dense

evaluate() { # evaluate RUN STORE CONTEXT STRIDE: losses of held-out rows of 4n tokens
    "$python" tools/score_tokens.py --checkpoint "$out/$1" --context "$3" --stride "$4" --rows "$eval_rows" \
        --output "$out/eval/$2.zarr" "${rows[@]}" --data-path "$out/valid-data" --seq-length $long \
        --micro-batch-size 4 --seed 0
}
mkdir -p "$out/eval"
for run in uniform uniform_2 dense_unfrozen dense_unfrozen_2 sparse_unfrozen dense_frozen sparse_frozen; do
    evaluate $run $run $long $long
    evaluate $run ${run}_short $n $((n * 3 / 4))
done
evaluate base base_short $n $((n * 3 / 4))

"$python" docs/experiments/token_weighting.py --runs "$out" --data-path "$out/valid-data" --tokenizer-model "$hf" \
    --json docs/experiments/token_weighting.json --figure docs/experiments/token_weighting.png
