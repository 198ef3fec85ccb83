#!/usr/bin/env bash
# Tests and times the package on the GPUs of this machine, in about eight minutes on two of them.
#
#   OUT=folder benchmarks/gpu_batch.sh
#
# First the GPU tests; when they fail the batch ends, because timing wrong results is of no use (KEEP_GOING=1 goes on).
# Then GPT with 1.4 and 6.9 billion parameters under this package and PyTorch's engines. A run that fails does not stop
# the others. Written to $OUT: environment.txt, tests.log, runs.log, results.jsonl (one line per run that succeeded).
#
# Environment: PYTHON (python3), NPROC (GPUs to use, at most two by default), BUDGET_SECONDS (540), SIZES ("1b 7b").
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$repository/runs/gpu}
budget_seconds=${BUDGET_SECONDS:-540}
sizes=${SIZES:-1b 7b}
port=29511
failures=0

mkdir -p "$out"
cd "$repository" || exit 1
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

require_packages() {
  "$python" - <<'CHECK'
import importlib.util
import sys

packages = "torch pydantic hjson safetensors numpy psutil rich pytest hypothesis".split()
missing = [name for name in packages if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"missing Python packages: {' '.join(missing)}")
import torch

if not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device")
CHECK
}

describe() {
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
  nvidia-smi topo -m
  "$python" -c 'import sys, torch; print(sys.version, torch.__version__, torch.cuda.nccl.version())'
  nproc
}

seconds_left() { echo $((budget_seconds - SECONDS)); }

# run LABEL LIMIT_SECONDS ARGUMENTS...: one training run (or $script), if there is time for it
run() {
  local label=$1 limit=$2
  shift 2
  if (($(seconds_left) < limit)); then
    echo "SKIPPED $label: $(seconds_left) s left of $budget_seconds"
    return
  fi
  port=$((port + 1))
  # static rendezvous on the loopback address: no host name has to be resolved
  timeout --kill-after=10 "$limit" "$python" -m torch.distributed.run --nnodes 1 --nproc-per-node "$gpus" \
    --master-addr 127.0.0.1 --master-port "$port" "${script:-benchmarks/train_gpt.py}" --label "$label" "$@" \
    >"$out/last_run.log" 2>&1
  local status=$?
  { echo "==== $label: exit code $status"; cat "$out/last_run.log"; } >>"$out/runs.log"
  if ((status)); then
    failures=$((failures + 1))
    echo "FAILED $label (exit code $status)"
    tail -n 25 "$out/last_run.log"
    return
  fi
  sed -n 's/^RESULT //p' "$out/last_run.log" | tee -a "$out/results.jsonl"
}

require_packages || exit 1
describe >"$out/environment.txt" 2>&1
cat "$out/environment.txt"
gpus=${NPROC:-$("$python" -c 'import torch; print(min(2, torch.cuda.device_count()))')}

timeout --kill-after=10 240 "$python" -m pytest tests/gpu -q -p no:cacheprovider -rf --tb=short >"$out/tests.log" 2>&1
status=$?
tail -n 15 "$out/tests.log"
echo "tests: exit code $status after $SECONDS s"
if ((status)); then
  failures=$((failures + 1))
  [[ ${KEEP_GOING:-0} == 1 ]] || exit 1
fi

quick=(--warmup 3 --steps 10)
for size in $sizes; do
  case $size in
    1b)
      run fsdp2-reshard-1b 75 --engine fsdp2 --stage 3 --size 1b --mbs 8 "${quick[@]}"
      run ds-z3-1b 75 --engine ds --stage 3 --size 1b --mbs 8 "${quick[@]}"
      run fsdp2-whole-1b 75 --engine fsdp2 --stage 2 --size 1b --mbs 8 "${quick[@]}"
      run ds-z2-1b 75 --engine ds --stage 2 --size 1b --mbs 8 "${quick[@]}"
      run ds-z1-1b 75 --engine ds --stage 1 --size 1b --mbs 8 "${quick[@]}"
      run ddp-1b 75 --engine ddp --size 1b --mbs 8 "${quick[@]}"
      ;;
    7b)
      run fsdp2-reshard-7b 100 --engine fsdp2 --stage 3 --size 7b --mbs 4 "${quick[@]}"
      run ds-z3-7b 100 --engine ds --stage 3 --size 7b --mbs 4 "${quick[@]}"
      run ds-z3-7b-compiled 130 --engine ds --stage 3 --size 7b --mbs 4 --compile "${quick[@]}"
      script=benchmarks/startup.py run ds-startup-7b 75 --engine ds --size 7b --first-step
      script=benchmarks/startup.py run fsdp2-startup-7b 75 --engine fsdp2 --size 7b
      ;;
    *)
      run "ds-z3-$size" 100 --engine ds --stage 3 --size "$size" --mbs 4 "${quick[@]}"
      ;;
  esac
done
run ds-z3-1b-profile 75 --engine ds --stage 3 --size 1b --mbs 8 --warmup 3 --steps 2 --profile "$out"

rm -f "$out/last_run.log"
echo "finished after $SECONDS s, $failures failed"
exit $((failures > 0))
