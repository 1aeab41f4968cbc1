"""Full fine-tune on a small model, by Python: python examples/full_small.py [OUTPUT_DIR]."""

import sys

import ssdtune
from ssdtune.demo import EVAL_FILE, TRAIN_FILE, make_demo_checkpoint

output_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/full_small_py"

# A small but real checkpoint; the same one is used again if it is there.
model = make_demo_checkpoint("demo/model")

result = ssdtune.finetune(
    model_name_or_path=model,
    train_file=TRAIN_FILE,
    eval_file=EVAL_FILE,
    output_dir=output_dir,
    max_length=256,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=0.1,
    max_steps=24,
    logging_steps=4,
    host_cache=0,  # keep nothing in memory: stream every state, as a large model must
)
print(result.text())
