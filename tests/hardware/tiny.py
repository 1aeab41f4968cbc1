"""The least effort with which every figure is still taken."""

from ssdtune.hardware.effort import Effort

TINY = Effort(
    name="quick",
    drive_s=0.01,
    drives_s=0.02,
    together_s=0.01,
    memory_s=0,
    adam_s=0,
    contention_s=0,
    copies_s=0,
    blocks_s=0,
    largest_file_bytes=16 << 20,
    memory_bytes=4 << 20,
    chunk_bytes=2 << 20,
    request_bytes=(1 << 20,),
    queue_depths=(1, 4),
    shapes=("small",),
    tokens=(8,),
)
