"""LoRA of a 7B to 100B checkpoint on one consumer card, by Python.

See lora_70b.yaml for what each setting is for. Usage: python examples/lora_70b.py [MODEL] [TRAIN_FILE]
"""

import sys

import ssdtune

settings = dict(
    model_name_or_path=sys.argv[1] if len(sys.argv) > 1 else "/nvme0/models/Llama-3.1-70B",
    train_file=sys.argv[2] if len(sys.argv) > 2 else "train.jsonl",
    output_dir="runs/lora_70b",
    dtype="bf16",
    max_length=2048,
    method="lora",
    lora_r=16,
    lora_alpha=32,
    lora_dropout=0.05,
    packing=True,
    learning_rate=1e-4,
    gradient_accumulation_steps=8,
    per_device_train_batch_size=4,
    lr_scheduler_type="cosine",
    warmup_steps=0.03,
    save_steps=100,
    device="cuda",
    host_memory="48GiB",
    swap_dirs=["/nvme0/ssdtune"],
)

plan = ssdtune.plan(**settings)
print(plan.text())
if plan.fits:
    print(ssdtune.finetune(**settings).text())
