#!/usr/bin/env bash
# Run the checks and benchmarks that need a CUDA GPU: benchmarks/gpu.sh [PART ...] (default: all parts).
#   correct      every attention kernel against fp32; the loss head; 50 training steps against the CPU's losses
#   attention    time of every attention kernel by window, row length and documents
#   step         tokens/s, MFU, memory and time saved by the window schedule, for the papers' models
#   length       the longest row that fits on the GPU
#   loss_head    time and memory of the loss head and of other implementations
# A failing script does not stop the others. Each command may take 9 minutes (attention: per row length; step: per
# model).
#   MINUTES=N          another time limit
#   ROWS="8192 32768"  row lengths of `attention`
#   OUTPUT=FILE        results (default: benchmarks/results/DATE-DEVICE.jsonl, a JSON object per line)
# Without a GPU this is a dry run with small sizes on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=python3 && [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # if the package is not installed
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}" # compile FA4 once, not per process
read -ra rows <<<"${ROWS:-8192 32768 131072 524288}"

minutes=${MINUTES:-9}
if [[ ! $minutes =~ ^[1-9][0-9]{0,8}$ ]]; then # bash evaluates arithmetic operands: allow only digits
  echo "benchmarks/gpu.sh: MINUTES: got '$minutes', needs a number from 1 on" >&2
  exit 2
fi

device=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-') if torch.cuda.is_available() else 'dry-run')")
mkdir -p benchmarks/results
out=${OUTPUT:-benchmarks/results/$(date -u +%F)-$device.jsonl}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
group='' # process group of the running command; its leader is timeout
# Stop all processes and start no further part; also kill the leader by its own id, as its group may not exist yet.
stop() {
  [ -z "$group" ] || kill -KILL "$group" "-$group" 2>/dev/null || true
  exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
parts=(correct attention step length loss_head)
failed=()

# limited COMMAND [ARGUMENT ...]: run it within the time limit; no child process is left on the GPU
limited() {
  local status=0
  timeout --kill-after 10 "$((minutes * 60))" "$@" &
  group=$!
  wait "$group" || status=$?
  kill -KILL "-$group" 2>/dev/null || true # children that outlived it
  group=''
  return "$status"
}

# bench SCRIPT [ARGUMENT ...]: run it within the time limit, and continue after a failure
bench() {
  limited "$PYTHON" "benchmarks/$1.py" "${@:2}" --output "$out" || failed+=("$*: status $?")
}

# each SCRIPT WORD SIZE ...: run bench for every size separately; without a GPU for the script's own small size
each() {
  local script=$1 word=$2 size
  shift 2
  [ "$device" != dry-run ] || set -- ''
  for size in "$@"; do
    bench "$script" "$word" ${size:+"$size"}
  done
}

# compare 50 steps of the smoke run on this device and on the CPU
losses() {
  [ -f data/smoke/corpus.idx ] || examples/smoke_data.sh
  local run=("$PYTHON" pretrain_skyladder.py --config examples/configs/cpu_smoke.yaml --bf16 --no-tensorboard
    --train-iters "$1")
  CUDA_VISIBLE_DEVICES='' limited "${run[@]}" --save "$scratch/cpu" && limited "${run[@]}" --save "$scratch/here"
}

[ $# -gt 0 ] || set -- "${parts[@]}"
for part in "$@"; do
  echo "== $part"
  case $part in
    correct)
      bench attention parity
      bench loss_head parity
      losses 50 || failed+=("training: status $?")
      bench compare_losses "$scratch/cpu" "$scratch/here"
      ;;
    attention) each attention speed "${rows[@]}" ;;
    step) each step --profile 120M-8K 360M-8K 1B-8K 1B-32K 8B-8K 8B-32K ;;
    length) bench length ;;
    loss_head) bench loss_head speed ;;
    *) echo "benchmarks/gpu.sh: got '$part', needs one of ${parts[*]}" >&2; exit 2 ;;
  esac
done
echo "$out"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
