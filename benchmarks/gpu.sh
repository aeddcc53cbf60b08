#!/usr/bin/env bash
# Run the checks and benchmarks that need a CUDA GPU: benchmarks/gpu.sh [PART ...]
#   prepare         beforehand, on any machine: the small data set and 50 training steps on a CPU, both in data/smoke
#   machine         the GPU, the environment, a compiler, a layer of Transformer Engine, a call of FlashAttention 4
#   correct         every attention kernel against fp32, 60 s each (FlashAttention 4: 120 s); the loss head
#   losses          50 training steps against those of `prepare`, with Transformer Engine's layers if it is installed; again
#                   without them, and with inputs of layers in host memory
#   two             with two GPUs: context and tensor parallelism against one process; what a hang leaves of NCCL
#   experts, fp8    50 training steps with grouped experts against ungrouped ones, and with fp8 against bf16
#   step:SHAPE      tokens/s, MFU, memory and time saved by the window schedule, for a paper's model
#   attention:ROW   time of every attention kernel by window and documents
#   windows:ROW     the same for the whole row and a window of 32
#   length:SHAPE    the longest row that fits on the GPU
#   loss_head       time and memory of the loss head and of other implementations
#   ten-minutes     machine, correct and losses, in at most 9.5 minutes together: the default
#   two-hours       these without a common limit, and what else a decision needs
#   all             everything
# A part takes at most 9 minutes, and its commands have shorter limits. A failing command does not stop the others. What
# cannot run is recorded with the reason, and what dies or takes too long with its exit status. The last lines of the
# output are the seconds of each part.
#   MINUTES=N          another time limit of a part
#   STEPS=N            training steps of `prepare` and `losses` (default: 50); those of `two` are at most 10
#   ROWS="8192 32768"  row lengths of `attention` without ROW
#   OUTPUT=FILE        results (default: benchmarks/results/DATE-DEVICE.jsonl, a JSON object per line); beside them FILE
#                      with .md, a page of all of them, and with .log, what the commands write to stderr
#   PYTHON=python3     the interpreter (default: that of .venv, if there is one)
# Without a GPU this is a dry run with small sizes on the CPU, and commands have ten times their limits. To begin on a
# machine for ten minutes a command:
#   here:     benchmarks/gpu.sh prepare; benchmarks/flash_attn_4.sh fetch build/flash_attn_4, then compile build/flash_attn_4
#   1st call: benchmarks/gpu.sh      then the other parts of two-hours in this order, in calls of their own
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then PYTHON=python3 && [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; fi
export PYTHON PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # if the package is not installed
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0 # NVIDIA's images set 1, with which products in fp32 would not be exact
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}" # compile FA4 once, not per process
read -ra rows <<<"${ROWS:-8192 32768 524288 131072}"
ten_minutes=(machine correct losses)
two_hours=("${ten_minutes[@]}" two attention:8192 attention:32768 step:1B-8K step:1B-32K loss_head experts fp8 windows:131072)
others=(step:8B-32K length:8B length:1B step:120M-8K step:360M-8K step:8B-8K attention:524288 attention:131072)
dry_run=(prepare machine correct losses two experts fp8 step attention windows length loss_head)
: "${MINUTES:=9}" "${STEPS:=50}"
for name in MINUTES STEPS; do
  if ! [[ ${!name} =~ ^(0|[1-9][0-9]{0,3})$ ]]; then # bash evaluates arithmetic operands: allow only digits
    echo "benchmarks/gpu.sh: $name: got '${!name}', needs a whole number" >&2
    exit 2
  fi
done
cpu_losses=data/smoke/cpu_losses/$STEPS

