#!/usr/bin/env bash
# Times the package beside PyTorch's engines on the GPUs of this machine, in about twelve minutes on two of them.
#
#   OUT=folder [PEER_PATH=folder] benchmarks/gpu_batch.sh
#
# GPT with 6.9 and 1.4 billion parameters. TESTS=1 runs the GPU tests first, and ends when they fail, because timing wrong
# results is of no use. Environment: NPROC (GPUs to use, at most two by default), and that of batch.sh.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/batch.sh"
gpus=${NPROC:-$("$python" -c 'import torch; print(max(1, min(2, torch.cuda.device_count())))')}
describe_machine

if [[ ${TESTS:-0} == 1 ]]; then
  PYTHONPATH=$ours timeout --kill-after=10 240 "$python" -m pytest tests/gpu -q -p no:cacheprovider -rf --tb=short \
    >"$out/tests.log" 2>&1
  status=$?
  tail -n 15 "$out/tests.log"
  echo "tests: exit code $status after $SECONDS s"
  ((status == 0)) || exit 1
fi

large=(--size 7b --mbs 4 --warmup 3 --steps 10)
run large-fsdp2 100 "$ours" --engine fsdp2 --stage 3 "${large[@]}"
run large-zero3 100 "$ours" --engine ds --stage-only --stage 3 "${large[@]}"
run large-fsdp2-compiled 130 "$ours" --engine fsdp2 --stage 3 --compile "${large[@]}"
run large-zero3-compiled 130 "$ours" --engine ds --stage-only --stage 3 --compile "${large[@]}"
script=benchmarks/startup.py run large-startup 75 "$ours" --engine ds --size 7b --first-step
script=benchmarks/startup.py run large-startup-fsdp2 75 "$ours" --engine fsdp2 --size 7b

small=(--size 1b --mbs 8 --warmup 3 --steps 10)
for stage in 1 2 3; do
  run_peer "peer-zero$stage" 150 --engine ds --stage "$stage" "${small[@]}"
  run "zero$stage" 75 "$ours" --engine ds --stage-only --stage "$stage" "${small[@]}"
done
run ddp 75 "$ours" --engine ddp "${small[@]}"
run fsdp2 75 "$ours" --engine fsdp2 --stage 3 "${small[@]}"
run fsdp2-whole 75 "$ours" --engine fsdp2 --stage 2 "${small[@]}"

accumulated=(--size 1b --mbs 8 --gas 8 --warmup 2 --steps 5)
run fsdp2-accumulation 90 "$ours" --engine fsdp2 --stage 2 "${accumulated[@]}"
for stage in 1 2; do
  run "zero$stage-accumulation" 90 "$ours" --engine ds --stage-only --stage "$stage" "${accumulated[@]}"
done
run zero3-profile 75 "$ours" --engine ds --stage-only --stage 3 --size 1b --mbs 8 --warmup 3 --steps 2 --profile "$out"
finish
