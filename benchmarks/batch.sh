# Sourced by the batches: starts training runs one after another, each in processes of its own, and collects what they print.
# A run that fails does not stop the others. Written to $OUT: environment.txt, runs.log, results.jsonl (one line per run that
# succeeded).
#
# Environment: PYTHON (python3), PEER_PATH (folder with another `deepspeed`, which then takes part), RUNS (labels to run, a
# pattern of grep -E), TRAIN (arguments of every run, such as "--size tiny --vocab 512 --seq 64" to try a batch on a CPU),
# BUDGET_SECONDS (a run that may take longer than what is left of it is left out).

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$repository/runs/$(basename "$0" .sh)}
ours=$repository${PYTHONPATH:+:$PYTHONPATH}
peer=${PEER_PATH:-}${PYTHONPATH:+:$PYTHONPATH}
port=29511
failures=0
read -r -a train <<<"${TRAIN:-}"

mkdir -p "$out"
cd "$repository" || exit 1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$out/extensions}

# describe_machine [FOLDER...]: also of the disks of these folders
describe_machine() {
  {
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    nvidia-smi topo -m
    "$python" -c 'import sys, torch; print(sys.version, torch.__version__, torch.version.cuda, torch.cuda.is_available() and
                                          torch.cuda.nccl.version())'
    lscpu
    free -g
    df -h "$out" "$@"
  } >"$out/environment.txt" 2>&1
  grep -E "Model name|H200|^Mem" "$out/environment.txt"
}

# run LABEL LIMIT_SECONDS PYTHONPATH ARGUMENTS...: one run of train_gpt.py (or $script) on $gpus GPUs
run() {
  local label=$1 limit=$2 path=$3
  shift 3
  grep -qE "${RUNS:-.}" <<<"$label" || return
  if ((SECONDS + limit > ${BUDGET_SECONDS:-86400})); then
    echo "SKIPPED $label: $SECONDS s of $BUDGET_SECONDS are over"
    return
  fi
  port=$((port + 1))
  # static rendezvous on the loopback address: no host name has to be resolved
  PYTHONPATH=$path timeout --kill-after=10 "$limit" "$python" -m torch.distributed.run --nnodes 1 --nproc-per-node "$gpus" \
    --master-addr 127.0.0.1 --master-port "$port" "${script:-benchmarks/train_gpt.py}" --label "$label" "$@" \
    ${train[@]+"${train[@]}"} >"$out/last_run.log" 2>&1
  local status=$?
  { echo "==== $label: exit code $status"; cat "$out/last_run.log"; } >>"$out/runs.log"
  if ((status)); then
    failures=$((failures + 1))
    echo "FAILED $label (exit code $status)"
    grep -E "Error|error" "$out/last_run.log" | tail -n 5 | cut -c1-300
    return
  fi
  sed -n 's/^RESULT //p' "$out/last_run.log" | cut -c1-600 | tee -a "$out/results.jsonl"
}

# run_peer: as run, with the peer's package; nothing without PEER_PATH
run_peer() {
  local label=$1 limit=$2
  shift 2
  [[ -z ${PEER_PATH:-} ]] || run "$label" "$limit" "$peer" "$@"
}

finish() {
  rm -f "$out/last_run.log"
  echo "finished after $SECONDS s, $failures failed"
  exit $((failures > 0))
}
