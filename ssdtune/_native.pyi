"""Types of the native extension; see native/bindings/module.cpp."""

from collections.abc import Sequence

from typing_extensions import Buffer

class Transfer:
    def done(self) -> bool: ...
    def wait(self) -> tuple[int, int]: ...

class Engine:
    def __init__(self, name: str, queue_depth: int, request_bytes: int) -> None: ...
    def submit(
        self, write: bool, descriptor: int, direct: bool, offset: int, buffer: Buffer
    ) -> Transfer: ...
    def close(self) -> None: ...

def simd_levels() -> list[str]: ...
def simd_name() -> str: ...
def adamw(
    weights: Buffer,
    low: Buffer | None,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    grad: Buffer,
    size: int,
    scalars: Sequence[float],
    threads: int,
    level: str,
    exp_avg_scale: Buffer | None = None,
    exp_avg_sq_scale: Buffer | None = None,
    rounding: Sequence[int] = (),
) -> bool: ...
def sum_of_squares(values: Buffer, size: int, threads: int, level: str) -> float: ...
