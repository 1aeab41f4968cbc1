"""How thoroughly a machine is measured: times, sizes and settings to try, thorough or quick.

Times are seconds for everything of a kind together; they are kept to, whatever the machine does, except that each
figure is taken once even if that takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdtune.hardware.stream import CHUNK_BYTES
from ssdtune.units import GIB, KIB, MIB


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of measuring.

    Attributes:
        drive_s: For each file system; `drives_s` is the most for all of them.
        together_s: For all file systems at once, if there are several.
        free_share: Share of the free space that the file to measure on may take.
        largest_file_bytes: The most that it may take in any case.
        chunk_bytes: Size of a transfer; the file to measure on holds at least four.
        memory_bytes: Of the arrays that memory and AdamW are measured on; more than the caches hold.
        request_bytes, queue_depths: Settings to try with the best backend.
        shapes: Built-in blocks to measure where no model is named (`ssdtune.hardware.blocks.BUILT_IN`).
        tokens: Of the micro-batches that a block is measured with.
    """

    name: str
    drive_s: float
    drives_s: float
    together_s: float
    memory_s: float
    adam_s: float
    contention_s: float
    copies_s: float
    blocks_s: float
    free_share: float = 0.1
    largest_file_bytes: int = 16 * GIB
    memory_bytes: int = 256 * MIB
    chunk_bytes: int = CHUNK_BYTES
    request_bytes: tuple[int, ...] = (128 * KIB, 512 * KIB, MIB, 4 * MIB, 8 * MIB)
    queue_depths: tuple[int, ...] = (1, 4, 16, 32)
    shapes: tuple[str, ...] = ("small", "medium")
    tokens: tuple[int, ...] = (128, 512, 2048)

    @property
    def total_s(self) -> float:
        """About the seconds that one file system and everything else take together, imports included."""
        rest = self.memory_s + self.adam_s + self.contention_s + self.copies_s + self.blocks_s
        return self.drive_s + rest


FULL = Effort(
    name="full",
    drive_s=25,
    drives_s=60,
    together_s=6,
    memory_s=3,
    adam_s=6,
    contention_s=6,
    copies_s=5,
    blocks_s=24,
)
QUICK = Effort(
    name="quick",
    drive_s=1.5,
    drives_s=3,
    together_s=0.6,
    memory_s=0.3,
    adam_s=0.4,
    contention_s=0.3,
    copies_s=0.4,
    blocks_s=0.4,
    largest_file_bytes=2 * GIB,
    memory_bytes=96 * MIB,
    chunk_bytes=16 * MIB,
    request_bytes=(MIB,),
    queue_depths=(4, 16),
    shapes=("small",),
    tokens=(128,),
)
