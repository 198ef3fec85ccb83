#!/usr/bin/env bash
# Times the package on one GPU, offloading above all, in about a quarter of an hour; LARGEST=1 adds five minutes for 17 billion
# parameters.
#
#   OUT=folder [PEER_PATH=folder] benchmarks/one_gpu_batch.sh
#
# Environment: NVME_PATH (folder on a disk with 40 GB free), and that of batch.sh.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/batch.sh"
gpus=1
nvme_path=${NVME_PATH:-/tmp/nvme}
mkdir -p "$nvme_path"
describe_machine "$nvme_path"

small=(--size 1b --mbs 8 --warmup 3 --steps 8)
early='{"offload_optimizer": {"device": "cpu", "super_offload": true}}'
half='{"offload_optimizer": {"device": "cpu", "super_offload": true, "ratio": 0.5}}'

for round in 1 2; do
  run_peer "peer-offload-$round" 150 --engine ds --stage 1 --offload cpu "${small[@]}"
  run "offload-$round" 60 "$ours" --engine ds --stage 1 --offload cpu "${small[@]}"
  run "early-$round" 60 "$ours" --engine ds --stage 1 --extra "$early" "${small[@]}"
  run "early-half-$round" 60 "$ours" --engine ds --stage 3 --extra "$half" "${small[@]}"
done
run ddp 60 "$ours" --engine ddp "${small[@]}"
run zero1 60 "$ours" --engine ds --stage-only --stage 1 "${small[@]}"
run fsdp2 60 "$ours" --engine fsdp2 --stage 3 "${small[@]}"
run zero3 60 "$ours" --engine ds --stage-only --stage 3 "${small[@]}"
accumulated=(--size 1b --mbs 8 --gas 8 --warmup 2 --steps 5)
run fsdp2-accumulation 90 "$ours" --engine fsdp2 --stage 2 "${accumulated[@]}"
run zero1-accumulation 90 "$ours" --engine ds --stage-only --stage 1 "${accumulated[@]}"
run zero2-accumulation 90 "$ours" --engine ds --stage-only --stage 2 "${accumulated[@]}"
run fsdp2-compiled 60 "$ours" --engine fsdp2 --stage 3 --compile "${small[@]}"
run zero1-compiled 60 "$ours" --engine ds --stage-only --stage 1 --compile "${small[@]}"

# 6.9 billion parameters on one GPU: FSDP2 has room for two sequences, this package for four
large=(--size 7b --stage 3 --compile --warmup 3 --steps 6)
run large-fsdp2-compiled 130 "$ours" --engine fsdp2 --mbs 2 "${large[@]}"
run large-zero3-compiled 130 "$ours" --engine ds --stage-only --mbs 2 "${large[@]}"
run large-zero3-compiled-4 130 "$ours" --engine ds --stage-only --mbs 4 "${large[@]}"

# so small that the host is the limit
tiny=(--size 125m --mbs 1 --seq 256 --warmup 20 --steps 100)
for round in 1 2; do
  run "host-ddp-$round" 40 "$ours" --engine ddp "${tiny[@]}"
  run "host-fsdp2-$round" 40 "$ours" --engine fsdp2 --stage 3 "${tiny[@]}"
  for stage in 1 3; do
    run_peer "host-peer-zero$stage-$round" 60 --engine ds --stage "$stage" "${tiny[@]}"
    run "host-zero$stage-$round" 40 "$ours" --engine ds --stage-only --stage "$stage" "${tiny[@]}"
  done
  run "host-ddp-graphs-$round" 60 "$ours" --engine ddp --compile reduce-overhead "${tiny[@]}"
  run "host-zero1-graphs-$round" 60 "$ours" --engine ds --stage-only --stage 1 --compile reduce-overhead "${tiny[@]}"
done
run host-zero1-profile 60 "$ours" --engine ds --stage-only --stage 1 "${tiny[@]}" --profile "$out"

script=benchmarks/startup.py run startup 60 "$ours" --engine ds --size 7b --first-step
run offload-all-7b 160 "$ours" --engine ds --stage 3 --size 7b --mbs 4 --offload param+cpu --warmup 2 --steps 3

if [[ ${LARGEST:-0} == 1 ]]; then
  # what `ds_plan --fit` says for 139 GiB of device memory, 122 GiB of host memory and 60 GiB of disk, a little of each left free
  zero='{"offload_optimizer": {"device": "cpu", "ratio": 0.45}, "offload_param": {"device": "nvme", "nvme_path": "'$nvme_path'",
         "max_in_cpu": 8000000000}}'
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True run largest-17b 400 "$ours" --engine ds --stage 3 --size 17b --mbs 1 \
    --checkpointing --zero-init --extra "$zero" --warmup 0 --steps 2
fi

finish
