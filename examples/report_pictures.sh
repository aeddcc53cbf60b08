#!/usr/bin/env bash
# The pictures of docs/reports.md: two small runs of a mixture, evaluated, their pages, and chromium.
#
#   examples/report_pictures.sh OUT     about ten minutes on one core; OUT: a folder for data, runs and pages. A run that
#                                       is there is kept, so that a call that was stopped goes on.
set -euo pipefail
[[ $# == 1 ]] || { echo "$0: got $# words, needs OUT" >&2; exit 2; }
out=$(realpath -m -- "$1")
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python} steps=${STEPS:-240}
mkdir -p "$out/data"

# packages of the standard library: those of more than 40,000 characters, the others, and some of both held out
[ -f "$out/data/corpus.jsonl" ] || "$python" tools/gather_corpus.py --output "$out/data/corpus.jsonl" --max-bytes 4000000
"$python" - "$out/data" <<'END'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
kind = ["packages" if len(json.loads(line)["text"]) > 40_000 else "modules" for line in lines]
kind[::8] = ["held_out"] * len(kind[::8])
for name in set(kind):
    (folder / f"{name}.jsonl").write_text("".join(line for line, own in zip(lines, kind) if own == name))
END
[ -d "$out/data/tokenizer" ] || "$python" tools/train_tokenizer.py --input "$out/data/corpus.jsonl" --vocab-size 1024 \
    --output "$out/data/tokenizer"
for name in packages modules held_out; do
    [ -f "$out/data/$name.idx" ] || "$python" tools/preprocess_data.py --input "$out/data/$name.jsonl" \
        --output-prefix "$out/data/$name" --tokenizer-model "$out/data/tokenizer"
done

common=(--model-preset tiny-1M --init-method-std 0.08 --tokenizer-model "$out/data/tokenizer" --split "100,0,0"
    --valid-data-path "$out/data/held_out" --data-path 0.6 "$out/data/packages" 0.4 "$out/data/modules" --seq-length 512 --global-batch-size 8
    --micro-batch-size 4 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 12 --train-iters "$steps"
    --eval-interval 40 --eval-lengths 128 512 --attention-health-interval 10 --no-tensorboard)
train() { # train NAME [FLAGS]
    grep -qs '"how": "done"' "$out/$1/history.jsonl" || "$python" pretrain_skyladder.py "${common[@]}" --save "$out/$1" \
        --load "$out/$1" --load-if-present "${@:2}"
}
train constant
train skyladder --window-schedule linear --window-start 32 --window-expansion-fraction 0.64
[ -f "$out/evaluated/perplexity.json" ] || "$python" tools/evaluate.py perplexity "$out/constant" "$out/skyladder" \
    --data-path "$out/data/held_out" --min-tokens 512 --max-tokens 4096 \
    --lengths 128 512 --output "$out/evaluated"

"$python" tools/report.py "$out/skyladder" --evaluations "$out/evaluated"
"$python" tools/report.py "$out/constant" "$out/skyladder" --output "$out/compare.html" --evaluations "$out/evaluated"
"$python" docs/take_pictures.py "$out/skyladder/report.html" docs/report
"$python" docs/take_pictures.py "$out/compare.html" docs/comparison
