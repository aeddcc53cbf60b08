#!/usr/bin/env bash
# Start one process per rank under Slurm on any number of nodes, and requeue the job after a warning or a preemption:
#
#   launch.sh COMMAND...      from a batch script: one srun task per rank; no torchrun
#
# Settings, all by environment (README.md beside this file explains each):
#   RUN               run folder of the trainer, with its checkpoints and stopped.json
#   LOGS              folder of the nodes' logs           (default RUN/logs, or ./logs)
#   VENV | MODULES | CONTAINER_IMAGE [CONTAINER_MOUNTS]    source of python; VENV and MODULES can be combined
#   MAX_CRASHES       maximum number of consecutive restarts without a new checkpoint, after crashes, and with RUN after
#                     warnings (SIGUSR1) too early to save (default 2)
#   GRACE_S           seconds that the other ranks have left when the first has ended (default 60)
#   DRY_RUN=1         print the srun command and stop
set -euo pipefail

# those that can be caught and would end the shell
SIGNALS=(HUP INT QUIT ALRM TERM USR1 USR2 XCPU VTALRM PROF IO PWR STKFLT)

fail() {
  echo "launch.sh: $*" >&2
  exit 2
}

# Bash evaluates arithmetic operands, including commands in a subscript: allow only digits.
is_number() {
  [[ $1 =~ ^(0|[1-9][0-9]{0,9})$ ]] # job ids have ten digits in a large federation
}

# Set up python. The modules and the venv reach the tasks because srun passes this environment on.
set_software() {
  if [[ ${CONTAINER_IMAGE:-} ]]; then
    [[ ! ${VENV:-} ]] || fail "VENV and CONTAINER_IMAGE: got both, needs one; the image brings its own Python"
    local mounts=$PWD:$PWD path
    if [[ ${RUN:-} ]]; then # unless mounted, it would be written into the container and lost
      RUN=$(realpath --canonicalize-missing -- "$RUN") # links in the path may not resolve inside
      mounts+=,$RUN:$RUN
    fi
    for path in "$PWD" "${RUN:-}"; do
      [[ $path != *[,:]* ]] || fail "CONTAINER_IMAGE: got $path to mount, needs a path without ',' and ':'; rename it"
    done
    container=(
      "--container-image=$CONTAINER_IMAGE"
      "--container-mounts=$mounts${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
      "--container-workdir=$PWD" --no-container-mount-home
    )
  fi
  if [[ ${MODULES:-} ]]; then
    type module >/dev/null 2>&1 || fail "MODULES: got '$MODULES', but this node has no module command"
    set +u # modules read variables that may be unset
    # shellcheck disable=SC2086 # several
    module load $MODULES
    set -u
  fi
  if [[ ${VENV:-} ]]; then
    [[ -x $VENV/bin/python ]] || fail "VENV: got '$VENV', needs a virtual environment with bin/python on every node"
    PATH=$(realpath -- "$VENV")/bin:$PATH
  fi
}

# The batch shell runs on the job's first node, as rank 0 does. The port is derived from the job and the start number,
# so that two jobs on one node differ, and so does a restart after a port could not be opened; ports in use are skipped.
set_rendezvous() {
  export MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
  if [[ ${SLURM_JOB_NUM_NODES:-1} != 1 && $MASTER_ADDR =~ ^(localhost|127\..*|::1)$ ]]; then
    fail "MASTER_ADDR: got $MASTER_ADDR, where each of $SLURM_JOB_NUM_NODES nodes finds itself; needs the first one's" \
      "name: unset it, also in the shell that you submit from"
  fi
  if [[ ! ${MASTER_PORT:-} ]]; then
    MASTER_PORT=$((10000 + (SLURM_JOB_ID + start - 1) % 20000))
    # on any of the node's addresses, because rank 0 opens it on all of them
    while grep --quiet --no-messages "^ *[0-9]*: [0-9A-F]*:$(printf %04X "$MASTER_PORT") " /proc/net/tcp{,6}; do
      ((MASTER_PORT += 1))
    done
  fi
  export MASTER_PORT
}

# Tuning for every cluster; interfaces and adapters (NCCL_SOCKET_IFNAME, NCCL_IB_HCA) are site-specific: see README.md.
set_tuning() {
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}                           # only warnings
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # kernels start in order: TP communication overlaps
  # Windows and short contexts change sizes: this avoids fragmentation. All versions of torch read this name; some ignore
  # the newer one, PYTORCH_ALLOC_CONF.
  [[ ${PYTORCH_ALLOC_CONF:-} ]] || export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
  export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
  export PYTHONUNBUFFERED=1 # output of a killed rank reaches the log
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer takes it from sbatch
}

