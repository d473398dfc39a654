"""Text as words and hashes: what filters compare. Shapes: W words, G = W - n + 1 word n-grams."""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zlib
from collections.abc import Iterator

import numpy as np

# A word is a run of letters and digits; languages that write without spaces count by the character.
_ALONE = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|(?:[^\W_](?<![{_ALONE}]))+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def normalised(text: str) -> str:
    """Without differences of case, of width and of white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def word_ids(found: list[str]) -> np.ndarray:
    """A number for each word: uint64 [W]."""
    return np.array([zlib.crc32(word.encode()) for word in found], dtype=np.uint64)


def gram_hashes(ids_W: np.ndarray, n: int) -> np.ndarray:
    """Hashes of all n words in a row: uint64 [G], empty for fewer than n words."""
    count = len(ids_W) - n + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    hashes_G = np.zeros(count, dtype=np.uint64)
    for place in range(n):
        hashes_G = mixed(hashes_G, ids_W[place : place + count])
    return hashes_G


def growing_grams(ids_W: np.ndarray, longest: int) -> Iterator[tuple[int, np.ndarray]]:
    """(n, hashes [G] of all n words in a row) for n from 1 up, each from the one before it."""
    hashes_G = np.zeros(len(ids_W), dtype=np.uint64)
    for n in range(1, min(longest, len(ids_W)) + 1):
        hashes_G = mixed(hashes_G[: len(ids_W) - n + 1], ids_W[n - 1 :])
        yield n, hashes_G


def mixed(hashes: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The hashes with one number more in each."""
    hashes = (hashes + more + np.uint64(1)) * _MULTIPLIER
    return hashes ^ (hashes >> np.uint64(29))


def hash_of(text: str) -> int:
    """64 bits: among ten million texts, two that differ share one with a chance of 3 in a million."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class Seen:
    """A set of 64-bit numbers that takes 8 bytes a member: a sorted array, and a small set of the latest."""

    def __init__(self, latest: int = 1 << 16):
        self._sorted, self._latest, self._limit = np.empty(0, dtype=np.uint64), set(), latest

    def __contains__(self, number: int) -> bool:
        return self.any_of([number])

    def any_of(self, numbers: list[int]) -> bool:
        if not self._latest.isdisjoint(numbers):
            return True
        if not len(self._sorted):
            return False
        wanted = np.array(numbers, dtype=np.uint64)
        places = np.searchsorted(self._sorted, wanted)
        return bool((self._sorted.take(places, mode="clip") == wanted).any())

    def add(self, *numbers: int) -> None:
        self._latest.update(numbers)
        if len(self._latest) >= self._limit:
            latest = np.fromiter(self._latest, dtype=np.uint64, count=len(self._latest))
            merged = np.concatenate([self._sorted, np.sort(latest)])
            merged.sort(kind="stable")  # which merges two sorted runs in one pass
            self._sorted, self._latest = merged, set()
