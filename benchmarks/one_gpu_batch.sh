#!/usr/bin/env bash
# Times the package on one GPU, offloading above all, in about eight minutes; LARGEST=1 adds five for 17 billion parameters.
#
#   OUT=folder [PEER_PATH=folder] benchmarks/one_gpu_batch.sh
#
# With PEER_PATH the `deepspeed` in that folder takes part. A run that fails does not stop the others. Written to $OUT:
# environment.txt, runs.log, results.jsonl (one line per run that succeeded).
#
# Environment: PYTHON (python3), TRAIN (arguments of every run, such as "--size tiny --vocab 512 --seq 64" to try the script on
# a CPU), NVME_PATH (folder on a disk with 40 GB free), RUNS (labels to run, a pattern of grep -E).
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$repository/runs/one_gpu}
nvme_path=${NVME_PATH:-/tmp/nvme}
port=29611
failures=0

mkdir -p "$out" "$nvme_path"
cd "$repository" || exit 1
ours=$repository${PYTHONPATH:+:$PYTHONPATH}
peer=${PEER_PATH:-}${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$out/extensions}
read -r -a train <<<"${TRAIN:-}"

# run LABEL LIMIT_SECONDS PYTHONPATH ARGUMENTS...: one training run (or $script)
run() {
  local label=$1 limit=$2 path=$3
  shift 3
  grep -qE "${RUNS:-.}" <<<"$label" || return
  port=$((port + 1))
  PYTHONPATH=$path timeout --kill-after=10 "$limit" "$python" -m torch.distributed.run --nnodes 1 --nproc-per-node 1 \
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

{ nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv; lscpu; free -g; df -h "$nvme_path"; } \
  >"$out/environment.txt" 2>&1
grep -E "Model name|H200|^Mem" "$out/environment.txt"

small=(--size 1b --mbs 8 --warmup 3 --steps 8)
early='{"offload_optimizer": {"device": "cpu", "super_offload": true}}'
half='{"offload_optimizer": {"device": "cpu", "super_offload": true, "ratio": 0.5}}'

for round in 1 2; do
  [[ -z ${PEER_PATH:-} ]] || run "peer-offload-$round" 150 "$peer" --engine ds --stage 1 --offload cpu "${small[@]}"
  run "offload-$round" 60 "$ours" --engine ds --stage 1 --offload cpu "${small[@]}"
  run "early-$round" 60 "$ours" --engine ds --stage 1 --extra "$early" "${small[@]}"
  run "early-half-$round" 60 "$ours" --engine ds --stage 3 --extra "$half" "${small[@]}"
done
run ddp 60 "$ours" --engine ddp "${small[@]}"
run zero1 60 "$ours" --engine ds --stage 1 "${small[@]}"
run fsdp2 60 "$ours" --engine fsdp2 --stage 3 "${small[@]}"
run zero3 60 "$ours" --engine ds --stage 3 "${small[@]}"
run fsdp2-accumulation 90 "$ours" --engine fsdp2 --stage 2 --size 1b --mbs 8 --gas 8 --warmup 2 --steps 5
run zero1-accumulation 90 "$ours" --engine ds --stage 1 --size 1b --mbs 8 --gas 8 --warmup 2 --steps 5
run zero2-accumulation 90 "$ours" --engine ds --stage 2 --size 1b --mbs 8 --gas 8 --warmup 2 --steps 5
run fsdp2-compiled 60 "$ours" --engine fsdp2 --stage 3 --compile "${small[@]}"
run zero1-compiled 60 "$ours" --engine ds --stage 1 --compile "${small[@]}"
script=benchmarks/startup.py run startup 60 "$ours" --engine ds --size 7b --first-step
run offload-all-7b 160 "$ours" --engine ds --stage 3 --size 7b --mbs 4 --offload param+cpu --warmup 2 --steps 3

if [[ ${LARGEST:-0} == 1 ]]; then
  # what `ds_plan --fit` says for 139 GiB of device memory, 122 GiB of host memory and 60 GiB of disk, a little of each left free
  zero='{"offload_optimizer": {"device": "cpu", "ratio": 0.45}, "offload_param": {"device": "nvme", "nvme_path": "'$nvme_path'",
         "max_in_cpu": 8000000000}}'
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True run largest-17b 400 "$ours" --engine ds --stage 3 --size 17b --mbs 1 \
    --checkpointing --zero-init --extra "$zero" --warmup 0 --steps 2
fi

rm -f "$out/last_run.log"
echo "finished after $SECONDS s, $failures failed"
exit $((failures > 0))