# The first task to end gives the others GRACE_S: a crash does not leave the rest waiting in a collective, and ranks
# that stop together keep their exit status, which --kill-on-bad-exit would turn into 137. The tasks get this
# environment regardless of `sbatch --export`, and a node's ranks get its cores in order: distributed over its sockets,
# srun's default, half of them would be far from their GPU.
srun_command() {
  # the checkout first, because tools/ would otherwise import an installed package; set here, because pyxis prefers the
  # image's value
  # shellcheck disable=SC2016 # expands in the task
  local as_rank='export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID'
  # shellcheck disable=SC2016
  as_rank+=' WORLD_SIZE=$SLURM_NTASKS; '
  # compiled kernels: a container may have no writable home, and a cluster's home is on NFS. Files of another user are
  # not used, because they would be executed
  # shellcheck disable=SC2016
  as_rank+='cache=/tmp/triton-$UID; mkdir -m 700 "$cache" 2>/dev/null; '
  # shellcheck disable=SC2016
  as_rank+='[[ ${TRITON_CACHE_DIR:-} || ! -O $cache ]] || export TRITON_CACHE_DIR=$cache; '
  # FlashAttention 4 otherwise compiles in every process
  # shellcheck disable=SC2016
  as_rank+='[[ ${FLASH_ATTENTION_CUTE_DSL_CACHE_DIR:-} || ! -O $cache ]] || '
  # shellcheck disable=SC2016
  as_rank+='export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=$cache/flash_attention_4; exec "$@"'
  command=(
    srun --label --mpi=none --export=ALL --distribution=block:block --kill-on-bad-exit=0 "--wait=${GRACE_S:-60}"
    "--output=${LOGS//%/%%}/$job-node%n-%N.log" --open-mode=append
    "${container[@]}" bash -c "$as_rank" rank "$@"
  )
}

# Pass a signal of the batch shell on to the ranks: sbatch --signal=B:USR1@..., or scancel --batch. They may have it
# already: on a preemption Slurm sends SIGTERM to all. An unresponsive controller must not end the job, nor hold it.
pass_on() {
  interrupted=1
  echo "job $job: got SIG$1, which is passed on to the ranks"
  {
    scancel --signal="$(kill -l "$1")" "$job" ||
      echo "job $job: SIG$1 was not passed on; in a job that Slurm ends, all ranks have it"
  } &
}

# Run the command and set its status. The shell must outlive the step's processes. `wait` returns early after a trap.
run_step() {
  local step name
  for name in "${SIGNALS[@]}"; do
    # shellcheck disable=SC2064 # expands now
    trap "pass_on $name" "$name"
  done
  "${command[@]}" &
  step=$!
  while :; do
    interrupted=
    status=0
    wait "$step" || status=$?
    [[ $interrupted ]] || break
  done
  trap '' "${SIGNALS[@]}" # ignore later warnings
  trap - TERM INT
}

# Find files of this name in the run folder, or in those of its stages.
of_run() {
  local file
  [[ ${RUN:-} ]] || return 0
  for file in "$RUN"/{,*/}"$1"; do
    [[ ! -f $file ]] || printf '%s\n' "$file"
  done
}

newest_checkpoint() {
  local file step found=()
  while read -r file; do
    step=$(<"$file")
    is_number "$step" || step=unreadable
    found+=("$step")
  done < <(of_run checkpoints/latest_checkpointed_iteration.txt)
  echo "${found[*]:-none}"
}

