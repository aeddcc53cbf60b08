#!/usr/bin/env bash
# Run the checks and benchmarks that need a CUDA GPU: benchmarks/gpu.sh [PART ...] (default: all, in this order).
#   prepare         beforehand, on any machine: the small data set and 50 training steps on a CPU, both in data/smoke
#   machine         the GPU, the environment, a layer of Transformer Engine (2 minutes)
#   correct         every attention kernel against fp32, 60 s each; the loss head
#   losses          50 training steps against those of `prepare`; again with inputs of layers in host memory
#   step:SHAPE      tokens/s, MFU, memory and time saved by the window schedule, for a paper's model
#   attention:ROW   time of every attention kernel by window and documents
#   length:SHAPE    the longest row that fits on the GPU
#   loss_head       time and memory of the loss head and of other implementations
# A part takes at most 9 minutes, and its commands have shorter limits. A failing command does not stop the others, and
# what cannot run is recorded with the reason.
#   MINUTES=N          another time limit of a part
#   ROWS="8192 32768"  row lengths of `attention` without ROW
#   OUTPUT=FILE        results (default: benchmarks/results/DATE-DEVICE.jsonl, a JSON object per line)
#   PYTHON=python3     the interpreter (default: that of .venv, if there is one)
# Without a GPU this is a dry run with small sizes on the CPU. To begin on a machine for ten minutes a command:
#   here:     benchmarks/gpu.sh prepare; benchmarks/flash_attn_4.sh fetch build/flash_attn_4
#   1st call: benchmarks/gpu.sh machine
#   2nd call: benchmarks/gpu.sh correct losses                  then step:1B-8K and attention:8192, each in its own call
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=python3 && [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; fi
export PYTHON PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # if the package is not installed
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}" # compile FA4 once, not per process
read -ra rows <<<"${ROWS:-8192 32768 524288 131072}"
if ! [[ ${MINUTES:=9} =~ ^[1-9][0-9]{0,3}$ ]]; then # bash evaluates arithmetic operands: allow only digits
  echo "benchmarks/gpu.sh: MINUTES: got '$MINUTES', needs a whole number of minutes" >&2
  exit 2
fi

device=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-') if torch.cuda.is_available() else 'dry-run')")
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
failed=()

# limited SECONDS COMMAND [ARGUMENT ...]: run it for at most so long, and not beyond the part's time; no child process is
# left on the GPU
limited() {
  local status=0 left=$((deadline - SECONDS))
  ((left > 0)) || return 124
  timeout --kill-after 10 "$(($1 < left ? $1 : left))" "${@:2}" &
  group=$!
  wait "$group" || status=$?
  kill -KILL "-$group" 2>/dev/null || true # children that outlived it
  group=''
  return "$status"
}

# bench SECONDS SCRIPT [ARGUMENT ...]: run it, and continue after a failure
bench() {
  limited "$1" "$PYTHON" "benchmarks/$2.py" "${@:3}" --output "$out" || failed+=("${*:2}: status $?")
}

# train FOLDER [FLAG ...]: 50 steps of the smoke run
train() {
  limited 300 "$PYTHON" pretrain_skyladder.py --config examples/configs/cpu_smoke.yaml --bf16 --no-tensorboard \
    --train-iters 50 --save "$@"
}

# run NAME [SIZE]: a part; without a GPU in the script's own small size
run() {
  deadline=$((SECONDS + MINUTES * 60))
  [ "$device" != dry-run ] || set -- "$1"
  case $1 in
    prepare)
      [ -f data/smoke/corpus.idx ] || examples/smoke_data.sh
      CUDA_VISIBLE_DEVICES='' train "$scratch/cpu" || { failed+=("prepare: status $?") && return; }
      mkdir -p data/smoke/cpu_losses
      cp "$scratch/cpu/metrics.jsonl" data/smoke/cpu_losses
      ;;
    machine) bench 120 checks machine ;;
    correct)
      bench 420 attention parity --seconds 60
      bench 60 loss_head parity
      ;;
    losses)
      [ -f data/smoke/cpu_losses/metrics.jsonl ] || { failed+=("losses: run benchmarks/gpu.sh prepare first"); return; }
      train "$scratch/here" || failed+=("training: status $?")
      bench 60 checks losses data/smoke/cpu_losses "$scratch/here"
      train "$scratch/host" --recompute-granularity full --offload-layer-inputs || failed+=("training: status $?")
      bench 60 checks losses data/smoke/cpu_losses "$scratch/host"
      ;;
    step) bench 540 step speed ${2:+"$2"} --profile ;;
    attention) bench 540 attention speed ${2:+"$2"} --seconds 85 ;; # six kernels
    length) bench 540 step length ${2:+"$2"} ;;
    loss_head) bench 540 loss_head speed ;;
    *) echo "benchmarks/gpu.sh: got '$1', needs one of those that its first lines list" >&2; exit 2 ;;
  esac
}

if [ $# -gt 0 ]; then
  parts=("$@")
elif [ "$device" = dry-run ]; then
  parts=(prepare machine correct losses step attention length loss_head)
else
  parts=(machine correct losses step:1B-8K attention step:8B-32K length:8B loss_head length:1B
    step:120M-8K step:360M-8K step:1B-32K step:8B-8K)
fi
for part in "${parts[@]}"; do
  echo "== $part"
  IFS=: read -r name size <<<"$part"
  if [ "$part" = attention ]; then
    for row in "${rows[@]}"; do run attention "$row" && [ "$device" != dry-run ] || break; done
  else
    run "$name" ${size:+"$size"}
  fi
done
echo "$out"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
