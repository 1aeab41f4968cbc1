#!/usr/bin/env bash
# LoRA on a small model, by command line: bash examples/lora_small.sh [OUTPUT_DIR]
set -euo pipefail
output=$(realpath -m "${1:-runs/lora_small_sh}")
. "$(dirname "${BASH_SOURCE[0]}")/../tools/venv.sh" ""

# A small but real checkpoint; the same one is used again if it is there.
model=$("$python" -c "from ssdtune.demo import make_demo_checkpoint as make; import sys; print(make(sys.argv[1]))" \
  "$root/demo/model")

"$python" -m ssdtune finetune "$model" \
  --train-file "$root/ssdtune/demo/train.jsonl" --eval-file "$root/ssdtune/demo/eval.jsonl" \
  --output-dir "$output" \
  --method lora --lora-r 8 --lora-alpha 16 --target-modules all-linear --assistant-only-loss \
  --learning-rate 1e-2 --lr-scheduler-type constant_with_warmup --warmup-steps 4 \
  --max-length 256 --per-device-train-batch-size 4 --gradient-accumulation-steps 2 \
  --max-steps 24 --logging-steps 4 --host-cache 0

"$python" -m ssdtune generate "$output" --chat --prompt "Can I freeze bread?"
