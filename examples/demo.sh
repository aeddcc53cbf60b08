#!/usr/bin/env bash
# Train a model on this machine's Python sources and report on it, in about four minutes on two cores.
# Run it through `make demo`, which sets up the environment first.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
run=runs/demo
examples/clean.sh demo # remove the results of an earlier demo

echo "== corpus: the standard library, one package is one document"
python tools/gather_corpus.py --output "$run/data/corpus.jsonl"

echo "== tokenizer: byte-level BPE"
python tools/train_tokenizer.py --input "$run/data/corpus.jsonl" --vocab-size 4096 --output "$run/data/tokenizer"

echo "== dataset: .bin and .idx"
python tools/preprocess_data.py --input "$run/data/corpus.jsonl" --output-prefix "$run/data/corpus" \
  --tokenizer-model "$run/data/tokenizer" --workers 2

echo "== training on 2 processes: the window grows from 32 tokens to the full row of 1,024"
torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 \
  pretrain_skyladder.py --config examples/configs/demo.yaml

python tools/report.py "$run"