read -r device gpus < <("$PYTHON" -c "import torch
print(*(torch.cuda.get_device_name().replace(' ', '-'), torch.cuda.device_count()) if torch.cuda.is_available() else ('dry-run', 0))")
if [ "$device" = dry-run ] && [ "${CUDA_VISIBLE_DEVICES-unset}" ] && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
  echo "benchmarks/gpu.sh: nvidia-smi lists a GPU that torch does not see; look at the driver and at torch's version of" \
    "CUDA ($PYTHON -c 'import torch; torch.cuda.init()'), or set CUDA_VISIBLE_DEVICES= for a dry run" >&2
  exit 2
fi
patience=1 # a busy CPU is no fault of a dry run
[ "$device" != dry-run ] || patience=10
out=${OUTPUT:-benchmarks/results/$(date -u +%F)-$device.jsonl}
mkdir -p "$(dirname "$out")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
exec 2> >(tee -a "${out%.jsonl}.log" >&2)
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
latest=999999 # second at which the last part has to end

# limited SECONDS COMMAND [ARGUMENT ...]: run it for at most so long, and not beyond the part's time; no child process is
# left on the GPU. Record a failure, with its exit status.
limited() {
  local status=0 left=$((deadline - SECONDS)) most=$(($1 * patience))
  if ((left > 0)); then
    timeout --kill-after 10 "$((most < left ? most : left))" "${@:2}" &
    group=$!
    wait "$group" || status=$?
    kill -KILL "-$group" 2>/dev/null || true # children that outlived it
    group=''
  else
    status=124
  fi
  if ((status)); then
    failed+=("$part: ${*:3}: status $status")
    "$PYTHON" benchmarks/record.py --output "$out" "${part%%:*}" "$status" -- "${@:3}"
  fi
  return "$status"
}

# bench SECONDS SCRIPT [ARGUMENT ...]: run it, and continue after a failure
bench() { limited "$1" "$PYTHON" "benchmarks/$2.py" "${@:3}" --output "$out" || true; }

# train RANKS STEPS FOLDER [FLAG ...]: the smoke run
train() {
  local launch=("$PYTHON")
  (($1 == 1)) || launch=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$1")
  limited 300 "${launch[@]}" pretrain_skyladder.py --config examples/configs/cpu_smoke.yaml --bf16 --no-tensorboard \
    --train-iters "$2" --save "${@:3}"
}

# compared PART CASE RUN OTHER_RUN: compare their losses
compared() { bench 60 checks losses "$3" "$4" --case "$2" --part "$1"; }

# skipped PART REASON
skipped() { "$PYTHON" benchmarks/record.py --output "$out" "$1" skipped -- "$2"; }

# has_transformer_engine: whether there is a GPU with it
has_transformer_engine() {
  [ "$device" != dry-run ] && "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(not u.find_spec("transformer_engine"))'
}

# run NAME [SIZE]: a part; without a GPU in the script's own small size
run() {
  deadline=$((SECONDS + MINUTES * 60))
  ((deadline < latest)) || deadline=$latest
  [ "$device" != dry-run ] || set -- "$1"
  case $1 in
    prepare)
      [ -f data/smoke/corpus.idx ] || examples/smoke_data.sh
      CUDA_VISIBLE_DEVICES='' train 1 "$STEPS" "$scratch/cpu" || return 0
      mkdir -p "$cpu_losses"
      cp "$scratch/cpu/metrics.jsonl" "$cpu_losses"
      ;;
    machine) bench 120 checks machine ;;
    correct)
      bench 480 attention parity --seconds $((60 * patience))
      bench 60 loss_head parity
      ;;
    losses)
      [ -f "$cpu_losses/metrics.jsonl" ] || { failed+=("losses: run benchmarks/gpu.sh prepare first"); return; }
      train 1 "$STEPS" "$scratch/here" && compared correct training "$cpu_losses" "$scratch/here"
      if has_transformer_engine; then
        mkdir -p "$scratch/hidden"
        echo 'import sys; sys.modules["transformer_engine"] = None' >"$scratch/hidden/sitecustomize.py"
        PYTHONPATH="$scratch/hidden:$PYTHONPATH" train 1 "$STEPS" "$scratch/plain" &&
          compared correct "training, without Transformer Engine" "$cpu_losses" "$scratch/plain"
      fi
      train 1 "$STEPS" "$scratch/host" --recompute-granularity full --offload-layer-inputs &&
        compared correct "training, inputs of layers in host memory" "$cpu_losses" "$scratch/host"
      ;;
    experts)
      local experts=(--num-experts 4 --moe-router-topk 2)
      train 1 "$STEPS" "$scratch/experts" "${experts[@]}" || return 0
      if has_transformer_engine; then
        train 1 "$STEPS" "$scratch/grouped" "${experts[@]}" --moe-grouped-gemm &&
          compared experts "grouped experts" "$scratch/experts" "$scratch/grouped"
      else
        skipped experts "needs a GPU with Transformer Engine"
      fi
      ;;
    fp8)
      if ! has_transformer_engine; then
        skipped fp8 "needs a GPU with Transformer Engine"
        return
      fi
      train 1 "$STEPS" "$scratch/bf16" || return 0
      train 1 "$STEPS" "$scratch/fp8" --fp8-format hybrid && compared fp8 fp8 "$scratch/bf16" "$scratch/fp8"
      ;;
    two)
      if [ "$gpus" = 1 ]; then
        skipped two "needs two GPUs"
        return
      fi
      local steps=$((STEPS < 10 ? STEPS : 10))
      train 1 "$steps" "$scratch/one"
      while read -r name flags; do
        # shellcheck disable=SC2086 # several flags
        train 2 "$steps" "$scratch/$name" $flags && compared two "$name" "$scratch/one" "$scratch/$name"
      done <<<"exchange --context-parallel-size 2 --cp-scheme exchange
ulysses --context-parallel-size 2 --cp-scheme ulysses
tensor --tensor-model-parallel-size 2"
      bench 200 checks hang "$scratch/hang"
      ;;
    step) bench 540 step speed ${2:+"$2"} --profile ;;
    attention) bench 540 attention speed ${2:+"$2"} --seconds $((100 * patience)) ;; # four kernels, one has twice the time
    windows) bench 540 attention speed "${2:-512}" --windows "${2:-512}" 32 --seconds $((100 * patience)) ;;
    length) bench 540 step length ${2:+"$2"} ;;
    loss_head) bench 540 loss_head speed ;;
    *) echo "benchmarks/gpu.sh: got '$1', needs one of those that its first lines list" >&2; exit 2 ;;
  esac
}

[ $# -gt 0 ] || set -- ten-minutes
case $* in
  ten-minutes) parts=("${ten_minutes[@]}") ;;
  two-hours) parts=("${two_hours[@]}") ;;
  all) parts=("${two_hours[@]}" "${others[@]}") ;;
  *) parts=("$@") ;;
esac
if [ "$device" = dry-run ]; then
  [ "$*" != all ] || parts=("${dry_run[@]}")
elif [ "$*" = ten-minutes ]; then
  latest=570
fi
times=()
for part in "${parts[@]}"; do
  echo "== $part"
  began=$SECONDS
  IFS=: read -r name size <<<"$part"
  if [ "$part" = attention ]; then
    for row in "${rows[@]}"; do run attention "$row" && [ "$device" != dry-run ] || break; done
  else
    run "$name" ${size:+"$size"} || true
  fi
  times+=("$((SECONDS - began)) s  $part")
done
if [ -f "$out" ]; then
  "$PYTHON" benchmarks/results.py "$out" --output "${out%.jsonl}.md" || failed+=("results.py: status $?")
  echo "$out ${out%.jsonl}.md"
fi
printf '%s\n' "${times[@]}"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
