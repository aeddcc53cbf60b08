#!/usr/bin/env bash
# Remove the files that `make setup` created in data/smoke (clean.sh smoke) and `make demo` in runs/demo (clean.sh
# demo), by name. Other files in these folders are kept.
set -euo pipefail
cd "$(dirname "$0")/.."

remove_data() { # remove_data FOLDER: a corpus, its tokenizer and its dataset
  rm -rf "$1"/corpus.{jsonl,bin,idx,json,parts} "$1"/tokenizer/{tokenizer,tokenizer_config}.json
  remove_empty "$1/tokenizer" "$1"
}

remove_run() { # remove_run FOLDER: files written by the trainer and tools/report.py
  rm -rf "$1"/checkpoints/iter_[0-9]* "$1"/checkpoints/latest_checkpointed_iteration.txt \
    "$1"/{metrics,evaluation,history}.jsonl "$1"/{config.yaml,lock,passage.json,stopped.json,diverged.json,metrics.prom} \
    "$1"/stacks/rank*.txt "$1"/report.{png,html} "$1"/tensorboard/events.out.tfevents.*
  remove_empty "$1/checkpoints" "$1/tensorboard" "$1/faults" "$1/stacks" "$1"
}

remove_empty() {
  local folder
  for folder in "$@"; do
    [[ ! -d $folder ]] || rmdir --ignore-fail-on-non-empty "$folder"
  done
}

for made in "$@"; do
  case $made in
    smoke)
      remove_data data/smoke
      remove_empty data
      ;;
    demo)
      remove_data runs/demo/data
      remove_run runs/demo
      remove_empty runs
      ;;
    *) echo "examples/clean.sh: got '$made', needs smoke or demo" >&2; exit 2 ;;
  esac
done