# One job per run folder: two would write the same files. Each job writes its marker first and then checks, so that of
# two simultaneous starts at least one sees the other. An unresponsive controller does not prevent a start.
claim_run() {
  local mark other others=() running
  mark=$RUN/slurm-$job.job
  : >"$mark"
  for other in "$RUN"/slurm-*.job; do
    other=${other##*/slurm-}
    other=${other%.job}
    [[ $other == "$job" || ! $other =~ ^[0-9]+(_[0-9]+)?$ ]] || others+=("$other")
  done
  ((${#others[@]})) || return 0
  # include our own job id: squeue fails if it knows none of the given ids
  running=$(IFS=, && squeue --noheader --states=RUNNING,SUSPENDED,COMPLETING --jobs="$job,${others[*]}" --format=%i) ||
    return 0
  for other in "${others[@]}"; do
    if grep --quiet --line-regexp --fixed-strings -- "$other" <<<"$running"; then
      rm -f -- "$mark"
      fail "RUN: got $RUN, where job $other still runs, needs a folder of this job's own; wait for it, or scancel $other"
    fi
    rm -f -- "$RUN/slurm-$other.job" # left by a killed job
  done
}

# Return true until the command has crashed, or was ended before it saved, more than MAX_CRASHES times since the newest
# checkpoint.
may_crash_again() {
  local count=0 seen='' newest file=$LOGS/$job.crashes
  newest=$(newest_checkpoint)
  [[ ! -f $file ]] || read -r count seen <"$file" || true # an empty file has no line
  if ! is_number "$count"; then
    echo "job $job: $file: got '$count', needs a number of starts: not requeued; remove the file and submit again"
    return 1
  fi
  [[ $seen == "$newest" ]] || count=0
  if ! echo "$((count + 1)) $newest" >"$file"; then # disk full: uncounted restarts would never end
    echo "job $job: $file: cannot be written: not requeued; make room and submit again"
    return 1
  fi
  ((count < ${MAX_CRASHES:-2}))
}

# Return true if a status is 128 + one of SIGNALS.
is_of_signal() {
  (($1 > 128)) && [[ " ${SIGNALS[*]} " == *" $(kill -l "$1" 2>/dev/null) "* ]]
}

# 0: done; 2: bad input; 86 or diverged.json: diverged; 130: Ctrl-C; 85 or stopped.json: stopped by a warning, and
# saved; 143 (TERM) and 128 + another of SIGNALS, such as 138 (USR1): ended before it could save; all else is a crash,
# including a rank that hung (87). 138 counts as a crash, because start-up may take longer than the time limit. 143 does
# not, because a preemption may come at any moment. Without RUN there are no checkpoints, and the command resumes by
# itself.
decide() {
  if [[ $(of_run stopped.json) ]]; then status=85; fi
  if [[ $(of_run diverged.json) ]]; then status=86; fi
  case $status in
    0 | 2 | 86 | 130) verdict=end ;;
    85 | 143) verdict=again ;;
    *)
      if { [[ ! ${RUN:-} ]] && is_of_signal "$status"; } || may_crash_again; then verdict=again; else verdict=end; fi
      ;;
  esac
}

# A job cancelled by its owner is no longer RUNNING, and neither is one that Slurm requeues itself.
requeue() {
  local state try
  for try in 1 2 3 4 5 6; do
    ((try == 1)) || sleep 10 # a busy or restarting controller refuses
    state=$(squeue --noheader --jobs="$job" --format=%T) || continue
    if [[ $state != RUNNING ]]; then
      echo "job $job: not requeued: it is ${state:-gone}, not RUNNING"
      return
    fi
    echo "job $job: exit status $status after start $start, newest checkpoint $(newest_checkpoint): requeued"
    if scontrol requeue "$job"; then
      sleep 60 # Slurm ends this shell; if it returned first, the job would count as finished
      return
    fi
  done
  echo "job $job: not requeued: Slurm did not take it; submit the same command again"
}

main() {
  (($# > 0)) || fail "got no command, needs what every rank runs, such as: python pretrain_skyladder.py --config ..."
  [[ ! ${DRY_RUN:-} ]] || SLURM_JOB_ID=${SLURM_JOB_ID:-0} # also works on a login node
  [[ ${SLURM_JOB_ID:-} ]] || fail "no SLURM_JOB_ID: submit a script that calls this, such as pretrain.sbatch"
  local name
  for name in SLURM_JOB_ID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_RESTART_COUNT MAX_CRASHES; do
    [[ ! ${!name:-} ]] || is_number "${!name}" || fail "$name: got '${!name}', needs a number; unset it"
  done
  [[ ! ${SLURM_GPUS_PER_TASK:-} ]] || fail "SLURM_GPUS_PER_TASK: got '$SLURM_GPUS_PER_TASK', of --gpus-per-task or left" \
    "over in the shell that you submitted from; it hides a rank's neighbours from NCCL: use --gpus-per-node, or unset it"
  # an array's own id is also the id of one of its tasks: only NUMBER_TASK identifies a task
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  job=${job:-$SLURM_JOB_ID}
  start=$((${SLURM_RESTART_COUNT:-0} + 1))
  unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" # set by srun in an interactive job that submitted this one
  LOGS=${LOGS:-${RUN:-.}/logs}
  container=()
  set_software
  set_rendezvous
  set_tuning
  srun_command "$@"
  if [[ ${DRY_RUN:-} ]]; then
    printf '%q ' "${command[@]}"
    echo
    return
  fi
  mkdir -p -- "$LOGS" "${RUN:-.}"
  if [[ ${RUN:-} ]]; then
    claim_run
    rm -f -- "$RUN"/{,*/}{stopped,diverged}.json
  fi
  echo "job $job, start $start: $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST, rendezvous $MASTER_ADDR:$MASTER_PORT, logs $LOGS"
  run_step
  [[ ! ${RUN:-} ]] || rm -f -- "$RUN/slurm-$job.job"
  decide
  [[ $verdict != again ]] || requeue
  echo "job $job: exit status $status after start $start"
  exit "$status"
}

main "$@"
