"""Where the features of each row lie, for any number of rows: 36 bytes a row in arrays, no Python object for each.

An index file has a line for each row: [key, shard, offset, length]. A key is kept as a hash of 128 bits, which no two
of any number of rows share.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

Place = tuple[str, int, int]  # shard, offset and length in tokens


class FeatureIndex:
    """All entries of some index files. Of a row in several entries the longest counts: another rank may have cut it at
    a smaller limit."""

    def __init__(self, paths: Iterable[Path] = ()):
        keys, numbers = bytearray(), {}
        shards, offsets, lengths = array("i"), array("q"), array("q")
        for path in paths:
            for key, (shard, offset, length) in read_entries(path):
                keys += _digest(key)
                shards.append(numbers.setdefault(shard, len(numbers)))
                offsets.append(offset)
                lengths.append(length)
        self._names = list(numbers)
        first, second = np.frombuffer(bytes(keys), np.uint64).reshape(-1, 2).T
        lengths = np.array(lengths, np.int64)
        order = np.lexsort((-lengths, second, first))
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(first[order]) != 0) | (np.diff(second[order]) != 0)
        order = order[new]
        self._first, self._second, self._lengths = first[order], second[order], lengths[order]
        self._shards, self._offsets = np.array(shards, np.int32)[order], np.array(offsets, np.int64)[order]

    def __len__(self) -> int:
        return len(self._first)

    def place(self, key: str) -> Place | None:
        """Where a row's features lie, None for a row without any."""
        first, second = np.frombuffer(_digest(key), np.uint64)
        found = int(np.searchsorted(self._first, first))
        while found < len(self) and self._first[found] == first:
            if self._second[found] == second:
                return self._names[self._shards[found]], int(self._offsets[found]), int(self._lengths[found])
            found += 1
        return None


def read_entries(path: Path) -> Iterator[tuple[str, Place]]:
    """The entries of an index file; a last line without its end (its writer was killed, or is at it) is left out."""
    if path.is_file():
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    key, shard, offset, length = json.loads(line)
                    yield key, (shard, offset, length)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
