#!/usr/bin/env bash
# Everything that wants a CUDA card: benchmarks/gpu.sh [parity] [speed] [training] [weighting]; all without a word.
# Results go to benchmarks/results/DATE-DEVICE.jsonl. Without a card it is a dry run on the CPU, on small sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] && export PATH="$PWD/.venv/bin:$PATH"
device=$(python -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-') if torch.cuda.is_available() else 'dry-run')")
mkdir -p benchmarks/results
out=benchmarks/results/$(date -u +%F)-$device.jsonl
[ $# -gt 0 ] || set -- parity speed training weighting
for step in "$@"; do
  echo "== $step"
  case $step in
    parity | speed) python benchmarks/attention.py "$step" --output "$out" ;;
    training)
      folder=$(mktemp -d)
      trap 'rm -rf "$folder"' EXIT
      run=(python pretrain_skyladder.py --config examples/configs/cpu_smoke.yaml --bf16 --no-tensorboard)
      CUDA_VISIBLE_DEVICES='' "${run[@]}" --save "$folder/cpu"
      "${run[@]}" --save "$folder/here"
      python benchmarks/compare_losses.py "$folder/cpu" "$folder/here" --output "$out"
      ;;
    weighting)
      case $device in
        dry-run) sizes=(--seq-length 256 --hidden-size 128 --num-layers 2 --steps 2) ;;
        *) sizes=(--device cuda --bf16 --seq-length 32768 --hidden-size 2048 --num-layers 8 --vocab-size 32000) ;;
      esac
      python benchmarks/token_weighting.py "${sizes[@]}" --output "$out" || echo "the goal is missed"
      ;;
    *) echo "benchmarks/gpu.sh: got '$step', needs parity, speed, training or weighting" >&2 && exit 2 ;;
  esac
done
echo "$out"
