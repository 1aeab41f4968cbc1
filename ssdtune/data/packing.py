"""Puts several rows into one sequence so that few places are padding.

It only chooses which rows go together; `ssdtune.data.batches` lays them out so that none sees another.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int64], max_length: int) -> list[list[int]]:
    """Group rows into sequences: best fit, longest rows first.

    Each row goes where it leaves the least room; among equals the earlier row goes first and the earlier sequence
    is filled first, so the result depends on nothing but the arguments.

    Args:
        lengths: Tokens of each row, int64 [rows]; none longer than `max_length`.
        max_length: Tokens that a sequence can hold.

    Returns:
        Row numbers of each sequence, ascending; sequences in the order of their first row.
    """
    sequences: list[list[int]] = []
    rooms: list[int] = []  # the distinct rooms left, ascending
    with_room: dict[int, list[int]] = {}
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            sequence, room = len(sequences), max_length
            sequences.append([])
        else:
            room = rooms[at]
            sequence = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        sequences[sequence].append(row)
        left = room - length
        if left:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(sequence)
    return sorted((sorted(rows) for rows in sequences), key=lambda rows: rows[0])
