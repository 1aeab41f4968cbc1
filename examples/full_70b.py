"""Full fine-tune of a 7B to 100B checkpoint on one consumer card, by Python.

See full_70b.yaml for what each setting is for. Usage: python examples/full_70b.py [MODEL] [TRAIN_FILE]
"""

import sys

import ssdtune

settings = dict(
    model_name_or_path=sys.argv[1] if len(sys.argv) > 1 else "/models/Llama-3.1-70B",
    train_file=sys.argv[2] if len(sys.argv) > 2 else "train.jsonl",
    output_dir="runs/full_70b",
    dtype="bf16",
    max_length=2048,
    learning_rate=1e-5,
    gradient_accumulation_steps=16,
    per_device_train_batch_size=4,
    lr_scheduler_type="cosine",
    warmup_steps=0.03,
    save_steps=100,
    device="cuda",
    host_memory="100GiB",
    swap_dirs=["/nvme0/ssdtune", "/nvme1/ssdtune"],
)

plan = ssdtune.plan(**settings)
print(plan.text())
if plan.fits:
    print(ssdtune.finetune(**settings).text())
