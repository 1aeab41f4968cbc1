#!/usr/bin/env bash
# LoRA of a 7B to 100B checkpoint on one consumer card, by command line. See lora_70b.yaml for what each
# setting is for. Usage: bash examples/lora_70b.sh [MODEL] [TRAIN_FILE] [FURTHER FLAGS]
set -euo pipefail
model=${1:-/nvme0/models/Llama-3.1-70B}
train_file=${2:-train.jsonl}
flags=(
  --train-file "$train_file" --output-dir runs/lora_70b --dtype bf16 --max-length 2048
  --method lora --lora-r 16 --lora-alpha 32 --lora-dropout 0.05 --packing
  --learning-rate 1e-4 --gradient-accumulation-steps 8
  --per-device-train-batch-size 4 --lr-scheduler-type cosine --warmup-steps 0.03 --save-steps 100
  --device cuda --host-memory 48GiB --swap-dirs /nvme0/ssdtune
  "${@:3}"
)

# What it needs and how long a step takes; ends here (exit code 3) if it does not fit.
ssdtune plan "$model" "${flags[@]}"
ssdtune finetune "$model" "${flags[@]}"
