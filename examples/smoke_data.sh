#!/usr/bin/env bash
# Make the small dataset of examples/configs/cpu_smoke.yaml from the standard library's sources.
set -euo pipefail
cd "$(dirname "$0")/.."
[ ! -x .venv/bin/python ] || export PATH="$PWD/.venv/bin:$PATH"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # if the package is not installed

"${PYTHON:-python3}" tools/gather_corpus.py --output data/smoke/corpus.jsonl --max-bytes 1000000 --overwrite
"${PYTHON:-python3}" tools/train_tokenizer.py --input data/smoke/corpus.jsonl --vocab-size 1024 --output data/smoke/tokenizer \
  --overwrite
"${PYTHON:-python3}" tools/preprocess_data.py --input data/smoke/corpus.jsonl --output-prefix data/smoke/corpus \
  --tokenizer-model data/smoke/tokenizer --source-field name --overwrite
