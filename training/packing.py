"""Which conversations share a row: each longest one first, into the fullest row that takes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np


class Groups(Sequence[np.ndarray]):
    """Groups of items, as two arrays: `members` one group after another, and where each group starts."""

    def __init__(self, members: np.ndarray, starts: np.ndarray):
        self.members, self.starts = members, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        index = range(len(self))[index]
        return self.members[self.starts[index] : self.starts[index + 1]]

    def largest(self, sizes: np.ndarray) -> int:
        """The largest sum of its members' sizes that a group has."""
        return int(np.add.reduceat(sizes[self.members], self.starts[:-1], dtype=np.int64).max())


def best_fit(lengths: Sequence[int], capacity: int) -> Groups:
    """Indices of items gathered to bins of at most `capacity`: longest first, each into the fullest bin that takes it.

    Bins with r free are stacked under r, and bit r of `free` says whether there are any, so that the search for the
    fullest is one step whatever the number of bins. Order among equal lengths is that of the indices. `top[r]` is the
    uppermost bin of a stack and `below[bin]` the one under it: nothing here is a Python object for each item.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    top, below, bins = array("q", [-1]) * (capacity + 1), array("q"), array("q")
    free = 0
    for length in map(int, lengths[order]):
        enough = free >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            number = top[room]
            top[room] = below[number]
            if top[room] < 0:
                free &= ~(1 << room)
        else:
            room, number = capacity, len(below)
            below.append(-1)
        bins.append(number)
        left = room - length
        below[number], top[left] = top[left], number
        free |= 1 << left
    numbers = np.frombuffer(bins, np.int64) if bins else np.zeros(0, np.int64)
    starts = np.concatenate([[0], np.bincount(numbers, minlength=len(below)).cumsum()])
    return Groups(order[np.argsort(numbers, kind="stable")].astype(np.int32), starts)
