"""Near duplicates by MinHash and locality-sensitive hashing (Broder 1997; Indyk and Motwani 1998), small in memory.

A text is the set of its word 3-grams. PERMUTATIONS minima are cut into b bands of r; two texts of Jaccard similarity s
share a band with a chance of 1 - (1 - s^r)^b, and one that shares a band with a kept text counts as its near duplicate.
b and r are those with the least sum of wrong decisions on both sides of the threshold. Only the hash of each band is
kept, 8 bytes: an index of dictionaries, such as datasketch's, takes kilobytes a text, and this gigabytes a million.

Shapes: G grams, P permutations.
"""

from __future__ import annotations

import numpy as np

from data.words import Seen, gram_hashes, hash_of, mixed, normalised, word_ids, words

PERMUTATIONS = 128
GRAM = 3
_CHUNK = 4096  # grams at once: their permutations take 4 MiB


class NearDuplicates:
    """The kept texts' bands. Args: threshold: the Jaccard similarity from which texts count as near duplicates."""

    def __init__(self, threshold: float):
        self.bands, self.rows = bands_and_rows(threshold)
        rng = np.random.default_rng(0)
        self._odd_P = rng.integers(0, 1 << 63, PERMUTATIONS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._shift_P = rng.integers(0, 1 << 63, PERMUTATIONS, dtype=np.uint64)
        self._seen = Seen()

    def keys(self, text: str) -> list[int]:
        """The hash of each band of a text's minima."""
        ids_W = word_ids(words(text))
        if not len(ids_W):  # signs alone
            return self.keys_of(np.array([hash_of(normalised(text))], dtype=np.uint64))
        return self.keys_of(gram_hashes(ids_W, min(GRAM, len(ids_W))))

    def keys_of(self, grams_G: np.ndarray) -> list[int]:
        grams_G = np.unique(grams_G)
        minima_P = np.full(PERMUTATIONS, np.iinfo(np.uint64).max, dtype=np.uint64)
        for start in range(0, len(grams_G), _CHUNK):
            product_GP = grams_G[start : start + _CHUNK, None] * self._odd_P + self._shift_P
            # The upper half of a product with an odd number is what its hash is good for.
            minima_P = np.minimum(minima_P, (product_GP >> np.uint64(32)).min(0))
        cut = minima_P[: self.bands * self.rows].reshape(self.bands, self.rows)
        keys = np.arange(self.bands, dtype=np.uint64)  # the same minima in another band are another key
        for row in range(self.rows):
            keys = mixed(keys, cut[:, row])
        return keys.tolist()

    def has(self, keys: list[int]) -> bool:
        return self._seen.any_of(keys)

    def add(self, keys: list[int]) -> None:
        self._seen.add(*keys)


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """The b and r whose S-curve does least wrong: area above it beyond the threshold plus area under it before."""
    similarity = np.linspace(0, 1, 201)
    before = similarity < threshold

    def wrong(bands: int, rows: int) -> float:
        chance = 1 - (1 - similarity**rows) ** bands
        return float(chance[before].sum() + (1 - chance[~before]).sum())

    choices = [(b, r) for r in range(1, PERMUTATIONS + 1) for b in range(1, PERMUTATIONS // r + 1)]
    return min(choices, key=lambda choice: wrong(*choice))
