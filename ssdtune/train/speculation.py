"""When updates are worth making before it is known whether gradients are clipped.

A speculative update costs nothing if nothing is clipped, and is made twice if it is. Whether a step's gradients were
clipped is known after every step, however it was updated, so the share of such steps says what to expect of the next
one. Both ways give the same numbers.
"""

from __future__ import annotations

from collections import deque

WINDOW = 32
"""Steps that are looked back on."""
MOST_CLIPPED = 0.1
"""Share of clipped steps above which speculating loses: where it is worth its room on the drives, making all updates again
takes, by simulation, between two and ten times what a step gains by updates within its backward pass."""


class Speculation:
    """Decides step by step, from the steps before.

    Args:
        always: Speculate whatever happened.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._clipped: deque[bool] = deque(maxlen=WINDOW)

    @property
    def is_allowed(self) -> bool:
        """Say whether the next step should speculate."""
        return self._always or sum(self._clipped) <= MOST_CLIPPED * len(self._clipped)

    def note(self, *, clipped: bool) -> None:
        """Take a step into account."""
        self._clipped.append(clipped)
